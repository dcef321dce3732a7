//! Mutants of the shipped kernels and of the conformance kernels: each synchronisation site is skipped or
//! miscounted in turn, and the emulator must report it. The score of each job is printed. Every shipped kernel is in a job.
//!
//! | file | what it holds |
//! |---|---|
//! | `all_reduce`, `amax`, `conformance`, `copy` (fills and sums of parts too), `exchange`, `fp8`, `gemm`, `gemm_gathered`, `gemm_grouped`, `gemm_scattered`, `grouped`, `interleave`, `interleaved`, `mxfp8`, `mxfp8_fused`, `nvfp4`, `rms_norm` | mutants of the kernels of that name |
//! | `attention`, `attention_arriving`, `attention_packed`, `attention_arriving_packed`, `attention_general` | of forward attention on Hopper: dense tensors, those whose keys arrive, packed sequences, such whose keys arrive, options |
//! | `attention_split`, `attention_fp8`, `attention_portable` | divided keys, 8 bits, any GPU |
//! | `attention_backward`, `attention_backward_general`, `attention_backward_wide`, `attention_backward_portable` | the backward pass: dense tensors, sequences and options, heads above 128, any GPU |
//! | `thd` | of packed sequences that ranks share |
//! | `training` | of cross entropy, rotary embedding, embedding and AdamW |
//! | `device` | emulated memory for the jobs, and launches on it, alone, two together or beside streams |

mod all_reduce;
mod amax;
mod attention;
mod attention_arriving;
mod attention_arriving_packed;
mod attention_backward;
mod attention_backward_general;
mod attention_backward_portable;
mod attention_backward_wide;
mod attention_fp8;
mod attention_general;
mod attention_packed;
mod attention_portable;
mod attention_split;
mod conformance;
mod copy;
mod device;
mod exchange;
mod fp8;
mod gemm;
mod gemm_gathered;
mod gemm_grouped;
mod gemm_scattered;
mod grouped;
mod interleave;
mod interleaved;
mod mxfp8;
mod mxfp8_fused;
mod nvfp4;
mod rms_norm;
mod thd;
mod training;

use std::collections::BTreeSet;

use device::Device;
use libtest_mimic::Trial;
use oxtile_emulator::Options;
use oxtile_emulator::mutation::{self, Change, Equivalent, Mutation, Outcome, Score, Seeds, Verdict};

use crate::{backend, times};

/// Seeds after which a mutant that was not reported has survived.
const SEEDS: u64 = 12;

/// Seeds under each of which a planted table of flags is reported.
const TABLE_SEEDS: u64 = 32;

/// Seeds of mutants that are excused: an excuse that another seed would show to be stale is found by long runs.
const FEW: usize = 1;

/// Kernels with their inputs, and the words they write.
struct Job {
    name: &'static str,
    run: fn(&Device) -> Result<Vec<u32>, Outcome>,
    equivalents: &'static [Equivalent<'static>],
}

/// The jobs of each family of shipped kernels.
const SHIPPED: &[&[Job]] = &[
    all_reduce::JOBS,
    amax::JOBS,
    attention::JOBS,
    attention_arriving::JOBS,
    attention_arriving_packed::JOBS,
    attention_backward::JOBS,
    attention_backward_general::JOBS,
    attention_backward_portable::JOBS,
    attention_backward_wide::JOBS,
    attention_fp8::JOBS,
    attention_general::JOBS,
    attention_packed::JOBS,
    attention_portable::JOBS,
    attention_split::JOBS,
    copy::JOBS,
    exchange::JOBS,
    fp8::JOBS,
    gemm::JOBS,
    gemm_gathered::JOBS,
    gemm_scattered::JOBS,
    gemm_grouped::JOBS,
    grouped::JOBS,
    interleave::JOBS,
    interleaved::JOBS,
    mxfp8::JOBS,
    mxfp8_fused::JOBS,
    nvfp4::JOBS,
    rms_norm::JOBS,
    thd::JOBS,
    training::JOBS,
];

/// One trial a job, and one that holds the jobs to the registry of kernels.
pub fn trials() -> Vec<Trial> {
    let jobs = SHIPPED.iter().chain([&conformance::JOBS]).flat_map(|jobs| jobs.iter());
    let scores = jobs.map(|job| times::trial(format!("mutation::{}", job.name), || score(job).map_err(Into::into)));
    let complete = times::trial("mutation::every_shipped_kernel_has_a_job".to_owned(), || every_kernel_has_a_job().map_err(Into::into));
    let stale = times::trial("mutation::an_excuse_of_nobody_is_refused".to_owned(), || an_excuse_of_nobody().map_err(Into::into));
    let guards = times::trial("mutation::blocks_beyond_the_last_tile_do_nothing".to_owned(), || beyond_the_last_tile().map_err(Into::into));
    let flags = times::trial("mutation::lists_of_wrong_flags_are_reported".to_owned(), || gemm_gathered::wrong_flags().map_err(Into::into));
    let keys =
        times::trial("mutation::tables_of_wrong_flags_are_reported".to_owned(), || attention_arriving::wrong_flags().map_err(Into::into));
    let packed = times::trial("mutation::tables_of_wrong_flags_of_packed_sequences_are_reported".to_owned(), || {
        attention_arriving_packed::wrong_flags().map_err(Into::into)
    });
    scores.chain([complete, stale, guards, flags, keys, packed]).collect()
}

