//! Products of an operand that arrives while the kernel runs: byte for byte those of the plain kernel, whichever chunk comes when.
//!
//! Streams put the chunks of an operand into place and set a flag for each, once the kernel waits for the first.

use std::time::Duration;

use oxtile::gemm::{Activation, Gemm, GemmConfig, GemmKernel, GemmOperands, GemmPlan, GemmTile};
use oxtile::{Buffer, Result, Runtime, Stream};
use oxtile_kernels::gemm::*;
use oxtile_tile::arch::MatrixElement;
use oxtile_tile::launch::Kernel;
use oxtile_tile::num::{bf16, e4m3, f16};
use oxtile_tile::register_tile::StoredElement;

use super::gathered_product::{Arriving, Job, NO_SOURCE, Product, Rank, Turns, Values};
use super::gemm::{Operand, Output, layout};
use super::gemm_gathered_limits::{late, refused};
use crate::case::{Case, Outcome, Size, equal, text};

use Turns::{InOrder, Reversed, Shuffled};

/// Rows of four sources, the last of which has fewer, in two slabs of unequal length; a tile has rows of all of them.
pub(super) const ROWS: Job =
    Job { shape: [200, 264, 208], sources: 4, extent: 56, slab: 3, first: 0, own: NO_SOURCE, turns: InOrder, of_b: false, fused: false };
/// Elements of four sources, of which several share a step; the last step has fewer, and comes in the middle of the sum.
pub(super) const SUM: Job = Job { shape: [72, 264, 152], sources: 4, extent: 40, slab: 0, first: 2, ..ROWS };

