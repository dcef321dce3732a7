//! The sequences of a batch, bound: where they lie, and their heads.

use oxtile_kernels::attention::{Heads, QueryStatisticsArgument, SequencesArgument};
use oxtile_tile::launch::DeviceView;

use super::config::{AttentionConfig, Layout};
use super::tensors::{Padding, Sequences};
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
    /// Those of a dense layout, or those given.
    pub(super) fn new(uploads: &mut Uploads, config: &AttentionConfig, given: Option<Sequences<'a>>) -> Self {
        let AttentionConfig { layout, batches, queries, keys, heads, .. } = *config;
        let sbhd = layout == Layout::Sbhd;
        let mut array = |step: u64| uploads.add_array(&(0..=batches).map(|batch| (batch * step) as u32).collect::<Vec<u32>>());
        let places = given
            .map_or_else(|| Places::Dense([queries, keys].map(|rows| [array(rows), array(if sbhd { 0 } else { rows })])), Places::Given);
        let [batches, heads, group, step] = [batches, heads, config.group(), if sbhd { heads } else { 0 }].map(|count| count as u32);
        Self {
            places,
            rows: if sbhd { [queries, keys] } else { config.rows() }.map(|rows| rows as u32),
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
