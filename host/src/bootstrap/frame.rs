//! Frames of a connection: a length, little-endian, and a body. A length is compared with the longest that may come before anything is allocated for it.

use std::{
    io::{self, Read, Write},
    net::TcpStream,
    time::{Duration, Instant},
};

/// Writes a frame, within the stream's write timeout.
pub fn write_frame(mut stream: &TcpStream, body: &[u8]) -> io::Result<()> {
    let length = u32::try_from(body.len()).map_err(|_| io::Error::new(io::ErrorKind::InvalidInput, "a frame of 4 GiB or more"))?;
    // One write: what comes between two would cost a round trip.
    stream.write_all(&[&length.to_le_bytes(), body].concat())
}

/// Reads a frame of at most `most` bytes; without a deadline it waits for as long as the connection stands.
///
/// # Errors
/// [`TimedOut`](io::ErrorKind::TimedOut) at the deadline, [`UnexpectedEof`](io::ErrorKind::UnexpectedEof) where the connection ends.
pub fn read_frame(stream: &TcpStream, most: u32, deadline: Option<Instant>) -> io::Result<Vec<u8>> {
    let mut length = [0; 4];
    read_exact(stream, &mut length, deadline)?;
    let length = u32::from_le_bytes(length);
    if length > most {
        return Err(io::Error::new(io::ErrorKind::InvalidData, format!("a frame of {length} bytes, where {most} are the most")));
    }
    // Read as it comes: the length is not trusted with an allocation.
    let mut body = Vec::new();
    while (body.len() as u32) < length {
        let begin = body.len();
        body.resize((begin + (1 << 16)).min(length as usize), 0);
        read_exact(stream, &mut body[begin..], deadline)?;
    }
    Ok(body)
}

/// A frame that comes in pieces, over a connection that does not wait.
#[derive(Debug, Default)]
pub struct PartialFrame {
    bytes: Vec<u8>,
}

impl PartialFrame {
    /// The frame's body, once it is there. Not a byte more is read, and nothing of a frame of more than `most` bytes.
    ///
    /// # Errors
    /// [`InvalidData`](io::ErrorKind::InvalidData) for a longer frame, [`UnexpectedEof`](io::ErrorKind::UnexpectedEof) where the connection ends.
    pub fn read(&mut self, mut stream: impl Read, most: usize) -> io::Result<Option<Vec<u8>>> {
        let mut buffer = [0; 128];
        loop {
            let length = self.bytes.first_chunk().map(|length| u32::from_le_bytes(*length) as usize);
            let missing = match length {
                Some(length) if length > most => return Err(io::ErrorKind::InvalidData.into()),
                Some(length) if self.bytes.len() == 4 + length => {
                    let body = self.bytes.split_off(4);
                    self.bytes.clear();
                    return Ok(Some(body));
                }
                Some(length) => 4 + length - self.bytes.len(),
                None => 4 - self.bytes.len(),
            };
            match stream.read(&mut buffer[..missing.min(128)]) {
                Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
                Ok(count) => self.bytes.extend(&buffer[..count]),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(None),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
    }
}

fn read_exact(mut stream: &TcpStream, mut buffer: &mut [u8], deadline: Option<Instant>) -> io::Result<()> {
    while !buffer.is_empty() {
        let left = deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
        if left == Some(Duration::ZERO) {
            return Err(io::ErrorKind::TimedOut.into());
        }
        stream.set_read_timeout(left)?;
        match stream.read(buffer) {
            Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(count) => buffer = &mut buffer[count..],
            Err(error) if matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut | io::ErrorKind::Interrupted) => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}
