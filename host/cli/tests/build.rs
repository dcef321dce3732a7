//! `oxtile build` compiles the kernels of a crate that knows nothing of this workspace.

mod common;

use std::{fs, path::Path};

use common::{run, stderr};

const KERNEL: &str = r#"//! A kernel crate of another author.
#![no_std]

pub mod negate {
    //! One family.
    use oxtile_tile::prelude::*;

    /// `target[i] = -source[i]`.
    #[kernel(threads = 128, grid = grid)]
    pub fn negate(source: Global<f32>, target: GlobalMut<f32>) {
        let i = u64::from(block::index()[0]) * 128 + u64::from(thread::index());
        if i < source.len() {
            target.store(i, -source.load(i));
        }
    }

    fn grid(args: &NegateArgs<'_>, _: &DeviceLimits) -> Result<Grid, LaunchError> {
        LaunchError::check_length("target", args.source.len(), args.target.len())?;
        Grid::cover("source", args.source.len(), 128)
    }
}
"#;

#[test]
fn a_crate_outside_the_workspace_builds() {
    // Below the target directory, where what is compiled is kept.
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("external-command");
    let dsl = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../gpu/tile").canonicalize().expect("the DSL is there");
    let manifest = format!(
        "[package]\nname = \"somebodys-kernels\"\nedition = \"2024\"\n\n\
         [dependencies]\noxtile-tile = {{ path = {dsl:?} }}\n\n[workspace]\n"
    );
    write(&folder.join("Cargo.toml"), &manifest);
    write(&folder.join("src/lib.rs"), KERNEL);
    let out = tempfile::tempdir().expect("a temporary folder");

    let built = run(&[&"build", &"--manifest-path", &folder.join("Cargo.toml"), &"--out-dir", &out.path()]);
    assert!(built.status.success(), "{}", stderr(&built));
    let printed = String::from_utf8(built.stdout).expect("UTF-8");
    let row = printed.lines().find(|line| line.starts_with("negate")).unwrap_or_else(|| panic!("{printed}"));
    assert_eq!(row.split_whitespace().take(2).collect::<Vec<_>>(), ["negate", "sm_90a"]);
    let manifest = fs::read_to_string(out.path().join("manifest.json")).expect("a manifest");
    assert!(manifest.contains("negate"), "{manifest}");
}

#[test]
fn a_missing_crate_is_named() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let missing = folder.path().join("Cargo.toml");
    let built = run(&[&"build", &"--manifest-path", &missing]);
    assert_eq!(built.status.code(), Some(1));
    let mend = format!("there is no {}; mend: run it in the crate's folder, or name that by --manifest-path", missing.display());
    assert!(stderr(&built).contains(&mend), "{}", stderr(&built));
}

/// A crate that cannot have kernels is refused before anything is compiled.
#[test]
fn a_crate_without_kernels_is_refused_at_once() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let manifest = folder.path().join("Cargo.toml");
    write(&manifest, "[package]\nname = \"plain\"\nedition = \"2024\"\n\n[workspace]\n");
    write(&folder.path().join("src/lib.rs"), "");
    let built = run(&[&"build", &"--manifest-path", &manifest]);
    assert_eq!(built.status.code(), Some(1));
    let expected =
        format!("oxtile: {}: this crate has no kernels: it does not depend on oxtile-tile; see `oxtile new`", manifest.display());
    assert!(stderr(&built).starts_with(&expected) && stderr(&built).lines().count() == 1, "{}", stderr(&built));
}

/// Leaves a file alone that is right, so that cargo does not compile it again.
fn write(path: &Path, text: &str) {
    fs::create_dir_all(path.parent().expect("a folder")).expect("a writable folder");
    if fs::read_to_string(path).ok().as_deref() != Some(text) {
        fs::write(path, text).expect("a writable folder");
    }
}
