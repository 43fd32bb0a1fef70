//! Copies stored rows to the device and repacks them there (kernels/repack.cu).

use std::ops::Range;
use std::sync::Arc;

use super::kernel_set::require;
use super::layout::{DeviceMatrix, F16_FACTOR, Format, Stored, TILE, UNIT};
use super::places::Piece;
use super::{Arg, Device, DeviceMemory, Event, Kernel, Launch, Module, Pinned, Stream};
use crate::error::{Error, Result};

/// Buffers that are filled in turn while others are under way, and their size.
const BUFFERS: usize = 4;
pub const BUFFER_BYTES: usize = 16 << 20;
/// Memory that loading takes besides what it loads.
pub const STAGING_BYTES: usize = BUFFERS * BUFFER_BYTES;
/// Parts of a buffer begin at multiples of this.
const ALIGNMENT: usize = 64;
const THREADS: u32 = 256;

/// Copies and repacks.
pub struct Uploader {
    stream: Stream,
    repack_codes: Kernel,
    repack_scales: Kernel,
    /// Stored rows on the device, a part for each buffer.
    staged: DeviceMemory,
    /// A buffer, and when the device is done with it.
    buffers: Vec<(Pinned, Event)>,
    turn: usize,
    /// A word that is set when a weight is too large for f16.
    overflow: DeviceMemory,
}

impl Uploader {
    /// # Errors
    /// If the staging buffers cannot be had.
    pub fn new(device: &Arc<Device>) -> Result<Self> {
        let module = Arc::new(Module::load(device, "repack", require("repack")?)?);
        let stream = Stream::new(device)?;
        let overflow = DeviceMemory::alloc(device, 4)?;
        stream.fill(overflow.address(), 0, 4)?;
        let buffer = |_| Ok((Pinned::alloc(device, BUFFER_BYTES)?, Event::new(device)?));
        Ok(Self {
            stream,
            repack_codes: module.kernel("repack_codes")?,
            repack_scales: module.kernel("repack_scales")?,
            staged: DeviceMemory::alloc(device, STAGING_BYTES)?,
            buffers: (0..BUFFERS).map(buffer).collect::<Result<_>>()?,
            turn: 0,
            overflow,
        })
    }

    /// Waits until all is on the device.
    ///
    /// # Errors
    /// Runtime error if a copy failed; input error if a weight is too large.
    pub fn finish(self) -> Result<()> {
        let mut overflow = [0; 4];
        self.stream.download(self.overflow.address(), &mut overflow)?;
        if overflow == [0; 4] {
            return Ok(());
        }
        Err(Error::input(format!(
            "a BF16 weight is not a number or beyond {}, the largest that the CUDA backend's f16 \
             holds; talon verify finds damage, --backend cpu takes any value",
            65504.0 / F16_FACTOR
        )))
    }

    /// A buffer that the device is done with.
    fn next(&mut self) -> Result<usize> {
        self.turn = (self.turn + 1) % BUFFERS;
        self.buffers[self.turn].1.synchronize()?;
        Ok(self.turn)
    }

    /// Writes `count` bytes to `to`; `fill` is asked for a range of them at a time.
    ///
    /// # Errors
    /// Whatever `fill` returns, or a runtime error if a copy failed.
    pub fn bytes(
        &mut self,
        to: u64,
        count: usize,
        mut fill: impl FnMut(Range<usize>, &mut [u8]) -> Result<()>,
    ) -> Result<()> {
        for start in (0..count).step_by(BUFFER_BYTES) {
            let range = start..(start + BUFFER_BYTES).min(count);
            let turn = self.next()?;
            let (buffer, done) = &mut self.buffers[turn];
            fill(range.clone(), &mut buffer.as_mut_slice()[..range.len()])?;
            self.stream.copy_to_device(to + start as u64, buffer, 0..range.len())?;
            done.record(&self.stream)?;
        }
        Ok(())
    }

