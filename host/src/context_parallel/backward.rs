//! The backward pass of a rank. Gradients of keys and values go to their owner in `f32`, which adds those of all ranks in their order.

use oxtile_tile::launch::{DeviceView, DeviceViewMut};

use super::core::{Core, Route};
use super::element::ContextElement;
use super::forward::{Own, check_sink};
use super::launches::{Launch, owner_of};

use super::memory::{Scratch, bytes, bytes_mut, copy, zero};
use super::mover::{Both, BothMut};
use crate::attention::{AttentionConfig, BackwardInputs, BackwardStep, GradientTarget, Gradients, Inputs, Sink};
use crate::comm::Rank;
use crate::runtime::{Bound, Error, Result, Stream};
use crate::symmetric::Rows;
use crate::tensor::{Heads, HeadsMut, Strided};
use oxtile_kernels::attention::{AttentionBackwardSinkArgs, QueryStatisticsArgument};
use oxtile_kernels::fill::FillRowsArgs;

/// Where gradients go.
struct Results<'a, T> {
    layouts: [Strided<4>; 3],
    targets: [DeviceViewMut<'a, T>; 3],
    sink: Option<DeviceViewMut<'a, f32>>,
}

/// What every launch reads beside keys and values.
#[derive(Clone, Copy)]
struct Rowwise<'a, T> {
    q: Heads<'a, T>,
    grad_out: Heads<'a, T>,
    log_sum_exp: DeviceView<'a, f32>,
    sink: Option<DeviceView<'a, f32>>,
}

