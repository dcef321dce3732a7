//! What connected ranks exchange.

use std::{
    fmt, io,
    net::TcpStream,
    sync::Arc,
    time::{Duration, Instant},
};

use super::{
    BootstrapError, StoreBoard,
    frame::write_frame,
    server::Server,
    wire::{Answer, Call, MAX_PAYLOAD, Operation, read_answer},
};
use crate::rank::{Rank, WorldSize};

/// The name of the rendezvous in errors.
const JOINING: &str = "the rendezvous";
/// How much longer than a deadline rank 0 has to report it: where it does not, it is rank 0 that is missing.
const GRACE: Duration = Duration::from_millis(500);

/// The ranks of a job, connected; made by [`connect`](Self::connect) or [`threads`](super::threads).
///
/// Its operations are collective: every rank calls the same ones in the same order, and each waits for all, at most for the
/// timeout of the rendezvous. After an error every call gives that error again. A store that is dropped without
/// [`close`](Self::close) is a lost rank to the others.
pub struct Store {
    // Declared before the server, so closed before it: the server sees that rank 0 leaves, and tells the others.
    stream: TcpStream,
    rank: Rank,
    world: WorldSize,
    timeout: Duration,
    failure: Option<BootstrapError>,
    /// Rank 0's server.
    _server: Option<Server>,
}

impl Store {
    /// A store over a connection to rank 0.
    pub(super) fn over(stream: TcpStream, rank: Rank, world: WorldSize, timeout: Duration, server: Option<Server>) -> Self {
        Self { stream, rank, world, timeout, failure: None, _server: server }
    }

    /// This rank.
    pub fn rank(&self) -> Rank {
        self.rank
    }

    /// How many ranks there are.
    pub fn world(&self) -> WorldSize {
        self.world
    }

    /// How long each wait is at most.
    pub fn timeout(&self) -> Duration {
        self.timeout
    }

    /// What every rank brings, in the order of ranks; lengths may differ, and be zero.
    ///
    /// # Errors
    /// [`Refused`](BootstrapError::Refused) for more than 1 MiB, which the others then wait for in vain;
    /// [`Lost`](BootstrapError::Lost), [`Deadline`](BootstrapError::Deadline), [`Mismatch`](BootstrapError::Mismatch) on every rank;
    /// [`Io`](BootstrapError::Io).
    pub fn all_gather(&mut self, bytes: &[u8]) -> Result<Vec<Vec<u8>>, BootstrapError> {
        let all = self.call(Operation::AllGather, bytes)?;
        if all.len() as u32 == self.world.get() { Ok(all) } else { Err(self.no_answer(Operation::AllGather, "parts are missing")) }
    }

    /// What `root` brings; what the others bring does not matter.
    ///
    /// # Errors
    /// As [`all_gather`](Self::all_gather); [`Refused`](BootstrapError::Refused) for a root of another world.
    pub fn broadcast(&mut self, root: Rank, bytes: &[u8]) -> Result<Vec<u8>, BootstrapError> {
        if root.index() >= self.world.get() {
            return Err(BootstrapError::Refused {
                rank: self.rank,
                reason: format!("{root} is not of this world of {}", self.world.get()),
            });
        }
        let operation = Operation::Broadcast(root.index());
        let all = self.call(operation, if root == self.rank { bytes } else { &[] })?;
        all.into_iter().next().ok_or_else(|| self.no_answer(operation, "it is empty"))
    }

    /// Returns when every rank has come here.
    ///
    /// # Errors
    /// As [`all_gather`](Self::all_gather).
    pub fn barrier(&mut self) -> Result<(), BootstrapError> {
        self.call(Operation::Barrier, &[]).map(drop)
    }

    /// A last barrier, after which ranks may end.
    ///
    /// # Errors
    /// As [`all_gather`](Self::all_gather).
    pub fn close(mut self) -> Result<(), BootstrapError> {
        self.call(Operation::Close, &[]).map(drop)
    }

    /// Turns the store into the ranks' board. Every rank calls it, as an operation.
    ///
    /// # Errors
    /// As [`all_gather`](Self::all_gather); [`Io`](BootstrapError::Io) if the system has no thread.
    pub fn into_board(mut self) -> Result<StoreBoard, BootstrapError> {
        self.call(Operation::Board, &[])?;
        let Self { stream, rank, world, timeout, _server: server, .. } = self;
        let failed = |error| BootstrapError::Io { operation: Operation::Board.to_string(), error: Arc::new(error) };
        StoreBoard::over(stream, rank, world, timeout, server).map_err(failed)
    }

