//! When and where outputs appear: after the report is printed, all or none, at the end of links, with the access of the file that they replace.

mod common;

use std::{
    ffi::OsStr,
    fs::{self, File, Permissions},
    os::unix::fs::{MetadataExt, PermissionsExt, symlink},
    path::{Path, PathBuf},
    process::Output,
};

use common::{names, oxtile, run, small_checkpoint, stderr};
use oxtile_cli::safetensors::Checkpoint;

/// Runs a command of words divided by blanks in a folder.
fn run_in(folder: &Path, words: &str) -> Output {
    oxtile().args(words.split(' ')).current_dir(folder).output().expect("the binary runs")
}

fn succeeds(folder: &Path, words: &str) {
    let done = run_in(folder, words);
    assert!(done.status.success(), "{words}: {}", stderr(&done));
}

/// A recording of one span.
const RECORDING: &str = r#"{"traceEvents":[{"ph":"X","pid":0,"tid":0,"cat":"kernel","name":"k","ts":0,"dur":5,"args":{"device":0}}],
    "otherData":{"clock":"steps","start_ns":0,"dropped":0}}"#;

/// A folder with an input for every command that writes.
fn inputs() -> tempfile::TempDir {
    let folder = tempfile::tempdir().expect("a temporary folder");
    small_checkpoint(folder.path());
    let tensor =
        |name: &str, begin: usize| format!(r#""{name}":{{"dtype":"BF16","shape":[1,4,1,8],"data_offsets":[{begin},{}]}}"#, begin + 64);
    let header = format!("{{{},{},{}}}", tensor("q", 0), tensor("k", 64), tensor("v", 128));
    fs::write(folder.path().join("qkv"), common::file(&header, &[0; 192])).expect("a writable folder");
    fs::write(folder.path().join("trace.json"), RECORDING).expect("a writable folder");
    succeeds(folder.path(), "quantize -i small.safetensors -o quantized --device emulated");
    succeeds(folder.path(), "shard -i small.safetensors --output-prefix part --ranks 2");
    folder
}

#[test]
fn a_report_that_cannot_be_printed_replaces_nothing() {
    let folder = inputs();
    let commands: [(&str, &[&str]); 8] = [
        ("quantize -i small.safetensors -o out --device emulated", &["out"]),
        ("dequantize -i quantized -o out --device emulated", &["out"]),
        ("inspect small.safetensors --histogram out", &["out"]),
        ("attention -i qkv -o out --device emulated", &["out"]),
        ("shard -i small.safetensors --output-prefix p --ranks 2", &["p-00001-of-00002.safetensors", "p-00002-of-00002.safetensors"]),
        ("join --inputs part-00001-of-00002.safetensors part-00002-of-00002.safetensors --output out", &["out"]),
        ("timeline trace.json --svg out --merged out2", &["out", "out2"]),
        ("demo-checkpoint --output out", &["out"]),
    ];
    for (words, outputs) in commands {
        let read = || outputs.iter().map(|output| fs::read(folder.path().join(output)).expect("the file")).collect::<Vec<_>>();
        if words.starts_with("shard") {
            // Shards of the same tensors alone are replaced.
            succeeds(folder.path(), &format!("{words} --format mxfp8 --device emulated"));
        } else {
            outputs.iter().for_each(|output| fs::write(folder.path().join(output), "precious").expect("a writable folder"));
        }
        let (before, precious) = (names(folder.path()), read());
        let full = File::options().write(true).open("/dev/full").expect("the device");
        let done = oxtile().args(words.split(' ')).current_dir(folder.path()).stdout(full).output().expect("the binary runs");
        assert_eq!(done.status.code(), Some(1), "{words}: {}", stderr(&done));
        assert!(stderr(&done).contains("cannot write to standard output"), "{words}: {}", stderr(&done));
        assert_eq!(names(folder.path()), before, "{words}");
        assert!(read() == precious, "{words}");
        succeeds(folder.path(), words);
        assert!(read().iter().zip(&precious).all(|(after, before)| after != before), "{words}");
        for output in outputs {
            fs::remove_file(folder.path().join(output)).expect("the file");
        }
    }
}

#[test]
fn a_crate_that_cannot_be_announced_is_not_made() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let full = File::options().write(true).open("/dev/full").expect("the device");
    let done = oxtile().args(["new", "some-kernels"]).current_dir(folder.path()).stdout(full).output().expect("the binary runs");
    assert_eq!((done.status.code(), names(folder.path())), (Some(1), Vec::new()));
    succeeds(folder.path(), "new some-kernels");
    assert!(folder.path().join("some-kernels/src/lib.rs").is_file());
}

