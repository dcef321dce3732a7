//! Memory that streams use: which streams used it last, and so which must wait for which.
//!
//! **Invariant:** before work that writes a piece of memory is enqueued, its stream waits for every stream that used
//! the memory since the last write; before work that reads it is enqueued, its stream waits for the stream that wrote
//! it. One stream alone never waits for itself, so that code with a single stream records no events.
//!
//! Threads may enqueue at the same time:
//! - Uses are noted and the waits that follow from them enqueued under one lock ([`order`]): a second reader on the same
//!   stream would otherwise find the first one noted, and launch before the wait of both is enqueued.
//! - Between that and the enqueue of the work no other use of the memory may come. For launches and copies Rust's borrows
//!   ensure that: a writer holds a `&mut` borrow of the buffer from the view to the end of the call. A graph's replay borrows
//!   nothing, so it excludes all other work of its runtime meanwhile ([`Inner::enqueue_alone`]; the others share that lock).

use std::sync::{Arc, Mutex, RwLockReadGuard};

use super::backend::{Copy, StreamId};
use super::error::{Error, Result};
use super::runtime::{Inner, lock};
use super::stream::StreamInner;

/// What lends memory, or is otherwise needed by work on streams: kept for as long as that work may be done, or done again by a graph.
pub(crate) trait Owner: Send + Sync {
    /// Fails when it has ended out of order: then no work that needs it is begun. The guard is held until the work is enqueued, so that
    /// the owner ends before this check, or after the work.
    fn begin(&self) -> Result<Option<RwLockReadGuard<'_, ()>>> {
        Ok(None)
    }

    /// Whether work on the stream may use it now; else why not, and how to mend it.
    fn admits(&self, _stream: &StreamInner) -> std::result::Result<(), String> {
        Ok(())
    }

    /// Whether a graph may hold work that uses it; else why not, and how to mend it.
    fn admits_capture(&self) -> std::result::Result<(), String> {
        Ok(())
    }

    /// A stream has work that needs it: it must not go before that.
    fn used_on(&self, stream: &Arc<StreamInner>);
}

/// Where a piece of memory lies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Place {
    Device,
    /// Page-locked memory of the host, in reach of every device.
    Host,
}

/// A piece of memory and its uses; what the views of a [`Buffer`](super::Buffer) own.
pub(crate) struct Memory {
    pub runtime: Arc<Inner>,
    pub place: Place,
    /// The device that it was allocated on or for.
    pub device: u32,
    pub address: u64,
    pub bytes: u64,
    pub name: String,
    /// The stream that it was allocated on; none for memory of another library, or of an owner, which frees it.
    home: Option<Arc<StreamInner>>,
    /// What lends it.
    owner: Option<Arc<dyn Owner>>,
    uses: Arc<Mutex<Uses>>,
}

/// The streams whose work on a piece of memory may still be under way.
#[derive(Clone, Default)]
pub(crate) struct Uses {
    writer: Option<Arc<StreamInner>>,
    /// Streams that read since the last write, the writer itself left out.
    readers: Vec<Arc<StreamInner>>,
}

impl Uses {
    /// Notes a use by `stream` and names the streams that it has to wait for.
    pub fn add(&mut self, stream: &Arc<StreamInner>, writes: bool, wait_for: &mut Vec<Arc<StreamInner>>) {
        let is_writer = self.writer.as_ref().is_some_and(|w| w.id == stream.id);
        if writes {
            for other in self.readers.drain(..).chain(self.writer.take_if(|_| !is_writer)) {
                push_once(wait_for, other, stream.id);
            }
            if !is_writer {
                self.writer = Some(Arc::clone(stream));
            }
        } else if !is_writer && !self.readers.iter().any(|r| r.id == stream.id) {
            if let Some(writer) = &self.writer {
                push_once(wait_for, Arc::clone(writer), stream.id);
            }
            self.readers.push(Arc::clone(stream));
        }
    }
}

