//! Trains a small transformer whose weights, gradients and optimizer are divided among ranks, and compares it with one device that does all of it:
//! `cargo run -p oxtile --example sharded_block -- --ranks 4 --steps 8 --format mxfp8` on the emulator, a thread a rank;
//! `oxtile launch -n 4 -- target/debug/examples/sharded_block --steps 8` on GPUs, a process a rank. `--model llama-8b` has the widths of Llama 8B and 8192 tokens a rank, is compared with
//! nothing, and prints the median time of a step and the tokens a second; without a launcher it is one rank on the first GPU. `--graph` captures the passes in the first step, and replays them. `--json FILE` writes all times. `--context-parallel auto` gives all ranks one sequence, of which each has some tokens.
//!
//! | file | what it holds |
//! |---|---|
//! | `comparison` | all ranks, and one device that does the same |
//! | `train` | a rank: its shards, the loop of steps |
//! | `passes` | its passes, enqueued or in a graph |
//! | `optimizer` | AdamW on the rows of a rank |
//! | `attend` | attention to a rank's own sequence, or to one that ranks share |
//! | `model`, `block`, `linear` | the passes: of the model, of a block, of a product with a weight that is pulled |
//! | `format` | formats of weights, and what a product reads of them |
//! | `kernels` | kernels without trained weights |
//! | `shape` | sizes and weights |

mod attend;
mod block;
pub mod comparison;
mod format;
mod kernels;
mod linear;
mod model;
mod optimizer;
mod passes;
pub mod shape;
mod train;

use std::error::Error;
use std::ops::Range;
use std::path::PathBuf;
use std::time::Duration;

use oxtile::Runtime;
use oxtile::bootstrap::{BootstrapError, Environment};
use oxtile::context_parallel::Schedule;
use oxtile::sharded::{Bf16, Mxfp8, Nvfp4};

use comparison::{Comparison, Place};
use shape::Shape;

/// How long a rank waits for another one.
const PATIENCE: Duration = Duration::from_secs(120);

/// What is asked for.
#[derive(Clone, Debug)]
pub struct Options {
    pub ranks: u32,
    pub steps: u32,
    pub format: String,
    pub shape: Shape,
    /// Whether one device does the same, and is compared.
    pub is_compared: bool,
    /// Whether the passes of ranks are captured in the first step, and replayed.
    pub is_captured: bool,
    /// By what all ranks attend to one sequence, if they share it.
    pub context_parallel: Option<Schedule>,
    /// The file for what was measured.
    pub json: Option<PathBuf>,
}

#[allow(dead_code, reason = "tests take the rest")]
fn main() -> Result<(), Box<dyn Error>> {
    let mut options = Options::read(std::env::args().skip(1))?;
    let place = match Environment::read() {
        Ok(environment) => {
            options.ranks = environment.world.get();
            Place::Process(environment)
        }
        // No virtual GPU trains it in a day.
        Err(BootstrapError::NoLauncher) if options.shape == Shape::LLAMA_8B => {
            options.ranks = 1;
            Place::Threads(Runtime::cuda()?)
        }
        Err(BootstrapError::NoLauncher) => Place::Threads(Runtime::emulated_fast(options.ranks)?),
        Err(error) => return Err(error.into()),
    };
    let found = compare(&place, &options)?;
    println!("{found}");
    let is_first = !matches!(&place, Place::Process(environment) if environment.rank.index() > 0);
    if let Some(file) = options.json.as_ref().filter(|_| is_first) {
        std::fs::write(file, format!("{}\n", found.json(&options))).map_err(|error| format!("cannot write {}: {error}", file.display()))?;
    }
    Ok(())
}

impl Default for Options {
    fn default() -> Self {
        let (format, shape) = ("bf16".to_owned(), Shape::TINY);
        Self { ranks: 2, steps: 4, format, shape, is_compared: true, is_captured: false, context_parallel: None, json: None }
    }
}

impl Options {
    /// The micro-batches of a rank in each step: one of its own, or its tokens of the one that all share.
    fn batches(&self, rank: u32) -> Range<u32> {
        if self.context_parallel.is_some() { 0..1 } else { rank..rank + 1 }
    }

    /// The tokens of a rank in a micro-batch.
    fn tokens(&self) -> u64 {
        self.shape.tokens / if self.context_parallel.is_some() { u64::from(self.ranks) } else { 1 }
    }

    fn read(mut arguments: impl Iterator<Item = String>) -> Result<Self, Box<dyn Error>> {
        let mut options = Self::default();
        while let Some(name) = arguments.next() {
            if name == "--graph" {
                options.is_captured = true;
                continue;
            }
            let value = arguments.next().ok_or(format!("{name} has no value"))?;
            match name.as_str() {
                "--ranks" => options.ranks = value.parse()?,
                "--steps" => options.steps = value.parse()?,
                "--format" => options.format = value,
                "--json" => options.json = Some(value.into()),
                "--model" => {
                    (options.shape, options.is_compared) = match value.as_str() {
                        "tiny" => (Shape::TINY, true),
                        "llama-8b" => (Shape::LLAMA_8B, false),
                        other => return Err(format!("there is no model {other}: give tiny or llama-8b").into()),
                    };
                }
                "--context-parallel" => {
                    options.context_parallel = Some(match value.as_str() {
                        "auto" => Schedule::Auto,
                        "pull" => Schedule::Pull,
                        "all-to-all" => Schedule::AllToAll,
                        other => return Err(format!("there is no schedule {other}: give auto, pull or all-to-all").into()),
                    });
                }
                _ => {
                    return Err(format!(
                        "there is no {name}: give --ranks, --steps, --format, --model, --graph, --context-parallel or --json"
                    )
                    .into());
                }
            }
        }
        if options.is_captured && options.context_parallel.is_some() {
            return Err("--graph captures attention to a rank's own sequence: leave out --context-parallel".into());
        }
        Ok(options)
    }
}

/// Trains by ranks and by one device, in the format that is asked for.
pub fn compare(place: &Place, options: &Options) -> Result<Comparison, Box<dyn Error>> {
    Ok(match options.format.as_str() {
        "bf16" => place.compare::<Bf16>(options)?,
        "mxfp8" => place.compare::<Mxfp8>(options)?,
        "nvfp4" => place.compare::<Nvfp4>(options)?,
        other => return Err(format!("there is no format {other}: give bf16, mxfp8 or nvfp4").into()),
    })
}
