//! Attention of a rank's queries to keys that arrive while its kernel runs, for [context parallelism](crate::context_parallel).

use std::marker::PhantomData;
use std::sync::Arc;

use oxtile_kernels::attention::{
    ArrivingArgument, ArrivingCausal, ArrivingFull, ArrivingKeysArgument, ArrivingOptioned, ArrivingOptionsArgument, ArrivingPackedCausal,
    ArrivingPackedFull, AttentionForward, AttentionForwardArgs, KeyMapsArgument, Narrow, Pair, Policy, RANK_CHUNKS, RoundedArgument, Shape,
    TileOrderArgument, WARPGROUP_QUERIES, WarpgroupRoles, Wide, Workspace,
};
use oxtile_tile::arch::{Columns, MatrixColumns};
use oxtile_tile::arrivals::WaitsArgument;
use oxtile_tile::launch::{DeviceView, DeviceViewMut, Kernel, Signature};
use oxtile_tile::layout::Swizzle128;
use oxtile_tile::num::{bf16, f16};
use oxtile_tile::register_tile::{RegisterElement, StoredElement};

use super::arriving_packed::{self, ArrivingSequences};
use super::choice::{ForwardKernel, Problem};
use super::config::{AttentionConfig, Layout};
use super::forward::AttentionElement;
use super::heads::by_head;
use super::sink::BoundSink;
use super::table::{Unloaded, rows};
use crate::choice::{Entry, Table};
use crate::runtime::{Buffer, Device, Error, Loaded, Result, Runtime, Stream};
use crate::tensor::{Heads, HeadsMut, Strided, TensorMap, TensorMapMut, Uploads};

/// The attention of a whole sequence by one of its ranks.
pub(crate) struct ArrivingAttention<T: ArrivingElement> {
    config: AttentionConfig,
    entry: &'static Entry<ForwardKernel, Unloaded<Bind<T>>>,
    bind: Bind<T>,
}

/// The tensors of a rank, whose batches are rows or heads, and those of all ranks.
pub(crate) struct ArrivingTensors<'a, T> {
    /// Queries of the rank, `[1, rows, heads, size]`: of each batch both chunks.
    pub q: Heads<'a, T>,
    /// Its keys and values.
    pub own: [Heads<'a, T>; 2],
    /// All keys and values, `[batches, keys, key heads, size]`; those of packed sequences of one rank after another, `[1, keys, key heads, size]`.
    pub gathered: [Heads<'a, T>; 2],
    pub out: HeadsMut<'a, T>,
    /// `[batches, heads, rows]`.
    pub log_sum_exp: DeviceViewMut<'a, f32>,
    /// A score beside those of the keys, of each head of the configuration.
    pub sink: Option<DeviceView<'a, f32>>,
    /// The largest score of each, of all that this rank's queries see.
    pub max_logit: Option<DeviceViewMut<'a, f32>>,
    pub places: ArrivingPlaces<'a>,
}

/// What arrives.
#[derive(Clone, Copy)]
pub(crate) enum ArrivingPlaces<'a> {
    /// Chunks of dense tensors.
    Chunks(ArrivingChunks<'a>),
    /// Packed sequences, whose lengths the device alone knows.
    Sequences(ArrivingSequences<'a>),
}

/// Which chunks are the rank's, and by which flags the others arrive.
#[derive(Clone, Copy)]
pub(crate) struct ArrivingChunks<'a> {
    /// Rows of a chunk.
    pub rows: u64,
    /// The numbers of the rank's chunks.
    pub own: [u64; 2],
    /// Key heads of a section.
    pub section: u32,
    /// A flag for each section and chunk.
    pub flags: DeviceView<'a, u32>,
    /// Whether own keys are read where they are.
    pub own_apart: bool,
}

/// A launch of a kernel that waits.
pub(crate) type Waiting<'a> = Box<dyn FnMut(&Stream, WaitsArgument<'_>) -> Result<()> + Send + 'a>;

/// Binds tensors to a loaded kernel.
#[doc(hidden)]
pub type Bind<T> = Box<dyn for<'s, 'a> Fn(Binding<'s, 'a, T>) -> Result<Waiting<'a>> + Send + Sync>;

/// What is bound.
#[doc(hidden)]
pub struct Binding<'s, 'a, T> {
    pub(super) stream: &'s Stream,
    pub(super) config: AttentionConfig,
    pub(super) tensors: ArrivingTensors<'a, T>,
}

/// An element for which there are kernels that wait for keys.
pub trait ArrivingElement: AttentionElement<Out = Self> {
    /// The kernels, which have the tiles of those of one device.
    #[doc(hidden)]
    const ARRIVING: Table<ForwardKernel, Unloaded<Bind<Self>>>;
}