/// A reader that has seen enough is no failure.
#[test]
fn a_closed_pipe_is_fine() {
    let folder = inputs();
    let (reader, writer) = std::io::pipe().expect("a pipe");
    drop(reader);
    let words = "quantize -i small.safetensors -o out --device emulated".split(' ');
    let done = oxtile().args(words).current_dir(folder.path()).stdout(writer).output().expect("the binary runs");
    assert!(done.status.success(), "{}", stderr(&done));
    assert!(Checkpoint::open(&folder.path().join("out")).is_ok());
}

#[test]
fn two_outputs_appear_together() {
    let folder = inputs();
    fs::write(folder.path().join("ok.json"), "precious").expect("a writable folder");
    let done = run_in(folder.path(), "timeline trace.json --merged ok.json --svg nodir/a.svg");
    assert!(
        done.status.code() == Some(1) && stderr(&done).contains("nodir/a.svg: there is no folder nodir: make it, or name another"),
        "{}",
        stderr(&done)
    );
    assert_eq!(fs::read(folder.path().join("ok.json")).expect("the file"), b"precious");
}

#[test]
fn two_outputs_are_two_files() {
    let folder = inputs();
    symlink("s", folder.path().join("link")).expect("a link");
    fs::create_dir(folder.path().join("sub")).expect("a folder");
    for other in ["./s", "link", "sub/../s"] {
        let done = run_in(folder.path(), &format!("timeline trace.json --svg s --merged {other}"));
        let expected = format!("{other}: is the file that s is; name two files");
        assert!(done.status.code() == Some(1) && stderr(&done).contains(&expected), "{other}: {}", stderr(&done));
        assert!(!folder.path().join("s").exists());
    }
    symlink("p-00002-of-00002.safetensors", folder.path().join("p-00001-of-00002.safetensors")).expect("a link");
    let done = run_in(folder.path(), "shard -i small.safetensors --output-prefix p --ranks 2");
    assert!(done.status.code() == Some(1) && stderr(&done).contains("name two files"), "{}", stderr(&done));
}

#[test]
fn an_output_has_the_access_of_the_file_that_it_replaces() {
    let folder = inputs();
    let output = folder.path().join("out");
    let mode = |file: &Path| fs::metadata(file).expect("the file").mode() & 0o7777;
    for before in [0o600, 0o640, 0o400, 0o666] {
        let _ = fs::remove_file(&output);
        fs::write(&output, "private").expect("a writable folder");
        fs::set_permissions(&output, Permissions::from_mode(before)).expect("the owner's file");
        succeeds(folder.path(), "quantize -i small.safetensors -o out --device emulated");
        assert_eq!(mode(&output), before, "{before:o}");
        assert!(Checkpoint::open(&output).is_ok());
    }
    succeeds(folder.path(), "quantize -i small.safetensors -o new --device emulated");
    assert_eq!(mode(&folder.path().join("new")), mode(&folder.path().join("small.safetensors")), "a new one has what any has");
}

#[test]
fn a_link_stays_and_its_file_is_replaced() {
    let folder = inputs();
    let at = |name: &str| folder.path().join(name);
    fs::create_dir(at("models")).expect("a folder");
    fs::write(at("models/old"), "old").expect("a writable folder");
    let link = |to: &str, name: &str| symlink(to, at(name)).expect("a link");
    // Through two links, and to a file that is not there yet.
    link("models/old", "link");
    link("link", "chain");
    link("models/new", "dangling");
    for (name, file) in [("link", "models/old"), ("chain", "models/old"), ("dangling", "models/new")] {
        let _ = fs::write(at("models/old"), "old");
        succeeds(folder.path(), &format!("quantize -i small.safetensors -o {name} --device emulated"));
        assert!(fs::symlink_metadata(at(name)).expect("the link").is_symlink(), "{name}");
        assert!(Checkpoint::open(&at(file)).is_ok(), "{name}");
    }
    assert_eq!(names(&at("models")), ["new", "old"]);
    link("round", "round");
    let done = run_in(folder.path(), "quantize -i small.safetensors -o round --device emulated");
    assert!(stderr(&done).contains("round: cannot look at it: Too many levels"), "{}", stderr(&done));
}

