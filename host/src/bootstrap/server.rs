//! What rank 0 runs for all: it greets the ranks that the door lets in, waits for each operation until all have come, and tells all of a failure.

use std::{
    collections::BTreeMap,
    io,
    net::{Shutdown, TcpListener, TcpStream},
    sync::{
        Arc,
        mpsc::{self, Receiver, RecvTimeoutError, Sender},
    },
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use super::at_exit;
use super::door::{Door, Knock};
use super::frame::{read_frame, write_frame};
use super::handshake::{Hello, Secret};
use super::wire::{Answer, Call, MAX_REQUEST, Operation, Post, Request};
use crate::rank::mend_of_shortage;
use crate::runtime::patience::after;

/// How long an answer may take to be sent: a rank that does not read it is as good as gone.
const WRITE_TIMEOUT: Duration = Duration::from_millis(500);

/// The thread that serves; it ends, and closes everything, when this is dropped.
#[derive(Debug)]
pub struct Server {
    events: Sender<Event>,
    thread: Option<JoinHandle<()>>,
}

/// What every rank must agree on.
#[derive(Clone, Debug)]
pub struct Identity {
    pub secret: Secret,
    pub world: u32,
    pub uid: u32,
}

enum Event {
    Knock(Knock),
    Call(usize, Call),
    Post(usize, Post),
    Gone(usize),
    /// Rank 0 has left: the others go on, for so long without a note.
    Outlive(Duration),
    Stop,
}

struct Connection {
    stream: Arc<TcpStream>,
    reader: JoinHandle<()>,
    rank: u32,
}

/// A rank that waits for an answer.
struct Waiter {
    connection: usize,
    deadline: Instant,
    /// `None` before all have joined.
    call: Option<(Operation, Vec<u8>)>,
}

struct State {
    identity: Identity,
    events: Sender<Event>,
    /// Those of ranks, by their numbers.
    connections: BTreeMap<usize, Connection>,
    /// How many there have been.
    greeted: usize,
    waiting: BTreeMap<u32, Waiter>,
    door: Door,
    /// Why no more connections could be let in, the last time.
    shortage: Option<io::Error>,
    failure: Option<Answer>,
    is_closed: bool,
    /// Ranks post notes: one that goes is no failure of the others.
    is_board: bool,
    /// Once rank 0 has left: how long the others may be silent, and until when.
    outlives: Option<(Duration, Instant)>,
}

impl Server {
    /// Serves the ranks that come to this listener.
    ///
    /// # Errors
    /// If the system has no thread.
    pub fn start(listener: TcpListener, identity: Identity) -> io::Result<Self> {
        let (events, inbox) = mpsc::channel();
        let knocks = events.clone();
        let door = Door::open(listener, identity.secret.clone(), move |knock| drop(knocks.send(Event::Knock(knock))))?;
        let state = State {
            identity,
            events: events.clone(),
            connections: BTreeMap::new(),
            greeted: 0,
            waiting: BTreeMap::new(),
            door,
            shortage: None,
            failure: None,
            is_closed: false,
            is_board: false,
            outlives: None,
        };
        let thread = thread::Builder::new().name("bootstrap".into()).spawn(move || state.serve(&inbox))?;
        Ok(Self { events, thread: Some(thread) })
    }

    /// Serves the other ranks without rank 0: until all have gone, or for `limit` after the last of their notes. The end of the process waits
    /// for that.
    pub fn outlive(mut self, limit: Duration) {
        let _ = self.events.send(Event::Outlive(limit));
        if let Some(thread) = self.thread.take() {
            at_exit::join(thread);
        }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        if let Some(thread) = self.thread.take() {
            let _ = self.events.send(Event::Stop);
            let _ = thread.join();
        }
    }
}

impl State {
    fn serve(mut self, inbox: &Receiver<Event>) {
        loop {
            match inbox.recv_timeout(self.patience()) {
                Ok(Event::Stop) | Err(RecvTimeoutError::Disconnected) => break,
                Ok(Event::Knock(Knock::Rank(stream, hello))) => self.greet(stream, &hello),
                Ok(Event::Knock(Knock::Shortage(error))) => self.shortage = Some(error),
                Ok(Event::Call(connection, call)) => self.call(connection, call),
                Ok(Event::Post(connection, post)) => self.post(connection, post),
                Ok(Event::Gone(connection)) => self.gone(connection),
                Ok(Event::Outlive(limit)) => self.outlives = Some((limit, after(limit))),
                Err(RecvTimeoutError::Timeout) => {}
            }
            self.check_deadlines();
            if self.is_left() {
                break;
            }
        }
        for connection in self.connections.values() {
            let _ = connection.stream.shutdown(Shutdown::Both);
        }
        for connection in self.connections.into_values() {
            let _ = connection.reader.join();
        }
    }

    /// Waits until something is to be done.
    fn patience(&self) -> Duration {
        let deadlines = self.waiting.values().map(|waiter| waiter.deadline);
        let next = deadlines.chain(self.outlives.map(|(_, deadline)| deadline)).min();
        next.map_or(Duration::from_secs(3600), |deadline| deadline.saturating_duration_since(Instant::now()))
    }

    /// Whether no rank needs the board of a rank 0 that has left.
    fn is_left(&self) -> bool {
        let is_silent = |(_, deadline): (Duration, Instant)| deadline <= Instant::now();
        self.outlives.is_some_and(|outlives| is_silent(outlives) || self.connections.is_empty())
    }

    /// Takes a rank in, or tells it why not. A connection that fails meanwhile is closed: its rank comes again, or is missing.
    fn greet(&mut self, stream: TcpStream, hello: &Hello) {
        let ready = stream.set_nonblocking(false).and_then(|()| stream.set_write_timeout(Some(WRITE_TIMEOUT)));
        let tell = |answer: Answer| write_frame(&stream, &answer.to_body());
        if ready.and_then(|()| tell(Answer::Welcome)).is_err() {
            return;
        }
        let Identity { world, uid, .. } = &self.identity;
        let refusal = if hello.uid != *uid {
            Some(format!("it runs as user {}, and rank 0 as {uid}: start all ranks as one user", hello.uid))
        } else if hello.world != *world {
            Some(format!("it is of a world of {}, and rank 0 of one of {world}: set WORLD_SIZE the same everywhere", hello.world))
        } else if hello.rank >= *world || self.connections.values().any(|connection| connection.rank == hello.rank) {
            Some("another process has the same rank: give each process its own RANK".to_owned())
        } else {
            None
        };
        if let Some(reason) = refusal {
            return drop(tell(Answer::Refused(reason)));
        }
        let (stream, events, number) = (Arc::new(stream), self.events.clone(), self.greeted);
        let read = Arc::clone(&stream);
        let reader = thread::Builder::new().name("bootstrap".into()).spawn(move || read_all(&read, number, &events));
        let Ok(reader) = reader else { return };
        self.connections.insert(number, Connection { stream, reader, rank: hello.rank });
        self.greeted += 1;
        if let Some(failure) = self.failure.clone() {
            return self.answer(number, &failure);
        }
        self.shortage = None;
        self.waiting.insert(hello.rank, Waiter { connection: number, deadline: after(hello.timeout), call: None });
        if self.waiting.len() == *world as usize {
            // Those that come too late are refused, with a rank that is taken.
            self.door.shut();
            self.finish(&Answer::Done(Vec::new()));
        }
    }

    fn call(&mut self, number: usize, Call { operation, timeout, payload }: Call) {
        let Some(rank) = self.rank(number) else { return };
        if self.failure.is_some() {
            // The rank has been told.
            return;
        }
        let first = self.waiting.values().find_map(|waiter| waiter.call.as_ref()).map(|(operation, _)| *operation);
        if let Some(expected) = first.filter(|first| *first != operation) {
            return self.fail(Answer::Mismatch { rank, found: operation, expected });
        }
        let call = Some((operation, payload));
        self.waiting.insert(rank, Waiter { connection: number, deadline: after(timeout), call });
        if self.waiting.len() < self.identity.world as usize {
            return;
        }
        let brought = self.waiting.values_mut().map(|waiter| waiter.call.take().map(|(_, payload)| payload).unwrap_or_default());
        let mut brought: Vec<_> = brought.collect();
        let result = match operation {
            Operation::AllGather => brought,
            Operation::Broadcast(root) => brought.get_mut(root as usize).map(std::mem::take).into_iter().collect(),
            Operation::Barrier | Operation::Close | Operation::Board => Vec::new(),
        };
        self.is_closed = operation == Operation::Close;
        self.is_board = operation == Operation::Board;
        self.finish(&Answer::Done(result));
    }

    /// Sends a note to every rank that it is for, and to the one that posted it: when a rank has it back, it was sent to the others.
    fn post(&mut self, number: usize, post: Post) {
        let (Some(rank), true) = (self.rank(number), self.is_board) else { return };
        if let Some((limit, deadline)) = &mut self.outlives {
            *deadline = after(*limit);
        }
        let readers = match &post {
            Post::Note { readers, .. } => readers.clone(),
            Post::GaveUp { .. } => Vec::new(),
        };
        self.tell(&Answer::News { rank, post }, |other| readers.is_empty() || other == rank || readers.contains(&other));
    }

    fn tell_all(&self, answer: &Answer) {
        self.tell(answer, |_| true);
    }

    fn tell(&self, answer: &Answer, is_told: impl Fn(u32) -> bool) {
        let told = self.connections.iter().filter(|(_, connection)| is_told(connection.rank));
        told.for_each(|(&number, _)| self.answer(number, answer));
    }

    /// A connection has ended. It stays, so that its rank is taken; a board's does not.
    fn gone(&mut self, number: usize) {
        let rank = self.rank(number);
        if self.is_board
            && let Some(connection) = self.connections.remove(&number)
        {
            // Its end was the last that its reader reported.
            let _ = connection.reader.join();
        }
        match rank {
            Some(rank) if self.is_board => self.tell_all(&Answer::Lost(rank)),
            Some(rank) if !self.is_closed && self.failure.is_none() => self.fail(Answer::Lost(rank)),
            _ => {}
        }
    }

    fn check_deadlines(&mut self) {
        let now = Instant::now();
        if self.waiting.values().any(|waiter| waiter.deadline <= now) {
            let missing = (0..self.identity.world).filter(|rank| !self.waiting.contains_key(rank));
            let failure = match &self.shortage {
                Some(error) if self.greeted < self.identity.world as usize => Answer::Refused(unlet(error)),
                _ => Answer::Missing(missing.collect()),
            };
            self.fail(failure);
        }
    }

    /// Answers all ranks that wait; they wait no more.
    fn finish(&mut self, answer: &Answer) {
        for waiter in std::mem::take(&mut self.waiting).into_values() {
            self.answer(waiter.connection, answer);
        }
    }

    /// Tells every rank of the failure, those that wait and those that come later.
    fn fail(&mut self, failure: Answer) {
        self.waiting.clear();
        self.tell_all(&failure);
        self.failure = Some(failure);
    }

    fn answer(&self, number: usize, answer: &Answer) {
        let Some(connection) = self.connections.get(&number) else { return };
        // A connection that does not take it is gone, which its reader reports.
        if write_frame(&connection.stream, &answer.to_body()).is_err() {
            self.hang_up(number);
        }
    }

    /// Ends a connection; its reader reports when it is gone.
    fn hang_up(&self, number: usize) {
        if let Some(connection) = self.connections.get(&number) {
            let _ = connection.stream.shutdown(Shutdown::Both);
        }
    }

    /// The rank of a connection.
    fn rank(&self, number: usize) -> Option<u32> {
        Some(self.connections.get(&number)?.rank)
    }
}

/// Why ranks are missing that no connection could be let in for. An error shows so many words of another process.
fn unlet(error: &io::Error) -> String {
    let mend = mend_of_shortage(error).unwrap_or("see the limits of its host");
    format!("no room for all ranks ({error}): {mend}")
}

/// Reads a connection until it ends, or sends bytes without a meaning.
fn read_all(stream: &TcpStream, number: usize, events: &Sender<Event>) {
    while let Some(request) = read_frame(stream, MAX_REQUEST, None).ok().and_then(|body| Request::from_body(&body)) {
        let event = match request {
            Request::Call(call) => Event::Call(number, call),
            Request::Post(post) => Event::Post(number, post),
        };
        if events.send(event).is_err() {
            return;
        }
    }
    let _ = stream.shutdown(Shutdown::Both);
    let _ = events.send(Event::Gone(number));
}
