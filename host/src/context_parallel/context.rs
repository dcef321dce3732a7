//! The operation: made by all ranks, and bound to tensors.

use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};

use oxtile_tile::launch::DeviceView;

use super::agreement::Agreement;
use super::config::{ContextParallelConfig, Schedule};
use super::element::{ContextElement, Sum};
use super::engine::Engine;
use super::plan::{Chosen, Direction, PassPlan, Plan};
use super::transport::Transport;
use crate::attention::{BackwardInputs, Gradients, Inputs, Outputs};
use crate::runtime::{Bound, Error, Result, Stream};
use crate::thd::{Packed, Share};

/// Attention over a sequence of which each rank has a part ([`Partition`](super::Partition)), forward and backward.
///
/// 1. All ranks make the operation ([`new`](Self::new)), which takes memory and loads kernels, and waits for no other rank.
/// 2. All bind tensors to passes: as those of [`Attention`](crate::attention::Attention), of the same layout, with the rows of this rank. The first time, what ranks
///    made is compared. Layers of one shape share an operation: bind the tensors of each.
/// 3. All run the same passes in the same order. A run waits for nothing on the host, allocates nothing, and may be captured: name the stream and
///    [`streams`](Self::streams) in [`Graph::capture`](crate::Graph::capture).
///
/// Between the passes the caller keeps its own `q`, `k`, `v`, `out` and log-sum-exp, and nothing else. Sums of what ranks computed are in `f32` and in the order of
/// ranks: results have the same bits in every run.
///
/// ```
/// use oxtile::attention::{AttentionConfig, Inputs, Mask, Outputs};
/// use oxtile::comm::{EmulatedCommunicator, WorldSize};
/// use oxtile::context_parallel::{ContextParallel, ContextParallelConfig, Transport};
/// use oxtile::num::bf16;
/// use oxtile::{Buffer, Result, Runtime};
///
/// # fn main() -> Result<()> {
/// let runtime = Runtime::emulated(2)?;
/// let ranks = EmulatedCommunicator::world_of(&runtime, WorldSize::new(2).unwrap())?;
/// // 16 tokens, of which each rank has 8.
/// let attention = AttentionConfig { queries: 16, keys: 16, heads: 2, key_heads: 2, head_size: 64, mask: Mask::CausalBottomRight, ..AttentionConfig::default() };
/// let config = ContextParallelConfig::new(attention);
/// let streams = [ranks[0].device().stream()?, ranks[1].device().stream()?];
/// let operations = [0, 1].map(|rank| ContextParallel::<bf16>::new(&streams[rank], Transport::collective(&ranks[rank]), config));
/// for (operation, stream) in operations.into_iter().zip(&streams).map(|(operation, stream)| (operation.unwrap(), stream)).collect::<Vec<_>>() {
///     println!("{}", operation.plan());
///     let tensor = Buffer::<bf16>::zeros(stream, 8 * 2 * 64)?;
///     let (mut out, mut log_sum_exp) = (Buffer::<bf16>::zeros(stream, 8 * 2 * 64)?, Buffer::<f32>::zeros(stream, 2 * 8)?);
///     let inputs = Inputs::new(tensor.view(), tensor.view(), tensor.view());
///     operation.bind_forward(stream, inputs, Outputs::new(out.view_mut(), log_sum_exp.view_mut()))?.run(stream)?;
/// }
/// # Ok(()) }
/// ```
pub struct ContextParallel<'t, T: ContextElement> {
    config: ContextParallelConfig,
    share: Share,
    transport: Transport<'t>,
    /// What the passes are made of: the forward pass by the first, the backward pass by the last.
    engines: Vec<Engine<'t, T>>,
    agreement: Agreement,
    plan: Plan,
    /// Whether sequences were given.
    has_batch: AtomicBool,
}

impl<'t, T: ContextElement> ContextParallel<'t, T> {
    /// Chooses the schedules, takes memory and loads kernels, by work on `stream`. Waits for no other rank; every rank makes the same operations in one order with all
    /// else that it calls on the transport.
    ///
    /// # Errors
    /// [`Error::Invalid`] that names a field, and what to take instead: tokens that the chunks do not divide, a causal mask of other keys than queries, a schedule that
    /// the transport or the heads do not allow; as [`Attention::new`](crate::attention::Attention::new); out of memory.
    pub fn new(stream: &Stream, transport: Transport<'t>, config: ContextParallelConfig) -> Result<Self> {
        Self::of(stream, transport, config, std::any::type_name::<T>())
    }

