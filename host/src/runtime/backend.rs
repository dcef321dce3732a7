//! The interface between the runtime and its back ends: one trait, two implementations.
//!
//! Handles are plain words that only their back end understands. The runtime above keeps them alive, orders the
//! work of different streams and refuses what cannot be captured, so that a back end only does as it is told.

use std::sync::Arc;
use std::time::Duration;

use oxtile_tile::launch::{DeviceLimits, Grid, KernelArgs, KernelInfo};
use oxtile_tile::layout::SwizzleMode;

use super::emulated::Cluster;
use super::error::Result;
use super::library::KernelLibrary;
use super::matmul::{Matmul, MatmulMemory, MatmulPlan};
use super::recorder::Recorder;
use super::virtual_memory::Driver;
pub(crate) use crate::recording::Caller;
use crate::recording::Recording;

/// A stream of one device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct StreamId {
    pub device: u32,
    pub handle: u64,
}

/// An event of one device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct EventId {
    pub device: u32,
    pub handle: u64,
}

/// A kernel loaded on one device.
#[derive(Clone, Copy, Debug)]
pub(crate) struct FunctionId(pub u64);

/// A captured graph, ready to be replayed.
#[derive(Clone, Copy, Debug)]
pub(crate) struct GraphId {
    pub device: u32,
    pub handle: u64,
}

/// What is known of a device without running anything on it.
#[derive(Clone, Debug)]
pub(crate) struct DeviceProperties {
    pub name: String,
    /// Major and minor compute capability.
    pub capability: (u32, u32),
    pub limits: DeviceLimits,
}

/// One launch: grid and arguments have been checked, and there is at least one block.
pub(crate) struct KernelLaunch<'a> {
    pub info: &'a KernelInfo,
    pub function: FunctionId,
    pub body: fn(&[u64]),
    pub grid: Grid,
    pub args: &'a dyn KernelArgs,
    pub caller: Caller,
}

/// What [`Backend::write_value`] and [`Backend::wait_value`] do.
#[derive(Clone, Copy)]
pub(crate) enum WordOperation {
    Write { address: u64, value: u64, caller: Caller },
    Wait { address: u64, value: u64, caller: Caller },
}

impl WordOperation {
    /// What it is called.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Write { .. } => "a signal",
            Self::Wait { .. } => "a wait for a signal",
        }
    }

    /// Where it was asked for.
    pub fn caller(&self) -> Caller {
        let (Self::Write { caller, .. } | Self::Wait { caller, .. }) = self;
        caller
    }
}

/// A back end: it does the work of streams. A method with a [`StreamId`] only enqueues, unless its documentation states otherwise.
pub(crate) trait Backend: Send + Sync {
    fn devices(&self) -> &[DeviceProperties];

    /// The virtual cluster, where that is what carries out the work.
    fn cluster(&self) -> Option<&Cluster> {
        None
    }

    /// Makes the device that of the calling thread, for libraries that ask which it is.
    fn make_current(&self, device: u32) -> Result<()>;

    fn create_stream(&self, device: u32) -> Result<StreamId>;
    /// A stream that the device serves before others.
    fn create_urgent_stream(&self, device: u32) -> Result<StreamId> {
        self.create_stream(device)
    }
    /// Work already enqueued is still done.
    fn destroy_stream(&self, stream: StreamId);
    /// Waits for all work of the stream; reports what went wrong in it.
    fn synchronize(&self, stream: StreamId) -> Result<()>;

    fn create_event(&self, device: u32, timing: bool) -> Result<EventId>;
    fn destroy_event(&self, event: EventId);
    fn record(&self, event: EventId, stream: StreamId) -> Result<()>;
    /// Makes the stream wait for the latest record of the event.
    fn wait(&self, stream: StreamId, event: EventId) -> Result<()>;
    /// Waits on the host.
    fn synchronize_event(&self, event: EventId) -> Result<()>;
    fn is_done(&self, event: EventId) -> Result<bool>;
    fn elapsed_seconds(&self, start: EventId, end: EventId) -> Result<f64>;

    /// Allocates at least one byte; usable by later work of the stream.
    fn allocate(&self, stream: StreamId, name: &str, bytes: u64) -> Result<u64>;
    fn free(&self, stream: StreamId, address: u64) -> Result<()>;
    /// Allocates page-locked host memory, at least one byte.
    fn allocate_host(&self, device: u32, bytes: u64) -> Result<u64>;
    /// Frees host memory once the stream's work so far is done; does not wait for it.
    fn free_host(&self, stream: StreamId, address: u64, bytes: u64) -> Result<()>;

    /// The 128 bytes of a tensor map, for device memory.
    fn encode_tensor_map(&self, device: u32, map: &BoxMap) -> Result<[u64; 16]>;

    fn fill(&self, stream: StreamId, address: u64, byte: u8, bytes: u64, caller: Caller) -> Result<()>;
    /// What is there is not needed any more: a check may report a read of it before it is written again. Nothing where there are no checks.
    fn discard(&self, _stream: StreamId, _address: u64, _bytes: u64, _caller: Caller) -> Result<()> {
        Ok(())
    }
    fn copy(&self, stream: StreamId, copy: Copy) -> Result<()>;
    /// Copies of some bytes each between devices, in any order among themselves, on a stream of the runtime that is not captured.
    fn copies(&self, stream: StreamId, copies: &[Copy]) -> Result<()> {
        copies.iter().try_for_each(|copy| self.copy(stream, *copy))
    }

