//! The emulated back end: one memory, the streams of all devices, and the scheduler that empties them.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use std::time::Instant;

use oxtile_emulator::tensor_map::{self, Swizzle, TensorMap};
use oxtile_emulator::{Launch, Memory, Mode, Options, TensorName};
use oxtile_tile::launch::{ArgumentWords, DeviceLimits, KernelInfo};
use oxtile_tile::layout::SwizzleMode;

use super::operation::{Mark, Operation, allocate_host};
use super::random::Random;
use super::schedule::Queues;
use crate::runtime::backend::{Backend, BoxMap, Copy, DeviceProperties, EventId, FunctionId, GraphId, KernelLaunch, StreamId};
use crate::runtime::error::{Error, Result};
use crate::runtime::library::KernelLibrary;
use crate::runtime::module::memory_of;
use crate::runtime::runtime::{lock, seed_from_environment};

/// Options of [`Runtime::emulated_with`](crate::runtime::Runtime::emulated_with).
#[derive(Clone, Debug)]
pub struct EmulatedOptions {
    /// How many virtual GPUs.
    pub devices: u32,
    /// What is checked in a kernel.
    pub mode: Mode,
    /// Determines the order of streams and, in [`Mode::Check`], of threads; `None` takes `OXTILE_SEED`, else 0. One
    /// seed gives one order as long as one thread enqueues.
    pub seed: Option<u64>,
    /// OS threads that run blocks in [`Mode::Fast`]; 0 takes one a core.
    pub workers: usize,
    /// Multiprocessors that a device reports; persistent kernels launch about as many blocks.
    pub multiprocessors: u32,
}

impl Default for EmulatedOptions {
    fn default() -> Self {
        Self { devices: 1, mode: Mode::Fast, seed: None, workers: 0, multiprocessors: 4 }
    }
}

/// Dynamic shared memory a block may ask for on compute capability 9.0 (CUDA C++ Programming Guide, table 27).
const SHARED_BYTES_PER_BLOCK: u32 = 227 << 10;

/// Virtual GPUs in one process.
pub(crate) struct Cluster {
    options: EmulatedOptions,
    devices: Vec<DeviceProperties>,
    memory: Arc<Memory>,
    state: Mutex<State>,
}

struct State {
    random: Random,
    /// The last handle given out, of any sort.
    handle: u64,
    queues: Queues,
    /// The latest record of each event.
    events: BTreeMap<u64, Option<Arc<Mark>>>,
    /// The streams of a capture, and what each capture holds, by the handle of its first stream.
    capturing: BTreeMap<u64, u64>,
    captures: BTreeMap<u64, Queues>,
    graphs: BTreeMap<u64, Arc<Queues>>,
    /// What ended all work.
    fault: Option<Error>,
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
        let state = State {
            random: Random::new(seed),
            handle: 0,
            queues: Queues::default(),
            events: BTreeMap::new(),
            capturing: BTreeMap::new(),
            captures: BTreeMap::new(),
            graphs: BTreeMap::new(),
            fault: None,
        };
        Ok(Self { options, devices, memory: Memory::new(), state: Mutex::new(state) })
    }

    fn push(&self, stream: StreamId, operation: Operation) -> Result<()> {
        lock(&self.state).push(stream.handle, operation)
    }

    /// Runs operations of random streams until `done`. That nothing can go on ends all work, so that no copy stays queued
    /// whose host memory the caller takes back.
    fn run_until(&self, done: impl Fn(&State) -> bool) -> Result<()> {
        let mut state = lock(&self.state);
        loop {
            state.check()?;
            if done(&state) {
                return Ok(());
            }
            if !self.step(&mut state)? {
                let why = "it waits for an event that nothing will record".to_owned();
                return Err(state.poison(Error::Invalid { what: "emulated stream", why }, &self.memory));
            }
        }
    }

    /// Runs one operation of a random stream that can go on; false if there is none.
    fn step(&self, state: &mut State) -> Result<bool> {
        let Some(operation) = state.queues.take(&mut state.random) else { return Ok(false) };
        let result = self.execute(&operation, &mut state.random);
        result.map_err(|error| state.poison(error, &self.memory))?;
        Ok(true)
    }

    fn execute(&self, operation: &Operation, random: &mut Random) -> Result<()> {
        match operation {
            Operation::Record(mark) => mark.set(Some(Instant::now())),
            Operation::Replay(graph) => {
                graph.reset_marks();
                let mut queues = Queues::clone(graph);
                while let Some(operation) = queues.take(random) {
                    self.execute(&operation, random)?;
                }
                debug_assert!(queues.are_all_empty(), "a capture joins all its streams");
            }
            operation => operation.execute(&self.memory, self.run_options(random.next()))?,
        }
        Ok(())
    }

    fn run_options(&self, seed: u64) -> Options {
        let options = match self.options.mode {
            Mode::Check => Options::check(seed),
            Mode::Fast => Options::fast(),
        };
        Options { workers: self.options.workers, ..options }
    }
}

