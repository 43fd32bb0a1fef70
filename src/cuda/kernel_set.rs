//! All kernels of the forward pass, loaded from the fatbins in this binary.

use std::sync::Arc;

use super::kernels::fatbin;
use super::layout::{MAX_HIDDEN, MAX_USED};
use super::{Device, Kernel, Module};
use crate::comm::Variant;
use crate::error::{Error, Result};

/// Threads of a block that multiplies matrices (tile.cuh, `LINEAR_THREADS`).
pub const LINEAR_THREADS: u32 = 256;
/// Warps of such a block.
pub const LINEAR_WARPS: usize = 8;
/// Slots of a warp's ring and bytes of a slot (tile.cuh).
const RING: u32 = 6;
const SLOT: u32 = 1024 + 256;
/// Dynamic shared memory of such a block (tile.cuh, `LINEAR_SHARED`).
pub const LINEAR_SHARED: u32 = LINEAR_WARPS as u32 * RING * SLOT;
/// The same of expert_gate_up.cu: more than its rings, so that no multiprocessor of an H200 (228 KiB)
/// takes three blocks where two each are all there are, and there is room for one of expert_down.cu.
pub const GATE_UP_SHARED: u32 = 68 << 10;
/// Threads of a block of expert_down.cu.
pub const DOWN_THREADS: u32 = 9 * 32;
/// Bytes of its warps' rings: 8 of 4 slots, one of 8.
pub const DOWN_RINGS: u32 = (8 * 4 + 8) * SLOT;

/// The kernel of `stem`'s fatbin.
///
/// # Errors
/// Input error if this build has no kernels.
pub fn require(stem: &str) -> Result<&'static [u8]> {
    fatbin(stem).ok_or_else(|| {
        Error::input(
            "this build has no CUDA kernels: it was made without nvcc (see make toolchain)",
        )
    })
}

/// A kernel for up to 8 rows and one for up to 16.
pub struct ByRows([Kernel; 2]);

impl ByRows {
    /// The kernel for `rows` rows.
    pub fn of(&self, rows: usize) -> &Kernel {
        &self.0[usize::from(rows > 8)]
    }
}

/// `reduce_norm` between ranks, of each variant; and again with what tests make go wrong.
pub struct Exchanges([[Kernel; 3]; 2]);

impl Exchanges {
    /// Those of reduce_norm.cu's module.
    ///
    /// # Errors
    /// Runtime error if the module lacks one.
    pub fn of_module(module: &Arc<Module>) -> Result<Self> {
        let kernel = |name: &str| {
            let kernel = module.kernel(name)?;
            kernel.set_max_shared((MAX_HIDDEN * size_of::<f32>()) as u32)?;
            Ok::<_, Error>(kernel)
        };
        let all = |suffix: &str| {
            let of = |variant: Variant| kernel(&format!("reduce_norm_{variant}{suffix}"));
            Ok::<_, Error>([of(Variant::Push)?, of(Variant::Pull)?, of(Variant::Owner)?])
        };
        Ok(Self([all("")?, all("_injected")?]))
    }

    /// The kernel of a variant.
    pub fn of(&self, variant: Variant, injected: bool) -> &Kernel {
        let place = match variant {
            Variant::Push => 0,
            // Pull's mailboxes may lie in the host's memory too.
            Variant::Pull | Variant::Staged => 1,
            Variant::Owner => 2,
        };
        &self.0[usize::from(injected)][place]
    }
}

/// All kernels; the fields carry their names.
pub struct KernelSet {
    pub embed: Kernel,
    pub reduce_norm: Kernel,
    pub exchanges: Exchanges,
    pub project_latents: ByRows,
    pub norm_latents: Kernel,
    pub project_queries: ByRows,
    pub absorb_queries: ByRows,
    pub score_keys: Kernel,
    pub select_keys: Kernel,
    pub attend: Kernel,
    pub merge_splits: Kernel,
    pub project_values: ByRows,
    pub project_output: ByRows,
    pub route: ByRows,
    pub choose_experts: Kernel,
    pub expert_gate_up: ByRows,
    pub expert_down: ByRows,
    pub dense_gate_up: ByRows,
    pub head: ByRows,
    pub argmax: Kernel,
}

impl KernelSet {
    /// Loads all of them; `attend_shared` is the shared memory that `attend` needs for the model.
    ///
    /// # Errors
    /// Input error if this build has no kernels or none for the device.
    pub fn load(device: &Arc<Device>, attend_shared: u32) -> Result<Self> {
        let module =
            |stem: &str| Ok::<_, Error>(Arc::new(Module::load(device, stem, require(stem)?)?));
        let linear = |module: &Arc<Module>, name: &str, shared: u32| -> Result<ByRows> {
            let kernels =
                [module.kernel(&format!("{name}_8"))?, module.kernel(&format!("{name}_16"))?];
            for kernel in &kernels {
                kernel.set_max_shared(shared)?;
            }
            Ok(ByRows(kernels))
        };
        let latents = module("project_latents")?;
        let queries = module("project_queries")?;
        let attention = module("attend")?;
        let head = module("head")?;
        let norm = module("reduce_norm")?;
        let attend = attention.kernel("attend")?;
        attend.set_max_shared(attend_shared)?;
        Ok(Self {
            embed: module("embed")?.kernel("embed")?,
            reduce_norm: norm.kernel("reduce_norm")?,
            exchanges: Exchanges::of_module(&norm)?,
            project_latents: linear(&latents, "project_latents", LINEAR_SHARED)?,
            norm_latents: latents.kernel("norm_latents")?,
            project_queries: linear(&queries, "project_queries", LINEAR_SHARED)?,
            absorb_queries: linear(&queries, "absorb_queries", LINEAR_SHARED)?,
            score_keys: module("score_keys")?.kernel("score_keys")?,
            select_keys: module("select_keys")?.kernel("select_keys")?,
            attend,
            merge_splits: attention.kernel("merge_splits")?,
            project_values: linear(&module("project_values")?, "project_values", LINEAR_SHARED)?,
            project_output: linear(&module("project_output")?, "project_output", LINEAR_SHARED)?,
            choose_experts: module("choose_experts")?.kernel("choose_experts")?,
            route: linear(&module("route")?, "route", LINEAR_SHARED)?,
            expert_gate_up: linear(&module("expert_gate_up")?, "expert_gate_up", GATE_UP_SHARED)?,
            expert_down: linear(&module("expert_down")?, "expert_down", down_shared(MAX_USED, 16))?,
            dense_gate_up: linear(&module("dense_gate_up")?, "dense_gate_up", LINEAR_SHARED)?,
            head: linear(&head, "head", LINEAR_SHARED)?,
            argmax: head.kernel("argmax")?,
        })
    }
}

/// Shared memory of `expert_down`: the rings, and the terms of `used` experts and of the shared one
/// for a block's dimensions.
pub fn down_shared(used: usize, rows: usize) -> u32 {
    let columns = if rows > 8 { 16 } else { 8 };
    DOWN_RINGS + ((used + 1) * columns * 16 * size_of::<f32>()) as u32
}
