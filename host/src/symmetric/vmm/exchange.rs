//! File descriptors from process to process, over sockets of the host (unix(7), `SCM_RIGHTS`).
//!
//! Sockets are `SOCK_SEQPACKET`: one message is one record, and a peer that ends is seen. Their names are random and in the abstract namespace: nothing
//! to unlink, no folder to write to. A message that is not from a process of the same user, or does not bear the token of the socket's rank, which only
//! readers of the job's board know, is dropped with all that came with it.

use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::thread;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::sockopt::socket_peercred;
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags,
    SocketAddrUnix, SocketFlags, SocketType, accept_with, bind, connect, listen, recvmsg, sendmsg, socket_with,
};

use crate::comm::Rank;

/// What a message begins with: name and version.
const MAGIC: [u8; 8] = *b"oxtilefd";
/// The bytes of a token, which is a random [`JobId`](crate::bootstrap::JobId).
const TOKEN_BYTES: usize = 32;
const MESSAGE_BYTES: usize = MAGIC.len() + TOKEN_BYTES + 4;
/// The time between two checks of the other ranks.
const TICK: Duration = Duration::from_millis(20);
/// The time between two tries to connect to a socket whose queue is full.
const PAUSE: Duration = Duration::from_millis(2);

fn socket() -> io::Result<OwnedFd> {
    Ok(socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC | SocketFlags::NONBLOCK, None)?)
}

fn message(token: &str, rank: Rank) -> Vec<u8> {
    [&MAGIC[..], token.as_bytes(), &rank.index().to_le_bytes()].concat()
}

/// Sends a descriptor to the rank that waits at `address`.
///
/// # Errors
/// [`TimedOut`](io::ErrorKind::TimedOut) at the deadline; an error of the system.
pub(super) fn send(address: &str, token: &str, from: Rank, descriptor: &OwnedFd, deadline: Instant) -> io::Result<()> {
    let (socket, name) = (socket()?, SocketAddrUnix::new_abstract_name(address.as_bytes())?);
    let retry = |what: &mut dyn FnMut() -> rustix::io::Result<()>| loop {
        match what() {
            Err(Errno::AGAIN | Errno::INTR) if Instant::now() < deadline => thread::sleep(PAUSE),
            Err(Errno::AGAIN | Errno::INTR) => return Err(io::Error::from(io::ErrorKind::TimedOut)),
            result => return Ok(result?),
        }
    };
    retry(&mut || connect(&socket, &name))?;
    let message = message(token, from);
    let descriptors = [descriptor.as_fd()];
    retry(&mut || {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        control.push(SendAncillaryMessage::ScmRights(&descriptors));
        sendmsg(&socket, &[IoSlice::new(&message)], &mut control, SendFlags::NOSIGNAL).map(drop)
    })
}

/// Where a rank waits for the others' descriptors.
#[derive(Debug)]
pub(super) struct Inbox {
    socket: OwnedFd,
    token: String,
    /// The user whose processes may send.
    uid: u32,
}

/// Why descriptors did not come.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Lacking<E> {
    /// A rank is known not to come.
    Told(E),
    /// A rank did not come in time.
    Late(Rank),
    /// The system, on this rank.
    System(String),
}

impl Inbox {
    /// Listens at a name of the abstract namespace, for processes of this user.
    pub fn open(address: &str, token: &str) -> io::Result<Self> {
        Self::open_for(address, token, rustix::process::geteuid().as_raw())
    }

    fn open_for(address: &str, token: &str, uid: u32) -> io::Result<Self> {
        let socket = socket()?;
        bind(&socket, &SocketAddrUnix::new_abstract_name(address.as_bytes())?)?;
        listen(&socket, 128)?;
        Ok(Self { socket, token: token.to_owned(), uid })
    }

