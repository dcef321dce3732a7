//! The general kernels of the backward pass on Hopper: their arguments.

use oxtile_kernels::attention::{
    AttentionBackwardBlocks as Blocks, AttentionBackwardBlocksArgs as BlocksArgs, AttentionBackwardConvertGeneral as Convert,
    AttentionBackwardConvertGeneralArgs as ConvertArgs, AttentionBackwardDeltas as Deltas, AttentionBackwardDeltasArgs as DeltasArgs,
    AttentionBackwardGeneral as Main, AttentionBackwardGeneralArgs as MainArgs, AttentionBackwardSink as Sink,
    AttentionBackwardSinkArgs as SinkArgs, KEYS, QueryBlocks, Window as Seen,
};
use oxtile_tile::arch::{Columns, MatrixColumns};
use oxtile_tile::launch::{DeviceViewMut, Kernel};
use oxtile_tile::layout::Swizzle128;
use oxtile_tile::num::Float;
use oxtile_tile::register_tile::{RegisterElement, StoredElement};

use super::backward::{Instance, Order};
use super::backward_tensors::{BackwardInputs, GradientTarget, Gradients};
use super::config::{AttentionConfig, Layout};
use super::forward::BoundAttention;
use super::general::{Placement, lend, rows_of, softmax_of};
use super::plan::SECTION_BYTES;
use super::tensors::Inputs;
use crate::runtime::{Buffer, Loaded, Result, Runtime, Stream};
use crate::tensor::{SequenceRows, TensorMap, TensorMapMut};

/// The kernels of a pass, in their order.
pub(super) struct Kernels<D: Kernel, M: Kernel, C: Kernel> {
    deltas: Loaded<D>,
    blocks: Loaded<Blocks>,
    main: Loaded<M>,
    convert: Loaded<C>,
    sink: Loaded<Sink>,
}

impl<D: Kernel, M: Kernel, C: Kernel> Kernels<D, M, C> {
    pub(super) fn load(runtime: &Runtime) -> Result<Self> {
        Ok(Self {
            deltas: runtime.load()?,
            blocks: runtime.load()?,
            main: runtime.load()?,
            convert: runtime.load()?,
            sink: runtime.load()?,
        })
    }
}

/// A gradient's tensor of rows of heads, and its sums if it has any.
struct Target<'a, T, const ROWS: usize, const D: usize> {
    map: TensorMapMut<'a, T, ROWS, D, Swizzle128, 5>,
    sums: Option<DeviceViewMut<'a, f32>>,
}

impl<'a, T: RegisterElement, const ROWS: usize, const D: usize> Target<'a, T, ROWS, D> {
    fn new(stream: &Stream, target: GradientTarget<'a, T>, rows: SequenceRows) -> Result<Self> {
        let (view, sums) = match target {
            GradientTarget::Rounded(view) => (view, None),
            GradientTarget::Added(sums) => {
                let access = sums.access("sums");
                // SAFETY: the memory is there as long as the sums, which have at least as many bytes. The kernels do not store through
                // this map, as they are given sums.
                (unsafe { DeviceViewMut::<T>::from_raw(access.address, sums.len(), access.owner) }, Some(sums))
            }
        };
        Ok(Self { map: TensorMapMut::sequences(stream, view, rows)?, sums })
    }
}

impl<T, const D: usize, const QUERIES: usize, const SPAN: usize, const CAPPED: bool> Instance<T>
    for Kernels<Deltas<T>, Main<T, D, QUERIES, SPAN, CAPPED>, Convert<T, D, QUERIES, SPAN>>
