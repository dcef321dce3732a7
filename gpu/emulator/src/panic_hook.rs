//! Keeps the message of a panic inside a kernel for the fault, instead of letting it be printed. And runs in which no panic is printed.

use crate::fault::Involved;
use crate::thread::running;
use std::cell::{Cell, RefCell};
use std::panic;
use std::sync::Once;

thread_local! {
    static LAST: RefCell<Option<(String, String)>> = const { RefCell::new(None) };
    static IS_QUIET: Cell<bool> = const { Cell::new(false) };
}

/// Runs without printing the panics of this thread, which `body` catches. Panics inside kernels become faults as ever.
pub fn quietly<T>(body: impl FnOnce() -> T) -> T {
    /// Ends the silence, also where `body` unwinds.
    struct Guard(bool);

    impl Drop for Guard {
        fn drop(&mut self) {
            IS_QUIET.set(self.0);
        }
    }

    install();
    let _guard = Guard(IS_QUIET.replace(true));
    body()
}

/// Puts a hook before the process's own, once; panics outside kernels go to that as before.
pub(crate) fn install() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        let previous = panic::take_hook();
        panic::set_hook(Box::new(move |info| {
            let Some(thread) = running() else {
                if !IS_QUIET.get() {
                    previous(info);
                }
                return;
            };
            thread.unwinding.set(true);
            let message = info.payload_as_str().unwrap_or("the kernel panicked").to_owned();
            let place = info.location().map(ToString::to_string).unwrap_or_default();
            LAST.set(Some((message, place)));
        }));
    });
}

/// The last panic's message with its place.
pub(crate) fn take() -> (String, Vec<Involved>) {
    let (message, place) = LAST.take().unwrap_or_else(|| ("the kernel unwound".to_owned(), "an unknown line".to_owned()));
    (format!("{message} (at {place})"), Vec::new())
}
