//! Ranks that fail, and what becomes of the others.

use std::{
    os::unix::process::ExitStatusExt,
    time::{Duration, Instant},
};

use crate::{PATIENCE, common::stderr, is_alive, launch, lines, processes, run, signal, wait_until};

#[test]
fn the_rank_that_fails_is_named_and_the_others_end() {
    for (fault, status, said) in [
        ("exit 7", 7, "exited with status 7; the 2 others that ran were ended"),
        ("kill -9 $$", 137, "was ended by SIGKILL (signal 9); the 2 others that ran were ended"),
        ("kill -SEGV $$", 139, "was ended by SIGSEGV (signal 11); the 2 others that ran were ended"),
    ] {
        let begin = Instant::now();
        let done = run(&["-n", "3"], &format!("if [ $RANK = 1 ]; then sleep 0.3; {fault}; fi; sleep 1000"));
        assert_eq!(done.status.code(), Some(status), "{fault}: {}", stderr(&done));
        let text = stderr(&done);
        assert!(text.starts_with("oxtile: rank 1 (process ") && text.trim_end().ends_with(said) && text.lines().count() == 1, "{text}");
        assert!(begin.elapsed() < PATIENCE, "{fault}");
    }
    let done = run(&["-n", "1"], "exit 3");
    assert!(stderr(&done).trim_end().ends_with("exited with status 3"), "{}", stderr(&done));
}

#[test]
fn ranks_that_do_not_listen_are_killed_after_the_grace() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    // It ignores SIGTERM, and so does what it starts.
    let script = format!(
        "if [ $RANK = 0 ]; then while [ ! -s {0}/1 ]; do sleep 0.05; done; exit 5; fi
        trap '' TERM; sleep 1000 & echo $! > {0}/1; wait; while true; do sleep 0.05; done",
        folder.path().display()
    );
    let begin = Instant::now();
    let done = run(&["-n", "2", "--grace", "0.3"], &script);
    assert_eq!(done.status.code(), Some(5), "{}", stderr(&done));
    assert!(stderr(&done).trim_end().ends_with(") exited with status 5; the other that ran was ended"), "{}", stderr(&done));
    assert!(begin.elapsed() >= Duration::from_millis(300), "they had their grace");
    for process in processes(folder.path(), 1) {
        wait_until("what a rank started is gone", || !is_alive(&process));
    }
}

#[test]
fn ranks_may_tidy_up_when_they_are_asked_to_end() {
    let done = run(
        &["-n", "2", "--grace", "60"],
        "if [ $RANK = 0 ]; then sleep 0.5; exit 1; fi; trap 'echo tidy; exit 0' TERM; while true; do sleep 0.05; done",
    );
    assert_eq!(done.status.code(), Some(1));
    assert_eq!(lines(&done.stdout), ["[rank 1] tidy"], "{}", stderr(&done));
}

#[test]
fn a_killed_launcher_leaves_no_rank() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let script = format!("trap '' INT TERM HUP; echo $$ > {}/$RANK; while true; do sleep 0.05; done", folder.path().display());
    let mut launcher = launch(&["-n", "3"], &script).spawn().expect("the binary runs");
    let ranks = processes(folder.path(), 3);
    signal(&launcher, libc::SIGKILL);
    assert_eq!(launcher.wait().expect("it ends").signal(), Some(libc::SIGKILL));
    for rank in ranks {
        wait_until("the rank is gone", || !is_alive(&rank));
    }
}

/// Under `sh -c` the program is not the rank's own process, which is all that the kernel kills; nor is what has left it for a group of its own.
#[test]
fn a_killed_launcher_leaves_nothing_that_its_ranks_have_started() {
    for start in ["sleep 1000", "setsid sleep 1000", "setsid sh -c 'sleep 1000 & sleep 1000; wait'"] {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let script = format!("trap '' INT TERM HUP; {start} & echo $! > {}/$RANK; wait", folder.path().display());
        let mut launcher = launch(&["-n", "2"], &script).spawn().expect("the binary runs");
        let programs = processes(folder.path(), 2);
        assert!(programs.iter().all(|program| is_alive(program)), "{start}");
        signal(&launcher, libc::SIGKILL);
        assert_eq!(launcher.wait().expect("it ends").signal(), Some(libc::SIGKILL));
        for program in programs {
            wait_until("what a rank started is gone", || !is_alive(&program));
        }
    }
}
