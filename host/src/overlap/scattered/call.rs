//! A scattered product bound to its operands, and one call of it.

use std::fmt;
use std::ops::Range;

use oxtile_tile::launch::{DeviceView, DeviceViewMut};
use oxtile_tile::num::Pod;

use super::kernels::{Call, Launch, ScatterOperands, Sending};
use super::{GemmReduceScatter, ScatterMethod, Staged, StagedPanel};
use crate::comm::Rank;
use crate::overlap::bulk::Scattering;
use crate::overlap::memory::{Begun, Inner, PLACES, place_of};
use crate::overlap::reduced::Spread;
use crate::overlap::transfer::{Read, wait_for};
use crate::runtime::{Bound, Buffer, Result, Stream, order};
use crate::symmetric::SymmetricBuffer;

/// A scattered product bound to its operands. Made by [`GemmReduceScatter::bind`].
pub struct ScatteredProduct<'a, T: ScatterOperands<O>, O: 'static> {
    call: ScatterCall<'a, T, O>,
    result: DeviceView<'a, O>,
}

/// The products and copies of a call.
pub(in crate::overlap) struct ScatterCall<'a, T: ScatterOperands<O>, O: 'static> {
    of: &'a GemmReduceScatter<T, O>,
    sent: Vec<Sent<'a>>,
    /// The products of own rows; of all rows, if tiles leave as they are computed.
    own: Vec<Run<'a, O>>,
    /// Where finished own rows go, if they are not for this rank alone.
    spread: Option<Spread<'a>>,
    around: Around<'a>,
}

/// What comes before the products of own rows, and after them.
#[derive(Default)]
pub(in crate::overlap) struct Around<'a> {
    /// Copies what the result was to the parts in each place, if it is added.
    pub old: Option<[Bound<'a>; PLACES]>,
    /// What of the epilogue is not fused.
    pub following: Option<Bound<'a>>,
    /// Dequantizes the operands, if they are codes.
    pub dequantize: Option<Dequantize<'a>>,
}

/// What dequantizes operands into a room that all calls on the memory share.
pub(in crate::overlap) struct Dequantize<'a> {
    /// Before the first product of a call, and of its second half if that is called apart.
    pub weight: Bound<'a>,
    /// Own rows of `A`, after the products of the others'.
    pub own: Bound<'a>,
}

/// A product of own rows in each place, which may wait for the others' parts.
pub(in crate::overlap) type Run<'a, O> = [Launch<'a, O>; PLACES];

/// A panel of another member's rows.
pub(in crate::overlap) struct Sent<'a> {
    /// None of an empty panel.
    pub product: Option<Bound<'a>>,
    /// Its result.
    pub bytes: Buffer<u8>,
    pub target: u32,
    pub panel: u32,
    /// Where it lies at the target, in bytes of a place.
    pub at: u64,
}

impl<'a, T: ScatterOperands<O>, O: Pod> ScatteredProduct<'a, T, O> {
    pub(super) fn new(call: ScatterCall<'a, T, O>, result: DeviceView<'a, O>) -> Self {
        Self { call, result }
    }

    /// The same of codes: `panel` dequantizes a panel of a member's rows, before its product.
    pub(super) fn dequantizing(mut self, operands: Dequantize<'a>, panel: impl Fn(u32, u32) -> Result<Bound<'a>>) -> Result<Self> {
        for Sent { product, target, panel: number, .. } in &mut self.call.sent {
            if let Some(of_rows) = product.take() {
                *product = Some(Bound::in_turn(vec![panel(*target, *number)?, of_rows]));
            }
        }
        self.call.around.dequantize = Some(operands);
        Ok(self)
    }

    /// The result, for kernels that are launched after a [call](Self::run) and before the next one.
    pub fn result(&self) -> DeviceView<'_, O> {
        self.result
    }

    /// Multiplies, puts the other members' rows to them, and adds what they put here, after the work on `compute` so far: the operands are written by then. Nothing is waited for on the host. The
    /// result is there after the work that this enqueues on `compute`. May be captured.
    ///
    /// Every member calls it. One that does not come is named by the next [ticket](crate::symmetric::Arena::ticket).
    ///
    /// # Errors
    /// [`Error::Invalid`](crate::Error::Invalid) where the shard of a gathered product lies in the place of this call, or the call that had it is not finished; as [`Bound::run`](crate::Bound::run); what
    /// ended the arena.
    pub fn run(&mut self, compute: &Stream) -> Result<()> {
        self.call.run(compute, "ScatteredProduct::run")
    }

    /// The first half of [`run`](Self::run): multiplies the other members' rows, and puts them; by [`ScatterMethod::Direct`] they have travelled when that is done. Work that is enqueued on `compute` before [`Scattering::finish`], which enqueues the other half, goes on
    /// beside the copies: products that need nothing of this one. May be captured, both halves in one graph. No graph with a call on this memory is replayed between the halves, as of a
    /// [`GatheredProduct`](crate::overlap::GatheredProduct::begin).
    ///
    /// # Errors
    /// As [`run`](Self::run).
    pub fn begin<'c>(&'c mut self, compute: &'c Stream) -> Result<Scattering<'c, 'a, T, O>> {
        let begun = self.call.send(compute, "ScatteredProduct::begin", true)?;
        Ok(Scattering::new(&mut self.call, compute, begun))
    }
}

