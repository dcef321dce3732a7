//! The sources of this crate itself: what is kept of a build was made by them, so an edit of one makes it anew.

use crate::source_hash::hex_digest;

/// A file of this folder and its text.
type Source = (&'static str, &'static str);

macro_rules! sources {
    ($($file:literal),*) => { [$(($file, include_str!($file))),*] };
}

/// What the figures of an assembled entry are made by.
const ASSEMBLING: [Source; 2] = sources!["assemble.rs", "machine_code.rs"];

/// What all that a build keeps of its kernels is made by. The flags of the compiler are in the hash of the kernels' sources.
const MEASURING: [Source; 10] = sources![
    "arch.rs",
    "assemble.rs",
    "builder.rs",
    "causes.rs",
    "compile.rs",
    "labels.rs",
    "machine_code.rs",
    "manifest.rs",
    "ptx.rs",
    "run.rs"
];

/// Changes with what the figures of an assembled entry are made by.
pub(crate) fn assembling() -> String {
    hex_digest(ASSEMBLING.map(|(_, text)| text))
}

/// Changes with what kept kernels are made by.
pub(crate) fn measuring() -> String {
    hex_digest(MEASURING.map(|(_, text)| text))
}

#[cfg(test)]
mod tests {
    use std::{collections::BTreeSet, fs, path::Path};

    use super::*;

    /// What finds tools, judges or writes what was kept, or is hashed with the kernels' sources.
    const OTHERS: [&str; 16] = [
        "cuda_tools.rs",
        "dependencies.rs",
        "draft.rs",
        "error.rs",
        "lib.rs",
        "lint.rs",
        "output.rs",
        "own.rs",
        "pack.rs",
        "ratchet.rs",
        "recipe.rs",
        "sass.rs",
        "source_hash.rs",
        "stamp.rs",
        "tool.rs",
        "toolchain.rs",
    ];

    #[test]
    fn every_file_is_known_to_make_what_is_kept_or_not() {
        let listed = MEASURING.iter().map(|(file, _)| *file).chain(OTHERS).map(str::to_owned).collect::<BTreeSet<_>>();
        let files = fs::read_dir(Path::new(env!("CARGO_MANIFEST_DIR")).join("src")).unwrap().map(|entry| entry.unwrap().file_name());
        let files: BTreeSet<_> = files.map(|name| name.into_string().unwrap()).filter(|name| name.ends_with(".rs")).collect();
        assert_eq!(files, listed, "add a new file to MEASURING if what a build keeps depends on it, else to OTHERS");
        assert!(ASSEMBLING.iter().all(|source| MEASURING.contains(source)));
    }
}
