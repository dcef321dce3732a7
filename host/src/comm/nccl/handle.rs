//! One NCCL communicator: calls with a deadline, one at a time; the first failure is the last.

use std::ffi::c_int;
use std::sync::{Arc, PoisonError, RwLock, RwLockReadGuard};
use std::time::{Duration, Instant};

use super::library::{Comm, Config, Functions, IN_PROGRESS, SUCCESS, UniqueId};
use super::watchdog::{Aborted, Watched};
use crate::comm::sequence::Sequence;
use crate::rank::{Rank, WorldSize};
use crate::runtime::stream::StreamInner;
use crate::runtime::{Error, Owner, Result};

/// A communicator, with its rank and world. Dropping it destroys it, which lets work on streams end; a failed one was aborted.
pub(super) struct Handle {
    functions: &'static Functions,
    watched: Arc<Watched>,
    pub rank: Rank,
    pub world: WorldSize,
    pub limit: Duration,
    /// Compares the ranks' calls before they are made, where that was asked for.
    pub sequence: Option<Sequence>,
    /// The error that broke it.
    failure: RwLock<Option<Error>>,
}

impl Handle {
    /// Joins a world; returns when all its ranks have.
    pub fn join(functions: &'static Functions, id: UniqueId, rank: Rank, world: WorldSize, limit: Duration) -> Result<Self> {
        let handle = Self::new(functions, rank, world, limit);
        let (number, count) = (rank.index() as c_int, world.get() as c_int);
        let (place, mut config) = (handle.watched.place(), Config::blocking());
        // SAFETY: a place for the communicator that lives as long as the handle, and a rank below its world.
        handle.call("ncclCommInitRankConfig", |nccl, _| unsafe { (nccl.init)(place, count, id, number, &raw mut config) })?;
        Ok(handle)
    }

    fn new(functions: &'static Functions, rank: Rank, world: WorldSize, limit: Duration) -> Self {
        Self { functions, watched: Watched::new(functions), rank, world, limit, sequence: None, failure: RwLock::new(None) }
    }

    /// A communicator of the ranks that name the same colour, ordered by key and then by rank; none for a rank that names none.
    pub fn split(&self, colour: Option<u32>, key: u32) -> Result<Option<Self>> {
        /// `NCCL_SPLIT_NOCOLOR`.
        const NO_COLOUR: c_int = -1;
        let number = |what, n: u32| c_int::try_from(n).map_err(|_| Error::Invalid { what, why: format!("{n} is more than 2^31 - 1") });
        let of = colour;
        let colour = colour.map_or(Ok(NO_COLOUR), |colour| number("NcclCommunicator::split: colour", colour))?;
        let order = number("NcclCommunicator::split: key", key)?;
        let sequence = self.compare(|sequence| sequence.split(of, key))?;
        let mut part = Self::new(self.functions, self.rank, self.world, self.limit);
        let (place, mut config) = (part.watched.place(), Config::blocking());
        // SAFETY: as in `join`; the part's place is filled by the time the call returns.
        self.call("ncclCommSplit", |nccl, comm| unsafe { (nccl.split)(comm, colour, order, place, &raw mut config) })?;
        if colour == NO_COLOUR {
            return Ok(None);
        }
        let (mut rank, mut count) = (0, 0);
        // SAFETY: a live communicator and a valid place for the number.
        part.call("ncclCommUserRank", |nccl, comm| unsafe { (nccl.user_rank)(comm, &raw mut rank) })?;
        // SAFETY: as above.
        part.call("ncclCommCount", |nccl, comm| unsafe { (nccl.count)(comm, &raw mut count) })?;
        let world = WorldSize::new(count.unsigned_abs());
        let place = world.and_then(|world| Some((Rank::new(rank.unsigned_abs(), world)?, world)));
        part.sequence = sequence.flatten();
        (part.rank, part.world) = place.ok_or_else(|| invalid(format!("NCCL made a part of {count} ranks with rank {rank}")))?;
        Ok(Some(part))
    }

    /// One call of NCCL, named for errors. After a failure it is not made.
    pub fn call(&self, name: &'static str, call: impl FnOnce(&Functions, Comm) -> c_int) -> Result<()> {
        self.check_failure()?;
        self.done(name, self.watched.call(name, self.limit, |comm| call(self.functions, comm)))
    }