impl<'a, T: ScatterOperands<O>, O: Pod> ScatterCall<'a, T, O> {
    /// Of rows that stay on this rank.
    pub fn new(of: &'a GemmReduceScatter<T, O>, sent: Vec<Sent<'a>>, own: Vec<Run<'a, O>>, around: Around<'a>) -> Self {
        Self { of, sent, own, spread: None, around }
    }

    /// Of rows that all members get.
    pub fn spreading(of: &'a GemmReduceScatter<T, O>, sent: Vec<Sent<'a>>, own: Vec<Run<'a, O>>, spread: Spread<'a>) -> Self {
        Self { spread: Some(spread), ..Self::new(of, sent, own, Around::default()) }
    }

    /// As [`ScatteredProduct::run`]; errors name `what` was called.
    pub fn run(&mut self, compute: &Stream, what: &'static str) -> Result<()> {
        // On one stream, puts would come after a kernel of all rows, which waits for those of the others.
        let is_apart = self.of.whole.is_some() && self.of.memory.0.out.raw() == compute.raw();
        let begun = self.send(compute, what, is_apart)?;
        self.sum(compute, &begun, what, is_apart)
    }

    /// The products of other members' rows, and their puts. Where tiles leave as they are computed, that is the launch of own rows too, unless that comes apart.
    pub fn send(&mut self, compute: &Stream, what: &'static str, is_apart: bool) -> Result<Begun> {
        let inner = &self.of.memory.0;
        inner.arena.glance()?;
        let turn = inner.turn();
        let (place, mut places) = (place_of(turn), inner.places());
        // Whatever can be refused is refused before the others hear of the call.
        places[place].local().check_stream(compute, what)?;
        inner.check_captures(compute, what)?;
        inner.begin(turn, places[place].local().memory(), compute, what)?;
        inner.sends(turn);
        let mut send = || {
            // A member without rows has no kernel that uses the place; the flags are of it all the same.
            let memory = places[place].local().memory();
            order(&compute.0, |wait_for| memory.add_use(&compute.0, true, wait_for))?;
            if let Some(codes) = &mut self.around.dequantize {
                codes.weight.run(compute)?;
            }
            if let Some(spread) = &self.spread {
                spread.begin(compute)?;
            }
            if let Some(whole) = &self.of.whole {
                if whole.staged.is_none() {
                    // The others have read what lies in the place: the kernel stores there.
                    let credit = inner.arena.batch(compute);
                    inner.others().try_fold(credit, |batch, other| batch.take_back(&inner.free, place as u32, other))?.enqueue()?;
                }
                if let Some(staged) = &whole.staged {
                    inner.after_staged(compute, staged.rows.address())?;
                }
                // Before a later call takes FREE of this place, by that stream.
                inner.out.wait(&compute.mark()?)?;
                if is_apart {
                    self.own
                        .iter_mut()
                        .try_for_each(|own| launch(self.of, compute, (place, &mut places[place]), (own, &[]), Tiles::Sent))?;
                    whole.staged.iter().try_for_each(|staged| staged.put(inner, &places[place], place))?;
                }
            }
            for sent in &mut self.sent {
                if let Some(product) = &mut sent.product {
                    product.run(compute)?;
                }
                // Also after all earlier calls: FREE is not taken before those have taken theirs.
                inner.out.wait(&compute.mark()?)?;
                sent.put(inner, &places[place], place)?;
            }
            inner.copies_enqueued(turn)
        };
        let sent = send();
        inner.arena.or_abort(compute, what, sent)
    }

    /// The products of own rows, to which the others' parts are added. Of a half that is called apart the weight is dequantized again: calls between the halves may have had its room.
    pub fn sum(&mut self, compute: &Stream, begun: &Begun, what: &'static str, is_apart: bool) -> Result<()> {
        let inner = &self.of.memory.0;
        let weight = self.around.dequantize.as_mut().filter(|_| is_apart).map_or(Ok(()), |codes| codes.weight.run(compute));
        let done = weight.and_then(|()| self.enqueue(compute, begun, is_apart));
        inner.finished(compute, begun);
        inner.arena.or_abort(compute, what, done)
    }

