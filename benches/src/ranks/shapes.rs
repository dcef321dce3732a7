//! The methods of many products, beside each other: whether what the model chooses is ever slower than a product and a transfer one after the other.

use anyhow::Result;
use oxtile::overlap::Rates;

use super::gathered::Sizes;
use super::plan::{Comparison, Side};
use super::products::{PRODUCT, WIRE, methods, reduce, scatter};

/// The family's name.
pub const SHAPES: &str = "overlap_shapes";

/// Rows.
const ROWS: [u64; 22] =
    [16384, 12288, 10240, 8192, 6144, 5120, 4096, 3072, 2560, 2048, 1536, 1280, 1024, 768, 640, 512, 384, 320, 256, 192, 128, 64];
/// N and K of column-parallel layers: query, key and value, and gate and up projections, of Llama 70B and 8B, Qwen3 32B and Mistral 7B.
///
/// Source: the `config.json` of meta-llama/Llama-3.1-70B and 8B, Qwen/Qwen3-32B, mistralai/Mistral-7B-v0.3 (<https://huggingface.co>).
const COLUMNS: [[u64; 2]; 8] =
    [[57344, 8192], [10240, 8192], [28672, 4096], [6144, 4096], [51200, 5120], [10240, 5120], [14336, 4096], [8192, 8192]];
/// N and K of row-parallel layers: output and down projections of the same, and of half as many inner elements.
const ROW_PARALLEL: [[u64; 2]; 8] =
    [[8192, 28672], [8192, 8192], [4096, 14336], [4096, 4096], [5120, 25600], [5120, 8192], [8192, 14336], [4096, 7168]];

/// About the microseconds of a round's calls.
const ROUND: f64 = 2_500.0;
/// A shape has fewer rounds than other comparisons.
const FEWER: usize = 8;

/// What the ranks do with a product.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Kind {
    Gathered,
    Scattered,
    Summed,
}

/// Every kind of product at the sizes of its layers.
fn shapes() -> impl Iterator<Item = (Kind, Sizes)> {
    let of = |kind: Kind, layers: [[u64; 2]; 8]| layers.into_iter().flat_map(move |[n, k]| ROWS.map(|m| (kind, [m, n, k])));
    of(Kind::Gathered, COLUMNS).chain(of(Kind::Scattered, ROW_PARALLEL)).chain(of(Kind::Summed, ROW_PARALLEL))
}

/// The methods alone.
pub fn grid(world: u32, rates: &Rates) -> Result<Vec<Comparison>> {
    shapes().map(|shape| compare(world, rates, shape)).collect()
}

fn compare(world: u32, rates: &Rates, (kind, sizes): (Kind, Sizes)) -> Result<Comparison> {
    Ok(alone(match kind {
        Kind::Gathered => methods(SHAPES, world, rates, sizes, ROUND),
        Kind::Scattered => scatter(world, rates, sizes, ROUND),
        Kind::Summed => reduce(world, rates, sizes, ROUND),
    }?))
}

/// Without what the methods are made of, and without peers.
fn alone(of: Comparison) -> Comparison {
    let is_method = |side: &Side| ![PRODUCT, WIRE].contains(&side.label);
    let sides = of.sides.into_iter().filter(is_method).collect();
    Comparison { family: SHAPES, fewer: FEWER, limit: &[], peers: Vec::new(), sides, ..of }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn there_are_five_hundred_shapes() {
        let all: Vec<_> = shapes().collect();
        let distinct: std::collections::HashSet<_> = all.iter().collect();
        assert!(all.len() >= 500 && distinct.len() == all.len(), "{} of {}", distinct.len(), all.len());
    }

    /// Of some of them, as a choice takes its time.
    #[test]
    fn two_and_four_ranks_have_methods() {
        for (world, shape) in shapes().step_by(61).flat_map(|shape| [2, 4].map(|world| (world, shape))) {
            let of = compare(world, &Rates::H200, shape).unwrap();
            let labels: Vec<_> = of.sides.iter().map(|side| side.label).collect();
            let chosen = of.chosen.unwrap();
            assert!(labels.contains(&chosen) && of.peers.is_empty(), "{}: {chosen} of {labels:?}", of.shape);
            assert!(labels.contains(&"sequential") || chosen == "one shot", "{}: {labels:?}", of.shape);
        }
    }
}