    /// Waits for a descriptor of each of these ranks. `look` returns whether a rank is known not to come.
    ///
    /// # Errors
    /// The ranks that are missing at the deadline, or will not come; a descriptor that was lost on the way.
    pub fn receive<E>(
        &self,
        mut missing: Vec<Rank>,
        deadline: Instant,
        mut look: impl FnMut(Rank) -> Result<(), E>,
    ) -> Result<Vec<(Rank, OwnedFd)>, Lacking<E>> {
        let system = |error: Errno| Lacking::System(error.to_string());
        let (mut found, mut pending): (_, Vec<OwnedFd>) = (Vec::new(), Vec::new());
        while !missing.is_empty() {
            self.wait(&pending).map_err(system)?;
            loop {
                match accept_with(&self.socket, SocketFlags::CLOEXEC | SocketFlags::NONBLOCK) {
                    // Of another user: closed at once.
                    Ok(connection) => {
                        pending.extend(Some(connection).filter(|of| socket_peercred(of).is_ok_and(|peer| peer.uid.as_raw() == self.uid)));
                    }
                    Err(Errno::INTR | Errno::CONNABORTED) => {}
                    Err(Errno::AGAIN) => break,
                    Err(error @ (Errno::MFILE | Errno::NFILE)) => {
                        return Err(Lacking::System(format!("{error}: raise the limit of open files (ulimit -n)")));
                    }
                    Err(error) => return Err(system(error)),
                }
            }
            let mut quiet = Vec::new();
            for connection in pending {
                match self.take(&connection) {
                    Ok(Some((rank, descriptor))) if missing.contains(&rank) => {
                        missing.retain(|other| *other != rank);
                        found.push((rank, descriptor));
                    }
                    Err(Errno::AGAIN | Errno::INTR) => quiet.push(connection),
                    Err(Errno::TOOBIG) => {
                        return Err(Lacking::System("a descriptor was lost: raise the limit of open files (ulimit -n)".to_owned()));
                    }
                    // From a stranger, from a rank that has sent before, or from one that ended.
                    Ok(_) | Err(_) => {}
                }
            }
            pending = quiet;
            missing.iter().try_for_each(|rank| look(*rank)).map_err(Lacking::Told)?;
            if let (Some(late), true) = (missing.first(), Instant::now() >= deadline) {
                return Err(Lacking::Late(*late));
            }
        }
        Ok(found)
    }

    /// Waits until something comes, or a tick is over.
    fn wait(&self, pending: &[OwnedFd]) -> Result<(), Errno> {
        let mut all: Vec<_> = pending.iter().chain([&self.socket]).map(|socket| PollFd::new(socket, PollFlags::IN)).collect();
        let tick = Timespec { tv_sec: 0, tv_nsec: TICK.subsec_nanos().into() };
        match poll(&mut all, Some(&tick)) {
            Ok(_) | Err(Errno::INTR) => Ok(()),
            Err(error) => Err(error),
        }
    }

    /// What a connection brought; `None` for what is not from a rank of this job.
    fn take(&self, connection: &OwnedFd) -> Result<Option<(Rank, OwnedFd)>, Errno> {
        let mut bytes = [0; MESSAGE_BYTES + 1];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let got = recvmsg(connection, &mut [IoSliceMut::new(&mut bytes)], &mut control, RecvFlags::CMSG_CLOEXEC)?;
        // What is not taken from here is closed.
        let mut descriptors = control.drain().flat_map(|message| match message {
            RecvAncillaryMessage::ScmRights(descriptors) => descriptors.collect(),
            _ => Vec::new(),
        });
        let descriptor = descriptors.next();
        let Some(index) = self.sender(&bytes[..got.bytes]) else { return Ok(None) };
        match descriptor {
            _ if got.flags.contains(ReturnFlags::CTRUNC) => Err(Errno::TOOBIG),
            descriptor => Ok(descriptor.map(|descriptor| (index, descriptor))),
        }
    }

