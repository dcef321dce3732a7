//! A crate that has a feature for each of its families is compiled a family at a time, each in two halves.

use std::{
    env, fs,
    os::unix::fs::symlink,
    path::{Path, PathBuf},
    thread,
    time::{Duration, SystemTime},
};

use oxtile_build::{Builder, Manifest};

/// A kernel that writes a number, in a family of its own.
fn family(number: u32) -> String {
    format!(
        "use oxtile_tile::prelude::*;\n\n\
         #[kernel(threads = 32, grid = one_block)]\npub fn write_{number}(target: GlobalMut<u32>) {{\n    target.store(0, {number});\n}}\n\n\
         fn one_block(_: &Write{number}Args<'_>, _: &DeviceLimits) -> Result<Grid, LaunchError> {{\n    Grid::cover(\"target\", 1, 1)\n}}\n"
    )
}

/// Where rustc's output of the crate's halves lies. `cargo xtask test` names one target directory for all.
fn emitted(root: &Path) -> [PathBuf; 2] {
    let target = env::var_os("CARGO_TARGET_DIR").map_or_else(|| root.join("target"), PathBuf::from);
    ["ptx/cargo", "ptx/cargo-half"].map(|half| target.join(half).join("emitted").join(root.file_name().unwrap()))
}

/// Removes what earlier tests left there.
fn forget(root: &Path) {
    emitted(root).iter().for_each(|folder| _ = fs::remove_dir_all(folder));
}

/// When the PTX of each half of a family was written.
fn written(root: &Path) -> Vec<(String, SystemTime)> {
    let mut found = Vec::new();
    let mut folders = emitted(root).to_vec();
    while let Some(folder) = folders.pop() {
        for path in fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()) {
            match path.extension().and_then(|extension| extension.to_str()) {
                None => folders.push(path),
                Some("ptx") => {
                    found.push((path.file_name().unwrap().to_str().unwrap().into(), path.metadata().unwrap().modified().unwrap()))
                }
                Some(_) => {}
            }
        }
    }
    found.sort();
    found
}

/// Lays a crate out that is called as its folder. Its target directory is that of the other crates outside the workspace, in which `core` is compiled once.
fn lay_out(root: &Path, features: &str) -> PathBuf {
    let shared = root.with_file_name("external").join("kernels/target");
    fs::create_dir_all(&shared).unwrap();
    fs::create_dir_all(root).unwrap();
    if !root.join("target").exists() {
        symlink(&shared, root.join("target")).unwrap();
    }
    let tile = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tile").canonicalize().unwrap();
    let manifest = format!(
        "[package]\nname = {:?}\nedition = \"2024\"\n\n[features]\n{features}\n\n[package.metadata.oxtile]\nfamily-features = true\n\n[dependencies]\noxtile-tile = {{ path = {tile:?} }}\n\n[workspace]\n",
        root.file_name().unwrap()
    );
    fs::create_dir_all(root.join("src")).unwrap();
    fs::write(root.join("Cargo.toml"), manifest).unwrap();
    fs::write(root.join("src/lib.rs"), "#![no_std]\n#[cfg(feature = \"one\")]\npub mod one;\n#[cfg(feature = \"two\")]\npub mod two;\n")
        .unwrap();
    fs::write(root.join("src/one.rs"), family(1)).unwrap();
    fs::write(root.join("src/two.rs"), family(2)).unwrap();
    root.to_owned()
}

#[test]
fn a_family_is_compiled_again_where_its_files_changed() {
    let root = Path::new(env!("CARGO_TARGET_TMPDIR")).join("divided");
    let folder = lay_out(&root, "default = [\"one\", \"two\"]\none = []\ntwo = []");
    forget(&root);
    let build = || {
        let build = Builder::new(&folder).build().unwrap();
        build.kernels.iter().map(|kernel| fs::read_to_string(&kernel.ptx).unwrap()).collect::<Vec<_>>()
    };
    let first = build();
    // `write_1` is of the second half, `write_2` of the first.
    assert_eq!(first.len(), 2);
    let before = written(&root);
    assert!(before.iter().map(|(name, _)| name.split('-').next().unwrap()).eq(["one.0", "one.1", "two.0", "two.1"]), "{before:?}");

    fs::write(folder.join("src/two.rs"), family(2).replace(", 2);", ", 3);")).unwrap();
    let second = build();
    assert_eq!(first[0], second[0]);
    assert_ne!(first[1], second[1], "the edited kernel is the old one");
    let after = written(&root);
    assert_eq!(after[..2], before[..2], "a family without an edit was compiled again");
    assert!(after[2].1 > before[2].1 && after[3].1 > before[3].1);

    // Another manifest, with which the kernel was another, and back.
    let manifest = fs::read_to_string(folder.join("Cargo.toml")).unwrap();
    fs::write(folder.join("Cargo.toml"), manifest.replace("two = []", "two = [\"one\"]")).unwrap();
    fs::write(folder.join("src/two.rs"), family(2).replace(", 2);", ", 4);")).unwrap();
    assert_ne!(build()[1], second[1]);
    fs::write(folder.join("Cargo.toml"), manifest).unwrap();
    fs::write(folder.join("src/two.rs"), family(2).replace(", 2);", ", 3);")).unwrap();
    assert_eq!(build(), second, "the PTX of another manifest was taken");

    // PTX that was removed is made again, though cargo remembers having compiled it.
    for folder in emitted(&root) {
        let of_compiler = fs::read_dir(folder).unwrap().next().unwrap().unwrap().path();
        let ptx = fs::read_dir(of_compiler)
            .unwrap()
            .map(|entry| entry.unwrap().path())
            .filter(|path| path.extension().is_some_and(|kind| kind == "ptx"));
        ptx.for_each(|path| fs::remove_file(path).unwrap());
    }
    fs::write(folder.join("src/two.rs"), family(2)).unwrap();
    assert_eq!(build(), first);
}

