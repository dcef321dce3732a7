//! The kernels of sequences and options on Hopper, bound for the backward pass.

use oxtile_kernels::attention::{
    AttentionBackwardBlocks as Blocks, AttentionBackwardBlocksArgs as BlocksArgs, AttentionBackwardConvertGeneral as Convert,
    AttentionBackwardConvertGeneralArgs as ConvertArgs, AttentionBackwardGeneral as Main, AttentionBackwardGeneralArgs as MainArgs,
    AttentionBackwardSink as Sink, BackwardTensorsArgument, BlockStatisticsArgument, KEYS, KeyGradientsArgument, KeyHeads,
    KeyOrderArgument, KeySumsArgument, QueryBlocks, QuerySumsArgument, QueryTargetArgument, SequenceKeysArgument,
};
use oxtile_tile::arch::{Columns, MatrixColumns};
use oxtile_tile::launch::Kernel;
use oxtile_tile::layout::Swizzle128;
use oxtile_tile::register_tile::{RegisterElement, StoredElement};

use super::backward::{Binding, Instance, Order};
use super::backward_sequences::SequenceArguments;
use super::backward_tensors::{Gradients, reborrow};
use super::config::AttentionConfig;
use super::forward::BoundAttention;
use super::plan::SECTION_BYTES;
use super::sequences::rows_of;
use super::tensors::Inputs;
use crate::runtime::{Buffer, Loaded, Result, Runtime};
use crate::tensor::{TensorMap, TensorMapMut};

/// The kernels, in their order.
pub(super) struct Kernels<M: Kernel, C: Kernel> {
    blocks: Loaded<Blocks>,
    main: Loaded<M>,
    convert: Loaded<C>,
    sink: Loaded<Sink>,
}

impl<M: Kernel, C: Kernel> Kernels<M, C> {
    pub(super) const NAME: &str = M::INFO.name;

    pub(super) fn load(runtime: &Runtime) -> Result<Self> {
        Ok(Self { blocks: runtime.load()?, main: runtime.load()?, convert: runtime.load()?, sink: runtime.load()? })
    }
}

impl<T, const D: usize, const QUERIES: usize, const SPAN: usize, const CAPPED: bool> Instance<T>
    for Kernels<Main<T, D, QUERIES, SPAN, CAPPED>, Convert<T, D, QUERIES, SPAN>>
