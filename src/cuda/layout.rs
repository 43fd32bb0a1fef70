//! The structs that kernels take by value, field for field as in `kernels/`, and the sizes of
//! matrices in the device's order (kernels/formats.cuh).

use crate::weights::StoredFormat;

/// What BF16 weights are multiplied with to become f16 (formats.cuh, `F16_FACTOR`).
pub const F16_FACTOR: f32 = 64.0;
/// What down projections make good: activations are stored times its inverse (common.cuh).
pub const ACTIVATION_FACTOR: f32 = 64.0;
/// Rows of a tile.
pub const TILE: usize = 16;
/// Columns of a unit.
pub const UNIT: usize = 128;
/// Bytes of a slot of codes.
const SLOT_CODES: usize = 1024;
/// Rows that a step can have on the device.
pub const MAX_ROWS: usize = 16;
/// Positions that one block of `attend` takes.
pub const SPLIT: usize = 64;
/// Experts that a layer can have, and that a row can use.
pub const MAX_EXPERTS: usize = 256;
pub const MAX_USED: usize = 16;
/// Bytes of routing.cuh's `Routing`.
pub const ROUTING_BYTES: usize =
    16 + MAX_EXPERTS * 4 + MAX_ROWS * MAX_EXPERTS + MAX_ROWS * MAX_USED * 8 + MAX_EXPERTS / 8;
/// Splits of a list that `merge_splits` takes.
pub const MAX_SPLITS_OF_LIST: usize = 128;
/// Largest rank that `norm_latents` takes.
pub const MAX_LATENT: usize = 8 * 512;
/// Longest index key of `score_keys`.
pub const MAX_INDEX_DIM: usize = 4 * 32;
/// Largest hidden size of `reduce_norm`.
pub const MAX_HIDDEN: usize = 16 * 1024;

/// Formats that the kernels multiply with.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(i32)]
pub enum Format {
    F16 = 0,
    Fp8 = 1,
    Nvfp4 = 2,
    Fp8Rows = 3,
}

impl Format {
    /// The device's format for a stored one.
    pub fn of(stored: StoredFormat) -> Self {
        match stored {
            StoredFormat::F32 | StoredFormat::F16 | StoredFormat::Bf16 => Format::F16,
            StoredFormat::Fp8Block => Format::Fp8,
            StoredFormat::Nvfp4 => Format::Nvfp4,
            StoredFormat::Fp8Rows => Format::Fp8Rows,
        }
    }

    /// Bytes of a unit's codes.
    pub fn unit_codes(self) -> usize {
        match self {
            Format::F16 => 4 * SLOT_CODES,
            Format::Fp8 | Format::Fp8Rows => 2 * SLOT_CODES,
            Format::Nvfp4 => SLOT_CODES,
        }
    }

    /// Bytes of a unit's scales.
    pub fn unit_scales(self) -> usize {
        match self {
            // A scale for a row is not one of a unit.
            Format::F16 | Format::Fp8Rows => 0,
            Format::Fp8 => 8,
            Format::Nvfp4 => 128,
        }
    }
}

/// A matrix on the device (formats.cuh, `Matrix`).
#[derive(Debug, Clone, Copy, Default, PartialEq)]
#[repr(C)]
pub struct DeviceMatrix {
    pub codes: u64,
    /// Of units, or in [`Format::Fp8Rows`] an f32 for each of the matrix's rows.
    pub scales: u64,
    pub global: f32,
    /// A multiple of [`TILE`]; 0 for a matrix that is not there.
    pub rows: i32,
    pub columns: i32,
    pub format: i32,
}

impl DeviceMatrix {
    /// Tiles of [`TILE`] rows.
    pub fn tiles(&self) -> usize {
        self.rows as usize / TILE
    }

    /// Units of [`UNIT`] columns in a tile, the last one padded.
    pub fn units(&self) -> usize {
        (self.columns as usize).div_ceil(UNIT)
    }

    /// Bytes of its codes.
    pub fn code_bytes(&self) -> usize {
        self.tiles() * self.units() * self.stored_as().unit_codes()
    }

    fn stored_as(&self) -> Format {
        match self.format {
            0 => Format::F16,
            1 => Format::Fp8,
            3 => Format::Fp8Rows,
            _ => Format::Nvfp4,
        }
    }

    /// Bytes that a step reads of it.
    pub fn bytes(&self) -> usize {
        let format = self.stored_as();
        let units = self.tiles() * self.units() * (format.unit_codes() + format.unit_scales());
        units + if format == Format::Fp8Rows { self.rows as usize * size_of::<f32>() } else { 0 }
    }
}

/// Weights that a later kernel reads (common.cuh, `Ahead`).
#[derive(Debug, Clone, Copy, Default)]
#[repr(C)]
pub struct Ahead {
    pub from: u64,
    pub bytes: u32,
    pub padding: u32,
}

/// NVFP4's scales of gate and up in an interleaved matrix.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
#[repr(C)]
pub struct Globals {
    pub gate: f32,
    pub up: f32,
}

/// A matrix as it is stored (repack.cu, `Stored`).
#[derive(Debug, Clone, Copy, Default)]
#[repr(C)]
pub struct Stored {
    pub codes: [u64; 2],
    pub scales: [u64; 2],
    pub rows: i32,
    pub columns: i32,
    pub interleaved: i32,
    pub from_bf16: i32,
}

/// project_latents.cu, `Segments`.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub struct Segments(pub [DeviceMatrix; 4]);

