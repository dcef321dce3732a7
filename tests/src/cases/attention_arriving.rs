//! Attention of a rank whose keys arrive while its kernel runs: the bits of one device, whichever chunk comes when; and its gradients.
//!
//! A world of one rank stands for a rank of two: streams put the chunks of the other one into place, each with its flag, once the kernel waits for the first.

use std::marker::PhantomData;
use std::time::Duration;

use oxtile::attention::{
    Attention, AttentionBackward, AttentionConfig, BackwardInputs, Gradients, Inputs, Mask, Order, Outputs, Sink, Window as Seen,
};
use oxtile::comm::{self, HostRank, Team, WorldSize};
use oxtile::context_parallel::{ContextElement, ContextParallel, ContextParallelConfig, Schedule, Transport};
use oxtile::runtime::Kind;
use oxtile::symmetric::{Arena, ArenaOptions, BackendName, Pitched, Rows};
use oxtile::tensor::{Strided, TensorMap, TensorMapMut};
use oxtile::{Buffer, Result, Runtime};
use oxtile_kernels::attention::*;
use oxtile_tests::inputs::Random;
use oxtile_tile::arch::{Columns, MatrixColumns};
use oxtile_tile::launch::Kernel;
use oxtile_tile::num::{bf16, f16};
use oxtile_tile::register_tile::{RegisterElement, StoredElement};

use super::attention::Operand;
use super::gathered_product::{Rank, turn};
use crate::case::{Case, Outcome, Size, equal, text};

/// Rows of a chunk, of which there are four.
const CHUNK: u64 = 128;
const CHUNKS: u64 = 4;
const TOKENS: u64 = CHUNKS * CHUNK;

macro_rules! instances {
    ($cases:ident: $($t:ident $d:literal $v:literal $keys:literal $roles:ident;)*) => { $(
        // Chunks 0 and 3 are the last rank's to see and the first one's; a mask hides chunk 3 from the rank that has chunks 1 and 2.
        for (rank, first) in [(0, 1), (1, 2)] {
            let name = |mask: &str| format!("attention_arriving::{}::{}x{}::{mask}::rank {rank}", stringify!($t), $d, $v);
            let size = if stringify!($t) == "bf16" || rank == 1 { Size::Small } else { Size::Twin };
            // Of four sections the last two are as long as the others.
            let job = Job { rank, heads: if $d == 64 && first == 1 { 4 } else { 2 }, first };
            $cases.push(Case::new(name("full"), size, move |runtime| check::<$t, $d, $v, $keys, $roles, ArrivingFull, false>(runtime, job)));
            $cases.push(Case::new(name("causal"), size, move |runtime| check::<$t, $d, $v, $keys, $roles, ArrivingCausal, true>(runtime, job)));
        }
    )* };
}

pub fn cases() -> Vec<Case> {
    let mut cases = Vec::new();
    instances! { cases:
        bf16 64 64 128 Narrow; bf16 128 128 128 Pair; bf16 192 128 128 Wide; bf16 256 256 80 Wide;
        f16 64 64 128 Narrow; f16 128 128 128 Pair; f16 192 128 128 Wide; f16 256 256 80 Wide;
    }
    macro_rules! options {
        ($($t:ident $d:literal $v:literal $keys:literal $roles:ident;)*) => { $(
            for rank in [0, 1] {
                let name = format!("attention_arriving::{}::{}x{}::options::rank {rank}", stringify!($t), $d, $v);
                let job = Job { rank, heads: 2, first: 1 };
                cases.push(Case::new(name, Size::Small, move |runtime| options::<$t, $d, $v, $keys, $roles>(runtime, job)));
            }
        )* };
    }
    options! {
        bf16 64 64 128 Pair; bf16 128 128 128 Wide; bf16 192 128 128 Wide; bf16 256 256 64 Wide;
        f16 64 64 128 Pair; f16 128 128 128 Wide; f16 192 128 128 Wide; f16 256 256 64 Wide;
    }
    macro_rules! gradients {
        ($($t:ident $d:literal;)*) => { $(
            for (name, mask) in [("full", Mask::Full), ("causal", Mask::CausalBottomRight)] {
                let of = format!("attention_arriving::gradients::{}::{}::{name}", stringify!($t), $d);
                cases.push(Case::new(of, Size::Small, move |runtime| gradients::<$t>(runtime, $d, mask, None)));
            }
        )* };
    }
    gradients! { bf16 64; bf16 128; f16 64; f16 128; }
    macro_rules! capped {
        ($($t:ident)*) => { $(
            let of = format!("attention_arriving::gradients::{}::128::capped", stringify!($t));
            cases.push(Case::new(of, Size::Small, |runtime| gradients::<$t>(runtime, 128, Mask::CausalBottomRight, Some(3.0))));
        )* };
    }
    capped! { bf16 f16 }
    cases
}

