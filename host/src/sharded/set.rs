//! The shards of a rank's weights, in memory that the other ranks read.

use std::fmt;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

use oxtile_tile::launch::DeviceView;
use oxtile_tile::num::bf16;

use super::amaxes::Amaxes;
use super::format::{Parts, WeightFormat};
use super::layout::{Entry, Layout, aligned, text};
use super::memory::{lend, write_access};
use super::split::EqualShards;
use super::step::{Readable, Updating};
use super::weight::{Weight, WeightId};
use crate::comm::{Member, Rank, Team};
use crate::quantize::Direction;
use crate::runtime::module::{note, zero};
use crate::runtime::{Buffer, Error, Result, Stream};
use crate::symmetric::{Arena, Flags, SymmetricBuffer};

/// Set by an owner: its shards may be read.
pub(super) const READY: u32 = 0;
/// Set by a reader: it reads them no more.
pub(super) const DONE: u32 = 1;
/// Set by a rank that has put its amaxes.
pub(super) const AMAXES: u32 = 2;
/// How many flags a set takes.
pub(super) const FLAGS: u32 = 3;

/// The shards of weights in the format `F`, one shard of each weight a rank of a team, and this rank's values from which they are cast.
///
/// A step has two halves. In the first, [`update`](Self::update), the owner writes its rows, and [publishes](Updating::publish) them. In the second, [`Published`](super::Published), no shard
/// changes, and every rank [pulls](super::Published::forward) whole weights as it needs them, as often as it likes: no rank takes part in another's pull. The types keep the order:
/// nothing can be pulled while it is written, or before it was cast and all ranks have published.
pub struct ShardSet<F: WeightFormat> {
    pub(super) id: u64,
    pub(super) arena: Arena,
    pub(super) member: Member,
    pub(super) entries: Vec<Entry<F>>,
    /// The planes of all shards of this rank; on all ranks at the same places.
    pub(super) planes: SymmetricBuffer<u8>,
    /// The values of this rank's rows; of a format that is not cast they are the planes.
    masters: Option<Buffer<bf16>>,
    casts: F::Casts,
    amax: Option<Amaxes>,
    /// For each matrix its amax, agreed on by all ranks.
    amaxes: Buffer<f32>,
    /// For each matrix what columns need of it, or all directions: see [`Parts`].
    numbers: Buffer<f32>,
    pub(super) flags: Flags,
    /// What ranks compare.
    text: String,
    compared: OnceLock<()>,
    pub(super) readable: Arc<Readable>,
}

impl<F: WeightFormat> ShardSet<F> {
    /// Takes memory of the arena for the shards of these weights, device memory for this rank's values, and loads the casts. The values are zeros at first. Collective: every
    /// member of the team makes the same set, in one order with all else that is taken from the arena; ranks outside of the team take the same, too
    /// ([`take_part`](Self::take_part)).
    ///
    /// # Errors
    /// [`Error::Invalid`] for a weight that the format cannot hold, no weights, or a member of another world; as [`Arena::buffer`], [`Arena::flags`] and
    /// [`Buffer::uninitialised`].
    pub fn new(stream: &Stream, arena: &Arena, member: &Member, weights: Vec<Weight>) -> Result<Self> {
        static SETS: AtomicU64 = AtomicU64::new(0);
        arena.check_member("ShardSet::new", member)?;
        // Before anything is taken: the other ranks take as much.
        arena.check_stream(stream)?;
        let layout = Layout::<F>::new(&weights, member.team())?;
        let planes = arena.buffer::<u8>(layout.bytes)?;
        let parts = arena.buffer::<f32>(layout.amaxes)?;
        let flags = arena.flags("shards of weights", FLAGS)?;
        let text = text::<F>(&weights, member.team());
        let matrices = weights.iter().map(|weight| weight.experts).sum();
        let (amaxes, numbers) = (Buffer::zeros(stream, matrices)?, Buffer::zeros(stream, matrices)?);
        let masters = if F::RULE.has_directions() {
            Some(Buffer::zeros(stream, layout.master_bytes(&weights, member.rank()) / 2)?)
        } else {
            zero(stream, lend(planes.local()))?;
            None
        };
        let mut set = Self {
            id: SETS.fetch_add(1, Ordering::Relaxed),
            arena: arena.clone(),
            member: member.clone(),
            entries: Vec::new(),
            planes,
            masters,
            casts: F::load(stream)?,
            amax: None,
            amaxes,
            numbers,
            flags,
            text,
            compared: OnceLock::new(),
            readable: Arc::default(),
        };
        let (mut first_matrix, mut at) = (0, 0);
        for ((weight, shards), starts) in weights.into_iter().zip(layout.shards).zip(layout.starts) {
            let experts = weight.experts;
            let entry = set.entry(Entry { weight, shards, starts, first_matrix, casts: Vec::new(), masters: Vec::new() }, &mut at);
            set.entries.push(entry);
            first_matrix += experts;
        }
        if F::RULE.has_amax {
            set.amax = Some(Amaxes::new(stream, &set.values().collect::<Vec<_>>(), parts)?);
        }
        // Told last: a rank that has compared what all made finds that none loads kernels or allocates any more.
        arena.note(&name(&set.flags), &set.text)?;
        Ok(set)
    }

