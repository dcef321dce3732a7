//! Which gathered products are compared: AG-GEMM beside its parts, NCCL and torch, and a grid of its methods.

use anyhow::{Context, Result};
use oxtile::comm::WorldSize;
use oxtile::num::bf16;
use oxtile::overlap::{AllReduceMethod, Method, OverlapChoice, Rates, ScatterMethod};

use super::gathered::{By, Sizes, config};
use super::plan::{Comparison, DEVICE, Side};
use super::quantized::{self, Travels};
use super::shapes::SHAPES;
use super::{Request, Work, layer, reduced, scattered, scattered_quantized};
use crate::results::Missing;

/// Gathered products beside what they are made of, and beside peers.
pub const OVERLAP: &str = "overlap";
/// About the microseconds of a round's calls.
const ROUND: f64 = 10_000.0;

const METHODS: [(&str, Method, By); 3] =
    [("fused", Method::Fused, By::Fused), ("chunked", Method::Chunked, By::Chunked), ("sequential", Method::Sequential, By::Sequential)];
pub(super) const PRODUCT: &str = "product alone";
pub(super) const WIRE: &str = "wire alone";
pub(super) const ONE_SHOT: &str = "one shot";

/// Where the product takes longer, where the wire does too, and a smaller one.
pub fn main(world: u32, rates: &Rates) -> Result<Vec<Comparison>> {
    let shapes = [[8192, 8192, 8192], [16384, 1024 * u64::from(world), 8192], [4096, 4096, 8192]];
    let compare = |sizes| {
        let mut of = whole(world, rates, sizes, ROUND)?;
        of.sides.push(side("NCCL, then product", By::NcclThenProduct, sizes, of.calls));
        Ok(of)
    };
    let mut all: Vec<_> = shapes.into_iter().map(compare).collect::<Result<_>>()?;
    let narrow = shapes.into_iter().take(2).flat_map(|sizes| [Travels::Mxfp8, Travels::Nvfp4].map(|travels| (sizes, travels)));
    for (sizes, travels) in narrow {
        all.push(codes(world, rates, sizes, travels, ROUND)?);
    }
    for sizes in [[8192, 8192, 8192], [16384, 8192, 1024 * u64::from(world)], [4096, 4096, 8192]] {
        let mut of = scatter(world, rates, sizes, ROUND)?;
        of.sides.push(scattered_side("product, then NCCL", scattered::By::ProductThenNccl, sizes, of.calls));
        all.push(of);
    }
    for sizes in [[8192, 8192, 8192], [4096, 4096, 8192]] {
        for travels in [Travels::Mxfp8, Travels::Nvfp4] {
            all.push(scattered_codes(world, rates, sizes, travels, ROUND)?);
        }
    }
    for m in [8192, 4096, 2048, 16] {
        let sizes = [m, 8192, 8192];
        let mut of = reduce(world, rates, sizes, ROUND)?;
        of.sides.push(reduced_side("product, then NCCL", reduced::By::ProductThenNccl, sizes, of.calls));
        if of.chosen == Some(ONE_SHOT) {
            // As a step of decoding is called.
            let calls = of.calls.next_multiple_of(reduced::CALLS);
            let in_graph = [
                ("one shot, in a graph", reduced::By::OneShotInGraph),
                ("product alone, in a graph", reduced::By::ProductAloneInGraph),
                ("product, then NCCL, in a graph", reduced::By::ProductThenNcclInGraph),
            ];
            of.sides.extend(in_graph.map(|(label, by)| reduced_side(label, by, sizes, calls)));
        }
        all.push(of);
    }
    // A layer of Llama 70B.
    all.push(layer::comparison(world, [8192, 8192, 28672], ROUND, true));
    all.push(layer::pair(world, [8192, 8192, 8192 * u64::from(world)], ROUND));
    Ok(all)
}

