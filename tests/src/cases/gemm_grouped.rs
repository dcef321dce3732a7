//! Products of groups by one launch: byte for byte those of each group alone, and nothing of another group or of none in any of them.

use oxtile::gemm::{Activation, Gemm, GemmConfig, GemmKernel, GemmOperands, GemmPlan, GemmTile, GroupedGemm};
use oxtile::runtime::Kind;
use oxtile::{Buffer, Error, Result, Runtime};
use oxtile_tests::inputs::Random;
use oxtile_tile::num::{Pod, bf16, e4m3};

use super::gathered_product::turn;
use super::gemm::{Operand, Output};
use crate::case::{Case, Outcome, Size, equal, stream, text};

use GemmTile::{Tile64x128, Tile128x128, Tile128x256};

/// What is multiplied: `tokens` is `m`, or `k` by the sum.
#[derive(Clone, Debug)]
struct Job {
    tokens: u64,
    /// The other two sizes: `n` and `k`, or `m` and `n` by the sum.
    other: [u64; 2],
    sizes: Vec<u32>,
    transposed: [bool; 2],
    tile: GemmTile,
    fused: bool,
}

impl Job {
    fn by_sum(&self) -> bool {
        self.transposed[0]
    }

    /// The product of so many tokens.
    fn config(&self, tokens: u64) -> GemmConfig {
        let [first, second] = self.other;
        let [m, n, k] = if self.by_sum() { [first, second, tokens] } else { [tokens, first, second] };
        let [transpose_a, transpose_b] = self.transposed;
        let plain = GemmConfig { m, n, k, transpose_a, transpose_b, ..GemmConfig::default() };
        if self.fused { GemmConfig { alpha: 0.5, beta: -2.0, activation: Activation::Gelu, ..plain } } else { plain }
    }

    /// The first token of each group, and the one after its last.
    fn ranges(&self) -> Vec<[u64; 2]> {
        let mut end = 0;
        let mut range = |size: &u32| {
            let first = end;
            end = self.tokens.min(end + u64::from(*size));
            [first, end]
        };
        self.sizes.iter().map(&mut range).collect()
    }
}

/// A number of tokens, the groups' sizes, and whether the result is fused.
fn jobs() -> [(&'static str, u64, &'static [u32], bool); 6] {
    [
        // Empty groups first, last and between; tiles that end with a group; tokens of no group at the end.
        ("edges", 410, &[0, 3, 0, 130, 1, 256, 0], false),
        ("a token each", 9, &[1; 9], false),
        ("more than all", 250, &[100, 200, 50, u32::MAX], false),
        ("no tokens", 40, &[0; 3], false),
        ("one group", 136, &[136], false),
        // Of both groups that have rows, tiles of 128 have warpgroups without any.
        ("fused", 200, &[60, 0, 130], true),
    ]
}

