//! Why ranks could not find one another, or lost one another.

use std::{io, sync::Arc, time::Duration};

use rustix::io::Errno;

use super::world::Rank;

/// A bootstrap that failed. Cheap to clone: the store gives it again to later calls.
#[derive(Clone, Debug, thiserror::Error)]
pub enum BootstrapError {
    /// No launcher's variables.
    #[error(
        "no launcher has set RANK, OMPI_COMM_WORLD_RANK, PMI_RANK or SLURM_PROCID: start the program by `oxtile launch -n N`, torchrun, \
         mpirun or srun, or set RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT"
    )]
    NoLauncher,
    /// A variable is missing that belongs to others that are set.
    #[error("{variable} is not set, though {because} is: {mend}")]
    Missing {
        /// The variable.
        variable: &'static str,
        /// The variable by which the launcher was recognised.
        because: &'static str,
        /// What to do.
        mend: &'static str,
    },
    /// A variable whose value makes no sense.
    #[error("{variable} = {value:?} is not {expected}")]
    Value {
        /// The variable.
        variable: &'static str,
        /// Its value.
        value: String,
        /// What it should be.
        expected: String,
    },
    /// Rank 0 cannot listen.
    #[error("rank 0 cannot listen at {address}: {error}; {}", mend_of(.error))]
    Listen {
        /// Where; all addresses that it tried.
        address: String,
        /// The system's answer.
        error: Arc<io::Error>,
    },
    /// Rank 0 listens, and does not reach itself.
    #[error(
        "rank 0 listens, but did not find itself at {address} within {} s: {found}; set MASTER_ADDR to a name or an address of the host of rank 0, \
         the same on every rank, or start rank 0 on that host",
        .timeout.as_secs_f32()
    )]
    Elsewhere {
        /// Where the other ranks would look for it.
        address: String,
        /// The deadline.
        timeout: Duration,
        /// What answers there, or the last answer of the system.
        found: String,
    },
    /// Rank 0 cannot be reached.
    #[error(
        "{rank} could not connect to rank 0 at {address} within {} s: {error}; {}",
        .timeout.as_secs_f32(), mend_of_shortage(.error).unwrap_or(HOST)
    )]
    Connect {
        /// This rank.
        rank: Rank,
        /// Where.
        address: String,
        /// The deadline.
        timeout: Duration,
        /// The last answer of the system.
        error: Arc<io::Error>,
    },
    /// What listens where this rank looks for rank 0 cannot prove that it knows the job's name, which this rank has not told it.
    #[error(
        "{rank} found a rank 0 at {address} that does not know the name of {ours}: it is of another job, or the two were given different names; \
         set OXTILE_JOB_ID the same on every rank of a job, or OXTILE_MASTER_PORT to a free port of rank 0's host, the same on every rank"
    )]
    OtherJob {
        /// This rank.
        rank: Rank,
        /// Where.
        address: String,
        /// This rank's job: how its name begins, and the port that it was given.
        ours: String,
    },
    /// A rank 0 of another version of Oxtile listens where this rank looks for its own.
    #[error(
        "{rank} found a rank 0 at {address} of another version of Oxtile, whose rendezvous is version {theirs}, and this program's is {own}: start \
         all ranks from the same build"
    )]
    OtherVersion {
        /// This rank.
        rank: Rank,
        /// Where.
        address: String,
        /// The version that is there.
        theirs: u8,
        /// This program's.
        own: u8,
    },
    /// Another program listens where this rank looks for rank 0.
    #[error(
        "{rank} found no rank 0 within {} s, and at {} what does not answer as one: another program, a rank 0 of an older version, or \
         one that stands still; set OXTILE_MASTER_PORT to a free port of rank 0's host, the same on every rank",
        .timeout.as_secs_f32(), .addresses.join(", ")
    )]
    Occupied {
        /// This rank.
        rank: Rank,
        /// Where.
        addresses: Vec<String>,
        /// The deadline.
        timeout: Duration,
    },
    /// Rank 0 refuses this rank.
    #[error("rank 0 refused {rank}: {}", foreign(.reason))]
    Refused {
        /// This rank.
        rank: Rank,
        /// Why.
        reason: String,
    },
    /// A rank has ended, or has dropped its store without [`close`](crate::bootstrap::Store::close).
    #[error("{rank} is gone, during {operation}: see what it said last")]
    Lost {
        /// The rank.
        rank: Rank,
        /// What this rank waited for.
        operation: String,
    },
    /// Ranks did not come in time.
    #[error("{} did not come to {operation} within {} s", names(.missing), .timeout.as_secs_f32())]
    Deadline {
        /// Those that did not come; rank 0 where it does not answer.
        missing: Vec<Rank>,
        /// What this rank waited for.
        operation: String,
        /// How long.
        timeout: Duration,
    },
    /// Ranks called different operations.
    #[error("{rank} called {found}, where others called {expected}: every rank calls the same operations in the same order")]
    Mismatch {
        /// A rank that does not agree with the first.
        rank: Rank,
        /// What it called.
        found: String,
        /// What the first called.
        expected: String,
    },
    /// The connection to rank 0.
    #[error("{operation}: the connection to rank 0 failed: {error}")]
    Io {
        /// The operation under way.
        operation: String,
        /// The system's answer.
        error: Arc<io::Error>,
    },
    /// Bytes that no rank sends.
    #[error("{operation}: rank 0 answered with what is no answer ({reason}): do all ranks run the same version?")]
    Protocol {
        /// The operation under way.
        operation: String,
        /// What is wrong.
        reason: String,
    },
}