/// project_latents.cu, `LatentLayout`.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub struct LatentLayout {
    pub width: i32,
    pub splits: i32,
    pub q_rank: i32,
    pub kv_at: i32,
    pub kv_rank: i32,
    pub rope: i32,
    pub key_at: i32,
    pub dim: i32,
    pub weights_at: i32,
    pub heads: i32,
    pub context: i32,
    pub eps: f32,
    pub key_eps: f32,
    pub weight_scale: f32,
}

/// project_queries.cu, `QueryLayout`.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub struct QueryLayout {
    pub q_rank: i32,
    pub nope: i32,
    pub rope: i32,
    pub heads: i32,
    pub kv_rank: i32,
    pub index_heads: i32,
    pub index_dim: i32,
}

/// attend.cu, `AttendLayout`.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub struct AttendLayout {
    pub heads: i32,
    pub kv_rank: i32,
    pub rope: i32,
    pub context: i32,
    pub top_k: i32,
    pub splits: i32,
    pub scale: f32,
}

/// routing.cuh, `RouteLayout`.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub struct RouteLayout {
    pub experts: i32,
    pub used: i32,
    pub splits: i32,
    pub renormalise: i32,
    pub scaling: f32,
    pub first_own: i32,
    pub own: i32,
}

/// expert_gate_up.cu, `Experts`.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub struct GateUpExperts {
    pub first: DeviceMatrix,
    pub gate_globals: u64,
    pub up_globals: u64,
}

/// choose_experts.cu, `SharedExpert`.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub struct SharedExpert {
    pub sums: u64,
    pub activations: u64,
    pub splits: i32,
    pub pitch: i32,
    pub width: i32,
    pub globals: Globals,
    pub padding: i32,
}

/// expert_down.cu, `DownExperts`.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub struct DownExperts {
    pub first: DeviceMatrix,
    pub globals: u64,
}

/// Ranks that can share a model (exchange.cuh, `MAX_RANKS`).
pub const MAX_RANKS: usize = 8;

/// exchange.cuh, `Exchange`.
#[derive(Debug, Clone, Copy, Default)]
#[repr(C)]
pub struct Exchange {
    pub boxes: [u64; MAX_RANKS],
    pub control: u64,
    pub fault: u64,
    pub injection: u64,
    pub trace: u64,
    pub timeout_ns: u64,
    pub collective: u32,
    pub rank: i32,
    pub ranks: i32,
    pub capacity: i32,
    pub phases: i32,
    pub shared_device: i32,
}

/// exchange.cuh, `Injection`.
#[derive(Debug, Clone, Copy, Default)]
#[repr(C)]
pub struct Injection {
    pub kind: i32,
    pub rank: i32,
    pub peer: i32,
    pub seed: u32,
    pub epoch: u64,
    pub delay_ns: u32,
    pub padding: i32,
}

/// Bytes of exchange.cuh's `Control` and `Fault`.
pub const CONTROL_BYTES: usize = 16;
pub const FAULT_BYTES: usize = 24;

/// reduce_norm.cu, `Rows`.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub struct NormRows {
    pub partial: u64,
    pub residual: u64,
    pub gain: u64,
    pub normed: u64,
    pub eps: f32,
    pub hidden: i32,
    pub rows: i32,
    pub padding: i32,
}

/// head.cu, `Part`.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub struct VocabularyPart {
    pub logits: u64,
    pub vocabulary: i32,
    pub limit: i32,
    pub first_id: i32,
    pub hidden: i32,
    pub normed: u64,
    pub own: u64,
    pub results: u64,
}

/// Bytes of a row as the kernels read it (common.cuh, `Row`), and of what the host writes for a step
/// before its rows (embed.cu, `Step`).
pub const ROW_BYTES: usize = 16;
pub const STEP_HEAD_BYTES: usize = 16;
/// Bytes of head.cu's `Best` and `Result`.
pub const BEST_BYTES: usize = 8;
pub const RESULT_BYTES: usize = 16;

/// features.cuh, `FeatureLayout`.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub struct FeatureLayout {
    pub positions: i32,
    pub count: i32,
    pub hidden: i32,
    pub unit: f32,
}

/// draft_join.cu, `FeatureNorm`.
#[derive(Debug, Clone, Copy, Default)]
#[repr(C)]
pub struct FeatureNorm {
    pub gain: u64,
    pub width: i32,
    pub eps: f32,
}

/// What a drafter's residual begins as (draft_join.cu, `Residual`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(i32)]
pub enum ResidualStart {
    Zero = 0,
    Hidden = 1,
    Normed = 2,
}

/// draft_join.cu, `JoinLayout`.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub struct JoinLayout {
    pub table: u64,
    pub embedding_gain: u64,
    pub hidden_gain: u64,
    pub output_gain: u64,
    pub eps: f32,
    pub hidden: i32,
    pub residual: i32,
    pub padding: i32,
}

/// draft_attend.cu, `DraftLayout`.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub struct DraftLayout {
    pub heads: i32,
    pub key_heads: i32,
    pub key_dim: i32,
    pub value_dim: i32,
    pub value_at: i32,
    pub entry: i32,
    pub context: i32,
    pub splits: i32,
    pub scale: f32,
}

/// draft_attend.cu, `KeyLayout`.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub struct KeyLayout {
    pub width: i32,
    pub splits: i32,
    pub key_at: i32,
    pub value_at: i32,
}

/// draft_choose.cu, `DraftPart`.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub struct DraftPart {
    pub logits: u64,
    pub limit: i32,
    pub first_id: i32,
    pub target_ids: u64,
    pub own: u64,
    pub result: u64,
    pub rows: u64,
}
