//! What ranks tell each other on their hosts.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::{Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

use super::rank::Rank;
use crate::runtime::Result;
use crate::runtime::runtime::lock;
use crate::symmetric::SymmetricError;

/// A board on which each rank pins notes that all ranks can read: the control plane of a rendezvous. Every wait has a deadline.
pub trait Board: fmt::Debug + Send + Sync {
    /// Pins a note; a note of that key is replaced.
    ///
    /// # Errors
    /// An error of the transport.
    fn publish(&self, from: Rank, key: &str, note: Vec<u8>) -> Result<()>;

    /// Waits until a rank has pinned a note and reads it.
    ///
    /// # Errors
    /// [`SymmetricError::Missing`] after `patience`; [`SymmetricError::Aborted`] as soon as the rank has given up; an error of the
    /// transport.
    fn read(&self, from: Rank, key: &str, patience: Duration) -> Result<Vec<u8>>;

    /// Tells everybody that a rank will pin nothing more whose key begins with `scope`: whoever waits for it gets `why`.
    fn give_up(&self, rank: Rank, scope: &str, why: &str);
}

/// The board of ranks in one process.
#[derive(Debug, Default)]
pub(crate) struct LocalBoard {
    notes: Mutex<Notes>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct Notes {
    pinned: BTreeMap<(Rank, String), Vec<u8>>,
    /// Scope and reason.
    gave_up: BTreeMap<Rank, Vec<(String, String)>>,
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
            let gave_up = notes.gave_up.get(&from).and_then(|all| all.iter().find(|(scope, _)| key.1.starts_with(scope)));
            if let Some((_, why)) = gave_up {
                return Err(SymmetricError::Aborted { rank: from, why: why.clone() }.into());
            }
            let left = patience.saturating_sub(start.elapsed());
            if left.is_zero() {
                return Err(SymmetricError::Missing { what: key.1, ranks: vec![from], waited: patience }.into());
            }
            notes = self.changed.wait_timeout(notes, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    fn give_up(&self, rank: Rank, scope: &str, why: &str) {
        lock(&self.notes).gave_up.entry(rank).or_default().push((scope.to_owned(), why.to_owned()));
        self.changed.notify_all();
    }
}
