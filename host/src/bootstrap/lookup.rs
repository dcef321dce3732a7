//! The addresses of a name, within a deadline. The system's resolver has none: it runs on a thread of its own, which is abandoned when the
//! time is over, and ends when the name service has answered or the resolver gives up.

use std::{
    io,
    net::{SocketAddr, ToSocketAddrs},
    sync::mpsc::{self, Receiver, TryRecvError},
    thread,
    time::Instant,
};

/// What finds the addresses of `host:port`.
pub type Resolver = fn(&str) -> io::Result<Vec<SocketAddr>>;

/// The system's resolver.
pub fn system(address: &str) -> io::Result<Vec<SocketAddr>> {
    address.to_socket_addrs().map(Iterator::collect)
}

/// A lookup on its way.
pub struct Lookup(Receiver<io::Result<Vec<SocketAddr>>>);

impl Lookup {
    /// Looks `host:port` up; an address needs no resolver.
    ///
    /// # Errors
    /// If the system has no thread.
    pub fn start(address: &str, resolve: Resolver) -> io::Result<Self> {
        let (found, lookup) = mpsc::channel();
        if let Ok(address) = address.parse() {
            let _ = found.send(Ok(vec![address]));
        } else {
            let address = address.to_owned();
            thread::Builder::new().name("name lookup".into()).spawn(move || drop(found.send(resolve(&address))))?;
        }
        Ok(Self(lookup))
    }

    /// The result, once; does not wait.
    pub fn poll(&self) -> Option<io::Result<Vec<SocketAddr>>> {
        match self.0.try_recv() {
            Ok(found) => Some(found),
            Err(TryRecvError::Empty) => None,
            Err(TryRecvError::Disconnected) => Some(Err(no_answer())),
        }
    }

    /// The result, at most after the deadline.
    ///
    /// # Errors
    /// The resolver's; [`TimedOut`](io::ErrorKind::TimedOut).
    pub fn wait(self, deadline: Instant) -> io::Result<Vec<SocketAddr>> {
        self.0.recv_timeout(deadline.saturating_duration_since(Instant::now())).unwrap_or_else(|_| Err(no_answer()))
    }
}

/// The error while the name service is silent.
pub fn no_answer() -> io::Error {
    io::Error::new(io::ErrorKind::TimedOut, "the name service has not answered")
}
