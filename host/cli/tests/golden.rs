//! The whole command on a small file, on the emulator: every byte it writes and every line it prints.

mod common;

use std::path::{Path, PathBuf};

use common::{file, names, run, small_checkpoint, stderr};
use oxtile_cli::quantize::{Format, Recipe};
use serde_json::Value;

/// What is printed, without the folder's name and without times, which no two runs share.
fn stable_part(printed: &str, folder: &Path) -> String {
    let is_timed = |line: &str| line.contains(" F32 ") || line.contains(" F16 ") || line.contains(" BF16 ");
    let lines = printed.replace(&format!("{}/", folder.display()), "").lines().map(str::to_owned).collect::<Vec<_>>();
    let quantized_ends = lines.iter().position(|line| line.starts_with("Passed")).unwrap_or(lines.len());
    let stable = lines.iter().enumerate().filter(|(_, line)| !line.starts_with("time")).map(|(i, line)| {
        // The time is the last column.
        let timed = i < quantized_ends && (is_timed(line) || line.starts_with("tensor "));
        let line = if timed { line.rsplit_once("  ").map_or(line.as_str(), |(rest, _)| rest) } else { line };
        line.trim_end().to_owned()
    });
    stable.collect::<Vec<_>>().join("\n")
}

const PRINTED: &str = "\
input   small.safetensors, 1.4 kB
output  out.safetensors, 1.6 kB
format  mxfp8: E4M3 elements, an E8M0 scale for every 32 of a row
device  CPU emulator

Quantized
tensor  dtype   shape  by      amax  SNR dB  zero %  saturated %
matrix  F32      2x64  row    24.79   31.35   0.781            0
half    F16      1x32  row    10.34   31.48   3.125            0
brain   BF16   2x1x32  row  0.06299   32.68   1.562            0

Passed through unchanged
tensor  dtype   shape  size  reason
bias    F32         3  12 B  1 dimension, fewer than 2
narrow  F32       2x3  24 B  last dimension 3 is not a multiple of 32
ids     I64       1x2  16 B  I64 is not F32, F16 or BF16
scalar  F32    scalar   4 B  0 dimensions, fewer than 2
empty   F32      0x32   0 B  no elements

tensors 3 quantized of 8, 224 elements
size    1.4 kB to 1.6 kB, 115.4 %
error   SNR 31.35 dB, 1.339 % zero, 0 % saturated";

#[test]
fn a_small_file_through_the_whole_command() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let (input, output) = (small_checkpoint(folder.path()), folder.path().join("out.safetensors"));
    let done = run(&[&"quantize", &"--input", &input, &"--output", &output, &"--format", &"mxfp8", &"--device", &"emulated"]);
    assert!(done.status.success(), "{}", stderr(&done));
    assert_eq!(stderr(&done), "", "no progress bar where there is no terminal");
    let printed = String::from_utf8(done.stdout).expect("UTF-8");
    assert_eq!(stable_part(&printed, folder.path()), PRINTED, "in full:\n{printed}");

    let expected = folder.path().join("expected.safetensors");
    common::quantize(&input, &expected).expect("a valid checkpoint");
    assert_eq!(names(folder.path()), ["expected.safetensors", "out.safetensors", "small.safetensors"]);
    let bytes = |path| std::fs::read(path).expect("readable");
    assert!(bytes(&output) == bytes(&expected), "the emulator's bytes are those of the scalar quantizer");
}

/// Every kind of number: random bits have all exponents, NaN and infinities of both signs; then zeros, subnormals, extremes.
fn extreme_checkpoint(folder: &Path) -> PathBuf {
    const ELEMENTS: usize = 128 * 96;
    let mut random = 1u64;
    let mut bits = move || {
        random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        random >> 32
    };
    let special = [0u32, 1 << 31, 1, 0x0040_0000, 0x7f7f_ffff, 0xff7f_ffff, 0x7f80_0000, 0x7fc0_0000, 0x0080_0000, 0x43e0_0000];
    let special = special.iter().flat_map(|bits| [*bits; 32]);
    let mut data: Vec<u8> = special.clone().flat_map(u32::to_le_bytes).collect();
    data.extend((special.count()..ELEMENTS).flat_map(|_| (bits() as u32).to_le_bytes()));
    data.extend((0..2 * ELEMENTS).flat_map(|_| (bits() as u16).to_le_bytes()));
    let entry = |name: &str, begin: usize, bytes: usize| {
        format!(r#""{name}":{{"dtype":"{name}","shape":[128,96],"data_offsets":[{begin},{}]}}"#, begin + bytes)
    };
    let (wide, half) = (ELEMENTS * 4, ELEMENTS * 2);
    let header = format!("{{{},{},{}}}", entry("F32", 0, wide), entry("F16", wide, half), entry("BF16", wide + half, half));
    let path = folder.join("extreme.safetensors");
    std::fs::write(&path, file(&header, &data)).expect("a writable folder");
    path
}

#[test]
fn extreme_numbers_agree_with_the_definition() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let (input, output) = (extreme_checkpoint(folder.path()), folder.path().join("out.safetensors"));
    let done = run(&[&"quantize", &"--input", &input, &"--output", &output, &"--device", &"emulated"]);
    assert!(done.status.success(), "{}", stderr(&done));
    let printed = String::from_utf8(done.stdout).expect("UTF-8");
    assert!(printed.contains("infinite or NaN elements in the input"), "{printed}");
    let expected = folder.path().join("expected.safetensors");
    common::quantize(&input, &expected).expect("a valid checkpoint");
    let bytes = |path| std::fs::read(path).expect("readable");
    let differing = bytes(&output).iter().zip(bytes(&expected)).filter(|(a, b)| **a != *b).count();
    assert_eq!((bytes(&output).len(), differing), (bytes(&expected).len(), 0), "bytes, and bytes that differ");
}

