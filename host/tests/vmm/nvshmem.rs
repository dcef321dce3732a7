//! Arenas in NVSHMEM's heap: the programs of `vmm`, whose ranks are processes with a GPU each, and what such an arena refuses. Skipped where there is
//! no library or are too few GPUs; `OXTILE_REQUIRE=nvshmem` makes that a failure, which says where it looked.

use std::error::Error as _;
use std::process::ExitCode;
use std::time::Duration;

use libloading::Library;
use libtest_mimic::{Failed, Trial};
use oxtile::comm::{HostRank, Rank, Team};
use oxtile::symmetric::{Arena, ArenaOptions, BackendName, SymmetricError};
use oxtile::{Error, Result, Runtime};

use crate::context::{self, By};
use crate::gpu::{self, BACKEND, QUEUES, options, process, program, silence};
use crate::watch::doing;
use crate::{all_gpus, ranks};

/// How long ranks wait for each other: to join NVSHMEM takes seconds a rank.
const START: Duration = Duration::from_secs(60);
/// After which a program is killed.
const LIMIT: Duration = Duration::from_secs(120);

/// Neither NVSHMEM nor its NCCL may use multicast; of its transports loads and stores alone are used. What it has to say, it says.
const VARIABLES: [(&str, &str); 6] = [
    QUEUES,
    (BACKEND, "nvshmem"),
    ("NVSHMEM_DISABLE_NVLS", "1"),
    ("NVSHMEM_DISABLE_NCCL", "1"),
    ("NVSHMEM_REMOTE_TRANSPORT", "none"),
    ("NVSHMEM_DEBUG", "WARN"),
];

pub fn trials() -> Vec<Trial> {
    let required = std::env::var("OXTILE_REQUIRE").is_ok_and(|required| required == "nvshmem");
    let found = library().and_then(|()| Ok(Runtime::cuda()?.device_count()));
    let case = |(name, world): (&'static str, u32)| {
        let lacking = match &found {
            Ok(count) if *count >= world => None,
            Ok(count) => Some(format!("it needs {world} GPUs, there are {count}")),
            Err(error) => Some(error.to_string()),
        };
        let is_skipped = lacking.is_some() && !required;
        if let (true, Some(why)) = (is_skipped, &lacking) {
            eprintln!("symmetric memory of NVSHMEM: nvshmem::{name}::{world} skipped: {why}");
        }
        let test = move || lacking.map_or_else(|| run(name, world), |why| Err(why.into()));
        Trial::test(format!("nvshmem::{name}::{world}"), test).with_ignored_flag(is_skipped)
    };
    [("process", 2), ("process", 4), ("silence", 2), ("context", 2)].map(case).into()
}

/// Whether there is a library, by the name that an arena loads it by.
fn library() -> Result<()> {
    let (name, from) = match std::env::var("OXTILE_NVSHMEM") {
        Ok(name) => (name, "as OXTILE_NVSHMEM says"),
        Err(_) => ("libnvshmem_host.so.3".to_owned(), "where the loader looks; OXTILE_NVSHMEM is not set"),
    };
    let missing = |error: libloading::Error| {
        let why = error.source().map_or_else(|| format!("{name}: {error}"), ToString::to_string);
        Error::NoLibrary { library: "NVSHMEM", why: format!("{why} ({from})") }
    };
    // SAFETY: NVSHMEM's library, with whatever it does when loaded.
    unsafe { Library::new(&name) }.map(drop).map_err(missing)
}

fn run(name: &str, world: u32) -> std::result::Result<(), Failed> {
    let _alone = all_gpus();
    let children = ranks::start(world, &format!("nvshmem:{name}"), &VARIABLES);
    let ends: Vec<_> = children.into_iter().map(|child| ranks::end(child, LIMIT)).collect();
    if ends.iter().all(|(code, _)| *code == Some(0)) {
        return Ok(());
    }
    let rank = |(rank, (code, said)): (usize, &(Option<i32>, String))| format!("rank {rank} ended with {code:?} and said {said:?}");
    Err(ends.iter().enumerate().map(rank).collect::<Vec<_>>().join("\n").into())
}

/// A program of a test.
pub fn child(case: &str) -> ExitCode {
    // NVSHMEM tells its errors there.
    // SAFETY: both are descriptors of this process, which nothing else uses yet.
    unsafe { libc::dup2(libc::STDOUT_FILENO, libc::STDERR_FILENO) };
    gpu::run_within(LIMIT, || match case {
        "process" => process(&rank),
        "silence" => process(&|rank| join(&rank).and_then(|()| silence(rank))),
        "context" => process(&|rank| join(&rank).and_then(|()| context::program(rank, patient(), By::Memory))),
        _ => panic!("{case}"),
    })
}

fn patient() -> ArenaOptions {
    ArenaOptions { deadline: START, ..options() }
}

/// Joins NVSHMEM, by an arena that is opened and closed.
fn join(rank: &HostRank) -> Result<()> {
    doing(rank.rank(), "joining NVSHMEM");
    Arena::open(rank, patient())?.close()?.finish()
}

/// All that an arena does, and that a process is one rank of NVSHMEM: there is none of a part of the ranks, and that is an error of the part alone.
fn rank(rank: HostRank) -> Result<()> {
    let world = rank.world();
    join(&rank)?;
    let half: Vec<Rank> = world.ranks().take(world.get() as usize / 2).collect();
    if let Some(member) = rank.team(&Team::new(world, &half)?)? {
        doing(rank.rank(), "opening an arena of a team");
        let error = Arena::open(&member, patient()).expect_err("a process is one rank");
        let is_told = match &error {
            Error::Symmetric(SymmetricError::Unavailable { backend: BackendName::Nvshmem, why }) => why.contains("a process joins once"),
            // The other was first to find it.
            Error::Symmetric(SymmetricError::Aborted { why, .. }) => why.contains("a process joins once"),
            _ => false,
        };
        assert!(is_told, "{error}");
    }
    program(rank, patient())
}