/// A rank alone, whose keys are all its own, by the kernels that would wait for others: gradients with the bits of one device.
fn gradients<T: Operand + ContextElement>(runtime: &Runtime, head_size: u64, mask: Mask, soft_cap: Option<f32>) -> Outcome {
    let (rows, heads) = (2 * CHUNK, if head_size == 64 { 2 } else { 1 });
    let attention = AttentionConfig { queries: rows, keys: rows, heads, key_heads: heads, head_size, mask, ..AttentionConfig::default() };
    let attention = AttentionConfig { key_parts: Some(1), soft_cap, ..attention };
    let config = ContextParallelConfig::new(attention).by(Schedule::Fused);
    let mut random = Random::new(head_size);
    let mut values = || -> Vec<T> {
        let value = |_| <T as Operand>::of(<T as Operand>::FORMAT.encode(f64::from(random.normal()) / 2.0) as u16);
        (0..rows * heads * head_size).map(value).collect()
    };
    let inputs = [(); 4].map(|()| values());
    let _turn = turn(runtime);
    let all = || -> Result<[Vec<Vec<T>>; 2]> {
        let device = runtime.device(0)?;
        let rank = HostRank::threads(std::slice::from_ref(&device))?.remove(0);
        let backend = if runtime.kind() == Kind::Cuda { BackendName::Vmm } else { BackendName::Emulated };
        let bytes = config.arena_bytes(WorldSize::ONE, 2);
        let arena = Arena::open(&rank, ArenaOptions { backend, bytes, ..ArenaOptions::default() })?;
        let member = Team::all(WorldSize::ONE).member(comm::Rank::ZERO).expect("of the world");
        let stream = device.stream()?;
        let [q, k, v, grad] = inputs.each_ref().map(|values| Buffer::from_slice(&stream, values));
        let (q, k, v, grad) = (q?, k?, v?, grad?);
        let tensor = || Buffer::<T>::named(&stream, "a result", rows * heads * head_size);
        let forward = || Inputs::new(q.view(), k.view(), v.view());
        let alone = Attention::<T>::new(runtime, attention)?.attend(&stream, forward())?;
        let [mut grad_q, mut grad_k, mut grad_v] = [tensor()?, tensor()?, tensor()?];
        let inputs = |out, log_sum_exp| BackwardInputs { forward: forward(), out, log_sum_exp, grad_out: grad.view().into() };
        let backward = AttentionBackward::<T>::new(runtime, attention, Order::Deterministic)?;
        let gradients = Gradients::new(grad_q.view_mut(), grad_k.view_mut(), grad_v.view_mut());
        backward.bind(&stream, inputs(alone.out.view().into(), alone.log_sum_exp.view()), gradients)?.run(&stream)?;
        let expected = [&alone.out, &grad_q, &grad_k, &grad_v].into_iter().map(|of| of.to_vec(&stream)).collect::<Result<_>>()?;
        let operation = ContextParallel::<T>::new(&stream, Transport::symmetric(&arena, &member), config)?;
        let (mut out, mut log_sum_exp) = (tensor()?, Buffer::<f32>::named(&stream, "log_sum_exp", rows * heads)?);
        let [mut grad_q, mut grad_k, mut grad_v] = [tensor()?, tensor()?, tensor()?];
        operation.bind_forward(&stream, forward(), Outputs::new(out.view_mut(), log_sum_exp.view_mut()))?.run(&stream)?;
        let gradients = Gradients::new(grad_q.view_mut(), grad_k.view_mut(), grad_v.view_mut());
        operation.bind_backward(&stream, inputs(out.view().into(), log_sum_exp.view()), gradients)?.run(&stream)?;
        let found = [&out, &grad_q, &grad_k, &grad_v].into_iter().map(|of| of.to_vec(&stream)).collect::<Result<_>>()?;
        drop(operation);
        arena.close()?.finish()?;
        rank.close()?;
        Ok([expected, found])
    };
    let [expected, found] = text(all())?;
    let bits = |values: Vec<T>| values.into_iter().map(|x| Operand::bits(x).into()).collect::<Vec<u64>>();
    let pairs = expected.into_iter().zip(found).zip(["out", "gradient of q", "gradient of k", "gradient of v"]);
    pairs.into_iter().try_for_each(|((expected, found), name)| equal(name, &bits(found), &bits(expected)))
}

