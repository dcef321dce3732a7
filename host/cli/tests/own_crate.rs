//! docs/own-crate.md does what it says, outside the workspace.

use std::{
    env, fs,
    path::Path,
    process::{Command, Output},
};

const PAGE: &str = include_str!("../../../docs/own-crate.md");

/// The blocks of the page in a language.
fn blocks(language: &str) -> Vec<&'static str> {
    let begin = format!("```{language}\n");
    PAGE.split(&begin).skip(1).map(|after| after.split("```").next().unwrap_or_default()).collect()
}

/// Runs lines of a shell where nothing is left of the surrounding build but its target folder and what its profile says of all crates: what both depend on is compiled once.
fn shell(folder: &Path, lines: &str) -> Output {
    let program = Path::new(env!("CARGO_BIN_EXE_oxtile")).parent().expect("a folder");
    let path = env::join_paths([program.to_owned()].into_iter().chain(env::split_paths(&env::var_os("PATH").unwrap_or_default())));
    let mut sh = Command::new("sh");
    sh.arg("-ec").arg(lines).current_dir(folder).env("PATH", path.expect("a path"));
    for (name, _) in env::vars_os().filter(|(name, _)| name.to_string_lossy().starts_with("CARGO_") && name != "CARGO_HOME") {
        sh.env_remove(name);
    }
    for (name, value) in env::vars_os().filter(|(name, _)| name == "CARGO_PROFILE_DEV_DEBUG") {
        sh.env(name, value);
    }
    sh.env("CARGO_PROFILE_DEV_LTO", "off");
    sh.env("CARGO_TARGET_DIR", target()).output().expect("a shell")
}

/// The target folder of the surrounding build.
fn target() -> &'static Path {
    Path::new(env!("CARGO_TARGET_TMPDIR")).parent().expect("it is within the target folder")
}

fn passed(output: Output) -> String {
    let text = [output.stdout, output.stderr].map(|bytes| String::from_utf8_lossy(&bytes).into_owned()).concat();
    assert!(output.status.success(), "{text}");
    text
}

fn replace(path: &Path, from: &str, to: &str) {
    let text = fs::read_to_string(path).expect("a file");
    assert!(text.contains(from), "{text}");
    fs::write(path, text.replace(from, to)).expect("a writable file");
}

