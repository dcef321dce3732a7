//! Attention of 8 bits over a sequence that is spread over ranks.

use std::fmt;
use std::sync::Mutex;

use oxtile_tile::launch::{DeviceView, DeviceViewMut};
use oxtile_tile::num::{bf16, e4m3};

use super::config::{ContextParallelConfig, Schedule, refuse};
use super::context::ContextParallel;
use super::core::elements;
use super::gathered::order_of_tokens;
use super::local::Local;
use super::memory::{Scratch, again, bytes, bytes_mut};
use super::messages::Messages;
use super::plan::{PassPlan, Plan};
use super::transport::Transport;
use crate::attention::{Attention, AttentionConfig, BackwardInputs, Gradients, Inputs, Layout, Mask, Outputs, Scales, Target};
use crate::quantize::{Amax, CurrentScaling, ScaleOptions};
use crate::runtime::runtime::lock;
use crate::runtime::{Bound, Error, Result, Stream};
use crate::symmetric::{Pitched, Rows};
use crate::tensor::{Heads, HeadsMut, Strided};
use crate::thd::{Half, Partition, Share};

/// [`ContextParallel`] whose forward pass multiplies tensors of 8 bits (`e4m3`), which it makes of `bf16` ones.
///
/// Each pass finds the largest magnitudes of this rank's queries, keys and values, and all ranks agree on the largest of all before one casts: so all have the same three
/// scales. In the forward pass keys and values travel as they were cast, 8 bits an element, and all of them come before the launches ([`Schedule::Gather`]): the kernel of 8
/// bits merges no steps. Probabilities are rounded to `e4m3` too; the result is `bf16`.
///
/// The backward pass is that of `bf16`, by the configuration's `backward`, of the operands that the forward pass multiplied, cast back. Gradients of keys and values go to
/// their owner in `f32`, as those of `bf16` tensors do. Between the passes the caller keeps its own `q`, `k`, `v`, `out` and log-sum-exp, as they were before the cast.
///
/// Layouts bshd and sbhd without gaps, full and causal masks, heads of 64 and 128 elements, any number of key heads, either partition. What else [`ContextParallel`] has is
/// refused by name.
///
/// ```
/// use oxtile::attention::{AttentionConfig, Inputs, Outputs};
/// use oxtile::comm::{EmulatedCommunicator, WorldSize};
/// use oxtile::context_parallel::{ContextParallelConfig, ContextParallelFp8, Transport};
/// use oxtile::num::bf16;
/// use oxtile::{Buffer, Result, Runtime};
///
/// # fn main() -> Result<()> {
/// let ranks = EmulatedCommunicator::world_of(&Runtime::emulated(1)?, WorldSize::new(1).unwrap())?;
/// let stream = ranks[0].device().stream()?;
/// let attention = AttentionConfig { queries: 4, keys: 4, head_size: 64, ..AttentionConfig::default() };
/// let operation = ContextParallelFp8::new(&stream, Transport::collective(&ranks[0]), ContextParallelConfig::new(attention))?;
/// let tensor = Buffer::<bf16>::zeros(&stream, 4 * 64)?;
/// let (mut out, mut log_sum_exp) = (Buffer::<bf16>::zeros(&stream, 4 * 64)?, Buffer::<f32>::zeros(&stream, 4)?);
/// let inputs = Inputs::new(tensor.view(), tensor.view(), tensor.view());
/// operation.bind_forward(&stream, inputs, Outputs::new(out.view_mut(), log_sum_exp.view_mut()))?.run(&stream)?;
/// assert!(log_sum_exp.to_vec(&stream)?.iter().all(|sum| (sum - 4.0_f32.ln()).abs() < 1e-6));
/// # Ok(()) }
/// ```
pub struct ContextParallelFp8<'t> {
    config: ContextParallelConfig,
    local: Local,
    messages: &'t dyn Messages,
    /// The backward pass.
    of_bf16: ContextParallel<'t, bf16>,
    plan: Plan,
    amax: Amax<bf16>,
    casts: CurrentScaling<bf16>,
    /// The launches of this rank: which queries, and their kernel.
    launches: Vec<(Part, Attention<e4m3>)>,
    /// The largest magnitudes of queries, keys and values, and what a code of them is worth.
    amaxes: Scratch<f32>,
    scales: Scratch<f32>,
    /// This rank's codes, and what they are worth.
    codes: [Scratch<e4m3>; 3],
    values: [Scratch<bf16>; 3],
    /// Codes of the keys and values of one rank after another, and in the order of tokens.
    by_rank: [Scratch<e4m3>; 2],
    natural: [Scratch<e4m3>; 2],
    /// Log-sum-exps of one launch after another.
    log_sum_exp: Scratch<f32>,
    /// Held while a pass is enqueued: passes share all of this memory.
    turn: Mutex<()>,
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