    /// The same of tensors that ranks name so to each other. Nothing may follow it on the stream that the host waits for: another rank is not waited for.
    pub(super) fn of(stream: &Stream, transport: Transport<'t>, config: ContextParallelConfig, elements: &str) -> Result<Self> {
        let (rank, world) = transport.place()?;
        config.validate(world)?;
        let share = Share { world, rank, partition: config.partition };
        let size = size_of::<T>() as u64;
        let means = transport.means(&stream.device());
        let forward = config.choose(Direction::Forward, world, means, size)?;
        let backward = config.choose(Direction::Backward, world, means.after(&config, &forward, world, size), size)?;
        let schedules = [forward.schedule, backward.schedule];
        let in_memory = [forward.in_memory, backward.in_memory];
        let engine = |schedules, in_memory, passes: &[Direction]| {
            // What has no room in the arena goes by messages.
            let transport = if in_memory { transport } else { transport.by_messages_alone() };
            Engine::new(stream, transport, config, share, schedules, passes)
        };
        let is_shared = schedules[0] == schedules[1] || schedules.iter().all(Schedule::is_by_sent_keys);
        let engines = match is_shared {
            true => vec![engine(schedules, in_memory[0], &Direction::BOTH)?],
            false => vec![
                engine([schedules[0]; 2], in_memory[0], &[Direction::Forward])?,
                engine([schedules[1]; 2], in_memory[1], &[Direction::Backward])?,
            ],
        };
        let pass = |direction, Chosen { schedule, why, refused, .. }: Chosen, engine: &Engine<'t, T>| {
            let (kernels, launches) = engine.kernels(direction);
            let received = engine.received(direction).unwrap_or_else(|| config.received(schedule, direction, world, size));
            PassPlan { schedule, kernels, launches, received, memory: engine.memory(&[direction]), why, refused }
        };
        let plan = Plan {
            forward: pass(Direction::Forward, forward, &engines[0]),
            backward: pass(Direction::Backward, backward, &engines[engines.len() - 1]),
            bytes: engines.iter().map(|engine| engine.memory(&Direction::BOTH)).sum(),
        };
        let text = format!("{config:?} of {elements} by {schedules:?}, in memory: {in_memory:?}, over {transport:?}");
        let agreement = Agreement::new(stream, &transport, text)?;
        Ok(Self { config, share, transport, engines, agreement, plan, has_batch: AtomicBool::new(false) })
    }

    /// What the passes do, and why.
    pub fn plan(&self) -> &Plan {
        &self.plan
    }

    /// Which tokens this rank has.
    pub fn share(&self) -> Share {
        self.share
    }

    /// Says where the sequences of a batch lie among the tokens of all ranks, if the layout is packed: sums of lengths in device memory, which the host does not read.
    /// It serves all passes that are enqueued after it, of all layers, until it is called again: a backward pass after the forward pass of another batch needs its own call. Padded lengths are multiples of the chunks of all ranks; rows that are in no whole chunk are cut: where the
    /// host has the lengths, [`StepSequences::on_host`](crate::thd::StepSequences::on_host) finds such ones. With a causal mask queries and keys are the same.
    ///
    /// # Errors
    /// [`Error::Invalid`] for another layout; [`Error::Length`] for arrays that do not have one more element than there are sequences.
    pub fn set_sequences(&self, stream: &Stream, queries: Packed<DeviceView<'_, u32>>, keys: Packed<DeviceView<'_, u32>>) -> Result<()> {
        const WHAT: &str = "ContextParallel::set_sequences";
        if !self.config.is_packed() {
            let why = format!("the layout is {:?}, whose sequences are known: leave it out", self.config.attention.layout);
            return Err(Error::Invalid { what: WHAT, why });
        }
        for array in [queries.cu_seqlens, queries.cu_seqlens_padded, keys.cu_seqlens, keys.cu_seqlens_padded] {
            Error::check_length(WHAT, self.config.attention.batches + 1, array.len())?;
        }
        self.engines.iter().try_for_each(|engine| engine.set_sequences(stream, queries, keys))?;
        self.has_batch.store(true, Ordering::Relaxed);
        Ok(())
    }

    /// Fills all memory that no pass may read before it has written it with NaN, in stream order: for tests.
    #[doc(hidden)]
    pub fn spoil_memory(&self, stream: &Stream) -> Result<()> {
        self.engines.iter().try_for_each(|engine| engine.spoil(stream))
    }

    /// Adds up gradients of keys and values by something else than the kernel: for tests, which plant a sum that is wrong.
    #[doc(hidden)]
    pub fn replace_sum(&mut self, make: impl Fn() -> Sum<f32, T>) {
        self.engines.iter_mut().filter_map(Engine::core_mut).for_each(|core| core.sum = make());
    }

    /// A pass that fails before anything is enqueued where sequences were not given.
    fn with_batch<'a>(&'a self, mut pass: Bound<'a>) -> Bound<'a> {
        Bound::new(move |stream| {
            if self.config.is_packed() && !self.has_batch.load(Ordering::Relaxed) {
                let why =
                    "the sequences of the batch are not known: give them by ContextParallel::set_sequences before the pass".to_owned();
                return Err(Error::Invalid { what: "ContextParallel", why });
            }
            pass.run(stream)
        })
    }

    /// Binds tensors of this rank to a forward pass. The sequences of packed tensors are [given apart](Self::set_sequences), not with the inputs. The first binding compares what
    /// ranks made, and waits for them.
    ///
    /// # Errors
    /// [`Error::Mismatch`] for another operation on another rank; as [`Attention::bind`](crate::attention::Attention::bind); [`Error::Invalid`] for batches with gaps
    /// between them.
    pub fn bind_forward<'a>(&'a self, stream: &Stream, inputs: Inputs<'a, T>, outputs: Outputs<'a, T>) -> Result<Bound<'a>> {
        self.open(stream, &inputs)?;
        Ok(self.with_batch(self.engines[0].bind_forward(stream, inputs, outputs)?))
    }

    /// Binds tensors of this rank to a backward pass: what the forward pass read and wrote, the gradient of its result, and where gradients go. As
    /// [`bind_forward`](Self::bind_forward).
    ///
    /// # Errors
    /// As [`bind_forward`](Self::bind_forward) and [`AttentionBackward::bind`](crate::attention::AttentionBackward::bind).
    pub fn bind_backward<'a>(&'a self, stream: &Stream, inputs: BackwardInputs<'a, T>, gradients: Gradients<'a, T>) -> Result<Bound<'a>> {
        self.open(stream, &inputs.forward)?;
        let engine = &self.engines[self.engines.len() - 1];
        Ok(self.with_batch(engine.bind_backward(stream, inputs, gradients)?))
    }

    /// Compares what ranks made.
    pub(super) fn compare(&self, stream: &Stream) -> Result<()> {
        self.agreement.compare(stream, &self.transport)
    }

    /// Compares what ranks made, and opens what they share.
    fn open(&self, stream: &Stream, inputs: &Inputs<'_, T>) -> Result<()> {
        if inputs.sequences.is_some() {
            let why = "sequences of all ranks are given by ContextParallel::set_sequences: leave those of the inputs out".to_owned();
            return Err(Error::Invalid { what: "ContextParallel", why });
        }
        if inputs.scales.is_some() {
            let why = "scales are of elements of 8 bits (ContextParallelFp8): leave those of the inputs out".to_owned();
            return Err(Error::Invalid { what: "ContextParallel", why });
        }
        self.compare(stream)?;
        self.engines.iter().try_for_each(|engine| engine.open(stream))
    }

    /// Streams beside the caller's on which passes enqueue work: a graph that has a pass captures them too.
    pub fn streams(&self) -> Vec<&Stream> {
        self.engines.iter().flat_map(Engine::streams).collect()
    }
}

impl<T: ContextElement> fmt::Debug for ContextParallel<'_, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ContextParallel").field("config", &self.config).field("share", &self.share).finish_non_exhaustive()
    }
}
