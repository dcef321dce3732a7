//! What ranks tell each other on their hosts.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

use crate::rank::SymmetricError;
use crate::rank::{Rank, WorldSize};
use crate::runtime::runtime::lock;
use crate::runtime::{Error, Result};

/// A board on which each rank pins notes that all ranks can read: the control plane of a rendezvous. Every wait has a deadline.
pub trait Board: fmt::Debug + Send + Sync {
    /// Pins a note; a note of that key is replaced.
    ///
    /// # Errors
    /// An error of the transport.
    fn publish(&self, from: Rank, key: &str, note: Vec<u8>) -> Result<()>;

    /// As [`publish`](Self::publish), for some ranks: the others need not be able to read it.
    ///
    /// # Errors
    /// An error of the transport.
    fn publish_to(&self, _readers: &[Rank], from: Rank, key: &str, note: Vec<u8>) -> Result<()> {
        self.publish(from, key, note)
    }

    /// Waits until a rank has pinned a note and reads it. What was pinned before the rank gave up can still be read.
    ///
    /// # Errors
    /// [`SymmetricError::Missing`] after `patience`; [`SymmetricError::Aborted`] as soon as the rank has given up or is gone.
    fn read(&self, from: Rank, key: &str, patience: Duration) -> Result<Vec<u8>>;

    /// Tells all ranks that a rank will pin no more notes with keys that begin with `scope`, or no more at all without one: a rank that waits for
    /// one gets `why`.
    fn give_up(&self, rank: Rank, scope: Option<&str>, why: &str);

    /// Drops all ranks' notes of a key, as far as this process holds them: every rank has read them.
    fn forget(&self, _key: &str) {}

    /// Drops all ranks' notes with keys that begin with `scope`, which this rank does not read any more, if no other rank reads this copy.
    fn leave(&self, _scope: &str) {}

    /// A name that all ranks' boards share and that no other board of this process has had; none where ranks are processes.
    fn name(&self) -> Option<String> {
        None
    }
}

/// Every rank's note of a key, in the order of ranks. The error names all ranks that are missing.
pub(crate) fn gather(board: &dyn Board, world: WorldSize, key: &str, patience: Duration) -> Result<Vec<Vec<u8>>> {
    gather_of(board, &world.ranks().collect::<Vec<_>>(), key, patience)
}

/// The notes of some ranks, in the order named.
pub(crate) fn gather_of(board: &dyn Board, ranks: &[Rank], key: &str, patience: Duration) -> Result<Vec<Vec<u8>>> {
    let start = Instant::now();
    let (mut found, mut missing) = (Vec::new(), Vec::new());
    for rank in ranks {
        match board.read(*rank, key, patience.saturating_sub(start.elapsed())) {
            Ok(note) => found.push(note),
            Err(Error::Symmetric(SymmetricError::Missing { .. })) => missing.push(*rank),
            Err(error) => return Err(error),
        }
    }
    if missing.is_empty() {
        return Ok(found);
    }
    Err(SymmetricError::Missing { what: key.to_owned(), ranks: missing, waited: patience }.into())
}

/// The board of ranks in one process.
#[derive(Debug)]
pub(crate) struct LocalBoard {
    number: u64,
    notes: Mutex<Notes>,
    changed: Condvar,
}

impl Default for LocalBoard {
    fn default() -> Self {
        static BOARDS: AtomicU64 = AtomicU64::new(0);
        Self { number: BOARDS.fetch_add(1, Ordering::Relaxed), notes: Mutex::default(), changed: Condvar::new() }
    }
}

#[derive(Debug, Default)]
struct Notes {
    pinned: BTreeMap<(Rank, String), Vec<u8>>,
    /// By rank, the scopes that it gave up, or all, with the reasons.
    gave_up: BTreeMap<Rank, Vec<(Option<String>, String)>>,
    /// Set when no rank pins any more: the rank that caused it, and why.
    ended: Option<(Rank, String)>,
}

impl Notes {
    /// Why a note will not come any more.
    fn hopeless(&self, from: Rank, key: &str) -> Option<SymmetricError> {
        let mut gave_up = self.gave_up.get(&from).into_iter().flatten();
        let found = gave_up.find(|(scope, _)| scope.as_ref().is_none_or(|scope| key.starts_with(scope)));
        let of_rank = found.map(|(_, why)| (from, why.clone()));
        of_rank.or_else(|| self.ended.clone()).map(|(rank, why)| SymmetricError::Aborted { rank, why })
    }
}

impl LocalBoard {
    /// Drops all notes with keys that begin with `scope`.
    pub fn forget_scope(&self, scope: &str) {
        lock(&self.notes).pinned.retain(|(_, pinned), _| !pinned.starts_with(scope));
    }

    /// How many notes there are.
    #[cfg(test)]
    pub fn count(&self) -> usize {
        lock(&self.notes).pinned.len()
    }

    /// Ends the board: no rank pins any more.
    pub fn end(&self, rank: Rank, why: &str) {
        lock(&self.notes).ended.get_or_insert((rank, why.to_owned()));
        self.changed.notify_all();
    }
}

impl Board for LocalBoard {
    fn publish(&self, from: Rank, key: &str, note: Vec<u8>) -> Result<()> {
        lock(&self.notes).pinned.insert((from, key.to_owned()), note);
        self.changed.notify_all();
        Ok(())
    }

    fn read(&self, from: Rank, key: &str, patience: Duration) -> Result<Vec<u8>> {
        let (start, key) = (Instant::now(), (from, key.to_owned()));
        let mut notes = lock(&self.notes);
        loop {
            if let Some(note) = notes.pinned.get(&key) {
                return Ok(note.clone());
            }
            if let Some(error) = notes.hopeless(from, &key.1) {
                return Err(error.into());
            }
            let left = patience.saturating_sub(start.elapsed());
            if left.is_zero() {
                return Err(SymmetricError::Missing { what: key.1, ranks: vec![from], waited: patience }.into());
            }
            notes = self.changed.wait_timeout(notes, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    fn give_up(&self, rank: Rank, scope: Option<&str>, why: &str) {
        lock(&self.notes).gave_up.entry(rank).or_default().push((scope.map(str::to_owned), why.to_owned()));
        self.changed.notify_all();
    }

    fn forget(&self, key: &str) {
        lock(&self.notes).pinned.retain(|(_, pinned), _| pinned != key);
    }

    fn name(&self) -> Option<String> {
        Some(format!("board {}", self.number))
    }
}
