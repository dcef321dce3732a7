//! Finds the port that rank 0 has taken, of those at which it may listen: the one where a program answers as rank 0 of this job.
//!
//! All candidates are connected to and their answers awaited together: one that is silent, or does not even take the connection, delays
//! nothing. All are asked again until the deadline: rank 0 may come later, and take one that another program holds now.

use std::{
    io::{self, Read},
    mem,
    net::TcpStream,
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::{
    BootstrapError,
    connecting::{Connecting, TRY},
    frame::write_frame,
    lookup::{Lookup, Resolver, no_answer},
    wire::{Answer, Hello},
};
use crate::rank::Rank;

/// The time between two checks whether a name's addresses are known.
const LOOK: Duration = Duration::from_millis(2);
/// The time before the next try where no program listens.
const PAUSE: Duration = Duration::from_millis(20);
/// The time before the next try where another program does.
const LONG_PAUSE: Duration = Duration::from_millis(250);
/// The time before the next try where another job's rank 0 listens, which all ranks of this job ask beside its own ranks.
const LONGEST_PAUSE: Duration = Duration::from_secs(1);
/// The longest first answer in bytes.
const LONGEST: usize = 1024;

/// A rank that looks for rank 0.
pub struct Search<'a> {
    hello: &'a Hello,
    deadline: Instant,
    resolve: Resolver,
    candidates: Vec<Candidate>,
}

struct Candidate {
    address: String,
    state: State,
    found: Found,
}

enum State {
    /// To be asked, or asked again, at this time.
    Resting(Instant),
    Resolving(Lookup),
    Connecting(Connecting),
    Asked(Attempt),
}

/// What was found at an address the last time.
enum Found {
    /// No program.
    Silence(io::Error),
    /// A program that does not answer as a rank 0 does.
    Stranger,
    /// Rank 0 of another job.
    OtherJob(String),
}

/// A connection on which the hello has been sent.
struct Attempt {
    stream: TcpStream,
    /// The bytes of the answer so far.
    bytes: Vec<u8>,
}

impl<'a> Search<'a> {
    /// A search of the rank that says `hello`, at one address or more. The hello's timeout is how long the rank waits in all: it sends what
    /// is left of that when it has found a program.
    pub fn new(hello: &'a Hello, addresses: impl IntoIterator<Item = String>, deadline: Instant, resolve: Resolver) -> Self {
        let new =
            |address| Candidate { address, state: State::Resting(Instant::now()), found: Found::Silence(io::ErrorKind::TimedOut.into()) };
        Self { hello, deadline, resolve, candidates: addresses.into_iter().map(new).collect() }
    }

    /// The connection to rank 0, which has taken note of this rank.
    ///
    /// # Errors
    /// [`OtherJob`](BootstrapError::OtherJob) as soon as other jobs have all addresses; at the deadline that, where one has any,
    /// [`Occupied`](BootstrapError::Occupied) where another program has one, [`Connect`](BootstrapError::Connect) where no program listens.
    pub fn run(mut self, rank: Rank) -> Result<TcpStream, BootstrapError> {
        loop {
            for candidate in &mut self.candidates {
                if let Some(stream) = candidate.advance(self.hello, self.deadline, self.resolve) {
                    return Ok(stream);
                }
            }
            let is_other_job =
                |candidate: &Candidate| matches!((&candidate.state, &candidate.found), (State::Resting(_), Found::OtherJob(_)));
            if self.candidates.iter().all(is_other_job) || Instant::now() >= self.deadline {
                return Err(self.failure(rank));
            }
            self.wait();
        }
    }

    /// Waits until an answer comes, or another try is due.
    fn wait(&self) {
        let (mut due, mut answers) = (vec![self.deadline], Vec::new());
        for candidate in &self.candidates {
            match &candidate.state {
                State::Resting(until) => due.push(*until),
                State::Resolving(_) => due.push(Instant::now() + LOOK),
                State::Connecting(connecting) => {
                    due.extend(connecting.due());
                    answers.extend(connecting.streams().map(|stream| PollFd::new(stream, PollFlags::OUT)));
                }
                State::Asked(attempt) => answers.push(PollFd::new(&attempt.stream, PollFlags::IN)),
            }
        }
        let patience = due.into_iter().min().map_or(PAUSE, |next| next.saturating_duration_since(Instant::now()));
        let limit = Timespec { tv_sec: 0, tv_nsec: patience.min(LONG_PAUSE).subsec_nanos().into() };
        if poll(&mut answers, Some(&limit)).is_err() {
            thread::sleep(PAUSE);
        }
    }

