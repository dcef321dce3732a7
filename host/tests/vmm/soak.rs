//! Rounds of put, signal and check, of random sizes and with random delays.
//!
//! In each batch of rounds a rank puts to one other and is put to by one other; all pairs take turns. A round is a put of a random piece of the
//! sender's words to a random place of the round's slot, and a signal after it. The receiver waits for the signal on its stream and copies the
//! piece away at once: were the signal there before the data, the copy would have what was in the slot before, of another piece. The host
//! compares every word.

use std::fmt;
use std::time::{Duration, Instant};

use oxtile::comm::{ArenaRank, HostRank, Meeting, Rank, WorldSize};
use oxtile::symmetric::{Arena, ArenaOptions, BackendName, Epoch};
use oxtile::{Buffer, Error, PinnedBuffer, Result};

use crate::watch::{doing, settle};

/// Rounds between two looks of the host.
const BATCH: u64 = 128;
/// Batches between two questions whether to go on.
const BETWEEN: u64 = 32;
/// What a round puts at most, in words: 64 KiB.
const SLOT: u64 = 16 << 10;
const SOURCE: u64 = 256 << 10;
/// How long a batch may take.
const DEADLINE: Duration = Duration::from_secs(20);

/// How long it goes on.
#[derive(Clone, Copy, Debug)]
pub enum Length {
    Batches(u64),
    Time(Duration),
}

impl Length {
    /// `OXTILE_SOAK_SECONDS`, or a few batches.
    pub fn from_variables() -> Self {
        let seconds = std::env::var("OXTILE_SOAK_SECONDS").ok().and_then(|seconds| seconds.parse().ok());
        seconds.map_or(Self::Batches(2 * BETWEEN), |seconds| Self::Time(Duration::from_secs(seconds)))
    }

    /// What it takes at the least.
    pub fn least(self) -> Duration {
        if let Self::Time(time) = self { time } else { Duration::ZERO }
    }
}

/// What a rank has checked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Soaked {
    pub rank: Rank,
    pub world: WorldSize,
    pub rounds: u64,
    pub words: u64,
    pub took: Duration,
}

impl fmt::Display for Soaked {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { rank, world, rounds, words, took } = self;
        write!(f, "soak: {rank} of {world}: {rounds} rounds and {words} words checked in {took:.1?}, 0 errors")
    }
}

/// One round, as sender and receiver draw it.
struct Round {
    /// Of the sender's words.
    from: u64,
    /// In the slot.
    at: u64,
    len: u64,
    /// The sender's stream has something else to do first.
    is_delayed: bool,
    /// How long the sender's host waits first.
    pause: Duration,
}

impl Round {
    fn draw(sender: Rank, number: u64) -> Self {
        let draw = |what: u64, below: u64| hash(u64::from(sender.index()) << 48 | number << 3 | what) % below;
        let len = 1 + draw(0, 1 << draw(1, 15));
        let pause = if draw(5, 64) == 0 { draw(6, 100) } else { 0 };
        Self {
            from: draw(2, SOURCE - len),
            at: draw(3, SLOT - len + 1),
            len,
            is_delayed: draw(4, 64) == 0,
            pause: Duration::from_micros(pause),
        }
    }
}

