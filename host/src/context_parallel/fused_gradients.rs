//! The backward pass in one launch ([`fused`](super::fused)): keys arrive as in the forward pass, and gradients of keys go straight to their owner's slots.

use std::sync::Mutex;

use super::backward::check_grad_sink;
use super::config::ContextParallelConfig;
use super::element::ContextElement;
use super::forward::check_sink;
use super::fused::Fused;
use super::key_exchange::BoundPass;
use super::memory::Scratch;
use crate::attention::{
    ArrivingBackward, ArrivingBackwardTensors, BackwardInputs, BoundArriving, GradientTarget, Gradients, Inputs, SlotPlaces, Window,
    packed_slot_elements, slot_elements,
};
use crate::runtime::runtime::lock;
use crate::runtime::{Bound, Buffer, Error, Result, Stream};
use crate::sum_parts::SumParts;
use crate::symmetric::{Arena, Flags, SymmetricBuffer};
use crate::tensor::HeadsMut;
use crate::thd::Share;

/// What the backward pass has beside the forward pass.
pub(super) struct FusedGradients<T: ContextElement> {
    kernel: ArrivingBackward<T>,
    /// A slot for each rank, by their numbers in the team. Locked while a pass is enqueued.
    slots: Mutex<SymmetricBuffer<f32>>,
    /// The same memory, as kernels of this rank read it.
    pub(super) place: Scratch<f32>,
    /// Elements of a slot.
    slot: u64,
    given: Flags,
    /// Of gradients of sinks.
    sum: SumParts<f32, f32>,
    /// Whether a window leaves blocks of keys to which some rank gives nothing: they are zeroed once, as no rank writes them.
    has_idle: bool,
}

/// Elements of a rank's slot.
pub(super) fn slot_of(config: &ContextParallelConfig, ranks: u64) -> u64 {
    let attention = &config.attention;
    if config.is_packed() {
        return packed_slot_elements(attention.key_heads, attention.keys / ranks, attention.batches, attention.head_size);
    }
    slot_elements(attention.batches * attention.key_heads, attention.keys / ranks, attention.head_size)
}

impl<T: ContextElement> FusedGradients<T> {
    /// Takes memory of the arena, and loads the kernels.
    pub fn take(stream: &Stream, arena: &Arena, config: &ContextParallelConfig, share: Share) -> Result<Self> {
        let (ranks, attention, device) = (u64::from(share.world.get()), config.attention, stream.device());
        let kernel = ArrivingBackward::new(&device, attention, attention.keys / config.partition.chunks(share.world))?;
        let slot = slot_of(config, ranks);
        let slots = arena.buffer::<f32>(ranks * slot)?;
        // SAFETY: the same elements; the runtime is told of the uses of either as of one.
        let place = Scratch::of(unsafe { Buffer::of(std::sync::Arc::clone(slots.local().memory()), slots.len()) });
        let given = arena.flags("gradients of keys", 1)?;
        let sum = SumParts::new(&device.runtime())?;
        sum.prepare(&device)?;
        let has_idle = config.window() != Window::default();
        let gradients = Self { kernel, slots: Mutex::new(slots), place, slot, given, sum, has_idle };
        if has_idle {
            gradients.place.zero(stream)?;
        }
        Ok(gradients)
    }

    pub fn kernel(&self) -> &'static str {
        self.kernel.kernel()
    }

    /// Bytes of all slots.
    pub fn bytes(&self) -> u64 {
        self.place.bytes()
    }

    /// Fills the slots with NaN, in stream order, or with zeros where some are never written.
    pub fn spoil(&self, stream: &Stream) -> Result<()> {
        if self.has_idle { self.place.zero(stream) } else { self.place.spoil(stream) }
    }
}

