//! A product and a reduce-scatter as one operation: rows of other ranks are multiplied first, and travel while this rank's own are multiplied.
//!
//! | file | what it holds |
//! |---|---|
//! | `config` | what is computed, and by which methods |
//! | `choice` | which method is taken, and why |
//! | `model` | the times that the methods take |
//! | `shards` | the rows of each member, and the panels in which they travel |
//! | `order` | the order of tiles where other members' rows leave as they are computed |
//! | `kernels` | the kernels that add other members' parts, and store tiles at the others |
//! | `call` | one call |
//! | `quantized` | the same of operands that are codes and scales |

mod call;
mod choice;
mod config;
mod kernels;
mod model;
mod order;
mod quantized;
mod shards;

pub(super) use call::ScatterCall;
pub use call::ScatteredProduct;
pub use choice::{ScatterChoice, ScatterTimes};
pub use config::{ReduceScatterConfig, ScatterMethod};
pub use kernels::ScatterOperands;
pub use quantized::QuantizedGemmReduceScatter;

use std::fmt;
use std::ops::Range;

use oxtile_kernels::copy::{CopyWords, CopyWordsArgs};
use oxtile_kernels::gemm::PRESENT;
use oxtile_tile::launch::{BufferAccess, DeviceView, DeviceViewMut};
use oxtile_tile::num::Pod;

use call::{Around, Run, Sent};
use kernels::{Instance, Launch, Places};
use order::TileLists;
pub(super) use shards::Shards;

use super::choice::Rates;
use super::memory::{Inner, OverlapMemory, PLACES};
use super::schedule::banded;
use crate::gemm::{Activation, Epilogue, Gemm, GemmConfig, Matrices, Unfinished};
use crate::runtime::{Bound, Buffer, Error, Loaded, Result, Stream};
use crate::tensor::Strided;

/// A product whose sum the members of a team share, and of which each gets some rows.
///
/// Each rank has a part of the sum: columns of `A` and rows of `B`. It multiplies the rows of the next member first, then those of the member
/// after it. Parts travel in the type of the result. The kernel of the own rows adds the others' parts in `f32`: first its own product, which is not rounded, then those
/// of the other members in ascending order, then the result as it was [if it is added](ReduceScatterConfig::beta); the factor, the bias and the activation come after the whole sum, once. So the bits are the same in every run, in whichever order parts arrive. Methods, and numbers of panels, may divide a product along `k` in other ways ([`GemmPlan`](crate::gemm::GemmPlan)): then their bits differ by its rounding.
///
/// By [`ScatterMethod::Whole`] all rows are one kernel, panel by panel of all members, and own tiles between those of later panels; copy engines put panels as their tiles are there. By [`ScatterMethod::Direct`] the kernel stores each tile of another member's rows at that one itself. By [`ScatterMethod::Fused`] own rows come last: copy engines put panels, each the result of a product, and the kernel of the own rows waits for each panel
/// before it adds it. By [`ScatterMethod::Sequential`] the stream waits for all of them before that kernel.
///
/// 1. all ranks take an [`OverlapMemory`], and make the operation ([`new`](Self::new)), which neither waits nor meets anyone;
/// 2. all [bind](Self::bind) it, which compares what they made;
/// 3. each call [runs](ScatteredProduct::run) the product of what is in the bound matrices then.
///
/// A call does not wait on the host and allocates no device memory. Any may be captured, the first too: by each method. After a call, wait for a
/// [ticket](crate::symmetric::Arena::ticket) of the stream: it names the rank and the chunk that did not come.
///
/// ```
/// use oxtile::comm::{EmulatedCommunicator, Team, WorldSize};
/// use oxtile::num::bf16;
/// use oxtile::overlap::{GemmReduceScatter, Global, OverlapMemory, ReduceScatterConfig};
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
/// let config = ReduceScatterConfig::new(Global { m: 64, n: 64, k: 64 });
/// let memory = OverlapMemory::take(&arena, &member, config.bytes::<bf16, bf16>(WorldSize::ONE)?, &out)?;
/// let scatter = GemmReduceScatter::<bf16, bf16>::new(&memory, &compute, config)?;
///
/// let (a, weight) = (Buffer::zeros(&compute, 64 * 64)?, Buffer::zeros(&compute, 64 * 64)?);
/// let mut d = Buffer::zeros(&compute, config.rows(WorldSize::ONE) * 64)?;
/// let mut product = scatter.bind(&compute, a.view(), weight.view(), None, d.view_mut())?;
/// for _ in 0..3 {
///     product.run(&compute)?;
/// }
/// arena.ticket(&compute)?.wait()?;
/// # drop(product);
/// # drop((scatter, memory));
/// # arena.close().unwrap().finish()
/// # }
/// ```
pub struct GemmReduceScatter<T: ScatterOperands<O>, O: 'static> {
    memory: OverlapMemory,
    config: ReduceScatterConfig,
    choice: ScatterChoice,
    shards: Shards,
    product: GemmConfig,
    /// The products of panels, by their rows.
    panels: Vec<(u64, Gemm<T, O>)>,
    /// What is put to other members, by target and panel. Each is memory of its own: work on one does not wait for copies of another.
    sent: Vec<(u32, u32, Buffer<O>)>,
    own: Box<dyn Instance<T, O>>,
    runs: Vec<OwnRows>,
    /// If all rows are one kernel.
    whole: Option<Whole<O>>,
    number: u64,
    note: String,
}

