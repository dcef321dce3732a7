//! Codes of the keys and values of all ranks, gathered before a rank attends to them.

use oxtile_tile::launch::DeviceViewMut;
use oxtile_tile::num::{bf16, e4m3};

use super::config::{ContextParallelConfig, refuse};
use super::core::elements;
use super::gathered::order_of_tokens;
use super::local::Local;
use super::memory::{Scratch, again, bytes, bytes_mut};
use super::messages::Messages;
use crate::attention::{Attention, AttentionConfig, Inputs, Layout, Mask, Outputs, Scales};
use crate::runtime::{Bound, Error, Result, Stream};
use crate::symmetric::{Pitched, Rows};
use crate::tensor::{Heads, HeadsMut, Strided};
use crate::thd::{Half, Partition, Share};

/// The launches of a rank, and the codes that they read.
pub(super) struct GatheredCodes<'t> {
    messages: &'t dyn Messages,
    local: Local,
    /// Which queries each has, and its kernel.
    launches: Vec<(Part, Attention<e4m3>)>,
    /// Codes of the keys and values of one rank after another, and in the order of tokens.
    by_rank: [Scratch<e4m3>; 2],
    natural: [Scratch<e4m3>; 2],
    /// Log-sum-exps of one launch after another.
    log_sum_exp: Scratch<f32>,
}

/// The queries of a launch, which see keys from the first one on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Part {
    /// The first of the rank's rows.
    first: u64,
    queries: u64,
    keys: u64,
}

/// The launches of a rank: one for each chunk under a causal mask, else one.
fn parts(config: &ContextParallelConfig, share: Share) -> Vec<Part> {
    let AttentionConfig { queries, keys, .. } = config.attention;
    let rows = queries / u64::from(share.world.get());
    if !config.is_causal() {
        return vec![Part { first: 0, queries: rows, keys }];
    }
    let size = queries / config.partition.chunks(share.world);
    let halves: &[Half] = if config.partition == Partition::Contiguous { &[Half::Early] } else { &[Half::Early, Half::Late] };
    let chunks = halves.iter().filter_map(|half| config.partition.chunk(share.rank, share.world, *half));
    chunks.enumerate().map(|(at, chunk)| Part { first: at as u64 * size, queries: size, keys: (chunk + 1) * size }).collect()
}

/// Strides of a tensor of so many batches and heads, from one batch, row and head to the next.
fn strides(layout: Layout, [batches, rows, heads, size]: [u64; 4]) -> [u64; 3] {
    match layout {
        Layout::Sbhd => [heads * size, batches * heads * size, size],
        Layout::Bshd | Layout::Packed => [rows * heads * size, heads * size, size],
    }
}

/// The kernel of 8 bits.
pub(super) fn kernel(runtime: &crate::Runtime, attention: AttentionConfig) -> Result<Attention<e4m3>> {
    match Attention::new(runtime, attention) {
        Err(Error::Invalid { why, .. }) => refuse(format!("{why}; ContextParallel of bf16 takes it otherwise")),
        made => made,
    }
}

impl<'t> GatheredCodes<'t> {
    /// Takes memory, and loads kernels.
    pub fn new(stream: &Stream, config: &ContextParallelConfig, local: Local, messages: &'t dyn Messages) -> Result<Self> {
        let runtime = stream.device().runtime();
        let launch = |part: Part| {
            let mask = if config.is_causal() { Mask::CausalBottomRight } else { Mask::Full };
            // Tensors are given by their strides.
            let attention = AttentionConfig { layout: Layout::Bshd, mask, queries: part.queries, keys: part.keys, ..config.attention };
            Ok((part, kernel(&runtime, attention)?))
        };
        let launches = parts(config, local.share).into_iter().map(launch).collect::<Result<Vec<_>>>()?;
        let [_, k, v] = local.given.whole_inputs().map(elements);
        let ranks = u64::from(local.share.world.get());
        let all =
            |name| -> Result<[Scratch<e4m3>; 2]> { Ok([Scratch::new(stream, name, ranks * k)?, Scratch::new(stream, name, ranks * v)?]) };
        Ok(Self {
            by_rank: all("codes of one rank after another")?,
            natural: all("codes in the order of tokens")?,
            log_sum_exp: Scratch::new(stream, "log-sum-exps of launches", local.packed.queries * local.packed.heads)?,
            launches,
            messages,
            local,
        })
    }

    /// The kernel's name, and its launches.
    pub fn kernels(&self) -> (Vec<&'static str>, u32) {
        let kernels = self.launches.iter().filter_map(|(_, kernel)| kernel.choice().kernel).take(1).collect();
        (kernels, self.launches.len() as u32)
    }

