//! What ranks tell each other of their memory.

use std::fs;
use std::sync::OnceLock;

use serde::{Deserialize, Serialize};

use crate::bootstrap::JobId;
use crate::comm::Rank;
use crate::rank::{Step, SymmetricError};

/// The version of the notes and of the messages between ranks.
const VERSION: u32 = 1;

/// A rank's memory, ready to be mapped by the others.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Record {
    pub version: u32,
    pub world: u32,
    pub host: String,
    /// Ranks of one process pass handles, not descriptors.
    pub process: String,
    pub device: [u8; 16],
    pub bytes: u64,
    pub granularity: u64,
    pub layout: u64,
    /// The name of the socket at which descriptors are waited for.
    pub address: String,
    /// A secret that only readers of this job's board know.
    pub token: String,
}

/// What went wrong, and on which rank.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Failure {
    pub rank: u32,
    pub step: Step,
    pub why: String,
}

/// How a phase ended on a rank.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Verdict {
    Prepared(Record),
    Mapped,
    Failed(Failure),
}

impl Verdict {
    pub fn to_note(&self) -> Vec<u8> {
        // A structure of numbers and strings: there is nothing in it that could fail.
        serde_json::to_vec(self).unwrap_or_default()
    }

    pub fn from_note(rank: Rank, note: &[u8]) -> Self {
        serde_json::from_slice(note).unwrap_or_else(|error| {
            let why = format!("its note cannot be read ({error}): do all ranks run the same version?");
            Self::Failed(Failure { rank: rank.index(), step: Step::Agree, why })
        })
    }
}

impl Failure {
    pub fn new(rank: Rank, step: Step, why: impl ToString) -> Self {
        Self { rank: rank.index(), step, why: why.to_string() }
    }

    pub fn into_error(self, ranks: impl Iterator<Item = Rank>) -> SymmetricError {
        let rank = ranks.into_iter().find(|rank| rank.index() == self.rank).unwrap_or(Rank::ZERO);
        SymmetricError::Step { rank, step: self.step, why: self.why }
    }
}

impl Record {
    /// The parts of a record that do not depend on the arena.
    pub fn identity() -> std::io::Result<(u32, String, String)> {
        Ok((VERSION, host(), process()?))
    }

    /// What differs from another rank's record and must not, with both values.
    fn difference(&self, other: &Self) -> Option<String> {
        let fields = [
            ("version", self.version.to_string(), other.version.to_string()),
            ("world", self.world.to_string(), other.world.to_string()),
            ("bytes", self.bytes.to_string(), other.bytes.to_string()),
            ("granularity", self.granularity.to_string(), other.granularity.to_string()),
            ("layout", format!("{:016x}", self.layout), format!("{:016x}", other.layout)),
        ];
        let (what, mine, theirs) = fields.into_iter().find(|(_, mine, theirs)| mine != theirs)?;
        Some(format!("its {what} is {mine}, that of rank 0 {theirs}: every rank opens the same"))
    }
}

/// Whether the records fit: every rank comes to the same result, since all look at all.
pub(super) fn agree(records: &[Record], share_devices: bool) -> Result<(), Failure> {
    let failed = |rank: usize, why: String| Err(Failure { rank: rank as u32, step: Step::Agree, why });
    for (rank, record) in records.iter().enumerate() {
        if let Some(why) = record.difference(&records[0]) {
            return failed(rank, why);
        }
        if record.host != records[0].host {
            let why = "it is on another host than rank 0, or in another network namespace (a container of its own): memory is shared within a host";
            return failed(rank, why.to_owned());
        }
        let same = records[..rank].iter().position(|other| other.device == record.device);
        if let (Some(other), false) = (same, share_devices) {
            let why = format!("it is on the device of rank {other}: give each rank a GPU of its own, or say ArenaOptions::share_devices");
            return failed(rank, why);
        }
    }
    Ok(())
}

/// A name of this process that no other has.
///
/// # Errors
/// Without a source of random numbers.
pub(in crate::symmetric) fn process() -> std::io::Result<String> {
    static PROCESS: OnceLock<String> = OnceLock::new();
    let random = JobId::random()?.as_str().to_owned();
    Ok(PROCESS.get_or_init(|| random).clone())
}

/// The running system and its network namespace, in which the sockets' names are.
fn host() -> String {
    let boot = fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
    let network = fs::read_link("/proc/self/ns/net").map(|link| link.display().to_string()).unwrap_or_default();
    format!("{} {network}", boot.trim())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record(device: u8) -> Record {
        let text = String::new;
        let (device, address, token, process) = ([device; 16], text(), text(), text());
        Record { version: VERSION, world: 2, host: "h".into(), process, device, bytes: 8, granularity: 4, layout: 1, address, token }
    }

    #[test]
    fn notes_are_read_as_written_and_nothing_else() {
        let failure = Failure::new(Rank::ZERO, Step::Map, "no");
        for verdict in [Verdict::Prepared(record(3)), Verdict::Mapped, Verdict::Failed(failure)] {
            assert_eq!(Verdict::from_note(Rank::ZERO, &verdict.to_note()), verdict);
        }
        assert!(matches!(Verdict::from_note(Rank::ZERO, b"{"), Verdict::Failed(Failure { step: Step::Agree, .. })));
    }

    #[test]
    fn what_does_not_fit_names_the_rank() {
        assert_eq!(agree(&[record(0), record(1)], false), Ok(()));
        assert_eq!(agree(&[record(0), record(0)], true), Ok(()));
        let why = |records: &[Record]| agree(records, false).unwrap_err();
        assert!(why(&[record(0), record(1), record(1)]).why.contains("the device of rank 1"));
        assert!(why(&[record(0), Record { bytes: 9, ..record(1) }]).why.starts_with("its bytes is 9, that of rank 0 8"));
        assert_eq!(why(&[record(0), record(1), Record { layout: 2, ..record(2) }]).rank, 2);
        assert!(why(&[record(0), Record { host: "i".into(), ..record(1) }]).why.starts_with("it is on another host"));
        assert!(why(&[record(0), Record { version: 9, ..record(1) }]).why.starts_with("its version"));
    }
}
