//! Number formats of stored matrices, decoded to f32.
//!
//! NVFP4 (facts/glm5.md §2.3): w[o, i] = E2M1[code] · float(weight_scale[o, i / 16]) ·
//! weight_scale_2, two codes a byte with the even column in the low nibble. FP8 blocks (§2.2):
//! w[o, i] = e4m3 · scale_inv[o / 128, i / 128].

use std::ops::Range;

use half::{bf16, f16};

use super::audit::Resolved;
use super::checkpoint::Checkpoint;
use super::manifest::{Axis, Manifest, Role};
use super::mmap::Bytes;
use crate::error::{Error, Result};

/// Values of the 4-bit codes 0..=7; bit 3 is the sign.
const E2M1: [f32; 8] = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0];

/// Columns that share a block scale in NVFP4.
const NVFP4_BLOCK: usize = 16;
/// Rows and columns that share a block scale in FP8.
const FP8_BLOCK: usize = 128;

/// A part of a matrix along one axis: the share of rank `index` of `of`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Slice {
    /// The rank.
    pub index: usize,
    /// The number of ranks.
    pub of: usize,
}

/// A `[rows, columns]` matrix in its stored format, or a rank's share of it. Cheap to clone.
#[derive(Clone)]
pub struct Matrix {
    rows: Range<usize>,
    columns: Range<usize>,
    /// Width of the stored matrix.
    stride: usize,
    values: Values,
}

/// How the values of a matrix are stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StoredFormat {
    /// 32-bit floats.
    F32,
    /// The upper halves of 32-bit floats.
    Bf16,
    /// 16-bit floats of IEEE 754.
    F16,
    /// 4-bit codes, an E4M3 scale for 16 columns, one scale for the tensor.
    Nvfp4,
    /// E4M3 codes, an f32 scale for 128 x 128 of them.
    Fp8Block,
    /// E4M3 codes, an f32 scale for each row; no checkpoint has it (`fp8_rows`).
    Fp8Rows,
}

#[derive(Clone)]
enum Values {
    F32(Bytes),
    Bf16(Bytes),
    F16(Bytes),
    Nvfp4 { codes: Bytes, block_scales: Bytes, global_scale: f32 },
    Fp8Block { codes: Bytes, block_scales: Bytes },
    Fp8Rows { codes: Bytes, row_scales: Bytes },
}

/// Both values of every NVFP4 byte.
static E2M1_PAIRS: [[f32; 2]; 256] = e2m1_pairs();
/// Value of every E4M3 byte (1-4-3, bias 7, no infinities; 0x7F and 0xFF are NaN).
static E4M3: [f32; 256] = e4m3_values();

impl Matrix {
    /// The matrix of a resolved module, cut to a rank's share by the manifest's rule.
    ///
    /// # Errors
    /// Input error if the parts do not make a matrix, or the cut would split a block of scales.
    pub fn new(
        checkpoint: &Checkpoint,
        manifest: &Manifest,
        resolved: &Resolved,
        rank: Slice,
    ) -> Result<Self> {
        let name = &resolved.module.name;
        let (rows, columns) = match resolved.module.shape[..] {
            [rows, columns] => (rows, columns),
            // A vector is a matrix of one row.
            [columns] => (1, columns),
            _ => return Err(Error::input(format!("tensor {name}: not a matrix"))),
        };
        let part = |role: Role| resolved.parts.iter().find(|(found, _)| *found == role);
        let bytes = |role: Role| {
            part(role).map(|(_, tensor)| checkpoint.bytes(tensor)).ok_or_else(|| {
                Error::input(format!("tensor {name}: its {role:?} are missing from the checkpoint"))
            })
        };
        let format = manifest.formats[resolved.format].name.as_str();
        let values = match format {
            "bf16" => Values::Bf16(bytes(Role::Values)?),
            "f32" => Values::F32(bytes(Role::Values)?),
            "f16" => Values::F16(bytes(Role::Values)?),
            "nvfp4" => Values::Nvfp4 {
                codes: bytes(Role::Values)?,
                block_scales: bytes(Role::BlockScales)?,
                global_scale: read_f32(&bytes(Role::GlobalScale)?, 0),
            },
            "nvfp4-packed" => Values::Nvfp4 {
                codes: bytes(Role::Values)?,
                block_scales: bytes(Role::BlockScales)?,
                global_scale: 1.0 / read_f32(&bytes(Role::GlobalScaleReciprocal)?, 0),
            },
            "fp8-block" => Values::Fp8Block {
                codes: bytes(Role::Values)?,
                block_scales: bytes(Role::BlockScales)?,
            },
            other => {
                return Err(Error::input(format!("tensor {name}: no decoder for format {other}")));
            }
        };
        let matrix = Self { rows: 0..rows, columns: 0..columns, stride: columns, values };
        let rule = manifest.entries[resolved.module.entry].slice.as_ref();
        // A pack's modules are shares already.
        match rule.filter(|_| checkpoint.pack.is_none()).map(|rule| rule.axis) {
            None => Ok(matrix),
            Some(axis) => {
                check_share(name, format, axis, &[rows, columns], rank.of)?;
                Ok(matrix.cut(axis, rank))
            }
        }
    }

