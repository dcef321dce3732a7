//! How ranks come together: rank 0 listens, all connect, and nobody returns before the last has come.

use std::{
    io,
    net::{IpAddr, Ipv6Addr, SocketAddr, TcpListener, ToSocketAddrs},
    os::unix::fs::MetadataExt,
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

use super::{
    BootstrapError, Environment, JobId, Store,
    search::Search,
    server::{Identity, Server},
    wire::Hello,
};
use crate::comm::{Rank, WorldSize};

/// Between two tries to listen.
const PAUSE: Duration = Duration::from_millis(20);
/// How long rank 0 tries to get its port: another rank's try to connect can hold it for a moment.
const BIND_TIMEOUT: Duration = Duration::from_secs(1);
/// Longer than anybody waits: a clock cannot count to [`Duration::MAX`].
const FOREVER: Duration = Duration::from_secs(100 * 365 * 86400);

impl Store {
    /// Waits until all ranks of the job have come, and connects them. `timeout` is that of this and of every later wait of this
    /// rank.
    ///
    /// Rank 0 listens at the first of [`Environment::master_ports`] that is free; the others ask at all of them for their job.
    ///
    /// # Errors
    /// [`Listen`](BootstrapError::Listen), [`Connect`](BootstrapError::Connect), [`Occupied`](BootstrapError::Occupied),
    /// [`OtherJob`](BootstrapError::OtherJob), [`Refused`](BootstrapError::Refused), [`Deadline`](BootstrapError::Deadline) with the ranks that did
    /// not come, [`Lost`](BootstrapError::Lost).
    pub fn connect(environment: &Environment, timeout: Duration) -> Result<Self, BootstrapError> {
        let timeout = timeout.min(FOREVER);
        let deadline = Instant::now() + timeout;
        let Environment { rank, world, job, .. } = environment;
        let identity = identity(environment.master_port, *world, job.as_ref());
        let (server, ports) = match *rank {
            Rank::ZERO => {
                let (server, port) =
                    listen(environment, &identity).map_err(|error| listen_error(&addresses(environment).join(", "), error))?;
                (Some(server), vec![port])
            }
            _ => (None, environment.master_ports().collect()),
        };
        let hello = identity.hello(*rank, timeout);
        let search = Search::new(&hello, ports.into_iter().map(|port| environment.address(port)));
        let stream = search.run(*rank, timeout, deadline)?;
        let mut store = Self::over(stream, *rank, *world, timeout, server);
        store.wait_for_all()?;
        Ok(store)
    }
}

/// The stores of all ranks of this process, to be handed to a thread each, with one timeout for every wait.
///
/// # Errors
/// [`Listen`](BootstrapError::Listen), [`Connect`](BootstrapError::Connect), if the system has no socket or thread.
pub fn threads(world: WorldSize, timeout: Duration) -> Result<Vec<Store>, BootstrapError> {
    let timeout = timeout.min(FOREVER);
    let deadline = Instant::now() + timeout;
    let local = SocketAddr::from(([127, 0, 0, 1], 0));
    let listening = |error| listen_error("127.0.0.1", error);
    let job = JobId::random().map_err(listening)?;
    let listener = TcpListener::bind(local).map_err(listening)?;
    let address = listener.local_addr().map_err(listening)?;
    let identity = identity(address.port(), world, Some(&job));
    let mut server = Some(Server::start(listener, identity.clone()).map_err(listening)?);
    let mut stores = Vec::new();
    for rank in world.ranks() {
        let hello = identity.hello(rank, timeout);
        let stream = Search::new(&hello, [address.to_string()]).run(rank, timeout, deadline)?;
        stores.push(Store::over(stream, rank, world, timeout, server.take()));
    }
    stores.iter_mut().try_for_each(Store::wait_for_all)?;
    Ok(stores)
}

fn identity(port: u16, world: WorldSize, job: Option<&JobId>) -> Identity {
    // The owner of its entry is whom a process runs as.
    let uid = std::fs::metadata("/proc/self").map_or(u32::MAX, |entry| entry.uid());
    Identity { job: job.map_or("", JobId::as_str).to_owned(), port: port.into(), world: world.get(), uid }
}

impl Identity {
    fn hello(&self, rank: Rank, timeout: Duration) -> Hello {
        let Self { job, port, world, uid } = self.clone();
        Hello { job, port, rank: rank.index(), world, uid, timeout }
    }
}

fn addresses(environment: &Environment) -> Vec<String> {
    environment.master_ports().map(|port| environment.address(port)).collect()
}

fn listen_error(address: &str, error: io::Error) -> BootstrapError {
    BootstrapError::Listen { address: address.to_owned(), error: Arc::new(error) }
}

/// Rank 0 takes the first port that is free. Ranks that come early may hold one for a moment.
fn listen(environment: &Environment, identity: &Identity) -> io::Result<(Server, u16)> {
    let deadline = Instant::now() + BIND_TIMEOUT;
    loop {
        let mut taken = None;
        for port in environment.master_ports() {
            match bind(&environment.master_host, port) {
                Ok(listener) => return Ok((Server::start(listener, identity.clone())?, port)),
                Err(error) if error.kind() == io::ErrorKind::AddrInUse => taken = Some(error),
                Err(error) => return Err(error),
            }
        }
        match taken {
            Some(error) if Instant::now() >= deadline => return Err(error),
            _ => thread::sleep(PAUSE),
        }
    }
}

/// At rank 0's own address alone where that is one of this host and other hosts know it by the name, else (behind a translated address) at all.
fn bind(host: &str, port: u16) -> io::Result<TcpListener> {
    let named: Vec<SocketAddr> = (host, port).to_socket_addrs()?.collect();
    let everywhere = || TcpListener::bind((Ipv6Addr::UNSPECIFIED, port)).or_else(|_| TcpListener::bind(("0.0.0.0", port)));
    if is_known_otherwise(host, &named) {
        return everywhere();
    }
    TcpListener::bind(&named[..]).or_else(|error| match error.kind() {
        io::ErrorKind::AddrNotAvailable => everywhere(),
        _ => Err(error),
    })
}

/// Whether other hosts know the name by another address: `/etc/hosts` of Debian and Ubuntu gives a host's own name 127.0.1.1.
fn is_known_otherwise(host: &str, named: &[SocketAddr]) -> bool {
    let is_local_by_name = host == "localhost" || host.parse::<IpAddr>().is_ok();
    !is_local_by_name && named.iter().any(|address| address.ip().is_loopback())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_timeout_may_be_as_long_as_there_are() {
        let mut stores = threads(WorldSize::new(1).unwrap(), Duration::MAX).unwrap();
        stores[0].barrier().unwrap();
    }

    #[test]
    fn a_host_whose_own_name_is_local_listens_everywhere() {
        let of = |host, address: &str| is_known_otherwise(host, &[SocketAddr::new(address.parse().unwrap(), 29500)]);
        assert!(of("node7", "127.0.1.1") && of("node7", "::1"));
        assert!(!of("node7", "10.0.0.7") && !of("localhost", "127.0.0.1") && !of("127.0.0.1", "127.0.0.1"));
    }
}