/// Own rows that are one product.
struct OwnRows {
    panels: Range<u32>,
    /// Of the rank's shard.
    rows: Range<u64>,
    /// The order of tiles.
    tiles: Buffer<u32>,
    /// For each panel and each part, other members' in ascending order first, the number of the flag that the kernel waits for, among those of the place.
    flags: Buffer<u32>,
}

/// What a kernel of all rows takes beside own ones.
struct Whole<O> {
    /// The orders of the tiles that leave, and of all.
    sent: Buffer<u32>,
    together: Buffer<u32>,
    /// Where the rows of each member go, as the kernel knows it.
    members: Buffer<u32>,
    /// Where copy engines put them from, if they do.
    staged: Option<Staged<O>>,
}

/// Rows of the other members, those of one after those of another in the order in which they are computed.
struct Staged<O> {
    rows: Buffer<O>,
    /// The same memory, of whose uses by copies the runtime is not told: they come after flags which the kernel sets, and not after the kernel.
    bytes: Buffer<u8>,
    panels: Vec<StagedPanel>,
}

/// A panel that is put.
struct StagedPanel {
    target: u32,
    panel: u32,
    /// The flag that says that it is there: of both places, as kernels come after the puts of the one before.
    flag: u32,
    /// Its bytes, and where they go in a place.
    from: Range<u64>,
    at: u64,
}

impl<T: ScatterOperands<O>, O: Pod> GemmReduceScatter<T, O> {
    /// Chooses the method, loads its kernels, takes room for what is put to the others, which all operations on one memory share, and uploads the order of tiles with `stream`. Waits for no other rank.
    ///
    /// # Errors
    /// As [`ReduceScatterConfig::choose`]; [`Error::Invalid`] for memory that is too small, and on devices other than Hopper; as [`Runtime::load`](crate::Runtime::load).
    pub fn new(memory: &OverlapMemory, stream: &Stream, config: ReduceScatterConfig) -> Result<Self> {
        let is_contiguous = memory.0.arena.capabilities().contiguous;
        let direct = is_contiguous.then_some(()).ok_or_else(|| "memory of the ranks does not lie in one range of addresses".to_owned());
        Self::made(memory, stream, config, ([direct, Ok(())], false), "rows of each rank")
    }