/// A product whose rows are scattered: the methods, what they are made of, and torch's.
pub(super) fn scatter(world: u32, rates: &Rates, sizes: Sizes, round: f64) -> Result<Comparison> {
    use scattered::By;
    let ranks = WorldSize::new(world).context("there are ranks")?;
    let (config, peers, [m, n, k]) = (scattered::config(sizes, None), u64::from(world - 1), sizes);
    let choice = config.choose::<bf16, bf16>(ranks, rates)?;
    let calls = ((round / choice.predicted.sequential).ceil() as u64).clamp(3, 200);
    let labels = [
        ("whole", By::Whole, ScatterMethod::Whole),
        ("direct", By::Direct, ScatterMethod::Direct),
        ("fused", By::Fused, ScatterMethod::Fused),
        ("sequential", By::Sequential, ScatterMethod::Sequential),
    ];
    let refused = |method: ScatterMethod| choice.refused.iter().find(|(refused, _)| *refused == method);
    let taken = labels.into_iter().filter(|(.., method)| refused(*method).is_none());
    let mut sides: Vec<_> = taken.map(|(label, by, _)| scattered_side(label, by, sizes, calls)).collect();
    let missing = labels.into_iter().filter_map(|(label, _, method)| refused(method).map(|(_, why)| (label, why)));
    let missing = missing.map(|(label, why)| Missing { peer: label.into(), why: why.clone() }).collect();
    let bytes = config.bytes::<bf16, bf16>(ranks)?;
    let puts = Request { work: Work::Put, bytes: bytes / peers, calls: calls * peers };
    sides.extend([scattered_side(PRODUCT, By::ProductAlone, sizes, calls), Side { label: WIRE, request: puts }]);
    let torch = [("torch fused", By::TorchFused), ("torch unfused", By::TorchUnfused)];
    Ok(Comparison {
        bytes,
        flops: 2 * m * n * k / u64::from(world),
        limit: &[PRODUCT, WIRE],
        missing,
        chosen: labels.into_iter().find(|(.., method)| *method == choice.method).map(|(label, ..)| label),
        peers: torch.map(|(label, by)| scattered_side(label, by, sizes, calls)).into(),
        ..Comparison::of(OVERLAP, "gemm-rs bf16 nt", format!("{m}x{n}x{k}, {world} ranks"), sides, &[DEVICE])
    })
}

pub(super) fn scattered_side(label: &'static str, by: scattered::By, sizes: Sizes, calls: u64) -> Side {
    Side { label, request: Request { work: Work::ScatteredProduct(by, sizes), bytes: 0, calls } }
}

/// A product whose sum all ranks get: the methods that can be taken, what they are made of, and torch's.
pub(super) fn reduce(world: u32, rates: &Rates, sizes: Sizes, round: f64) -> Result<Comparison> {
    use reduced::By;
    let ranks = WorldSize::new(world).context("there are ranks")?;
    let (config, peers, [m, n, k]) = (reduced::config(sizes, None), u64::from(world - 1), sizes);
    let choice = config.choose::<bf16, bf16>(ranks, rates)?;
    let longest = choice.predicted.sequential.or(choice.predicted.one_shot).unwrap_or(round);
    let calls = ((round / longest).ceil() as u64).clamp(3, 200);
    let labels = [
        ("fused", By::Fused, AllReduceMethod::Fused),
        ("sequential", By::Sequential, AllReduceMethod::Sequential),
        (ONE_SHOT, By::OneShot, AllReduceMethod::OneShot),
    ];
    let refused = |method: AllReduceMethod| choice.refused.iter().find(|(refused, _)| *refused == method);
    let taken = labels.into_iter().filter(|(.., method)| refused(*method).is_none());
    let mut sides: Vec<_> = taken.map(|(label, by, _)| reduced_side(label, by, sizes, calls)).collect();
    let missing = labels.into_iter().filter_map(|(label, _, method)| refused(method).map(|(_, why)| (label, why)));
    let missing = missing.map(|(label, why)| Missing { peer: label.into(), why: why.clone() }).collect();
    // Parts, and then rows.
    let bytes = 2 * config.bytes::<bf16, bf16>(ranks)?;
    let puts = Request { work: Work::Put, bytes: bytes / (2 * peers), calls: 2 * calls * peers };
    sides.extend([reduced_side(PRODUCT, By::ProductAlone, sizes, calls), Side { label: WIRE, request: puts }]);
    Ok(Comparison {
        bytes,
        flops: 2 * m * n * k / u64::from(world),
        limit: &[PRODUCT, WIRE],
        missing,
        chosen: labels.into_iter().find(|(.., method)| *method == choice.method).map(|(label, ..)| label),
        peers: vec![reduced_side("torch unfused", By::TorchUnfused, sizes, calls)],
        ..Comparison::of(OVERLAP, "gemm-ar bf16 nt", format!("{m}x{n}x{k}, {world} ranks"), sides, &[DEVICE])
    })
}

pub(super) fn reduced_side(label: &'static str, by: reduced::By, sizes: Sizes, calls: u64) -> Side {
    Side { label, request: Request { work: Work::ReducedProduct(by, sizes), bytes: 0, calls } }
}