    /// Begins a group of this thread; not after a failure. While it is open the communicator is not aborted, whatever fails.
    pub fn open_group(&self) -> Result<()> {
        self.check_failure()?;
        self.done("ncclGroupStart", self.watched.open_group())
    }

    /// Ends the group of this thread, also after a failure, which it returns then.
    ///
    /// # Safety
    /// The thread [opened](Self::open_group) a group, and has not ended it.
    pub unsafe fn end_group(&self) -> Result<()> {
        // SAFETY: the caller vouches for it.
        self.done("ncclGroupEnd", unsafe { self.watched.end_group(self.limit) })
    }

    /// How a call ended.
    fn done(&self, name: &'static str, code: std::result::Result<c_int, Aborted>) -> Result<()> {
        match code {
            Ok(SUCCESS) => Ok(()),
            Ok(code) => Err(self.fail(self.error(name, code))),
            Err(Aborted) => {
                let (late, number) = self.watched.last();
                Err(self.fail(self.late(late, number)))
            }
        }
    }

    /// Compares a call with those of the other ranks, before it is made: one that does not fit would hang, or give garbage.
    pub fn agree(&self, call: impl FnOnce() -> String) -> Result<()> {
        self.compare(|sequence| sequence.agree(call())).map(drop)
    }

    fn compare<R>(&self, compare: impl FnOnce(&Sequence) -> Result<R>) -> Result<Option<R>> {
        self.check_failure()?;
        self.sequence.as_ref().map(compare).transpose().map_err(|error| self.fail(error))
    }

    /// What went wrong after the calls, as far as NCCL has noticed.
    pub fn check(&self) -> Result<()> {
        let mut state = SUCCESS;
        // SAFETY: a live communicator and a valid place for the code.
        self.call("ncclCommGetAsyncError", |nccl, comm| unsafe { (nccl.async_error)(comm, &raw mut state) })?;
        match state {
            SUCCESS | IN_PROGRESS => Ok(()),
            code => Err(self.fail(self.error("a collective", code))),
        }
    }

    /// Waits until `done`, at most as long as the deadline; asks NCCL meanwhile whether something went wrong.
    pub fn wait(&self, what: &'static str, mut done: impl FnMut() -> Result<bool>) -> Result<()> {
        let (start, mut looks) = (Instant::now(), 0_u32);
        while !done()? {
            looks += 1;
            // Short work ends without a sleep; a long wait costs little.
            if looks > 1000 {
                std::thread::sleep(Duration::from_micros(100));
                self.check()?;
            }
            if start.elapsed() > self.limit {
                return Err(self.fail(self.late(what, self.watched.last().1)));
            }
        }
        self.check_failure()
    }

    /// Ends everything under way, on this rank; what is queued in a group, at the end of the group. The other ranks' work ends by their own deadlines.
    pub fn abort(&self, why: &str) {
        let _ = self.fail(Error::Aborted { what: self.name(), why: why.to_owned() });
    }

    fn check_failure(&self) -> Result<()> {
        self.failure.read().unwrap_or_else(PoisonError::into_inner).clone().map_or(Ok(()), Err)
    }

    /// Breaks the communicator; returns what broke it first.
    fn fail(&self, error: Error) -> Error {
        let first = self.failure.write().unwrap_or_else(PoisonError::into_inner).get_or_insert(error).clone();
        self.watched.abort();
        first
    }

    fn name(&self) -> String {
        format!("NCCL communicator, {} of {}", self.rank, self.world.get())
    }

    fn late(&self, what: &str, number: u64) -> Error {
        Error::Deadline {
            what: format!("{}: {what} (call {number})", self.name()),
            limit: self.limit,
            mend: "a rank did not come to the same call: see which one ended or is elsewhere; the communicator was aborted, make a new one",
        }
    }

    fn error(&self, call: &'static str, code: c_int) -> Error {
        Error::Nccl {
            call,
            communicator: self.name(),
            code,
            meaning: self.functions.describe(code),
            detail: self.functions.last_error(std::ptr::null_mut()),
        }
    }
}

