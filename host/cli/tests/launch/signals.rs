//! Signals to the launcher.

use std::{
    process::{Command, Stdio},
    time::Duration,
};

use crate::{common::stderr, is_alive, is_stopped, launch, lines, processes, signal, wait_until};

#[test]
fn signals_go_to_all_ranks() {
    for (name, number, status) in [
        ("INT", libc::SIGINT, 130),
        ("TERM", libc::SIGTERM, 143),
        ("HUP", libc::SIGHUP, 129),
        ("QUIT", libc::SIGQUIT, 131),
        ("ALRM", libc::SIGALRM, 142),
    ] {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let script = format!(
            "for name in INT TERM HUP QUIT ALRM; do trap \"echo $name; exit 0\" $name; done; echo $$ > {}/$RANK; while true; do sleep 0.05; done",
            folder.path().display()
        );
        let launcher = launch(&["-n", "3"], &script).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("the binary runs");
        let ranks = processes(folder.path(), 3);
        signal(&launcher, number);
        let done = launcher.wait_with_output().expect("it ends");
        assert_eq!(done.status.code(), Some(status), "{}", stderr(&done));
        assert_eq!(lines(&done.stdout), [0, 1, 2].map(|rank| format!("[rank {rank}] {name}")));
        assert!(stderr(&done).contains("and all ranks with it"), "{}", stderr(&done));
        assert!(ranks.iter().all(|rank| !is_alive(rank)));
    }
}

#[test]
fn messages_go_to_all_ranks_and_end_nobody() {
    for (name, number) in [("USR1", libc::SIGUSR1), ("WINCH", libc::SIGWINCH)] {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let script = format!(
            "trap 'heard=1' {name}; echo $$ > {}/$RANK; while [ -z \"$heard\" ]; do sleep 0.05; done; echo heard; exit 0",
            folder.path().display()
        );
        let mut launcher = launch(&["-n", "2"], &script).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("the binary runs");
        processes(folder.path(), 2);
        signal(&launcher, number);
        wait_until("they have heard it", || launcher.try_wait().expect("a child").is_some());
        let done = launcher.wait_with_output().expect("it ends");
        assert!(done.status.success(), "{name}: {}", stderr(&done));
        assert_eq!(lines(&done.stdout), ["[rank 0] heard", "[rank 1] heard"]);
    }
}

/// Ctrl-Z and `fg`.
#[test]
fn a_stop_is_one_of_all_ranks_and_so_is_what_follows() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let script = format!("echo $$ > {0}/$RANK; while [ ! -e {0}.go ]; do sleep 0.05; done; echo done", folder.path().display());
    let launcher = launch(&["-n", "2"], &script).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("the binary runs");
    let mut all = processes(folder.path(), 2);
    all.push(launcher.id().to_string());
    for _ in 0..2 {
        signal(&launcher, libc::SIGTSTP);
        wait_until("all stand still", || all.iter().all(|process| is_stopped(process)));
        signal(&launcher, libc::SIGCONT);
        wait_until("all go on", || all.iter().all(|process| is_alive(process) && !is_stopped(process)));
    }
    let go = folder.path().with_extension("go");
    std::fs::write(&go, "").expect("a writable folder");
    let done = launcher.wait_with_output().expect("it ends");
    std::fs::remove_file(go).expect("it is there");
    assert!(done.status.success(), "{}", stderr(&done));
    assert_eq!(lines(&done.stdout), ["[rank 0] done", "[rank 1] done"]);
}

#[test]
fn the_end_of_a_terminal_is_nothing_to_a_launch_under_nohup() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let script = format!("echo $$ > {0}/$RANK; while [ ! -e {0}.go ]; do sleep 0.05; done; echo done", folder.path().display());
    let mut command = Command::new("nohup");
    command.arg(env!("CARGO_BIN_EXE_oxtile")).args(["launch", "-n", "1", "--", "sh", "-c", &script]).stdin(Stdio::null());
    let launcher = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("nohup");
    let ranks = processes(folder.path(), 1);
    signal(&launcher, libc::SIGHUP);
    std::thread::sleep(Duration::from_millis(200));
    assert!(ranks.iter().all(|rank| is_alive(rank)));
    let go = folder.path().with_extension("go");
    std::fs::write(&go, "").expect("a writable folder");
    let done = launcher.wait_with_output().expect("it ends");
    std::fs::remove_file(go).expect("it is there");
    assert!(done.status.success() && lines(&done.stdout) == ["[rank 0] done"], "{}", stderr(&done));
}

#[test]
fn a_second_signal_kills() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let script = format!("trap '' INT; echo $$ > {}/$RANK; while true; do sleep 0.05; done", folder.path().display());
    let launcher = launch(&["-n", "2", "--grace", "3600"], &script).stderr(Stdio::piped()).spawn().expect("the binary runs");
    let ranks = processes(folder.path(), 2);
    signal(&launcher, libc::SIGINT);
    std::thread::sleep(Duration::from_millis(200));
    assert!(ranks.iter().all(|rank| is_alive(rank)), "they were only asked");
    signal(&launcher, libc::SIGINT);
    // One more changes nothing.
    signal(&launcher, libc::SIGTERM);
    let done = launcher.wait_with_output().expect("it ends");
    assert_eq!(done.status.code(), Some(130), "{}", stderr(&done));
    assert_eq!(stderr(&done), "oxtile: ended by SIGINT (signal 2), and all ranks with it\n", "nothing was said, and nothing lost");
    assert!(ranks.iter().all(|rank| !is_alive(rank)));
}

#[test]
fn without_grace_ranks_are_killed_and_what_they_said_is_there() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let script = format!("trap '' TERM; echo said; echo $$ > {}/$RANK; while true; do sleep 0.05; done", folder.path().display());
    let mut command = launch(&["-n", "2", "--grace", "0"], &script);
    let launcher = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("the binary runs");
    processes(folder.path(), 2);
    signal(&launcher, libc::SIGTERM);
    let done = launcher.wait_with_output().expect("it ends");
    assert_eq!(done.status.code(), Some(143), "{}", stderr(&done));
    assert_eq!(stderr(&done), "oxtile: ended by SIGTERM (signal 15), and all ranks with it\n");
    assert_eq!(lines(&done.stdout), ["[rank 0] said", "[rank 1] said"]);
}