/// The output function of SplitMix64 (Steele, Lea and Flood, "Fast Splittable Pseudorandom Number Generators", 2014).
fn hash(value: u64) -> u64 {
    let value = value.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let value = (value ^ value >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let value = (value ^ value >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    value ^ value >> 31
}

/// The word that a rank has at a place of its source.
fn word(sender: Rank, at: u64) -> u32 {
    hash(u64::from(sender.index()) << 32 | at) as u32
}

/// Puts, and checks what is put, until the time is over.
///
/// # Errors
/// The first word that is wrong, with its round; a batch that does not end.
pub fn soak(rank: HostRank, backend: BackendName, length: Length) -> Result<Soaked> {
    let (me, world) = (rank.rank(), rank.world());
    let shifted = |by: u64| Rank::new(((u64::from(me.index()) + by) % u64::from(world.get())) as u32, world).expect("of this world");
    let (send, receive) = (rank.device().stream()?, rank.device().stream()?);
    let source: Vec<u32> = (0..SOURCE).map(|at| word(me, at)).collect();
    let source = Buffer::from_slice(&send, &source)?;
    let mut scratch = Buffer::<u32>::zeros(&send, SOURCE)?;
    let mut host = PinnedBuffer::<u32>::zeros(&receive, (BATCH * SLOT) as usize)?;
    let options = ArenaOptions { backend, bytes: 4 * BATCH * SLOT, share_devices: true, deadline: DEADLINE, ..ArenaOptions::default() };
    let arena = Arena::open(&rank, options)?;
    let (slots, ready, free) = (arena.buffer::<u32>(BATCH * SLOT)?, arena.channel()?, arena.channel()?);
    let mut inbox = Buffer::<u32>::zeros(&receive, BATCH * SLOT)?;
    let (meeting, begin) = (rank.next_meeting(), Instant::now());
    let mut soaked = Soaked { rank: me, world, rounds: 0, words: 0, took: Duration::ZERO };
    for batch in 0.. {
        let is_over = match length {
            Length::Batches(count) => batch >= count,
            Length::Time(time) => batch % BETWEEN == 0 && !goes_on(&meeting, me, batch, begin.elapsed() < time)?,
        };
        if is_over {
            break;
        }
        doing(me, format!("batch {batch}"));
        // Where it puts to, and where what it gets is from, in this batch and the next.
        let others = u64::from(world.get()) - 1;
        let shift = |batch: u64| 1 + batch % others;
        let (to, from) = (shifted(shift(batch)), shifted(u64::from(world.get()) - shift(batch)));
        let next = shifted(u64::from(world.get()) - shift(batch + 1));
        arena.wait(&send, free, to, Epoch::ZERO.later(batch))?;
        for number in batch * BATCH..(batch + 1) * BATCH {
            let (slot, epoch) = (number % BATCH * SLOT, Epoch::ZERO.later(number + 1));
            let round = Round::draw(me, number);
            if round.is_delayed {
                scratch.copy_from(&send, &source)?;
            }
            pause(round.pause);
            slots.peer(to)?.put(&send, &source, round.from..round.from + round.len, slot + round.at)?;
            arena.signal(&send, ready, to, epoch)?;
            let round = Round::draw(from, number);
            arena.wait(&receive, ready, from, epoch)?;
            let piece = slot + round.at..slot + round.at + round.len;
            inbox = slots.peer(me)?.get(&receive, piece, inbox, slot)?.then(&receive)?;
        }
        inbox.copy_to_pinned(&receive, &mut host)?;
        settle(&receive)?;
        // What comes next may overwrite the slots: all of this batch is in the host's memory.
        arena.signal(&receive, free, next, Epoch::ZERO.later(batch + 1))?;
        let words = host.as_slice()?;
        for number in batch * BATCH..(batch + 1) * BATCH {
            let (slot, round) = ((number % BATCH * SLOT) as usize, Round::draw(from, number));
            let wrong = (0..round.len).find(|i| words[slot + *i as usize] != word(from, round.from + i));
            if let Some(i) = wrong {
                let why = format!("round {number} from {from} to {me}: word {i} of {} is {:#x}", round.len, words[slot + i as usize]);
                return Err(Error::Invalid { what: "soak", why });
            }
            soaked.words += round.len;
        }
        soaked.rounds += BATCH;
    }
    soaked.took = begin.elapsed();
    doing(me, "closing");
    drop(slots);
    arena.close()?.finish()?;
    rank.close()?;
    Ok(soaked)
}

/// Rank 0 says to all what its clock says.
pub fn goes_on(meeting: &Meeting, me: Rank, batch: u64, has_time: bool) -> Result<bool> {
    let what = format!("batch {batch}");
    if me == Rank::ZERO {
        meeting.publish(&what, vec![u8::from(has_time)])?;
    }
    Ok(meeting.read(Rank::ZERO, &what, DEADLINE)? == [1])
}

fn pause(time: Duration) {
    let begin = Instant::now();
    while begin.elapsed() < time {
        std::hint::spin_loop();
    }
}

/// The same on virtual GPUs.
pub fn on_virtual_gpus(world: u32) {
    let runtime = oxtile::Runtime::emulated_fast(world).expect("virtual GPUs");
    let devices: Vec<_> = (0..world).map(|index| runtime.device(index).expect("a device")).collect();
    let ranks = HostRank::threads(&devices).expect("ranks");
    std::thread::scope(|scope| {
        let rank = |rank| scope.spawn(|| soak(rank, BackendName::Emulated, Length::Batches(2)));
        let threads: Vec<_> = ranks.into_iter().map(rank).collect();
        for thread in threads {
            let soaked = thread.join().expect("no panic").expect("no error");
            assert!(soaked.rounds == 2 * BATCH && soaked.words > soaked.rounds);
        }
    });
}