#[test]
fn a_kernel_is_in_one_family() {
    let root = Path::new(env!("CARGO_TARGET_TMPDIR")).join("twice");
    let folder = lay_out(&root, "default = [\"one\", \"two\"]\none = []\ntwo = []");
    forget(&root);
    fs::write(folder.join("src/two.rs"), family(1)).unwrap();
    let out = tempfile::tempdir().unwrap();
    let builder = || Builder::new(&folder).out_dir(out.path());
    let refused = |builder: Builder<'_>| builder.build().unwrap_err().to_string();
    let expected = "kernel `write_1` is in the families `one` and `two`: rename one";
    assert_eq!(refused(builder()), expected);
    // Also where the other was built before.
    builder().family("two").build().unwrap();
    assert_eq!(refused(builder().family("one")), expected);
    assert_eq!(Manifest::read(out.path()).unwrap().kernels["write_1"].meta.family, "two");
}

#[test]
fn a_build_that_ends_half_way_leaves_no_manifest() {
    let root = Path::new(env!("CARGO_TARGET_TMPDIR")).join("halfway");
    let folder = lay_out(&root, "default = [\"one\", \"two\"]\none = []\ntwo = []");
    let out = tempfile::tempdir().unwrap();
    let build = || Builder::new(&folder).out_dir(out.path()).build();
    build().unwrap();
    // The cubin of the first kernel changes, that of the second cannot be written.
    fs::write(folder.join("src/one.rs"), family(1).replace(", 1);", ", 3);")).unwrap();
    let [first, second] = ["write_1", "write_2"].map(|name| out.path().join(format!("{name}.sm_90a.cubin")));
    let old = fs::read(&first).unwrap();
    fs::remove_file(&second).unwrap();
    fs::create_dir(&second).unwrap();
    let error = build().unwrap_err().to_string();
    assert!(error.starts_with(&format!("cannot write {}: ", second.display())), "{error}");
    assert_ne!(fs::read(&first).unwrap(), old, "without a change this shows nothing");
    assert!(!out.path().join("manifest.json").exists(), "a manifest names files of other sources");
    fs::remove_dir(&second).unwrap();
    build().unwrap();
    assert_eq!(Manifest::read(out.path()).unwrap().kernels.len(), 2);
    let names = fs::read_dir(out.path()).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap());
    assert_eq!(names.filter(|name| name.contains("manifest")).collect::<Vec<_>>(), ["manifest.json"], "drafts are left");
}

#[test]
fn builds_into_one_folder_wait_for_each_other() {
    let root = Path::new(env!("CARGO_TARGET_TMPDIR")).join("waiting");
    let folder = lay_out(&root, "default = [\"one\", \"two\"]\none = []\ntwo = []");
    let out = tempfile::tempdir().unwrap();
    let build = |family: &str| Builder::new(&folder).family(family).out_dir(out.path()).build().unwrap();
    build("one");
    let two = tempfile::tempdir().unwrap();
    // Compiled before, so that what is waited for is the folder.
    Builder::new(&folder).family("two").out_dir(two.path()).build().unwrap();
    let kernels = || Manifest::read(out.path()).unwrap().kernels.into_keys().collect::<Vec<_>>();
    let lock = fs::File::open(out.path().join(".lock")).unwrap();
    lock.lock().unwrap();
    thread::scope(|scope| {
        let other = scope.spawn(|| build("two"));
        thread::sleep(Duration::from_secs(3));
        assert_eq!(kernels(), ["write_1"], "the folder was written while it was locked");
        lock.unlock().unwrap();
        other.join().unwrap();
    });
    assert_eq!(kernels(), ["write_1", "write_2"]);
}
