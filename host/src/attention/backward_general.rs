//! The kernels of sequences and options on Hopper, bound for the backward pass.

use std::sync::Arc;

use oxtile_kernels::attention::{
    AttentionBackwardBlocks as Arrange, AttentionBackwardBlocksArgs as ArrangeArgs, AttentionBackwardConvertGeneral as Convert,
    AttentionBackwardConvertGeneralArgs as ConvertArgs, AttentionBackwardGeneral as Main, AttentionBackwardGeneralArgs as MainArgs,
    AttentionBackwardSink as Sink, KeyHeads, KeyOrderArgument, KeySumsArgument, QueryBlocks, QueryTargetArgument, SequenceKeysArgument,
};
use oxtile_tile::arch::{Columns, MatrixColumns};
use oxtile_tile::launch::Kernel;
use oxtile_tile::register_tile::{RegisterElement, StoredElement};

use super::backward::{BackwardElement, Binding, Order};
use super::backward_blocks::{BlockArguments, Blocks};
use super::backward_deltas::Deltas;
use super::config::{AttentionConfig, GradientOutput};
use super::heads::Rows;
use super::sequences::BoundSequences;
use super::sink::differentiate_sink;
use crate::runtime::{Bound, Loaded, Result};
use crate::tensor::{HeadsMut, Uploads};

/// The main kernel, those before and after it, and that of the sink's gradient.
type Kernels<T, const D: usize, const QUERIES: usize, const SPAN: usize, const CAPPED: bool> =
    (Loaded<Main<T, D, QUERIES, SPAN, CAPPED>>, Loaded<Arrange>, Loaded<Convert<T, D, QUERIES, SPAN>>, Loaded<Sink>);

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
    let Binding { stream, config, order, workspace, inputs, delta_kernel, deltas, log_sum_exp, grad_out, mut gradients, .. } = binding;
    let mut deltas = Deltas::new(stream, delta_kernel, deltas, log_sum_exp.len())?;
    let AttentionConfig { batches, heads, key_heads, head_size, .. } = config;
    let (value_size, sink, mut grad_sink) = (config.value_size(), inputs.sink, gradients.sink.take());
    // Gradients are added by the numbers of rows.
    let target = if config.gradients == GradientOutput::Added { Rows::Whole } else { Rows::Strided };
    let steps = gradients.row_steps(&config, &inputs, &grad_out, [Rows::Strided, target])?;
    let mut uploads = Uploads::default();
    let ((rounded, added), tensors) = (gradients.split(), [inputs.q, grad_out, inputs.k, inputs.v]);
    let mut added = added.map(|tensors| tensors.map(HeadsMut::into_view));
    let counts = [heads, QueryBlocks::of(config.rows()[0], batches, QUERIES as u64)];
    let layout = |tensor| config.sequence_rows(tensor);
    let mut blocks = Blocks::<_, D, QUERIES, 5>::new(&mut uploads, stream, tensors, rounded, layout, counts, workspace)?;
    let sequences = BoundSequences::new(&mut uploads, &config, inputs.sequences, steps);
    uploads.copy(stream)?;
    let (ordered, scale, section) =
        (order == Order::Deterministic, config.scale() as f32, config.cached_keys(size_of::<T>() as u64) as u32);
    let [size, value_size, key_heads] = [head_size, value_size, key_heads].map(|size| size as u32);
    let heads = sequences.heads;
    let step = if heads.step == 0 { 0 } else { key_heads };
    let tile_heads = KeyHeads { batches: heads.batches, heads: key_heads, group: heads.group, splits: 1, step };
    Ok(Bound::new(move |stream| {
        let ((main, arrange, convert, of_sink), deltas) = (&*kernels, deltas.run(stream)?);
        let (queries, statistics) = (sequences.statistics(log_sum_exp, deltas), blocks.statistics());
        arrange.launch(stream, ArrangeArgs { queries, statistics, sequences: sequences.argument(), heads })?;
        let BlockArguments { tensors, sums, grad_kv, counter, .. } = blocks.arguments();
        let problem = SequenceKeysArgument {
            tensors,
            sums,
            gradients: grad_kv,
            added: added.as_mut().map(|[_, k, v]| KeySumsArgument { k: k.reborrow(), v: v.reborrow(), size, value_size }),
            grad_scale: scale,
            sequences: sequences.argument(),
            heads: tile_heads,
            window: config.seen(),
            scores: config.scores(),
            order: KeyOrderArgument { counter, section, ordered },
        };
        main.launch(stream, MainArgs { problem })?;
        let BlockArguments { sums, grad_q, .. } = blocks.arguments();
        let target = QueryTargetArgument { rounded: grad_q, added: added.as_mut().map(|[q, ..]| q.reborrow()), size, scale };
        convert.launch(stream, ConvertArgs { sums, target, sequences: sequences.argument(), heads })?;
        differentiate_sink(of_sink, stream, &sequences, [log_sum_exp, deltas], sink, &mut grad_sink)
    }))
}
