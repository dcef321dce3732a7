//! docs/status.md holds what the registry of kernels and the committed results say.

use std::{fs, path::Path};

use oxtile_benches::status;

#[test]
fn the_page_is_that_of_the_registry_and_the_results() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let page = fs::read_to_string(root.join("docs/status.md")).unwrap();
    let made = status::put(&page, &status::markdown(&root.join("benches/results")).unwrap()).unwrap();
    let differing = page.lines().zip(made.lines()).find(|(old, new)| old != new);
    assert!(page == made, "docs/status.md is stale ({differing:?}): run `cargo run -p oxtile-benches -- --status`");
}
