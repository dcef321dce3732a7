//! The kernels of dense tensors on Hopper, bound for the backward pass.

use std::sync::Arc;

use oxtile_kernels::attention::{
    AttentionBackward as Main, AttentionBackwardAddKeys as AddKeys, AttentionBackwardAddKeysArgs as AddKeysArgs,
    AttentionBackwardAddQueries as AddQueries, AttentionBackwardAddQueriesArgs as AddQueriesArgs, AttentionBackwardArgs as MainArgs,
    AttentionBackwardBlocks as Arrange, AttentionBackwardBlocksArgs as ArrangeArgs, AttentionBackwardConvert as Convert,
    AttentionBackwardConvertArgs as ConvertArgs, AttentionBackwardPrepare as Prepare, AttentionBackwardPrepareArgs as PrepareArgs,
    AttentionBackwardReduce as Reduce, AttentionBackwardReduceArgs as ReduceArgs, BACKWARD_KEYS, BlockStatisticsArgument,
    DenseKeysArgument, DenseRows, Heads, KeyHeads, KeyOrderArgument, KeyPartsArgument, KeySumsArgument, QueryStatisticsArgument,
    partial_elements,
};
use oxtile_tile::arch::{Columns, MatrixColumns};
use oxtile_tile::launch::{DeviceView, Kernel};
use oxtile_tile::num::Float;
use oxtile_tile::register_tile::{RegisterElement, StoredElement};

use super::backward::{BackwardElement, Binding, Order};
use super::backward_blocks::{BlockArguments, Blocks};
use super::backward_deltas::{DeltaSource, Deltas, ResultRows};
use super::backward_tensors::GRADIENTS;
use super::config::{AttentionConfig, GradientOutput, Layout};
use super::heads::by_head;
use super::sequences::BoundSequences;
use crate::runtime::{Bound, Buffer, Error, Loaded, Result, Stream};
use crate::tensor::{HeadsMut, Strided, Uploads};

/// Where the rows of the heads of a tensor lie that gradients are added to, counted in heads.
fn dense_rows(what: &'static str, tensor: Strided<4>) -> Result<DenseRows> {
    let Strided { shape: [batches, rows, heads, size], strides: [batch, row, head, _] } = tensor;
    let count = |elements: u64| u32::try_from(elements / size).ok().filter(|_| elements.is_multiple_of(size));
    match (count(if batches > 1 { batch } else { 0 }), count(row)) {
        (Some(batch_heads), Some(row_heads)) if heads <= 1 || head == size => {
            let [batches, heads, rows] = [batches, heads, rows].map(|count| count as u32);
            Ok(DenseRows { batches, heads, rows, batch_heads, row_heads })
        }
        _ => {
            let why = format!(
                "[batch, row, head] strides of {:?} elements, but the kernel that adds counts heads of {size}, which are neighbours in a row: \
                 give it such a tensor",
                [batch, row, head]
            );
            Err(Error::Invalid { what, why })
        }
    }
}

/// Where those lie that gradients of queries, and of keys and values, are added to.
fn added_rows([q, k, v]: &[HeadsMut<'_, f32>; 3]) -> Result<[DenseRows; 2]> {
    let [of_q, of_k, of_v] = GRADIENTS;
    if !k.layout().lies_as(&v.layout()) {
        let why = format!(
            "strides are {:?}, those of the keys {:?}, but they are added by one kernel: give both the same",
            v.strides(),
            k.strides()
        );
        return Err(Error::Invalid { what: of_v, why });
    }
    Ok([dense_rows(of_q, q.layout())?, dense_rows(of_k, k.layout())?])
}

/// Launches of the kernel of statistics count so many heads.
const MOST_HEADS: u64 = 65535;

/// Row sums of `O dO` that are there before, put beside the log-sum-exp into blocks: all heads are those of one sequence.
struct GivenStatistics<'a, T> {
    log_sum_exp: DeviceView<'a, f32>,
    deltas: Deltas<'a, T>,
    sequence: BoundSequences<'a>,
    rows: u64,
    heads: u64,
}