    /// As [`new`](Self::new). Tiles may be stored at other ranks, and all rows may be one kernel, or may not; own rows may be multiplied a panel at a time. Members compare what becomes of the rows.
    pub(super) fn made(
        memory: &OverlapMemory,
        stream: &Stream,
        config: ReduceScatterConfig,
        (methods, apart): ([Result<(), String>; 2], bool),
        becomes: &str,
    ) -> Result<Self> {
        let inner = &memory.0;
        inner.arena.check_stream(stream)?;
        let (ranks, me, device) = (inner.member.team().size(), inner.member.rank().index(), stream.device());
        crate::gemm::wgmma_of(device.capability()).map_err(|why| {
            let why = format!("parts are added by kernels on wgmma: {why}; multiply by Gemm, and sum by a communicator's collective");
            Error::Invalid { what: "GemmReduceScatter::new", why }
        })?;
        memory.check_room("GemmReduceScatter::new", config.bytes::<T, O>(ranks)?)?;
        let rates = Rates::of(&device);
        let choice = config.choose_where::<T, O>(ranks, &rates, methods)?;
        let mut shards = config.shards(ranks, choice.panels);
        shards.apart = apart;
        let (product, runtime) = (config.product(ranks)?, device.runtime());
        let is_whole = matches!(choice.method, ScatterMethod::Direct | ScatterMethod::Whole);
        let foreign = shards.targets(me).filter(|_| !is_whole).flat_map(|target| (0..shards.panels()).map(move |panel| (target, panel)));
        let foreign: Vec<_> = foreign.collect();
        let (mut panels, mut sent) = (Vec::<(u64, Gemm<T, O>)>::new(), Vec::new());
        for (number, (target, panel)) in foreign.into_iter().enumerate() {
            let rows = shards.panel(target, panel);
            let m = rows.end - rows.start;
            if m > 0 && !panels.iter().any(|(rows, _)| *rows == m) {
                panels.push((m, Gemm::new(&runtime, GemmConfig { m, ..product })?));
            }
            sent.push((target, panel, inner.room::<O>(stream, 1 + number, m * product.n)?));
        }
        let entry = T::kernel(choice.tile, !config.transpose_b).expect("the choice is of kernels that there are");
        let own = (entry.load)(&runtime)?;
        own.prepare(&device)?;
        let (unit, columns) = (choice.tile.size().0[0] * choice.tile.size().1, product.n.div_ceil(choice.tile.size().0[1]) as u32);
        let at_once = rates.multiprocessors.saturating_sub(config.margin).max(1) / choice.tile.size().1.max(1) as u32;
        let lists = is_whole.then(|| TileLists::new(&shards, me, unit, columns, at_once.max(1) as usize));
        let run = |panels: Range<u32>| {
            let rows = shards.rows_of(me, &panels);
            let tiles = match &lists {
                Some(lists) => lists.own.clone(),
                None => banded(&(0..(rows.end - rows.start).div_ceil(unit) as u32).collect::<Vec<_>>(), columns),
            };
            let flags = Buffer::from_slice(stream, &flags_of(inner, &shards, &panels, (choice.method, config.old_parts())))?;
            Ok(OwnRows { panels, rows, tiles: Buffer::from_slice(stream, &tiles)?, flags })
        };
        let runs = shards.runs(me).into_iter().map(run).collect::<Result<Vec<_>>>()?;
        let whole = |lists: TileLists| -> Result<Whole<O>> {
            let staged = if choice.method == ScatterMethod::Whole { Some(Staged::new(inner, stream, &shards, product.n)?) } else { None };
            let [sent, together] = [&lists.sent, &lists.together].map(|list| Buffer::from_slice(stream, list));
            let members = members_of(inner, &shards, staged.is_some());
            Ok(Whole { sent: sent?, together: together?, members: Buffer::from_slice(stream, &members)?, staged })
        };
        let whole = lists.map(whole).transpose()?;
        let number = inner.next_operation();
        let (elements, results) = (std::any::type_name::<T>(), std::any::type_name::<O>());
        let ScatterChoice { method, panels: count, .. } = choice;
        let team = inner.member.team();
        let note = format!("{config:?} of {elements} into {results} by {method:?} in {team:?}, {count} panels, of {becomes}");
        inner.arena.note(&inner.operation(number), &note)?;
        Ok(Self { memory: memory.clone(), config, choice, shards, product, panels, sent, own, runs, whole, number, note })
    }

    /// The method, and why.
    pub fn choice(&self) -> &ScatterChoice {
        &self.choice
    }

