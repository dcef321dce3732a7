//! There and back: quantize, dequantize, compare, on the emulator.

mod common;

use std::path::{Path, PathBuf};

use common::{file, names, run, small_checkpoint, stderr, tensors};
use serde_json::Value;

fn command(words: &[&dyn AsRef<std::ffi::OsStr>]) -> String {
    let done = run(words);
    assert!(done.status.success(), "{}", stderr(&done));
    String::from_utf8(done.stdout).expect("UTF-8")
}

fn refusal(words: &[&dyn AsRef<std::ffi::OsStr>]) -> String {
    let done = run(words);
    assert!(!done.status.success());
    stderr(&done)
}

/// The small checkpoint through a format and back as `dtype`; the quantized and the restored file.
fn there_and_back(folder: &Path, format: &str, dtype: &str) -> [PathBuf; 2] {
    let input = small_checkpoint(folder);
    let files = [folder.join(format!("{format}.safetensors")), folder.join(format!("{format}-{dtype}.safetensors"))];
    command(&[&"quantize", &"--input", &input, &"--output", &files[0], &"--format", &format, &"--device", &"emulated"]);
    command(&[&"dequantize", &"--input", &files[0], &"--output", &files[1], &"--dtype", &dtype, &"--device", &"emulated"]);
    files
}

fn compare(reference: &Path, other: &Path) -> Value {
    serde_json::from_str(&command(&[&"compare", &reference, &other, &"--json"])).expect("one JSON document")
}

#[test]
fn what_comes_back_is_as_far_as_the_report_said() {
    for format in ["mxfp8", "nvfp4", "fp8", "fp8-block"] {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let input = small_checkpoint(folder.path());
        let quantized = folder.path().join("quantized.safetensors");
        let said = command(&[&"quantize", &"-i", &input, &"-o", &quantized, &"--format", &format, &"--device", &"emulated", &"--json"]);
        let said: Value = serde_json::from_str(&said).expect("one JSON document");
        let restored = folder.path().join("restored.safetensors");
        command(&[&"dequantize", &"-i", &quantized, &"-o", &restored, &"--device", &"emulated", &"--dtype", &"f32"]);
        let found = compare(&input, &restored);
        assert_eq!((found["only_in_reference"].to_string(), found["only_in_other"].to_string()), ("[]".into(), "[]".into()));
        for tensor in said["tensors"].as_array().expect("tensors") {
            let pair =
                found["tensors"].as_array().expect("tensors").iter().find(|pair| pair["name"] == tensor["name"]).expect("the tensor");
            assert_eq!(pair["shapes"][0], pair["shapes"][1], "{pair}");
            match tensor["action"].as_str() {
                Some("passed_through") => assert_eq!(pair["difference"]["equal"], true, "{pair}"),
                _ => {
                    let [said, found] =
                        [&tensor["sides"][0]["snr_db"], &pair["difference"]["snr_db"]].map(|n| n.as_f64().expect("a number"));
                    assert!((said - found).abs() < 1e-3, "{format} {}: {said} and {found} dB", tensor["name"]);
                    assert!(pair["difference"]["cosine"].as_f64().expect("a number") > 0.98, "{pair}");
                }
            }
        }
    }
}

/// The decibels of the only tensor's way back, by the report of its cast and as they are found.
fn decibels(folder: &Path, input: &Path, format: &str) -> [f64; 2] {
    let [quantized, restored] = ["quantized", "restored"].map(|name| folder.join(name));
    let said = command(&[&"quantize", &"-i", &input, &"-o", &quantized, &"--format", &format, &"--device", &"emulated", &"--json"]);
    command(&[&"dequantize", &"-i", &quantized, &"-o", &restored, &"--device", &"emulated", &"--dtype", &"f32"]);
    let said: Value = serde_json::from_str(&said).expect("one JSON document");
    let found = compare(input, &restored);
    [&said["tensors"][0]["sides"][0]["snr_db"], &found["tensors"][0]["difference"]["snr_db"]].map(|n| n.as_f64().expect("a number"))
}

