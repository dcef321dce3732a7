//! A pass over a chain: weights are pulled ahead, lent one after another, and given up.

use std::collections::VecDeque;
use std::fmt;
use std::marker::PhantomData;
use std::ops::Deref;
use std::sync::Arc;

use super::chain::{Chain, ChainPass, Position};
use super::format::WeightFormat;
use super::memory::write_access;
use super::mode::{Eager, Mode};
use super::set::ShardSet;
use super::step::Published;
use super::weight::WeightId;
use crate::runtime::memory::Owner;
use crate::runtime::module::{note, note_after};
use crate::runtime::{Error, Event, Result, Stream};

/// A pass over the weights of a chain, in their order. Made by [`Published::forward`](super::Published::forward) and [`backward`](super::Published::backward).
///
/// A pass that is dropped before its end gives up; the next one begins anew. A pass of a [captured](super::Captured) chain begins and ends inside of one capture, and that of an [eager](Eager) one outside of all.
pub struct Pass<'p, F: WeightFormat, M: Mode = Eager> {
    set: &'p ShardSet<F>,
    chain: &'p Chain<F, M>,
    pass: ChainPass,
    /// The number of the graph that holds the pass; none where it is done at once.
    capture: Option<u64>,
    /// How many weights were lent.
    taken: usize,
    /// The ends of the pulls under way, the next one to be lent first.
    pulled: VecDeque<Event>,
}

impl<'p, F: WeightFormat, M: Mode> Pass<'p, F, M> {
    pub(super) fn begin(published: &'p Published<'_, F>, chain: &'p mut Chain<F, M>, pass: ChainPass) -> Result<Self> {
        let set = published.set;
        if chain.set != set.id {
            let why = "the chain is of another set: make it of this one".to_owned();
            return Err(Error::Invalid { what: "Published", why });
        }
        let captured = chain.capture();
        let capture = captured.as_ref().map(|captured| captured.number);
        match (published.capture, captured) {
            (Some(step), _) if capture != Some(step) => {
                return Err(Error::NotCapturable {
                    what: "a pass over a step that is in another graph",
                    mend: "capture both in one graph, or begin the pass with Published::of a step that was done",
                });
            }
            // The graph has the pass alone: at each replay there must be something to pull.
            (None, Some(captured)) => captured.keep(Arc::clone(&set.readable) as Arc<dyn Owner>),
            _ => {}
        }
        if M::IS_CAPTURED && capture.is_none() {
            let why =
                "the chain is for graphs: begin its passes inside Graph::capture with Chain::pulls named to it, or make it by Chain::new"
                    .to_owned();
            return Err(Error::Invalid { what: "Published", why });
        }
        let mut pass = Self { set, chain, pass, capture, taken: 0, pulled: VecDeque::new() };
        while pass.pulled.len() < pass.distance() && pass.pull()? {}
        Ok(pass)
    }

    fn distance(&self) -> usize {
        self.chain.plan().distance() as usize
    }

