//! Ranks trade tokens for heads: each attends with some of the heads to all tokens of those that trade (Ulysses, arXiv:2309.14509).
//!
//! Those are all ranks, and attention is that of one device; or they are neighbours, and a ring between such groups attends to the tokens of all.

use oxtile_kernels::fill::{FillRows, FillRowsArgs};
use oxtile_tile::launch::{DeviceView, DeviceViewMut};

use super::carrier::{Carrier, Given, Reach, Taken};
use super::config::{ContextParallelConfig, Schedule, refuse};
use super::core::{Core, check_captures};
use super::element::{ContextElement, Sum};
use super::forward::{check_max_logit, check_sink};
use super::head_group::{Group, groups_of};
use super::lane::{Lane, Order as TokenOrder, Trade};
use super::memory::{Place, Scratch, copy, note};
use super::plan::Direction;
use crate::attention::{
    Attention, AttentionBackward, AttentionConfig, BackwardInputs, GradientTarget, Gradients, Inputs, Order, Outputs, Sequences, Sink,
    Target,
};
use crate::runtime::runtime::lock;
use crate::runtime::{Bound, Buffer, Error, Loaded, Result, Stream};
use crate::tensor::{Heads, Strided};
use crate::thd::{Packed, Reorder, Share};
use std::iter;
use std::sync::{Arc, Mutex};

/// Attention by traded heads.
pub(super) struct AllToAll<'t, T: ContextElement> {
    trade: Trade,
    carrier: Carrier<'t>,
    /// The user's, with the rows of this rank.
    given: AttentionConfig,
    inner: Inner<'t, T>,
    /// Adds gradients of keys that ranks share.
    sum: Sum<T, T>,
    /// Heads that are traded one group after the other: while some are attended to, the next are on their way.
    groups: Vec<Group<T>>,
    /// Carries heads.
    comm: Stream,
    /// Numbers of this rank's heads, and of all.
    max_logit: OfAll,
    grad_sink: OfAll,
    /// Packed sequences, of queries and of keys: their ends, and where their tokens lie.
    sequences: Option<[(Scratch<u32>, TokenOrder); 2]>,
    /// What fills the log-sum-exp of rows in no sequence, and with what.
    fill: Loaded<FillRows>,
    nothing: Scratch<f32>,
    turn: Mutex<()>,
}

/// A number for each of this rank's heads, and for all heads.
struct OfAll {
    own: Scratch<f32>,
    all: Place<f32>,
}

