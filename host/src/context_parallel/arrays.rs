//! What the queries of each launch see, as arrays on the device.

use oxtile_kernels::attention::SequencesArgument;
use oxtile_tile::launch::DeviceView;

use super::config::ContextParallelConfig;
use super::launches::{Halves, Launch};
use super::local::Local;
use super::memory::Scratch;
use crate::attention::{AttentionConfig, Padding, Sequences};
use crate::runtime::{Buffer, Result, Stream};
use crate::thd::{Packed, StepKeys, StepSequences, Steps};

/// The arrays of all sets of a pass.
pub(super) struct Arrays {
    steps: Steps,
    sequences: u64,
    arrays: Scratch<u32>,
    diagonals: Scratch<i32>,
    /// Makes them from lengths that are on the device.
    kernel: Option<StepSequences>,
}

/// Which sequences a set has, and how it counts.
fn steps(config: &ContextParallelConfig, local: &Local, keys: StepKeys) -> Steps {
    let window = config.window();
    let right = if config.is_causal() { Some(0) } else { window.right };
    Steps { keys, share: local.share, left: window.left, right }
}

impl Arrays {
    /// Those of a layout whose lengths are known.
    pub fn on_host(config: &ContextParallelConfig, local: &Local, keys: StepKeys) -> Result<Option<(Vec<u32>, Vec<i32>)>> {
        if config.is_packed() {
            return Ok(None);
        }
        let [of_queries, of_keys] = local.ends();
        let [of_queries, of_keys] = [&of_queries[..], &of_keys[..]].map(|ends| Packed { cu_seqlens: ends, cu_seqlens_padded: ends });
        StepSequences::on_host(steps(config, local, keys), of_queries, of_keys).map(Some)
    }

    /// Takes memory, and writes what is known.
    pub fn new(stream: &Stream, config: &ContextParallelConfig, local: &Local, keys: StepKeys) -> Result<Self> {
        let (steps, sequences) = (steps(config, local, keys), local.sequences());
        let [of_arrays, of_diagonals] = steps.sizes(sequences);
        let (arrays, diagonals, kernel) = match Self::on_host(config, local, keys)? {
            Some((arrays, diagonals)) => (Buffer::from_slice(stream, &arrays)?, Buffer::from_slice(stream, &diagonals)?, None),
            None => {
                let kernel = StepSequences::new(&stream.device().runtime())?;
                // Until a batch is given there are no sequences.
                (Buffer::zeros(stream, of_arrays)?, Buffer::zeros(stream, of_diagonals)?, Some(kernel))
            }
        };
        Ok(Self { steps, sequences, arrays: Scratch::of(arrays), diagonals: Scratch::of(diagonals), kernel })
    }

    /// Makes them for a batch, in stream order.
    pub fn update(&self, stream: &Stream, queries: Packed<DeviceView<'_, u32>>, keys: Packed<DeviceView<'_, u32>>) -> Result<()> {
        match &self.kernel {
            Some(kernel) => kernel.run(stream, self.steps, queries, keys, self.arrays.lend(), self.diagonals.lend()),
            None => Ok(()),
        }
    }

    /// One of the four arrays of a set: elements of a launch's sequences, and one more.
    fn array(&self, set: u64, array: u64, [first, last]: [u64; 2]) -> DeviceView<'_, u32> {
        let begin = (4 * set + array) * (2 * self.sequences + 1);
        self.arrays.part(begin + first..begin + last + 1)
    }

    /// Those of a launch.
    pub fn sequences(&self, launch: &Launch, config: &AttentionConfig) -> Sequences<'_> {
        let range @ [first, last] = launch.halves.sequences(self.sequences);
        let array = |number| self.array(launch.set, number, range);
        let diagonals = 2 * launch.set * self.sequences;
        Sequences {
            cu_seqlens_q_padded: Some(array(2)),
            cu_seqlens_kv_padded: Some(array(3)),
            diagonals: config.diagonals.then(|| self.diagonals.part(diagonals + first..diagonals + last)),
            // Both halves share the rows of a sequence, in no order.
            padding: Padding::Kept,
            ..Sequences::new(array(0), array(1))
        }
    }

    /// The first set, of both halves: ends of queries and of keys, and their offsets.
    pub fn of_both_halves(&self) -> [DeviceView<'_, u32>; 4] {
        [0, 1, 2, 3].map(|number| self.array(0, number, Halves::Both.sequences(self.sequences)))
    }

    /// The same as a kernel's argument: for so many rows of queries and of keys.
    pub fn argument(&self, query_rows: u32, key_rows: u32) -> SequencesArgument<'_> {
        let [query_ends, key_ends, query_offsets, key_offsets] = self.of_both_halves();
        SequencesArgument { query_ends, key_ends, query_offsets, key_offsets, diagonals: None, query_rows, key_rows, padded: false }
    }

    /// Device memory.
    pub fn bytes(&self) -> u64 {
        self.arrays.bytes() + self.diagonals.bytes()
    }
}
