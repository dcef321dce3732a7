//! `oxtile launch` with real processes: what they are told, how their output comes, and that they end together.

mod common;

use std::{
    io::{BufRead, BufReader, Read},
    os::unix::process::ExitStatusExt,
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

/// Whether a process is there and has not ended.
fn is_alive(process: &str) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{process}/stat")).unwrap_or_default();
    stat.rsplit_once(") ").is_some_and(|(_, rest)| !rest.starts_with('Z'))
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
    let done =
        run(&["-n", "3"], "echo $RANK $LOCAL_RANK $WORLD_SIZE $LOCAL_WORLD_SIZE $MASTER_ADDR; echo $OXTILE_JOB_ID:$MASTER_PORT >&2; cat");
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
fn lines_are_never_torn() {
    // Twelve ranks write half lines in turns, and a line longer than a pipe takes at once.
    let script = r#"i=0; while [ $i -lt 40 ]; do printf "%s" "begin-$RANK-$i "; printf "%s\n" "end-$RANK-$i"; i=$((i+1)); done
        head -c 30000 /dev/zero | tr '\0' x; echo; printf "no end""#;
    let done = run(&["-n", "12"], script);
    assert!(done.status.success(), "{}", stderr(&done));
    let found = lines(&done.stdout);
    let expected = |rank: usize, i: usize| format!("[rank {rank:>2}] begin-{rank}-{i} end-{rank}-{i}");
    let mut all: Vec<_> = (0..12).flat_map(|rank| (0..40).map(move |i| expected(rank, i))).collect();
    all.extend((0..12).flat_map(|rank| [format!("[rank {rank:>2}] {}", "x".repeat(30_000)), format!("[rank {rank:>2}] no end")]));
    all.sort();
    assert!(found == all, "{} lines, {} expected", found.len(), all.len());
    // What a rank says stays in its order.
    let ordered: Vec<_> =
        String::from_utf8_lossy(&done.stdout).lines().filter(|line| line.contains("begin-5-")).map(str::to_owned).collect();
    assert_eq!(ordered, (0..40).map(|i| expected(5, i)).collect::<Vec<_>>());
}

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
fn what_a_rank_leaves_behind_ends_with_it() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    // The child keeps the output open, and must not keep the launcher.
    let done = run(&["-n", "2"], &format!("sleep 1000 & echo $! > {}/$RANK", folder.path().display()));
    assert!(done.status.success(), "{}", stderr(&done));
    for process in processes(folder.path(), 2) {
        wait_until("it is gone", || !is_alive(&process));
    }
}

#[test]
fn what_left_its_rank_for_a_group_of_its_own_ends_too() {
    for (rest, status) in [("", 0), ("if [ $RANK = 1 ]; then exit 4; fi; sleep 1000", 4)] {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let child = "trap '' TERM INT HUP; echo $$ > $1/$RANK; sleep 1000 & wait; sleep 1000";
        let script = format!("setsid sh -c \"$2\" x \"$1\" & while [ ! -s $1/$RANK ]; do sleep 0.05; done; echo said; {rest}");
        let mut command = oxtile();
        let launch = command.args(["launch", "-n", "2", "--", "sh", "-c", &script, "x"]).arg(folder.path()).arg(child);
        let begin = Instant::now();
        // It holds the rank's output, which must not keep the launcher.
        let done = launch.output().expect("the binary runs");
        assert!(begin.elapsed() < PATIENCE, "{rest}");
        assert_eq!(done.status.code(), Some(status), "{}", stderr(&done));
        assert_eq!(lines(&done.stdout), ["[rank 0] said", "[rank 1] said"]);
        assert!(processes(folder.path(), 2).iter().all(|process| !is_alive(process)), "{rest}");
    }
}

