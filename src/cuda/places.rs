//! Where weights lie on the device: counted first, so that the memory is planned exactly, then
//! filled by the uploader. Both walk the same list, `weights.rs`.

use std::ops::Range;

use half::{bf16, f16};

use super::layout::{ACTIVATION_FACTOR, DeviceMatrix, F16_FACTOR, Format, Globals, TILE};
use super::upload::{BUFFER_BYTES, Uploader};
use crate::error::{Error, Result};
use crate::weights::{Matrix, StoredFormat};

/// Places begin at multiples of this.
const ALIGNMENT: usize = 256;

/// Gives out places one behind the other; writes to them, if it has an uploader.
pub struct Places {
    next: u64,
    uploader: Option<Uploader>,
}

/// A matrix to write: where its rows come from.
pub struct Piece<'a> {
    /// Two for an interleaved matrix, whose tiles have 8 rows of each.
    pub parts: &'a [&'a dyn Rows],
    pub columns: usize,
    pub format: Format,
}

/// Rows of a matrix as the device takes them.
pub trait Rows {
    fn rows(&self) -> usize;
    /// The codes are BF16, which the device turns into its own f16.
    fn is_bf16(&self) -> bool;
    /// Writes the codes of `rows`, without padding.
    fn codes(&self, rows: Range<usize>, out: &mut [u8]) -> Result<()>;
    /// Writes NVFP4's scales of `rows`.
    fn scales(&self, rows: Range<usize>, out: &mut [u8]);
    /// The scale of a row, in the format that has one.
    fn row_scale(&self, row: usize) -> f32;
    /// FP8's scale at a row and a column.
    fn fp8_scale(&self, row: usize, column: usize) -> f32;
    /// Whether FP8's blocks begin at the first row and column.
    fn begins_fp8_block(&self) -> bool;
}

impl Rows for Matrix {
    fn rows(&self) -> usize {
        Matrix::rows(self)
    }

    fn is_bf16(&self) -> bool {
        self.format() == StoredFormat::Bf16
    }

    fn codes(&self, rows: Range<usize>, out: &mut [u8]) -> Result<()> {
        match self.format() {
            StoredFormat::F32 | StoredFormat::F16 => {
                let mut values = vec![0.0; rows.len() * self.columns()];
                self.decode(rows, &mut values);
                to_f16(&values, out, true)
            }
            _ => {
                self.copy_codes(rows, out);
                Ok(())
            }
        }
    }

    fn scales(&self, rows: Range<usize>, out: &mut [u8]) {
        self.copy_block_scales(rows, out);
    }

    fn row_scale(&self, row: usize) -> f32 {
        Matrix::row_scale(self, row)
    }

    fn fp8_scale(&self, row: usize, column: usize) -> f32 {
        Matrix::fp8_scale(self, row, column)
    }

    fn begins_fp8_block(&self) -> bool {
        Matrix::begins_fp8_block(self)
    }
}

/// f32 values that become f16.
struct Floats {
    values: Vec<f32>,
    columns: usize,
}

impl Rows for Floats {
    fn rows(&self) -> usize {
        self.values.len() / self.columns
    }

    fn is_bf16(&self) -> bool {
        false
    }

    fn codes(&self, rows: Range<usize>, out: &mut [u8]) -> Result<()> {
        to_f16(&self.values[rows.start * self.columns..rows.end * self.columns], out, false)
    }

    fn scales(&self, _rows: Range<usize>, _out: &mut [u8]) {}

    fn row_scale(&self, _row: usize) -> f32 {
        1.0
    }

    fn fp8_scale(&self, _row: usize, _column: usize) -> f32 {
        1.0
    }

    fn begins_fp8_block(&self) -> bool {
        true
    }
}

/// Rows of a table as BF16.
fn table_rows(matrix: &Matrix, rows: Range<usize>, out: &mut [u8]) -> Result<()> {
    if matrix.format() == StoredFormat::Bf16 {
        matrix.copy_codes(rows, out);
        return Ok(());
    }
    let mut values = vec![0.0; rows.len() * matrix.columns()];
    matrix.decode(rows, &mut values);
    for (value, out) in values.iter().zip(out.as_chunks_mut::<2>().0) {
        *out = bf16::from_f32(*value).to_le_bytes();
    }
    Ok(())
}

