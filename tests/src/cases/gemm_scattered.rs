//! Products whose sum ranks share: parts of other ranks arrive while the kernel runs, and have the bits of sums in order, whichever comes when; tiles of other ranks' rows leave.

use std::marker::PhantomData;
use std::time::Duration;

use oxtile::gemm::{Gemm, GemmConfig, GemmOperands};
use oxtile::symmetric::{Pitched, Rows};
use oxtile::tensor::{TensorMap, TensorMapMut};
use oxtile::{Buffer, Result, Runtime};
use oxtile_kernels::gemm::*;
use oxtile_tests::inputs::Random;
use oxtile_tile::arch::MatrixElement;
use oxtile_tile::launch::Kernel;
use oxtile_tile::num::{bf16, f16};
use oxtile_tile::register_tile::StoredElement;

use super::gathered_product::Rank;
use super::gemm::{Operand, Output};
use crate::case::{Case, Outcome, Size, equal, text};

/// What is multiplied, and what is added to it.
#[derive(Clone, Copy, Debug)]
struct Job {
    shape: [u32; 3],
    sources: u32,
    /// Rows of a panel.
    panel: u32,
    alpha: f32,
    /// Whether all rows are two members', the second of which is this one.
    leaves: bool,
}

const JOBS: [(&str, Job); 5] = [
    ("one part", Job { shape: [200, 264, 72], sources: 1, panel: 256, alpha: 1.0, leaves: false }),
    // A tile has rows of two panels, and the last panel is short.
    ("straddled", Job { shape: [264, 264, 144], sources: 2, panel: 96, alpha: 0.5, leaves: false }),
    ("many parts", Job { shape: [16, 24, 16], sources: 7, panel: 16, alpha: 1.0, leaves: false }),
    ("no part", Job { shape: [8, 8, 16], sources: 0, panel: 8, alpha: 2.0, leaves: false }),
    // Two panels of each member; the other's rows go to a place of this rank.
    ("leaving", Job { shape: [512, 264, 72], sources: 1, panel: 256, alpha: 0.5, leaves: true }),
];

macro_rules! instance {
    ($cases:ident, $t:ident, $tile:ident, $n_major:literal) => {
        for (what, job) in JOBS {
            let layout = if $n_major { "nn" } else { "nt" };
            let name = format!("gemm_scattered::{}::{layout}::{}::{what}", stringify!($t), stringify!($tile));
            $cases.push(Case::new(name, Size::Small, move |runtime| check::<$t, $tile, $n_major>(runtime, &job)));
        }
    };
}

pub fn cases() -> Vec<Case> {
    let mut cases = Vec::new();
    instance!(cases, bf16, Tile128x256, false);
    instance!(cases, bf16, Tile128x256, true);
    instance!(cases, bf16, Tile128x128, false);
    instance!(cases, bf16, Tile128x128, true);
    instance!(cases, f16, Tile128x256, false);
    instance!(cases, f16, Tile128x256, true);
    cases
}

