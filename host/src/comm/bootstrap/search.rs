//! Which of the ports at which rank 0 may listen it has taken: whoever answers there as rank 0 of this job is it.
//!
//! All candidates are connected to, one after another, and then their answers are awaited together: one that takes the connection and is silent
//! holds nothing up, and one that does not even take it a second at most. All are asked again until the deadline: rank 0 may come later,
//! and take one that another program holds now.

use std::{
    io::{self, Read},
    net::{TcpStream, ToSocketAddrs},
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::{
    BootstrapError,
    wire::{Answer, Hello, write_frame},
};
use crate::comm::Rank;

/// The longest that one try to connect takes.
const TRY: Duration = Duration::from_secs(1);
/// Before the next try where nobody listens.
const PAUSE: Duration = Duration::from_millis(20);
/// Before the next try where somebody else does.
const LONG_PAUSE: Duration = Duration::from_millis(250);
/// Before the next try where another job's rank 0 does, which is asked by all ranks of this one and has its own to see to.
const LONGEST_PAUSE: Duration = Duration::from_secs(1);
/// The longest first answer in bytes.
const LONGEST: usize = 1024;

/// A rank that looks for rank 0.
pub struct Search<'a> {
    hello: &'a Hello,
    candidates: Vec<Candidate>,
}

struct Candidate {
    address: String,
    attempt: Option<Attempt>,
    retry_at: Instant,
    found: Found,
}

/// What was found at an address the last time.
enum Found {
    /// Nobody.
    Nobody(io::Error),
    /// Who does not answer as a rank 0 does.
    Stranger,
    /// Rank 0 of another job.
    OtherJob(String),
}

/// A connection on which the hello has been said.
struct Attempt {
    stream: TcpStream,
    /// What has come of the answer.
    bytes: Vec<u8>,
}

impl<'a> Search<'a> {
    /// Of a rank that says so, at addresses of which there is at least one.
    pub fn new(hello: &'a Hello, addresses: impl IntoIterator<Item = String>) -> Self {
        let new =
            |address| Candidate { address, attempt: None, retry_at: Instant::now(), found: Found::Nobody(io::ErrorKind::TimedOut.into()) };
        Self { hello, candidates: addresses.into_iter().map(new).collect() }
    }

    /// The connection to rank 0, which has taken note of this rank.
    ///
    /// # Errors
    /// [`OtherJob`](BootstrapError::OtherJob) as soon as other jobs have all addresses; at the deadline that, where one has any,
    /// [`Occupied`](BootstrapError::Occupied) where another program has one, [`Connect`](BootstrapError::Connect) where nobody listens.
    pub fn run(mut self, rank: Rank, timeout: Duration, deadline: Instant) -> Result<TcpStream, BootstrapError> {
        loop {
            for candidate in &mut self.candidates {
                if let Some(stream) = candidate.advance(self.hello, deadline) {
                    return Ok(stream);
                }
            }
            let is_other_job = |candidate: &Candidate| candidate.attempt.is_none() && matches!(candidate.found, Found::OtherJob(_));
            if self.candidates.iter().all(is_other_job) || Instant::now() >= deadline {
                return Err(self.failure(rank, timeout));
            }
            self.wait(deadline);
        }
    }

    /// Until an answer comes, or another try is due.
    fn wait(&self, deadline: Instant) {
        let tries = self.candidates.iter().filter(|candidate| candidate.attempt.is_none()).map(|candidate| candidate.retry_at);
        let patience = tries.chain([deadline]).min().map_or(PAUSE, |next| next.saturating_duration_since(Instant::now()));
        let attempts = self.candidates.iter().filter_map(|candidate| candidate.attempt.as_ref());
        let mut answers: Vec<_> = attempts.map(|attempt| PollFd::new(&attempt.stream, PollFlags::IN)).collect();
        let limit = Timespec { tv_sec: 0, tv_nsec: patience.min(LONG_PAUSE).subsec_nanos().into() };
        if poll(&mut answers, Some(&limit)).is_err() {
            thread::sleep(PAUSE);
        }
    }

    fn failure(self, rank: Rank, timeout: Duration) -> BootstrapError {
        let mut occupied = Vec::new();
        let mut nobody = None;
        for Candidate { address, found, .. } in self.candidates {
            match found {
                Found::OtherJob(theirs) => return BootstrapError::OtherJob { rank, address, theirs, ours: self.hello.job_name() },
                Found::Stranger => occupied.push(address),
                Found::Nobody(error) => nobody = nobody.or(Some((address, error))),
            }
        }
        match nobody {
            Some((address, error)) if occupied.is_empty() => BootstrapError::Connect { rank, address, timeout, error: Arc::new(error) },
            _ => BootstrapError::Occupied { rank, addresses: occupied, timeout },
        }
    }
}

impl Candidate {
    /// The connection, if rank 0 has answered.
    fn advance(&mut self, hello: &Hello, deadline: Instant) -> Option<TcpStream> {
        let now = Instant::now();
        if self.attempt.is_none() && now >= self.retry_at {
            match Attempt::new(&self.address, hello, deadline.saturating_duration_since(now)) {
                // A stranger until it answers.
                Ok(attempt) => (self.attempt, self.found) = (Some(attempt), Found::Stranger),
                Err(error) => (self.found, self.retry_at) = (Found::Nobody(error), Instant::now() + PAUSE),
            }
        }
        let answer = self.attempt.as_mut()?.answer()?;
        let attempt = self.attempt.take()?;
        let (found, pause) = match answer {
            Some(Answer::Welcome) if attempt.stream.set_nonblocking(false).is_ok() => return Some(attempt.stream),
            Some(Answer::OtherJob(theirs)) => (Found::OtherJob(theirs), LONGEST_PAUSE),
            _ => (Found::Stranger, LONG_PAUSE),
        };
        (self.found, self.retry_at) = (found, Instant::now() + pause);
        None
    }
}

impl Attempt {
    fn new(address: &str, hello: &Hello, left: Duration) -> io::Result<Self> {
        let stream = connect(address, left)?;
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

fn connect(address: &str, left: Duration) -> io::Result<TcpStream> {
    let mut last = io::Error::new(io::ErrorKind::NotFound, "the name has no address");
    for address in address.to_socket_addrs()? {
        match TcpStream::connect_timeout(&address, left.clamp(Duration::from_millis(1), TRY)) {
            // While nobody listens at a port that the system also gives out, a connection can meet itself.
            Ok(stream) if stream.local_addr()? == stream.peer_addr()? => last = io::ErrorKind::ConnectionRefused.into(),
            Ok(stream) => return Ok(stream),
            Err(error) => last = error,
        }
    }
    Err(last)
}
