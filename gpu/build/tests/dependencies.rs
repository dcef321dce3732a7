//! What cannot be compiled for a GPU is told before rustc is started.

use std::{
    env,
    ffi::OsString,
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use oxtile_build::{Builder, Error};

const DEVICE: &str = "#![cfg_attr(target_arch = \"nvptx64\", no_std)]\n";

/// A crate without kernels, which needs no DSL, below a folder of its own.
fn package(root: &Path, name: &str, dependencies: &str, source: &str) {
    let folder = root.join(name);
    fs::create_dir_all(folder.join("src")).unwrap();
    let manifest = format!("[package]\nname = \"{name}\"\nversion = \"1.2.3\"\nedition = \"2024\"\n\n{dependencies}\n");
    fs::write(folder.join("Cargo.toml"), manifest).unwrap();
    fs::write(folder.join("src/lib.rs"), source).unwrap();
}

/// The lines with which the crate `own` is refused.
fn refusal(root: &Path) -> Vec<String> {
    let manifest = root.join("own/Cargo.toml");
    let text = fs::read_to_string(&manifest).unwrap();
    fs::write(&manifest, text + "\n[workspace]\n").unwrap();
    match Builder::new(root.join("own")).on_step(|step| panic!("it was compiled: {step}")).build() {
        Err(error @ Error::NeedsStd(_)) => {
            assert_eq!(format!("{error:?}"), error.to_string(), "a test that returns it prints its text");
            let Error::NeedsStd(lines) = error else { unreachable!() };
            lines
        }
        other => panic!("the build should have been refused: {other:?}"),
    }
}

#[test]
fn a_dependency_that_needs_std_is_named_with_the_table_for_it() {
    let root = tempfile::tempdir().unwrap();
    let table = "move `runtime` to [target.'cfg(not(target_arch = \"nvptx64\"))'.dependencies]";
    package(root.path(), "runtime", "", "");
    package(root.path(), "own", "[dependencies]\nruntime = { path = \"../runtime\" }", DEVICE);
    let manifest = root.path().join("own/Cargo.toml").canonicalize().unwrap();
    let expected = format!("{}: `runtime` needs std, which the GPU does not have: {table}", manifest.display());
    assert_eq!(refusal(root.path()), [expected]);
}

#[test]
fn a_dependency_of_a_dependency_is_found_and_features_are_those_of_the_device() {
    let root = tempfile::tempdir().unwrap();
    let std_by_feature = "#![cfg_attr(not(feature = \"std\"), no_std)]";
    package(root.path(), "numbers", "[features]\nstd = []\n", std_by_feature);
    package(root.path(), "helper", "[dependencies]\nnumbers = { path = \"../numbers\", features = [\"std\"] }", DEVICE);
    let host = "[target.'cfg(not(target_arch = \"nvptx64\"))'.dependencies]\nhelper = { path = \"../helper\" }";
    // The host's helper asks for std of `numbers`, the device does not.
    let own = format!("[dependencies]\nnumbers = {{ path = \"../numbers\" }}\n\n{host}");
    package(root.path(), "own", &own, "");
    let [line] = &refusal(root.path())[..] else { panic!("only the crate's own root is wrong") };
    assert!(line.ends_with("own/src/lib.rs: this crate needs std, which the GPU does not have: begin the file with #![cfg_attr(target_arch = \"nvptx64\", no_std)]"), "{line}");

    package(root.path(), "own", "[dependencies]\nhelper = { path = \"../helper\" }", DEVICE);
    let [line] = &refusal(root.path())[..] else { panic!("one dependency is wrong") };
    assert!(line.contains(": `helper` depends on `numbers`, which needs std, which the GPU does not have: move `helper` to ["), "{line}");
    assert!(line.ends_with(", or leave out the features that ask for it (`default-features = false`)"), "{line}");
}

#[test]
fn a_wrong_dependency_is_told_where_no_compiler_is_found() {
    const CRATE: &str = "OXTILE_TESTED_CRATE";
    if let Some(folder) = env::var_os(CRATE) {
        println!("{}", Builder::new(PathBuf::from(folder)).build().unwrap_err());
        return;
    }
    let root = tempfile::tempdir().unwrap();
    package(root.path(), "runtime", "", "");
    package(root.path(), "own", "[dependencies]\nruntime = { path = \"../runtime\" }\n\n[workspace]", DEVICE);
    let built_with = |path: OsString| {
        // Another process: the variable is of all its threads.
        let mut child = Command::new(env::current_exe().unwrap());
        child.args(["--exact", "a_wrong_dependency_is_told_where_no_compiler_is_found", "--nocapture"]);
        let output = child.env(CRATE, root.path().join("own")).env("OXTILE_RUSTC", "/nothing/rustc").env("PATH", path).output().unwrap();
        String::from_utf8_lossy(&output.stdout).into_owned()
    };
    let text = built_with(env::var_os("PATH").unwrap_or_default());
    assert!(text.contains("`runtime` needs std, which the GPU does not have: move `runtime` to"), "{text}");
    // Also where there is no cargo.
    package(root.path(), "own", "[workspace]", DEVICE);
    for path in [env::var_os("PATH").unwrap_or_default(), "/nothing".into()] {
        let text = built_with(path);
        assert!(text.contains("/nothing/rustc"), "{text}");
    }
}

#[test]
fn a_package_without_a_library_is_told_so() {
    let root = tempfile::tempdir().unwrap();
    package(root.path(), "own", "", "");
    fs::rename(root.path().join("own/src/lib.rs"), root.path().join("own/src/main.rs")).unwrap();
    let lines = refusal(root.path());
    assert!(lines[0].contains("own/Cargo.toml: there is no library (src/lib.rs)"), "{lines:?}");
}
