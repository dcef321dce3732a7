//! Whether the data of all files is what was written.

use sha2::{Digest, Sha256};

use super::{JoinError, Shards};
use crate::safetensors::{Checkpoint, hex};

/// SHA-256 of each rank's data, as it is read: tensor by tensor in the order in which all files have them.
pub struct Digests(Vec<Sha256>);

impl Digests {
    /// Of nothing yet.
    pub fn of(shards: &Shards) -> Self {
        Self(shards.files().map(|_| Sha256::new()).collect())
    }

    /// The next bytes of a rank's file.
    pub fn read(&mut self, rank: usize, bytes: &[u8]) {
        self.0[rank].update(bytes);
    }

    /// Holds them against what the files state; those that state nothing are not checked.
    ///
    /// # Errors
    /// The first file whose data is other data.
    pub fn check(self, shards: &Shards) -> Result<(), JoinError> {
        for ((file, stated), digest) in shards.pairs().zip(self.0) {
            let found = hex(digest);
            if let Some(expected) = stated.data.as_ref().filter(|expected| **expected != found) {
                return Err(damaged(file, found, expected));
            }
        }
        Ok(())
    }
}

fn damaged(file: &Checkpoint, found: String, expected: &str) -> JoinError {
    JoinError::Data { file: file.path().into(), found, expected: crate::text::shortened(&crate::text::printable(expected), 64) }
}
