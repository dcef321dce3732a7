//! Rules of docs/style.md that the compiler does not know.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("tests/ is in the workspace").to_owned()
}

/// Every Rust file of the workspace, by its path from the root.
fn sources() -> Vec<(String, String)> {
    fn walk(folder: &Path, found: &mut Vec<PathBuf>) {
        for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
            let (path, name) = (entry.path(), entry.file_name().to_string_lossy().into_owned());
            if path.is_dir() && !name.starts_with('.') && name != "target" {
                walk(&path, found);
            } else if name.ends_with(".rs") {
                found.push(path);
            }
        }
    }
    let mut files = Vec::new();
    walk(&root(), &mut files);
    assert!(files.len() > 50, "the walk found {} files: it looks in the wrong place", files.len());
    let text = |path: PathBuf| {
        let name = path.strip_prefix(root()).expect("below the root").to_string_lossy().into_owned();
        (name, fs::read_to_string(&path).expect("a readable source file"))
    };
    files.into_iter().map(text).collect()
}

/// Lines of code that contain `what`, comments left out.
fn lines_with(source: &str, what: &str) -> usize {
    source.lines().filter(|line| !line.trim_start().starts_with("//") && line.contains(what)).count()
}

#[test]
fn instructions_and_targets_stay_in_arch_and_in_the_macro() {
    let allowed =
        |name: &str| name.starts_with("gpu/tile/src/arch/") || name.starts_with("gpu/macros/src/") || name == "tests/tests/tidy.rs";
    // The features of the device compiler can only be named at the crate's root.
    let mut strays: Vec<_> = sources().into_iter().filter(|(name, _)| !allowed(name) && name != "gpu/tile/src/lib.rs").collect();
    strays.retain(|(name, source)| {
        let in_fixture = name.starts_with("gpu/build/");
        let found = ["asm!(", "link_name", "target_feature = ", "cfg(target_arch", "cfg_attr(target_arch"];
        !in_fixture && found.iter().any(|what| lines_with(source, what) > 0)
    });
    let names: Vec<_> = strays.iter().map(|(name, _)| name).collect();
    assert!(names.is_empty(), "device instructions or target switches outside gpu/tile/src/arch: {names:?}");
}

/// `cargo xtask test` compiles for one of the two.
#[test]
fn what_sm_100a_has_sm_120a_has_too() {
    let mut lines = 0;
    for (name, source) in sources().into_iter().filter(|(name, _)| name.starts_with("gpu/tile/src/") || name.starts_with("gpu/src/")) {
        for line in source.lines().filter(|line| line.contains("target_feature")) {
            let names = ["\"sm_100a\"", "\"sm_120a\""].map(|feature| line.contains(feature));
            assert_eq!(names[0], names[1], "{name}: `{}` tells the two apart; build both (xtask/src/kernels.rs)", line.trim());
            lines += usize::from(names[0]);
        }
    }
    assert!(lines > 0, "no line names either: the scan looks in the wrong place");
}

#[test]
fn files_are_short() {
    let long: Vec<_> =
        sources().into_iter().map(|(name, source)| (name, source.lines().count())).filter(|(_, lines)| *lines > 500).collect();
    assert!(long.is_empty(), "split by noun: {long:?}");
}

/// The examples of docs/kernels.md for what is not a matrix: a kernel with its grid is one page.
#[test]
fn kernels_of_a_training_step_have_at_most_100_lines() {
    let files = ["adamw/mod", "cross_entropy/mod", "embedding", "rms_norm/backward", "rms_norm/forward", "rotary/mod"];
    let sources = sources();
    for file in files.map(|file| format!("gpu/src/{file}.rs")) {
        let (_, source) = sources.iter().find(|(name, _)| *name == file).unwrap_or_else(|| panic!("{file} is not there"));
        let lines = source.lines().map(str::trim).filter(|line| !line.is_empty() && !line.starts_with("//")).count();
        assert!(lines <= 100, "{file} has {lines} lines of code");
    }
}

/// A kernel developer finds the commands for one case, one kernel and one family in both places.
#[test]
fn commands_for_one_kernel_are_on_the_pages() {
    for page in ["README.md", "docs/kernels.md"] {
        let text = fs::read_to_string(root().join(page)).expect("a page");
        for command in ["cargo run -p oxtile-tests -- ", "cargo xtask kernel NAME --emulate", "cargo xtask build-ptx --family F"] {
            assert!(text.contains(command), "{page} lacks `{command}`");
        }
    }
}

#[test]
fn libraries_do_not_print() {
    let library = |name: &str| {
        let of_library = ["gpu/src/", "gpu/tile/src/", "gpu/emulator/src/", "gpu/build/src/", "host/src/"];
        of_library.iter().any(|folder| name.starts_with(folder)) && !name.contains("/bin/")
    };
    let prints: Vec<_> = sources()
        .into_iter()
        .filter(|(name, source)| library(name) && (lines_with(source, "println!(") > 0 || lines_with(source, "dbg!(") > 0))
        .map(|(name, _)| name)
        .collect();
    assert!(prints.is_empty(), "return it or use `tracing`: {prints:?}");
}

#[test]
fn nothing_is_left_for_later() {
    let open: Vec<_> = sources()
        .into_iter()
        .filter(|(name, _)| name != "tests/tests/tidy.rs")
        .filter(|(_, source)| ["todo!(", "unimplemented!(", "#[ignore"].iter().any(|what| lines_with(source, what) > 0))
        .map(|(name, _)| name)
        .collect();
    assert!(open.is_empty(), "finish or remove: {open:?}");
}

