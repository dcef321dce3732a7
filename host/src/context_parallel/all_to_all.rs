//! Ranks trade tokens for heads: each attends with some of the heads to all tokens of those that trade (Ulysses, arXiv:2309.14509).
//!
//! Those are all ranks, and attention is that of one device; or they are neighbours, and a ring between such groups attends to the tokens of all.

use oxtile_kernels::fill::{FillRows, FillRowsArgs};
use oxtile_tile::launch::{DeviceView, DeviceViewMut};

use super::alone::Alone;
use super::backward::check_grad_sink;
use super::carrier::{Given, Reach, Taken};
use super::config::{ContextParallelConfig, Schedule, refuse};
use super::core::Core;
use super::element::{ContextElement, Sum};
use super::forward::{check_max_logit, check_sink};
use super::head_group::{Group, groups_of, in_rows};
use super::lane::{Lane, Order as TokenOrder, Trade};
use super::memory::{Place, Scratch, copy};
use super::plan::Direction;
use super::trading::Trading;
use crate::attention::{AttentionConfig, BackwardInputs, GradientTarget, Gradients, Inputs, Outputs, Sequences, Sink, Target};
use crate::runtime::{Bound, Buffer, Error, Loaded, Result, Stream};
use crate::tensor::{Heads, Strided};
use crate::thd::{Packed, Reorder, Share};
use std::sync::Arc;

/// Attention by traded heads.
pub(super) struct AllToAll<'t, T: ContextElement> {
    trading: Trading<'t>,
    /// The user's, with the rows of this rank.
    given: AttentionConfig,
    inner: Inner<'t, T>,
    /// Adds gradients of keys that ranks share.
    sum: Sum<T, T>,
    /// Heads that are traded one group after the other: while some are attended to, the next are on their way.
    groups: Vec<Group<T>>,
    /// Numbers of this rank's heads, and of all.
    max_logit: OfAll,
    grad_sink: OfAll,
    /// Packed sequences, of queries and of keys: their ends, and where their tokens lie.
    sequences: Option<[(Scratch<u32>, TokenOrder); 2]>,
    /// What fills the log-sum-exp of rows in no sequence, and with what.
    fill: Loaded<FillRows>,
    nothing: Scratch<f32>,
}

/// A number for each of this rank's heads, and for all heads.
struct OfAll {
    own: Scratch<f32>,
    all: Place<f32>,
}

/// What attends to the traded heads.
#[expect(clippy::large_enum_variant, reason = "one for each operation")]
pub(super) enum Inner<'t, T: ContextElement> {
    Alone(Vec<Alone<T>>),
    Ring(Core<'t, T>),
}

impl<'t, T: ContextElement> AllToAll<'t, T> {
    /// The attention of each rank, once heads are traded among `share.world` ranks: of the whole sequence with fewer heads.
    pub fn traded(config: &ContextParallelConfig, share: Share) -> Result<ContextParallelConfig> {
        let (ranks, AttentionConfig { heads, key_heads, .. }) = (u64::from(share.world.get()), config.attention);
        if key_heads < ranks && ranks.is_multiple_of(key_heads) && heads.is_multiple_of(ranks) {
            let attention = AttentionConfig { heads: heads / ranks, key_heads: 1, ..config.attention };
            return Ok(ContextParallelConfig { attention, ..*config });
        }
        for (name, count) in [("heads", heads), ("key_heads", key_heads)] {
            if !count.is_multiple_of(ranks) {
                return refuse(format!(
                    "attention.{name} is {count}, and {} trade heads: take a multiple of {ranks}, or the schedule ring or gather",
                    share.world
                ));
            }
        }
        let attention = AttentionConfig { heads: heads / ranks, key_heads: key_heads / ranks, ..config.attention };
        Ok(ContextParallelConfig { attention, ..*config })
    }

