//! A rank: its tensors, and its steps, which are enqueued once, replayed by a graph, and enqueued again. All of them have the same bits.

use std::fmt;
use std::time::Duration;

use half::bf16;
use oxtile::comm::{HostRank, Team};
use oxtile::overlap::OverlapMemory;
use oxtile::symmetric::{Arena, ArenaOptions, BackendName};
use oxtile::{Graph, Kind, Result};

use super::Options;
use super::layer::{Products, Shape, Tensors};

/// How long a rank waits for another one.
pub const PATIENCE: Duration = Duration::from_secs(120);

/// What a rank has found.
#[derive(Debug)]
pub struct Run {
    choices: [String; 6],
    /// Of its tokens, and of its part of the weights.
    pub y: Vec<f32>,
    pub dx: Vec<f32>,
    pub dup: Vec<f32>,
    pub dbias: Vec<f32>,
    pub ddown: Vec<f32>,
    /// Whether all steps had the bits of the first one.
    pub is_equal: bool,
    /// The time of each replay, on a GPU.
    times: Vec<Duration>,
}

/// Random numbers around 0, of a tensor and a rank.
pub fn numbers(tensor: u64, rank: u32, len: u64, scale: f32) -> Vec<bf16> {
    let mut state = (1 + tensor + 16 * u64::from(rank)).wrapping_mul(0x9E37_79B9_7F4A_7C15);
    let next = |_| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        bf16::from_f32(scale * ((state >> 40) as f32 / (1 << 23) as f32 - 1.0))
    };
    (0..len).map(next).collect()
}

/// The five tensors that are given: `x`, `dy`, and this rank's part of `W1`, of the bias and of `W2`.
pub fn given(Shape { tokens, width, hidden }: Shape, rank: u32, ranks: u32) -> [Vec<bf16>; 5] {
    let part = |size: u64| size / u64::from(ranks);
    let scale = |sum: u64| 1.7 / (sum as f32).sqrt();
    [
        numbers(0, rank, part(tokens) * width, 1.0),
        numbers(1, rank, part(tokens) * width, 1.0),
        numbers(2, rank, part(hidden) * width, scale(width)),
        numbers(3, rank, part(hidden), 0.5),
        numbers(4, rank, width * part(hidden), scale(hidden)),
    ]
}

/// The steps of a rank.
pub fn run(rank: HostRank, options: &Options) -> Result<Run> {
    let (compute, out) = (rank.device().stream()?, rank.device().urgent_stream()?);
    let (world, shape) = (rank.world(), options.shape);
    let is_gpu = rank.device().runtime().kind() == Kind::Cuda;
    let backend = if is_gpu { BackendName::Vmm } else { BackendName::Emulated };
    // Two places, and the flags.
    let bytes = 2 * shape.bytes(world)? + 4096;
    let arena = Arena::open(&rank, ArenaOptions { backend, bytes, deadline: PATIENCE, ..ArenaOptions::default() })?;
    let member = Team::all(world).member(rank.rank()).expect("all ranks are members");
    let tensors = Tensors::new(&compute, shape, world.get(), given(shape, rank.rank().index(), world.get()))?;
    let memory = OverlapMemory::take(&arena, &member, shape.bytes(world)?, &out)?;
    let products = Products::new(&memory, &compute, shape, options.way)?;
    let mut layer = products.bind(&compute, &tensors)?;

    let mut step = || layer.forward(&compute).and_then(|()| layer.backward(&compute));
    step()?;
    arena.ticket(&compute)?.wait()?;
    let first = tensors.results(&compute)?;
    let graph = Graph::capture(&[&compute, &out], &mut step)?;
    let mut ends = vec![compute.record()?];
    for _ in 0..options.steps {
        graph.replay(&compute)?;
        ends.push(compute.record()?);
    }
    arena.ticket(&compute)?.wait()?;
    let replayed = tensors.results(&compute)?;
    step()?;
    arena.ticket(&compute)?.wait()?;
    let again = tensors.results(&compute)?;
    let times = ends.windows(2).filter(|_| is_gpu).map(|step| step[1].elapsed_since(&step[0])).collect::<Result<_>>()?;

    let bits = |found: &[Vec<f32>; 5]| found.iter().flatten().map(|value| value.to_bits()).collect::<Vec<_>>();
    let is_equal = [&replayed, &again].into_iter().all(|found| bits(found) == bits(&first));
    let (choices, [y, dx, dup, dbias, ddown]) = (products.choices(), first);
    drop((graph, layer));
    drop((products, tensors, memory));
    arena.close()?.finish()?;
    rank.close()?;
    Ok(Run { choices, y, dx, dup, dbias, ddown, is_equal, times })
}

impl fmt::Display for Run {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.choices.iter().try_for_each(|choice| writeln!(f, "{choice}"))?;
        let mut times = self.times.clone();
        times.sort_unstable();
        if let Some(median) = times.get(times.len() / 2) {
            writeln!(f, "{:.3} ms in the median step, forward and backward", median.as_secs_f64() * 1e3)?;
        }
        let is_equal = if self.is_equal { "all steps have the bits of the first one" } else { "steps differ in bits" };
        write!(f, "{is_equal}, enqueued and in a graph")
    }
}
