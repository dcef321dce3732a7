//! Messages between ranks by loads and stores, ordered by flags alone: all-gather and all-to-all of few bytes in one launch a rank.
//!
//! Every rank has a *mailbox* that all ranks reach: two flags for each other rank and lane, READY and DONE, each in a line of its own that one
//! rank writes, and after them a slot for a piece of a message. A CUDA block serves one lane of one pair of ranks. Round by round it
//!
//! 1. waits for the peer's DONE of the round before: the slot over there is free;
//! 2. stores its piece there and signals READY;
//! 3. waits for the peer's READY, copies the piece out of its own slot and signals DONE.
//!
//! Flags are [epochs](oxtile_tile::flag) that go on from launch to launch, and each is waited for in the memory of the device that waits. Every lane does every
//! round, even with an empty piece, so that all flags stay equal. All blocks must be resident together on every rank, which `grid` ensures.
//!
//! A wait that is not answered ends its block, which writes the rank that did not answer to `verdict`: nothing that may be unfinished is read.
//!
//! Bound by latency: a round is two crossings of the link. Large messages are for copy engines.

use oxtile_tile::flag::{FlagStorage, Outcome, Patience};
use oxtile_tile::prelude::*;

const THREADS: u32 = 256;
/// Blocks that a multiprocessor surely holds.
const RESIDENT: u32 = 4;
/// Words of 64 bits from a flag to the next: a line of 128 bytes.
const LINE: u64 = 16;
/// The value of `verdict` after a notice or a flag was poisoned.
pub const ENDED: u32 = u32::MAX;

#[derive(SharedStorage)]
struct Shared {
    flag: FlagStorage,
}

/// How a mailbox is divided: `[READY | DONE]`, each `[lanes, ranks]` flags, then `[lanes, ranks]` slots.
#[derive(Clone, Copy, Debug)]
pub struct Mailbox {
    /// How many ranks there are.
    pub ranks: u32,
    /// How many blocks serve a pair.
    pub lanes: u32,
    /// Words of 32 bits of a slot: a multiple of 4.
    pub slot_words: u32,
}

impl Mailbox {
    /// Words of 64 bits that it needs.
    pub const fn len(self) -> u64 {
        self.flags() + self.lines() * (self.slot_words as u64).div_ceil(2)
    }

    /// Whether it has no lane, or no rank.
    pub const fn is_empty(self) -> bool {
        self.lines() == 0
    }

    /// Epochs that a message of so many words takes.
    pub const fn rounds(self, words: u32) -> u32 {
        words.div_ceil(self.slot_words).div_ceil(self.lanes)
    }

    const fn lines(self) -> u64 {
        self.lanes as u64 * self.ranks as u64
    }

    /// Words of 64 bits of all flags.
    const fn flags(self) -> u64 {
        2 * self.lines() * LINE
    }

    const fn line(self, lane: u32, source: u32) -> u64 {
        lane as u64 * self.ranks as u64 + source as u64
    }

    const fn ready(self, lane: u32, source: u32) -> u64 {
        self.line(lane, source) * LINE
    }

    const fn done(self, lane: u32, source: u32) -> u64 {
        (self.lines() + self.line(lane, source)) * LINE
    }
}

/// The mailboxes of all ranks.
#[derive(Clone, Copy, Parameter)]
pub struct Mailboxes {
    /// The address of each rank's [`Mailbox`] as this device reaches it. Flags are 0 before the first launch.
    pub addresses: Global<u64>,
    /// How many blocks serve a pair of ranks.
    pub lanes: u32,
    /// Words of a slot: a multiple of 4.
    pub slot_words: u32,
}

/// The messages that a launch sends and receives.
#[derive(Clone, Copy, Parameter)]
pub struct Messages {
    /// What is sent: `[words]` to all ranks, or `[ranks, words]` if `spread`, whose part `p` is for rank `p`.
    pub input: Global<u32>,
    /// What came from each rank, `[ranks, words]`.
    pub output: GlobalMut<u32>,
    /// Words of a message.
    pub words: u32,
    /// Whether each rank gets a part of its own (all-to-all), or all get the same (all-gather).
    pub spread: bool,
}

/// The ranks of one device that a launch plays.
#[derive(Clone, Copy, Parameter)]
pub struct Players {
    /// One word for each. It stays 0 if all went well, else it is raised to 1 plus a rank that did not answer, or to [`ENDED`] where the
    /// notice or a flag is poisoned.
    pub verdict: GlobalMut<u32>,
    /// The first; the others are those after it.
    pub first: u32,
}

/// The rounds of a launch.
#[derive(Clone, Copy, Parameter)]
pub struct Rounds {
    /// How many: [`Mailbox::rounds`].
    pub count: u32,
    /// The epoch of the first: 1 plus the rounds of all launches before.
    pub epoch: u64,
}

/// How long a block waits for another rank.
#[derive(Clone, Copy, Parameter)]
pub struct Deadline {
    /// One word, which ends the wait when it is poisoned.
    pub notice: GlobalMut<u64>,
    /// Nanoseconds of each wait.
    pub patience: u64,
}

/// A rank's mailbox, as this rank reaches it.
#[derive(Clone, Copy)]
struct Reached {
    layout: Mailbox,
    address: u64,
}

impl Reached {
    #[inline(always)]
    fn flags(self) -> GlobalMut<u64> {
        // SAFETY: the caller that launched the kernel vouches for a mailbox of this layout at each address of the table (`exchange`).
        unsafe { GlobalMut::from_raw_parts(self.address, self.layout.flags()) }
    }