    fn enqueue(&mut self, compute: &Stream, begun: &Begun, is_apart: bool) -> Result<()> {
        let Self { of, sent, own, spread, around } = self;
        let (inner, place) = (&of.memory.0, begun.place());
        let mut places = inner.places();
        if let Some(old) = &mut around.old {
            old[place].run(compute)?;
        }
        if let Some(codes) = &mut around.dequantize {
            codes.own.run(compute)?;
        }
        let waits = of.choice.method != ScatterMethod::Sequential;
        let [read, unread] = of.awaited(place, 0..of.shards.panels());
        if !waits {
            wait_for(inner, compute, &read)?;
        }
        for (number, (own, run)) in own.iter_mut().zip(&of.runs).enumerate() {
            let [awaited, _] = of.awaited(place, if waits { run.panels.clone() } else { 0..0 });
            let tiles = if of.whole.is_some() && !is_apart { Tiles::Together } else { Tiles::Own(number) };
            launch(of, compute, (place, &mut places[place]), (own, &awaited), tiles)?;
            if let Some(spread) = spread {
                inner.out.wait(&compute.mark()?)?;
                spread.put(inner, number)?;
            }
        }
        let staged = of.whole.as_ref().and_then(|whole| whole.staged.as_ref());
        let put = match staged.filter(|_| !is_apart) {
            // After the launch that sets what they wait for: streams may share a hardware queue.
            Some(staged) => {
                staged.put(inner, &places[place], place)?;
                Some(inner.out.mark()?)
            }
            None => None,
        };
        let put = put.as_ref().unwrap_or(&begun.put);
        if let Some(following) = &mut around.following {
            following.run(compute)?;
        }
        wait_for(inner, compute, &unread)?;
        match spread {
            Some(spread) => {
                spread.end(inner, compute)?;
                // The finished rows were put later than the parts.
                compute.wait(&inner.out.mark()?)?;
            }
            None => compute.wait(put)?,
        }
        if !compute.is_capturing() && inner.sent_last(begun.turn) {
            // All uses so far come before later work of this stream: the next products need not wait for `out` again, which would be for puts of their own call.
            let rows = spread.iter().flat_map(Spread::memories);
            let staged = staged.map(|staged| staged.rows.memory());
            // An empty panel was neither written nor put: other uses of its room were not waited for.
            let written = sent.iter().filter(|sent| sent.product.is_some()).map(|sent| sent.bytes.memory());
            for memory in written.chain(staged).chain(rows) {
                memory.forget_uses();
                memory.add_use(&compute.0, true, &mut Vec::new());
            }
        }
        let others = &|| Some(0..of.parts_bytes()).into_iter().filter(|range| !range.is_empty()).collect();
        let flags = [read, unread].concat();
        let read = Read { place, put, has_waited: waits, flags: &flags, others, shard: None };
        inner.release(compute, &mut places[place], read)
    }

    pub(in crate::overlap) fn memory(&self) -> &Inner {
        &self.of.memory.0
    }
}

/// Which tiles a launch computes.
#[derive(Clone, Copy)]
enum Tiles {
    /// Those of the other members' rows.
    Sent,
    /// Those of a run of own rows.
    Own(usize),
    /// All.
    Together,
}

