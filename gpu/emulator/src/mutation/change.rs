//! One change to one synchronisation site of a kernel.

use crate::report::SyncSite;
use crate::site::Site;
use std::fmt;

/// One change to one synchronisation site.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mutation {
    /// The site, as a [`Report`](crate::Report) lists it.
    pub site: SyncSite,
    /// What is changed.
    pub change: Change,
}

impl Mutation {
    pub(crate) fn is_at(&self, operation: &str, site: Site) -> bool {
        let SyncSite { file, line, column, operation: mine } = &self.site;
        *line == site.line() && *column == site.column() && mine == operation && file == site.file()
    }
}

impl fmt::Display for Mutation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let change = match self.change {
            Change::Skip => "skip",
            Change::CountUp => "count + 1 of",
            Change::CountDown => "count - 1 of",
        };
        write!(f, "{change} {}", self.site)
    }
}

/// What a mutant does at its site.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Change {
    /// The operation is not done; a wait does not wait, a test succeeds.
    Skip,
    /// The count is one too high.
    CountUp,
    /// The count is one too low.
    CountDown,
}

impl Change {
    /// The count to use instead, or nothing to skip the operation.
    pub(crate) fn apply(self, count: u32) -> Option<u32> {
        match self {
            Self::Skip => None,
            Self::CountUp => Some(count + 1),
            Self::CountDown => Some(count.saturating_sub(1)),
        }
    }
}
