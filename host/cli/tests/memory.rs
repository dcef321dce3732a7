//! Memory stays bounded by a few pieces of a tensor, however large the file.

mod common;

use std::{
    fs::File,
    io::Write,
    os::unix::fs::FileExt,
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use common::oxtile;

/// Tensors of the file and rows of each: 64 MiB of f32 a tensor.
const TENSORS: u64 = 3;
const ROWS: u64 = 16_384;
const COLUMNS: u64 = 1024;
const TENSOR_BYTES: u64 = ROWS * COLUMNS * 4;

/// A file with holes for data: large to read, small on disk.
fn large_checkpoint(folder: &Path) -> PathBuf {
    let entry = |i| {
        let (begin, end) = (i * TENSOR_BYTES, (i + 1) * TENSOR_BYTES);
        format!(r#""t{i}":{{"dtype":"F32","shape":[{ROWS},{COLUMNS}],"data_offsets":[{begin},{end}]}}"#)
    };
    let header = format!("{{{}}}", (0..TENSORS).map(entry).collect::<Vec<_>>().join(","));
    let path = folder.join("large.safetensors");
    let mut file = File::create(&path).expect("a writable folder");
    file.write_all(&common::file(&header, &[])).expect("writable");
    let end = 8 + header.len() as u64 + TENSORS * TENSOR_BYTES;
    file.write_all_at(&1f32.to_le_bytes(), end - 4).expect("writable");
    path
}

/// Runs a command and returns the most memory it had resident, in bytes.
#[expect(clippy::zombie_processes, reason = "wait4 waits for the child")]
fn peak_memory(command: &mut Command) -> u64 {
    let child = command.stdout(Stdio::null()).spawn().expect("the binary runs");
    let id = libc::pid_t::try_from(child.id()).expect("a process id");
    let (mut status, mut usage) = (0, std::mem::MaybeUninit::<libc::rusage>::zeroed());
    // SAFETY: both pointers are to live values of the types that wait4(2) writes; the id is that of our child.
    assert_eq!(unsafe { libc::wait4(id, &mut status, 0, usage.as_mut_ptr()) }, id);
    assert_eq!(status, 0, "the command succeeds");
    // SAFETY: wait4 has filled it, and zeros were a valid value before.
    let usage = unsafe { usage.assume_init() };
    u64::try_from(usage.ru_maxrss).expect("a size") * 1024
}

#[test]
fn inspecting_takes_less_than_a_tensor() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let peak = peak_memory(oxtile().arg("inspect").arg(large_checkpoint(folder.path())));
    let document = oxtile().args(["inspect", "--json"]).arg(folder.path().join("large.safetensors")).output().expect("the binary runs");
    let document: serde_json::Value = serde_json::from_slice(&document.stdout).expect("JSON");
    assert_eq!(document["tensors"][TENSORS as usize - 1]["values"]["max"], 1.0, "the file is read to its last element");
    println!("inspect: {} MiB resident for {} MiB of file", peak >> 20, (TENSORS * TENSOR_BYTES) >> 20);
    assert!(peak < TENSOR_BYTES / 2, "{} MiB", peak >> 20);
}

/// As [`quantizing_takes_less_than_the_file`].
#[test]
fn sharding_and_joining_take_less_than_the_file() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let (input, prefix, joined) = (large_checkpoint(folder.path()), folder.path().join("p"), folder.path().join("joined"));
    let mut command = oxtile();
    let sharding = peak_memory(command.args(["shard", "--ranks", "3", "--input"]).arg(&input).arg("--output-prefix").arg(&prefix));
    let part = |rank| folder.path().join(format!("p-{rank:05}-of-00003.safetensors"));
    let joining = peak_memory(oxtile().args(["join", "--inputs"]).args([1, 2, 3].map(part)).arg("--output").arg(&joined));
    println!("shard and join: {} and {} MiB resident for {} MiB of file", sharding >> 20, joining >> 20, (TENSORS * TENSOR_BYTES) >> 20);
    assert!(sharding.max(joining) < TENSOR_BYTES, "{} and {} MiB", sharding >> 20, joining >> 20);
    let same = oxtile().arg("compare").args([&input, &joined]).args(["--max-relative", "0"]).output().expect("the binary runs");
    assert!(same.status.success(), "{}", common::stderr(&same));
}

/// Pages of the mapped file count, as many as the system leaves mapped: from less than one tensor to more than two.
#[test]
fn quantizing_takes_less_than_the_file() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let (input, output) = (large_checkpoint(folder.path()), folder.path().join("out.safetensors"));
    let mut command = oxtile();
    let peak = peak_memory(command.args(["quantize", "--device", "emulated", "--input"]).arg(input).arg("--output").arg(output));
    println!("quantize: {} MiB resident for {} MiB of file", peak >> 20, (TENSORS * TENSOR_BYTES) >> 20);
    assert!(peak < TENSORS * TENSOR_BYTES, "{} MiB", peak >> 20);
}

/// Rows so wide that a piece does not fit the memory that a process may have: an error, before anything is allocated for it.
#[test]
fn rows_too_wide_for_memory_are_named() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let header = r#"{"w":{"dtype":"BF16","shape":[128,2097152],"data_offsets":[0,536870912]}}"#;
    let path = folder.path().join("wide");
    std::fs::write(&path, common::file(header, &[])).expect("a writable folder");
    File::options()
        .write(true)
        .open(&path)
        .and_then(|file| file.set_len(8 + header.len() as u64 + 536_870_912))
        .expect("a file with a hole");
    let script = "ulimit -v 4000000; exec \"$0\" quantize --format nvfp4 --direction both --device emulated -i wide -o out";
    let done = Command::new("sh").args(["-c", script, env!("CARGO_BIN_EXE_oxtile")]).current_dir(folder.path()).output().expect("a shell");
    let said = common::stderr(&done);
    assert!(
        done.status.code() == Some(1) && said.contains("tensor `w`: its rows are so wide that a piece takes 6.4 GB of memory"),
        "{said}"
    );
    assert_eq!(common::names(folder.path()), ["wide"]);
}