fn push_once(streams: &mut Vec<Arc<StreamInner>>, stream: Arc<StreamInner>, but: StreamId) {
    if stream.id != but && !streams.iter().any(|s| s.id == stream.id) {
        streams.push(stream);
    }
}

impl Memory {
    /// Device memory whose allocation is the first work on it, done on `stream`.
    pub fn on_device(stream: &Arc<StreamInner>, address: u64, bytes: u64, name: &str) -> Arc<Self> {
        let uses = Uses { writer: Some(Arc::clone(stream)), readers: Vec::new() };
        Self::owned(stream, Place::Device, address, bytes, name, uses)
    }

    /// Page-locked memory, in use by no stream yet.
    pub fn on_host(stream: &Arc<StreamInner>, address: u64, bytes: u64) -> Arc<Self> {
        Self::owned(stream, Place::Host, address, bytes, "pinned", Uses::default())
    }

    fn owned(stream: &Arc<StreamInner>, place: Place, address: u64, bytes: u64, name: &str, uses: Uses) -> Arc<Self> {
        let (runtime, name, home) = (Arc::clone(&stream.runtime), name.to_owned(), Some(Arc::clone(stream)));
        if place == Place::Device {
            runtime.counts[stream.id.device as usize].take(bytes);
        }
        let (device, owner, uses) = (stream.id.device, None, Arc::new(Mutex::new(uses)));
        Arc::new(Self { runtime, place, device, address, bytes, name, home, owner, uses })
    }

    /// Device memory of an owner, or of another library, which the caller vouches for.
    pub fn borrowed(runtime: &Arc<Inner>, device: u32, address: u64, bytes: u64, owner: Option<Arc<dyn Owner>>) -> Arc<Self> {
        let (runtime, name, uses) = (Arc::clone(runtime), "borrowed".to_owned(), Arc::default());
        Arc::new(Self { runtime, place: Place::Device, device, address, bytes, name, home: None, owner, uses })
    }

    /// Fails unless work on `stream` may use this memory.
    pub fn check_stream(&self, stream: &StreamInner, what: &'static str) -> Result<()> {
        if !Arc::ptr_eq(&self.runtime, &stream.runtime) {
            return Err(Error::ForeignRuntime { what });
        }
        self.check_device(stream, || what.to_owned())
    }

    pub fn check_device(&self, stream: &StreamInner, what: impl FnOnce() -> String) -> Result<()> {
        let (expected, found) = (stream.id.device, self.device);
        if self.place != Place::Host && expected != found {
            return Err(Error::WrongDevice { what: what(), buffer: self.name.clone(), expected, found });
        }
        self.check_admitted(stream, what)
    }

    /// Fails where the owner lets no work of the stream use this memory now. What is captured is not done: its replay is asked about, and here whether there may be one.
    pub fn check_admitted(&self, stream: &StreamInner, what: impl FnOnce() -> String) -> Result<()> {
        let Some(owner) = &self.owner else { return Ok(()) };
        let admitted = if stream.capture().is_some() { owner.admits_capture() } else { owner.admits(stream) };
        admitted.map_err(|why| Error::NotReady { what: what(), why })
    }

    /// Memory of the same owner that is part of this: what comes next on it comes after what this was used for.
    pub fn part(&self, address: u64, bytes: u64) -> Arc<Self> {
        debug_assert!(self.home.is_none() && self.address <= address && address + bytes <= self.address + self.bytes);
        let (runtime, name, owner, uses) = (Arc::clone(&self.runtime), self.name.clone(), self.owner.clone(), lock(&self.uses).clone());
        let uses = Arc::new(Mutex::new(uses));
        Arc::new(Self { runtime, place: self.place, device: self.device, address, bytes, name, home: None, owner, uses })
    }

    /// A range of this under its uses: what is done with either, or with another window of it, is ordered as uses of one memory. For tensors that take a piece of
    /// memory in turn.
    pub fn window(self: &Arc<Self>, address: u64, bytes: u64) -> Arc<Self> {
        debug_assert!(self.address <= address && address + bytes <= self.address + self.bytes);
        let (runtime, name, uses) = (Arc::clone(&self.runtime), self.name.clone(), Arc::clone(&self.uses));
        let owner = Some(Arc::clone(self) as Arc<dyn Owner>);
        Arc::new(Self { runtime, place: self.place, device: self.device, address, bytes, name, home: None, owner, uses })
    }

