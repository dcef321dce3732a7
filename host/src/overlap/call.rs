//! A gathered product bound to its operands, and one call of it.

use std::fmt;
use std::sync::Arc;

use oxtile_tile::launch::DeviceView;
use oxtile_tile::num::Pod;

use super::bulk::Gathering;
use super::gathered::{AllGatherGemm, Product};
use super::memory::{Begun, Given, Inner, PLACES, place_of};
use super::schedule::Schedule;
use super::table::GatherOperands;
use super::transfer::{Read, Transfer, wait_for};
use crate::comm::Rank;
use crate::runtime::{Bound, Buffer, Error, Result, Stream, order};
use crate::symmetric::replaced;

/// A gathered product bound to its operands. Made by [`AllGatherGemm::bind`].
pub struct GatheredProduct<'a, T: GatherOperands<O>, O: 'static> {
    of: &'a AllGatherGemm<T, O>,
    result: DeviceView<'a, O>,
    /// The input of the activation, if it is kept.
    input: Option<DeviceView<'a, O>>,
    /// This member's shard in each place, where shards are rows.
    shards: Option<[Buffer<T>; PLACES]>,
    products: [Product<'a>; PLACES],
    /// What of the epilogue is not fused.
    following: Option<Bound<'a>>,
    /// Where the gathered operand is kept.
    kept: Option<&'a mut Buffer<T>>,
    /// The call that the shard was handed out for.
    given: Given,
}

impl<'a, T: GatherOperands<O>, O: Pod> GatheredProduct<'a, T, O> {
    pub(super) fn new(
        of: &'a AllGatherGemm<T, O>,
        (result, input): (DeviceView<'a, O>, Option<DeviceView<'a, O>>),
        products: [Product<'a>; PLACES],
        following: Option<Bound<'a>>,
    ) -> Result<Self> {
        let inner = &of.memory.0;
        let shard = |place: usize| {
            let ((address, len), all) = (of.shard_in(place), inner.place::<T>(place, 0));
            // SAFETY: the shard lies inside the place, aligned as its elements; the place's memory keeps the arena and is told of streams.
            unsafe { Buffer::of_owner(&inner.out.device(), address, len, Arc::clone(all.memory()) as _) }
        };
        let shards = if of.schedule.shards_are_rows { Some([shard(0)?, shard(1)?]) } else { None };
        Ok(Self { of, result, input, shards, products, following, kept: None, given: Given::new(&of.memory.0) })
    }

    /// The result, for kernels that are launched after a [call](Self::run) and before the next one.
    pub fn result(&self) -> DeviceView<'_, O> {
        self.result
    }

    /// The input of the activation, if it is [kept](crate::gemm::Epilogue::kept), for kernels that are launched after a [call](Self::run) and before the next one.
    pub fn input(&self) -> Option<DeviceView<'_, O>> {
        self.input
    }

    /// From the next call on, each call copies the gathered operand to `kept`, as it is stored, after the product and before the others may put again: for the
    /// gradient of the weight, which then needs no gather. A copy within the device, of [`AllGatherConfig::bytes`](super::AllGatherConfig::bytes). Members may
    /// differ in it. Without it all of them gather again, by [`Gathers::SumOfA`](super::Gathers::SumOfA) of the same shards; by [`Method::Sequential`](super::Method::Sequential)
    /// these have the same bits.
    ///
    /// # Errors
    /// [`Error::Length`].
    pub fn keep_gathered(&mut self, kept: &'a mut Buffer<T>) -> Result<()> {
        Error::check_length("GatheredProduct::keep_gathered", self.of.places[0].len(), kept.len())?;
        self.kept = Some(kept);
        Ok(())
    }

    /// What the last [call](Self::run) gathered, if it is [kept](Self::keep_gathered): for work after that call and before the next one.
    pub fn kept(&self) -> Option<&Buffer<T>> {
        self.kept.as_deref()
    }

    /// This member's shard of the gathered operand, in the place of the next call: write all of it, by work on `stream`, then [run](Self::run) the product. What was
    /// there before is not kept. No other product on the memory takes that place before this one is run, or dropped before the shard is written, and no graph with a call on the memory is replayed between. May be captured, in one graph with
    /// the call.
    ///
    /// # Errors
    /// [`Error::Invalid`] where shards are columns of the operand as it is stored: there [`copy_shard`](Self::copy_shard) serves; where the shard of another product lies in the place, or the call that had it
    /// is not finished; what ended the arena.
    pub fn shard(&mut self, stream: &Stream) -> Result<&mut Buffer<T>> {
        const WHAT: &str = "GatheredProduct::shard";
        if self.shards.is_none() {
            let why = "shards are columns of the operand as it is stored, with gaps: copy yours by GatheredProduct::copy_shard".to_owned();
            return Err(Error::Invalid { what: WHAT, why });
        }
        let place = self.give(stream, WHAT)?;
        match &mut self.shards {
            Some(shards) => Ok(&mut shards[place]),
            None => unreachable!("it was looked at above"),
        }
    }

