//! `oxtile timeline`: what is drawn and merged, and what is refused.

mod common;
#[path = "../../examples/timeline.rs"]
mod example;

use std::path::{Path, PathBuf};

use common::{assert_well_formed, names, run, stderr};
use oxtile::timeline::Recording;
use oxtile::{EmulatedOptions, Runtime};

/// The order that the committed picture shows.
const SEED: u64 = 63;

fn recording() -> Recording {
    let options = EmulatedOptions { devices: 2, seed: Some(SEED), ..EmulatedOptions::default() };
    Runtime::emulated_with(options).and_then(|runtime| example::recorded(&runtime)).expect("the program of the example")
}

fn written(folder: &Path, name: &str, recording: &Recording) -> PathBuf {
    let file = folder.join(name);
    recording.write(&file).expect("a writable folder");
    file
}

/// The recording without the other ranks' spans.
fn only(rank: u32) -> Recording {
    let mut recording = recording();
    recording.spans.retain(|span| span.rank == rank);
    recording
}

fn draw(folder: &Path, files: &[&PathBuf]) -> (String, String) {
    let picture = folder.join("picture.svg");
    let done = common::oxtile().arg("timeline").args(files).arg("--svg").arg(&picture).output().expect("the binary runs");
    assert!(done.status.success(), "{}", stderr(&done));
    (String::from_utf8(done.stdout).expect("UTF-8"), std::fs::read_to_string(picture).expect("the picture"))
}

/// A picture in which sources have no line numbers, which change with every edit.
fn without_lines(picture: &str) -> String {
    let mut parts = picture.split(".rs:");
    let first = parts.next().unwrap_or_default().to_owned();
    parts.fold(first, |text, part| text + ".rs" + part.trim_start_matches(|c: char| c.is_ascii_digit() || c == ':'))
}

/// `docs/timeline.svg` is what the tool makes of the example.
#[test]
fn the_committed_picture_is_up_to_date() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let (said, picture) = draw(folder.path(), &[&written(folder.path(), "trace.json", &recording())]);
    assert!(said.starts_with("ranks   2, streams 3\n"), "{said}");
    assert_well_formed(&picture);
    for drawn in ["rank 0", "rank 1", "Timeline of 2 ranks", "steps of the scheduler", "get from device 1", "all_reduce", "class=\"wait\""]
    {
        assert!(picture.contains(drawn), "{drawn} is not in the picture");
    }
    let recording = recording();
    assert_eq!(picture.matches("text-anchor=\"end\">stream ").count(), recording.lanes().len());
    assert_eq!(picture.matches("<title>").count(), recording.spans.len(), "every span is drawn");
    let committed = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/timeline.svg");
    if std::fs::read_to_string(&committed).ok().map(|committed| without_lines(&committed)) != Some(without_lines(&picture)) {
        let new = Path::new(env!("CARGO_TARGET_TMPDIR")).join("timeline.svg");
        std::fs::write(&new, &picture).expect("a writable folder");
        panic!("docs/timeline.svg is another picture: look at the new one, then `cp {} docs/timeline.svg`", new.display());
    }
}

#[test]
fn files_of_ranks_are_merged() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let files = [0, 1].map(|rank| written(folder.path(), &format!("trace.rank{rank}.json"), &only(rank)));
    let (_, picture) = draw(folder.path(), &[&files[1], &files[0]]);
    let whole = written(folder.path(), "whole.json", &recording());
    assert_eq!(picture, draw(folder.path(), &[&whole]).1);
    let merged = folder.path().join("merged.json");
    let done = run(&[&"timeline", &files[0], &files[1], &"--merged", &merged]);
    assert!(done.status.success(), "{}", stderr(&done));
    assert_eq!(Recording::read(&merged).expect("a recording").spans, recording().spans);
}

#[test]
fn what_is_no_recording_is_refused_and_leaves_nothing() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let (good, bad, picture) = (written(folder.path(), "good.json", &recording()), folder.path().join("bad.json"), folder.path().join("p"));
    let text = recording().to_json();
    let mut negative: serde_json::Value = serde_json::from_str(&text).expect("JSON");
    negative["traceEvents"][6]["dur"] = (-1).into();
    let device = text.replace("\"clock\":\"steps\"", "\"clock\":\"device\"");
    let cases: [(String, &str); 8] = [
        (String::new(), "bad.json: not a recording: EOF while parsing a value at line 1 column 0"),
        (text[..text.len() / 2].into(), "bad.json: not a recording: "),
        ("[]".into(), "bad.json: not a recording: invalid length 0"),
        (r#"{"traceEvents":[]}"#.into(), "bad.json: not a recording: missing field `otherData`"),
        (negative.to_string(), "bad.json: event 6 of `traceEvents`: its `dur` is -1"),
        (text.replace("\"cat\":\"wait\"", "\"cat\":\"\\u001b[2J\""), "its `cat` `\\u{1b}[2J` is none of kernel"),
        (device, "bad.json: one counts microseconds of a GPU, the other steps"),
        (text, "bad.json: rank 0 is in two recordings"),
    ];
    for (content, expected) in cases {
        std::fs::write(&bad, content).expect("a writable folder");
        let done = run(&[&"timeline", &good, &bad, &"--svg", &picture]);
        let said = stderr(&done);
        assert!(done.status.code() == Some(1) && said.contains(expected) && said.lines().count() == 1, "{expected}: {said}");
        assert_eq!(names(folder.path()), ["bad.json", "good.json"]);
    }
    std::fs::write(&bad, Recording { spans: Vec::new(), ..recording() }.to_json()).expect("a writable folder");
    assert!(stderr(&run(&[&"timeline", &bad, &"--svg", &picture])).contains("nothing was recorded"));
    let missing = run(&[&"timeline", &folder.path().join("none.json"), &"--svg", &picture]);
    assert!(stderr(&missing).contains("none.json: cannot read it"), "{}", stderr(&missing));
    let itself = run(&[&"timeline", &good, &"--svg", &good]);
    assert!(!itself.status.success() && Recording::read(&good).is_ok(), "the input is not replaced");
}
