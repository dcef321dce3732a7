//! A product of gathered codes and scales bound to its operands, and one call of it.

use std::fmt;

use oxtile_tile::launch::{DeviceView, DeviceViewMut};
use oxtile_tile::num::{Pod, bf16};

use super::format::GatherFormat;
use super::memory::{Given, PLACES, place_of};
use super::quantized::{Piece, Products, QuantizedAllGatherGemm};
use super::table::GatherOperands;
use super::transfer::{Read, wait_for};
use crate::quantize::{Direction, QuantizedTensor};
use crate::runtime::{Result, Stream};
use crate::symmetric::{SymmetricBuffer, replaced};

/// A product of gathered codes and scales bound to its operands. Made by [`QuantizedAllGatherGemm::bind`].
pub struct QuantizedProduct<'a, F: GatherFormat, O: Pod>
where
    bf16: GatherOperands<O>,
{
    of: &'a QuantizedAllGatherGemm<F, O>,
    result: DeviceView<'a, O>,
    products: Products<'a>,
    /// Of each place: the own shard, then the others' chunks as they arrive.
    pieces: [Vec<Piece<F>>; PLACES],
    /// Where the own shard lies.
    shards: Box<[Lent; PLACES]>,
    /// The call that the shard was handed out for.
    given: Given,
}

/// Where a tensor lies: other ranks, and the pieces that they put here, know of this memory.
#[derive(Clone, Copy, PartialEq, Eq)]
struct Lent {
    /// Address and length of the codes, of the scales and of the amax.
    buffers: [[u64; 2]; 3],
    shape: [u64; 2],
    direction: Direction,
}

impl Lent {
    fn of<F: GatherFormat>(QuantizedTensor { data, scales, amax, shape, direction }: &QuantizedTensor<F>) -> Self {
        Self {
            buffers: [[data.address(), data.len()], [scales.address(), scales.len()], F::place_of(amax)],
            shape: *shape,
            direction: *direction,
        }
    }
}

