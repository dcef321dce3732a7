//! All-gather and product as one operation.

use std::fmt;

use oxtile_kernels::gemm::PRESENT;
use oxtile_tile::launch::{BufferAccess, DeviceView, DeviceViewMut};
use oxtile_tile::num::Pod;

use super::call::GatheredProduct;
use super::choice::{OverlapChoice, Rates};
use super::config::{AllGatherConfig, Gathers, Method};
use super::memory::{Inner, OverlapMemory, PLACES};
use super::products::ShardProducts;
use super::schedule::{Schedule, banded};
use super::table::{GatherOperands, GatheredKernel, Instance, Order, Waiting};
use crate::choice::Entry;
use crate::gemm::{Epilogue, Gemm, GemmConfig, Matrices, Unfinished, wgmma_of};
use crate::runtime::{Bound, Buffer, Error, Result, Stream};

/// A product of which one operand is gathered from all members of a team: the copies to the others and the product overlap.
///
/// Each rank has a shard of one operand and its own part of the other ([`Gathers`]). A call puts the shard to the other members by copy engines, in chunks with a
/// flag for each, while the product begins with what is there.
///
/// A fused product has the bits of a [`Gemm`] on the gathered operand whose tiles are [not split](Gemm::planned). Where the sum is gathered, those of operands whose sum begins
/// with the first step that is wholly of the own shard. The other methods have the bits of [`Gemm::new`], of all rows or of each shard.
///
/// 1. all ranks take an [`OverlapMemory`], and make the operation ([`new`](Self::new)), which neither waits nor meets anyone;
/// 2. all [bind](Self::bind) it, which compares what they made;
/// 3. before each call the rank writes its [shard](GatheredProduct::shard) in place, then [runs](GatheredProduct::run) the product.
///
/// A call does not wait on the host and allocates no device memory. Any may be captured, the first too: by each method. After a call, wait for a
/// [ticket](crate::symmetric::Arena::ticket) of the stream: it names the rank and the chunk that did not come.
///
/// ```
/// use oxtile::comm::{EmulatedCommunicator, Team, WorldSize};
/// use oxtile::num::bf16;
/// use oxtile::overlap::{AllGatherConfig, AllGatherGemm, Global, OverlapMemory};
/// use oxtile::symmetric::{Arena, ArenaOptions};
/// use oxtile::{Buffer, Result, Runtime};
///
/// # fn main() -> Result<()> {
/// let runtime = Runtime::checked(1)?;
/// let rank = EmulatedCommunicator::world_of(&runtime, WorldSize::ONE)?.remove(0);
/// let arena = Arena::open(&rank, ArenaOptions::default())?;
/// let (compute, out) = (rank.device().stream()?, rank.device().urgent_stream()?);
/// let member = Team::all(arena.world()).member(arena.rank()).unwrap();
///
/// let config = AllGatherConfig::new(Global { m: 64, n: 64, k: 64 });
/// let memory = OverlapMemory::take(&arena, &member, config.bytes::<bf16, bf16>()?, &out)?;
/// let gather = AllGatherGemm::<bf16, bf16>::new(&memory, &compute, config)?;
///
/// let (weight, mut d) = (Buffer::zeros(&compute, 64 * 64)?, Buffer::zeros(&compute, 64 * 64)?);
/// let mut product = gather.bind(&compute, weight.view(), None, d.view_mut())?;
/// for _ in 0..3 {
///     product.shard(&compute)?.fill_zero(&compute)?;
///     product.run(&compute)?;
/// }
/// arena.ticket(&compute)?.wait()?;
/// # drop(product);
/// # drop((gather, memory));
/// # arena.close().unwrap().finish()
/// # }
/// ```
pub struct AllGatherGemm<T: GatherOperands<O>, O: 'static> {
    pub(super) memory: OverlapMemory,
    pub(super) config: AllGatherConfig,
    choice: OverlapChoice,
    pub(super) schedule: Schedule,
    product: GemmConfig,
    work: Work<T, O>,
    /// The gathered operand in each place.
    pub(super) places: [Buffer<T>; PLACES],
    number: u64,
    note: String,
}

