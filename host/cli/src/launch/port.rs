//! The port at which rank 0 will listen, kept from other programs.
//!
//! A socket has the port while the launcher runs, and does not listen. The system then gives the port to no program that asks for any, nor to an outgoing connection; a
//! program that names it can have it only by `SO_REUSEADDR`, socket(7), which rank 0 sets, as do libraries with a rendezvous of their own.

use std::{
    io,
    net::{SocketAddr, TcpListener},
    os::fd::OwnedFd,
};

use rustix::net::{AddressFamily, SocketFlags, SocketType, bind, socket_with, sockopt::set_socket_reuseaddr};

/// A port of this host, reserved until this is dropped.
#[derive(Debug)]
pub struct Port {
    number: u16,
    _socket: OwnedFd,
}

impl Port {
    /// One that is free.
    ///
    /// # Errors
    /// If the system has no port or socket.
    pub fn reserve() -> io::Result<Self> {
        let socket = socket_with(AddressFamily::INET, SocketType::STREAM, SocketFlags::CLOEXEC, None)?;
        set_socket_reuseaddr(&socket, true)?;
        bind(&socket, &SocketAddr::from(([127, 0, 0, 1], 0)))?;
        // Only asks for the address: it does not listen.
        let socket = TcpListener::from(socket);
        Ok(Self { number: socket.local_addr()?.port(), _socket: socket.into() })
    }

    /// The port.
    pub fn number(&self) -> u16 {
        self.number
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn is_free(port: u16) -> bool {
        let socket = socket_with(AddressFamily::INET, SocketType::STREAM, SocketFlags::CLOEXEC, None).expect("a socket");
        bind(&socket, &SocketAddr::from(([127, 0, 0, 1], port))).is_ok()
    }

    #[test]
    fn a_reserved_port_is_rank_0s() {
        let port = Port::reserve().expect("a port");
        assert!(!is_free(port.number()), "a program that names it does not get it");
        // Rank 0 listens, ends, and a rank 0 that is started again listens too.
        for _ in 0..2 {
            TcpListener::bind(("127.0.0.1", port.number())).expect("rank 0 gets it");
        }
        let number = port.number();
        drop(port);
        assert!(is_free(number), "it is free again");
    }
}
