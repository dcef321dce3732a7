//! A run: the chosen families, one benchmark after the other.

use std::{
    cell::RefCell,
    collections::BTreeMap,
    path::PathBuf,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail, ensure};
use oxtile::runtime::Runtime;

use crate::{
    bench::{Bench, Gpu, Prepared, Replays, Size},
    family::{self, attention, attention_sweep, gemm, gemm_shapes, launch},
    machine::{self, Machine},
    pattern::Pattern,
    peers::{Check, PeerSide, Peers},
    random::Random,
    results::{Clock, Document, Missing, Record, SideRecord},
    rounds::{self, Plan, Rounds, Side},
};

/// The least number of rounds that has quartiles.
pub const LEAST_ROUNDS: usize = 30;

/// Long enough for the clocks of an idle GPU to rise.
const WARM_UP: Duration = Duration::from_millis(500);
/// The same between the shapes of a sweep, which leave it no time to fall.
const SWEEP_WARM_UP: Duration = Duration::from_millis(100);
/// A sweep measures no further shape after this long: an hour of a GPU is expensive.
const SWEEP_BUDGET: Duration = Duration::from_secs(60);
/// The same of products, of which there are more.
const PRODUCTS_BUDGET: Duration = Duration::from_secs(240);

/// How the numbers are made; printed in every results file.
const METHOD: &str = "Each side holds its own buffers in its own process, several sets so that no launch finds its input in \
the L2 cache, filled with the same random normal values. The launches over the sets are captured in a CUDA graph. A round \
times every side once, in random order: one replay that is not timed, an event, the replays, an event. Half a second of \
warm-up rounds, a tenth in a sweep, is not counted. The times here are those between the events, in milliseconds, for `launches` launches. Shares are bytes that \
must move over the median time, over the same of the faster copy in this file. A side that says its `flops` does other work \
than the record: its times count for as much work as the record's. Where the clock is the host's, it is read \
around `launches` calls from an empty queue.";

/// Many shapes of one family.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Sweep {
    /// All of them beside the peers.
    Shapes,
    /// Some of them by every plan: of products alone.
    Plans,
}

/// What to run.
#[derive(Debug, Clone)]
pub struct Options {
    /// Families; none means all.
    pub families: Vec<String>,
    /// Many shapes of attention, or of products, instead.
    pub sweep: Option<Sweep>,
    /// Only benchmarks whose names have this text.
    pub only: Option<String>,
    /// Rounds of each comparison.
    pub rounds: usize,
    /// The shapes.
    pub size: Size,
    /// Whether to run the peers.
    pub peers: bool,
    /// The folder of the peers' server, if it is not one of the usual ones.
    pub peers_folder: Option<PathBuf>,
    /// The seed of the data and of the order of rounds.
    pub seed: u64,
}

impl Options {
    /// Those of the benchmarks with these names that were asked for.
    ///
    /// # Errors
    /// There are some, and none has the text that was asked for: the error has their names.
    pub(crate) fn only<T>(&self, mut benches: Vec<T>, name: impl Fn(&T) -> String) -> Result<Vec<T>> {
        let Some(text) = &self.only else { return Ok(benches) };
        let names: Vec<_> = benches.iter().map(&name).collect();
        benches.retain(|bench| name(bench).contains(text));
        ensure!(names.is_empty() || !benches.is_empty(), "`{text}` is in no name of:\n{}", names.join("\n"));
        Ok(benches)
    }
}

/// The outcome of a run.
#[derive(Debug)]
pub struct Outcome {
    /// What was measured.
    pub document: Document,
    /// The benchmarks that failed, and why. The others ran all the same.
    pub failures: Vec<String>,
}