    /// Names the memory of a weight; its values begin at byte `at` of the masters.
    fn entry(&self, entry: Entry<F>, at: &mut u64) -> Entry<F> {
        let rows = entry.shards.padded_range(self.member.rank());
        let (rows, columns) = (rows.end - rows.start, entry.weight.columns);
        let (mut casts, mut masters) = (Vec::new(), Vec::new());
        for expert in 0..entry.weight.experts {
            let tensor = |direction: Direction| {
                let starts = entry.starts(direction)?;
                let [codes, scales] = entry.plane(rows, direction).arrays().map(|array| array.bytes());
                let part = |start, bytes| {
                    // SAFETY: the arrays of planes are apart, one a matrix and direction; a matrix of codes begins where the formats' kernels take it, or they refuse it.
                    unsafe { self.planes.local().window::<u8>(start + expert * bytes, bytes) }
                };
                let parts = Parts {
                    codes: part(starts[0], codes),
                    scales: part(starts[1], scales),
                    number: self.number(&entry, expert, direction),
                };
                Some(F::tensor(&parts, [rows, columns], direction))
            };
            if let Some(by_rows) = tensor(Direction::Rows) {
                casts.push(F::shard(by_rows, tensor(Direction::Columns)));
            }
            let elements = rows * columns;
            let start = entry.starts[0].map_or(0, |starts| starts[0] + expert * elements * 2);
            let (memory, first) = match &self.masters {
                Some(all) => (all.memory(), *at),
                None => (self.planes.local().memory(), start),
            };
            let window = memory.window(memory.address + first, elements * 2);
            // SAFETY: values of matrices are apart; elements of two bytes at even addresses.
            masters.push(unsafe { Buffer::of(window, elements) });
            *at += aligned(elements * 2);
        }
        Entry { casts, masters, ..entry }
    }

    /// The number that belongs to a matrix in a direction.
    pub(super) fn number(&self, entry: &Entry<F>, expert: u64, direction: Direction) -> Buffer<f32> {
        let all = if F::RULE.number_is_amax && direction == Direction::Rows { &self.amaxes } else { &self.numbers };
        // SAFETY: a number a matrix, which the casts write and others read, on streams that the runtime orders.
        unsafe { all.window(4 * (entry.first_matrix + expert), 1) }
    }