impl<T: ContextElement> Fused<T> {
    /// Binds tensors of this rank, of the layout and the rows that the configuration says.
    pub fn bind_backward<'a>(
        &'a self,
        stream: &Stream,
        inputs: BackwardInputs<'a, T>,
        gradients: Gradients<'a, T>,
    ) -> Result<BoundPass<'a, T>> {
        let Some(of) = &self.gradients else { unreachable!("a backward pass that is fused has memory for it") };
        let (given, share) = (&self.local.given, self.local.share);
        let BackwardInputs { forward: Inputs { q, k, v, sink, .. }, out, log_sum_exp, grad_out } = inputs;
        check_sink(given, sink)?;
        let ([of_q, of_k, of_v], of_out) = (given.whole_inputs(), given.whole_result());
        let q = q.shaped("ContextParallel, q", of_q)?;
        let own = [k.shaped("ContextParallel, k", of_k)?, v.shaped("ContextParallel, v", of_v)?];
        // Rows that are put count as those of all batches; these are checked for it.
        let rows = [self.local.rows("ContextParallel, k", own[0], of_k)?, self.local.rows("ContextParallel, v", own[1], of_v)?];
        let results = [out.shaped("ContextParallel, out", of_out)?, grad_out.shaped("ContextParallel, grad_out", of_out)?];
        Error::check_length("ContextParallel, log_sum_exp", self.local.packed.queries * self.local.packed.heads, log_sum_exp.len())?;
        let Gradients { q: grad_q, k: grad_k, v: grad_v, sink: mut grad_sink } = gradients;
        check_grad_sink(given, grad_sink.as_ref())?;
        let gradients = [
            rounded("ContextParallel, gradients of q", grad_q)?.shaped("ContextParallel, gradients of q", of_q)?,
            rounded("ContextParallel, gradients of k", grad_k)?.shaped("ContextParallel, gradients of k", of_k)?,
            rounded("ContextParallel, gradients of v", grad_v)?.shaped("ContextParallel, gradients of v", of_v)?,
        ];
        let (ranks, rank, heads) = (u64::from(share.world.get()), u64::from(share.rank.index()), given.heads);
        let step = lock(&of.slots).contiguous()?.stride();
        let tensors = ArrivingBackwardTensors {
            own: [q, own[0], own[1]],
            gathered: self.all(&own, if self.config.is_packed() { 1 } else { given.batches })?,
            results,
            log_sum_exp,
            gradients,
            sink,
            places: self.places(),
            slots: SlotPlaces { ranks, readers: self.pieces.readers(), step },
        };
        let BoundArriving { mut multiply, mut add } = of.kernel.bind(stream, tensors)?;
        let numbers = self.numbers.as_ref().filter(|_| sink.is_some());
        Ok(BoundPass {
            own: rows,
            launch: Box::new(move |stream, waits| {
                let mut slots = lock(&of.slots);
                let mut mine = slots.contiguous_mut()?.slice(rank * of.slot..(rank + 1) * of.slot)?;
                let tell = || {
                    let batch = self.arena.batch(stream);
                    // Of packed sequences without a row the kernel waits for nothing, and an owner may not have taken back the flag of its last pass.
                    let batch = match self.config.is_packed() {
                        true => {
                            self.awaited().into_iter().try_fold(batch, |batch, (flag, from)| batch.wait_flag(&self.ready, flag, from))?
                        }
                        false => batch,
                    };
                    let batch = batch.answered();
                    self.owners().try_fold(batch, |batch, owner| batch.set(&of.given, 0, owner))?.enqueue()
                };
                // SAFETY: the kernel stores in this rank's slots alone, those of the slice.
                let view = unsafe { mine.view_mut(stream) }?;
                multiply(stream, waits, view, numbers.map(|numbers| numbers.own.lend()), &tell)
            }),
            finish: Bound::new(move |stream| {
                let all = self.arena.batch(stream);
                self.readers().try_fold(all, |batch, from| batch.take_back(&of.given, 0, from))?.enqueue()?;
                add(stream, of.place.lend())?;
                // All ranks bring theirs, also where this one's caller does not ask for the sum.
                let Some(numbers) = numbers else { return Ok(()) };
                numbers.together(stream, share, |all| match &mut grad_sink {
                    Some(grad_sink) => of.sum.run(stream, all, ranks as u32, heads, grad_sink.reborrow()),
                    None => Ok(()),
                })
            }),
        })
    }
}

/// A gradient of the inputs' type.
fn rounded<'a, T>(what: &'static str, target: GradientTarget<'a, T>) -> Result<HeadsMut<'a, T>> {
    match target {
        GradientTarget::Rounded(tensor) => Ok(tensor),
        _ => Err(Error::Invalid { what, why: "ranks add gradients up themselves: give Gradients::new".to_owned() }),
    }
}
