//! `oxtile explain`: what it says of a record, and what it draws.

use std::path::Path;
use std::process::{Command, Output};

/// A record of a kernel with a conflict, a swizzled box and a pipeline of one stage.
const RECORD: &str = r#"{
    "kernel": "turn__bf16", "launches": 3, "blocks": 4, "threads": 64, "shared_bytes": 1040, "steps": 90,
    "lines": [
        {"file": "src/turn.rs", "line": 20, "operation": "shared_write", "requests": 6, "transactions": 6, "ideal": 6},
        {"file": "src/turn.rs", "line": 24, "operation": "shared_read", "requests": 6, "transactions": 192, "ideal": 6},
        {"file": "src/turn.rs", "line": 25, "operation": "global_write", "requests": 6, "transactions": 48, "ideal": 24}
    ],
    "layout": "Shared",
    "fields": [{"name": "tile", "offset": 0, "bytes": 1024}, {"name": "full", "offset": 1024, "bytes": 16}],
    "boxes": [
        {"place": "`tile` of `Shared`", "dimensions": [64, 8], "element_bytes": 2, "swizzle": 128},
        {"place": "`other` of `Shared`", "dimensions": [64, 8], "element_bytes": 2, "swizzle": 128}
    ],
    "phases": [{
        "mbarrier": "the mbarrier `full` of `Shared`", "offset": 1024, "phase": 0, "ended": 40, "copies": [30, 38],
        "arrivals": {"0": [12, 12]}, "waits": {"1": [14, 44]}
    }]
}"#;

/// A manifest of two kernels, one of two instances.
const MANIFEST: &str = r#"{
    "package": "mine", "source_hash": "", "compiler": "", "ptxas": "", "flags": [], "kernels": {
        "conv__k3": {"name": "conv__k3", "family": "conv", "threads": [32, 1, 1], "architectures": {}},
        "conv__k5": {"name": "conv__k5", "family": "conv", "threads": [32, 1, 1], "architectures": {}},
        "top_k": {"name": "top_k", "family": "top_k", "threads": [32, 1, 1], "architectures": {}}
    }
}"#;

fn explain(folder: &Path, words: &[&str]) -> Output {
    let (records, kernels) = (folder.join("records"), folder.join("kernels"));
    let mut oxtile = Command::new(env!("CARGO_BIN_EXE_oxtile"));
    oxtile.arg("explain").args(words).arg("--records").arg(records).arg("--kernels").arg(kernels);
    oxtile.output().unwrap()
}

fn with_record() -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    std::fs::create_dir(folder.path().join("records")).unwrap();
    std::fs::write(folder.path().join("records/turn__bf16.json"), RECORD).unwrap();
    folder
}

#[test]
fn a_record_is_told_line_by_line() {
    let folder = with_record();
    let output = explain(folder.path(), &["turn"]);
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let rows: Vec<Vec<&str>> = text.lines().map(|line| line.split_whitespace().collect()).collect();
    for row in [
        &["kernel", "turn__bf16"][..],
        &["tile", "0", "1024"],
        &["src/turn.rs:24", "read", "6", "192", "6", "32.00"],
        &["src/turn.rs:20", "write", "6", "6", "6", "1.00"],
        &["src/turn.rs:25", "write", "6", "48", "24", "2.00"],
    ] {
        assert!(rows.iter().any(|found| found == row), "{row:?} is not in\n{text}");
    }
    let place = |line: &str| text.find(line).unwrap();
    assert!(place("turn.rs:24") < place("turn.rs:20"), "what costs the most comes first:\n{text}");
    assert!(text.contains("not compiled: `oxtile build`"), "{text}");
}

#[test]
fn pictures_are_drawn_of_each_shape_once() {
    let folder = with_record();
    let pictures = folder.path().join("pictures");
    let output = explain(folder.path(), &["turn__bf16", "--svg", pictures.to_str().unwrap()]);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let mut names: Vec<_> = std::fs::read_dir(&pictures).unwrap().map(|file| file.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    assert_eq!(names, ["turn__bf16.box1.svg", "turn__bf16.stages.svg"]);
    let picture = |name: &str| std::fs::read_to_string(pictures.join(name)).unwrap();
    let swizzle = picture("turn__bf16.box1.svg");
    assert!(swizzle.contains("a swizzle of 128 bytes") && swizzle.matches(">row 7, chunk ").count() == 8, "{swizzle}");
    let stages = picture("turn__bf16.stages.svg");
    for part in
        ["steps of the emulator's scheduler", ">phase 0: 0 to 40<", ">warp 1<", "waits for phase 0", "arrives at phase 0", ">44 steps<"]
    {
        assert!(stages.contains(part), "{part} is not in {stages}");
    }
}

#[test]
fn a_kernel_of_which_nothing_is_known_is_told_how_to_learn_of_it() {
    let folder = with_record();
    let output = explain(folder.path(), &["gemm"]);
    let text = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(1), "{text}");
    for part in ["begins with `gemm`", "`oxtile build`", "OXTILE_EXPLAIN="] {
        assert!(text.contains(part), "{part} is not in {text}");
    }
    assert!(text.contains("kernels has no compiled one"), "{text}");
    std::fs::create_dir(folder.path().join("kernels")).unwrap();
    std::fs::write(folder.path().join("kernels/manifest.json"), MANIFEST).unwrap();
    let text = String::from_utf8(explain(folder.path(), &["gem"]).stderr).unwrap();
    assert!(text.contains("kernels has others (conv, top_k), and"), "{text}");
    std::fs::write(folder.path().join("records/gemm.json"), "{}").unwrap();
    let text = String::from_utf8(explain(folder.path(), &["gemm"]).stderr).unwrap();
    assert!(text.contains("gemm.json") && text.contains("run the test again"), "{text}");
}