/// Finalizing waits for work under way, whatever streams it is on.
impl Owner for Handle {
    fn begin(&self) -> Result<Option<RwLockReadGuard<'_, ()>>> {
        self.check_failure().map(|()| None)
    }

    fn used_on(&self, _: &Arc<StreamInner>) {}
}

impl Drop for Handle {
    fn drop(&mut self) {
        if self.watched.comm().is_null() {
            return;
        }
        // SAFETY: a live communicator. The call waits for work under way, at most as long as the deadline.
        let ended = self.watched.call("ncclCommFinalize", self.limit, |comm| unsafe { (self.functions.finalize)(comm) });
        let comm = self.watched.take();
        if comm.is_null() {
            tracing::warn!(?ended, "{}: its work did not end in time", self.name());
            return;
        }
        // SAFETY: a live communicator, taken out of its place and not used after this.
        let code = unsafe { (self.functions.destroy)(comm) };
        if code != SUCCESS {
            tracing::warn!(code, "{} was not destroyed", self.name());
        }
    }
}

fn invalid(why: String) -> Error {
    Error::Invalid { what: "NcclCommunicator::split", why }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicU32;
    use std::sync::atomic::Ordering::{AcqRel, Acquire, Release};

    use super::super::fake::{FUNCTIONS, Fake};
    use super::*;
    use crate::bootstrap::board::LocalBoard;
    use crate::comm::Board;

    const SHORT: Duration = Duration::from_millis(60);
    /// Until when a deadline must have been noticed.
    const SOON: Duration = Duration::from_secs(1);

    fn join(id: UniqueId, limit: Duration) -> Result<Handle> {
        let world = WorldSize::new(4).unwrap();
        Handle::join(&FUNCTIONS, id, Rank::new(2, world).unwrap(), world, limit)
    }

    fn send(handle: &Handle) -> Result<()> {
        // SAFETY: the fake looks at the communicator alone.
        handle.call("ncclSend", |nccl, comm| unsafe { (nccl.send)(std::ptr::null(), 0, 1, 0, comm, std::ptr::null_mut()) })
    }

    #[test]
    fn a_healthy_communicator_is_finalized_and_destroyed_once() {
        let (fake, id) = Fake::leaked();
        let handle = join(id, SHORT).unwrap();
        send(&handle).unwrap();
        handle.check().unwrap();
        // Idle, it outlives its deadline.
        std::thread::sleep(2 * SHORT);
        send(&handle).unwrap();
        drop(handle);
        assert_eq!((fake.finalized.load(Acquire), fake.destroyed.load(Acquire), fake.aborted.load(Acquire)), (1, 1, 0));
    }

    #[test]
    fn no_deadline_is_too_long() {
        let (fake, id) = Fake::leaked();
        let handle = join(id, Duration::MAX).unwrap();
        send(&handle).unwrap();
        drop(handle);
        assert_eq!((fake.destroyed.load(Acquire), fake.aborted.load(Acquire)), (1, 0));
    }

    #[test]
    fn a_rank_that_does_not_come_ends_the_join() {
        let (fake, id) = Fake::leaked();
        fake.blocks.store(true, Release);
        let start = Instant::now();
        let error = join(id, SHORT).err().unwrap();
        assert!(matches!(error, Error::Deadline { .. }), "{error}");
        assert!(
            error.to_string().starts_with("NCCL communicator, rank 2 of 4: ncclCommInitRankConfig (call 1) did not end within 60ms"),
            "{error}"
        );
        assert!(start.elapsed() < SOON);
        assert_eq!((fake.aborted.load(Acquire), fake.destroyed.load(Acquire)), (1, 0));
    }

    #[test]
    fn a_call_that_blocks_is_ended_and_the_first_error_stays() {
        let (fake, id) = Fake::leaked();
        let handle = join(id, SHORT).unwrap();
        fake.blocks.store(true, Release);
        let error = send(&handle).unwrap_err();
        assert!(error.to_string().contains("ncclSend (call 2) did not end"), "{error}");
        let calls = fake.calls.load(Acquire);
        assert_eq!(send(&handle).unwrap_err().to_string(), error.to_string());
        assert_eq!(fake.calls.load(Acquire), calls, "a broken communicator was called");
        drop(handle);
        assert_eq!((fake.aborted.load(Acquire), fake.finalized.load(Acquire), fake.destroyed.load(Acquire)), (1, 0, 0));
    }

    #[test]
    fn an_error_says_who_what_and_why() {
        let (fake, id) = Fake::leaked();
        let handle = join(id, SHORT).unwrap();
        fake.code.store(6, Release);
        let text = send(&handle).unwrap_err().to_string();
        assert_eq!(text, "NCCL communicator, rank 2 of 4: ncclSend failed with code 6, remote error: the other side hung up");
        assert_eq!(fake.aborted.load(Acquire), 1);
    }

    #[test]
    fn waiting_sees_errors_behind_the_calls() {
        let (fake, id) = Fake::leaked();
        let handle = join(id, Duration::from_secs(10)).unwrap();
        fake.async_error.store(6, Release);
        assert!(matches!(handle.wait("work", || Ok(false)), Err(Error::Nccl { code: 6, .. })));
        assert_eq!(fake.aborted.load(Acquire), 1);
    }

    #[test]
    fn waiting_has_a_deadline_too() {
        let (fake, id) = Fake::leaked();
        let handle = join(id, SHORT).unwrap();
        let start = Instant::now();
        assert!(matches!(handle.wait("work", || Ok(false)), Err(Error::Deadline { .. })));
        assert!(start.elapsed() < SOON);
        assert_eq!(fake.aborted.load(Acquire), 1);
        let done = AtomicU32::new(0);
        let (_, id) = Fake::leaked();
        join(id, SHORT).unwrap().wait("work", || Ok(done.fetch_add(1, AcqRel) > 5)).unwrap();
    }

    #[test]
    fn work_that_does_not_end_does_not_hold_up_a_drop() {
        let (fake, id) = Fake::leaked();
        let handle = join(id, SHORT).unwrap();
        fake.blocks.store(true, Release);
        let start = Instant::now();
        drop(handle);
        assert!(start.elapsed() < SOON);
        assert_eq!((fake.aborted.load(Acquire), fake.destroyed.load(Acquire)), (1, 0));
    }

    #[test]
    fn calls_that_do_not_fit_are_not_made() {
        let board: Arc<dyn Board> = Arc::new(LocalBoard::default());
        let world: Vec<Rank> = WorldSize::new(2).unwrap().ranks().collect();
        let rank = |rank: Rank| {
            let (fake, id) = Fake::leaked();
            let mut handle = join(id, Duration::from_secs(10)).unwrap();
            handle.sequence = Some(Sequence::new(Arc::clone(&board), "the world", rank, world.clone(), handle.limit));
            handle.agree(|| "barrier".to_owned()).and_then(|()| send(&handle)).unwrap();
            let made = fake.calls.load(Acquire);
            let error = handle.agree(|| format!("broadcast from {rank}")).and_then(|()| send(&handle)).unwrap_err();
            assert_eq!(send(&handle).unwrap_err().to_string(), error.to_string(), "the first error stays");
            assert_eq!((fake.calls.load(Acquire), fake.aborted.load(Acquire)), (made, 1));
            assert!(matches!(error, Error::Mismatch { sequence: 1, .. }), "{error}");
            error.to_string()
        };
        let errors = std::thread::scope(|scope| {
            let threads: Vec<_> = world.iter().map(|of| scope.spawn(|| rank(*of))).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect::<Vec<_>>()
        });
        assert!(errors.iter().all(|error| error.contains("rank 1 called broadcast from rank 1, rank 0 called broadcast from rank 0")));
    }

    #[test]
    fn who_aborts_says_why() {
        let (fake, id) = Fake::leaked();
        let handle = join(id, SHORT).unwrap();
        handle.abort("the user pressed Ctrl-C");
        handle.abort("again");
        let text = send(&handle).unwrap_err().to_string();
        assert_eq!(text, "NCCL communicator, rank 2 of 4 was aborted: the user pressed Ctrl-C");
        assert_eq!(fake.aborted.load(Acquire), 1);
    }
}
