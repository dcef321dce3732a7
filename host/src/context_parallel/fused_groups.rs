//! Passes in one launch for each of some groups of heads, where memory for keys of all ranks is capped.

use std::ops::Range;

use super::config::{ContextParallelConfig, Schedule};
use super::element::ContextElement;
use super::forward::{check_max_logit, check_sink};
use super::fused::Fused;
use super::key_exchange::{BoundPass, run};
use super::local::Local;
use super::plan::Direction;
use crate::attention::{AttentionConfig, BackwardInputs, GradientTarget, Gradients, Inputs, Outputs, Target};
use crate::comm::{Member, WorldSize};
use crate::runtime::{Bound, Error, Result, Stream};
use crate::symmetric::Arena;
use crate::tensor::{Heads, HeadsMut};
use crate::thd::{Packed, Share};
use oxtile_tile::launch::{DeviceView, DeviceViewMut};

/// Operations of a group of heads: one, if all heads are one group, else two that take turns.
pub(super) struct FusedGroups<T: ContextElement> {
    turns: Vec<Fused<T>>,
    groups: u64,
    /// Attention of all heads, with the rows of this rank.
    given: AttentionConfig,
}

impl ContextParallelConfig {
    /// Groups of key heads of a fused pass: as few as fit the cap, with two of them at once.
    ///
    /// # Errors
    /// Why there are none.
    pub(super) fn fused_groups(&self, world: WorldSize, element_bytes: u64) -> Result<u64, String> {
        let Some(most) = self.gathered_bytes else { return Ok(1) };
        let AttentionConfig { key_heads, batches, .. } = self.attention;
        let of_group = |groups: u64| self.of_groups(groups).arena_bytes_of(Schedule::Fused, world, element_bytes);
        let bytes = |groups: u64| of_group(groups).saturating_mul(groups.min(2));
        let mend = "raise it or leave it out, or take pull, gather or all-to-all";
        let all = bytes(1);
        if all <= most {
            return Ok(1);
        }
        if self.is_packed() || batches > 1 {
            return Err(format!(
                "gathered_bytes is {most}, all heads take {all}, and groups of heads are of dense tensors of one batch: {mend}"
            ));
        }
        // No device has more heads than this.
        let mut counts = (2..=key_heads.min(1 << 16)).filter(|groups| key_heads.is_multiple_of(*groups));
        counts.find(|groups| bytes(*groups) <= most).ok_or_else(|| {
            format!(
                "gathered_bytes is {most}, and it takes {} by as many groups as there are key heads, {all} without groups: {mend}",
                bytes(key_heads.max(1))
            )
        })
    }

    /// The attention of one of so many groups of heads.
    pub(super) fn of_groups(&self, groups: u64) -> Self {
        let AttentionConfig { heads, key_heads, .. } = self.attention;
        let attention = AttentionConfig { heads: heads / groups, key_heads: key_heads / groups, ..self.attention };
        Self { attention, gathered_bytes: None, ..*self }
    }
}

impl<T: ContextElement> FusedGroups<T> {
    /// Takes memory of the arena, and loads kernels. All ranks of the arena take as much.
    pub fn new(
        stream: &Stream,
        arena: &Arena,
        member: &Member,
        config: ContextParallelConfig,
        share: Share,
        has_gradients: bool,
    ) -> Result<Self> {
        let groups = config.fused_groups(share.world, size_of::<T>() as u64);
        let groups = groups.map_err(|why| Error::Invalid { what: "ContextParallelConfig", why })?;
        let one = |_| Fused::new(stream, arena, member, config.of_groups(groups), share, has_gradients);
        Ok(Self { turns: (0..groups.min(2)).map(one).collect::<Result<_>>()?, groups, given: Local::new(&config, share).given })
    }

    /// Says where the packed sequences of a batch lie, in stream order.
    pub fn set_sequences(&self, stream: &Stream, queries: Packed<DeviceView<'_, u32>>, keys: Packed<DeviceView<'_, u32>>) -> Result<()> {
        self.turns.iter().try_for_each(|fused| fused.set_sequences(stream, queries, keys))
    }

    /// Before the first pass: nothing lies at the other ranks. Meets all ranks.
    pub fn open(&self, stream: &Stream) -> Result<()> {
        self.turns.iter().try_for_each(|fused| fused.open(stream))
    }

    /// Fills what no pass may read before it has written it with NaN, in stream order.
    pub fn spoil(&self, stream: &Stream) -> Result<()> {
        self.turns.iter().try_for_each(|fused| fused.spoil(stream))
    }

    /// The streams that carry keys.
    pub fn streams(&self) -> impl Iterator<Item = &Stream> {
        self.turns.iter().flat_map(Fused::streams)
    }

    /// The kernel of a pass, and its launches.
    pub fn kernel(&self, direction: Direction) -> (&'static str, u32) {
        (self.turns[0].kernel(direction), self.groups as u32)
    }

    /// Bytes of keys and values of all ranks, and of the slots.
    pub fn memory(&self, passes: &[Direction]) -> u64 {
        self.turns.iter().map(|fused| fused.memory(passes)).sum()
    }

    /// Bytes that this rank receives in a pass.
    pub fn received(&self, direction: Direction) -> u64 {
        self.groups * self.turns[0].received(direction)
    }

    /// The operation of a group.
    fn of(&self, group: u64) -> &Fused<T> {
        &self.turns[group as usize % self.turns.len()]
    }

    /// The part of a group of so many heads, or of what there is of each.
    fn part(&self, heads: u64, group: u64) -> Range<u64> {
        let of_group = heads / self.groups;
        group * of_group..(group + 1) * of_group
    }

