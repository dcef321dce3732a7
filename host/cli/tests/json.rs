//! The JSON documents keep their shape: programs read them. A change here asks for a new `schema` number.

mod common;

use std::collections::BTreeSet;

use common::{
    run, small_checkpoint, stderr,
    tensors::{bytes, random, write},
};
use serde_json::Value;

/// Every path of a document with the type found there: `tensors[].name string`.
fn shape(value: &Value, path: &str, found: &mut BTreeSet<String>) {
    let kind = match value {
        Value::Null => "null",
        Value::Bool(_) => "bool",
        Value::Number(_) => "number",
        Value::String(_) => "string",
        Value::Array(items) => return items.iter().for_each(|item| shape(item, &format!("{path}[]"), found)),
        Value::Object(members) => {
            return members.iter().for_each(|(key, value)| shape(value, &format!("{path}.{key}"), found));
        }
    };
    found.insert(format!("{path} {kind}"));
}

fn shape_of(document: &str) -> Vec<String> {
    let mut found = BTreeSet::new();
    shape(&serde_json::from_str(document).expect("one JSON document"), "", &mut found);
    found.into_iter().collect()
}

#[test]
fn the_document_of_quantize() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let document = common::quantize_json(&small_checkpoint(folder.path()), &folder.path().join("out"));
    let expected = [
        ".command string",
        ".device.name string",
        ".device.reason string",
        ".device.requested string",
        ".direction string",
        ".format string",
        ".hadamard bool",
        ".input string",
        ".interleaved bool",
        ".output string",
        ".schema number",
        ".seed null",
        ".tensors[].action string",
        ".tensors[].bytes number",
        ".tensors[].dtype string",
        ".tensors[].elements number",
        ".tensors[].name string",
        ".tensors[].reason string",
        ".tensors[].seconds number",
        ".tensors[].shape[] number",
        ".tensors[].sides[].amax number",
        ".tensors[].sides[].direction string",
        ".tensors[].sides[].exact bool",
        ".tensors[].sides[].non_finite number",
        ".tensors[].sides[].saturated number",
        ".tensors[].sides[].snr_db number",
        ".tensors[].sides[].zeros number",
        ".totals.coded_elements number",
        ".totals.device_seconds number",
        ".totals.input_bytes number",
        ".totals.non_finite number",
        ".totals.output_bytes number",
        ".totals.passed_through_tensors number",
        ".totals.quantized_elements number",
        ".totals.quantized_tensors number",
        ".totals.saturated number",
        ".totals.seconds number",
        ".totals.snr_db number",
        ".totals.zeros number",
        ".version string",
    ];
    assert_eq!(shape_of(&document), expected);
    assert!(document.contains("\"schema\": 2,"));
}

#[test]
fn the_document_of_inspect() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let inspected = run(&[&"inspect", &"--json", &small_checkpoint(folder.path())]);
    assert!(inspected.status.success(), "{}", stderr(&inspected));
    let document = String::from_utf8(inspected.stdout).expect("UTF-8");
    let expected = [
        ".bytes number",
        ".command string",
        ".file string",
        ".histogram null",
        ".metadata.format string",
        ".schema number",
        ".tensors[].bytes number",
        ".tensors[].dtype string",
        ".tensors[].elements number",
        ".tensors[].name string",
        ".tensors[].shape[] number",
        ".tensors[].values.amax null",
        ".tensors[].values.amax number",
        ".tensors[].values.infinite number",
        ".tensors[].values.max null",
        ".tensors[].values.max number",
        ".tensors[].values.min null",
        ".tensors[].values.min number",
        ".tensors[].values.nan number",
        ".tensors[].values.zeros number",
        ".version string",
    ];
    assert_eq!(shape_of(&document), expected);
    let parsed: Value = serde_json::from_str(&document).expect("JSON");
    let matrix = parsed["tensors"].as_array().expect("an array").iter().find(|tensor| tensor["name"] == "matrix");
    assert_eq!(matrix.expect("it is there")["values"]["amax"], f64::from(67f32 * 0.37));
}

