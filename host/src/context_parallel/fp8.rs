//! Attention of 8 bits over a sequence that is spread over ranks.

use std::fmt;
use std::sync::Mutex;

use oxtile_tile::launch::DeviceView;
use oxtile_tile::num::{bf16, e4m3};

use super::carrier::Reach;
use super::config::{ContextParallelConfig, Schedule, refuse};
use super::context::ContextParallel;
use super::core::elements;
use super::fp8_gathered::{GatheredCodes, kernel};
use super::fp8_traded::TradedCodes;
use super::local::Local;
use super::memory::Scratch;
use super::numbers::Numbers;
use super::plan::{Chosen, Direction, Means, PassPlan, Plan};
use super::transport::Transport;
use crate::attention::{AttentionConfig, BackwardInputs, Gradients, Inputs, Layout, Outputs, Scales, Sink, Target, Window};
use crate::comm::WorldSize;
use crate::quantize::{Amax, CurrentScaling, ScaleOptions};
use crate::runtime::runtime::lock;
use crate::runtime::{Bound, Error, Result, Stream};
use crate::sum_parts::LargestPart;
use crate::thd::Share;

/// [`ContextParallel`] whose forward pass multiplies tensors of 8 bits (`e4m3`), which it makes of `bf16` ones.
///
/// Each pass finds the largest magnitudes of this rank's queries, keys and values, and all ranks agree on the largest of all before one casts: so all have the same three
/// scales. In the forward pass tensors travel as they were cast, 8 bits an element: all keys and values before the launches ([`Schedule::Gather`]), as the kernel of 8
/// bits merges no steps, or queries, keys and values of traded heads ([`Schedule::AllToAll`]), also by symmetric memory alone. Probabilities are rounded to `e4m3` too; the result is `bf16`.
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
    forward: Forward<'t>,
    /// The backward pass.
    of_bf16: ContextParallel<'t, bf16>,
    plan: Plan,
    amax: Amax<bf16>,
    largest: LargestPart,
    casts: CurrentScaling<bf16>,
    /// The largest magnitudes of this rank's queries, keys and values, and of all ranks'; what a code of them is worth.
    numbers: Numbers<'t>,
    amaxes: Scratch<f32>,
    scales: Scratch<f32>,
    /// This rank's codes, and what they are worth.
    codes: [Scratch<e4m3>; 3],
    values: [Scratch<bf16>; 3],
    /// Held while a pass is enqueued: passes share all of this memory.
    turn: Mutex<()>,
}

