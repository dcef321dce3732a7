//! The order in which passes use weights, and the memory in which whole weights are.

use std::fmt;
use std::marker::PhantomData;
use std::sync::Arc;

use super::format::{Parts, WeightFormat};
use super::layout::{Entry, aligned};
use super::mode::{Captured, Eager, Mode};
use super::plane::Extent;
use super::pull::{Lanes, PullStreams};
use super::set::ShardSet;
use super::slots::SlotPlan;
use super::weight::{Uses, WeightId};
use crate::comm::Rank;
use crate::quantize::Direction;
use crate::runtime::graph::Capture;
use crate::runtime::{Buffer, Error, Result, Stream};
use crate::symmetric::Rows;

/// The order in which passes use weights. A weight that is used twice, as by a forward pass that is computed again, is named twice.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ChainConfig {
    /// The weights of a forward pass, which takes them by rows.
    pub forward: Vec<WeightId>,
    /// The weights of a backward pass, and by what each is taken: by columns for the gradient of the data, by rows where the forward pass is computed again.
    pub backward: Vec<(WeightId, Direction)>,
    /// How many weights are pulled ahead of the one that is in use. 1 hides pulls where a weight's products take longer than the next weight's pull; 0 has memory for one weight.
    pub distance: u32,
    /// The most bytes of whole weights.
    pub memory: Option<u64>,
    /// Weights that are taken together, such as experts of other sizes: each list is one position of a pass, pulled as one batch of copies and lent at once by the first of it that the pass
    /// names. A pass names all of a list, one after another, or none.
    pub groups: Vec<Vec<WeightId>>,
    /// How many streams carry what comes from other ranks: one by default.
    pub streams: PullStreams,
}

impl ChainConfig {
    /// A chain whose backward pass takes the same weights in reverse, but those of [forward passes alone](Uses::ForwardOnly).
    ///
    /// # Errors
    /// [`Error::Invalid`] for a weight of another set.
    pub fn new<F: WeightFormat>(set: &ShardSet<F>, forward: impl IntoIterator<Item = WeightId>) -> Result<Self> {
        let forward: Vec<_> = forward.into_iter().collect();
        let mut backward = Vec::new();
        for weight in forward.iter().rev() {
            if set.at("ChainConfig::new", *weight)?.weight.uses == Uses::Both {
                backward.push((*weight, Direction::Columns));
            }
        }
        Ok(Self { forward, backward, distance: 1, memory: None, groups: Vec::new(), streams: PullStreams::One })
    }
}

/// Which pass of a chain.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ChainPass {
    Forward,
    Backward,
}

/// Weights in the order in which passes use them, and slots of memory for whole weights. Every weight has one slot for every pass, so graphs may hold passes; a chain allocates
/// nothing after it was made. Ranks need not make the same chains: a pull involves no other rank.
///
/// Its type says whether its passes are enqueued ([`Eager`], made by [`new`](Self::new)) or in graphs ([`Captured`], made by [`captured`](Chain::captured)): a chain is one of both, so that no
/// replay meets an eager pass in its slots. A model that has both makes two chains, which may take turns in any order.
pub struct Chain<F: WeightFormat, M: Mode = Eager> {
    pub(super) set: u64,
    pub(super) passes: Arc<[Vec<Position<F>>; 2]>,
    pub(super) slots: Vec<Buffer<u8>>,
    /// Carries pulls from other ranks, and nothing else.
    pub(super) pulls: Stream,
    /// Carries the second halves of pulls from other ranks, where two streams do.
    pub(super) second: Option<Stream>,
    plan: SlotPlan,
    mode: PhantomData<fn() -> M>,
}

/// Where the whole weights of a chain are: the same at every pass. Made by [`Chain::places`].
///
/// A tensor here is what [`Gathered`](super::Gathered) lends, without the order. It holds the weight from the [`take`](super::Pass::take) of its position to the next one, for the stream that
/// was named there; at other times another weight has the memory. So an operation that needs tensor maps, as a product on `wgmma`, is bound before the passes, and runs in them:
/// nothing is uploaded then, and a graph may hold it.
pub struct Places<F: WeightFormat>(Arc<[Vec<Position<F>>; 2]>);

impl<F: WeightFormat> Places<F> {
    /// The matrices of the weights at a position of the forward pass: one, or those of the experts.
    ///
    /// # Errors
    /// [`Error::Invalid`] for a position that the pass does not have.
    pub fn forward(&self, position: usize) -> Result<&[F::Tensor]> {
        self.at(ChainPass::Forward, position)
    }

    /// The same of the backward pass.
    ///
    /// # Errors
    /// As [`forward`](Self::forward).
    pub fn backward(&self, position: usize) -> Result<&[F::Tensor]> {
        self.at(ChainPass::Backward, position)
    }

    fn at(&self, pass: ChainPass, position: usize) -> Result<&[F::Tensor]> {
        let all = &self.0[pass as usize];
        let missing =
            || Error::Invalid { what: "Places", why: format!("there is no position {position} in a {pass:?} pass of {}", all.len()) };
        all.get(position).map(|position| &position.tensors[..]).ok_or_else(missing)
    }
}

