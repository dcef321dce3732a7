//! How an arena is opened.

use std::time::Duration;

use crate::comm::{Meeting, Rank};
use crate::rank::{BackendName, SymmetricError};
use crate::runtime::Result;

/// The name of the note with a rank's options.
const OPTIONS: &str = "options";

/// How an arena is opened; the same on every rank.
#[derive(Clone, Debug)]
pub struct ArenaOptions {
    /// Where the memory comes from.
    pub backend: BackendName,
    /// Room for buffers, each rounded up to 256 bytes.
    pub bytes: u64,
    /// Signal channels: one for each direction of each operation object.
    pub channels: u32,
    /// Whether ranks may be on one device: for tests on one GPU. Without it, `vmm` refuses that.
    pub share_devices: bool,
    /// How long a host waits for another rank, and a [`Ticket`](super::Ticket) for its stream.
    pub deadline: Duration,
    /// How long the ranks may take to come together: to open their arenas, and to take what a peer uses first. `None` takes the deadline. Processes that start, and
    /// drivers that allocate, can take seconds, where an answer to work under way takes none.
    pub rendezvous: Option<Duration>,
    /// Whether gathers are compared between the ranks, in kind, size of elements, members and, of pushes, chunks: those that differ are [`Error::Mismatch`](crate::Error::Mismatch) where a ticket is
    /// waited for. It costs a note when a gather is made, for which no rank waits; in debug builds unless told otherwise.
    pub compare_calls: bool,
}

impl Default for ArenaOptions {
    fn default() -> Self {
        let (backend, deadline) = (BackendName::Emulated, Duration::from_secs(30));
        let compare_calls = cfg!(debug_assertions);
        Self { backend, bytes: 1 << 20, channels: 64, share_devices: false, deadline, rendezvous: None, compare_calls }
    }
}

impl ArenaOptions {
    /// How long the ranks may take to come together.
    pub(super) fn rendezvous_deadline(&self) -> Duration {
        self.rendezvous.unwrap_or(self.deadline)
    }

    /// Tells the other ranks.
    pub(super) fn publish(&self, meeting: &Meeting) -> Result<()> {
        let Self { backend, bytes, channels, share_devices, .. } = self;
        let shared = if *share_devices { " on shared devices" } else { "" };
        meeting.publish(OPTIONS, format!("{backend} memory of {bytes} bytes and {channels} channels{shared}").into_bytes())
    }

    /// Compares those of all ranks.
    pub(super) fn compare(&self, meeting: &Meeting) -> Result<()> {
        let notes = meeting.gather(OPTIONS, self.rendezvous_deadline())?;
        let text = |note: &[u8]| String::from_utf8_lossy(note).into_owned();
        let (rank, mine) = (meeting.rank(), &notes[meeting.rank().index() as usize]);
        let differs = meeting.world().ranks().zip(&notes).find(|(_, note)| *note != mine);
        let error = |(other, note): (Rank, &Vec<u8>)| SymmetricError::Rendezvous { rank, found: text(mine), other, expected: text(note) };
        differs.map_or(Ok(()), |differs| Err(error(differs).into()))
    }
}
