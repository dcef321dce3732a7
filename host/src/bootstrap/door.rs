//! Where connections come in at rank 0, and stay until they have proved that they are of its job.
//!
//! A stranger costs a file descriptor and a frame of at most [`LONGEST`] bytes, and no thread: one thread hears all. There is a bound on how many are heard at
//! once, and on the time that each has. So strangers that are silent, or come in floods, neither delay ranks much nor take what rank 0 needs.

use std::{
    collections::VecDeque,
    fmt,
    io::{self, ErrorKind, PipeReader, PipeWriter, Read, Write},
    net::{TcpListener, TcpStream},
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    io::Errno,
    process::{Resource, getrlimit},
};

use super::{
    frame::{PartialFrame, write_frame},
    handshake::{Exchange, Foreign, Hello, Introduction, LONGEST, Opening, Secret, nonce, other_version},
};

/// How long a connection may take to prove itself.
const PROOF_TIMEOUT: Duration = Duration::from_secs(10);
/// The time before the next try to let a connection in, where the system has no means for one more.
const PAUSE: Duration = Duration::from_millis(50);
/// The most connections that are heard at once; fewer where the process may have few files.
const MOST: usize = 256;
const FEWEST: usize = 4;
/// The share of the process's file descriptors that they may take.
const SHARE: u64 = 8;
/// How long a connection is heard at least, though others wait: longer than a rank needs, unless it is far away.
const LEAST: Duration = Duration::from_millis(20);

/// What the door tells.
pub enum Knock {
    /// A connection that has proved to be a rank of the job.
    Rank(TcpStream, Hello),
    /// None can be let in: why.
    Shortage(io::Error),
}

/// A thread that lets ranks in; it ends, with all that has not proved itself, when this is dropped.
pub struct Door {
    control: Option<PipeWriter>,
    thread: Option<JoinHandle<()>>,
}

impl Door {
    /// Hears the connections that come to a listener.
    ///
    /// # Errors
    /// If the system has no thread or pipe.
    pub fn open(listener: TcpListener, secret: Secret, told: impl Fn(Knock) + Send + 'static) -> io::Result<Self> {
        listener.set_nonblocking(true)?;
        let port = listener.local_addr()?.port();
        let (reader, control) = io::pipe()?;
        let files = getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX);
        let most = ((files / SHARE) as usize).clamp(FEWEST, MOST);
        let hall = Hall { listener: Some(listener), control: reader, secret, port, most, heard: VecDeque::new(), pause_until: None };
        let thread = thread::Builder::new().name("bootstrap door".into()).spawn(move || hall.run(&told))?;
        Ok(Self { control: Some(control), thread: Some(thread) })
    }

    /// Takes no more connections. Those that have come are heard out.
    pub fn shut(&mut self) {
        // A thread that has ended takes no more either.
        let _ = self.control.as_mut().map(|control| control.write(&[0]));
    }
}

impl Drop for Door {
    fn drop(&mut self) {
        self.control = None;
        let _ = self.thread.take().map(JoinHandle::join);
    }
}

impl fmt::Debug for Door {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Door")
    }
}

/// Connections that have not proved themselves.
struct Hall {
    /// None once the door is shut.
    listener: Option<TcpListener>,
    /// Ends when the door is dropped, and has a byte when it is shut.
    control: PipeReader,
    secret: Secret,
    port: u16,
    /// How many are heard at once.
    most: usize,
    /// In the order in which they came.
    heard: VecDeque<Stranger>,
    /// Before this time no connection is let in.
    pause_until: Option<Instant>,
}

/// A connection that has not proved itself.
struct Stranger {
    stream: TcpStream,
    since: Instant,
    frame: PartialFrame,
    /// Once it has been challenged.
    exchange: Option<Exchange>,
}

impl Hall {
    fn run(mut self, told: &dyn Fn(Knock)) {
        while self.listener.is_some() || !self.heard.is_empty() {
            if self.wait() {
                match self.control.read(&mut [0]) {
                    Ok(1) => {
                        self.accept(told);
                        self.listener = None;
                    }
                    Err(error) if error.kind() == ErrorKind::Interrupted => {}
                    _ => return,
                }
            }
            self.hear(told);
            self.accept(told);
        }
    }

    /// Waits until a connection has come or says more, or time has passed. Returns whether the door has been shut or dropped.
    fn wait(&self) -> bool {
        let is_listening = self.may_accept();
        let mut polled = vec![PollFd::new(&self.control, PollFlags::IN)];
        polled.extend(self.heard.iter().map(|stranger| PollFd::new(&stranger.stream, PollFlags::IN)));
        polled.extend(self.listener.iter().filter(|_| is_listening).map(|listener| PollFd::new(listener, PollFlags::IN)));
        let patience = self.due(is_listening).map(|due| due.saturating_duration_since(Instant::now()));
        let limit = patience.map(|patience| Timespec { tv_sec: patience.as_secs() as i64, tv_nsec: i64::from(patience.subsec_nanos()) });
        match poll(&mut polled, limit.as_ref()) {
            Ok(_) => !polled[0].revents().is_empty(),
            Err(Errno::INTR) => false,
            Err(_) => {
                thread::sleep(PAUSE);
                false
            }
        }
    }

