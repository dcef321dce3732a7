//! Files of tensors, made by hand and read back.

use std::{collections::BTreeMap, path::Path};

use oxtile_cli::safetensors::{Checkpoint, Tensor};
use oxtile_tests::inputs::Random;

use super::file;

/// Tensors of a file: name, type, shape and bytes.
pub type Tensors = Vec<(&'static str, &'static str, Vec<usize>, Vec<u8>)>;

/// Writes a file.
pub fn write(path: &Path, tensors: &Tensors) {
    let mut at = 0;
    let entries: Vec<String> = tensors
        .iter()
        .map(|(name, dtype, shape, bytes)| {
            at += bytes.len();
            format!(r#""{name}":{{"dtype":"{dtype}","shape":{shape:?},"data_offsets":[{},{at}]}}"#, at - bytes.len())
        })
        .collect();
    let data: Vec<u8> = tensors.iter().flat_map(|(.., bytes)| bytes.clone()).collect();
    std::fs::write(path, file(&format!("{{{}}}", entries.join(",")), &data)).expect("a writable folder");
}

/// Shapes and bytes of a file's tensors.
pub fn read(path: &Path) -> BTreeMap<String, (Vec<u64>, Vec<u8>)> {
    let opened = Checkpoint::open(path).expect("a safetensors file");
    let bytes = |tensor: &Tensor| match tensor.bytes() {
        0 => Vec::new(),
        bytes => opened.window(tensor, 0..bytes).expect("its bytes").to_vec(),
    };
    opened.tensors().iter().map(|tensor| (tensor.name.clone(), (tensor.shape.clone(), bytes(tensor)))).collect()
}

/// Numbers of normal distribution.
pub fn random(count: usize, seed: u64) -> Vec<half::bf16> {
    let mut random = Random::new(seed);
    (0..count).map(|_| half::bf16::from_f32(random.normal())).collect()
}

/// Their bytes.
pub fn bytes(values: &[half::bf16]) -> Vec<u8> {
    values.iter().flat_map(|x| x.to_le_bytes()).collect()
}

/// The bytes of integers.
pub fn integers(values: &[i32]) -> Vec<u8> {
    values.iter().flat_map(|x| x.to_le_bytes()).collect()
}

/// The numbers of a BF16 tensor.
pub fn halves(bytes: &[u8]) -> Vec<half::bf16> {
    bytes.chunks_exact(2).map(|b| half::bf16::from_le_bytes([b[0], b[1]])).collect()
}

/// The numbers of an F32 tensor.
pub fn floats(bytes: &[u8]) -> Vec<f32> {
    bytes.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect()
}