/// What multiplies.
enum Work<T: GatherOperands<O>, O: 'static> {
    Fused { kernel: Box<dyn Instance<T, O>>, tiles: Buffer<u32>, flags: Buffer<u32> },
    Chunked(ShardProducts<T, O>),
    Sequential(Gemm<T, O>),
}

/// What is multiplied, but for the gathered operand, and what is computed of it.
#[derive(Clone, Copy)]
struct Operands<'a, T, O> {
    config: GemmConfig,
    weight: DeviceView<'a, T>,
    scales: Option<[DeviceView<'a, f32>; 2]>,
    bias: Option<DeviceView<'a, O>>,
}

impl<T: GatherOperands<O>, O: Pod> AllGatherGemm<T, O> {
    /// Chooses the method, loads its kernels and uploads the order of its tiles with `stream`. Waits for no other rank. Not in a capture: it allocates.
    ///
    /// # Errors
    /// As [`AllGatherConfig::choose`]; [`Error::Invalid`] for memory that is too small; as [`Runtime::load`](crate::Runtime::load).
    pub fn new(memory: &OverlapMemory, stream: &Stream, config: AllGatherConfig) -> Result<Self> {
        const WHAT: &str = "AllGatherGemm::new";
        let inner = &memory.0;
        inner.arena.check_stream(stream)?;
        let (ranks, me, device) = (inner.member.team().size(), inner.member.rank().index(), stream.device());
        if let Some(format) = config.format {
            let why = format!("the configuration's operand travels as {format}: take QuantizedAllGatherGemm");
            return Err(Error::Invalid { what: WHAT, why });
        }
        memory.check_room(WHAT, config.bytes::<T, O>()?)?;
        let rates = Rates { multiprocessors: device.limits().multiprocessors, ..Rates::H200 };
        let choice = config.choose_where::<T, O>(ranks, &rates, wgmma_of(device.capability()))?;
        let (schedule, product) = (config.schedule::<T, O>(ranks, choice.cut), config.product(ranks)?);
        let runtime = device.runtime();
        let work = match (choice.method, choice.tile) {
            (Method::Fused, Some(tile)) => {
                let [m_major, n_major] = product.majors();
                let kernel = GatheredKernel { by_sum: config.gathers != Gathers::Rows, tile, m_major, n_major };
                let kernel = (Entry::find(T::GATHERED, &kernel)?.load)(&runtime)?;
                kernel.prepare(&device)?;
                let ([rows, columns], cluster) = tile.size();
                let columns = product.n.div_ceil(columns) as u32;
                let tiles = match config.gathers {
                    Gathers::Rows => schedule.tiles(me, rows * cluster, columns),
                    Gathers::SumOfA | Gathers::SumOfB => {
                        banded(&(0..product.m.div_ceil(rows * cluster) as u32).collect::<Vec<_>>(), columns)
                    }
                };
                let flags = Buffer::from_slice(stream, &flags_of(inner, &schedule))?;
                Work::Fused { kernel, tiles: Buffer::from_slice(stream, &tiles)?, flags }
            }
            (Method::Chunked, _) => Work::Chunked(ShardProducts::new(&runtime, &schedule, product)?),
            _ => Work::Sequential(Gemm::new(&runtime, product)?),
        };
        let len = config.gathered().iter().product();
        let number = inner.next_operation();
        let (elements, results) = (std::any::type_name::<T>(), std::any::type_name::<O>());
        let OverlapChoice { cut, order, .. } = &choice;
        let note = format!("{config:?} of {elements} into {results} in {:?}, cut {cut:?}, puts {order:?}", inner.member.team());
        inner.arena.note(&inner.operation(number), &note)?;
        let (memory, places) = (memory.clone(), [0, 1].map(|place| inner.place(place, len)));
        Ok(Self { memory, config, choice, schedule, product, work, places, number, note })
    }

    /// The method, and why.
    pub fn choice(&self) -> &OverlapChoice {
        &self.choice
    }