    fn failure(self, rank: Rank) -> BootstrapError {
        let timeout = self.hello.timeout;
        let mut occupied = Vec::new();
        let mut silence = None;
        for Candidate { address, state, found } in self.candidates {
            match found {
                Found::Silence(_) if matches!(state, State::Resolving(_)) => silence = silence.or_else(|| Some((address, no_answer()))),
                Found::OtherJob(theirs) => return BootstrapError::OtherJob { rank, address, theirs, ours: self.hello.job_name() },
                Found::Stranger => occupied.push(address),
                Found::Silence(error) => silence = silence.or(Some((address, error))),
            }
        }
        match silence {
            Some((address, error)) if occupied.is_empty() => BootstrapError::Connect { rank, address, timeout, error: Arc::new(error) },
            _ => BootstrapError::Occupied { rank, addresses: occupied, timeout },
        }
    }
}

impl Candidate {
    /// The connection, if rank 0 has answered.
    fn advance(&mut self, hello: &Hello, deadline: Instant, resolve: Resolver) -> Option<TcpStream> {
        if matches!(self.state, State::Resting(until) if Instant::now() >= until) {
            match Lookup::start(&self.address, resolve) {
                Ok(lookup) => self.state = State::Resolving(lookup),
                Err(error) => self.rest(Found::Silence(error), PAUSE),
            }
        }
        if let State::Resolving(lookup) = &self.state {
            match lookup.poll() {
                Some(Ok(addresses)) => self.state = State::Connecting(Connecting::new(addresses)),
                Some(Err(error)) => self.rest(Found::Silence(error), PAUSE),
                None => {}
            }
        }
        if let State::Connecting(connecting) = &mut self.state {
            match connecting.advance().and_then(|stream| stream.map(|stream| Attempt::new(stream, hello, deadline)).transpose()) {
                Ok(None) => {}
                // A stranger until it answers.
                Ok(Some(attempt)) => (self.state, self.found) = (State::Asked(attempt), Found::Stranger),
                Err(error) => self.rest(Found::Silence(error), PAUSE),
            }
        }
        let State::Asked(attempt) = &mut self.state else { return None };
        let answer = attempt.answer()?;
        if answer == Some(Answer::Welcome)
            && let State::Asked(Attempt { stream, .. }) = mem::replace(&mut self.state, State::Resting(Instant::now()))
            && stream.set_nonblocking(false).is_ok()
        {
            return Some(stream);
        }
        match answer {
            Some(Answer::OtherJob(theirs)) => self.rest(Found::OtherJob(theirs), LONGEST_PAUSE),
            _ => self.rest(Found::Stranger, LONG_PAUSE),
        }
        None
    }

    fn rest(&mut self, found: Found, pause: Duration) {
        (self.found, self.state) = (found, State::Resting(Instant::now() + pause));
    }
}

impl Attempt {
    fn new(stream: TcpStream, hello: &Hello, deadline: Instant) -> io::Result<Self> {
        let hello = Hello { timeout: deadline.saturating_duration_since(Instant::now()), ..hello.clone() };
        stream.set_nonblocking(false)?;
        stream.set_nodelay(true)?;
        stream.set_write_timeout(Some(TRY))?;
        write_frame(&stream, &hello.to_body())?;
        stream.set_nonblocking(true)?;
        Ok(Self { stream, bytes: Vec::new() })
    }

    /// `None` until there is one; `Some(None)` where none will come.
    fn answer(&mut self) -> Option<Option<Answer>> {
        match self.read() {
            Ok(body) => body.map(|body| Answer::from_body(&body)),
            Err(_) => Some(None),
        }
    }

    /// A frame's body, once it is there; not a byte more is read.
    fn read(&mut self) -> io::Result<Option<Vec<u8>>> {
        let mut buffer = [0; LONGEST];
        loop {
            let length = self.bytes.first_chunk().map(|length| u32::from_le_bytes(*length) as usize);
            let missing = match length {
                Some(length) if length > LONGEST => return Err(io::ErrorKind::InvalidData.into()),
                Some(length) if self.bytes.len() == 4 + length => return Ok(Some(self.bytes.split_off(4))),
                Some(length) => 4 + length - self.bytes.len(),
                None => 4 - self.bytes.len(),
            };
            match self.stream.read(&mut buffer[..missing]) {
                Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
                Ok(count) => self.bytes.extend(&buffer[..count]),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(None),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
    }
}
