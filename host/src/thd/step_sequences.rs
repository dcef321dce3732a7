//! The sequences of the attention launches of a pass.

use std::fmt;

use oxtile_kernels::attention::FAR;
use oxtile_kernels::thd as kernels;
use oxtile_kernels::thd::{Half, StepKeys, StepSequencesArgs};
use oxtile_tile::launch::{DeviceView, DeviceViewMut};

use super::share::{Packed, Share};
use crate::runtime::{Error, Loaded, Result, Runtime, Stream};

/// The sets of sequences of a pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Steps {
    /// Which keys each set has.
    pub keys: StepKeys,
    /// The rank that has the queries.
    pub share: Share,
    /// Keys that a query sees before its diagonal, aligned bottom-right in each sequence; none is no bound.
    pub left: Option<u64>,
    /// Keys that it sees after its diagonal; 0 is causal.
    pub right: Option<u64>,
}

impl Steps {
    /// How many sets there are.
    pub const fn sets(&self) -> u64 {
        match self.keys {
            StepKeys::Owners => self.share.world.get() as u64,
            StepKeys::Chunks => self.share.partition.chunks(self.share.world),
            StepKeys::Whole => 1,
        }
    }

    /// The elements of `arrays`, `[sets, 4, 2 batches + 1]`, and of `diagonals`, `[sets, 2 batches]`.
    pub const fn sizes(&self, batches: u64) -> [u64; 2] {
        [4 * self.sets() * (2 * batches + 1), 2 * self.sets() * batches]
    }

    fn checked(&self) -> Result<kernels::Steps> {
        let bound = |bound: Option<u64>| bound.and_then(|keys| i32::try_from(keys).ok()).map_or(FAR, |keys| keys.min(FAR));
        let bounds = kernels::Bounds { left: bound(self.left), right: bound(self.right) };
        Ok(kernels::Steps { keys: self.keys, share: self.share.checked(WHAT)?, bounds })
    }
}

/// Makes the sequences of the attention launches of a context-parallel pass from `cu_seqlens`, by one small launch: no host waits for lengths.
///
/// Each packed sequence is there twice in a set: the queries of the rank's late chunks are the first sequences, those of its early chunks the others. A
/// set has `query_ends`, `key_ends`, `query_offsets` and `key_offsets` in `arrays`, one after the other, and its part of `diagonals`, as attention takes
/// them.
///
/// ```
/// use oxtile::comm::{Rank, WorldSize};
/// use oxtile::thd::{Packed, Partition, Share, StepKeys, StepSequences, Steps};
/// use oxtile::{Buffer, Result, Runtime};
///
/// # fn main() -> Result<()> {
/// let runtime = Runtime::checked(1)?; // or Runtime::cuda()
/// let stream = runtime.device(0)?.stream()?;
/// // Two sequences of 7 and 4 tokens, padded to 8 and 4, on two ranks.
/// let (ends, offsets) = ([0, 7, 11], [0, 8, 12]);
/// let share = Share { world: WorldSize::new(2).unwrap(), rank: Rank::ZERO, partition: Partition::Zigzag };
/// let steps = Steps { keys: StepKeys::Whole, share, left: None, right: Some(0) };
///
/// let (of_ends, of_offsets) = (Buffer::from_slice(&stream, &ends)?, Buffer::from_slice(&stream, &offsets)?);
/// let packed = Packed { cu_seqlens: of_ends.view(), cu_seqlens_padded: of_offsets.view() };
/// let [arrays, diagonals] = steps.sizes(2);
/// let (mut arrays, mut diagonals) = (Buffer::uninitialised(&stream, arrays)?, Buffer::uninitialised(&stream, diagonals)?);
/// StepSequences::new(&runtime)?.run(&stream, steps, packed, packed, arrays.view_mut(), diagonals.view_mut())?;
///
/// let arrays = arrays.to_vec(&stream)?;
/// assert_eq!(arrays[..5], [0, 1, 2, 4, 5], "queries: 1 and 1 in the late chunks, 2 and 1 in the early ones");
/// assert_eq!(arrays[5..10], [0, 7, 11, 13, 14], "keys: all that they see");
/// let packed = Packed { cu_seqlens: &ends[..], cu_seqlens_padded: &offsets[..] };
/// assert_eq!(StepSequences::on_host(steps, packed, packed)?, (arrays, diagonals.to_vec(&stream)?));
/// # Ok(()) }
/// ```
pub struct StepSequences(Loaded<kernels::StepSequences>);

