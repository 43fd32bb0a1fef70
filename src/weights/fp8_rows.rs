//! Matrices stored in 16 or 32 bits, rounded to E4M3 with a scale for each row: half of the bytes
//! to read in a step. Activations are not rounded.

use std::ops::Range;

use super::formats::{Matrix, StoredFormat};
use crate::error::{Error, Result};

/// The largest E4M3 value.
const LARGEST: f32 = 448.0;
/// E4M3's smallest normal exponent, below which steps no longer shrink.
const SMALLEST_EXPONENT: i32 = -6;
/// Bits of its fraction.
const FRACTION: i32 = 3;
/// Rows that a thread takes at a time.
const ROWS_AT_A_TIME: usize = 64;

/// The matrix with E4M3 codes and a scale for each of its rows; a matrix that is stored in 8 bits or
/// less is returned as it is. Scales are powers of two: of a row's values, as many fall on codes
/// with a full fraction as with any scale, and their product with a code is exact in every float.
///
/// A rank's share has scales of its own rows, so ranks round a matrix that is cut along its columns
/// a little differently than one rank does.
///
/// # Errors
/// Input error that names `name` if a value is not finite.
pub fn to_fp8_rows(name: &str, matrix: Matrix) -> Result<Matrix> {
    if matches!(
        matrix.format(),
        StoredFormat::Nvfp4 | StoredFormat::Fp8Block | StoredFormat::Fp8Rows
    ) {
        return Ok(matrix);
    }
    let (rows, columns) = (matrix.rows(), matrix.columns());
    let mut codes = vec![0; rows * columns];
    let mut scales = vec![0.0; rows];
    let threads = std::thread::available_parallelism().map_or(1, |count| count.get());
    let each = rows.div_ceil(threads).max(ROWS_AT_A_TIME);
    let parts = codes.chunks_mut(each * columns).zip(scales.chunks_mut(each)).enumerate();
    let finite = std::thread::scope(|scope| {
        let tasks: Vec<_> = parts
            .map(|(part, (codes, scales))| {
                let matrix = &matrix;
                let first = part * each;
                scope.spawn(move || round_rows(matrix, first..first + scales.len(), codes, scales))
            })
            .collect();
        tasks.into_iter().all(|task| task.join().unwrap_or(false))
    });
    if !finite {
        return Err(Error::input(format!(
            "tensor {name}: a value is not finite, so --dense-weights fp8 has no scale for it; \
             talon verify finds damage"
        )));
    }
    let scales = scales.iter().flat_map(|scale| scale.to_le_bytes()).collect();
    Matrix::from_bytes(StoredFormat::Fp8Rows, (rows, columns), codes, scales)
}

/// Writes the codes and scales of `rows`; false if a value is not finite.
fn round_rows(matrix: &Matrix, rows: Range<usize>, codes: &mut [u8], scales: &mut [f32]) -> bool {
    let columns = matrix.columns();
    let mut values = vec![0.0; ROWS_AT_A_TIME * columns];
    for (part, (codes, scales)) in
        codes.chunks_mut(values.len()).zip(scales.chunks_mut(ROWS_AT_A_TIME)).enumerate()
    {
        let first = rows.start + part * ROWS_AT_A_TIME;
        let values = &mut values[..codes.len()];
        matrix.decode(first..first + scales.len(), values);
        let rows = values.chunks(columns).zip(codes.chunks_mut(columns)).zip(scales);
        for ((values, codes), scale) in rows {
            // Not a maximum, which would pass over NaN.
            if !values.iter().all(|value| value.is_finite()) {
                return false;
            }
            *scale = scale_of(values.iter().fold(0.0, |largest, value| value.abs().max(largest)));
            let inverse = scale.recip();
            for (value, code) in values.iter().zip(codes) {
                *code = encode_e4m3(value * inverse);
            }
        }
    }
    true
}

/// The smallest power of two, times which E4M3 reaches `largest`; and its inverse is finite.
fn scale_of(largest: f32) -> f32 {
    let mut exponent = exponent_of((largest / LARGEST).max(2.0_f32.powi(-100)));
    if 2.0_f32.powi(exponent) * LARGEST < largest {
        exponent += 1;
    }
    2.0_f32.powi(exponent)
}

/// e of 2^e <= value < 2^(e + 1), for a normal positive value.
fn exponent_of(value: f32) -> i32 {
    (value.to_bits() >> 23) as i32 - 127
}

