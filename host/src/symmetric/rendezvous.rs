//! Where the ranks of an arena come together: where each one's memory lies, and that all take the same from it.

use super::arena::Inner;
use crate::comm::{Rank, Sequence};
use crate::rank::SymmetricError;
use crate::runtime::{Error, Result};

impl Inner {
    /// Where a rank's arena lies, for a use of the item that this rank took as its `number`th.
    pub fn peer(&self, rank: Rank, number: usize) -> Result<u64> {
        self.check()?;
        let peers = match self.peers.get() {
            Some(peers) => peers,
            None => {
                let met = self.meet()?;
                self.peers.get_or_init(|| met)
            }
        };
        if rank.index() >= self.world.get() {
            return Err(Error::Invalid { what: "Arena", why: format!("{rank} is not of this world of {}", self.world) });
        }
        self.check_layout(rank, number)?;
        Ok(peers[rank.index() as usize])
    }

    /// Compares all ranks' options, then learns where all ranks' memory lies.
    fn meet(&self) -> Result<Vec<u64>> {
        if !self.backend.is_collective() {
            self.options.compare(&self.meeting)?;
        }
        self.backend.peers(&self.meeting, self.options.rendezvous_deadline())
    }

    /// Waits until all ranks have come to a point of this name, where all have taken the same as their `number`th thing.
    pub fn meet_with(&self, name: &str, number: usize, taken: &str) -> Result<()> {
        self.meeting.publish(name, taken.as_bytes().to_vec())?;
        let all = self.meeting.gather(name, self.options.rendezvous_deadline())?;
        let differs = self.world.ranks().zip(all).find(|(_, other)| other != taken.as_bytes());
        let error = |(other, expected): (Rank, Vec<u8>)| {
            let expected = String::from_utf8_lossy(&expected).into_owned();
            SymmetricError::Layout { number, rank: self.rank, found: taken.to_owned(), other, expected }
        };
        differs.map_or(Ok(()), |differs| Err(error(differs).into()))
    }

    /// Compares calls of this name with those of the other ranks.
    pub fn calls(&self, name: &str) -> Sequence {
        self.meeting.calls(name, self.options.deadline)
    }

    pub fn publish_layout(&self, number: usize) -> Result<()> {
        self.meeting.publish(&format!("allocation {number}"), self.layout.note(number))
    }

    /// Checks that a peer has taken so far what this rank took.
    fn check_layout(&self, other: Rank, number: usize) -> Result<()> {
        if self.layout.is_checked(other, number) {
            return Ok(());
        }
        let theirs = self.meeting.read(other, &format!("allocation {number}"), self.options.rendezvous_deadline())?;
        self.layout.compare(self.rank, other, number, &theirs)
    }
}