#[test]
fn the_document_of_dequantize() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let (input, output) = (small_checkpoint(folder.path()), folder.path().join("quantized"));
    common::quantize(&input, &output).expect("a valid checkpoint");
    let restored = run(&[&"dequantize", &"--json", &"--device", &"emulated", &"-i", &output, &"-o", &folder.path().join("restored")]);
    assert!(restored.status.success(), "{}", stderr(&restored));
    let document = String::from_utf8(restored.stdout).expect("UTF-8");
    let expected = [
        ".command string",
        ".copied_tensors number",
        ".device.name string",
        ".device.reason string",
        ".device.requested string",
        ".direction string",
        ".format string",
        ".input string",
        ".input_bytes number",
        ".output string",
        ".output_bytes number",
        ".restored[].dtype string",
        ".restored[].name string",
        ".restored[].shape[] number",
        ".schema number",
        ".seconds number",
        ".version string",
    ];
    assert_eq!(shape_of(&document), expected);
    let parsed: Value = serde_json::from_str(&document).expect("JSON");
    assert_eq!((&parsed["schema"], &parsed["restored"][0]["dtype"], &parsed["copied_tensors"]), (&2.into(), &"BF16".into(), &5.into()));
}

#[test]
fn the_document_of_compare() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let input = small_checkpoint(folder.path());
    let other = folder.path().join("other");
    std::fs::write(&other, common::file(r#"{"bias":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},"scalar":{"dtype":"F32","shape":[],"data_offsets":[4,8]},"new":{"dtype":"U8","shape":[0],"data_offsets":[8,8]}}"#, &[0; 8])).expect("a writable folder");
    let compared = run(&[&"compare", &"--json", &input, &other, &"--max-relative", &"0.5"]);
    assert_eq!(compared.status.code(), Some(1), "{}", stderr(&compared));
    let expected = [
        ".command string",
        ".only_in_other[] string",
        ".only_in_reference[] string",
        ".other string",
        ".reference string",
        ".schema number",
        ".tensors[].difference null",
        ".tensors[].difference.cosine number",
        ".tensors[].difference.equal bool",
        ".tensors[].difference.max_error number",
        ".tensors[].difference.relative number",
        ".tensors[].difference.snr_db number",
        ".tensors[].difference.special number",
        ".tensors[].dtypes[] string",
        ".tensors[].name string",
        ".tensors[].shapes[][] number",
        ".version string",
    ];
    assert_eq!(shape_of(&String::from_utf8(compared.stdout).expect("UTF-8")), expected);
}

#[test]
fn the_document_with_a_histogram() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let picture = folder.path().join("picture.svg");
    let inspected = run(&[&"inspect", &"--json", &small_checkpoint(folder.path()), &"--histogram", &picture]);
    let parsed: Value = serde_json::from_slice(&inspected.stdout).expect("JSON");
    let expected = serde_json::json!({ "output": picture.to_str().expect("UTF-8"), "tensor": "matrix" });
    assert_eq!(parsed["histogram"], expected);
}

#[test]
fn the_documents_of_shard_and_join() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let (input, prefix, joined) = (small_checkpoint(folder.path()), folder.path().join("p"), folder.path().join("joined"));
    let document = |words: &[&dyn AsRef<std::ffi::OsStr>]| {
        let done = run(words);
        assert!(done.status.success(), "{}", stderr(&done));
        String::from_utf8(done.stdout).expect("UTF-8")
    };
    let common = [".command string", ".format string", ".ranks number", ".schema number", ".version string"];
    let expected = |more: &[&'static str]| common.iter().chain(more).map(|line| (*line).to_owned()).collect::<BTreeSet<_>>();
    let found = |document: &str| shape_of(document).into_iter().collect::<BTreeSet<_>>();
    let shard: [&dyn AsRef<std::ffi::OsStr>; 8] = [&"shard", &"--json", &"-i", &input, &"--ranks", &"2", &"--format", &"mxfp8"];
    let written = document(&[&shard[..], &[&"--device", &"emulated", &"--output-prefix", &prefix]].concat());
    let of_files = [
        ".device.name string",
        ".device.reason string",
        ".device.requested string",
        ".direction string",
        ".files[].bytes number",
        ".files[].file string",
        ".files[].rank number",
        ".input string",
        ".input_bytes number",
        ".model string",
        ".plan null",
        ".seconds number",
        ".tensors[].action string",
        ".tensors[].dtype string",
        ".tensors[].name string",
        ".tensors[].reason null",
        ".tensors[].reason string",
        ".tensors[].rows[] number",
        ".tensors[].shape[] number",
        ".tensors[].sides[].amax number",
        ".tensors[].sides[].direction string",
        ".tensors[].sides[].exact bool",
        ".tensors[].sides[].non_finite number",
        ".tensors[].sides[].saturated number",
        ".tensors[].sides[].snr_db number",
        ".tensors[].sides[].zeros number",
    ];
    assert_eq!(found(&written), expected(&of_files));
    let parsed: Value = serde_json::from_str(&written).expect("JSON");
    let matrix = parsed["tensors"].as_array().expect("an array").iter().find(|tensor| tensor["name"] == "matrix").expect("it is there");
    assert_eq!((&matrix["action"], &matrix["rows"]), (&"quantized".into(), &serde_json::json!([2, 0])));
    let planned = document(&[&shard[..], &[&"--plan"]].concat());
    let of_plan = [
        ".device null",
        ".direction string",
        ".input string",
        ".input_bytes number",
        ".model null",
        ".plan.backward_bytes number",
        ".plan.distances[].backward[].slot number",
        ".plan.distances[].backward[].weight string",
        ".plan.distances[].bytes number",
        ".plan.distances[].distance number",
        ".plan.distances[].forward[].slot number",
        ".plan.distances[].forward[].weight string",
        ".plan.distances[].peak_bytes number",
        ".plan.distances[].slots[] number",
        ".plan.elements number",
        ".plan.forward_bytes number",
        ".plan.gradient_buffer_bytes number",
        ".plan.gradient_bytes number",
        ".plan.gradient_slot_bytes number",
        ".plan.largest_bytes number",
        ".plan.main_gradient_bytes number",
        ".plan.master_bytes number",
        ".plan.order string",
        ".plan.rounded number",
        ".plan.shard_bytes number",
        ".plan.step_bytes number",
        ".plan.tied null",
        ".plan.weights number",
        ".plan.wide number",
        ".seconds null",
    ];
    assert_eq!(found(&planned), expected(&of_plan));
    let parts = [1, 2].map(|part| format!("{}-{part:05}-of-00002.safetensors", prefix.display()));
    let together = document(&[&"join", &"--json", &"--inputs", &parts[1], &parts[0], &"--output", &joined]);
    let of_join = [
        ".direction string",
        ".input_bytes number",
        ".inputs[] string",
        ".model string",
        ".output string",
        ".output_bytes number",
        ".seconds number",
        ".tensors number",
        ".unchecked number",
    ];
    assert_eq!(found(&together), expected(&of_join));
    let joined: Value = serde_json::from_str(&together).expect("JSON");
    assert_eq!((&joined["inputs"][0], &joined["model"], &joined["tensors"]), (&parts[0].as_str().into(), &parsed["model"], &14.into()));
}

