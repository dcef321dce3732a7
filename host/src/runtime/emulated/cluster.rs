//! The emulated back end: one memory, the streams of all devices, and the scheduler that empties them.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::Duration;

use oxtile_emulator::tensor_map::{self, Swizzle, TensorMap};
use oxtile_emulator::{Launch, Memory, Options, TensorName};
use oxtile_tile::launch::{ArgumentWords, BufferAccess, DeviceLimits, KernelInfo};
use oxtile_tile::layout::SwizzleMode;

use super::collective::Part;
use super::operation::{Launched, Mark, Operation, Use, allocate_host, check_memory, word};
use super::options::EmulatedOptions;
use super::ranges::Place;
use super::room::share_of;
use super::schedule::{Graph, Queues};
use super::scheduler::State;
use super::script::Script;
use crate::recording::Recording;
use crate::runtime::backend::{Backend, BoxMap, Caller, Copy, DeviceProperties, EventId, FunctionId, GraphId, KernelLaunch, StreamId};
use crate::runtime::buffer::UNNAMED;
use crate::runtime::error::{Error, Result};
use crate::runtime::library::KernelLibrary;
use crate::runtime::module::{instances_of, memory_of};
use crate::runtime::runtime::{lock, seed_from_environment};

/// Dynamic shared memory a block may ask for on compute capability 9.0 (CUDA C++ Programming Guide, table 27).
const SHARED_BYTES_PER_BLOCK: u32 = 227 << 10;

/// How long a look at an event waits where nothing can go on.
const IDLE: Duration = Duration::from_micros(200);

/// Virtual GPUs in one process.
pub(crate) struct Cluster {
    pub options: EmulatedOptions,
    devices: Vec<DeviceProperties>,
    pub(super) memory: Arc<Memory>,
    pub(super) state: Mutex<State>,
    /// Signalled when work is enqueued or done.
    pub(super) progress: Condvar,
    /// How often an event was recorded or waited for, a copy enqueued, or a stream asked whether it is captured: calls of a driver that a program's order of work takes.
    pub calls: AtomicU64,
}

impl Cluster {
    pub fn new(options: EmulatedOptions) -> Result<Self> {
        if options.devices == 0 {
            return Err(Error::Invalid { what: "EmulatedOptions::devices", why: "it is 0: ask for at least one".to_owned() });
        }
        let seed = options.seed.map_or_else(seed_from_environment, |seed| Ok(Some(seed)))?.unwrap_or(0);
        let limits = DeviceLimits { multiprocessors: options.multiprocessors.max(1), shared_bytes_per_block: SHARED_BYTES_PER_BLOCK };
        let properties = |i| DeviceProperties { name: format!("emulated GPU {i}"), capability: (9, 0), limits };
        let devices = (0..options.devices).map(properties).collect();
        let sanitize = options.sanitize_streams;
        Ok(Self {
            options,
            devices,
            memory: Memory::new(),
            state: Mutex::new(State::new(seed, sanitize)),
            progress: Condvar::new(),
            calls: AtomicU64::new(0),
        })
    }

    /// Notes the order of all that runs from now on, or takes it as given. Such a run repeats another one, so that it is not explained again.
    pub fn follow(&self, script: Script) {
        let mut state = lock(&self.state);
        (state.script, state.explanations) = (Some(script), None);
    }

    /// The order noted so far, which is not noted any further, and the error that ended all work.
    pub fn outcome(&self) -> (Option<Script>, Option<Error>) {
        let mut state = lock(&self.state);
        (state.script.take(), state.check().err())
    }

    fn push(&self, stream: StreamId, operation: Operation, caller: Option<Caller>) -> Result<()> {
        lock(&self.state).push(stream.handle, operation, caller)?;
        self.progress.notify_all();
        Ok(())
    }

    /// Enqueues a rank's parts in collectives that are called as one: it comes to all of them before it waits for any.
    pub fn collectives(&self, stream: StreamId, parts: Vec<(Part, Caller)>) -> Result<()> {
        let parts: Vec<_> = parts.into_iter().map(|(part, caller)| (Arc::new(part), caller)).collect();
        let mut state = lock(&self.state);
        for (part, caller) in &parts {
            state.push(stream.handle, Operation::Arrive(Arc::clone(part)), Some(*caller))?;
        }
        for (part, caller) in parts {
            state.push(stream.handle, Operation::Leave(part), Some(caller))?;
        }
        self.progress.notify_all();
        Ok(())
    }

