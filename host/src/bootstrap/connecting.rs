//! A connection to one of several addresses, of which some may not answer.
//!
//! Each is tried as soon as the one before has failed or has not answered for a moment, and all are awaited together: the first that takes the
//! connection is it (RFC 8305, "Happy Eyeballs").

use std::{
    io,
    net::{SocketAddr, TcpStream},
    time::{Duration, Instant},
    vec,
};

use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    io::Errno,
    net::{AddressFamily, SocketFlags, SocketType, connect, socket_with},
};

/// The longest that one address may take.
pub const TRY: Duration = Duration::from_secs(1);
/// How long one address is awaited alone: RFC 8305 recommends 250 ms, and at least 100.
const ALONE: Duration = Duration::from_millis(100);

/// Addresses that are being connected to.
pub struct Connecting {
    tried: Vec<Try>,
    left: vec::IntoIter<SocketAddr>,
    /// When the next of them is due.
    next_at: Instant,
    /// The error of the last address that failed.
    error: io::Error,
}

/// A connection on its way.
struct Try {
    stream: TcpStream,
    until: Instant,
}

impl Connecting {
    pub fn new(addresses: Vec<SocketAddr>) -> Self {
        let error = io::Error::new(io::ErrorKind::NotFound, "the name has no address");
        Self { tried: Vec::new(), left: addresses.into_iter(), next_at: Instant::now(), error }
    }

    /// The connection, once there is one; does not wait. The connection is non-blocking.
    ///
    /// # Errors
    /// The error of the last address, when none is left.
    pub fn advance(&mut self) -> io::Result<Option<TcpStream>> {
        loop {
            let now = Instant::now();
            let mut at = 0;
            while at < self.tried.len() {
                match self.tried[at].is_connected(now) {
                    Ok(true) => return Ok(Some(self.tried.swap_remove(at).stream)),
                    Ok(false) => at += 1,
                    Err(error) => {
                        self.tried.remove(at);
                        (self.error, self.next_at) = (error, now);
                    }
                }
            }
            if now < self.next_at {
                return Ok(None);
            }
            match self.left.next().map(|address| Try::new(address, now)) {
                Some(Ok(one)) => {
                    self.tried.push(one);
                    self.next_at = now + ALONE;
                }
                Some(Err(error)) => self.error = error,
                None if self.tried.is_empty() => return Err(std::mem::replace(&mut self.error, io::ErrorKind::NotFound.into())),
                None => return Ok(None),
            }
        }
    }

    /// The sockets that become writable when an address has answered.
    pub fn streams(&self) -> impl Iterator<Item = &TcpStream> {
        self.tried.iter().map(|one| &one.stream)
    }

    /// When to advance though no address has answered.
    pub fn due(&self) -> Option<Instant> {
        let next = (self.left.len() > 0).then_some(self.next_at);
        self.tried.iter().map(|one| one.until).chain(next).min()
    }
}

impl Try {
    fn new(address: SocketAddr, now: Instant) -> io::Result<Self> {
        let family = if address.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 };
        let socket = socket_with(family, SocketType::STREAM, SocketFlags::CLOEXEC | SocketFlags::NONBLOCK, None)?;
        match connect(&socket, &address) {
            Ok(()) | Err(Errno::INPROGRESS) => Ok(Self { stream: socket.into(), until: now + TRY }),
            Err(error) => Err(error.into()),
        }
    }

    fn is_connected(&self, now: Instant) -> io::Result<bool> {
        let at_once = Timespec { tv_sec: 0, tv_nsec: 0 };
        if !has_event(poll(&mut [PollFd::new(&self.stream, PollFlags::OUT)], Some(&at_once)))? {
            return if now < self.until { Ok(false) } else { Err(io::ErrorKind::TimedOut.into()) };
        }
        if let Some(error) = self.stream.take_error()? {
            return Err(error);
        }
        // While no program listens at a port that the system also gives out, a connection can meet itself.
        if self.stream.local_addr()? == self.stream.peer_addr()? { Err(io::ErrorKind::ConnectionRefused.into()) } else { Ok(true) }
    }
}