where
    T: RegisterElement + StoredElement + Float,
    Columns<D>: MatrixColumns,
    Columns<QUERIES>: MatrixColumns,
    Columns<SPAN>: MatrixColumns,
    Deltas<T>: for<'a> Kernel<Args<'a> = DeltasArgs<'a, T>>,
    Main<T, D, QUERIES, SPAN, CAPPED>: for<'a> Kernel<Args<'a> = MainArgs<'a, T, D, QUERIES, SPAN, CAPPED>>,
    Convert<T, D, QUERIES, SPAN>: for<'a> Kernel<Args<'a> = ConvertArgs<'a, T, D, QUERIES, SPAN>>,
{
    fn bind<'a>(
        &'a self,
        stream: &Stream,
        config: AttentionConfig,
        order: Order,
        inputs: BackwardInputs<'a, T>,
        gradients: Gradients<'a, T>,
    ) -> Result<BoundAttention<'a>> {
        let AttentionConfig { layout, batches, queries, keys, heads, key_heads, head_size, .. } = config;
        let value_size = config.value_size();
        let BackwardInputs { forward: Inputs { q, k, v, sequences, sink }, out, log_sum_exp, grad_out } = inputs;
        let Gradients { q: grad_q, k: grad_k, v: grad_v, sink: mut grad_sink } = gradients;
        let [of_q, of_out] = [head_size, value_size].map(|size| rows_of(&config, queries, heads, size));
        let [of_k, of_v] = [head_size, value_size].map(|size| rows_of(&config, keys, key_heads, size));
        let q_map = TensorMap::<_, QUERIES, D, Swizzle128, 5>::sequences(stream, q, of_q)?;
        let grad_out_map = TensorMap::<_, QUERIES, D, Swizzle128, 5>::sequences(stream, grad_out, of_out)?;
        let k_map = TensorMap::<_, KEYS, D, Swizzle128, 5>::sequences(stream, k, of_k)?;
        let v_map = TensorMap::<_, KEYS, D, Swizzle128, 5>::sequences(stream, v, of_v)?;
        let mut grad_q = Target::<_, QUERIES, D>::new(stream, grad_q, of_q)?;
        let mut grad_k = Target::<_, 64, D>::new(stream, grad_k, of_k)?;
        let mut grad_v = Target::<_, 64, D>::new(stream, grad_v, of_v)?;

        let placement = Placement::new(stream, &config, sequences)?;
        let all_queries = if layout == Layout::Packed { queries } else { batches * queries };
        let blocks = QueryBlocks::of(all_queries, batches, QUERIES as u64);
        let block_rows = heads * blocks * QUERIES as u64;
        let mut deltas = Buffer::<f32>::uninitialised(stream, log_sum_exp.len())?;
        let mut offsets = Buffer::<f32>::uninitialised(stream, block_rows)?;
        let mut of_blocks = Buffer::<f32>::uninitialised(stream, block_rows)?;
        let mut sums = Buffer::<f32>::uninitialised(stream, block_rows * D as u64)?;
        let mut turns = Buffer::<u32>::zeros(stream, heads * blocks)?;
        let mut counter = Buffer::<u32>::zeros(stream, 1)?;
        let mut nothing = [Buffer::<f32>::zeros(stream, 0)?, Buffer::<f32>::zeros(stream, 0)?];
        let [scale, cap_limit, cap_factor] = softmax_of(&config);
        let grad_scale = config.scale() as f32;
        let Seen { left, right, top_left } = config.seen();
        let section_keys = (SECTION_BYTES / ((head_size + value_size) * size_of::<T>() as u64)) as u32;
        let [query_rows, key_rows] = [of_q.rows, of_k.rows].map(|rows| rows as u32);
        let (size, value_size, group) = (head_size as u32, value_size as u32, config.group() as u32);
        let [batches, heads, key_heads, blocks, queries] = [batches, heads, key_heads, blocks, queries].map(|size| size as u32);
        let (log_rows, ordered) = (if layout == Layout::Packed { 0 } else { queries }, order == Order::Deterministic);
        let of_sequence = |heads: u32| if layout == Layout::Sbhd { heads } else { 0 };
        let [sequence_heads, sequence_key_heads] = [heads, key_heads].map(of_sequence);
        // Lanes that share a row, 8 elements each.
        let lanes = (value_size / 8).next_power_of_two();
        Ok(BoundAttention::new(move |stream| {
            let [query_ends, key_ends, query_offsets, key_offsets] = placement.arrays();
            let padded = u32::from(placement.padded());
            let tensor_heads = if layout == Layout::Sbhd { heads * batches } else { heads };
            let args = DeltasArgs { out, grad_out, deltas: deltas.view_mut(), rows: queries, heads: tensor_heads, size: value_size, lanes };
            self.deltas.launch(stream, args)?;
            let args = BlocksArgs {
                log_sum_exp,
                deltas: deltas.view(),
                offsets: offsets.view_mut(),
                of_blocks: of_blocks.view_mut(),
                query_ends,
                query_offsets,
                query_rows,
                batches,
                heads,
                log_rows,
                blocks,
                size: QUERIES as u32,
            };
            self.blocks.launch(stream, args)?;
            let [nothing, nothing_of_v] = &mut nothing;
            let args = MainArgs {
                q: q_map.view(),
                grad_out: grad_out_map.view(),
                k: k_map.view(),
                v: v_map.view(),
                grad_k: grad_k.map.view_mut(),
                grad_v: grad_v.map.view_mut(),
                grad_k_sum: lend(&mut grad_k.sums, nothing),
                grad_v_sum: lend(&mut grad_v.sums, nothing_of_v),
                offsets: offsets.view(),
                deltas: of_blocks.view(),
                sums: sums.view_mut(),
                turns: turns.view_mut(),
                counter: counter.view_mut(),
                query_ends,
                key_ends,
                query_offsets,
                key_offsets,
                query_rows,
                key_rows,
                padded,
                batches,
                heads: key_heads,
                group,
                sequence_heads: sequence_key_heads,
                blocks,
                section_keys,
                size,
                value_size,
                left,
                right,
                top_left: top_left.into(),
                scale,
                cap_limit,
                cap_factor,
                grad_scale,
                ordered: ordered.into(),
            };
            self.main.launch(stream, args)?;
            let args = ConvertArgs {
                sums: sums.view_mut(),
                turns: turns.view_mut(),
                grad_q: grad_q.map.view_mut(),
                grad_q_sum: lend(&mut grad_q.sums, nothing),
                query_ends,
                query_offsets,
                query_rows,
                padded,
                batches,
                heads,
                sequence_heads,
                blocks,
                size,
                scale: grad_scale,
            };
            self.convert.launch(stream, args)?;
            let (Some(sink), Some(grad_sink)) = (sink, &mut grad_sink) else { return Ok(()) };
            let grad_sink = grad_sink.slice_mut(0, sink.len());
            let deltas = deltas.view();
            let args = SinkArgs { sink, log_sum_exp, deltas, grad_sink, query_ends, query_offsets, query_rows, batches, log_rows };
            self.sink.launch(stream, args)
        }))
    }
}
