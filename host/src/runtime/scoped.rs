//! Memory of another library that is lent for a scope, to one stream.

use std::sync::Arc;

use oxtile_tile::num::Pod;

use super::buffer::Buffer;
use super::error::Result;
use super::memory::Owner;
use super::stream::{Stream, StreamInner};

/// The stream whose work may use the memory.
struct OneStream(Arc<StreamInner>);

impl Owner for OneStream {
    fn admits(&self, stream: &StreamInner) -> std::result::Result<(), String> {
        if stream.id == self.0.id {
            return Ok(());
        }
        let (lent, found) = (self.0.id.handle, stream.id.handle);
        Err(format!("the memory is lent to stream {lent:#x}, the call is on stream {found:#x}: use the stream that it was lent to"))
    }

    fn admits_capture(&self) -> std::result::Result<(), String> {
        Err("the memory is lent for a scope, which a graph outlives: lend it together with what keeps it alive (Buffer::lent)".to_owned())
    }

    /// Its stream is the one that frees it.
    fn used_on(&self, _: &Arc<StreamInner>) {}
}

impl<T: Pod> Buffer<T> {
    /// Borrows device memory of another library for the life of the buffer and for work on one stream: work on another one, and a graph, is refused. So a safe
    /// wrapper can lend memory that has a lifetime.
    ///
    /// ```
    /// use oxtile::{Buffer, Result, Runtime};
    ///
    /// # fn main() -> Result<()> {
    /// let device = Runtime::checked(1)?.device(0)?;
    /// let (stream, other) = (device.stream()?, device.stream()?);
    /// let theirs = Buffer::from_slice(&stream, &[1_u32, 2, 3])?;
    /// // SAFETY: the three elements are there for longer than `ours`, and were written on the same stream.
    /// let ours = unsafe { Buffer::<u32>::scoped(&stream, theirs.address(), 3)? };
    /// assert_eq!(ours.to_vec(&stream)?, [1, 2, 3]);
    /// assert!(ours.to_vec(&other).unwrap_err().to_string().contains("use the stream that it was lent to"));
    /// # Ok(()) }
    /// ```
    ///
    /// # Safety
    /// `len` elements lie at `address`, aligned for `T` and usable on the stream's device, until the buffer is dropped and the work that the stream has
    /// at that time is done. The caller orders earlier work of the other library on them before, as for [`borrow_raw`](Self::borrow_raw).
    ///
    /// # Errors
    /// [`Error::TooLarge`](super::Error::TooLarge).
    pub unsafe fn scoped(stream: &Stream, address: u64, len: u64) -> Result<Self> {
        // SAFETY: passed on to the caller; the owner lets no other stream use the memory.
        unsafe { Self::of_owner(&stream.device(), address, len, Arc::new(OneStream(Arc::clone(&stream.0)))) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::runtime::{Error, Graph, Runtime};

    #[test]
    fn one_stream_may_use_it_and_no_graph() {
        let device = Runtime::checked(1).unwrap().device(0).unwrap();
        let (stream, other) = (device.stream().unwrap(), device.stream().unwrap());
        let theirs = Buffer::<u32>::zeros(&stream, 4).unwrap();
        // SAFETY: the elements are there for longer than `ours`, and were written on the same stream.
        let mut ours = unsafe { Buffer::<u32>::scoped(&stream, theirs.address(), 4) }.unwrap();
        ours.fill_zero(&stream).unwrap();
        let refused = ours.fill_zero(&other).unwrap_err();
        assert!(matches!(&refused, Error::NotReady { why, .. } if why.contains("use the stream that it was lent to")), "{refused}");
        let refused = Graph::capture(&[&stream], || ours.fill_zero(&stream)).unwrap_err();
        assert!(matches!(&refused, Error::NotReady { why, .. } if why.contains("Buffer::lent")), "{refused}");
        assert_eq!(ours.to_vec(&stream).unwrap(), [0; 4]);
    }
}
