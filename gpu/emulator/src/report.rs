//! What a run counted: steps, synchronisation sites, and the cost of memory lines.

use crate::cost::LineCost;
use crate::phases::Phase;
use crate::shared_layout::SharedField;
use crate::site::Site;
use std::collections::BTreeMap;
use std::fmt;

/// A synchronisation operation at a source line.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SyncSite {
    /// Source file.
    pub file: String,
    /// Line.
    pub line: u32,
    /// Column.
    pub column: u32,
    /// The device operation.
    pub operation: String,
}

impl SyncSite {
    pub(crate) fn new(operation: &str, site: Site) -> Self {
        Self { file: site.file().to_owned(), line: site.line(), column: site.column(), operation: operation.to_owned() }
    }
}

impl fmt::Display for SyncSite {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} at {}:{}:{}", self.operation, self.file, self.line, self.column)
    }
}

/// How a synchronisation site was used.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SiteUse {
    /// How often it ran.
    pub visits: u64,
    /// The smallest count given to it, if it takes one.
    pub count: Option<u32>,
}

impl SiteUse {
    pub(crate) fn add(&mut self, other: &Self) {
        self.visits += other.visits;
        self.count = self.count.min(other.count);
    }
}

/// What a run counted. Sites are those of check mode.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Report {
    /// Resumptions of emulated threads on the calling OS thread.
    pub steps: u64,
    /// Synchronisation sites that ran.
    pub sites: BTreeMap<SyncSite, SiteUse>,
    /// Memory requests by source line, with [`Options::explain`](crate::Options::explain).
    pub lines: Vec<LineCost>,
    /// The type of the shared memory's layout and its fields, with [`Options::explain`](crate::Options::explain).
    pub shared: Option<(String, Vec<SharedField>)>,
    /// The boxes that tensor maps copied to or from shared memory, with [`Options::explain`](crate::Options::explain).
    pub boxes: Vec<BoxCopy>,
    /// The phases of the first block's mbarriers, with [`Options::explain`](crate::Options::explain).
    pub phases: Vec<Phase>,
}

/// A copy of a box by a tensor map.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct BoxCopy {
    /// The piece of shared memory where it begins, such as `a` of `Shared`; of a ring the first of its stages that a copy went to.
    pub place: String,
    /// Elements of the box in each dimension, innermost first.
    pub dimensions: Vec<u32>,
    /// Bytes an element.
    pub element_bytes: u32,
    /// Bytes of the swizzle's span: 32, 64 or 128; 0 without swizzle.
    pub swizzle: u32,
}

impl Report {
    /// Adds another launch's counts, for a job of several launches.
    pub fn merge(&mut self, other: &Self) {
        self.steps += other.steps;
        for (site, seen) in &other.sites {
            self.sites.entry(site.clone()).and_modify(|known| known.add(seen)).or_insert(*seen);
        }
        for line in &other.lines {
            let same = |known: &&mut LineCost| (&known.file, known.line, known.operation) == (&line.file, line.line, line.operation);
            match self.lines.iter_mut().find(same) {
                Some(known) => {
                    known.requests += line.requests;
                    known.transactions += line.transactions;
                    known.ideal += line.ideal;
                }
                None => self.lines.push(line.clone()),
            }
        }
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{} steps", self.steps)?;
        for line in &self.lines {
            let shared = line.operation.starts_with("shared");
            let unit = if shared { "wavefronts" } else { "sectors" };
            let LineCost { file, line, operation, requests, transactions, ideal } = line;
            writeln!(f, "{file}:{line}: {operation}: {requests} requests, {transactions} {unit} (ideal {ideal})")?;
        }
        Ok(())
    }
}
