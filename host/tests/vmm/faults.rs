//! Ranks that are processes, on files in memory: all goes well; and the matrix of faults, a rank that is killed, ends, stops or gets an error at each
//! step until memory is mapped, while it writes, while it waits, and before it gives its memory back. The others, and it too if it lives, return an error that names it and the step, in time, and leave nothing behind.

use std::process::ExitCode;
use std::sync::Arc;
use std::time::{Duration, Instant};

use libtest_mimic::Trial;
use oxtile::comm::bootstrap::{Environment, Store, StoreBoard};
use oxtile::comm::{Meeting, Rank, WorldSize};
use oxtile::symmetric::vmm::{Driver, FlatOptions, Memfd};
use oxtile::symmetric::{Step, SymmetricError};
use oxtile::{Error, Result};

use crate::program::{
    DEADLINE, Faulty, PATIENCE, Seen, device, options, refused, resources, resources_after, write_and_read, write_and_read_with,
};
use crate::{ranks, trial};

const WORLD: u32 = 3;
/// What ranks do when their memory is mapped.
const WITH_MEMORY: [&str; 3] = ["copy", "wait", "teardown"];
/// In which no rank of a test can be any more.
const LIMIT: Duration = Duration::from_secs(20);

pub fn trials() -> Vec<Trial> {
    let worlds = (1..=4).map(|world| trial(format!("processes::write_and_read::{world}"), move || all_goes_well(world)));
    let mut trials: Vec<Trial> = worlds.collect();
    for call in ["create", "export", "map"] {
        for kind in ["kill", "panic", "exit", "stop", "error"] {
            for victim in [0, 1] {
                trials.push(trial(format!("processes::{call}::{kind}::rank{victim}"), move || matrix(call, kind, victim)));
            }
        }
    }
    for phase in WITH_MEMORY {
        for kind in ["kill", "panic", "exit", "stop"] {
            for victim in [0, 1] {
                trials.push(trial(format!("processes::{phase}::{kind}::rank{victim}"), move || matrix(phase, kind, victim)));
            }
        }
    }
    for call in ["reserve", "reach", "import", "access"] {
        trials.push(trial(format!("processes::{call}::error::rank2"), move || matrix(call, "error", 2)));
    }
    for what in ["layout", "bytes", "device"] {
        trials.push(trial(format!("processes::another_{what}_is_an_error_of_all"), move || matrix(what, "differs", 2)));
    }
    trials
}

fn all_goes_well(world: u32) {
    for rank in ranks::start(world, "none:none:99", &[]) {
        assert_eq!(ranks::end(rank, LIMIT), (Some(0), String::new()));
    }
}

fn matrix(call: &str, kind: &str, victim: u32) {
    let mut ranks: Vec<_> = ranks::start(WORLD, &format!("{call}:{kind}:{victim}"), &[]).into_iter().map(Some).collect();
    let survives = |rank: u32| rank != victim || ["error", "differs"].contains(&kind);
    for rank in (0..WORLD).filter(|rank| survives(*rank)) {
        let title = format!("{kind} of rank {victim} at {call}");
        let (code, said) = ranks::end(ranks[rank as usize].take().expect("not ended yet"), LIMIT);
        assert_eq!(code, Some(3), "{title}: rank {rank} says {said:?}");
        let fields: Vec<_> = said.splitn(5, '|').collect();
        let [step, named, late, leaked, text] = fields[..] else { panic!("{title}: rank {rank} says {said:?}") };
        // Rank 0, which carries the notes, takes those of others with it when it stops.
        let names: Vec<_> = named.split(',').collect();
        assert!(names.contains(&&*victim.to_string()), "{title}: rank {rank} names {named}: {text}");
        assert!(names.len() == 1 || (kind, victim) == ("stop", 0), "{title}: rank {rank} names {named}: {text}");
        assert!(steps(call, kind).contains(&step), "{title}: rank {rank} says {step}: {text}");
        assert_eq!((late, leaked), ("in time", "nothing leaked"), "{title}: rank {rank}");
    }
    for mut rest in ranks.into_iter().flatten() {
        // A stopped one is still there.
        let _ = rest.kill();
        let _ = rest.wait();
    }
}

/// At what a rank can be said to have failed.
fn steps(call: &str, kind: &str) -> &'static [&'static str] {
    match (call, kind) {
        (_, "differs") => &["Agree"],
        ("copy" | "wait" | "teardown", "stop") => &["Missing"],
        ("copy" | "wait" | "teardown", _) => &["Aborted"],
        ("create", "error") => &["Create"],
        ("reserve", "error") => &["Reserve"],
        ("reach", "error") => &["Check"],
        ("export", "error") => &["Export"],
        ("import", "error") => &["Import"],
        ("map" | "access", "error") => &["Map"],
        // The first whose deadline is over tells the others.
        ("create", "stop") => &["Missing", "Prepare"],
        ("create", _) => &["Prepare"],
        // Its socket listens as long as it lives, so that others can send to it; what it sends does not come.
        // Rank 0 may be gone before it has passed on the last note of the first phase.
        ("export", "kill" | "panic" | "exit") => &["Prepare", "Commit"],
        ("export", "stop") => &["Receive", "Commit", "Missing"],
        ("map", "stop") => &["Missing", "Commit"],
        _ => &["Commit"],
    }
}