/// Runs the benchmarks; `progress` gets each step, `keep` the document after each, so that a run which is cut short
/// leaves what it measured.
///
/// # Errors
/// An unknown family, a text that is in no name, too few rounds, no GPU, an error of `keep`. A peer that fails is recorded in the document.
pub fn run(options: &Options, progress: &mut dyn FnMut(&str), keep: &mut dyn FnMut(&Document) -> Result<()>) -> Result<Outcome> {
    check(options)?;
    let start = Instant::now();
    let gpu = open(options)?;
    let peers = match options.peers {
        true => Peers::start(options.peers_folder.as_deref()).map_err(|error| format!("{error:#}")),
        false => Err("not asked for".to_owned()),
    };
    if let (true, Err(why)) = (options.peers, &peers) {
        progress(&format!("no peers: {why}"));
    }
    let machine = Machine {
        device: gpu.device.name().to_owned(),
        commit: machine::commit(),
        peers: peers.as_ref().map(|peers| peers.versions.clone()).map_err(Clone::clone),
        before: machine::readings(),
        after: machine::Readings::new(),
    };
    let mut document = Document::new(METHOD.to_owned(), options.seed, machine);
    let warm_up = if options.sweep.is_some() { SWEEP_WARM_UP } else { WARM_UP };
    let plan = Plan { warm_up: options.size.pick(warm_up, Duration::ZERO), rounds: options.rounds };
    let shorter = if options.sweep == Some(Sweep::Plans) { 4 } else { 1 };
    let mut runner = Runner { gpu, shorter, peers: peers.ok().map(RefCell::new), plan, random: Random::new(!options.seed) };
    let mut failures = Vec::new();
    let mut add = |document: &mut Document, name: &str, result: Result<Record>| {
        match result {
            Ok(record) => document.records.push(record),
            Err(error) => failures.push(format!("{name}: {error:#}")),
        }
        document.machine.after = machine::readings();
        keep(document)
    };
    for bench in options.only(chosen(options), Bench::name)? {
        progress(&bench.name());
        let spent = options.sweep.is_some() && options.size == Size::Full && start.elapsed() > budget(options);
        let result = if spent { Ok(left_out(&bench, budget(options))) } else { runner.compare(&bench, progress) };
        add(&mut document, &bench.name(), result)?;
    }
    if options.sweep.is_none() && options.only.is_none() && is_chosen(options, launch::FAMILY) {
        progress(launch::FAMILY);
        let result = launch::measure(&runner.gpu, options.size, plan, &mut runner.random);
        add(&mut document, launch::FAMILY, result)?;
    }
    Ok(Outcome { document, failures })
}

fn check(options: &Options) -> Result<()> {
    if let Some(unknown) = options.families.iter().find(|family| !family::NAMES.contains(&family.as_str())) {
        bail!("there is no family `{unknown}`: name some of {}", family::NAMES.join(", "));
    }
    match options.sweep {
        Some(_) if options.families == [gemm::FAMILY] => {}
        Some(Sweep::Shapes) if options.families.iter().all(|family| family == attention::FAMILY) => {}
        Some(Sweep::Shapes) => bail!("there are sweeps of `{}` and of `{}`: name one of them", attention::FAMILY, gemm::FAMILY),
        Some(Sweep::Plans) => bail!("there are plans of `{}` alone: name that", gemm::FAMILY),
        None => {}
    }
    if options.size == Size::Full && options.rounds < LEAST_ROUNDS {
        bail!("{} rounds are too few for quartiles: ask for {LEAST_ROUNDS} or more", options.rounds);
    }
    Ok(())
}

fn open(options: &Options) -> Result<Gpu> {
    let runtime = match options.size {
        Size::Full => Runtime::cuda().context("the benchmarks need a GPU; --smoke runs them, tiny, on the emulator")?,
        Size::Smoke => Runtime::emulated_fast(1)?,
    };
    let device = runtime.device(0)?;
    let pattern = Pattern::new(options.seed, options.size.pick(1 << 22, 1 << 10))?;
    Ok(Gpu { stream: device.stream()?, device, runtime, pattern })
}

fn is_chosen(options: &Options, family: &str) -> bool {
    options.families.is_empty() || options.families.iter().any(|chosen| chosen == family)
}

/// The benchmarks of the chosen families, and the copies that are their ceilings.
fn chosen(options: &Options) -> Vec<Bench> {
    match options.sweep {
        Some(Sweep::Plans) => return gemm_shapes::plans(options.size),
        Some(Sweep::Shapes) if options.families == [gemm::FAMILY] => return gemm_shapes::benches(options.size),
        Some(Sweep::Shapes) => return attention_sweep::benches(options.size),
        None => {}
    }
    let (mut benches, others): (Vec<_>, Vec<_>) =
        family::device_benches(options.size).into_iter().partition(|bench| is_chosen(options, bench.family));
    let is_ceiling = |copy: &Bench| benches.iter().any(|bench| bench.ceiling.as_deref() == Some(&copy.name()));
    let mut ceilings: Vec<_> = others.into_iter().filter(is_ceiling).collect();
    ceilings.append(&mut benches);
    ceilings
}

struct Runner {
    gpu: Gpu,
    /// How many times shorter than usual a round is: there are many plans of a product.
    shorter: usize,
    peers: Option<RefCell<Peers>>,
    plan: Plan,
    random: Random,
}

/// A peer that is ready for its rounds.
struct ReadyPeer {
    peer: &'static str,
    title: String,
    check: Check,
}

