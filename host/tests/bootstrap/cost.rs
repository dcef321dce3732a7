//! What strangers cost rank 0: memory, threads and files. Rank 0 is a process of its own, which is looked at from outside.

use std::{
    env, fs,
    fs::File,
    io::{Read, Write},
    net::TcpStream,
    process::{Child, Command, ExitCode, Stdio},
    thread,
    time::{Duration, Instant},
};

use libtest_mimic::Trial;
use oxtile::comm::bootstrap::{Environment, Store};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

use crate::{
    CHILD, free_port,
    proof::{JOB, connect, opening},
    strangers::{TIMEOUT, environment},
    trial,
};

/// The files that rank 0 needs: the listener, two for the door, and two for its connection to itself.
const OWN_FILES: usize = 5;

pub fn trials() -> Vec<Trial> {
    vec![
        trial("cost::strangers_cost_little", cost),
        trial("cost::strangers_leave_files_to_ranks", few_files),
        trial("cost::a_lack_of_files_is_told", no_files),
    ]
}

/// This program as rank 0 of two.
fn rank_0(port: u16, case: &str) -> Child {
    Command::new(env::current_exe().expect("a path"))
        .envs([("RANK", "0"), ("LOCAL_RANK", "0"), ("WORLD_SIZE", "2"), ("MASTER_ADDR", "127.0.0.1"), ("OXTILE_JOB_ID", JOB)])
        .envs([("MASTER_PORT", &*port.to_string()), (CHILD, case)])
        .stdout(Stdio::piped())
        .spawn()
        .expect("it starts")
}

/// Rank 0 in a process of its own, which may have few files, or only some of them left.
pub fn child(case: &str) -> ExitCode {
    let mut timeout = TIMEOUT;
    let mut held = Vec::new();
    if let Some(files) = case.strip_prefix("cost:files:") {
        let files = files.parse().expect("a number");
        setrlimit(Resource::Nofile, Rlimit { current: Some(files), ..getrlimit(Resource::Nofile) }).expect("fewer");
    }
    if let Some(left) = case.strip_prefix("cost:left:") {
        setrlimit(Resource::Nofile, Rlimit { current: Some(64), ..getrlimit(Resource::Nofile) }).expect("fewer");
        held.extend(std::iter::from_fn(|| File::open("/dev/null").ok()));
        let left = left.parse::<usize>().expect("a number");
        held.truncate(held.len() - left);
        if left == OWN_FILES {
            // It waits in vain.
            timeout = Duration::from_secs(3);
        }
    }
    let well = Environment::read().and_then(|environment| {
        let mut store = Store::connect(&environment, timeout)?;
        let all = store.all_gather(&[0])?;
        assert_eq!(all, [[0], [1]]);
        store.close()
    });
    match well {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            println!("{error}");
            ExitCode::FAILURE
        }
    }
}

/// A number of `/proc/PID/status`.
fn status(child: &Child, name: &str) -> u64 {
    let text = fs::read_to_string(format!("/proc/{}/status", child.id())).expect("it runs");
    let line = text.lines().find_map(|line| line.strip_prefix(name)).expect(name);
    line.split_whitespace().next().expect("a number").parse().expect("a number")
}

/// Sends as much as is taken at once.
fn pour(stream: &mut TcpStream, bytes: &[u8]) {
    stream.set_nonblocking(true).expect("an option");
    let mut at = 0;
    while at < bytes.len() {
        match stream.write(&bytes[at..]) {
            Ok(count) => at += count,
            Err(_) => return,
        }
    }
}

/// Waits until a rank 0 to which no connection has come has all of its own files: three of them are sockets.
fn has_its_files(zero: &Child) {
    let folder = format!("/proc/{}/fd", zero.id());
    let sockets = || {
        let files = fs::read_dir(&folder).expect("it runs").filter_map(|file| fs::read_link(file.ok()?.path()).ok());
        files.filter(|file| file.to_string_lossy().starts_with("socket:")).count()
    };
    let deadline = Instant::now() + TIMEOUT;
    while sockets() < 3 {
        assert!(Instant::now() < deadline, "rank 0 has {} sockets", sockets());
        thread::sleep(Duration::from_millis(20));
    }
}

