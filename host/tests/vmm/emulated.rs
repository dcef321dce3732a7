//! Memory of a virtual cluster is of one process, and of one runtime of it: to all other ranks its addresses mean something else.

use std::process::ExitCode;
use std::time::Duration;

use libtest_mimic::Trial;
use oxtile::comm::bootstrap::Environment;
use oxtile::comm::{HostRank, Rank};
use oxtile::symmetric::{Arena, ArenaOptions, BackendName, SymmetricError};
use oxtile::{Error, Result, Runtime};

use crate::{ranks, trial};

/// In which no rank of a test can be any more.
const LIMIT: Duration = Duration::from_secs(20);

pub fn trials() -> Vec<Trial> {
    vec![
        trial("emulated::ranks_of_other_processes_are_refused", ranks_of_other_processes_are_refused),
        trial("emulated::ranks_of_other_runtimes_are_refused", ranks_of_other_runtimes_are_refused),
    ]
}

fn options() -> ArenaOptions {
    ArenaOptions { deadline: Duration::from_secs(10), ..ArenaOptions::default() }
}

/// Why a rank cannot use that of the others.
fn refusal(arena: &Arena) -> Result<String> {
    let buffer = arena.buffer::<u32>(4)?;
    match buffer.peer(Rank::ZERO).map(drop) {
        Err(Error::Symmetric(SymmetricError::Unavailable { backend: BackendName::Emulated, why })) => Ok(why),
        other => panic!("{}: {other:?}", arena.rank()),
    }
}

/// Where addresses are not random, each would read its own memory for that of the other.
fn ranks_of_other_processes_are_refused() {
    for (rank, child) in ranks::start(2, "emulated:two", &[]).into_iter().enumerate() {
        let other = 1 - rank;
        let why = format!(
            "rank {other} is another process than rank {rank}, and the virtual cluster is memory of one: let ranks be its threads, or use vmm on GPUs"
        );
        assert_eq!(ranks::end(child, LIMIT), (Some(0), why));
    }
}

/// One of the two processes.
pub fn child() -> ExitCode {
    let program = || {
        let environment = Environment::read()?;
        let rank = HostRank::connect(&environment, &Runtime::emulated(1)?.device(0)?, LIMIT / 2)?;
        let arena = Arena::open(&rank, options())?;
        println!("{}", refusal(&arena)?);
        // An arena that is dropped is an error of a rank that still waits for it.
        let closing = arena.close()?;
        closing.finish()?;
        rank.close()
    };
    let ended: Result<()> = program();
    ended.inspect_err(|error| println!("{error}")).map_or(ExitCode::FAILURE, |()| ExitCode::SUCCESS)
}

fn ranks_of_other_runtimes_are_refused() {
    let devices = [(); 2].map(|()| Runtime::emulated(1).expect("a virtual GPU").device(0).expect("it has one"));
    let ranks = HostRank::threads(&devices).expect("two ranks");
    assert_eq!(ranks[1].device().index(), 0);
    let arenas: Vec<_> = ranks.iter().map(|rank| Arena::open(rank, options()).expect("it does not wait")).collect();
    for (rank, arena) in arenas.iter().enumerate() {
        let why = refusal(arena).expect("a buffer");
        let other = 1 - rank;
        assert!(why.starts_with(&format!("rank {other} has another Runtime than rank {rank}: make both")), "{why}");
    }
}
