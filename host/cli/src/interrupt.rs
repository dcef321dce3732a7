//! Ctrl-C and its kin leave no half-written file behind.

use std::{
    io,
    mem::MaybeUninit,
    path::PathBuf,
    process, ptr,
    sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, atomic::AtomicBool},
    thread,
    time::{Duration, Instant},
};

use signal_hook::{
    consts::{SIGALRM, SIGCONT, SIGHUP, SIGINT, SIGQUIT, SIGTERM, SIGTSTP, SIGUSR1, SIGUSR2, SIGWINCH, SIGXFSZ},
    iterator::{Handle, Signals},
    low_level::emulate_default_handler,
};
use tempfile::NamedTempFile;

/// Files to be removed when a signal ends the process.
static UNFINISHED: Mutex<Vec<PathBuf>> = Mutex::new(Vec::new());

type Forward = Box<dyn Fn(i32) + Send>;

/// The channel that is told of signals instead.
static FORWARD: Mutex<Option<Forward>> = Mutex::new(None);

/// What the thread of [`install`] listens to.
static SIGNALS: OnceLock<Handle> = OnceLock::new();

/// Sends signals to `to` while this lives, instead of ending the process; those of [`JOB_CONTROL`] too, which then lose their usual effect: the receiver
/// of SIGTSTP has to [`stop`] the process.
pub(crate) fn forward(to: impl Fn(i32) + Send + 'static) -> Forwarding {
    // A signal that the system does not let a process catch stays as it is.
    let heard = SIGNALS.get().into_iter().flat_map(|signals| JOB_CONTROL.iter().map(move |signal| (signals, *signal)));
    heard.filter(|(_, signal)| disposition(*signal) != libc::SIG_IGN).for_each(|(signals, signal)| _ = signals.add_signal(signal));
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

/// Stops the process as SIGTSTP by itself does, until SIGCONT comes. Returns how long that was.
pub(crate) fn stop() -> Duration {
    let begin = Instant::now();
    let _ = emulate_default_handler(SIGTSTP);
    begin.elapsed()
}

/// The signals that ask a process to end, or would end it unasked, and which a launcher passes on.
const ENDS: [i32; 7] = [SIGINT, SIGTERM, SIGHUP, SIGQUIT, SIGALRM, SIGUSR1, SIGUSR2];
/// Others that end a process, which are about this one alone: its limits, its timers, its machine. Those of real time are like them.
const LIMITS: [i32; 6] = [libc::SIGXCPU, libc::SIGVTALRM, libc::SIGPROF, libc::SIGIO, libc::SIGPWR, libc::SIGSTKFLT];
/// The signals of a terminal, and of a shell with jobs, to a process that goes on.
const JOB_CONTROL: [i32; 3] = [SIGTSTP, SIGCONT, SIGWINCH];

/// Starts the thread that, on a signal that ends a process, removes the unfinished files and ends the process as the signal would have. What was
/// ignored stays so (nohup(1)), and so does what a library handles that was loaded before, of the limits.
/// SIGXFSZ (a file over the shell's `ulimit -f`) no longer ends it: the write fails with an error instead.
///
/// # Errors
/// If the system refuses a handler.
pub fn install() -> io::Result<()> {
    signal_hook::flag::register(SIGXFSZ, Arc::new(AtomicBool::new(false)))?;
    let others = || LIMITS.into_iter().chain(libc::SIGRTMIN()..=libc::SIGRTMAX()).filter(|&signal| disposition(signal) == libc::SIG_DFL);
    let mut signals =
        Signals::new(ENDS.into_iter().filter(|&signal| signal != SIGHUP || disposition(signal) != libc::SIG_IGN).chain(others()))?;
    let _ = SIGNALS.set(signals.handle());
    thread::Builder::new().name("signals".into()).spawn(move || {
        for signal in signals.forever() {
            let passed_on = ENDS.contains(&signal) || JOB_CONTROL.contains(&signal);
            if let Some(forward) = FORWARD.lock().unwrap_or_else(PoisonError::into_inner).as_ref().filter(|_| passed_on) {
                forward(signal);
            } else if JOB_CONTROL.contains(&signal) {
                let _ = emulate_default_handler(signal);
            } else {
                // Held until the process has ended: no file is made meanwhile.
                let unfinished = lock();
                for path in unfinished.iter() {
                    let _ = std::fs::remove_file(path);
                }
                end(signal);
            }
        }
    })?;
    Ok(())
}

/// Ends the process as a signal does that it does not handle.
fn end(signal: i32) -> ! {
    let mut only = MaybeUninit::<libc::sigset_t>::zeroed();
    // SAFETY: the calls write the set that is theirs alone, and give the signal back its default effect, which is to end the process.
    unsafe {
        libc::sigemptyset(only.as_mut_ptr());
        libc::sigaddset(only.as_mut_ptr(), signal);
        libc::signal(signal, libc::SIG_DFL);
        libc::pthread_sigmask(libc::SIG_UNBLOCK, only.as_ptr(), ptr::null_mut());
        libc::raise(signal);
    }
    process::exit(128 + signal)
}

/// What a signal does now: the parent of the process may have had it ignored, and a library may handle it.
fn disposition(signal: i32) -> libc::sighandler_t {
    let mut action = MaybeUninit::<libc::sigaction>::zeroed();
    // SAFETY: a null pointer changes nothing; the other is to a value of the type that sigaction(2) writes, for which all bytes 0 are a value.
    let action = unsafe {
        libc::sigaction(signal, ptr::null(), action.as_mut_ptr());
        action.assume_init()
    };
    action.sa_sigaction
}

/// Makes a file that a signal which ends the process removes while the registration lives. No signal comes between the two.
///
/// # Errors
/// Of `create`.
pub(crate) fn removed_on_signal<F>(create: impl FnOnce() -> io::Result<NamedTempFile<F>>) -> io::Result<(NamedTempFile<F>, Registration)> {
    let mut unfinished = lock();
    let file = create()?;
    unfinished.push(file.path().into());
    let registration = Registration(file.path().into());
    Ok((file, registration))
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