impl Runner {
    fn compare(&mut self, bench: &Bench, progress: &mut dyn FnMut(&str)) -> Result<Record> {
        let prepared = (bench.prepare)(&self.gpu)?;
        let replays = bench.replays(self.gpu.runtime.kind()).div_ceil(self.shorter);
        let (mut ready, mut missing) = self.prepare_peers(bench, &prepared)?;
        let mut measured = self.rounds(&prepared, replays, &ready);
        if let (Err(error), false) = (&measured, ready.is_empty()) {
            // It may have been a peer: then the kernel runs alone.
            let why = format!("a round failed: {error:#}");
            missing.extend(ready.drain(..).map(|peer| Missing { peer: peer.peer.to_owned(), why: why.clone() }));
            measured = self.rounds(&prepared, replays, &[]);
        }
        if let Some(Err(error)) = self.peers.as_ref().map(|peers| peers.borrow_mut().release()) {
            progress(&format!("the peers keep their memory: {error:#}"));
        }
        for Missing { peer, why } in &missing {
            progress(&format!("peer {peer} did not run: {why}"));
        }
        let rivals = prepared.rivals.iter().map(|rival| SideRecord { flops: rival.flops, ..SideRecord::new(&rival.label) });
        let peers = ready.into_iter().map(|peer| SideRecord { check: Some(peer.check), ..SideRecord::new(peer.title) });
        let others = rivals.chain(peers).collect();
        let mut record = record(bench, replays, others, missing);
        record.fill(measured?);
        Ok(record)
    }

    fn rounds(&mut self, prepared: &Prepared, replays: usize, ready: &[ReadyPeer]) -> Result<Rounds> {
        let ours = |label, graph| Box::new(Replays { label, stream: &self.gpu.stream, graph, count: replays }) as Box<dyn Side>;
        let mut sides = vec![ours("oxtile", &prepared.graph)];
        sides.extend(prepared.rivals.iter().map(|rival| ours(&rival.label, &rival.graph)));
        if let Some(peers) = &self.peers {
            let side = |ready: &ReadyPeer| PeerSide { peers, peer: ready.peer, title: ready.title.clone(), replays };
            sides.extend(ready.iter().map(|ready| Box::new(side(ready)) as Box<dyn Side>));
        }
        rounds::run(&mut sides, self.plan, &mut self.random)
    }

    /// Prepares each peer and holds its outputs against the kernel's.
    fn prepare_peers(&self, bench: &Bench, prepared: &Prepared) -> Result<(Vec<ReadyPeer>, Vec<Missing>)> {
        let (mut ready, mut missing) = (Vec::new(), Vec::new());
        let Some(peers) = &self.peers else { return Ok((ready, missing)) };
        let mut files = BTreeMap::new();
        prepared.graph.replay(&self.gpu.stream)?;
        for output in (prepared.outputs)(&self.gpu.stream)? {
            files.insert(output.name, self.gpu.pattern.write(output.name, &output.bytes)?);
        }
        let mut peers = peers.borrow_mut();
        for &peer in bench.peers {
            let title = peers.prepare(peer, &bench.dimensions, bench.sets, &self.gpu.pattern.file());
            let checked = title.and_then(|title| Ok(ReadyPeer { peer, title, check: peers.check(peer, &files)? }));
            match checked {
                Ok(peer) => ready.push(peer),
                Err(error) => missing.push(Missing { peer: peer.to_owned(), why: format!("{error:#}") }),
            }
        }
        Ok((ready, missing))
    }
}

/// How long a sweep may take.
fn budget(options: &Options) -> Duration {
    if options.families == [gemm::FAMILY] { PRODUCTS_BUDGET } else { SWEEP_BUDGET }
}

/// A record without times, of a shape for which a sweep has no time left.
fn left_out(bench: &Bench, budget: Duration) -> Record {
    let why = format!("the {} s of a sweep are spent", budget.as_secs());
    record(bench, 0, Vec::new(), bench.peers.iter().map(|&peer| Missing { peer: peer.to_owned(), why: why.clone() }).collect())
}

fn record(bench: &Bench, replays: usize, others: Vec<SideRecord>, missing: Vec<Missing>) -> Record {
    Record {
        family: bench.family.to_owned(),
        kernel: bench.kernel.to_owned(),
        shape: bench.shape.clone(),
        clock: Clock::DeviceEvents,
        bytes: bench.bytes,
        flops: bench.flops,
        launches: (replays * bench.sets) as u64,
        ceiling: bench.ceiling.clone(),
        limit: Vec::new(),
        chosen: None,
        divided: None,
        sides: [SideRecord::new("oxtile")].into_iter().chain(others).collect(),
        order: Vec::new(),
        missing,
    }
}