impl<'a, F: GatherFormat, O: Pod> QuantizedProduct<'a, F, O>
where
    bf16: GatherOperands<O>,
{
    pub(super) fn new(
        of: &'a QuantizedAllGatherGemm<F, O>,
        result: DeviceView<'a, O>,
        products: Products<'a>,
        pieces: [Vec<Piece<F>>; PLACES],
    ) -> Self {
        let shards = Box::new([0, 1].map(|place: usize| Lent::of(&pieces[place][0].tensor)));
        Self { of, result, products, pieces, shards, given: Given::new(&of.memory.0) }
    }

    /// The result, for kernels that are launched after a [call](Self::run) and before the next one.
    pub fn result(&self) -> DeviceView<'_, O> {
        self.result
    }

    /// The gathered operand in bf16, for kernels that are launched after a [call](Self::run) and before the next call, or second half of a call, of any operation on the same memory: for the gradient of the weight.
    pub fn gathered(&self) -> DeviceView<'_, bf16> {
        self.of.wide.view()
    }

    /// This member's shard of the gathered operand, in the place of the next call: have a cast write all codes and scales of it, and of NVFP4 the amax that all members agreed on, by work on `stream`, then
    /// [run](Self::run) the product. What was there before is not kept. No graph with a call on the memory is replayed between. May be captured, in one graph with the call.
    ///
    /// # Errors
    /// As [`GatheredProduct::shard`](super::GatheredProduct::shard), but for columns.
    pub fn shard(&mut self, stream: &Stream) -> Result<&mut QuantizedTensor<F>> {
        let turn = self.given.give(stream, "QuantizedProduct::shard")?;
        Ok(&mut self.pieces[place_of(turn)][0].tensor)
    }

    /// Puts the shard to the other members, dequantizes what they put here, and multiplies it, after the work on `compute` so far: the shard is written by then. Nothing is waited for on the host, and
    /// nothing is allocated. The result is there after the work that this enqueues on `compute`. May be captured.
    ///
    /// Every member calls it. One that does not come is named by the next [ticket](crate::symmetric::Arena::ticket).
    ///
    /// # Errors
    /// [`Error::Invalid`](crate::Error::Invalid) for a shard that was not written for this call, or in another capture, and where another tensor, or another buffer of codes, scales or the amax, was assigned to the one that [`shard`](Self::shard) lends: copy into it instead; as [`Bound::run`](crate::Bound::run); what ended the arena.
    pub fn run(&mut self, compute: &Stream) -> Result<()> {
        const WHAT: &str = "QuantizedProduct::run";
        let inner = &self.of.memory.0;
        let turn = self.given.take_for(compute, WHAT, "QuantizedProduct::shard")?;
        let place = place_of(turn);
        let mut places = inner.places();
        // Whatever can be refused is refused before the others hear of the call.
        if Lent::of(&self.pieces[place][0].tensor) != self.shards[place] {
            return Err(replaced(WHAT, "what QuantizedProduct::shard lends"));
        }
        places[place].local().check_stream(compute, WHAT)?;
        inner.check_captures(compute, WHAT)?;
        inner.begin(turn, places[place].local().memory(), compute, WHAT)?;
        let done = self.enqueue(compute, &mut places[place], place);
        inner.arena.or_abort(compute, WHAT, done)
    }

    /// One call.
    fn enqueue(&mut self, compute: &Stream, from: &mut SymmetricBuffer<u8>, place: usize) -> Result<()> {
        let Self { of, products, pieces, .. } = self;
        let (inner, transfer, me) = (&of.memory.0, of.transfer(), of.memory.member().rank().index());
        transfer.put(from, place, None, |chunk| of.parts.copies(chunk))?;
        let pieces = &pieces[place];
        match products {
            Products::Sequential(product) => {
                pieces.iter().try_for_each(|piece| arrive(of, compute, piece))?;
                product.run(compute)?;
            }
            Products::Chunked(products) => {
                for source in [me].into_iter().chain(of.schedule.sources(me)) {
                    pieces.iter().filter(|piece| piece.source == source).try_for_each(|piece| arrive(of, compute, piece))?;
                    products[source as usize].run(compute)?;
                }
            }
        }
        let flags: Vec<_> = pieces.iter().filter_map(|piece| piece.flag).collect();
        let own = of.schedule.shard(me);
        let (put, others) = (inner.out.mark()?, &|| of.parts.others(of.schedule.gathered, &own));
        inner.release(compute, from, Read { place, put: &put, has_waited: false, flags: &flags, others, shard: None })
    }
}

/// Waits for a piece that another member puts, and dequantizes it.
fn arrive<F: GatherFormat, O: Pod>(of: &QuantizedAllGatherGemm<F, O>, compute: &Stream, piece: &Piece<F>) -> Result<()>
where
    bf16: GatherOperands<O>,
{
    if let Some(flag) = piece.flag {
        wait_for(&of.memory.0, compute, &[flag])?;
    }
    if piece.rows.is_empty() {
        return Ok(());
    }
    let [start, len] = [piece.rows.start, piece.rows.end - piece.rows.start].map(|rows| rows * of.schedule.other);
    let wide = of.wide.view().access("gathered");
    // SAFETY: these rows of the operand, which nothing uses meanwhile: calls on the memory, of this operation and of others, come one after another, and their products after what writes their rows.
    let output = unsafe { DeviceViewMut::from_raw(wide.address + start * size_of::<bf16>() as u64, len, wide.owner) };
    F::dequantize(&of.casts, compute, &piece.tensor, output)
}

impl<F: GatherFormat, O: Pod> fmt::Debug for QuantizedProduct<'_, F, O>
where
    bf16: GatherOperands<O>,
{
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("QuantizedProduct").field("of", self.of).field("given", &self.given).finish_non_exhaustive()
    }
}