impl<F: WeightFormat> Clone for Places<F> {
    fn clone(&self) -> Self {
        Self(Arc::clone(&self.0))
    }
}

impl<F: WeightFormat> fmt::Debug for Places<F> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.0.iter().flatten().map(|position| &position.name)).finish()
    }
}

/// A weight, or weights that are taken together, at their place in a pass.
pub(super) struct Position<F: WeightFormat> {
    /// The first of them.
    pub weight: WeightId,
    pub name: String,
    pub slot: usize,
    /// The whole weights, for each matrix.
    pub tensors: Vec<F::Tensor>,
    /// The copies that bring the codes and scales.
    pub lanes: Lanes,
    /// Bytes that come from other ranks.
    pub bytes: u64,
}

impl<F: WeightFormat> Chain<F> {
    /// Plans the slots, allocates them on the stream's device, and makes the streams for pulls. Its passes are enqueued.
    ///
    /// # Errors
    /// [`Error::Invalid`] for a weight of another set, a weight by columns that is not cast by columns, a chain of no weights, and for more memory than the configuration has, with the
    /// distance that fits; as [`Buffer::uninitialised`] and [`Device::urgent_stream`](crate::Device::urgent_stream).
    pub fn new(stream: &Stream, set: &ShardSet<F>, config: &ChainConfig) -> Result<Self> {
        Self::make(stream, set, config)
    }
}

impl<F: WeightFormat> Chain<F, Captured> {
    /// The same for passes that are in graphs: they begin and end inside of [`Graph::capture`](crate::Graph::capture).
    ///
    /// # Errors
    /// As [`Chain::new`]; [`Error::Invalid`] for [two streams](PullStreams::Two).
    pub fn captured(stream: &Stream, set: &ShardSet<F>, config: &ChainConfig) -> Result<Self> {
        if config.streams == PullStreams::Two {
            let why = "`PullStreams::Two` is for eager chains: take `One`".to_owned();
            return Err(Error::Invalid { what: "Chain::captured", why });
        }
        Self::make(stream, set, config)
    }

    /// The stream that carries the pulls: name it to [`Graph::capture`](crate::Graph::capture) beside the stream of the computation.
    pub fn pulls(&self) -> &Stream {
        &self.pulls
    }
}

impl<F: WeightFormat, M: Mode> Chain<F, M> {
    fn make(stream: &Stream, set: &ShardSet<F>, config: &ChainConfig) -> Result<Self> {
        let passes = positions(set, config)?;
        let whole = |parts: &Vec<Part<'_, F>>| parts.iter().map(|part| part.entry.whole_bytes(part.plane)).sum();
        let bytes = passes.each_ref().map(|pass| pass.iter().map(whole).collect::<Vec<u64>>());
        let name = |pass: usize, position: usize| passes[pass][position][0].entry.weight.name.clone();
        let plan = SlotPlan::new(&[&bytes[0], &bytes[1]], config.distance, config.memory, name)?;
        let slots = plan.slots().iter().map(|bytes| Buffer::named(stream, "whole weights", *bytes)).collect::<Result<Vec<_>>>()?;
        let numbered = |pass: usize| passes[pass].iter().zip(0..).map(move |(position, number)| (pass, number, position));
        let make = |(pass, number, parts): (usize, usize, &Vec<Part<'_, F>>)| {
            let slot = plan.slot(pass, number);
            position(set, parts, (slot, &slots[slot]), config.streams)
        };
        let passes = Arc::new([numbered(0).map(make).collect(), numbered(1).map(make).collect()]);
        let device = stream.device();
        let pulls = device.urgent_stream()?;
        let second = (config.streams == PullStreams::Two).then(|| device.urgent_stream()).transpose()?;
        Ok(Self { set: set.id, passes, slots, pulls, second, plan, mode: PhantomData })
    }

    /// The graph that is captured, of which the stream of pulls is part, or none.
    pub(super) fn capture(&self) -> Option<Arc<Capture>> {
        self.pulls.0.capture()
    }

    /// Where the whole weights are, to bind operations to them once, before the first pass.
    pub fn places(&self) -> Places<F> {
        Places(Arc::clone(&self.passes))
    }

    /// The slots, and which weight has which.
    pub fn plan(&self) -> &SlotPlan {
        &self.plan
    }

    /// The bytes that come from other ranks in a forward and in a backward pass.
    pub fn pulled_bytes(&self) -> [u64; 2] {
        self.passes.each_ref().map(|pass| pass.iter().map(|position| position.bytes).sum())
    }
}

/// A weight of a position, and the plane that is taken of it.
struct Part<'s, F: WeightFormat> {
    entry: &'s Entry<F>,
    weight: WeightId,
    plane: Direction,
}

