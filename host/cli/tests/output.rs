//! The output: what it holds, what it must never replace, and that nothing is left of a failure.

mod common;

use std::{
    io::Write,
    os::unix::{fs::symlink, process::ExitStatusExt},
    path::Path,
    process::{Child, Stdio},
    time::{Duration, Instant},
};

use common::{file, names, oxtile, run, small_checkpoint, stderr, tensor_bytes};
use oxtile_cli::{
    progress::Progress,
    quantize::{self, Codes, DeviceError, Elements, Piece, QuantizeDevice, Quantized, Recipe, Side},
    safetensors::Checkpoint,
};

#[test]
fn tensors_and_metadata_arrive() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let (input, output) = (small_checkpoint(folder.path()), folder.path().join("out.safetensors"));
    common::quantize(&input, &output).expect("a valid checkpoint");
    let checkpoint = Checkpoint::open(&output).expect("a valid output");
    let mut tensors: Vec<_> = checkpoint.tensors().iter().map(|t| format!("{} {} {:?}", t.name, t.dtype, t.shape)).collect();
    tensors.sort();
    let expected = [
        "bias F32 [3]",
        "brain F8_E4M3 [2, 1, 32]",
        "brain_amax F32 [1]",
        "brain_scale F8_E8M0 [2, 1]",
        "empty F32 [0, 32]",
        "half F8_E4M3 [1, 32]",
        "half_amax F32 [1]",
        "half_scale F8_E8M0 [1, 1]",
        "ids I64 [1, 2]",
        "matrix F8_E4M3 [2, 64]",
        "matrix_amax F32 [1]",
        "matrix_scale F8_E8M0 [2, 2]",
        "narrow F32 [2, 3]",
        "scalar F32 []",
    ];
    assert_eq!(tensors, expected);
    let metadata: Vec<_> = checkpoint.metadata().iter().map(|(key, value)| format!("{key}={value}")).collect();
    assert_eq!(metadata[..4], ["format=pt", "oxtile.direction=row", "oxtile.format=mxfp8", "oxtile.format_version=2"]);
    for name in ["bias", "narrow", "ids", "scalar"] {
        assert_eq!(tensor_bytes(&output, name), tensor_bytes(&input, name), "{name} is copied");
    }
    assert_eq!(tensor_bytes(&output, "matrix_amax"), (67.0f32 * 0.37).to_le_bytes());
    assert_eq!(names(folder.path()), ["out.safetensors", "small.safetensors"]);
}

#[test]
fn every_tensor_is_aligned() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let (input, output) = (small_checkpoint(folder.path()), folder.path().join("out.safetensors"));
    common::quantize(&input, &output).expect("a valid checkpoint");
    let length = u64::from_le_bytes(std::fs::read(&output).expect("readable")[..8].try_into().expect("8 bytes"));
    assert_eq!(length % 8, 0, "the data section is aligned");
    for tensor in Checkpoint::open(&output).expect("a valid output").tensors() {
        assert_eq!(tensor.range.start % (tensor.dtype.bits() / 8), 0, "{}", tensor.name);
    }
}

#[test]
fn misaligned_input_gives_the_same_output() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let input = small_checkpoint(folder.path());
    let (straight, shifted) = (folder.path().join("straight"), folder.path().join("shifted"));
    common::quantize(&input, &straight).expect("a valid checkpoint");
    // One space more of header, and every tensor lies at another address modulo 8.
    let mut bytes = std::fs::read(&input).expect("readable");
    let length = u64::from_le_bytes(bytes[..8].try_into().expect("8 bytes"));
    bytes[..8].copy_from_slice(&(length + 1).to_le_bytes());
    bytes.insert(8 + length as usize, b' ');
    std::fs::write(&input, bytes).expect("a writable folder");
    common::quantize(&input, &shifted).expect("a valid checkpoint");
    assert_eq!(std::fs::read(straight).expect("readable"), std::fs::read(shifted).expect("readable"));
}

#[test]
fn the_input_is_never_the_output() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let input = small_checkpoint(folder.path());
    let before = std::fs::read(&input).expect("readable");
    let (soft, hard) = (folder.path().join("soft"), folder.path().join("hard"));
    symlink(&input, &soft).expect("a link");
    std::fs::hard_link(&input, &hard).expect("a link");
    for output in [&input, &soft, &hard] {
        let text = common::quantize(&input, output).expect_err("the same file").to_string();
        assert!(text.contains("is the input file itself"), "{text}");
        assert_eq!(std::fs::read(&input).expect("readable"), before);
    }
    let text = common::quantize(&soft, &hard).expect_err("the same file").to_string();
    assert!(text.contains("by a link"), "{text}");
    assert_eq!(names(folder.path()), ["hard", "small.safetensors", "soft"]);
}

