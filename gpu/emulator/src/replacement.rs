//! Kernels that were compiled after the program and run in place of its own: an edit of a kernel need not compile what launches it.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::OnceLock;

/// A kernel as [`Launch::body`](crate::Launch::body) has it.
pub type Body = fn(&[u64]);

/// How the symbol of such a kernel begins; its name follows. `#[kernel]` exports it under `cfg(oxtile_replacement)`.
pub const SYMBOL: &str = "oxtile_emulate_";

/// Kernels in place of a program's own.
#[derive(Debug)]
pub struct Replacements {
    /// By their names.
    pub kernels: BTreeMap<String, Body>,
    /// Families of which the program's own kernels are not to run.
    pub changed: BTreeSet<String>,
    /// Called with the name of such a kernel where one is launched.
    pub missing: fn(&str),
}

static REPLACEMENTS: OnceLock<Replacements> = OnceLock::new();

/// Takes these kernels from now on. Once in a program: false if it was done before, and nothing has changed then.
pub fn replace(replacements: Replacements) -> bool {
    REPLACEMENTS.set(replacements).is_ok()
}

/// What runs in place of the kernel of this name and family.
pub fn of(kernel: &str, family: &str) -> Option<Body> {
    let replacements = REPLACEMENTS.get()?;
    let found = replacements.kernels.get(kernel).copied();
    if found.is_none() && replacements.changed.contains(family) {
        (replacements.missing)(kernel);
    }
    found
}