impl State {
    fn new_handle(&mut self) -> u64 {
        self.handle += 1;
        self.handle
    }

    fn check(&self) -> Result<()> {
        self.fault.clone().map_or(Ok(()), Err)
    }

    fn push(&mut self, stream: u64, operation: Operation) -> Result<()> {
        self.check()?;
        let captured = self.capturing.get(&stream).and_then(|capture| self.captures.get_mut(capture));
        captured.unwrap_or(&mut self.queues).push(stream, operation);
        Ok(())
    }

    fn mark(&self, event: EventId) -> Option<Arc<Mark>> {
        self.events.get(&event.handle).cloned().flatten()
    }

    /// Ends all work: only frees are still done.
    fn poison(&mut self, error: Error, memory: &Arc<Memory>) -> Error {
        self.fault = Some(error.clone());
        self.abandon(memory);
        error
    }

    fn abandon(&mut self, memory: &Arc<Memory>) {
        for operation in self.queues.drain() {
            if matches!(operation, Operation::Free { .. } | Operation::FreeHost { .. }) {
                // What cannot be freed is freed with the memory itself.
                let _ = operation.execute(memory, Options::fast());
            }
        }
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        let memory = Arc::clone(&self.memory);
        self.state.get_mut().unwrap_or_else(std::sync::PoisonError::into_inner).abandon(&memory);
    }
}

impl Backend for Cluster {
    fn devices(&self) -> &[DeviceProperties] {
        &self.devices
    }

    fn create_stream(&self, device: u32) -> Result<StreamId> {
        let mut state = lock(&self.state);
        state.check()?;
        Ok(StreamId { device, handle: state.new_handle() })
    }

    fn destroy_stream(&self, stream: StreamId) {
        lock(&self.state).queues.forget(stream.handle);
    }

    fn synchronize(&self, stream: StreamId) -> Result<()> {
        self.run_until(|state| state.queues.is_empty(stream.handle))
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
        let mut state = lock(&self.state);
        let mark = Mark::new(state.capturing.get(&stream.handle).copied());
        state.push(stream.handle, Operation::Record(Arc::clone(&mark)))?;
        state.events.insert(event.handle, Some(mark));
        Ok(())
    }

    /// As on CUDA, an event that was never recorded holds nobody up, and a stream that waits for a captured event
    /// joins the capture.
    fn wait(&self, stream: StreamId, event: EventId) -> Result<()> {
        let mut state = lock(&self.state);
        let Some(mark) = state.mark(event) else { return state.check() };
        if let Some(capture) = mark.capture.filter(|capture| state.captures.contains_key(capture)) {
            state.capturing.insert(stream.handle, capture);
        }
        state.push(stream.handle, Operation::Wait(mark))
    }

