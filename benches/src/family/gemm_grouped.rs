//! Products of groups by one launch, beside one product of as many operations.

use anyhow::Result;
use oxtile::gemm::{Gemm, GemmConfig, GemmElement, GemmTile, GroupedGemm};
use oxtile::runtime::{Bound, Buffer, HostElement};
use oxtile_tile::num::{Float, Pod, bf16, e4m3};

use super::gemm::Operand;
use crate::bench::{Bench, Gpu, Output, Prepared, Size};

/// The family's name.
pub const FAMILY: &str = "gemm_grouped";

/// Results of more elements are not compared with a peer's; peers/gemm.py has the same number.
const COMPARED: u64 = 1 << 27;

/// How the sizes of groups differ.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Sizes {
    /// From half of the mean to one and a half of it.
    Uneven,
    /// Not at all.
    Even,
}

/// Groups, tokens of a group in the mean, and the other two sizes: `n` and `k`, or by the sum `m` and `n`.
type Shape = [u64; 4];

/// Few large groups, more and smaller ones, and those of few rows.
const SHAPES: [Shape; 6] = [
    [8, 4096, 4096, 4096],
    [64, 1024, 4096, 2048],
    [256, 512, 2048, 2048],
    [128, 128, 2048, 4096],
    [128, 64, 2048, 4096],
    [128, 16, 2048, 4096],
];

const SMOKE: [Shape; 1] = [[3, 64, 128, 64]];

/// Products of every kind, of each shape.
pub fn benches(size: Size) -> Vec<Bench> {
    let shapes: &[Shape] = size.pick(&SHAPES, &SMOKE);
    let of_shape = |&shape: &Shape| {
        let uneven = Sizes::Uneven;
        [
            bench::<bf16, bf16>("gemm_grouped bf16 nt", &["gemm_grouped_nt"], shape, uneven),
            bench::<bf16, bf16>("gemm_grouped bf16 nt, even", &[], shape, Sizes::Even),
            bench::<bf16, bf16>("gemm_grouped bf16 nn", &[], shape, uneven),
            bench::<e4m3, bf16>("gemm_grouped e4m3 nt", &[], shape, uneven),
            bench::<bf16, f32>("gemm_grouped bf16 f32 tn", &[], shape, uneven),
        ]
    };
    shapes.iter().flat_map(of_shape).collect()
}

/// Tokens of each group: in all, so many times the mean. peers/gemm.py has the same formula.
fn sizes(groups: u64, mean: u64, sizes: Sizes) -> Vec<u32> {
    if sizes == Sizes::Even {
        return vec![mean as u32; groups as usize];
    }
    let mut sizes: Vec<u32> = (0..groups).map(|group| (mean / 2 + 97 * group % groups * mean / groups) as u32).collect();
    let rest = groups * mean - sizes.iter().map(|&size| u64::from(size)).sum::<u64>();
    sizes[groups as usize - 1] += rest as u32;
    sizes
}

/// The product of all tokens. The name ends in how `A` and `B` are stored: as they are (`n`) or transposed (`t`).
fn config(kernel: &str, [groups, mean, first, second]: Shape) -> GemmConfig {
    let by_sum = kernel.contains("tn");
    let [m, n, k] = if by_sum { [first, second, groups * mean] } else { [groups * mean, first, second] };
    GemmConfig { m, n, k, transpose_a: by_sum, transpose_b: kernel.contains("nt"), ..GemmConfig::default() }
}