    /// Allocates one of the pieces of a range of addresses; returns its address, and the bytes from one piece to the next.
    pub fn allocate_in(&self, place: &Place<'_>, stream: StreamId, name: &str, bytes: u64) -> Result<(u64, u64)> {
        let mut state = lock(&self.state);
        state.check()?;
        let (address, stride) = state.ranges.allocate(&self.memory, place, name, bytes, stream.device)?;
        if let Some(sanitizer) = &mut state.sanitizer {
            sanitizer.allocate(address, bytes);
        }
        Ok((address, stride))
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        let memory = Arc::clone(&self.memory);
        self.state.get_mut().unwrap_or_else(PoisonError::into_inner).abandon(&memory);
    }
}

impl Backend for Cluster {
    fn cluster(&self) -> Option<&Cluster> {
        Some(self)
    }

    fn devices(&self) -> &[DeviceProperties] {
        &self.devices
    }

    fn make_current(&self, _device: u32) -> Result<()> {
        Ok(())
    }

    fn create_stream(&self, device: u32) -> Result<StreamId> {
        let mut state = lock(&self.state);
        state.check()?;
        Ok(StreamId { device, handle: state.new_stream(device) })
    }

    fn destroy_stream(&self, stream: StreamId) {
        lock(&self.state).forget_stream(stream.handle);
    }

    fn synchronize(&self, stream: StreamId) -> Result<()> {
        self.synchronize_within(stream, None, &[]).map(drop)
    }

    fn create_event(&self, device: u32, _timing: bool) -> Result<EventId> {
        let mut state = lock(&self.state);
        state.check()?;
        let handle = state.new_handle();
        state.events.insert(handle, None);
        Ok(EventId { device, handle })
    }

    fn destroy_event(&self, event: EventId) {
        lock(&self.state).events.remove(&event.handle);
    }

    fn record(&self, event: EventId, stream: StreamId) -> Result<()> {
        self.calls.fetch_add(1, Ordering::Relaxed);
        let mut state = lock(&self.state);
        let mark = Mark::new(stream.handle, state.capturing.get(&stream.handle).copied());
        state.push(stream.handle, Operation::Record(Arc::clone(&mark)), None)?;
        state.events.insert(event.handle, Some(mark));
        self.progress.notify_all();
        Ok(())
    }

    /// As on CUDA, an event that was never recorded delays nothing, and a stream that waits for a captured event
    /// joins the capture.
    fn wait(&self, stream: StreamId, event: EventId) -> Result<()> {
        self.calls.fetch_add(1, Ordering::Relaxed);
        let mut state = lock(&self.state);
        let Some(mark) = state.mark(event) else { return state.check() };
        if let Some(capture) = mark.capture.filter(|capture| state.captures.contains_key(capture)) {
            state.capturing.insert(stream.handle, capture);
        }
        state.push(stream.handle, Operation::Wait(mark), None)?;
        self.progress.notify_all();
        Ok(())
    }

    fn synchronize_event(&self, event: EventId) -> Result<()> {
        self.synchronize_event_within(event, None, &[]).map(drop)
    }

    /// Runs one operation if the event is not done, so that a loop around it ends. Where none can go on, it waits a little for other threads to enqueue some.
    fn is_done(&self, event: EventId) -> Result<bool> {
        let mut state = lock(&self.state);
        state.check()?;
        let mark = state.mark(event);
        let done = mark.as_ref().is_none_or(|mark| mark.is_reached());
        if !done {
            let went_on = state.step(&self.memory, &self.options).inspect_err(|_| self.progress.notify_all())?;
            if went_on {
                self.progress.notify_all();
            } else {
                drop(self.progress.wait_timeout(state, IDLE));
            }
        } else if let Some(mark) = mark {
            state.host_saw(&mark);
        }
        Ok(done)
    }