    /// A whole matrix of bytes that were made: codes row by row, and the scales of blocks or rows where
    /// the format has them. NVFP4's scale of the tensor is 1.
    ///
    /// # Errors
    /// Runtime error if there are not as many bytes as the shape takes.
    pub fn from_bytes(
        format: StoredFormat,
        (rows, columns): (usize, usize),
        codes: Vec<u8>,
        scales: Vec<u8>,
    ) -> Result<Self> {
        let count = rows * columns;
        let (code_bytes, scale_bytes) = match format {
            StoredFormat::F32 => (count * 4, 0),
            StoredFormat::Bf16 | StoredFormat::F16 => (count * 2, 0),
            StoredFormat::Nvfp4 => (count / 2, count / NVFP4_BLOCK),
            StoredFormat::Fp8Block => {
                (count, rows.div_ceil(FP8_BLOCK) * columns.div_ceil(FP8_BLOCK) * 4)
            }
            StoredFormat::Fp8Rows => (count, rows * 4),
        };
        if (codes.len(), scales.len()) != (code_bytes, scale_bytes) {
            return Err(Error::runtime(format!(
                "a {format:?} matrix of {rows} x {columns}: expected {code_bytes} bytes of codes \
                 and {scale_bytes} of scales, found {} and {}",
                codes.len(),
                scales.len()
            )));
        }
        let (codes, block_scales) = (Bytes::owned(codes), Bytes::owned(scales));
        let values = match format {
            StoredFormat::F32 => Values::F32(codes),
            StoredFormat::Bf16 => Values::Bf16(codes),
            StoredFormat::F16 => Values::F16(codes),
            StoredFormat::Nvfp4 => Values::Nvfp4 { codes, block_scales, global_scale: 1.0 },
            StoredFormat::Fp8Block => Values::Fp8Block { codes, block_scales },
            StoredFormat::Fp8Rows => Values::Fp8Rows { codes, row_scales: block_scales },
        };
        Ok(Self { rows: 0..rows, columns: 0..columns, stride: columns, values })
    }

    fn cut(mut self, axis: Axis, rank: Slice) -> Self {
        let whole = if axis == Axis::Rows { self.rows.len() } else { self.columns.len() };
        let share = whole / rank.of;
        let range = rank.index * share..(rank.index + 1) * share;
        match axis {
            Axis::Rows => self.rows = range,
            Axis::Columns => self.columns = range,
        }
        self
    }

    /// Output dimension.
    pub fn rows(&self) -> usize {
        self.rows.len()
    }

    /// Input dimension.
    pub fn columns(&self) -> usize {
        self.columns.len()
    }

    /// Rows `range` of this matrix as a matrix.
    pub fn row_range(&self, range: Range<usize>) -> Self {
        let start = self.rows.start;
        Self { rows: start + range.start..start + range.end, ..self.clone() }
    }

    /// Decodes `rows` into `out`, `[rows, columns]`.
    pub fn decode(&self, rows: Range<usize>, out: &mut [f32]) {
        let width = self.columns();
        let first = self.rows.start + rows.start;
        if width == self.stride {
            // Whole rows lie one behind the other: one run.
            return self.decode_run(first * width, rows.len() * width, out);
        }
        for (i, out) in out.chunks_exact_mut(width).enumerate() {
            self.decode_run((first + i) * self.stride + self.columns.start, width, out);
        }
    }