impl AttentionConfig {
    /// The kernel of one device for this attention, if another one with its tiles and its bits waits for keys.
    ///
    /// # Errors
    /// Why there is none: what one device takes.
    pub(crate) fn arriving<T: ArrivingElement>(&self) -> Result<ForwardKernel, String> {
        let whole = Self { key_parts: Some(1), ..*self };
        let (_, choice) = whole.decide::<T>(None).map_err(|error| error.to_string())?;
        match choice.decision {
            decision @ ForwardKernel::Wgmma {
                problem: Problem::Dense { ring: false, .. } | Problem::Packed { ring: false, .. }, ..
            } if !self.folds() => Ok(decision),
            decision @ ForwardKernel::Wgmma { problem: Problem::Options, .. } if self.layout != Layout::Packed => Ok(decision),
            _ => {
                let options = self.set_among(&["window", "soft_cap", "sink", "max_logit"]);
                let options = if options.is_empty() { choice.why } else { options.join(", ") };
                let why = self.why_portable(None).unwrap_or(options);
                Err(format!("no kernel that waits for keys has what is asked for: {why}"))
            }
        }
    }
}

impl<T: ArrivingElement> ArrivingAttention<T> {
    /// Loads the kernel of a whole sequence's attention on a device.
    pub fn new(device: &Device, config: AttentionConfig) -> Result<Self> {
        let decision = config.arriving::<T>().map_err(|why| Error::Invalid { what: "AttentionConfig", why })?;
        let entry = Entry::find(T::ARRIVING, &decision)?;
        Ok(Self { config, entry, bind: (entry.load)(&device.runtime())?.load_on(device)? })
    }

    /// Keys of a block of the kernel of an attention, if there is one.
    pub fn block_of(config: &AttentionConfig) -> Option<u64> {
        Entry::find(T::ARRIVING, &config.arriving::<T>().ok()?).ok().map(|entry| entry.tile[1])
    }

    /// The kernel's name.
    pub fn kernel(&self) -> &'static str {
        self.entry.name
    }

    /// Keys of a block.
    pub fn block(&self) -> u64 {
        self.entry.tile[1]
    }

    /// Binds tensors; encodes their maps and copies those to the device, in stream order.
    pub fn bind<'a>(&self, stream: &Stream, tensors: ArrivingTensors<'a, T>) -> Result<Waiting<'a>> {
        (self.bind)(Binding { stream, config: self.config, tensors })
    }
}

/// A tensor of a rank by chunks of so many rows: `[chunks of all batches, heads, rows, size]`.
fn by_chunk(Strided { shape: [_, rows, heads, size], strides: [_, row, head, one] }: Strided<4>, chunk: u64) -> Strided<4> {
    Strided { shape: [rows / chunk.max(1), heads, chunk, size], strides: [chunk * row, head, row, one] }
}

fn load_with<K, T>(
    runtime: &Runtime,
    bind: for<'s, 'a> fn(Arc<Loaded<K>>, Binding<'s, 'a, T>) -> Result<Waiting<'a>>,
) -> Result<Unloaded<Bind<T>>>
where
    K: Kernel + Signature + Send + Sync + 'static,
    T: ArrivingElement,
{
    Unloaded::new(runtime, |kernel| -> Bind<T> { Box::new(move |binding| bind(Arc::clone(&kernel), binding)) })
}

/// Dense tensors of a rank, mapped for the kernels.
pub(super) struct MappedRank<'a, T: RegisterElement, const D: usize, const V: usize, const KEYS: usize> {
    q: TensorMap<'a, T, WARPGROUP_QUERIES, D, Swizzle128, 4>,
    own: Maps<'a, T, D, V, KEYS>,
    gathered: Maps<'a, T, D, V, KEYS>,
    out: TensorMapMut<'a, T, WARPGROUP_QUERIES, V, Swizzle128, 4>,
    log_sum_exp: DeviceViewMut<'a, f32>,
    counter: Buffer<u32>,
    shape: Shape,
    chunks: ArrivingChunks<'a>,
    /// Rows of a chunk in whole tiles.
    padded: u32,
    section: u32,
    scale: f32,
}

/// The maps of keys and of values.
type Maps<'a, T, const D: usize, const V: usize, const KEYS: usize> =
    (TensorMap<'a, T, KEYS, D, Swizzle128, 4>, TensorMap<'a, T, KEYS, V, Swizzle128, 4>);

