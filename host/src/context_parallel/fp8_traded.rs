//! Codes of heads that ranks trade for tokens: each attends with some of the heads to all tokens, by the kernel of one device.

use oxtile_tile::launch::{BufferAccess, DeviceViewMut};
use oxtile_tile::num::{bf16, e4m3};

use super::all_to_all::AllToAll;
use super::carrier::{Given, Reach, Taken};
use super::config::{ContextParallelConfig, Schedule};
use super::fp8_gathered::kernel;
use super::head_group::{groups_of, in_rows};
use super::lane::{Lane, Trade, Way};
use super::local::Local;
use super::memory::Scratch;
use super::trading::{HeadGroup, Trading};
use crate::attention::{Attention, AttentionConfig, Inputs, Outputs, Scales};
use crate::runtime::{Bound, Result, Stream};
use crate::tensor::{Heads, Strided};

/// Attention of 8 bits by traded heads.
pub(super) struct TradedCodes<'t> {
    trading: Trading<'t>,
    local: Local,
    groups: Vec<CodeGroup>,
    /// Those of groups of so many key heads.
    kernels: Vec<(u64, Attention<e4m3>)>,
}

/// Some of each rank's heads.
struct CodeGroup {
    key_heads: u64,
    /// Queries, keys and values.
    codes: [Lane<e4m3>; 3],
    out: Lane<bf16>,
    log_sum_exp: Lane<f32>,
}

impl HeadGroup for CodeGroup {
    fn accesses(&self) -> Vec<BufferAccess<'_>> {
        let codes = self.codes.iter().map(|lane| lane.natural.access(true));
        codes.chain([self.out.natural.access(true), self.log_sum_exp.natural.access(true)]).collect()
    }
}

impl<'t> TradedCodes<'t> {
    /// Takes memory, and loads kernels.
    pub fn new(stream: &Stream, config: &ContextParallelConfig, local: Local, reach: Reach<'t>) -> Result<Self> {
        let (share, whole, runtime) = (local.share, config.attention, stream.device().runtime());
        let all = AllToAll::<bf16>::traded(config, share)?.attention;
        let (trade, arena, ranks) = (Trade::new(share, &whole), reach.arena(), u64::from(share.world.get()));
        let sizes = if ranks == 1 { vec![all.key_heads] } else { groups_of(&all, size_of::<e4m3>() as u64) };
        let (sharing, of_key) = ((ranks / whole.key_heads).max(1), all.heads / all.key_heads);
        let AttentionConfig { queries, keys, heads, key_heads, head_size, .. } = all;
        let group = |(first, count)| -> Result<CodeGroup> {
            let of_queries = [first * of_key, count * of_key];
            let place = || (trade, arena);
            let of_keys = |name, size| Lane::new(stream, place(), name, [keys, key_heads, size], [first, count], (sharing, Way::Given));
            Ok(CodeGroup {
                key_heads: count,
                codes: [
                    Lane::new(stream, place(), "traded codes of queries", [queries, heads, head_size], of_queries, (1, Way::Given))?,
                    of_keys("traded codes of keys", head_size)?,
                    of_keys("traded codes of values", all.value_size())?,
                ],
                out: Lane::new(stream, place(), "traded results", [queries, heads, all.value_size()], of_queries, (1, Way::Taken))?,
                log_sum_exp: Lane::new(stream, place(), "traded log-sum-exp", [queries, heads, 1], of_queries, (1, Way::Taken))?,
            })
        };
        let groups = in_rows(&sizes).map(group).collect::<Result<Vec<_>>>()?;
        let mut kernels: Vec<(u64, Attention<e4m3>)> = Vec::new();
        for &key_heads in &sizes {
            if kernels.iter().all(|(other, _)| *other != key_heads) {
                kernels.push((key_heads, kernel(&runtime, AttentionConfig { heads: key_heads * of_key, key_heads, ..all })?));
            }
        }
        let kept = groups.iter().map(|group| group.out.kept().max(group.codes[0].kept())).max().unwrap_or_default();
        let around = config.goes_around(stream, Schedule::AllToAll, share.world, size_of::<e4m3>() as u64);
        let carrier = reach.carrier(stream, groups.len(), (groups.len() > 1 && around).then_some(kept))?;
        Ok(Self { trading: Trading::new(stream, trade, carrier)?, local, groups, kernels })
    }