    /// Decodes `count` values from `at` on, counted over the whole stored matrix. Both are
    /// multiples of 16 for NVFP4.
    fn decode_run(&self, at: usize, count: usize, out: &mut [f32]) {
        match &self.values {
            Values::F32(bytes) => {
                let (chunks, _) = bytes[at * 4..(at + count) * 4].as_chunks::<4>();
                for (out, chunk) in out.iter_mut().zip(chunks) {
                    *out = f32::from_le_bytes(*chunk);
                }
            }
            Values::Bf16(bytes) => {
                let (chunks, _) = bytes[at * 2..(at + count) * 2].as_chunks::<2>();
                for (out, chunk) in out.iter_mut().zip(chunks) {
                    // bf16 is the upper half of an f32. half's own conversion also quiets NaNs,
                    // which doubles the time of this loop.
                    *out = f32::from_bits(u32::from(bf16::from_le_bytes(*chunk).to_bits()) << 16);
                }
            }
            Values::F16(bytes) => {
                let (chunks, _) = bytes[at * 2..(at + count) * 2].as_chunks::<2>();
                for (out, chunk) in out.iter_mut().zip(chunks) {
                    *out = f16::from_le_bytes(*chunk).to_f32();
                }
            }
            Values::Nvfp4 { codes, block_scales, global_scale } => {
                let codes = &codes[at / 2..(at + count) / 2];
                let scales = &block_scales[at / NVFP4_BLOCK..(at + count) / NVFP4_BLOCK];
                let (code_blocks, _) = codes.as_chunks::<{ NVFP4_BLOCK / 2 }>();
                let (out_blocks, _) = out.as_chunks_mut::<NVFP4_BLOCK>();
                for ((codes, out), scale) in code_blocks.iter().zip(out_blocks).zip(scales) {
                    let scale = E4M3[usize::from(*scale)] * global_scale;
                    let (pairs, _) = out.as_chunks_mut::<2>();
                    for (code, pair) in codes.iter().zip(pairs) {
                        let [low, high] = E2M1_PAIRS[usize::from(*code)];
                        *pair = [low * scale, high * scale];
                    }
                }
            }
            Values::Fp8Block { codes, block_scales } => {
                let blocks_per_row = self.stride.div_ceil(FP8_BLOCK);
                for (i, (out, code)) in out.iter_mut().zip(&codes[at..at + count]).enumerate() {
                    let (row, column) = ((at + i) / self.stride, (at + i) % self.stride);
                    let block = row / FP8_BLOCK * blocks_per_row + column / FP8_BLOCK;
                    *out = E4M3[usize::from(*code)] * read_f32(block_scales, block);
                }
            }
            Values::Fp8Rows { codes, row_scales } => {
                let first = (self.stride - at % self.stride).min(count);
                let (head, rest) = out[..count].split_at_mut(first);
                let mut codes = codes[at..at + count].iter();
                let rows = std::iter::once(head).chain(rest.chunks_mut(self.stride));
                for (row, out) in (at / self.stride..).zip(rows) {
                    let scale = read_f32(row_scales, row);
                    for (out, code) in out.iter_mut().zip(&mut codes) {
                        *out = E4M3[usize::from(*code)] * scale;
                    }
                }
            }
        }
    }

    /// How the values are stored.
    pub fn format(&self) -> StoredFormat {
        match self.values {
            Values::F32(_) => StoredFormat::F32,
            Values::Bf16(_) => StoredFormat::Bf16,
            Values::F16(_) => StoredFormat::F16,
            Values::Nvfp4 { .. } => StoredFormat::Nvfp4,
            Values::Fp8Block { .. } => StoredFormat::Fp8Block,
            Values::Fp8Rows { .. } => StoredFormat::Fp8Rows,
        }
    }

    /// The scale of the whole tensor; 1 where the format has none.
    pub fn global_scale(&self) -> f32 {
        match self.values {
            Values::Nvfp4 { global_scale, .. } => global_scale,
            _ => 1.0,
        }
    }

    /// Copies `rows` as they are stored into `out`: their codes, one row behind the other. The
    /// columns of an NVFP4 matrix are a multiple of 16.
    pub fn copy_codes(&self, rows: Range<usize>, out: &mut [u8]) {
        let (bytes, bits) = match &self.values {
            Values::F32(bytes) => (bytes, 32),
            Values::Bf16(bytes) | Values::F16(bytes) => (bytes, 16),
            Values::Nvfp4 { codes, .. } => (codes, 4),
            Values::Fp8Block { codes, .. } | Values::Fp8Rows { codes, .. } => (codes, 8),
        };
        self.copy_rows(bytes, rows, |values| values * bits / 8, out);
    }

    /// As [`Matrix::copy_codes`], the E4M3 scales of an NVFP4 matrix; nothing in other formats.
    pub fn copy_block_scales(&self, rows: Range<usize>, out: &mut [u8]) {
        if let Values::Nvfp4 { block_scales, .. } = &self.values {
            self.copy_rows(block_scales, rows, |values| values / NVFP4_BLOCK, out);
        }
    }