    /// Waits until all have joined, at most for the deadline of the rendezvous.
    pub(super) fn wait_for_all(&mut self, deadline: Instant) -> Result<(), BootstrapError> {
        self.wait(JOINING, deadline).map(drop)
    }

    fn call(&mut self, operation: Operation, bytes: &[u8]) -> Result<Vec<Vec<u8>>, BootstrapError> {
        if let Some(failure) = &self.failure {
            return Err(failure.clone());
        }
        if bytes.len() > MAX_PAYLOAD {
            let reason = format!("{} bytes are more than the {MAX_PAYLOAD} that a rank can bring to {operation}", bytes.len());
            return Err(BootstrapError::Refused { rank: self.rank, reason });
        }
        let call = Call { operation, timeout: self.timeout, payload: bytes.into() };
        // If rank 0 has failed before, its reason may have arrived already, though nothing can be sent any more.
        let sent = self.stream.set_write_timeout(Some(self.timeout)).and_then(|()| write_frame(&self.stream, &call.to_body()));
        let answer = self.wait(&operation.to_string(), Instant::now() + self.timeout);
        match (sent, answer) {
            (Err(error), Err(BootstrapError::Io { .. })) => Err(self.fail(self.connection_failed(&operation.to_string(), error))),
            (_, answer) => answer,
        }
    }

    fn wait(&mut self, operation: &str, deadline: Instant) -> Result<Vec<Vec<u8>>, BootstrapError> {
        let answer = read_answer(&self.stream, deadline + GRACE);
        let rank = |index| Rank::new(index, self.world).unwrap_or(Rank::ZERO);
        let failure = match answer {
            Ok(Answer::Done(parts)) => return Ok(parts),
            Ok(Answer::Refused(reason)) => BootstrapError::Refused { rank: self.rank, reason },
            Ok(Answer::Lost(lost)) => BootstrapError::Lost { rank: rank(lost), operation: operation.into() },
            Ok(Answer::Missing(missing)) => {
                let missing = missing.into_iter().map(rank).collect();
                BootstrapError::Deadline { missing, operation: operation.into(), timeout: self.timeout }
            }
            Ok(Answer::Mismatch { rank: found_by, found, expected }) => {
                BootstrapError::Mismatch { rank: rank(found_by), found: found.to_string(), expected: expected.to_string() }
            }
            // No rank posts before all have called for the board; this rank has been greeted.
            Ok(Answer::News { .. } | Answer::Welcome) => {
                BootstrapError::Protocol { operation: operation.into(), reason: "out of turn".into() }
            }
            Err(error) => self.connection_failed(operation, error),
        };
        Err(self.fail(failure))
    }

    /// Remembers the failure, which every later call returns.
    fn fail(&mut self, failure: BootstrapError) -> BootstrapError {
        self.failure = Some(failure.clone());
        failure
    }

    fn no_answer(&mut self, operation: Operation, reason: &str) -> BootstrapError {
        self.fail(BootstrapError::Protocol { operation: operation.to_string(), reason: reason.into() })
    }

    /// What an error of the connection to rank 0 means.
    fn connection_failed(&self, operation: &str, error: io::Error) -> BootstrapError {
        use io::ErrorKind::{BrokenPipe, ConnectionAborted, ConnectionReset, InvalidData, TimedOut, UnexpectedEof, WouldBlock};
        let operation = operation.to_owned();
        match error.kind() {
            UnexpectedEof | ConnectionReset | ConnectionAborted | BrokenPipe => BootstrapError::Lost { rank: Rank::ZERO, operation },
            TimedOut | WouldBlock => BootstrapError::Deadline { missing: vec![Rank::ZERO], operation, timeout: self.timeout },
            InvalidData => BootstrapError::Protocol { operation, reason: error.to_string() },
            _ => BootstrapError::Io { operation, error: Arc::new(error) },
        }
    }
}

impl fmt::Debug for Store {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { rank, world, timeout, failure, .. } = self;
        let mut debug = f.debug_struct("Store");
        debug.field("rank", rank).field("world", world).field("timeout", timeout).field("failure", failure);
        debug.finish_non_exhaustive()
    }
}
