//! `NcclCommunicator::connect` between processes, as far as it goes without GPUs: they come together by the launcher's variables, and a rank that cannot go on, or does
//! not come, is an error of all, in time, that leaves nothing. With GPUs it is [`nccl`](crate::nccl)'s.

use std::process::ExitCode;
use std::time::{Duration, Instant};

use libtest_mimic::Trial;
use oxtile::Runtime;
use oxtile::comm::bootstrap::Environment;
use oxtile::comm::{NcclCommunicator, NcclOptions};

use crate::program::{resources, resources_after};
use crate::{ranks, trial};

const WORLD: u32 = 3;
const DEADLINE: Duration = Duration::from_secs(3);
const LIMIT: Duration = Duration::from_secs(30);

pub fn trials() -> Vec<Trial> {
    let mut trials = vec![trial("connect::devices_without_nccl", || no_rank_goes_on("none"))];
    for kind in ["kill", "stop"] {
        for victim in [0, WORLD - 1] {
            trials.push(trial(format!("connect::{kind}::rank{victim}"), move || no_rank_goes_on(&format!("{kind}:{victim}"))));
        }
    }
    trials
}

fn no_rank_goes_on(fault: &str) {
    let victim = fault.split_once(':').and_then(|(_, victim)| victim.parse::<usize>().ok());
    let mut children: Vec<_> = ranks::start(WORLD, &format!("connect:{fault}"), &[]).into_iter().map(Some).collect();
    for rank in (0..WORLD as usize).filter(|rank| Some(*rank) != victim) {
        let (code, said) = ranks::end(children[rank].take().expect("not ended yet"), LIMIT);
        let named = match victim {
            None => "emulated".to_owned(),
            // There is no other rank to connect to.
            Some(0) => "could not connect to rank 0".to_owned(),
            Some(victim) => format!("rank {victim} did not come to the rendezvous"),
        };
        // Rank 0's port may have been taken by the job of another test.
        let is_taken = victim == Some(0) && said.contains("and belongs to job");
        assert!(code == Some(3) && (said.contains(&named) || is_taken), "{fault}: rank {rank} ended with {code:?} and said {said:?}");
    }
    for mut rest in children.into_iter().flatten() {
        // A stopped one is still there.
        let _ = rest.kill();
        let _ = rest.wait();
    }
}

/// One rank: it ends with 3 and says its error.
pub fn child(fault: &str) -> ExitCode {
    let environment = Environment::read().expect("the variables are set");
    if let Some((kind, victim)) = fault.split_once(':')
        && victim == environment.rank.index().to_string()
    {
        crate::faults::strike(kind).expect("it ends the process");
    }
    let device = Runtime::emulated(1).and_then(|runtime| runtime.device(0)).expect("a virtual device");
    let (before, begin) = (resources(), Instant::now());
    let options = NcclOptions { deadline: DEADLINE, ..NcclOptions::default() };
    let error = NcclCommunicator::connect(&environment, &device, &options).expect_err("no GPU");
    let took = begin.elapsed();
    let after = resources_after(before);
    assert_eq!(after, before, "descriptors, threads and mapped files: {error}");
    assert!(took <= DEADLINE + Duration::from_secs(1), "after {took:?}: {error}");
    println!("{error}");
    ExitCode::from(3)
}