    /// This rank's values of all matrices.
    fn values(&self) -> impl Iterator<Item = DeviceView<'_, bf16>> {
        self.entries.iter().flat_map(|entry| entry.masters.iter().map(Buffer::view))
    }

    /// Takes what [`new`](Self::new) takes from the arena, on a rank outside of the team.
    ///
    /// # Errors
    /// As [`new`](Self::new).
    pub fn take_part(arena: &Arena, team: &Team, weights: &[Weight]) -> Result<()> {
        let layout = Layout::<F>::new(weights, team)?;
        arena.buffer::<u8>(layout.bytes)?;
        arena.buffer::<f32>(layout.amaxes)?;
        arena.flags("shards of weights", FLAGS).map(drop)
    }

    /// The bytes of an arena that [`new`](Self::new) takes, beside 3 channels.
    ///
    /// # Errors
    /// As [`new`](Self::new).
    pub fn arena_bytes(team: &Team, weights: &[Weight]) -> Result<u64> {
        Ok(Layout::<F>::new(weights, team)?.arena_bytes())
    }

    /// The weights, in the order of their numbers.
    pub fn weights(&self) -> impl ExactSizeIterator<Item = (WeightId, &Weight)> {
        self.entries.iter().enumerate().map(|(i, entry)| (WeightId::new(i, &entry.weight), &entry.weight))
    }

    /// The number of the weight with a name.
    pub fn find(&self, name: &str) -> Option<WeightId> {
        self.weights().find(|(_, weight)| weight.name == name).map(|(id, _)| id)
    }

    /// How the rows of a weight are divided.
    ///
    /// # Errors
    /// [`Error::Invalid`] for the number of a weight of another set.
    pub fn shards(&self, weight: WeightId) -> Result<EqualShards<F>> {
        Ok(self.at("ShardSet::shards", weight)?.shards)
    }

    /// The rows of a weight that are this rank's.
    ///
    /// # Errors
    /// As [`shards`](Self::shards).
    pub fn own_rows(&self, weight: WeightId) -> Result<Range<u64>> {
        Ok(self.shards(weight)?.range(self.member.rank()))
    }

    /// The member whose shards they are.
    pub fn member(&self) -> &Member {
        &self.member
    }

    pub(super) fn at(&self, what: &'static str, weight: WeightId) -> Result<&Entry<F>> {
        weight.find(&self.entries, |entry| &entry.weight).map_err(|why| Error::Invalid { what, why })
    }

    /// Begins the first half of a step: later work of the stream may write this rank's values, once no rank reads the shards of the step before. Does not wait on the host. The
    /// first call meets all ranks and compares what they made.
    ///
    /// # Errors
    /// [`Error::Mismatch`] where another rank made another set; ranks that do not come; what ended the arena; an error of the driver.
    pub fn update<'s>(&'s mut self, stream: &Stream) -> Result<Updating<'s, F>> {
        self.arena.check_stream(stream)?;
        self.compare()?;
        let begun = self.begin(stream);
        self.arena.or_abort(stream, "ShardSet::update", begun)?;
        // What is captured is not done.
        if !stream.is_capturing() {
            self.readable.set(false);
        }
        let capture = stream.0.capture().map(|capture| capture.number);
        Ok(Updating { set: self, stream: stream.clone(), capture })
    }

    /// Gives back what was pulled in the step before, and waits for the other ranks to do so.
    fn begin(&self, stream: &Stream) -> Result<()> {
        // After all that was pulled, by any chain or graph: pulls are reads of the planes.
        note(stream, &[write_access(self.planes.local())])?;
        let batch = self.others().try_fold(self.arena.batch(stream), |batch, owner| batch.set(&self.flags, DONE, owner))?;
        self.others().try_fold(batch, |batch, reader| batch.take_back(&self.flags, DONE, reader))?.enqueue()
    }

    /// Agrees with the other ranks on the amaxes of all matrices.
    pub(super) fn agree(&mut self, stream: &Stream) -> Result<()> {
        let Self { amax: Some(amax), arena, member, flags, entries, amaxes, numbers, .. } = self else { return Ok(()) };
        let values: Vec<_> = entries.iter().flat_map(|entry| entry.masters.iter().map(Buffer::view)).collect();
        amax.agree(stream, (arena, member, flags), &values, amaxes)?;
        numbers.copy_from(stream, amaxes)
    }

    /// Casts this rank's values.
    pub(super) fn cast(&mut self, stream: &Stream) -> Result<()> {
        let Self { entries, casts, amaxes, .. } = self;
        for Entry { casts: targets, masters, first_matrix, .. } in entries {
            for ((target, master), matrix) in targets.iter_mut().zip(masters).zip(*first_matrix..) {
                F::cast(casts, stream, master.view(), amaxes.view().slice(matrix, matrix + 1), target)?;
            }
        }
        Ok(())
    }

    /// Tells the other ranks that the shards may be read, and waits for all to do so.
    pub(super) fn tell(&self, stream: &Stream) -> Result<()> {
        // The values of a format that is not cast are the planes, and were written on other streams maybe.
        note(stream, &[write_access(self.planes.local())])?;
        let batch = self.others().try_fold(self.arena.batch(stream), |batch, reader| batch.set(&self.flags, READY, reader))?;
        self.others().try_fold(batch, |batch, owner| batch.take_back(&self.flags, READY, owner))?.enqueue()
    }

    /// Compares what the ranks made, once.
    fn compare(&self) -> Result<()> {
        if self.compared.get().is_none() {
            self.arena.compare_notes(&name(&self.flags), self.flags.number() as u64, &self.text, self.others())?;
            let _ = self.compared.set(());
        }
        Ok(())
    }

    /// The other members' ranks in the world.
    pub(super) fn others(&self) -> impl Iterator<Item = Rank> + '_ {
        self.member.others_in_world()
    }
}

/// The name of the ranks' texts.
fn name(flags: &Flags) -> String {
    format!("shards {}", flags.number())
}

impl<F: WeightFormat> fmt::Debug for ShardSet<F> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ShardSet").field("set", &self.text).field("member", &self.member).finish_non_exhaustive()
    }
}
