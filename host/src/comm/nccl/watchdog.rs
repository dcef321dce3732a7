//! The deadline of calls that block: a thread that aborts a communicator whose call takes too long.
//!
//! NCCL's calls return when their work is enqueued, but the first of them connects the ranks and waits for all to come,
//! and a rank that died never does. `ncclCommAbort` from another thread makes the blocked call return (NCCL user guide,
//! "Fault tolerance"). One thread watches all communicators of the process.
//!
//! **Invariant:** a communicator is aborted at most once, and never while a group is open on it: the calls that are queued in the group name the
//! communicator until `ncclGroupEnd` has taken them. A failure meanwhile marks it as broken, so that no call begins on it any more, and the thread that ends
//! the last of its groups aborts it. All that is settled under one lock, [`Watched::state`], which is not held while NCCL is called.

use std::ffi::{c_int, c_void};
use std::ptr;
use std::sync::atomic::{AtomicPtr, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError, Weak};
use std::time::{Duration, Instant};

use super::library::{Comm, Functions, SUCCESS};
use crate::runtime::lock;
use crate::runtime::patience::after;

/// How often the thread looks.
const INTERVAL: Duration = Duration::from_millis(20);
/// The longest that the end of a group may take on a communicator that is broken already.
const GRACE: Duration = Duration::from_millis(500);

/// A communicator as the watchdog sees it.
pub(super) struct Watched {
    functions: &'static Functions,
    /// The communicator: where NCCL writes it while it is being made, null before and after.
    comm: AtomicPtr<c_void>,
    state: Mutex<State>,
    /// No call is under way any more, or it is broken.
    turn: Condvar,
}

#[derive(Default)]
struct State {
    /// When the call under way must have ended: NCCL wants one at a time.
    due: Option<Instant>,
    /// The last call that was begun, and its number.
    last: (&'static str, u64),
    /// Groups that threads have begun and not begun to end.
    open: u32,
    /// When each group that is ending on a broken communicator must have ended. These ends do not wait for other calls.
    ends: Vec<Instant>,
    /// Whether it is broken: nothing begins on it any more, and it is aborted as soon as it may be.
    broken: bool,
}

impl State {
    fn may_abort(&self) -> bool {
        let now = Instant::now();
        self.broken && self.open == 0 && self.due.iter().chain(&self.ends).all(|due| *due <= now)
    }
}

impl Watched {
    /// A communicator that is still to be made; the watchdog knows it from now on.
    pub fn new(functions: &'static Functions) -> Arc<Self> {
        let (comm, state, turn) = (AtomicPtr::new(ptr::null_mut()), Mutex::default(), Condvar::new());
        let watched = Arc::new(Self { functions, comm, state, turn });
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

    /// The last call that was begun, and how many were begun. If a deadline broke the communicator, that call was late.
    pub fn last(&self) -> (&'static str, u64) {
        lock(&self.state).last
    }

    /// Makes one call under a deadline, after those of other threads. `Err` if the communicator broke meanwhile or before.
    pub fn call<R>(&self, name: &'static str, limit: Duration, call: impl FnOnce(Comm) -> R) -> Result<R, Aborted> {
        let mut state = self.await_turn();
        if state.broken {
            return Err(Aborted);
        }
        self.begin(&mut state, name, limit);
        let comm = self.comm();
        drop(state);
        let result = call(comm);
        self.settle(|state| state.due = None).map(|()| result)
    }

    /// Begins a group of this thread, whose calls are queued until its [end](Self::end_group): until then the communicator is not aborted.
    /// Returns what `ncclGroupStart` returns. After an `Err` or a failure no group is open.
    pub fn open_group(&self) -> Result<c_int, Aborted> {
        {
            let mut state = lock(&self.state);
            if state.broken {
                return Err(Aborted);
            }
            state.open += 1;
        }
        // SAFETY: no arguments.
        let code = unsafe { (self.functions.group_start)() };
        if code != SUCCESS {
            let _ = self.settle(|state| state.open -= 1);
        }
        Ok(code)
    }

    /// Ends the group of this thread, also of a broken communicator, which is aborted after the last of its groups; `Err` then.
    ///
    /// # Safety
    /// The thread opened a group, and has not ended it.
    pub unsafe fn end_group(&self, limit: Duration) -> Result<c_int, Aborted> {
        let mut state = self.await_turn();
        let broken = state.broken.then(|| after(limit.min(GRACE)));
        match broken {
            Some(due) => state.ends.push(due),
            None => self.begin(&mut state, "ncclGroupEnd", limit),
        }
        state.open -= 1;
        drop(state);
        // SAFETY: the caller vouches for the start. What its calls name is alive: it was not aborted while the group was open, and is not
        // until this has returned or, as any call, is late, when the abort makes it return.
        let code = unsafe { (self.functions.group_end)() };
        let ended = self.settle(|state| match broken {
            Some(due) => _ = state.ends.iter().position(|other| *other == due).map(|at| state.ends.swap_remove(at)),
            None => state.due = None,
        });
        ended.map(|()| code)
    }

    /// Breaks the communicator: nothing begins on it any more. It is aborted now, or when its groups and the call under way have ended.
    pub fn abort(&self) {
        let _ = self.settle(|state| state.broken = true);
    }

    /// Hands the communicator over to be destroyed; null if it was aborted.
    pub fn take(&self) -> Comm {
        let mut state = lock(&self.state);
        if std::mem::replace(&mut state.broken, true) { ptr::null_mut() } else { self.comm.swap(ptr::null_mut(), Ordering::AcqRel) }
    }

    /// No call is under way, or the communicator is broken.
    fn await_turn(&self) -> MutexGuard<'_, State> {
        let state = lock(&self.state);
        self.turn.wait_while(state, |state| state.due.is_some() && !state.broken).unwrap_or_else(PoisonError::into_inner)
    }

    fn begin(&self, state: &mut State, name: &'static str, limit: Duration) {
        state.due = Some(after(limit));
        state.last = (name, state.last.1 + 1);
    }

    /// Notes what has happened, and aborts the communicator if that is due. `Err` if it is broken.
    fn settle(&self, note: impl FnOnce(&mut State)) -> Result<(), Aborted> {
        let mut state = lock(&self.state);
        note(&mut state);
        let comm = if state.may_abort() { self.comm.swap(ptr::null_mut(), Ordering::AcqRel) } else { ptr::null_mut() };
        let broken = state.broken;
        drop(state);
        self.turn.notify_all();
        if !comm.is_null() {
            // SAFETY: a live communicator: it is taken out of its place here, once, and only what is in its place is used in other calls. No
            // group with calls that name it is open. A call that is late and blocked in it may be aborted from another thread.
            let code = unsafe { (self.functions.abort)(comm) };
            tracing::warn!(code, "a communicator was aborted");
        }
        if broken { Err(Aborted) } else { Ok(()) }
    }

    /// Breaks it if its call is late.
    fn check(&self, now: Instant) {
        let is_late = |state: &State| state.due.is_some_and(|due| due <= now);
        let _ = self.settle(|state| state.broken |= is_late(state));
    }
}

/// The communicator is broken: nothing may be called on it any more.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Aborted;

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
        let now = Instant::now();
        let watched: Vec<_> = lock(watch()).iter().filter_map(Weak::upgrade).collect();
        watched.iter().for_each(|watched| watched.check(now));
    }
}
