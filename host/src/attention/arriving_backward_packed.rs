//! Packed sequences of a rank, whose keys arrive while the kernel runs, bound to the kernels of the backward pass.

use std::sync::Arc;

use oxtile_kernels::attention::{
    ArrivingChunksArgument, AttentionBackwardArrivingPacked as Main, AttentionBackwardArrivingPackedArgs as MainArgs,
    AttentionBackwardBlocks as Arrange, AttentionBackwardBlocksArgs as ArrangeArgs, AttentionBackwardConvertGeneral as Convert,
    AttentionBackwardConvertGeneralArgs as ConvertArgs, AttentionBackwardPadding as Pad, AttentionBackwardPaddingArgs as PadArgs,
    AttentionBackwardReduceChunks as Reduce, AttentionBackwardReduceChunksArgs as ReduceArgs, Heads as HeadCounts, KeyGradientsArgument,
    KeyHeads, KeyOrderArgument, QueryBlocks, QueryStatisticsArgument, QueryTargetArgument, RANK_CHUNKS, SlotsArgument, WARPGROUP_KEYS,
};
use oxtile_tile::arch::{Columns, MatrixColumns};
use oxtile_tile::arrivals::WaitsArgument;
use oxtile_tile::launch::{DeviceViewMut, Kernel};
use oxtile_tile::num::Float;
use oxtile_tile::register_tile::{RegisterElement, StoredElement};

use super::arriving::ArrivingPlaces;
use super::arriving_backward::{Add, ArrivingBackwardTensors, ArrivingGradients, Binding, BoundArriving, Multiply, SlotPlaces};
use super::backward_blocks::{BlockArguments, Blocks, map_mut};
use super::backward_deltas::{DeltaKernel, DeltaSource, Deltas, ResultRows};
use super::config::{AttentionConfig, Mask};
use super::table::Load;
use crate::runtime::{Device, Error, Loaded, Result, Runtime};
use crate::tensor::{Strided, TensorMap, TensorMapMut, Uploads};

/// The kernels of a pass, in the order of their launches.
pub(super) struct Kernels<T: ArrivingGradients, const D: usize, const QUERIES: usize, const SPAN: usize>
where
    T: RegisterElement + StoredElement,
    Columns<D>: MatrixColumns,
    Columns<QUERIES>: MatrixColumns,
    Columns<SPAN>: MatrixColumns,
{
    deltas: DeltaKernel<T>,
    arrange: Loaded<Arrange>,
    main: Loaded<Main<T, D, QUERIES, SPAN>>,
    pad: Loaded<Pad<T, D>>,
    convert: Loaded<Convert<T, D, QUERIES, SPAN>>,
    reduce: Loaded<Reduce<T, D>>,
}

impl<T, const D: usize, const QUERIES: usize, const SPAN: usize> Load for Kernels<T, D, QUERIES, SPAN>
where
    T: ArrivingGradients + RegisterElement + StoredElement,
    Columns<D>: MatrixColumns,
    Columns<QUERIES>: MatrixColumns,
    Columns<SPAN>: MatrixColumns,
    Main<T, D, QUERIES, SPAN>: Kernel,
    Pad<T, D>: Kernel,
    Convert<T, D, QUERIES, SPAN>: Kernel,
    Reduce<T, D>: Kernel,
{
    fn load(runtime: &Runtime) -> Result<Self> {
        Ok(Self {
            deltas: T::load_deltas(runtime)?,
            arrange: runtime.load()?,
            main: runtime.load()?,
            pad: runtime.load()?,
            convert: runtime.load()?,
            reduce: runtime.load()?,
        })
    }

    fn prepare(&self, device: &Device) -> Result<()> {
        let Self { arrange, main, pad, convert, reduce, .. } = self;
        T::prepare_deltas(device)?;
        arrange.prepare(device)?;
        main.prepare(device)?;
        pad.prepare(device)?;
        convert.prepare(device)?;
        reduce.prepare(device)
    }
}