/// Whose tokens, how many heads, and how many of a section.
#[derive(Clone, Copy, Debug)]
struct Job {
    rank: u64,
    heads: u64,
    first: u64,
}

/// Queries, keys and values of the whole sequence, `[tokens, heads, size]`.
struct Whole<T> {
    tensors: [Vec<T>; 3],
    sizes: [u64; 3],
}

fn check<T, const D: usize, const V: usize, const KEYS: usize, G, P, const CAUSAL: bool>(runtime: &Runtime, job: Job) -> Outcome
where
    T: Operand + RegisterElement + StoredElement,
    G: WarpgroupRoles,
    P: Policy<Of<T, D, V, KEYS> = Arriving<T, D, V, KEYS, CAUSAL>>,
    Columns<D>: MatrixColumns,
    Columns<V>: MatrixColumns,
    Columns<KEYS>: MatrixColumns,
    AttentionForward<T, D, V, KEYS, G, P>: Kernel,
{
    let Job { rank, heads, .. } = job;
    let whole = Whole::new(rank + D as u64, heads, [D, D, V].map(|size| size as u64));
    // The case has its turn first: a kernel that is loaded while another case's waits makes the driver wait for that one.
    let ranks = text(Rank::new(runtime, Duration::from_secs(30)))?;
    let kernel = text(runtime.load::<AttentionForward<T, D, V, KEYS, G, P>>())?;
    text(runtime.device(0).and_then(|device| kernel.prepare(&device)))?;
    // A block that has keys of several chunks has some of those that are hidden: they come too, and are masked.
    let is_seen = |chunk: u64| chunk < CHUNKS - 1 - rank || !CAUSAL || !CHUNK.is_multiple_of(KEYS as u64);
    let found = attend(&ranks, job, &whole, is_seen, &mut (), |problem, ()| {
        kernel.launch(&ranks.compute, AttentionForwardArgs { problem, marker: PhantomData })
    });
    let found = text(found)?;
    let mask = if CAUSAL { Mask::CausalBottomRight } else { Mask::Full };
    let config = AttentionConfig { mask, ..whole.config(heads) };
    let one = || -> Result<Results<T>> {
        let [q, k, v] = whole.tensors.each_ref().map(|tensor| Buffer::from_slice(&ranks.compute, tensor));
        let (q, k, v) = (q?, k?, v?);
        let one = Attention::<T>::new(runtime, config)?.attend(&ranks.compute, Inputs::new(q.view(), k.view(), v.view()))?;
        Ok((one.out.to_vec(&ranks.compute)?, one.log_sum_exp.to_vec(&ranks.compute)?))
    };
    compare(job, &found, &text(one())?, whole.sizes[2])?;
    text(ranks.close())
}

/// The last of the keys before a query that the windows of these cases leave: less than a chunk, so that some chunks are hidden from each rank.
const LEFT: u64 = 100;

/// What a launch with options takes beside the tensors.
struct Beside {
    sink: Buffer<f32>,
    largest: Buffer<f32>,
    workspace: Buffer<u32>,
}