/// The weights of the positions of both passes.
fn positions<'s, F: WeightFormat>(set: &'s ShardSet<F>, config: &ChainConfig) -> Result<[Vec<Vec<Part<'s, F>>>; 2]> {
    const WHAT: &str = "Chain::new";
    if config.forward.is_empty() && config.backward.is_empty() {
        return Err(Error::Invalid { what: WHAT, why: "it has no weights".to_owned() });
    }
    let of = |(weight, direction): (WeightId, Direction)| {
        let entry = set.at(WHAT, weight)?;
        let plane = F::RULE.plane_of(direction);
        if entry.starts(plane).is_none() {
            let why = format!("`{}` is of forward passes alone: it has no codes by columns", entry.weight.name);
            return Err(Error::Invalid { what: WHAT, why });
        }
        Ok(Part { entry, weight, plane })
    };
    let group = |weight: WeightId| config.groups.iter().find(|group| group.contains(&weight));
    let grouped = |parts: Vec<Part<'s, F>>| {
        let mut all: Vec<Vec<Part<'s, F>>> = Vec::new();
        for part in parts {
            let goes_on = |last: &Vec<Part<'s, F>>| {
                group(part.weight)
                    .is_some_and(|group| group.contains(&last[0].weight) && last.iter().all(|other| other.weight != part.weight))
            };
            match all.last_mut().filter(|last| goes_on(last)) {
                Some(last) => last.push(part),
                None => all.push(vec![part]),
            }
        }
        for position in &all {
            if let Some(group) = group(position[0].weight).filter(|group| group.len() != position.len()) {
                let (name, found) = (&position[0].entry.weight.name, position.len());
                let why = format!(
                    "`{name}` is of a group of {}, and {found} of it follow one another in a pass: name all of them there",
                    group.len()
                );
                return Err(Error::Invalid { what: WHAT, why });
            }
        }
        Ok(all)
    };
    let forward = config.forward.iter().map(|weight| of((*weight, Direction::Rows))).collect::<Result<_>>()?;
    let backward = config.backward.iter().copied().map(of).collect::<Result<_>>()?;
    Ok([grouped(forward)?, grouped(backward)?])
}

/// Places whole weights in a slot, one after another.
fn position<F: WeightFormat>(
    set: &ShardSet<F>,
    parts: &[Part<'_, F>],
    (slot, memory): (usize, &Buffer<u8>),
    streams: PullStreams,
) -> Position<F> {
    let names: Vec<_> = parts.iter().map(|part| part.entry.weight.name.as_str()).collect();
    let mut position =
        Position { weight: parts[0].weight, name: names.join(", "), slot, tensors: Vec::new(), lanes: Lanes::default(), bytes: 0 };
    let (mut start, mut rows) = (0, [Vec::new(), Vec::new()]);
    for part in parts {
        place(set, part, (start, memory), &mut position, &mut rows);
        start += part.entry.whole_bytes(part.plane);
    }
    let [others, own] = rows;
    position.lanes = Lanes::new(others, own, streams);
    position
}

/// Places a whole weight at byte `first` of a slot, and adds the rows that make its codes and scales: those of the other ranks, and this rank's own.
fn place<F: WeightFormat>(
    set: &ShardSet<F>,
    part: &Part<'_, F>,
    (first, memory): (u64, &Buffer<u8>),
    position: &mut Position<F>,
    [others, own]: &mut [Vec<(Rank, Rows)>; 2],
) {
    let &Part { entry, plane, .. } = part;
    let (experts, rows, columns) = (entry.weight.experts, entry.shards.padded_rows(), entry.weight.columns);
    let [codes, scales] = entry.plane(rows, plane).arrays();
    // Codes lie before scales, and each array begins at a multiple of 256 bytes.
    let begins = [first, first + aligned(experts * codes.bytes())];
    let tensor = |expert| {
        let part = |start, extent: Extent| {
            // SAFETY: the arrays of a position are apart in its slot, and those of experts in an array; positions have the slot in turn.
            unsafe { memory.window::<u8>(start + expert * extent.bytes(), extent.bytes()) }
        };
        let parts = Parts { codes: part(begins[0], codes), scales: part(begins[1], scales), number: set.number(entry, expert, plane) };
        F::tensor(&parts, [rows, columns], plane)
    };
    position.tensors.extend((0..experts).map(tensor));
    position.bytes += entry.travelling_bytes(set.member.rank(), plane);
    let starts = entry.starts(plane).unwrap_or_default();
    for number in 0..2 {
        let extent = |rows| entry.plane(rows, plane).arrays()[number];
        let of = |member: Rank| {
            let range = entry.shards.padded_range(member);
            let extents = [range.start, range.end - range.start, rows].map(extent);
            let mut rows = F::RULE.rows(plane, experts, starts[number], extents);
            rows.to.start += begins[number];
            let is_some = rows.count > 0 && rows.width > 0;
            set.member.team().world_rank(member).filter(|_| is_some).map(|rank| (rank, rows))
        };
        others.extend(set.member.others().filter_map(of));
        own.extend(of(set.member.rank()));
    }
}

impl<F: WeightFormat, M: Mode> fmt::Debug for Chain<F, M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let names = self.passes.each_ref().map(|pass| pass.iter().map(|position| position.name.as_str()).collect::<Vec<_>>());
        f.debug_struct("Chain").field("forward", &names[0]).field("backward", &names[1]).field("plan", &self.plan).finish_non_exhaustive()
    }
}