#[test]
fn what_is_no_file_is_not_replaced() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let input = small_checkpoint(folder.path());
    for (output, reason) in [
        (folder.path(), "is a directory"),
        (Path::new("/dev/null"), "is a device"),
        (&folder.path().join("no/such/folder/out"), "there is no folder"),
    ] {
        let text = common::quantize(&input, output).expect_err("no place for a file").to_string();
        assert!(text.contains(reason) && text.contains(output.to_str().expect("UTF-8")), "{text}");
    }
    assert_eq!(names(folder.path()), ["small.safetensors"]);
}

#[test]
fn clashing_names_are_refused() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let input = folder.path().join("clash.safetensors");
    let header = r#"{"w":{"dtype":"F32","shape":[1,32],"data_offsets":[0,128]},
        "w_scale":{"dtype":"U8","shape":[1],"data_offsets":[128,129]}}"#;
    std::fs::write(&input, file(header, &[0; 129])).expect("a writable folder");
    let text = common::quantize(&input, &folder.path().join("out")).expect_err("a clash").to_string();
    assert!(text.contains("`w_scale`: the scales of `w` and the input's `w_scale`"), "{text}");
    assert_eq!(names(folder.path()), ["clash.safetensors"]);
}

#[test]
fn a_quantized_file_is_not_quantized_again() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let (input, output) = (small_checkpoint(folder.path()), folder.path().join("out.safetensors"));
    common::quantize(&input, &output).expect("a valid checkpoint");
    let text = common::quantize(&output, &folder.path().join("twice")).expect_err("a refusal").to_string();
    assert!(text.contains("quantized already"), "{text}");
}

/// A device that fails, or misbehaves, at a call.
struct Faulty(fn() -> Result<Quantized, DeviceError>);

impl QuantizeDevice for Faulty {
    fn name(&self) -> String {
        "faulty".into()
    }

    fn amax(&mut self, _: &Recipe, _: [u64; 2], _: Elements<'_>) -> Result<[f32; 2], DeviceError> {
        (self.0)().map(|output| [output.amax; 2])
    }

    fn quantize(&mut self, _: &Recipe, _: &Piece, _: Elements<'_>) -> Result<Quantized, DeviceError> {
        (self.0)()
    }

    fn interleave(&mut self, _: &Side, _: &[u8]) -> Result<Vec<u8>, DeviceError> {
        (self.0)().map(|_| Vec::new())
    }
}

#[test]
fn a_failing_device_leaves_nothing() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let (input, output) = (small_checkpoint(folder.path()), folder.path().join("out.safetensors"));
    std::fs::write(&output, "what stood there before").expect("a writable folder");
    let fail = || Err(DeviceError::new("out of memory"));
    let short = || Ok(Quantized { sides: [Some(Codes { data: vec![0; 5], scales: vec![] }), None], amax: 0.0 });
    let none = || Ok(Quantized::default());
    let cases = [
        (Faulty(fail), "out of memory"),
        (Faulty(short), "returned 5 bytes of codes and 0 scales for 2x64"),
        (Faulty(none), "returned nothing by rows for 2x64"),
    ];
    for (device, reason) in cases {
        let outcome = quantize::run(&input, &output, Recipe::default(), &mut { device }, &mut Progress::hidden());
        let text = outcome.expect_err("a failure").to_string();
        assert!(text.contains("tensor `matrix` on device faulty") && text.contains(reason), "{text}");
        assert_eq!(names(folder.path()), ["out.safetensors", "small.safetensors"]);
        assert_eq!(std::fs::read(&output).expect("readable"), b"what stood there before");
    }
}

/// Whether it grows, or is cut as by a program that saves another checkpoint under its name.
#[test]
fn an_input_that_changes_is_noticed() {
    let more = |mut file: std::fs::File| file.write_all(b"more").expect("writable");
    let cut = |file: std::fs::File| file.set_len(100).expect("writable");
    changed(more);
    changed(cut);
}

fn changed(change: fn(std::fs::File)) {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let input = small_checkpoint(folder.path());
    struct Meddler(std::path::PathBuf, fn(std::fs::File));
    impl QuantizeDevice for Meddler {
        fn name(&self) -> String {
            "meddler".into()
        }
        fn amax(&mut self, recipe: &Recipe, shape: [u64; 2], input: Elements<'_>) -> Result<[f32; 2], DeviceError> {
            common::Scalar.amax(recipe, shape, input)
        }
        fn quantize(&mut self, recipe: &Recipe, piece: &Piece, input: Elements<'_>) -> Result<Quantized, DeviceError> {
            (self.1)(std::fs::OpenOptions::new().append(true).open(&self.0).expect("it is there"));
            common::Scalar.quantize(recipe, piece, input)
        }
        fn interleave(&mut self, side: &Side, compact: &[u8]) -> Result<Vec<u8>, DeviceError> {
            common::Scalar.interleave(side, compact)
        }
    }
    let outcome =
        quantize::run(&input, &folder.path().join("out"), Recipe::default(), &mut Meddler(input.clone(), change), &mut Progress::hidden());
    let text = outcome.expect_err("a refusal").to_string();
    assert!(text.contains("changed while it was being read"), "{text}");
    assert_eq!(names(folder.path()), ["small.safetensors"]);
}

