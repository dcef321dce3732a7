//! Turns the crash of an overflown emulated stack into a message that names its thread.
//!
//! The guard page below a stack makes an overflow a SIGSEGV, after which the thread cannot go on. The handler
//! writes one message and aborts; a SIGSEGV anywhere else goes to the handler that was there before.

use crate::thread::running;
use std::fmt::{self, Write};
use std::mem::MaybeUninit;
use std::ptr;
use std::sync::OnceLock;

/// What handled SIGSEGV before.
static PREVIOUS: OnceLock<libc::sigaction> = OnceLock::new();

/// Bytes above the limit of a stack that count as its guard: a page, whatever its size.
const GUARD_BYTES: usize = 64 << 10;

thread_local! {
    static ALTERNATE: () = ensure_alternate_stack();
}

/// Installs the handler in the process, and on this OS thread a stack for it to run on.
pub(crate) fn install() {
    PREVIOUS.get_or_init(|| {
        let mut previous = MaybeUninit::zeroed();
        // SAFETY: the handler is async-signal-safe, and both actions are valid for reads and writes.
        unsafe {
            let mut action: libc::sigaction = MaybeUninit::zeroed().assume_init();
            action.sa_sigaction = handle as *const () as usize;
            action.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK;
            libc::sigemptyset(&mut action.sa_mask);
            libc::sigaction(libc::SIGSEGV, &action, previous.as_mut_ptr());
            previous.assume_init()
        }
    });
    ALTERNATE.with(|()| ());
}

/// Rust's own threads have an alternate stack; a foreign thread gets one, which lives as long as the process.
fn ensure_alternate_stack() {
    // SAFETY: the structures are valid for reads and writes, and the mapping is never unmapped.
    unsafe {
        let mut current: libc::stack_t = MaybeUninit::zeroed().assume_init();
        if libc::sigaltstack(ptr::null(), &mut current) != 0 || current.ss_flags & libc::SS_DISABLE == 0 {
            return;
        }
        let size = libc::SIGSTKSZ.max(64 << 10);
        let protection = libc::PROT_READ | libc::PROT_WRITE;
        let memory = libc::mmap(ptr::null_mut(), size, protection, libc::MAP_PRIVATE | libc::MAP_ANON, -1, 0);
        if memory != libc::MAP_FAILED {
            libc::sigaltstack(&libc::stack_t { ss_sp: memory, ss_flags: 0, ss_size: size }, ptr::null_mut());
        }
    }
}

/// Text in place: a signal handler must not allocate.
struct Buffer {
    bytes: [u8; 1024],
    used: usize,
}

impl Write for Buffer {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        let fits = text.len().min(self.bytes.len() - self.used);
        self.bytes[self.used..][..fits].copy_from_slice(&text.as_bytes()[..fits]);
        self.used += fits;
        Ok(())
    }
}

extern "C" fn handle(signal: i32, info: *mut libc::siginfo_t, _context: *mut libc::c_void) {
    // SAFETY: the kernel passes a valid `siginfo_t` to an SA_SIGINFO handler.
    let address = unsafe { (*info).si_addr() } as usize;
    // The cell of the running thread is initialised in place and has no destructor: reading it here is safe.
    let overflown = running().filter(|thread| address.wrapping_sub(thread.stack_limit.get()) < GUARD_BYTES);
    let Some(thread) = overflown else {
        if let Some(previous) = PREVIOUS.get() {
            // SAFETY: `previous` is what sigaction returned. The access faults again and goes there.
            unsafe { libc::sigaction(signal, previous, ptr::null_mut()) };
        }
        return;
    };
    let grid = thread.worker().grid();
    let mut text = Buffer { bytes: [0; 1024], used: 0 };
    let _ = writeln!(
        text,
        "oxtile-emulator: stack overflow in kernel `{}`, block {:?}, thread {:?}: its stack has {} bytes\n  \
         mend: raise Options::stack_bytes, or keep fewer values and less recursion in the kernel",
        grid.launch.kernel,
        thread.block().index,
        thread.index,
        grid.options.stack_bytes
    );
    // SAFETY: the buffer holds `used` bytes; write and abort are async-signal-safe.
    unsafe {
        libc::write(libc::STDERR_FILENO, text.bytes.as_ptr().cast(), text.used);
        libc::abort();
    }
}
