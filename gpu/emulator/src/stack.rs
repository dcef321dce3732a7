//! Pooled coroutine stacks.

use corosensei::stack::{DefaultStack, Stack, StackPointer};
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

/// Stacks of one OS thread, used again and again.
pub(crate) struct StackPool {
    bytes: usize,
    made: usize,
    free: Vec<PooledStack>,
}

impl StackPool {
    pub fn new(bytes: usize) -> Self {
        Self { bytes, made: 0, free: Vec::new() }
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
