//! Launches, copies, casts, products and attention by criterion, timed by events on the device: `cargo bench --bench device -- mxfp8`.
//!
//! But for the launches, the same buffers, graphs and shapes as `oxtile-benches`, without peers: for what one's own change does to a kernel. With `--test` each runs once, tiny,
//! on the emulator.

use std::{env, time::Duration};

use anyhow::{Context, Result};
use criterion::{BenchmarkGroup, Criterion, SamplingMode, Throughput, measurement::WallTime};
use oxtile::runtime::{Buffer, Runtime};
use oxtile_benches::{
    bench::{Bench, Gpu, Prepared, Size},
    family,
    pattern::Pattern,
};
use oxtile_kernels::copy::{CopyWords, CopyWordsArgs};

/// What runs, by family.
const FAMILIES: [&str; 6] = ["copy", "fp8", "mxfp8", "nvfp4", "gemm", "attention"];

/// So many times of a launch's figure, each over about so long.
const SAMPLES: usize = 30;
const WARM_UP: Duration = Duration::from_millis(500);
const MEASURED: Duration = Duration::from_secs(2);

fn main() {
    // As criterion takes it: `cargo bench` gives `--bench`, `cargo test` nothing.
    let is_test = env::args().any(|argument| argument == "--test") || !env::args().any(|argument| argument == "--bench");
    let mut criterion = Criterion::default().sample_size(SAMPLES).warm_up_time(WARM_UP).measurement_time(MEASURED).configure_from_args();
    match open(is_test) {
        Ok((gpu, size)) => {
            launches(&mut criterion, &gpu).expect("a launch is prepared");
            all(&mut criterion, &gpu, size);
        }
        Err(error) => eprintln!("nothing is measured: {error:#}"),
    }
    criterion.final_summary();
}

/// The GPU, or the emulator for a test.
fn open(is_test: bool) -> Result<(Gpu, Size)> {
    let (runtime, size) = match is_test {
        true => (Runtime::emulated_fast(1)?, Size::Smoke),
        false => (Runtime::cuda().context("these benchmarks need a GPU")?, Size::Full),
    };
    let device = runtime.device(0)?;
    let pattern = Pattern::new(1, size.pick(1 << 22, 1 << 10))?;
    Ok((Gpu { stream: device.stream()?, device, runtime, pattern }, size))
}

/// Launches of one block, one after another, without a graph: the longer of what the host takes to enqueue one and of what the device takes to run it.
fn launches(criterion: &mut Criterion, gpu: &Gpu) -> Result<()> {
    let kernel = gpu.runtime.load::<CopyWords>()?;
    let (source, mut target) = (Buffer::<u32>::zeros(&gpu.stream, 1024)?, Buffer::<u32>::zeros(&gpu.stream, 1024)?);
    let mut group = criterion.benchmark_group("launch");
    group.sampling_mode(SamplingMode::Flat);
    group.bench_function("copy_words, 1 block", |bencher| {
        bencher.iter_custom(|launches| {
            let launch = || kernel.launch(&gpu.stream, CopyWordsArgs { source: source.view(), target: target.view_mut() });
            between(gpu, launches, launch).expect("the launches run")
        });
    });
    group.finish();
    Ok(())
}

fn all(criterion: &mut Criterion, gpu: &Gpu, size: Size) {
    let benches = family::device_benches(size);
    for family in FAMILIES {
        let mut group = criterion.benchmark_group(family);
        // A sample is many launches: their number stays the same, since their times hardly differ.
        group.sampling_mode(SamplingMode::Flat);
        benches.iter().filter(|bench| bench.family == family).for_each(|bench| one(&mut group, gpu, bench));
        group.finish();
    }
}

fn one(group: &mut BenchmarkGroup<'_, WallTime>, gpu: &Gpu, bench: &Bench) {
    group.throughput(match bench.flops {
        0 => Throughput::Bytes(bench.bytes),
        // Criterion's elements: operations.
        flops => Throughput::Elements(flops),
    });
    // Made where the filter lets it run, and once.
    let mut prepared = None;
    group.bench_function(bench.name(), |bencher| {
        let prepared: &Prepared = prepared.get_or_insert_with(|| (bench.prepare)(gpu).expect("the benchmark is prepared"));
        bencher.iter_custom(|launches| time(gpu, bench, prepared, launches).expect("the launches run"));
    });
}

/// The time of so many launches: of as many replays of the graph, which holds a launch for each buffer set, as have no fewer.
fn time(gpu: &Gpu, bench: &Bench, prepared: &Prepared, launches: u64) -> Result<Duration> {
    let replays = launches.div_ceil(bench.sets as u64);
    let time = between(gpu, replays, || prepared.graph.replay(&gpu.stream))?;
    Ok(time.mul_f64(launches as f64 / (replays * bench.sets as u64) as f64))
}

/// The time between two events, before and after so many calls.
fn between(gpu: &Gpu, calls: u64, mut enqueue: impl FnMut() -> oxtile::Result<()>) -> Result<Duration> {
    // Not timed: the device is busy when the host enqueues the rest.
    enqueue()?;
    let begin = gpu.stream.record()?;
    for _ in 0..calls {
        enqueue()?;
    }
    let end = gpu.stream.record()?;
    end.synchronize()?;
    Ok(end.elapsed_since(&begin)?)
}
