//! The forward pass of a rank: attention to the keys of each rank in turn, or to all at once.

use std::sync::MutexGuard;

use oxtile_tile::launch::{DeviceView, DeviceViewMut};

use super::core::{Core, Route, check_captures, elements};
use super::element::ContextElement;
use super::local::Local;
use super::memory::{Scratch, again, bytes, bytes_mut, note, zero};
use super::mover::{Both, Reads};
use crate::attention::{AttentionConfig, Inputs, Output, Outputs, Sink, Target};
use crate::comm::Rank;
use crate::runtime::runtime::lock;
use crate::runtime::{Bound, Error, Result, Stream};
use crate::symmetric::Rows;
use crate::tensor::{Heads, HeadsMut, Strided};
use oxtile_kernels::fill::FillRowsArgs;

/// Keys and values as their owner sends them: without gaps.
pub(super) struct Own<'a, T> {
    pub heads: [Heads<'a, T>; 2],
    /// Where they are copied from first, if they have gaps.
    from: [Option<Heads<'a, T>>; 2],
}

impl<'a, T: ContextElement> Own<'a, T> {
    pub fn new(core: &'a Core<'_, T>, k: Heads<'a, T>, v: Heads<'a, T>) -> Result<Self> {
        let of = |tensor: Heads<'a, T>, own: &'a Scratch<T>| match Local::is_gapless(tensor.layout()) {
            true => Ok((tensor, None)),
            false => {
                let [_, rows, heads, size] = tensor.shape();
                Ok::<_, Error>((Heads::packed(own.view(), [rows, heads, size])?, Some(tensor)))
            }
        };
        let ((k, from_k), (v, from_v)) = (of(k, &core.own[0])?, of(v, &core.own[1])?);
        Ok(Self { heads: [k, v], from: [from_k, from_v] })
    }

    /// Their bytes.
    pub fn bytes(&self) -> Both<'a> {
        self.heads.map(|heads| bytes(heads.view()))
    }

    /// Copies those that have gaps.
    fn prepare(&self, stream: &Stream, own: &[Scratch<T>; 2]) -> Result<()> {
        for (from, own) in self.from.iter().zip(own) {
            if let Some(tensor) = from {
                let rows: Vec<_> = Local::gapless(tensor.layout()).into_iter().map(Rows::turned).collect();
                Rows::copy_all(stream, "ContextParallel, keys", tensor.view(), own.lend(), &rows)?;
            }
        }
        Ok(())
    }
}

/// Where the result of a pass goes.
struct Results<'a, T> {
    layout: Strided<4>,
    target: DeviceViewMut<'a, T>,
    log_sum_exp: DeviceViewMut<'a, f32>,
    max_logit: Option<DeviceViewMut<'a, f32>>,
}

