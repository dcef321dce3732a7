//! What the whole workspace's build compiled, the build of the case binary alone does not compile again.

use std::collections::BTreeSet;
use std::process::Command;

/// The packages that are compiled, each with its features.
fn packages(arguments: &[&str]) -> BTreeSet<String> {
    let mut cargo = Command::new(env!("CARGO"));
    cargo.current_dir(env!("CARGO_MANIFEST_DIR")).args(["tree", "--offline", "--prefix", "none", "--format", "{p} [{f}]"]).args(arguments);
    let output = cargo.output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let lines = String::from_utf8(output.stdout).unwrap();
    lines.lines().filter(|line| line.contains('[')).map(|line| line.trim_end_matches(" (*)").to_owned()).collect()
}

#[test]
fn the_case_binary_has_the_features_of_the_workspace() {
    let whole = packages(&["--workspace", "--edges", "all"]);
    let alone = packages(&["--package", "oxtile-tests", "--edges", "normal,build"]);
    assert!(alone.len() > 20, "{alone:?}");
    let other: Vec<_> = alone.difference(&whole).collect();
    let mend = "give these dependencies the workspace's features in [workspace.dependencies]";
    assert!(other.is_empty(), "compiled twice, with other features: {other:#?}: {mend}");
}
