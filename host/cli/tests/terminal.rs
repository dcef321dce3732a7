//! Colours and bars are for terminals alone.

mod common;

use std::{
    fs::File,
    io::Read,
    os::fd::{FromRawFd, OwnedFd},
    process::{Command, Stdio},
    ptr,
};

use common::{
    names, oxtile,
    tensors::{bytes, random, write},
};

/// What forbids colours, or asks for them.
const VARIABLES: [&str; 5] = ["NO_COLOR", "CLICOLOR", "CLICOLOR_FORCE", "TERM", "CI"];

/// Both ends of a terminal.
fn terminal() -> (File, OwnedFd) {
    let (mut ours, mut its) = (-1, -1);
    // SAFETY: the two places are ours, and the other three may be null.
    assert_eq!(unsafe { libc::openpty(&mut ours, &mut its, ptr::null_mut(), ptr::null_mut(), ptr::null_mut()) }, 0);
    // SAFETY: `openpty` has just made both, for this caller.
    unsafe { (File::from_raw_fd(ours), OwnedFd::from_raw_fd(its)) }
}

/// What a command writes to a terminal, as standard output and error or as error alone.
fn shown(mut command: Command, is_output: bool) -> String {
    let (mut ours, its) = terminal();
    let output = if is_output { Stdio::from(its.try_clone().expect("a descriptor")) } else { Stdio::null() };
    let mut child = command.stdout(output).stderr(its).spawn().expect("the binary runs");
    // Or it would keep the terminal open.
    drop(command);
    let mut text = Vec::new();
    // A terminal that all others have closed ends with an error.
    let _ = ours.read_to_end(&mut text);
    assert!(child.wait().expect("the child ends").success(), "{}", String::from_utf8_lossy(&text));
    String::from_utf8(text).expect("UTF-8")
}

fn help(variables: &[(&str, &str)]) -> Command {
    let mut command = oxtile();
    VARIABLES.iter().for_each(|name| _ = command.env_remove(name));
    command.args(["quantize", "--help"]).envs(variables.iter().copied());
    command
}

#[test]
fn help_has_colours_on_a_terminal_alone() {
    let is_coloured = |text: &str| text.contains('\u{1b}');
    let terminal = ("TERM", "xterm");
    assert!(is_coloured(&shown(help(&[terminal]), true)));
    for forbidden in [&[terminal, ("NO_COLOR", "1")][..], &[terminal, ("CLICOLOR", "0")], &[("TERM", "dumb")]] {
        let text = shown(help(forbidden), true);
        assert!(text.contains("--stochastic <SEED>") && !is_coloured(&text), "{forbidden:?}: {text:?}");
    }
    for (variables, expected) in [(&[terminal][..], false), (&[terminal, ("CLICOLOR_FORCE", "1")], true)] {
        let text = help(variables).output().expect("the binary runs").stdout;
        assert_eq!(is_coloured(&String::from_utf8(text).expect("UTF-8")), expected, "{variables:?}");
    }
}

/// On one device and as ranks; without a terminal standard error stays empty.
#[test]
fn attention_shows_its_progress_on_a_terminal_alone() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let tensor = |name, seed| (name, "BF16", vec![1, 8, 2, 8], bytes(&random(128, seed)));
    write(&folder.path().join("in"), &vec![tensor("q", 1), tensor("k", 2), tensor("v", 3), tensor("dout", 4)]);
    let attend = |options: &[&str]| {
        let mut command = oxtile();
        command.current_dir(folder.path()).args(["attention", "-i", "in", "-o", "out", "--device", "emulated", "--backward"]).args(options);
        command
    };
    let alone: &[&str] = &[];
    for (options, stages) in [
        (alone, ["attention forward", "attention backward"]),
        (&["--context-parallel", "ring", "--ranks", "2"], ["  q of rank 0", "attention of rank 1"]),
    ] {
        let text = shown(attend(options), false);
        assert!(text.contains("[===") && stages.iter().all(|stage| text.contains(stage)), "{options:?}: {text:?}");
        assert!(text.ends_with("\r\u{1b}[K"), "the bar is wiped: {text:?}");
        let piped = attend(options).output().expect("the binary runs");
        assert_eq!((piped.status.code(), piped.stderr), (Some(0), Vec::new()), "{options:?}");
    }
    assert_eq!(names(folder.path()), ["in", "out"]);
}