/// A causal window, a cap, sinks and largest scores, with the bits of one device.
fn options<T, const D: usize, const V: usize, const KEYS: usize, G>(runtime: &Runtime, job: Job) -> Outcome
where
    T: Operand + RegisterElement + StoredElement,
    G: WarpgroupRoles,
    Columns<D>: MatrixColumns,
    Columns<V>: MatrixColumns,
    Columns<KEYS>: MatrixColumns,
    AttentionForward<T, D, V, KEYS, G, ArrivingOptioned>: Kernel,
{
    let Job { rank, heads, .. } = job;
    let whole = Whole::new(rank + 10 + D as u64, heads, [D, D, V].map(|size| size as u64));
    let ranks = text(Rank::new(runtime, Duration::from_secs(30)))?;
    let kernel = text(runtime.load::<AttentionForward<T, D, V, KEYS, G, ArrivingOptioned>>())?;
    text(runtime.device(0).and_then(|device| kernel.prepare(&device)))?;
    let cap = 1.5_f64;
    let config = AttentionConfig {
        mask: Mask::CausalBottomRight,
        window: Seen { left: Some(LEFT), right: None },
        soft_cap: Some(cap as f32),
        sink: Sink::Learnable,
        max_logit: true,
        ..whole.config(heads)
    };
    let sinks: Vec<f32> = (0..heads).map(|head| head as f32 - 0.5).collect();
    let (stream, log2e) = (&ranks.compute, std::f64::consts::LOG2_E);
    let scores = Scores { scale: 1.0, cap_limit: (cap * log2e) as f32, cap_factor: (2.0 * log2e * (D as f64).powf(-0.5) / cap) as f32 };
    let run = || -> Result<_> {
        let mut beside = Beside {
            sink: Buffer::from_slice(stream, &sinks)?,
            largest: Buffer::named(stream, "max_logit", heads)?,
            workspace: Buffer::zeros(stream, Workspace::words(heads))?,
        };
        // Of each rank's chunks the one before it.
        let is_seen = |chunk: u64| [rank, CHUNKS - 1 - rank].contains(&(chunk + 1));
        let found = attend(&ranks, job, &whole, is_seen, &mut beside, |arriving, Beside { sink, largest, workspace }| {
            let problem = ArrivingOptionsArgument {
                arriving,
                window: Window { left: LEFT as i32, right: 0, top_left: false },
                scores,
                sink: Some(sink.view()),
                max_logit: Some(largest.view_mut()),
                workspace: workspace.view_mut(),
            };
            kernel.launch(stream, AttentionForwardArgs { problem, marker: PhantomData })
        })?;
        let Beside { sink, largest, workspace } = beside;
        let (largest, left) = (largest.to_vec(stream)?, workspace.to_vec(stream)?);
        let [q, k, v] = whole.tensors.each_ref().map(|tensor| Buffer::from_slice(stream, tensor));
        let (q, k, v) = (q?, k?, v?);
        let inputs = Inputs { sink: Some(sink.view()), ..Inputs::new(q.view(), k.view(), v.view()) };
        let one = Attention::<T>::new(runtime, config)?.attend(stream, inputs)?;
        let of_all = one.max_logit.as_ref().map_or(Ok(Vec::new()), |largest| largest.to_vec(stream))?;
        Ok((found, (one.out.to_vec(stream)?, one.log_sum_exp.to_vec(stream)?), [largest, of_all], left))
    };
    let (found, one, [largest, of_all], left) = text(run())?;
    compare(job, &found, &one, whole.sizes[2])?;
    equal("workspace", &left, &vec![0; left.len()])?;
    // The largest of all ranks are those of one of them at least; the other one's queries have smaller ones.
    for (found, of_all) in largest.iter().zip(&of_all) {
        if !(found <= of_all && *found > 0.0) {
            return Err(format!("{job:?}: largest scores {largest:?}, of all ranks {of_all:?}"));
        }
    }
    text(ranks.close())
}

impl<T: Operand> Whole<T> {
    fn new(seed: u64, heads: u64, sizes: [u64; 3]) -> Self {
        let mut random = Random::new(seed);
        let tensors = sizes.map(|size| {
            (0..TOKENS * heads * size)
                .map(|_| <T as Operand>::of(<T as Operand>::FORMAT.encode(f64::from(random.normal()) / 2.0) as u16))
                .collect()
        });
        Self { tensors, sizes }
    }

    /// Attention of the whole sequence, without a mask.
    fn config(&self, heads: u64) -> AttentionConfig {
        let [head_size, _, value] = self.sizes;
        let config = AttentionConfig { queries: TOKENS, keys: TOKENS, heads, key_heads: heads, head_size, ..AttentionConfig::default() };
        AttentionConfig { value_size: Some(value), key_parts: Some(1), ..config }
    }
}