/// Writes values as the device's f16; refuses those that are none, if `exact`.
fn to_f16(values: &[f32], out: &mut [u8], exact: bool) -> Result<()> {
    for (value, out) in values.iter().zip(out.as_chunks_mut::<2>().0) {
        let rounded = f16::from_f32(*value * F16_FACTOR);
        if !rounded.is_finite() || (exact && rounded.to_f32() != *value * F16_FACTOR) {
            return Err(Error::input(format!(
                "a matrix holds {value}, which the CUDA backend's f16 cannot; use --backend cpu"
            )));
        }
        *out = rounded.to_le_bytes();
    }
    Ok(())
}

impl Places {
    /// Counts only.
    pub fn counting() -> Self {
        Self { next: 0, uploader: None }
    }

    /// Gives out places from `base` on and fills them.
    pub fn filling(base: u64, uploader: Uploader) -> Self {
        Self { next: base, uploader: Some(uploader) }
    }

    /// The next place, `bytes` long.
    pub fn take(&mut self, bytes: usize) -> u64 {
        let place = self.next;
        self.next += bytes.next_multiple_of(ALIGNMENT) as u64;
        place
    }

    /// Bytes given out, if it began at 0.
    pub fn used(&self) -> usize {
        self.next as usize
    }

    /// Waits until all is on the device.
    ///
    /// # Errors
    /// Runtime error if a copy failed.
    pub fn finish(self) -> Result<()> {
        self.uploader.map_or(Ok(()), |uploader| uploader.finish())
    }

