//! The tables of docs/architecture.md that lead from old paths to new ones lead to files that are there.

use std::fs;
use std::path::{Path, PathBuf};

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("tests/ is in the workspace").to_owned()
}

/// What stands between backticks.
fn quoted(text: &str) -> impl Iterator<Item = &str> {
    text.split('`').skip(1).step_by(2)
}

/// The new paths of all tables, each with the folder that its table names, if any.
fn moves(page: &str) -> Vec<(&str, &str)> {
    let section = page.split("\n## ").find(|text| text.starts_with("Old paths and names")).expect("a section");
    let (mut folder, mut found) = ("", Vec::new());
    for line in section.lines() {
        if line.starts_with("**") {
            folder = quoted(line).next().unwrap_or_default();
        }
        let is_path = |word: &&str| word.ends_with(".rs") || word.ends_with('/');
        found.extend(line.split('|').nth(2).into_iter().flat_map(quoted).filter(is_path).map(|path| (folder, path)));
    }
    found
}

#[test]
fn new_paths_are_there() {
    let page = fs::read_to_string(root().join("docs/architecture.md")).expect("a page");
    let moves = moves(&page);
    assert!(moves.len() > 50, "{} paths: the scan looks in the wrong place", moves.len());
    let is_there = |(folder, path): &(&str, &str)| root().join(folder).join(path).exists() || root().join(path).exists();
    let gone: Vec<_> = moves.into_iter().filter(|found| !is_there(found)).collect();
    assert!(gone.is_empty(), "docs/architecture.md, \"Old paths and names\": no such file, by folder of the table: {gone:?}");
}