fn of<T, O>(cases: &mut Vec<Case>, name: &'static str, transposed: [bool; 2], tile: GemmTile)
where
    T: Operand + GemmOperands<O, A = T, B = T>,
    O: Output,
{
    // As many steps of 8-bit elements; weights whose rows are no multiples of a tile's.
    let k = 160 / size_of::<T>() as u64;
    for (what, tokens, sizes, fused) in jobs() {
        let job = Job { tokens, other: if transposed[0] { [136, 264] } else { [264, k] }, sizes: sizes.to_vec(), transposed, tile, fused };
        let name = format!("gemm_grouped::{name}::{}::{tile:?}::{what}", super::gemm::layout(transposed));
        cases.push(Case::new(name, Size::Small, move |runtime| check::<T, O>(runtime, &job)));
    }
}

pub fn cases() -> Vec<Case> {
    let mut cases = Vec::new();
    for tile in [Tile128x128, Tile64x128] {
        of::<bf16, bf16>(&mut cases, "bf16", [false, false], tile);
        of::<bf16, bf16>(&mut cases, "bf16", [false, true], tile);
        of::<e4m3, bf16>(&mut cases, "e4m3", [false, true], tile);
    }
    of::<bf16, f32>(&mut cases, "bf16_f32 by sum", [true, false], Tile128x256);
    of::<bf16, f32>(&mut cases, "bf16_f32 by sum", [true, false], Tile128x128);
    cases.push(Case::new("gemm_grouped::many groups", Size::Large, many));
    cases.push(Case::new("gemm_grouped::scaled", Size::Small, scaled));
    cases.push(Case::new("gemm_grouped::empty", Size::Small, empty));
    cases.push(Case::new("gemm_grouped::nothing summed", Size::Small, nothing_summed));
    cases.push(Case::new("gemm_grouped::refused", Size::Small, refused));
    cases
}

/// More groups than there are tiles at a time, most of them small.
fn many(runtime: &Runtime) -> Outcome {
    let mut random = Random::new(600);
    // The emulated device has fewer tiles at a time.
    let groups = if runtime.kind() == Kind::Emulated { 150 } else { 600 };
    let sizes: Vec<u32> = (0..groups).map(|group| if group % 50 == 0 { 300 } else { random.below(4) as u32 }).collect();
    let tokens = sizes.iter().map(|&size| u64::from(size)).sum();
    let job = Job { tokens, other: [136, 16], sizes, transposed: [false, true], tile: Tile128x128, fused: false };
    check::<bf16, bf16>(runtime, &job)?;
    check::<bf16, bf16>(runtime, &Job { tile: Tile64x128, ..job.clone() })?;
    check::<bf16, f32>(runtime, &Job { other: [8, 264], transposed: [true, false], ..job })
}

/// Values of which those of no group, and the weights of groups without tokens, are not numbers.
fn values<T: Operand>(random: &mut Random, rows: u64, width: u64, of_group: impl Fn(u64) -> bool) -> Vec<T> {
    let value = |row| if of_group(row) { T::round(random.normal()) } else { f32::NAN };
    (0..rows * width).map(|i| i / width).map(value).map(T::encode).collect()
}

/// The groups by one launch, and each by one of its own.
fn check<T, O>(runtime: &Runtime, job: &Job) -> Outcome
where
    T: Operand + GemmOperands<O, A = T, B = T>,
    O: Output,
{
    let (found, expected) = text(multiply::<T, O>(runtime, job))?;
    let bits = |values: Vec<O>| values.into_iter().map(|value| value.value().to_bits()).collect::<Vec<u64>>();
    equal("d", &bits(found), &bits(expected)).map_err(|why| format!("{job:?}: {why}"))
}

fn multiply<T, O>(runtime: &Runtime, job: &Job) -> Result<(Vec<O>, Vec<O>)>
where
    T: Operand + GemmOperands<O, A = T, B = T>,
    O: Output,
{
    let _turn = turn(runtime);
    let (device, mut random) = (runtime.device(0)?, Random::new(job.tokens));
    let stream = device.stream()?;
    let (GemmConfig { m, n, k, transpose_b, .. }, groups, by_sum) = (job.config(job.tokens), job.sizes.len() as u64, job.by_sum());
    let ranges = job.ranges();
    let last = ranges.last().map_or(0, |[_, end]| *end);
    let has_tokens = |group: u64| ranges[group as usize][0] < ranges[group as usize][1];
    let (a, b) = if by_sum {
        (values::<T>(&mut random, k, m, |row| row < last), values::<T>(&mut random, k, n, |row| row < last))
    } else {
        let [rows, width] = if transpose_b { [n, k] } else { [k, n] };
        (values::<T>(&mut random, m, k, |row| row < last), values::<T>(&mut random, groups * rows, width, |row| has_tokens(row / rows)))
    };
    let count = m * n * if by_sum { groups } else { 1 };
    let old: Vec<O> = (0..count).map(|_| O::encode(random.normal())).collect();
    let (a, b) = (Buffer::from_slice(&stream, &a)?, Buffer::from_slice(&stream, &b)?);
    let (sizes, mut d) = (Buffer::from_slice(&stream, &job.sizes)?, Buffer::from_slice(&stream, &old)?);
    let grouped = GroupedGemm::<T, O>::tiled(runtime, job.config(job.tokens), groups, job.tile)?;
    grouped.run(&stream, a.view(), b.view(), sizes.view(), d.view_mut())?;
    let found = d.to_vec(&stream)?;

    let mut expected = old;
    for (group, [first, end]) in (0..).zip(ranges) {
        let (config, tokens) = (job.config(end - first), end - first);
        if tokens == 0 && !by_sum {
            continue;
        }
        let of_d = if by_sum { group * m * n..(group + 1) * m * n } else { first * n..end * n };
        let of_d = of_d.start as usize..of_d.end as usize;
        let mut d = Buffer::from_slice(&stream, &expected[of_d.clone()])?;
        let (a, b) = match by_sum {
            true => (a.view().slice(first * m, end * m), b.view().slice(first * n, end * n)),
            false => (a.view().slice(first * k, end * k), b.view().slice(group * n * k, (group + 1) * n * k)),
        };
        alone::<T, O>(runtime, config)?.run(&stream, a, b, None, d.view_mut())?;
        expected.splice(of_d, d.to_vec(&stream)?);
    }
    Ok((found, expected))
}

/// The product of a group by whole tiles, of the one shape that there is for all operands: the order of an element's sum is the same in every tile. Of none, by any kernel.
fn alone<T: GemmOperands<O>, O: Pod>(runtime: &Runtime, config: GemmConfig) -> Result<Gemm<T, O>> {
    if config.k == 0 {
        return Gemm::new(runtime, config);
    }
    let tile = Tile128x256;
    let kernel = GemmKernel::Wgmma { tile, m_major: config.transpose_a, n_major: !config.transpose_b };
    Gemm::planned(
        runtime,
        config,
        GemmPlan { kernel, whole: tile.count([config.m, config.n]), parts: 1, in_clusters: false, microseconds: 0.0 },
    )
}

/// Factors in device memory are those of every group.
fn scaled(runtime: &Runtime) -> Outcome {
    let _turn = turn(runtime);
    let (stream, one) = (stream(runtime)?, <e4m3 as Operand>::encode(1.0));
    let config = GemmConfig { m: 5, n: 16, k: 32, transpose_b: true, ..GemmConfig::default() };
    let grouped = text(GroupedGemm::<e4m3, bf16>::by_rows(runtime, config, 2))?;
    let (a, b) = (text(Buffer::from_slice(&stream, &[one; 5 * 32]))?, text(Buffer::from_slice(&stream, &[one; 2 * 16 * 32]))?);
    let scales = text(Buffer::from_slice(&stream, &[0.5_f32, 4.0]))?;
    let (sizes, mut d) = (text(Buffer::from_slice(&stream, &[2_u32, 3]))?, text(Buffer::<bf16>::zeros(&stream, 5 * 16))?);
    let factors = [scales.view().slice(0, 1), scales.view().slice(1, 2)];
    text(grouped.bind_scaled(&stream, (a.view(), b.view()), factors, sizes.view(), d.view_mut()).and_then(|mut bound| bound.run(&stream)))?;
    let found: Vec<f64> = text(d.to_vec(&stream))?.into_iter().map(Output::value).collect();
    equal("d", &found, &[64.0; 5 * 16])
}

/// Nothing is launched, and no map is made, where there is no result.
fn empty(runtime: &Runtime) -> Outcome {
    let _turn = turn(runtime);
    let stream = stream(runtime)?;
    let none = text(Buffer::<bf16>::zeros(&stream, 0))?;
    for (m, groups) in [(0, 2), (8, 0)] {
        let config = GemmConfig { m, n: 8, k: 8, ..GemmConfig::default() };
        let grouped = text(GroupedGemm::<bf16, bf16>::by_rows(runtime, config, groups))?;
        let (a, b) = (text(Buffer::<bf16>::zeros(&stream, m * 8))?, text(Buffer::<bf16>::zeros(&stream, groups * 64))?);
        let (sizes, mut d) = (
            text(Buffer::<u32>::zeros(&stream, groups))?,
            text(Buffer::from_slice(&stream, &vec![<bf16 as Operand>::encode(1.0); m as usize * 8]))?,
        );
        let b = if groups == 0 { none.view() } else { b.view() };
        text(grouped.run(&stream, a.view(), b, sizes.view(), d.view_mut()))?;
        equal("d", &text(d.to_vec(&stream))?, &vec![<bf16 as Operand>::encode(1.0); m as usize * 8])?;
    }
    Ok(())
}

/// A step in which no expert has a token: the results are `beta D`.
fn nothing_summed(runtime: &Runtime) -> Outcome {
    let _turn = turn(runtime);
    let stream = stream(runtime)?;
    for beta in [0.0, 1.0, -2.0] {
        let config = GemmConfig { m: 24, n: 8, k: 0, transpose_a: true, beta, ..GemmConfig::default() };
        let grouped = text(GroupedGemm::<bf16, f32>::by_sum(runtime, config, 3))?;
        let (none, sizes) = (text(Buffer::<bf16>::zeros(&stream, 0))?, text(Buffer::<u32>::zeros(&stream, 3))?);
        let before: Vec<f32> = (0..3 * 24 * 8).map(|i| i as f32).collect();
        let mut d = text(Buffer::from_slice(&stream, &before))?;
        text(grouped.run(&stream, none.view(), none.view(), sizes.view(), d.view_mut()))?;
        equal("d", &text(d.to_vec(&stream))?, &before.iter().map(|x| beta * x).collect::<Vec<f32>>())?;
    }
    Ok(())
}

/// What has no kernel, and views of other sizes: each names what is wrong.
fn refused(runtime: &Runtime) -> Outcome {
    let _turn = turn(runtime);
    let good = GemmConfig { m: 8, n: 8, k: 8, ..GemmConfig::default() };
    let refuse = |result: Result<()>, why: &str| match result {
        Err(error) if error.to_string().contains(why) => Ok(()),
        other => Err(format!("{other:?}, not {why}")),
    };
    let rows = |config| GroupedGemm::<bf16, bf16>::by_rows(runtime, config, 2).map(drop);
    refuse(rows(GemmConfig { transpose_a: true, ..good }), "no transpose_a, or by_sum")?;
    refuse(rows(GemmConfig { k: 12, ..good }), "k is 12, no multiple of 8")?;
    refuse(rows(GemmConfig { k: 0, ..good }), "k is 0: rows of groups have nothing to multiply")?;
    refuse(rows(GemmConfig { n: 12, ..good }), "n is 12, no multiple of 8")?;
    refuse(rows(GemmConfig { m: (1 << 30) + 1, ..good }), "m is 1073741825: at most 1073741824")?;
    refuse(rows(GemmConfig { k: 1 << 30, ..good }), "2 groups of 1073741824 rows of weights")?;
    refuse(GroupedGemm::<bf16, f32>::by_sum(runtime, good, 2).map(drop), "transpose_a, and no transpose_b")?;
    refuse(GroupedGemm::<bf16, f32>::by_rows(runtime, good, 2).map(drop), "no kernel of groups takes these elements")?;
    refuse(GroupedGemm::<bf16, bf16>::tiled(runtime, good, 2, GemmTile::Tile64x64).map(drop), "with Tile64x64: there are")?;
    let stream = stream(runtime)?;
    let grouped = text(GroupedGemm::<bf16, bf16>::by_rows(runtime, good, 2))?;
    let (a, b) = (text(Buffer::<bf16>::zeros(&stream, 64))?, text(Buffer::<bf16>::zeros(&stream, 128))?);
    let (sizes, mut d) = (text(Buffer::<u32>::zeros(&stream, 3))?, text(Buffer::<bf16>::zeros(&stream, 64))?);
    match grouped.run(&stream, a.view(), b.view(), sizes.view(), d.view_mut()) {
        Err(Error::Length { what: "GroupedGemm, sizes", expected: 2, found: 3 }) => Ok(()),
        other => Err(format!("{other:?}")),
    }
}