/// A result and its log-sum-exp.
type Results<T> = (Vec<T>, Vec<f32>);

/// Holds those of a rank against those of the whole sequence, bit by bit.
fn compare<T: Operand>(job: Job, found: &Results<T>, whole: &Results<T>, value_size: u64) -> Outcome {
    let Job { rank, heads, .. } = job;
    let token = |row: u64| if row < CHUNK { rank * CHUNK + row } else { (CHUNKS - 1 - rank) * CHUNK + row - CHUNK };
    let width = heads * value_size;
    let rows = (0..2 * CHUNK).flat_map(|row| (token(row) * width)..(token(row) + 1) * width);
    let expected: Vec<u64> = rows.map(|at| whole.0[at as usize].bits().into()).collect();
    let bits: Vec<u64> = found.0.iter().map(|x| x.bits().into()).collect();
    equal("out", &bits, &expected).map_err(|why| format!("{job:?}: {why}"))?;
    let logs = (0..heads).flat_map(|head| (0..2 * CHUNK).map(move |row| head * TOKENS + token(row)));
    let expected: Vec<u64> = logs.map(|at| whole.1[at as usize].to_bits().into()).collect();
    let bits: Vec<u64> = found.1.iter().map(|x| x.to_bits().into()).collect();
    equal("log_sum_exp", &bits, &expected).map_err(|why| format!("{job:?}: {why}"))
}

