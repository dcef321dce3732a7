//! The warpgroup: 128 threads that multiply matrices together, and the roles that warpgroups of a block take.

use crate::arch::{Barrier, Donation, Target};
use crate::{thread, warp};

/// Threads of a warpgroup.
pub const THREADS: u32 = 128;

/// The first of the named barriers that [`sync`] uses, one a warpgroup.
const FIRST_BARRIER: u32 = 8;

/// The calling warpgroup's index in the block. The compiler sees that it is the same in all lanes of a warp.
#[inline(always)]
#[track_caller]
pub fn index() -> u32 {
    warp::shuffle(thread::index() / THREADS, 0)
}

/// Whether this is the warpgroup's first thread.
#[inline(always)]
#[track_caller]
pub fn is_leader() -> bool {
    thread::index().is_multiple_of(THREADS)
}

/// Waits for the 128 threads of warpgroup `index`, which all call it, and orders their accesses.
///
/// Takes the named barriers from 8 on, one a warpgroup; those below are the kernel's.
#[inline(always)]
#[track_caller]
pub fn sync(index: u32) {
    Target::sync(FIRST_BARRIER + index, THREADS);
}

/// What a warpgroup does in a kernel of [`Roles`]. Each arm of the `match` begins with `begin`, so that the compiler
/// knows how many registers the arm has.
pub enum Role<const PRODUCER: u32, const CONSUMER: u32> {
    /// It fills the pipeline.
    Producer(ProducerRole<PRODUCER>),
    /// It drains the pipeline.
    Consumer(ConsumerRole<CONSUMER>),
}

/// The role of the warpgroup that fills the pipeline.
#[must_use = "a producer that does not begin keeps its registers"]
pub struct ProducerRole<const REGISTERS: u32> {
    warp: u32,
}

/// The role of a warpgroup that drains the pipeline.
#[must_use = "a consumer that does not begin claims no registers"]
pub struct ConsumerRole<const REGISTERS: u32> {
    number: u32,
}

impl<const REGISTERS: u32> ProducerRole<REGISTERS> {
    /// Gives registers away; true in the one thread that fills the pipeline. All threads of the warpgroup call it.
    #[inline(always)]
    #[track_caller]
    pub fn begin(self) -> bool {
        if REGISTERS > 0 {
            Target::release::<REGISTERS>();
        }
        self.warp == 0 && warp::elect()
    }

    /// As [`begin`](Self::begin), where the four warps have tasks of their own: gives the warp's number, the same in all lanes
    /// to the compiler too.
    #[inline(always)]
    #[track_caller]
    pub fn begin_warps(self) -> u32 {
        Target::release::<REGISTERS>();
        self.warp
    }
}

impl<const REGISTERS: u32> ConsumerRole<REGISTERS> {
    /// Waits for the registers; returns the consumer's number, from 0 on. All threads of the warpgroup call it.
    #[inline(always)]
    #[track_caller]
    pub fn begin(self) -> u32 {
        if REGISTERS > 0 {
            Target::claim::<REGISTERS>();
        }
        self.number
    }
}

/// One warpgroup that fills a pipeline and `CONSUMERS` that multiply, with the registers that a thread of either has.
///
/// | warpgroup | role | threads that run it | registers a thread |
/// |---|---|---|---|
/// | 0 | producer | one, elected by the first warp | `PRODUCER` |
/// | 1 to `CONSUMERS` | consumer | all | `CONSUMER` |
///
/// A kernel starts with as many registers in each; the producer gives its own away. If both numbers are 0, each keeps what it starts with: where
/// that is enough, such as with one consumer.
pub struct Roles<const CONSUMERS: u32, const PRODUCER: u32, const CONSUMER: u32>;

impl<const CONSUMERS: u32, const PRODUCER: u32, const CONSUMER: u32> Roles<CONSUMERS, PRODUCER, CONSUMER> {
    /// Threads of the block.
    pub const THREADS: u32 = (1 + CONSUMERS) * THREADS;

    /// Warps that drain the pipeline.
    pub const CONSUMER_WARPS: u32 = CONSUMERS * THREADS / warp::LANES;

    /// Registers a thread when the kernel starts, as ptxas allots them to one block a multiprocessor.
    const AT_START: u32 = {
        let even = 65536 / Self::THREADS / 8 * 8;
        if even > 255 { 255 } else { even }
    };

    const FITS: () = if PRODUCER > 0 || CONSUMER > 0 {
        assert!(
            PRODUCER >= 24 && PRODUCER.is_multiple_of(8) && CONSUMER.is_multiple_of(8) && CONSUMER <= 256,
            "setmaxnreg takes multiples of 8 from 24 to 256"
        );
        assert!(PRODUCER <= Self::AT_START && Self::AT_START <= CONSUMER, "the producer gives registers to the consumers");
        assert!(PRODUCER + CONSUMERS * CONSUMER <= (1 + CONSUMERS) * Self::AT_START, "consumers cannot claim more than the producer gives");
    };

    /// The calling warpgroup's role.
    #[inline(always)]
    #[track_caller]
    pub fn role() -> Role<PRODUCER, CONSUMER> {
        let () = Self::FITS;
        let warp = warp::shuffle(thread::warp(), 0);
        match warp / (THREADS / warp::LANES) {
            0 => Role::Producer(ProducerRole { warp }),
            warpgroup => Role::Consumer(ConsumerRole { number: warpgroup - 1 }),
        }
    }
}