/// A variable that is not the project's own is a leftover of an experiment.
#[test]
fn cases_read_variables_of_oxtile_alone() {
    let reads = |source: &str| -> Vec<String> {
        let calls = ["env::var(\"", "env::var_os(\""];
        let names = calls.iter().flat_map(|call| source.split(call).skip(1)).map(|rest| rest.split('"').next().unwrap_or(rest).to_owned());
        names.collect()
    };
    let of_cases = sources().into_iter().filter(|(name, _)| name.starts_with("tests/src/"));
    let read: Vec<_> = of_cases.flat_map(|(name, source)| reads(&source).into_iter().map(move |read| (name.clone(), read))).collect();
    assert!(!read.is_empty(), "no case reads a variable: the scan looks in the wrong place");
    let others: Vec<_> = read.iter().filter(|(_, variable)| !variable.starts_with("OXTILE_")).collect();
    assert!(others.is_empty(), "cases read variables that do not begin with OXTILE_: {others:?}");
}

/// The registries list every `#[kernel]` of their crates.
#[test]
fn registries_are_complete() {
    let all = sources();
    for (folder, registry) in [("gpu/src/", oxtile_kernels::KERNELS), ("tests/conformance/src/", oxtile_conformance::KERNELS)] {
        let listed: BTreeSet<_> = registry.iter().map(|family| family.name.to_owned()).collect();
        let written: BTreeSet<_> = all.iter().filter(|(name, _)| name.starts_with(folder)).flat_map(|(_, s)| kernels_of(s)).collect();
        assert!(!written.is_empty());
        assert_eq!(listed, written, "{folder}lib.rs: KERNELS and the #[kernel] functions differ");
        for info in registry.iter().flat_map(|family| family.instances) {
            assert!(info.threads.is_multiple_of(32) && info.threads <= 1024, "{}: {} threads", info.name, info.threads);
            assert!(info.shared_bytes <= 227 * 1024, "{}: {} bytes of shared memory", info.name, info.shared_bytes);
        }
    }
}

/// Names of the functions under `#[kernel]`.
fn kernels_of(source: &str) -> Vec<String> {
    let mut names = Vec::new();
    let mut under_attribute = false;
    for line in source.lines() {
        under_attribute |= line.starts_with("#[kernel(");
        if let Some(rest) = line.strip_prefix("pub fn ").filter(|_| under_attribute) {
            names.push(rest.chars().take_while(|c| c.is_alphanumeric() || *c == '_').collect());
            under_attribute = false;
        }
    }
    names
}

/// `oxtile-build` compiles a family alone where each has a feature: without one, an edit compiles all kernels again.
#[test]
fn every_family_is_a_feature() {
    let manifest = fs::read_to_string(root().join("gpu/Cargo.toml")).expect("the manifest of the kernels");
    let features =
        manifest.split_once("[features]").and_then(|(_, rest)| rest.split_once("\n[")).expect("features, and a table after them").0;
    let (all, each) = features.split_once("all = [").and_then(|(_, rest)| rest.split_once(']')).expect("the feature `all`");
    for info in oxtile_kernels::KERNELS.iter().flat_map(|family| family.instances) {
        let family = info.family;
        assert!(each.contains(&format!("\n{family} = [")), "gpu/Cargo.toml: no feature `{family}`");
        assert!(all.contains(&format!("\"{family}\"")), "gpu/Cargo.toml: `{family}` is not in `all`");
    }
}

/// What a newcomer copies looks for races, and for memory without a value.
#[test]
fn pages_show_the_emulator_that_checks() {
    let page = |name: &str| fs::read_to_string(root().join(name)).unwrap_or_else(|error| panic!("{name}: {error}"));
    for name in ["README.md", "docs/kernels.md", "docs/own-crate.md"] {
        let text = page(name);
        let blocks: Vec<_> = text.split("```").skip(1).step_by(2).collect();
        assert!(!blocks.is_empty(), "{name}");
        assert!(!blocks.iter().any(|block| block.contains("emulated_fast(")), "{name} shows the emulator that checks nothing");
    }
    assert!(page("README.md").contains("Runtime::checked("));
    assert!(page("host/cli/src/new/test.rs.in").contains("testing::seeds("));
}

/// The first page is read whole: what it is, two commands, a kernel, five things, where to read on.
#[test]
fn the_first_page_is_short() {
    let text = fs::read_to_string(root().join("README.md")).expect("README.md");
    let lines = text.lines().count();
    assert!(lines <= 120, "README.md has {lines} lines, of at most 120: what is a table of facts belongs into docs/status.md");
    let commands = text.split("## Two commands").nth(1).and_then(|rest| rest.split("```").nth(1)).expect("a block of commands");
    assert_eq!(commands.lines().filter(|line| line.starts_with("cargo xtask ")).count(), 2, "{commands}");
}

/// Most of an edit's compile time hangs on these lines: docs/performance/loop.md.
#[test]
fn the_profile_keeps_edits_short() {
    let manifest = fs::read_to_string(root().join("Cargo.toml")).expect("the workspace's manifest");
    let profile =
        |name: &str| manifest.split_once(&format!("[profile.dev{name}]\n")).expect("a profile").1.split("\n[").next().unwrap_or_default();
    assert!(profile("").contains("lto = \"off\""));
    for package in [".package.oxtile-emulator", ".package.oxtile-tile"] {
        assert!(profile(package).contains("codegen-units = 1"), "{package}");
    }
}
