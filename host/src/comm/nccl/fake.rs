//! An NCCL of one rank that does what a test sets: its communicator is the test's own record of what was called.

use std::cell::{Cell, RefCell};
use std::ffi::{c_char, c_int, c_void};
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU32, Ordering};
use std::time::{Duration, Instant};

use super::library::{Comm, Config, CudaStream, Functions, SUCCESS, UniqueId};

/// What the communicator does and what was done to it.
#[derive(Default)]
pub struct Fake {
    /// The result of calls that only return one.
    pub code: AtomicI32,
    /// What `ncclCommGetAsyncError` reports.
    pub async_error: AtomicI32,
    /// Whether calls wait until the communicator is aborted, as for a rank that never comes.
    pub blocks: AtomicBool,
    pub aborted: AtomicU32,
    pub finalized: AtomicU32,
    pub destroyed: AtomicU32,
    pub calls: AtomicU32,
    /// Calls in groups that are open.
    pub queued: AtomicU32,
    /// Aborts while there were open groups.
    pub torn: AtomicU32,
}

thread_local! {
    static DEPTH: Cell<u32> = const { Cell::new(0) };
    /// The communicators of the calls of this thread's group.
    static QUEUE: RefCell<Vec<&'static Fake>> = const { RefCell::new(Vec::new()) };
}

/// How many groups this thread has begun and not ended.
pub fn depth() -> u32 {
    DEPTH.get()
}

impl Fake {
    /// A record that outlives every thread, and the id that leads to it.
    pub fn leaked() -> (&'static Self, UniqueId) {
        let fake: &'static Self = Box::leak(Box::default());
        let mut bytes = [0; UniqueId::BYTES];
        bytes[..8].copy_from_slice(&(std::ptr::from_ref(fake).expose_provenance() as u64).to_le_bytes());
        (fake, UniqueId::from_bytes(bytes))
    }

    /// A call that is made at the end of the group, if there is one and nothing is wrong with it.
    fn enqueue(&'static self) -> c_int {
        if depth() == 0 || self.code.load(Ordering::Acquire) != SUCCESS {
            return self.answer();
        }
        self.queued.fetch_add(1, Ordering::AcqRel);
        QUEUE.with_borrow_mut(|queue| queue.push(self));
        SUCCESS
    }

    fn answer(&self) -> c_int {
        self.calls.fetch_add(1, Ordering::Relaxed);
        let start = Instant::now();
        while self.blocks.load(Ordering::Acquire) && self.aborted.load(Ordering::Acquire) == 0 {
            assert!(start.elapsed() < Duration::from_secs(20), "no thread aborted a call that blocks");
            std::thread::sleep(Duration::from_millis(1));
        }
        self.code.load(Ordering::Acquire)
    }
}

fn fake(comm: Comm) -> &'static Fake {
    // SAFETY: every communicator of these functions is the address of a leaked `Fake`.
    unsafe { &*comm.cast_const().cast() }
}

unsafe extern "C" fn init(place: *mut Comm, _: c_int, id: UniqueId, _: c_int, _: *mut Config) -> c_int {
    let address = u64::from_le_bytes(id.as_bytes()[..8].try_into().unwrap());
    let comm = std::ptr::with_exposed_provenance_mut(address as usize);
    // SAFETY: the caller gives a valid place.
    unsafe { *place = comm };
    fake(comm).answer()
}

unsafe extern "C" fn split(_: Comm, _: c_int, _: c_int, _: *mut Comm, _: *mut Config) -> c_int {
    SUCCESS
}

unsafe extern "C" fn number(_: Comm, number: *mut c_int) -> c_int {
    // SAFETY: the caller gives a valid place.
    unsafe { *number = 1 };
    SUCCESS
}

unsafe extern "C" fn async_error(comm: Comm, code: *mut c_int) -> c_int {
    // SAFETY: the caller gives a valid place.
    unsafe { *code = fake(comm).async_error.load(Ordering::Acquire) };
    SUCCESS
}

unsafe extern "C" fn finalize(comm: Comm) -> c_int {
    fake(comm).finalized.fetch_add(1, Ordering::AcqRel);
    fake(comm).answer()
}

unsafe extern "C" fn destroy(comm: Comm) -> c_int {
    fake(comm).destroyed.fetch_add(1, Ordering::AcqRel);
    SUCCESS
}

unsafe extern "C" fn abort(comm: Comm) -> c_int {
    if fake(comm).queued.load(Ordering::Acquire) > 0 {
        fake(comm).torn.fetch_add(1, Ordering::AcqRel);
    }
    fake(comm).aborted.fetch_add(1, Ordering::AcqRel);
    SUCCESS
}

unsafe extern "C" fn version(_: *mut c_int) -> c_int {
    SUCCESS
}

unsafe extern "C" fn unique_id(_: *mut UniqueId) -> c_int {
    SUCCESS
}

unsafe extern "C" fn string(code: c_int) -> *const c_char {
    if code == 6 { c"remote error".as_ptr() } else { c"other".as_ptr() }
}

unsafe extern "C" fn last_error(_: Comm) -> *const c_char {
    c"the other side hung up".as_ptr()
}

unsafe extern "C" fn group_start() -> c_int {
    DEPTH.set(depth() + 1);
    SUCCESS
}

/// Makes the calls of the outermost group; without a group it is an error, as of NCCL.
unsafe extern "C" fn group_end() -> c_int {
    let Some(depth) = depth().checked_sub(1) else { return 5 };
    DEPTH.set(depth);
    let queue = if depth == 0 { QUEUE.take() } else { Vec::new() };
    queue.iter().for_each(|fake| _ = fake.queued.fetch_sub(1, Ordering::AcqRel));
    queue.iter().map(|fake| fake.answer()).find(|code| *code != SUCCESS).unwrap_or(SUCCESS)
}

unsafe extern "C" fn reduce(_: *const c_void, _: *mut c_void, _: usize, _: c_int, _: c_int, comm: Comm, _: CudaStream) -> c_int {
    fake(comm).enqueue()
}

unsafe extern "C" fn gather(_: *const c_void, _: *mut c_void, _: usize, _: c_int, comm: Comm, _: CudaStream) -> c_int {
    fake(comm).enqueue()
}

unsafe extern "C" fn send(_: *const c_void, _: usize, _: c_int, _: c_int, comm: Comm, _: CudaStream) -> c_int {
    fake(comm).enqueue()
}

unsafe extern "C" fn receive(_: *mut c_void, _: usize, _: c_int, _: c_int, comm: Comm, _: CudaStream) -> c_int {
    fake(comm).enqueue()
}

pub static FUNCTIONS: Functions = Functions {
    get_version: version,
    get_unique_id: unique_id,
    init,
    split,
    count: number,
    user_rank: number,
    async_error,
    finalize,
    destroy,
    abort,
    error_string: string,
    last_error,
    group_start,
    group_end,
    all_reduce: reduce,
    all_gather: gather,
    reduce_scatter: reduce,
    broadcast: reduce,
    send,
    receive,
};