#[test]
fn a_folders_name_is_refused_before_the_work() {
    let folder = inputs();
    let before = names(folder.path());
    for name in ["new/", "new/.", "new/.."] {
        let done = run_in(folder.path(), &format!("quantize -i small.safetensors -o {name} --device emulated"));
        let expected = format!("{name}: is a folder's name; name a file for the output");
        assert!(done.status.code() == Some(1) && stderr(&done).contains(&expected), "{name}: {}", stderr(&done));
        assert_eq!(names(folder.path()), before);
    }
}

#[test]
fn the_input_itself_is_no_link() {
    let folder = inputs();
    let said = |output: &str| stderr(&run_in(folder.path(), &format!("quantize -i small.safetensors -o {output} --device emulated")));
    assert!(said("./small.safetensors").contains("is the input file itself; choose"), "{}", said("./small.safetensors"));
    fs::hard_link(folder.path().join("small.safetensors"), folder.path().join("hard")).expect("a link");
    assert!(said("hard").contains("is the input file itself (by a link); choose"), "{}", said("hard"));
    let whole: PathBuf = folder.path().join("small.safetensors");
    let done = run(&[&"inspect", &whole, &"--histogram", &whole as &dyn AsRef<OsStr>]);
    assert!(stderr(&done).contains("is the input file itself; choose"), "{}", stderr(&done));
}

/// `OXTILE_TRACE` replaces recordings alone, and what keeps one from being written is told.
#[test]
fn a_recording_replaces_nothing_else() {
    let folder = inputs();
    let before = fs::read(folder.path().join("small.safetensors")).expect("the file");
    let traced = |trace: &str, output: &str| {
        let words = format!("quantize -i small.safetensors -o {output} --device emulated");
        let done = oxtile().args(words.split(' ')).current_dir(folder.path()).env("OXTILE_TRACE", trace).output().expect("the binary runs");
        (done.status.code(), stderr(&done))
    };
    for (trace, output, expected) in [
        ("/dev/full", "out", "/dev/full cannot be written: it is no regular file"),
        ("small.safetensors", "out", "small.safetensors cannot be written: it is there and is no recording, which would be lost"),
        ("./out", "out", "out: is the file that OXTILE_TRACE names for a recording"),
    ] {
        let (status, said) = traced(trace, output);
        assert!(status == Some(1) && said.contains(expected) && said.lines().count() == 1, "{trace}: {status:?} {said}");
        assert!(Checkpoint::open(&folder.path().join("out")).is_err(), "{trace}");
    }
    assert_eq!(fs::read(folder.path().join("small.safetensors")).expect("the file"), before);
    for _ in 0..2 {
        assert_eq!(traced("new.json", "out").0, Some(0), "one that is a recording is replaced");
        assert!(oxtile::timeline::Recording::read(&folder.path().join("new.json")).is_ok());
    }
    // The name under which the recording is written first is taken, which stands for a full disk.
    let script = format!(
        "mkdir late.json.$$.partial; exec {:?} quantize -i small.safetensors -o out --device emulated",
        env!("CARGO_BIN_EXE_oxtile")
    );
    let done = std::process::Command::new("sh").args(["-c", &script]).current_dir(folder.path()).env("OXTILE_TRACE", "late.json").output();
    let done = done.expect("a shell");
    let said = stderr(&done);
    assert!(done.status.code() == Some(1) && said.contains("OXTILE_TRACE: late.json: the timeline was not written: "), "{said}");
    assert_eq!(said.lines().count(), 1, "{said}");
}

#[test]
fn what_is_no_recording_is_not_waited_for() {
    let folder = inputs();
    let pipe = folder.path().join("pipe");
    assert!(std::process::Command::new("mkfifo").arg(&pipe).status().expect("mkfifo runs").success());
    for (file, kind) in [("pipe", "pipe"), ("/dev/zero", "device"), (".", "directory")] {
        let done = run_in(folder.path(), &format!("timeline {file} --svg out"));
        assert!(
            done.status.code() == Some(1) && stderr(&done).contains(&format!("{file}: is a {kind}, not a regular file")),
            "{}",
            stderr(&done)
        );
    }
    let late = RECORDING.replace("\"ts\":0", "\"ts\":900000000000000");
    fs::write(folder.path().join("late.json"), late).expect("a writable folder");
    succeeds(folder.path(), "timeline late.json --svg out");
    let picture = fs::read_to_string(folder.path().join("out")).expect("the picture");
    assert!(!picture.contains("NaN") && !picture.contains("inf"), "{picture}");
}
