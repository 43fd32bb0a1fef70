//! A rank whose buffers are written and read between stages, so that another backend's can be
//! compared with them.

use std::sync::Arc;

use super::buffer::{Buffer, Stored};
use super::kernel_set::{LINEAR_SHARED, LINEAR_THREADS};
use super::layout::{BEST_BYTES, MAX_ROWS, ROUTING_BYTES, SPLIT, STEP_HEAD_BYTES, UNIT};
use super::places::Places;
use super::rank::{CudaOptions, CudaRank};
use super::routing::{self, Route, encode_routes};
use super::runner::row_bytes;
use super::upload::Uploader;
use super::weights::{DeviceLayer, DeviceMlp};
use super::{Arg, DeviceMemory, Launch};
use crate::error::{Error, Result};
use crate::model::{ModelConfig, ModelParams, Row, Stages};
use crate::weights::Matrix;

/// All bits set: NaN in every format, and an id that is none.
const POISON: u8 = 0xFF;
/// In a routing, where -1 means something: no expert, no place, and a weight that is far too large.
const ROUTING_POISON: u8 = 0x7F;

/// Bytes on the device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Span {
    at: u64,
    bytes: usize,
}

/// A rank that is run a stage at a time.
pub struct Probe {
    rank: CudaRank,
}

impl Probe {
    /// As [`CudaRank::load`].
    ///
    /// # Errors
    /// As [`CudaRank::load`].
    pub fn load(
        config: &Arc<ModelConfig>,
        params: &ModelParams,
        options: &CudaOptions,
        progress: &dyn Fn(usize, usize),
    ) -> Result<Self> {
        Ok(Self { rank: CudaRank::load(config, params, options, None, progress)? })
    }

    /// Parts of a row's attention that there is room for, and positions of a part.
    pub fn attend_splits(&self) -> (usize, usize) {
        (self.rank.buffers.attend_splits, SPLIT)
    }

    /// Begins with these rows: all buffers between stages become zero, the caches stay.
    ///
    /// # Errors
    /// Runtime error if the device fails.
    pub fn begin(&self, rows: &[Row]) -> Result<()> {
        let (stream, buffers) = (&self.rank.stream, &self.rank.buffers);
        // They lie one behind the other, from the rows up to the routing (plan.rs).
        let end = buffers.routing + ROUTING_BYTES as u64;
        stream.fill(buffers.rows, 0, (end - buffers.rows) as usize)?;
        let bytes: Vec<u8> = rows.iter().flat_map(row_bytes).collect();
        stream.upload(buffers.step + STEP_HEAD_BYTES as u64, &bytes)?;
        stream.upload(buffers.rows, &bytes)
    }

    /// Writes the values of each row.
    ///
    /// # Errors
    /// Runtime error if they are not as many as the rows have, or if the device fails.
    pub fn write(&self, buffer: Buffer, rows: &[Row], values: &[Vec<f32>]) -> Result<()> {
        let bytes = buffer.stored().encode(values.iter().flatten());
        let spans = self.spans(buffer, rows);
        let room: usize = spans.iter().map(|span| span.bytes).sum();
        if room != bytes.len() {
            let (name, found) = (buffer.name(), bytes.len());
            return Err(Error::runtime(format!("{name}: {found} bytes for a room of {room}")));
        }
        let mut rest = bytes.as_slice();
        for span in spans {
            let (here, behind) = rest.split_at(span.bytes);
            self.rank.stream.upload(span.at, here)?;
            rest = behind;
        }
        Ok(())
    }

    /// Writes what `route` would leave.
    ///
    /// # Errors
    /// Runtime error if the device fails.
    pub fn write_routes(&self, routes: &[Route]) -> Result<()> {
        let bytes = encode_routes(routes, self.rank.config.n_routed_experts);
        self.rank.stream.upload(self.rank.buffers.routing, &bytes)
    }

    /// Fills what a stage writes for these rows with NaN. What lies behind the rows stays, because
    /// kernels multiply it with weights of zero.
    ///
    /// # Errors
    /// Runtime error if the device fails.
    pub fn poison(&self, buffer: Buffer, rows: &[Row]) -> Result<()> {
        let stream = &self.rank.stream;
        if buffer == Buffer::Routing {
            let routing = self.rank.buffers.routing;
            return stream.fill(routing, ROUTING_POISON, ROUTING_BYTES);
        }
        for span in self.spans(buffer, rows) {
            stream.fill(span.at, POISON, span.bytes)?;
        }
        Ok(())
    }

    /// Runs `stage` for the first `rows` rows and nothing beside it.
    ///
    /// # Errors
    /// Runtime error if it cannot be launched; a fault in it shows in the next call.
    pub fn run(
        &self,
        rows: usize,
        long: bool,
        stage: &dyn Fn(&mut dyn Stages) -> Result<()>,
    ) -> Result<()> {
        // A stage may begin before the launch ahead of it has ended; what was written here must
        // have.
        self.rank.stream.synchronize()?;
        stage(&mut self.rank.recorder(rows, long))
    }

