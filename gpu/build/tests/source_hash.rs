//! The source hash changes with what the PTX is made from, and with nothing else.

use std::{fs, path::Path};

use oxtile_build::source_hash::{cargo_directives, source_hash};
use oxtile_build::stamp;

fn write(path: &Path, text: &str) {
    fs::create_dir_all(path.parent().unwrap()).unwrap();
    fs::write(path, text).unwrap();
}

/// A workspace: `kernels` uses `dsl` through the workspace's table, `emulator` on the host only.
fn workspace() -> tempfile::TempDir {
    let root = tempfile::tempdir().unwrap();
    let at = |place: &str| root.path().join(place);
    write(&at("Cargo.toml"), "[workspace]\n[workspace.dependencies]\ndsl = { path = \"dsl\" }\n");
    let kernels = "[package]\nname = \"kernels\"\n[dependencies]\ndsl.workspace = true\nhalf = \"2\"\n\
                   [target.'cfg(not(target_arch = \"nvptx64\"))'.dependencies]\nemulator = { path = \"../emulator\" }\n";
    write(&at("kernels/Cargo.toml"), kernels);
    for name in ["dsl", "emulator"] {
        write(&at(&format!("{name}/Cargo.toml")), &format!("[package]\nname = \"{name}\"\n"));
    }
    for name in ["kernels", "dsl", "emulator"] {
        write(&at(&format!("{name}/src/lib.rs")), "// sources\n");
    }
    root
}

#[test]
fn it_covers_the_device_sources_only() {
    let root = workspace();
    let hash = || source_hash(root.path().join("kernels")).unwrap();
    let before = hash();
    let changes_with = |place: &str| {
        let path = root.path().join(place);
        let old = fs::read_to_string(&path).unwrap_or_default();
        write(&path, &(old.clone() + "\n# or // more\n"));
        let changed = hash() != before;
        write(&path, &old);
        changed
    };
    for place in ["kernels/src/lib.rs", "kernels/Cargo.toml", "dsl/src/lib.rs"] {
        assert!(changes_with(place), "{place}");
        assert_eq!(hash(), before, "{place} is as it was");
    }
    for place in ["emulator/src/lib.rs", "kernels/README.md", "Cargo.lock"] {
        assert!(!changes_with(place), "{place}");
    }
    for place in ["kernels/src/.lib.rs.swp", "kernels/src/lib.rs~", "kernels/src/#lib.rs#"] {
        write(&root.path().join(place), "what an editor leaves");
        assert_eq!(hash(), before, "{place}");
    }
    write(&root.path().join("kernels/src/more/one.rs"), "");
    assert_ne!(hash(), before);
}

#[test]
fn it_covers_what_a_package_inherits() {
    let root = workspace();
    let (manifest, kernels) = (root.path().join("Cargo.toml"), root.path().join("kernels"));
    let package = "[package]\nname = \"kernels\"\nedition.workspace = true\n[dependencies]\nhalf.workspace = true\n";
    write(&kernels.join("Cargo.toml"), package);
    let hash = |edition: &str, half: &str, other: &str| {
        let dependencies = format!("[workspace.dependencies]\nhalf = {half}\nother = {other}\n");
        write(&manifest, &format!("[workspace.package]\nedition = {edition}\n{dependencies}"));
        source_hash(&kernels).unwrap()
    };
    let before = hash("'2024'", "'2'", "'1'");
    assert_ne!(hash("'2021'", "'2'", "'1'"), before);
    assert_ne!(hash("'2024'", "{ version = '2', features = ['serde'] }", "'1'"), before);
    assert_eq!(hash("'2024'", "'2'", "'2'"), before, "a dependency of others");
}