#[test]
fn the_page_makes_a_crate_that_passes_and_builds() {
    let root = tempfile::tempdir().expect("a temporary folder");
    let [lines] = blocks("sh")[..] else { panic!("the page has one block of commands") };
    let text = passed(shell(root.path(), lines));
    assert!(text.contains("test every_number_is_multiplied ... ok"), "{text}");
    let row = text.lines().find(|line| line.starts_with("scale ")).unwrap_or_else(|| panic!("{text}"));
    assert_eq!(row.split_whitespace().nth(1), Some("sm_90a"), "{row}");
    assert!(!text.contains("warning") && !text.contains("note "), "{text}");

    // The page shows the files as they are.
    let crate_folder = root.path().join("mykernels");
    let file = |place: &str| fs::read_to_string(crate_folder.join(place)).unwrap_or_else(|error| panic!("{place}: {error}"));
    let checkout = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").canonicalize().expect("this checkout");
    assert_eq!(blocks("toml"), [file("Cargo.toml").replace(checkout.to_str().expect("UTF-8"), "OXTILE")]);
    assert_eq!(blocks("rust,ignore"), ["src/lib.rs", "src/scale.rs", "tests/scale.rs", "build.rs"].map(file));

    // It compiles none of Oxtile's kernels.
    let tree = passed(shell(&crate_folder, "cargo tree --quiet --offline --edges normal,build"));
    assert!(tree.contains("oxtile-emulator") && !tree.contains("oxtile-kernels"), "{tree}");

    // Kernels of other sources than the program's are refused, not run.
    let stale = "#[test]\nfn found() {\n    let info = <mykernels::scale::Scale as oxtile_tile::launch::Kernel>::INFO;\n    oxtile::runtime::KernelLibrary::default().find(&info, (9, 0)).unwrap();\n}\n";
    fs::write(crate_folder.join("tests/stale.rs"), stale).expect("a writable file");
    passed(shell(&crate_folder, "cargo test --quiet --test stale"));
    replace(&crate_folder.join("src/scale.rs"), "factor * input", "-factor * input");
    let output = shell(&crate_folder, "cargo test --quiet --test stale");
    let text = [output.stdout, output.stderr].map(|bytes| String::from_utf8_lossy(&bytes).into_owned()).concat();
    assert!(!output.status.success() && text.contains("are stale"), "{text}");
    replace(&crate_folder.join("src/scale.rs"), "-factor * input", "factor * input");
    fs::remove_file(crate_folder.join("tests/stale.rs")).expect("the file that was written");

    // An instance that is not there is one error, where it is loaded, and none where it is launched.
    let kernel = fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("../../gpu/tile/tests/ui/uncompiled_instance.rs"));
    let (kernel, _) = kernel.as_ref().expect("a file").split_once("fn launched").expect("a kernel before it");
    let launch = "#[test]\nfn launched() {\n    let runtime = oxtile::Runtime::checked(1).unwrap();\n    let stream = runtime.device(0).unwrap().stream().unwrap();\n    let mut output = oxtile::Buffer::<bf16>::uninitialised(&stream, 1).unwrap();\n    runtime.load::<Fill<bf16>>().unwrap().launch(&stream, FillArgs { output: output.view_mut() }).unwrap();\n}\n";
    fs::write(crate_folder.join("tests/missing.rs"), format!("{kernel}{launch}")).expect("a writable file");
    let output = shell(&crate_folder, "cargo test --quiet --test missing");
    let text = String::from_utf8_lossy(&output.stderr).into_owned();
    let errors: Vec<_> = text.lines().filter(|line| line.starts_with("error[")).collect();
    assert!(matches!(errors[..], [error] if error.contains("is not a compiled kernel instance")), "{text}");
    fs::remove_file(crate_folder.join("tests/missing.rs")).expect("the file that was written");

    // What an emulated run records, the program explains.
    passed(shell(&crate_folder, "OXTILE_EXPLAIN=$PWD/records cargo test --quiet"));
    let text = passed(shell(&crate_folder, "oxtile explain scale --records records --kernels $CARGO_TARGET_DIR/oxtile/kernels"));
    assert!(text.contains("src/scale.rs:") && text.contains("registers"), "{text}");

    // What the checks are for: an element too far is a report, not a passing test.
    let kernel = crate_folder.join("src/scale.rs");
    replace(&kernel, "i < input.len()", "i <= input.len()");
    let output = shell(&crate_folder, "cargo test --quiet");
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(!output.status.success() && text.contains("index 600 of `input`, which has length 600"), "{text}");
    replace(&kernel, "i <= input.len()", "i < input.len()");

    // A host's dependency in the wrong table, and no hash.
    let manifest = crate_folder.join("Cargo.toml");
    replace(&manifest, "[target.'cfg(not(target_arch = \"nvptx64\"))'.dependencies]\n", "");
    let output = shell(&crate_folder, "oxtile build");
    let text = String::from_utf8_lossy(&output.stderr).into_owned();
    let mend = "needs std, which the GPU does not have: move `oxtile` to [target.'cfg(not(target_arch = \"nvptx64\"))'.dependencies]";
    assert!(!output.status.success() && text.contains(mend) && text.lines().count() <= 2, "{text}");
    replace(&manifest, "oxtile = {", "[target.'cfg(not(target_arch = \"nvptx64\"))'.dependencies]\noxtile = {");
    replace(&crate_folder.join("src/lib.rs"), "oxtile_tile::source_hash!();\n", "");
    let text = passed(shell(&crate_folder, "oxtile build --accept"));
    assert!(text.contains("note    mykernels: programs do not know the hash of these sources"), "{text}");
    assert!(file("ratchet/scale.toml").contains("scale.sm_90a = { registers = "));

    // A kernel that is refused is in the table all the same.
    let accepted = "scale.sm_90a = { registers = 1, instructions = 1 }\n";
    fs::write(crate_folder.join("ratchet/scale.toml"), accepted).expect("a writable file");
    let output = shell(&crate_folder, "oxtile build");
    assert_eq!(output.status.code(), Some(1));
    assert!(String::from_utf8_lossy(&output.stdout).contains("scale "), "{output:?}");

    // Programs of this checkout look there for kernels.
    fs::remove_dir_all(target().join("oxtile/kernels/mykernels")).expect("the kernels that were built");
}