    /// Writes the `index`-th of the matrices that lie one behind the other at `placed`.
    ///
    /// # Errors
    /// Input error if the device cannot take its format or shape.
    pub fn matrix(&mut self, piece: &Piece, placed: &DeviceMatrix, index: usize) -> Result<()> {
        let (tiles, units) = (placed.tiles(), placed.units());
        let rows_of_tile = TILE / piece.parts.len();
        let bits = match piece.format {
            Format::F16 => 16,
            Format::Fp8 | Format::Fp8Rows => 8,
            Format::Nvfp4 => 4,
        };
        if !piece.columns.is_multiple_of(if piece.format == Format::Nvfp4 { 16 } else { 8 }) {
            return Err(Error::input(format!(
                "a matrix of {} columns: the CUDA kernels need a multiple of 8, in NVFP4 of 16; \
                 use --backend cpu",
                piece.columns
            )));
        }
        let code_row = piece.columns * bits / 8;
        let scale_row = if piece.format == Format::Nvfp4 { piece.columns / 16 } else { 0 };
        let tile_bytes = TILE * (code_row + scale_row) + 4 * ALIGNMENT;
        let at_a_time = BUFFER_BYTES / tile_bytes;
        if at_a_time == 0 {
            return Err(Error::input(format!(
                "a matrix of {} columns is wider than the CUDA backend takes; use --backend cpu",
                piece.columns
            )));
        }
        let first_unit = index * tiles * units;
        for first in (0..tiles).step_by(at_a_time) {
            let count = at_a_time.min(tiles - first);
            let turn = self.next()?;
            let staged = self.staged.address() + (turn * BUFFER_BYTES) as u64;
            let (buffer, done) = &mut self.buffers[turn];
            let bytes = buffer.as_mut_slice();
            let mut stored = Stored {
                columns: piece.columns as i32,
                interleaved: i32::from(piece.parts.len() == 2),
                from_bf16: i32::from(piece.parts[0].is_bf16()),
                ..Stored::default()
            };
            let mut used = 0;
            for (part, rows) in piece.parts.iter().enumerate() {
                let begin = (first * rows_of_tile).min(rows.rows());
                let range = begin..((first + count) * rows_of_tile).min(rows.rows());
                stored.rows = range.len() as i32;
                stored.codes[part] = staged + used as u64;
                let codes = range.len() * code_row;
                rows.codes(range.clone(), &mut bytes[used..used + codes])?;
                used = (used + codes).next_multiple_of(ALIGNMENT);
                stored.scales[part] = staged + used as u64;
                let scales = range.len() * scale_row;
                rows.scales(range, &mut bytes[used..used + scales]);
                used = (used + scales).next_multiple_of(ALIGNMENT);
            }
            self.stream.copy_to_device(staged, buffer, 0..used)?;
            let unit = (first_unit + first * units) as u64;
            let codes_to = placed.codes + unit * piece.format.unit_codes() as u64;
            let scales_to = placed.scales + unit * piece.format.unit_scales() as u64;
            let shape = |threads: usize| Launch {
                grid: [(threads.div_ceil(THREADS as usize) as u32).clamp(1, 4096), 1, 1],
                block: THREADS,
                shared_bytes: 0,
                dependent: false,
            };
            let pieces = count * units * piece.format.unit_codes() / 16;
            self.stream.launch(
                &self.repack_codes,
                shape(pieces),
                &[
                    Arg::of(&stored),
                    (codes_as(piece.format) as i32).into(),
                    (count as i32).into(),
                    (units as i32).into(),
                    codes_to.into(),
                    self.overflow.address().into(),
                ],
            )?;
            if piece.format == Format::Nvfp4 {
                self.stream.launch(
                    &self.repack_scales,
                    shape(count * units * piece.format.unit_scales()),
                    &[
                        Arg::of(&stored),
                        (count as i32).into(),
                        (units as i32).into(),
                        scales_to.into(),
                    ],
                )?;
            }
            done.record(&self.stream)?;
        }
        match piece.format {
            Format::Fp8 => self.fp8_scales(piece, placed, first_unit),
            Format::Fp8Rows => self.row_scales(piece, placed, index),
            Format::F16 | Format::Nvfp4 => Ok(()),
        }
    }

    /// A scale for each row, in the order of the tiles' rows.
    fn row_scales(&mut self, piece: &Piece, placed: &DeviceMatrix, index: usize) -> Result<()> {
        let rows_of_tile = TILE / piece.parts.len();
        let rows = placed.tiles() * TILE;
        let scales: Vec<u8> = (0..rows)
            .flat_map(|row| {
                let (tile, within) = (row / TILE, row % TILE);
                let part = piece.parts[within / rows_of_tile];
                // Rows of padding have zeros for codes.
                let row = tile * rows_of_tile + within % rows_of_tile;
                part.row_scale(row.min(part.rows() - 1)).to_ne_bytes()
            })
            .collect();
        let to = placed.scales + (index * rows * size_of::<f32>()) as u64;
        self.bytes(to, scales.len(), |range, out| {
            out.copy_from_slice(&scales[range]);
            Ok(())
        })
    }

    /// Two scales for each unit: of its upper and its lower 8 rows.
    fn fp8_scales(
        &mut self,
        piece: &Piece,
        placed: &DeviceMatrix,
        first_unit: usize,
    ) -> Result<()> {
        if !piece.parts.iter().all(|part| part.begins_fp8_block()) {
            return Err(Error::input(
                "a rank's share of an FP8 matrix splits a block of 128 that shares a scale; use a \
                 smaller --tp, or --backend cpu",
            ));
        }
        let units = placed.units();
        let mut scales = Vec::with_capacity(placed.tiles() * units * 8);
        for (tile, unit) in (0..placed.tiles()).flat_map(|t| (0..units).map(move |u| (t, u))) {
            for half in 0..2 {
                let (part, row) = match piece.parts {
                    [whole] => (*whole, tile * TILE + half * TILE / 2),
                    parts => (parts[half], tile * TILE / 2),
                };
                // Rows of padding have zeros for codes.
                let row = row.min(part.rows() - 1);
                scales.extend(part.fp8_scale(row, unit * UNIT).to_ne_bytes());
            }
        }
        let to = placed.scales + (first_unit * Format::Fp8.unit_scales()) as u64;
        self.bytes(to, scales.len(), |range, out| {
            out.copy_from_slice(&scales[range]);
            Ok(())
        })
    }
}

/// The format whose codes lie in the same order.
fn codes_as(format: Format) -> Format {
    if format == Format::Fp8Rows { Format::Fp8 } else { format }
}
