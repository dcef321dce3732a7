//! `oxtile overlap` of products whose sum the ranks share: how one would be done, and why.

use std::fmt;

use oxtile::num::bf16;
use oxtile::overlap::{AllReduceConfig, AllReduceMethod, AllReduceTimes, Global, Method, Rates, ReduceScatterConfig, ScatterMethod};
use serde::Serialize;

use crate::arguments::{Operation, Overlap};
use crate::overlap::{Refusal, Sizes, name};

/// The choice, for people and for programs.
#[derive(Debug, Serialize)]
pub struct Report {
    command: &'static str,
    schema: u32,
    version: &'static str,
    operation: &'static str,
    ranks: u32,
    /// Over all ranks, and of each.
    product: Sizes,
    local: Sizes,
    method: &'static str,
    why: String,
    /// Parts of a rank's rows, which travel one after another.
    panels: u32,
    predicted: Predicted,
    refused: Vec<Refusal>,
}

/// Microseconds; none for a method that is refused.
#[derive(Debug, Serialize)]
struct Predicted {
    /// Of a reduce-scatter.
    whole: Option<f64>,
    direct: Option<f64>,
    fused: Option<f64>,
    sequential: Option<f64>,
    /// Of an all-reduce.
    one_shot: Option<f64>,
    product: f64,
    wire: f64,
}

/// Chooses, for `bf16` and by the rates of H200s. Needs no GPU.
///
/// # Errors
/// As [`ReduceScatterConfig::choose`] and [`AllReduceConfig::choose`].
pub fn run(request: &Overlap) -> oxtile::Result<Report> {
    let ([m, n, k], world) = (request.plan, request.ranks);
    let sizes = Global { m, n, k };
    let (config, reduce) = (ReduceScatterConfig::new(sizes), AllReduceConfig::new(sizes));
    let (method, why, panels, predicted, refused) = if request.operation == Operation::AllReduce {
        let choice = reduce.choose::<bf16, bf16>(world, &Rates::H200)?;
        let AllReduceTimes { product, wire, fused, sequential, one_shot } = choice.predicted;
        let refused = choice.refused.into_iter().map(|(method, why)| Refusal { method: name_of(method), why }).collect();
        (
            name_of(choice.method),
            choice.why,
            choice.panels,
            Predicted { whole: None, direct: None, fused, sequential, one_shot, product, wire },
            refused,
        )
    } else {
        let choice = config.choose::<bf16, bf16>(world, &Rates::H200)?;
        let times = choice.predicted;
        let (fused, sequential) = (Some(times.fused), Some(times.sequential));
        let predicted = Predicted {
            whole: times.whole,
            direct: times.direct,
            fused,
            sequential,
            one_shot: None,
            product: times.product,
            wire: times.wire,
        };
        let refused = choice.refused.into_iter().map(|(method, why)| Refusal { method: name_of_scatter(method), why }).collect();
        (name_of_scatter(choice.method), choice.why, choice.panels, predicted, refused)
    };
    let local = config.product(world)?;
    Ok(Report {
        command: "overlap",
        schema: 1,
        version: env!("CARGO_PKG_VERSION"),
        operation: request.operation.name(),
        ranks: world.get(),
        product: Sizes { m, n, k },
        local: Sizes { m: local.m, n: local.n, k: local.k },
        method,
        why,
        panels,
        predicted,
        refused,
    })
}

fn name_of_scatter(method: ScatterMethod) -> &'static str {
    match method {
        ScatterMethod::Whole => "whole",
        ScatterMethod::Direct => "direct",
        ScatterMethod::Fused => name(Method::Fused),
        ScatterMethod::Sequential => name(Method::Sequential),
    }
}

fn name_of(method: AllReduceMethod) -> &'static str {
    match method {
        AllReduceMethod::Fused => name(Method::Fused),
        AllReduceMethod::Sequential => name(Method::Sequential),
        AllReduceMethod::OneShot => "one_shot",
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { operation, ranks, product, local, method, why, panels, predicted, refused, .. } = self;
        writeln!(f, "product  {product} over {ranks} ranks, {local} on each, then {operation}; bf16, rates of H200s")?;
        writeln!(f, "method   {method}: {why}\ncopies   {panels} panels a rank\n\nus, predicted")?;
        let Predicted { whole, direct, fused, sequential, one_shot, .. } = *predicted;
        let times = [("whole", whole), ("direct", direct), ("fused", fused), ("sequential", sequential), ("one_shot", one_shot)];
        for (name, time) in times.into_iter().filter_map(|(name, time)| Some((name, time?))) {
            writeln!(f, "{name:<14} {time:>10.1}{}", if name == *method { "  chosen" } else { "" })?;
        }
        writeln!(f, "{:<14} {:>10.1}\n{:<14} {:>10.1}", "product alone", predicted.product, "copies alone", predicted.wire)?;
        refused.iter().try_for_each(|Refusal { method, why }| writeln!(f, "not {method}: {why}"))
    }
}