#[test]
fn a_tensor_of_several_pieces_comes_back() {
    // A piece has at most 2^20 elements.
    let [rows, columns] = [1056, 1024];
    let folder = tempfile::tempdir().expect("a temporary folder");
    let input = folder.path().join("input");
    tensors::write(&input, &vec![("w", "BF16", vec![rows, columns], tensors::bytes(&tensors::random(rows * columns, 1)))]);
    for format in ["mxfp8", "nvfp4", "nvfp4-squares", "fp8", "fp8-block"] {
        let [said, found] = decibels(folder.path(), &input, format);
        assert!((said - found).abs() < 1e-3 && said > 15.0, "{format}: {said} and {found} dB");
    }
}

#[test]
fn restored_numbers_are_of_the_type_asked_for_and_no_traces_stay() {
    for dtype in ["f32", "bf16", "f16"] {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let [_, restored] = there_and_back(folder.path(), "mxfp8", dtype);
        let found: Value = serde_json::from_str(&command(&[&"inspect", &restored, &"--json"])).expect("one JSON document");
        assert_eq!(found["metadata"]["oxtile.dequantized_from"], "mxfp8");
        assert!(found["metadata"].get("oxtile.format").is_none());
        let tensors = found["tensors"].as_array().expect("tensors");
        let matrix = tensors.iter().find(|tensor| tensor["name"] == "matrix").expect("the matrix");
        assert_eq!(matrix["dtype"], dtype.to_uppercase());
        assert!(tensors.iter().all(|tensor| !tensor["name"].as_str().expect("a name").ends_with("_scale")));
        // What was restored can be quantized again.
        let again = folder.path().join("again.safetensors");
        command(&[&"quantize", &"-i", &restored, &"-o", &again, &"--device", &"emulated"]);
    }
}

#[test]
fn files_that_are_not_quantized_are_refused_and_leave_nothing() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let (input, output) = (small_checkpoint(folder.path()), folder.path().join("out.safetensors"));
    let before = names(folder.path());
    let said = refusal(&[&"dequantize", &"-i", &input, &"-o", &output, &"--device", &"emulated"]);
    assert!(said.contains("has no `oxtile.format`: name a file that `oxtile quantize` wrote"), "{said}");

    // A file of version 2 with one thing wrong.
    let damaged = |from: &str, to: &str| {
        let header = r#"{"__metadata__":{"oxtile.format":"mxfp8","oxtile.format_version":"2","oxtile.direction":"row","oxtile.layout":"compact",
            "oxtile.hadamard":"false","oxtile.tensors":"{\"m\":{\"dtype\":\"F32\",\"shape\":[2,32]}}"},
            "m":{"dtype":"F8_E4M3","shape":[2,32],"data_offsets":[0,64]},"m_amax":{"dtype":"F32","shape":[1],"data_offsets":[64,68]},
            "m_scale":{"dtype":"F8_E8M0","shape":[2,1],"data_offsets":[68,70]}}"#;
        assert!(from.is_empty() || header.contains(from), "{from}");
        let path = folder.path().join("damaged.safetensors");
        std::fs::write(&path, file(&header.replacen(from, to, 1), &[0; 70])).expect("a file");
        let done = run(&[&"dequantize", &"-i", &path, &"-o", &output, &"--device", &"emulated"]);
        std::fs::remove_file(path).expect("the file");
        let _ = std::fs::remove_file(&output);
        assert_eq!(done.status.success(), from.is_empty(), "{from} to {to}: {}", stderr(&done));
        stderr(&done)
    };
    damaged("", "");
    for (from, to, expected) in [
        ("\"shape\":[2,1]", "\"shape\":[2]", "tensor `m_scale` is F8_E8M0 [2], where `m` needs F8_E8M0 [2x1]"),
        ("\"mxfp8\"", "\"int4\"", "oxtile.format = \"int4\", which is none of: mxfp8, nvfp4, nvfp4-squares, fp8, fp8-block"),
        ("_version\":\"2\"", "_version\":\"1\"", "format_version = \"1\", and this program reads \"2\""),
        ("\"row\"", "\"column\"", "tensor `m_columnwise` is missing, which `m` needs"),
        ("\"m_scale\"", "\"n_scale\"", "tensor `m_scale` is missing, which `m` needs"),
        ("[2,32]}}", "[1,2,32]}}", "tensor `m` is F8_E4M3 [2x32], where `m` needs F8_E4M3 [1x2x32]"),
        ("[2,32]}}", "[2,0]}}", "says that `m` was 2x0, which is not quantized"),
        ("[2,32]}}", "[64]}}", "says that `m` was 64, which is not quantized"),
        ("[2,32]}}", "[4294967296,4294967296]}}", "which is not quantized"),
        ("[2,32]}}", "[-2,32]}}", "oxtile.tensors"),
        ("\"F32\\\"", "\"I8\\\"", "\"I8\", none of F32, F16 and BF16"),
        ("\"compact\"", "\"interleaved\"", "where `m` needs F8_E8M0 [128x4]"),
        ("\"false\"", "\"true\"", "--hadamard goes with --format nvfp4"),
    ] {
        let said = damaged(from, to);
        assert!(said.contains(expected) && said.lines().count() == 1, "{said}");
    }
    assert_eq!(names(folder.path()), before);
}