    /// What a buffer holds for these rows, one row behind the other.
    ///
    /// # Errors
    /// Runtime error if the device fails, or a kernel before it did.
    pub fn read(&self, buffer: Buffer, rows: &[Row]) -> Result<Vec<u8>> {
        let spans = self.spans(buffer, rows);
        let mut bytes = vec![0; spans.iter().map(|span| span.bytes).sum()];
        let mut rest = bytes.as_mut_slice();
        for span in spans {
            let (here, behind) = rest.split_at_mut(span.bytes);
            self.rank.stream.download(span.at, here)?;
            rest = behind;
        }
        if buffer == Buffer::Routing {
            let config = &self.rank.config;
            let (experts, used) = (config.n_routed_experts, config.num_experts_per_tok);
            bytes = routing::said(&bytes, rows.len(), experts, used);
        }
        if buffer == Buffer::Best {
            // Ids of the whole vocabulary, of which this rank's part is looked at.
            for best in bytes.as_chunks_mut::<BEST_BYTES>().0 {
                let id = i32::from_ne_bytes([best[0], best[1], best[2], best[3]]);
                let own = id.wrapping_sub(self.rank.first_id as i32);
                best[..4].copy_from_slice(&own.to_ne_bytes());
            }
        }
        Ok(bytes)
    }

    /// Every value of `matrix` as the kernels decode it: it is repacked as at a load and multiplied
    /// with each unit vector.
    ///
    /// # Errors
    /// Runtime error if the device fails.
    pub fn decode(&self, matrix: &Matrix) -> Result<Vec<f32>> {
        let (rank, device) = (&self.rank, &self.rank.device);
        let (rows, columns) = (matrix.rows(), matrix.columns());
        let mut counted = Places::counting();
        counted.matrix(matrix)?;
        let memory = DeviceMemory::alloc(device, counted.used())?;
        let mut places = Places::filling(memory.address(), Uploader::new(device)?);
        let placed = places.matrix(matrix)?;
        places.finish()?;

        let x = DeviceMemory::alloc(device, (MAX_ROWS * columns + UNIT) * 2)?;
        let y = DeviceMemory::alloc(device, MAX_ROWS * rows * 4)?;
        rank.stream.fill(x.address(), 0, x.len())?;
        let mut decoded = vec![0.0; rows * columns];
        for first in (0..columns).step_by(MAX_ROWS) {
            let count = MAX_ROWS.min(columns - first);
            let mut units = vec![0.0f32; count * columns];
            for n in 0..count {
                units[n * columns + first + n] = 1.0;
            }
            rank.stream.upload(x.address(), &Stored::F16.encode(units.iter()))?;
            rank.stream.fill(y.address(), POISON, y.len())?;
            let launch = Launch {
                grid: [placed.tiles() as u32, 1, 1],
                block: LINEAR_THREADS,
                shared_bytes: LINEAR_SHARED,
                dependent: false,
            };
            rank.stream.launch(
                rank.kernels.project_output.of(count),
                launch,
                &[
                    Arg::of(&placed),
                    x.address().into(),
                    y.address().into(),
                    (rows as i32).into(),
                    (count as i32).into(),
                ],
            )?;
            let mut bytes = vec![0; count * rows * 4];
            rank.stream.download(y.address(), &mut bytes)?;
            let products = Stored::F32.decode(&bytes);
            for (n, column) in products.chunks_exact(rows).enumerate() {
                for (row, value) in column.iter().enumerate() {
                    decoded[row * columns + first + n] = *value;
                }
            }
        }
        Ok(decoded)
    }

    fn layer(&self, layer: usize) -> &DeviceLayer {
        &self.rank.weights.layers[layer]
    }

