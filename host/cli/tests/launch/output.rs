//! The output of ranks, and its readers.

use std::{
    io::{BufRead, BufReader, Read},
    process::{ExitStatus, Stdio},
    time::Duration,
};

use crate::{common::stderr, is_alive, launch, lines, processes, run, signal, wait_until};

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
fn output_that_cannot_be_written_is_a_failure() {
    for (script, status, before) in [("echo hi", 1, "oxtile: "), ("echo hi; exit 7", 7, "exited with status 7; ")] {
        let full = std::fs::OpenOptions::new().write(true).open("/dev/full").expect("Linux");
        let done = launch(&["-n", "1"], script).stdout(full).stderr(Stdio::piped()).output().expect("the binary runs");
        let said = stderr(&done);
        assert_eq!(done.status.code(), Some(status), "{said}");
        let lost = "output of ranks is lost, of rank 0 first: the launcher's standard output takes nothing: No space left on device";
        assert!(said.contains(&format!("{before}{lost}")), "{said}");
    }
    let full = std::fs::OpenOptions::new().write(true).open("/dev/full").expect("Linux");
    let done = launch(&["-n", "1"], "echo hi >&2").stdout(Stdio::null()).stderr(full).output().expect("the binary runs");
    assert_eq!(done.status.code(), Some(1), "nothing can be said, but the status says it");
}

/// No program reads what the ranks said: a signal ends the launcher all the same.
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

/// More than the launcher's pipe takes, and less than that, the launcher and the rank's pipe: the rank can end.
const FLOOD: &str = "head -c 100000 /dev/zero | tr '\\0' x";

/// A launch of one rank with a reader that holds its output, or errors, and does not read, until it ends.
fn unread(options: &[&str], script: &str, stream: &str) -> (ExitStatus, String) {
    let mut command = launch(&[&["-n", "1"], options].concat(), script);
    let (output, errors) = if stream == "output" { (Stdio::piped(), Stdio::piped()) } else { (Stdio::null(), Stdio::piped()) };
    let mut launcher = command.stdout(output).stderr(errors).spawn().expect("the binary runs");
    wait_until("the launcher is gone", || launcher.try_wait().expect("a child").is_some());
    let mut said = String::new();
    launcher.stderr.take().expect("piped").read_to_string(&mut said).expect("text");
    (launcher.wait().expect("it has ended"), said)
}

/// The seconds for which a launcher says that its reader took nothing, and nothing else.
fn waited(said: &str) -> Option<f32> {
    let waited = said.strip_prefix("oxtile: the last output of ranks is lost: its reader took nothing for ")?;
    waited.strip_suffix(" s (--drain SECONDS)\n")?.parse().ok()
}

#[test]
fn a_reader_that_stands_still_keeps_no_launcher_whose_ranks_have_ended() {
    let (status, said) = unread(&["--drain", "0.3"], FLOOD, "output");
    assert_eq!(status.code(), Some(1), "{said}");
    assert!(waited(&said).is_some_and(|waited| waited >= 0.3), "{said}");
    let (status, said) = unread(&["--drain", "0.3"], &format!("{FLOOD}; exit 7"), "output");
    assert_eq!(status.code(), Some(7), "{said}");
    assert!(said.contains("exited with status 7; the last output of ranks is lost"), "{said}");
}

/// With no time to drain, the end of what was said is still seen.
#[test]
fn no_time_to_drain_loses_nothing_that_is_read() {
    for _ in 0..5 {
        let done = run(&["-n", "2", "--drain", "0"], "echo said");
        assert!(done.status.success() && stderr(&done).is_empty(), "{}", stderr(&done));
        assert_eq!(lines(&done.stdout), ["[rank 0] said", "[rank 1] said"]);
    }
    let (status, said) = unread(&["--drain", "0"], FLOOD, "output");
    assert_eq!(status.code(), Some(1), "{said}");
    assert!(waited(&said).is_some_and(|waited| waited >= 0.1), "{said}");
}

/// A signal ends the wait for a reader that stands still, and the limit that is named is not that of the options.
#[test]
fn a_signal_ends_the_wait_for_a_reader() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let script = format!("echo $$ > {}/$RANK; {FLOOD}", folder.path().display());
    let mut command = launch(&["-n", "1", "--drain", "3600", "--grace", "3600"], &script);
    let mut launcher = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("the binary runs");
    let rank = &processes(folder.path(), 1)[0];
    wait_until("the rank is gone", || !is_alive(rank));
    std::thread::sleep(Duration::from_millis(300));
    signal(&launcher, libc::SIGTERM);
    wait_until("the launcher is gone", || launcher.try_wait().expect("a child").is_some());
    let mut said = String::new();
    launcher.stderr.take().expect("piped").read_to_string(&mut said).expect("text");
    assert!(said.contains("the last output of ranks is lost: a signal ended the wait for its reader after "), "{said}");
    assert!(!said.contains("3600") && !said.contains("--"), "{said}");
}

/// What the launcher itself says has no room either.
#[test]
fn errors_that_nobody_reads_keep_no_launcher() {
    let (status, said) = unread(&["--drain", "0.3"], &format!("({FLOOD}) >&2; exit 7"), "errors");
    assert_eq!(status.code(), Some(7), "{} bytes", said.len());
    let (status, said) = unread(&["--drain", "0.3", "--verbose"], &format!("({FLOOD}) >&2"), "errors");
    assert_eq!(status.code(), Some(1), "{} bytes", said.len());
}

/// It is read for longer than the time to drain after the rank has ended, and never that long without a line.
#[test]
fn a_slow_reader_gets_everything() {
    let script = "i=0; while [ $i -lt 150 ]; do head -c 1000 /dev/zero | tr '\\0' x; echo; i=$((i+1)); done";
    let mut launcher = launch(&["-n", "1", "--drain", "1"], script).stdout(Stdio::piped()).spawn().expect("the binary runs");
    let (mut reader, mut piece, mut total) = (launcher.stdout.take().expect("piped"), vec![0; 3000], 0);
    std::thread::sleep(Duration::from_millis(500));
    loop {
        std::thread::sleep(Duration::from_millis(50));
        match reader.read(&mut piece).expect("readable") {
            0 => break,
            count => total += count,
        }
    }
    assert!(launcher.wait().expect("it ends").success());
    assert_eq!(total, 150 * (1001 + "[rank 0] ".len()));
}
