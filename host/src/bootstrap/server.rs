//! What rank 0 runs for all: it lets the ranks in, waits for each operation until all have come, and tells all of a failure.

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
use super::frame::{read_frame, write_frame};
use super::wire::{Answer, Call, Hello, MAX_REQUEST, Operation, Post, Request, job_name};
use crate::runtime::patience::after;

/// The time between two checks for new connections, while ranks are missing.
const POLL: Duration = Duration::from_millis(2);
/// How long a connection may take to send its hello.
const HELLO_TIMEOUT: Duration = Duration::from_secs(10);
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
    pub job: Option<String>,
    /// See [`Hello::port`].
    pub port: u32,
    pub world: u32,
    pub uid: u32,
}

enum Event {
    Hello(usize, Hello),
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
    rank: Option<u32>,
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
    /// By their numbers: those of ranks, and those that may yet become some.
    connections: BTreeMap<usize, Connection>,
    /// How many there have been.
    accepted: usize,
    waiting: BTreeMap<u32, Waiter>,
    /// Until all have joined.
    listener: Option<TcpListener>,
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
        listener.set_nonblocking(true)?;
        let (events, inbox) = mpsc::channel();
        let state = State {
            identity,
            events: events.clone(),
            connections: BTreeMap::new(),
            accepted: 0,
            waiting: BTreeMap::new(),
            listener: Some(listener),
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
            self.accept();
            match inbox.recv_timeout(self.patience()) {
                Ok(Event::Stop) | Err(RecvTimeoutError::Disconnected) => break,
                Ok(Event::Hello(connection, hello)) => self.greet(connection, hello),
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
        if self.listener.is_some() {
            return POLL;
        }
        let deadlines = self.waiting.values().map(|waiter| waiter.deadline);
        let next = deadlines.chain(self.outlives.map(|(_, deadline)| deadline)).min();
        next.map_or(Duration::from_secs(3600), |deadline| deadline.saturating_duration_since(Instant::now()))
    }

    /// Whether no rank needs the board of a rank 0 that has left.
    fn is_left(&self) -> bool {
        let is_silent = |(_, deadline): (Duration, Instant)| deadline <= Instant::now();
        self.outlives.is_some_and(|outlives| is_silent(outlives) || self.connections.values().all(|connection| connection.rank.is_none()))
    }

    fn accept(&mut self) {
        while let Some(Ok((stream, _))) = self.listener.as_ref().map(TcpListener::accept) {
            let ready = stream.set_nonblocking(false).and_then(|()| stream.set_nodelay(true));
            if ready.and_then(|()| stream.set_write_timeout(Some(WRITE_TIMEOUT))).is_err() {
                continue;
            }
            let (stream, events, number) = (Arc::new(stream), self.events.clone(), self.accepted);
            let read = Arc::clone(&stream);
            let reader = thread::Builder::new().name("bootstrap".into()).spawn(move || read_all(&read, number, &events));
            // Without a thread the connection is closed, and its rank tries again or reports it.
            if let Ok(reader) = reader {
                self.connections.insert(number, Connection { stream, reader, rank: None });
                self.accepted += 1;
            }
        }
    }

    fn greet(&mut self, number: usize, hello: Hello) {
        let Identity { job, port, world, uid } = &self.identity;
        if (&hello.job, hello.port) != (job, *port) {
            self.answer(number, &Answer::OtherJob(job_name(job.as_deref(), *port)));
            return self.hang_up(number);
        }
        self.answer(number, &Answer::Welcome);
        let refusal = if hello.uid != *uid {
            Some(format!("it runs as user {}, and rank 0 as {uid}: start all ranks as one user", hello.uid))
        } else if hello.world != *world {
            Some(format!("it is of a world of {}, and rank 0 of one of {world}: set WORLD_SIZE the same everywhere", hello.world))
        } else if hello.rank >= *world || self.connections.values().any(|connection| connection.rank == Some(hello.rank)) {
            Some("another process has the same rank: give each process its own RANK".to_owned())
        } else {
            None
        };
        if let Some(reason) = refusal {
            self.answer(number, &Answer::Refused(reason));
            return self.hang_up(number);
        }
        if let Some(connection) = self.connections.get_mut(&number) {
            connection.rank = Some(hello.rank);
        }
        if let Some(failure) = self.failure.clone() {
            return self.answer(number, &failure);
        }
        self.waiting.insert(hello.rank, Waiter { connection: number, deadline: after(hello.timeout), call: None });
        if self.waiting.len() == *world as usize {
            // Refuses the connections that came too late, with a rank that is taken.
            self.accept();
            self.listener = None;
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
            Operation::Broadcast(root) => vec![std::mem::take(&mut brought[root as usize])],
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
        let told = self.connections.iter().filter(|(_, connection)| connection.rank.is_some_and(&is_told));
        told.for_each(|(&number, _)| self.answer(number, answer));
    }

    /// A connection has ended. That of a rank stays, so that its number is taken. A board's does not, nor a stranger's, of which there may be any number.
    fn gone(&mut self, number: usize) {
        let rank = self.rank(number);
        if (rank.is_none() || self.is_board)
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
            self.fail(Answer::Missing(missing.collect()));
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

    /// The rank of a connection, if it has one.
    fn rank(&self, number: usize) -> Option<u32> {
        self.connections.get(&number)?.rank
    }
}

/// Reads a connection until it ends, or sends bytes without a meaning.
fn read_all(stream: &TcpStream, number: usize, events: &Sender<Event>) {
    let hello = read_frame(stream, MAX_REQUEST, Some(Instant::now() + HELLO_TIMEOUT));
    if let Some(hello) = hello.ok().and_then(|body| Hello::from_body(&body)) {
        let _ = events.send(Event::Hello(number, hello));
        while let Some(request) = read_frame(stream, MAX_REQUEST, None).ok().and_then(|body| Request::from_body(&body)) {
            let event = match request {
                Request::Call(call) => Event::Call(number, call),
                Request::Post(post) => Event::Post(number, post),
            };
            if events.send(event).is_err() {
                return;
            }
        }
    }
    let _ = stream.shutdown(Shutdown::Both);
    let _ = events.send(Event::Gone(number));
}
