//! Which launches a rank makes, of whose keys: pure functions.
//!
//! The rows of a rank are two chunks, which see different keys. To a kernel they are two sequences of queries for each sequence of the batch, first all late
//! chunks and then all early ones. So one launch attends to keys that lie together, in both halves, whatever each half sees of them.

use super::config::ContextParallelConfig;
use crate::attention::{AttentionConfig, Mask, Output, Window};
use crate::comm::Rank;
use crate::thd::StepKeys;
use crate::thd::{Half, Partition, Share};

/// Which queries a launch has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Halves {
    Both,
    Late,
    Early,
}

/// One launch of an attention kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Launch {
    /// Whose keys it reads; none: all ranks'.
    pub owner: Option<Rank>,
    /// Its place among the steps, in which keys of one owner are read.
    pub step: u32,
    /// The arrays that say what its queries see.
    pub set: u64,
    pub halves: Halves,
    /// Whether it has the mask of the whole: else its queries see all keys of the arrays.
    pub masked: bool,
    /// Where its result goes, in a forward pass.
    pub output: Output,
}

/// All launches of one pass of one rank.
#[derive(Clone, Debug)]
pub(super) struct Program {
    pub keys: StepKeys,
    pub launches: Vec<Launch>,
}

impl Halves {
    /// Sequences of queries, of so many sequences: the first and one after the last.
    pub fn sequences(self, sequences: u64) -> [u64; 2] {
        match self {
            Self::Both => [0, 2 * sequences],
            Self::Late => [0, sequences],
            Self::Early => [sequences, 2 * sequences],
        }
    }

    /// Whether it has the queries of one half.
    fn has(self, half: Self) -> bool {
        self == Self::Both || self == half
    }
}

impl Program {
    /// A launch for the keys of each owner, or for each of an owner's chunks where a window counts from the diagonal. In step `i` rank `r` reads the keys of
    /// rank `r - i`, so that no two read from the same one.
    pub fn by_steps(config: &ContextParallelConfig, share: Share) -> Self {
        let (windowed, causal) = (config.window() != Window::default(), config.is_causal());
        let world = share.world.get();
        let mut launches = Vec::new();
        for step in 0..world {
            let owner = owner_of(share, step);
            let of_owner = |set, halves, masked| Launch { owner: Some(owner), step, set, halves, masked, output: Output::Merged };
            let set = u64::from(owner.index());
            if windowed {
                let chunks = u64::from(config.partition.chunks_of_rank());
                // Early chunks of keys first.
                for half in (0..chunks).rev() {
                    let of = if half + 1 == chunks { Half::Early } else { Half::Late };
                    launches.extend(seeing(config, share, owner, of).map(|halves| of_owner(chunks * set + half, halves, true)));
                }
            } else {
                let halves = seeing(config, share, owner, Half::Early);
                launches.extend(halves.map(|halves| of_owner(set, halves, causal && owner == share.rank)));
            }
        }
        Self { keys: if windowed { StepKeys::Chunks } else { StepKeys::Owners }, launches }
    }

    /// One launch for all keys.
    pub fn at_once(share: Share) -> Self {
        let halves = if share.partition == Partition::Contiguous { Halves::Early } else { Halves::Both };
        Self {
            keys: StepKeys::Whole,
            launches: vec![Launch { owner: None, step: 0, set: 0, halves, masked: true, output: Output::Rounded }],
        }
    }

    /// The same for the backward pass, in which launches do not share keys among their sequences.
    pub fn backward(self) -> Self {
        let halves = |launch: Launch| {
            let of = |halves| Launch { halves, ..launch };
            if launch.halves == Halves::Both { vec![of(Halves::Late), of(Halves::Early)] } else { vec![launch] }
        };
        Self { launches: self.launches.into_iter().flat_map(halves).collect(), ..self }
    }

    /// Steps of which the first one of each half stores its result, if results begin with nothing (`begins`), and the last one rounds it. A launch of both halves, of which one
    /// has more to come or less behind it than the other, becomes one for each.
    pub fn with_ends(self, begins: bool) -> Self {
        let places = |half: Halves| self.launches.iter().enumerate().filter(move |(_, launch)| launch.halves.has(half)).map(|(at, _)| at);
        let ends = |half| [places(half).next(), places(half).next_back()];
        let (late, early) = (ends(Halves::Late), ends(Halves::Early));
        let output = |at: usize, [first, last]: [Option<usize>; 2]| match (begins && first == Some(at), last == Some(at)) {
            (true, true) => Output::Rounded,
            (true, false) => Output::First,
            (false, true) => Output::Last,
            (false, false) => Output::Merged,
        };
        let of = |(at, launch): (usize, &Launch)| {
            let (late, early) = (output(at, late), output(at, early));
            match launch.halves {
                Halves::Both if late != early => {
                    vec![
                        Launch { halves: Halves::Late, output: late, ..*launch },
                        Launch { halves: Halves::Early, output: early, ..*launch },
                    ]
                }
                Halves::Early => vec![Launch { output: early, ..*launch }],
                Halves::Both | Halves::Late => vec![Launch { output: late, ..*launch }],
            }
        };
        let launches = self.launches.iter().enumerate().flat_map(of).collect();
        Self { launches, ..self }
    }