/// One rank. With an error it ends with 3 and says: step, rank, in time or late, what leaked, and the text.
pub fn child(what: &str) -> ExitCode {
    let parts: Vec<_> = what.split(':').collect();
    let [call, kind, victim] = parts[..] else { panic!("{what}") };
    let environment = Environment::read().expect("the variables are set");
    let is_victim = victim == environment.rank.index().to_string();
    let before = resources();
    let (result, took) = job(&environment, call, kind, is_victim);
    let late = if took <= DEADLINE + Duration::from_secs(1) { "in time" } else { "late" };
    let after = resources_after(before);
    let leaked = if after == before { "nothing leaked".into() } else { format!("{before:?} before, {after:?} after") };
    let Err(error) = result else {
        let is_clean = leaked == "nothing leaked";
        if !is_clean {
            println!("{leaked}");
        }
        return if is_clean { ExitCode::SUCCESS } else { ExitCode::FAILURE };
    };
    let (step, named) = match &error {
        Error::Symmetric(SymmetricError::Step { rank, step, .. }) => (step_name(*step), vec![*rank]),
        Error::Symmetric(SymmetricError::Missing { ranks, .. }) => ("Missing".to_owned(), ranks.clone()),
        Error::Symmetric(SymmetricError::Aborted { rank, .. }) => ("Aborted".to_owned(), vec![*rank]),
        _ => ("other".to_owned(), Vec::new()),
    };
    let named: Vec<_> = named.iter().map(|rank: &Rank| rank.index().to_string()).collect();
    println!("{step}|{}|{late}|{leaked}|{error}", named.join(","));
    ExitCode::from(3)
}

fn step_name(step: Step) -> String {
    format!("{step:?}")
}

/// The life of a rank, and how long it took from the opening of memory on.
fn job(environment: &Environment, call: &str, kind: &str, is_victim: bool) -> (Result<()>, Duration) {
    let mut took = Duration::ZERO;
    let mut run = || -> Result<()> {
        // What is waited for at the end is the board, whose deadline is that of the ranks' coming.
        let store = Store::connect(environment, if call == "teardown" { DEADLINE } else { Duration::from_secs(10) })?;
        let (me, world) = (store.rank(), store.world());
        let board = Arc::new(store.into_board()?);
        all_have_begun(&board, is_victim)?;
        let begin = Instant::now();
        let (driver, options) = if is_victim { of_victim(call, kind, me, world) } else { (well(me), options()) };
        let at = |phase: &str, seen: Seen<'_>| {
            if is_victim && phase == call {
                // Rank 0, which carries the notes, takes none with it that the others wait for.
                seen().expect("the others are there");
                strike(kind).expect("it ends the process");
            }
        };
        let patience = if WITH_MEMORY.contains(&call) { DEADLINE } else { PATIENCE };
        let result = write_and_read_with(driver, &board, "first", options, patience, &at);
        took = begin.elapsed();
        if kind == "error" || kind == "differs" {
            assert!(result.is_err(), "{call}: the fault did not strike");
            // What has failed is undone, and the same ranks can open another.
            write_and_read(well(me), &board, "second", crate::program::options())?;
            board.close()?;
            return result;
        }
        let result = result.and_then(|()| board.close());
        took = begin.elapsed();
        if kind == "stop" && WITH_MEMORY.contains(&call) {
            // Rank 0, which carries the notes, is there until the deadlines of all are over.
            std::thread::sleep(Duration::from_secs(1));
        }
        result
    };
    let result = run();
    (result, took)
}

/// The victim goes on when it knows that all others know of all: what comes before is another test's.
fn all_have_begun(board: &Arc<StoreBoard>, is_victim: bool) -> Result<()> {
    const PATIENCE: Duration = Duration::from_secs(10);
    let meeting = Meeting::new(board.clone(), board.rank(), board.world(), "begin");
    meeting.publish("here", Vec::new())?;
    meeting.gather("here", PATIENCE)?;
    meeting.publish("all here", Vec::new())?;
    if is_victim { meeting.gather("all here", PATIENCE).map(drop) } else { Ok(()) }
}

fn well(me: Rank) -> Arc<dyn Driver> {
    Arc::new(Memfd::new(device(me)))
}

fn of_victim(call: &str, kind: &str, me: Rank, _: WorldSize) -> (Arc<dyn Driver>, FlatOptions) {
    match call {
        "layout" => (well(me), FlatOptions { layout: 8, ..options() }),
        "bytes" => (well(me), FlatOptions { bytes: 1 << 20, ..options() }),
        "device" => (well(Rank::ZERO), options()),
        _ => {
            let kind = kind.to_owned();
            (Arc::new(Faulty::new(device(me), call, Box::new(move || strike(&kind)))), options())
        }
    }
}

/// Ends, or stops, this process, or is an error.
pub fn strike(kind: &str) -> Result<()> {
    let signal = match kind {
        "exit" => std::process::exit(0),
        "panic" => panic!("meant"),
        "kill" => libc::SIGKILL,
        "stop" => libc::SIGSTOP,
        _ => return Err(refused()),
    };
    // SAFETY: `kill` touches no memory.
    unsafe { libc::kill(libc::getpid(), signal) };
    Ok(())
}