impl StepSequences {
    /// Loads the kernel.
    ///
    /// # Errors
    /// As [`Runtime::load`].
    pub fn new(runtime: &Runtime) -> Result<Self> {
        Ok(Self(runtime.load()?))
    }

    /// Enqueues the arrays of all sets, of [`Steps::sizes`]. Allocates nothing; it may be captured, and replayed after `cu_seqlens` are written again.
    ///
    /// What `cu_seqlens` hold is not checked, which would take a wait: rows of a sequence that are in no whole chunk are cut, and sums of more than
    /// 2^32 - 1 rows stay there. [`on_host`](Self::on_host) refuses them.
    ///
    /// # Errors
    /// [`Error::Invalid`] for a rank that the world does not have, and for a world of more than 65536 ranks; as [`Loaded::launch`].
    pub fn run(
        &self,
        stream: &Stream,
        steps: Steps,
        queries: Packed<DeviceView<'_, u32>>,
        keys: Packed<DeviceView<'_, u32>>,
        arrays: DeviceViewMut<'_, u32>,
        diagonals: DeviceViewMut<'_, i32>,
    ) -> Result<()> {
        let kernels::Steps { keys: kind, share, bounds } = steps.checked()?;
        let (queries, keys) = (queries.into_argument(), keys.into_argument());
        self.0.launch(stream, StepSequencesArgs { queries, keys, arrays, diagonals, kind: kind as u32, share, bounds })
    }

    /// The same arrays, made by the host: for layouts whose lengths it knows.
    ///
    /// # Errors
    /// [`Error::Invalid`] as [`run`](Self::run), and for arrays that are no running sums, sequences whose padded rows are no multiple of the chunks or
    /// are fewer than the valid ones, and queries and keys of different numbers of sequences.
    pub fn on_host(steps: Steps, queries: Packed<&[u32]>, keys: Packed<&[u32]>) -> Result<(Vec<u32>, Vec<i32>)> {
        let (rule, chunks) = (steps.checked()?, steps.share.partition.chunks(steps.share.world));
        let (of_queries, of_keys) = (queries.rows(WHAT, chunks)?, keys.rows(WHAT, chunks)?);
        if of_queries.len() != of_keys.len() {
            let why = format!("queries of {} sequences, keys of {}: give each sequence both", of_queries.len(), of_keys.len());
            return Err(Error::Invalid { what: WHAT, why });
        }
        let sum = |sum: &mut u32, length: u32| {
            let before = *sum;
            *sum = sum.saturating_add(length);
            Some(before)
        };
        let last = |packed: Packed<&[u32]>| packed.cu_seqlens_padded.last().copied().unwrap_or(0);
        let query_rows = last(queries) / rule.share.world;
        let key_rows = last(keys) / if rule.keys == StepKeys::Whole { 1 } else { rule.share.world };
        let (mut arrays, mut diagonals) = (Vec::new(), Vec::new());
        for set in 0..rule.sets() {
            let sequences: Vec<_> = [Half::Late, Half::Early]
                .into_iter()
                .flat_map(|half| of_queries.iter().zip(&of_keys).map(move |(&queries, &keys)| (half, queries, keys)))
                .map(|(half, queries, keys)| rule.sequence(set, half, queries, keys))
                .collect();
            // A length of nothing after the last one, so that there is the sum of all.
            arrays.extend(sequences.iter().map(|sequence| sequence.queries).chain([0]).scan(0, sum));
            arrays.extend(sequences.iter().map(|sequence| sequence.keys).chain([0]).scan(0, sum));
            arrays.extend(sequences.iter().map(|sequence| sequence.query_offset).chain([query_rows]));
            arrays.extend(sequences.iter().map(|sequence| sequence.key_offset).chain([key_rows]));
            diagonals.extend(sequences.iter().map(|sequence| sequence.diagonal));
        }
        Ok((arrays, diagonals))
    }
}

impl fmt::Debug for StepSequences {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("StepSequences").finish_non_exhaustive()
    }
}

const WHAT: &str = "StepSequences";