    /// Whether every row of a dense layout is among the queries of a launch.
    pub fn covers(&self, partition: Partition) -> bool {
        let halves: &[Halves] = if partition == Partition::Contiguous { &[Halves::Early] } else { &[Halves::Late, Halves::Early] };
        halves.iter().all(|half| self.launches.iter().any(|launch| launch.halves.has(*half)))
    }

    /// Whether results begin with what the first launches store.
    pub fn begins(&self) -> bool {
        self.launches.iter().any(|launch| matches!(launch.output, Output::First | Output::Rounded))
    }

    /// Whether the last launches round.
    pub fn rounds(&self) -> bool {
        self.launches.iter().any(|launch| matches!(launch.output, Output::Last | Output::Rounded))
    }

    /// Without launches in which no query sees a key, by the arrays of a batch of `sequences`, if their lengths are known.
    pub fn without_idle(mut self, arrays: Option<&[u32]>, sequences: u64) -> Self {
        let Some(arrays) = arrays else { return self };
        let ends = 2 * sequences + 1;
        self.launches.retain(|launch| {
            let [first, last] = launch.halves.sequences(sequences).map(|sequence| (launch.set * 4 * ends + sequence) as usize);
            arrays[first] != arrays[last]
        });
        self
    }

    /// Whether the pass reads keys of a rank.
    pub fn reads(&self, owner: Rank) -> bool {
        self.launches.iter().any(|launch| launch.owner.is_none_or(|of| of == owner))
    }
}

/// Whose keys a rank reads in a step.
pub(super) fn owner_of(share: Share, step: u32) -> Rank {
    rank_at(share, share.rank.index() + share.world.get() - step)
}

/// Who reads a rank's keys in a step, the ranks after it in turn.
pub(super) fn reader_of(share: Share, step: u32) -> Rank {
    rank_at(share, share.rank.index() + step)
}

fn rank_at(share: Share, index: u32) -> Rank {
    Rank::new(index % share.world.get(), share.world).unwrap_or(Rank::ZERO)
}

/// Which of a rank's queries may see keys of an owner's chunk, and of those after it that lie with it, by the mask alone.
fn seeing(config: &ContextParallelConfig, share: Share, owner: Rank, of: Half) -> Option<Halves> {
    let sees = |half| {
        let queries = config.partition.chunk(share.rank, share.world, half)?;
        let keys = config.partition.chunk(owner, share.world, of)?;
        (!config.is_causal() || keys <= queries).then_some(())
    };
    match (sees(Half::Late), sees(Half::Early)) {
        (Some(()), Some(())) => Some(Halves::Both),
        (Some(()), None) => Some(Halves::Late),
        (None, Some(())) => Some(Halves::Early),
        (None, None) => None,
    }
}