/// How codes reach queries.
enum Forward<'t> {
    Gather(Box<GatheredCodes<'t>>),
    AllToAll(Box<TradedCodes<'t>>),
}

/// The schedule of the forward pass: of those that the kernel of 8 bits has.
fn chosen(config: &ContextParallelConfig, world: WorldSize, means: Means) -> Result<Chosen> {
    let by = |schedule| ContextParallelConfig { forward: schedule, ..*config }.choose(Direction::Forward, world, means, CODE);
    let because = |chosen: Chosen, why: &str| Ok(Chosen { why: why.to_owned(), ..chosen });
    match config.forward {
        Schedule::AllToAll => by(Schedule::AllToAll),
        Schedule::Gather if !means.messages => refuse(
            "gather sends messages, and the transport has symmetric memory alone: of 8 bits take all-to-all, or give Transport::both"
                .to_owned(),
        ),
        Schedule::Gather => by(Schedule::Gather),
        Schedule::Auto => match (by(Schedule::AllToAll), by(Schedule::Gather)) {
            (Ok(traded), _) if traded.in_memory => because(traded, "copy engines put codes of heads while others are attended to"),
            (_, Ok(gathered)) => because(gathered, "codes of heads cannot be put into the memory of other ranks"),
            (Ok(traded), _) => Ok(traded),
            (Err(traded), Err(gathered)) => refuse(format!("of 8 bits there are gather and all-to-all alone. {gathered}. {traded}")),
        },
        other => refuse(format!(
            "{other} cannot be taken of 8 bits, whose kernel merges no steps: take gather or all-to-all, or ContextParallel of bf16"
        )),
    }
}

/// Refuses what the kernel of 8 bits has on one GPU, and no schedule of it over ranks.
fn check_spread(attention: &AttentionConfig) -> Result<()> {
    let (field, value, allowed) = match *attention {
        AttentionConfig { layout: Layout::Packed, .. } => ("layout", "Packed".to_owned(), "Bshd or Sbhd"),
        AttentionConfig { window, .. } if window != Window::default() => ("window", format!("{window:?}"), "without bounds"),
        AttentionConfig { soft_cap: Some(cap), .. } => ("soft_cap", cap.to_string(), "none"),
        AttentionConfig { sink, .. } if sink != Sink::None => ("sink", format!("{sink:?}"), "None"),
        _ => return Ok(()),
    };
    refuse(format!("{field} is {value}: {allowed} of 8 bits over ranks; ContextParallel of bf16 takes it otherwise"))
}

/// Bytes of a code.
const CODE: u64 = 1;

impl<'t> ContextParallelFp8<'t> {
    /// As [`ContextParallel::new`]. The configuration's `forward` is [`Schedule::Gather`], [`Schedule::AllToAll`] or [`Schedule::Auto`], which takes all-to-all where codes can be put
    /// into the memory of other ranks.
    ///
    /// # Errors
    /// As [`ContextParallel::new`]; [`Error::Invalid`] that names what 8 bits do not have, and what to take instead.
    pub fn new(stream: &Stream, transport: Transport<'t>, config: ContextParallelConfig) -> Result<Self> {
        let (rank, world) = transport.place()?;
        config.validate(world)?;
        check_spread(&config.attention)?;
        if config.attention.max_logit {
            // In the words of the kernel, which does not have it.
            kernel(&stream.device().runtime(), config.attention)?;
        }
        let Chosen { schedule, in_memory, why, .. } = chosen(&config, world, transport.means(&stream.device()))?;
        let share = Share { world, rank, partition: config.partition };
        let (local, runtime) = (Local::new(&config, share), stream.device().runtime());
        let [q, k, v] = local.given.whole_inputs().map(elements);
        let of = |name, len| Scratch::<e4m3>::new(stream, name, len);
        let back = |name, len| Scratch::<bf16>::new(stream, name, len);
        let codes = [of("codes of queries", q)?, of("codes of keys", k)?, of("codes of values", v)?];
        let values = [back("queries cast back", q)?, back("keys cast back", k)?, back("values cast back", v)?];
        let numbers = match (transport.messages, transport.memory) {
            (None, Some((arena, member))) => Numbers::by_puts(stream, arena, member, 3)?,
            _ => Numbers::by_messages(stream, transport.messages_for(schedule)?, 3)?,
        };
        let forward = match (schedule, transport.memory) {
            (Schedule::AllToAll, Some((arena, member))) if in_memory => {
                Forward::AllToAll(Box::new(TradedCodes::new(stream, &config, local, Reach::Memory(arena, member))?))
            }
            (Schedule::AllToAll, _) => {
                let reach = Reach::Messages(transport.messages_for(schedule)?);
                Forward::AllToAll(Box::new(TradedCodes::new(stream, &config, local, reach)?))
            }
            _ => Forward::Gather(Box::new(GatheredCodes::new(stream, &config, local, transport.messages_for(schedule)?)?)),
        };
        let (kernels, launches) = forward.kernels();
        let (of_codes, of_forward) = (codes.iter().map(Scratch::bytes).sum::<u64>(), forward.memory());
        let of_values = values.iter().map(Scratch::bytes).sum::<u64>();
        let (amaxes, scales) = (Scratch::new(stream, "largest magnitudes", 3)?, Scratch::new(stream, "scales of all ranks", 3)?);
        // Both passes by one schedule, as its forward pass is not run. It comes last, as it tells the other ranks what this one makes.
        // With the room that the codes have left.
        let means = transport.means(&stream.device());
        let backward = config.choose(Direction::Backward, world, means, size_of::<bf16>() as u64)?.schedule;
        let of_bf16 = ContextParallel::of(stream, transport, config.by(backward), &format!("e4m3 by {schedule}"))?;
        let ranks = u64::from(world.get());
        let received = match schedule {
            // Results come back as bf16.
            Schedule::AllToAll => {
                config.received(schedule, Direction::Forward, world, CODE) + elements(local.given.whole_result()) / ranks * (ranks - 1)
            }
            _ => (ranks - 1) * (k + v),
        };
        let forward_pass = PassPlan { schedule, kernels, launches, received, memory: of_codes + of_forward, why, refused: Vec::new() };
        let Plan { mut backward, bytes, .. } = of_bf16.plan().clone();
        backward.memory += of_codes + of_values;
        let plan = Plan { forward: forward_pass, backward, bytes: bytes + of_codes + of_forward + of_values };
        Ok(Self {
            turn: Mutex::default(),
            amax: Amax::new(&runtime)?,
            largest: LargestPart::new(&runtime)?,
            casts: CurrentScaling::new(&runtime, ScaleOptions::default())?,
            config,
            local,
            forward,
            of_bf16,
            plan,
            numbers,
            amaxes,
            scales,
            codes,
            values,
        })
    }

    /// As [`ContextParallelConfig::arena_bytes`]: bytes of the arena that codes take, and the backward pass.
    pub fn arena_bytes(config: &ContextParallelConfig, world: WorldSize) -> u64 {
        let has_traded = matches!(config.forward, Schedule::AllToAll | Schedule::Auto);
        let codes = if has_traded { config.arena_bytes_of(Schedule::AllToAll, world, CODE) } else { 0 };
        let backward = config.by(config.backward).arena_bytes(world, size_of::<bf16>() as u64);
        codes.saturating_add(backward).saturating_add(Numbers::arena_bytes(world, 3))
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
        let traded = match &self.forward {
            Forward::AllToAll(traded) => Some(traded.streams()),
            Forward::Gather(_) => None,
        };
        traded.into_iter().flatten().chain(self.of_bf16.streams()).collect()
    }

    /// As [`ContextParallel::spoil_memory`].
    #[doc(hidden)]
    pub fn spoil_memory(&self, stream: &Stream) -> Result<()> {
        let _turn = lock(&self.turn);
        self.codes.iter().try_for_each(|codes| codes.spoil(stream))?;
        self.values.iter().try_for_each(|values| values.spoil(stream))?;
        [&self.amaxes, &self.scales].into_iter().try_for_each(|numbers| numbers.spoil(stream))?;
        self.numbers.spoil(stream)?;
        match &self.forward {
            Forward::Gather(gathered) => gathered.spoil(stream)?,
            Forward::AllToAll(traded) => traded.spoil(stream)?,
        }
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
        self.numbers.own.zero(stream)?;
        let place = |at: usize| at as u64..at as u64 + 1;
        for (at, tensor) in tensors.into_iter().enumerate() {
            self.amax.raise_at(stream, tensor, self.numbers.own.lend_part(place(at)))?;
        }
        self.numbers
            .together(stream, self.local.share, |all| self.largest.run(stream, all, self.local.share.world.get(), 3, self.amaxes.lend()))?;
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
        let AttentionConfig { batches, queries, heads, .. } = self.local.given;
        let Outputs { out: Target::Rounded(out), log_sum_exp, max_logit: None } = outputs else {
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
        Error::check_length("ContextParallelFp8, log_sum_exp", batches * heads * queries, log_sum_exp.len())?;
        self.open(stream)?;
        let scale = |at: u64| self.scales.part(at..at + 1);
        let scales = Scales { q: scale(0), k: scale(1), v: scale(2) };
        let mut pass = match &self.forward {
            Forward::Gather(gathered) => gathered.bind(stream, &self.codes, scales, (out, out_len), log_sum_exp)?,
            Forward::AllToAll(traded) => traded.bind(stream, &self.codes, scales, out, log_sum_exp)?,
        };
        Ok(Bound::new(move |stream| {
            let _turn = lock(&self.turn);
            self.cast(stream, tensors)?;
            pass.run(stream)
        }))
    }

    /// Compares what ranks made, and opens what they share.
    fn open(&self, stream: &Stream) -> Result<()> {
        self.of_bf16.compare(stream)?;
        self.numbers.open(stream)
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
        self.open(stream)?;
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

impl Forward<'_> {
    fn kernels(&self) -> (Vec<&'static str>, u32) {
        match self {
            Self::Gather(gathered) => gathered.kernels(),
            Self::AllToAll(traded) => traded.kernels(),
        }
    }

    fn memory(&self) -> u64 {
        match self {
            Self::Gather(gathered) => gathered.memory(),
            Self::AllToAll(traded) => traded.memory(),
        }
    }
}

impl fmt::Debug for ContextParallelFp8<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ContextParallelFp8").field("config", &self.config).field("share", &self.local.share).finish_non_exhaustive()
    }
}
