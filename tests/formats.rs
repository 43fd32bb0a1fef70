//! Promise: every stored number decodes to exactly the value that its format defines, and the ranks'
//! slices together are the whole matrix.

mod common;

use std::path::Path;

use common::join_shard;
use half::bf16;
use serde_json::{Map, json};
use talon::weights::{
    Axis, Checkpoint, Manifest, Matrix, Module, Resolved, Role, Slice, Source, decode_e4m3,
};

const WHOLE: Slice = Slice { index: 0, of: 1 };
const NAME: &str = "m.weight";

/// What a test stores: tensor, dtype, shape, bytes.
type Part<'a> = (&'a str, &'a str, Vec<usize>, Vec<u8>);

/// A stored module, read back from a file.
struct Stored {
    checkpoint: Checkpoint,
    manifest: Manifest,
    resolved: Resolved,
}

impl Stored {
    /// `axis` chooses a manifest entry that ranks share along it.
    fn new(format: &str, axis: Option<Axis>, shape: &[usize], parts: &[Part]) -> Self {
        let directory = tempfile::tempdir().unwrap();
        write(directory.path(), parts);
        let source = Source::Directory(directory.path().to_owned());
        let checkpoint = Checkpoint::open(source, false).unwrap();
        assert_eq!(checkpoint.problems, []);
        let manifest = Manifest::glm5().unwrap();
        let format = manifest.formats.iter().position(|found| found.name == format).unwrap();
        let entry = manifest.entries.iter().position(|entry| {
            entry.shape.len() == 2 && entry.slice.as_ref().map(|rule| rule.axis) == axis
        });
        let module =
            Module { entry: entry.unwrap(), name: NAME.into(), layer: None, shape: shape.to_vec() };
        let parts = manifest.formats[format].parts.iter().filter_map(|part| {
            Some((part.role, checkpoint.tensors.get(&part.tensor_name(NAME))?.clone()))
        });
        let resolved = Resolved { module, format, parts: parts.collect() };
        assert!(resolved.parts.iter().any(|(role, _)| *role == Role::Values));
        Self { checkpoint, manifest, resolved }
    }

    fn try_matrix(&self, rank: Slice) -> talon::error::Result<Matrix> {
        Matrix::new(&self.checkpoint, &self.manifest, &self.resolved, rank)
    }

    fn matrix(&self, rank: Slice) -> Matrix {
        self.try_matrix(rank).unwrap()
    }
}

fn write(directory: &Path, parts: &[Part]) {
    let (mut header, mut data) = (Map::new(), Vec::new());
    for (name, dtype, shape, bytes) in parts {
        let start = data.len();
        data.extend_from_slice(bytes);
        let offsets = [start, data.len()];
        let info = json!({"dtype": dtype, "shape": shape, "data_offsets": offsets});
        header.insert((*name).into(), info);
    }
    std::fs::write(directory.join("model.safetensors"), join_shard(&header, &data)).unwrap();
}

/// The definition: sign, four bits of exponent with bias 7, three of mantissa, no infinities.
fn e4m3(code: u8) -> f64 {
    let sign = if code >= 128 { -1.0 } else { 1.0 };
    let (exponent, mantissa) = (i32::from(code >> 3 & 15), f64::from(code & 7));
    match (exponent, mantissa) {
        (15, 7.0) => f64::NAN,
        (0, _) => sign * mantissa * 2f64.powi(-9),
        _ => sign * (8.0 + mantissa) * 2f64.powi(exponent - 10),
    }
}

/// The definition: sign, two bits of exponent with bias 1, one of mantissa.
fn e2m1(code: u8) -> f64 {
    let sign = if code & 8 != 0 { -1.0 } else { 1.0 };
    let (exponent, mantissa) = (i32::from(code >> 1 & 3), f64::from(code & 1));
    match exponent {
        0 => sign * mantissa * 0.5,
        _ => sign * (2.0 + mantissa) * 2f64.powi(exponent - 2),
    }
}

fn assert_bits(found: f32, expected: f32, what: &str) {
    let same = found.to_bits() == expected.to_bits() || (found.is_nan() && expected.is_nan());
    assert!(same, "{what}: {found} for {expected}");
}

/// Noise that is the same in every run.
fn noise(count: usize) -> impl Iterator<Item = u32> {
    std::iter::successors(Some(1u32), |x| {
        Some(x.wrapping_mul(1_664_525).wrapping_add(1_013_904_223))
    })
    .skip(1)
    .take(count)
}

fn noise_bytes(count: usize) -> Vec<u8> {
    noise(count).map(|x| (x >> 24) as u8).collect()
}