impl Launch {
    /// What it computes of a rank's packed attention, with `keys` rows of keys.
    pub fn config(&self, whole: &ContextParallelConfig, packed: AttentionConfig, of: StepKeys, keys: u64) -> AttentionConfig {
        let [first, last] = self.halves.sequences(packed.batches);
        let windowed = whole.window() != Window::default();
        let masked = self.masked && whole.is_causal();
        AttentionConfig {
            batches: last - first,
            keys,
            mask: if masked { Mask::CausalBottomRight } else { Mask::Full },
            window: whole.window(),
            diagonals: windowed && of != StepKeys::Owners,
            output: self.output,
            ..packed
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;
    use crate::comm::WorldSize;

    fn config(partition: Partition, mask: Mask, window: Window) -> ContextParallelConfig {
        let attention = AttentionConfig { mask, window, ..AttentionConfig::default() };
        ContextParallelConfig { partition, ..ContextParallelConfig::new(attention) }
    }

    fn parts() -> impl Iterator<Item = Share> {
        let partitions = [Partition::Zigzag, Partition::Contiguous];
        let worlds = partitions.into_iter().flat_map(|partition| (1..9).filter_map(WorldSize::new).map(move |world| (partition, world)));
        worlds.flat_map(|(partition, world)| world.ranks().map(move |rank| Share { partition, rank, world }))
    }

    /// In each step every rank reads from another one, and is read by another one.
    #[test]
    fn steps_are_permutations() {
        for share in parts() {
            for step in 0..share.world.get() {
                let owner = owner_of(share, step);
                assert_eq!(reader_of(Share { rank: owner, ..share }, step), share.rank);
            }
            let owners: std::collections::BTreeSet<_> = (0..share.world.get()).map(|step| owner_of(share, step)).collect();
            assert_eq!(owners.len(), share.world.get() as usize);
        }
    }

    /// Every half sees each owner's keys in one launch, and none twice.
    #[test]
    fn every_pair_of_chunks_is_seen_once() {
        for share in parts() {
            for mask in [Mask::Full, Mask::CausalBottomRight] {
                let config = config(share.partition, mask, Window { left: Some(3), right: None });
                let mut seen = BTreeMap::new();
                for launch in Program::by_steps(&config, share).backward().launches {
                    let chunks = u64::from(share.partition.chunks_of_rank());
                    let of = if launch.set % chunks + 1 == chunks { Half::Early } else { Half::Late };
                    let keys = share.partition.chunk(launch.owner.unwrap(), share.world, of).unwrap();
                    let half = if launch.halves == Halves::Early { Half::Early } else { Half::Late };
                    let queries = share.partition.chunk(share.rank, share.world, half).unwrap();
                    assert_eq!(launch.set / chunks, u64::from(launch.owner.unwrap().index()));
                    *seen.entry((queries, keys)).or_insert(0) += 1;
                }
                let chunks = share.partition.chunks(share.world);
                let own = [Half::Early, Half::Late].into_iter().filter_map(|half| share.partition.chunk(share.rank, share.world, half));
                for (queries, keys) in own.flat_map(|queries| (0..chunks).map(move |keys| (queries, keys))) {
                    let expected = (mask == Mask::Full || keys <= queries).then_some(&1);
                    assert_eq!(seen.get(&(queries, keys)), expected, "{share:?} {mask:?}: chunk {queries} sees {keys}");
                }
            }
        }
    }

    /// Every half stores its first result and rounds its last one, once, and in the order of steps; only ends are cut off from the other half.
    #[test]
    fn every_half_begins_and_ends_once() {
        for share in parts() {
            for (mask, begins) in [(Mask::Full, true), (Mask::CausalBottomRight, true), (Mask::CausalBottomRight, false)] {
                let plain = Program::by_steps(&config(share.partition, mask, Window::default()), share);
                let ended = plain.clone().with_ends(begins);
                assert!(ended.covers(share.partition) && ended.rounds());
                let has_late = share.partition.chunks_of_rank() == 2;
                for half in [Halves::Early, Halves::Late].into_iter().take(if has_late { 2 } else { 1 }) {
                    let steps = |program: &Program| {
                        let of_half = program.launches.iter().filter(|launch| launch.halves.has(half));
                        of_half.map(|launch| (launch.step, launch.output)).collect::<Vec<_>>()
                    };
                    let (before, found) = (steps(&plain), steps(&ended));
                    let last = found.len() - 1;
                    for (at, (step, output)) in found.iter().enumerate() {
                        let expected = match (begins && at == 0, at == last) {
                            (true, true) => Output::Rounded,
                            (true, false) => Output::First,
                            (false, true) => Output::Last,
                            (false, false) => Output::Merged,
                        };
                        assert_eq!((*step, *output), (before[at].0, expected), "{share:?} {mask:?} {half:?}");
                    }
                    assert_eq!(before.len(), found.len());
                }
                assert!(ended.launches.len() <= plain.launches.len() + 2);
            }
        }
    }

    /// Without a window an owner's keys are one launch, which has the mask if they are the rank's own.
    #[test]
    fn a_step_is_one_launch_without_a_window() {
        for share in parts() {
            let program = Program::by_steps(&config(share.partition, Mask::CausalTopLeft, Window::default()), share);
            for step in 0..share.world.get() {
                let of_step: Vec<_> = program.launches.iter().filter(|launch| launch.step == step).collect();
                let (owner, me) = (owner_of(share, step), share.rank);
                let expected = match share.partition {
                    Partition::Contiguous => (owner <= me).then_some(Halves::Early),
                    Partition::Zigzag => Some(if owner <= me { Halves::Both } else { Halves::Late }),
                };
                assert_eq!(of_step.iter().map(|launch| launch.halves).collect::<Vec<_>>(), Vec::from_iter(expected));
                assert!(of_step.iter().all(|launch| launch.masked == (owner == me)));
            }
        }
    }
}