/// Rank 0 and rank 1 are well; strangers that hold `said` come before. Returns how much more memory (KiB) and how many more threads and files rank 0 had.
fn beside_many(case: &str, count: usize, said: &[&[u8]]) -> [u64; 3] {
    let port = free_port();
    let mut zero = rank_0(port, case);
    has_its_files(&zero);
    let files = |zero: &Child| fs::read_dir(format!("/proc/{}/fd", zero.id())).expect("it runs").count() as u64;
    let before = [status(&zero, "VmHWM:"), status(&zero, "Threads:"), files(&zero)];
    let mut most = before;
    let mut held = Vec::new();
    for i in 0..count {
        let mut stream = connect(port);
        pour(&mut stream, said[i % said.len()]);
        held.push(stream);
        if i % 32 == 0 {
            // At most what rank 0 closes: its own port is where they come from.
            most = [most[0], most[1].max(status(&zero, "Threads:")), most[2].max(files(&zero))];
        }
    }
    thread::sleep(Duration::from_millis(200));
    most = [status(&zero, "VmHWM:"), most[1].max(status(&zero, "Threads:")), most[2].max(files(&zero))];
    let begin = Instant::now();
    let mut store = Store::connect(&environment(port, 1, 2, JOB), TIMEOUT).expect("rank 1 is let in");
    assert!(begin.elapsed() < Duration::from_secs(3), "strangers delay a rank: {:?}", begin.elapsed());
    assert_eq!(store.all_gather(&[1]).expect("well"), [[0], [1]]);
    store.close().expect("well");
    assert!(zero.wait().expect("it ends").success());
    [0, 1, 2].map(|i| most[i] - before[i])
}

fn cost() {
    // As many files as there are strangers, and some.
    let limit = getrlimit(Resource::Nofile);
    let _ = setrlimit(Resource::Nofile, Rlimit { current: limit.maximum.or(limit.current), ..limit });
    let mebibyte = vec![b'x'; 1 << 20];
    let long = [&(1_u32 << 20).to_le_bytes()[..], &mebibyte].concat();
    let almost = [&512_u32.to_le_bytes()[..], &[b'x'; 511]].concat();
    let [memory, threads, files] = beside_many("cost", 800, &[&long, &almost, &[], &opening(&[8; 32])]);
    println!("800 strangers: {memory} KiB, {threads} threads and {files} files more");
    assert!(memory < 2048, "{memory} KiB for 800 strangers");
    // Rank 0 may begin one of its own while they come.
    assert!(threads <= 1, "{threads} threads are strangers'");
    // The last that came is let in before the first one is sent away.
    assert!(files <= 257, "{files} files are strangers'");
}

/// A process that may have 40 files, to which 300 strangers come, and one that has two left once rank 0 is there.
fn few_files() {
    let [_, _, files] = beside_many("cost:files:40", 300, &[&[]]);
    assert!(files <= 5, "{files} files are strangers'");
    beside_many("cost:left:7", 40, &[&[]]);
}

/// No file is left but rank 0's own.
fn no_files() {
    let port = free_port();
    let mut zero = rank_0(port, &format!("cost:left:{OWN_FILES}"));
    // Strangers that came before it had all of its five files could take one of them. The last file, of 64, is that of its connection to itself.
    let last = format!("/proc/{}/fd/63", zero.id());
    let deadline = Instant::now() + TIMEOUT;
    while !fs::read_link(&last).is_ok_and(|file| file.to_string_lossy().starts_with("socket:")) {
        assert!(Instant::now() < deadline, "rank 0 has files left");
        thread::sleep(Duration::from_millis(20));
    }
    thread::sleep(Duration::from_millis(200));
    let _stranger = connect(port);
    assert!(!zero.wait().expect("it ends").success());
    let mut said = String::new();
    zero.stdout.take().expect("piped").read_to_string(&mut said).expect("text");
    let mend = "raise the number of files that a process may open (ulimit -n)";
    assert_eq!(said, format!("rank 0 refused rank 0: no room for all ranks (Too many open files (os error 24)): {mend}\n"));
}