/// An operand that travels as codes and scales: the methods, what they are made of, and the same product of an operand in bf16.
fn codes(world: u32, rates: &Rates, sizes: Sizes, travels: Travels, round: f64) -> Result<Comparison> {
    let ranks = WorldSize::new(world).context("there are ranks")?;
    let config = quantized::config(sizes, travels, None);
    let choice = config.choose::<bf16, bf16>(ranks, rates)?;
    let predicted = choice.predicted.map_or(round, |predicted| predicted.sequential);
    let calls = ((round / predicted).ceil() as u64).clamp(3, 200);
    let side = |label, by| Side { label, request: Request { work: Work::QuantizedProduct(by, travels, sizes), bytes: 0, calls } };
    let labels = [("chunked", quantized::By::Chunked, Method::Chunked), ("sequential", quantized::By::Sequential, Method::Sequential)];
    let mut sides: Vec<_> = labels.map(|(label, by, _)| side(label, by)).into();
    sides.extend([side(PRODUCT, quantized::By::ProductAlone), side("dequantizing alone", quantized::By::Dequantize)]);
    let (peers, whole) = (u64::from(world - 1), config.bytes::<bf16, bf16>()?);
    let bytes = whole / u64::from(world) * peers;
    sides.push(Side { label: WIRE, request: Request { work: Work::Put, bytes: bytes / peers, calls: calls * peers } });
    // Of the same product as it is best in bf16.
    for (label, by) in [("bf16 fused", By::Fused), ("bf16 sequential", By::Sequential)] {
        sides.push(Side { label, request: Request { work: Work::GatheredProduct(by, sizes), bytes: 0, calls } });
    }
    let ([m, n, k], chosen) = (sizes, labels.into_iter().find(|(.., method)| *method == choice.method));
    Ok(Comparison {
        bytes,
        flops: 2 * m * n * k / u64::from(world),
        limit: &[PRODUCT, WIRE],
        chosen: chosen.map(|(label, ..)| label),
        ..Comparison::of(OVERLAP, &format!("ag-gemm {} nt", travels.name()), format!("{m}x{n}x{k}, {world} ranks"), sides, &[DEVICE])
    })
}

/// Operands that are codes and scales, whose product's rows are scattered: the methods, what they are made of, and the same product of operands in bf16.
fn scattered_codes(world: u32, rates: &Rates, sizes: Sizes, travels: Travels, round: f64) -> Result<Comparison> {
    use scattered_quantized::By;
    let Comparison { bytes, flops, calls, shape, .. } = scatter(world, rates, sizes, round)?;
    let side = |label, by| Side { label, request: Request { work: Work::ScatteredCodes(by, travels, sizes), bytes: 0, calls } };
    let peers = u64::from(world - 1);
    let mut sides = vec![side("fused", By::Fused), side("sequential", By::Sequential), side(PRODUCT, By::ProductAlone)];
    sides.push(side("dequantizing alone", By::Dequantize));
    sides.push(Side { label: WIRE, request: Request { work: Work::Put, bytes: bytes / peers, calls: calls * peers } });
    sides.push(scattered_side("bf16 fused", scattered::By::Fused, sizes, calls));
    Ok(Comparison {
        bytes,
        flops,
        limit: &[PRODUCT, WIRE],
        chosen: Some("fused"),
        ..Comparison::of(OVERLAP, &format!("gemm-rs {} nt", travels.name()), shape, sides, &[DEVICE])
    })
}

/// What virtual GPUs do of [`main`] and of [`shapes`](super::shapes).
pub fn tiny(world: u32, rates: &Rates) -> Result<Vec<Comparison>> {
    let count = u64::from(world);
    let one = methods(SHAPES, world, rates, [16 * count, 16 * count, 72], 0.0)?;
    let narrow = |travels| codes(world, rates, [32 * count, 16 * count, 96], travels, 0.0);
    let scattered = scatter(world, rates, [24 * count, 16, 16 * count], 0.0)?;
    let scattered_codes = |travels| scattered_codes(world, rates, [24 * count, 32, 64 * count], travels, 0.0);
    let reduced = reduce(world, rates, [24 * count, 16, 16 * count], 0.0)?;
    let first = whole(world, rates, [48 * count, 32 * count, 136], 0.0)?;
    let sizes = [24 * count, 32, 16 * count];
    let (layer, pair) = (layer::comparison(world, sizes, 0.0, false), layer::pair(world, sizes, 0.0));
    let codes = [scattered_codes(Travels::Mxfp8)?, scattered_codes(Travels::Nvfp4)?];
    Ok([first, narrow(Travels::Mxfp8)?, narrow(Travels::Nvfp4)?, one, scattered]
        .into_iter()
        .chain(codes)
        .chain([reduced, layer, pair])
        .collect())
}