impl<'a, T: ArrivingElement + RegisterElement, const D: usize, const V: usize, const KEYS: usize> MappedRank<'a, T, D, V, KEYS> {
    /// Maps them, for tiles of so many queries.
    pub(super) fn new(
        uploads: &mut Uploads,
        stream: &Stream,
        config: &AttentionConfig,
        tensors: ArrivingTensors<'a, T>,
        queries: u32,
    ) -> Result<Self> {
        let ArrivingTensors { q, own, gathered, out, log_sum_exp, places, .. } = tensors;
        let ArrivingPlaces::Chunks(chunks) = places else {
            return Err(Error::Invalid {
                what: "ContextParallel, fused",
                why: "a kernel of dense tensors has packed sequences".to_owned(),
            });
        };
        let ([batches, keys, ..], [_, all_rows, heads, _], rows) = (gathered[0].shape(), q.shape(), chunks.rows);
        let mut maps = |[k, v]: [Heads<'a, T>; 2], layout: &dyn Fn(Strided<4>) -> Strided<4>| -> Result<Maps<'a, T, D, V, KEYS>> {
            let k = TensorMap::with(uploads, stream, k.view(), layout(k.layout()))?;
            Ok((k, TensorMap::with(uploads, stream, v.view(), layout(v.layout()))?))
        };
        let (own, gathered) = (maps(own, &|of| by_chunk(of, rows))?, maps(gathered, &by_head)?);
        let q = TensorMap::with(uploads, stream, q.view(), by_chunk(q.layout(), rows))?;
        let of_out = by_chunk(out.layout(), rows);
        let out = TensorMapMut::with(uploads, stream, out.into_view(), of_out)?;
        let [batches, heads, group, of_rank, keys] =
            [batches, heads, config.heads / config.key_heads, all_rows / batches.max(1), keys].map(|size| size as u32);
        debug_assert_eq!(u64::from(of_rank), u64::from(RANK_CHUNKS) * rows, "a rank has both of its chunks");
        Ok(Self {
            q,
            own,
            gathered,
            out,
            log_sum_exp,
            counter: Buffer::zeros(stream, 1)?,
            shape: Shape { batches, heads, group, queries: of_rank, keys },
            chunks,
            padded: rows.next_multiple_of(queries.into()) as u32,
            section: config.section(size_of::<T>() as u64),
            scale: config.scale_log2(),
        })
    }

    /// What a launch takes.
    pub(super) fn argument<'s, 'w: 's, const CAUSAL: bool>(
        &'s mut self,
        waits: WaitsArgument<'w>,
    ) -> ArrivingArgument<'s, T, D, V, KEYS, CAUSAL>
    where
        Columns<V>: MatrixColumns,
    {
        let WaitsArgument { lines, first, patience } = waits;
        let waits = WaitsArgument { lines, first, patience };
        let ArrivingChunks { rows, own, section, flags, own_apart } = self.chunks;
        let [first, second] = own.map(|chunk| chunk as u32);
        ArrivingArgument {
            q: self.q.view(),
            own: KeyMapsArgument { k: self.own.0.view(), v: self.own.1.view() },
            gathered: KeyMapsArgument { k: self.gathered.0.view(), v: self.gathered.1.view() },
            target: RoundedArgument { out: self.out.view_mut(), log_sum_exp: self.log_sum_exp.reborrow() },
            shape: self.shape,
            arriving: ArrivingKeysArgument { chunk: rows as u32, padded: self.padded, first, second, section, flags, waits, own_apart },
            order: TileOrderArgument { counter: self.counter.view_mut(), section: self.section },
            scale: self.scale,
        }
    }
}

fn bind<'a, T, const D: usize, const V: usize, const KEYS: usize, G, P, const CAUSAL: bool>(
    kernel: Arc<Loaded<AttentionForward<T, D, V, KEYS, G, P>>>,
    Binding { stream, config, tensors }: Binding<'_, 'a, T>,
) -> Result<Waiting<'a>>
where
    T: ArrivingElement + RegisterElement + StoredElement,
    G: WarpgroupRoles,
    P: Policy<Of<T, D, V, KEYS> = oxtile_kernels::attention::Arriving<T, D, V, KEYS, CAUSAL>>,
    Columns<D>: MatrixColumns,
    Columns<V>: MatrixColumns,
    Columns<KEYS>: MatrixColumns,
    AttentionForward<T, D, V, KEYS, G, P>: Kernel,
{
    let mut uploads = Uploads::default();
    let mut mapped = MappedRank::<T, D, V, KEYS>::new(&mut uploads, stream, &config, tensors, G::QUERIES)?;
    uploads.copy(stream)?;
    Ok(Box::new(move |stream, waits| kernel.launch(stream, AttentionForwardArgs { problem: mapped.argument(waits), marker: PhantomData })))
}