    /// Copies this member's shard into the place of the next call: rows or columns of the operand as it is stored, without gaps. No graph with a call on the memory is replayed between this and [`run`](Self::run). May be captured, in one graph with the call.
    ///
    /// # Errors
    /// [`Error::Length`]; as [`shard`](Self::shard).
    pub fn copy_shard(&mut self, stream: &Stream, shard: &Buffer<T>) -> Result<()> {
        const WHAT: &str = "GatheredProduct::copy_shard";
        let (inner, schedule, me) = (&self.of.memory.0, &self.of.schedule, self.of.memory.member().rank().index());
        let own = schedule.shard(me);
        let width = own.end - own.start;
        Error::check_length(WHAT, width * schedule.other, shard.len())?;
        // Before the place is given out: a shard that was not copied counts as not written.
        shard.check_stream(stream, WHAT)?;
        if self.shards.is_some() {
            return self.shard(stream)?.copy_from(stream, shard);
        }
        let place = self.give(stream, WHAT)?;
        let size = size_of::<T>() as u64;
        // SAFETY: the bytes of a buffer's elements, which share its uses.
        let bytes = unsafe { Buffer::<u8>::of(Arc::clone(shard.memory()), shard.len() * size) };
        let mut rows = schedule.whole(me).copy(schedule.gathered, size);
        (rows.from.start, rows.from.pitch) = (0, width * size);
        let places = inner.places();
        places[place].peer(inner.member.world_rank())?.put_rows(stream, &bytes, rows)
    }

    /// Later work of `stream` comes after all uses of the shard in the place of the next call.
    fn give(&mut self, stream: &Stream, what: &'static str) -> Result<usize> {
        let place = self.given.give(stream, what).map(place_of)?;
        if let Some(shards) = &self.shards {
            let memory = shards[place].memory();
            order(&stream.0, |wait_for| memory.add_use(&stream.0, true, wait_for))?;
        }
        Ok(place)
    }

    /// Puts the shard to the other members, and multiplies what they put here, after the work on `compute` so far: the shard is written by then. Nothing is
    /// waited for on the host. The result is there after the work that this enqueues on `compute`. May be captured.
    ///
    /// Every member calls it. One that does not come is named by the next [ticket](crate::symmetric::Arena::ticket).
    ///
    /// # Errors
    /// [`Error::Invalid`] for a shard that was not written for this call, or in another capture, and where another buffer was assigned to the one that [`shard`](Self::shard) lends; as [`Bound::run`](crate::Bound::run); what ended the arena.
    pub fn run(&mut self, compute: &Stream) -> Result<()> {
        const WHAT: &str = "GatheredProduct::run";
        let begun = self.put(compute, WHAT)?;
        self.multiply(compute, &begun, WHAT)
    }