/// The methods, what they are made of, and torch's.
fn whole(world: u32, rates: &Rates, sizes: Sizes, round: f64) -> Result<Comparison> {
    let mut of = methods(OVERLAP, world, rates, sizes, round)?;
    // The puts of a call, one after another to one peer.
    let peers = u64::from(world - 1);
    let puts = Request { work: Work::Put, bytes: of.bytes / peers, calls: of.calls * peers };
    of.sides.extend([side(PRODUCT, By::ProductAlone, sizes, of.calls), Side { label: WIRE, request: puts }]);
    of.limit = &[PRODUCT, WIRE];
    of.peers =
        [("torch fused", By::TorchFused), ("torch unfused", By::TorchUnfused)].map(|(label, by)| side(label, by, sizes, of.calls)).into();
    Ok(of)
}

/// The methods that can be taken, and the one that the model takes.
pub(super) fn methods(family: &'static str, world: u32, rates: &Rates, sizes: Sizes, round: f64) -> Result<Comparison> {
    let ranks = WorldSize::new(world).context("there are ranks")?;
    let choose = |method| -> oxtile::Result<OverlapChoice> { config(sizes, method).choose::<bf16, bf16>(ranks, rates) };
    let choice = choose(None)?;
    let predicted = choice.predicted.map_or(round, |predicted| predicted.sequential);
    let calls = ((round / predicted).ceil() as u64).clamp(3, 200);
    let (mut sides, mut missing) = (Vec::new(), Vec::new());
    for (label, method, by) in METHODS {
        match choose(Some(method)) {
            Ok(_) => sides.push(side(label, by, sizes, calls)),
            Err(error) => missing.push(Missing { peer: label.into(), why: error.to_string() }),
        }
    }
    let ([m, n, k], chosen) = (sizes, METHODS.into_iter().find(|(_, method, _)| *method == choice.method));
    Ok(Comparison {
        bytes: m * k * 2 / u64::from(world) * u64::from(world - 1),
        flops: 2 * m * n * k / u64::from(world),
        missing,
        chosen: chosen.map(|(label, ..)| label),
        ..Comparison::of(family, "ag-gemm bf16 nt", format!("{m}x{n}x{k}, {world} ranks"), sides, &[DEVICE])
    })
}

fn side(label: &'static str, by: By, sizes: Sizes, calls: u64) -> Side {
    Side { label, request: Request { work: Work::GatheredProduct(by, sizes), bytes: 0, calls } }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn two_and_four_ranks_have_all_shapes_and_methods() {
        for world in [2, 4] {
            let main = main(world, &Rates::H200).unwrap();
            assert_eq!(main.len(), 20);
            assert_eq!(main[1].shape, format!("16384x{}x8192, {world} ranks", 1024 * world));
            let wire = main[0].sides.iter().find(|side| side.label == WIRE).unwrap().request;
            let [puts, shards] = [wire.calls * wire.bytes, main[0].calls * main[0].bytes];
            assert_eq!(puts, shards, "the wire carries what the calls do");
            // A byte of codes and a scale for 32, half a byte and one for 16.
            assert_eq!(
                main[3..7].iter().map(|of| of.kernel.as_str()).collect::<Vec<_>>(),
                ["ag-gemm mxfp8 nt", "ag-gemm nvfp4 nt"].repeat(2)
            );
            assert_eq!([main[3].bytes, main[4].bytes], [33, 18].map(|of| 8192 * 8192 * of / 32 / world as u64 * (world as u64 - 1)));
            let of = |kernel| main.iter().filter(|of| of.kernel == kernel).collect::<Vec<_>>();
            for codes in ["gemm-rs mxfp8 nt", "gemm-rs nvfp4 nt"].map(of) {
                assert_eq!(
                    codes.iter().map(|of| of.bytes).collect::<Vec<_>>(),
                    [8192 * 8192, 4096 * 4096].map(|len| len * 2 / world as u64 * (world as u64 - 1))
                );
            }
            let sums = of("gemm-ar bf16 nt");
            assert_eq!(sums[3].missing, [], "small sums are made by every method");
            assert_eq!([sums[0].missing.len(), sums[3].sides.len()], [1, 9], "large ones by all but one launch, small ones in graphs too");
            for of in main.iter().filter(|of| !of.kernel.starts_with("gemm-ar")).take(14) {
                assert!(of.missing.is_empty() && of.sides.len() >= 3 && of.chosen.is_some(), "{}: {:?}", of.shape, of.missing);
            }
        }
    }
}