    /// The rank that a message names, if it bears the token.
    fn sender(&self, message: &[u8]) -> Option<Rank> {
        let rest = message.strip_prefix(&MAGIC)?.strip_prefix(self.token.as_bytes())?;
        let index = u32::from_le_bytes(rest.try_into().ok()?);
        // Whether there is such a rank is in the list of those that are missing.
        index.checked_add(1).and_then(crate::comm::WorldSize::new).and_then(|world| Rank::new(index, world))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bootstrap::JobId;
    use crate::comm::WorldSize;

    fn random() -> String {
        JobId::random().unwrap().as_str().to_owned()
    }

    fn ranks() -> Vec<Rank> {
        WorldSize::new(3).unwrap().ranks().collect()
    }

    fn file() -> OwnedFd {
        std::fs::File::open("/proc/self/stat").unwrap().into()
    }

    fn soon() -> Instant {
        Instant::now() + Duration::from_millis(150)
    }

    fn open_descriptors() -> usize {
        std::fs::read_dir("/proc/self/fd").unwrap().filter(|entry| entry.as_ref().is_ok_and(is_ours)).count()
    }

    /// Other tests of this program open files too, but no sockets of this kind and no such file.
    fn is_ours(entry: &std::fs::DirEntry) -> bool {
        std::fs::read_link(entry.path()).is_ok_and(|target| target.ends_with("stat"))
    }

    #[test]
    fn descriptors_arrive_in_any_order_and_strangers_are_dropped() {
        let (address, token, ranks) = (random(), random(), ranks());
        let before = open_descriptors();
        let inbox = Inbox::open(&address, &token).unwrap();
        for (token, rank) in [(&random(), 0), (&token, 2), (&token, 2), (&token, 1)] {
            send(&address, token, ranks[rank], &file(), soon()).unwrap();
        }
        // One that connects and says nothing.
        let quiet = socket().unwrap();
        connect(&quiet, &SocketAddrUnix::new_abstract_name(address.as_bytes()).unwrap()).unwrap();
        let found = inbox.receive(vec![ranks[1], ranks[2]], soon(), |_| Ok::<_, ()>(())).unwrap();
        let mut from: Vec<_> = found.iter().map(|(rank, _)| rank.index()).collect();
        from.sort_unstable();
        assert_eq!(from, [1, 2]);
        assert_eq!(open_descriptors(), before + 2, "what the strangers sent is closed");
        drop(found);
        assert_eq!(open_descriptors(), before);
        // The one with another job's token did not count as rank 0.
        let error = inbox.receive(vec![ranks[0]], soon(), |_| Ok::<_, ()>(())).unwrap_err();
        assert_eq!(error, Lacking::Late(ranks[0]));
    }

    #[test]
    fn another_user_is_refused() {
        let (address, token, ranks) = (random(), random(), ranks());
        let other = rustix::process::geteuid().as_raw().wrapping_add(1);
        let inbox = Inbox::open_for(&address, &token, other).unwrap();
        send(&address, &token, ranks[1], &file(), soon()).unwrap();
        assert_eq!(inbox.receive(vec![ranks[1]], soon(), |_| Ok::<_, ()>(())).unwrap_err(), Lacking::Late(ranks[1]));
    }

    #[test]
    fn who_will_not_come_is_not_waited_for() {
        let (address, token, ranks) = (random(), random(), ranks());
        let inbox = Inbox::open(&address, &token).unwrap();
        let start = Instant::now();
        let look = |rank: Rank| if rank == ranks[2] { Err("gone") } else { Ok(()) };
        let error = inbox.receive(vec![ranks[1], ranks[2]], start + Duration::from_secs(20), look).unwrap_err();
        assert_eq!(error, Lacking::Told("gone"));
        assert!(start.elapsed() < Duration::from_secs(5));
        drop(inbox);
        let refused = send(&address, &token, ranks[0], &file(), soon()).unwrap_err();
        assert_eq!(refused.kind(), io::ErrorKind::ConnectionRefused);
    }
}