impl<T: ContextElement> Core<'_, T> {
    /// Keys and values of an owner as a launch reads them.
    pub fn keys_of<'a>(&'a self, own: &Own<'a, T>, owner: Option<Rank>, step: u32) -> Result<[Heads<'a, T>; 2]> {
        match owner {
            Some(owner) if owner == self.local.share.rank => Ok(own.heads),
            Some(_) => self.heads_of(&self.slots[step as usize % 2], self.local.packed.keys),
            None => match &self.gathered {
                Some(gathered) => self.heads_of(&gathered.natural, self.local.tokens[1]),
                None => unreachable!("a pass at once has memory for all keys"),
            },
        }
    }

    fn heads_of<'a>(&self, [k, v]: &'a [Scratch<T>; 2], rows: u64) -> Result<[Heads<'a, T>; 2]> {
        let packed = self.local.packed;
        Ok([
            Heads::packed(k.view(), [rows, packed.key_heads, packed.head_size])?,
            Heads::packed(v.view(), [rows, packed.key_heads, packed.value_size()])?,
        ])
    }

    /// Binds tensors of this rank, of the layout and the rows that the configuration says.
    pub fn bind_forward<'a>(&'a self, stream: &Stream, inputs: Inputs<'a, T>, outputs: Outputs<'a, T>) -> Result<Bound<'a>> {
        let (local, Inputs { q, k, v, sink, .. }) = (&self.local, inputs);
        let [of_q, of_k, of_v] = local.given.whole_inputs();
        let q = local.rows("ContextParallel, q", q, of_q)?;
        let own = Own::new(self, local.rows("ContextParallel, k", k, of_k)?, local.rows("ContextParallel, v", v, of_v)?)?;
        check_sink(&local.given, sink)?;
        let Outputs { out, log_sum_exp, max_logit } = outputs;
        let Target::Rounded(out) = out else {
            return Err(Error::Invalid {
                what: "ContextParallel, out",
                why: "ranks merge their results themselves: give Outputs::new".to_owned(),
            });
        };
        let out = local.rows_mut("ContextParallel, out", out, local.given.whole_result())?;
        Error::check_length("ContextParallel, log_sum_exp", local.packed.queries * local.packed.heads, log_sum_exp.len())?;
        check_max_logit(&local.given, max_logit.as_ref())?;
        let results = Results { layout: out.layout(), target: out.into_view(), log_sum_exp, max_logit };
        match self.forward.route {
            Route::Steps => self.bind_steps(stream, q, own, sink, results),
            Route::AtOnce => self.bind_at_once(stream, q, own, sink, results),
        }
    }

    fn bind_steps<'a>(
        &'a self,
        stream: &Stream,
        q: Heads<'a, T>,
        own: Own<'a, T>,
        sink: Option<DeviceView<'a, f32>>,
        mut results: Results<'a, T>,
    ) -> Result<Bound<'a>> {
        let (pass, len, is_gapless) = (&self.forward, elements(results.layout), Local::is_gapless(results.layout));
        let (mut steps, mut at): (Vec<Vec<Bound<'a>>>, u64) = (Vec::new(), 0);
        for step in 0..self.local.share.world.get() {
            let bind = |launch| {
                let config = self.forward_config(launch);
                let [k, v] = self.keys_of(&own, launch.owner, launch.step)?;
                let sequences = Some(pass.arrays.sequences(launch, &config));
                let inputs = Inputs { sequences, ..Inputs::new(q, k, v) };
                let shape = [config.queries, config.heads, config.value_size()];
                let out = || HeadsMut::packed(if is_gapless { again(&results.target, len) } else { self.staged.lend_part(0..len) }, shape);
                let max_logit = self.max_logit_of(at);
                at += 1;
                let outputs = match launch.output {
                    Output::Rounded => Outputs::new(out()?, self.log_sum_exp.lend()),
                    Output::Merged | Output::First => {
                        Outputs::merged(HeadsMut::packed(self.running.lend(), shape)?, self.log_sum_exp.lend())
                    }
                    Output::Last => Outputs::last(Heads::packed(self.running.view(), shape)?, out()?, self.log_sum_exp.lend()),
                };
                pass.kernel(config).bind(stream, inputs, Outputs { max_logit, ..outputs })
            };
            steps.push(pass.of_step(step).map(bind).collect::<Result<_>>()?);
        }
        let (begins, rounds) = (pass.program.begins(), pass.program.rounds());
        // Halves that see nothing are of no launch, and padding of packed sequences neither.
        let is_whole = !self.config.is_packed() && pass.program.covers(self.config.partition);
        Ok(Bound::new(move |stream| {
            let _turn = self.begin(stream, &own)?;
            // The sink is a score that every row sees, of a value that is zero.
            let begin = match self.config.attention.sink {
                Sink::None => self.nothing.part(0..1),
                Sink::OffByOne => self.nothing.part(1..2),
                Sink::Learnable => sink.unwrap_or_else(|| unreachable!("a learnable sink was checked to be there")),
            };
            if !(begins && is_whole) {
                self.begin_rows(stream, begin, self.log_sum_exp.lend())?;
            }
            self.begin_max_logit(stream)?;
            if !begins {
                self.running.zero(stream)?;
            }
            if rounds && !is_whole {
                zero(stream, if is_gapless { results.target.reborrow() } else { self.staged.lend_part(0..len) })?;
            }
            let launches = |step: u32| steps[step as usize].iter_mut().try_for_each(|launch| launch.run(stream));
            self.in_steps(stream, own.bytes(), &pass.reads, launches, |_| Ok(()))?;
            self.join(stream)?;
            if !rounds {
                self.round(stream, &self.running, results.layout, results.target.reborrow())?;
            } else if !is_gapless {
                self.unstage(stream, results.layout, results.target.reborrow())?;
            }
            self.finish(stream, &mut results)
        }))
    }

    fn bind_at_once<'a>(
        &'a self,
        stream: &Stream,
        q: Heads<'a, T>,
        own: Own<'a, T>,
        sink: Option<DeviceView<'a, f32>>,
        mut results: Results<'a, T>,
    ) -> Result<Bound<'a>> {
        let (pass, len) = (&self.forward, elements(results.layout));
        let mut launches = Vec::new();
        for (at, launch) in (0..).zip(pass.of_step(0)) {
            let config = self.forward_config(launch);
            let [k, v] = self.keys_of(&own, launch.owner, 0)?;
            // Batches may count as heads, each with the scores of its own.
            let scores = self.sink.as_ref().map(|sink| sink.scores.view());
            let inputs = Inputs { sequences: Some(pass.arrays.sequences(launch, &config)), sink: scores, ..Inputs::new(q, k, v) };
            let out = HeadsMut::packed(self.staged.lend_part(0..len), [config.queries, config.heads, config.value_size()])?;
            let outputs = Outputs { max_logit: self.max_logit_of(at), ..Outputs::new(out, self.log_sum_exp.lend()) };
            launches.push(pass.kernel(config).bind(stream, inputs, outputs)?);
        }
        Ok(Bound::new(move |stream| {
            let _turn = self.begin(stream, &own)?;
            self.gather_keys(stream, own.bytes(), &pass.reads, || {
                // Rows that are in no sequence.
                self.begin_rows(stream, self.nothing.part(0..1), self.log_sum_exp.lend())?;
                if let (Some(own), Some(values)) = (&self.sink, sink) {
                    self.fill.launch(stream, FillRowsArgs { values, target: own.scores.lend(), rows: 1 })?;
                }
                self.begin_max_logit(stream)?;
                zero(stream, self.staged.lend_part(0..len))
            })?;
            launches.iter_mut().try_for_each(|launch| launch.run(stream))?;
            self.unstage(stream, results.layout, results.target.reborrow())?;
            self.finish(stream, &mut results)
        }))
    }

    /// Fills a number for each head and row.
    fn begin_rows(&self, stream: &Stream, values: DeviceView<'_, f32>, target: DeviceViewMut<'_, f32>) -> Result<()> {
        let rows = self.local.packed.queries as u32;
        if target.is_empty() { Ok(()) } else { self.fill.launch(stream, FillRowsArgs { values, target, rows }) }
    }

    /// Begins a pass, which holds the lock to its end: what carries keys comes after the caller's work so far, also on memory whose uses the runtime does not know. Keys with
    /// gaps are copied.
    pub fn begin(&self, stream: &Stream, own: &Own<'_, T>) -> Result<MutexGuard<'_, ()>> {
        let turn = lock(&self.turn);
        check_captures(stream, &self.comm)?;
        let tensors = self.slots.as_flattened().iter().map(|slot| slot.access(true));
        let sums = self.parts.as_flattened().iter().chain(&self.returned).map(|part| part.access(true));
        note(stream, &tensors.chain(sums).collect::<Vec<_>>())?;
        self.comm.wait(&stream.mark()?)?;
        own.prepare(stream, &self.own)?;
        Ok(turn)
    }

    /// Makes each step's work after its keys are there, while those of the next one are on their way, and then what `after` enqueues: what it waits for on the stream that
    /// carries keys, the work of the next step does not wait for. The stream is to [join](Self::join) what carries keys.
    pub fn in_steps(
        &self,
        stream: &Stream,
        own: Both<'_>,
        reads: &Reads,
        mut work: impl FnMut(u32) -> Result<()>,
        after: impl Fn(u32) -> Result<()>,
    ) -> Result<()> {
        let (share, world) = (self.local.share, self.local.share.world.get());
        self.mover.publish(&self.comm, share, own, reads)?;
        for step in 0..world {
            let next = step + 1;
            let slots = &self.slots[next as usize % 2];
            if next < world {
                self.mover.fetch(&self.comm, share, next, own, slots.each_ref().map(|slot| bytes_mut(slot.lend())), reads)?;
            }
            work(step)?;
            if next < world {
                note(stream, &slots.each_ref().map(|slot| slot.access(false)))?;
                let parts = &self.parts[next as usize % 2];
                note(stream, &parts.each_ref().map(|part| part.access(true)))?;
            }
            after(step)?;
        }
        Ok(())
    }

    /// Later work of the stream comes after what carries keys, so that a graph ends on one stream.
    pub fn join(&self, stream: &Stream) -> Result<()> {
        stream.wait(&self.comm.mark()?)
    }

    /// Copies the log-sum-exp to where it goes, and agrees on the largest scores.
    fn finish(&self, stream: &Stream, results: &mut Results<'_, T>) -> Result<()> {
        Rows::copy_all(
            stream,
            "ContextParallel, log_sum_exp",
            self.log_sum_exp.view(),
            results.log_sum_exp.reborrow(),
            &self.local.log_sum_exp(),
        )?;
        let (Some(max_logit), Some(numbers)) = (&mut results.max_logit, &self.numbers) else { return Ok(()) };
        let (launches, of_launch) = (self.forward.program.launches.len() as u32, self.local.packed.heads);
        self.largest.run(stream, self.max_logit.view(), launches, of_launch, numbers.own.lend())?;
        // Of each rank, and of each batch that counts as heads.
        let heads = self.config.attention.heads;
        numbers.together(stream, self.local.share, |all| {
            self.largest.run(stream, all, (all.len() / heads.max(1)) as u32, heads, max_logit.reborrow())
        })
    }

    /// Where launch `at` of the forward pass writes the largest score of each head, if it is asked for.
    fn max_logit_of(&self, at: u64) -> Option<DeviceViewMut<'_, f32>> {
        let heads = self.local.packed.heads;
        self.config.attention.max_logit.then(|| self.max_logit.lend_part(at * heads..(at + 1) * heads))
    }

    /// Launches that see nothing write no largest scores.
    fn begin_max_logit(&self, stream: &Stream) -> Result<()> {
        self.fill.launch(stream, FillRowsArgs { values: self.nothing.part(0..1), target: self.max_logit.lend(), rows: 1 })
    }
}

/// Scores of sinks are given where they are learnable.
pub(super) fn check_sink(config: &AttentionConfig, given: Option<DeviceView<'_, f32>>) -> Result<()> {
    match (config.sink, given) {
        (Sink::Learnable, Some(sink)) => Error::check_length("ContextParallel, sink", config.heads, sink.len()),
        (Sink::None | Sink::OffByOne, None) => Ok(()),
        (kind, _) => {
            let why = format!("the configuration's sink is {kind:?}: scores are given if it is Learnable, and only then");
            Err(Error::Invalid { what: "ContextParallel, sink", why })
        }
    }
}

/// The largest scores are given where they are asked for.
pub(super) fn check_max_logit(config: &AttentionConfig, given: Option<&DeviceViewMut<'_, f32>>) -> Result<()> {
    match given {
        Some(scores) if config.max_logit => Error::check_length("ContextParallel, max_logit", config.heads, scores.len()),
        None if !config.max_logit => Ok(()),
        _ => {
            let why = "given if, and only if, the configuration asks for it".to_owned();
            Err(Error::Invalid { what: "ContextParallel, max_logit", why })
        }
    }
}