    /// Binds this rank's part of `A`, `[m, k / ranks]`, and of `B`, `[k / ranks, n]` or its transpose, a bias of one value a column if there is one, and the result, [`rows`](ReduceScatterConfig::rows) or fewer rows of
    /// `n`: those of its shard of all rows. Every rank names the same bias, which is added once. Compares the operation with the other members', and waits for them to make it; encodes tensor maps
    /// and waits for those to be there.
    ///
    /// # Errors
    /// [`Error::Mismatch`] for another operation on another member; [`Error::Length`] for a view of another size; ranks that do not come; as
    /// [`Gemm::bind`].
    pub fn bind<'a>(
        &'a self,
        stream: &Stream,
        a: DeviceView<'a, T>,
        weight: DeviceView<'a, T>,
        bias: Option<DeviceView<'a, O>>,
        d: DeviceViewMut<'a, O>,
    ) -> Result<ScatteredProduct<'a, T, O>> {
        self.bind_epilogue(stream, a, weight, Epilogue::of_bias(bias), d)
    }

    /// As [`bind`](Self::bind), with an [`Epilogue`] of whole sums: its matrices have the rows of the result. Every rank names the same bias, which is added once. A gradient of a bias is that of the rank's rows: sum those of
    /// all ranks by [`Communicator::all_reduce`](crate::comm::Communicator::all_reduce).
    ///
    /// # Errors
    /// As [`bind`](Self::bind); [`Error::Invalid`] for an epilogue that does not fit the configuration, with what to do.
    pub fn bind_epilogue<'a>(
        &'a self,
        stream: &Stream,
        a: DeviceView<'a, T>,
        weight: DeviceView<'a, T>,
        epilogue: Epilogue<'a, O>,
        d: DeviceViewMut<'a, O>,
    ) -> Result<ScatteredProduct<'a, T, O>> {
        let GemmConfig { m, k, .. } = self.product;
        Error::check_length("GemmReduceScatter::bind, a", m * k, a.len())?;
        self.bind_rows(stream, (|rows: Range<u64>| a.slice(rows.start * k, rows.end * k), weight), epilogue, d)
    }

    /// As [`bind_epilogue`](Self::bind_epilogue), of rows of `A` that are where `a` says.
    fn bind_rows<'a>(
        &'a self,
        stream: &Stream,
        (a, weight): (impl Fn(Range<u64>) -> DeviceView<'a, T>, DeviceView<'a, T>),
        epilogue: Epilogue<'a, O>,
        d: DeviceViewMut<'a, O>,
    ) -> Result<ScatteredProduct<'a, T, O>> {
        let (own, n) = (self.shards.shard(self.memory.member().rank().index()), self.product.n);
        let ReduceScatterConfig { alpha, beta, activation, .. } = self.config;
        let config = GemmConfig { m: own.end - own.start, alpha, beta, activation, ..self.product };
        let len = config.m * n;
        Error::check_length("GemmReduceScatter::bind, d", len, d.len())?;
        epilogue.check("GemmReduceScatter::bind", &config)?;
        let result = d.access("d");
        let old = if self.config.old_parts() > 0 && len > 0 { Some(self.copies_of(stream, result)?) } else { None };
        // SAFETY: what follows is enqueued by `ScatteredProduct::run` alone, after the products of own rows.
        let Unfinished { config, bias, d, following } = unsafe { epilogue.part::<T>(stream, config, d) }?;
        let target = d.access("d");
        let rows = |run: usize| {
            let Range { start, end } = self.runs[run].rows;
            // SAFETY: the runs' products have a part of the result each, which the two places' products share. Only the call of one of them is enqueued at a time, by `ScatteredProduct::run`, which
            // has the only reference to both, and each call is after the one before it.
            unsafe { DeviceViewMut::from_raw(target.address + start * n * size_of::<O>() as u64, (end - start) * n, target.owner) }
        };
        let (sent, own) = self.bind_products(stream, (a, weight), (bias, config.activation), rows)?;
        // SAFETY: what `d` lends is lent on, to be read: between the calls, which need the products that lend it for themselves.
        let result = unsafe { DeviceView::from_raw(result.address, len, result.owner) };
        Ok(ScatteredProduct::new(ScatterCall::new(self, sent, own, Around { old, following, ..Around::default() }), result))
    }

    /// Copies of the own rows of a result as it was, after the other ranks' parts in each place.
    fn copies_of<'a>(&'a self, stream: &Stream, result: BufferAccess<'a>) -> Result<[Bound<'a>; PLACES]> {
        let (device, others) = (stream.device(), u64::from(self.shards.members - 1));
        let len = result.bytes / size_of::<O>() as u64;
        let of_place = |place| -> Result<Bound<'a>> {
            let copy: Loaded<CopyWords> = device.runtime().load()?;
            copy.prepare(&device)?;
            let mut part = self.memory.0.place_from::<O>(place, others * len, len);
            Ok(Bound::new(move |stream| {
                // SAFETY: the result's elements, which live as long as this operation; the products that write them are enqueued after this copy, by the same call.
                let source = unsafe { DeviceView::<O>::from_raw(result.address, len, result.owner) };
                copy.launch(stream, CopyWordsArgs { source: source.cast(), target: part.view_mut().cast() })
            }))
        };
        Ok([of_place(0)?, of_place(1)?])
    }

    pub(super) fn shards(&self) -> &Shards {
        &self.shards
    }

    /// The rows of each product of own rows, of all.
    pub(super) fn own_rows(&self) -> impl Iterator<Item = Range<u64>> + use<'_, T, O> {
        let first = self.shards.shard(self.memory.member().rank().index()).start;
        self.runs.iter().map(move |run| first + run.rows.start..first + run.rows.end)
    }

    /// The products of other members' panels, and of each run of own rows in each place; `a` says where rows of `A` are, and `rows` lends a run's rows of the result, once a place.
    pub(super) fn bind_products<'a>(
        &'a self,
        stream: &Stream,
        (a, weight): (impl Fn(Range<u64>) -> DeviceView<'a, T>, DeviceView<'a, T>),
        (bias, activation): (Option<DeviceView<'a, O>>, Activation),
        rows: impl Fn(usize) -> DeviceViewMut<'a, O>,
    ) -> Result<(Vec<Sent<'a>>, Vec<Run<'a, O>>)> {
        let (inner, GemmConfig { n, k, .. }) = (&self.memory.0, self.product);
        Error::check_length("GemmReduceScatter::bind, b", k * n, weight.len())?;
        if let Some(bias) = bias {
            Error::check_length("GemmReduceScatter::bind, bias", n, bias.len())?;
        }
        inner.arena.compare_notes(&inner.operation(self.number), self.number, &self.note, inner.others())?;
        inner.open(stream)?;
        let sent = self.sent.iter().map(|of| self.bind_panel(stream, of, &a, weight)).collect::<Result<Vec<_>>>()?;
        let first = self.shards.shard(inner.member.rank().index()).start;
        let own = |(number, run): (usize, &'a OwnRows)| {
            let of_a = if self.whole.is_some() { a(0..self.product.m) } else { a(first + run.rows.start..first + run.rows.end) };
            let in_place = |place| {
                let matrices = Matrices { a: of_a, b: weight, scales: None, bias, d: rows(number) };
                self.bind_run(stream, place, (run, activation), matrices)
            };
            Ok([in_place(0)?, in_place(1)?])
        };
        let own = self.runs.iter().enumerate().map(own).collect::<Result<Vec<_>>>()?;
        Ok((sent, own))
    }

    /// The product of a panel of another member's rows.
    fn bind_panel<'a>(
        &'a self,
        stream: &Stream,
        (target, panel, room): &'a (u32, u32, Buffer<O>),
        a: &impl Fn(Range<u64>) -> DeviceView<'a, T>,
        weight: DeviceView<'a, T>,
    ) -> Result<Sent<'a>> {
        let (GemmConfig { n, .. }, first) = (self.product, self.shards.shard(*target).start);
        let rows = self.shards.panel(*target, *panel);
        let count = rows.end - rows.start;
        let gemm = self.panels.iter().find(|(rows, _)| *rows == count).filter(|_| count > 0);
        let product = gemm.map(|(_, gemm)| {
            // SAFETY: the room is of this panel alone, and is written by this product alone; a call is after the one before it, also of another operation that has the same room.
            let d = unsafe { DeviceViewMut::from_raw(room.address(), count * n, room.owner()) };
            let a = a(first + rows.start..first + rows.end);
            gemm.bind_matrices(stream, Matrices { a, b: weight, scales: None, bias: None, d })
        });
        let size = size_of::<O>() as u64;
        // SAFETY: the bytes of a buffer's elements, which share its uses.
        let bytes = unsafe { Buffer::<u8>::of(std::sync::Arc::clone(room.memory()), count * n * size) };
        let at = self.shards.part_at(*target, self.memory.member().rank().index(), *panel) * n * size;
        Ok(Sent { product: product.transpose()?, bytes, target: *target, panel: *panel, at })
    }

    /// The product of a run of own rows, with the parts that lie in a place; of all rows, if tiles leave.
    fn bind_run<'a>(
        &'a self,
        stream: &Stream,
        place: usize,
        (run, activation): (&'a OwnRows, Activation),
        matrices: Matrices<'a, T, T, O>,
    ) -> Result<Launch<'a, O>> {
        let (GemmConfig { n, .. }, rows) = (self.product, run.rows.end - run.rows.start);
        let ReduceScatterConfig { alpha, margin, .. } = self.config;
        let sources = self.shards.members - 1 + self.config.old_parts();
        let m = if self.whole.is_some() { self.product.m } else { rows };
        let config = GemmConfig { m, alpha, activation, ..self.product };
        let of_source = |rows: u64| u64::from(sources) * rows * n;
        let parts = (sources > 0).then(|| self.memory.0.place_from::<O>(place, of_source(run.rows.start), of_source(rows)));
        let own = kernels::Own { rows, parts: (sources, parts), flags: run.flags.view(), extent: self.shards.panel_rows() as u32, margin };
        match &self.whole {
            Some(whole) => self.with_places(stream, place, whole, |places| self.own.bind(stream, config, own, matrices, Some(places))),
            None => self.own.bind(stream, config, own, matrices, None),
        }
    }

    /// Where tiles go that leave, as the kernel's map of it is made.
    fn with_places<'a, R>(
        &'a self,
        stream: &Stream,
        place: usize,
        whole: &'a Whole<O>,
        bind: impl FnOnce(Places<'a, '_, O>) -> Result<R>,
    ) -> Result<R> {
        let (inner, n) = (&self.memory.0, self.product.n);
        let (shard, panels, me) = (self.shards.extent(), self.shards.panels(), inner.member.rank().index());
        let rows = u64::from(self.shards.members - 1) * shard;
        // Before a capture: it copies where the others' flags lie.
        inner.ready.signals(stream)?;
        let places = |all, layout| Places { members: whole.members.view(), all, layout, shard: shard as u32, panels, me };
        if let Some(staged) = &whole.staged {
            return bind(places(staged.rows.view(), Strided::dense([1, rows, n])));
        }
        let all = inner.places();
        let all = all[place].contiguous()?;
        let strides = [all.stride() / size_of::<O>() as u64, n, 1];
        let view = all.view(stream)?.cast();
        bind(places(view, Strided { shape: [inner.arena.world().get().into(), rows, n], strides }))
    }
}

