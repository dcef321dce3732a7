//! Rings of shared-memory stages that one thread fills with bulk copies and warps drain.
//!
//! | barrier | arrivals a phase | what arrives | what waits |
//! |---|---|---|---|
//! | `full[s]` | 1, and the bytes announced | the producer, then TMA | the consumers |
//! | the same, filled by stores | one a producer warp | lane 0 of each producer warp | the consumers |
//! | `empty[s]` | one a consumer warp | lane 0 of each consumer warp | the producer |
//!
//! Counts derive from the consumer warps given to [`Pipeline::init`]; phases and stage numbers are kept
//! by the handles. A stage that is not released shows as a deadlock report on the emulator.

mod copy;
mod mbarrier;

use core::fmt::{self, Write};
use core::marker::PhantomData;

use crate::arch::{Cluster, Target};
use crate::shared::{SharedStorage, Tiles, name_field};

pub use copy::{
    commit_copies, commit_stores, copy_async, copy_async_lasting, copy_async_pair, copy_async_to_chunk, copy_async_to_tile,
    copy_async_word, prefetch, store_bulk, wait_copies, wait_stores, wait_stores_read,
};
pub use mbarrier::{Mbarrier, publish_barriers};

/// A ring of `STAGES` stages of layout `S`: the stages, then their `full`, then their `empty` barriers.
pub struct Pipeline<S, const STAGES: usize> {
    address: u32,
    stage: PhantomData<fn() -> S>,
}

impl<S, const STAGES: usize> Clone for Pipeline<S, STAGES> {
    #[inline(always)]
    fn clone(&self) -> Self {
        *self
    }
}

impl<S, const STAGES: usize> Copy for Pipeline<S, STAGES> {}

impl<S: SharedStorage, const STAGES: usize> SharedStorage for Pipeline<S, STAGES> {
    const SIZE: u32 = Self::EMPTY + Self::BARRIERS;
    const ALIGN: u32 = crate::shared::max_align(&[S::ALIGN, Mbarrier::ALIGN]);

    #[inline(always)]
    unsafe fn at(address: u32) -> Self {
        Self { address, stage: PhantomData }
    }

    /// `.stages[1]`, `.full[1]`, `.empty[1]`.
    #[inline]
    fn name_part(offset: u32, bytes: u32, name: &mut dyn Write) -> fmt::Result {
        let _ = name_field::<Tiles<S, STAGES>>("stages", 0, offset, bytes, name)?
            || name_field::<[Mbarrier; STAGES]>("full", Self::FULL, offset, bytes, name)?
            || name_field::<[Mbarrier; STAGES]>("empty", Self::EMPTY, offset, bytes, name)?;
        Ok(())
    }
}

impl<S: SharedStorage, const STAGES: usize> Pipeline<S, STAGES> {
    const STAGE: u32 = S::SIZE.next_multiple_of(S::ALIGN);
    const BARRIERS: u32 = STAGES as u32 * Mbarrier::SIZE;
    const FULL: u32 = (STAGES as u32 * Self::STAGE).next_multiple_of(Mbarrier::ALIGN);
    const EMPTY: u32 = Self::FULL + Self::BARRIERS;

    /// Readies the barriers for `consumer_warps` warps. One thread calls it before a block barrier.
    #[inline(always)]
    #[track_caller]
    pub fn init(self, consumer_warps: u32) {
        self.init_between(1, consumer_warps);
    }

    /// The same for stages that `producer_warps` warps fill together by stores ([`Producer::wait`]).
    #[inline(always)]
    #[track_caller]
    pub fn init_between(self, producer_warps: u32, consumer_warps: u32) {
        for stage in 0..STAGES as u32 {
            self.full(stage).init(producer_warps);
            self.empty(stage).init(consumer_warps);
        }
        publish_barriers();
    }

    /// The filling side. One thread holds it.
    #[inline(always)]
    pub fn producer(self) -> Producer<S, STAGES> {
        Producer { ring: self, cursor: Cursor::new() }
    }

    /// The filling side at the beginning of a round of this [parity](Producer::parity).
    #[inline(always)]
    pub fn producer_in_round(self, parity: u32) -> Producer<S, STAGES> {
        Producer { ring: self, cursor: Cursor { stage: 0, parity } }
    }