/// The nearest E4M3 code, of two equally near ones the even one; values beyond the largest take it.
pub fn encode_e4m3(value: f32) -> u8 {
    let sign = if value.is_sign_negative() { 0x80 } else { 0 };
    let magnitude = value.abs().min(LARGEST);
    let exponent = if magnitude.is_normal() { exponent_of(magnitude) } else { SMALLEST_EXPONENT };
    let exponent = exponent.max(SMALLEST_EXPONENT);
    // Steps of 2^(exponent - 3); 8 to 16 of them where the value is normal, fewer below.
    let steps = (magnitude * 2.0_f32.powi(FRACTION - exponent)).round_ties_even() as i32;
    // A carry into the exponent is the next code; steps of the smallest exponent count from 0.
    let code = (exponent - SMALLEST_EXPONENT) * 8 + steps;
    sign | code as u8
}

#[cfg(test)]
mod tests {
    use super::super::formats::decode_e4m3;
    use super::*;

    #[test]
    fn every_code_is_its_own_nearest() {
        for code in 0..=255u8 {
            let value = decode_e4m3(code);
            if value.is_finite() {
                assert_eq!(encode_e4m3(value), code, "{value}");
            }
        }
    }

    #[test]
    fn a_value_takes_the_nearest_code() {
        let finite: Vec<f32> =
            (0..=0x7E).map(decode_e4m3).filter(|value| value.is_finite()).collect();
        for pair in finite.windows(2) {
            let [low, high] = [pair[0], pair[1]];
            let middle = f32::midpoint(low, high);
            let gap = high - low;
            assert_eq!(decode_e4m3(encode_e4m3(middle - gap / 64.0)), low);
            assert_eq!(decode_e4m3(encode_e4m3(middle + gap / 64.0)), high);
            assert_eq!(encode_e4m3(middle) % 2, 0, "{middle} is as near to both");
            assert_eq!(encode_e4m3(-middle), encode_e4m3(middle) | 0x80);
        }
        assert_eq!(decode_e4m3(encode_e4m3(1e30)), LARGEST);
    }

    #[test]
    fn scales_are_the_smallest_powers_of_two_that_reach() {
        assert_eq!(scale_of(448.0), 1.0);
        assert_eq!(scale_of(449.0), 2.0);
        assert_eq!(scale_of(224.0), 0.5);
        assert!(scale_of(0.0).recip().is_finite());
        assert!(scale_of(f32::MAX) * LARGEST >= f32::MAX);
    }

    #[test]
    fn a_matrix_is_near_what_it_was_and_a_share_has_its_own_scales() {
        let values: Vec<f32> = (0..200 * 32)
            .map(|i| ((i * 7919 % 1000) as f32 / 500.0 - 1.0) * 2.0_f32.powi(-(i / 320)))
            .collect();
        let bytes = values.iter().flat_map(|value| value.to_le_bytes()).collect();
        let matrix = Matrix::from_bytes(StoredFormat::F32, (200, 32), bytes, Vec::new()).unwrap();
        let rounded = to_fp8_rows("w", matrix).unwrap();
        assert_eq!(rounded.format(), StoredFormat::Fp8Rows);
        for (row, (ours, values)) in rounded.to_vec().chunks(32).zip(values.chunks(32)).enumerate()
        {
            let largest = values.iter().fold(0.0_f32, |largest, value| largest.max(value.abs()));
            for (ours, value) in ours.iter().zip(values) {
                // Half a step: 2^-4 of the value, or of the smallest normal one.
                let bound = (value.abs() / 16.0).max(largest * 2.0_f32.powi(-18));
                assert!((ours - value).abs() <= bound, "row {row}: {ours} for {value}");
            }
        }
        let part = rounded.row_range(100..110);
        assert_eq!(part.to_vec(), rounded.to_vec()[100 * 32..110 * 32]);
        assert_eq!(part.row_scale(3), rounded.row_scale(103));
    }

    #[test]
    fn what_is_not_finite_is_refused_by_name() {
        for bad in [f32::NAN, f32::INFINITY] {
            let bytes = [1.0, bad].iter().flat_map(|value: &f32| value.to_le_bytes()).collect();
            let matrix = Matrix::from_bytes(StoredFormat::F32, (1, 2), bytes, Vec::new()).unwrap();
            let error = to_fp8_rows("w.weight", matrix).err().expect("it was taken").to_string();
            assert!(error.contains("w.weight"), "{error}");
        }
    }
}