/// The kernels whose blocks down are folded into z where they are more than 65535, by their jobs.
const FOLDED: [&str; 15] = [
    "fp8_cast_transpose",
    "fp8_cast_transpose_delayed",
    "fp8_cast_squares",
    "fp8_cast_row_blocks",
    "fp8_dequantize_blocks",
    "fp8_partial_amax",
    "fp8_partial_cast",
    "interleave_rows",
    "interleave_columns",
    "mxfp8_cast_both",
    "mxfp8_columns",
    "mxfp8_cast_fused",
    "mxfp8_cast_fused_columns",
    "mxfp8_cast_fused_rows",
    "mxfp8_cast_rows_interleaved",
];

/// A matrix of so many tiles is long on the emulator. So small ones are launched with a grid that is folded all the same: the blocks beyond the
/// last tile write nothing, neither outside, which is a fault, nor in another tile's place.
fn beyond_the_last_tile() -> Result<(), String> {
    for name in FOLDED {
        let jobs = SHIPPED.iter().flat_map(|jobs| jobs.iter());
        let job = jobs.into_iter().find(|job| job.name == name).ok_or_else(|| format!("no job is called {name}"))?;
        let device = || Device::new(&Options::fast());
        let expected = (job.run)(&device()).map_err(|outcome| format!("{name}: {outcome:?}"))?;
        let found = (job.run)(&device().folding()).map_err(|outcome| format!("{name}, its grid folded: {outcome:?}"))?;
        if found != expected {
            return Err(format!("{name}: with its grid folded it writes other bytes"));
        }
    }
    Ok(())
}

fn score(job: &Job) -> Result<(), String> {
    let expected = match (job.run)(&Device::new(&Options::check(1))) {
        Ok(words) => words,
        Err(outcome) => return Err(format!("the unchanged kernel: {outcome:?}")),
    };
    let run = |options: &Options| {
        let device = Device::new(options);
        match (job.run)(&device) {
            Ok(words) if words == expected => Outcome::Passed(Box::new(device.report.take())),
            Ok(_) => Outcome::WrongOutput("the output differs from the unchanged kernel's".to_owned()),
            Err(outcome) => outcome,
        }
    };
    let seeds: Vec<u64> = (1..=SEEDS).collect();
    let few = if backend::long() { &seeds } else { &seeds[..FEW] };
    let score = mutation::score(run, Seeds { mutants: &seeds, excused: few }, job.equivalents).map_err(|e| e.to_string())?;
    eprintln!("mutation: {}: {score}", job.name);
    if !score.is_complete() {
        return Err(score.to_string());
    }
    match stale(&score, job.equivalents)[..] {
        [] => Ok(()),
        ref stale => Err(format!("{}: excuses of no mutant that survives; remove them from the job: {stale:?}", job.name)),
    }
}

/// The reasons of excuses that are not needed: their mutants are gone, or all are reported.
fn stale<'a>(score: &Score, excuses: &[Equivalent<'a>]) -> Vec<&'a str> {
    let survivors: Vec<_> = score.mutants.iter().filter(|mutant| matches!(mutant.verdict, Verdict::Equivalent(_))).collect();
    let is_stale = |excuse: &&Equivalent<'_>| !survivors.iter().any(|mutant| (excuse.matches)(&mutant.mutation));
    excuses.iter().filter(is_stale).map(|excuse| excuse.reason).collect()
}

/// Whether a mutant's site is in the only line of its file that has these words.
fn is_at_line(mutation: &Mutation, source: &str, words: &str) -> bool {
    let mut lines = (1..).zip(source.lines()).filter(|(_, line)| line.contains(words));
    let only = lines.next().filter(|_| lines.next().is_none());
    only.is_some_and(|(line, _)| line == mutation.site.line)
}

/// An excuse that matches nothing, or only what is reported, fails its job and is named.
fn an_excuse_of_nobody() -> Result<(), String> {
    const EXCUSES: [Equivalent<'static>; 3] = [
        conformance::STRICTER_WAIT,
        Equivalent { matches: |_| false, reason: "of no mutant" },
        Equivalent { matches: |mutation| mutation.change == Change::Skip, reason: "of mutants that are reported" },
    ];
    let ring = conformance::JOBS.iter().find(|job| job.name == "copy_async_ring").ok_or("no job is called copy_async_ring")?;
    match score(&Job { name: ring.name, run: ring.run, equivalents: &EXCUSES }) {
        Err(refused) if refused.ends_with(r#": ["of no mutant", "of mutants that are reported"]"#) => Ok(()),
        other => Err(format!("{other:?}")),
    }
}

/// Runs the jobs unchanged, and asks which kernels they launched.
fn every_kernel_has_a_job() -> Result<(), String> {
    let mut launched = BTreeSet::new();
    for job in SHIPPED.iter().flat_map(|jobs| jobs.iter()) {
        let device = Device::new(&Options::fast());
        (job.run)(&device).map_err(|outcome| format!("{}: {outcome:?}", job.name))?;
        launched.append(&mut device.launched.borrow_mut());
    }
    let has_job = |family: &oxtile_tile::launch::KernelFamily| family.instances.iter().any(|info| launched.contains(info.name));
    let without: Vec<_> = oxtile_kernels::KERNELS.iter().filter(|family| !has_job(family)).map(|family| family.name).collect();
    if without.is_empty() { Ok(()) } else { Err(format!("kernels in no job of tests/src/mutation: {without:?}")) }
}
