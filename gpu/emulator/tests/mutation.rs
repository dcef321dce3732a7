//! Mutation scores of small kernels: every broken synchronisation shows, and equivalents must be named.

mod common;
use common::*;
use oxtile_emulator::mutation::{Change, Equivalent, Mutant, Outcome, Score, Seeds, Verdict, score};
use oxtile_emulator::{Options, Space, device};

const STAGES: u32 = 2;
const TILE: u32 = 128;
const TILES: u32 = 6;

/// Warp 0 loads tiles in bulk, warp 1 adds one and stores them in bulk.
fn pipeline(arguments: &[u64]) {
    let full = |stage: u32| 2 * STAGES * TILE + stage * 16;
    let empty = |stage: u32| full(stage) + 8;
    if thread() == 0 {
        for stage in 0..STAGES {
            device::mbarrier_init(full(stage), 1);
            device::mbarrier_init(empty(stage), 32);
        }
        device::fence_mbarrier_init();
    }
    device::barrier_sync(0, 64);
    for tile in 0..TILES {
        let (stage, parity) = (tile % STAGES, tile / STAGES % 2);
        if thread() == 0 {
            device::mbarrier_wait_parity(empty(stage), parity ^ 1);
            device::mbarrier_arrive_expect_transaction(full(stage), TILE);
            device::bulk_load(stage * TILE, arguments[0] + u64::from(tile * TILE), TILE, full(stage));
        } else if thread() >= 32 {
            let (lane, out) = (device::lane(), STAGES * TILE);
            device::mbarrier_wait_parity(full(stage), parity);
            let value = shared_load(stage * TILE + lane * 4);
            device::mbarrier_arrive(empty(stage));
            shared_store(out + lane * 4, value + 1);
            device::fence_proxy_async(Space::Shared);
            device::warp_sync(u32::MAX);
            if lane == 0 {
                device::bulk_store(arguments[1] + u64::from(tile * TILE), out, TILE);
                device::bulk_commit();
                device::bulk_wait(0, true);
            }
            device::warp_sync(u32::MAX);
        }
    }
}

fn outcome(job: &Job, options: &Options, right: impl Fn(usize) -> u32) -> Outcome {
    match job.run(options.clone()) {
        Err(fault) => Outcome::Faulted(fault),
        Ok(report) => match job.output().iter().enumerate().find(|&(i, &v)| v != right(i)) {
            Some((i, v)) => Outcome::WrongOutput(format!("word {i} is {v}")),
            None => Outcome::Passed(Box::new(report)),
        },
    }
}

#[test]
fn every_mutant_of_a_pipeline_is_reported() {
    let run = |options: &Options| {
        let job = Job::new("pipeline", 1, 64, TILES * TILE / 4, 2 * STAGES * (TILE + 8), pipeline);
        outcome(&job, options, |i| i as u32 + 1)
    };
    let seeds: Vec<u64> = (0..12).collect();
    let score: Score = score(run, seeds.as_slice(), &[]).unwrap();
    println!("pipeline: {score}");
    assert!(score.mutants.len() >= 15, "{score}");
    assert!(score.is_complete(), "{score}");
    assert!(score.to_string().ends_with(" reported, 0 by a wrong output alone, 0 equivalent, 0 survived"), "{score}");
}

/// The last barrier does nothing.
fn superfluous(arguments: &[u64]) {
    shared_store(thread() * 4, load(arguments[0] + u64::from(thread()) * 4));
    device::barrier_sync(0, 64);
    store(arguments[1] + u64::from(thread()) * 4, shared_load((thread() ^ 32) * 4));
    device::barrier_sync(1, 64);
}

#[test]
fn a_superfluous_barrier_survives_unless_it_is_listed() {
    let run = |options: &Options| outcome(&Job::new("superfluous", 1, 64, 64, 256, superfluous), options, |i| i as u32 ^ 32);
    let survivors = score(run, &[1, 2, 3], &[]).unwrap();
    assert_eq!(survivors.unreported().count(), 1, "{survivors}");
    assert!(!survivors.is_complete() && survivors.to_string().contains("survived 3 seeds: skip barrier_sync"), "{survivors}");
    let last = Equivalent { matches: |m| m.change == Change::Skip, reason: "nothing follows the last barrier" };
    let excused = score(run, Seeds { mutants: &[1, 2, 3], excused: &[1, 2] }, &[last]).unwrap();
    assert!(excused.is_complete() && excused.to_string().contains("1 equivalent"), "{excused}");
    let seeds = |mutant: &&Mutant| matches!(mutant.verdict, Verdict::Equivalent(_)).then_some(mutant.seeds);
    assert_eq!(excused.mutants.iter().find_map(|mutant| seeds(&mutant)), Some(2), "{excused}");
}

/// One thread asks whether a phase is over before it has ended.
fn early_test(arguments: &[u64]) {
    device::mbarrier_init(0, 1);
    let over = device::mbarrier_try_wait_parity(0, 0);
    device::mbarrier_arrive(0);
    device::mbarrier_wait_parity(0, 0);
    store(arguments[1], u32::from(over));
}

#[test]
fn a_wrong_output_is_no_report() {
    let run = |options: &Options| outcome(&Job::new("early_test", 1, 1, 1, 8, early_test), options, |_| 0);
    let score = score(run, &[1, 2, 3], &[]).unwrap();
    let skipped = score.mutants.iter().find(|m| m.mutation.site.operation == "mbarrier_try_wait_parity").unwrap();
    assert_eq!((&skipped.verdict, skipped.seeds), (&Verdict::WrongOutput("word 0 is 1".to_owned()), 3));
    assert!(!score.is_complete());
    let text = score.to_string();
    assert!(text.contains(" 1 by a wrong output alone, "), "{text}");
    assert!(text.contains("alone, 3 seeds: skip mbarrier_try_wait_parity at gpu/emulator/tests/mutation.rs"), "{text}");
}

/// Odd seeds show a wrong output, even ones a report: the report counts.
#[test]
fn a_report_of_a_later_seed_counts() {
    let run = |options: &Options| match (&options.mutation, options.seed % 2) {
        (Some(_), 1) => Outcome::WrongOutput("shown first".to_owned()),
        _ => outcome(&Job::new("superfluous", 1, 64, 64, 256, superfluous), options, |i| i as u32 ^ 32),
    };
    let score = score(run, &[1, 2], &[]).unwrap();
    let (reported, rest): (Vec<_>, Vec<_>) = score.mutants.iter().partition(|m| matches!(m.verdict, Verdict::Reported(_)));
    assert!(!reported.is_empty() && reported.iter().all(|m| m.seeds == 2), "{score}");
    assert!(rest.iter().all(|m| m.mutation.change == Change::Skip), "{score}");
}

#[test]
fn a_job_that_fails_unchanged_has_no_score() {
    let run = |options: &Options| outcome(&Job::new("superfluous", 1, 64, 64, 256, superfluous), options, |_| 0);
    assert!(score(run, &[1], &[]).unwrap_err().problem.contains("word 0 is 32"));
}
