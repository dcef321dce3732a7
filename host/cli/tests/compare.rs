//! `oxtile compare`: what is equal, and what is not.

mod common;

use common::{run, stderr, tensors::write};

/// Type, elements, bytes of both, and whether they are equal; none where they cannot be compared.
type Case = (&'static str, usize, Vec<u8>, Vec<u8>, Option<bool>);

#[test]
fn only_what_is_equal_is_called_so() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let [left, right] = ["left", "right"].map(|name| folder.path().join(name));
    let integers = |value: i64| value.to_le_bytes().to_vec();
    let floats = |values: &[f64]| values.iter().flat_map(|value| value.to_le_bytes()).collect::<Vec<_>>();
    let nan = |payload: u64| (f64::NAN.to_bits() | payload).to_le_bytes().to_vec();
    let cases: [Case; 9] = [
        ("I64", 1, integers(1 << 53), integers((1 << 53) + 1), Some(false)),
        ("I64", 1, integers(i64::MIN), integers(i64::MIN), Some(true)),
        ("F64", 2, floats(&[1e-170, 1.0]), floats(&[2e-170, 1.0]), Some(false)),
        ("F64", 2, floats(&[1e200, 1.0]), floats(&[1.1e200, 1.0]), Some(false)),
        ("F64", 2, floats(&[0.0, 1.0]), floats(&[-0.0, 1.0]), Some(true)),
        ("F64", 1, nan(1), nan(2), Some(true)),
        ("F6_E2M3", 4, vec![1, 2, 3], vec![1, 2, 3], Some(true)),
        ("C64", 1, vec![7; 8], vec![7; 8], Some(true)),
        ("C64", 1, vec![7; 8], vec![8; 8], None),
    ];
    for (dtype, elements, a, b, equal) in cases {
        write(&left, &vec![("t", dtype, vec![elements], a)]);
        write(&right, &vec![("t", dtype, vec![elements], b)]);
        let done = run(&[&"compare", &left, &right, &"--max-relative", &"0", &"--json"]);
        let document: serde_json::Value = serde_json::from_slice(&done.stdout).expect("JSON");
        let difference = &document["tensors"][0]["difference"];
        assert_eq!(difference["equal"].as_bool(), equal, "{dtype}: {difference}");
        assert_eq!(done.status.success(), equal == Some(true), "{dtype}: {}", stderr(&done));
        if dtype == "F64" && equal == Some(false) {
            assert!(difference["relative"].as_f64().is_some_and(|relative| relative > 0.0), "{difference}");
            assert!(difference["cosine"].as_f64().is_some_and(|cosine| cosine > 0.99), "{difference}");
        }
    }
}