fn jobs_by_rows() -> [(&'static str, Job); 4] {
    [
        ("straddled", ROWS),
        // Two rows of tiles, of which the last is almost wholly beyond the edge, with a source of its own that is there.
        ("reversed", Job { shape: [264, 264, 144], sources: 3, extent: 100, slab: 1, own: 1, turns: Reversed, ..ROWS }),
        ("one chunk", Job { shape: [8, 8, 16], sources: 1, extent: 8, slab: 1, ..ROWS }),
        ("fused", Job { shape: [136, 272, 144], sources: 2, extent: 72, slab: 2, turns: Shuffled, fused: true, ..ROWS }),
    ]
}

fn jobs_by_sum() -> [(&'static str, Job); 4] {
    [
        ("straddled", SUM),
        ("reversed", Job { shape: [264, 264, 200], sources: 3, extent: 80, first: 2, own: 1, turns: Reversed, ..SUM }),
        ("of b", Job { shape: [8, 16, 200], sources: 2, extent: 128, first: 1, of_b: true, ..SUM }),
        ("fused", Job { shape: [72, 272, 128], sources: 2, extent: 64, first: 0, turns: Shuffled, fused: true, ..SUM }),
    ]
}

macro_rules! instance {
    ($cases:ident, $name:literal, $t:ident $depth:literal $o:ident $width:literal, $tile:ident $g:ident, $m:literal $n:literal, $jobs:expr) => {
        for (what, job, size) in $jobs {
            let name = format!("gemm_gathered::{}::{}::{}::{what}", $name, layout([$m, !$n]), stringify!($tile));
            $cases.push(Case::new(name, size, move |runtime| {
                check::<$t, $depth, $o, $width, $tile, $g, $m, $n>(runtime, GemmTile::$tile, &job)
            }));
        }
    };
}

pub fn cases() -> Vec<Case> {
    let mut cases = Vec::new();
    let by_rows = || jobs_by_rows().into_iter().map(|(what, job)| (what, job, Size::Small));
    let by_sum = || jobs_by_sum().into_iter().map(|(what, job)| (what, job, Size::Small));
    // Elements of the same width: one job of each layout is enough for the emulator.
    let twins = || jobs_by_rows().into_iter().map(|(what, job)| (what, job, if what == "reversed" { Size::Small } else { Size::Twin }));
    let sum_twins = || jobs_by_sum().into_iter().map(|(what, job)| (what, job, if what == "straddled" { Size::Small } else { Size::Twin }));
    // As many steps of twice the elements.
    let doubled = || by_rows().map(|(what, job, size)| (what, Job { shape: [job.shape[0], job.shape[1], 2 * job.shape[2]], ..job }, size));
    instance!(cases, "bf16", bf16 64 bf16 64, Tile128x256 ByRows, false false, by_rows());
    instance!(cases, "bf16", bf16 64 bf16 64, Tile128x256 ByRows, true false, by_rows());
    instance!(cases, "bf16", bf16 64 bf16 64, Tile128x256 ByRows, false true, by_rows());
    instance!(cases, "bf16", bf16 64 bf16 64, Tile128x256 ByRows, true true, by_rows());
    instance!(cases, "bf16", bf16 64 bf16 64, Tile128x128 ByRows, false false, by_rows());
    instance!(cases, "bf16", bf16 64 bf16 64, Tile128x128 ByRows, false true, by_rows());
    instance!(cases, "f16", f16 64 f16 64, Tile128x256 ByRows, false false, twins());
    instance!(cases, "f16", f16 64 f16 64, Tile128x256 ByRows, true false, twins());
    instance!(cases, "f16", f16 64 f16 64, Tile128x256 ByRows, false true, twins());
    instance!(cases, "f16", f16 64 f16 64, Tile128x256 ByRows, true true, twins());
    instance!(cases, "e4m3", e4m3 128 bf16 64, Tile128x256 ByRows, false false, doubled());
    instance!(cases, "bf16_f32 by sum", bf16 64 f32 32, Tile128x256 BySum, true true, by_sum());
    instance!(cases, "bf16 by sum", bf16 64 bf16 64, Tile128x256 BySum, true true, by_sum());
    instance!(cases, "bf16 by sum", bf16 64 bf16 64, Tile128x256 BySum, false false, sum_twins());
    instance!(cases, "bf16 by sum", bf16 64 bf16 64, Tile128x256 BySum, false true, sum_twins());
    instance!(cases, "f16 by sum", f16 64 f16 64, Tile128x256 BySum, true true, sum_twins());
    cases.push(Case::new("gemm_gathered::divisions", Size::Large, divisions));
    cases.push(Case::new("gemm_gathered::many flags", Size::Small, |runtime| {
        // 80 flags: more than a thread remembers.
        let job = Job { shape: [40, 16, 80], sources: 40, extent: 1, slab: 1, ..ROWS };
        check::<bf16, 64, bf16, 64, Tile128x128, ByRows, false, false>(runtime, GemmTile::Tile128x128, &job)
    }));
    cases.push(Case::new("gemm_gathered::orders", Size::Small, orders));
    cases.push(Case::new("gemm_gathered::a flag that does not come", Size::Small, late));
    cases.push(Case::new("gemm_gathered::refused", Size::Small, refused));
    cases
}

/// Every number of sources and slabs up to four, of sizes that none of them divides.
fn divisions(runtime: &Runtime) -> Outcome {
    for (sources, slab) in (1..=4_u32).flat_map(|sources| (1..=4).map(move |slab| (sources, slab))) {
        let rows = Job { shape: [136, 16, 248], sources, extent: 136_u32.div_ceil(sources), slab, own: slab % 3, ..ROWS };
        check::<bf16, 64, bf16, 64, Tile128x256, ByRows, false, false>(runtime, GemmTile::Tile128x256, &rows)?;
        // Here `slab` is the first step, of four.
        let sum = Job { extent: 248_u32.div_ceil(sources), first: slab - 1, of_b: sources % 2 == 0, ..rows };
        check::<bf16, 64, bf16, 64, Tile128x256, BySum, true, true>(runtime, GemmTile::Tile128x256, &sum)?;
    }
    Ok(())
}

/// Lists of the same tiles in other orders give the same bytes.
fn orders(runtime: &Runtime) -> Outcome {
    for turns in [InOrder, Reversed, Shuffled] {
        let job = Job { shape: [264, 264, 80], sources: 2, extent: 136, slab: 1, turns, ..ROWS };
        check::<bf16, 64, bf16, 64, Tile128x128, ByRows, false, true>(runtime, GemmTile::Tile128x128, &job)?;
    }
    Ok(())
}

/// The product while the operand arrives, and by the plain kernel when it is there.
fn check<T, const DEPTH: usize, O, const WIDTH: usize, S, G, const M_MAJOR: bool, const N_MAJOR: bool>(
    runtime: &Runtime,
    tile: GemmTile,
    job: &Job,
) -> Outcome
where
    T: Operand + MatrixElement + GemmOperands<O, A = T, B = T>,
    O: Output + StoredElement,
    S: TileLoops,
    G: Arriving,
    GemmGathered<T, T, DEPTH, O, WIDTH, S, G, M_MAJOR, N_MAJOR>: Kernel,
{
    let values = Values::<T, O>::new(job);
    // The case has its turn first: a kernel that is loaded while another case's waits makes the driver wait for that one, and its flags for the driver.
    let rank = text(Rank::new(runtime, Duration::from_secs(30)))?;
    let kernel = text(runtime.load::<GemmGathered<T, T, DEPTH, O, WIDTH, S, G, M_MAJOR, N_MAJOR>>())?;
    text(runtime.device(0).and_then(|device| kernel.prepare(&device)))?;
    let gathered = || -> Result<Vec<O>> {
        let mut product = Product::new::<DEPTH, S, G>(&rank, job, &values, [M_MAJOR, N_MAJOR])?;
        product.incoming.discard(&rank, job)?;
        product.multiply::<DEPTH, WIDTH, S, G, M_MAJOR, N_MAJOR, _>(&rank, job, None, |incoming, args| {
            incoming.put(&rank, job)?;
            kernel.launch(&rank.compute, args)?;
            incoming.open(&rank)?;
            incoming.clear(&rank, job)
        })??;
        let found = product.d.to_vec(&rank.compute)?;
        rank.out.iter().chain([&rank.gate]).try_for_each(Stream::synchronize)?;
        Ok(found)
    };
    let found = text(gathered())?;
    let expected = text(plain::<T, O, G>(runtime, &rank.compute, job, &values, tile, [M_MAJOR, N_MAJOR], DEPTH))?;
    let bits = |values: Vec<O>| values.into_iter().map(|value| value.value().to_bits()).collect::<Vec<u64>>();
    equal("d", &bits(found), &bits(expected)).map_err(|why| format!("{job:?}: {why}"))?;
    text(rank.close())
}

/// The plain kernel on the operands, with whole tiles. Of a sum that does not begin with step 0 they are rotated, the last step with zeros.
fn plain<T: Operand + GemmOperands<O, A = T, B = T>, O: Output, G: Arriving>(
    runtime: &Runtime,
    stream: &Stream,
    job: &Job,
    Values { a, b, old, bias }: &Values<T, O>,
    tile: GemmTile,
    [m_major, n_major]: [bool; 2],
    depth: usize,
) -> Result<Vec<O>> {
    let [m, n, k] = job.shape.map(|size| size as usize);
    let padded = if G::BY_SUM { k.next_multiple_of(depth) } else { k };
    let first = job.first as usize * depth;
    // Rows along the sum, or along the other dimension.
    let rotated = |values: &[T], width: usize, is_along: bool| -> Vec<T> {
        let turn = |part: &[T], width: usize| -> Vec<T> {
            let mut part = part.to_vec();
            part.resize(padded * width, T::encode(0.0));
            part.rotate_left(first * width);
            part
        };
        if is_along { values.chunks(k).flat_map(|row| turn(row, 1)).collect() } else { turn(values, width) }
    };
    let [a, b] = if G::BY_SUM { [rotated(a, m, !m_major), rotated(b, n, !n_major)] } else { [a.clone(), b.clone()] };
    let (a, b, bias) = (Buffer::from_slice(stream, &a)?, Buffer::from_slice(stream, &b)?, Buffer::from_slice(stream, bias)?);
    let mut d = Buffer::from_slice(stream, old)?;
    let [alpha, beta] = if job.fused { [0.5, -2.0] } else { [1.0, 0.0] };
    let activation = if job.fused { Activation::Gelu } else { Activation::Identity };
    let [m, n, k] = [m, n, padded].map(|size| size as u64);
    let config = GemmConfig { m, n, k, transpose_a: m_major, transpose_b: !n_major, alpha, beta, activation };
    let kernel = GemmKernel::Wgmma { tile, m_major, n_major };
    let plan = GemmPlan { kernel, whole: tile.count([m, n]), parts: 1, in_clusters: false, microseconds: 0.0 };
    let gemm = Gemm::<T, O>::planned(runtime, config, plan)?;
    gemm.run(stream, a.view(), b.view(), job.fused.then(|| bias.view()), d.view_mut())?;
    d.to_vec(stream)
}