    fn synchronize_event(&self, event: EventId) -> Result<()> {
        self.run_until(|state| state.mark(event).is_none_or(|mark| mark.reached().is_some()))
    }

    /// Runs one operation if the event is not done, so that a loop around it ends.
    fn is_done(&self, event: EventId) -> Result<bool> {
        let mut state = lock(&self.state);
        state.check()?;
        let done = state.mark(event).is_none_or(|mark| mark.reached().is_some());
        if !done {
            self.step(&mut state)?;
        }
        Ok(done)
    }

    fn elapsed_seconds(&self, start: EventId, end: EventId) -> Result<f64> {
        let state = lock(&self.state);
        let reached = |event| state.mark(event).and_then(|mark| mark.reached());
        match (reached(start), reached(end)) {
            (Some(start), Some(end)) => Ok(end.saturating_duration_since(start).as_secs_f64()),
            _ => Err(Error::Invalid { what: "Event::elapsed_since", why: "an event is not done: wait for both".to_owned() }),
        }
    }

    fn allocate(&self, stream: StreamId, name: &str, bytes: u64) -> Result<u64> {
        lock(&self.state).check()?;
        Ok(self.memory.allocate(name, bytes, stream.device))
    }

    fn free(&self, stream: StreamId, address: u64) -> Result<()> {
        self.push(stream, Operation::Free { address })
    }

    fn allocate_host(&self, _device: u32, bytes: u64) -> Result<u64> {
        allocate_host(bytes)
    }

    fn free_host(&self, stream: StreamId, address: u64, bytes: u64) -> Result<()> {
        let operation = Operation::FreeHost { address, bytes };
        // After a fault nothing runs any more that could still use it.
        self.push(stream, operation.clone()).or_else(|_| operation.execute(&self.memory, Options::fast()))
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

    fn fill(&self, stream: StreamId, address: u64, byte: u8, bytes: u64) -> Result<()> {
        self.push(stream, Operation::Fill { address, byte, bytes })
    }

    fn copy(&self, stream: StreamId, copy: Copy) -> Result<()> {
        self.push(stream, Operation::Copy(copy))
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
            cluster: [info.cluster, 1, 1],
            shared_bytes: info.shared_bytes,
            arguments: words.as_slice().to_vec(),
            body: launch.body,
            device: stream.device,
            tensors: tensor_names(launch),
        };
        self.push(stream, Operation::Launch(Arc::new(emulated)))
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
        state.capturing.retain(|_, capture| *capture != origin.handle);
        let queues = state.captures.remove(&origin.handle);
        state.check()?;
        let Some(queues) = queues else {
            return Err(Error::Invalid { what: "Graph::capture", why: "the stream is not being captured".to_owned() });
        };
        let handle = state.new_handle();
        state.graphs.insert(handle, Arc::new(queues));
        Ok(GraphId { device: origin.device, handle })
    }

    fn launch_graph(&self, stream: StreamId, graph: GraphId) -> Result<()> {
        let mut state = lock(&self.state);
        match state.graphs.get(&graph.handle).cloned() {
            Some(queues) => state.push(stream.handle, Operation::Replay(queues)),
            None => Err(Error::Invalid { what: "Graph::replay", why: "the graph is gone".to_owned() }),
        }
    }

    fn destroy_graph(&self, graph: GraphId) {
        lock(&self.state).graphs.remove(&graph.handle);
    }
}

/// The kernel's parameters by name, for the emulator's reports.
fn tensor_names(launch: &KernelLaunch<'_>) -> Vec<TensorName> {
    let mut names = Vec::new();
    launch.args.accesses(&mut |access| {
        let buffer = memory_of(&access).map_or("", |memory| memory.name.as_str());
        let name = if matches!(buffer, "" | "buffer") { access.parameter.to_owned() } else { format!("{} ({buffer})", access.parameter) };
        names.push(TensorName { name, address: access.address, bytes: access.bytes });
    });
    names
}