    #[inline(always)]
    fn slot(self, lane: u32, source: u32) -> GlobalMut<u32> {
        let bytes = self.layout.flags() * 8 + self.layout.line(lane, source) * u64::from(self.layout.slot_words) * 4;
        // SAFETY: as `flags`; slots follow the flags.
        unsafe { GlobalMut::from_raw_parts(self.address + bytes, u64::from(self.layout.slot_words)) }
    }
}

/// Sends a message to every rank, its own too, and writes what came from each. The rounds are the same on all ranks. What came is garbage unless
/// the verdict is 0.
///
/// One launch may play several ranks of one device, which each have an instance of the messages. The host does not keep the memory that
/// `mailboxes` points to: the caller of the launch keeps it, and orders other uses of it.
#[kernel(threads = THREADS, grid = grid, shared = Shared, min_blocks = RESIDENT)]
pub fn exchange(mailboxes: Mailboxes, messages: Messages, players: Players, rounds: Rounds, deadline: Deadline) {
    let Mailboxes { addresses, lanes, slot_words } = mailboxes;
    let Messages { input, output, words, spread } = messages;
    let Players { verdict, first } = players;
    let [lane, peer, player] = block::index();
    let layout = Mailbox { ranks: block::count()[1], lanes, slot_words };
    let me = first + player;
    let reach = |rank: u32| Reached { layout, address: addresses.load(u64::from(rank)) };
    let (mine, theirs) = (reach(me), reach(peer));
    let patience = Patience::new(deadline.notice, deadline.patience);
    let storage = Shared::claim().flag;
    let (parts, part) = if spread { (layout.ranks, peer) } else { (1, 0) };
    let sent = u64::from(player) * u64::from(parts) + u64::from(part);
    let received = u64::from(player) * u64::from(layout.ranks) + u64::from(peer);
    let mut round = 0;
    while round < rounds.count {
        let now = rounds.epoch + u64::from(round);
        let start = (round * lanes + lane) * slot_words;
        let count = slot_words.min(words.saturating_sub(start));
        let (from, to) = (sent * u64::from(words) + u64::from(start), received * u64::from(words) + u64::from(start));
        let free = patience.wait_block(&mine.flags(), layout.done(lane, peer), now - 1, storage);
        if free != Outcome::Reached {
            return judge(&verdict, player, peer, free);
        }
        let slot = theirs.slot(lane, me);
        copy(count, input.start() + from * 4, |i| input.load_vector(from + i), |i| input.load(from + i), &slot, 0);
        block::sync();
        if thread::index() == 0 {
            flag::signal(&theirs.flags(), layout.ready(lane, me), now);
        }
        let ready = patience.wait_block(&mine.flags(), layout.ready(lane, peer), now, storage);
        if ready != Outcome::Reached {
            return judge(&verdict, player, peer, ready);
        }
        let slot = mine.slot(lane, peer);
        copy(count, slot.start(), |i| slot.load_vector(i), |i| slot.load(i), &output, to);
        block::sync();
        if thread::index() == 0 {
            flag::signal(&theirs.flags(), layout.done(lane, me), now);
        }
        round += 1;
    }
}

/// Copies `count` words to `target` from its element `to` on, by the block: vectors where both sides are aligned for them.
#[inline(always)]
fn copy(count: u32, source: u64, vector: impl Fn(u64) -> Vector<u32>, word: impl Fn(u64) -> u32, target: &GlobalMut<u32>, to: u64) {
    let vectors = if (source | (target.start() + to * 4)).is_multiple_of(16) { count / 4 } else { 0 };
    let mut i = thread::index();
    while i < vectors {
        let at = u64::from(i) * 4;
        target.store_vector(to + at, vector(at));
        i += THREADS;
    }
    let mut i = vectors * 4 + thread::index();
    while i < count {
        target.store(to + u64::from(i), word(i.into()));
        i += THREADS;
    }
}

#[inline(always)]
fn judge(verdict: &GlobalMut<u32>, player: u32, peer: u32, outcome: Outcome) {
    if thread::index() == 0 {
        atomic::max_u32(verdict, player.into(), if outcome == Outcome::Late { 1 + peer } else { ENDED });
    }
}

fn grid(args: &ExchangeArgs<'_>, device: &DeviceLimits) -> Result<Grid, LaunchError> {
    let ExchangeArgs { mailboxes: MailboxesArgument { addresses, lanes, slot_words }, messages, players, .. } = args;
    let (lanes, slot_words) = (*lanes, *slot_words);
    let (ranks, played, words) = (addresses.len(), players.verdict.len(), u64::from(messages.words));
    LaunchError::check_length("deadline.notice", 1, args.deadline.notice.len())?;
    LaunchError::check_multiple("mailboxes.slot_words", 4, slot_words.into())?;
    LaunchError::check_length("mailboxes.lanes", lanes.max(1).into(), lanes.into())?;
    LaunchError::check_length("mailboxes.slot_words", slot_words.max(4).into(), slot_words.into())?;
    let mailbox = Mailbox { ranks: ranks as u32, lanes, slot_words };
    LaunchError::check_length("rounds.count", mailbox.rounds(messages.words).into(), args.rounds.count.into())?;
    let parts = if messages.spread { ranks } else { 1 };
    LaunchError::check_length("messages.input", played * parts * words, messages.input.len())?;
    LaunchError::check_length("messages.output", played * ranks * words, messages.output.len())?;
    LaunchError::check_limit("players.first", u64::from(players.first) + played, ranks)?;
    // Blocks wait for each other: none may be left for later.
    LaunchError::check_limit("mailboxes.lanes", u64::from(lanes) * ranks * played, u64::from(device.multiprocessors * RESIDENT))?;
    // The index past the last word must not overflow its type.
    LaunchError::check_limit("messages.words", words + 2 * u64::from(lanes) * u64::from(slot_words), u32::MAX.into())?;
    Ok(Grid::xyz(lanes, ranks as u32, played as u32))
}
