//! The JSON documents keep their shape: programs read them. A change here asks for a new `schema` number.

mod common;

use std::collections::BTreeSet;

use common::{run, small_checkpoint, stderr};
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
