//! How ranks come together: rank 0 listens, all connect, and nobody returns before the last has come.

use std::{
    io,
    net::{Ipv6Addr, SocketAddr, TcpListener, TcpStream, ToSocketAddrs},
    os::unix::fs::MetadataExt,
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

use super::{
    BootstrapError, Environment, JobId, Store,
    server::{Identity, Server},
    store::JOINING,
    wire::{Hello, write_frame},
};
use crate::comm::{Rank, WorldSize};

/// The longest that one try to connect takes.
const TRY: Duration = Duration::from_secs(1);
/// Between two tries.
const PAUSE: Duration = Duration::from_millis(20);
/// How long rank 0 tries to get its port: another rank's try to connect can hold it for a moment.
const BIND_TIMEOUT: Duration = Duration::from_secs(1);

impl Store {
    /// Waits until all ranks of the job have come, and connects them. `timeout` is that of this and of every later wait of this
    /// rank.
    ///
    /// # Errors
    /// [`Listen`](BootstrapError::Listen), [`Connect`](BootstrapError::Connect), [`Refused`](BootstrapError::Refused),
    /// [`Deadline`](BootstrapError::Deadline) with the ranks that did not come, [`Lost`](BootstrapError::Lost).
    pub fn connect(environment: &Environment, timeout: Duration) -> Result<Self, BootstrapError> {
        let deadline = Instant::now() + timeout;
        let Environment { rank, world, job, .. } = environment;
        let address = environment.master();
        let identity = identity(*world, job.as_ref());
        let server = match *rank {
            Rank::ZERO => Some(listen(environment, &identity).map_err(|error| listen_error(&address, error))?),
            _ => None,
        };
        let stream = connect(&address, deadline).map_err(|error| {
            let error = Arc::new(error);
            BootstrapError::Connect { rank: *rank, address, timeout, error }
        })?;
        let mut store = Self::over(stream, *rank, *world, timeout, server);
        store.say_hello(&identity)?;
        store.wait_for_all()?;
        Ok(store)
    }

    fn say_hello(&mut self, identity: &Identity) -> Result<(), BootstrapError> {
        let Identity { job, world, uid } = identity.clone();
        let hello = Hello { job, rank: self.rank().index(), world, uid, timeout: self.timeout() };
        write_frame(self.stream(), &hello.to_body()).map_err(|error| self.connection_failed(JOINING, error))
    }
}

/// The stores of all ranks of this process, to be handed to a thread each, with one timeout for every wait.
///
/// # Errors
/// [`Listen`](BootstrapError::Listen), [`Connect`](BootstrapError::Connect), if the system has no socket or thread.
pub fn threads(world: WorldSize, timeout: Duration) -> Result<Vec<Store>, BootstrapError> {
    let deadline = Instant::now() + timeout;
    let local = SocketAddr::from(([127, 0, 0, 1], 0));
    let listening = |error| listen_error("127.0.0.1", error);
    let job = JobId::random().map_err(listening)?;
    let identity = identity(world, Some(&job));
    let listener = TcpListener::bind(local).map_err(listening)?;
    let address = listener.local_addr().map_err(listening)?.to_string();
    let mut server = Some(Server::start(listener, identity.clone()).map_err(listening)?);
    let mut stores = Vec::new();
    for rank in world.ranks() {
        let failed = |error| BootstrapError::Connect { rank, address: address.clone(), timeout, error: Arc::new(error) };
        let stream = connect(&address, deadline).map_err(failed)?;
        let mut store = Store::over(stream, rank, world, timeout, server.take());
        store.say_hello(&identity)?;
        stores.push(store);
    }
    stores.iter_mut().try_for_each(Store::wait_for_all)?;
    Ok(stores)
}

fn identity(world: WorldSize, job: Option<&JobId>) -> Identity {
    // The owner of its entry is whom a process runs as.
    let uid = std::fs::metadata("/proc/self").map_or(u32::MAX, |entry| entry.uid());
    Identity { job: job.map_or("", JobId::as_str).to_owned(), world: world.get(), uid }
}

fn listen_error(address: &str, error: io::Error) -> BootstrapError {
    BootstrapError::Listen { address: address.to_owned(), error: Arc::new(error) }
}

/// Rank 0 listens at its own address alone where that is one of this host, else (behind a translated address) at all.
fn listen(environment: &Environment, identity: &Identity) -> io::Result<Server> {
    let port = environment.master_port;
    let deadline = Instant::now() + BIND_TIMEOUT;
    loop {
        let named: Vec<SocketAddr> = (environment.master_host.as_str(), port).to_socket_addrs()?.collect();
        let bound = TcpListener::bind(&named[..]).or_else(|error| match error.kind() {
            io::ErrorKind::AddrNotAvailable => {
                TcpListener::bind((Ipv6Addr::UNSPECIFIED, port)).or_else(|_| TcpListener::bind(("0.0.0.0", port)))
            }
            _ => Err(error),
        });
        match bound {
            Ok(listener) => return Server::start(listener, identity.clone()),
            Err(error) if error.kind() == io::ErrorKind::AddrInUse && Instant::now() < deadline => thread::sleep(PAUSE),
            Err(error) => return Err(error),
        }
    }
}

/// Tries until rank 0 listens.
fn connect(address: &str, deadline: Instant) -> io::Result<TcpStream> {
    loop {
        let error = match try_connect(address, deadline) {
            Ok(stream) => return Ok(stream),
            Err(error) => error,
        };
        if Instant::now() + PAUSE >= deadline {
            return Err(error);
        }
        thread::sleep(PAUSE);
    }
}

fn try_connect(address: &str, deadline: Instant) -> io::Result<TcpStream> {
    let mut last = io::Error::new(io::ErrorKind::NotFound, "the name has no address");
    for address in address.to_socket_addrs()? {
        let left = deadline.saturating_duration_since(Instant::now()).clamp(Duration::from_millis(1), TRY);
        match TcpStream::connect_timeout(&address, left) {
            // While nobody listens at a port that the system also gives out, a connection can meet itself.
            Ok(stream) if stream.local_addr()? == stream.peer_addr()? => last = io::ErrorKind::ConnectionRefused.into(),
            Ok(stream) => {
                stream.set_nodelay(true)?;
                return Ok(stream);
            }
            Err(error) => last = error,
        }
    }
    Err(last)
}