/// The question where nothing else is known.
const HOST: &str = "is MASTER_ADDR the host of rank 0?";

/// How to give rank 0 a port to listen at.
fn mend_of(error: &io::Error) -> &'static str {
    match error.kind() {
        io::ErrorKind::AddrInUse => {
            "set OXTILE_MASTER_PORT to a free port of its host, the same on every rank; `oxtile launch` chooses a port by itself: start it again"
        }
        io::ErrorKind::PermissionDenied => "set OXTILE_MASTER_PORT to a port from 1024 on, the same on every rank",
        _ => mend_of_shortage(error).unwrap_or(HOST),
    }
}

/// How to mend that no more files, and so no more connections, can be opened, if the error is that.
pub(crate) fn mend_of_shortage(error: &io::Error) -> Option<&'static str> {
    match Errno::from_io_error(error)? {
        Errno::MFILE => Some("raise the number of files that a process may open (ulimit -n)"),
        Errno::NFILE => Some("raise the number of files that the host may open (sysctl fs.file-max)"),
        _ => None,
    }
}

/// The most characters of words that another process has sent.
const FOREIGN: usize = 128;

/// Words of another process, which may be no rank at all: few, and none that drive a terminal.
fn foreign(words: &str) -> String {
    let escaped: String =
        words.chars().take(FOREIGN).flat_map(|c| if c == '"' || c == '\'' { vec![c] } else { c.escape_debug().collect() }).collect();
    let short: String = escaped.chars().take(FOREIGN).collect();
    if short.len() < escaped.len() || words.chars().nth(FOREIGN).is_some() { format!("{short}...") } else { short }
}

/// So many ranks are listed; the rest is counted.
const LISTED: usize = 16;

/// Ranks as words.
fn names(ranks: &[Rank]) -> String {
    let listed = || ranks.iter().take(LISTED).map(|rank| rank.index().to_string()).collect::<Vec<_>>().join(", ");
    match ranks {
        [] => "a rank".into(),
        [rank] => rank.to_string(),
        ranks if ranks.len() <= LISTED => format!("ranks {}", listed()),
        ranks => format!("ranks {} and {} more", listed(), ranks.len() - LISTED),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rank::WorldSize;

    #[test]
    fn words_of_others_are_short_and_plain() {
        assert_eq!(foreign("job \"a\" of 4 ranks, by torchrun's port"), "job \"a\" of 4 ranks, by torchrun's port");
        assert_eq!(foreign("\u{1b}[2J\n\u{202e}\u{2028}"), "\\u{1b}[2J\\n\\u{202e}\\u{2028}");
        for words in ["x".repeat(1 << 20), "\u{1b}".repeat(1000)] {
            assert_eq!(foreign(&words).chars().count(), FOREIGN + 3);
        }
        let rank = Rank::ZERO;
        let refused = BootstrapError::Refused { rank, reason: "\u{7}".into() };
        assert!(refused.to_string().contains("\\u{7}"), "{refused}");
    }

    #[test]
    fn a_shortage_of_files_has_its_own_mend() {
        let error = |number| Arc::new(io::Error::from_raw_os_error(number));
        let connect = |number| {
            let (rank, timeout) = (Rank::ZERO, Duration::from_secs(1));
            BootstrapError::Connect { rank, address: "a:1".into(), timeout, error: error(number) }.to_string()
        };
        let listen = |number| BootstrapError::Listen { address: "a:1".into(), error: error(number) }.to_string();
        for text in [connect(24), listen(24)] {
            assert!(text.ends_with("(os error 24); raise the number of files that a process may open (ulimit -n)"), "{text}");
        }
        assert!(connect(23).ends_with("; raise the number of files that the host may open (sysctl fs.file-max)"), "{}", connect(23));
        assert!(
            connect(111).ends_with("; is MASTER_ADDR the host of rank 0?") && listen(99).ends_with("; is MASTER_ADDR the host of rank 0?")
        );
        assert!(listen(98).ends_with("`oxtile launch` chooses a port by itself: start it again"), "{}", listen(98));
    }

    #[test]
    fn many_ranks_are_counted() {
        let named = |count| names(&WorldSize::new(4096).unwrap().ranks().take(count).collect::<Vec<_>>());
        assert_eq!([named(0), named(1), named(2)], ["a rank", "rank 0", "ranks 0, 1"]);
        assert!(named(16).ends_with(", 15") && named(17).ends_with(", 15 and 1 more"), "{} {}", named(16), named(17));
        assert!(named(4096).ends_with(", 14, 15 and 4080 more"));
    }
}
