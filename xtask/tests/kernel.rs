//! `cargo xtask kernel NAME`, as a person calls it.

use std::{
    fs,
    os::unix::fs::symlink,
    path::{Path, PathBuf},
    process::{Command, Output},
};

fn checkout() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("it is in the checkout").into()
}

/// The command of the checkout at `root`, with the target folder of this build.
fn kernel(root: &Path, arguments: &[&str]) -> Command {
    let mut xtask = Command::new(env!("CARGO_BIN_EXE_xtask"));
    xtask.env("CARGO_MANIFEST_DIR", root.join("xtask")).current_dir(root).arg("kernel").args(arguments);
    xtask
}

fn text(output: &Output) -> String {
    [&output.stdout, &output.stderr].map(|bytes| String::from_utf8_lossy(bytes)).concat()
}

/// Where no tool that assembles PTX is found.
#[test]
fn emulated_cases_need_no_ptx() {
    let none = tempfile::tempdir().unwrap();
    let output = kernel(&checkout(), &["fill_rows", "--emulate"]).env("OXTILE_CUDA_BIN", none.path()).output().unwrap();
    let said = text(&output);
    assert!(output.status.success() && said.contains("test result: ok. "), "{said}");
    assert!(said.contains("fill") && !said.contains(" 0 passed"), "{said}");
    // The same without `--emulate` fails, so the folder is looked into.
    let output = kernel(&checkout(), &["fill_rows"]).env("OXTILE_CUDA_BIN", none.path()).output().unwrap();
    assert!(!output.status.success() && text(&output).contains("ptxas"), "{}", text(&output));
}

/// In a copy of the checkout, of a kernel with a barrier more than is accepted.
#[test]
fn a_kernel_that_no_build_takes_is_an_error_after_its_figures() {
    let copy = tempfile::tempdir().unwrap();
    let (from, root) = (checkout(), copy.path());
    // All but one.
    let take = |folder: &str, own: &str| {
        fs::create_dir_all(root.join(folder)).unwrap();
        let entries = fs::read_dir(from.join(folder)).unwrap().map(Result::unwrap);
        for entry in entries.filter(|entry| entry.file_name() != own && entry.file_name() != "target") {
            let to = root.join(folder).join(entry.file_name());
            // A manifest that is a link is one of another folder.
            if entry.path().is_file() { fs::copy(entry.path(), to).map(drop) } else { symlink(entry.path(), to) }.unwrap();
        }
    };
    take("", "gpu");
    take("gpu", "src");
    take("gpu/src", "fill.rs");
    let kernel_file = fs::read_to_string(from.join("gpu/src/fill.rs")).unwrap();
    let (head, body) = kernel_file.split_once("rows: u32) {\n").expect("a kernel");
    fs::write(root.join("gpu/src/fill.rs"), format!("{head}rows: u32) {{\n    block::sync();\n{body}")).unwrap();
    let output = kernel(root, &["fill_rows"]).output().unwrap();
    let said = text(&output);
    assert!(!output.status.success(), "{said}");
    let place = |what: &str| said.find(what).unwrap_or_else(|| panic!("no `{what}` in {said}"));
    assert!(["fill_rows on sm_90a", "instructions", "MEND"].map(place).is_sorted(), "{said}");
    place("must be mended");
    place("src/fill.rs:");
}