#[test]
fn it_covers_what_cargo_reads_in_the_root_alone() {
    let root = workspace();
    let manifest = root.path().join("Cargo.toml");
    let text = fs::read_to_string(&manifest).unwrap();
    let hash = |more: &str| {
        write(&manifest, &format!("{text}{more}"));
        source_hash(root.path().join("kernels")).unwrap()
    };
    let before = hash("");
    for more in
        ["[profile.release]\noverflow-checks = true\n", "[profile.ptx]\nopt-level = 1\n", "[patch.crates-io]\nhalf = { path = \"half\" }\n"]
    {
        assert_ne!(hash(more), before, "{more}");
    }
    assert_eq!(hash("[profile.dev]\nopt-level = 1\n"), before, "a profile of others");
}

#[test]
fn it_does_not_depend_on_the_place_or_the_line_ends() {
    let (one, other) = (workspace(), workspace());
    write(&other.path().join("dsl/src/lib.rs"), "// sources\r\n");
    let hash = |root: &Path| source_hash(root.join("kernels")).unwrap();
    assert_eq!(hash(one.path()), hash(other.path()));
}

#[test]
fn the_build_script_watches_every_source_folder() {
    let root = workspace();
    let text = cargo_directives(root.path().join("kernels")).unwrap();
    let (head, rest) = text.split_once("\ncargo::rustc-env=OXTILE_SOURCE_HASH=").unwrap();
    assert_eq!(head, "cargo::rerun-if-env-changed=OXTILE_BUILD_NESTED");
    // From the package on: cargo keeps these, also where the whole is copied elsewhere.
    let watched: Vec<_> = rest.lines().skip(1).map(|line| line.strip_prefix("cargo::rerun-if-changed=").unwrap()).collect();
    // The workspace's manifest too: packages inherit from it.
    assert_eq!(watched, ["../dsl/Cargo.toml", "../dsl/src", "Cargo.toml", "src", "../Cargo.toml"]);
}

#[test]
fn a_missing_dependency_is_named() {
    let root = workspace();
    fs::remove_dir_all(root.path().join("dsl")).unwrap();
    let error = source_hash(root.path().join("kernels")).unwrap_err().to_string();
    assert!(error.contains("dsl") && error.contains("source hash"), "{error}");
}

/// The hash that the build script of the kernel crate in a folder compiles in.
fn compiled_in(folder: &Path) -> String {
    let text = cargo_directives(folder).unwrap();
    text.lines().find_map(|line| line.strip_prefix("cargo::rustc-env=OXTILE_SOURCE_HASH=")).unwrap().to_owned()
}

#[test]
fn a_package_has_the_hash_of_the_workspace_until_it_is_edited() {
    let (root, package) = (workspace(), tempfile::tempdir().unwrap());
    let checkout = root.path().join("kernels");
    let (hash, at) = (source_hash(&checkout).unwrap(), |place: &str| package.path().join(place));
    // As cargo packs it: another manifest, no crate beside it.
    write(&at("Cargo.toml"), "[package]\nname = \"kernels\"\n[dependencies]\ndsl = \"=0.1.0\"\nhalf = \"2\"\n");
    write(&at("Cargo.toml.orig"), &fs::read_to_string(checkout.join("Cargo.toml")).unwrap());
    write(&at("src/lib.rs"), "// sources\n");
    write(&at(stamp::FILE), &stamp::stamp(&checkout).unwrap());
    assert_eq!(compiled_in(package.path()), hash);
    write(&at("README.md"), "not a source");
    assert_eq!(compiled_in(package.path()), hash);

    write(&at("src/lib.rs"), "// sources, edited where they were vendored\n");
    let edited = compiled_in(package.path());
    assert!(edited.starts_with("edited-") && edited.len() > 64, "{edited}");

    write(&at(stamp::FILE), "one line\n");
    let error = cargo_directives(package.path()).unwrap_err().to_string();
    assert!(error.contains("SOURCE_HASH") && error.contains("two lines"), "{error}");
}

#[test]
fn a_stamp_that_was_left_in_a_checkout_is_not_read() {
    let root = workspace();
    let checkout = root.path().join("kernels");
    write(&checkout.join(stamp::FILE), &stamp::stamp(&checkout).unwrap());
    write(&checkout.join("src/lib.rs"), "// edited since\n");
    assert_eq!(compiled_in(&checkout), source_hash(&checkout).unwrap());
}