impl<T: ContextElement> Core<'_, T> {
    /// Binds tensors of this rank, of the layout and the rows that the configuration says.
    pub fn bind_backward<'a>(&'a self, stream: &Stream, inputs: BackwardInputs<'a, T>, gradients: Gradients<'a, T>) -> Result<Bound<'a>> {
        let (local, BackwardInputs { forward: Inputs { q, k, v, sink, .. }, out, log_sum_exp, grad_out }) = (&self.local, inputs);
        let (wholes @ [of_q, of_k, of_v], of_out) = (local.given.whole_inputs(), local.given.whole_result());
        let own = Own::new(self, local.rows("ContextParallel, k", k, of_k)?, local.rows("ContextParallel, v", v, of_v)?)?;
        check_sink(&local.given, sink)?;
        let q = local.rows("ContextParallel, q", q, of_q)?;
        let out = local.rows("ContextParallel, out", out, of_out)?;
        let grad_out = local.rows("ContextParallel, grad_out", grad_out, of_out)?;
        Error::check_length("ContextParallel, log_sum_exp", local.packed.queries * local.packed.heads, log_sum_exp.len())?;
        let results = self.results(gradients, wholes)?;
        let rowwise = Rowwise { q, grad_out, log_sum_exp: self.packed_log(log_sum_exp), sink };
        let mut begin = Vec::new();
        let any = self.backward.kernels().next();
        if let Some(kernel) = any {
            begin.push(kernel.prepare(out, grad_out, self.deltas.lend())?);
        }
        match self.backward.route {
            Route::Steps => self.bind_steps_back(stream, own, rowwise, log_sum_exp, begin, results),
            Route::AtOnce => self.bind_at_once_back(stream, own, rowwise, log_sum_exp, begin, results),
        }
    }

    fn results<'a>(&self, gradients: Gradients<'a, T>, wholes: [Strided<4>; 3]) -> Result<Results<'a, T>> {
        let names = ["ContextParallel, gradients of q", "ContextParallel, gradients of k", "ContextParallel, gradients of v"];
        let Gradients { q, k, v, sink } = gradients;
        let mut tensors = Vec::new();
        for ((target, what), whole) in [q, k, v].into_iter().zip(names).zip(wholes) {
            let GradientTarget::Rounded(tensor) = target else {
                return Err(Error::Invalid { what, why: "ranks add gradients up themselves: give Gradients::new".to_owned() });
            };
            tensors.push(self.local.rows_mut(what, tensor, whole)?);
        }
        check_grad_sink(&self.config.attention, sink.as_ref())?;
        let layouts = [0, 1, 2].map(|i| tensors[i].layout());
        let mut views = tensors.into_iter().map(HeadsMut::into_view);
        let mut next = || views.next().unwrap_or_else(|| unreachable!("three were pushed"));
        Ok(Results { layouts, targets: [next(), next(), next()], sink })
    }

    /// One launch of the gradients of queries, and of keys and values.
    fn bind_launch<'a>(
        &'a self,
        stream: &Stream,
        launch: &Launch,
        Rowwise { q, grad_out, log_sum_exp, .. }: Rowwise<'a, T>,
        [k, v]: [Heads<'a, T>; 2],
        [to_k, to_v]: [DeviceViewMut<'a, f32>; 2],
    ) -> Result<Bound<'a>> {
        let config = self.backward_config(launch);
        let sequences = Some(self.backward.arrays.sequences(launch, &config));
        let forward = Inputs { sequences, ..Inputs::new(q, k, v) };
        let step = BackwardStep { forward, deltas: self.deltas.view(), log_sum_exp, grad_out };
        let gradients = Gradients::added(
            HeadsMut::packed(self.gradient.lend(), [config.queries, config.heads, config.head_size])?,
            HeadsMut::packed(to_k, [config.keys, config.key_heads, config.head_size])?,
            HeadsMut::packed(to_v, [config.keys, config.key_heads, config.value_size()])?,
        );
        self.backward.kernel(config).step(stream, step, gradients)
    }

    /// This rank's place among the gradients that return to an owner.
    pub fn slot(&self, rank: Rank) -> [DeviceViewMut<'_, f32>; 2] {
        let (at, ranks) = (u64::from(rank.index()), u64::from(self.local.share.world.get()));
        self.returned.each_ref().map(|slots| {
            let len = slots.len() / ranks;
            slots.lend_part(at * len..(at + 1) * len)
        })
    }

    fn slot_bytes(&self, rank: Rank) -> BothMut<'_> {
        self.slot(rank).map(bytes_mut)
    }

    fn bind_steps_back<'a>(
        &'a self,
        stream: &Stream,
        own: Own<'a, T>,
        rowwise: Rowwise<'a, T>,
        given_log: DeviceView<'a, f32>,
        mut begin: Vec<Bound<'a>>,
        mut results: Results<'a, T>,
    ) -> Result<Bound<'a>> {
        let (share, pass) = (self.local.share, &self.backward);
        let mut steps: Vec<Vec<Bound<'a>>> = Vec::new();
        for step in 0..share.world.get() {
            let bind = |launch| {
                let to = match step {
                    0 => self.slot(share.rank),
                    _ => self.parts[step as usize % 2].each_ref().map(Scratch::lend),
                };
                self.bind_launch(stream, launch, rowwise, self.keys_of(&own, Some(owner_of(share, step)), step)?, to)
            };
            steps.push(pass.of_step(step).map(bind).collect::<Result<_>>()?);
        }
        // The last launch on the own keys comes last of all: beside it the gradients of the last step travel. The first one hides the keys of the next step.
        let mut held = if steps[0].len() > 1 { steps[0].pop() } else { None };
        Ok(Bound::new(move |stream| {
            let _turn = self.begin(stream, &own)?;
            self.begin_back(stream, given_log, &mut begin)?;
            let work = |step: u32| {
                match step {
                    0 => self.slot(share.rank).into_iter().try_for_each(|slot| zero(stream, slot))?,
                    _ => self.parts[step as usize % 2].iter().try_for_each(|part| part.zero(stream))?,
                }
                steps[step as usize].iter_mut().try_for_each(|launch| launch.run(stream))
            };
            let deliver = |step: u32| {
                if step == 0 {
                    return Ok(());
                }
                let gradients = self.parts[step as usize % 2].each_ref().map(|part| bytes(part.view()));
                self.mover.deliver(&self.comm, share, step, gradients, |reader| self.slot_bytes(reader), &pass.reads)
            };
            self.in_steps(stream, own.bytes(), &pass.reads, work, deliver)?;
            held.iter_mut().try_for_each(|launch| launch.run(stream))?;
            self.end_back(stream, rowwise, &mut results)
        }))
    }

    fn bind_at_once_back<'a>(
        &'a self,
        stream: &Stream,
        own: Own<'a, T>,
        rowwise: Rowwise<'a, T>,
        given_log: DeviceView<'a, f32>,
        mut begin: Vec<Bound<'a>>,
        mut results: Results<'a, T>,
    ) -> Result<Bound<'a>> {
        let (share, pass) = (self.local.share, &self.backward);
        let Some(gathered) = &self.gathered else { unreachable!("a pass at once has memory for all keys") };
        let mut launches = Vec::new();
        for launch in pass.of_step(0) {
            let to = gathered.gradients.each_ref().map(Scratch::lend);
            launches.push(self.bind_launch(stream, launch, rowwise, self.keys_of(&own, None, 0)?, to)?);
        }
        Ok(Bound::new(move |stream| {
            let _turn = self.begin(stream, &own)?;
            self.gather_keys(stream, own.bytes(), &pass.reads, || {
                self.begin_back(stream, given_log, &mut begin)?;
                gathered.gradients.iter().try_for_each(|gradients| gradients.zero(stream))
            })?;
            launches.iter_mut().try_for_each(|launch| launch.run(stream))?;
            gathered.part(stream, &self.local)?;
            let of_rank = |rank: Rank| gathered.of_rank(rank, &self.local);
            for (slot, own) in self.slot(share.rank).into_iter().zip(of_rank(share.rank)) {
                copy(stream, own, slot)?;
            }
            for step in 1..share.world.get() {
                let gradients: Both<'_> = of_rank(owner_of(share, step)).map(bytes);
                self.mover.deliver(&self.comm, share, step, gradients, |reader| self.slot_bytes(reader), &pass.reads)?;
            }
            self.end_back(stream, rowwise, &mut results)
        }))
    }

    /// The log-sum-exp as launches read it: the caller's, or a copy by rows.
    fn packed_log<'a>(&'a self, given: DeviceView<'a, f32>) -> DeviceView<'a, f32> {
        if self.local.log_sum_exp().len() <= 1 { given } else { self.log_sum_exp.view() }
    }

    /// Row sums, and the sums that gradients of queries are added to.
    fn begin_back(&self, stream: &Stream, log_sum_exp: DeviceView<'_, f32>, begin: &mut [Bound<'_>]) -> Result<()> {
        let rows = self.local.log_sum_exp();
        if rows.len() > 1 {
            let rows: Vec<_> = rows.into_iter().map(Rows::turned).collect();
            Rows::copy_all(stream, "ContextParallel, log_sum_exp", log_sum_exp, self.log_sum_exp.lend(), &rows)?;
        }
        if begin.is_empty() {
            // Rows that see nothing have a result of zeros.
            self.deltas.zero(stream)?;
        }
        begin.iter_mut().try_for_each(|part| part.run(stream))?;
        self.gradient.zero(stream)
    }

    /// Rounds the gradient of the queries, while the last gradients of keys and values travel, and adds those of all ranks in their order.
    fn end_back(&self, stream: &Stream, Rowwise { sink, log_sum_exp, .. }: Rowwise<'_, T>, results: &mut Results<'_, T>) -> Result<()> {
        let (share, reads) = (self.local.share, &self.backward.reads);
        let [q, k, v] = &mut results.targets;
        let [of_q, of_k, of_v] = results.layouts;
        self.round(stream, &self.gradient, of_q, q.reborrow())?;
        self.join(stream)?;
        self.mover.collect(stream, share, reads)?;
        let ranks = share.world.get();
        self.sum(stream, self.returned[0].view(), ranks, of_k, k.reborrow())?;
        self.sum(stream, self.returned[1].view(), ranks, of_v, v.reborrow())?;
        // All ranks send theirs, also where this one's caller does not ask for the sum.
        match sink {
            Some(sink) => self.sink_gradient(stream, log_sum_exp, sink, results.sink.as_mut().map(DeviceViewMut::reborrow)),
            None => Ok(()),
        }
    }

    /// The gradient of the sink: by this rank's rows, then the sum over all ranks in their order, and over batches that count as heads.
    fn sink_gradient(
        &self,
        stream: &Stream,
        log_sum_exp: DeviceView<'_, f32>,
        sink: DeviceView<'_, f32>,
        target: Option<DeviceViewMut<'_, f32>>,
    ) -> Result<()> {
        let (Some(own), Some(numbers)) = (&self.sink, &self.numbers) else {
            unreachable!("a learnable sink has memory, and numbers of all ranks")
        };
        let (packed, heads) = (self.local.packed, self.config.attention.heads);
        self.fill.launch(stream, FillRowsArgs { values: sink, target: own.scores.lend(), rows: 1 })?;
        let sequences = own.arrays.argument(packed.queries as u32, self.local.tokens[1] as u32);
        let statistics = QueryStatisticsArgument { log_sum_exp, deltas: self.deltas.view(), rows: 0 };
        let batches = 2 * self.local.sequences() as u32;
        let args = AttentionBackwardSinkArgs { sink: own.scores.view(), grad_sink: numbers.own.lend(), statistics, sequences, batches };
        own.kernel.launch(stream, args)?;
        numbers.together(stream, self.local.share, |all| match target {
            Some(target) => own.sum.run(stream, all, (all.len() / heads.max(1)) as u32, heads, target),
            None => Ok(()),
        })
    }
}

/// Learnable sinks alone have gradients.
pub(super) fn check_grad_sink(config: &AttentionConfig, given: Option<&DeviceViewMut<'_, f32>>) -> Result<()> {
    match given {
        Some(_) if config.sink != Sink::Learnable => {
            let why = format!("the configuration's sink is {:?}, which has none: leave it out", config.sink);
            Err(Error::Invalid { what: "ContextParallel, gradients of sink", why })
        }
        Some(sink) => Error::check_length("ContextParallel, gradients of sink", config.heads, sink.len()),
        None => Ok(()),
    }
}
