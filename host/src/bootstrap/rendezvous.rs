//! How ranks come together: rank 0 listens, all connect, and no rank returns before the last has come.

use std::{
    io,
    net::{IpAddr, Ipv6Addr, SocketAddr, TcpListener},
    os::unix::fs::MetadataExt,
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

use super::{
    BootstrapError, Environment, JobId, MOST_RANKS, Store,
    handshake::{Hello, Secret},
    lookup::{self, Lookup, Resolver},
    search::Search,
    server::{Identity, Server},
};
use crate::rank::{Rank, WorldSize, mend_of_shortage};

/// The time between two tries to listen.
const PAUSE: Duration = Duration::from_millis(20);
/// How long rank 0 tries to get its port: another rank's try to connect can hold it for a moment.
const BIND_TIMEOUT: Duration = Duration::from_secs(1);
/// Longer than any rank waits: a clock cannot count to [`Duration::MAX`].
const FOREVER: Duration = Duration::from_secs(100 * 365 * 86400);

impl Store {
    /// Waits until all ranks of the job have come, and connects them. `timeout` is the limit of this and of every later wait of this
    /// rank.
    ///
    /// Rank 0 listens at the first of [`Environment::master_ports`] that is free; the others ask at all of them for their job.
    ///
    /// # Errors
    /// [`Listen`](BootstrapError::Listen), [`Elsewhere`](BootstrapError::Elsewhere), [`Connect`](BootstrapError::Connect),
    /// [`Occupied`](BootstrapError::Occupied), [`OtherJob`](BootstrapError::OtherJob), [`OtherVersion`](BootstrapError::OtherVersion),
    /// [`Refused`](BootstrapError::Refused),
    /// [`Deadline`](BootstrapError::Deadline) with the ranks that did not come, [`Lost`](BootstrapError::Lost).
    pub fn connect(environment: &Environment, timeout: Duration) -> Result<Self, BootstrapError> {
        Self::connect_by(environment, timeout, lookup::system)
    }

    fn connect_by(environment: &Environment, timeout: Duration, resolve: Resolver) -> Result<Self, BootstrapError> {
        let timeout = timeout.min(FOREVER);
        let deadline = Instant::now() + timeout;
        let Environment { rank, world, job, .. } = environment;
        check_size(*rank, *world)?;
        let identity = identity(environment.master_port, *world, job.as_ref());
        let hello = identity.hello(*rank, timeout);
        let search = |ports: Vec<u16>| {
            let addresses = ports.into_iter().map(|port| environment.address(port));
            Search::new(&identity.secret, &hello, addresses, deadline, resolve)
        };
        if *rank != Rank::ZERO {
            let stream = search(environment.master_ports().collect()).run(*rank)?;
            let mut store = Self::over(stream, *rank, *world, timeout, None);
            return store.wait_for_all(deadline).map(|()| store);
        }
        let (server, port) = match listen(environment, &identity, deadline, resolve) {
            Ok(server) => server,
            Err(error) => return Err(why_not_here(environment, &identity, deadline, resolve, error)),
        };
        let stream = search(vec![port]).run(*rank).map_err(elsewhere)?;
        let mut store = Self::over(stream, *rank, *world, timeout, Some(server));
        store.wait_for_all(deadline).map(|()| store)
    }
}

/// The stores of all ranks of this process, to be handed to a thread each, with one timeout for every wait.
///
/// # Errors
/// [`Listen`](BootstrapError::Listen), [`Connect`](BootstrapError::Connect), if the system has no socket or thread;
/// [`Refused`](BootstrapError::Refused) for more than [`MOST_RANKS`].
pub fn threads(world: WorldSize, timeout: Duration) -> Result<Vec<Store>, BootstrapError> {
    let timeout = timeout.min(FOREVER);
    let deadline = Instant::now() + timeout;
    check_size(Rank::ZERO, world)?;
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
        let stream = Search::new(&identity.secret, &hello, [address.to_string()], deadline, lookup::system).run(rank)?;
        stores.push(Store::over(stream, rank, world, timeout, server.take()));
    }
    stores.iter_mut().try_for_each(|store| store.wait_for_all(deadline))?;
    Ok(stores)
}

fn check_size(rank: Rank, world: WorldSize) -> Result<(), BootstrapError> {
    match world.get() {
        ..=MOST_RANKS => Ok(()),
        ranks => Err(BootstrapError::Refused { rank, reason: format!("a world of {ranks} is larger than the largest, {MOST_RANKS}") }),
    }
}

fn identity(port: u16, world: WorldSize, job: Option<&JobId>) -> Identity {
    // The owner of a process's entry is the user that it runs as.
    let uid = std::fs::metadata("/proc/self").map_or(u32::MAX, |entry| entry.uid());
    Identity { secret: Secret { job: job.map(|job| job.as_str().to_owned()), port }, world: world.get(), uid }
}

impl Identity {
    fn hello(&self, rank: Rank, timeout: Duration) -> Hello {
        Hello { rank: rank.index(), world: self.world, uid: self.uid, timeout }
    }
}

fn addresses(environment: &Environment) -> Vec<String> {
    environment.master_ports().map(|port| environment.address(port)).collect()
}

fn listen_error(address: &str, error: io::Error) -> BootstrapError {
    BootstrapError::Listen { address: address.to_owned(), error: Arc::new(error) }
}