    /// The draining side. Every lane of every consumer warp holds one.
    #[inline(always)]
    pub fn consumer(self) -> Consumer<S, STAGES> {
        Consumer { ring: self, cursor: Cursor::new() }
    }

    /// The memory of stage `AT`, for code that knows what is in it.
    #[inline(always)]
    pub fn memory<const AT: usize>(self) -> S {
        const { assert!(AT < STAGES, "the ring has no such stage") };
        self.stage(AT as u32)
    }

    /// The memory of all stages, for what is written before the first is filled.
    #[inline(always)]
    pub fn stages(self) -> Tiles<S, STAGES> {
        // SAFETY: the ring lies in the arena and begins with its stages.
        unsafe { Tiles::at(self.address) }
    }

    /// The memory of a stage that a cursor of this ring names, below `STAGES`.
    #[inline(always)]
    fn stage(self, stage: u32) -> S {
        // SAFETY: the ring lies in the arena and `SIZE` counts this stage.
        unsafe { S::at(self.address + stage * Self::STAGE) }
    }

    #[inline(always)]
    fn full(self, stage: u32) -> Mbarrier {
        // SAFETY: as `stage`; the barriers come after the stages.
        unsafe { Mbarrier::at(self.address + Self::FULL + stage * Mbarrier::SIZE) }
    }

    #[inline(always)]
    fn empty(self, stage: u32) -> Mbarrier {
        // SAFETY: as `full`.
        unsafe { Mbarrier::at(self.address + Self::EMPTY + stage * Mbarrier::SIZE) }
    }
}

/// Which stage comes next, and the parity of its phase.
#[derive(Clone, Copy)]
struct Cursor<const STAGES: usize> {
    stage: u32,
    parity: u32,
}

impl<const STAGES: usize> Cursor<STAGES> {
    #[inline(always)]
    const fn new() -> Self {
        Self { stage: 0, parity: 0 }
    }

    #[inline(always)]
    fn advance(&mut self) {
        let last = self.stage + 1 == STAGES as u32;
        self.stage = if last { 0 } else { self.stage + 1 };
        self.parity ^= u32::from(last);
    }
}

/// The filling side of a [`Pipeline`].
pub struct Producer<S, const STAGES: usize> {
    ring: Pipeline<S, STAGES>,
    cursor: Cursor<STAGES>,
}

impl<S: SharedStorage, const STAGES: usize> Producer<S, STAGES> {
    /// The number of the next stage, of `STAGES`.
    #[inline(always)]
    pub fn next_stage(&self) -> u32 {
        self.cursor.stage
    }

    /// Whether the ring's round is odd: 0 or 1 in turn, from 0 on.
    #[inline(always)]
    pub fn parity(&self) -> u32 {
        self.cursor.parity
    }

    /// Says that another ring was filled as often as this one: registers then hold one place for both.
    #[inline(always)]
    pub fn at_place_of<S2>(&mut self, other: &Producer<S2, STAGES>) {
        self.cursor = other.cursor;
    }

    /// Waits for the next stage to be empty and announces `bytes`; the copies are then started with the
    /// returned mbarrier.
    #[inline(always)]
    #[track_caller]
    pub fn acquire(&mut self, bytes: u32) -> (S, Mbarrier) {
        self.acquire_with(bytes, |_| ())
    }

    /// As [`acquire`](Self::acquire), for a stage in which the producer writes something itself, in `write`.
    #[inline(always)]
    #[track_caller]
    pub fn acquire_with(&mut self, bytes: u32, write: impl FnOnce(&S)) -> (S, Mbarrier) {
        let Cursor { stage, parity } = self.cursor;
        let (memory, full) = (self.ring.stage(stage), self.ring.full(stage));
        // A new mbarrier counts as having completed the phase of parity 1: the first round does not wait.
        self.ring.empty(stage).wait(parity ^ 1);
        write(&memory);
        full.arrive_expect(bytes);
        self.cursor.advance();
        (memory, full)
    }

    /// Waits for the next stage to be empty, which warps then fill by stores. Every lane of every producer warp holds a
    /// producer of its own and calls it.
    #[inline(always)]
    #[track_caller]
    pub fn wait(&mut self) -> Filling<S> {
        let Cursor { stage, parity } = self.cursor;
        self.ring.empty(stage).wait(parity ^ 1);
        self.cursor.advance();
        Filling { memory: self.ring.stage(stage), full: self.ring.full(stage) }
    }
}

