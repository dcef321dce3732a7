//! Flags that devices set for one another, at system scope: 64-bit epochs that only grow.
//!
//! One thread writes a word, any device waits for it. What the writer's block did before a block barrier that precedes [`signal`] is seen by the
//! block of the thread that [waited](Patience::wait), after another barrier: release and acquire are cumulative over barriers (PTX ISA, "Memory
//! Consistency Model"). Place a word in memory of the device that waits, so that no thread polls over a link.
//!
//! A wait has a bound and looks for the end of the team. Code after a wait that was not answered does not run, but for [arrivals](crate::arrivals).

use core::fmt::{self, Write};

use crate::arch::{GlobalMemory, Target};
use crate::global::GlobalMut;
use crate::shared::{SharedArray, SharedStorage};
use crate::{block, thread};

/// No epoch comes up to this: a word with it tells every thread that waits that the team has ended. `oxtile`'s arenas write it as poison.
pub const POISON: u64 = 1 << 62;

/// The number of polls before the notice and the clock are looked at.
const POLLS: u32 = 8;
/// The first pause between polls, in nanoseconds; each is twice the one before it.
const FIRST_PAUSE: u32 = 16;
/// The longest.
const LAST_PAUSE: u32 = 512;

/// How a wait ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum Outcome {
    /// The epoch has come: what was done before its signal is seen.
    Reached,
    /// The team has ended: the word or the notice is poisoned.
    Ended,
    /// The epoch did not come in time.
    Late,
}

/// How long a kernel waits, and what may end it.
#[derive(Clone, Copy)]
pub struct Patience {
    notice: GlobalMut<u64>,
    nanoseconds: u64,
}

/// The shared memory by which a block learns the outcome of a wait.
#[derive(Clone, Copy)]
pub struct FlagStorage {
    outcome: SharedArray<u32, 1>,
}

impl SharedStorage for FlagStorage {
    const SIZE: u32 = <SharedArray<u32, 1> as SharedStorage>::SIZE;
    const ALIGN: u32 = <SharedArray<u32, 1> as SharedStorage>::ALIGN;

    #[inline(always)]
    unsafe fn at(address: u32) -> Self {
        // SAFETY: passed on to the caller; this is that array.
        Self { outcome: unsafe { SharedArray::at(address) } }
    }

    #[inline]
    fn name_part(offset: u32, bytes: u32, name: &mut dyn Write) -> fmt::Result {
        <SharedArray<u32, 1> as SharedStorage>::name_part(offset, bytes, name)
    }
}

/// Sets word `index` to `epoch` for all devices, and releases what this thread did, and what it has seen, before. PTX `st.release.sys`.
///
/// For the writes of a block: a [`block::sync`], then one thread calls this.
#[inline(always)]
#[track_caller]
pub fn signal(words: &GlobalMut<u64>, index: u64, epoch: u64) {
    // SAFETY: `address_of` checked the index where this build checks.
    unsafe { Target::store_release_system(words.address_of(index), epoch) };
}

/// Word `index` as it is now; acquires what was released with it. PTX `ld.acquire.sys`.
#[inline(always)]
#[track_caller]
pub fn load(words: &GlobalMut<u64>, index: u64) -> u64 {
    // SAFETY: as `signal`.
    unsafe { Target::load_acquire_system(words.address_of(index)) }
}

impl Patience {
    /// Waits take at most `nanoseconds` of the device's clock (on the emulator, steps), and end when the first word of `notice` is
    /// [`POISON`] or more.
    #[inline(always)]
    pub const fn new(notice: GlobalMut<u64>, nanoseconds: u64) -> Self {
        Self { notice, nanoseconds }
    }

    /// Waits until word `index` has come to `epoch`, by the cyclic signed comparison of `cuStreamWaitValue64` (GEQ). One thread calls it;
    /// it polls with `ld.acquire.sys` and sleeps between polls, longer from one to the next.
    #[inline(always)]
    #[track_caller]
    pub fn wait(&self, words: &GlobalMut<u64>, index: u64, epoch: u64) -> Outcome {
        let mut polls = Polls::new(thread::timer(), LAST_PAUSE);
        loop {
            let word = load(words, index);
            if word >= POISON {
                return Outcome::Ended;
            }
            if word.wrapping_sub(epoch).cast_signed() >= 0 {
                return Outcome::Reached;
            }
            if let Some(outcome) = polls.next(self, || false) {
                return outcome;
            }
        }
    }

    /// Looks until something is there, and now and then whether all is over, of a wait that `began` then; returns what was seen last, too, and goes on whatever the outcome. One thread calls it. Pauses are short.
    #[inline(always)]
    #[track_caller]
    pub(crate) fn until<V>(&self, began: u64, look: impl Fn() -> (bool, V), is_over: impl Fn() -> bool) -> (Outcome, V) {
        let mut polls = Polls::new(began, FIRST_PAUSE);
        loop {
            let (is_there, seen) = look();
            if is_there {
                return (Outcome::Reached, seen);
            }
            if let Some(outcome) = polls.next(self, &is_over) {
                return (outcome, seen);
            }
        }
    }

    /// [`wait`](Self::wait) for the block: thread 0 waits, all threads get the outcome and, if it is reached, see what was released.
    ///
    /// All threads of the block call it; contains one block barrier. The storage may be used again after the next block barrier.
    #[inline(always)]
    #[track_caller]
    pub fn wait_block(&self, words: &GlobalMut<u64>, index: u64, epoch: u64, storage: FlagStorage) -> Outcome {
        if thread::index() == 0 {
            storage.outcome.store(0, self.wait(words, index, epoch) as u32);
        }
        block::sync();
        match storage.outcome.load(0) {
            0 => Outcome::Reached,
            1 => Outcome::Ended,
            _ => Outcome::Late,
        }
    }
}

/// The polls of a wait.
struct Polls {
    start: u64,
    count: u32,
    pause: u32,
    longest: u32,
}

impl Polls {
    /// None yet, of a wait that began then; pauses grow to so many nanoseconds.
    #[inline(always)]
    const fn new(start: u64, longest: u32) -> Self {
        Self { start, count: 0, pause: FIRST_PAUSE, longest }
    }

    /// Before the next one: pauses, and now and then looks whether the wait has an end.
    #[inline(always)]
    #[track_caller]
    fn next(&mut self, patience: &Patience, is_over: impl Fn() -> bool) -> Option<Outcome> {
        self.count += 1;
        if self.count.is_multiple_of(POLLS) {
            // SAFETY: as `signal`.
            if unsafe { Target::load_relaxed_system(patience.notice.address_of(0)) } >= POISON || is_over() {
                return Some(Outcome::Ended);
            }
            if thread::timer().wrapping_sub(self.start) >= patience.nanoseconds {
                return Some(Outcome::Late);
            }
        }
        thread::sleep(self.pause);
        self.pause = self.longest.min(2 * self.pause);
        None
    }
}
