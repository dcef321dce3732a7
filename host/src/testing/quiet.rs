//! Panics of runs that only look for them: they are not printed.

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
    let was_quiet = IS_QUIET.replace(true);
    let result = body();
    IS_QUIET.set(was_quiet);
    result
}