    /// f32 values.
    pub fn floats(&mut self, values: &[f32]) -> Result<u64> {
        let place = self.take(size_of_val(values));
        if let Some(uploader) = &mut self.uploader {
            let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_ne_bytes()).collect();
            uploader.bytes(place, bytes.len(), |range, out| {
                out.copy_from_slice(&bytes[range]);
                Ok(())
            })?;
        }
        Ok(place)
    }

    /// Ids, as 32-bit integers.
    pub fn ids(&mut self, ids: &[u32]) -> Result<u64> {
        let bits: Vec<f32> = ids.iter().map(|id| f32::from_bits(*id)).collect();
        self.floats(&bits)
    }

    /// A table as BF16, row by row: a table to look up in.
    pub fn table(&mut self, matrix: &Matrix) -> Result<u64> {
        let row = matrix.columns() * 2;
        let place = self.take(matrix.rows() * row);
        if let Some(uploader) = &mut self.uploader {
            let rows_at_a_time = (BUFFER_BYTES / row).max(1);
            for first in (0..matrix.rows()).step_by(rows_at_a_time) {
                let rows = first..(first + rows_at_a_time).min(matrix.rows());
                let at = place + (first * row) as u64;
                let bytes = rows.len() * row;
                uploader.bytes(at, bytes, |_, out| table_rows(matrix, rows.clone(), out))?;
            }
        }
        Ok(place)
    }

    /// A matrix of a layer.
    pub fn matrix(&mut self, matrix: &Matrix) -> Result<DeviceMatrix> {
        let format = Format::of(matrix.format());
        let mut placed = self.place(matrix.rows(), matrix.columns(), format, 1);
        placed.global = matrix.global_scale();
        let piece = Piece { parts: &[matrix], columns: matrix.columns(), format };
        self.fill(&piece, &placed, 0)?;
        Ok(placed)
    }

    /// Gate and up as one matrix.
    pub fn gate_up(&mut self, gate: &Matrix, up: &Matrix) -> Result<(DeviceMatrix, Globals)> {
        let (mut placed, gates, ups) = self.gate_ups(&[(gate, up)])?;
        placed.global = 1.0;
        Ok((placed, Globals { gate: gates[0], up: ups[0] }))
    }

    /// Gates and ups of experts, one behind the other, and their scales.
    pub fn gate_ups(
        &mut self,
        experts: &[(&Matrix, &Matrix)],
    ) -> Result<(DeviceMatrix, Vec<f32>, Vec<f32>)> {
        let (first, _) = experts[0];
        let format = Format::of(first.format());
        let rows = first.rows().next_multiple_of(TILE / 2) * 2;
        let placed = self.place(rows, first.columns(), format, experts.len());
        for (index, (gate, up)) in experts.iter().enumerate() {
            check_alike(first, gate)?;
            check_alike(first, up)?;
            let piece = Piece { parts: &[*gate, *up], columns: first.columns(), format };
            self.fill(&piece, &placed, index)?;
        }
        let gates = experts.iter().map(|(gate, _)| gate.global_scale()).collect();
        let ups = experts.iter().map(|(_, up)| up.global_scale()).collect();
        Ok((placed, gates, ups))
    }

    /// A down projection, whose input is scaled (see [`ACTIVATION_FACTOR`]).
    pub fn down(&mut self, matrix: &Matrix) -> Result<DeviceMatrix> {
        let mut placed = self.matrix(matrix)?;
        placed.global *= ACTIVATION_FACTOR;
        Ok(placed)
    }

    /// Down projections of experts, one behind the other, and their scales.
    pub fn downs(&mut self, experts: &[&Matrix]) -> Result<(DeviceMatrix, Vec<f32>)> {
        let first = experts[0];
        let format = Format::of(first.format());
        let placed = self.place(first.rows(), first.columns(), format, experts.len());
        for (index, down) in experts.iter().enumerate() {
            check_alike(first, down)?;
            let piece = Piece { parts: &[*down], columns: first.columns(), format };
            self.fill(&piece, &placed, index)?;
        }
        let globals = experts.iter().map(|down| down.global_scale() * ACTIVATION_FACTOR);
        Ok((placed, globals.collect()))
    }

    /// Matrices of heads, one behind the other, each `[rows, columns]` and padded to whole tiles.
    /// `values` gives those of a head; they become f16.
    pub fn heads(
        &mut self,
        (heads, rows, columns): (usize, usize, usize),
        values: impl Fn(usize) -> Vec<f32>,
    ) -> Result<DeviceMatrix> {
        let padded = rows.next_multiple_of(TILE);
        let mut placed = self.place(padded, columns, Format::F16, heads);
        if self.uploader.is_some() {
            for head in 0..heads {
                let rows = Floats { values: values(head), columns };
                let piece = Piece { parts: &[&rows], columns, format: Format::F16 };
                self.fill(&piece, &placed, head)?;
            }
        }
        placed.rows = (padded * heads) as i32;
        placed.global = 1.0;
        Ok(placed)
    }

    /// Room for `count` matrices.
    fn place(&mut self, rows: usize, columns: usize, format: Format, count: usize) -> DeviceMatrix {
        let rows = rows.next_multiple_of(TILE);
        let mut placed = DeviceMatrix {
            codes: 0,
            scales: 0,
            global: 1.0,
            rows: rows as i32,
            columns: columns as i32,
            format: format as i32,
        };
        let units = placed.tiles() * placed.units() * count;
        placed.codes = self.take(units * format.unit_codes());
        placed.scales = self.take(match format {
            Format::Fp8Rows => rows * count * size_of::<f32>(),
            _ => units * format.unit_scales(),
        });
        placed
    }

    fn fill(&mut self, piece: &Piece, placed: &DeviceMatrix, index: usize) -> Result<()> {
        match &mut self.uploader {
            Some(uploader) => uploader.matrix(piece, placed, index),
            None => Ok(()),
        }
    }
}

/// Experts of a layer are read with one format and size.
fn check_alike(first: &Matrix, other: &Matrix) -> Result<()> {
    let of = |m: &Matrix| (m.format(), m.rows(), m.columns());
    if of(first) == of(other) {
        return Ok(());
    }
    Err(Error::input(format!(
        "the experts of a layer differ: {:?} and {:?} (format, rows, columns); the CUDA kernels \
         need them alike: use --backend cpu",
        of(first),
        of(other)
    )))
}
