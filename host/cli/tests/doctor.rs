//! `oxtile doctor`: it answers on every machine, and what is broken is its status.

mod common;

use std::process::Output;

use common::{oxtile, stderr};
use serde_json::Value;

/// What could be set where the tests run.
const VARIABLES: [&str; 14] = [
    "OXTILE_NCCL",
    "OXTILE_NVSHMEM",
    "OXTILE_KERNELS",
    "OXTILE_JOB_ID",
    "OXTILE_MASTER_PORT",
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "OMPI_COMM_WORLD_RANK",
    "PMI_RANK",
    "SLURM_PROCID",
    "MASTER_ADDR",
    "MASTER_PORT",
    "TORCHELASTIC_USE_AGENT_STORE",
];

fn doctor(arguments: &[&str], variables: &[(&str, &str)]) -> Output {
    let mut command = oxtile();
    VARIABLES.iter().for_each(|name| _ = command.env_remove(name));
    command.arg("doctor").args(arguments).envs(variables.iter().copied()).output().expect("the binary runs")
}

/// The findings of a subject, as JSON.
fn findings(variables: &[(&str, &str)], subject: &str) -> (Option<i32>, Vec<Value>) {
    let done = doctor(&["--json"], variables);
    let document: Value = serde_json::from_slice(&done.stdout).expect("one JSON document");
    let all = document["findings"].as_array().expect("a list").clone();
    let is_broken = all.iter().any(|finding| finding["status"] == "broken");
    assert_eq!(document["healthy"], !is_broken, "{document}");
    assert_eq!(done.status.code(), Some(i32::from(is_broken)), "{document}");
    assert_eq!(stderr(&done).contains("broken: see above"), is_broken, "{}", stderr(&done));
    (done.status.code(), all.into_iter().filter(|finding| finding["subject"] == subject).collect())
}

#[test]
fn every_subject_has_its_lines() {
    let done = doctor(&[], &[]);
    let text = String::from_utf8_lossy(&done.stdout).into_owned();
    let has = |subject: &str| text.lines().any(|line| line.split_whitespace().nth(1) == Some(subject));
    for subject in ["driver", "gpu", "nccl", "nvshmem", "symmetric", "kernels", "launch"] {
        assert!(has(subject), "{subject}: {text}");
    }
    assert_eq!(text.lines().filter(|line| line.contains(" symmetric ")).count(), 4, "{text}");
    assert!(text.contains("ok      symmetric emulated: always"), "{text}");
    assert!(text.contains("absent  launch    this process is alone"), "{text}");
}

#[test]
fn the_document_keeps_its_shape() {
    let document: Value = serde_json::from_slice(&doctor(&["--json"], &[]).stdout).expect("one JSON document");
    let mut keys: Vec<_> = document.as_object().expect("an object").keys().cloned().collect();
    keys.sort();
    assert_eq!(keys, ["command", "findings", "healthy", "schema", "version"]);
    assert_eq!((&document["command"], &document["schema"]), (&"doctor".into(), &1.into()));
    for finding in document["findings"].as_array().expect("a list") {
        let is = |key: &str, also: Option<&str>| finding[key].is_string() || also.is_some() && finding[key].is_null();
        assert!(is("subject", None) && is("found", None) && is("mend", Some("null")), "{finding}");
        assert!(["ok", "absent", "broken"].map(Value::from).contains(&finding["status"]), "{finding}");
        assert_eq!(finding["mend"].is_null(), finding["status"] == "ok", "what is missing says how to mend it: {finding}");
        assert_eq!(finding.as_object().map(serde_json::Map::len), Some(4), "{finding}");
    }
}

#[test]
fn a_library_that_was_named_and_does_not_load_is_broken() {
    for (variable, subject) in [("OXTILE_NCCL", "nccl"), ("OXTILE_NVSHMEM", "nvshmem")] {
        let (status, found) = findings(&[(variable, "/nowhere/lib.so")], subject);
        assert_eq!((status, &found[0]["status"]), (Some(1), &"broken".into()), "{found:?}");
        assert!(found[0]["found"].as_str().is_some_and(|text| text.contains("/nowhere/lib.so")), "{found:?}");
        assert!(found[0]["mend"].as_str().is_some_and(|mend| mend.contains(variable)), "{found:?}");
    }
}

#[test]
fn kernels_are_those_of_this_program_or_broken() {
    let (_, found) = findings(&[("OXTILE_KERNELS", "/nowhere")], "kernels");
    assert_eq!((&found[0]["status"], &found[0]["found"]), (&"broken".into(), &"OXTILE_KERNELS: /nowhere is no folder".into()));
    let folder = tempfile::tempdir().expect("a temporary folder");
    let package = folder.path().join("oxtile-kernels");
    std::fs::create_dir(&package).expect("a writable folder");
    let variables = [("OXTILE_KERNELS", folder.path().to_str().expect("text"))];
    for (manifest, expected) in [("{", "manifest.json"), (r#"{"source_hash": "of another program", "kernels": {}}"#, "of another program")]
    {
        std::fs::write(package.join("manifest.json"), manifest).expect("a writable folder");
        let (status, found) = findings(&variables, "kernels");
        assert_eq!((status, &found[0]["status"]), (Some(1), &"broken".into()), "{found:?}");
        assert!(found[0]["found"].as_str().is_some_and(|text| text.contains(expected)), "{found:?}");
    }
}

#[test]
fn variables_of_a_launcher_are_read_as_a_program_reads_them() {
    let whole =
        [("RANK", "1"), ("WORLD_SIZE", "4"), ("LOCAL_RANK", "1"), ("MASTER_ADDR", "h"), ("MASTER_PORT", "7"), ("OXTILE_JOB_ID", "job 17")];
    let (_, found) = findings(&whole, "launch");
    assert_eq!(found[0]["found"], "rank 1 of 4, 1 on its host, by oxtile launch or torchrun; rank 0 at h:7; JobId(job...)");
    let agent = [&whole[..], &[("TORCHELASTIC_USE_AGENT_STORE", "True")]].concat();
    let (_, found) = findings(&agent, "launch");
    assert!(found[0]["found"].as_str().is_some_and(|text| text.contains("rank 0 at h:8 or one of the 3 ports after it")), "{found:?}");
    let (status, found) = findings(&[("RANK", "1")], "launch");
    assert_eq!((status, &found[0]["status"]), (Some(1), &"broken".into()));
    assert!(found[0]["found"].as_str().is_some_and(|text| text.starts_with("WORLD_SIZE is not set, though RANK is")), "{found:?}");
}
