//! The kernels of dense tensors on Hopper, bound for the backward pass.

use oxtile_kernels::attention::{
    AttentionBackward as Main, AttentionBackwardAddKeys as AddKeys, AttentionBackwardAddKeysArgs as AddKeysArgs,
    AttentionBackwardAddQueries as AddQueries, AttentionBackwardAddQueriesArgs as AddQueriesArgs, AttentionBackwardArgs as MainArgs,
    AttentionBackwardBlocks as Blocks, AttentionBackwardBlocksArgs as BlocksArgs, AttentionBackwardConvert as Convert,
    AttentionBackwardConvertArgs as ConvertArgs, AttentionBackwardPrepare as Prepare, AttentionBackwardPrepareArgs as PrepareArgs,
    AttentionBackwardReduce as Reduce, AttentionBackwardReduceArgs as ReduceArgs, BackwardTensorsArgument, BlockStatisticsArgument,
    DenseKeysArgument, DenseRows, Heads, KEYS, KeyGradientsArgument, KeyHeads, KeyOrderArgument, KeyPartsArgument, KeySumsArgument,
    QueryStatisticsArgument, QuerySumsArgument, SequencesArgument, partial_elements,
};
use oxtile_tile::arch::{Columns, MatrixColumns};
use oxtile_tile::launch::{DeviceView, Kernel};
use oxtile_tile::layout::Swizzle128;
use oxtile_tile::num::Float;
use oxtile_tile::register_tile::{RegisterElement, StoredElement};

use super::backward::{Binding, DeltaSource, Instance, Order};
use super::backward_deltas::{OfResult, tensor_heads};
use super::backward_tensors::reborrow;
use super::config::{AttentionConfig, GradientOutput, Layout};
use super::dense::by_head;
use super::forward::BoundAttention;
use super::tensors::Inputs;
use crate::runtime::{Buffer, Loaded, Result, Runtime, Stream};
use crate::tensor::{TensorMap, TensorMapMut};

/// The kernels, in their order.
pub(super) struct Kernels<P: Kernel, M: Kernel, R: Kernel, C: Kernel, K: Kernel, Q: Kernel> {
    prepare: Loaded<P>,
    blocks: Loaded<Blocks>,
    main: Loaded<M>,
    reduce: Loaded<R>,
    convert: Loaded<C>,
    add_keys: Loaded<K>,
    add_queries: Loaded<Q>,
}

impl<P: Kernel, M: Kernel, R: Kernel, C: Kernel, K: Kernel, Q: Kernel> Kernels<P, M, R, C, K, Q> {
    pub(super) const NAME: &str = M::INFO.name;

    pub(super) fn load(runtime: &Runtime) -> Result<Self> {
        Ok(Self {
            prepare: runtime.load()?,
            blocks: runtime.load()?,
            main: runtime.load()?,
            reduce: runtime.load()?,
            convert: runtime.load()?,
            add_keys: runtime.load()?,
            add_queries: runtime.load()?,
        })
    }
}

/// The tensor maps of the gradients of keys and values.
type KeyMaps<'a, T, const D: usize> = [TensorMapMut<'a, T, 64, D, Swizzle128, 4>; 2];

/// Lends them to a kernel.
fn key_gradients<'s, T: RegisterElement, const D: usize>([k, v]: &'s mut KeyMaps<'_, T, D>) -> KeyGradientsArgument<'s, T, D, 4> {
    KeyGradientsArgument { k: k.view_mut(), v: v.view_mut() }
}

/// Where the rows of a dense tensor's heads lie.
fn dense_rows(layout: Layout, batches: u64, rows: u64, heads: u64) -> DenseRows {
    let [batch_heads, row_heads] = if layout == Layout::Sbhd { [heads, batches * heads] } else { [rows * heads, heads] };
    let [batches, heads, rows, batch_heads, row_heads] = [batches, heads, rows, batch_heads, row_heads].map(|size| size as u32);
    DenseRows { batches, heads, rows, batch_heads, row_heads }
}

/// Launches of the kernel of statistics count so many heads.
const MOST_HEADS: u64 = 65535;

/// Row sums of `O dO` that were computed before, put beside the log-sum-exp into blocks: all heads are those of one sequence.
struct GivenStatistics<'a> {
    log_sum_exp: DeviceView<'a, f32>,
    deltas: DeviceView<'a, f32>,
    ends: Buffer<u32>,
    starts: Buffer<u32>,
    rows: u64,
    heads: u64,
}

impl<'a> GivenStatistics<'a> {
    fn new(stream: &Stream, config: &AttentionConfig, log_sum_exp: DeviceView<'a, f32>, deltas: DeviceView<'a, f32>) -> Result<Self> {
        let (rows, heads) = (config.queries, config.batches * config.heads);
        let ends = Buffer::from_slice(stream, &[0, rows as u32])?;
        Ok(Self { log_sum_exp, deltas, ends, starts: Buffer::zeros(stream, 2)?, rows, heads })
    }

