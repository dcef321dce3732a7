//! Finds the port that rank 0 has taken, of those at which it may listen: the one where a program proves to be rank 0 of this job.
//!
//! All candidates are connected to and their answers awaited together: one that is silent, or does not even take the connection, delays
//! nothing. All are asked again until the deadline: rank 0 may come later, and take one that another program holds now.

use std::{
    io, mem,
    net::TcpStream,
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::{
    BootstrapError,
    connecting::{Connecting, TRY},
    frame::{PartialFrame, write_frame},
    handshake::{Challenge, Exchange, Foreign, Hello, LONGEST, Opening, Secret, VERSION, nonce},
    lookup::{Lookup, Resolver, no_answer},
    wire::Answer,
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

/// A rank that looks for rank 0.
pub struct Search<'a> {
    secret: &'a Secret,
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
    /// A program that does not know this job's name.
    OtherJob,
    /// A rank 0 of another version of the protocol.
    OtherVersion(u8),
}

/// A connection on which the opening has been sent.
struct Attempt {
    stream: TcpStream,
    frame: PartialFrame,
    /// Where it was sent, with this rank's number and, once it is there, rank 0's.
    exchange: Exchange,
    /// Whether rank 0 has proved itself, and this rank in turn.
    is_proved: bool,
}

impl<'a> Search<'a> {
    /// A search of the rank that says `hello`, at one address or more. The hello's timeout is how long the rank waits in all: it sends what
    /// is left of that when it has found rank 0.
    pub fn new(
        secret: &'a Secret,
        hello: &'a Hello,
        addresses: impl IntoIterator<Item = String>,
        deadline: Instant,
        resolve: Resolver,
    ) -> Self {
        let new =
            |address| Candidate { address, state: State::Resting(Instant::now()), found: Found::Silence(io::ErrorKind::TimedOut.into()) };
        Self { secret, hello, deadline, resolve, candidates: addresses.into_iter().map(new).collect() }
    }

    /// The connection to rank 0, which has taken note of this rank.
    ///
    /// # Errors
    /// [`OtherJob`](BootstrapError::OtherJob) or [`OtherVersion`](BootstrapError::OtherVersion) as soon as such have all addresses; at the deadline that, where one has any,
    /// [`Occupied`](BootstrapError::Occupied) where another program has one, [`Connect`](BootstrapError::Connect) where no program listens.
    pub fn run(mut self, rank: Rank) -> Result<TcpStream, BootstrapError> {
        loop {
            for candidate in &mut self.candidates {
                if let Some(stream) = candidate.advance(self.secret, self.hello, self.deadline, self.resolve) {
                    return Ok(stream);
                }
            }
            let is_other = |Candidate { state, found, .. }: &Candidate| {
                matches!((state, found), (State::Resting(_), Found::OtherJob | Found::OtherVersion(_)))
            };
            if self.candidates.iter().all(is_other) || Instant::now() >= self.deadline {
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
                Found::OtherJob => return BootstrapError::OtherJob { rank, address, ours: self.secret.job_name() },
                Found::OtherVersion(theirs) => return BootstrapError::OtherVersion { rank, address, theirs, own: VERSION },
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
    /// The connection, if rank 0 has let this rank in.
    fn advance(&mut self, secret: &Secret, hello: &Hello, deadline: Instant, resolve: Resolver) -> Option<TcpStream> {
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
            match connecting.advance().and_then(|stream| stream.map(Attempt::new).transpose()) {
                Ok(None) => {}
                // A stranger until it has proved itself.
                Ok(Some(attempt)) => (self.state, self.found) = (State::Asked(attempt), Found::Stranger),
                Err(error) => self.rest(Found::Silence(error), PAUSE),
            }
        }
        let State::Asked(attempt) = &mut self.state else { return None };
        match attempt.advance(secret, hello, deadline)? {
            Ok(()) => {
                if let State::Asked(Attempt { stream, .. }) = mem::replace(&mut self.state, State::Resting(Instant::now()))
                    && stream.set_nonblocking(false).is_ok()
                {
                    return Some(stream);
                }
            }
            Err(found) => {
                let pause = if matches!(found, Found::Stranger) { LONG_PAUSE } else { LONGEST_PAUSE };
                self.rest(found, pause);
            }
        }
        None
    }

    fn rest(&mut self, found: Found, pause: Duration) {
        (self.found, self.state) = (found, State::Resting(Instant::now() + pause));
    }
}

impl Attempt {
    fn new(stream: TcpStream) -> io::Result<Self> {
        let exchange = Exchange { port: stream.peer_addr()?.port(), nonces: [nonce()?, [0; 32]] };
        stream.set_nodelay(true)?;
        let attempt = Self { stream, frame: PartialFrame::default(), exchange, is_proved: false };
        attempt.send(&Opening { nonce: attempt.exchange.nonces[0] }.to_body())?;
        Ok(attempt)
    }

    /// Sends a frame. Both of a handshake have room on a new connection, so that nothing waits here.
    fn send(&self, body: &[u8]) -> io::Result<()> {
        self.stream.set_nonblocking(false)?;
        self.stream.set_write_timeout(Some(TRY))?;
        write_frame(&self.stream, body)?;
        self.stream.set_nonblocking(true)
    }

    /// `None` until it is known whether rank 0 is there and has let this rank in.
    fn advance(&mut self, secret: &Secret, hello: &Hello, deadline: Instant) -> Option<Result<(), Found>> {
        loop {
            let body = match self.frame.read(&self.stream, LONGEST) {
                Ok(body) => body?,
                Err(_) => return Some(Err(Found::Stranger)),
            };
            if self.is_proved {
                return Some(if Answer::from_body(&body) == Some(Answer::Welcome) { Ok(()) } else { Err(Found::Stranger) });
            }
            match Challenge::from_body(&body) {
                Ok(challenge) => {
                    self.exchange.nonces[1] = challenge.nonce;
                    if !secret.is_of_job(&self.exchange, &challenge.proof) {
                        return Some(Err(Found::OtherJob));
                    }
                }
                Err(Foreign::Version(version)) => return Some(Err(Found::OtherVersion(version))),
                Err(Foreign::Unknown) => return Some(Err(Found::Stranger)),
            }
            let hello = Hello { timeout: deadline.saturating_duration_since(Instant::now()), ..hello.clone() };
            if self.send(&secret.introduce(&self.exchange, hello).to_body()).is_err() {
                return Some(Err(Found::Stranger));
            }
            self.is_proved = true;
        }
    }
}
