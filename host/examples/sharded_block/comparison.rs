//! Ranks that train, and one device that does the same.

use std::fmt;
use std::thread;
use std::time::Duration;

use oxtile::bootstrap::Environment;
use oxtile::comm::HostRank;
use oxtile::{Device, Result, Runtime};

use super::format::Format;
use super::train::{Trained, train};
use super::{Options, PATIENCE};

/// Where the ranks are.
pub enum Place {
    /// All ranks are threads of this process, each with a virtual GPU.
    Threads(Runtime),
    /// This process is a rank, and has a GPU.
    Process(Environment),
}

impl Place {
    /// Trains by ranks and by one device, in the format `F`.
    ///
    /// # Errors
    /// A rank that does not come; an error of the driver.
    pub fn compare<F: Format>(&self, options: &Options) -> Result<Comparison> {
        match self {
            Self::Threads(runtime) => {
                let devices = (0..options.ranks).map(|device| runtime.device(device)).collect::<Result<Vec<_>>>()?;
                let trained = thread::scope(|scope| {
                    let start =
                        |(rank, number)| (number, scope.spawn(move || train::<F>(rank, options.batches(number), options.ranks, options)));
                    let threads: Vec<_> = HostRank::threads(&devices)?.into_iter().zip(0..).map(start).collect();
                    let ended = threads.into_iter().map(|(number, thread)| Ok((number, thread.join().expect("no rank panics")?)));
                    ended.collect::<Result<Vec<_>>>()
                })?;
                Comparison::new(options, &trained, || alone::<F>(&devices[0], options))
            }
            Self::Process(environment) => {
                let device = Runtime::cuda()?.device(environment.local_rank)?;
                let (rank, number) = (HostRank::connect(environment, &device, PATIENCE)?, environment.rank.index());
                let trained = train::<F>(rank, options.batches(number), options.ranks, options)?;
                Comparison::new(options, &[(number, trained)], || alone::<F>(&device, options))
            }
        }
    }
}

/// Trains by a world of one rank, whose passes are not captured, which computes the micro-batches of all ranks one after another, or the whole of the one that they share.
fn alone<F: Format>(device: &Device, options: &Options) -> Result<Trained> {
    let batches = if options.context_parallel.is_some() { 1 } else { options.ranks };
    let options = Options { is_captured: false, ..options.clone() };
    train::<F>(HostRank::threads(std::slice::from_ref(device))?.remove(0), 0..batches, batches, &options)
}

/// What ranks found, beside what one device found.
#[derive(Debug)]
pub struct Comparison {
    /// The mean of the ranks' losses in each step.
    pub losses: Vec<f32>,
    /// How many ranks have the losses and the masters of the one device, bit by bit, and how many there are; none where they are not compared, or share a sequence.
    pub equal: Option<[usize; 2]>,
    /// The largest difference of a loss from that of the one device, where ranks share a sequence and are threads: gradients of weights are sums over tokens in another order.
    pub off: Option<f32>,
    /// The tokens of a rank in each step.
    pub tokens: u64,
    /// The times of the steps after the second one, of the rank with the largest median.
    pub steps: Vec<Duration>,
}

impl Comparison {
    fn new(options: &Options, ranks: &[(u32, Trained)], alone: impl FnOnce() -> Result<Trained>) -> Result<Self> {
        let mean = |step| ranks.iter().map(|(_, rank)| rank.losses[step]).sum::<f32>() / ranks.len() as f32;
        let is_equal = |alone: &Trained, (number, rank): &&(u32, Trained)| {
            let losses = alone.losses.iter().skip(*number as usize).step_by(options.ranks as usize);
            let mut masters = rank.masters.iter().zip(&alone.masters);
            bits(losses).eq(bits(rank.losses.iter()))
                && masters.all(|((start, own), (_, whole))| bits(own.iter()).eq(bits(whole[*start as usize..].iter().take(own.len()))))
        };
        let losses: Vec<_> = (0..options.steps as usize).map(mean).collect();
        // A process has the losses of its own tokens of a shared sequence, and not the mean of all.
        let can_be_compared = options.context_parallel.is_none() || ranks.len() == options.ranks as usize;
        let alone = if options.is_compared && can_be_compared { Some(alone()?) } else { None };
        let (shared, apart) = if options.context_parallel.is_some() { (alone, None) } else { (None, alone) };
        let equal = apart.map(|alone| [ranks.iter().filter(|rank| is_equal(&alone, rank)).count(), ranks.len()]);
        let off = shared.map(|alone| losses.iter().zip(&alone.losses).map(|(one, other)| (one - other).abs()).fold(0.0, f32::max));
        let slowest = ranks.iter().max_by_key(|(_, rank)| median(&rank.steps));
        let steps = slowest.map_or_else(Vec::new, |(_, rank)| rank.steps.clone());
        Ok(Self { losses, equal, off, tokens: options.tokens(), steps })
    }

    /// The median of the steps' times in milliseconds, and the tokens of a rank that it computes in a second; none of fewer than three steps.
    pub fn rate(&self) -> Option<[f64; 2]> {
        let seconds = median(&self.steps)?.as_secs_f64();
        Some([seconds * 1e3, self.tokens as f64 / seconds])
    }

    /// What was measured, for programs.
    pub fn json(&self, options: &Options) -> serde_json::Value {
        let rate = self.rate();
        serde_json::json!({
            "example": "sharded_block",
            "format": options.format,
            "is_captured": options.is_captured,
            "ranks": options.ranks,
            "tokens_a_rank": self.tokens,
            "trained_elements": options.shape.weights().iter().rev().skip(1).map(|weight| weight.rows * weight.columns).sum::<u64>(),
            "step_ms": self.steps.iter().map(|step| step.as_secs_f64() * 1e3).collect::<Vec<_>>(),
            "median_ms": rate.map(|[median, _]| median),
            "tokens_a_second_a_rank": rate.map(|[_, tokens]| tokens),
            "losses": self.losses,
        })
    }
}

/// The time in the middle; the later of two.
fn median(times: &[Duration]) -> Option<Duration> {
    let mut times = times.to_vec();
    times.sort_unstable();
    times.get(times.len() / 2).copied()
}

fn bits<'a>(values: impl Iterator<Item = &'a f32>) -> impl Iterator<Item = u32> {
    values.map(|value| value.to_bits())
}

impl fmt::Display for Comparison {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (loss, step) in self.losses.iter().zip(1..) {
            writeln!(f, "step {step}: loss {loss:.4}")?;
        }
        match (self.equal, self.off) {
            (_, Some(off)) => write!(f, "at most {off:.4} from the loss of one device"),
            (Some([equal, ranks]), _) => write!(f, "{equal} of {ranks} ranks bit-equal to one device"),
            (None, None) => match self.rate() {
                Some([median, tokens]) => write!(f, "{median:.3} ms in the median step: {tokens:.0} tokens a second on each rank"),
                None => write!(f, "no step was timed: give --steps 3 or more"),
            },
        }
    }
}