impl<'t> ContextParallelFp8<'t> {
    /// As [`ContextParallel::new`]. The configuration's `forward` is [`Schedule::Gather`] or [`Schedule::Auto`].
    ///
    /// # Errors
    /// As [`ContextParallel::new`]; [`Error::Invalid`] that names what 8 bits do not have, and what to take instead.
    pub fn new(stream: &Stream, transport: Transport<'t>, config: ContextParallelConfig) -> Result<Self> {
        let (rank, world) = transport.place()?;
        config.validate(world)?;
        if !matches!(config.forward, Schedule::Auto | Schedule::Gather) {
            return refuse(format!(
                "{} cannot be taken of 8 bits, whose kernel merges no steps and whose heads are not traded: take gather, or ContextParallel of bf16",
                config.forward
            ));
        }
        let messages = transport.messages_for(Schedule::Gather)?;
        let share = Share { world, rank, partition: config.partition };
        let runtime = stream.device().runtime();
        let launch = |part: Part| {
            let mask = if config.is_causal() { Mask::CausalBottomRight } else { Mask::Full };
            // Tensors are given by their strides.
            let layout = if config.is_packed() { Layout::Packed } else { Layout::Bshd };
            let attention = AttentionConfig { layout, mask, queries: part.queries, keys: part.keys, ..config.attention };
            match Attention::new(&runtime, attention) {
                Ok(kernel) => Ok((part, kernel)),
                Err(Error::Invalid { why, .. }) => refuse(format!("{why}; ContextParallel of bf16 takes it otherwise")),
                Err(other) => Err(other),
            }
        };
        let launches = parts(&config, share).into_iter().map(launch).collect::<Result<Vec<_>>>()?;
        let local = Local::new(&config, share);
        let [q, k, v] = local.given.whole_inputs().map(elements);
        let ranks = u64::from(world.get());
        let of = |name, len| Scratch::<e4m3>::new(stream, name, len);
        let back = |name, len| Scratch::<bf16>::new(stream, name, len);
        let codes = [of("codes of queries", q)?, of("codes of keys", k)?, of("codes of values", v)?];
        let values = [back("queries cast back", q)?, back("keys cast back", k)?, back("values cast back", v)?];
        let all = |name| -> Result<[Scratch<e4m3>; 2]> { Ok([of(name, ranks * k)?, of(name, ranks * v)?]) };
        let (by_rank, natural) = (all("codes of one rank after another")?, all("codes in the order of tokens")?);
        let log_sum_exp = Scratch::<f32>::new(stream, "log-sum-exps of launches", local.packed.queries * local.packed.heads)?;
        let (amaxes, scales) = (Scratch::new(stream, "largest magnitudes", 3)?, Scratch::new(stream, "scales of all ranks", 3)?);
        let (amax, casts) = (Amax::new(&runtime)?, CurrentScaling::new(&runtime, ScaleOptions::default())?);
        let sum = |all: &[Scratch<e4m3>]| all.iter().map(Scratch::bytes).sum::<u64>();
        let (of_codes, of_forward) = (sum(&codes), sum(&by_rank) + sum(&natural) + log_sum_exp.bytes());
        let of_values = values.iter().map(Scratch::bytes).sum::<u64>();
        // Both passes by one schedule, as its forward pass is not run. It comes last, as it tells the other ranks what this one makes.
        let backward = if config.backward == Schedule::Auto { Schedule::Gather } else { config.backward };
        let of_bf16 = ContextParallel::of(stream, transport, config.by(backward), "e4m3")?;
        let forward = PassPlan {
            schedule: Schedule::Gather,
            kernels: launches.iter().filter_map(|(_, kernel)| kernel.choice().kernel).take(1).collect(),
            launches: launches.len() as u32,
            received: (ranks - 1) * (k + v),
            memory: of_codes + of_forward,
            why: "the kernel of 8 bits has all keys at once".to_owned(),
            refused: Vec::new(),
        };
        let Plan { mut backward, bytes, .. } = of_bf16.plan().clone();
        backward.memory += of_codes + of_values;
        let plan = Plan { forward, backward, bytes: bytes + of_codes + of_forward + of_values };
        Ok(Self {
            turn: Mutex::default(),
            config,
            local,
            messages,
            of_bf16,
            plan,
            amax,
            casts,
            launches,
            amaxes,
            scales,
            codes,
            values,
            by_rank,
            natural,
            log_sum_exp,
        })
    }

