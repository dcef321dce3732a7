//! Threads that other processes need: the end of this process waits for them.

use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Mutex, Once};
use std::thread::JoinHandle;

use crate::runtime::lock;

static THREADS: Mutex<Vec<JoinHandle<()>>> = Mutex::new(Vec::new());
/// The process that has the threads: a child that it forks inherits the list and the handler, but no thread.
static PROCESS: AtomicU32 = AtomicU32::new(0);

/// Makes the orderly end of the process wait for this thread, which has a time limit of its own.
pub fn join(thread: JoinHandle<()>) {
    static REGISTERED: Once = Once::new();
    let mut threads = lock(&THREADS);
    threads.retain(|thread| !thread.is_finished());
    threads.push(thread);
    PROCESS.store(std::process::id(), Ordering::Relaxed);
    REGISTERED.call_once(|| {
        // SAFETY: a function of the C library with the signature of its header; what it is to call lives as long as the process. Without room
        // for one more the process ends at once, as it does without this.
        let _ = unsafe { atexit(join_all) };
    });
}

unsafe extern "C" {
    fn atexit(function: extern "C" fn()) -> std::ffi::c_int;
}

extern "C" fn join_all() {
    if PROCESS.load(Ordering::Relaxed) != std::process::id() {
        return;
    }
    let threads = std::mem::take(&mut *lock(&THREADS));
    threads.into_iter().for_each(|thread| _ = thread.join());
}