fn check<T, S, const N_MAJOR: bool>(runtime: &Runtime, job: &Job) -> Outcome
where
    T: Operand + Output + MatrixElement + StoredElement + GemmOperands<f32, A = T, B = T>,
    S: TileLoops,
    GemmScattered<T, S, N_MAJOR>: Kernel,
{
    let [m, n, k] = job.shape.map(|size| size as usize);
    let members = if job.leaves { 2 } else { 1 };
    let mut random = Random::new((m * n * k) as u64);
    let mut values = |count: usize, of: fn(f32) -> f32| -> Vec<T> { (0..count).map(|_| Operand::encode(of(random.normal()))).collect() };
    // Products of quarters have exact sums, whichever kernel adds them up. Those of parts are not exact.
    let quarters = |x: f32| (4.0 * x).round() / 4.0;
    // Rows of all members: own ones come last.
    let (a, b) = (values(members * m * k, quarters), values(n * k, quarters));
    let (parts, bias) = (values(job.sources as usize * m * n, |x| x), values(n, |x| x));
    let rank = text(Rank::new(runtime, Duration::from_secs(30)))?;
    let kernel = text(runtime.load::<GemmScattered<T, S, N_MAJOR>>())?;
    text(runtime.device(0).and_then(|device| kernel.prepare(&device)))?;
    let (found, left) = text(multiply::<T, S, N_MAJOR>(&rank, &kernel, job, [&a, &b, &parts, &bias]))?;
    let sums = text(product::<T, N_MAJOR>(runtime, &rank, [members * m, n, k], [&a, &b]))?;
    let (others, sums) = sums.split_at((members - 1) * m * n);
    let value = |value: T| Output::value(value) as f32;
    let sum = |at: usize| (0..job.sources as usize).fold(sums[at], |sum, source| sum + value(parts[source * m * n + at]));
    let scaled = |sum: f32| if job.alpha == 1.0 { sum } else { job.alpha * sum };
    let expected: Vec<T> = (0..m * n).map(|at| Output::encode(scaled(sum(at)) + value(bias[at % n]))).collect();
    let bits = |values: Vec<T>| values.into_iter().map(|value| Output::value(value).to_bits()).collect::<Vec<u64>>();
    let of_job = |why: String| format!("{job:?}: {why}");
    equal("d", &bits(found), &bits(expected)).map_err(of_job)?;
    equal("what leaves", &bits(left), &bits(others.iter().map(|sum| Output::encode(*sum)).collect())).map_err(of_job)?;
    text(rank.close())
}

/// The product alone, in `f32`.
fn product<T, const N_MAJOR: bool>(runtime: &Runtime, rank: &Rank, shape: [usize; 3], [a, b]: [&[T]; 2]) -> Result<Vec<f32>>
where
    T: Operand + GemmOperands<f32, A = T, B = T>,
{
    let ([m, n, k], stream) = (shape.map(|size| size as u64), &rank.compute);
    let config = GemmConfig { m, n, k, transpose_b: !N_MAJOR, ..GemmConfig::default() };
    let gemm = Gemm::<T, f32>::new(runtime, config)?;
    let (a, b, mut d) = (Buffer::from_slice(stream, a)?, Buffer::from_slice(stream, b)?, Buffer::<f32>::zeros(stream, m * n)?);
    gemm.run(stream, a.view(), b.view(), None, d.view_mut())?;
    d.to_vec(stream)
}

