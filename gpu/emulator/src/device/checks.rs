//! What ends a run.

use crate::{
    fault::FaultKind,
    thread::{acting, current},
};
use std::panic::Location;

/// Ends the run with a trap fault (`trap`).
#[track_caller]
#[inline]
pub fn trap() -> ! {
    current().fail(FaultKind::Trap, Location::caller(), "the kernel trapped".to_owned(), "")
}

/// Ends the run: `index` is not below `length` of the tensor.
#[track_caller]
#[inline]
pub fn out_of_bounds(tensor: &str, index: u64, length: u64) -> ! {
    let message = format!("index {index} of {tensor}, which has length {length}");
    current().fail(FaultKind::OutOfBounds, Location::caller(), message, "keep the index below the length")
}

/// Ends the run: `index` is not below `length` of the view that starts at a global address. The report names the
/// kernel's parameter, or the allocation, that holds the address.
#[cold]
#[track_caller]
pub fn view_out_of_bounds(address: u64, index: u64, length: u64) -> ! {
    let name = current().worker().name_at(address).map_or_else(|| "a view of no live memory".to_owned(), |name| format!("`{name}`"));
    out_of_bounds(&name, index, length)
}

/// Ends the run: `index` is not below `length` of the piece of so many bytes at a shared offset, which the report names.
#[cold]
#[track_caller]
pub fn shared_out_of_bounds(offset: u32, bytes: u32, index: u64, length: u64) -> ! {
    out_of_bounds(&current().worker().shared.place(offset, bytes), index, length)
}

/// Ends the run with `message` unless `condition` holds.
#[track_caller]
#[inline]
pub fn assume(condition: bool, message: &str) {
    if !condition && let Some(thread) = acting() {
        thread.fail(FaultKind::Assumption, Location::caller(), message.to_owned(), "");
    }
}