    fn elapsed_seconds(&self, start: EventId, end: EventId) -> Result<f64> {
        let state = lock(&self.state);
        let reached = |event| state.mark(event).and_then(|mark| mark.instant());
        match (reached(start), reached(end)) {
            (Some(start), Some(end)) => Ok(end.saturating_duration_since(start).as_secs_f64()),
            _ => Err(Error::Invalid { what: "Event::elapsed_since", why: "an event is not done: wait for both".to_owned() }),
        }
    }

    fn allocate(&self, stream: StreamId, name: &str, bytes: u64) -> Result<u64> {
        let mut state = lock(&self.state);
        state.check()?;
        check_memory(bytes)?;
        let address = self.memory.allocate(name, bytes, stream.device);
        if let Some(sanitizer) = &mut state.sanitizer {
            sanitizer.allocate(address, bytes);
        }
        Ok(address)
    }

    fn free(&self, stream: StreamId, address: u64) -> Result<()> {
        self.push(stream, Operation::Free { address }, None)
    }

    fn allocate_host(&self, _device: u32, bytes: u64) -> Result<u64> {
        allocate_host(bytes)
    }

    fn free_host(&self, stream: StreamId, address: u64, bytes: u64) -> Result<()> {
        let operation = Operation::FreeHost { address, bytes };
        // After a fault nothing runs any more that could still use it.
        self.push(stream, operation.clone(), None).or_else(|_| operation.execute(&self.memory, Options::fast()))
    }

    fn encode_tensor_map(&self, _: u32, map: &BoxMap) -> Result<[u64; 16]> {
        let map = TensorMap {
            address: map.address,
            element_bytes: map.element_bytes,
            dimensions: map.dimensions.clone(),
            strides: map.strides.clone(),
            box_dimensions: map.box_dimensions.clone(),
            swizzle: match map.swizzle {
                SwizzleMode::None => Swizzle::None,
                SwizzleMode::Bytes32 => Swizzle::Bytes32,
                SwizzleMode::Bytes64 => Swizzle::Bytes64,
                SwizzleMode::Bytes128 => Swizzle::Bytes128,
            },
        };
        let bytes = tensor_map::encode(&map).map_err(|error| Error::Invalid { what: "tensor map", why: error.to_string() })?;
        let (words, _) = bytes.as_chunks::<8>();
        Ok(std::array::from_fn(|i| u64::from_le_bytes(words[i])))
    }

    fn fill(&self, stream: StreamId, address: u64, byte: u8, bytes: u64, caller: Caller) -> Result<()> {
        self.push(stream, Operation::Fill { address, byte, bytes }, Some(caller))
    }

    fn write_words(&self, stream: StreamId, address: u64, words: &[u64], caller: Caller) -> Result<()> {
        self.push(stream, Operation::WriteWords { address, words: words.into() }, Some(caller))
    }

    fn discard(&self, stream: StreamId, address: u64, bytes: u64, caller: Caller) -> Result<()> {
        self.push(stream, Operation::Discard { address, bytes }, Some(caller))
    }

    fn copy(&self, stream: StreamId, copy: Copy) -> Result<()> {
        self.calls.fetch_add(1, Ordering::Relaxed);
        self.push(stream, Operation::Copy(copy), Some(copy.caller))
    }

    fn write_value(&self, stream: StreamId, address: u64, value: u64, caller: Caller) -> Result<()> {
        self.push(stream, Operation::WriteValue { address, value }, Some(caller))
    }

    fn wait_value(&self, stream: StreamId, address: u64, value: u64, caller: Caller) -> Result<()> {
        self.push(stream, Operation::WaitValue { address, value }, Some(caller))
    }

    fn read_word(&self, _: StreamId, address: u64, _: Duration) -> Result<u64> {
        let gone = || Error::Invalid { what: "emulated memory", why: format!("there is no word at {address:#x}") };
        word(&self.memory, address).ok_or_else(gone)
    }

    /// The kernel is compiled into the program: there is nothing to load.
    fn load(&self, _device: u32, _info: &KernelInfo, _library: &KernelLibrary) -> Result<FunctionId> {
        Ok(FunctionId(0))
    }