    /// Takes memory. `share` is the rank among those that trade, `others` how many such teams there are; `inner` attends to the tokens of all of them.
    pub fn new(
        stream: &Stream,
        config: &ContextParallelConfig,
        share: Share,
        teams: u64,
        reach: Reach<'t>,
        inner: Option<Core<'t, T>>,
    ) -> Result<Self> {
        let all = Self::traded(config, share)?.attention;
        let all = AttentionConfig { queries: all.queries / teams, keys: all.keys / teams, ..all };
        let (ranks, whole) = (u64::from(share.world.get()), config.attention);
        let given = AttentionConfig { queries: all.queries / ranks, keys: all.keys / ranks, ..whole };
        let (trade, runtime) = (Trade::new(share, &whole), stream.device().runtime());
        let sizes = if inner.is_some() || ranks == 1 { vec![all.key_heads] } else { groups_of(&all, size_of::<T>() as u64) };
        // Ranks of which each has the only key head of its queries.
        let sharing = (ranks / whole.key_heads).max(1);
        let inner = match inner {
            Some(core) => Inner::Ring(core),
            None => {
                // Where all query heads of a key head are here, their gradients are added as on one device.
                let as_whole = (sharing == 1).then_some(&whole);
                // Groups are attended to one after another.
                let workspace = Arc::default();
                let with = |made, size: &u64| Alone::with(made, &runtime, &all, *size, as_whole, |backward| backward.sharing(&workspace));
                Inner::Alone(sizes.iter().try_fold(Vec::new(), with)?)
            }
        };
        let arena = reach.arena();
        let both = |name| -> Result<OfAll> {
            Ok(OfAll { own: Scratch::new(stream, name, all.heads)?, all: Place::new(stream, arena, name, whole.heads)? })
        };
        let array = |name| Scratch::<u32>::new(stream, name, whole.batches + 1);
        let sequences = || -> Result<(Scratch<u32>, TokenOrder)> {
            let reorder = Reorder::new(&runtime, share.world, share.partition)?.of_teams(teams as u32);
            Ok((array("ends of sequences")?, TokenOrder { reorder, offsets: array("offsets of sequences")? }))
        };
        let group = |(first, count)| Group::new(stream, (trade, arena), &all, [first, count], sharing);
        let groups = in_rows(&sizes).map(group).collect::<Result<Vec<_>>>()?;
        // What a rank keeps of one tensor of a group, at most.
        let kept = groups.iter().map(Group::kept).max().unwrap_or_default();
        let around =
            (groups.len() > 1 && config.goes_around(stream, Schedule::AllToAll, share.world, size_of::<T>() as u64)).then_some(kept);
        Ok(Self {
            trading: Trading::new(stream, trade, reach.carrier(stream, groups.len(), around)?)?,
            groups,
            sum: T::load_rounded_sum(&runtime)?,
            max_logit: both("largest scores")?,
            grad_sink: both("gradients of sinks")?,
            sequences: if config.is_packed() { Some([sequences()?, sequences()?]) } else { None },
            fill: runtime.load()?,
            nothing: Scratch::of(Buffer::from_slice(stream, &[f32::NEG_INFINITY])?),
            given,
            inner,
        })
    }

    /// The streams that carry heads.
    pub fn streams(&self) -> impl Iterator<Item = &Stream> {
        self.trading.streams()
    }

