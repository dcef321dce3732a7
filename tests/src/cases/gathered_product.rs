//! A product of which an operand arrives while the kernel runs, in a world of one rank that stands for several sources.

use std::cmp::Reverse;
use std::marker::PhantomData;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use oxtile::comm::{self, HostRank};
use oxtile::runtime::Kind;
use oxtile::symmetric::{Arena, ArenaOptions, BackendName, Flags, Pitched, Rows, SymmetricBuffer};
use oxtile::tensor::{TensorMap, TensorMapMut};
use oxtile::{Buffer, Result, Runtime, Stream};
use oxtile_kernels::gemm::*;
use oxtile_tests::inputs::Random;
use oxtile_tile::arch::MatrixElement;
use oxtile_tile::arrivals::WaitsArgument;
use oxtile_tile::launch::DeviceViewMut;
use oxtile_tile::register_tile::StoredElement;

use super::gemm::{Operand, Output};

/// What is multiplied, and how it arrives.
#[derive(Clone, Copy, Debug)]
pub struct Job {
    pub shape: [u32; 3],
    pub sources: u32,
    /// Rows or elements of a source.
    pub extent: u32,
    /// Steps of a slab.
    pub slab: u32,
    /// The first step of the sum.
    pub first: u32,
    /// The source whose chunks are there when the kernel begins.
    pub own: u32,
    pub turns: Turns,
    /// Whether `B` arrives, and not `A`.
    pub of_b: bool,
    pub fused: bool,
}

/// In which order tiles are computed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Turns {
    InOrder,
    Reversed,
    Shuffled,
}

/// No source is this one.
pub const NO_SOURCE: u32 = u32::MAX;
/// Streams that bring chunks: fewer than hardware queues, with those that compute.
const OUT: u32 = 4;
/// What the flags are called.
pub const NAME: &str = "gathered product";

/// Which dimension arrives.
pub trait Arriving: Gathering {
    const BY_SUM: bool;
}

impl Arriving for ByRows {
    const BY_SUM: bool = false;
}

impl Arriving for BySum {
    const BY_SUM: bool = true;
}

/// A chunk: the place of its flag in the list, and where it lies.
pub struct Chunk {
    pub place: u32,
    pub rows: Rows,
}

/// The chunks of the operand that arrives, which is of so many columns.
fn chunks<G: Arriving>(job: &Job, depth: u32, is_major: bool) -> Vec<Chunk> {
    let Job { shape: [m, n, k], sources, extent, slab, .. } = *job;
    let slabs = if G::BY_SUM { 1 } else { k.div_ceil(depth).div_ceil(slab) };
    let width = if job.of_b { n } else { m };
    let mut chunks = Vec::new();
    for place in 0..slabs * sources {
        let (j, source) = (place / sources, place % sources);
        let of_source = |size: u32| (source * extent).min(size)..((source + 1) * extent).min(size);
        let (across, along) =
            if G::BY_SUM { (0..width, of_source(k)) } else { (of_source(m), j * slab * depth..((j + 1) * slab * depth).min(k)) };
        if across.is_empty() || along.is_empty() {
            continue;
        }
        let (rows, columns, pitch) = if is_major { (along, across, width) } else { (across, along, k) };
        let place_of = Pitched { start: u64::from(rows.start * pitch + columns.start), pitch: pitch.into() };
        let rows = Rows { count: rows.len() as u64, width: columns.len() as u64, from: place_of, to: place_of };
        chunks.push(Chunk { place, rows });
    }
    chunks
}

/// The list of tiles.
fn tiles<S: TileLoops>(job: &Job) -> Vec<u32> {
    let [m, n, _] = job.shape;
    let (rows, columns) = (m.div_ceil(S::CLUSTER * S::ROWS), n.div_ceil(S::COLUMNS));
    let mut tiles: Vec<u32> = (0..rows * columns).map(|tile| ((tile % rows) << 16) | (tile / rows)).collect();
    match job.turns {
        Turns::InOrder => {}
        Turns::Reversed => tiles.reverse(),
        Turns::Shuffled => {
            let mut random = Random::new(7);
            (1..tiles.len()).rev().for_each(|i| tiles.swap(i, random.below(i as u64 + 1) as usize));
        }
    }
    tiles
}

/// A turn, which one case has at a time, on a GPU: of those whose kernels wait, and of those that load kernels meanwhile, as the driver waits with that for
/// kernels that run.
pub fn turn(runtime: &Runtime) -> Option<MutexGuard<'static, ()>> {
    static TURN: Mutex<()> = Mutex::new(());
    (runtime.kind() == Kind::Cuda).then(|| TURN.lock().unwrap_or_else(PoisonError::into_inner))
}

/// Where the product is computed: a world of one rank.
pub struct Rank {
    /// On a GPU one case at a time: streams that wait share its hardware queues with all others.
    _turn: Option<MutexGuard<'static, ()>>,
    pub rank: HostRank,
    pub arena: Arena,
    pub compute: Stream,
    /// Each brings the chunks of some sources. No order of theirs stands in for a wait that is missing.
    pub out: Vec<Stream>,
    pub gate: Stream,
}

