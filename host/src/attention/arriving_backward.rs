//! Gradients of a rank's attention to keys that arrive while its kernel runs, for [context parallelism](crate::context_parallel).

use std::ops::Range;
use std::sync::Arc;

use oxtile_kernels::attention::{
    ArrivingKeysArgument, ArrivingRowsArgument, AttentionBackwardArriving as Main, AttentionBackwardArrivingArgs as MainArgs,
    AttentionBackwardArrivingPacked as Packed, AttentionBackwardConvert as Convert, AttentionBackwardConvertArgs as ConvertArgs,
    AttentionBackwardPrepare as Prepare, AttentionBackwardPrepareArgs as PrepareArgs, AttentionBackwardReduce as Reduce,
    AttentionBackwardReduceArgs as ReduceArgs, AttentionBackwardSink as Sink, BACKWARD_KEYS, Chunks, FAR, KeyGradientsArgument, KeyHeads,
    KeyOrderArgument, KeyPartsArgument, Mask as Seen, Missing, SlotsArgument, Visited, VisitedArgument, Window, partial_elements,
};
use oxtile_tile::arch::{Columns, MatrixColumns};
use oxtile_tile::arrivals::WaitsArgument;
use oxtile_tile::launch::{DeviceView, DeviceViewMut, Kernel};
use oxtile_tile::num::{Float, bf16, f16};
use oxtile_tile::register_tile::{RegisterElement, StoredElement};

use super::arriving::{ArrivingChunks, ArrivingElement, ArrivingPlaces};
use super::arriving_backward_packed as packed;
use super::backward::BackwardElement;
use super::backward_blocks::{BlockArguments, Blocks, map_mut};
use super::backward_choice::BackwardKernel;
use super::config::{AttentionConfig, Layout};
use super::heads::by_head;
use super::sequences::BoundSequences;
use super::sink::differentiate_sink;
use super::table::{Load, Unloaded, rows};
use crate::choice::{Entry, Table};
use crate::runtime::{Device, Error, Loaded, Result, Runtime, Stream};
use crate::tensor::{Heads, HeadsMut, TensorMap, Uploads};

/// The gradients of a whole sequence's attention by one of its ranks.
pub(crate) struct ArrivingBackward<T: ArrivingGradients> {
    /// Of the whole.
    config: AttentionConfig,
    entry: &'static Entry<BackwardKernel, Unloaded<BindBackward<T>>>,
    bind: BindBackward<T>,
}