/// Launches a product in a place, which waits for these flags.
fn launch<T: ScatterOperands<O>, O: Pod>(
    of: &GemmReduceScatter<T, O>,
    compute: &Stream,
    (place, all): (usize, &mut SymmetricBuffer<u8>),
    (own, awaited): (&mut Run<'_, O>, &[(u32, Rank)]),
    tiles: Tiles,
) -> Result<()> {
    let inner = &of.memory.0;
    let waits = inner.waits(compute, place, awaited)?;
    let adds = !matches!(tiles, Tiles::Sent);
    let Some(whole) = &of.whole else {
        let Tiles::Own(run) = tiles else { unreachable!("tiles leave from a kernel of all rows") };
        return own[place](compute, Call { tiles: of.runs[run].tiles.view(), adds, waits, away: None });
    };
    let (tiles, leaves) = match tiles {
        Tiles::Sent => (&whole.sent, true),
        Tiles::Together => (&whole.together, true),
        Tiles::Own(run) => (&of.runs[run].tiles, false),
    };
    let signals = inner.ready.signals(compute)?;
    let mut places;
    let (others, flag) = match &whole.staged {
        // SAFETY: the room is written by this kernel alone, while nothing is put from it: a call is after the puts of the one before it.
        Some(Staged { rows, .. }) => (unsafe { DeviceViewMut::from_raw(rows.address(), rows.len(), rows.owner()) }, 0),
        None => {
            places = all.contiguous_mut()?;
            // SAFETY: the kernel stores in this rank's part of each place alone, which its owner has read.
            (unsafe { places.parts_mut(compute, |rank| of.stored_at(rank)) }?.cast(), Inner::ready_flag(place, 0))
        }
    };
    let away = Sending { others: leaves.then_some(others), signals: signals.argument(), flag };
    own[place](compute, Call { tiles: tiles.view(), adds, waits, away: Some(away) })
}

impl<O: Pod> Staged<O> {
    /// Puts each panel to its member once the kernel has told that it is there, and all members that they have read what was in the place; then tells it so. After the launch of the kernel.
    ///
    /// Panels take turns on some streams: a wait and a flag take as long as some megabytes. In a graph there is one, which its maker has named.
    fn put(&self, inner: &Inner, parts: &SymmetricBuffer<u8>, place: usize) -> Result<()> {
        let credit = inner.arena.batch(&inner.out);
        inner.others().try_fold(credit, |batch, other| batch.take_back(&inner.free, place as u32, other))?.enqueue()?;
        let beside = if inner.out.is_capturing() { &inner.beside[..0] } else { &inner.beside };
        let taken = inner.out.mark()?;
        beside.iter().try_for_each(|stream| stream.wait(&taken))?;
        let outs = || std::iter::once(&inner.out).chain(beside);
        let put = self.panels.iter().zip(outs().cycle()).try_for_each(|(StagedPanel { target, panel, flag, from, at }, out)| {
            let (to, batch) = (inner.world_rank(*target), inner.arena.batch(out).take_own(&inner.ready, *flag)?);
            let peer = parts.peer(to)?;
            let batch = batch.put(&peer, &self.bytes, from.clone(), *at)?;
            batch.set(&inner.ready, Inner::ready_flag(place, *panel), to)?.enqueue()
        });
        // Also of those that were enqueued before an error: what writes there later, or frees it, waits for the puts.
        let joined = beside.iter().try_for_each(|stream| inner.out.wait(&stream.mark()?));
        self.rows.memory().add_use(&inner.out.0, false, &mut Vec::new());
        put.and(joined).and_then(|()| inner.staged(self.rows.address()))
    }
}

impl Sent<'_> {
    /// Puts the panel to its member, once that one has read what was in the place, and tells it so.
    fn put(&self, inner: &Inner, parts: &SymmetricBuffer<u8>, place: usize) -> Result<()> {
        let to = inner.world_rank(self.target);
        let mut batch = inner.arena.batch(&inner.out);
        if self.panel == 0 {
            batch = batch.take_back(&inner.free, place as u32, to)?;
        }
        let peer = parts.peer(to)?;
        if !self.bytes.is_empty() {
            batch = batch.put(&peer, &self.bytes, 0..self.bytes.len(), self.at)?;
        }
        batch.set(&inner.ready, Inner::ready_flag(place, self.panel), to)?.enqueue()
    }
}

impl<T: ScatterOperands<O>, O: Pod> GemmReduceScatter<T, O> {
    /// The flags of some panels that come here: those with rows, and those without.
    fn awaited(&self, place: usize, panels: Range<u32>) -> [Vec<(u32, Rank)>; 2] {
        let (inner, me) = (&self.memory.0, self.memory.member().rank().index());
        let of = |panel: u32| self.shards.sources(me).map(move |source| (Inner::ready_flag(place, panel), inner.world_rank(source)));
        let is_read = |panel: &u32| !self.shards.panel(me, *panel).is_empty();
        let (read, unread): (Vec<_>, Vec<_>) = panels.partition(is_read);
        [read, unread].map(|panels| panels.into_iter().flat_map(of).collect())
    }

    /// The bytes of a rank's place in which this rank's part of its rows lies: none of a rank that gets none from here.
    fn stored_at(&self, rank: Rank) -> Range<u64> {
        let (inner, me) = (&self.memory.0, self.memory.member().rank().index());
        let bytes = self.shards.extent() * self.product.n * size_of::<O>() as u64;
        let place = self.shards.targets(me).find(|target| inner.world_rank(*target) == rank).map(|target| self.shards.place_at(target, me));
        place.map_or(0..0, |place| place * bytes..(place + 1) * bytes)
    }

    /// Bytes of the parts that come here.
    fn parts_bytes(&self) -> u64 {
        let own = self.shards.shard(self.memory.member().rank().index());
        u64::from(self.shards.members - 1) * (own.end - own.start) * self.product.n * size_of::<O>() as u64
    }
}

impl<T: ScatterOperands<O>, O> fmt::Debug for ScatteredProduct<'_, T, O> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ScatteredProduct").field("of", self.call.of).finish_non_exhaustive()
    }
}