impl<'a, T> GivenStatistics<'a, T> {
    fn new(uploads: &mut Uploads, config: &AttentionConfig, log_sum_exp: DeviceView<'a, f32>, deltas: Deltas<'a, T>) -> Self {
        let (rows, heads) = (config.queries, config.batches * config.heads);
        let one = AttentionConfig { layout: Layout::Bshd, batches: 1, keys: rows, ..*config };
        Self { log_sum_exp, deltas, sequence: BoundSequences::new(uploads, &one, None, [rows; 2]), rows, heads }
    }

    fn launch(&mut self, stream: &Stream, kernel: &Loaded<Arrange>, mut statistics: BlockStatisticsArgument<'_>) -> Result<()> {
        let BlockStatisticsArgument { blocks, size, rows, .. } = statistics;
        let queries = [self.log_sum_exp, self.deltas.run(stream)?];
        for first in (0..self.heads).step_by(MOST_HEADS as usize) {
            let end = (first + MOST_HEADS).min(self.heads);
            let [log_sum_exp, of_deltas] = queries.map(|view| view.slice(first * self.rows, end * self.rows));
            let [begin_row, end_row] = [first, end].map(|head| head * u64::from(rows));
            let (offsets, deltas) = (statistics.offsets.slice_mut(begin_row, end_row), statistics.deltas.slice_mut(begin_row, end_row));
            let args = ArrangeArgs {
                queries: QueryStatisticsArgument { log_sum_exp, deltas: of_deltas, rows: 0 },
                statistics: BlockStatisticsArgument { offsets, deltas, blocks, size, rows },
                sequences: self.sequence.argument(),
                heads: Heads { batches: 1, heads: (end - first) as u32, group: 1, step: 0 },
            };
            kernel.launch(stream, args)?;
        }
        Ok(())
    }
}

