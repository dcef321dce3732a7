//! A rank: its shards of weights, gradients and optimizer, and the loop of steps.

use std::ops::Range;
use std::time::Duration;

use oxtile::comm::{HostRank, Team};
use oxtile::sharded::{GradientConfig, GradientScatter, Published, ShardSet};
use oxtile::symmetric::{Arena, ArenaOptions, BackendName};
use oxtile::{Buffer, Kind, Result, Stream};

use super::attend::Tokens;
use super::format::Format;
use super::model::Model;
use super::optimizer::Optimizer;
use super::passes::Passes;
use super::shape::Shape;
use super::{Options, PATIENCE};

/// Steps that are not timed.
const WARM_UP: u32 = 2;

/// What a rank has in the end.
pub struct Trained {
    /// The loss of each micro-batch, step by step.
    pub losses: Vec<f32>,
    /// For each weight the number of the first own element, and the own elements; empty where nothing is compared.
    pub masters: Vec<(u64, Vec<f32>)>,
    /// The times of the steps after the second one.
    pub steps: Vec<Duration>,
}

/// Trains the model, of which this rank has some rows of each weight, by the micro-batches `batches` of each step, or by this rank's tokens of them. Gradients are sums of so
/// many `parts` of equal weight.
pub fn train<F: Format>(rank: HostRank, batches: Range<u32>, parts: u32, options: &Options) -> Result<Trained> {
    let stream = &rank.device().stream()?;
    let team = Team::all(rank.world());
    let shared = options.context_parallel.filter(|_| rank.world().get() > 1).map(|schedule| (rank.rank(), rank.world(), schedule));
    let tokens = Tokens { whole: options.shape.tokens, shared };
    let shape = Shape { tokens: tokens.numbers().len() as u64, ..options.shape };
    let weights = shape.weights();
    let trained = &weights[..weights.len() - 1];
    let sums = GradientScatter::<f32>::arena_bytes::<F>(&team, trained)?;
    let bytes = ShardSet::<F>::arena_bytes(&team, &weights)? + sums + tokens.arena_bytes(shape);
    let backend = if rank.device().runtime().kind() == Kind::Cuda { BackendName::Vmm } else { BackendName::Emulated };
    let arena = Arena::open(&rank, ArenaOptions { backend, bytes: bytes + 4096, deadline: PATIENCE, ..ArenaOptions::default() })?;
    let member = team.member(rank.rank()).expect("all ranks are members");

    let mut set = ShardSet::<F>::new(stream, &arena, &member, weights.clone())?;
    let gradients = GradientScatter::<f32>::new::<F>(stream, &arena, &member, trained, GradientConfig::default())?;
    let mut passes = Passes::new(stream, &set, options.is_captured)?;
    let (model, places) = (Model::new(stream, shape, &set, tokens, (&arena, &member))?, passes.places());
    let mut bound = model.bind(stream, tokens, &places, &gradients)?;
    let mut optimizer = Optimizer::new(stream, &set, shape.width(), parts)?;
    let mut losses = Vec::new();
    // All of it before the first step: a copy from the host waits for the stream.
    let all = (1..=options.steps).flat_map(|step| batches.clone().map(move |batch| (step, batch)));
    let mut data = all.map(|(step, batch)| micro_batch(stream, tokens, step, batch)).collect::<Result<Vec<_>>>()?.into_iter();

    // Before anything is captured.
    gradients.open()?;
    let mut updating = set.update(stream)?;
    optimizer.begin(stream, &mut updating)?;
    updating.publish()?;
    let mut ends = Vec::new();
    for step in 1..=options.steps {
        let published = Published::of(&set)?;
        for batch in batches.clone() {
            let (tokens, targets) = data.next().expect("a micro-batch of each step");
            bound.give(&tokens, &targets)?;
            // The first micro-batch replaces the gradients of the step before, and the others add to its.
            passes.run(stream, &mut bound, &published, batch == batches.start)?;
            losses.push(bound.loss()?);
        }
        let mut updating = set.update(stream)?;
        optimizer.step(stream, step, &gradients, &mut updating)?;
        updating.publish()?;
        if step >= WARM_UP {
            ends.push(stream.record()?);
        }
    }
    arena.ticket(stream)?.wait()?;
    let steps = ends.windows(2).map(|step| step[1].elapsed_since(&step[0])).collect::<Result<_>>()?;
    // Read last, so that no step waits for a host.
    let losses = losses.iter().map(|losses| model.loss_of(stream, losses)).collect::<Result<_>>()?;
    let compared = optimizer.owned.iter().filter(|_| options.is_compared);
    let masters = compared.map(|owned| Ok((owned.start, owned.values.to_vec(stream)?))).collect::<Result<_>>()?;
    drop((bound, passes));
    drop((places, model, gradients, set));
    arena.close()?.finish()?;
    rank.close()?;
    Ok(Trained { losses, masters, steps })
}

/// This rank's tokens of a sequence in which each token follows from the one before, and what comes next after each.
fn micro_batch(stream: &Stream, tokens: Tokens, step: u32, batch: u32) -> Result<(Buffer<u32>, Buffer<i32>)> {
    let first = (step * 7 + batch * 11) % 32;
    let sequence: Vec<u32> =
        std::iter::successors(Some(first), |token| Some((5 * token + 3) % 32)).take(tokens.whole as usize + 1).collect();
    let (own, targets): (Vec<u32>, Vec<i32>) =
        tokens.numbers().into_iter().map(|at| (sequence[at as usize], sequence[at as usize + 1] as i32)).unzip();
    Ok((Buffer::from_slice(stream, &own)?, Buffer::from_slice(stream, &targets)?))
}
