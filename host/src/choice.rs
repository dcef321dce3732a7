//! Which kernel or path an operation takes, and why: what it states before it launches anything.

use std::fmt;

use crate::runtime::{Error, Result, Runtime};

/// A decision, and the reasons for it. Displayed as a line for the user: the kernel and why.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Choice<D> {
    /// What is taken.
    pub decision: D,
    /// The entry of its main kernel. None if no kernel is launched: the result is empty, or a library computes it.
    pub kernel: Option<&'static str>,
    /// Why this one.
    pub why: String,
    /// What comes before it where it can be taken, each with why it cannot.
    pub refused: Vec<(D, String)>,
}

impl<D: PartialEq + fmt::Debug> Choice<D> {
    /// Loads what was chosen from its table; none if no kernel is launched.
    pub(crate) fn load<L>(&self, table: Table<D, L>, runtime: &Runtime) -> Result<Option<L>> {
        self.kernel.map(|_| (Entry::find(table, &self.decision)?.load)(runtime)).transpose()
    }
}

impl<D> fmt::Display for Choice<D> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.kernel.unwrap_or("none"), self.why)
    }
}

/// The kernels among which an operation chooses: what is chosen is what is loaded.
#[doc(hidden)]
pub type Table<D, L> = &'static [&'static [Entry<D, L>]];

/// A kernel of a [`Table`].
#[doc(hidden)]
pub struct Entry<D, L> {
    /// The decision for it.
    pub(crate) decision: D,
    /// The entry's name.
    pub(crate) name: &'static str,
    /// Rows and columns of what a block computes at a time: of a product, or of the scores of attention.
    pub(crate) tile: [u64; 2],
    /// Loads it, and what is launched with it.
    pub(crate) load: fn(&Runtime) -> Result<L>,
}

impl<D: PartialEq + fmt::Debug, L> Entry<D, L> {
    /// The kernel of a decision.
    pub(crate) fn find(table: Table<D, L>, decision: &D) -> Result<&'static Self> {
        let found = table.iter().copied().flatten().find(|entry| entry.decision == *decision);
        found.ok_or_else(|| Error::Invalid { what: "Choice", why: format!("no kernel for {decision:?}") })
    }
}