impl Rank {
    pub fn new(runtime: &Runtime, deadline: Duration) -> Result<Self> {
        let turn = turn(runtime);
        let device = runtime.device(0)?;
        let rank = HostRank::threads(std::slice::from_ref(&device))?.remove(0);
        let backend = if runtime.kind() == Kind::Cuda { BackendName::Vmm } else { BackendName::Emulated };
        let arena = Arena::open(&rank, ArenaOptions { backend, bytes: 4 << 20, channels: 256, deadline, ..ArenaOptions::default() })?;
        let out = (0..OUT).map(|_| device.stream()).collect::<Result<_>>()?;
        Ok(Self { _turn: turn, rank, arena, compute: device.stream()?, out, gate: device.stream()? })
    }

    pub fn close(self) -> Result<()> {
        self.arena.close()?.finish()?;
        self.rank.close()
    }
}

/// The operand that arrives.
pub struct Incoming<T> {
    source: Buffer<T>,
    gathered: SymmetricBuffer<T>,
    pub flags: Flags,
    chunks: Vec<Chunk>,
}

/// The operands of a product, and its result.
pub struct Product<T, O> {
    pub incoming: Incoming<T>,
    other: Buffer<T>,
    bias: Buffer<O>,
    pub d: Buffer<O>,
    tiles: Buffer<u32>,
    listed: Buffer<u32>,
}

/// Values of the operands, the matrix as it was, and the bias.
pub struct Values<T, O> {
    pub a: Vec<T>,
    pub b: Vec<T>,
    pub old: Vec<O>,
    pub bias: Vec<O>,
}

impl<T: Operand, O: Output> Values<T, O> {
    pub fn new(job: &Job) -> Self {
        let [m, n, k] = job.shape.map(|size| size as usize);
        let mut random = Random::new((m * n * k) as u64);
        let mut values = |count: usize| -> Vec<f32> { (0..count).map(|_| random.normal()).collect() };
        let (a, b) = (values(m * k).into_iter().map(T::encode).collect(), values(n * k).into_iter().map(T::encode).collect());
        let (old, bias) = (values(m * n).into_iter().map(O::encode).collect(), values(n).into_iter().map(O::encode).collect());
        Self { a, b, old, bias }
    }
}

impl<T: Operand> Incoming<T> {
    /// The chunks of the rank's own source, which are there from the beginning.
    fn put_own(&self, stream: &Stream, me: comm::Rank, job: &Job) -> Result<()> {
        let own = self.chunks.iter().filter(|chunk| chunk.place % job.sources == job.own);
        own.into_iter().try_for_each(|chunk| self.gathered.peer(me)?.put_rows(stream, &self.source, chunk.rows))
    }

    /// Says that what has not arrived yet is garbage: on the emulator a read of it is an error.
    pub fn discard(&mut self, rank: &Rank, job: &Job) -> Result<()> {
        for chunk in &self.chunks {
            if chunk.place % job.sources == job.own {
                continue;
            }
            let Rows { count, width, to: Pitched { start, pitch }, .. } = chunk.rows;
            (0..count).try_for_each(|row| {
                let start = start + row * pitch;
                self.gathered.discard(&rank.compute, start..start + width)
            })?;
        }
        rank.compute.synchronize()
    }

    /// Enqueues the chunks and their flags, the last source of a stream first, to go once the gate is open.
    pub fn put(&self, rank: &Rank, job: &Job) -> Result<()> {
        let (me, gates) = (rank.arena.rank(), self.flags.len() - OUT);
        let peer = self.gathered.peer(me)?;
        for (out, number) in rank.out.iter().zip(0..) {
            let mut batch = rank.arena.batch(out).take_back(&self.flags, gates + number, me)?;
            let mut chunks: Vec<_> = self.awaited(job).filter(|chunk| chunk.place % job.sources % OUT == number).collect();
            chunks.sort_by_key(|chunk| Reverse(chunk.place % job.sources));
            for chunk in chunks {
                batch = batch.put_rows(&peer, &self.source, chunk.rows)?.set(&self.flags, chunk.place, me)?;
            }
            batch.enqueue()?;
        }
        Ok(())
    }

    /// Lets the chunks go.
    pub fn open(&self, rank: &Rank) -> Result<()> {
        let (me, gates) = (rank.arena.rank(), self.flags.len() - OUT..self.flags.len());
        gates.into_iter().try_fold(rank.arena.batch(&rank.gate), |batch, gate| batch.set(&self.flags, gate, me))?.enqueue()
    }

    /// Resets the flags, after the kernel.
    pub fn clear(&self, rank: &Rank, job: &Job) -> Result<()> {
        let me = rank.arena.rank();
        self.awaited(job).try_fold(rank.arena.batch(&rank.compute), |batch, chunk| batch.clear(&self.flags, chunk.place, me))?.enqueue()
    }

