//! Runs whose panics are not printed: those of a search.

use std::cell::Cell;
use std::panic;
use std::sync::Once;

thread_local! {
    static IS_QUIET: Cell<bool> = const { Cell::new(false) };
}

/// Runs without printing the panics of this thread, which `body` catches.
pub(super) fn run<T>(body: impl FnOnce() -> T) -> T {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        let previous = panic::take_hook();
        panic::set_hook(Box::new(move |info| {
            if !IS_QUIET.get() {
                previous(info);
            }
        }));
    });
    let _guard = Guard(IS_QUIET.replace(true));
    body()
}

/// Ends the silence, also where `body` unwinds.
struct Guard(bool);

impl Drop for Guard {
    fn drop(&mut self) {
        IS_QUIET.set(self.0);
    }
}
