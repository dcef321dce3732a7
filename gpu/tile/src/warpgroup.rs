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

/// What a thread does in a kernel of [`Roles`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Role {
    /// It fills the pipeline.
    Producer,
    /// It is a neighbour of the producer and has nothing to do.
    Idle,
    /// It is in the consumer of this number, from 0 on.
    Consumer(u32),
}

/// One warpgroup that fills a pipeline and `CONSUMERS` that multiply, with the registers that a thread of either has.
///
/// | warpgroup | role | threads that run it | registers a thread |
/// |---|---|---|---|
/// | 0 | producer | the first | `PRODUCER` |
/// | 1 to `CONSUMERS` | consumer | all | `CONSUMER` |
///
/// A kernel starts with as many registers in each; the producer gives its own away.
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

    const FITS: () = {
        assert!(
            PRODUCER >= 24 && PRODUCER.is_multiple_of(8) && CONSUMER.is_multiple_of(8) && CONSUMER <= 256,
            "setmaxnreg takes multiples of 8 from 24 to 256"
        );
        assert!(PRODUCER <= Self::AT_START && Self::AT_START <= CONSUMER, "the producer gives registers to the consumers");
        assert!(PRODUCER + CONSUMERS * CONSUMER <= (1 + CONSUMERS) * Self::AT_START, "consumers cannot claim more than the producer gives");
    };

    /// The calling thread's role, once its registers are moved. All threads of the block call it.
    #[inline(always)]
    #[track_caller]
    pub fn role() -> Role {
        let () = Self::FITS;
        let warpgroup = index();
        if warpgroup != 0 {
            Target::claim::<CONSUMER>();
            return Role::Consumer(warpgroup - 1);
        }
        Target::release::<PRODUCER>();
        if thread::index() == 0 { Role::Producer } else { Role::Idle }
    }
}