where
    T: RegisterElement + StoredElement,
    Columns<D>: MatrixColumns,
    Columns<QUERIES>: MatrixColumns,
    Columns<SPAN>: MatrixColumns,
    Main<T, D, QUERIES, SPAN, CAPPED>: Kernel,
    Convert<T, D, QUERIES, SPAN>: Kernel,
{
    fn bind<'a>(&'a self, binding: Binding<'_, 'a, T>) -> Result<BoundAttention<'a>> {
        let mut row_sums = binding.deltas()?;
        let Binding { stream, config, order, inputs, log_sum_exp, grad_out, gradients, .. } = binding;
        let AttentionConfig { batches, queries, keys, heads, key_heads, head_size, .. } = config;
        let value_size = config.value_size();
        let Inputs { q, k, v, sequences, sink } = inputs;
        let Gradients { q: grad_q, k: grad_k, v: grad_v, sink: mut grad_sink } = gradients;
        let [of_q, of_out] = [head_size, value_size].map(|size| rows_of(&config, queries, heads, size));
        let [of_k, of_v] = [head_size, value_size].map(|size| rows_of(&config, keys, key_heads, size));
        let q = TensorMap::<_, QUERIES, D, Swizzle128, 5>::sequences(stream, q, of_q)?;
        let grad_out = TensorMap::<_, QUERIES, D, Swizzle128, 5>::sequences(stream, grad_out, of_out)?;
        let k = TensorMap::<_, KEYS, D, Swizzle128, 5>::sequences(stream, k, of_k)?;
        let v = TensorMap::<_, KEYS, D, Swizzle128, 5>::sequences(stream, v, of_v)?;
        let [(grad_q, mut q_sum), (grad_k, mut k_sum), (grad_v, mut v_sum)] = [grad_q, grad_k, grad_v].map(|gradient| gradient.split());
        let mut grad_q = grad_q.map(|view| TensorMapMut::<_, QUERIES, D, Swizzle128, 5>::sequences(stream, view, of_q)).transpose()?;
        let mut grad_k = grad_k.map(|view| TensorMapMut::<_, 64, D, Swizzle128, 5>::sequences(stream, view, of_k)).transpose()?;
        let mut grad_v = grad_v.map(|view| TensorMapMut::<_, 64, D, Swizzle128, 5>::sequences(stream, view, of_v)).transpose()?;

        let arguments = SequenceArguments::new(stream, &config, sequences, log_sum_exp)?;
        let blocks = QueryBlocks::of(config.rows()[0], batches, QUERIES as u64);
        let block_rows = heads * blocks * QUERIES as u64;
        let mut offsets = Buffer::<f32>::uninitialised(stream, block_rows)?;
        let mut deltas = Buffer::<f32>::uninitialised(stream, block_rows)?;
        let mut sums = Buffer::<f32>::uninitialised(stream, block_rows * D as u64)?;
        let mut turns = Buffer::<u32>::zeros(stream, heads * blocks)?;
        let mut counter = Buffer::<u32>::zeros(stream, 1)?;
        let scale = config.scale() as f32;
        let section = (SECTION_BYTES / ((head_size + value_size) * size_of::<T>() as u64)) as u32;
        let [size, value_size, key_heads, blocks] = [head_size, value_size, key_heads, blocks].map(|size| size as u32);
        let heads = arguments.heads;
        let step = if heads.step == 0 { 0 } else { key_heads };
        let tile_heads = KeyHeads { batches: heads.batches, heads: key_heads, group: heads.group, splits: 1, step };
        Ok(BoundAttention::new(move |stream| {
            let row_sums = row_sums.run(stream)?;
            let statistics = BlockStatisticsArgument {
                offsets: offsets.view_mut(),
                deltas: deltas.view_mut(),
                blocks,
                size: QUERIES as u32,
                rows: blocks * QUERIES as u32,
            };
            let (queries, sequences) = (arguments.statistics(row_sums), arguments.sequences());
            self.blocks.launch(stream, BlocksArgs { queries, statistics, sequences, heads })?;
            let gradients = match (&mut grad_k, &mut grad_v) {
                (Some(k), Some(v)) => Some(KeyGradientsArgument { k: k.view_mut(), v: v.view_mut() }),
                _ => None,
            };
            let added = match (reborrow(&mut k_sum), reborrow(&mut v_sum)) {
                (Some(k), Some(v)) => Some(KeySumsArgument { k, v, size, value_size }),
                _ => None,
            };
            let problem = SequenceKeysArgument {
                tensors: BackwardTensorsArgument {
                    q: q.view(),
                    grad_out: grad_out.view(),
                    k: k.view(),
                    v: v.view(),
                    offsets: offsets.view(),
                    deltas: deltas.view(),
                },
                sums: QuerySumsArgument { values: sums.view_mut(), turns: turns.view_mut(), blocks },
                gradients,
                added,
                grad_scale: scale,
                sequences: arguments.sequences(),
                heads: tile_heads,
                window: arguments.window,
                scores: arguments.scores,
                order: KeyOrderArgument { counter: counter.view_mut(), section, ordered: order == Order::Deterministic },
            };
            self.main.launch(stream, MainArgs { problem })?;
            let sums = QuerySumsArgument { values: sums.view_mut(), turns: turns.view_mut(), blocks };
            let rounded = grad_q.as_mut().map(TensorMapMut::view_mut);
            let target = QueryTargetArgument { rounded, added: reborrow(&mut q_sum), size, scale };
            self.convert.launch(stream, ConvertArgs { sums, target, sequences: arguments.sequences(), heads })?;
            arguments.differentiate_sink(stream, &self.sink, sink, reborrow(&mut grad_sink), row_sums)
        }))
    }
}
