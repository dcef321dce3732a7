//! `oxtile overlap`: how a product would be done of which the ranks gather an operand, and why.

use std::fmt;

use oxtile::{
    num::bf16,
    overlap::{AllGatherConfig, Global, Method, OverlapChoice, Rates},
    symmetric::PutOrder,
};
use serde::Serialize;

use crate::arguments;

/// The choice, for people and for programs.
#[derive(Debug, Serialize)]
pub struct Report {
    command: &'static str,
    schema: u32,
    version: &'static str,
    ranks: u32,
    /// Over all ranks, and of each.
    product: Sizes,
    local: Sizes,
    /// How the gathered operand travels.
    format: &'static str,
    /// Bytes of the gathered operand as it travels.
    gathered_bytes: u64,
    method: &'static str,
    why: String,
    /// Chunks of a shard.
    cut: Chunks,
    puts: &'static str,
    /// Of a fused product.
    tiles: Option<Tiles>,
    predicted: Option<Predicted>,
    refused: Vec<Refusal>,
}

#[derive(Debug, Serialize)]
pub(crate) struct Sizes {
    pub m: u64,
    pub n: u64,
    pub k: u64,
}

#[derive(Debug, Serialize)]
struct Chunks {
    panels: u32,
    slabs: u32,
    /// Whether each slab is half as wide as the one before it.
    halving: bool,
    /// Whether only the panel that comes last of all has slabs.
    last_only: bool,
}

/// In the order of time those of the own rows come first, then those of each rank before.
#[derive(Debug, Serialize)]
struct Tiles {
    tile: String,
    count: u64,
    /// Of the rows of one shard.
    of_shard: u64,
    /// Whether some have rows of two shards.
    span_shards: bool,
}

/// Microseconds.
#[derive(Debug, Serialize)]
struct Predicted {
    fused: Option<f64>,
    chunked: Option<f64>,
    sequential: f64,
    product: f64,
    wire: f64,
    /// Of kernels that dequantize; 0 of bf16.
    dequantize: f64,
}

#[derive(Debug, Serialize)]
pub(crate) struct Refusal {
    pub method: &'static str,
    pub why: String,
}

/// Chooses, for `bf16` and by the rates of H200s. Needs no GPU.
///
/// # Errors
/// As [`AllGatherConfig::choose`].
pub fn run(request: &arguments::Overlap) -> oxtile::Result<Report> {
    let ([m, n, k], world) = (request.plan, request.ranks);
    let ranks = world.get();
    let config = AllGatherConfig { format: request.format.format(), ..AllGatherConfig::new(Global { m, n, k }) };
    let OverlapChoice { method, cut, order, tile, why, refused, predicted, .. } = config.choose::<bf16, bf16>(world, &Rates::H200)?;
    let local = config.local(world)?;
    let tiles = tile.map(|tile| {
        let [count, of_shard] = [m, m.div_ceil(ranks.into())].map(|rows| tile.count([rows, local.n()]));
        Tiles { tile: format!("{tile:?}"), count, of_shard, span_shards: count < of_shard * u64::from(ranks) }
    });
    Ok(Report {
        command: "overlap",
        schema: 1,
        version: env!("CARGO_PKG_VERSION"),
        ranks,
        product: Sizes { m, n, k },
        local: Sizes { m: local.m(), n: local.n(), k: local.k() },
        format: request.format.name(),
        gathered_bytes: config.bytes::<bf16, bf16>()?,
        method: name(method),
        why,
        cut: Chunks { panels: cut.panels, slabs: cut.slabs, halving: cut.halving, last_only: cut.last_only },
        puts: match order {
            PutOrder::ByPeer => "by_peer",
            PutOrder::InStep => "in_step",
            PutOrder::ByChunk => "by_chunk",
        },
        tiles,
        predicted: predicted.map(|of| Predicted {
            fused: of.fused,
            chunked: of.chunked,
            sequential: of.sequential,
            product: of.product,
            wire: of.wire,
            dequantize: of.dequantize,
        }),
        refused: refused.into_iter().map(|(method, why)| Refusal { method: name(method), why }).collect(),
    })
}

pub(crate) fn name(method: Method) -> &'static str {
    match method {
        Method::Fused => "fused",
        Method::Chunked => "chunked",
        Method::Sequential => "sequential",
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { ranks, product, local, method, why, cut, puts, .. } = self;
        writeln!(f, "product  {product} over {ranks} ranks, {local} on each; bf16, rates of H200s")?;
        let form = if self.format == "bf16" { String::new() } else { format!(", as {} codes and scales", self.format) };
        writeln!(f, "gathers  {} bytes of A, by rows{form}", self.gathered_bytes)?;
        writeln!(f, "method   {method}: {why}")?;
        writeln!(f, "copies   {}, {}", chunks(cut), puts.replace('_', " "))?;
        if let Some(Tiles { tile, count, of_shard, span_shards }) = &self.tiles {
            let spans = if *span_shards { "; those at a shard's end wait for two" } else { "" };
            writeln!(
                f,
                "tiles    {count} of {tile}, {of_shard} a shard: the own one's first, then as shards arrive, from the rank before backwards{spans}"
            )?;
        }
        if let Some(Predicted { fused, chunked, sequential, product, wire, dequantize }) = self.predicted {
            writeln!(f, "\nus, predicted")?;
            let times = [("fused", fused), ("chunked", chunked), ("sequential", Some(sequential))];
            for (name, time) in times {
                let time = time.map_or("-".to_owned(), |time| format!("{time:.1}"));
                writeln!(f, "{name:<14} {time:>10}{}", if name == *method { "  chosen" } else { "" })?;
            }
            writeln!(f, "{:<14} {product:>10.1}\n{:<14} {wire:>10.1}", "product alone", "copies alone")?;
            if self.format != "bf16" {
                writeln!(f, "{:<14} {dequantize:>10.1}", "dequantizing")?;
            }
        }
        if !self.refused.is_empty() {
            writeln!(f)?;
        }
        self.refused.iter().try_for_each(|Refusal { method, why }| writeln!(f, "not {method}: {why}"))
    }
}

impl fmt::Display for Sizes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}x{}x{}", self.m, self.n, self.k)
    }
}

fn chunks(cut: &Chunks) -> String {
    let Chunks { panels, slabs, halving, last_only } = *cut;
    let each = if halving { ", each half of the one before" } else { "" };
    let panels = if panels == 1 { "whole shards".to_owned() } else { format!("shards in {panels} panels") };
    match (slabs, last_only) {
        (1, _) => panels,
        (_, true) => format!("{panels}, the last to arrive in {slabs} slabs{each}"),
        (_, false) => format!("{panels} of {slabs} slabs{each}"),
    }
}