    fn launch(&self, stream: &Stream, kernel: &Loaded<Blocks>, mut statistics: BlockStatisticsArgument<'_>) -> Result<()> {
        let BlockStatisticsArgument { blocks, size, rows, .. } = statistics;
        let padded = u64::from(rows);
        for first in (0..self.heads).step_by(MOST_HEADS as usize) {
            let end = (first + MOST_HEADS).min(self.heads);
            let (heads, of_queries) = ((end - first) as u32, |view: DeviceView<'a, f32>| view.slice(first * self.rows, end * self.rows));
            let args = BlocksArgs {
                queries: QueryStatisticsArgument { log_sum_exp: of_queries(self.log_sum_exp), deltas: of_queries(self.deltas), rows: 0 },
                statistics: BlockStatisticsArgument {
                    offsets: statistics.offsets.slice_mut(first * padded, end * padded),
                    deltas: statistics.deltas.slice_mut(first * padded, end * padded),
                    blocks,
                    size,
                    rows,
                },
                sequences: SequencesArgument {
                    query_ends: self.ends.view(),
                    key_ends: self.ends.view(),
                    query_offsets: self.starts.view(),
                    key_offsets: self.starts.view(),
                    diagonals: None,
                    query_rows: self.rows as u32,
                    key_rows: self.rows as u32,
                    padded: false,
                },
                heads: Heads { batches: 1, heads, group: 1, step: 0 },
            };
            kernel.launch(stream, args)?;
        }
        Ok(())
    }
}

/// What the kernel of statistics makes them of.
enum Statistics<'a, T> {
    Of(OfResult<'a, T>),
    Given(GivenStatistics<'a>),
}

impl<T, const D: usize, const QUERIES: usize, const SPAN: usize, const MASKED: bool> Instance<T>
    for Kernels<
        Prepare<T, D>,
        Main<T, D, QUERIES, SPAN, MASKED>,
        Reduce<T, D>,
        Convert<T, D, QUERIES, SPAN>,
        AddKeys<D>,
        AddQueries<D, QUERIES, SPAN>,
    >
where
    T: RegisterElement + StoredElement + Float,
    Columns<D>: MatrixColumns,
    Columns<QUERIES>: MatrixColumns,
    Columns<SPAN>: MatrixColumns,
    Prepare<T, D>: Kernel,
    Main<T, D, QUERIES, SPAN, MASKED>: Kernel,
    Reduce<T, D>: Kernel,
    AddKeys<D>: Kernel,
    AddQueries<D, QUERIES, SPAN>: Kernel,
    Convert<T, D, QUERIES, SPAN>: Kernel,
{
    fn bind<'a>(&'a self, binding: Binding<'_, 'a, T>) -> Result<BoundAttention<'a>> {
        let Binding { stream, config, order, inputs, deltas, log_sum_exp, grad_out: grad_out_rows, gradients, .. } = binding;
        let AttentionConfig { layout, batches, queries, keys, heads, key_heads, head_size, .. } = config;
        let (mut of_queries, mut of_keys) =
            (by_head(layout, batches, queries, heads, head_size), by_head(layout, batches, keys, key_heads, head_size));
        let Inputs { mut q, mut k, mut v, .. } = inputs;
        let [(grad_q, mut q_sum), (grad_k, mut k_sum), (grad_v, mut v_sum)] =
            [gradients.q, gradients.k, gradients.v].map(|gradient| gradient.split());
        let [rows_of_queries, rows_of_keys] =
            [(queries, heads), (keys, key_heads)].map(|(rows, heads)| dense_rows(layout, batches, rows, heads));
        let (has_queries, has_keys) = (!q.is_empty(), !k.is_empty());
        // Without queries, or without keys, nothing is loaded by their maps, which must be of something: the others.
        let mut grad_out = grad_out_rows;
        if !has_queries {
            (q, grad_out, of_queries) = (k, k, of_keys);
        }
        if !has_keys {
            (k, v, of_keys) = (q, q, of_queries);
        }
        let q = TensorMap::<_, QUERIES, D, Swizzle128, 4>::strided(stream, q, of_queries)?;
        let grad_out = TensorMap::<_, QUERIES, D, Swizzle128, 4>::strided(stream, grad_out, of_queries)?;
        let k = TensorMap::<_, KEYS, D, Swizzle128, 4>::strided(stream, k, of_keys)?;
        let v = TensorMap::<_, KEYS, D, Swizzle128, 4>::strided(stream, v, of_keys)?;
        let keys_map = |view| TensorMapMut::<_, 64, D, Swizzle128, 4>::strided(stream, view, of_keys);
        let mut of_keys = match (grad_k, grad_v) {
            (Some(grad_k), Some(grad_v)) if has_keys => Some([keys_map(grad_k)?, keys_map(grad_v)?]),
            _ => None,
        };
        let queries_map = |view| TensorMapMut::<_, QUERIES, D, Swizzle128, 4>::strided(stream, view, of_queries);
        let mut of_queries = grad_q.filter(|_| has_queries).map(queries_map).transpose()?;

        let source = match deltas {
            DeltaSource::Of(out) => Statistics::Of(OfResult::new(&config, out, grad_out_rows)),
            DeltaSource::Given(deltas) => Statistics::Given(GivenStatistics::new(stream, &config, log_sum_exp, deltas)?),
        };
        let blocks = queries.div_ceil(QUERIES as u64);
        let padded_rows = batches * heads * blocks * QUERIES as u64;
        let ordered = order == Order::Deterministic;
        let mut offsets = Buffer::<f32>::uninitialised(stream, padded_rows)?;
        let mut deltas = Buffer::<f32>::uninitialised(stream, padded_rows)?;
        let mut sums = Buffer::<f32>::uninitialised(stream, padded_rows * D as u64)?;
        let mut turns = Buffer::<u32>::zeros(stream, batches * heads * blocks)?;
        let mut counter = Buffer::<u32>::zeros(stream, 1)?;
        let (splits, key_blocks) = (config.group_parts(QUERIES as u64), keys.div_ceil(KEYS as u64));
        // Gradients that are added leave in parts, though there be one of each.
        let in_parts = splits > 1 || config.gradients == GradientOutput::Added;
        let part_tiles = if in_parts { batches * key_heads * splits * key_blocks } else { 0 };
        let mut partials = Buffer::<f32>::uninitialised(stream, part_tiles * partial_elements(D as u64))?;
        let section = config.section_of_keys(size_of::<T>() as u64, ordered).saturating_mul(splits as u32);
        let (mask, scale, scale_log2, tensor_heads) =
            (config.bounds(), config.scale() as f32, config.scale_log2(), tensor_heads(&config) as u32);
        let [batches, rows, heads, key_heads] = [batches, queries, heads, key_heads].map(|size| size as u32);
        let [blocks, splits, key_blocks] = [blocks, splits, key_blocks].map(|size| size as u32);
        let tile_heads = KeyHeads { batches, heads: key_heads * splits, group: heads / key_heads / splits, splits, step: 0 };
        Ok(BoundAttention::new(move |stream| {
            let statistics = BlockStatisticsArgument {
                offsets: offsets.view_mut(),
                deltas: deltas.view_mut(),
                blocks,
                size: QUERIES as u32,
                rows: blocks * QUERIES as u32,
            };
            match &source {
                Statistics::Of(OfResult { out, grad_out, .. }) => {
                    let args = PrepareArgs { out: *out, grad_out: *grad_out, log_sum_exp, statistics, heads: tensor_heads, rows };
                    self.prepare.launch(stream, args)?;
                }
                Statistics::Given(given) => given.launch(stream, &self.blocks, statistics)?,
            }
            if has_keys {
                let gradients = of_keys.as_mut().filter(|_| !in_parts).map(key_gradients);
                let problem = DenseKeysArgument {
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
                    partials: in_parts.then(|| partials.view_mut()),
                    heads: tile_heads,
                    mask,
                    order: KeyOrderArgument { counter: counter.view_mut(), section, ordered },
                    scale: scale_log2,
                };
                self.main.launch(stream, MainArgs { problem })?;
                let parts = KeyPartsArgument { values: partials.view_mut(), splits, key_blocks };
                if let (Some(k), Some(v)) = (reborrow(&mut k_sum), reborrow(&mut v_sum)) {
                    let sums = KeySumsArgument { k, v, size: D as u32, value_size: D as u32 };
                    self.add_keys.launch(stream, AddKeysArgs { parts, sums, rows: rows_of_keys })?;
                } else if let Some(of_keys) = of_keys.as_mut().filter(|_| in_parts) {
                    self.reduce.launch(stream, ReduceArgs { parts, gradients: key_gradients(of_keys), heads: key_heads })?;
                }
            }
            let sums = QuerySumsArgument { values: sums.view_mut(), turns: turns.view_mut(), blocks };
            match (&mut of_queries, reborrow(&mut q_sum)) {
                (Some(grad_q), _) => self.convert.launch(stream, ConvertArgs { sums, grad_q: grad_q.view_mut(), heads, scale }),
                (None, Some(grad_q)) if has_queries => {
                    self.add_queries.launch(stream, AddQueriesArgs { sums, grad_q, rows: rows_of_queries, scale })
                }
                _ => Ok(()),
            }
        }))
    }
}