    /// Whether uses of both are uses of one memory.
    pub fn shares_uses(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.uses, &other.uses)
    }

    /// Forgets uses that all later work is ordered after already.
    pub fn forget_uses(&self) {
        *lock(&self.uses) = Uses::default();
    }

    /// Forgets the uses by a stream that all later work is ordered after already.
    pub fn forget_uses_of(&self, stream: &StreamInner) {
        let uses = &mut *lock(&self.uses);
        uses.writer.take_if(|writer| writer.id == stream.id);
        uses.readers.retain(|reader| reader.id != stream.id);
    }

    /// Notes a use and names the streams that `stream` has to wait for. In a capture the uses inside it count; the
    /// graph's replay is then one use of its own.
    pub fn add_use(self: &Arc<Self>, stream: &Arc<StreamInner>, writes: bool, wait_for: &mut Vec<Arc<StreamInner>>) {
        match stream.capture() {
            Some(capture) => capture.add_use(self, stream, writes, wait_for),
            None => lock(&self.uses).add(stream, writes, wait_for),
        }
    }

    /// Waits on the host for the work that a use of the host has to wait for.
    pub fn wait_on_host(&self, writes: bool) -> Result<()> {
        self.streams(writes).iter().try_for_each(|stream| stream.wait_on_host())
    }

    /// The streams that a use has to wait for.
    pub fn streams(&self, writes: bool) -> Vec<Arc<StreamInner>> {
        let uses = lock(&self.uses);
        uses.writer.iter().chain(uses.readers.iter().filter(|_| writes)).cloned().collect()
    }
}

/// Part of it is lent under a name of its own.
impl Owner for Memory {
    fn admits(&self, stream: &StreamInner) -> std::result::Result<(), String> {
        self.owner.as_ref().map_or(Ok(()), |owner| owner.admits(stream))
    }

    fn admits_capture(&self) -> std::result::Result<(), String> {
        self.owner.as_ref().map_or(Ok(()), |owner| owner.admits_capture())
    }

    fn used_on(&self, stream: &Arc<StreamInner>) {
        lock(&self.uses).add(stream, false, &mut Vec::new());
    }
}

/// Makes the stream wait for the streams that `note` names while it notes uses of memory; atomic to other threads.
pub(crate) fn order(stream: &Arc<StreamInner>, note: impl FnOnce(&mut Vec<Arc<StreamInner>>)) -> Result<()> {
    let _order = lock(&stream.runtime.order);
    let mut wait_for = Vec::new();
    note(&mut wait_for);
    stream.order_after(&wait_for)
}

/// Enqueues a copy in order with the other uses of both ends; `None` is pageable host memory.
pub(crate) fn copy(stream: &Arc<StreamInner>, copy: Copy, target: Option<&Arc<Memory>>, source: Option<&Arc<Memory>>) -> Result<()> {
    let _enqueue = stream.runtime.enqueue();
    order(stream, |wait_for| {
        if let Some(memory) = source {
            memory.add_use(stream, false, wait_for);
        }
        if let Some(memory) = target {
            memory.add_use(stream, true, wait_for);
        }
    })?;
    let copy = copy.joined();
    if copy.bytes == 0 {
        return Ok(());
    }
    stream.note(copy.direction.name(), Some(copy.caller));
    stream.runtime.backend.copy(stream.id, copy)
}