    fn positions(&self) -> &'p [Position<F>] {
        &self.chain.passes[self.pass as usize]
    }

    /// Pulls the next weight after what its slot was used for before; whether there was one.
    fn pull(&mut self) -> Result<bool> {
        let Some(position) = self.positions().get(self.taken + self.pulled.len()) else { return Ok(false) };
        let Chain { pulls, second, slots, .. } = self.chain;
        // Without one it has no copies.
        let second = second.as_ref().unwrap_or(pulls);
        let (planes, slot) = (&self.set.planes, &slots[position.slot]);
        // After the casts, and after all ranks have published: both are uses of the planes.
        note(pulls, &[planes.local().view().access("shards"), write_access(slot)])?;
        position.lanes.pull(planes, slot, [pulls, second])?;
        self.pulled.push_back(pulls.mark()?);
        tracing::trace!(weight = position.name, slot = position.slot, bytes = position.bytes, "pulled");
        Ok(true)
    }

    /// Nothing is left to pull into the slot of the weight before: notes that the stream of pulls has it from now on. The first pull of the next pass then waits for what was enqueued with that
    /// weight, not for the rest of this pass, where it goes to that slot.
    fn free_slot_before(&self) -> Result<()> {
        let Some(before) = self.taken.checked_sub(1) else { return Ok(()) };
        note(&self.chain.pulls, &[write_access(&self.chain.slots[self.positions()[before].slot])])
    }

    /// Lends the next weight to work on `compute`, which starts when it is there and this rank's own rows are copied, on `compute` too, and pulls the one that is [`distance`](super::ChainConfig::distance) further.
    /// The weight before must be given up first: the borrow sees to that, and what was enqueued with it before is waited for by the pull that overwrites it. Does not wait on the host.
    ///
    /// # Errors
    /// [`Error::Invalid`] if the chain has another weight next, or none, with the names of both; [`Error::NotCapturable`](crate::Error::NotCapturable) if only a part of the pass is captured; what
    /// ended the arena; an error of the driver.
    pub fn take<'a>(&'a mut self, weight: WeightId, compute: &Stream) -> Result<Gathered<'a, F, M>> {
        let Some(position) = self.positions().get(self.taken) else {
            return Err(invalid(format!("the pass has no weight after {}: {}", self.last(), self.wanted(weight))));
        };
        if position.weight != weight {
            return Err(invalid(format!("`{}` is next in the chain: {}", position.name, self.wanted(weight))));
        }
        let captures = [self.chain.capture(), compute.0.capture()].map(|capture| capture.map(|capture| capture.number));
        if captures != [self.capture; 2] {
            return Err(Error::NotCapturable {
                what: "a part of a pass",
                mend: "make the chain by Chain::captured, name Chain::pulls and the stream of the computation to Graph::capture, and begin and finish the pass inside",
            });
        }
        // The next ones first: their slots are free after what `compute` holds now.
        while self.pulled.len() <= self.distance() {
            if !self.pull()? {
                self.free_slot_before()?;
                break;
            }
        }
        let event = self.pulled.front().expect("it was pulled, or that failed");
        let (planes, slot) = (&self.set.planes, &self.chain.slots[position.slot]);
        if position.lanes.has_own() {
            // Here and not beside the pull: docs/adr/0031-own-rows.md.
            note_after(compute, event, &[planes.local().view().access("shards"), write_access(slot)])?;
            position.lanes.copy_own(planes, slot, compute)?;
        } else {
            note_after(compute, event, &[slot.view().access("weights")])?;
        }
        self.pulled.pop_front();
        self.taken += 1;
        Ok(Gathered { tensors: &position.tensors, name: &position.name, pass: PhantomData })
    }

    /// An event at the end of the pulls so far; where nothing was left to pull, after what the weight before the last one was used for, too.
    ///
    /// # Errors
    /// As [`Stream::record`].
    pub fn record_pulls(&self) -> Result<Event> {
        self.chain.pulls.record()
    }

    /// The weight that is lent next; none at the end.
    pub fn next_weight(&self) -> Option<WeightId> {
        self.positions().get(self.taken).map(|position| position.weight)
    }

    /// Ends the pass.
    ///
    /// # Errors
    /// [`Error::Invalid`] if weights of the chain were not taken, with their names.
    pub fn finish(self) -> Result<()> {
        let left: Vec<_> = self.positions()[self.taken..].iter().map(|position| format!("`{}`", position.name)).collect();
        if left.is_empty() {
            return Ok(());
        }
        Err(invalid(format!("the pass did not take {}: take them, or leave them out of the chain", left.join(", "))))
    }

    fn last(&self) -> String {
        self.taken.checked_sub(1).map_or("its beginning".to_owned(), |last| format!("`{}`", self.positions()[last].name))
    }

    fn wanted(&self, weight: WeightId) -> String {
        match self.set.at("Pass::take", weight) {
            Ok(entry) => format!("`{}` was asked for", entry.weight.name),
            Err(_) => format!("weight {} was asked for, which the set does not have", weight.index()),
        }
    }
}

fn invalid(why: String) -> Error {
    Error::Invalid { what: "Pass", why }
}

