//! Every stored value of the number formats, as the kernels decode it and as the CPU backend does.

use super::compare::{Judgement, values_differ};
use super::random::Random;
use super::{StageCheck, Target};
use crate::error::Result;
use crate::weights::{Matrix, StoredFormat};

/// Columns of a group that shares a scale in NVFP4, and in a block of FP8.
const GROUP: usize = 16;
const BLOCK: usize = 128;
/// Codes of an E4M3 byte that are no number, and where the negative ones begin.
const NAN: [u8; 2] = [0x7F, 0xFF];
const NEGATIVE: u8 = 0x80;
/// Exponents of BF16 values that f16 holds exactly, times 64: from the last bit of 2^-23, which is
/// that of the smallest f16, to 1020, the last below 1024.
const BF16_EXPONENTS: std::ops::RangeInclusive<i32> = -23..=9;

fn finite(code: &u8) -> bool {
    !NAN.contains(code)
}

/// Checks each format.
///
/// # Errors
/// If the device fails.
pub fn check_formats(target: &dyn Target) -> Result<Vec<StageCheck>> {
    let not_negative: Vec<u8> = (0..NEGATIVE).filter(finite).collect();
    let negative: Vec<u8> = (NEGATIVE..=255).filter(finite).collect();
    // No exporter writes negative scales. They are apart because a wrong one may be a NaN, which
    // every product of its row then is.
    let matrices = [
        ("formats nvfp4", nvfp4(&not_negative)?),
        ("formats nvfp4, scales < 0", nvfp4(&negative)?),
        ("formats fp8", fp8()?),
        ("formats fp8, rows", fp8_rows()?),
        ("formats bf16", bf16()?),
    ];
    let mut checks = Vec::new();
    for (stage, matrix) in matrices {
        let found = target.decode(&matrix)?;
        let judged = exactly(&found, &matrix);
        let mut check = StageCheck { stage: stage.into(), rows: 1, ..StageCheck::default() };
        check.add(judged);
        checks.push(check);
    }
    Ok(checks)
}

fn exactly(found: &[f32], matrix: &Matrix) -> Judgement {
    let wanted: Vec<Vec<f32>> =
        matrix.to_vec().chunks_exact(matrix.columns()).map(<[f32]>::to_vec).collect();
    values_differ(found, &wanted, 0.0)
}

/// All 16 codes under each of `scales`, each code at every place of a group.
fn nvfp4(scales: &[u8]) -> Result<Matrix> {
    let groups_of_row = 64;
    // One group for each turn of the codes under each scale, to whole tiles of rows.
    let rows = (scales.len() * GROUP).div_ceil(groups_of_row).next_multiple_of(16);
    let (mut codes, mut block_scales) = (Vec::new(), Vec::new());
    for group in 0..rows * groups_of_row {
        let (turn, scale) = (group / scales.len(), group % scales.len());
        block_scales.push(scales[scale]);
        let code = |place: usize| ((place + turn) % GROUP) as u8;
        codes.extend((0..GROUP / 2).map(|pair| code(2 * pair) | code(2 * pair + 1) << 4));
    }
    let shape = (rows, groups_of_row * GROUP);
    Matrix::from_bytes(StoredFormat::Nvfp4, shape, codes, block_scales)
}

/// All finite codes in every column of a block, under scales of random mantissas.
fn fp8() -> Result<Matrix> {
    let codes: Vec<u8> = (0..=255).filter(finite).collect();
    let (rows, columns) = (2 * BLOCK, 2 * BLOCK);
    let code = |i: usize| codes[(i / columns + i % columns) % codes.len()];
    let mut random = Random::new(8);
    let scales = (0..4).flat_map(|_| (random.uniform() * 0.01).to_le_bytes()).collect();
    let codes = (0..rows * columns).map(code).collect();
    Matrix::from_bytes(StoredFormat::Fp8Block, (rows, columns), codes, scales)
}

/// All finite codes in every column of a unit, under a scale of random mantissa for each row.
fn fp8_rows() -> Result<Matrix> {
    let codes: Vec<u8> = (0..=255).filter(finite).collect();
    let (rows, columns) = (codes.len(), 2 * BLOCK);
    let mut random = Random::new(9);
    let scales = (0..rows).flat_map(|_| (random.uniform() * 0.01).to_le_bytes()).collect();
    let code = |i: usize| codes[(i / columns + i % columns) % codes.len()];
    let codes = (0..rows * columns).map(code).collect();
    Matrix::from_bytes(StoredFormat::Fp8Rows, (rows, columns), codes, scales)
}

/// All BF16 values that the device's f16 holds, with both zeros.
fn bf16() -> Result<Matrix> {
    let exponents = BF16_EXPONENTS.map(|exponent| (exponent + 127) as u16);
    let magnitudes = exponents.flat_map(|exponent| (0..128).map(move |m| exponent << 7 | m));
    let mut values: Vec<u16> =
        [0].into_iter().chain(magnitudes).flat_map(|bits| [bits, bits | 0x8000]).collect();
    let columns = 192;
    let rows = values.len().div_ceil(columns);
    values.resize(rows * columns, 0);
    let codes = values.iter().flat_map(|bits| bits.to_le_bytes()).collect();
    Matrix::from_bytes(StoredFormat::Bf16, (rows, columns), codes, Vec::new())
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;
    use crate::weights::decode_e4m3;

    fn bits(matrix: &Matrix) -> HashSet<u32> {
        matrix.to_vec().into_iter().map(f32::to_bits).collect()
    }

    #[test]
    fn every_code_is_under_every_scale() {
        let scales: Vec<u8> = (0..=255).filter(finite).collect();
        assert_eq!(scales.len(), 254);
        for scales in scales.chunks(127) {
            let found = bits(&nvfp4(scales).unwrap());
            for scale in scales {
                for magnitude in [0.0f32, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0] {
                    for code in [magnitude, -magnitude] {
                        let value = code * decode_e4m3(*scale);
                        assert!(found.contains(&value.to_bits()), "{code} under {scale:#x}");
                    }
                }
            }
        }
    }

    #[test]
    fn every_fp8_code_is_there() {
        let matrix = fp8().unwrap();
        let scale = matrix.fp8_scale(0, 0);
        let found = bits(&matrix);
        for code in (0..=255).filter(finite) {
            assert!(found.contains(&(decode_e4m3(code) * scale).to_bits()), "{code:#x}");
        }
    }

    #[test]
    fn bf16_values_are_those_that_f16_holds() {
        let matrix = bf16().unwrap();
        assert_eq!(bits(&matrix).len(), 33 * 128 * 2 + 2);
        for value in matrix.to_vec() {
            let stored = half::f16::from_f32(value * 64.0);
            assert_eq!(stored.to_f32() / 64.0, value);
        }
    }
}