/// Enqueues copies between devices, in order with the other uses of the sources and in any among themselves: by one call of the driver where that can be.
pub(crate) fn copies(stream: &Arc<StreamInner>, copies: &[Copy], sources: &[&Arc<Memory>]) -> Result<()> {
    let _enqueue = stream.runtime.enqueue();
    order(stream, |wait_for| sources.iter().for_each(|memory| memory.add_use(stream, false, wait_for)))?;
    let backend = &stream.runtime.backend;
    if let Some(copy) = copies.last() {
        stream.note("copies", Some(copy.caller));
    }
    if copies.len() > 1 && stream.takes_batches() && copies.iter().all(|copy| copy.bytes > 0) {
        return backend.copies(stream.id, copies);
    }
    copies.iter().filter(|copy| copy.bytes > 0).try_for_each(|copy| backend.copy(stream.id, *copy))
}

/// What is left to do when nothing refers to a piece of memory any more.
pub(crate) struct Release {
    place: Place,
    address: u64,
    bytes: u64,
    home: Arc<StreamInner>,
    uses: Uses,
}

impl Release {
    /// Frees in stream order: after every use, with nothing waiting on the host.
    pub fn run(self) {
        let stream = self.uses.writer.as_ref().unwrap_or(&self.home);
        // A stream of a capture takes no other work: the capture frees when it ends.
        let busy = self.uses.readers.iter().chain([stream]).find_map(|s| s.capture());
        if let Some(capture) = busy {
            return capture.release_later(self);
        }
        let others: Vec<_> = self.uses.readers.iter().filter(|reader| reader.id != stream.id).cloned().collect();
        let backend = &stream.runtime.backend;
        let freed = stream.order_after(&others).and_then(|()| match self.place {
            Place::Device => {
                stream.runtime.counts[stream.id.device as usize].give_back(self.bytes);
                backend.free(stream.id, self.address)
            }
            Place::Host => backend.free_host(stream.id, self.address, self.bytes),
        });
        if let Err(error) = freed {
            tracing::warn!(%error, address = self.address, "memory was not freed");
        }
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        if let Some(owner) = self.owner.take() {
            self.streams(true).iter().for_each(|stream| owner.used_on(stream));
        }
        let Some(home) = self.home.take().filter(|_| self.bytes != 0) else { return };
        let uses = std::mem::take(&mut *lock(&self.uses));
        Release { place: self.place, address: self.address, bytes: self.bytes, home, uses }.run();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::runtime::{Runtime, Stream};

    /// Which use waits for which streams, in a sequence of uses `(stream, writes)`.
    fn waits(uses: &[(usize, bool)]) -> Vec<Vec<usize>> {
        let runtime = Runtime::emulated(1).unwrap();
        let streams: Vec<Stream> = (0..3).map(|_| runtime.device(0).unwrap().stream().unwrap()).collect();
        let number = |inner: &Arc<StreamInner>| streams.iter().position(|stream| stream.0.id == inner.id).unwrap();
        let mut memory = Uses::default();
        let mut one = |&(stream, writes): &(usize, bool)| {
            let mut wait_for = Vec::new();
            memory.add(&streams[stream].0, writes, &mut wait_for);
            let mut numbers: Vec<_> = wait_for.iter().map(number).collect();
            numbers.sort_unstable();
            numbers
        };
        uses.iter().map(&mut one).collect()
    }

    const READ: bool = false;
    const WRITE: bool = true;

    #[test]
    fn one_stream_never_waits() {
        let uses = [(0, WRITE), (0, READ), (0, WRITE), (0, WRITE), (0, READ), (0, READ)];
        assert!(waits(&uses).iter().all(Vec::is_empty));
    }

    #[test]
    fn readers_wait_for_the_writer_once_and_not_for_each_other() {
        assert_eq!(waits(&[(0, WRITE), (1, READ), (2, READ), (1, READ), (0, READ)]), [vec![], vec![0], vec![0], vec![], vec![]]);
    }

    #[test]
    fn a_writer_waits_for_all_that_used_the_memory_since_the_last_write() {
        assert_eq!(waits(&[(0, WRITE), (1, READ), (2, WRITE), (0, WRITE)]), [vec![], vec![0], vec![0, 1], vec![2]]);
        // Its own reads do not count, the other streams' do.
        assert_eq!(waits(&[(0, READ), (1, READ), (0, WRITE), (0, WRITE)]), [vec![], vec![], vec![1], vec![]]);
    }
}
