//! The sequences of a batch, bound: where they lie, and their heads.

use oxtile_kernels::attention::{Heads, QueryStatisticsArgument, SequencesArgument};
use oxtile_tile::launch::DeviceView;

use super::config::{AttentionConfig, Layout};
use super::heads::Rows;
use super::tensors::{Inputs, Outputs, Padding, Sequences};
use crate::runtime::Result;
use crate::tensor::{UploadedArray, Uploads};

/// The sequences that tensors hold.
pub(super) struct BoundSequences<'a> {
    places: Places<'a>,
    /// Rows of the tensors of queries and of keys.
    rows: [u32; 2],
    pub(super) heads: Heads,
    /// Rows of a head of the log-sum-exp where sequences have heads of their own in it; 0 where its rows are those of the tensor.
    pub(super) log_rows: u32,
}

/// Where they lie: given, or made of a dense layout.
enum Places<'a> {
    /// Packed sequences.
    Given(Sequences<'a>),
    /// Ends and offsets, of queries and of keys.
    Dense([[UploadedArray; 2]; 2]),
}

impl<'a> BoundSequences<'a> {
    /// Those of a dense layout, `steps` rows of queries and of keys apart, or those given.
    pub(super) fn new(uploads: &mut Uploads, config: &AttentionConfig, given: Option<Sequences<'a>>, steps: [u64; 2]) -> Self {
        let AttentionConfig { layout, batches, queries, keys, heads, .. } = *config;
        let sbhd = layout == Layout::Sbhd;
        let sides = [(queries, steps[0]), (keys, steps[1])];
        let is_empty = batches == 0 && layout != Layout::Packed;
        let rows = sides.map(|(rows, step)| if is_empty { 0 } else { batches.saturating_sub(1) * step + rows } as u32);
        let mut array = |step: u64| uploads.add_array(&(0..=batches).map(|batch| (batch * step) as u32).collect::<Vec<u32>>());
        let places = given.map_or_else(|| Places::Dense(sides.map(|(rows, step)| [array(rows), array(step)])), Places::Given);
        let [batches, heads, group, step] = [batches, heads, config.group(), if sbhd { heads } else { 0 }].map(|count| count as u32);
        Self {
            places,
            rows,
            heads: Heads { batches, heads, group, step },
            log_rows: if layout == Layout::Packed { 0 } else { queries as u32 },
        }
    }

    /// Statistics of their queries, laid out as the log-sum-exp.
    pub(super) fn statistics<'s>(&self, log_sum_exp: DeviceView<'s, f32>, deltas: DeviceView<'s, f32>) -> QueryStatisticsArgument<'s> {
        QueryStatisticsArgument { log_sum_exp, deltas, rows: self.log_rows }
    }

    /// The argument of a launch.
    pub(super) fn argument(&self) -> SequencesArgument<'_> {
        let (ends, offsets, diagonals, padded) = match &self.places {
            Places::Given(given) => (
                [given.cu_seqlens_q, given.cu_seqlens_kv],
                [given.query_offsets(), given.key_offsets()],
                given.diagonals,
                given.padding == Padding::Zeroed,
            ),
            Places::Dense([queries, keys]) => ([queries[0].view(), keys[0].view()], [queries[1].view(), keys[1].view()], None, false),
        };
        let ([query_ends, key_ends], [query_offsets, key_offsets], [query_rows, key_rows]) = (ends, offsets, self.rows);
        SequencesArgument { query_ends, key_ends, query_offsets, key_offsets, diagonals, query_rows, key_rows, padded }
    }
}

/// The rows from one sequence of a dense layout to the next, of queries and of keys, in what the forward pass reads and writes.
pub(super) fn row_steps<T, O>(config: &AttentionConfig, inputs: &Inputs<'_, T>, outputs: &Outputs<'_, O>, rows: Rows) -> Result<[u64; 2]> {
    let (q, k, v, out) = (inputs.q.layout(), inputs.k.layout(), inputs.v.layout(), outputs.out.layout());
    Ok([
        config.row_step(&[("Attention, q", q, rows), ("Attention, out", out, rows)])?,
        config.row_step(&[("Attention, k", k, rows), ("Attention, v", v, rows)])?,
    ])
}