#[test]
fn e4m3_table_is_the_formula() {
    let finite = (0..=255u8).filter(|code| !decode_e4m3(*code).is_nan()).count();
    assert_eq!(finite, 254);
    for code in 0..=255 {
        assert_bits(decode_e4m3(code), e4m3(code) as f32, &format!("code {code:#x}"));
    }
    assert_eq!(
        [decode_e4m3(0x7E), decode_e4m3(0xFE), decode_e4m3(1)],
        [448.0, -448.0, 1.0 / 512.0]
    );
}

/// Row r holds every code in both nibbles under block scale r.
#[test]
fn nvfp4_decodes_every_code_under_every_scale() {
    let codes = |column: u8| if column < 16 { column } else { 31 - column };
    let row: Vec<u8> = (0..16).map(|byte| codes(2 * byte) | codes(2 * byte + 1) << 4).collect();
    let scales: Vec<u8> = (0..=255).flat_map(|scale| [scale, scale]).collect();
    for (global, exact) in [(1.0f32, true), (0.25, true), (1.7e-4, false)] {
        for (format, values, name, stored) in [
            ("nvfp4", NAME, "m.weight_scale_2", global),
            ("nvfp4-packed", "m.weight_packed", "m.weight_global_scale", 1.0 / global),
        ] {
            let parts = [
                (values, "U8", vec![256, 16], row.repeat(256)),
                ("m.weight_scale", "F8_E4M3", vec![256, 2], scales.clone()),
                (name, "F32", vec![], stored.to_le_bytes().to_vec()),
            ];
            let decoded = Stored::new(format, None, &[256, 32], &parts).matrix(WHOLE).to_vec();
            assert_eq!(decoded.len(), 256 * 32);
            for (at, found) in decoded.into_iter().enumerate() {
                let (scale, code) = ((at / 32) as u8, codes((at % 32) as u8));
                let expected = e2m1(code) * e4m3(scale) * f64::from(global);
                let what = format!("{format}: code {code} under scale {scale:#x} and {global}");
                if exact {
                    // Powers of two lose nothing.
                    assert_bits(found, expected as f32, &what);
                } else if !expected.is_nan() {
                    let error = (f64::from(found) - expected).abs();
                    assert!(error <= expected.abs() * 3e-7, "{what}: {found} for {expected}");
                }
            }
        }
    }
}

#[test]
fn bf16_decodes_every_pattern() {
    let bytes: Vec<u8> = (0..=u16::MAX).flat_map(u16::to_le_bytes).collect();
    let parts = [(NAME, "BF16", vec![256, 256], bytes)];
    let decoded = Stored::new("bf16", None, &[256, 256], &parts).matrix(WHOLE).to_vec();
    for (pattern, found) in (0..=u16::MAX).zip(decoded) {
        assert_bits(found, bf16::from_bits(pattern).to_f32(), &format!("{pattern:#06x}"));
        assert_bits(found, f32::from_bits(u32::from(pattern) << 16), &format!("{pattern:#06x}"));
    }
}

#[test]
fn f32_is_taken_as_it_is() {
    let patterns: Vec<u32> = noise(16 * 1024).collect();
    let bytes = patterns.iter().flat_map(|pattern| pattern.to_le_bytes()).collect();
    let parts = [(NAME, "F32", vec![128, 128], bytes)];
    let decoded = Stored::new("f32", None, &[128, 128], &parts).matrix(WHOLE).to_vec();
    for (pattern, found) in patterns.into_iter().zip(decoded) {
        assert_bits(found, f32::from_bits(pattern), &format!("{pattern:#010x}"));
    }
}

/// Every code under scales that differ from block to block, the last ones partial.
#[test]
fn fp8_blocks_decode_to_code_times_scale() {
    let (rows, columns) = (300, 400);
    let codes: Vec<u8> = (0..rows * columns).map(|at| (at % 256) as u8).collect();
    let scales: Vec<f32> = (0..12).map(|block| 2f32.powi(block - 6)).collect();
    let scale_bytes = scales.iter().flat_map(|scale| scale.to_le_bytes()).collect();
    let parts = [
        (NAME, "F8_E4M3", vec![rows, columns], codes.clone()),
        ("m.weight_scale_inv", "F32", vec![3, 4], scale_bytes),
    ];
    let decoded = Stored::new("fp8-block", None, &[rows, columns], &parts).matrix(WHOLE).to_vec();
    for (at, found) in decoded.into_iter().enumerate() {
        let (row, column) = (at / columns, at % columns);
        let expected = e4m3(codes[at]) * f64::from(scales[row / 128 * 4 + column / 128]);
        assert_bits(found, expected as f32, &format!("[{row}, {column}]"));
    }
}