#[test]
fn a_comparison_names_what_cannot_be_compared() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let write = |name: &str, header: &str, numbers: &[f32]| {
        let path = folder.path().join(name);
        std::fs::write(&path, file(header, &numbers.iter().flat_map(|x| x.to_le_bytes()).collect::<Vec<_>>())).expect("a file");
        path
    };
    let a = write(
        "a",
        r#"{"x":{"dtype":"F32","shape":[3],"data_offsets":[0,12]},"y":{"dtype":"F32","shape":[1],"data_offsets":[12,16]},"gone":{"dtype":"F32","shape":[1],"data_offsets":[16,20]}}"#,
        &[3.0, 4.0, f32::NAN, 1.0, 2.0],
    );
    let b = write(
        "b",
        r#"{"x":{"dtype":"F32","shape":[3],"data_offsets":[0,12]},"y":{"dtype":"F32","shape":[1,1],"data_offsets":[12,16]},"new":{"dtype":"F32","shape":[1],"data_offsets":[16,20]}}"#,
        &[3.0, 4.5, 1.0, 1.0, 2.0],
    );
    let found = compare(&a, &b);
    let x = &found["tensors"][0]["difference"];
    assert_eq!((x["max_error"].as_f64(), x["special"].as_u64(), x["equal"].as_bool()), (Some(0.5), Some(1), Some(false)));
    // 0.5 beside a norm of 5.
    assert!((x["relative"].as_f64().expect("a number") - 0.1).abs() < 1e-12);
    assert!((x["snr_db"].as_f64().expect("a number") - 20.0).abs() < 1e-9);
    assert_eq!(found["tensors"][1]["difference"], Value::Null);
    assert_eq!((&found["only_in_reference"][0], &found["only_in_other"][0]), (&"gone".into(), &"new".into()));
    let table = command(&[&"compare", &a, &b]);
    for expected in ["Only in the reference: gone", "Only in the other: new", "Not comparable", "tensors 1 compared, 0 equal"] {
        assert!(table.contains(expected), "{expected} in\n{table}");
    }
}

#[test]
fn a_bound_decides_the_status() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let write = |name: &str, tensor: &str, numbers: [f32; 2]| {
        let path = folder.path().join(name);
        let header = format!(r#"{{"{tensor}":{{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}}}"#);
        std::fs::write(&path, file(&header, &numbers.map(f32::to_le_bytes).concat())).expect("a file");
        path
    };
    // 0.5 beside a norm of 5.
    let (a, b) = (write("a", "x", [3.0, 4.0]), write("b", "x", [3.0, 4.5]));
    let status = |other: &Path, bound: &str| {
        let done = run(&[&"compare", &a, &other, &"--max-relative", &bound]);
        assert!(String::from_utf8_lossy(&done.stdout).contains("tensors "), "the table comes in any case");
        (done.status.code(), stderr(&done))
    };
    assert_eq!(status(&b, "0.11"), (Some(0), String::new()));
    let (code, said) = status(&b, "0.09");
    assert_eq!(code, Some(1));
    assert!(said.contains("is not within a relative error of 0.09 of") && said.contains("tensor `x` has one of 0.1000"), "{said}");
    assert_eq!(status(&a, "0").0, Some(0), "equal files are within 0");
    for (other, expected) in [
        (write("c", "y", [3.0, 4.0]), "tensor `x` is only in the reference, and 1 more"),
        (write("d", "x", [3.0, f32::NAN]), "tensor `x` has 1 other NaN or infinite elements"),
    ] {
        let (code, said) = status(&other, "inf");
        assert!(code == Some(1) && said.contains(expected), "{said}");
    }
    assert!(run(&[&"compare", &a, &b]).status.success(), "without a bound a difference is no failure");
}
