//! The deadline of calls that block: a thread that aborts a communicator whose call takes too long.
//!
//! NCCL's calls return when their work is enqueued, but the first of them connects the ranks and waits for all to come,
//! and a rank that died never does. `ncclCommAbort` from another thread makes the blocked call return (NCCL user guide,
//! "Fault tolerance"). One thread watches all communicators of the process.
//!
//! **Invariant:** a communicator is aborted at most once, and never while it is idle: a call and the watchdog settle by one
//! compare-and-swap of [`Watched::state`] whether the call ended in time.

use std::ffi::c_void;
use std::ptr;
use std::sync::atomic::{AtomicPtr, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock, Weak};
use std::time::{Duration, Instant};

use super::library::{Comm, Functions};
use crate::runtime::lock;
use crate::runtime::patience::after;

/// How often the thread looks.
const INTERVAL: Duration = Duration::from_millis(20);

/// No call is under way.
const IDLE: u64 = 0;
/// The watchdog aborts, or has aborted.
const ABORTED: u64 = u64::MAX;

/// A communicator as the watchdog sees it.
pub(super) struct Watched {
    functions: &'static Functions,
    /// The communicator: where NCCL writes it while it is being made, null before and after.
    comm: AtomicPtr<c_void>,
    /// [`IDLE`], [`ABORTED`], or when the call under way must have ended, in nanoseconds since [`epoch`].
    state: AtomicU64,
}

impl Watched {
    /// A communicator that is still to be made; the watchdog knows it from now on.
    pub fn new(functions: &'static Functions) -> Arc<Self> {
        let watched = Arc::new(Self { functions, comm: AtomicPtr::new(ptr::null_mut()), state: AtomicU64::new(IDLE) });
        let all = watch();
        let mut all = lock(all);
        all.retain(|other| other.strong_count() > 0);
        all.push(Arc::downgrade(&watched));
        watched
    }

    /// Where NCCL writes the communicator that it makes.
    pub fn place(&self) -> *mut Comm {
        self.comm.as_ptr()
    }

    /// The communicator; null if there is none.
    pub fn comm(&self) -> Comm {
        self.comm.load(Ordering::Acquire)
    }

    /// Makes one call under a deadline. `Err` if the watchdog aborted the communicator meanwhile or before.
    pub fn call<R>(&self, limit: Duration, call: impl FnOnce(Comm) -> R) -> Result<R, Aborted> {
        let due = since_epoch(after(limit));
        self.state.compare_exchange(IDLE, due, Ordering::AcqRel, Ordering::Acquire).map_err(|_| Aborted)?;
        let result = call(self.comm());
        self.state.compare_exchange(due, IDLE, Ordering::AcqRel, Ordering::Acquire).map_err(|_| Aborted)?;
        Ok(result)
    }

    /// Aborts an idle communicator; `false` if that was done before.
    pub fn abort(&self) -> bool {
        self.abort_from(IDLE)
    }

    /// Hands the communicator over to be destroyed; null if it was aborted.
    pub fn take(&self) -> Comm {
        match self.state.compare_exchange(IDLE, ABORTED, Ordering::AcqRel, Ordering::Acquire) {
            Ok(_) => self.comm.swap(ptr::null_mut(), Ordering::AcqRel),
            Err(_) => ptr::null_mut(),
        }
    }

    fn abort_from(&self, state: u64) -> bool {
        if self.state.compare_exchange(state, ABORTED, Ordering::AcqRel, Ordering::Acquire).is_err() {
            return false;
        }
        let comm = self.comm.swap(ptr::null_mut(), Ordering::AcqRel);
        if !comm.is_null() {
            // SAFETY: a live communicator: it is taken out of its place here, once, and only what is in its place is used
            // in other calls. The call that is blocked in it may be aborted from another thread.
            let code = unsafe { (self.functions.abort)(comm) };
            tracing::warn!(code, "a communicator was aborted");
        }
        true
    }

    fn check(&self, now: u64) {
        let due = self.state.load(Ordering::Acquire);
        if due != IDLE && due != ABORTED && due <= now {
            self.abort_from(due);
        }
    }
}

/// The communicator was aborted: nothing may be called on it any more.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Aborted;

/// When the process first asked for the time.
fn epoch() -> Instant {
    static EPOCH: OnceLock<Instant> = OnceLock::new();
    *EPOCH.get_or_init(Instant::now)
}

/// Never [`IDLE`].
fn since_epoch(time: Instant) -> u64 {
    u64::try_from(time.saturating_duration_since(epoch()).as_nanos()).map_or(ABORTED - 1, |nanoseconds| nanoseconds.max(1))
}

/// All communicators; starts the thread that watches them.
fn watch() -> &'static Mutex<Vec<Weak<Watched>>> {
    static ALL: OnceLock<Mutex<Vec<Weak<Watched>>>> = OnceLock::new();
    ALL.get_or_init(|| {
        std::thread::Builder::new().name("oxtile watchdog".into()).spawn(run).expect("a thread for the watchdog");
        Mutex::default()
    })
}

fn run() {
    loop {
        std::thread::sleep(INTERVAL);
        let now = since_epoch(Instant::now());
        let watched: Vec<_> = lock(watch()).iter().filter_map(Weak::upgrade).collect();
        watched.iter().for_each(|watched| watched.check(now));
    }
}
