//! `oxtile overlap` of the gradients of a column-parallel layer: whether what they gather and scatter is to travel beside them, and why.

use std::fmt;

use oxtile::num::bf16;
use oxtile::overlap::{AllGatherConfig, BulkChoice, Gathers, Global, Rates, ReduceScatterConfig};
use serde::Serialize;

use crate::arguments::Overlap;
use crate::overlap::Sizes;

/// The choice, for people and for programs.
#[derive(Debug, Serialize)]
pub struct Report {
    command: &'static str,
    schema: u32,
    version: &'static str,
    operation: &'static str,
    ranks: u32,
    /// The product of the forward pass, over all ranks.
    product: Sizes,
    /// The products of the gradients of the weight and of the input, over all ranks.
    weight: Sizes,
    input: Sizes,
    /// `bulk`, or `apart`.
    method: &'static str,
    why: String,
    predicted: Option<Predicted>,
}

/// Microseconds of both.
#[derive(Debug, Serialize)]
struct Predicted {
    bulk: f64,
    apart: f64,
}

/// Chooses for `y = x W^T`, whose input each rank has some rows of, and the weight some columns of the result: `bf16`, the gradient of the weight in `f32`, by the rates of H200s. Needs no GPU.
///
/// # Errors
/// As [`BulkChoice::of`].
pub fn run(request: &Overlap) -> oxtile::Result<Report> {
    let ([m, n, k], world) = (request.plan, request.ranks);
    let weight = AllGatherConfig::new(Global { m: n, n: k, k: m });
    let weight = AllGatherConfig { gathers: Gathers::SumOfB, transpose_a: true, ..weight };
    let input = ReduceScatterConfig::new(Global { m, n: k, k: n });
    let choice = BulkChoice::of::<bf16, f32, bf16>(&weight, &input, world, &Rates::H200)?;
    let sizes = |Global { m, n, k }| Sizes { m, n, k };
    Ok(Report {
        command: "overlap",
        schema: 1,
        version: env!("CARGO_PKG_VERSION"),
        operation: request.operation.name(),
        ranks: world.get(),
        product: Sizes { m, n, k },
        weight: sizes(weight.sizes),
        input: sizes(input.sizes),
        method: if choice.is_bulk { "bulk" } else { "apart" },
        why: choice.why,
        predicted: choice.predicted.map(|of| Predicted { bulk: of.bulk, apart: of.apart }),
    })
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { ranks, product, weight, input, method, why, predicted, .. } = self;
        writeln!(f, "product  {product} over {ranks} ranks, in the backward pass; bf16, rates of H200s")?;
        writeln!(f, "weight   {weight}, gathers x\ninput    {input}, scatters its rows\nmethod   {method}: {why}")?;
        let Some(Predicted { bulk, apart }) = predicted else { return Ok(()) };
        writeln!(f, "\nus, predicted")?;
        [("bulk", bulk), ("apart", apart)]
            .into_iter()
            .try_for_each(|(name, time)| writeln!(f, "{name:<14} {time:>10.1}{}", if name == *method { "  chosen" } else { "" }))
    }
}