    /// Where the values of each row lie, in the order of the rows; neighbours are one.
    fn spans(&self, buffer: Buffer, rows: &[Row]) -> Vec<Span> {
        let (config, sizes, buffers) = (&self.rank.config, &self.rank.sizes, &self.rank.buffers);
        let item = buffer.stored().bytes();
        let indices = 0..rows.len();
        // Row `index` of rows of `pitch` values; the first `count` of them.
        let part = |at: u64, pitch: usize, index: usize, count: usize| Span {
            at: at + (index * pitch * item) as u64,
            bytes: count * item,
        };
        let even = |at: u64, width: usize| -> Vec<Span> {
            indices.clone().map(|index| part(at, width, index, width)).collect()
        };
        // The parts of a sum over columns, MAX_ROWS rows each.
        let split = |at: u64, splits: usize, width: usize| -> Vec<Span> {
            let all = (0..splits).flat_map(|split| indices.clone().map(move |i| (split, i)));
            all.map(|(split, index)| part(at, width, split * MAX_ROWS + index, width)).collect()
        };
        // Rows that do not attend to all they see.
        let listed = |at: u64, pitch: usize, count: &dyn Fn(&Row) -> usize| -> Vec<Span> {
            let visible = |row: &Row| row.position + 1 - row.first;
            let rows = rows.iter().enumerate();
            let long = rows.filter(|(_, row)| visible(row) > config.index_topk);
            long.map(|(index, row)| part(at, pitch, index, count(row))).collect()
        };
        let entries = |at: u64, width: usize| -> Vec<Span> {
            let place = |row: &Row| row.sequence * sizes.context + row.position;
            rows.iter().map(|row| part(at, width, place(row), width)).collect()
        };
        let width = config.kv_lora_rank + config.qk_rope_head_dim;
        let spans = match buffer {
            Buffer::Partial => even(buffers.partial, config.hidden_size),
            Buffer::Residual => even(buffers.residual, config.hidden_size),
            Buffer::Normed => even(buffers.normed, config.hidden_size),
            Buffer::Latents(layer) => {
                let layer = self.layer(layer);
                let indexer = &layer.indexer;
                let parts = [&layer.q_a_proj, &layer.kv_a_proj_with_mqa];
                let parts = parts.into_iter().chain([&indexer.wk, &indexer.weights_proj]);
                let height = parts.map(|part| part.rows as usize).sum();
                split(buffers.latents, buffers.latent_splits, height)
            }
            Buffer::QueryLatents => even(buffers.query_latents, config.q_lora_rank),
            Buffer::WithoutRope => {
                even(buffers.without_rope, sizes.heads * config.qk_nope_head_dim)
            }
            Buffer::Queries => even(buffers.queries, sizes.heads * width),
            Buffer::IndexQueries => {
                even(buffers.index_queries, config.index_n_heads * config.index_head_dim)
            }
            Buffer::IndexWeights => even(buffers.index_weights, config.index_n_heads),
            Buffer::Scores => {
                listed(buffers.scores, sizes.context, &|row| row.position + 1 - row.first)
            }
            Buffer::Selected => listed(buffers.selected, config.index_topk, &|_| config.index_topk),
            Buffer::Parts => {
                even(buffers.parts, buffers.attend_splits * sizes.heads * config.kv_lora_rank)
            }
            Buffer::Bounds => even(buffers.bounds, buffers.attend_splits * sizes.heads * 2),
            Buffer::Attended => even(buffers.attended, sizes.heads * config.kv_lora_rank),
            Buffer::Values => even(buffers.values, sizes.heads * config.v_head_dim),
            Buffer::RouterLogits => {
                split(buffers.router_logits, buffers.route_splits, config.n_routed_experts)
            }
            Buffer::SharedSums(layer) => match &self.layer(layer).mlp {
                DeviceMlp::Moe(moe) => {
                    let pitch = moe.shared_gate_up.rows as usize;
                    split(buffers.shared_sums, buffers.route_splits, pitch)
                }
                DeviceMlp::Dense { .. } => Vec::new(),
            },
            Buffer::Routing => vec![Span { at: buffers.routing, bytes: ROUTING_BYTES }],
            Buffer::Activations(layer) => match &self.layer(layer).mlp {
                DeviceMlp::Moe(moe) => {
                    even(buffers.activations, config.num_experts_per_tok * moe.width)
                }
                DeviceMlp::Dense { .. } => Vec::new(),
            },
            Buffer::MlpActivations(layer) => match &self.layer(layer).mlp {
                DeviceMlp::Moe(moe) => even(buffers.mlp_activations, moe.shared_width),
                DeviceMlp::Dense { width, .. } => even(buffers.mlp_activations, *width),
            },
            Buffer::Logits => even(buffers.logits, self.rank.weights.vocabulary),
            Buffer::Best => even(buffers.best, 2),
            Buffer::LatentCache(layer) => entries(buffers.latent_caches[layer], width),
            Buffer::KeyCache(layer) => entries(buffers.key_caches[layer], config.index_head_dim),
        };
        merged(spans)
    }
}

/// Spans of which each that begins where the one before it ends is joined to it.
fn merged(spans: Vec<Span>) -> Vec<Span> {
    let mut merged: Vec<Span> = Vec::new();
    for span in spans {
        match merged.last_mut() {
            Some(last) if last.at + last.bytes as u64 == span.at => last.bytes += span.bytes,
            _ => merged.push(span),
        }
    }
    merged
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn poison_is_nan_or_no_id() {
        for stored in [Stored::F16, Stored::Activation, Stored::F32] {
            assert!(stored.decode(&[POISON; 8]).iter().all(|value| value.is_nan()), "{stored:?}");
        }
        assert_eq!(Stored::I32.decode(&[POISON; 8]), [-1.0, -1.0]);
    }

    #[test]
    fn neighbours_are_one_span() {
        let span = |at, bytes| Span { at, bytes };
        let spans = vec![span(0, 4), span(4, 4), span(12, 4), span(8, 4), span(12, 2)];
        assert_eq!(merged(spans), [span(0, 8), span(12, 4), span(8, 6)]);
    }
}
