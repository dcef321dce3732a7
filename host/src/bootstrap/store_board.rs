//! The board of ranks that are processes.

use std::{
    fmt, io,
    net::{Shutdown, TcpStream},
    sync::{Arc, Mutex},
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use super::{
    board::{Board, LocalBoard, gather},
    frame::{read_frame, write_frame},
    server::Server,
    wire::{Answer, Post},
};
use crate::rank::{Rank, SymmetricError, WorldSize};
use crate::runtime::Result;
use crate::runtime::runtime::lock;

/// The key of the note that a rank needs the board no more.
const CLOSED: &str = "board closed";
/// The key of the note that rank 0 leaves.
const LAST: &str = "board left";
/// How long its last notes may take to be sent.
const FLUSH: Duration = Duration::from_millis(500);

/// A [`Board`] over the connections of a [`Store`](super::Store), made by [`Store::into_board`](super::Store::into_board).
///
/// Every rank holds a copy of all notes. What is posted goes to rank 0 and from there to all, in one order; a read waits for the rank's own
/// copy. When a process ends, all ranks that wait for its rank see that at once. When rank 0 ends, every read of a note that has not come yet fails.
pub struct StoreBoard {
    rank: Rank,
    world: WorldSize,
    timeout: Duration,
    notes: Arc<LocalBoard>,
    stream: Arc<TcpStream>,
    /// One post at a time.
    writing: Mutex<()>,
    reader: Option<JoinHandle<()>>,
    /// Rank 0's server.
    server: Option<Server>,
    /// For how long it serves the others without rank 0.
    outlives: Option<Duration>,
}

impl StoreBoard {
    pub(super) fn over(stream: TcpStream, rank: Rank, world: WorldSize, timeout: Duration, server: Option<Server>) -> io::Result<Self> {
        stream.set_write_timeout(Some(timeout))?;
        let (notes, stream) = (Arc::new(LocalBoard::default()), Arc::new(stream));
        let (pinned, incoming) = (Arc::clone(&notes), Arc::clone(&stream));
        let reader = thread::Builder::new().name("board".into()).spawn(move || read_all(&incoming, world, &pinned))?;
        Ok(Self { rank, world, timeout, notes, stream, writing: Mutex::new(()), reader: Some(reader), server, outlives: None })
    }

    /// This rank.
    pub fn rank(&self) -> Rank {
        self.rank
    }

    /// How many ranks there are.
    pub fn world(&self) -> WorldSize {
        self.world
    }

    /// Waits until no rank needs the board any more, for the timeout of the store at most. To the others a rank that ends before is
    /// lost.
    ///
    /// # Errors
    /// [`SymmetricError`] with the ranks that did not come, or are gone.
    pub fn close(&self) -> Result<()> {
        self.publish(self.rank, CLOSED, Vec::new())?;
        gather(self, self.world, CLOSED, self.timeout).map(drop)
    }

    /// A board that the others keep when rank 0 drops it: until they have dropped theirs, or have pinned nothing for `limit`. Rank 0's process
    /// serves them meanwhile and, when it ends in order, waits for that. A wait for a note of rank 0 fails at once.
    #[must_use]
    pub fn outliving_rank_0(mut self, limit: Duration) -> Self {
        self.outlives = Some(limit);
        self
    }

    /// How many notes this rank holds.
    #[cfg(test)]
    pub(crate) fn count(&self) -> usize {
        self.notes.count()
    }

    fn post(&self, post: &Post) -> Result<()> {
        let _writing = lock(&self.writing);
        write_frame(&self.stream, &post.to_body()).map_err(|error| {
            let why = format!("it passes on no note of {} any more ({error}): see what it said last", self.rank);
            SymmetricError::Aborted { rank: Rank::ZERO, why }.into()
        })
    }
}

impl Board for StoreBoard {
    /// Gives up in this rank's name: `from` is this rank.
    fn publish(&self, _from: Rank, key: &str, note: Vec<u8>) -> Result<()> {
        self.post(&Post::Note { key: key.to_owned(), note, readers: Vec::new() })
    }

    fn publish_to(&self, readers: &[Rank], _from: Rank, key: &str, note: Vec<u8>) -> Result<()> {
        let is_all = readers.len() == self.world.get() as usize;
        let readers = if is_all { Vec::new() } else { readers.iter().map(|rank| rank.index()).collect() };
        self.post(&Post::Note { key: key.to_owned(), note, readers })
    }

    fn read(&self, from: Rank, key: &str, patience: Duration) -> Result<Vec<u8>> {
        self.notes.read(from, key, patience)
    }

    fn give_up(&self, rank: Rank, scope: Option<&str>, why: &str) {
        self.notes.give_up(rank, scope, why);
        // If rank 0 is gone, the others know by that.
        let _ = self.post(&Post::GaveUp { scope: scope.map(str::to_owned), why: why.to_owned() });
    }

    fn forget(&self, key: &str) {
        self.notes.forget(key);
    }

    fn leave(&self, scope: &str) {
        self.notes.forget_scope(scope);
    }
}

impl Drop for StoreBoard {
    fn drop(&mut self) {
        if self.server.is_some() {
            // What rank 0 said last reaches the others before it ends the connections.
            let _ = self.publish(self.rank, LAST, Vec::new());
            let _ = self.notes.read(self.rank, LAST, FLUSH);
        }
        if let Some(limit) = self.outlives.filter(|_| !thread::panicking())
            && let Some(server) = self.server.take()
        {
            server.outlive(limit);
        }
        let _ = self.stream.shutdown(Shutdown::Both);
        if let Some(reader) = self.reader.take() {
            let _ = reader.join();
        }
    }
}

impl fmt::Debug for StoreBoard {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("StoreBoard").field("rank", &self.rank).field("world", &self.world).finish_non_exhaustive()
    }
}

/// Pins what the others post, until the connection ends.
fn read_all(stream: &TcpStream, world: WorldSize, notes: &LocalBoard) {
    let next = || read_frame(stream, u32::MAX, None::<Instant>).ok().and_then(|body| Answer::from_body(&body));
    let rank = |index| Rank::new(index, world).unwrap_or(Rank::ZERO);
    while let Some(answer) = next() {
        match answer {
            Answer::News { rank: from, post: Post::Note { key, note, .. } } => _ = notes.publish(rank(from), &key, note),
            Answer::News { rank: from, post: Post::GaveUp { scope, why } } => notes.give_up(rank(from), scope.as_deref(), &why),
            Answer::Lost(lost) => notes.give_up(rank(lost), None, "its process is gone"),
            _ => break,
        }
    }
    notes.end(Rank::ZERO, "its process is gone, and with it the board");
}