fn bench<T, O>(kernel: &'static str, peers: &'static [&'static str], shape: Shape, sizes: Sizes) -> Bench
where
    T: Operand + GemmElement<O>,
    O: HostElement<Device = O> + Float + Pod,
{
    let [groups, mean, first, second] = shape;
    let (GemmConfig { m, n, k, transpose_a, .. }, bytes) = (config(kernel, shape), size_of::<O>() as u64);
    let [of_b, of_d] = if transpose_a { [1, groups] } else { [groups, 1] };
    Bench {
        family: FAMILY,
        kernel,
        shape: format!("{groups} x {mean}x{first}x{second}"),
        dimensions: shape.to_vec(),
        bytes: (m * k + of_b * k * n) * size_of::<T>() as u64 + of_d * m * n * bytes,
        flops: 2 * m * n * k,
        sets: 1,
        ceiling: None,
        peers,
        prepare: Box::new(move |gpu| prepare::<T, O>(gpu, kernel, shape, sizes)),
    }
}

fn prepare<T, O>(gpu: &Gpu, kernel: &str, shape: Shape, kind: Sizes) -> Result<Prepared>
where
    T: Operand + GemmElement<O>,
    O: HostElement<Device = O> + Float + Pod,
{
    let ([groups, mean, ..], config) = (shape, config(kernel, shape));
    let GemmConfig { m, n, k, transpose_a: by_sum, .. } = config;
    let [of_b, of_d] = if by_sum { [1, groups] } else { [groups, 1] };
    let operand =
        |buffer, count| Buffer::from_slice(&gpu.stream, &gpu.pattern.fill(buffer, count).into_iter().map(T::of).collect::<Vec<T>>());
    let (a, b) = (operand(0, m * k)?, operand(1, of_b * k * n)?);
    let sizes = Buffer::from_slice(&gpu.stream, &sizes(groups, mean, kind))?;
    let mut d = Buffer::<O>::uninitialised(&gpu.stream, of_d * m * n)?;
    let mut graph = |grouped: &GroupedGemm<T, O>| {
        let mut bound: Bound<'_> = grouped.bind(&gpu.stream, a.view(), b.view(), sizes.view(), d.view_mut())?;
        Prepared::capture(gpu, || bound.run(&gpu.stream))
    };
    let mut rivals = Vec::new();
    for tile in [GemmTile::Tile128x256, GemmTile::Tile128x128, GemmTile::Tile64x128] {
        if let Ok(grouped) = GroupedGemm::<T, O>::tiled(&gpu.runtime, config, groups, tile) {
            rivals.push((format!("{tile:?}"), graph(&grouped)?));
        }
    }
    let chosen = match by_sum {
        true => GroupedGemm::<T, O>::by_sum(&gpu.runtime, config, groups)?,
        false => GroupedGemm::<T, O>::by_rows(&gpu.runtime, config, groups)?,
    };
    let ours = graph(&chosen)?;
    let one = Gemm::<T, O>::new(&gpu.runtime, config)?;
    let mut whole = Buffer::<O>::uninitialised(&gpu.stream, m * n)?;
    let one = {
        let mut bound = one.bind(&gpu.stream, a.view(), b.view().slice(0, k * n), None, whole.view_mut())?;
        Prepared::capture(gpu, || bound.run(&gpu.stream))?
    };
    let kept = (a, b, sizes, whole);
    let prepared = Prepared::new(ours, move |stream| {
        _ = &kept;
        if of_d * m * n > COMPARED || size_of::<O>() != size_of::<bf16>() {
            return Ok(Vec::new());
        }
        let d: Vec<O> = d.to_vec(stream)?;
        let bytes = d.iter().flat_map(|value| half::bf16::from_f32(value.to_f32()).to_le_bytes()).collect();
        Ok(vec![Output { name: "d", bytes }])
    });
    let prepared = prepared.against("one product", Prepared::new(one, |_| Ok(Vec::new())));
    Ok(rivals.into_iter().fold(prepared, |prepared, (label, graph)| prepared.against(label, Prepared::new(graph, |_| Ok(Vec::new())))))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn groups_have_all_tokens() {
        for kind in [Sizes::Even, Sizes::Uneven] {
            for [groups, mean, ..] in SHAPES.into_iter().chain(SMOKE) {
                let sizes = sizes(groups, mean, kind);
                assert_eq!(sizes.iter().map(|&size| u64::from(size)).sum::<u64>(), groups * mean);
                assert!(sizes.iter().all(|&size| u64::from(size) >= mean / 2));
            }
        }
    }
}
