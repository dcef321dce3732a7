//! Where sequences lie, bound: their tensor maps, their arrays, their heads.

use oxtile_kernels::attention::{Heads, Scores, SequencesArgument};
use oxtile_tile::layout::Swizzle128;
use oxtile_tile::register_tile::RegisterElement;

use super::config::{AttentionConfig, Layout};
use super::tensors::{Inputs, Padding, Sequences};
use crate::runtime::{Result, Stream};
use crate::tensor::{SequenceRows, TensorMap, UploadedArray, Uploads};

/// A tensor of heads as rows that sequences are parts of: the layouts are told apart here and by the offsets.
pub(super) fn rows_of(config: &AttentionConfig, rows: u64, heads: u64, size: u64) -> SequenceRows {
    match config.layout {
        Layout::Bshd => SequenceRows { rows: config.batches * rows, row: heads * size, heads, head: size, size },
        Layout::Sbhd => {
            let heads = config.batches * heads;
            SequenceRows { rows, row: heads * size, heads, head: size, size }
        }
        Layout::Packed => SequenceRows { rows, row: heads * size, heads, head: size, size },
    }
}

/// Keys and values as sequences are parts of them.
pub(super) struct SequenceKeys<'a, T: RegisterElement, const KEYS: usize, const D: usize, const V: usize> {
    pub(super) k: TensorMap<'a, T, KEYS, D, Swizzle128, 5>,
    pub(super) v: TensorMap<'a, T, KEYS, V, Swizzle128, 5>,
    /// Rows of both.
    pub(super) rows: u32,
}

impl<'a, T: RegisterElement, const KEYS: usize, const D: usize, const V: usize> SequenceKeys<'a, T, KEYS, D, V> {
    /// Without keys nothing is loaded by these maps, which must be of something: the queries.
    pub(super) fn new(uploads: &mut Uploads, stream: &Stream, config: &AttentionConfig, inputs: &Inputs<'a, T>) -> Result<Self> {
        let AttentionConfig { queries, keys, heads, key_heads, head_size, .. } = *config;
        let of_keys = |size| rows_of(config, keys, key_heads, size);
        let ((k, of_k), (v, of_v)) = match of_keys(head_size).rows {
            0 => [(inputs.q, rows_of(config, queries, heads, head_size)); 2].into(),
            _ => ((inputs.k, of_keys(head_size)), (inputs.v, of_keys(config.value_size()))),
        };
        let rows = if keys == 0 { 0 } else { of_k.rows as u32 };
        let (k, v) = (TensorMap::sequences_in(uploads, stream, k, of_k)?, TensorMap::sequences_in(uploads, stream, v, of_v)?);
        Ok(Self { k, v, rows })
    }
}

/// Where the sequences lie: given, or made of a dense layout.
pub(super) enum Placement<'a> {
    /// Packed sequences.
    Given(Sequences<'a>),
    /// Ends and offsets, of queries and of keys.
    Dense([[UploadedArray; 2]; 2]),
}

impl<'a> Placement<'a> {
    pub(super) fn new(uploads: &mut Uploads, config: &AttentionConfig, given: Option<Sequences<'a>>) -> Self {
        if let Some(given) = given {
            return Self::Given(given);
        }
        let mut array = |step: u64| uploads.add_array(&(0..=config.batches).map(|batch| (batch * step) as u32).collect::<Vec<u32>>());
        let offsets = |rows: u64| if config.layout == Layout::Sbhd { 0 } else { rows };
        Self::Dense([config.queries, config.keys].map(|rows| [array(rows), array(offsets(rows))]))
    }

    /// The same, copied alone.
    pub(super) fn copied(stream: &Stream, config: &AttentionConfig, given: Option<Sequences<'a>>) -> Result<Self> {
        let mut uploads = Uploads::default();
        let placement = Self::new(&mut uploads, config, given);
        uploads.copy(stream)?;
        Ok(placement)
    }

    /// The argument of a launch on tensors with so many rows of queries and of keys.
    pub(super) fn argument(&self, [query_rows, key_rows]: [u32; 2]) -> SequencesArgument<'_> {
        match self {
            Self::Given(given) => SequencesArgument {
                query_ends: given.cu_seqlens_q,
                key_ends: given.cu_seqlens_kv,
                query_offsets: given.query_offsets(),
                key_offsets: given.key_offsets(),
                diagonals: given.diagonals,
                query_rows,
                key_rows,
                padded: given.padding == Padding::Zeroed,
            },
            Self::Dense([queries, keys]) => SequencesArgument {
                query_ends: queries[0].view(),
                key_ends: keys[0].view(),
                query_offsets: queries[1].view(),
                key_offsets: keys[1].view(),
                diagonals: None,
                query_rows,
                key_rows,
                padded: false,
            },
        }
    }
}

impl AttentionConfig {
    /// The heads of sequences, as the kernels want them.
    pub(super) fn kernel_heads(&self) -> Heads {
        let [batches, heads, group] = [self.batches, self.heads, self.group()].map(|size| size as u32);
        Heads { batches, heads, group, step: if self.layout == Layout::Sbhd { heads } else { 0 } }
    }

    /// Factor and cap of scores, as the kernels want them.
    pub(super) fn kernel_scores(&self) -> Scores {
        let (log2e, scale) = (std::f64::consts::LOG2_E, self.scale());
        let [scale, cap_limit, cap_factor] = match self.soft_cap.map(f64::from) {
            None => [scale * log2e, 0.0, 0.0],
            Some(cap) => [1.0, cap * log2e, 2.0 * log2e * scale / cap],
        }
        .map(|x| x as f32);
        Scores { scale, cap_limit, cap_factor }
    }
}