    /// The first half of [`run`](Self::run): puts the shard to the other members. Work that is enqueued on `compute` before [`Gathering::finish`], which enqueues the other half, goes on beside
    /// the copies: products that need nothing of this one. May be captured, both halves in one graph. No graph with a call on this memory is replayed between the halves: it would wait for a place that
    /// no rank gives free before its second half, until the arena's deadline.
    ///
    /// The shard is `[rows, columns]` of the operand as it is stored, which [`copy_shard`](Self::copy_shard) or [`shard`](Self::shard) has put into its place. What is gathered is read by `finish` alone, and the
    /// result is no result before:
    ///
    /// ```compile_fail,E0502
    /// use oxtile::num::bf16;
    /// use oxtile::overlap::GatheredProduct;
    /// # use oxtile::{Result, Stream};
    ///
    /// fn early(product: &mut GatheredProduct<'_, bf16, bf16>, stream: &Stream) -> Result<u64> {
    ///     let gathering = product.begin(stream)?;
    ///     let early = product.result().len();
    ///     gathering.finish()?;
    ///     Ok(early)
    /// }
    /// ```
    ///
    /// # Errors
    /// As [`run`](Self::run).
    pub fn begin<'c>(&'c mut self, compute: &'c Stream) -> Result<Gathering<'c, 'a, T, O>> {
        let begun = self.put(compute, "GatheredProduct::begin")?;
        Ok(Gathering::new(self, compute, begun))
    }

    /// The copies of a call.
    fn put(&mut self, compute: &Stream, what: &'static str) -> Result<Begun> {
        let inner = &self.of.memory.0;
        let turn = self.given.take_for(compute, what, "GatheredProduct::shard")?;
        let place = place_of(turn);
        let (shard, places) = (self.of.shard_in(place), inner.places());
        // Whatever can be refused is refused before the others hear of the call.
        if self.shards.as_ref().is_some_and(|shards| (shards[place].address(), shards[place].len()) != shard) {
            return Err(replaced(what, "what GatheredProduct::shard lends"));
        }
        places[place].local().check_stream(compute, what)?;
        self.kept.iter().try_for_each(|kept| kept.check_stream(compute, what))?;
        inner.check_captures(compute, what)?;
        inner.begin(turn, places[place].local().memory(), compute, what)?;
        let size = size_of::<T>() as u64;
        let put = || {
            let shard = self.shards.as_ref().map(|shards| shards[place].memory());
            // The shard may have been used on other streams than the one that it was given for.
            shard.map_or(Ok(()), |shard| order(&compute.0, |wait_for| shard.add_use(&compute.0, false, wait_for)))?;
            // Before the launch that waits for the others' puts: queues of the device may be shared.
            self.of.transfer().put(&places[place], place, shard, |chunk| vec![chunk.copy(self.of.schedule.stored()[1], size)])?;
            inner.copies_enqueued(turn)
        };
        inner.arena.or_abort(compute, what, put())
    }

    /// The rest of a call.
    pub(super) fn multiply(&mut self, compute: &Stream, begun: &Begun, what: &'static str) -> Result<()> {
        let inner = &self.of.memory.0;
        let done = self.enqueue(compute, begun);
        inner.finished(compute, begun);
        inner.arena.or_abort(compute, what, done)
    }

    fn enqueue(&mut self, compute: &Stream, begun: &Begun) -> Result<()> {
        let (inner, schedule, place) = (&self.of.memory.0, &self.of.schedule, begun.place());
        let mut places = inner.places();
        let flags = self.of.transfer().awaited(place);
        match &mut self.products[place] {
            Product::Fused(product) => {
                let is_empty =
                    |from: &Rank| inner.member.team().rank_of(*from).is_some_and(|of| self.of.schedule.shard(of.index()).is_empty());
                // The kernel waits for chunks that it reads.
                let (empty, read): (Vec<_>, Vec<_>) = flags.iter().partition(|(_, from)| is_empty(from));
                product(compute, inner.waits(compute, place, &read)?)?;
                wait_for(inner, compute, &empty)?;
            }
            Product::Sequential(product) => {
                wait_for(inner, compute, &flags)?;
                product.run(compute)?;
            }
            Product::Chunked(products) => {
                let me = inner.member.rank().index();
                products[me as usize].run(compute)?;
                for source in self.of.schedule.sources(me) {
                    let of_source = inner.world_rank(source);
                    let flags: Vec<_> = flags.iter().copied().filter(|(_, from)| *from == of_source).collect();
                    wait_for(inner, compute, &flags)?;
                    products[source as usize].run(compute)?;
                }
            }
        }
        if let Some(following) = &mut self.following {
            following.run(compute)?;
        }
        if let Some(kept) = &mut self.kept {
            kept.copy_from(compute, &self.of.places[place])?;
        }
        let others = &|| others_of(schedule, inner.member.rank().index(), size_of::<T>() as u64);
        let has_waited = matches!(self.products[place], Product::Fused(_));
        let shard = self.shards.as_ref().map(|shards| shards[place].memory());
        inner.release(compute, &mut places[place], Read { place, put: &begun.put, has_waited, flags: &flags, others, shard })
    }

    pub(super) fn memory(&self) -> &Inner {
        &self.of.memory.0
    }
}

impl<T: GatherOperands<O>, O: Pod> AllGatherGemm<T, O> {
    /// Where this member's shard lies in a place, if shards are rows, and how many elements it has.
    fn shard_in(&self, place: usize) -> (u64, u64) {
        let (schedule, inner) = (&self.schedule, &self.memory.0);
        let own = schedule.shard(inner.member.rank().index());
        let address = inner.place::<T>(place, 0).address() + own.start * schedule.other * size_of::<T>() as u64;
        (address, (own.end - own.start) * schedule.other)
    }

    fn transfer(&self) -> Transfer<'_> {
        Transfer { inner: &self.memory.0, schedule: &self.schedule, order: self.choice().order }
    }
}

/// The bytes of the gathered operand that are not this member's.
fn others_of(schedule: &Schedule, me: u32, size: u64) -> Vec<std::ops::Range<u64>> {
    let [rows, columns] = schedule.stored();
    let own = schedule.whole(me);
    let ranges = if schedule.shards_are_rows {
        vec![0..own.rows.start * columns, own.rows.end * columns..rows * columns]
    } else {
        let of_row = |row| [row * columns..row * columns + own.columns.start, row * columns + own.columns.end..(row + 1) * columns];
        (0..rows).flat_map(of_row).collect()
    };
    ranges.into_iter().filter(|range| !range.is_empty()).map(|range| range.start * size..range.end * size).collect()
}

impl<T: GatherOperands<O>, O> fmt::Debug for GatheredProduct<'_, T, O> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("GatheredProduct").field("of", self.of).field("given", &self.given).finish_non_exhaustive()
    }
}
