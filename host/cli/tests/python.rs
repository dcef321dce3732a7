//! Python's safetensors and ml_dtypes, which share no code with Oxtile, read the output and agree on its numbers.

mod common;

use std::{
    fs,
    path::{Path, PathBuf},
    process::{Command, ExitCode},
};

use common::{run, small_checkpoint, stderr};
use libtest_mimic::{Arguments, Trial};

/// The packages; F8_E8M0 came with these releases.
const PACKAGES: [&str; 3] = ["safetensors>=0.6", "ml_dtypes>=0.5", "numpy>=2"];

fn main() -> ExitCode {
    let folder = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join("python");
    let offline = std::env::var_os("OXTILE_OFFLINE").is_some_and(|value| value == "1");
    let skipped = offline && !is_installed(&folder);
    if skipped {
        eprintln!("python: 1 test skipped: {} are not installed and OXTILE_OFFLINE=1 forbids fetching them", PACKAGES.join(", "));
    }
    let test = Trial::test("python_reads_the_output", move || {
        if !is_installed(&folder) {
            install(&folder);
        }
        python_reads_the_output(&folder);
        Ok(())
    });
    libtest_mimic::run(&Arguments::from_args(), vec![test.with_ignored_flag(skipped)]).exit_code()
}

/// The file that says what was installed, written last.
fn complete(folder: &Path) -> PathBuf {
    folder.join("complete")
}

fn is_installed(folder: &Path) -> bool {
    fs::read_to_string(complete(folder)).is_ok_and(|installed| installed == PACKAGES.join(" "))
}

fn install(folder: &Path) {
    let mut pip = Command::new("python3");
    pip.args(["-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--upgrade", "--target"]);
    let installed = pip.arg(folder).args(PACKAGES).output().expect("python3 runs; install Python 3 with pip");
    assert!(
        installed.status.success(),
        "pip could not install {}; OXTILE_OFFLINE=1 skips this test.\n{}",
        PACKAGES.join(", "),
        stderr(&installed)
    );
    fs::write(complete(folder), PACKAGES.join(" ")).expect("a writable folder");
}

fn python_reads_the_output(packages: &Path) {
    for format in ["mxfp8", "nvfp4"] {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let input = small_checkpoint(folder.path());
        let (output, report) = (folder.path().join("out.safetensors"), folder.path().join("report.json"));
        let quantized = run(&[&"quantize", &"-i", &input, &"-o", &output, &"--format", &format, &"--device", &"emulated", &"--json"]);
        assert!(quantized.status.success(), "{}", stderr(&quantized));
        fs::write(&report, quantized.stdout).expect("a writable folder");
        let script = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/check_output.py");
        let checked = Command::new("python3").env("PYTHONPATH", packages).arg(script).args([&input, &output, &report]).output();
        let checked = checked.expect("python3 runs");
        assert!(checked.status.success(), "{format}: {}", stderr(&checked));
        let printed = String::from_utf8(checked.stdout).expect("UTF-8");
        assert_eq!(printed.trim(), "3 tensors quantized, 5 passed through", "the script saw every tensor");
    }
}