#[test]
fn the_document_of_attention() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let (input, output) = (folder.path().join("in"), folder.path().join("out"));
    let tensors = ["q", "k", "v", "dout"].map(|name| (name, "BF16", vec![1, 6, 1, 8], bytes(&random(48, 1))));
    write(&input, &tensors.to_vec());
    let words: [&dyn AsRef<std::ffi::OsStr>; 7] = [&"attention", &"--json", &"--device", &"emulated", &"-i", &input, &"-o"];
    let document = |options: &[&'static str]| {
        let words = words.into_iter().chain([&output as &dyn AsRef<std::ffi::OsStr>]);
        let done = run(&words.chain(options.iter().map(|option| option as &dyn AsRef<std::ffi::OsStr>)).collect::<Vec<_>>());
        assert!(done.status.success(), "{}", stderr(&done));
        String::from_utf8(done.stdout).expect("UTF-8")
    };
    let common = [
        ".command string",
        ".device string",
        ".input string",
        ".output string",
        ".schema number",
        ".seconds number",
        ".tensors[].dtype string",
        ".tensors[].name string",
        ".tensors[].shape[] number",
        ".version string",
    ];
    let expected = |more: &[&'static str]| common.into_iter().chain(more.iter().copied()).map(str::to_owned).collect::<BTreeSet<_>>();
    let found = |document: &str| shape_of(document).into_iter().collect::<BTreeSet<_>>();
    assert_eq!(found(&document(&[])), expected(&[".context_parallel null", ".kernels[] string"]));
    let pass = |pass: &'static str| {
        ["kernels[] string", "launches number", "memory number", "received number", "schedule string", "why string"]
            .map(|key| format!(".context_parallel.{pass}.{key}"))
    };
    let ranks = document(&["--backward", "--context-parallel", "ring", "--ranks", "3"]);
    let more = [".context_parallel.bytes number", ".context_parallel.ranks number", ".context_parallel.requested string"];
    let passes = ["forward", "backward"].into_iter().flat_map(pass);
    assert_eq!(found(&ranks), expected(&more).into_iter().chain(passes).collect());
    let parsed: Value = serde_json::from_str(&ranks).expect("JSON");
    let forward = &parsed["context_parallel"]["forward"];
    // Each of three ranks gets two rows of keys and values, of 8 elements of 2 bytes, from two others.
    assert_eq!((&parsed["context_parallel"]["ranks"], &forward["received"]), (&3.into(), &128.into()));
    assert!(forward["launches"].as_u64() >= Some(1) && forward["schedule"] == "ring", "{ranks}");
}