/// A whole weight, for as long as no other is taken. Work that is enqueued with it comes after its pull, on any stream, and before the pull that overwrites it.
///
/// ```compile_fail,E0499
/// use oxtile::sharded::{Bf16, Pass, WeightId};
/// # use oxtile::{Result, Stream};
///
/// fn two(pass: &mut Pass<'_, Bf16>, [a, b]: [WeightId; 2], stream: &Stream) -> Result<()> {
///     let first = pass.take(a, stream)?;
///     let second = pass.take(b, stream)?;
///     println!("{:?}", (first.tensor(), second.tensor()));
///     Ok(())
/// }
/// ```
pub struct Gathered<'a, F: WeightFormat, M: Mode = Eager> {
    tensors: &'a [F::Tensor],
    name: &'a str,
    /// No other weight is taken meanwhile.
    pass: PhantomData<&'a mut M>,
}

impl<'a, F: WeightFormat, M: Mode> Gathered<'a, F, M> {
    /// The matrix, or the first expert.
    pub fn tensor(&self) -> &'a F::Tensor {
        &self.tensors[0]
    }

    /// All matrices: one, those of the experts, or those of the [group](super::ChainConfig::groups), weight by weight in the order in which the pass names them.
    pub fn tensors(&self) -> &'a [F::Tensor] {
        self.tensors
    }

    /// The name of the weight.
    pub fn name(&self) -> &'a str {
        self.name
    }
}

impl<F: WeightFormat, M: Mode> Deref for Gathered<'_, F, M> {
    type Target = F::Tensor;

    fn deref(&self) -> &F::Tensor {
        self.tensor()
    }
}

impl<F: WeightFormat, M: Mode> fmt::Debug for Gathered<'_, F, M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Gathered").field(&self.name).finish()
    }
}

impl<F: WeightFormat, M: Mode> fmt::Debug for Pass<'_, F, M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Pass").field("pass", &self.pass).field("taken", &self.taken).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::Ordering;

    use super::*;
    use crate::comm::{EmulatedCommunicator, Team, WorldSize};
    use crate::runtime::Runtime;
    use crate::sharded::{Bf16, ChainConfig, Weight};
    use crate::symmetric::{Arena, ArenaOptions};

    /// On two ranks: two events are recorded and waited for, a stream is asked once whether it is captured, and there is a copy from each rank.
    #[test]
    fn a_pull_is_seven_calls_of_the_driver() {
        let (runtime, world) = (Runtime::emulated(2).unwrap(), WorldSize::new(2).unwrap());
        let ranks = EmulatedCommunicator::world_of(&runtime, world).unwrap();
        let streams: Vec<_> = ranks.iter().map(|rank| rank.device().stream().unwrap()).collect();
        let weights = ["a", "b", "c", "d"].map(|name| Weight::new(name, [8, 8]));
        let mut sets = Vec::new();
        for (rank, stream) in ranks.iter().zip(&streams) {
            let arena = Arena::open(rank, ArenaOptions::default()).unwrap();
            let member = Team::all(world).member(arena.rank()).unwrap();
            let set = ShardSet::<Bf16>::new(stream, &arena, &member, weights.to_vec()).unwrap();
            let config = ChainConfig::new(&set, set.weights().map(|(id, _)| id)).unwrap();
            let chain = Chain::new(stream, &set, &config).unwrap();
            sets.push((set, chain));
        }
        for ((set, _), stream) in sets.iter_mut().zip(&streams) {
            set.update(stream).unwrap().publish().unwrap();
        }
        let calls = || runtime.0.backend.cluster().expect("it is emulated").calls.load(Ordering::Relaxed);
        for ((set, chain), stream) in sets.iter_mut().zip(&streams) {
            let published = Published::of(set).unwrap();
            for _ in 0..2 {
                let mut pass = published.forward(chain).unwrap();
                let ids: Vec<_> = set.weights().map(|(id, _)| id).collect();
                pass.take(ids[0], stream).unwrap();
                pass.take(ids[1], stream).unwrap();
                let before = calls();
                pass.take(ids[2], stream).unwrap();
                assert_eq!(calls() - before, 7, "a wait for the third weight, and the pull of the fourth");
                pass.take(ids[3], stream).unwrap();
                pass.finish().unwrap();
            }
        }
    }
}
