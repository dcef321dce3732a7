//! What ranks are about to do together in an arena, compared without a wait.
//!
//! A put, a get or a signal has no counterpart on the other rank, whose program need not call anything: there is no sequence of calls that two ranks
//! could compare. What ranks do together, a gather of many rounds, is declared once, when it is made, by a note on the board, for which no rank waits;
//! a rank that waits for a ticket compares the notes meanwhile. So a round costs nothing. The number of rounds is in the epochs: a rank that makes fewer is
//! named when the deadline of the others is over.

use std::collections::BTreeMap;
use std::time::Duration;

use sha2::{Digest, Sha256};

use super::arena::{Arena, Inner};
use crate::comm::Rank;
use crate::runtime::runtime::lock;
use crate::runtime::{Error, Result};

/// What this rank has declared, and the ranks of which it is not known whether they have declared the same.
#[derive(Debug, Default)]
pub(super) struct Declared(BTreeMap<usize, (String, Vec<Rank>)>);

impl Inner {
    /// Declares what this rank does with its `number`th item, together with others.
    pub fn declare(&self, number: usize, what: String, others: impl Iterator<Item = Rank>) -> Result<()> {
        if !self.options.compare_calls {
            return Ok(());
        }
        let what = digest(&what);
        self.meeting.publish(&key(number), what.clone().into_bytes())?;
        lock(&self.declared).0.insert(number, (what, others.collect()));
        Ok(())
    }

    /// Compares it with what the others have declared so far; does not wait.
    ///
    /// # Errors
    /// [`Error::Mismatch`], and the arena is ended.
    pub fn compare_declared(&self) -> Result<()> {
        let mut declared = lock(&self.declared);
        let differs = declared.0.iter_mut().find_map(|(number, (what, others))| {
            let mut differs = None;
            others.retain(|other| match self.meeting.read(*other, &key(*number), Duration::ZERO) {
                Ok(note) if note == what.as_bytes() => false,
                Ok(note) => {
                    differs = Some((*other, String::from_utf8_lossy(&note).into_owned()));
                    true
                }
                Err(_) => true,
            });
            differs.map(|(other, expected)| Error::Mismatch {
                group: "the arena".to_owned(),
                sequence: *number as u64,
                rank: self.rank,
                found: what.clone(),
                other,
                expected,
            })
        });
        declared.0.retain(|_, (_, others)| !others.is_empty());
        drop(declared);
        differs.map_or(Ok(()), |error| Err(self.fail(error)?))
    }
}

impl Arena {
    /// Notes what this rank has made together with others under a name. Does not wait.
    pub(crate) fn note(&self, name: &str, what: &str) -> Result<()> {
        self.0.meeting.publish(name, digest(what).into_bytes())
    }

    /// Compares it with the notes of others, and waits for each as for a rank that comes: in every build.
    ///
    /// # Errors
    /// [`Error::Mismatch`] with both texts; ranks that do not come.
    pub(crate) fn compare_notes(&self, name: &str, sequence: u64, what: &str, others: impl Iterator<Item = Rank>) -> Result<()> {
        let Inner { meeting, rank, options, .. } = &*self.0;
        for other in others {
            let note = meeting.read(other, name, options.rendezvous_deadline())?;
            if note != digest(what).as_bytes() {
                let (found, expected) = (what.to_owned(), String::from_utf8_lossy(&note).into_owned());
                return Err(Error::Mismatch { group: "the arena".to_owned(), sequence, rank: *rank, found, other, expected });
            }
        }
        Ok(())
    }
}

/// A text as ranks compare it: of a long one, as of a set of thousands of weights, its beginning, its length and its SHA-256. Notes between hosts are at most a mebibyte.
fn digest(what: &str) -> String {
    const LONG: usize = 64 << 10;
    const BEGINNING: usize = 1 << 10;
    if what.len() <= LONG {
        return what.to_owned();
    }
    let bytes: String = Sha256::digest(what).iter().map(|byte| format!("{byte:02x}")).collect();
    format!("{} ... ({} bytes, SHA-256 {bytes})", &what[..what.floor_char_boundary(BEGINNING)], what.len())
}

fn key(number: usize) -> String {
    format!("operation {number}")
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A note of thousands of weights is no longer than one of a few, and says where it differs by its digest.
    #[test]
    fn long_texts_are_compared_by_their_digest() {
        assert_eq!(digest("short"), "short");
        let long = "\u{e9}".repeat(1 << 20);
        let other = format!("{}f", &long[2..]);
        let [one, two] = [&long, &other].map(|text| digest(text));
        assert!(one.len() < 2000 && one.contains("(2097152 bytes, SHA-256 "), "{one}");
        assert_ne!(one, two);
    }
}
