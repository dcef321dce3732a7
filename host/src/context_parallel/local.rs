//! The attention of one rank, as packed sequences: every layout becomes one.
//!
//! | layout | rows | heads | sequences |
//! |---|---|---|---|
//! | bshd | those of all batches | as they are | the batches |
//! | sbhd | those of one batch | those of all batches | one |
//! | thd | as they are | as they are | as given |

use super::config::ContextParallelConfig;
use crate::attention::{AttentionConfig, Layout, Mask, Sink, Window};
use crate::runtime::{Error, Result};
use crate::symmetric::{Pitched, Rows};
use crate::tensor::{Heads, HeadsMut, Strided};
use crate::thd::Share;

/// What a rank computes, and whose part it is.
#[derive(Clone, Copy, Debug)]
pub(super) struct Local {
    pub share: Share,
    /// The user's, with the rows of this rank.
    pub given: AttentionConfig,
    /// The same as packed sequences: full attention without a sink, which a launch completes.
    pub packed: AttentionConfig,
    /// Tokens of all ranks: of queries and of keys.
    pub tokens: [u64; 2],
}

impl Local {
    pub fn new(config: &ContextParallelConfig, share: Share) -> Self {
        let (ranks, whole) = (u64::from(share.world.get()), config.attention);
        let given = AttentionConfig { queries: whole.queries / ranks, keys: whole.keys / ranks, ..whole };
        let AttentionConfig { batches, queries, keys, heads, key_heads, .. } = given;
        let plain = AttentionConfig {
            layout: Layout::Packed,
            mask: Mask::Full,
            window: Window::default(),
            sink: Sink::None,
            max_logit: false,
            ..given
        };
        let (packed, rows) = match whole.layout {
            Layout::Packed => (plain, 1),
            Layout::Bshd => (AttentionConfig { queries: batches * queries, keys: batches * keys, ..plain }, batches),
            // One sequence without tokens.
            Layout::Sbhd if batches == 0 => (AttentionConfig { batches: 1, queries: 0, keys: 0, ..plain }, 0),
            Layout::Sbhd => (AttentionConfig { batches: 1, heads: batches * heads, key_heads: batches * key_heads, ..plain }, 1),
        };
        Self { share, given, packed, tokens: [whole.queries, whole.keys].map(|tokens| tokens * rows) }
    }

    /// Sequences.
    pub fn sequences(&self) -> u64 {
        self.packed.batches
    }

    /// Ends of the sequences of a dense layout, among all ranks' queries and keys.
    pub fn ends(&self) -> [Vec<u32>; 2] {
        let sequences = self.sequences();
        self.tokens.map(|tokens| (0..=sequences).map(|sequence| (tokens / sequences.max(1) * sequence) as u32).collect())
    }

    /// A tensor of the user's as rows of heads.
    ///
    /// # Errors
    /// [`Error::Length`]; [`Error::Invalid`] for another shape, or batches with gaps between them.
    pub fn rows<'a, T>(&self, what: &'static str, tensor: Heads<'a, T>, whole: Strided<4>) -> Result<Heads<'a, T>> {
        let tensor = tensor.shaped(what, whole)?;
        let (shape, strides) = self.merged(what, &tensor)?;
        Heads::strided(tensor.view(), shape, strides)
    }

    /// The same of one that is written.
    pub fn rows_mut<'a, T>(&self, what: &'static str, tensor: HeadsMut<'a, T>, whole: Strided<4>) -> Result<HeadsMut<'a, T>> {
        let mut tensor = tensor.shaped(what, whole)?;
        let strided = tensor.layout();
        let (shape, strides) = self.merged_layout(what, strided)?;
        let _ = tensor.reborrow();
        HeadsMut::strided(tensor.into_view(), shape, strides)
    }

    fn merged<T>(&self, what: &'static str, tensor: &Heads<'_, T>) -> Result<([u64; 4], [u64; 3])> {
        self.merged_layout(what, tensor.layout())
    }

    /// Shape and strides with batches as rows or as heads.
    fn merged_layout(&self, what: &'static str, tensor: Strided<4>) -> Result<([u64; 4], [u64; 3])> {
        let Strided { shape: [batches, rows, heads, size], strides: [batch, row, head, _] } = tensor;
        let (shape, step, of) = match self.given.layout {
            Layout::Packed => return Ok((tensor.shape, [batch, row, head])),
            Layout::Bshd => ([1, batches * rows, heads, size], rows * row, "rows"),
            Layout::Sbhd => ([1, rows, batches * heads, size], heads * head, "heads"),
        };
        if batches > 1 && batch != step && !shape.contains(&0) {
            let why = format!(
                "batches are {batch} elements apart, and their {of} take {step}: ranks need batches without gaps between them; copy the tensor"
            );
            return Err(Error::Invalid { what, why });
        }
        Ok((shape, [0, row, head]))
    }

    /// Where the log-sum-exp of packed rows, `[heads, rows]`, lies in the user's, `[batches, heads, rows]`.
    pub fn log_sum_exp(&self) -> Vec<Rows> {
        let AttentionConfig { batches, queries, heads, .. } = self.given;
        if self.given.layout != Layout::Bshd {
            let all = self.packed.heads * self.packed.queries;
            let place = Pitched { start: 0, pitch: all };
            return vec![Rows { count: 1, width: all, from: place, to: place }];
        }
        let of_batch = |batch: u64| {
            let from = Pitched { start: batch * queries, pitch: batches * queries };
            Rows { count: heads, width: queries, from, to: Pitched { start: batch * heads * queries, pitch: queries } }
        };
        (0..batches).map(of_batch).collect()
    }

    /// Rows of heads without gaps, and where they lie in a tensor: `from` is without gaps.
    pub fn gapless(tensor: Strided<4>) -> Vec<Rows> {
        let Strided { shape: [_, rows, heads, size], strides: [_, row, head, _] } = tensor;
        let width = heads * size;
        if head == size || heads <= 1 {
            let (from, to) = (Pitched { start: 0, pitch: width }, Pitched { start: 0, pitch: row });
            return vec![Rows { count: rows, width, from, to }];
        }
        let of_head = |at: u64| {
            let from = Pitched { start: at * size, pitch: width };
            Rows { count: rows, width: size, from, to: Pitched { start: at * head, pitch: row } }
        };
        (0..heads).map(of_head).collect()
    }

    /// Whether rows of heads have no gaps.
    pub fn is_gapless(tensor: Strided<4>) -> bool {
        let Strided { shape: [_, rows, heads, size], strides: [_, row, head, _] } = tensor;
        (heads <= 1 || head == size) && (rows <= 1 || row == heads * size)
    }
}