/// However it ends: also by a signal that no process can handle, and by those of limits, timers and batch systems.
#[test]
fn signals_leave_nothing() {
    let signals = [libc::SIGINT, libc::SIGTERM, libc::SIGHUP, libc::SIGQUIT, libc::SIGALRM, libc::SIGUSR1, libc::SIGKILL];
    let others = [libc::SIGXCPU, libc::SIGVTALRM, libc::SIGPROF, libc::SIGIO, libc::SIGPWR, libc::SIGABRT, libc::SIGRTMIN()];
    for signal in signals.into_iter().chain(others) {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let output = folder.path().join("demo.safetensors");
        let mut child = oxtile().args(["demo-checkpoint", "--output"]).arg(&output).stdout(Stdio::null()).spawn().expect("the binary runs");
        interrupt(&mut child, folder.path(), signal);
        assert_eq!(names(folder.path()), [""; 0], "signal {signal}");
    }
}

#[test]
fn an_interrupted_job_leaves_what_stood_there() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let (input, output) = (folder.path().join("in"), folder.path().join("out"));
    // 64 Mi elements: seconds of work, so that the signal comes in the middle of it.
    let header = r#"{"w":{"dtype":"BF16","shape":[65536,1024],"data_offsets":[0,134217728]}}"#;
    std::fs::write(&input, file(header, &[])).expect("a writable folder");
    let sparse = std::fs::OpenOptions::new().write(true).open(&input).expect("it is there");
    sparse.set_len(8 + header.len() as u64 + 134_217_728).expect("a file with a hole");
    std::fs::write(&output, "what stood there before").expect("a writable folder");
    let mut child = oxtile()
        .args(["quantize", "--device", "emulated", "-i"])
        .arg(&input)
        .arg("-o")
        .arg(&output)
        .stdout(Stdio::null())
        .spawn()
        .expect("the binary runs");
    interrupt(&mut child, folder.path(), libc::SIGINT);
    assert_eq!(names(folder.path()), ["in", "out"]);
    assert_eq!(std::fs::read(&output).expect("readable"), b"what stood there before");
}

/// Waits until the process has an output in the folder, under a temporary name or none, and ends it with a signal.
fn interrupt(child: &mut Child, folder: &Path, signal: libc::c_int) {
    let deadline = Instant::now() + Duration::from_secs(60);
    let unnamed = folder.canonicalize().expect("a folder").join("#");
    let unnamed = unnamed.to_str().expect("UTF-8");
    let has_unnamed = |process: u32| {
        let descriptors = std::fs::read_dir(format!("/proc/{process}/fd")).into_iter().flatten().flatten();
        descriptors
            .filter_map(|descriptor| std::fs::read_link(descriptor.path()).ok())
            .any(|file| file.to_string_lossy().starts_with(unnamed))
    };
    while !has_unnamed(child.id()) && !names(folder).iter().any(|name| name.ends_with(".partial")) {
        assert!(Instant::now() < deadline, "the output appears");
        std::thread::sleep(Duration::from_millis(1));
    }
    let id = libc::pid_t::try_from(child.id()).expect("a process id");
    // SAFETY: `kill` touches no memory; the id is that of a child that has not been waited for.
    assert_eq!(unsafe { libc::kill(id, signal) }, 0);
    let status = child.wait().expect("the child ends");
    assert_eq!(status.signal(), Some(signal), "it ends as the signal would have ended it: {status}");
}

#[test]
fn a_full_disk_leaves_nothing() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let script = format!("ulimit -f 2000; exec {:?} demo-checkpoint --output out", env!("CARGO_BIN_EXE_oxtile"));
    let output = std::process::Command::new("sh").args(["-c", &script]).current_dir(folder.path()).output();
    let output = output.expect("a shell");
    assert_eq!(output.status.code(), Some(1), "{}", stderr(&output));
    assert!(stderr(&output).contains("out: cannot write: File too large"), "{}", stderr(&output));
    assert_eq!(names(folder.path()), [""; 0]);
}

#[test]
fn the_demo_depends_on_its_seed_alone() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let make = |name: &str, seed: &str| {
        let path = folder.path().join(name);
        let made = run(&[&"demo-checkpoint", &"--seed", &seed, &"--dtype", &"bf16", &"--output", &path]);
        assert!(made.status.success(), "{}", stderr(&made));
        let printed = String::from_utf8(made.stdout).expect("UTF-8");
        assert!(printed.contains(&format!("seed    {seed}\n")) && printed.contains("22.7 M BF16"), "{printed}");
        std::fs::read(path).expect("readable")
    };
    let first = make("a", "1");
    assert!(first == make("b", "1"), "one seed, one file");
    assert!(first != make("c", "2"), "another seed, another file");
}
