//! Finding compiled kernels, and what is said when they are not there.

use std::fs;
use std::path::Path;

use oxtile::kernels::copy::CopyWords;
use oxtile::runtime::KernelLibrary;
use oxtile::{Error, Kind, Runtime};
use oxtile_tile::launch::{Kernel, KernelInfo};

const HOPPER: (u32, u32) = (9, 0);

fn info() -> KernelInfo {
    KernelInfo { package: "some-kernels", source_hash: &"abc", ..CopyWords::INFO }
}

/// A folder with a manifest of one kernel for these architectures.
fn library(folder: &Path, source_hash: &str, kernel: &str, architectures: &[&str]) -> KernelLibrary {
    library_of(folder, source_hash, kernel, architectures, &CopyWords::INFO)
}

/// As [`library`], with the launch facts of another kernel.
fn library_of(folder: &Path, source_hash: &str, kernel: &str, architectures: &[&str], facts: &KernelInfo) -> KernelLibrary {
    let files: Vec<_> = architectures.iter().map(|a| format!(r#""{a}": {{"ptx": "{a}.ptx", "cubin": "{a}.cubin"}}"#)).collect();
    let launch = format!(
        r#""threads": [{}, 1, 1], "cluster": {}, "shared": {}, "params": {:?}, "words": {}"#,
        facts.threads, facts.cluster, facts.shared_bytes, facts.parameters, facts.words
    );
    let manifest = format!(
        r#"{{"package": "some-kernels", "source_hash": "{source_hash}", "kernels": {{"{kernel}": {{{launch}, "architectures": {{{}}}}}}}}}"#,
        files.join(", ")
    );
    fs::create_dir(folder.join("some-kernels")).unwrap();
    fs::write(folder.join("some-kernels/manifest.json"), manifest).unwrap();
    KernelLibrary::new(vec![folder.to_owned()])
}

#[test]
fn cubins_come_first_and_ptx_is_the_fallback() {
    let folder = tempfile::tempdir().unwrap();
    let library = library(folder.path(), "abc", "copy_words", &["sm_80", "sm_90a", "sm_100a"]);
    let names = |capability| -> Vec<String> {
        let images = library.find(&info(), capability).unwrap();
        images.into_iter().map(|image| image.path.file_name().unwrap().to_string_lossy().into_owned()).collect()
    };
    assert_eq!(names(HOPPER), ["sm_90a.cubin", "sm_90a.ptx", "sm_80.ptx"]);
    assert_eq!(names((8, 6)), ["sm_80.cubin", "sm_80.ptx"]);
    assert_eq!(names((12, 0)), ["sm_80.ptx"]);
}

#[test]
fn missing_kernels_say_what_to_run() {
    let folder = tempfile::tempdir().unwrap();
    let error = KernelLibrary::new(vec![folder.path().to_owned()]).find(&info(), HOPPER).unwrap_err();
    let mend = "run `oxtile build` in the folder of `some-kernels`, or name their folder in OXTILE_KERNELS (looked in ";
    let expected = format!("no compiled kernels of `some-kernels` for `copy_words`: {mend}");
    assert!(error.to_string().starts_with(&expected), "{error}");
    assert!(error.to_string().contains(&folder.path().display().to_string()), "{error}");
}

#[test]
fn stale_kernels_are_an_error() {
    let folder = tempfile::tempdir().unwrap();
    let library = library(folder.path(), "old", "copy_words", &["sm_90a"]);
    let error = library.find(&info(), HOPPER).unwrap_err();
    assert!(matches!(error, Error::StaleKernels { .. }));
    let mend = "run `oxtile build` in the folder of `some-kernels`, or take them with OXTILE_STALE_KERNELS=1";
    assert!(error.to_string().ends_with(&format!("built from sources old, this program from abc: {mend}")), "{error}");
    library.clone().stale().find(&info(), HOPPER).unwrap();
    // Their code may not wait for the launches ahead.
    assert!(KernelLibrary::took_stale());
}

#[test]
fn a_program_that_cannot_tell_whether_kernels_are_stale_takes_none() {
    let folder = tempfile::tempdir().unwrap();
    let library = library(folder.path(), "abc", "copy_words", &["sm_90a"]);
    let unhashed = KernelInfo { source_hash: &"", ..info() };
    let error = library.find(&unhashed, HOPPER).unwrap_err();
    assert!(matches!(error, Error::UnhashedKernels { .. }), "{error}");
    assert!(error.to_string().starts_with("kernel `copy_words`: `some-kernels` has no hash of its sources"), "{error}");
    assert!(error.to_string().ends_with("or take them with OXTILE_STALE_KERNELS=1"), "{error}");
    library.stale().find(&unhashed, HOPPER).unwrap();
}

#[test]
fn a_wrong_architecture_names_the_right_one() {
    let folder = tempfile::tempdir().unwrap();
    let library = library(folder.path(), "abc", "copy_words", &["sm_100a", "sm_90a"]);
    let text = library.find(&info(), (8, 0)).unwrap_err().to_string();
    let expected = "kernel `copy_words` is compiled for sm_100a, sm_90a, none of which runs on sm_80: run `oxtile build --arch sm_80` in the folder of `some-kernels`";
    assert_eq!(text, expected);
    let text = library.find(&info(), (12, 0)).unwrap_err().to_string();
    assert!(text.contains("`oxtile build --arch sm_120a`"), "{text}");
}

#[test]
fn other_launch_facts_are_an_error() {
    let facts = [
        ("threads", KernelInfo { threads: 64, ..CopyWords::INFO }),
        ("cluster", KernelInfo { cluster: 2, ..CopyWords::INFO }),
        ("shared", KernelInfo { shared_bytes: 1234, ..CopyWords::INFO }),
        ("parameters", KernelInfo { parameters: &["target", "source"], ..CopyWords::INFO }),
        ("words", KernelInfo { words: 5, ..CopyWords::INFO }),
    ];
    for (name, facts) in facts {
        let folder = tempfile::tempdir().unwrap();
        let library = library_of(folder.path(), "abc", "copy_words", &["sm_90a"], &facts);
        let error = library.find(&info(), HOPPER).unwrap_err();
        assert!(matches!(error, Error::KernelMismatch { what, .. } if what == name), "{error}");
        assert!(error.to_string().ends_with("run `oxtile build` in the folder of `some-kernels`"), "{error}");
        if name == "threads" {
            let expected = format!("has threads 64, this program expects {}", CopyWords::INFO.threads);
            assert!(error.to_string().contains(&expected), "{error}");
        }
    }
}

#[test]
fn whether_any_kernel_runs_on_a_device_is_said_with_the_mend() {
    let folder = tempfile::tempdir().unwrap();
    let library = library(folder.path(), "abc", "copy_words", &["sm_90a"]);
    library.check_any(HOPPER).unwrap();
    let why = library.check_any((7, 5)).unwrap_err();
    assert!(why.starts_with("the compiled kernels are for ") && why.contains("sm_90a"), "{why}");
    let mend = "run `cargo xtask build-ptx --arch sm_75`, or `oxtile build --arch sm_75` in the folder of a crate of your own";
    assert!(why.ends_with(&format!("none of which runs on sm_75: {mend}")), "{why}");
}

#[test]
fn an_unknown_kernel_and_a_broken_manifest_are_errors() {
    let folder = tempfile::tempdir().unwrap();
    let library = library(folder.path(), "abc", "other", &["sm_90a"]);
    let error = library.find(&info(), HOPPER).unwrap_err();
    assert!(
        error.to_string().ends_with("manifest.json has no kernel `copy_words`: run `oxtile build` in the folder of `some-kernels`"),
        "{error}"
    );
    fs::write(folder.path().join("some-kernels/manifest.json"), "{").unwrap();
    let error = library.find(&info(), HOPPER).unwrap_err();
    assert!(matches!(error, Error::KernelFile { .. }), "{error}");
    // Oxtile's own kernels have a command of their own.
    fs::create_dir(folder.path().join("oxtile-kernels")).unwrap();
    fs::write(folder.path().join("oxtile-kernels/manifest.json"), "{").unwrap();
    let error = library.find(&CopyWords::INFO, HOPPER).unwrap_err();
    assert!(error.to_string().ends_with(": run `cargo xtask build-ptx`"), "{error}");
}

#[test]
fn auto_gives_a_reason() {
    let choice = Runtime::auto().unwrap();
    match (Runtime::cuda(), choice.runtime.kind()) {
        (Ok(_), Kind::Cuda) => assert!(choice.reason.starts_with("CUDA: "), "{}", choice.reason),
        (Ok(_), Kind::Emulated) => assert!(choice.reason.contains("build-ptx"), "{}", choice.reason),
        (Err(error), kind) => {
            assert_eq!(kind, Kind::Emulated);
            assert_eq!(choice.reason, format!("the CPU emulator, fast (Runtime::checked looks for races), since {error}"));
            assert!(error.to_string().starts_with("CUDA is not available: "), "{error}");
        }
    }
}
