//! Rewrites the matrices of a checkpoint in other formats.

use half::{bf16, f16};
use talon::weights::decode_e4m3;

use super::{Tensor, Tensors};

const E2M1: [f32; 8] = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0];

/// The code of the nearest of `values`.
fn nearest(value: f32, values: &[f32]) -> u8 {
    let distance = |code: &usize| (values[*code] - value.abs()).abs();
    (0..values.len()).min_by(|a, b| distance(a).total_cmp(&distance(b))).unwrap() as u8
}

/// Stores a plain matrix in NVFP4.
pub fn nvfp4(tensors: &mut Tensors, module: &str) {
    let name = format!("{module}.weight");
    let plain = tensors.remove(&name);
    let values = plain.values();
    let amax = |values: &[f32]| values.iter().fold(0.0, |max: f32, value| max.max(value.abs()));
    let global = amax(&values) / (6.0 * 448.0);
    let positive: Vec<f32> = (0..0x7F).map(decode_e4m3).collect();
    let (mut codes, mut scales) = (Vec::new(), Vec::new());
    for block in values.chunks(16) {
        let scale = nearest(amax(block) / (6.0 * global), &positive).max(1);
        scales.push(scale);
        let step = decode_e4m3(scale) * global;
        let code = |value: f32| nearest(value / step, &E2M1) | (u8::from(value < 0.0) << 3);
        codes.extend(block.chunks(2).map(|pair| code(pair[0]) | code(pair[1]) << 4));
    }
    let (rows, columns) = (plain.shape[0], plain.shape[1]);
    let mut put = |suffix: &str, dtype: &str, shape: Vec<usize>, bytes: Vec<u8>| {
        let shard = plain.shard.clone();
        tensors
            .0
            .insert(format!("{name}{suffix}"), Tensor { dtype: dtype.into(), shape, bytes, shard });
    };
    put("", "U8", vec![rows, columns / 2], codes);
    put("_scale", "F8_E4M3", vec![rows, columns / 16], scales);
    put("_scale_2", "F32", vec![], global.to_le_bytes().to_vec());
}

/// Stores the values of an NVFP4 matrix in F32.
pub fn dequantise_nvfp4(tensors: &mut Tensors, module: &str) {
    let name = format!("{module}.weight");
    let (codes, scales) = (tensors.remove(&name), tensors.remove(&format!("{name}_scale")));
    let global = tensors.remove(&format!("{name}_scale_2")).values()[0];
    let value = |code: u8| E2M1[usize::from(code & 7)] * if code & 8 == 0 { 1.0 } else { -1.0 };
    let values: Vec<f32> = (codes.bytes.iter().enumerate())
        .flat_map(|(at, byte)| {
            let scale = decode_e4m3(scales.bytes[at / 8]) * global;
            [value(byte & 15) * scale, value(byte >> 4) * scale]
        })
        .collect();
    let shape = [codes.shape[0], codes.shape[1] * 2];
    tensors.0.insert(name, Tensor::f32(&shape, &values, &codes.shard));
}

/// Stores a plain matrix in FP8 with a scale for each block of 128 by 128.
pub fn fp8(tensors: &mut Tensors, module: &str) {
    let name = format!("{module}.weight");
    let plain = tensors.remove(&name);
    let values = plain.values();
    let (rows, columns) = (plain.shape[0], plain.shape[1]);
    let across = columns.div_ceil(128);
    let mut scales = vec![0.0f32; rows.div_ceil(128) * across];
    let block = |at: usize| at / columns / 128 * across + at % columns / 128;
    for (at, value) in values.iter().enumerate() {
        let scale = &mut scales[block(at)];
        *scale = scale.max(value.abs() / 448.0);
    }
    let positive: Vec<f32> = (0..0x7F).map(decode_e4m3).collect();
    let code = |(at, value): (usize, &f32)| {
        nearest(value / scales[block(at)], &positive) | (u8::from(*value < 0.0) << 7)
    };
    let codes = values.iter().enumerate().map(code).collect();
    let scale = Tensor::f32(&[rows.div_ceil(128), across], &scales, &plain.shard);
    tensors.0.insert(format!("{name}_scale_inv"), scale);
    tensors.0.insert(name, Tensor { dtype: "F8_E4M3".into(), bytes: codes, ..plain });
}

/// Stores the values of an FP8 matrix in F32.
pub fn dequantise_fp8(tensors: &mut Tensors, module: &str) {
    let name = format!("{module}.weight");
    let (codes, scales) = (tensors.remove(&name), tensors.remove(&format!("{name}_scale_inv")));
    let (columns, scale) = (codes.shape[1], scales.values());
    let values: Vec<f32> = (codes.bytes.iter().enumerate())
        .map(|(at, code)| {
            let (row, column) = (at / columns / 128, at % columns / 128);
            decode_e4m3(*code) * scale[row * scales.shape[1] + column]
        })
        .collect();
    tensors.0.insert(name, Tensor::f32(&codes.shape, &values, &codes.shard));
}

/// NVFP4 as compressed-tensors names it, with the global scale's reciprocal.
pub fn packed(tensors: &mut Tensors) {
    let names: Vec<String> = tensors.0.keys().cloned().collect();
    for global in names.iter().filter(|name| name.ends_with("weight_scale_2")) {
        let name = global.strip_suffix("_scale_2").unwrap();
        let module = name.strip_suffix(".weight").unwrap();
        let codes = tensors.remove(name);
        tensors.0.insert(format!("{name}_packed"), codes);
        let scale = tensors.remove(global);
        let reciprocal = Tensor::f32(&[1], &[1.0 / scale.values()[0]], &scale.shard);
        tensors.0.insert(format!("{name}_global_scale"), reciprocal);
        let input = tensors.remove(&format!("{module}.input_scale"));
        tensors.0.insert(format!("{module}.input_global_scale"), input);
    }
}

/// Stores a plain matrix in BF16, rounded.
pub fn to_bf16(tensors: &mut Tensors, module: &str) {
    let tensor = tensors.get(&format!("{module}.weight"));
    let values = tensor.values().into_iter();
    tensor.bytes = values.flat_map(|value| bf16::from_f32(value).to_le_bytes()).collect();
    tensor.dtype = "BF16".into();
}

/// Stores a plain matrix in F32, as it is.
pub fn to_f32(tensors: &mut Tensors, module: &str) {
    let tensor = tensors.get(&format!("{module}.weight"));
    *tensor = Tensor::f32(&tensor.shape, &tensor.values(), &tensor.shard);
}

/// Stores a plain matrix in F32, rounded to multiples of f16 times a power of two, so that a device
/// which keeps f16 loses nothing.
pub fn to_f32_of_f16(tensors: &mut Tensors, module: &str, factor: f32) {
    let tensor = tensors.get(&format!("{module}.weight"));
    let round = |value: f32| f16::from_f32(value * factor).to_f32() / factor;
    let values: Vec<f32> = tensor.values().into_iter().map(round).collect();
    *tensor = Tensor::f32(&tensor.shape, &values, &tensor.shard);
}
