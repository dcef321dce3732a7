//! What a launch costs the host: Oxtile's checks, ordering and argument packing over the driver's own call.

use std::time::Instant;

use anyhow::Result;
use oxtile::runtime::{Buffer, Kind, Stream};
use oxtile_kernels::copy::{CopyWords, CopyWordsArgs};
use oxtile_tile::launch::{ArgumentWords, Kernel, KernelArgs};

use super::raw_launch::RawLaunch;
use crate::{
    bench::{Gpu, Size},
    random::Random,
    results::{Clock, Record, SideRecord},
    rounds::{self, Plan, Side},
};

/// The family's name.
pub const FAMILY: &str = "launch";

/// Words that the kernel copies: one block.
const WORDS: u64 = 1024;

/// A batch of launches, timed on the host from an empty queue. It is far shorter than the queue, so that no launch
/// waits for a place in it.
struct Batch<'a> {
    label: &'static str,
    stream: &'a Stream,
    count: u64,
    launch: Box<dyn FnMut() -> Result<()> + 'a>,
}

impl Side for Batch<'_> {
    fn label(&self) -> &str {
        self.label
    }

    fn round(&mut self) -> Result<f64> {
        self.stream.synchronize()?;
        let start = Instant::now();
        for _ in 0..self.count {
            (self.launch)()?;
        }
        let milliseconds = start.elapsed().as_secs_f64() * 1e3;
        self.stream.synchronize()?;
        Ok(milliseconds)
    }
}

/// Compares a loaded kernel's launch with the driver's, and with loading it each time.
///
/// # Errors
/// What the launches give.
pub fn measure(gpu: &Gpu, size: Size, plan: Plan, random: &mut Random) -> Result<Record> {
    let count = size.pick(200, 5);
    let mut pairs = Vec::new();
    for set in 0..3 {
        let source = Buffer::<u32>::from_slice(&gpu.stream, &gpu.pattern.fill_words(set, WORDS))?;
        pairs.push((source, Buffer::<u32>::uninitialised(&gpu.stream, WORDS)?));
    }
    let [(source, target), (raw_source, raw_target), (load_source, load_target)] = pairs.as_mut_slice() else {
        unreachable!("three pairs were made")
    };
    let batch = |label, launch| Batch { label, stream: &gpu.stream, count, launch };
    let kernel = gpu.runtime.load::<CopyWords>()?;
    let mut sides: Vec<Box<dyn Side>> = vec![Box::new(batch(
        "kernel.launch(), kernel = runtime.load()",
        Box::new(|| Ok(kernel.launch(&gpu.stream, CopyWordsArgs { source: source.view(), target: target.view_mut() })?)),
    ))];
    if gpu.runtime.kind() == Kind::Cuda {
        let args = CopyWordsArgs { source: raw_source.view(), target: raw_target.view_mut() };
        let mut words = ArgumentWords::new();
        args.pack(&mut words);
        let mut raw = RawLaunch::new(gpu, CopyWords::INFO, CopyWords::grid(&args, &gpu.device.limits())?, words)?;
        sides.push(Box::new(batch("cuLaunchKernel", Box::new(move || raw.launch()))));
    }
    sides.push(Box::new(batch(
        "runtime.load().launch(), loaded each time",
        Box::new(|| {
            let kernel = gpu.runtime.load::<CopyWords>()?;
            Ok(kernel.launch(&gpu.stream, CopyWordsArgs { source: load_source.view(), target: load_target.view_mut() })?)
        }),
    )));
    let measured = rounds::run(&mut sides, plan, random)?;
    let labels = sides.iter().map(|side| SideRecord::new(side.label()));
    let mut record = Record {
        family: FAMILY.to_owned(),
        kernel: "copy_words".to_owned(),
        shape: "1 block".to_owned(),
        clock: Clock::Host,
        bytes: 0,
        flops: 0,
        launches: count,
        ceiling: None,
        limit: Vec::new(),
        chosen: None,
        divided: None,
        sides: labels.collect(),
        order: Vec::new(),
        missing: Vec::new(),
    };
    record.fill(measured);
    Ok(record)
}