    /// Copies what `bytes_of` many values take of each row.
    fn copy_rows(
        &self,
        bytes: &Bytes,
        rows: Range<usize>,
        bytes_of: impl Fn(usize) -> usize,
        out: &mut [u8],
    ) {
        let width = bytes_of(self.columns());
        let first = self.rows.start + rows.start;
        let start = |row: usize| bytes_of((first + row) * self.stride + self.columns.start);
        if self.columns() == self.stride {
            let whole = rows.len() * width;
            return out[..whole].copy_from_slice(&bytes[start(0)..start(0) + whole]);
        }
        for (row, out) in (0..rows.len()).zip(out.chunks_exact_mut(width)) {
            out.copy_from_slice(&bytes[start(row)..start(row) + width]);
        }
    }

    /// The scale of an FP8 matrix at a row and a column; 1 in other formats.
    pub fn fp8_scale(&self, row: usize, column: usize) -> f32 {
        let Values::Fp8Block { block_scales, .. } = &self.values else {
            return 1.0;
        };
        let (row, column) = (self.rows.start + row, self.columns.start + column);
        let blocks_per_row = self.stride.div_ceil(FP8_BLOCK);
        read_f32(block_scales, row / FP8_BLOCK * blocks_per_row + column / FP8_BLOCK)
    }

    /// The scale of a row of a matrix that has one for each; 1 in other formats.
    pub fn row_scale(&self, row: usize) -> f32 {
        match &self.values {
            Values::Fp8Rows { row_scales, .. } => read_f32(row_scales, self.rows.start + row),
            _ => 1.0,
        }
    }

    /// Whether a block of FP8 scales begins at the first row and at the first column.
    pub fn begins_fp8_block(&self) -> bool {
        self.rows.start.is_multiple_of(FP8_BLOCK) && self.columns.start.is_multiple_of(FP8_BLOCK)
    }

    /// All values, row by row.
    pub fn to_vec(&self) -> Vec<f32> {
        let mut values = vec![0.0; self.rows() * self.columns()];
        self.decode(0..self.rows(), &mut values);
        values
    }
}

/// Whether `ranks` can share a stored module: a cut along the columns may not go through a block of
/// NVFP4. (FP8 blocks are found by their place in the whole matrix.)
pub(super) fn check_share(
    name: &str,
    format: &str,
    axis: Axis,
    shape: &[usize],
    ranks: usize,
) -> Result<()> {
    let columns = shape.last().copied().unwrap_or(0);
    let nvfp4 = matches!(format, "nvfp4" | "nvfp4-packed");
    if axis == Axis::Rows || !nvfp4 || (columns / ranks).is_multiple_of(NVFP4_BLOCK) {
        return Ok(());
    }
    Err(Error::input(format!(
        "tensor {name}: {columns} columns over {ranks} ranks split a block of {NVFP4_BLOCK} that \
         shares a scale; use a smaller --tp"
    )))
}

/// The value of an E4M3 byte.
pub fn decode_e4m3(code: u8) -> f32 {
    E4M3[usize::from(code)]
}

fn read_f32(bytes: &[u8], index: usize) -> f32 {
    bytes
        .get(index * 4..)
        .and_then(|rest| rest.first_chunk::<4>())
        .map_or(f32::NAN, |chunk| f32::from_le_bytes(*chunk))
}

const fn e2m1_pairs() -> [[f32; 2]; 256] {
    let mut pairs = [[0.0; 2]; 256];
    let mut byte = 0;
    while byte < 256 {
        pairs[byte] = [e2m1(byte & 15), e2m1(byte >> 4)];
        byte += 1;
    }
    pairs
}

const fn e2m1(code: usize) -> f32 {
    if code & 8 == 0 { E2M1[code & 7] } else { -E2M1[code & 7] }
}

const fn e4m3_values() -> [f32; 256] {
    let mut values = [0.0; 256];
    let mut code = 0;
    while code < 256 {
        let exponent = (code >> 3) & 15;
        let mantissa = code & 7;
        let magnitude = if exponent == 15 && mantissa == 7 {
            f32::NAN
        } else if exponent == 0 {
            // Subnormal: steps of 2^-9.
            mantissa as f32 / 512.0
        } else {
            // 2^(exponent - 7) by its bits: the f32 exponent has bias 127.
            (1.0 + mantissa as f32 / 8.0) * f32::from_bits((exponent as u32 + 120) << 23)
        };
        values[code] = if code & 128 == 0 { magnitude } else { -magnitude };
        code += 1;
    }
    values
}
