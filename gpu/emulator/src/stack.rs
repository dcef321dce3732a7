//! Pooled coroutine stacks.

use corosensei::stack::{DefaultStack, Stack, StackPointer};
use std::io;
use std::sync::{Mutex, PoisonError};

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

/// Stacks of runs that ended, by their size, for other runs: a worker and a launch under way have OS threads of their own, which end with them.
static IDLE: Mutex<Vec<(usize, Vec<PooledStack>)>> = Mutex::new(Vec::new());

/// Idle stacks of one size that are kept; mapping one costs as much as thousands of switches. Each is two of the 65530 mappings that a Linux process may have.
const MOST_IDLE: usize = 12288;
/// Idle stacks that a run takes at once.
const TAKEN: usize = 512;

/// The stacks of one run on one OS thread.
pub(crate) struct StackPool {
    bytes: usize,
    made: usize,
    free: Vec<PooledStack>,
}

impl StackPool {
    pub fn new(bytes: usize) -> Self {
        Self { bytes, made: 0, free: Vec::new() }
    }

    /// Leaves the stacks to other runs.
    pub fn keep(&mut self) {
        let left = with_idle(self.bytes, |idle| {
            idle.append(&mut self.free);
            idle.split_off(idle.len().min(MOST_IDLE))
        });
        // Unmapped without the lock.
        drop(left);
    }

    pub fn take(&mut self) -> io::Result<PooledStack> {
        if self.free.is_empty() {
            self.free = with_idle(self.bytes, |idle| idle.split_off(idle.len().saturating_sub(TAKEN)));
        }
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

/// The idle stacks of a size.
fn with_idle<R>(bytes: usize, change: impl FnOnce(&mut Vec<PooledStack>) -> R) -> R {
    let mut idle = IDLE.lock().unwrap_or_else(PoisonError::into_inner);
    let at = idle.iter().position(|(size, _)| *size == bytes).unwrap_or_else(|| {
        idle.push((bytes, Vec::new()));
        idle.len() - 1
    });
    change(&mut idle[at].1)
}