/// The tensors of a rank, of `[batches, rows, heads, size]`, and those of all ranks.
pub(crate) struct ArrivingBackwardTensors<'a, T> {
    /// Queries, keys and values.
    pub own: [Heads<'a, T>; 3],
    /// All keys and values.
    pub gathered: [Heads<'a, T>; 2],
    /// The result, and its gradient.
    pub results: [Heads<'a, T>; 2],
    pub log_sum_exp: DeviceView<'a, f32>,
    /// Of queries, keys and values.
    pub gradients: [HeadsMut<'a, T>; 3],
    /// The score of each head's sink, if it is learnable.
    pub sink: Option<DeviceView<'a, f32>>,
    pub places: ArrivingPlaces<'a>,
    pub slots: SlotPlaces,
}

/// Where gradients of keys lie that ranks give to one another.
#[derive(Clone, Debug)]
pub(crate) struct SlotPlaces {
    pub ranks: u64,
    /// The ranks that see any key of either chunk of this one are among these.
    pub readers: [Range<u64>; 2],
    /// Elements from a slot at one rank to that at the next.
    pub step: u64,
}

/// The launches of a pass, in the order of the fields.
#[doc(hidden)]
pub struct BoundArriving<'a> {
    /// Computes gradients while keys arrive; the first view is of this rank's slots at all ranks, the second one of what its queries give to the gradients of sinks, if there are
    /// such. What is called then tells the owners of slots, before gradients of queries are rounded.
    pub(crate) multiply: Multiply<'a>,
    /// Adds up what all ranks have stored in the slots here.
    pub(crate) add: Add<'a>,
}

pub(super) type Multiply<'a> =
    Box<dyn FnMut(&Stream, WaitsArgument<'_>, DeviceViewMut<'_, f32>, Sinks<'_>, &dyn Fn() -> Result<()>) -> Result<()> + Send + 'a>;
type Sinks<'s> = Option<DeviceViewMut<'s, f32>>;
pub(super) type Add<'a> = Box<dyn FnMut(&Stream, DeviceViewMut<'_, f32>) -> Result<()> + Send + 'a>;

/// Binds tensors to loaded kernels.
#[doc(hidden)]
pub type BindBackward<T> = Box<dyn for<'s, 'a> Fn(Binding<'s, 'a, T>) -> Result<BoundArriving<'a>> + Send + Sync>;

/// What is bound.
#[doc(hidden)]
pub struct Binding<'s, 'a, T> {
    pub(super) stream: &'s Stream,
    pub(super) config: AttentionConfig,
    pub(super) tensors: ArrivingBackwardTensors<'a, T>,
}

/// An element for which there are kernels of gradients that wait for keys.
pub trait ArrivingGradients: ArrivingElement + BackwardElement {
    /// The kernels, which have the tiles of those of one device.
    #[doc(hidden)]
    const ARRIVING_BACKWARD: Table<BackwardKernel, Unloaded<BindBackward<Self>>>;
}

/// The most key heads whose gradients are added up: the height of a grid.
const MOST_KEY_HEADS: u64 = 65_535;

/// Elements of a slot, which has gradients of so many key heads of a rank with so many rows.
pub(crate) const fn slot_elements(key_heads: u64, rows: u64, head_size: u64) -> u64 {
    key_heads * (rows / BACKWARD_KEYS as u64) * partial_elements(head_size)
}

/// The same of packed sequences, where each chunk has tiles of its own.
pub(crate) const fn packed_slot_elements(key_heads: u64, rows: u64, sequences: u64, head_size: u64) -> u64 {
    key_heads * Chunks::slot_tiles(rows, sequences) * partial_elements(head_size)
}

impl AttentionConfig {
    /// The kernel of one device for these gradients, if another one with its tiles waits for keys, in chunks of so many rows, which packed sequences may have any of.
    ///
    /// # Errors
    /// Why there is none: what one device takes.
    pub(crate) fn arriving_backward<T: ArrivingGradients>(&self, chunk: u64) -> Result<BackwardKernel, String> {
        self.arriving::<T>()?;
        if self.layout != Layout::Packed && !chunk.is_multiple_of(BACKWARD_KEYS as u64) {
            return Err(format!("chunks are of {chunk} rows: its kernel takes multiples of {BACKWARD_KEYS}"));
        }
        let key_heads = self.key_heads * if self.layout == Layout::Packed { 1 } else { self.batches };
        if key_heads > MOST_KEY_HEADS {
            return Err(format!("{key_heads} key heads of all batches: the kernel that adds gradients up takes {MOST_KEY_HEADS}"));
        }
        let (_, choice) = self.decide_backward::<T>(None).map_err(|error| error.to_string())?;
        match choice.decision {
            decision @ BackwardKernel::Dense { .. } => Ok(decision),
            decision @ BackwardKernel::General { size, .. }
                if [self.head_size, self.value_size()] == [size; 2] && self.layout == Layout::Packed =>
            {
                Ok(decision)
            }
            // A sink has its gradient by another kernel. Blocks of 96 queries, as with caps of small heads, do not divide chunks.
            BackwardKernel::General { size, capped } if [self.head_size, self.value_size()] == [size; 2] && !(capped && size == 64) => {
                Ok(if capped { choice.decision } else { BackwardKernel::Dense { head_size: size, masked: true } })
            }
            _ => Err(format!("no kernel of gradients that waits for keys has what is asked for: {}", choice.why)),
        }
    }
}

impl<T: ArrivingGradients> ArrivingBackward<T> {
    /// Loads the kernels of a whole sequence's gradients on a device.
    pub fn new(device: &Device, config: AttentionConfig, chunk: u64) -> Result<Self> {
        let decision = config.arriving_backward::<T>(chunk).map_err(|why| Error::Invalid { what: "AttentionConfig", why })?;
        let entry = Entry::find(T::ARRIVING_BACKWARD, &decision)?;
        Ok(Self { config, entry, bind: (entry.load)(&device.runtime())?.load_on(device)? })
    }

    /// The main kernel's name.
    pub fn kernel(&self) -> &'static str {
        self.entry.name
    }

    /// Binds tensors; makes tensor maps and the memory that the pass needs in between, in stream order.
    pub fn bind<'a>(&self, stream: &Stream, tensors: ArrivingBackwardTensors<'a, T>) -> Result<BoundArriving<'a>> {
        (self.bind)(Binding { stream, config: self.config, tensors })
    }
}

