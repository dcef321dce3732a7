//! The portable kernels of the backward pass: their arguments.

use oxtile_kernels::attention::{
    AttentionBackwardDeltas as Deltas, AttentionBackwardDeltasArgs as DeltasArgs, AttentionBackwardPortable as Main,
    AttentionBackwardPortableArgs as MainArgs, AttentionBackwardSink as Sink, AttentionBackwardSinkArgs as SinkArgs, RESTING,
    Window as Seen,
};
use oxtile_tile::arch::{Columns, MatrixColumns};
use oxtile_tile::launch::Kernel;
use oxtile_tile::num::Float;
use oxtile_tile::register_tile::RegisterElement;

use super::backward::{Instance, Order};
use super::backward_tensors::{BackwardInputs, Gradients};
use super::config::{AttentionConfig, Layout};
use super::forward::BoundAttention;
use super::general::{Placement, lend, softmax_of};
use super::tensors::Inputs;
use crate::runtime::{Buffer, Loaded, Result, Runtime, Stream};

/// The kernels of a pass, in their order.
pub(super) struct Kernels<D: Kernel, K: Kernel, Q: Kernel> {
    deltas: Loaded<D>,
    of_keys: Loaded<K>,
    of_queries: Loaded<Q>,
    sink: Loaded<Sink>,
}

impl<D: Kernel, K: Kernel, Q: Kernel> Kernels<D, K, Q> {
    pub(super) fn load(runtime: &Runtime) -> Result<Self> {
        Ok(Self { deltas: runtime.load()?, of_keys: runtime.load()?, of_queries: runtime.load()?, sink: runtime.load()? })
    }
}

impl<T, const PANELS: usize, const STEP: usize, const PARTS: usize> Instance<T>
    for Kernels<Deltas<T>, Main<T, PANELS, STEP, PARTS, true>, Main<T, PANELS, STEP, PARTS, false>>
where
    T: RegisterElement + Float,
    Columns<STEP>: MatrixColumns,
    Deltas<T>: for<'a> Kernel<Args<'a> = DeltasArgs<'a, T>>,
    Main<T, PANELS, STEP, PARTS, true>: for<'a> Kernel<Args<'a> = MainArgs<'a, T, PANELS, STEP, PARTS, true>>,
    Main<T, PANELS, STEP, PARTS, false>: for<'a> Kernel<Args<'a> = MainArgs<'a, T, PANELS, STEP, PARTS, false>>,
{
    fn bind<'a>(
        &'a self,
        stream: &Stream,
        config: AttentionConfig,
        _: Order,
        inputs: BackwardInputs<'a, T>,
        gradients: Gradients<'a, T>,
    ) -> Result<BoundAttention<'a>> {
        let AttentionConfig { layout, batches, queries, keys, heads, key_heads, .. } = config;
        let BackwardInputs { forward: Inputs { q, k, v, sequences, sink }, out, log_sum_exp, grad_out } = inputs;
        let Gradients { q: grad_q, k: grad_k, v: grad_v, sink: mut grad_sink } = gradients;
        let [mut grad_q, mut grad_k, mut grad_v] = [grad_q, grad_k, grad_v].map(super::backward_tensors::GradientTarget::split);
        let placement = Placement::new(stream, &config, sequences)?;
        let mut deltas = Buffer::<f32>::uninitialised(stream, log_sum_exp.len())?;
        let mut nothing = [Buffer::<T>::zeros(stream, 0)?, Buffer::<T>::zeros(stream, 0)?];
        let mut no_sums = [Buffer::<f32>::zeros(stream, 0)?, Buffer::<f32>::zeros(stream, 0)?];
        let (packed, sbhd) = (layout == Layout::Packed, layout == Layout::Sbhd);
        let [query_rows, key_rows] = if sbhd { [queries, keys] } else { config.rows() };
        let [scale, cap_limit, cap_factor] = softmax_of(&config);
        let Seen { left, right, top_left } = config.seen();
        let (size, value_size) = (config.head_size as u32, config.value_size() as u32);
        let [queries, heads, query_rows, key_rows] = [queries, heads, query_rows, key_rows].map(|size| size as u32);
        let log_rows = if packed { 0 } else { queries };
        // Lanes that share a row, 8 elements each.
        let lanes = (value_size / 8).next_power_of_two();
        Ok(BoundAttention::new(move |stream| {
            if !log_sum_exp.is_empty() {
                let heads = if sbhd { heads * batches as u32 } else { heads };
                self.deltas.launch(
                    stream,
                    DeltasArgs { out, grad_out, deltas: deltas.view_mut(), rows: queries, heads, size: value_size, lanes },
                )?;
            }
            let [query_ends, key_ends, query_offsets, key_offsets] = placement.arrays();
            let [nothing, nothing_of_v] = &mut nothing;
            let [no_sum, no_sum_of_v] = &mut no_sums;
            macro_rules! arguments {
                ($grad:ident, $grad_v:expr, $grad_v_sum:expr, $rows:expr) => {
                    MainArgs {
                        q,
                        k,
                        v,
                        grad_out,
                        log_sum_exp,
                        deltas: deltas.view(),
                        grad: lend(&mut $grad.0, nothing),
                        grad_v: $grad_v,
                        grad_sum: lend(&mut $grad.1, no_sum),
                        grad_v_sum: $grad_v_sum,
                        query_ends,
                        key_ends,
                        query_offsets,
                        key_offsets,
                        query_rows,
                        key_rows,
                        padded: u32::from(placement.padded()),
                        batches: batches as u32,
                        heads,
                        group: config.group() as u32,
                        head_step: if sbhd { heads } else { 0 },
                        row_tiles: u64::div_ceil($rows, RESTING as u64) as u32,
                        log_rows,
                        size,
                        value_size,
                        left,
                        right,
                        top_left: top_left.into(),
                        scale,
                        cap_limit,
                        cap_factor,
                        grad_scale: config.scale() as f32,
                    }
                };
            }
            if keys * key_heads > 0 {
                let (grad_v, grad_v_sum) = (lend(&mut grad_v.0, nothing_of_v), lend(&mut grad_v.1, no_sum_of_v));
                self.of_keys.launch(stream, arguments!(grad_k, grad_v, grad_v_sum, keys))?;
            }
            if !log_sum_exp.is_empty() {
                let args = arguments!(grad_q, nothing_of_v.view_mut(), no_sum_of_v.view_mut(), config.queries);
                self.of_queries.launch(stream, args)?;
            }
            let (Some(sink), Some(grad_sink)) = (sink, &mut grad_sink) else { return Ok(()) };
            let grad_sink = grad_sink.slice_mut(0, sink.len());
            let deltas = deltas.view();
            let args =
                SinkArgs { sink, log_sum_exp, deltas, grad_sink, query_ends, query_offsets, query_rows, batches: batches as u32, log_rows };
            self.sink.launch(stream, args)
        }))
    }
}
