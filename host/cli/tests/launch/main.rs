//! `oxtile launch` with real processes: what they are told, how their output comes, and that they end together.

#[path = "../common/mod.rs"]
mod common;
mod ends;
mod leftovers;
mod output;
mod signals;

use std::{
    io::{Read, Seek, Write},
    path::Path,
    process::{Child, Command, Output, Stdio},
    time::{Duration, Instant},
};

use common::{oxtile, stderr};

/// How long anything here may take on a busy machine.
const PATIENCE: Duration = Duration::from_secs(60);

/// A launch of a shell script.
fn launch(options: &[&str], script: &str) -> Command {
    let mut command = oxtile();
    command.arg("launch").args(options).args(["--", "sh", "-c", script]);
    command
}

fn run(options: &[&str], script: &str) -> Output {
    launch(options, script).output().expect("the binary runs")
}

fn lines(bytes: &[u8]) -> Vec<String> {
    let mut lines: Vec<_> = String::from_utf8_lossy(bytes).lines().map(str::to_owned).collect();
    lines.sort();
    lines
}

/// The state of a process, as ps(1) has it, while it is there.
fn state(process: &str) -> Option<char> {
    let stat = std::fs::read_to_string(format!("/proc/{process}/stat")).unwrap_or_default();
    stat.rsplit_once(") ").and_then(|(_, rest)| rest.chars().next())
}

/// Whether a process is there and has not ended.
fn is_alive(process: &str) -> bool {
    state(process).is_some_and(|state| state != 'Z')
}

fn is_stopped(process: &str) -> bool {
    state(process) == Some('T')
}

fn wait_until(what: &str, mut is_so: impl FnMut() -> bool) {
    let deadline = Instant::now() + PATIENCE;
    while !is_so() {
        assert!(Instant::now() < deadline, "{what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Files that each rank has written its process id to, as processes.
fn processes(folder: &Path, count: usize) -> Vec<String> {
    let read = || -> Vec<String> {
        let entries = std::fs::read_dir(folder).expect("readable").map(|entry| entry.expect("an entry").path());
        entries.map(|path| std::fs::read_to_string(path).expect("readable").trim().to_owned()).filter(|id| !id.is_empty()).collect()
    };
    wait_until("all processes have started", || read().len() == count);
    read()
}

fn signal(child: &Child, signal: libc::c_int) {
    let id = libc::pid_t::try_from(child.id()).expect("a process id");
    // SAFETY: `kill` touches no memory; the id is that of a child that has not been waited for.
    assert_eq!(unsafe { libc::kill(id, signal) }, 0);
}

#[test]
fn ranks_are_told_who_they_are() {
    let script = "echo $RANK $LOCAL_RANK $WORLD_SIZE $LOCAL_WORLD_SIZE $MASTER_ADDR; echo $OXTILE_JOB_ID:$MASTER_PORT >&2; cat";
    let mut not_for_ranks = tempfile::tempfile().expect("a temporary file");
    not_for_ranks.write_all(b"not for ranks").and_then(|()| not_for_ranks.rewind()).expect("it is written");
    let done = launch(&["-n", "3"], script).stdin(not_for_ranks).output().expect("the binary runs");
    assert!(done.status.success(), "{}", stderr(&done));
    let expected = ["[rank 0] 0 0 3 3 127.0.0.1", "[rank 1] 1 1 3 3 127.0.0.1", "[rank 2] 2 2 3 3 127.0.0.1"];
    assert_eq!(lines(&done.stdout), expected);
    let said = lines(&done.stderr);
    let jobs: Vec<_> = said.iter().map(|line| line.split_once("] ").expect("a prefix").1).collect();
    assert!(jobs.len() == 3 && jobs.iter().all(|job| *job == jobs[0]), "one job, one port: {said:?}");
    let (job, port) = jobs[0].split_once(':').expect("both");
    assert!(job.len() == 32 && port.parse::<u16>().is_ok_and(|port| port > 0), "{said:?}");
    let other = run(&["-n", "1"], "echo $OXTILE_JOB_ID");
    assert_ne!(lines(&other.stdout)[0], format!("[rank 0] {job}"), "another launch is another job");
}

#[test]
fn a_program_that_is_not_there_is_an_error() {
    let done = oxtile().args(["launch", "-n", "2", "/no/such/program"]).output().expect("the binary runs");
    assert_eq!(done.status.code(), Some(1));
    assert!(stderr(&done).contains("cannot start \"/no/such/program\" as rank 0: No such file"), "{}", stderr(&done));
    assert!(stderr(&done).ends_with("; name a program that the shell finds, or its path\n"), "{}", stderr(&done));
    let usage = oxtile().args(["launch", "-n", "2"]).output().expect("the binary runs");
    assert_eq!(usage.status.code(), Some(2), "{}", stderr(&usage));
}

/// The launcher's descriptors, and not the program, are what is missing.
#[test]
fn a_rank_too_many_is_an_error_that_says_so() {
    let script = "ulimit -n 24; exec \"$0\" launch -n 64 -- sleep 1000";
    let done = Command::new("sh").args(["-c", script, env!("CARGO_BIN_EXE_oxtile")]).stdin(Stdio::null()).output().expect("a shell");
    let said = stderr(&done);
    assert_eq!(done.status.code(), Some(1), "{said}");
    let rank = said.strip_prefix("oxtile: cannot start \"sleep\" as rank ").and_then(|rest| rest.split_once(": "));
    assert!(rank.is_some_and(|(rank, _)| (1..24).contains(&rank.parse().unwrap_or(0))), "{said}");
    assert!(said.contains("(os error 24)") && said.contains("raise their limit (ulimit -n), or start fewer ranks"), "{said}");
}

#[test]
fn a_good_end_can_be_told() {
    let mut child = launch(&["-n", "2", "--verbose"], "true").stderr(Stdio::piped()).spawn().expect("the binary runs");
    let mut said = String::new();
    child.stderr.take().expect("piped").read_to_string(&mut said).expect("text");
    assert!(child.wait().expect("it ends").success());
    assert!(said.starts_with("oxtile: 2 ranks ended well after "), "{said}");
}
