//! Chunks that arrive while a kernel runs: flags of 0 and 1 that streams and kernels set for one another.
//!
//! Copy engines, or kernels of other devices, write the chunks of a tensor and then set a flag for each. A kernel waits for the flag of a chunk
//! before it first reads the chunk; the stream resets the flag after the kernel, and only then tells the writer that the chunk may be written
//! again. So the protocol is that of `oxtile`'s handovers, in a graph and outside.
//!
//! A wait that is not answered raises the *verdict* and ends all later waits of the thread, not the kernel: it goes on with whatever is in
//! memory and ends in the time that it takes anyway, so that no other thread waits for it in vain. What it writes then is garbage: it tells no
//! other rank of it ([`Arrivals::is_over`]), and the host finds the verdict.

use oxtile_macros::Parameter;

use crate::flag::{self, Outcome, Patience};
use crate::global::{GlobalMut, GlobalTable};
use crate::{sync, thread};

/// Words of 64 bits from a flag to the next: a line of 128 bytes.
pub const LINE: u64 = 16;
/// The word of line 0 in which the number of a line is left whose flag did not come; 0 if there is none. Word 0 of it is the notice.
pub const VERDICT: u64 = 1;
/// Set in a verdict, beside the flag's line: as a signed number it is below 0, so that streams which wait for 0 or more are held.
pub const HOLD: u64 = 1 << 63;
/// The value of a flag that is set.
const SET: u64 = 1;

/// Flags in this device's memory, one in the first word of each line. Line 0 is the team's: its notice and its verdict.
#[derive(Clone, Copy)]
pub struct FlagLines(GlobalMut<u64>);

impl FlagLines {
    /// The lines of so many words at `address`.
    ///
    /// # Safety
    /// As [`GlobalMut::from_raw_parts`].
    #[inline(always)]
    pub(crate) const unsafe fn from_raw_parts(address: u64, length: u64) -> Self {
        // SAFETY: passed on to the caller.
        Self(unsafe { GlobalMut::from_raw_parts(address, length) })
    }

    /// The words of the lines.
    #[inline(always)]
    pub const fn words(&self) -> GlobalMut<u64> {
        self.0
    }
}

/// The flags that a kernel waits for.
#[derive(Clone, Copy, Parameter)]
pub struct Waits {
    /// All flags of the team.
    pub lines: FlagLines,
    /// The line of this kernel's flag 0.
    pub first: u32,
    /// Nanoseconds that a wait lasts at most; on the emulator, steps.
    pub patience: u64,
}

/// The flags of this rank at every rank, which a kernel sets.
#[derive(Clone, Copy, Parameter)]
pub struct Signals {
    /// The lines of each rank, as this device reaches them.
    pub lines: GlobalTable<u64>,
    /// The line of flag 0 of this rank.
    pub first: u32,
    /// Lines from a flag of this rank to the next.
    pub stride: u32,
}

/// What one thread has seen to arrive.
pub struct Arrivals {
    waits: Waits,
    /// A bit for each of the first 64 flags.
    seen: u64,
    is_over: bool,
    /// When the first wait for [slots](crate::slots) began: all of a thread together have the patience of one.
    began: Option<u64>,
}

impl Arrivals {
    /// Nothing was seen yet.
    #[inline(always)]
    pub const fn new(waits: Waits) -> Self {
        Self { waits, seen: 0, is_over: false, began: None }
    }

    /// Waits for a flag that this thread has not seen yet; flags from 64 on are looked at again each time. Afterwards this thread, and the bulk
    /// copies that it issues, see what was written before the flag was set: PTX `ld.acquire.sys`, then `fence.proxy.async.global`.
    ///
    /// After a wait that was not answered it returns at once; so does the first wait for a flag that is not set, once another thread's was not answered.
    /// It orders bulk copies and accesses of a [`GlobalMut`], not those of a [`Global`](crate::global::Global), which may come by `ld.global.nc`.
    #[inline(always)]
    #[track_caller]
    pub fn wait(&mut self, flag: u32) {
        let bit = if flag < u64::BITS { 1 << flag } else { 0 };
        if self.is_over || self.seen & bit != 0 {
            return;
        }
        if self.poll(flag) {
            sync::fence_proxy_async_global();
            self.seen |= bit;
        }
    }

    #[inline(always)]
    #[track_caller]
    fn poll(&mut self, flag: u32) -> bool {
        let (words, line) = (self.waits.lines.words(), u64::from(self.waits.first + flag));
        if flag::load(&words, line * LINE) < SET && flag::load(&words, VERDICT) != 0 {
            self.is_over = true;
            return false;
        }
        let outcome = Patience::new(words, self.waits.patience).wait(&words, line * LINE, SET);
        if outcome != Outcome::Reached {
            self.give_up(outcome, || flag);
        }
        outcome == Outcome::Reached
    }

    /// Looks until what this thread waits for is there, and a few times if an earlier wait was not answered; returns what it has seen last, too.
    #[inline(always)]
    #[track_caller]
    pub(crate) fn until<V>(&mut self, look: impl Fn() -> (bool, V)) -> (Outcome, V) {
        let (words, is_over) = (self.waits.lines.words(), self.is_over);
        let began = *self.began.get_or_insert_with(thread::timer);
        Patience::new(words, self.waits.patience).until(began, look, || is_over || flag::load(&words, VERDICT) != 0)
    }

    /// After a wait with this outcome: if what `flag` stands for did not come in time, the verdict names it.
    #[inline(always)]
    #[track_caller]
    pub(crate) fn give_up(&mut self, outcome: Outcome, flag: impl FnOnce() -> u32) {
        if outcome == Outcome::Late {
            flag::signal(&self.waits.lines.words(), VERDICT, HOLD | u64::from(self.waits.first + flag()));
        }
        self.is_over = true;
    }

    /// Whether a wait was not answered: what this thread has read is garbage, and no other rank is to be told of it.
    #[inline(always)]
    pub const fn is_over(&self) -> bool {
        self.is_over
    }
}

impl Signals {
    /// Sets flag `flag` of this rank at `rank`, and releases what this thread did, and what it has seen, before. PTX `st.release.sys`.
    ///
    /// For the writes of a block: a [`block::sync`](crate::block::sync), then one thread calls this. For bulk stores: the thread that has
    /// waited for them.
    #[inline(always)]
    #[track_caller]
    pub fn set(&self, rank: u32, flag: u32) {
        let lines = self.lines.get(u64::from(rank));
        // SAFETY: the caller that launched the kernel lent the flags of each rank for writing.
        let words = unsafe { GlobalMut::from_raw_parts(lines.start(), lines.len()) };
        flag::signal(&words, u64::from(self.first + flag * self.stride) * LINE, SET);
    }
}