    /// What the passes do, and why.
    pub fn plan(&self) -> &Plan {
        &self.plan
    }

    /// Which tokens this rank has.
    pub fn share(&self) -> Share {
        self.local.share
    }

    /// As [`ContextParallel::streams`].
    pub fn streams(&self) -> Vec<&Stream> {
        self.of_bf16.streams()
    }

    /// As [`ContextParallel::spoil_memory`].
    #[doc(hidden)]
    pub fn spoil_memory(&self, stream: &Stream) -> Result<()> {
        let _turn = lock(&self.turn);
        self.codes.iter().chain(&self.by_rank).chain(&self.natural).try_for_each(|codes| codes.spoil(stream))?;
        self.values.iter().try_for_each(|values| values.spoil(stream))?;
        [&self.amaxes, &self.scales, &self.log_sum_exp].into_iter().try_for_each(|numbers| numbers.spoil(stream))?;
        self.of_bf16.spoil_memory(stream)
    }

    /// Tensors as they are cast: without gaps.
    fn whole<'a>(&self, inputs: &Inputs<'a, bf16>) -> Result<[DeviceView<'a, bf16>; 3]> {
        let names = ["ContextParallelFp8, q", "ContextParallelFp8, k", "ContextParallelFp8, v"];
        let [of_q, of_k, of_v] = self.local.given.whole_inputs();
        let whole = |what, tensor, layout| {
            let rows = self.local.rows(what, tensor, layout)?;
            if Local::is_gapless(rows.layout()) {
                return Ok(rows.view());
            }
            Err(Error::Invalid { what, why: "it has gaps between its rows: copy it first, as it is cast as a whole".to_owned() })
        };
        Ok([whole(names[0], inputs.q, of_q)?, whole(names[1], inputs.k, of_k)?, whole(names[2], inputs.v, of_v)?])
    }

    /// Agrees on the scales, and casts what this rank has.
    fn cast(&self, stream: &Stream, tensors: [DeviceView<'_, bf16>; 3]) -> Result<()> {
        self.amaxes.zero(stream)?;
        let place = |at: usize| at as u64..at as u64 + 1;
        for (at, tensor) in tensors.into_iter().enumerate() {
            self.amax.raise_at(stream, tensor, self.amaxes.lend_part(place(at)))?;
        }
        self.messages.largest(stream, self.amaxes.lend())?;
        for (at, (tensor, codes)) in tensors.into_iter().zip(&self.codes).enumerate() {
            self.casts.cast(stream, tensor, self.amaxes.part(place(at)), codes.lend(), self.scales.lend_part(place(at)))?;
        }
        Ok(())
    }

    /// Binds tensors of this rank to a forward pass, as [`ContextParallel::bind_forward`]; they have no gaps.
    ///
    /// # Errors
    /// As [`ContextParallel::bind_forward`].
    pub fn bind_forward<'a>(&'a self, stream: &Stream, inputs: Inputs<'a, bf16>, outputs: Outputs<'a, bf16>) -> Result<Bound<'a>> {
        let tensors = self.whole(&inputs)?;
        self.check_left(&inputs)?;
        let AttentionConfig { layout, batches, queries, heads, key_heads, head_size, .. } = self.local.given;
        let Outputs { out: Target::Rounded(out), log_sum_exp: mut given_log, max_logit: None } = outputs else {
            return Err(Error::Invalid { what: "ContextParallelFp8, outputs", why: "give Outputs::new, without max_logit".to_owned() });
        };
        let out = self.local.rows_mut("ContextParallelFp8, out", out, self.local.given.whole_result())?;
        if !Local::is_gapless(out.layout()) {
            return Err(Error::Invalid {
                what: "ContextParallelFp8, out",
                why: "it has gaps between its rows: take one without".to_owned(),
            });
        }
        let (out_len, out) = (elements(out.layout()), out.into_view());
        Error::check_length("ContextParallelFp8, log_sum_exp", batches * heads * queries, given_log.len())?;
        self.of_bf16.compare(stream)?;
        let (mut launches, mut logs) = (Vec::new(), Vec::new());
        let of_rows = strides(layout, [batches, queries, heads, head_size]);
        let whole_keys = self.config.attention.keys;
        let of_keys = strides(layout, [batches, whole_keys, key_heads, head_size]);
        let scale = |at: u64| self.scales.part(at..at + 1);
        for (Part { first, queries: rows, keys }, kernel) in &self.launches {
            let (start, log) = (first * of_rows[1], first * batches * heads..(first + rows) * batches * heads);
            let end = elements(Strided { shape: [batches, queries, heads, head_size], strides: [0; 4] });
            let start = start.min(end);
            let q = Heads::strided(self.codes[0].part(start..end), [batches, *rows, heads, head_size], of_rows)?;
            let [k, v] = self.natural.each_ref().map(|codes| Heads::strided(codes.view(), [batches, *keys, key_heads, head_size], of_keys));
            let part = again(&out, out_len).split_at(start).1;
            let out = HeadsMut::strided(part, [batches, *rows, heads, head_size], of_rows)?;
            let scales = Some(Scales { q: scale(0), k: scale(1), v: scale(2) });
            let inputs = Inputs { scales, ..Inputs::new(q, k?, v?) };
            launches.push(kernel.bind(stream, inputs, Outputs::new(out, self.log_sum_exp.lend_part(log.clone())))?);
            let from = Pitched { start: log.start, pitch: *rows };
            logs.push(Rows { count: batches * heads, width: *rows, from, to: Pitched { start: *first, pitch: queries } });
        }
        Ok(Bound::new(move |stream| {
            let _turn = lock(&self.turn);
            self.cast(stream, tensors)?;
            for ((codes, by_rank), natural) in self.codes[1..].iter().zip(&self.by_rank).zip(&self.natural) {
                self.messages.gather(stream, bytes(codes.view()), bytes_mut(by_rank.lend()))?;
                let copies = order_of_tokens(&self.local, by_rank.len(), true);
                Rows::copy_all(stream, "ContextParallelFp8, the order of tokens", by_rank.view(), natural.lend(), &copies)?;
            }
            launches.iter_mut().try_for_each(|launch| launch.run(stream))?;
            let (from, to) = (self.log_sum_exp.view(), DeviceViewMut::reborrow(&mut given_log));
            Rows::copy_all(stream, "ContextParallelFp8, log_sum_exp", from, to, &logs)
        }))
    }

    /// Binds tensors of this rank to a backward pass, as [`ContextParallel::bind_backward`]; queries, keys and values have no gaps.
    ///
    /// # Errors
    /// As [`ContextParallel::bind_backward`].
    pub fn bind_backward<'a>(
        &'a self,
        stream: &Stream,
        inputs: BackwardInputs<'a, bf16>,
        gradients: Gradients<'a, bf16>,
    ) -> Result<Bound<'a>> {
        let tensors = self.whole(&inputs.forward)?;
        self.check_left(&inputs.forward)?;
        self.of_bf16.compare(stream)?;
        let [q, k, v] = self.values.each_ref().map(Scratch::view);
        let inputs = BackwardInputs { forward: Inputs::new(q, k, v), ..inputs };
        let mut pass = self.of_bf16.bind_backward(stream, inputs, gradients)?;
        Ok(Bound::new(move |stream| {
            let _turn = lock(&self.turn);
            self.cast(stream, tensors)?;
            for (at, (codes, values)) in (0..).zip(self.codes.iter().zip(&self.values)) {
                self.casts.dequantize_at(stream, codes.view(), self.scales.part(at..at + 1), values.lend())?;
            }
            pass.run(stream)
        }))
    }

    /// What is not given here.
    fn check_left(&self, inputs: &Inputs<'_, bf16>) -> Result<()> {
        let left = [("sequences", inputs.sequences.is_some()), ("sink", inputs.sink.is_some()), ("scales", inputs.scales.is_some())];
        match left.into_iter().find(|(_, is_given)| *is_given) {
            Some((field, _)) => {
                let why = format!("`{field}` is given, which attention of 8 bits over ranks does not take: leave it out");
                Err(Error::Invalid { what: "ContextParallelFp8, inputs", why })
            }
            None => Ok(()),
        }
    }
}

impl fmt::Debug for ContextParallelFp8<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ContextParallelFp8").field("config", &self.config).field("share", &self.local.share).finish_non_exhaustive()
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