/// The product while the parts arrive panel by panel, the last source of a stream first; and what has left.
fn multiply<T, S, const N_MAJOR: bool>(
    rank: &Rank,
    kernel: &oxtile::Loaded<GemmScattered<T, S, N_MAJOR>>,
    job: &Job,
    [a, b, parts, bias]: [&[T]; 4],
) -> Result<(Vec<T>, Vec<T>)>
where
    T: Operand + MatrixElement + StoredElement,
    S: TileLoops,
    GemmScattered<T, S, N_MAJOR>: Kernel,
{
    let (Job { sources, panel, alpha, leaves, .. }, Rank { arena, compute, out, gate, .. }) = (*job, rank);
    let (me, [m, n, k], panels) = (arena.rank(), job.shape.map(u64::from), job.shape[0].div_ceil(job.panel));
    let members = if leaves { 2 } else { 1 };
    let (source, mut there) = (Buffer::from_slice(compute, parts)?, arena.buffer::<T>((parts.len() as u64).max(1))?);
    there.local_mut().copy_from_slice(compute, &vec![T::encode(f32::NAN); parts.len().max(1)])?;
    there.discard(compute, 0..parts.len() as u64)?;
    // Where the other member's rows go: the part of the second one there, which is the first.
    let mut left = arena.buffer::<T>((u64::from(members - 1) * m * n).max(1))?;
    // The last flags let the streams go; those before are of what leaves.
    let of_parts = panels * sources;
    let gates = of_parts + if leaves { panels } else { 0 };
    let flags = arena.flags("part", gates + out.len() as u32)?;
    let listed: Vec<u32> = (0..of_parts).map(|place| flags.index(place, me)).collect();
    let awaited: Vec<_> = (0..of_parts).map(|place| (place, me)).collect();
    let (rows, columns) = (members * job.shape[0].div_ceil(S::CLUSTER * S::ROWS), job.shape[1].div_ceil(S::COLUMNS));
    let tiles: Vec<u32> = (0..rows * columns).map(|tile| ((tile % rows) << 16) | (tile / rows)).collect();
    let (tiles, listed, bias) =
        (Buffer::from_slice(compute, &tiles)?, Buffer::from_slice(compute, &listed)?, Buffer::from_slice(compute, bias)?);
    let (a, b) = (Buffer::from_slice(compute, a)?, Buffer::from_slice(compute, b)?);
    let mut d = Buffer::<T>::named(compute, "d", m * n)?;
    let a = TensorMap::new(compute, a.view(), [u64::from(members) * m, k])?;
    let b = TensorMap::new(compute, b.view(), if N_MAJOR { [k, n] } else { [n, k] })?;
    let mut map = TensorMapMut::new(compute, d.view_mut(), [m, n])?;
    // The other member's rows go to the first matrix, from its first row on, and set flags of this rank.
    let to = Buffer::from_slice(compute, &[0_u32; 8])?;
    let mut landed = Buffer::<u32>::zeros(compute, u64::from(2 * panels))?;
    let signals = flags.signals(compute)?;
    let peer = there.peer(me)?;
    let map_of_parts = TensorMap::new(compute, there.local().view().slice(0, u64::from(sources) * m * n), [u64::from(sources), m, n]);
    let map_of_parts = if sources > 0 { Some(map_of_parts?) } else { None };
    let mut all = left.contiguous_mut()?;
    // SAFETY: the kernel stores in the elements of this rank, which is the only one.
    let view = unsafe { all.view_mut(compute) }?;
    let mut others = if leaves { Some(TensorMapMut::new(compute, view, [1, m, n])?) } else { None };
    compute.synchronize()?;
    for (out, number) in out.iter().zip(0..) {
        let mut batch = arena.batch(out).take_back(&flags, gates + number, me)?;
        let of_stream = (0..panels).flat_map(|panel| (0..sources).rev().map(move |source| (panel, source)));
        for (at, of) in of_stream.filter(|(_, source)| source % 4 == number) {
            let (first, end) = (u64::from(at * panel), u64::from((at + 1) * panel).min(m));
            let place = Pitched { start: (u64::from(of) * m + first) * n, pitch: n };
            let rows = Rows { count: end - first, width: n, from: place, to: place };
            batch = batch.put_rows(&peer, &source, rows)?.set(&flags, at * sources + of, me)?;
        }
        batch.enqueue()?;
    }
    let waits = flags.waits(compute, &awaited)?;
    let [m32, n32, k32] = job.shape;
    let away =
        AwayArgument { members: to.view(), landed: landed.view_mut(), signals: signals.argument(), flag: of_parts, shard: m32, me: 1 };
    kernel.launch(
        compute,
        GemmScatteredArgs {
            a: a.view(),
            b: b.view(),
            d: map.view_mut(),
            parts: map_of_parts.as_ref().map(TensorMap::view),
            others: others.as_mut().map(TensorMapMut::view_mut),
            shape: Shape { m: members * m32, n: n32, k: k32 },
            fusion: FusionArgument { bias: Some(bias.view()), a_scale: None, b_scale: None, alpha, beta: 0.0, gelu: false },
            gathered: GatheredArgument {
                tiles: tiles.view(),
                flags: listed.view(),
                waits,
                extent: panel,
                sources,
                slab: 1,
                first: 0,
                margin: 0,
            },
            away: leaves.then_some(away),
            marker: PhantomData,
        },
    )?;
    (gates..gates + out.len() as u32).try_fold(arena.batch(gate), |batch, flag| batch.set(&flags, flag, me))?.enqueue()?;
    awaited.iter().try_fold(arena.batch(compute), |batch, (flag, from)| batch.clear(&flags, *flag, *from))?.enqueue()?;
    // Each panel that has left has set its flag.
    (of_parts..gates).try_fold(arena.batch(compute), |batch, flag| batch.take_back(&flags, flag, me))?.enqueue()?;
    drop((map, map_of_parts, others));
    let found = d.to_vec(compute)?;
    let left = if leaves { left.local().to_vec(compute)? } else { Vec::new() };
    assert!(landed.to_vec(compute)?.iter().all(|count| *count == 0), "counts are zero again");
    out.iter().chain([gate]).try_for_each(oxtile::Stream::synchronize)?;
    Ok((found, left))
}
