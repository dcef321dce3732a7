//! A pass in one launch: copy engines put the keys of each rank at the others, section of heads by section of heads, and the kernel waits for the flag of a section
//! before it first reads it.
//!
//! | flag | set by | says |
//! |---|---|---|
//! | READY of a section | the owner of keys, at each rank that reads them | the section is there |
//! | FREE | a rank, at each other one | its kernel has read all keys: the next pass may put there |
//! | GIVEN | a rank, at each other one | its gradients of that one's keys are in its slot there |
//!
//! Sections are of key heads, counted over all batches: the first tiles need the first section alone. What a causal mask hides is not sent: of two ranks, the one with the lower
//! number alone reads the second chunk of the other. Of packed sequences the device alone knows where chunks lie: all keys of a rank are put as they lie there, at those of the
//! ranks before, and the kernel finds them.
//!
//! Slots need no flag that says that they were read: a rank stores in another one's only when keys of that one have arrived, which puts them after it has read its slots.

use std::ops::Range;
use std::sync::{Arc, Mutex};

use super::arrays::Arrays;
use super::config::ContextParallelConfig;
use super::core::check_captures;
use super::element::ContextElement;
use super::fused_gradients::FusedGradients;
use super::local::Local;
use super::memory::{Scratch, note};
use super::plan::Direction;
use super::sections::{KEYS, Sections};
use crate::attention::{
    ArrivingAttention, ArrivingChunks, ArrivingPlaces, ArrivingSequences, ArrivingTensors, AttentionConfig, Inputs, Layout, Outputs, Target,
};
use crate::comm::{Member, Rank, WorldSize};
use crate::runtime::runtime::lock;
use crate::runtime::{Bound, Buffer, Error, Kind, Result, Stream};
use crate::symmetric::{Arena, Flags, Pitched, Rows, SymmetricBuffer};
use crate::tensor::Heads;
use crate::thd::{Packed, Partition, Share, StepKeys};
use oxtile_kernels::attention::{MOST_KEY_BLOCKS, PRESENT};
use oxtile_tile::arrivals::WaitsArgument;
use oxtile_tile::launch::DeviceView;

const WHAT: &str = "ContextParallel, fused";

/// Memory of a rank for the forward pass of one shape.
pub(super) struct Fused<T: ContextElement> {
    pub(super) config: ContextParallelConfig,
    pub(super) local: Local,
    pub(super) arena: Arena,
    pub(super) member: Member,
    kernel: ArrivingAttention<T>,
    /// If the backward pass is fused too.
    pub(super) gradients: Option<FusedGradients<T>>,
    /// Where packed sequences lie.
    arrays: Option<Arrays>,
    /// Keys and values of all ranks, in the order of tokens, or of packed sequences of one rank after another. Locked while a pass is enqueued.
    pub(super) gathered: Mutex<[SymmetricBuffer<T>; 2]>,
    /// The same memory, as kernels of this rank read it.
    places: [Scratch<T>; 2],
    sections: Sections,
    pub(super) ready: Flags,
    free: Flags,
    /// The flag of each section and chunk.
    table: Buffer<u32>,
    /// Carries keys to the others.
    pub(super) out: Stream,
    is_open: Mutex<bool>,
}

/// Why a pass cannot be taken in one launch, but for memory.
pub(super) fn why_not<T: ContextElement>(config: &ContextParallelConfig, direction: Direction, world: WorldSize) -> Option<String> {
    let attention = &config.attention;
    if config.partition != Partition::Zigzag {
        return Some("parts are contiguous, and its kernel has two chunks a rank: take zigzag parts".to_owned());
    }
    if attention.queries != attention.keys {
        let AttentionConfig { queries, keys, .. } = attention;
        return Some(format!("{queries} queries and {keys} keys: its kernel has as many of both: take pull, gather or all-to-all"));
    }
    if attention.batches * attention.heads * attention.key_heads * attention.queries == 0 {
        return Some("there is nothing to attend to: take any other".to_owned());
    }
    let blocks = attention.keys.div_ceil(KEYS) + config.partition.chunks(world);
    if config.is_packed() && blocks > MOST_KEY_BLOCKS {
        let keys = attention.keys;
        return Some(format!("{keys} rows of packed keys: its kernel counts blocks of {KEYS} in 16 bits: take pull, gather or all-to-all"));
    }
    match direction {
        Direction::Forward => attention.arriving::<T>().err().map(or_another),
        Direction::Backward if config.is_packed() && !config.has_slots() => {
            let AttentionConfig { keys, batches, .. } = attention;
            Some(format!(
                "{batches} sequences in {keys} rows: gradients of each chunk take whole blocks of {KEYS} keys: take pull, gather or all-to-all"
            ))
        }
        Direction::Backward => attention.arriving_backward::<T>(attention.keys / config.partition.chunks(world)).err().map(or_another),
    }
}

