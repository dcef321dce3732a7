//! Pooled coroutine stacks.

use corosensei::stack::{DefaultStack, Stack, StackPointer};
use std::cell::RefCell;
use std::io;

/// A stack whose top is displaced, so that the hot lines of a warp's stacks fall into different cache sets.
pub(crate) struct PooledStack {
    inner: DefaultStack,
    base: StackPointer,
}

/// Distance of two tops, modulo [`COLOURS`]; an odd number of 64-byte lines.
const STRIDE: usize = 7 * 64;
const COLOURS: usize = 32;

impl PooledStack {
    fn new(bytes: usize, colour: usize) -> io::Result<Self> {
        let offset = colour % COLOURS * STRIDE;
        let inner = DefaultStack::new(bytes + COLOURS * STRIDE)?;
        let base = StackPointer::new(inner.base().get() - offset).expect("a stack does not start at address zero");
        Ok(Self { inner, base })
    }
}

// SAFETY: `DefaultStack` has the guard page and the size; `base` is inside it, displaced by less than the
// surplus that was allocated and by a multiple of 64.
unsafe impl Stack for PooledStack {
    fn base(&self) -> StackPointer {
        self.base
    }

    fn limit(&self) -> StackPointer {
        self.inner.limit()
    }
}

thread_local! {
    /// Stacks of runs that ended on this OS thread, for the next run with stacks of the same size.
    static IDLE: RefCell<Vec<StackPool>> = const { RefCell::new(Vec::new()) };
}

/// Idle stacks of one size that an OS thread keeps; mapping one costs as much as thousands of switches.
const MOST_IDLE: usize = 4096;

/// The stacks of one run on one OS thread.
pub(crate) struct StackPool {
    bytes: usize,
    made: usize,
    free: Vec<PooledStack>,
}

impl StackPool {
    /// A pool with the stacks of earlier runs.
    pub fn new(bytes: usize) -> Self {
        let left = IDLE.with_borrow_mut(|idle| idle.iter().position(|pool| pool.bytes == bytes).map(|at| idle.swap_remove(at)));
        left.unwrap_or(Self { bytes, made: 0, free: Vec::new() })
    }

    /// Leaves the stacks to later runs.
    pub fn keep(&mut self) {
        let pool = Self { bytes: self.bytes, made: self.made, free: std::mem::take(&mut self.free) };
        // A run that is dropped while its OS thread ends leaves no stacks.
        let _ = IDLE.try_with(|idle| {
            let mut idle = idle.borrow_mut();
            match idle.iter_mut().find(|other| other.bytes == pool.bytes) {
                Some(other) => other.free.extend(pool.free),
                None => idle.push(pool),
            }
            idle.iter_mut().for_each(|pool| pool.free.truncate(MOST_IDLE));
        });
    }

    pub fn take(&mut self) -> io::Result<PooledStack> {
        self.free.pop().map_or_else(
            || {
                self.made += 1;
                PooledStack::new(self.bytes, self.made)
            },
            Ok,
        )
    }

    pub fn give(&mut self, stack: PooledStack) {
        self.free.push(stack);
    }
}
