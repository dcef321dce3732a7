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

/// Without anything that assembles PTX, and without a compiler's library for the GPU.
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

/// A copy of the checkout whose ratchet asks for fewer registers than the kernel has.
#[test]
fn a_kernel_that_no_build_takes_is_an_error_after_its_figures() {
    let copy = tempfile::tempdir().unwrap();
    let (from, root) = (checkout(), copy.path());
    let link = |from: &Path, to: &Path, own: &str| {
        fs::create_dir(to).unwrap_or_default();
        for entry in
            fs::read_dir(from).unwrap().map(Result::unwrap).filter(|entry| entry.file_name() != own && entry.file_name() != "target")
        {
            symlink(entry.path(), to.join(entry.file_name())).unwrap();
        }
    };
    link(&from, root, "gpu");
    link(&from.join("gpu"), &root.join("gpu"), "ratchet");
    let ratchet = root.join("gpu/ratchet");
    link(&from.join("gpu/ratchet"), &ratchet, "fill.toml");
    fs::write(ratchet.join("fill.toml"), "fill_rows.sm_90a = { registers = 1, instructions = 1 }\n").unwrap();
    let output = kernel(root, &["fill_rows"]).output().unwrap();
    let said = text(&output);
    assert!(!output.status.success(), "{said}");
    let place = |what: &str| said.find(what).unwrap_or_else(|| panic!("no `{what}` in {said}"));
    let places = ["fill_rows on sm_90a", "(ratchet 1)", "MEND", "hot loop", "must be mended"].map(place);
    assert!(places.is_sorted(), "{said}");
}