/// Rank 0 takes the first port that is free. Ranks that come early may hold one for a moment.
fn listen(environment: &Environment, identity: &Identity, deadline: Instant, resolve: Resolver) -> io::Result<(Server, u16)> {
    let named = Lookup::start(&environment.master(), resolve)?.wait(deadline)?;
    let until = deadline.min(Instant::now() + BIND_TIMEOUT);
    loop {
        let mut taken = None;
        for port in environment.master_ports() {
            match bind(&environment.master_host, &named, port) {
                Ok(listener) => return Ok((Server::start(listener, identity.clone())?, port)),
                Err(error) if error.kind() == io::ErrorKind::AddrInUse => taken = Some(error),
                Err(error) => return Err(error),
            }
        }
        match taken {
            Some(error) if Instant::now() >= until => return Err(error),
            _ => thread::sleep(PAUSE),
        }
    }
}

/// Listens at rank 0's own address alone, if that is one of this host and other hosts know it by the name, else (where addresses are translated) at all.
fn bind(host: &str, named: &[SocketAddr], port: u16) -> io::Result<TcpListener> {
    let everywhere = || TcpListener::bind((Ipv6Addr::UNSPECIFIED, port)).or_else(|_| TcpListener::bind(("0.0.0.0", port)));
    if is_known_otherwise(host, named) {
        return everywhere();
    }
    let named: Vec<_> = named.iter().map(|address| SocketAddr::new(address.ip(), port)).collect();
    TcpListener::bind(&named[..]).or_else(|error| match error.kind() {
        io::ErrorKind::AddrNotAvailable => everywhere(),
        _ => Err(error),
    })
}

/// Why rank 0 cannot listen. Where its ports are taken it connects to them as a rank of no world: a rank 0 of this job proves that it is of this job,
/// and then refuses the rank.
fn why_not_here(environment: &Environment, identity: &Identity, deadline: Instant, resolve: Resolver, error: io::Error) -> BootstrapError {
    let until = deadline.max(Instant::now() + PAUSE).min(Instant::now() + BIND_TIMEOUT);
    let no_rank = Hello { rank: u32::MAX, ..identity.hello(Rank::ZERO, BIND_TIMEOUT) };
    let is_taken = error.kind() == io::ErrorKind::AddrInUse;
    if is_taken && Search::new(&identity.secret, &no_rank, addresses(environment), until, resolve).run(Rank::ZERO).is_ok() {
        let reason = format!(
            "another process of this job is rank 0, at {}: give each process its own rank (RANK), from 0 on",
            addresses(environment).join(", ")
        );
        return BootstrapError::Refused { rank: Rank::ZERO, reason };
    }
    listen_error(&addresses(environment).join(", "), error)
}

/// The error of a rank 0 that listens and does not reach itself. That it has no means to connect tells nothing of where it is.
fn elsewhere(error: BootstrapError) -> BootstrapError {
    match error {
        BootstrapError::Connect { address, timeout, error, .. } if mend_of_shortage(&error).is_none() => {
            BootstrapError::Elsewhere { address, timeout, found: error.to_string() }
        }
        BootstrapError::Occupied { addresses, timeout, .. } => {
            BootstrapError::Elsewhere { address: addresses.join(", "), timeout, found: "another program answers there".into() }
        }
        other => other,
    }
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

    /// The deadline covers every wait of a rank, that for the resolver too.
    #[test]
    fn a_silent_name_service_is_not_waited_for() {
        const TIMEOUT: Duration = Duration::from_millis(100);
        let silent: Resolver = |_| {
            thread::sleep(Duration::from_secs(20));
            lookup::system("127.0.0.1:1")
        };
        let world = WorldSize::new(2).unwrap();
        for rank in world.ranks() {
            let variable = |name: &str| match name {
                "RANK" | "LOCAL_RANK" => Some(rank.index().to_string()),
                "WORLD_SIZE" => Some("2".to_owned()),
                "MASTER_ADDR" => Some("node".to_owned()),
                "MASTER_PORT" => Some("1".to_owned()),
                _ => None,
            };
            let begin = Instant::now();
            let error = Store::connect_by(&Environment::from_variables(variable).unwrap(), TIMEOUT, silent).unwrap_err().to_string();
            assert!(begin.elapsed() < Duration::from_secs(10), "{:?}: {error}", begin.elapsed());
            assert!(error.contains("node:1") && error.contains("the name service has not answered; is MASTER_ADDR the host"), "{error}");
        }
    }

    #[test]
    fn a_world_has_a_bound() {
        let error = threads(WorldSize::new(400_000_000).unwrap(), Duration::from_secs(9)).unwrap_err().to_string();
        assert_eq!(error, "rank 0 refused rank 0: a world of 400000000 is larger than the largest, 4096");
    }

    #[test]
    fn a_host_whose_own_name_is_local_listens_everywhere() {
        let of = |host, address: &str| is_known_otherwise(host, &[SocketAddr::new(address.parse().unwrap(), 29500)]);
        assert!(of("node7", "127.0.1.1") && of("node7", "::1"));
        assert!(!of("node7", "10.0.0.7") && !of("localhost", "127.0.0.1") && !of("127.0.0.1", "127.0.0.1"));
    }
}
