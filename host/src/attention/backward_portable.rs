//! The kernels for GPUs other than Hopper and for large heads, bound for the backward pass.

use std::sync::Arc;

use oxtile_kernels::attention::{
    AttentionBackwardPortable as Main, AttentionBackwardPortableArgs as MainArgs, AttentionBackwardSink as Sink, PORTABLE_ROWS,
    PortableTargetArgument, PortableTensorsArgument,
};
use oxtile_tile::arch::{Columns, MatrixColumns};
use oxtile_tile::launch::Kernel;
use oxtile_tile::register_tile::RegisterElement;

use super::backward::{BackwardElement, Binding};
use super::backward_deltas::Deltas;
use super::heads::Rows;
use super::sequences::BoundSequences;
use super::sink::differentiate_sink;
use super::tensors::Inputs;
use crate::runtime::{Bound, Loaded, Result};
use crate::tensor::{HeadsMut, Uploads};

/// The kernels of the gradients of keys, of queries and of the sink.
type Kernels<T, const PANELS: usize, const STEP: usize, const PARTS: usize> =
    (Loaded<Main<T, PANELS, STEP, PARTS, true>>, Loaded<Main<T, PANELS, STEP, PARTS, false>>, Loaded<Sink>);

/// Binds tensors.
pub(super) fn bind<'a, T, const PANELS: usize, const STEP: usize, const PARTS: usize>(
    kernels: Arc<Kernels<T, PANELS, STEP, PARTS>>,
    binding: Binding<'_, 'a, T>,
) -> Result<Bound<'a>>
where
    T: BackwardElement + RegisterElement,
    Columns<STEP>: MatrixColumns,
    Main<T, PANELS, STEP, PARTS, true>: Kernel,
    Main<T, PANELS, STEP, PARTS, false>: Kernel,
{
    let Binding { stream, config, inputs, delta_kernel, deltas, log_sum_exp, grad_out, mut gradients, .. } = binding;
    let mut deltas = Deltas::new(stream, delta_kernel, deltas, log_sum_exp.len())?;
    let steps = gradients.row_steps(&config, &inputs, &grad_out, [Rows::Whole; 2])?;
    let (Inputs { q, k, v, sequences, sink, .. }, mut grad_sink) = (inputs, gradients.sink.take());
    let [q, k, v, grad_out] = [q, k, v, grad_out].map(|tensor| tensor.view());
    let (rounded, added) = gradients.split();
    let mut rounded = rounded.map(|tensors| tensors.map(HeadsMut::into_view));
    let mut added = added.map(|tensors| tensors.map(HeadsMut::into_view));
    let mut uploads = Uploads::default();
    let sequences = BoundSequences::new(&mut uploads, &config, sequences, steps);
    uploads.copy(stream)?;
    let (size, value_size, scale) = (config.head_size as u32, config.value_size() as u32, config.scale() as f32);
    let row_tiles = |rows: u64| rows.div_ceil(PORTABLE_ROWS as u64) as u32;
    Ok(Bound::new(move |stream| {
        let ((of_keys, of_queries, of_sink), deltas) = (&*kernels, deltas.run(stream)?);
        macro_rules! arguments {
            ($target:expr) => {
                MainArgs {
                    tensors: PortableTensorsArgument { q, k, v, grad_out, size, value_size },
                    statistics: sequences.statistics(log_sum_exp, deltas),
                    target: $target,
                    sequences: sequences.argument(),
                    heads: sequences.heads,
                    window: config.seen(),
                    scores: config.scores(),
                }
            };
        }
        if config.keys * config.key_heads > 0 {
            let (grad, grad_v) = rounded.as_mut().map(|[_, k, v]| (k.reborrow(), v.reborrow())).unzip();
            let (grad_sum, grad_v_sum) = added.as_mut().map(|[_, k, v]| (k.reborrow(), v.reborrow())).unzip();
            let target = PortableTargetArgument { grad, grad_v, grad_sum, grad_v_sum, scale, row_tiles: row_tiles(config.keys) };
            of_keys.launch(stream, arguments!(target))?;
        }
        if !log_sum_exp.is_empty() {
            let (grad, grad_sum) = (rounded.as_mut().map(|[q, ..]| q.reborrow()), added.as_mut().map(|[q, ..]| q.reborrow()));
            let row_tiles = row_tiles(config.queries);
            let target = PortableTargetArgument { grad, grad_v: None, grad_sum, grad_v_sum: None, scale, row_tiles };
            of_queries.launch(stream, arguments!(target))?;
        }
        differentiate_sink(of_sink, stream, &sequences, [log_sum_exp, deltas], sink, &mut grad_sink)
    }))
}
