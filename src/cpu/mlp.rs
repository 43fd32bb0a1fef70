//! The feed-forward block: router, routed experts, shared expert, dense MLP (facts/glm5.md §3.3).

use super::ops::{add_scaled, linear, silu, top_k};
use super::rank::{CpuRank, clear};
use crate::model::{DenseParams, LayerParams, MlpParams, MoeParams};

/// Keeps the renormalisation finite where all chosen probabilities are zero.
const ROUTE_SUM_FLOOR: f32 = 1e-20;

/// The layer's experts; the forward pass asks for them only in layers that have some.
fn moe(layer: &LayerParams) -> &MoeParams {
    match &layer.mlp {
        MlpParams::Moe(moe) => moe,
        MlpParams::Dense(_) => unreachable!("forward() routes only in MoE layers"),
    }
}

fn dense(layer: &LayerParams) -> &DenseParams {
    match &layer.mlp {
        MlpParams::Dense(dense) => dense,
        MlpParams::Moe(_) => unreachable!("forward() runs dense stages only in dense layers"),
    }
}

/// silu(gate x) · up x for each row of `x`: `[n, hidden]` to `[n, width / R]`.
fn swiglu(mlp: &DenseParams, x: &[f32], out: &mut Vec<f32>) {
    let rows = x.len() / mlp.gate_proj.columns();
    clear(out, rows * mlp.gate_proj.rows());
    linear(&mlp.gate_proj, x, out);
    let mut up = vec![0.0; out.len()];
    linear(&mlp.up_proj, x, &mut up);
    for (gate, up) in out.iter_mut().zip(&up) {
        *gate = silu(*gate) * up;
    }
}

/// Experts are chosen by p + bias and weighted by p alone, p = sigmoid(router logit).
pub fn route(rank: &mut CpuRank, layer: usize) {
    let config = &rank.config;
    let moe = moe(&rank.params.layers[layer]);
    let buffers = &mut rank.buffers;
    let experts = config.n_routed_experts;
    let mut logits = vec![0.0; buffers.rows.len() * experts];
    linear(&moe.gate, &buffers.normed, &mut logits);
    let route_row = |logits: &[f32]| {
        let p: Vec<f32> = logits.iter().map(|z| 1.0 / (1.0 + (-z).exp())).collect();
        let choice: Vec<f32> =
            p.iter().zip(&moe.e_score_correction_bias).map(|(p, bias)| p + bias).collect();
        let chosen = top_k(&choice, config.num_experts_per_tok);
        let sum: f32 = match config.norm_topk_prob {
            true => chosen.iter().map(|expert| p[*expert]).sum::<f32>() + ROUTE_SUM_FLOOR,
            false => 1.0,
        };
        let weight = |expert: usize| p[expert] / sum * config.routed_scaling_factor;
        chosen.into_iter().map(|expert| (expert, weight(expert))).collect()
    };
    buffers.routes = logits.chunks_exact(experts).map(route_row).collect();
    swiglu(&moe.shared_experts, &buffers.normed, &mut buffers.mlp_activations);
}

/// (row, place in its route) of every use of each of the rank's experts, experts rising.
fn uses_by_expert(routes: &[Vec<(usize, f32)>], moe: &MoeParams) -> Vec<Vec<(usize, usize)>> {
    let mut uses = vec![Vec::new(); moe.experts.len()];
    for (row, route) in routes.iter().enumerate() {
        for (place, (expert, _)) in route.iter().enumerate() {
            let own = expert.checked_sub(moe.first_expert).and_then(|own| uses.get_mut(own));
            if let Some(uses) = own {
                uses.push((row, place));
            }
        }
    }
    uses
}

/// SwiGLU of the routed experts. An expert's weights are read once for all rows that use it.
pub fn expert_gate_up(rank: &mut CpuRank, layer: usize) {
    let hidden = rank.config.hidden_size;
    let moe = moe(&rank.params.layers[layer]);
    let buffers = &mut rank.buffers;
    buffers.expert_activations =
        buffers.routes.iter().map(|route| vec![Vec::new(); route.len()]).collect();
    let (mut x, mut activations) = (Vec::new(), Vec::new());
    for (expert, uses) in uses_by_expert(&buffers.routes, moe).iter().enumerate() {
        if uses.is_empty() {
            continue;
        }
        x.clear();
        for (row, _) in uses {
            x.extend_from_slice(&buffers.normed[row * hidden..][..hidden]);
        }
        swiglu(&moe.experts[expert], &x, &mut activations);
        let width = moe.experts[expert].gate_proj.rows();
        for ((row, place), activation) in uses.iter().zip(activations.chunks_exact(width)) {
            buffers.expert_activations[*row][*place] = activation.to_vec();
        }
    }
}

/// partial = shared expert + Σ weight · down(activation), experts rising for every row.
pub fn expert_down(rank: &mut CpuRank, layer: usize) {
    let hidden = rank.config.hidden_size;
    let moe = moe(&rank.params.layers[layer]);
    let buffers = &mut rank.buffers;
    linear(&moe.shared_experts.down_proj, &buffers.mlp_activations, &mut buffers.partial);
    let (mut x, mut y) = (Vec::new(), Vec::new());
    for (expert, uses) in uses_by_expert(&buffers.routes, moe).iter().enumerate() {
        if uses.is_empty() {
            continue;
        }
        x.clear();
        for (row, place) in uses {
            x.extend_from_slice(&buffers.expert_activations[*row][*place]);
        }
        clear(&mut y, uses.len() * hidden);
        linear(&moe.experts[expert].down_proj, &x, &mut y);
        for ((row, place), y) in uses.iter().zip(y.chunks_exact(hidden)) {
            let weight = buffers.routes[*row][*place].1;
            add_scaled(&mut buffers.partial[row * hidden..][..hidden], weight, y);
        }
    }
}

pub fn dense_gate_up(rank: &mut CpuRank, layer: usize) {
    let buffers = &mut rank.buffers;
    swiglu(dense(&rank.params.layers[layer]), &buffers.normed, &mut buffers.mlp_activations);
}

pub fn dense_down(rank: &mut CpuRank, layer: usize) {
    let buffers = &mut rank.buffers;
    let down_proj = &dense(&rank.params.layers[layer]).down_proj;
    linear(down_proj, &buffers.mlp_activations, &mut buffers.partial);
}