/// Why its kernels are not there, with what to take instead.
fn or_another(why: String) -> String {
    format!("{why}: take pull, gather or all-to-all")
}

impl<T: ContextElement> Fused<T> {
    /// Takes memory of the arena, and loads the kernel. All ranks of the arena take as much.
    pub fn new(
        stream: &Stream,
        arena: &Arena,
        member: &Member,
        config: ContextParallelConfig,
        share: Share,
        has_gradients: bool,
    ) -> Result<Self> {
        let (local, attention) = (Local::new(&config, share), config.attention);
        let kernel = ArrivingAttention::new(&stream.device().runtime(), attention)?;
        let tokens = local.tokens[1] * local.packed.key_heads;
        let gathered: [SymmetricBuffer<T>; 2] =
            [arena.buffer(tokens * attention.head_size)?, arena.buffer(tokens * attention.value_size())?];
        // SAFETY: the same elements; the runtime is told of the uses of either as of one.
        let places = gathered.each_ref().map(|all| Scratch::of(unsafe { Buffer::of(Arc::clone(all.local().memory()), all.len()) }));
        let packed = config.is_packed();
        let arrays = packed.then(|| Arrays::new(stream, &config, &local, StepKeys::Whole)).transpose()?;
        let key_heads = attention.key_heads * if packed { 1 } else { attention.batches };
        let sections = Sections::new(&attention, key_heads, share.world, size_of::<T>() as u64);
        let ready = arena.flags("keys of a section of heads", sections.count())?;
        let free = arena.flags("keys were read", 1)?;
        let chunks = config.partition.chunks(share.world);
        let flag = |section: u32, chunk: u64| match config.partition.owner(chunk, share.world).0 {
            owner if owner == share.rank => PRESENT,
            owner => ready.index(section, world_rank(member, owner)),
        };
        let table: Vec<u32> =
            (0..sections.count()).flat_map(|section| (0..chunks).map(move |chunk| (section, chunk))).map(|(s, c)| flag(s, c)).collect();
        let table = Buffer::from_slice(stream, &table)?;
        let gradients = if has_gradients { Some(FusedGradients::take(stream, arena, &config, share)?) } else { None };
        let (arena, member, out) = (arena.clone(), member.clone(), stream.device().urgent_stream()?);
        let (gathered, is_open) = (Mutex::new(gathered), Mutex::default());
        Ok(Self { config, local, arena, member, kernel, gradients, arrays, gathered, places, sections, ready, free, table, out, is_open })
    }

    /// Says where the packed sequences of a batch lie, in stream order.
    pub fn set_sequences(&self, stream: &Stream, queries: Packed<DeviceView<'_, u32>>, keys: Packed<DeviceView<'_, u32>>) -> Result<()> {
        self.arrays.iter().try_for_each(|arrays| arrays.update(stream, queries, keys))
    }

    /// Before the first pass: nothing lies at the other ranks. Meets all ranks.
    pub fn open(&self, stream: &Stream) -> Result<()> {
        let mut is_open = lock(&self.is_open);
        if !*is_open {
            self.member.others_in_world().try_for_each(|other| self.free.open(stream, 0, other))?;
            *is_open = true;
        }
        Ok(())
    }

    /// Before the first pass: fills the keys of other ranks with NaN, in stream order. Later ones may have put those of the next pass already; what was read is
    /// [discarded](SymmetricBuffer::discard) after each pass.
    pub fn spoil(&self, stream: &Stream) -> Result<()> {
        // Slots are written only after keys have arrived.
        self.gradients.iter().try_for_each(|gradients| gradients.spoil(stream))?;
        let is_open = lock(&self.is_open);
        if *is_open { Ok(()) } else { self.places.iter().try_for_each(|place| place.spoil(stream)) }
    }