/// A module of each format, `[rows, columns]`, filled with noise.
fn noisy(format: &str, axis: Option<Axis>, rows: usize, columns: usize) -> Stored {
    let block_scales = || noise_bytes(rows * columns / 16).iter().map(|code| code & 0x77).collect();
    let global = |scale: f32| scale.to_le_bytes().to_vec();
    let parts = match format {
        "f32" => vec![(NAME, "F32", vec![rows, columns], noise_bytes(rows * columns * 4))],
        "bf16" => vec![(NAME, "BF16", vec![rows, columns], noise_bytes(rows * columns * 2))],
        "nvfp4" => vec![
            (NAME, "U8", vec![rows, columns / 2], noise_bytes(rows * columns / 2)),
            ("m.weight_scale", "F8_E4M3", vec![rows, columns / 16], block_scales()),
            ("m.weight_scale_2", "F32", vec![1], global(0.3)),
        ],
        "nvfp4-packed" => vec![
            ("m.weight_packed", "U8", vec![rows, columns / 2], noise_bytes(rows * columns / 2)),
            ("m.weight_scale", "F8_E4M3", vec![rows, columns / 16], block_scales()),
            ("m.weight_global_scale", "F32", vec![1], global(3.0)),
        ],
        "fp8-block" => {
            let blocks = [rows.div_ceil(128), columns.div_ceil(128)];
            let scales = (0..blocks[0] * blocks[1]).flat_map(|at| global(1.5 + at as f32));
            vec![
                (NAME, "F8_E4M3", vec![rows, columns], noise_bytes(rows * columns)),
                ("m.weight_scale_inv", "F32", blocks.to_vec(), scales.collect()),
            ]
        }
        other => panic!("no test data for format {other}"),
    };
    Stored::new(format, axis, &[rows, columns], &parts)
}

/// Bits, so that NaN equals itself.
fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|value| value.to_bits()).collect()
}

#[test]
fn slices_of_the_ranks_are_the_whole() {
    let (rows, columns) = (320, 384);
    // From the manifest, so that a new format cannot be left out.
    for format in Manifest::glm5().unwrap().formats {
        let whole = noisy(&format.name, None, rows, columns).matrix(Slice { index: 1, of: 2 });
        assert_eq!((whole.rows(), whole.columns()), (rows, columns), "shared by no rule");
        let whole = bits(&whole.to_vec());
        for of in [2, 4, 8] {
            let ranks = |axis| {
                let stored = noisy(&format.name, Some(axis), rows, columns);
                let ranks = (0..of).map(move |index| stored.matrix(Slice { index, of }));
                ranks.collect::<Vec<Matrix>>()
            };
            let by_rows = ranks(Axis::Rows);
            assert!(by_rows.iter().all(|m| (m.rows(), m.columns()) == (rows / of, columns)));
            let joined: Vec<u32> = by_rows.iter().flat_map(|m| bits(&m.to_vec())).collect();
            assert!(joined == whole, "{}: rows over {of} ranks", format.name);

            let by_columns = ranks(Axis::Columns);
            assert!(by_columns.iter().all(|m| (m.rows(), m.columns()) == (rows, columns / of)));
            let values: Vec<Vec<u32>> = by_columns.iter().map(|m| bits(&m.to_vec())).collect();
            let width = columns / of;
            let joined: Vec<u32> = (0..rows)
                .flat_map(|row| values.iter().flat_map(move |v| v[row * width..][..width].to_vec()))
                .collect();
            assert!(joined == whole, "{}: columns over {of} ranks", format.name);
        }
    }
}

#[test]
fn parts_of_a_matrix_decode_like_the_whole() {
    for format in Manifest::glm5().unwrap().formats {
        for axis in [Axis::Rows, Axis::Columns] {
            let share = noisy(&format.name, Some(axis), 320, 384).matrix(Slice { index: 1, of: 2 });
            let whole = bits(&share.to_vec());
            let width = share.columns();
            let part = share.row_range(17..43);
            assert_eq!(bits(&part.to_vec()), whole[17 * width..43 * width], "{}", format.name);
            let mut out = vec![0.0; 2 * width];
            part.decode(5..7, &mut out);
            assert_eq!(bits(&out), whole[22 * width..24 * width], "{}", format.name);
        }
    }
}

#[test]
fn a_cut_through_a_block_of_scales_is_refused() {
    for format in ["nvfp4", "nvfp4-packed"] {
        let stored = noisy(format, Some(Axis::Columns), 16, 64);
        assert!(stored.try_matrix(Slice { index: 0, of: 4 }).is_ok());
        let error = stored.try_matrix(Slice { index: 0, of: 8 }).err().unwrap();
        assert_eq!(error.exit_code(), 2);
        assert!(error.to_string().contains(NAME) && error.to_string().contains("--tp"), "{error}");
    }
}