/// An empty stage, to be filled by stores and then published.
#[must_use = "a stage that is not published stops the consumers"]
pub struct Filling<S> {
    memory: S,
    full: Mbarrier,
}

impl<S: Copy> Filling<S> {
    /// The stage's memory.
    #[inline(always)]
    pub fn memory(&self) -> S {
        self.memory
    }

    /// Hands the stage to the consumers, their matrix instructions included. All lanes of the warp call it, after their last
    /// store.
    #[inline(always)]
    #[track_caller]
    pub fn publish(self) {
        crate::sync::fence_proxy_async();
        crate::warp::sync();
        self.full.arrive_if(crate::thread::lane() == 0);
    }
}

/// The draining side of a [`Pipeline`].
pub struct Consumer<S, const STAGES: usize> {
    ring: Pipeline<S, STAGES>,
    cursor: Cursor<STAGES>,
}

impl<S: SharedStorage, const STAGES: usize> Consumer<S, STAGES> {
    /// The number of the next stage, of `STAGES`.
    #[inline(always)]
    pub fn next_stage(&self) -> u32 {
        self.cursor.stage
    }

    /// Whether the ring's round is odd: 0 or 1 in turn, from 0 on.
    #[inline(always)]
    pub fn parity(&self) -> u32 {
        self.cursor.parity
    }

    /// Waits until the next stage is full.
    #[inline(always)]
    #[track_caller]
    pub fn wait(&mut self) -> Stage<S> {
        let Cursor { stage, parity } = self.cursor;
        self.ring.full(stage).wait(parity);
        self.cursor.advance();
        Stage { memory: self.ring.stage(stage), full: self.ring.full(stage), parity, empty: self.ring.empty(stage) }
    }
}

/// A full stage, to be read and then released.
#[must_use = "a stage that is not released stops the producer"]
pub struct Stage<S> {
    memory: S,
    full: Mbarrier,
    parity: u32,
    empty: Mbarrier,
}

impl<S: Copy> Stage<S> {
    /// The stage's memory.
    #[inline(always)]
    pub fn memory(&self) -> S {
        self.memory
    }

    /// Waits again for the stage, which is already full. ptxas moves no wait for multiplications across this one: it would otherwise
    /// put theirs before instructions that are to run meanwhile.
    #[inline(always)]
    #[track_caller]
    pub fn wait_again(&self) {
        self.full.wait(self.parity);
    }

    /// Hands the stage back. All lanes of the warp call it, after their last read.
    #[inline(always)]
    #[track_caller]
    pub fn release(self) {
        crate::warp::sync();
        self.release_after_wait();
    }

    /// [`release`](Self::release)s the stage, or gives it back to be kept for longer.
    #[inline(always)]
    #[track_caller]
    pub fn release_unless(self, keep: bool) -> Option<Self> {
        if keep {
            return Some(self);
        }
        self.release();
        None
    }

    /// Hands back a stage that only matrix instructions read, after the [wait](crate::matrix::InFlight) for them: they brought
    /// the lanes together, which need not meet again. All lanes of the warp call it. A stage that nothing read is
    /// [`release`](Self::release)d: a lane that still waits for it would be lapped.
    #[inline(always)]
    #[track_caller]
    pub fn release_after_wait(self) {
        self.full.met_since_wait();
        self.empty.arrive_if(crate::thread::lane() == 0);
    }

    /// The same in every block of a cluster of `BLOCKS`, whose producers each fill a part of the stage. The barriers were
    /// [readied](Pipeline::init) for the consumer warps of all blocks.
    #[inline(always)]
    #[track_caller]
    pub fn release_to_cluster<const BLOCKS: u32>(self) {
        const { assert!(BLOCKS <= crate::warp::LANES, "one lane arrives for each block") };
        self.full.met_since_wait();
        let lane = crate::thread::lane();
        // SAFETY: as `release`, in every block; none ends before the cluster's last barrier.
        unsafe { Target::arrive_remote_if(self.empty.address(), lane, lane < BLOCKS) };
    }
}