/// With windows, caps, sinks and largest scores.
fn bind_options<'a, T, const D: usize, const V: usize, const KEYS: usize, G>(
    kernel: Arc<Loaded<AttentionForward<T, D, V, KEYS, G, ArrivingOptioned>>>,
    Binding { stream, config, mut tensors }: Binding<'_, 'a, T>,
) -> Result<Waiting<'a>>
where
    T: ArrivingElement + RegisterElement + StoredElement,
    G: WarpgroupRoles,
    Columns<D>: MatrixColumns,
    Columns<V>: MatrixColumns,
    Columns<KEYS>: MatrixColumns,
    AttentionForward<T, D, V, KEYS, G, ArrivingOptioned>: Kernel,
{
    let mut uploads = Uploads::default();
    let (sink, mut max_logit) = (tensors.sink.take(), tensors.max_logit.take());
    let mut mapped = MappedRank::<T, D, V, KEYS>::new(&mut uploads, stream, &config, tensors, G::QUERIES)?;
    let sink = BoundSink::new(&mut uploads, &config, sink);
    uploads.copy(stream)?;
    let words = Workspace::words(max_logit.as_ref().map_or(0, DeviceViewMut::len));
    let mut workspace = Buffer::<u32>::zeros(stream, words)?;
    Ok(Box::new(move |stream, waits| {
        let problem = ArrivingOptionsArgument {
            arriving: mapped.argument(waits),
            window: config.seen(),
            scores: config.scores(),
            sink: sink.argument(),
            max_logit: max_logit.as_mut().map(DeviceViewMut::reborrow),
            workspace: workspace.view_mut(),
        };
        kernel.launch(stream, AttentionForwardArgs { problem, marker: PhantomData })
    }))
}

/// The kernels of one tile.
macro_rules! tile {
    ($t:ident $d:tt $v:tt $keys:tt $roles:ident) => {
        rows! { ForwardKernel:
            [Wgmma { problem: Problem::Dense { causal: false, ring: false }, sizes: [$d, $v] }] [<$roles as WarpgroupRoles>::QUERIES, $keys]
                AttentionForward<$t, $d, $v, $keys, $roles, ArrivingFull>: bind::<$t, $d, $v, $keys, $roles, ArrivingFull, false>;
            [Wgmma { problem: Problem::Dense { causal: true, ring: false }, sizes: [$d, $v] }] [<$roles as WarpgroupRoles>::QUERIES, $keys]
                AttentionForward<$t, $d, $v, $keys, $roles, ArrivingCausal>: bind::<$t, $d, $v, $keys, $roles, ArrivingCausal, true>;
        }
    };
}

/// The kernel with options of one tile.
macro_rules! options {
    ($t:ident $d:tt $v:tt $keys:tt $roles:ident) => {
        rows! { ForwardKernel:
            [Wgmma { problem: Problem::Options, sizes: [$d, $v] }] [<$roles as WarpgroupRoles>::QUERIES, $keys]
                AttentionForward<$t, $d, $v, $keys, $roles, ArrivingOptioned>: bind_options::<$t, $d, $v, $keys, $roles>;
        }
    };
}

/// Those of packed sequences.
macro_rules! packed {
    ($t:ident $d:tt $v:tt $keys:tt $roles:ident) => {
        rows! { ForwardKernel:
            [Wgmma { problem: Problem::Packed { causal: false, ring: false }, sizes: [$d, $v] }] [<$roles as WarpgroupRoles>::QUERIES, $keys]
                AttentionForward<$t, $d, $v, $keys, $roles, ArrivingPackedFull>:
                    arriving_packed::bind::<$t, $d, $v, $keys, $roles, ArrivingPackedFull, false>;
            [Wgmma { problem: Problem::Packed { causal: true, ring: false }, sizes: [$d, $v] }] [<$roles as WarpgroupRoles>::QUERIES, $keys]
                AttentionForward<$t, $d, $v, $keys, $roles, ArrivingPackedCausal>:
                    arriving_packed::bind::<$t, $d, $v, $keys, $roles, ArrivingPackedCausal, true>;
        }
    };
}

macro_rules! elements {
    ($($t:ident)*) => { $(
        impl ArrivingElement for $t {
            const ARRIVING: Table<ForwardKernel, Unloaded<Bind<$t>>> = &[
                tile!($t 64 64 128 Narrow), tile!($t 128 128 128 Pair), tile!($t 192 128 128 Wide), tile!($t 256 256 80 Wide),
                options!($t 64 64 128 Pair), options!($t 128 128 128 Wide), options!($t 192 128 128 Wide), options!($t 256 256 64 Wide),
                packed!($t 64 64 128 Narrow), packed!($t 128 128 128 Pair),
            ];
        }
    )* };
}

elements! { bf16 f16 }