    /// Whose attention it is, once heads are traded.
    pub fn inner(&self) -> &Inner<'t, T> {
        &self.inner
    }

    /// The kernels of a pass, and its launches.
    pub fn kernels(&self, direction: Direction) -> (Vec<&'static str>, u32) {
        match (&self.inner, direction) {
            (Inner::Ring(core), _) => core.kernels(direction),
            (Inner::Alone(alone), _) => {
                let kernel = |alone: &Alone<T>| match direction {
                    Direction::Forward => alone.forward.choice().kernel,
                    Direction::Backward => alone.backward.choice().kernel,
                };
                (alone.iter().filter_map(kernel).collect(), self.groups.len() as u32)
            }
        }
    }

    /// As [`Core::memory`].
    pub fn memory(&self, passes: &[Direction]) -> u64 {
        let Self { max_logit, grad_sink, sequences, .. } = self;
        let lanes = self.groups.iter().map(|group| group.memory(passes)).sum::<u64>();
        let numbers = passes.iter().map(|pass| {
            let OfAll { own, all } = if *pass == Direction::Forward { max_logit } else { grad_sink };
            own.bytes() + all.bytes()
        });
        let arrays = sequences.iter().flatten().map(|(ends, order)| ends.bytes() + order.offsets.bytes()).sum::<u64>();
        let inner = match &self.inner {
            Inner::Ring(core) => core.memory(passes),
            Inner::Alone(..) => 0,
        };
        lanes + numbers.sum::<u64>() + arrays + inner
    }

    /// As [`Core::spoil`].
    pub fn spoil(&self, stream: &Stream) -> Result<()> {
        let _turn = self.trading.lock();
        self.groups.iter().try_for_each(|group| group.spoil(stream))?;
        for OfAll { own, all } in [&self.max_logit, &self.grad_sink] {
            own.spoil(stream)?;
            all.spoil(stream)?;
        }
        match &self.inner {
            Inner::Ring(core) => core.spoil(stream),
            Inner::Alone(..) => Ok(()),
        }
    }

    /// Where the sequences of a batch lie, in stream order.
    pub fn set_sequences(&self, stream: &Stream, queries: Packed<DeviceView<'_, u32>>, keys: Packed<DeviceView<'_, u32>>) -> Result<()> {
        let _turn = self.trading.lock();
        for ((ends, order), given) in self.sequences.iter().flatten().zip([queries, keys]) {
            copy(stream, given.cu_seqlens, ends.lend())?;
            copy(stream, given.cu_seqlens_padded, order.offsets.lend())?;
        }
        match &self.inner {
            Inner::Ring(core) => core.set_sequences(stream, queries, keys),
            Inner::Alone(..) => Ok(()),
        }
    }

    fn sequences(&self) -> Option<Sequences<'_>> {
        let [queries, keys] = self.sequences.as_ref().filter(|_| matches!(self.inner, Inner::Alone(..)))?;
        Some(Sequences {
            cu_seqlens_q_padded: Some(queries.1.offsets.view()),
            cu_seqlens_kv_padded: Some(keys.1.offsets.view()),
            ..Sequences::new(queries.0.view(), keys.0.view())
        })
    }

    /// The scores of a group's sinks.
    fn sink_of<'a>(&self, group: &Group<T>, sink: Option<DeviceView<'a, f32>>) -> Option<DeviceView<'a, f32>> {
        let [first, count] = group.heads;
        let first =
            u64::from(self.trading.trade.share.rank.index()) * self.given.heads / u64::from(self.trading.trade.share.world.get()) + first;
        sink.map(|sink| sink.slice(first, first + count))
    }

    fn check(&self, sink: Option<DeviceView<'_, f32>>, log_sum_exp: u64) -> Result<()> {
        check_sink(&self.given, sink)?;
        Error::check_length("ContextParallel, log_sum_exp", self.trading.trade.batches * self.given.heads * self.given.queries, log_sum_exp)
    }

    /// The inputs of a group's attention.
    fn inputs<'a>(&'a self, group: &'a Group<T>, sink: Option<DeviceView<'a, f32>>) -> Result<Inputs<'a, T>> {
        let inputs = Inputs::new(group.q.heads()?, group.k.heads()?, group.v.heads()?);
        Ok(Inputs { sequences: self.sequences(), sink: self.sink_of(group, sink), ..inputs })
    }

    /// As [`Core::bind_forward`].
    pub fn bind_forward<'a>(&'a self, stream: &Stream, inputs: Inputs<'a, T>, outputs: Outputs<'a, T>) -> Result<Bound<'a>> {
        let Inputs { q, k, v, sink, .. } = inputs;
        let [of_q, of_k, of_v] = self.given.whole_inputs();
        let tensors = [q.shaped("ContextParallel, q", of_q)?, k.shaped("ContextParallel, k", of_k)?, v.shaped("ContextParallel, v", of_v)?];
        let Outputs { out, mut log_sum_exp, mut max_logit } = outputs;
        let Target::Rounded(out) = out else {
            return Err(Error::Invalid { what: "ContextParallel, out", why: "ranks trade their results: give Outputs::new".to_owned() });
        };
        let out = out.shaped("ContextParallel, out", self.given.whole_result())?;
        let (layout, mut out) = (out.layout(), out.into_view());
        self.check(sink, log_sum_exp.len())?;
        check_max_logit(&self.given, max_logit.as_ref())?;
        let bind = |group: &'a Group<T>| {
            let max_logit = self.given.max_logit.then(|| self.max_logit.own.lend_part(group.range()));
            let outputs = Outputs { max_logit, ..Outputs::new(group.out.heads_mut()?, group.log_sum_exp.natural.lend()) };
            match &self.inner {
                Inner::Alone(alone) => Alone::of(alone, group).forward.bind(stream, self.inputs(group, sink)?, outputs),
                Inner::Ring(core) => core.bind_forward(stream, self.inputs(group, sink)?, outputs),
            }
        };
        let mut attention = self.groups.iter().map(bind).collect::<Result<Vec<_>>>()?;
        Ok(Bound::new(move |stream| {
            let _turn = self.trading.begin(stream, &self.groups)?;
            let give = |at: usize| self.give(at, self.groups[at].forward().as_slice(), &tensors, None);
            // While the first heads are on their way.
            self.clear(stream, self.groups.iter().map(|group| &group.out))?;
            self.groups.iter().try_for_each(|group| self.clear_numbers(stream, group))?;
            let take = |at: usize| {
                let (Trading { trade, carrier, comm, .. }, group, order) = (&self.trading, &self.groups[at], self.order_of(0));
                let taken = Taken { lanes: vec![(&group.out, order)], numbers: Some((&group.log_sum_exp, order)) };
                carrier.cut(comm, &taken)?;
                let within = carrier.within(comm, at);
                group.out.keep(within, layout, out.reborrow())?;
                group.log_sum_exp.keep_numbers(within, log_sum_exp.reborrow())?;
                carrier.take(comm, *trade, at, &taken)?;
                group.out.unpack(within, layout, out.reborrow())?;
                group.log_sum_exp.unpack_numbers(within, log_sum_exp.reborrow())
            };
            self.trading.in_turn(stream, &self.groups, give, |at| attention[at].run(stream), take)?;
            if let Some(max_logit) = &mut max_logit {
                self.of_all_heads(&self.max_logit, Some(max_logit.reborrow()))?;
            }
            self.trading.end(stream)
        }))
    }

    /// Gives heads of some tensors: of queries, keys, values, and what lies as queries.
    fn give(
        &self,
        at: usize,
        lanes: &[&Lane<T>],
        tensors: &[Heads<'_, T>],
        numbers: Option<(&Lane<f32>, DeviceView<'_, f32>)>,
    ) -> Result<()> {
        let sides = [0, 1, 1, 0, 0];
        let tensors = lanes.iter().zip(tensors).zip(sides).map(|((lane, tensor), side)| (*lane, tensor, self.order_of(side))).collect();
        let numbers = numbers.map(|(lane, numbers)| (lane, numbers, self.order_of(0)));
        self.trading.carrier.give(&self.trading.comm, self.trading.trade, at, &Given { tensors, numbers })
    }

    /// Clears what attention on one device writes of packed tensors: rows in no sequence are zeros. A ring clears what it writes.
    fn clear<'g>(&self, stream: &Stream, lanes: impl IntoIterator<Item = &'g Lane<T>>) -> Result<()>
    where
        T: 'g,
    {
        if self.sequences().is_none() { Ok(()) } else { lanes.into_iter().try_for_each(|lane| lane.natural.zero(stream)) }
    }

    /// The same of the log-sum-exp, which is -inf there.
    fn clear_numbers(&self, stream: &Stream, group: &Group<T>) -> Result<()> {
        if self.sequences().is_none() || group.log_sum_exp.natural.len() == 0 {
            return Ok(());
        }
        let args = FillRowsArgs { values: self.nothing.view(), target: group.log_sum_exp.natural.lend(), rows: 1 };
        self.fill.launch(stream, args)
    }

    /// Where the tokens of queries, or of keys, of packed sequences lie.
    fn order_of(&self, side: usize) -> Option<&TokenOrder> {
        self.sequences.as_ref().map(|sequences| &sequences[side].1)
    }

    /// Gives numbers of each rank's heads to all.
    fn of_all_heads(&self, OfAll { own, all }: &OfAll, target: Option<DeviceViewMut<'_, f32>>) -> Result<()> {
        self.trading.carrier.gather_numbers(&self.trading.comm, self.trading.trade, self.groups.len(), own, all)?;
        target.map_or(Ok(()), |target| copy(&self.trading.comm, all.view(), target))
    }

    /// As [`Core::bind_backward`].
    pub fn bind_backward<'a>(&'a self, stream: &Stream, inputs: BackwardInputs<'a, T>, gradients: Gradients<'a, T>) -> Result<Bound<'a>> {
        let BackwardInputs { forward: Inputs { q, k, v, sink, .. }, out, log_sum_exp, grad_out } = inputs;
        let ([of_q, of_k, of_v], of_out) = (self.given.whole_inputs(), self.given.whole_result());
        let tensors = [
            q.shaped("ContextParallel, q", of_q)?,
            k.shaped("ContextParallel, k", of_k)?,
            v.shaped("ContextParallel, v", of_v)?,
            out.shaped("ContextParallel, out", of_out)?,
            grad_out.shaped("ContextParallel, grad_out", of_out)?,
        ];
        self.check(sink, log_sum_exp.len())?;
        let Gradients { q, k, v, sink: mut grad_sink } = gradients;
        let names = ["ContextParallel, gradients of q", "ContextParallel, gradients of k", "ContextParallel, gradients of v"];
        let targets = [q, k, v].into_iter().zip(names).zip([of_q, of_k, of_v]).map(|((target, what), whole)| match target {
            GradientTarget::Rounded(tensor) => tensor.shaped(what, whole).map(|tensor| (tensor.layout(), tensor.into_view())),
            GradientTarget::Added(_) => Err(Error::Invalid { what, why: "ranks trade rounded gradients: give Gradients::new".to_owned() }),
        });
        let mut targets = targets.collect::<Result<Vec<(Strided<4>, DeviceViewMut<'a, T>)>>>()?;
        check_grad_sink(&self.given, grad_sink.as_ref())?;
        // All ranks send theirs, also where this one's caller does not ask for them.
        let has_sink = self.given.sink == Sink::Learnable;
        let bind = |group: &'a Group<T>| {
            let forward = self.inputs(group, sink)?;
            let (out, grad_out) = (group.out.heads()?, group.grad_out.heads()?);
            let inputs = BackwardInputs { forward, out, log_sum_exp: group.log_sum_exp.natural.view(), grad_out };
            let [grad_q, grad_k, grad_v] = &group.grads;
            let gradients = Gradients::new(grad_q.heads_mut()?, grad_k.heads_mut()?, grad_v.heads_mut()?);
            let gradients = Gradients { sink: has_sink.then(|| self.grad_sink.own.lend_part(group.range())), ..gradients };
            match &self.inner {
                Inner::Alone(alone) => Alone::of(alone, group).backward.bind(stream, inputs, gradients),
                Inner::Ring(core) => core.bind_backward(stream, inputs, gradients),
            }
        };
        let mut attention = self.groups.iter().map(bind).collect::<Result<Vec<_>>>()?;
        Ok(Bound::new(move |stream| {
            let _turn = self.trading.begin(stream, &self.groups)?;
            let give = |at: usize| {
                let group = &self.groups[at];
                self.give(at, group.backward().as_slice(), &tensors, Some((&group.log_sum_exp, log_sum_exp)))
            };
            // While the first heads are on their way.
            self.clear(stream, self.groups.iter().flat_map(|group| &group.grads))?;
            let take = |at: usize| {
                let (Trading { trade, carrier, comm, .. }, grads) = (&self.trading, &self.groups[at].grads);
                let lanes = grads.iter().zip([0, 1, 1]).map(|(lane, side)| (lane, self.order_of(side))).collect();
                let (taken, within) = (Taken { lanes, numbers: None }, carrier.within(comm, at));
                carrier.cut(comm, &taken)?;
                for (lane, (layout, target)) in grads.iter().zip(&mut targets) {
                    lane.keep(within, *layout, target.reborrow())?;
                }
                carrier.take(comm, *trade, at, &taken)?;
                for (lane, (layout, target)) in grads.iter().zip(&mut targets) {
                    lane.sum(comm, &self.sum)?;
                    lane.unpack(within, *layout, target.reborrow())?;
                }
                Ok(())
            };
            self.trading.in_turn(stream, &self.groups, give, |at| attention[at].run(stream), take)?;
            if has_sink {
                self.of_all_heads(&self.grad_sink, grad_sink.as_mut().map(DeviceViewMut::reborrow))?;
            }
            self.trading.end(stream)
        }))
    }
}