    /// The inputs of each group.
    fn inputs<'a>(&self, Inputs { q, k, v, sink, .. }: Inputs<'a, T>) -> Result<Vec<Inputs<'a, T>>> {
        let [of_q, of_k, of_v] = self.given.whole_inputs();
        check_sink(&self.given, sink)?;
        let q = q.shaped("ContextParallel, q", of_q)?;
        let (k, v) = (k.shaped("ContextParallel, k", of_k)?, v.shaped("ContextParallel, v", of_v)?);
        let of = |tensor: Heads<'a, T>, group: u64| tensor.heads(self.part(tensor.shape()[2], group));
        let of_group = |group: u64| {
            let sink = sink.map(|sink| {
                let Range { start, end } = self.part(sink.len(), group);
                sink.slice(start, end)
            });
            Ok(Inputs { sink, ..Inputs::new(of(q, group)?, of(k, group)?, of(v, group)?) })
        };
        (0..self.groups).map(of_group).collect()
    }

    /// Binds tensors of this rank, of the layout and the rows that the configuration says.
    pub fn bind_forward<'a>(&'a self, stream: &Stream, inputs: Inputs<'a, T>, outputs: Outputs<'a, T>) -> Result<Bound<'a>> {
        let Outputs { out, log_sum_exp, max_logit } = outputs;
        check_max_logit(&self.given, max_logit.as_ref())?;
        let Target::Rounded(out) = out else {
            let why = "ranks merge their results themselves: give Outputs::new".to_owned();
            return Err(Error::Invalid { what: "ContextParallel, out", why });
        };
        let out = out.shaped("ContextParallel, out", self.given.whole_result())?;
        Error::check_length("ContextParallel, log_sum_exp", self.rows(), log_sum_exp.len())?;
        let (out, log_sum_exp, max_logit) = (self.heads(out)?, self.views(log_sum_exp), max_logit.map(|largest| self.views(largest)));
        let mut max_logit = max_logit.into_iter().flatten();
        let mut passes = Vec::new();
        for ((group, inputs), (out, log_sum_exp)) in (0..).zip(self.inputs(inputs)?).zip(out.into_iter().zip(log_sum_exp)) {
            let outputs = Outputs { max_logit: max_logit.next(), ..Outputs::new(out, log_sum_exp) };
            passes.push(self.of(group).bind_forward(stream, inputs, outputs)?);
        }
        Ok(self.bound(passes))
    }

    /// The same to a backward pass.
    pub fn bind_backward<'a>(&'a self, stream: &Stream, inputs: BackwardInputs<'a, T>, gradients: Gradients<'a, T>) -> Result<Bound<'a>> {
        let BackwardInputs { forward, out, log_sum_exp, grad_out } = inputs;
        let whole = self.given.whole_result();
        let (out, grad_out) = (out.shaped("ContextParallel, out", whole)?, grad_out.shaped("ContextParallel, grad_out", whole)?);
        Error::check_length("ContextParallel, log_sum_exp", self.rows(), log_sum_exp.len())?;
        let Gradients { q, k, v, sink } = gradients;
        let [of_q, of_k, of_v] = self.given.whole_inputs();
        let rounded = |what: &'static str, target: GradientTarget<'a, T>, whole| match target {
            GradientTarget::Rounded(tensor) => self.heads(tensor.shaped(what, whole)?),
            _ => Err(Error::Invalid { what, why: "ranks add gradients up themselves: give Gradients::new".to_owned() }),
        };
        let q = rounded("ContextParallel, gradients of q", q, of_q)?;
        let k = rounded("ContextParallel, gradients of k", k, of_k)?;
        let v = rounded("ContextParallel, gradients of v", v, of_v)?;
        let mut sinks = sink.map(|sink| self.views(sink)).into_iter().flatten();
        let mut passes = Vec::new();
        for ((group, forward), ((q, k), v)) in (0..).zip(self.inputs(forward)?).zip(q.into_iter().zip(k).zip(v)) {
            let heads = self.part(self.given.heads, group);
            let rows = self.part(log_sum_exp.len(), group);
            let (out, grad_out) = (out.heads(heads.clone())?, grad_out.heads(heads)?);
            let inputs = BackwardInputs { forward, out, log_sum_exp: log_sum_exp.slice(rows.start, rows.end), grad_out };
            let gradients = Gradients { sink: sinks.next(), ..Gradients::new(q, k, v) };
            passes.push(self.of(group).bind_backward(stream, inputs, gradients)?);
        }
        Ok(self.bound(passes))
    }

    fn bound<'a>(&'a self, mut passes: Vec<BoundPass<'a, T>>) -> Bound<'a> {
        Bound::new(move |stream| run(&self.turns, stream, &mut passes))
    }

    /// Numbers of a log-sum-exp.
    fn rows(&self) -> u64 {
        self.given.whole_result().shape[..3].iter().product()
    }

    /// A tensor by groups of heads.
    fn heads<'a>(&self, tensor: HeadsMut<'a, T>) -> Result<Vec<HeadsMut<'a, T>>> {
        let (of_group, mut rest, mut groups) = (tensor.shape()[2] / self.groups, tensor, Vec::new());
        for _ in 1..self.groups {
            let (one, others) = rest.split_heads(of_group)?;
            groups.push(one);
            rest = others;
        }
        groups.push(rest);
        Ok(groups)
    }

    /// Numbers by groups of heads, which follow each other.
    fn views<'a>(&self, numbers: DeviceViewMut<'a, f32>) -> Vec<DeviceViewMut<'a, f32>> {
        let (of_group, mut rest, mut groups) = (numbers.len() / self.groups, numbers, Vec::new());
        for _ in 1..self.groups {
            let (one, others) = rest.split_at(of_group);
            groups.push(one);
            rest = others;
        }
        groups.push(rest);
        groups
    }
}