#[test]
fn nvfp4_agrees_with_the_definition() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    for input in [small_checkpoint(folder.path()), extreme_checkpoint(folder.path())] {
        let (output, expected) = (folder.path().join("out.safetensors"), folder.path().join("expected.safetensors"));
        let done = run(&[&"quantize", &"-i", &input, &"-o", &output, &"--format", &"nvfp4", &"--device", &"emulated"]);
        assert!(done.status.success(), "{}", stderr(&done));
        common::quantize_by(Recipe::of(Format::Nvfp4), &input, &expected).expect("a valid checkpoint");
        let bytes = |path| std::fs::read(path).expect("readable");
        let differing = bytes(&output).iter().zip(bytes(&expected)).filter(|(a, b)| **a != *b).count();
        assert_eq!((bytes(&output).len(), differing), (bytes(&expected).len(), 0), "bytes, and bytes that differ");
    }
}

#[test]
fn nvfp4_says_what_it_did() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let (input, output) = (small_checkpoint(folder.path()), folder.path().join("out.safetensors"));
    let done = run(&[&"quantize", &"-i", &input, &"-o", &output, &"--format", &"nvfp4", &"--device", &"emulated"]);
    let printed = String::from_utf8(done.stdout).expect("UTF-8");
    assert!(printed.contains("format  nvfp4: E2M1 elements, an E4M3 scale for every 16 of a row, one for the tensor"), "{printed}");
    assert!(printed.contains("last dimension 3 is not a multiple of 16"), "{printed}");
    let inspected = String::from_utf8(run(&[&"inspect", &output]).stdout).expect("UTF-8");
    for line in
        ["matrix_packed U8 2x32", "matrix_scale F8_E4M3 2x4", "matrix_global_scale F32 1", "matrix_amax F32 1", "brain_packed U8 2x16"]
    {
        let words = |printed: &str| printed.split_whitespace().take(3).collect::<Vec<_>>().join(" ");
        assert!(inspected.lines().any(|printed| words(printed) == line), "{line}: {inspected}");
    }
    assert!(inspected.contains("oxtile.format          nvfp4"), "{inspected}");
}

#[test]
fn inspect_shows_the_formats_of_the_output() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let (input, output) = (small_checkpoint(folder.path()), folder.path().join("out.safetensors"));
    assert!(run(&[&"quantize", &"-i", &input, &"-o", &output, &"--device", &"emulated"]).status.success());
    let inspected = run(&[&"inspect", &output]);
    let printed = String::from_utf8(inspected.stdout).expect("UTF-8");
    let words = |name: &str| {
        let line = printed.lines().find(|line| line.split_whitespace().next() == Some(name));
        line.unwrap_or_else(|| panic!("{printed}")).split_whitespace().skip(1).take(2).collect::<Vec<_>>().join(" ")
    };
    assert_eq!(words("matrix"), "F8_E4M3 2x64");
    assert_eq!(words("matrix_scale"), "F8_E8M0 2x2");
    assert_eq!(words("matrix_amax"), "F32 1");
    assert!(printed.contains("oxtile.format          mxfp8"), "{printed}");
}

#[test]
fn the_device_is_named_with_the_reason() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let (input, output) = (small_checkpoint(folder.path()), folder.path().join("out.safetensors"));
    for requested in ["auto", "emulated"] {
        let done = run(&[&"quantize", &"-i", &input, &"-o", &output, &"--device", &requested, &"--json"]);
        assert!(done.status.success(), "{}", stderr(&done));
        let document: Value = serde_json::from_slice(&done.stdout).expect("one JSON document");
        let device = &document["device"];
        assert_eq!(device["requested"], requested);
        assert!(!device["name"].as_str().expect("a name").is_empty() && !device["reason"].as_str().expect("a reason").is_empty());
        assert_eq!(document["totals"]["quantized_tensors"], 3);
    }
}

#[test]
fn a_gpu_that_is_not_there_is_an_error_that_helps() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let (input, output) = (small_checkpoint(folder.path()), folder.path().join("out.safetensors"));
    let hidden = common::oxtile()
        .env("CUDA_VISIBLE_DEVICES", "")
        .args(["quantize", "--device", "cuda", "-i"])
        .arg(&input)
        .arg("-o")
        .arg(&output)
        .output();
    let hidden = hidden.expect("the binary runs");
    assert_eq!(hidden.status.code(), Some(1), "{}", stderr(&hidden));
    let text = stderr(&hidden);
    assert!(text.contains("--device cuda") && text.contains("--device emulated"), "{text}");
    assert_eq!(names(folder.path()), ["small.safetensors"]);
}
