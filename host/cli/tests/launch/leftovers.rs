//! What ranks started and left behind, and what is none of theirs.

use std::{
    io::{Read, Write},
    process::{Command, Stdio},
    ptr,
    time::Instant,
};

use crate::{
    PATIENCE,
    common::{oxtile, stderr},
    is_alive, launch, lines, processes, run, signal, wait_until,
};

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
fn what_a_rank_leaves_behind_does_not_wait_for_the_others() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    // Rank 1 ends well once what rank 0 left behind has ended; no process has asked the system for that before the end of all.
    let script = format!(
        "cd {}; if [ $RANK = 0 ]; then sleep 1000 & echo $! > 0; exit 0; fi
        i=0; while [ ! -s 0 ] || grep -qs 'State:.[^ZX]' /proc/$(cat 0)/status; do i=$((i+1)); [ $i -lt 400 ] || exit 9; sleep 0.05; done",
        folder.path().display()
    );
    let done = run(&["-n", "2"], &script);
    assert!(done.status.success(), "{}", stderr(&done));
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

/// A process that this thread traces. When it has been killed it stays on the system's table for as long as this thread does not wait for it:
/// to its parent it does not end.
struct Traced(libc::pid_t);

impl Traced {
    fn seize(process: &str) -> Self {
        let process: libc::pid_t = process.parse().expect("a process id");
        // SAFETY: PTRACE_SEIZE takes no pointers but null ones.
        let result = unsafe { libc::ptrace(libc::PTRACE_SEIZE, process, ptr::null_mut::<libc::c_void>(), ptr::null_mut::<libc::c_void>()) };
        assert_eq!(result, 0, "{}", std::io::Error::last_os_error());
        Self(process)
    }
}

impl Drop for Traced {
    fn drop(&mut self) {
        // SAFETY: a null pointer asks for no status.
        unsafe { libc::waitpid(self.0, ptr::null_mut(), libc::__WALL) };
    }
}

/// The status of a launcher that is told to go on when `is_traced`, and what it said.
fn ends_beside(script: &str, of: impl FnOnce(&[String]) -> Traced) -> (Option<i32>, String, String) {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let script = script.replace("FOLDER", folder.path().to_str().expect("text"));
    let mut launcher = launch(&["-n", "1", "--grace", "0.2"], &script).stderr(Stdio::piped()).spawn().expect("the binary runs");
    let ids = processes(folder.path(), 1);
    let traced = of(&ids);
    let go = folder.path().with_extension("go");
    std::fs::write(&go, "").expect("a writable folder");
    signal(&launcher, libc::SIGTERM);
    wait_until("the launcher is gone", || launcher.try_wait().expect("a child").is_some());
    let mut said = String::new();
    launcher.stderr.take().expect("piped").read_to_string(&mut said).expect("text");
    let status = launcher.wait().expect("it has ended").code();
    drop(traced);
    std::fs::remove_file(go).expect("it is there");
    (status, said, ids[0].clone())
}

#[test]
fn what_cannot_be_killed_is_named() {
    let script = "setsid sleep 1000 & echo $! > FOLDER/0; wait";
    let (status, said, process) = ends_beside(script, |ids| {
        let name = || std::fs::read_to_string(format!("/proc/{}/comm", ids[0])).unwrap_or_default();
        wait_until("setsid has become sleep", || name() == "sleep\n");
        Traced::seize(&ids[0])
    });
    assert_eq!(status, Some(143), "{said}");
    let expected = format!("; process {process} (sleep), which a rank left behind, is there 10 s after SIGKILL: ");
    assert!(said.starts_with("oxtile: ended by SIGTERM") && said.contains(&expected), "{said}");
}

#[test]
fn a_rank_that_cannot_be_killed_is_named() {
    let script = "trap '' TERM; echo $$ > FOLDER/0; while true; do sleep 0.05; done";
    let (status, said, process) = ends_beside(script, |ids| Traced::seize(&ids[0]));
    assert_eq!(status, Some(143), "{said}");
    assert!(said.contains(&format!("; rank 0 (process {process}) is there 10 s after SIGKILL: ")), "{said}");
}

/// A shell that becomes the launcher leaves it children that are none of its ranks', and whose children become the launcher's in turn.
#[test]
fn children_from_before_the_launch_are_left_alone() {
    let [theirs, ours] = [(); 2].map(|()| tempfile::tempdir().expect("a temporary folder"));
    let begin = "sleep 1000 & echo $! > $1/child; (sleep 1000 & echo $! > $1/grandchild; while [ ! -e $1.go ]; do sleep 0.05; done) &";
    // Each rank leaves a process behind, and ends when the other one's parent has ended.
    let rank = "setsid sleep 1000 & echo $! > $2/$RANK; : > $1.go; sleep 1";
    let script = format!("{begin} exec \"$0\" launch -n 2 -- sh -c '{rank}' x \"$1\" \"$2\"");
    let mut shell = Command::new("sh");
    shell.args(["-c", &script, env!("CARGO_BIN_EXE_oxtile")]).args([theirs.path(), ours.path()]);
    let status = shell.stdout(Stdio::null()).stderr(Stdio::null()).status().expect("the binary runs");
    let [theirs_alive, ours_alive] =
        [&theirs, &ours].map(|folder| processes(folder.path(), 2).into_iter().filter(|id| is_alive(id)).collect::<Vec<_>>());
    for process in &theirs_alive {
        // SAFETY: `kill` touches no memory; the process is one that this test has had started, and is there.
        unsafe { libc::kill(process.parse().expect("a process id"), libc::SIGKILL) };
    }
    std::fs::remove_file(theirs.path().with_extension("go")).expect("it is there");
    assert!(status.success(), "{status}");
    assert_eq!((theirs_alive.len(), ours_alive), (2, Vec::<String>::new()));
}

/// A guardian kills the processes of a job by the job's random name, and by no other entry of an environment.
#[test]
fn a_guardian_takes_the_name_of_a_job_alone() {
    // All values are of this process's own, so that a guardian that is wrong kills only its children.
    let own = format!("{:032x}", u128::from(std::process::id()) << 64 | 0x5eed);
    let entries = [
        (format!("UNIQ={own}"), false),
        (format!("HOME={own}"), false),
        (format!("OXTILE_JOB_ID={}", &own[1..]), false),
        (format!("OXTILE_JOB_ID={own}0"), false),
        (format!("OXTILE_JOB_ID={}Z", &own[1..]), false),
        (format!("OXTILE_JOB_ID={own}"), true),
    ];
    for (entry, ends) in entries {
        let (name, value) = entry.split_once('=').expect("both");
        let mut marked =
            Command::new("sleep").arg("1000").env_clear().env("PATH", "/usr/bin:/bin").env(name, value).spawn().expect("sleep");
        let mut guardian = oxtile().arg("--guardian-of-a-launch").env_clear().stdin(Stdio::piped()).spawn().expect("the binary runs");
        let mut pipe = guardian.stdin.take().expect("piped");
        pipe.write_all(format!("{entry}\n").as_bytes()).expect("a reader");
        drop(pipe);
        assert!(guardian.wait().expect("it ends").success());
        if ends {
            wait_until("it is killed", || marked.try_wait().expect("a child").is_some());
        } else {
            assert!(marked.try_wait().expect("a child").is_none(), "{entry}");
            marked.kill().and_then(|()| marked.wait()).expect("a child");
        }
    }
}