    /// Writes words at an address that is a multiple of 8, of the stream's device, after all earlier work of the stream. The call takes the words with
    /// it.
    fn write_words(&self, stream: StreamId, address: u64, words: &[u64], caller: Caller) -> Result<()>;
    /// Whether the stream does that now: a GPU's does not while another library captures it.
    fn writes_words(&self, _stream: StreamId) -> Result<bool> {
        Ok(true)
    }

    /// Writes a word that the device reaches, its own or a peer's, once all earlier work of the stream is visible there.
    fn write_value(&self, stream: StreamId, address: u64, value: u64, caller: Caller) -> Result<()>;
    /// The stream goes on once the word of its own device is at least `value`: `(word - value) as i64 >= 0`.
    fn wait_value(&self, stream: StreamId, address: u64, value: u64, caller: Caller) -> Result<()>;

    /// Writes of words and waits for words, each as above, one after another.
    fn word_operations(&self, stream: StreamId, operations: &[WordOperation]) -> Result<()> {
        operations.iter().try_for_each(|operation| match *operation {
            WordOperation::Write { address, value, caller } => self.write_value(stream, address, value, caller),
            WordOperation::Wait { address, value, caller } => self.wait_value(stream, address, value, caller),
        })
    }

    /// A word of the stream's device, as it is now; waits for the stream, at most until the limit. The word may be written meanwhile.
    fn read_word(&self, stream: StreamId, address: u64, limit: Duration) -> Result<u64>;

    /// Virtual memory management of a device, where there is any.
    fn virtual_memory(&self, _device: u32) -> Option<Arc<dyn Driver>> {
        None
    }

    /// Finds the kernel where the back end needs compiled code and loads it.
    fn load(&self, device: u32, info: &KernelInfo, library: &KernelLibrary) -> Result<FunctionId>;
    fn launch(&self, stream: StreamId, launch: &KernelLaunch<'_>) -> Result<()>;

    /// The version of cuBLASLt, such as 130000, or why it cannot be called.
    fn cublaslt(&self) -> Result<usize, String> {
        Err("emulated devices have none".to_owned())
    }
    /// Chooses cuBLASLt's algorithm for a multiplication in this memory; `None` if it has none.
    fn plan_matmul(&self, _: u32, _: &Matmul, _: &MatmulMemory) -> Result<Option<Box<dyn MatmulPlan>>> {
        Ok(None)
    }
    fn matmul(&self, stream: StreamId, plan: &dyn MatmulPlan) -> Result<()> {
        plan.enqueue(stream)
    }

    fn begin_capture(&self, origin: StreamId) -> Result<()>;
    fn end_capture(&self, origin: StreamId) -> Result<GraphId>;
    fn launch_graph(&self, stream: StreamId, graph: GraphId, caller: Caller) -> Result<()>;
    fn destroy_graph(&self, graph: GraphId);

    /// Records work between two events, for a back end without a scheduler of its own.
    fn recorder(&self) -> Option<&Recorder> {
        None
    }
    /// Whether what is enqueued is captured, not done.
    fn is_capturing(&self, stream: StreamId) -> Result<bool>;
    /// Records from now on; false if that is so already.
    fn start_recording(&self) -> bool;
    /// What was recorded so far, and what is under way. Does not wait.
    fn recorded(&self) -> Result<Recording>;
    /// Forgets what was recorded.
    fn stop_recording(&self);
}

/// A tensor and the box that one bulk copy moves; dimensions innermost first, strides in bytes from the second on.
#[derive(Clone, Debug)]
pub(crate) struct BoxMap {
    pub address: u64,
    pub element_bytes: u32,
    pub dimensions: Vec<u64>,
    pub strides: Vec<u64>,
    pub box_dimensions: Vec<u32>,
    pub swizzle: SwizzleMode,
}

/// A copy of rows of bytes, which is one row unless it is between devices. Host addresses must stay valid until the copy is done.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Copy {
    pub direction: Direction,
    pub target: u64,
    pub source: u64,
    /// Bytes of a row.
    pub bytes: u64,
    pub rows: CopyRows,
    pub caller: Caller,
}

/// How many rows a [`Copy`] has, and the bytes from the start of one to that of the next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct CopyRows {
    pub count: u64,
    pub target_pitch: u64,
    pub source_pitch: u64,
}

impl CopyRows {
    /// A single range of bytes.
    pub const ONE: Self = Self { count: 1, target_pitch: 0, source_pitch: 0 };
}

impl Copy {
    /// The bytes of all rows.
    pub fn total(&self) -> u64 {
        self.bytes * self.rows.count
    }

    /// The same copy; rows that follow one another without a gap at both ends are one row, and so is none.
    pub fn joined(self) -> Self {
        let CopyRows { count, target_pitch, source_pitch } = self.rows;
        let is_one = count <= 1 || self.bytes == 0 || (target_pitch == self.bytes && source_pitch == self.bytes);
        if is_one { Self { bytes: self.total(), rows: CopyRows::ONE, ..self } } else { self }
    }
}

/// From where to where a [`Copy`] goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Direction {
    HostToDevice,
    /// The host reads elements of so many bytes.
    DeviceToHost {
        element_bytes: u64,
    },
    DeviceToDevice,
}

impl Direction {
    /// What a copy that way is called in a recording.
    pub const fn name(self) -> &'static str {
        match self {
            Self::HostToDevice => "copy from host",
            Self::DeviceToHost { .. } => "copy to host",
            Self::DeviceToDevice => "copy",
        }
    }
}
