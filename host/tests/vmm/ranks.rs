//! This program as the ranks of a job.

use std::env;
use std::io::Read;
use std::net::TcpListener;
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use crate::CHILD;

/// As `oxtile launch` starts them, but to be looked at one by one.
pub fn start(world: u32, what: &str, variables: &[(&'static str, &str)]) -> Vec<Child> {
    start_each(world, what, |_| variables.iter().map(|(name, value)| (*name, (*value).to_owned())).collect())
}

/// The same, with variables of each rank.
pub fn start_each(world: u32, what: &str, variables: impl Fn(u32) -> Vec<(&'static str, String)>) -> Vec<Child> {
    let listener = TcpListener::bind(("127.0.0.1", 0)).expect("a free port");
    let port = listener.local_addr().expect("an address").port().to_string();
    drop(listener);
    let start = |rank: u32| {
        let of_rank = [("RANK", rank), ("LOCAL_RANK", rank), ("WORLD_SIZE", world)].map(|(name, value)| (name, value.to_string()));
        Command::new(env::current_exe().expect("a path"))
            .envs(of_rank)
            .envs([("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", &port), ("OXTILE_JOB_ID", what), (CHILD, what)])
            // To name the frames of a panic takes longer than the others wait, on a machine that has much else to do.
            .env("RUST_BACKTRACE", "0")
            .envs(variables(rank))
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .expect("the ranks start")
    };
    (0..world).map(start).collect()
}

/// The next line that a rank says; empty once it has ended.
pub fn line(child: &mut Child) -> String {
    // A byte at a time: what follows is read by `end`.
    let (out, mut said, mut byte) = (child.stdout.as_mut().expect("piped"), Vec::new(), [0]);
    while out.read(&mut byte).is_ok_and(|read| read == 1) && byte != *b"\n" {
        said.extend(byte);
    }
    String::from_utf8(said).expect("text")
}

/// What a rank said and how it ended; it is killed at the limit, which is then said too.
pub fn end(mut child: Child, limit: Duration) -> (Option<i32>, String) {
    let (start, mut is_killed) = (Instant::now(), false);
    let status = loop {
        if let Some(status) = child.try_wait().expect("a child") {
            break status;
        }
        if start.elapsed() > limit {
            is_killed |= child.kill().is_ok();
        }
        thread::sleep(Duration::from_millis(5));
    };
    let mut said = String::new();
    child.stdout.take().expect("piped").read_to_string(&mut said).expect("text");
    let killed = if is_killed { format!(" (killed by the test after {limit:?})") } else { String::new() };
    (status.code(), said.trim().to_owned() + &killed)
}
