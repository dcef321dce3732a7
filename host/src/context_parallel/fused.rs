//! A pass in one launch: copy engines put the keys of each rank at the others, section of heads by section of heads, and the kernel waits for the flag of a section
//! before it first reads it.
//!
//! | flag | set by | says |
//! |---|---|---|
//! | READY of a section | the owner of keys, at each rank that reads them | the section is there |
//! | FREE | a rank, at each owner whose keys it reads | its kernel has read them: the next pass may put there |
//! | GIVEN | a rank, at each of these | its gradients of the owner's keys are in its slot there |
//!
//! Sections are of key heads, counted over all batches: the first tiles need the first sections alone. What a mask or a window hides is not sent ([`Pieces`]): under a causal mask, of two
//! ranks, the one with the lower number alone reads the second chunk of the other. Ranks that read nothing of each other have none of these flags for each other. Of packed sequences the device alone
//! knows where chunks lie: all keys of a rank are put as they lie there, at those of the ranks before, and the kernel finds them.
//!
//! Slots need no flag that says that they were read: a rank stores in another one's only when keys of that one have arrived, which puts them after it has read its slots.

use std::sync::{Arc, Mutex};

use super::arrays::Arrays;
use super::config::ContextParallelConfig;
use super::element::ContextElement;
use super::forward::{check_max_logit, check_sink};
use super::fused_gradients::FusedGradients;
use super::key_exchange::BoundPass;
use super::local::Local;
use super::memory::Scratch;
use super::numbers::Numbers;
use super::pieces::Pieces;
use super::plan::Direction;
use super::sections::{KEYS, Sections};
use crate::attention::{
    ArrivingAttention, ArrivingChunks, ArrivingPlaces, ArrivingSequences, ArrivingTensors, AttentionConfig, Inputs, Layout, Outputs, Target,
};
use crate::comm::{Member, Rank, WorldSize};
use crate::runtime::runtime::lock;
use crate::runtime::{Bound, Buffer, Error, Result, Stream};
use crate::sum_parts::LargestPart;
use crate::symmetric::{Arena, Flags, SymmetricBuffer};
use crate::tensor::Heads;
use crate::thd::{Packed, Partition, Share, StepKeys};
use oxtile_kernels::attention::{MOST_KEY_BLOCKS, PRESENT};
use oxtile_tile::launch::DeviceView;

