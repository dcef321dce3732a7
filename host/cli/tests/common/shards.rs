//! Checkpoints with every kind of tensor, divided and put together by the binary.

use std::{
    ffi::OsString,
    path::{Path, PathBuf},
};

use half::{bf16, f16};
use oxtile_cli::safetensors::{Checkpoint, Tensor};

use super::{file, oxtile, stderr};

/// A tensor of a file by hand: name, type, dimensions, bytes.
pub type Made = (&'static str, &'static str, Vec<u64>, Vec<u8>);

/// A name that is JSON, a path, and a command to a terminal.
pub const ODD: &str = "a \"b\"/..\\ü\n\u{1b}[2J";

pub fn numbers(count: usize, seed: u64) -> impl Iterator<Item = f32> {
    let mut state = seed;
    (0..count).map(move |i| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        let number = (state >> 40) as f32 / 16_777_216.0 - 0.5;
        if i % 41 == 7 { 0.0 } else { number * if i % 97 == 3 { 40.0 } else { 1.0 } }
    })
}

/// Every kind of tensor: ragged rows, NaN and infinities, no elements, no dimensions, packed elements, odd types and names.
pub fn tensors() -> Vec<Made> {
    let special =
        [f32::NAN, -f32::NAN, f32::INFINITY, f32::NEG_INFINITY, -0.0, f32::MIN_POSITIVE / 4.0, 3.0e38, f32::from_bits(0x7f80_0001)];
    let strange = numbers(48 * 32, 5).enumerate().map(|(i, x)| if i < 8 { special[i] } else { x });
    let bytes = |count: usize| (0..count).map(|i| (i * 7 + 3) as u8).collect::<Vec<_>>();
    vec![
        ("wide.3.w", "F32", vec![70, 64], numbers(70 * 64, 1).flat_map(f32::to_le_bytes).collect()),
        ("brain", "BF16", vec![2, 80, 96], numbers(160 * 96, 2).flat_map(|x| bf16::from_f32(x).to_le_bytes()).collect()),
        ("half", "F16", vec![64, 32], numbers(64 * 32, 3).flat_map(|x| f16::from_f32(x).to_le_bytes()).collect()),
        ("strange", "F32", vec![48, 32], strange.flat_map(f32::to_le_bytes).collect()),
        (ODD, "F32", vec![1, 32], numbers(32, 4).flat_map(f32::to_le_bytes).collect()),
        ("narrow", "F32", vec![3, 5], numbers(15, 6).flat_map(f32::to_le_bytes).collect()),
        ("vector", "F32", vec![33], numbers(33, 7).flat_map(f32::to_le_bytes).collect()),
        ("double", "F64", vec![4, 3], bytes(96)),
        ("ids", "I64", vec![3, 2, 5], bytes(240)),
        ("mask", "BOOL", vec![2, 32], [0, 1].repeat(32)),
        ("nibbles", "F4", vec![6, 3], bytes(9)),
        ("complex", "C64", vec![2, 1], bytes(16)),
        ("scalar", "F64", vec![], bytes(8)),
        ("empty", "F32", vec![0, 32], vec![]),
        ("hollow", "BF16", vec![5, 0], vec![]),
    ]
}

pub fn checkpoint(path: &Path, tensors: &[Made]) {
    let mut data = Vec::new();
    let mut entries = vec![r#""__metadata__":{"format":"pt","note":"\"ü\"\n"}"#.to_owned()];
    for (name, dtype, shape, bytes) in tensors {
        let begin = data.len();
        data.extend(bytes);
        let name = serde_json::to_string(name).expect("a string is JSON");
        entries.push(format!(r#"{name}:{{"dtype":"{dtype}","shape":{shape:?},"data_offsets":[{begin},{}]}}"#, data.len()));
    }
    std::fs::write(path, file(&format!("{{{}}}", entries.join(",")), &data)).expect("a writable folder");
}

/// The words of a command.
pub fn words(list: &[&dyn AsRef<std::ffi::OsStr>]) -> Vec<OsString> {
    list.iter().map(|word| word.as_ref().to_owned()).collect()
}

pub fn command(words: &[OsString]) -> String {
    let done = oxtile().args(words).output().expect("the binary runs");
    assert!(done.status.success(), "{words:?}: {}", stderr(&done));
    String::from_utf8(done.stdout).expect("UTF-8")
}

pub fn shard(input: &Path, prefix: &Path, ranks: usize, options: &[&str]) -> Vec<PathBuf> {
    let ranks_word = ranks.to_string();
    let mut line = words(&[&"shard", &"--input", &input, &"--output-prefix", &prefix, &"--ranks", &ranks_word]);
    if options.contains(&"--format") && !options.contains(&"bf16") {
        line.extend(words(&[&"--device", &"emulated"]));
    }
    line.extend(options.iter().map(OsString::from));
    command(&line);
    let file = |rank: usize| format!("{}-{:05}-of-{ranks:05}.safetensors", prefix.display(), rank + 1).into();
    (0..ranks).map(file).collect()
}

pub fn join_words(files: &[PathBuf], output: &Path) -> Vec<OsString> {
    let mut line = words(&[&"join", &"--inputs"]);
    line.extend(files.iter().map(|file| file.clone().into_os_string()));
    line.extend(words(&[&"--output", &output]));
    line
}

/// Names, types, dimensions and bytes, by name.
pub fn content(path: &Path) -> Vec<(String, String, Vec<u64>, Vec<u8>)> {
    let checkpoint = Checkpoint::open(path).expect("a valid file");
    let bytes = |tensor: &Tensor| checkpoint.windows(tensor, 1 << 20).flat_map(|window| window.expect("mapped").to_vec()).collect();
    let mut tensors: Vec<_> =
        checkpoint.tensors().iter().map(|t| (t.name.clone(), t.dtype.to_string(), t.shape.clone(), bytes(t))).collect();
    tensors.sort();
    tensors
}
