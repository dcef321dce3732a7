//! What a call of a communicator reads or writes.

use std::sync::Arc;

use oxtile_tile::launch::{BufferAccess, DeviceView, DeviceViewMut};

use crate::runtime::emulated::Region;
use crate::runtime::memory::Memory;
use crate::runtime::module::{instances_of, memory_of};
use crate::runtime::stream::StreamInner;
use crate::runtime::{Error, Result, Stream};

/// Some bytes of a piece of memory, and whether the call writes them.
#[derive(Clone)]
pub(super) struct Operand {
    pub memory: Arc<Memory>,
    pub address: u64,
    pub bytes: u64,
    pub writes: bool,
}

impl Operand {
    /// What a call on the stream reads.
    ///
    /// # Errors
    /// As [`of`](Self::of).
    pub fn read<T>(stream: &Stream, what: &'static str, view: DeviceView<'_, T>) -> Result<Self> {
        Self::of(stream, what, &view.access("input"))
    }

    /// What a call on the stream writes.
    ///
    /// # Errors
    /// As [`of`](Self::of).
    pub fn written<T>(stream: &Stream, what: &'static str, view: &DeviceViewMut<'_, T>) -> Result<Self> {
        Self::of(stream, what, &view.access("output"))
    }

    /// # Errors
    /// [`Error::ForeignMemory`] for a view that this crate did not lend; [`Error::Invalid`] for one of all ranks' memory; as
    /// [`Memory::check_stream`].
    fn of(stream: &Stream, what: &'static str, access: &BufferAccess<'_>) -> Result<Self> {
        if instances_of(access).is_some() {
            let why = "the view is of all ranks' memory, of which one rank cannot dispose: give a view of this rank's".to_owned();
            return Err(Error::Invalid { what, why });
        }
        let memory = memory_of(access).ok_or(Error::ForeignMemory { kernel: what, parameter: access.parameter })?;
        memory.check_stream(&stream.0, what)?;
        Ok(Self { memory: Arc::clone(memory), address: access.address, bytes: access.bytes, writes: access.writes })
    }

    /// Whether two calls with these operands need an order.
    pub fn conflicts(&self, other: &Self) -> bool {
        let meet = self.address.max(other.address) < (self.address + self.bytes).min(other.address + other.bytes);
        meet && (self.writes || other.writes) && self.memory.shares_uses(&other.memory)
    }

    pub fn region(&self) -> Region {
        Region { address: self.address, bytes: self.bytes }
    }

    /// Notes the use, and names the streams that `stream` has to wait for.
    pub fn add_use(&self, stream: &Arc<StreamInner>, wait_for: &mut Vec<Arc<StreamInner>>) {
        self.memory.add_use(stream, self.writes, wait_for);
    }
}