/// Attention of the rank's queries, which `launch` computes with what is `beside` it, while the keys of the other one that they see arrive, the last section first.
fn attend<T, B, const D: usize, const V: usize, const KEYS: usize, const CAUSAL: bool>(
    ranks: &Rank,
    Job { rank, heads, first }: Job,
    whole: &Whole<T>,
    is_seen: impl Fn(u64) -> bool,
    beside: &mut B,
    launch: impl for<'p> FnOnce(ArrivingArgument<'p, T, D, V, KEYS, CAUSAL>, &'p mut B) -> Result<()>,
) -> Result<Results<T>>
where
    T: Operand + RegisterElement + StoredElement,
    Columns<D>: MatrixColumns,
    Columns<V>: MatrixColumns,
    Columns<KEYS>: MatrixColumns,
{
    let Rank { arena, compute, out: streams, gate, .. } = ranks;
    let (me, own) = (arena.rank(), [rank, CHUNKS - 1 - rank]);
    // Whole blocks of keys are read where the rank has them; else its own keys lie among the others from the beginning.
    let own_apart = CHUNK.is_multiple_of(KEYS as u64);
    let part = |tensor: &[T], size: u64| -> Vec<T> {
        let chunk = |number: u64| tensor[(number * CHUNK * heads * size) as usize..((number + 1) * CHUNK * heads * size) as usize].to_vec();
        own.into_iter().flat_map(chunk).collect()
    };
    let [q, k, v] = [0, 1, 2].map(|at| Buffer::from_slice(compute, &part(&whole.tensors[at], whole.sizes[at])));
    let (q, k, v) = (q?, k?, v?);
    let sources = [Buffer::from_slice(compute, &whole.tensors[1])?, Buffer::from_slice(compute, &whole.tensors[2])?];
    let mut gathered = [arena.buffer::<T>(sources[0].len())?, arena.buffer::<T>(sources[1].len())?];
    let others: Vec<u64> = (0..CHUNKS).filter(|chunk| !own.contains(chunk) && is_seen(*chunk)).collect();
    let sections = heads.div_ceil(first);
    let flags = arena.flags("keys", (sections * CHUNKS) as u32 + streams.len() as u32)?;
    let of = |section: u64, chunk: u64| (section * CHUNKS + chunk) as u32;
    let listed = |place: u64| if others.contains(&(place % CHUNKS)) { flags.index(place as u32, me) } else { PRESENT };
    let listed = Buffer::from_slice(compute, &(0..sections * CHUNKS).map(listed).collect::<Vec<u32>>())?;
    let rows = |chunk: u64, heads_of: std::ops::Range<u64>, size: u64| {
        let place = Pitched { start: (chunk * CHUNK * heads + heads_of.start) * size, pitch: heads * size };
        Rows { count: CHUNK, width: (heads_of.end - heads_of.start) * size, from: place, to: place }
    };
    for ((all, source), size) in gathered.iter_mut().zip(&sources).zip(&whole.sizes[1..]) {
        let len = all.len();
        all.discard(compute, 0..len)?;
        if !own_apart {
            own.iter().try_for_each(|chunk| all.peer(me)?.put_rows(compute, source, rows(*chunk, 0..heads, *size)))?;
        }
    }
    let mut result = Buffer::<T>::named(compute, "out", 2 * CHUNK * heads * V as u64)?;
    let mut log_sum_exp = Buffer::<f32>::named(compute, "log_sum_exp", 2 * CHUNK * heads)?;
    let mut counter = Buffer::<u32>::zeros(compute, 1)?;
    let by_chunk = |size: usize| {
        let row = heads * size as u64;
        Strided { shape: [2, heads, CHUNK, size as u64], strides: [CHUNK * row, size as u64, row, 1] }
    };
    let natural = |size: usize| {
        let row = heads * size as u64;
        Strided { shape: [1, heads, TOKENS, size as u64], strides: [TOKENS * row, size as u64, row, 1] }
    };
    let q = TensorMap::strided(compute, q.view(), by_chunk(D))?;
    let own_maps = (TensorMap::strided(compute, k.view(), by_chunk(D))?, TensorMap::strided(compute, v.view(), by_chunk(V))?);
    let [all_k, all_v] = &gathered;
    let maps =
        (TensorMap::strided(compute, all_k.local().view(), natural(D))?, TensorMap::strided(compute, all_v.local().view(), natural(V))?);
    let mut of_out = TensorMapMut::strided(compute, result.view_mut(), by_chunk(V))?;
    compute.synchronize()?;
    let gates = (sections * CHUNKS) as u32;
    let mut awaited = Vec::new();
    for (at, stream) in streams.iter().enumerate() {
        arena.batch(stream).take_back(&flags, gates + at as u32, me)?.enqueue()?;
        let pieces = (0..sections).rev().flat_map(|section| others.iter().map(move |chunk| (section, *chunk)));
        for (section, chunk) in pieces.filter(|(section, chunk)| (section + chunk) as usize % streams.len() == at) {
            let heads_of = section * first..((section + 1) * first).min(heads);
            for ((all, source), size) in gathered.iter().zip(&sources).zip(&whole.sizes[1..]) {
                all.peer(me)?.put_rows(stream, source, rows(chunk, heads_of.clone(), *size))?;
            }
            arena.batch(stream).set(&flags, of(section, chunk), me)?.enqueue()?;
            awaited.push((of(section, chunk), me));
        }
    }
    let waits = flags.waits(compute, &awaited)?;
    let problem = ArrivingArgument {
        q: q.view(),
        own: KeyMapsArgument { k: own_maps.0.view(), v: own_maps.1.view() },
        gathered: KeyMapsArgument { k: maps.0.view(), v: maps.1.view() },
        target: RoundedArgument { out: of_out.view_mut(), log_sum_exp: log_sum_exp.view_mut() },
        shape: Shape { batches: 1, heads: heads as u32, group: 1, queries: 2 * CHUNK as u32, keys: TOKENS as u32 },
        arriving: ArrivingKeysArgument {
            chunk: CHUNK as u32,
            padded: CHUNK as u32,
            first: own[0] as u32,
            second: own[1] as u32,
            section: first as u32,
            flags: listed.view(),
            waits,
            own_apart,
        },
        order: TileOrderArgument { counter: counter.view_mut(), section: 1 },
        scale: ((D as f64).powf(-0.5) * std::f64::consts::LOG2_E) as f32,
    };
    launch(problem, beside)?;
    (0..streams.len() as u32).try_fold(arena.batch(gate), |batch, at| batch.set(&flags, gates + at, me))?.enqueue()?;
    awaited.iter().try_fold(arena.batch(compute), |batch, (flag, from)| batch.clear(&flags, *flag, *from))?.enqueue()?;
    drop(of_out);
    let found = (result.to_vec(compute)?, log_sum_exp.to_vec(compute)?);
    streams.iter().chain([gate]).try_for_each(oxtile::Stream::synchronize)?;
    Ok(found)
}
