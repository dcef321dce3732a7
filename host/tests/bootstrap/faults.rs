//! The kill matrix: three processes, one of which ends or stops, at each phase and in each way. The others return an error that names it,
//! within their deadline and a second, and leave no descriptor and no thread behind.

use std::{
    env, fs,
    io::Read,
    process::{Child, Command, ExitCode, Stdio},
    thread,
    time::{Duration, Instant},
};

use libtest_mimic::Trial;
use oxtile::comm::{
    Rank,
    bootstrap::{BootstrapError, Environment, Store},
};

use crate::{CHILD, free_port, trial};

const WORLD: u32 = 3;
const TIMEOUT: Duration = Duration::from_secs(2);
const PHASES: [&str; 4] = ["before", "exchange", "waiting", "teardown"];
const KINDS: [&str; 4] = ["kill", "panic", "exit", "stop"];

pub fn trials() -> Vec<Trial> {
    let mut trials = vec![trial("faults::none", || {
        let ranks = ranks("none:none:9");
        for mut rank in ranks {
            assert!(rank.wait().expect("it ends").success());
        }
    })];
    for phase in PHASES {
        for kind in KINDS {
            for victim in 0..WORLD {
                trials.push(trial(format!("faults::{phase}::{kind}::rank{victim}"), move || tried(kind, || matrix(phase, kind, victim))));
            }
        }
    }
    trials
}

/// What a deadline decides comes out otherwise where the machine stands still for half a second: a stopped rank has three tries.
fn tried(kind: &str, run: impl Fn() + std::panic::RefUnwindSafe) {
    let tries = if kind == "stop" { 3 } else { 1 };
    for _ in 1..tries {
        if std::panic::catch_unwind(&run).is_ok() {
            return;
        }
    }
    run();
}

/// This program as the ranks of a job, one of which has a fault.
pub fn ranks(fault: &str) -> Vec<Child> {
    let port = free_port().to_string();
    let start = |rank: u32| {
        let variables = [("RANK", rank), ("LOCAL_RANK", rank), ("WORLD_SIZE", WORLD)].map(|(name, value)| (name, value.to_string()));
        Command::new(env::current_exe().expect("a path"))
            .envs(variables)
            .envs([("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", &port), ("OXTILE_JOB_ID", "matrix"), (CHILD, fault)])
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .expect("the ranks start")
    };
    (0..WORLD).map(start).collect()
}

fn matrix(phase: &str, kind: &str, victim: u32) {
    let mut ranks = ranks(&format!("{phase}:{kind}:{victim}"));
    let title = format!("{kind} of rank {victim}, {phase}");
    for (rank, child) in ranks.iter_mut().enumerate().filter(|(rank, _)| *rank as u32 != victim) {
        let mut said = String::new();
        child.stdout.take().expect("piped").read_to_string(&mut said).expect("text");
        assert_eq!(child.wait().expect("it ends").code(), Some(3), "{title}: rank {rank} says {said:?}");
        let fields: Vec<_> = said.trim().splitn(5, '|').collect();
        let [how, named, late, leaked, text] = fields[..] else { panic!("{title}: rank {rank} says {said:?}") };
        let expected = match (phase, kind, victim) {
            ("before", _, 0) => "connect",
            ("before", ..) | (_, "stop", _) => "deadline",
            // The end of a process is seen at once.
            _ => "lost",
        };
        assert_eq!(how, expected, "{title}: rank {rank}: {text}");
        assert_eq!(named, victim.to_string(), "{title}: rank {rank} names the rank that is missing: {text}");
        assert_eq!(late, "in time", "{title}: rank {rank}");
        assert_eq!(leaked, "nothing leaked", "{title}: rank {rank}");
    }
    // A stopped one is still there.
    let _ = ranks[victim as usize].kill();
    ranks[victim as usize].wait().expect("it ends");
}

/// One rank: what it does ends with the fault of its neighbour, or its own.
pub fn child(fault: &str) -> ExitCode {
    let parts: Vec<_> = fault.split(':').collect();
    let [phase, kind, victim] = parts[..] else { panic!("{fault}") };
    let environment = Environment::read().expect("the variables are set");
    let me = environment.rank.index();
    let fault_at = |here: &str| {
        if here == phase && victim == me.to_string() {
            strike(kind);
        }
    };
    let before = open_descriptors_and_threads();
    let (result, begin) = job(&environment, phase, me, victim, &fault_at, kind);
    let Err(error) = result else { return ExitCode::SUCCESS };
    let late = if begin.elapsed() <= TIMEOUT + Duration::from_secs(1) { "in time" } else { "late" };
    let names = |ranks: &[Rank]| ranks.iter().map(|rank| rank.index().to_string()).collect::<Vec<_>>().join(",");
    let (how, named) = match &error {
        BootstrapError::Lost { rank, .. } => ("lost", names(&[*rank])),
        BootstrapError::Deadline { missing, .. } => ("deadline", names(missing)),
        // Rank 0 is the only one that can be connected to.
        BootstrapError::Connect { .. } => ("connect", "0".into()),
        _ => ("other", String::new()),
    };
    // A thread that was joined stays in /proc for a moment.
    let patience = Instant::now() + Duration::from_secs(1);
    let mut after = open_descriptors_and_threads();
    while after != before && Instant::now() < patience {
        thread::sleep(Duration::from_millis(1));
        after = open_descriptors_and_threads();
    }
    let leaked = if after == before { "nothing leaked".into() } else { format!("{before:?} before, {after:?} after") };
    println!("{how}|{named}|{late}|{leaked}|{error}");
    ExitCode::from(3)
}

/// The whole life of a rank; also when its last wait began.
fn job(
    environment: &Environment,
    phase: &str,
    me: u32,
    victim: &str,
    fault_at: &dyn Fn(&str),
    kind: &str,
) -> (Result<(), BootstrapError>, Instant) {
    fault_at("before");
    let mut begin = Instant::now();
    let mut run = || {
        let mut store = Store::connect(environment, TIMEOUT)?;
        begin = Instant::now();
        let all = store.all_gather(&[me as u8; 100])?;
        assert!(all.len() == WORLD as usize && all[2] == [2; 100]);
        fault_at("exchange");
        begin = Instant::now();
        store.all_gather(&[me as u8])?;
        if phase == "waiting" {
            // The victim is hit while it waits for a rank that takes its time.
            let (is_victim, kind) = (victim == me.to_string(), kind.to_owned());
            if is_victim {
                thread::spawn(move || {
                    thread::sleep(Duration::from_millis(150));
                    strike(&kind);
                });
            } else if (me + 1) % WORLD == victim.parse::<u32>().expect("a rank") {
                thread::sleep(Duration::from_millis(400));
            }
        }
        begin = Instant::now();
        store.barrier()?;
        fault_at("teardown");
        begin = Instant::now();
        store.close()
    };
    let result = run();
    (result, begin)
}

/// Ends, or stops, this process.
fn strike(kind: &str) {
    match kind {
        "panic" => {
            // In whichever thread: a panic that is not caught is the end of the program.
            std::panic::set_hook(Box::new(|_| std::process::abort()));
            panic!("meant");
        }
        "exit" => std::process::exit(0),
        kind => {
            let signal = if kind == "kill" { libc::SIGKILL } else { libc::SIGSTOP };
            // SAFETY: `kill` touches no memory.
            unsafe { libc::kill(libc::getpid(), signal) };
        }
    }
}

fn open_descriptors_and_threads() -> [usize; 2] {
    let count = |folder: &str| fs::read_dir(folder).expect("proc is mounted").count();
    [count("/proc/self/fd"), count("/proc/self/task")]
}