    /// Whether a connection that comes now can be let in.
    fn may_accept(&self) -> bool {
        let is_pause = self.pause_until.is_some_and(|until| Instant::now() < until);
        let is_full = self.heard.len() >= self.most && self.heard.front().is_some_and(|oldest| oldest.since.elapsed() < LEAST);
        self.listener.is_some() && !is_pause && !is_full
    }

    /// When to go on though no connection says anything.
    fn due(&self, is_listening: bool) -> Option<Instant> {
        let oldest = self.heard.front().map(|stranger| stranger.since);
        let is_waiting = self.listener.is_some() && !is_listening;
        let full = oldest.filter(|_| is_waiting && self.heard.len() >= self.most).map(|since| since + LEAST);
        let pause = self.pause_until.filter(|until| is_waiting && Instant::now() < *until);
        oldest.map(|since| since + PROOF_TIMEOUT).into_iter().chain(pause.or(full)).min()
    }

    /// Lets in those that have come. Where there are too many, the oldest is sent away: of strangers it has had the most time, and a rank comes again.
    fn accept(&mut self, told: &dyn Fn(Knock)) {
        while self.may_accept()
            && let Some(listener) = &self.listener
        {
            match listener.accept() {
                Ok((stream, _)) => {
                    if self.heard.len() >= self.most {
                        self.heard.pop_front();
                    }
                    let mut stranger = Stranger { stream, since: Instant::now(), frame: PartialFrame::default(), exchange: None };
                    let ready = stranger.stream.set_nonblocking(true).and_then(|()| stranger.stream.set_nodelay(true));
                    // Its opening is often there already.
                    match ready.and_then(|()| stranger.advance(&self.secret, self.port)) {
                        Ok(Some(hello)) => told(Knock::Rank(stranger.stream, hello)),
                        Ok(None) => self.heard.push_back(stranger),
                        Err(_) => {}
                    }
                }
                Err(error) if error.kind() == ErrorKind::WouldBlock => return,
                Err(error) if matches!(error.kind(), ErrorKind::Interrupted | ErrorKind::ConnectionAborted) => {}
                // No file descriptor, mostly, and that is told though no connection waits.
                Err(_) if !is_asked(listener) => return,
                Err(error) => match self.heard.front().map(|oldest| oldest.since + LEAST) {
                    // Its descriptor is free after this.
                    Some(until) if until <= Instant::now() => drop(self.heard.pop_front()),
                    Some(until) => self.pause_until = Some(until),
                    None => {
                        self.pause_until = Some(Instant::now() + PAUSE);
                        told(Knock::Shortage(error));
                    }
                },
            }
        }
    }

    /// Hears those that are there. Those that are wrong or have had their time are closed.
    fn hear(&mut self, told: &dyn Fn(Knock)) {
        for _ in 0..self.heard.len() {
            let Some(mut stranger) = self.heard.pop_front() else { return };
            match stranger.advance(&self.secret, self.port) {
                Ok(Some(hello)) => told(Knock::Rank(stranger.stream, hello)),
                Ok(None) if stranger.since.elapsed() < PROOF_TIMEOUT => self.heard.push_back(stranger),
                _ => {}
            }
        }
    }
}

/// Whether a connection waits to be let in.
fn is_asked(listener: &TcpListener) -> bool {
    let at_once = Timespec { tv_sec: 0, tv_nsec: 0 };
    poll(&mut [PollFd::new(listener, PollFlags::IN)], Some(&at_once)).is_ok_and(|count| count > 0)
}

impl Stranger {
    /// Reads what has come, and answers it. Which rank it is, once that is proved.
    ///
    /// # Errors
    /// The connection's; [`InvalidData`](ErrorKind::InvalidData) for what no rank of the job sends.
    fn advance(&mut self, secret: &Secret, port: u16) -> io::Result<Option<Hello>> {
        let invalid = || io::Error::from(ErrorKind::InvalidData);
        while let Some(body) = self.frame.read(&self.stream, LONGEST)? {
            if let Some(exchange) = &self.exchange {
                let introduction = Introduction::from_body(&body).ok_or_else(invalid)?;
                return secret.hello(exchange, introduction).map(Some).ok_or_else(invalid);
            }
            let exchange = match Opening::from_body(&body) {
                Ok(opening) => Exchange { port, nonces: [opening.nonce, nonce()?] },
                Err(Foreign::Version(_)) => return write_frame(&self.stream, &other_version()).and(Err(invalid())),
                Err(Foreign::Unknown) => return Err(invalid()),
            };
            // The first bytes on a connection: there is room for them without a wait.
            write_frame(&self.stream, &secret.challenge(&exchange).to_body())?;
            self.exchange = Some(exchange);
        }
        Ok(None)
    }
}
