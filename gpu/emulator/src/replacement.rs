//! Kernels that were compiled after the program and run in place of its own: an edit of a kernel need not compile what launches it.

use std::collections::BTreeMap;
use std::sync::OnceLock;

/// A kernel as [`Launch::body`](crate::Launch::body) has it.
pub type Body = fn(&[u64]);

/// How the symbol of such a kernel begins; its name follows. `#[kernel]` exports it under `cfg(oxtile_replacement)`.
pub const SYMBOL: &str = "oxtile_emulate_";

static REPLACEMENTS: OnceLock<BTreeMap<String, Body>> = OnceLock::new();

/// Takes these kernels, by their names, in place of the program's own from now on. Once in a program: false if it was done before, and nothing has
/// changed then.
pub fn replace(kernels: BTreeMap<String, Body>) -> bool {
    REPLACEMENTS.set(kernels).is_ok()
}

/// What runs in place of the kernel of this name.
pub fn of(kernel: &str) -> Option<Body> {
    REPLACEMENTS.get()?.get(kernel).copied()
}