type Kernels<T, const D: usize, const QUERIES: usize, const SPAN: usize, const MASKED: bool, const CAPPED: bool> = (
    Loaded<Main<T, D, QUERIES, SPAN, MASKED, CAPPED>>,
    Loaded<Prepare<T, D>>,
    Loaded<Reduce<T, D>>,
    Loaded<Convert<T, D, QUERIES, SPAN>>,
    Loaded<Sink>,
);

fn load_with<K, T>(
    runtime: &Runtime,
    bind: for<'s, 'a> fn(Arc<K>, Binding<'s, 'a, T>) -> Result<BoundArriving<'a>>,
) -> Result<Unloaded<BindBackward<T>>>
where
    K: Load + Send + Sync + 'static,
    T: ArrivingGradients,
{
    Unloaded::new(runtime, |kernels| -> BindBackward<T> { Box::new(move |binding| bind(Arc::clone(&kernels), binding)) })
}

/// Heads from one row of a result and its gradient to the next, for the kernel that sums rows: heads of a row follow each other, and all rows are as far apart.
fn row_heads<T>(of_rank: &AttentionConfig, tensors: [Heads<'_, T>; 2]) -> Result<u32> {
    let ([batches, rows, heads, size], sbhd) = (of_rank.whole_result().shape, of_rank.layout == Layout::Sbhd);
    let found = tensors.map(|tensor| {
        let [batch, row, head] = tensor.strides();
        let of_batch = if sbhd { heads * size } else { rows * row };
        let follows = (heads <= 1 || head == size) && (batches <= 1 || batch == of_batch) && row.is_multiple_of(size.max(1));
        (tensor.shape() == [batches, rows, heads, size] && follows).then_some(row / size.max(1))
    });
    match found {
        [Some(one), Some(other)] if one == other => Ok(one as u32),
        _ => {
            let why = "the kernel that sums rows takes both with heads that follow each other, and rows of all batches as far apart: copy the tensors";
            Err(Error::Invalid { what: "ContextParallel, out and grad_out", why: why.to_owned() })
        }
    }
}

/// What the queries of a rank see.
struct Sight {
    mask: Seen,
    /// The blocks of queries between its chunks.
    missing: Missing,
    /// The blocks of keys.
    visited: Visited,
}

impl Sight {
    /// Of the chunks of so many rows, in blocks of so many queries.
    fn new(config: &AttentionConfig, chunks: [u64; 2], chunk: u64, block: u64) -> Self {
        const NONE: Missing = Missing { begin: u32::MAX, count: 0 };
        let ([first, second], key_block) = (chunks, BACKWARD_KEYS as u64);
        let Window { left, right, top_left } = config.seen();
        let [left, right] = [left, if top_left { right.min(0) } else { right }];
        if [left, right] == [FAR; 2] {
            let visited = Visited { first: 0, count: (config.keys / key_block) as u32, hidden: NONE };
            return Self { mask: Seen::full(2 * chunk as u32, config.keys as u32), missing: NONE, visited };
        }
        let bounds = |number: u64| {
            let end = ((number + 1) * chunk + right as u64).min(config.keys);
            [(number * chunk).saturating_sub(left as u64) / key_block, end.div_ceil(key_block)]
        };
        let [[begin, of_first], [of_second, end]] = chunks.map(bounds);
        // Blocks between what the two chunks see.
        let hidden = of_second.saturating_sub(of_first);
        let between = if hidden == 0 { NONE } else { Missing { begin: of_first as u32, count: hidden as u32 } };
        let place = (first * chunk) as i32;
        let mask = Seen {
            queries: ((second - first + 1) * chunk) as u32,
            keys: (end * key_block) as u32,
            first: (place - left).max(-FAR),
            last: (place + right).min(FAR),
        };
        Self {
            mask,
            missing: Missing { begin: (chunk / block) as u32, count: ((second - first - 1) * chunk / block) as u32 },
            visited: Visited { first: begin as u32, count: (end - begin - hidden) as u32, hidden: between },
        }
    }
}

fn bind<'a, T, const D: usize, const QUERIES: usize, const SPAN: usize, const MASKED: bool, const CAPPED: bool>(
    kernels: Arc<Kernels<T, D, QUERIES, SPAN, MASKED, CAPPED>>,
    Binding { stream, config, tensors }: Binding<'_, 'a, T>,
) -> Result<BoundArriving<'a>>
where
    T: ArrivingGradients + RegisterElement + StoredElement + Float,
    Columns<D>: MatrixColumns,
    Columns<QUERIES>: MatrixColumns,
    Columns<SPAN>: MatrixColumns,
    Prepare<T, D>: Kernel,
    Main<T, D, QUERIES, SPAN, MASKED, CAPPED>: Kernel,
    Reduce<T, D>: Kernel,
    Convert<T, D, QUERIES, SPAN>: Kernel,
{
    let ArrivingBackwardTensors { own: [q, own_k, own_v], gathered: [k, v], results, log_sum_exp, gradients, sink, places, slots } =
        tensors;
    let ArrivingPlaces::Chunks(arriving) = places else {
        return Err(Error::Invalid { what: "ContextParallel, fused", why: "kernels of dense tensors have packed sequences".to_owned() });
    };
    let ArrivingChunks { rows: chunk, own, section: arriving_section, flags, own_apart } = arriving;
    let [batches, rows, heads, _] = q.shape();
    let key_heads = own_k.shape()[2];
    let [out, grad_out] = results;
    let of_rank = AttentionConfig { queries: rows, keys: rows, ..config };
    let row_heads = row_heads(&of_rank, [out, grad_out])?;
    let mut uploads = Uploads::default();
    let counts = [batches * heads, rows.div_ceil(QUERIES as u64)];
    let mut blocks = Blocks::<_, D, QUERIES, 4>::new(&mut uploads, stream, [q, grad_out, k, v], None, by_head, counts, None)?;
    let own_k = TensorMap::with(&mut uploads, stream, own_k.view(), by_head(own_k.layout()))?;
    let own_v = TensorMap::with(&mut uploads, stream, own_v.view(), by_head(own_v.layout()))?;
    let [grad_q, grad_k, grad_v] = gradients;
    let mut grad_q = map_mut(&mut uploads, stream, grad_q, by_head)?;
    let ([k_first, k_second], [v_first, v_second]) = (grad_k.split_rows(chunk)?.into(), grad_v.split_rows(chunk)?.into());
    let mut halves = Vec::new();
    for (k, v) in [(k_first, v_first), (k_second, v_second)] {
        halves.push((map_mut(&mut uploads, stream, k, by_head)?, map_mut(&mut uploads, stream, v, by_head)?));
    }
    let sequences = BoundSequences::new(&mut uploads, &of_rank, None, [rows; 2]);
    uploads.copy(stream)?;
    let Sight { mask, missing, visited } = Sight::new(&config, own, chunk, QUERIES as u64);
    let section = config.section_of_keys(size_of::<T>() as u64, true);
    let (scale, scores) = (config.scale() as f32, config.scores());
    let (of_chunk, all_heads, of_slot) =
        (chunk / BACKWARD_KEYS as u64, batches * key_heads, slot_elements(batches * key_heads, rows, D as u64));
    let SlotPlaces { ranks, readers, step } = slots;
    let [batches, heads, key_heads] = [batches, heads, key_heads].map(|size| size as u32);
    let tile_heads = KeyHeads { batches, heads: key_heads, group: heads / key_heads, splits: 1, step: 0 };
    // Batches of sbhd are heads of a row.
    let heads_of_row = if config.layout == Layout::Sbhd { batches * heads } else { heads };
    let (out, of_out) = (out.view(), grad_out.view());
    let multiply_kernels = Arc::clone(&kernels);
    let multiply: Multiply<'a> = Box::new(move |stream, waits, values, grad_sink, given| {
        let (main, prepare, _, convert, of_sink) = &*multiply_kernels;
        let statistics = blocks.statistics();
        let args = PrepareArgs { out, grad_out: of_out, log_sum_exp, statistics, heads: heads_of_row, row_heads, rows: rows as u32 };
        prepare.launch(stream, args)?;
        let WaitsArgument { lines, first: first_line, patience } = waits;
        let waits = WaitsArgument { lines, first: first_line, patience };
        let BlockArguments { tensors, sums, counter, .. } = blocks.arguments();
        let [first, second] = own.map(|chunk| chunk as u32);
        let (chunk, ranks) = (chunk as u32, ranks as u32);
        let problem = ArrivingRowsArgument {
            tensors,
            own_k: own_k.view(),
            own_v: own_v.view(),
            sums,
            slots: SlotsArgument { values, step, ranks },
            heads: tile_heads,
            mask,
            missing,
            visited: VisitedArgument { first: visited.first, count: visited.count, hidden: visited.hidden },
            arriving: ArrivingKeysArgument { chunk, padded: chunk, first, second, section: arriving_section, flags, waits, own_apart },
            order: KeyOrderArgument { counter, section, ordered: true },
            scores,
            grad_scale: scale,
        };
        main.launch(stream, MainArgs { problem })?;
        given()?;
        let BlockArguments { sums, tensors, .. } = blocks.arguments();
        convert.launch(stream, ConvertArgs { sums, grad_q: grad_q.view_mut(), heads, scale })?;
        // Blocks of queries are whole here, so that rows of their statistics are those of the log-sum-exp.
        differentiate_sink(of_sink, stream, &sequences, [log_sum_exp, tensors.deltas], sink, &mut { grad_sink })
    });
    let add: Add<'a> = Box::new(move |stream, mut values| {
        let (_, _, reduce, ..) = &*kernels;
        for ((at, (k, v)), of_half) in (0..).zip(&mut halves).zip(&readers) {
            let half = at * of_slot / 2;
            let [first, last] = [of_half.start, of_half.end - 1].map(|rank| half + rank * of_slot);
            let parts = KeyPartsArgument {
                values: values.slice_mut(first, last + of_slot / 2),
                splits: (of_half.end - of_half.start) as u32,
                heads: all_heads as u32,
                key_blocks: of_chunk as u32,
                split_step: (2 * all_heads * of_chunk) as u32,
                head_step: of_chunk as u32,
            };
            let gradients = KeyGradientsArgument { k: k.view_mut(), v: v.view_mut() };
            reduce.launch(stream, ReduceArgs { parts, gradients, heads: key_heads })?;
        }
        Ok(())
    });
    Ok(BoundArriving { multiply, add })
}