/// Whether a poll found something. After an interruption by a signal nothing is known of the connection.
fn has_event(polled: rustix::io::Result<usize>) -> io::Result<bool> {
    match polled {
        Ok(events) => Ok(events > 0),
        Err(Errno::INTR) => Ok(false),
        Err(error) => Err(error.into()),
    }
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;

    use rustix::net::{bind, listen};

    use super::*;

    /// An address that neither takes nor refuses a connection, while the second value is alive.
    fn full() -> (SocketAddr, TcpListener, Vec<TcpStream>) {
        let socket = socket_with(AddressFamily::INET, SocketType::STREAM, SocketFlags::CLOEXEC, None).unwrap();
        bind(&socket, &SocketAddr::from(([127, 0, 0, 1], 0))).unwrap();
        listen(&socket, 0).unwrap();
        let listener = TcpListener::from(socket);
        let address = listener.local_addr().unwrap();
        let held = std::iter::from_fn(|| TcpStream::connect_timeout(&address, Duration::from_millis(50)).ok()).collect();
        (address, listener, held)
    }

    fn run(addresses: &[SocketAddr]) -> (io::Result<TcpStream>, Duration) {
        let (begin, mut connecting) = (Instant::now(), Connecting::new(addresses.to_vec()));
        loop {
            match connecting.advance() {
                Ok(None) => std::thread::sleep(connecting.due().unwrap().saturating_duration_since(Instant::now()).min(ALONE / 10)),
                done => return (done.map(|stream| stream.unwrap()), begin.elapsed()),
            }
        }
    }

    #[test]
    fn silent_addresses_hold_nothing_up() {
        let (silent, live) = ([full(), full()], TcpListener::bind("127.0.0.1:0").unwrap());
        let [first, second] = [silent[0].0, silent[1].0];
        let (found, took) = run(&[first, second, live.local_addr().unwrap()]);
        assert_eq!(found.unwrap().peer_addr().unwrap(), live.local_addr().unwrap());
        assert!(took >= 2 * ALONE && took < TRY, "{took:?}");
        live.accept().unwrap();
        live.set_nonblocking(true).unwrap();
        assert!(live.accept().is_err(), "it is connected to once");
    }

    #[test]
    fn the_first_in_order_is_taken_and_the_next_where_that_fails() {
        let [one, other] = [0, 1].map(|_| TcpListener::bind("127.0.0.1:0").unwrap());
        let [first, second] = [&one, &other].map(|listener| listener.local_addr().unwrap());
        assert_eq!(run(&[first, second]).0.unwrap().peer_addr().unwrap(), first);
        other.set_nonblocking(true).unwrap();
        assert!(other.accept().is_err(), "no connection comes to the second");
        drop(one);
        assert_eq!(run(&[first, second]).0.unwrap().peer_addr().unwrap(), second);
        drop(other);
        assert_eq!(run(&[first, second]).0.unwrap_err().kind(), io::ErrorKind::ConnectionRefused);
        assert_eq!(run(&[]).0.unwrap_err().to_string(), "the name has no address");
    }

    #[test]
    fn one_that_stays_silent_is_given_up() {
        let (address, ..) = &full();
        let (error, took) = run(&[*address]);
        assert_eq!(error.unwrap_err().kind(), io::ErrorKind::TimedOut);
        assert!(took >= TRY && took < 2 * TRY, "{took:?}");
    }

    #[test]
    fn a_signal_does_not_end_a_try() {
        assert!(!has_event(Err(Errno::INTR)).unwrap() && !has_event(Ok(0)).unwrap() && has_event(Ok(1)).unwrap());
        assert_eq!(has_event(Err(Errno::NOMEM)).unwrap_err().kind(), io::ErrorKind::OutOfMemory);
    }
}