/// What attends to the traded heads.
#[expect(clippy::large_enum_variant, reason = "one for each operation")]
pub(super) enum Inner<'t, T: ContextElement> {
    Alone(Attention<T>, AttentionBackward<T>),
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
        let count = if inner.is_some() || ranks == 1 { 1 } else { groups_of(&all, size_of::<T>() as u64) };
        // Ranks of which each has the only key head of its queries.
        let sharing = (ranks / whole.key_heads).max(1);
        let traded = AttentionConfig { heads: all.heads / count, key_heads: all.key_heads / count, ..all };
        let inner = match inner {
            Some(core) => Inner::Ring(core),
            None => {
                // Where all query heads of a key head are here, their gradients are added as on one device.
                let as_whole = if sharing == 1 { &whole } else { &traded };
                let backward = AttentionBackward::new_as(&runtime, traded, Order::Deterministic, as_whole)?.sharing(&Arc::default());
                Inner::Alone(Attention::new(&runtime, traded)?, backward)
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
        let group = |number| Group::new(stream, (trade, arena), &all, [number, count], sharing);
        let groups = (0..count).map(group).collect::<Result<Vec<_>>>()?;
        // What a rank keeps of one tensor of a group, at most.
        let kept = groups.first().map(Group::kept).unwrap_or_default();
        let around =
            (groups.len() > 1 && config.goes_around(stream, Schedule::AllToAll, share.world, size_of::<T>() as u64)).then_some(kept);
        Ok(Self {
            carrier: reach.carrier(stream, groups.len(), around)?,
            groups,
            sum: T::load_rounded_sum(&runtime)?,
            comm: stream.device().urgent_stream()?,
            max_logit: both("largest scores")?,
            grad_sink: both("gradients of sinks")?,
            sequences: if config.is_packed() { Some([sequences()?, sequences()?]) } else { None },
            fill: runtime.load()?,
            nothing: Scratch::of(Buffer::from_slice(stream, &[f32::NEG_INFINITY])?),
            turn: Mutex::default(),
            trade,
            given,
            inner,
        })
    }

    /// The streams that carry heads.
    pub fn streams(&self) -> impl Iterator<Item = &Stream> {
        iter::once(&self.comm).chain(self.carrier.stream())
    }

    /// Whose attention it is, once heads are traded.
    pub fn inner(&self) -> &Inner<'t, T> {
        &self.inner
    }

    /// The kernels of a pass, and its launches.
    pub fn kernels(&self, direction: Direction) -> (Vec<&'static str>, u32) {
        match (&self.inner, direction) {
            (Inner::Ring(core), _) => core.kernels(direction),
            (Inner::Alone(attention, _), Direction::Forward) => (attention.choice().kernel.into_iter().collect(), self.groups.len() as u32),
            (Inner::Alone(_, attention), Direction::Backward) => {
                (attention.choice().kernel.into_iter().collect(), self.groups.len() as u32)
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
        let _turn = lock(&self.turn);
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
        let _turn = lock(&self.turn);
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
        let first = u64::from(self.trade.share.rank.index()) * self.given.heads / u64::from(self.trade.share.world.get()) + first;
        sink.map(|sink| sink.slice(first, first + count))
    }

    fn check(&self, sink: Option<DeviceView<'_, f32>>, log_sum_exp: u64) -> Result<()> {
        check_sink(&self.given, sink)?;
        Error::check_length("ContextParallel, log_sum_exp", self.trade.batches * self.given.heads * self.given.queries, log_sum_exp)
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
                Inner::Alone(attention, _) => attention.bind(stream, self.inputs(group, sink)?, outputs),
                Inner::Ring(core) => core.bind_forward(stream, self.inputs(group, sink)?, outputs),
            }
        };
        let mut attention = self.groups.iter().map(bind).collect::<Result<Vec<_>>>()?;
        Ok(Bound::new(move |stream| {
            let _turn = lock(&self.turn);
            self.begin(stream)?;
            let give = |at: usize| self.give(at, self.groups[at].forward().as_slice(), &tensors, None);
            let attend = |at: usize| {
                self.clear(stream, [&self.groups[at].out])?;
                self.clear_numbers(stream, &self.groups[at])?;
                attention[at].run(stream)
            };
            let take = |at: usize| {
                let (comm, group, order) = (&self.comm, &self.groups[at], self.order_of(0));
                let taken = Taken { lanes: vec![(&group.out, order)], numbers: Some((&group.log_sum_exp, order)) };
                self.carrier.take(comm, self.trade, at, &taken)?;
                let within = self.carrier.within(comm, at);
                group.out.unpack(within, layout, out.reborrow())?;
                group.log_sum_exp.unpack_numbers(within, log_sum_exp.reborrow())
            };
            self.in_turn(stream, give, attend, take)?;
            if let Some(max_logit) = &mut max_logit {
                self.of_all_heads(&self.max_logit, Some(max_logit.reborrow()))?;
            }
            self.end(stream)
        }))
    }

    /// Gives the heads of each group, attends, and takes the results: the heads of the next group travel before the results of this one.
    fn in_turn(
        &self,
        stream: &Stream,
        give: impl Fn(usize) -> Result<()>,
        mut attend: impl FnMut(usize) -> Result<()>,
        mut take: impl FnMut(usize) -> Result<()>,
    ) -> Result<()> {
        let count = self.groups.len();
        if count > 0 {
            give(0)?;
            note(stream, &self.groups[0].accesses())?;
        }
        for at in 0..count {
            let next = self.groups.get(at + 1);
            next.map_or(Ok(()), |_| give(at + 1))?;
            attend(at)?;
            // Before the results are on their way, for which the next group does not wait.
            next.map_or(Ok(()), |next| note(stream, &next.accesses()))?;
            take(at)?;
        }
        Ok(())
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
        self.carrier.give(&self.comm, self.trade, at, &Given { tensors, numbers })
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
        self.carrier.gather_numbers(&self.comm, self.trade, self.groups.len(), own, all)?;
        target.map_or(Ok(()), |target| copy(&self.comm, all.view(), target))
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
        if let Some(grad_sink) = &grad_sink {
            Error::check_length("ContextParallel, gradients of sink", self.given.heads, grad_sink.len())?;
        }
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
                Inner::Alone(_, attention) => attention.bind(stream, inputs, gradients),
                Inner::Ring(core) => core.bind_backward(stream, inputs, gradients),
            }
        };
        let mut attention = self.groups.iter().map(bind).collect::<Result<Vec<_>>>()?;
        Ok(Bound::new(move |stream| {
            let _turn = lock(&self.turn);
            self.begin(stream)?;
            let give = |at: usize| {
                let group = &self.groups[at];
                self.give(at, group.backward().as_slice(), &tensors, Some((&group.log_sum_exp, log_sum_exp)))
            };
            let attend = |at: usize| {
                self.clear(stream, &self.groups[at].grads)?;
                attention[at].run(stream)
            };
            let take = |at: usize| {
                let (comm, grads) = (&self.comm, &self.groups[at].grads);
                let lanes = grads.iter().zip([0, 1, 1]).map(|(lane, side)| (lane, self.order_of(side))).collect();
                self.carrier.take(comm, self.trade, at, &Taken { lanes, numbers: None })?;
                for (lane, (layout, target)) in grads.iter().zip(&mut targets) {
                    lane.sum(comm, &self.sum)?;
                    lane.unpack(self.carrier.within(comm, at), *layout, target.reborrow())?;
                }
                Ok(())
            };
            self.in_turn(stream, give, attend, take)?;
            if has_sink {
                self.of_all_heads(&self.grad_sink, grad_sink.as_mut().map(DeviceViewMut::reborrow))?;
            }
            self.end(stream)
        }))
    }

    /// Begins a pass: what carries heads comes after the caller's work so far, also on memory whose uses the runtime does not know. What the pass writes on the caller's
    /// stream it has then used last there, so that it waits for no heads that are on their way.
    fn begin(&self, stream: &Stream) -> Result<()> {
        self.streams().try_for_each(|comm| check_captures(stream, comm))?;
        let lanes: Vec<_> = self.groups.iter().flat_map(Group::accesses).collect();
        note(stream, &lanes)?;
        let begun = stream.mark()?;
        if let Some(within) = self.carrier.stream() {
            within.wait(&begun)?;
            // The results of the pass before are unpacked there: others may put some again after what this rank gives now.
            self.comm.wait(&within.mark()?)?;
        }
        self.comm.wait(&begun)
    }

    /// Ends a pass: the caller's work comes after all of it.
    fn end(&self, stream: &Stream) -> Result<()> {
        self.streams().try_for_each(|comm| stream.wait(&comm.mark()?))
    }
}