    /// The chunks that the kernel waits for.
    fn awaited(&self, job: &Job) -> impl Iterator<Item = &Chunk> {
        let (sources, own) = (job.sources, job.own);
        self.chunks.iter().filter(move |chunk| chunk.place % sources != own)
    }
}

impl<T: Operand + MatrixElement, O: Output + StoredElement> Product<T, O> {
    /// Garbage where nothing has arrived yet, and the chunks of the rank's own source.
    pub fn new<const DEPTH: usize, S: TileLoops, G: Arriving>(
        rank: &Rank,
        job: &Job,
        values: &Values<T, O>,
        major: [bool; 2],
    ) -> Result<Self> {
        let Rank { arena, compute, .. } = rank;
        let (arriving, other) = if job.of_b { (&values.b, &values.a) } else { (&values.a, &values.b) };
        let source = Buffer::from_slice(compute, arriving)?;
        let mut gathered = arena.buffer(arriving.len() as u64)?;
        gathered.local_mut().copy_from_slice(compute, &vec![T::encode(f32::NAN); arriving.len()])?;
        let chunks = chunks::<G>(job, DEPTH as u32, major[usize::from(job.of_b)]);
        let places = chunks.iter().map(|chunk| chunk.place + 1).max().unwrap_or(0);
        // The last flags let the streams go.
        let flags = arena.flags(NAME, places + OUT)?;
        let me = arena.rank();
        let all = places.next_multiple_of(job.sources);
        let listed: Vec<u32> = (0..all)
            .map(|place| {
                let is_awaited = place % job.sources != job.own && chunks.iter().any(|chunk| chunk.place == place);
                if is_awaited { flags.index(place, me) } else { PRESENT }
            })
            .collect();
        let of = |values: &[O]| Buffer::from_slice(compute, values);
        let incoming = Incoming { source, gathered, flags, chunks };
        incoming.put_own(compute, me, job)?;
        let product = Self {
            incoming,
            other: Buffer::from_slice(compute, other)?,
            bias: of(&values.bias)?,
            d: of(&values.old)?,
            tiles: Buffer::from_slice(compute, &tiles::<S>(job))?,
            listed: Buffer::from_slice(compute, &listed)?,
        };
        compute.synchronize()?;
        Ok(product)
    }

    /// Gives the kernel's arguments to `launch`, with a patience of its own if there is one. Maps are made before: making one may wait for all work under way.
    pub fn multiply<const DEPTH: usize, const WIDTH: usize, S: TileLoops, G: Arriving, const M_MAJOR: bool, const N_MAJOR: bool, R>(
        &mut self,
        rank: &Rank,
        job: &Job,
        patience: Option<u64>,
        launch: impl FnOnce(&Incoming<T>, GemmGatheredArgs<'_, T, T, DEPTH, O, WIDTH, S, G, M_MAJOR, N_MAJOR>) -> R,
    ) -> Result<R> {
        let Job { shape: [m, n, k], sources, extent, slab, first, fused, .. } = *job;
        let (me, compute) = (rank.arena.rank(), &rank.compute);
        let awaited: Vec<_> = self.incoming.awaited(job).map(|chunk| (chunk.place, me)).collect();
        let waits = self.incoming.flags.waits(compute, &awaited)?;
        let waits = WaitsArgument { patience: patience.unwrap_or(waits.patience), ..waits };
        let (arriving, other) = (self.incoming.gathered.local().view(), self.other.view());
        let (a, b) = if job.of_b { (other, arriving) } else { (arriving, other) };
        let [m64, n64, k64] = job.shape.map(u64::from);
        let a = TensorMap::new(compute, a, if M_MAJOR { [k64, m64] } else { [m64, k64] })?;
        let b = TensorMap::new(compute, b, if N_MAJOR { [k64, n64] } else { [n64, k64] })?;
        let d = self.d.view_mut();
        let (memory, length) = (d.access("old"), d.len());
        let mut d = TensorMapMut::new(compute, d, [m64, n64])?;
        // SAFETY: the map `d` holds the only view of this memory. The kernel reads an element as it was before it stores that element, in the same warpgroup.
        let old = unsafe { DeviceViewMut::from_raw(memory.address, length, memory.owner) };
        let [alpha, beta] = if fused { [0.5, -2.0] } else { [1.0, 0.0] };
        let bias = fused.then(|| self.bias.view());
        let args = GemmGatheredArgs {
            a: a.view(),
            b: b.view(),
            d: d.view_mut(),
            old,
            shape: Shape { m, n, k },
            fusion: FusionArgument { bias, a_scale: None, b_scale: None, alpha, beta, gelu: fused },
            gathered: GatheredArgument {
                tiles: self.tiles.view(),
                flags: self.listed.view(),
                waits,
                extent,
                sources,
                slab,
                first,
                margin: 0,
            },
            marker: PhantomData,
        };
        Ok(launch(&self.incoming, args))
    }
}