    pub fn stream(&self) -> &Stream {
        &self.out
    }

    /// The kernel of a pass.
    pub fn kernel(&self, direction: Direction) -> &'static str {
        match (direction, &self.gradients) {
            (Direction::Backward, Some(gradients)) => gradients.kernel(),
            _ => self.kernel.kernel(),
        }
    }

    /// Bytes of keys and values of all ranks, and of the slots.
    pub fn memory(&self, passes: &[Direction]) -> u64 {
        let slots = self.gradients.as_ref().filter(|_| passes.contains(&Direction::Backward)).map_or(0, FusedGradients::bytes);
        self.key_bytes() + slots
    }

    fn key_bytes(&self) -> u64 {
        self.places.iter().map(Scratch::bytes).sum()
    }

    /// Bytes that this rank receives: keys, and gradients of its own ones in `f32`.
    pub fn received(&self, direction: Direction) -> u64 {
        let Share { rank, world, .. } = self.local.share;
        let others = || world.ranks().filter(|other| *other != rank);
        let pieces = u64::from(world.get()) * self.pieces_of(rank).len() as u64;
        let count = |some: usize| self.key_bytes() / pieces * some as u64;
        let keys = count(others().map(|owner| self.seen(owner, rank).count()).sum());
        match direction {
            Direction::Forward => keys,
            Direction::Backward => keys + count(others().map(|reader| self.seen(rank, reader).count()).sum()) * 4 / size_of::<T>() as u64,
        }
    }

    /// Rows of a piece of keys: of a chunk or, of packed sequences, of all of a rank's keys.
    fn piece(&self) -> u64 {
        let world = self.local.share.world;
        self.config.attention.keys / if self.config.is_packed() { world.get().into() } else { self.config.partition.chunks(world) }
    }

    /// What arrives.
    pub(super) fn places(&self) -> ArrivingPlaces<'_> {
        match &self.arrays {
            Some(arrays) => ArrivingPlaces::Sequences(self.arriving_sequences(arrays)),
            None => ArrivingPlaces::Chunks(self.arriving()),
        }
    }

    /// The chunks of this rank and the flags of the others', of dense tensors.
    fn arriving(&self) -> ArrivingChunks<'_> {
        ArrivingChunks {
            rows: self.piece(),
            own: self.chunks_of(self.local.share.rank).map(|(_, number)| number),
            section: self.sections.first,
            flags: self.table.view(),
            own_apart: self.own_apart(),
        }
    }

    /// Where packed sequences lie, and the flags of the other ranks.
    fn arriving_sequences<'a>(&'a self, arrays: &'a Arrays) -> ArrivingSequences<'a> {
        let Share { rank, world, .. } = self.local.share;
        ArrivingSequences {
            arrays: arrays.of_both_halves(),
            batches: self.config.attention.batches,
            rows: [self.local.packed.queries, self.local.packed.keys],
            ranks: world.get().into(),
            rank: rank.index().into(),
            section: self.sections.first,
            flags: self.table.view(),
        }
    }

    /// All keys and values, of so many batches: those of a tensor of the rank's.
    pub(super) fn all(&self, own: &[Heads<'_, T>; 2], batches: u64) -> Result<[Heads<'_, T>; 2]> {
        let keys = self.config.attention.keys;
        let (places, layout) = (&self.places, self.config.attention.layout);
        let natural = |at: usize| {
            let ([_, _, of_row, size], view) = (own[at].shape(), places[at].view());
            match layout {
                Layout::Sbhd => Heads::sbhd(view, [batches, keys, of_row, size]),
                Layout::Bshd | Layout::Packed => Heads::bshd(view, [batches, keys, of_row, size]),
            }
        };
        Ok([natural(0)?, natural(1)?])
    }

    /// Whether own keys are read where the caller has them: no block of keys has some of another chunk.
    fn own_apart(&self) -> bool {
        self.config.is_packed() || self.piece().is_multiple_of(self.kernel.block())
    }

    /// The chunks of a rank: which of its own, and the number in the sequence.
    fn chunks_of(&self, rank: Rank) -> [(u64, u64); 2] {
        let (last, rank) = (self.config.partition.chunks(self.local.share.world) - 1, u64::from(rank.index()));
        [(0, rank), (1, last - rank)]
    }

    /// The pieces of a rank's keys: where each is among its own, and among those of all ranks.
    fn pieces_of(&self, rank: Rank) -> Vec<(u64, u64)> {
        if self.config.is_packed() { vec![(0, rank.index().into())] } else { self.chunks_of(rank).into() }
    }

    /// The pieces of an owner that a reader loads: of dense tensors those of which it sees any, or all, where a block of keys has some of several chunks. What is masked is multiplied by zero there.
    fn seen(&self, owner: Rank, reader: Rank) -> impl Iterator<Item = (u64, u64)> + use<T> {
        let [_, (_, last)] = self.chunks_of(reader);
        let all = self.config.is_packed() || !self.config.is_causal() || !self.own_apart();
        self.pieces_of(owner).into_iter().filter(move |(_, chunk)| all || *chunk < last)
    }

    /// Rows of a tensor of this rank's keys or values, and their places among those of all ranks.
    fn rows(&self, tensor: &Heads<'_, T>, (half, number): (u64, u64), heads: Range<u64>) -> Vec<Rows> {
        let ([_, _, of_row, size], [_, row, head]) = (tensor.shape(), tensor.strides());
        let AttentionConfig { layout, batches, keys, .. } = self.config.attention;
        let batches = if layout == Layout::Bshd { batches } else { 1 };
        let (chunk, pitch) = (self.piece(), of_row * size);
        let of_batch = |batch: u64| {
            // Heads of the section that are of this batch.
            let [begin, end] = [heads.start, heads.end].map(|at| at.saturating_sub(batch * of_row).min(of_row));
            let together = if head == size { (end - begin).max(1) } else { 1 };
            (begin..end).step_by(together as usize).map(move |first| Rows {
                count: chunk,
                width: together * size,
                from: Pitched { start: (2 * batch + half) * chunk * row + first * head, pitch: row },
                to: Pitched { start: (batch * keys + number * chunk) * pitch + first * size, pitch },
            })
        };
        (0..batches).flat_map(of_batch).collect()
    }

    /// Binds tensors of this rank, of the layout and the rows that the configuration says.
    pub fn bind_forward<'a>(&'a self, stream: &Stream, inputs: Inputs<'a, T>, outputs: Outputs<'a, T>) -> Result<Bound<'a>> {
        let (local, Inputs { q, k, v, .. }) = (&self.local, inputs);
        let [of_q, of_k, of_v] = local.given.whole_inputs();
        let q = local.rows("ContextParallel, q", q, of_q)?;
        let own = [local.rows("ContextParallel, k", k, of_k)?, local.rows("ContextParallel, v", v, of_v)?];
        let Outputs { out, log_sum_exp, .. } = outputs;
        let Target::Rounded(out) = out else {
            let why = "ranks merge their results themselves: give Outputs::new".to_owned();
            return Err(Error::Invalid { what: "ContextParallel, out", why });
        };
        let out = local.rows_mut("ContextParallel, out", out, local.given.whole_result())?;
        Error::check_length("ContextParallel, log_sum_exp", local.packed.queries * local.packed.heads, log_sum_exp.len())?;
        // Batches of sbhd are heads here, those of packed sequences rows.
        let AttentionConfig { layout, batches, .. } = self.config.attention;
        let gathered = self.all(&own, if layout == Layout::Bshd { batches } else { 1 })?;
        let mut kernel = self.kernel.bind(stream, ArrivingTensors { q, own, gathered, out, log_sum_exp, places: self.places() })?;
        Ok(Bound::new(move |stream| self.pass(stream, |gathered| self.exchange(stream, gathered, own, |waits| kernel(stream, waits)))))
    }
}