/// The most streams that carry keys, of those of a device, which share a few hardware queues.
const OUTS: usize = 3;

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
    /// Which rank reads which piece of which other.
    pub(super) pieces: Pieces,
    /// Numbers of heads that all ranks have a share in, if there are any.
    pub(super) numbers: Option<Numbers<'static>>,
    /// The larger of numbers.
    largest: LargestPart,
    /// Keys and values of all ranks, in the order of tokens, or of packed sequences of one rank after another. Locked while a pass is enqueued.
    pub(super) gathered: Mutex<[SymmetricBuffer<T>; 2]>,
    /// The same memory, as kernels of this rank read it.
    pub(super) places: [Scratch<T>; 2],
    pub(super) sections: Sections,
    pub(super) ready: Flags,
    pub(super) free: Flags,
    /// The flag of each section and chunk.
    table: Buffer<u32>,
    /// The ranks that read keys of this one, in the order in which it puts: no two ranks begin with the same.
    turns: Vec<Rank>,
    /// The streams that carry keys to them by turns: what a copy and a flag take beside bytes is spent on all at once.
    outs: Vec<Stream>,
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
    if [attention.batches, attention.heads, attention.key_heads, attention.queries].contains(&0) {
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
    /// Takes memory of the arena, and loads the kernels of its passes: not when streams wait for other ranks already. All ranks of the arena take as much.
    pub fn new(
        stream: &Stream,
        arena: &Arena,
        member: &Member,
        config: ContextParallelConfig,
        share: Share,
        has_gradients: bool,
    ) -> Result<Self> {
        let (local, attention) = (Local::new(&config, share), config.attention);
        let device = stream.device();
        let kernel = ArrivingAttention::new(&device, attention)?;
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
        let pieces = Pieces::new(config, share, kernel.block());
        let gradients = if has_gradients { Some(FusedGradients::take(stream, arena, &config, share)?) } else { None };
        let numbers = match config.has_numbers() {
            true => Some(Numbers::by_puts(stream, arena, member, attention.heads)?),
            false => None,
        };
        let largest = LargestPart::new(&device.runtime())?;
        largest.prepare(&device)?;
        let (me, ranks) = (share.rank, share.world.get());
        let turns = (1..ranks).filter_map(|step| Rank::new((me.index() + ranks - step) % ranks, share.world));
        let turns: Vec<Rank> = turns.filter(|reader| pieces.reads(*reader, me)).collect();
        let outs = (0..turns.len().min(OUTS)).map(|_| device.urgent_stream()).collect::<Result<_>>()?;
        let (arena, member) = (arena.clone(), member.clone());
        let (gathered, is_open) = (Mutex::new(gathered), Mutex::default());
        Ok(Self {
            config,
            local,
            arena,
            member,
            kernel,
            gradients,
            arrays,
            pieces,
            numbers,
            largest,
            gathered,
            places,
            sections,
            ready,
            free,
            table,
            turns,
            outs,
            is_open,
        })
    }

    /// Says where the packed sequences of a batch lie, in stream order.
    pub fn set_sequences(&self, stream: &Stream, queries: Packed<DeviceView<'_, u32>>, keys: Packed<DeviceView<'_, u32>>) -> Result<()> {
        self.arrays.iter().try_for_each(|arrays| arrays.update(stream, queries, keys))
    }

    /// Before the first pass: nothing lies at the other ranks. Meets all ranks.
    pub fn open(&self, stream: &Stream) -> Result<()> {
        let mut is_open = lock(&self.is_open);
        if !*is_open {
            self.owners().try_for_each(|owner| self.free.open(stream, 0, owner))?;
            *is_open = true;
        }
        self.numbers.iter().try_for_each(|numbers| numbers.open(stream))
    }

    /// Before the first pass: fills the keys of other ranks with NaN, in stream order. Later ones may have put those of the next pass already; what was read is
    /// [discarded](SymmetricBuffer::discard) after each pass.
    pub fn spoil(&self, stream: &Stream) -> Result<()> {
        // Slots are written only after keys have arrived.
        self.gradients.iter().try_for_each(|gradients| gradients.spoil(stream))?;
        self.numbers.iter().try_for_each(|numbers| numbers.spoil(stream))?;
        let is_open = lock(&self.is_open);
        if *is_open { Ok(()) } else { self.places.iter().try_for_each(|place| place.spoil(stream)) }
    }

    /// The streams that carry keys.
    pub fn streams(&self) -> impl Iterator<Item = &Stream> {
        self.outs.iter()
    }

    /// The ranks that keys are put to, each with its stream.
    pub(super) fn turns(&self) -> impl Iterator<Item = (Rank, &Stream)> {
        self.turns.iter().copied().zip(self.outs.iter().cycle())
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
        self.key_bytes() + slots + self.numbers.as_ref().map_or(0, Numbers::bytes)
    }

    fn key_bytes(&self) -> u64 {
        self.places.iter().map(Scratch::bytes).sum()
    }

    /// Bytes that this rank receives, at most: keys, and gradients of its own ones in `f32`, of which a window leaves out blocks.
    pub fn received(&self, direction: Direction) -> u64 {
        let Share { rank, world, .. } = self.local.share;
        let others = || world.ranks().filter(|other| *other != rank);
        let pieces = u64::from(world.get()) * self.pieces.of(rank).len() as u64;
        let count = |some: usize| self.key_bytes() / pieces * some as u64;
        let keys = count(others().map(|owner| self.pieces.seen(owner, rank).count()).sum());
        match direction {
            Direction::Forward => keys,
            Direction::Backward => {
                keys + count(others().map(|reader| self.pieces.seen(rank, reader).count()).sum()) * 4 / size_of::<T>() as u64
            }
        }
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
            rows: self.pieces.rows(),
            own: self.pieces.chunks_of(self.local.share.rank).map(|(_, number)| number),
            section: self.sections.each,
            flags: self.table.view(),
            own_apart: self.pieces.own_apart,
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
            section: self.sections.each,
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

    /// Binds tensors of this rank, of the layout and the rows that the configuration says.
    pub fn bind_forward<'a>(&'a self, stream: &Stream, inputs: Inputs<'a, T>, outputs: Outputs<'a, T>) -> Result<BoundPass<'a, T>> {
        let (local, Inputs { q, k, v, sink, .. }) = (&self.local, inputs);
        let [of_q, of_k, of_v] = local.given.whole_inputs();
        let q = local.rows("ContextParallel, q", q, of_q)?;
        let own = [local.rows("ContextParallel, k", k, of_k)?, local.rows("ContextParallel, v", v, of_v)?];
        check_sink(&local.given, sink)?;
        let Outputs { out, log_sum_exp, mut max_logit } = outputs;
        check_max_logit(&local.given, max_logit.as_ref())?;
        let Target::Rounded(out) = out else {
            let why = "ranks merge their results themselves: give Outputs::new".to_owned();
            return Err(Error::Invalid { what: "ContextParallel, out", why });
        };
        let out = local.rows_mut("ContextParallel, out", out, local.given.whole_result())?;
        Error::check_length("ContextParallel, log_sum_exp", local.packed.queries * local.packed.heads, log_sum_exp.len())?;
        // Batches of sbhd are heads here, those of packed sequences rows.
        let AttentionConfig { layout, batches, .. } = self.config.attention;
        let gathered = self.all(&own, if layout == Layout::Bshd { batches } else { 1 })?;
        let of_rank = self.numbers.as_ref().filter(|_| max_logit.is_some()).map(|numbers| numbers.own.lend());
        let tensors = ArrivingTensors { q, own, gathered, out, log_sum_exp, sink, max_logit: of_rank, places: self.places() };
        let mut kernel = self.kernel.bind(stream, tensors)?;
        let share = local.share;
        Ok(BoundPass {
            own,
            launch: Box::new(move |stream, waits| kernel(stream, waits)),
            finish: Bound::new(move |stream| {
                let (Some(max_logit), Some(numbers)) = (&mut max_logit, &self.numbers) else { return Ok(()) };
                numbers.together(stream, share, |all| {
                    self.largest.run(stream, all, share.world.get(), self.config.attention.heads, max_logit.reborrow())
                })
            }),
        })
    }
}

/// The rank of the arena that a rank of the team is.
pub(super) fn world_rank(member: &Member, rank: Rank) -> Rank {
    member.team().world_rank(rank).unwrap_or_else(|| panic!("{rank} is not of {:?}", member.team()))
}