    /// Binds the operand that is not gathered, a bias of one value a column if there is one, and the result. Compares the operation with the other members',
    /// and waits for them to make it; encodes tensor maps and waits for those to be there. Not in a capture, which refuses the wait ([`Error::NotCapturable`](crate::Error::NotCapturable)): bind before, and capture calls.
    ///
    /// # Errors
    /// [`Error::Mismatch`] for another operation on another member; [`Error::Length`] for a view of another size; ranks that do not come; as
    /// [`Gemm::bind`].
    pub fn bind<'a>(
        &'a self,
        stream: &Stream,
        weight: DeviceView<'a, T>,
        bias: Option<DeviceView<'a, O>>,
        d: DeviceViewMut<'a, O>,
    ) -> Result<GatheredProduct<'a, T, O>> {
        self.bind_as("AllGatherGemm::bind", stream, (weight, None), Epilogue::of_bias(bias), d)
    }

    /// As [`bind`](Self::bind), with a factor of each operand in device memory, one element each, that of `A` first: the product is multiplied by both. What the
    /// members gather has one factor: agree on it before the shards are quantized.
    ///
    /// # Errors
    /// As [`bind`](Self::bind).
    pub fn bind_scaled<'a>(
        &'a self,
        stream: &Stream,
        weight: DeviceView<'a, T>,
        scales: [DeviceView<'a, f32>; 2],
        bias: Option<DeviceView<'a, O>>,
        d: DeviceViewMut<'a, O>,
    ) -> Result<GatheredProduct<'a, T, O>> {
        self.bind_as("AllGatherGemm::bind_scaled", stream, (weight, Some(scales)), Epilogue::of_bias(bias), d)
    }

    /// As [`bind`](Self::bind), with an [`Epilogue`], and with factors as [`bind_scaled`](Self::bind_scaled) has them if there are any. What is kept or
    /// read, and the gradient of a bias, are launches after the product, in the call. Where rows are gathered, the gradient of a bias is that of all rows.
    ///
    /// # Errors
    /// As [`bind`](Self::bind); [`Error::Invalid`] for an epilogue that does not fit the configuration, or whose `kept` begins at no multiple of 16 bytes.
    pub fn bind_epilogue<'a>(
        &'a self,
        stream: &Stream,
        weight: DeviceView<'a, T>,
        scales: Option<[DeviceView<'a, f32>; 2]>,
        epilogue: Epilogue<'a, O>,
        d: DeviceViewMut<'a, O>,
    ) -> Result<GatheredProduct<'a, T, O>> {
        self.bind_as("AllGatherGemm::bind_epilogue", stream, (weight, scales), epilogue, d)
    }

    fn bind_as<'a>(
        &'a self,
        bind: &'static str,
        stream: &Stream,
        (weight, scales): (DeviceView<'a, T>, Option<[DeviceView<'a, f32>; 2]>),
        epilogue: Epilogue<'a, O>,
        d: DeviceViewMut<'a, O>,
    ) -> Result<GatheredProduct<'a, T, O>> {
        let (inner, GemmConfig { m, n, k, .. }) = (&self.memory.0, self.product);
        let (what, len) = match self.config.gathers {
            Gathers::Rows | Gathers::SumOfA => ("AllGatherGemm::bind, b", k * n),
            Gathers::SumOfB => ("AllGatherGemm::bind, a", m * k),
        };
        Error::check_length(what, len, weight.len())?;
        scales.into_iter().flatten().try_for_each(|scale| Error::check_length("AllGatherGemm::bind, scale", 1, scale.len()))?;
        Error::check_length("AllGatherGemm::bind, d", m * n, d.len())?;
        epilogue.check(bind, &self.product)?;
        if let Some(address) = epilogue.kept.as_ref().map(DeviceViewMut::address).filter(|address| !address.is_multiple_of(16)) {
            return Err(Error::Invalid { what: bind, why: format!("`kept` begins at {address:#x}, no multiple of 16 bytes") });
        }
        inner.arena.compare_notes(&inner.operation(self.number), self.number, &self.note, inner.others())?;
        inner.open(stream)?;
        let (result, input) = (d.access("d"), epilogue.kept.as_ref().map(|kept| kept.access("kept")));
        // SAFETY: what follows is enqueued by `GatheredProduct::run` alone, after the product of the call.
        let Unfinished { config, bias, d, following } = unsafe { epilogue.part::<T>(stream, self.product, d) }?;
        let operands = Operands { config, weight, scales, bias };
        let [first, second] = [0, 1].map(|place| self.bind_place(stream, place, operands, &d));
        let products = [first?, second?];
        // SAFETY: what `d` and `kept` lend is lent on, to be read: between the calls, which need the product that lends it for themselves.
        let lent = |of: BufferAccess<'a>| unsafe { DeviceView::from_raw(of.address, m * n, of.owner) };
        GatheredProduct::new(self, (lent(result), input.map(lent)), products, following)
    }

    /// The product in one place.
    fn bind_place<'a>(
        &'a self,
        stream: &Stream,
        place: usize,
        operands: Operands<'a, T, O>,
        d: &DeviceViewMut<'a, O>,
    ) -> Result<Product<'a>> {
        let (gathered, length) = (self.places[place].view(), d.len());
        let target = d.access("d");
        // SAFETY: the two places' products share what they write. Only the call of one of them is enqueued at a time, by `GatheredProduct::run`, which has the
        // only reference to both, and each call is after the one before it.
        let d = || unsafe { DeviceViewMut::from_raw(target.address, length, target.owner) };
        let Operands { config, weight, scales, bias } = operands;
        let matrices = |gathered, d| match self.config.gathers {
            Gathers::Rows | Gathers::SumOfA => Matrices { a: gathered, b: weight, scales, bias, d },
            Gathers::SumOfB => Matrices { a: weight, b: gathered, scales, bias, d },
        };
        Ok(match &self.work {
            Work::Sequential(gemm) => Product::Sequential(gemm.bind_activated(stream, config.activation, matrices(gathered, d()))?),
            Work::Fused { kernel, tiles, flags } => {
                let (schedule, me) = (&self.schedule, self.memory.member().rank().index());
                // The first step that is wholly of the own part.
                let first = schedule.shard(me).start.div_ceil(T::STEP) as u32;
                let [slab, first] = match self.config.gathers {
                    Gathers::Rows => [(schedule.unit / T::STEP) as u32, 0],
                    // A part that is empty begins beyond the end.
                    _ if first >= self.product.k.div_ceil(T::STEP) as u32 => [1, 0],
                    _ => [1, first],
                };
                let (tiles, flags, margin) = (tiles.view(), flags.view(), self.config.overlap.margin);
                let order = Order {
                    tiles,
                    flags,
                    extent: schedule.panel_extent() as u32,
                    sources: schedule.members * schedule.cut.panels,
                    slab,
                    first,
                    margin,
                };
                Product::Fused(kernel.bind(stream, config, order, matrices(gathered, d()))?)
            }
            Work::Chunked(products) => Product::Chunked(products.bind(stream, &self.schedule, config, gathered, d, matrices)?),
        })
    }
}

/// A product bound in one place.
pub(super) enum Product<'a> {
    Fused(Waiting<'a>),
    /// By members.
    Chunked(Vec<Bound<'a>>),
    Sequential(Bound<'a>),
}

/// For each unit and panel of all shards the number of the flag that the kernel waits for, among those of the place.
fn flags_of(inner: &Inner, schedule: &Schedule) -> Vec<u32> {
    let me = inner.member.rank().index();
    let flag = |unit: u32, source: u32, panel: u32| {
        let number = if source == me { None } else { schedule.number(source, schedule.position(me, source), panel, unit) };
        number.map_or(PRESENT, |number| inner.ready.index(number, inner.world_rank(source)))
    };
    let panels = || (0..schedule.members).flat_map(|source| (0..schedule.cut.panels).map(move |panel| (source, panel)));
    (0..schedule.units()).flat_map(|unit| panels().map(move |(source, panel)| flag(unit, source, panel))).collect()
}

impl<T: GatherOperands<O>, O> fmt::Debug for AllGatherGemm<T, O> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("AllGatherGemm").field("config", &self.config).field("method", &self.choice.method).finish_non_exhaustive()
    }
}
