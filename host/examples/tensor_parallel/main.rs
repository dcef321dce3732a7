//! A feed-forward layer with tensor and sequence parallelism, forward and backward: six products, of which each overlaps with the gather or the scatter that it needs.
//! `cargo run -p oxtile --example tensor_parallel -- --ranks 4` on the emulator, a thread a rank; `oxtile launch -n 4 -- target/debug/examples/tensor_parallel --tokens 8192 --width 8192 --hidden 28672` on
//! GPUs, a process a rank.
//!
//! | file | what it holds |
//! |---|---|
//! | `layer` | the products of a rank |
//! | `rank` | a rank: its tensors, and its steps, enqueued and in a graph |

pub mod layer;
pub mod rank;

use std::error::Error;
use std::thread;

use oxtile::bootstrap::{BootstrapError, Environment};
use oxtile::comm::HostRank;
use oxtile::overlap::Method;
use oxtile::{Result, Runtime};

use layer::{Shape, Way};
use rank::{PATIENCE, Run, run};

/// What is asked for.
#[derive(Clone, Debug)]
pub struct Options {
    pub ranks: u32,
    pub shape: Shape,
    /// Replays of the graph.
    pub steps: u32,
    pub way: Way,
}

impl Default for Options {
    fn default() -> Self {
        Self { ranks: 2, shape: Shape { tokens: 96, width: 32, hidden: 64 }, steps: 3, way: Way::Chosen }
    }
}

#[allow(dead_code, reason = "tests take the rest")]
fn main() -> std::result::Result<(), Box<dyn Error>> {
    let mut options = Options::read(std::env::args().skip(1))?;
    let (found, is_first) = match Environment::read() {
        Ok(environment) => {
            options.ranks = environment.world.get();
            let device = Runtime::cuda()?.device(environment.local_rank)?;
            (run(HostRank::connect(&environment, &device, PATIENCE)?, &options)?, environment.rank.index() == 0)
        }
        Err(BootstrapError::NoLauncher) => {
            // No model of times holds on the emulator.
            if options.ranks > 1 && options.way == Way::Chosen {
                options.way = Way::By(Method::Fused);
            }
            let ranks = by_threads(&Runtime::emulated(options.ranks)?, &options)?;
            let differs = |run: &Run| !run.is_equal;
            let found = ranks.iter().position(differs).unwrap_or(0);
            (ranks.into_iter().nth(found).ok_or("no rank")?, true)
        }
        Err(error) => return Err(error.into()),
    };
    if !found.is_equal {
        return Err(found.to_string().into());
    }
    if is_first {
        println!("{found}");
    }
    Ok(())
}

/// All ranks, each a thread with a virtual GPU.
pub fn by_threads(runtime: &Runtime, options: &Options) -> Result<Vec<Run>> {
    let devices = (0..options.ranks).map(|device| runtime.device(device)).collect::<Result<Vec<_>>>()?;
    thread::scope(|scope| {
        let threads: Vec<_> = HostRank::threads(&devices)?.into_iter().map(|rank| scope.spawn(move || run(rank, options))).collect();
        threads.into_iter().map(|thread| thread.join().expect("no rank panics")).collect()
    })
}

impl Options {
    fn read(mut arguments: impl Iterator<Item = String>) -> std::result::Result<Self, Box<dyn Error>> {
        let mut options = Self::default();
        while let Some(name) = arguments.next() {
            let value = arguments.next().ok_or(format!("{name} has no value"))?;
            match name.as_str() {
                "--ranks" => options.ranks = value.parse()?,
                "--tokens" => options.shape.tokens = value.parse()?,
                "--width" => options.shape.width = value.parse()?,
                "--hidden" => options.shape.hidden = value.parse()?,
                "--steps" => options.steps = value.parse()?,
                "--way" => {
                    options.way = match value.as_str() {
                        "chosen" => Way::Chosen,
                        "bulk" => Way::Bulk,
                        _ => return Err(format!("there is no way {value}: give chosen or bulk").into()),
                    }
                }
                _ => return Err(format!("there is no {name}: give --ranks, --tokens, --width, --hidden, --steps or --way").into()),
            }
        }
        Ok(options)
    }
}