    /// Device memory.
    pub fn memory(&self) -> u64 {
        self.by_rank.iter().chain(&self.natural).map(Scratch::bytes).sum::<u64>() + self.log_sum_exp.bytes()
    }

    /// Fills it with NaN, in stream order.
    pub fn spoil(&self, stream: &Stream) -> Result<()> {
        self.by_rank.iter().chain(&self.natural).try_for_each(|codes| codes.spoil(stream))?;
        self.log_sum_exp.spoil(stream)
    }

    /// Binds codes of this rank, and where its result goes: a tensor without gaps of so many elements.
    pub fn bind<'a>(
        &'a self,
        stream: &Stream,
        codes: &'a [Scratch<e4m3>; 3],
        scales: Scales<'a>,
        (out, out_len): (DeviceViewMut<'a, bf16>, u64),
        mut given_log: DeviceViewMut<'a, f32>,
    ) -> Result<Bound<'a>> {
        let AttentionConfig { layout, batches, queries, heads, key_heads, head_size, .. } = self.local.given;
        let (mut launches, mut logs) = (Vec::new(), Vec::new());
        let of_rows = strides(layout, [batches, queries, heads, head_size]);
        let whole_keys = self.local.given.keys * u64::from(self.local.share.world.get());
        let of_keys = strides(layout, [batches, whole_keys, key_heads, head_size]);
        for (Part { first, queries: rows, keys }, kernel) in &self.launches {
            let (start, log) = (first * of_rows[1], first * batches * heads..(first + rows) * batches * heads);
            let end = elements(Strided { shape: [batches, queries, heads, head_size], strides: [0; 4] });
            let start = start.min(end);
            let q = Heads::strided(codes[0].part(start..end), [batches, *rows, heads, head_size], of_rows)?;
            let [k, v] = self.natural.each_ref().map(|codes| Heads::strided(codes.view(), [batches, *keys, key_heads, head_size], of_keys));
            let part = again(&out, out_len).split_at(start).1;
            let out = HeadsMut::strided(part, [batches, *rows, heads, head_size], of_rows)?;
            let inputs = Inputs { scales: Some(scales), ..Inputs::new(q, k?, v?) };
            launches.push(kernel.bind(stream, inputs, Outputs::new(out, self.log_sum_exp.lend_part(log.clone())))?);
            let from = Pitched { start: log.start, pitch: *rows };
            logs.push(Rows { count: batches * heads, width: *rows, from, to: Pitched { start: *first, pitch: queries } });
        }
        Ok(Bound::new(move |stream| {
            // Held by the launches, which write parts of it.
            let _ = &out;
            for ((codes, by_rank), natural) in codes[1..].iter().zip(&self.by_rank).zip(&self.natural) {
                self.messages.gather(stream, bytes(codes.view()), bytes_mut(by_rank.lend()))?;
                let copies = order_of_tokens(&self.local, by_rank.len(), true);
                Rows::copy_all(stream, "ContextParallelFp8, the order of tokens", by_rank.view(), natural.lend(), &copies)?;
            }
            launches.iter_mut().try_for_each(|launch| launch.run(stream))?;
            let (from, to) = (self.log_sum_exp.view(), DeviceViewMut::reborrow(&mut given_log));
            Rows::copy_all(stream, "ContextParallelFp8, log_sum_exp", from, to, &logs)
        }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::comm::{Rank, WorldSize};

    /// Every query sees the keys up to its own token, in one launch.
    #[test]
    fn launches_see_what_a_causal_mask_leaves() {
        for world in (1..6).filter_map(WorldSize::new) {
            for partition in [Partition::Zigzag, Partition::Contiguous] {
                let tokens = 3 * partition.chunks(world);
                let attention = AttentionConfig { queries: tokens, keys: tokens, mask: Mask::CausalTopLeft, ..AttentionConfig::default() };
                let config = ContextParallelConfig { partition, ..ContextParallelConfig::new(attention) };
                for rank in world.ranks() {
                    let mut rows = 0;
                    for part in parts(&config, Share { partition, rank, world }) {
                        assert_eq!(part.first, rows);
                        for row in 0..part.queries {
                            let token = partition.token(rank, world, tokens, part.first + row);
                            assert_eq!(token + 1, part.keys - part.queries + row + 1, "{rank} of {world}, {part:?}");
                        }
                        rows += part.queries;
                    }
                    assert_eq!(rows, tokens / u64::from(world.get()));
                }
            }
        }
        let share = Share { partition: Partition::Zigzag, rank: Rank::ZERO, world: WorldSize::new(2).unwrap() };
        let full = ContextParallelConfig::new(AttentionConfig { queries: 8, keys: 12, ..AttentionConfig::default() });
        assert_eq!(parts(&full, share), [Part { first: 0, queries: 4, keys: 12 }]);
    }
}