macro_rules! elements {
    ($($t:ident)*) => { $(
        impl ArrivingGradients for $t {
            const ARRIVING_BACKWARD: Table<BackwardKernel, Unloaded<BindBackward<$t>>> = &[rows! { BackwardKernel:
                [Dense { head_size: 64, masked: true }] [128, BACKWARD_KEYS] Main<$t, 64, 128, 64, true, false>: bind::<$t, 64, 128, 64, true, false>;
                [Dense { head_size: 128, masked: true }] [64, BACKWARD_KEYS] Main<$t, 128, 64, 64, true, false>: bind::<$t, 128, 64, 64, true, false>;
                [Dense { head_size: 128, masked: false }] [80, BACKWARD_KEYS] Main<$t, 128, 80, 80, false, false>: bind::<$t, 128, 80, 80, false, false>;
                [General { size: 128, capped: true }] [64, BACKWARD_KEYS] Main<$t, 128, 64, 64, true, true>: bind::<$t, 128, 64, 64, true, true>;
                [General { size: 64, capped: false }] [128, BACKWARD_KEYS] Packed<$t, 64, 128, 64>: packed::bind::<$t, 64, 128, 64>;
                [General { size: 128, capped: false }] [64, BACKWARD_KEYS] Packed<$t, 128, 64, 64>: packed::bind::<$t, 128, 64, 64>;
            }];
        }
    )* };
}

elements! { bf16 f16 }