#[test]
fn signals_go_to_all_ranks() {
    for (number, status) in [(libc::SIGINT, 130), (libc::SIGTERM, 143), (libc::SIGHUP, 129), (libc::SIGQUIT, 131)] {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let script = format!(
            "trap 'echo caught; exit 0' INT TERM HUP QUIT; echo $$ > {}/$RANK; while true; do sleep 0.05; done",
            folder.path().display()
        );
        let launcher = launch(&["-n", "3"], &script).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("the binary runs");
        let ranks = processes(folder.path(), 3);
        signal(&launcher, number);
        let done = launcher.wait_with_output().expect("it ends");
        assert_eq!(done.status.code(), Some(status), "{}", stderr(&done));
        assert_eq!(lines(&done.stdout), ["[rank 0] caught", "[rank 1] caught", "[rank 2] caught"]);
        assert!(stderr(&done).contains("and all ranks with it"), "{}", stderr(&done));
        assert!(ranks.iter().all(|rank| !is_alive(rank)));
    }
}

#[test]
fn messages_go_to_all_ranks_and_end_nobody() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let script = format!(
        "trap 'heard=1' USR1; echo $$ > {}/$RANK; while [ -z \"$heard\" ]; do sleep 0.05; done; echo heard; exit 0",
        folder.path().display()
    );
    let launcher = launch(&["-n", "2"], &script).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("the binary runs");
    processes(folder.path(), 2);
    signal(&launcher, libc::SIGUSR1);
    let done = launcher.wait_with_output().expect("it ends");
    assert!(done.status.success(), "{}", stderr(&done));
    assert_eq!(lines(&done.stdout), ["[rank 0] heard", "[rank 1] heard"]);
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

/// Nobody reads what the ranks said: a signal ends the launcher all the same.
#[test]
fn a_reader_that_stands_still_does_not_keep_a_launcher_that_is_told_to_end() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let script = format!("head -c 3000000 /dev/zero | tr '\\0' x & sleep 0.3; echo $$ > {}/$RANK; wait", folder.path().display());
    let mut command = launch(&["-n", "1", "--grace", "0.2"], &script);
    let mut launcher = command.stdout(Stdio::piped()).stderr(Stdio::null()).spawn().expect("the binary runs");
    let rank = &processes(folder.path(), 1)[0];
    signal(&launcher, libc::SIGTERM);
    wait_until("the rank is gone", || !is_alive(rank));
    wait_until("the launcher is gone", || launcher.try_wait().expect("a child").is_some());
    assert_eq!(launcher.wait().expect("it has ended").code(), Some(143));
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
    let done = launcher.wait_with_output().expect("it ends");
    assert_eq!(done.status.code(), Some(130), "{}", stderr(&done));
    assert!(ranks.iter().all(|rank| !is_alive(rank)));
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

#[test]
fn a_reader_that_has_seen_enough_is_no_failure() {
    let mut launcher = launch(&["-n", "2"], "i=0; while [ $i -lt 2000 ]; do echo line $i; i=$((i+1)); done")
        .stdout(Stdio::piped())
        .spawn()
        .expect("it runs");
    let mut reader = BufReader::new(launcher.stdout.take().expect("piped"));
    let mut line = String::new();
    reader.read_line(&mut line).expect("a line");
    assert!(line.starts_with("[rank "), "{line}");
    drop(reader);
    assert!(launcher.wait().expect("it ends").success());
}

#[test]
fn a_program_that_is_not_there_is_an_error() {
    let done = oxtile().args(["launch", "-n", "2", "/no/such/program"]).output().expect("the binary runs");
    assert_eq!(done.status.code(), Some(1));
    assert!(stderr(&done).contains("cannot start \"/no/such/program\": No such file"), "{}", stderr(&done));
    let usage = oxtile().args(["launch", "-n", "2"]).output().expect("the binary runs");
    assert_eq!(usage.status.code(), Some(2), "{}", stderr(&usage));
}

#[test]
fn a_good_end_can_be_told() {
    let mut child = launch(&["-n", "2", "--verbose"], "true").stderr(Stdio::piped()).spawn().expect("the binary runs");
    let mut said = String::new();
    child.stderr.take().expect("piped").read_to_string(&mut said).expect("text");
    assert!(child.wait().expect("it ends").success());
    assert!(said.starts_with("oxtile: 2 ranks ended well after "), "{said}");
}