impl<O: Pod> Staged<O> {
    fn new(inner: &Inner, stream: &Stream, shards: &Shards, n: u64) -> Result<Self> {
        let (me, size) = (inner.member.rank().index(), n * size_of::<O>() as u64);
        let rows = inner.room::<O>(stream, 1, u64::from(shards.members - 1) * shards.extent() * n)?;
        // SAFETY: the memory of the room, which this keeps.
        let bytes = unsafe { Buffer::<u8>::borrow_raw(&stream.device(), rows.address(), rows.len() * size_of::<O>() as u64) }?;
        let of = |panel: u32| {
            shards.targets(me).zip(0_u32..).map(move |(target, number)| {
                let rows = shards.panel(target, panel);
                let first = u64::from(number) * shards.extent();
                let from = (first + rows.start) * size..(first + rows.end) * size;
                StagedPanel { target, panel, flag: number * shards.panels() + panel, from, at: shards.part_at(target, me, panel) * size }
            })
        };
        Ok(Self { rows, bytes, panels: (0..shards.panels()).flat_map(of).collect() })
    }
}

/// What the kernel knows of each member ([`Away`](oxtile_kernels::gemm::Away)): where copy engines put from its rows are those of one matrix, and flags are set here.
fn members_of(inner: &Inner, shards: &Shards, is_staged: bool) -> Vec<u32> {
    let (me, shard) = (inner.member.rank().index(), shards.extent() as u32);
    let of = |member: u32| {
        let there = inner.world_rank(member).index();
        match shards.targets(me).zip(0_u32..).find(|(target, _)| *target == member) {
            None => [0; 4],
            Some((_, number)) if is_staged => [0, number * shard, inner.world_rank(me).index(), number * shards.panels()],
            Some(_) => [there, shards.place_at(member, me) as u32 * shard, there, 0],
        }
    };
    (0..shards.members).flat_map(of).collect()
}

/// The flags of [`OwnRows`] of these panels. Parts that are no rank's are there.
fn flags_of(inner: &Inner, shards: &Shards, panels: &Range<u32>, (method, old_parts): (ScatterMethod, u32)) -> Vec<u32> {
    let me = inner.member.rank().index();
    let flag = |panel: u32, source: u32| match method {
        ScatterMethod::Direct | ScatterMethod::Whole | ScatterMethod::Fused => inner.ready.index(panel, inner.world_rank(source)),
        ScatterMethod::Sequential => PRESENT,
    };
    let of_panel = |panel| {
        let others = shards.sources(me).map(move |source| flag(panel, source));
        others.chain((0..old_parts).map(|_| PRESENT))
    };
    panels.clone().flat_map(of_panel).collect()
}

impl<T: ScatterOperands<O>, O> fmt::Debug for GemmReduceScatter<T, O> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("GemmReduceScatter").field("config", &self.config).field("method", &self.choice.method).finish_non_exhaustive()
    }
}