    /// The streams that carry heads.
    pub fn streams(&self) -> impl Iterator<Item = &Stream> {
        self.trading.streams()
    }

    /// The kernel's name, and its launches.
    pub fn kernels(&self) -> (Vec<&'static str>, u32) {
        (self.kernels.iter().filter_map(|(_, kernel)| kernel.choice().kernel).take(1).collect(), self.groups.len() as u32)
    }

    /// Device memory.
    pub fn memory(&self) -> u64 {
        let of = |group: &CodeGroup| group.codes.iter().map(Lane::bytes).sum::<u64>() + group.out.bytes() + group.log_sum_exp.bytes();
        self.groups.iter().map(of).sum()
    }

    /// Fills it with NaN, in stream order.
    pub fn spoil(&self, stream: &Stream) -> Result<()> {
        let _turn = self.trading.lock();
        self.groups.iter().try_for_each(|CodeGroup { codes, out, log_sum_exp, .. }| {
            codes.iter().try_for_each(|lane| lane.spoil(stream))?;
            out.spoil(stream)?;
            log_sum_exp.spoil(stream)
        })
    }

    /// Binds codes of this rank, and where its result goes: a tensor of the configuration's layout without gaps.
    pub fn bind<'a>(
        &'a self,
        stream: &Stream,
        codes: &'a [Scratch<e4m3>; 3],
        scales: Scales<'a>,
        mut out: DeviceViewMut<'a, bf16>,
        mut given_log: DeviceViewMut<'a, f32>,
    ) -> Result<Bound<'a>> {
        let tensor = |(codes, Strided { shape, strides: [batch, row, head, _] }): (&'a Scratch<e4m3>, Strided<4>)| {
            Heads::strided(codes.view(), shape, [batch, row, head])
        };
        let tensors = codes.iter().zip(self.local.given.whole_inputs()).map(tensor).collect::<Result<Vec<_>>>()?;
        let layout = self.local.given.whole_result();
        let bind = |group: &'a CodeGroup| {
            let [q, k, v] = &group.codes;
            let inputs = Inputs { scales: Some(scales), ..Inputs::new(q.heads()?, k.heads()?, v.heads()?) };
            let found = self.kernels.iter().find(|(key_heads, _)| *key_heads == group.key_heads);
            let (_, kernel) = found.unwrap_or_else(|| unreachable!("the kernel of each group was loaded"));
            kernel.bind(stream, inputs, Outputs::new(group.out.heads_mut()?, group.log_sum_exp.natural.lend()))
        };
        let mut attention = self.groups.iter().map(bind).collect::<Result<Vec<_>>>()?;
        Ok(Bound::new(move |stream| {
            let Trading { trade, carrier, comm, .. } = &self.trading;
            let _turn = self.trading.begin(stream, &self.groups)?;
            let give = |at: usize| {
                let tensors = self.groups[at].codes.iter().zip(&tensors).map(|(lane, tensor)| (lane, tensor, None)).collect();
                carrier.give(comm, *trade, at, &Given { tensors, numbers: None })
            };
            let take = |at: usize| {
                let CodeGroup { out: lane, log_sum_exp, .. } = &self.groups[at];
                let (taken, within) = (Taken { lanes: vec![(lane, None)], numbers: Some((log_sum_exp, None)) }, carrier.within(comm, at));
                carrier.cut(comm, &taken)?;
                lane.keep(within, layout, out.reborrow())?;
                log_sum_exp.keep_numbers(within, given_log.reborrow())?;
                carrier.take(comm, *trade, at, &taken)?;
                lane.unpack(within, layout, out.reborrow())?;
                log_sum_exp.unpack_numbers(within, given_log.reborrow())
            };
            self.trading.in_turn(stream, &self.groups, give, |at| attention[at].run(stream), take)?;
            self.trading.end(stream)
        }))
    }
}
