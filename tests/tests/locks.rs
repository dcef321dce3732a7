//! The lock files of the workspaces beside the main one are those of their manifests: their builds take them as they are (`--locked`).

use std::{env, path::Path, process::Command};

#[test]
fn every_lock_file_is_that_of_its_manifests() {
    if env::var_os("OXTILE_OFFLINE").is_some_and(|value| value == "1") {
        eprintln!("locks: 1 test skipped: cargo looks at crates that may not be here, and OXTILE_OFFLINE=1 forbids fetching them");
        return;
    }
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let listed = Command::new("git").current_dir(&root).args(["ls-files", "*/Cargo.lock"]).output().expect("git runs");
    let listed = String::from_utf8(listed.stdout).expect("UTF-8");
    assert!(listed.lines().any(|lock| lock == "python/Cargo.lock"), "{listed}");
    for lock in listed.lines() {
        let manifest = root.join(lock).with_extension("toml");
        let mut cargo = Command::new(env!("CARGO"));
        let output = cargo.args(["metadata", "--locked", "--quiet", "--format-version", "1", "--manifest-path"]).arg(&manifest).output();
        let output = output.expect("cargo runs");
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(
            output.status.success(),
            "{lock}: run `cargo metadata --manifest-path {} >/dev/null` and commit it: {said}",
            manifest.display()
        );
    }
}