    fn launch(&self, stream: StreamId, launch: &KernelLaunch<'_>) -> Result<()> {
        let mut words = ArgumentWords::new();
        launch.args.pack(&mut words);
        let info = launch.info;
        let emulated = Launch {
            kernel: info.name.to_owned(),
            grid: [launch.grid.x, launch.grid.y, launch.grid.z],
            block: [info.threads, 1, 1],
            cluster: [info.cluster * launch.grid.cluster, 1, 1],
            shared_bytes: info.shared_bytes,
            arguments: words.as_slice().to_vec(),
            body: launch.body,
            device: stream.device,
            tensors: tensor_names(launch),
        };
        let mut uses = Vec::new();
        launch.args.accesses(&mut |access| {
            let pieces = pieces_of(&access).into_iter();
            let (writes, meanwhile, parameter) = (access.writes, access.meanwhile, access.parameter);
            uses.extend(pieces.map(|(address, bytes)| Use { address, bytes, writes, meanwhile, parameter }));
        });
        let launched = Launched { launch: emulated, uses, share: share_of(info), blocked: Mutex::default() };
        self.push(stream, Operation::Launch(Arc::new(launched)), Some(launch.caller))
    }

    fn begin_capture(&self, origin: StreamId) -> Result<()> {
        let mut state = lock(&self.state);
        state.check()?;
        state.capturing.insert(origin.handle, origin.handle);
        state.captures.insert(origin.handle, Queues::default());
        Ok(())
    }

    fn end_capture(&self, origin: StreamId) -> Result<GraphId> {
        let mut state = lock(&self.state);
        let queues = state.end_capture(origin.handle);
        state.check()?;
        let Some(queues) = queues else {
            return Err(Error::Invalid { what: "Graph::capture", why: "the stream is not being captured".to_owned() });
        };
        let graph = Graph::new(queues, || state.new_stream(origin.device));
        let handle = state.new_handle();
        state.graphs.insert(handle, graph);
        Ok(GraphId { device: origin.device, handle })
    }

    fn launch_graph(&self, stream: StreamId, graph: GraphId, caller: Caller) -> Result<()> {
        let mut state = lock(&self.state);
        match state.graphs.get(&graph.handle).cloned() {
            Some(graph) => {
                state.push(stream.handle, Operation::Replay(graph), Some(caller))?;
                self.progress.notify_all();
                Ok(())
            }
            None => Err(Error::Invalid { what: "Graph::replay", why: "the graph is gone".to_owned() }),
        }
    }

    fn destroy_graph(&self, graph: GraphId) {
        lock(&self.state).forget_graph(graph.handle);
    }

    fn is_capturing(&self, stream: StreamId) -> Result<bool> {
        self.calls.fetch_add(1, Ordering::Relaxed);
        Ok(lock(&self.state).capturing.contains_key(&stream.handle))
    }

    fn start_recording(&self) -> bool {
        lock(&self.state).start_recording()
    }

    fn recorded(&self) -> Result<Recording> {
        Ok(lock(&self.state).recorded(&self.memory))
    }

    fn stop_recording(&self) {
        lock(&self.state).log = None;
    }
}

/// The kernel's parameters by name, for the emulator's reports.
fn tensor_names(launch: &KernelLaunch<'_>) -> Vec<TensorName> {
    let mut names = Vec::new();
    launch.args.accesses(&mut |access| {
        let name = match memory_of(&access).map(|memory| &*memory.name).filter(|name| *name != UNNAMED) {
            Some(buffer) => format!("{} ({buffer})", access.parameter),
            None => access.parameter.to_string(),
        };
        let pieces = pieces_of(&access).into_iter();
        names.extend(pieces.map(|(address, bytes)| TensorName { name: name.clone(), address, bytes }));
    });
    names
}

/// The bytes of an argument: those of every rank's instance, where it is a view of all.
fn pieces_of(access: &BufferAccess<'_>) -> Vec<(u64, u64)> {
    let whole = (access.address, access.bytes);
    instances_of(access).map_or_else(|| vec![whole], |instances| instances.pieces(access.address, access.bytes))
}
