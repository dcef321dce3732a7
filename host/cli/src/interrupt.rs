//! Ctrl-C and its kin leave no half-written file behind.

use std::{
    io,
    path::{Path, PathBuf},
    sync::{Arc, Mutex, MutexGuard, PoisonError, atomic::AtomicBool},
    thread,
};

use signal_hook::{
    consts::{SIGHUP, SIGINT, SIGTERM, SIGXFSZ},
    iterator::Signals,
    low_level::emulate_default_handler,
};

/// Files to be removed when a signal ends the process.
static UNFINISHED: Mutex<Vec<PathBuf>> = Mutex::new(Vec::new());

type Forward = Box<dyn Fn(i32) + Send>;

/// What is told of signals instead.
static FORWARD: Mutex<Option<Forward>> = Mutex::new(None);

/// Has signals told to `to` while this lives, instead of ending the process.
pub(crate) fn forward(to: impl Fn(i32) + Send + 'static) -> Forwarding {
    *FORWARD.lock().unwrap_or_else(PoisonError::into_inner) = Some(Box::new(to));
    Forwarding
}

/// Ends the forwarding when it is dropped.
pub(crate) struct Forwarding;

impl Drop for Forwarding {
    fn drop(&mut self) {
        *FORWARD.lock().unwrap_or_else(PoisonError::into_inner) = None;
    }
}

/// Starts the thread that, on SIGINT, SIGTERM or SIGHUP, removes the unfinished files and ends the process as the signal
/// would have. SIGXFSZ (a file over the shell's `ulimit -f`) no longer ends it: the write fails with an error instead.
///
/// # Errors
/// If the system refuses a handler.
pub fn install() -> io::Result<()> {
    signal_hook::flag::register(SIGXFSZ, Arc::new(AtomicBool::new(false)))?;
    let mut signals = Signals::new([SIGINT, SIGTERM, SIGHUP])?;
    thread::Builder::new().name("signals".into()).spawn(move || {
        for signal in signals.forever() {
            if let Some(forward) = &*FORWARD.lock().unwrap_or_else(PoisonError::into_inner) {
                forward(signal);
                continue;
            }
            for path in lock().iter() {
                let _ = std::fs::remove_file(path);
            }
            let _ = emulate_default_handler(signal);
        }
    })?;
    Ok(())
}

/// Has `path` removed if a signal ends the process while the registration lives.
pub(crate) fn remove_on_signal(path: &Path) -> Registration {
    lock().push(path.into());
    Registration(path.into())
}

/// Keeps a file on the list of those that a signal removes.
#[derive(Debug)]
pub(crate) struct Registration(PathBuf);

impl Drop for Registration {
    fn drop(&mut self) {
        lock().retain(|path| *path != self.0);
    }
}

fn lock() -> MutexGuard<'static, Vec<PathBuf>> {
    // The list is whole whatever its last holder did.
    UNFINISHED.lock().unwrap_or_else(PoisonError::into_inner)
}
