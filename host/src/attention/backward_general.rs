//! The kernels of sequences and options on Hopper, bound for the backward pass.

use std::sync::Arc;

use oxtile_kernels::attention::{
    AttentionBackwardBlocks as Blocks, AttentionBackwardBlocksArgs as BlocksArgs, AttentionBackwardConvertGeneral as Convert,
    AttentionBackwardConvertGeneralArgs as ConvertArgs, AttentionBackwardGeneral as Main, AttentionBackwardGeneralArgs as MainArgs,
    AttentionBackwardSink as Sink, KeyHeads, KeySumsArgument, QueryBlocks, QueryTargetArgument, SequenceKeysArgument,
};
use oxtile_tile::arch::{Columns, MatrixColumns};
use oxtile_tile::launch::Kernel;
use oxtile_tile::layout::Swizzle128;
use oxtile_tile::register_tile::{RegisterElement, StoredElement};

use super::backward::{BackwardElement, Binding, Order};
use super::backward_blocks::{BackwardMaps, KeyGradientMaps, QueryBlockMemory};
use super::backward_deltas::Deltas;
use super::config::AttentionConfig;
use super::sequences::BoundSequences;
use super::sink::differentiate_sink;
use crate::runtime::{Bound, Loaded, Result};
use crate::tensor::{TensorMapMut, Uploads};

/// The main kernel, those before and after it, and that of the sink's gradient.
type Kernels<T, const D: usize, const QUERIES: usize, const SPAN: usize, const CAPPED: bool> =
    (Loaded<Main<T, D, QUERIES, SPAN, CAPPED>>, Loaded<Blocks>, Loaded<Convert<T, D, QUERIES, SPAN>>, Loaded<Sink>);

/// Binds tensors.
pub(super) fn bind<'a, T, const D: usize, const QUERIES: usize, const SPAN: usize, const CAPPED: bool>(
    kernels: Arc<Kernels<T, D, QUERIES, SPAN, CAPPED>>,
    binding: Binding<'_, 'a, T>,
) -> Result<Bound<'a>>
where
    T: BackwardElement + RegisterElement + StoredElement,
    Columns<D>: MatrixColumns,
    Columns<QUERIES>: MatrixColumns,
    Columns<SPAN>: MatrixColumns,
    Main<T, D, QUERIES, SPAN, CAPPED>: Kernel,
    Convert<T, D, QUERIES, SPAN>: Kernel,
{
    let Binding { stream, config, order, inputs, delta_kernel, deltas, log_sum_exp, grad_out, mut gradients, .. } = binding;
    let mut deltas = Deltas::new(stream, delta_kernel, deltas, log_sum_exp.len())?;
    let AttentionConfig { batches, heads, key_heads, head_size, .. } = config;
    let (value_size, sink, mut grad_sink) = (config.value_size(), inputs.sink, gradients.sink.take());
    let [of_q, of_out] = [head_size, value_size].map(|size| config.sequence_queries(size));
    let [of_k, of_v] = [head_size, value_size].map(|size| config.sequence_keys(size));
    let mut uploads = Uploads::default();
    let tensors = [inputs.q, grad_out, inputs.k, inputs.v];
    let maps = BackwardMaps::<_, D, QUERIES, 5>::new(&mut uploads, stream, tensors, [of_q, of_out, of_k, of_v])?;
    let (rounded, mut added) = gradients.split();
    let (mut grad_q, mut key_gradients) = (None, None);
    if let Some([q, k, v]) = rounded {
        grad_q = Some(TensorMapMut::<_, QUERIES, D, Swizzle128, 5>::with(&mut uploads, stream, q, of_q)?);
        key_gradients = Some(KeyGradientMaps::new(&mut uploads, stream, [k, v], [of_k, of_v])?);
    }
    let sequences = BoundSequences::new(&mut uploads, &config, inputs.sequences);
    uploads.copy(stream)?;
    let blocks = QueryBlocks::of(config.rows()[0], batches, QUERIES as u64);
    let mut memory = QueryBlockMemory::new(stream, heads, blocks, QUERIES, D)?;
    let (ordered, scale, section) =
        (order == Order::Deterministic, config.scale() as f32, config.cached_keys(size_of::<T>() as u64) as u32);
    let [size, value_size, key_heads] = [head_size, value_size, key_heads].map(|size| size as u32);
    let heads = sequences.heads;
    let step = if heads.step == 0 { 0 } else { key_heads };
    let tile_heads = KeyHeads { batches: heads.batches, heads: key_heads, group: heads.group, splits: 1, step };
    Ok(Bound::new(move |stream| {
        let ((main, before, convert, of_sink), deltas) = (&*kernels, deltas.run(stream)?);
        let (queries, statistics) = (sequences.statistics(log_sum_exp, deltas), memory.statistics());
        before.launch(stream, BlocksArgs { queries, statistics, sequences: sequences.argument(), heads })?;
        let (tensors, sums, order) = memory.main(&maps, section, ordered);
        let key_sums = added.as_mut().map(|[_, k, v]| KeySumsArgument { k: k.reborrow(), v: v.reborrow(), size, value_size });
        let problem = SequenceKeysArgument {
            tensors,
            sums,
            gradients: key_gradients.as_mut().map(KeyGradientMaps::argument),
            added: key_sums,
            grad_scale: scale,
            sequences: sequences.argument(),
            heads: tile_heads,
            window: config.seen(),
            scores: config.scores(),
            order,
        };
        main.launch(stream, MainArgs { problem })?;
        let (rounded, added) = (grad_q.as_mut().map(TensorMapMut::view_mut), added.as_mut().map(|[q, ..]| q.reborrow()));
        let target = QueryTargetArgument { rounded, added, size, scale };
        convert.launch(stream, ConvertArgs { sums: memory.sums(), target, sequences: sequences.argument(), heads })?;
        differentiate_sink(of_sink, stream, &sequences, [log_sum_exp, deltas], sink, &mut grad_sink)
    }))
}
