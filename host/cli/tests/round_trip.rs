//! There and back: quantize, dequantize, compare, on the emulator.

mod common;

use std::path::{Path, PathBuf};

use common::{file, names, run, small_checkpoint, stderr};
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
    for format in ["mxfp8", "nvfp4"] {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let input = small_checkpoint(folder.path());
        let quantized = folder.path().join("quantized.safetensors");
        let said = command(&[&"quantize", &"-i", &input, &"-o", &quantized, &"--format", &format, &"--device", &"emulated", &"--json"]);
        let said: Value = serde_json::from_str(&said).expect("one JSON document");
        let restored = folder.path().join("restored.safetensors");
        command(&[&"dequantize", &"-i", &quantized, &"-o", &restored, &"--device", &"emulated"]);
        let found = compare(&input, &restored);
        assert_eq!((found["only_in_reference"].to_string(), found["only_in_other"].to_string()), ("[]".into(), "[]".into()));
        for tensor in said["tensors"].as_array().expect("tensors") {
            let pair =
                found["tensors"].as_array().expect("tensors").iter().find(|pair| pair["name"] == tensor["name"]).expect("the tensor");
            // A file of NVFP4 does not tell more than rows and columns.
            if pair["shapes"][0] != pair["shapes"][1] {
                assert_eq!((format, &pair["difference"]), ("nvfp4", &Value::Null));
                continue;
            }
            match tensor["action"].as_str() {
                Some("passed_through") => assert_eq!(pair["difference"]["equal"], true, "{pair}"),
                _ => {
                    let [said, found] = [&tensor["snr_db"], &pair["difference"]["snr_db"]].map(|n| n.as_f64().expect("a number"));
                    assert!((said - found).abs() < 1e-3, "{format} {}: {said} and {found} dB", tensor["name"]);
                    assert!(pair["difference"]["cosine"].as_f64().expect("a number") > 0.98, "{pair}");
                }
            }
        }
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

    let damaged = |metadata: &str, scale: &str| {
        let header = format!(
            r#"{{"__metadata__":{{"oxtile.format":"{metadata}"}},"m":{{"dtype":"F8_E4M3","shape":[2,32],"data_offsets":[0,64]}},"m_amax":{{"dtype":"F32","shape":[1],"data_offsets":[64,68]}},"m_scale":{{"dtype":"{scale}","shape":[2],"data_offsets":[68,70]}}}}"#
        );
        let path = folder.path().join("damaged.safetensors");
        std::fs::write(&path, file(&header, &[0; 70])).expect("a file");
        let said = refusal(&[&"dequantize", &"-i", &path, &"-o", &output, &"--device", &"emulated"]);
        std::fs::remove_file(path).expect("the file");
        said
    };
    let said = damaged("mxfp8", "F8_E8M0");
    assert!(said.contains("tensor `m_scale` is F8_E8M0 [2], where `m` needs F8_E8M0 [2x1]"), "{said}");
    let said = damaged("int4", "F8_E8M0");
    assert!(said.contains(r#"oxtile.format = "int4", which is none of: mxfp8, nvfp4"#), "{said}");
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
