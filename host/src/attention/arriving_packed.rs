//! Packed sequences of a rank, whose keys arrive while the kernel runs, bound to the forward kernel.

use std::marker::PhantomData;
use std::sync::Arc;

use oxtile_kernels::attention::{
    ArrivingPacked, ArrivingPackedArgument, AttentionForward, AttentionForwardArgs, ChunksArgument, Heads, KeyMapsArgument, Policy,
    RoundedArgument, SequencesArgument, WarpgroupRoles,
};
use oxtile_tile::arch::{Columns, MatrixColumns};
use oxtile_tile::arrivals::WaitsArgument;
use oxtile_tile::launch::{DeviceView, Kernel};
use oxtile_tile::register_tile::{RegisterElement, StoredElement};

use super::arriving::{ArrivingElement, ArrivingPlaces, ArrivingTensors, Binding, Waiting};
use crate::runtime::{Buffer, Error, Loaded, Result};
use crate::tensor::{TensorMap, TensorMapMut, Uploads};

/// Where the sequences lie that ranks share, and by which flags the keys of other ranks arrive.
#[derive(Clone, Copy)]
pub(crate) struct ArrivingSequences<'a> {
    /// Late chunks of the rank's queries, then early ones, and all keys in the order of the sequences: ends of queries and of keys, and their offsets.
    pub arrays: [DeviceView<'a, u32>; 4],
    /// Sequences.
    pub batches: u64,
    /// Rows of a rank's queries and of its keys.
    pub rows: [u64; 2],
    pub ranks: u64,
    /// The one that has the queries.
    pub rank: u64,
    /// Key heads of a section.
    pub section: u32,
    /// A flag for each section and chunk.
    pub flags: DeviceView<'a, u32>,
}

impl ArrivingSequences<'_> {
    /// The arrays, for so many rows of keys.
    pub(super) fn sequences(&self, key_rows: u64) -> SequencesArgument<'_> {
        let [query_ends, key_ends, query_offsets, key_offsets] = self.arrays;
        let [query_rows, key_rows] = [self.rows[0], key_rows].map(|rows| rows as u32);
        SequencesArgument { query_ends, key_ends, query_offsets, key_offsets, diagonals: None, query_rows, key_rows, padded: false }
    }

    /// Where the chunks lie.
    pub(super) fn chunks(&self) -> ChunksArgument<'_> {
        let [batches, world, rank] = [self.batches, self.ranks, self.rank].map(|count| count as u32);
        ChunksArgument { sequences: self.sequences(self.rows[1]), batches, world, rank }
    }
}

pub(super) fn bind<'a, T, const D: usize, const V: usize, const KEYS: usize, G, P, const CAUSAL: bool>(
    kernel: Arc<Loaded<AttentionForward<T, D, V, KEYS, G, P>>>,
    Binding { stream, config, tensors }: Binding<'_, 'a, T>,
) -> Result<Waiting<'a>>
where
    T: ArrivingElement + RegisterElement + StoredElement,
    G: WarpgroupRoles,
    P: Policy<Of<T, D, V, KEYS> = ArrivingPacked<T, D, V, KEYS, CAUSAL>>,
    Columns<D>: MatrixColumns,
    Columns<V>: MatrixColumns,
    Columns<KEYS>: MatrixColumns,
    AttentionForward<T, D, V, KEYS, G, P>: Kernel,
{
    let ArrivingTensors { q, own: [own_k, own_v], gathered: [k, v], out, mut log_sum_exp, places, .. } = tensors;
    let ArrivingPlaces::Sequences(places) = places else {
        return Err(Error::Invalid { what: "ContextParallel, fused", why: "a kernel of packed sequences has chunks of one".to_owned() });
    };
    let mut uploads = Uploads::default();
    let map_rows = |tensor: &crate::tensor::Heads<'a, T>| config.sequence_rows(tensor.layout());
    let own_maps = (
        TensorMap::with(&mut uploads, stream, own_k.view(), map_rows(&own_k))?,
        TensorMap::with(&mut uploads, stream, own_v.view(), map_rows(&own_v))?,
    );
    let gathered_maps =
        (TensorMap::with(&mut uploads, stream, k.view(), map_rows(&k))?, TensorMap::with(&mut uploads, stream, v.view(), map_rows(&v))?);
    let q = TensorMap::with(&mut uploads, stream, q.view(), map_rows(&q))?;
    let of_out = config.sequence_rows(out.layout());
    let mut out = TensorMapMut::with(&mut uploads, stream, out.into_view(), of_out)?;
    uploads.copy(stream)?;
    let mut counter = Buffer::<u32>::zeros(stream, 1)?;
    let [batches, heads, group] = [config.batches, config.heads, config.group()].map(|count| count as u32);
    let heads = Heads { batches, heads, group, step: 0 };
    let (section_keys, scale) = (config.section_keys(size_of::<T>() as u64), config.scale_log2());
    Ok(Box::new(move |stream, waits| {
        let WaitsArgument { lines, first, patience } = waits;
        let problem = ArrivingPackedArgument {
            q: q.view(),
            own: KeyMapsArgument { k: own_maps.0.view(), v: own_maps.1.view() },
            gathered: KeyMapsArgument { k: gathered_maps.0.view(), v: gathered_maps.1.view() },
            target: RoundedArgument { out: out.view_mut(), log_sum_exp: log_sum_exp.reborrow() },
            chunks: places.chunks(),
            heads,
            section: places.section,
            section_keys,
            flags: places.flags,
            waits: WaitsArgument { lines, first, patience },
            counter: counter.view_mut(),
            scale,
        };
        kernel.launch(stream, AttentionForwardArgs { problem, marker: PhantomData })
    }))
}