/// What the statistics of blocks are made of.
enum Statistics<'a, T> {
    Of(ResultRows<'a, T>),
    Given(Box<GivenStatistics<'a, T>>),
}

/// The main kernel, those of the statistics before it, and those of the gradients of keys and of queries after it.
type Kernels<T, const D: usize, const QUERIES: usize, const SPAN: usize, const MASKED: bool> = (
    Loaded<Main<T, D, QUERIES, SPAN, MASKED>>,
    (Loaded<Prepare<T, D>>, Loaded<Arrange>),
    (Loaded<Reduce<T, D>>, Loaded<AddKeys<D>>),
    (Loaded<Convert<T, D, QUERIES, SPAN>>, Loaded<AddQueries<D, QUERIES, SPAN>>),
);

/// Binds tensors.
pub(super) fn bind<'a, T, const D: usize, const QUERIES: usize, const SPAN: usize, const MASKED: bool>(
    kernels: Arc<Kernels<T, D, QUERIES, SPAN, MASKED>>,
    binding: Binding<'_, 'a, T>,
) -> Result<Bound<'a>>
where
    T: BackwardElement + RegisterElement + StoredElement + Float,
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
    let Binding { stream, config, order, parts: splits, workspace, inputs, delta_kernel, deltas, log_sum_exp, grad_out, gradients } =
        binding;
    let AttentionConfig { batches, queries, keys, heads, key_heads, .. } = config;
    let tensors = [inputs.q, grad_out, inputs.k, inputs.v];
    let (rounded, added) = gradients.split();
    let added = added.map(|tensors| added_rows(&tensors).map(|rows| (rows, tensors))).transpose()?;
    let mut added = added.map(|(rows, tensors)| (rows, tensors.map(HeadsMut::into_view)));
    let counts = [batches * heads, queries.div_ceil(QUERIES as u64)];
    let mut uploads = Uploads::default();
    let mut blocks = Blocks::<_, D, QUERIES, 4>::new(&mut uploads, stream, tensors, rounded, by_head, counts, workspace)?;
    let (has_queries, has_keys) = (blocks.has_queries, blocks.has_keys);
    let mut statistics = match deltas {
        DeltaSource::Of(result) if result.is_whole() => Statistics::Of(result),
        deltas => {
            let deltas = Deltas::new(stream, delta_kernel, deltas, log_sum_exp.len())?;
            Statistics::Given(Box::new(GivenStatistics::new(&mut uploads, &config, log_sum_exp, deltas)))
        }
    };
    uploads.copy(stream)?;
    let (ordered, key_blocks) = (order == Order::Deterministic, keys.div_ceil(BACKWARD_KEYS as u64));
    // Gradients that are added leave in parts, though there be one of each.
    let in_parts = splits > 1 || config.gradients == GradientOutput::Added;
    let part_tiles = if in_parts { batches * key_heads * splits * key_blocks } else { 0 };
    let mut partials = Buffer::<f32>::uninitialised(stream, part_tiles * partial_elements(D as u64))?;
    let section = config.section_of_keys(size_of::<T>() as u64, ordered).saturating_mul(splits as u32);
    let (mask, scale, scale_log2) = (config.bounds(), config.scale() as f32, config.scale_log2());
    let [batches, heads, key_heads, splits, key_blocks] = [batches, heads, key_heads, splits, key_blocks].map(|size| size as u32);
    let tile_heads = KeyHeads { batches, heads: key_heads * splits, group: heads / key_heads / splits, splits, step: 0 };
    Ok(Bound::new(move |stream| {
        let (main, (prepare, arrange), (reduce, add_keys), (convert, add_queries)) = &*kernels;
        match &mut statistics {
            Statistics::Of(ResultRows { out, grad_out, heads, rows, .. }) => {
                let (out, grad_out, statistics) = (*out, *grad_out, blocks.statistics());
                let (heads, rows) = (*heads, *rows);
                prepare.launch(stream, PrepareArgs { out, grad_out, log_sum_exp, statistics, heads, row_heads: heads, rows })?;
            }
            Statistics::Given(given) => given.launch(stream, arrange, blocks.statistics())?,
        }
        if has_keys {
            let BlockArguments { tensors, sums, grad_kv, counter, .. } = blocks.arguments();
            let problem = DenseKeysArgument {
                tensors,
                sums,
                gradients: grad_kv.filter(|_| !in_parts),
                partials: in_parts.then(|| partials.view_mut()),
                heads: tile_heads,
                mask,
                order: KeyOrderArgument { counter, section, ordered },
                scale: scale_log2,
            };
            main.launch(stream, MainArgs { problem })?;
            let parts = KeyPartsArgument {
                values: partials.view_mut(),
                splits,
                heads: batches * key_heads,
                key_blocks,
                split_step: key_blocks,
                head_step: splits * key_blocks,
            };
            if let Some(([_, rows], [_, k, v])) = &mut added {
                let sums = KeySumsArgument { k: k.reborrow(), v: v.reborrow(), size: D as u32, value_size: D as u32 };
                add_keys.launch(stream, AddKeysArgs { parts, sums, rows: *rows })?;
            } else if let Some(gradients) = blocks.arguments().grad_kv.filter(|_| in_parts) {
                reduce.launch(stream, ReduceArgs { parts, gradients, heads: key_heads })?;
            }
        }
        let BlockArguments { sums, grad_q, .. } = blocks.arguments();
        match (grad_q, &mut added) {
            (Some(grad_q), _) => convert.launch(stream, ConvertArgs { sums, grad_q, heads, scale }),
            (None, Some(([rows, _], [grad_q, ..]))) if has_queries => {
                add_queries.launch(stream, AddQueriesArgs { sums, grad_q: grad_q.reborrow(), rows: *rows, scale })
            }
            _ => Ok(()),
        }
    }))
}
