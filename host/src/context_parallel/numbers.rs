//! Numbers of all ranks, brought together in the order of ranks: the largest scores of heads, gradients of sinks, largest magnitudes.
//!
//! By messages they are gathered. By symmetric memory each rank puts its own at every other one, with two flags for each pair of ranks, which the one that waits resets:
//!
//! 1. a rank takes FREE of each other rank, puts its numbers there, and sets THERE;
//! 2. it takes THERE of all, and reads;
//! 3. it sets FREE at all.

use std::sync::Mutex;

use oxtile_tile::launch::DeviceView;

use super::launches::reader_of;
use super::memory::{Place, Scratch};
use super::messages::Messages;
use crate::comm::{Member, Rank, WorldSize};
use crate::runtime::runtime::lock;
use crate::runtime::{Result, Stream};
use crate::symmetric::{Arena, Flags, Pitched, Rows};
use crate::thd::Share;

/// Some numbers of each rank.
pub(super) struct Numbers<'t> {
    way: Way<'t>,
    /// This rank's, which are written before they are brought together.
    pub own: Scratch<f32>,
    /// Those of one rank after another.
    all: Place<f32>,
}

/// By what they travel.
enum Way<'t> {
    Messages(&'t dyn Messages),
    Puts { arena: Arena, member: Member, flags: Flags, is_open: Mutex<bool> },
}

const FREE: u32 = 0;
const THERE: u32 = 1;
const FLAGS: u32 = 2;

/// What errors and buffers name.
const WHAT: &str = "numbers of context parallelism";

impl<'t> Numbers<'t> {
    /// So many of each rank, by messages.
    pub fn by_messages(stream: &Stream, messages: &'t dyn Messages, len: u64) -> Result<Self> {
        let all = Place::new(stream, None, WHAT, len * u64::from(messages.world().get()))?;
        Ok(Self { way: Way::Messages(messages), own: Scratch::new(stream, WHAT, len)?, all })
    }

    /// The same by symmetric memory, of which all ranks take as much.
    pub fn by_puts(stream: &Stream, arena: &Arena, member: &Member, len: u64) -> Result<Self> {
        let all = Place::new(stream, Some(arena), WHAT, len * u64::from(member.team().size().get()))?;
        let way = Way::Puts { arena: arena.clone(), member: member.clone(), flags: arena.flags(WHAT, FLAGS)?, is_open: Mutex::default() };
        Ok(Self { way, own: Scratch::new(stream, WHAT, len)?, all })
    }

    /// Bytes of the arena that so many numbers of each rank take.
    pub fn arena_bytes(world: WorldSize, len: u64) -> u64 {
        (u64::from(world.get()) * len * size_of::<f32>() as u64).next_multiple_of(256)
    }

    /// Before the first pass: nothing has been put so far. Meets the ranks whose memory is reached.
    pub fn open(&self, stream: &Stream) -> Result<()> {
        let Way::Puts { member, flags, is_open, .. } = &self.way else { return Ok(()) };
        let mut is_open = lock(is_open);
        if !*is_open {
            member.others_in_world().into_iter().try_for_each(|other| flags.open(stream, FREE, other))?;
            *is_open = true;
        }
        Ok(())
    }

    /// Brings the numbers of all ranks here, and enqueues what `reads` them, one rank after another. All ranks call it.
    pub fn together(&self, stream: &Stream, share: Share, reads: impl FnOnce(DeviceView<'_, f32>) -> Result<()>) -> Result<()> {
        match &self.way {
            Way::Messages(messages) => {
                messages.gather_numbers(stream, self.own.view(), self.all.lend())?;
                reads(self.all.view())
            }
            Way::Puts { arena, member, flags, .. } => {
                let world_rank =
                    |rank: Rank| member.team().world_rank(rank).unwrap_or_else(|| panic!("{rank} is not of {:?}", member.team()));
                let others = || (1..share.world.get()).map(|step| world_rank(reader_of(share, step)));
                let len = self.own.len();
                let at = |start| Pitched { start, pitch: len };
                let rows = Rows { count: 1, width: len, from: at(0), to: at(u64::from(share.rank.index()) * len) };
                let symmetric = self.all.symmetric().expect("numbers that are put are of the arena");
                others().try_fold(arena.batch(stream), |batch, to| batch.take_back(flags, FREE, to))?.enqueue()?;
                for to in others() {
                    symmetric.put_rows_each(stream, self.own.view(), to, &[rows])?;
                }
                others().try_fold(arena.batch(stream), |batch, to| batch.set(flags, THERE, to))?.enqueue()?;
                Rows::copy_all(stream, WHAT, self.own.view(), self.all.lend(), &[rows])?;
                others().try_fold(arena.batch(stream), |batch, from| batch.take_back(flags, THERE, from))?.enqueue()?;
                reads(self.all.view())?;
                others().try_fold(arena.batch(stream), |batch, to| batch.set(flags, FREE, to))?.enqueue()
            }
        }
    }

    /// Device memory.
    pub fn bytes(&self) -> u64 {
        self.own.bytes() + self.all.bytes()
    }

    /// Fills with NaN what no other rank may write meanwhile.
    pub fn spoil(&self, stream: &Stream) -> Result<()> {
        self.own.spoil(stream)?;
        match self.way {
            Way::Messages(_) => self.all.spoil(stream),
            Way::Puts { .. } => Ok(()),
        }
    }
}