/// One pass.
impl<T: ContextElement> Fused<T> {
    /// Enqueues a pass, which holds the lock. One that fails ends the arena: the others go on with it.
    pub(super) fn pass(&self, stream: &Stream, enqueue: impl FnOnce(&mut [SymmetricBuffer<T>; 2]) -> Result<()>) -> Result<()> {
        let mut gathered = lock(&self.gathered);
        check_captures(stream, &self.out)?;
        self.arena.check()?;
        // After the pass before, on whichever stream: until it has reset the flags, a kernel would take its keys for those of this one.
        note(stream, &self.places.each_ref().map(|place| place.access(true)))?;
        let done = enqueue(&mut gathered);
        if let Err(error) = &done
            && !stream.is_capturing()
        {
            // What is returned is why.
            let _ = self.arena.abort(&format!("{WHAT}: {error}"));
        }
        done
    }

    /// Puts own keys at the others while `kernel` waits for theirs, and then says that they were read.
    pub(super) fn exchange(
        &self,
        stream: &Stream,
        gathered: &mut [SymmetricBuffer<T>; 2],
        own: [Heads<'_, T>; 2],
        kernel: impl FnOnce(WaitsArgument<'_>) -> Result<()>,
    ) -> Result<()> {
        // After the caller's work so far, also on memory whose uses the runtime does not know.
        self.out.wait(&stream.mark()?)?;
        if !self.own_apart() {
            self.keep(stream, own)?;
        }
        // Before the launch that waits for what others put: queues of the device may be shared.
        self.put(gathered, own)?;
        let flags = self.awaited();
        kernel(self.ready.waits(stream, &flags)?)?;
        // Later work may write the keys again, and a capture ends on one stream.
        stream.wait(&self.out.mark()?)?;
        let mut batch = self.arena.batch(stream);
        for (flag, from) in flags {
            // The lengths of packed sequences decide whether the kernel has waited for it: if not, it may not be set yet.
            batch = if self.config.is_packed() { batch.wait_flag(&self.ready, flag, from)? } else { batch };
            batch = batch.clear(&self.ready, flag, from)?;
        }
        batch.enqueue()?;
        if stream.0.runtime.kind() == Kind::Emulated {
            gathered.iter_mut().try_for_each(|all| all.discard(stream, 0..all.len()))?;
        }
        let batch = self.arena.batch(stream);
        self.member.others_in_world().try_fold(batch, |batch, other| batch.set(&self.free, 0, other))?.enqueue()
    }

    /// Copies own keys among those of all ranks.
    fn keep(&self, stream: &Stream, own: [Heads<'_, T>; 2]) -> Result<()> {
        let Share { rank, .. } = self.local.share;
        for (tensor, place) in own.iter().zip(&self.places) {
            let rows: Vec<_> =
                self.pieces_of(rank).into_iter().flat_map(|chunk| self.rows(tensor, chunk, 0..self.sections.heads.into())).collect();
            Rows::copy_all(stream, WHAT, tensor.view(), place.lend(), &rows)?;
        }
        Ok(())
    }

    /// Puts own keys at the others, a section at all of them before the next one, and sets its flag.
    fn put(&self, gathered: &[SymmetricBuffer<T>; 2], own: [Heads<'_, T>; 2]) -> Result<()> {
        let Share { rank: me, world, .. } = self.local.share;
        let turns = || (1..world.get()).filter_map(move |step| Rank::new((me.index() + world.get() - step) % world.get(), world));
        for (section, to) in (0..self.sections.count()).flat_map(|section| turns().map(move |to| (section, to))) {
            let there = world_rank(&self.member, to);
            if section == 0 {
                self.arena.batch(&self.out).take_back(&self.free, 0, there)?.enqueue()?;
            }
            for (tensor, all) in own.iter().zip(gathered) {
                let rows: Vec<_> = self.seen(me, to).flat_map(|chunk| self.rows(tensor, chunk, self.sections.heads(section))).collect();
                all.put_rows_each(&self.out, tensor.view(), there, &rows)?;
            }
            self.arena.batch(&self.out).set(&self.ready, section, there)?.enqueue()?;
        }
        Ok(())
    }

    /// The flags of all sections of the other ranks.
    pub(super) fn awaited(&self) -> Vec<(u32, Rank)> {
        (0..self.sections.count()).flat_map(|section| self.member.others_in_world().map(move |from| (section, from))).collect()
    }
}

/// The rank of the arena that a rank of the team is.
fn world_rank(member: &Member, rank: Rank) -> Rank {
    member.team().world_rank(rank).unwrap_or_else(|| panic!("{rank} is not of {:?}", member.team()))
}