/// Binds tensors. What a slot has is [`Chunks::slot_tiles`](oxtile_kernels::attention::Chunks::slot_tiles) of each key head.
pub(super) fn bind<'a, T, const D: usize, const QUERIES: usize, const SPAN: usize>(
    kernels: Arc<Kernels<T, D, QUERIES, SPAN>>,
    Binding { stream, config, tensors }: Binding<'_, 'a, T>,
) -> Result<BoundArriving<'a>>
where
    T: ArrivingGradients + RegisterElement + StoredElement + Float,
    Columns<D>: MatrixColumns,
    Columns<QUERIES>: MatrixColumns,
    Columns<SPAN>: MatrixColumns,
    Main<T, D, QUERIES, SPAN>: Kernel,
    Pad<T, D>: Kernel,
    Convert<T, D, QUERIES, SPAN>: Kernel,
    Reduce<T, D>: Kernel,
{
    let ArrivingBackwardTensors { own: [q, own_k, own_v], gathered: [k, v], results, log_sum_exp, gradients, places, slots, .. } = tensors;
    let ArrivingPlaces::Sequences(places) = places else {
        return Err(Error::Invalid { what: "ContextParallel, fused", why: "kernels of packed sequences have chunks of one".to_owned() });
    };
    let [_, rows, heads, _] = q.shape();
    let key_heads = own_k.shape()[2];
    let [out, grad_out] = results;
    let of_rank = AttentionConfig { queries: rows, keys: places.rows[1], ..config };
    let deltas = DeltaSource::Of(ResultRows::new(&of_rank, out, grad_out)?);
    let mut deltas = Deltas::new(stream, &kernels.deltas, deltas, log_sum_exp.len())?;
    let mut uploads = Uploads::default();
    let layout = |tensor: Strided<4>| config.sequence_rows(tensor);
    let pieces = u64::from(RANK_CHUNKS) * config.batches;
    let counts = [heads, QueryBlocks::of(rows, pieces, QUERIES as u64)];
    let mut blocks = Blocks::<_, D, QUERIES, 5>::new(&mut uploads, stream, [q, grad_out, k, v], None, layout, counts, None)?;
    let own_k = TensorMap::with(&mut uploads, stream, own_k.view(), layout(own_k.layout()))?;
    let own_v = TensorMap::with(&mut uploads, stream, own_v.view(), layout(own_v.layout()))?;
    let [grad_q, grad_k, grad_v] = gradients;
    let (of_grad, view) = (layout(grad_q.layout()), grad_q.into_view());
    let (access, len) = (view.access("grad_q"), view.len());
    // SAFETY: no kernel takes both views, and they borrow the gradient as long.
    let [padding, valid] = [(); 2].map(|()| unsafe { DeviceViewMut::from_raw(access.address, len, access.owner) });
    let mut padding: TensorMapMut<'_, T, WARPGROUP_KEYS, D, _, 5> = TensorMapMut::with(&mut uploads, stream, padding, of_grad)?;
    let mut grad_q: TensorMapMut<'_, T, QUERIES, D, _, 5> = TensorMapMut::with(&mut uploads, stream, valid, of_grad)?;
    let (mut grad_k, mut grad_v) = (map_mut(&mut uploads, stream, grad_k, layout)?, map_mut(&mut uploads, stream, grad_v, layout)?);
    uploads.copy(stream)?;
    let (is_causal, scale, scale_log2) = (config.mask != Mask::Full, config.scale() as f32, config.scale_log2());
    let [section_keys, size] = [config.cached_keys(size_of::<T>() as u64), D as u64].map(|size| size as u32);
    let [batches, pieces, heads, key_heads] = [config.batches, pieces, heads, key_heads].map(|count| count as u32);
    let group = heads / key_heads;
    let (all_heads, tile_heads) =
        (HeadCounts { batches: pieces, heads, group, step: 0 }, KeyHeads { batches, heads: key_heads, group, splits: 1, step: 0 });
    let (ranks, SlotPlaces { step, .. }) = (places.ranks as u32, slots);
    let adding = Arc::clone(&kernels);
    let multiply: Multiply<'a> = Box::new(move |stream, waits, values, _, given| {
        let Kernels { arrange, main, pad, convert, .. } = &*kernels;
        let queries = QueryStatisticsArgument { log_sum_exp, deltas: deltas.run(stream)?, rows: 0 };
        // Offsets of keys are those of all ranks.
        let all_keys = places.rows[1] * places.ranks;
        let statistics = blocks.statistics();
        arrange.launch(stream, ArrangeArgs { queries, statistics, sequences: places.sequences(all_keys), heads: all_heads })?;
        let WaitsArgument { lines, first, patience } = waits;
        let BlockArguments { tensors, sums, counter, .. } = blocks.arguments();
        let problem = ArrivingChunksArgument {
            tensors,
            own_k: own_k.view(),
            own_v: own_v.view(),
            sums,
            slots: SlotsArgument { values, step, ranks },
            chunks: places.chunks(),
            heads: tile_heads,
            is_causal,
            section: places.section,
            flags: places.flags,
            waits: WaitsArgument { lines, first, patience },
            order: KeyOrderArgument { counter, section: section_keys, ordered: true },
            scale: scale_log2,
        };
        main.launch(stream, MainArgs { problem })?;
        given()?;
        pad.launch(stream, PadArgs { gradient: padding.view_mut(), chunks: places.chunks(), heads })?;
        let BlockArguments { sums, .. } = blocks.arguments();
        let target = QueryTargetArgument { rounded: Some(grad_q.view_mut()), added: None, size, scale };
        convert.launch(stream, ConvertArgs { sums, target, sequences: places.sequences(all_keys), heads: all_heads })
    });
    let add: Add<'a> = Box::new(move |stream, slots| {
        let gradients = KeyGradientsArgument { k: grad_k.view_mut(), v: grad_v.view_mut() };
        adding.reduce.launch(stream, ReduceArgs { slots, gradients, chunks: places.chunks(), heads: key_heads, is_causal })
    });
    Ok(BoundArriving { multiply, add })
}
