//! The CUDA back end: each method is one call of the driver.

use std::ffi::c_void;
use std::ptr;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use cudarc::driver::sys::{
    self, CUevent, CUevent_flags, CUfunction, CUgraphExec, CUresult, CUstream, CUstream_flags, CUstreamCaptureMode, CUstreamCaptureStatus,
};
use oxtile_tile::launch::{ArgumentWords, KernelInfo};

use super::context::Context;
use super::cublaslt::CublasLt;
use super::driver::{check, start};
use super::function::{self, Functions};
use super::pinned::PinnedPool;
use super::virtual_memory::VirtualMemory;
use super::{copy, word};
use crate::recording::{Activity, Recording, Work};
use crate::runtime::backend::{
    Backend, BoxMap, Caller, Copy, DeviceProperties, EventId, FunctionId, GraphId, KernelLaunch, StreamId, WordOperation,
};
use crate::runtime::error::{Error, Result};
use crate::runtime::library::KernelLibrary;
use crate::runtime::matmul::{Matmul, MatmulMemory, MatmulPlan};
use crate::runtime::recorder::{self, Recorder};
use crate::runtime::virtual_memory::Driver;

/// All GPUs of the machine. One for the process, never torn down.
pub(crate) struct Platform {
    contexts: Vec<Arc<Context>>,
    devices: Vec<DeviceProperties>,
    functions: Functions,
    pinned: PinnedPool,
    cublaslt: CublasLt,
    recorder: Recorder,
}

/// The machine's GPUs, found when first asked for.
pub(crate) fn platform() -> Result<Arc<dyn Backend>> {
    static PLATFORM: OnceLock<Result<Arc<Platform>>> = OnceLock::new();
    let platform = PLATFORM.get_or_init(|| Platform::new().map(Arc::new)).clone()?;
    Ok(platform)
}

impl Platform {
    fn new() -> Result<Self> {
        let found: Result<Vec<_>> = (0..start()?).map(Context::new).collect();
        let (contexts, devices): (Vec<_>, Vec<_>) = found?.into_iter().map(|(context, device)| (Arc::new(context), device)).unzip();
        let cublaslt = CublasLt::new(devices.len());
        Ok(Self {
            contexts,
            devices,
            functions: Functions::default(),
            pinned: PinnedPool::default(),
            cublaslt,
            recorder: Recorder::default(),
        })
    }

    #[inline]
    fn enter(&self, device: u32) -> Result<()> {
        self.contexts[device as usize].make_current()
    }

    /// Enqueues one piece of work, between two events if it is recorded.
    #[inline]
    fn work(&self, stream: StreamId, work: impl FnOnce() -> Work, enqueue: impl FnOnce() -> Result<()>) -> Result<()> {
        self.enter(stream.device)?;
        recorder::record(self, stream, work, enqueue)
    }
}

impl StreamId {
    fn cuda(self) -> CUstream {
        self.handle as CUstream
    }
}

impl EventId {
    fn cuda(self) -> CUevent {
        self.handle as CUevent
    }
}

/// Logs what a destructor cannot report.
pub(super) fn log(result: Result<()>) {
    if let Err(error) = result {
        tracing::warn!(%error, "a CUDA object was not destroyed");
    }
}

// In every method below the handles are live: the runtime owns each in exactly one object, hands it on from there, and
// destroys it with that object; borrowed streams are vouched for by `Stream::borrow_raw`.
impl Backend for Platform {
    fn devices(&self) -> &[DeviceProperties] {
        &self.devices
    }

    fn make_current(&self, device: u32) -> Result<()> {
        self.enter(device)
    }

    fn create_stream(&self, device: u32) -> Result<StreamId> {
        self.enter(device)?;
        let mut stream: CUstream = ptr::null_mut();
        let flags = CUstream_flags::CU_STREAM_NON_BLOCKING as u32;
        // SAFETY: a valid place for the stream.
        check("cuStreamCreate", unsafe { sys::cuStreamCreate(&raw mut stream, flags) })?;
        Ok(StreamId { device, handle: stream as u64 })
    }

    /// The highest priority (CUDA C++ Programming Guide, "Stream Priorities"). It shares the hardware queues of the others all the same
    /// (`CUDA_DEVICE_MAX_CONNECTIONS`): a wait in one can delay it (docs/communication.md).
    fn create_urgent_stream(&self, device: u32) -> Result<StreamId> {
        self.enter(device)?;
        let (mut least, mut greatest, mut stream): (_, _, CUstream) = (0, 0, ptr::null_mut());
        // SAFETY: valid places for the two numbers.
        check("cuCtxGetStreamPriorityRange", unsafe { sys::cuCtxGetStreamPriorityRange(&raw mut least, &raw mut greatest) })?;
        let flags = CUstream_flags::CU_STREAM_NON_BLOCKING as u32;
        // SAFETY: a valid place for the stream.
        check("cuStreamCreateWithPriority", unsafe { sys::cuStreamCreateWithPriority(&raw mut stream, flags, greatest) })?;
        Ok(StreamId { device, handle: stream as u64 })
    }

    /// The driver destroys it when its work is done, and does not wait for that here.
    fn destroy_stream(&self, stream: StreamId) {
        // SAFETY: a live stream, not used after this.
        let destroy = || check("cuStreamDestroy", unsafe { sys::cuStreamDestroy_v2(stream.cuda()) });
        log(self.enter(stream.device).and_then(|()| destroy()));
    }

    fn synchronize(&self, stream: StreamId) -> Result<()> {
        self.enter(stream.device)?;
        // SAFETY: a live stream.
        check("cuStreamSynchronize", unsafe { sys::cuStreamSynchronize(stream.cuda()) })
    }

    fn create_event(&self, device: u32, timing: bool) -> Result<EventId> {
        self.enter(device)?;
        let mut event: CUevent = ptr::null_mut();
        let flags = if timing { CUevent_flags::CU_EVENT_DEFAULT } else { CUevent_flags::CU_EVENT_DISABLE_TIMING };
        // SAFETY: a valid place for the event.
        check("cuEventCreate", unsafe { sys::cuEventCreate(&raw mut event, flags as u32) })?;
        Ok(EventId { device, handle: event as u64 })
    }

    /// The driver destroys it when it is done, and does not wait for that here.
    fn destroy_event(&self, event: EventId) {
        // SAFETY: a live event, not used after this.
        let destroy = || check("cuEventDestroy", unsafe { sys::cuEventDestroy_v2(event.cuda()) });
        log(self.enter(event.device).and_then(|()| destroy()));
    }

    fn record(&self, event: EventId, stream: StreamId) -> Result<()> {
        self.enter(stream.device)?;
        // SAFETY: a live event and stream of one context: the runtime records events on their own device's streams.
        check("cuEventRecord", unsafe { sys::cuEventRecord(event.cuda(), stream.cuda()) })
    }

    fn wait(&self, stream: StreamId, event: EventId) -> Result<()> {
        let work = || Work::new(Activity::Wait, "wait for an event", None, None);
        // SAFETY: a live event and stream; they may be of different devices. No flags.
        self.work(stream, work, || check("cuStreamWaitEvent", unsafe { sys::cuStreamWaitEvent(stream.cuda(), event.cuda(), 0) }))
    }

    fn synchronize_event(&self, event: EventId) -> Result<()> {
        self.enter(event.device)?;
        // SAFETY: a live event.
        check("cuEventSynchronize", unsafe { sys::cuEventSynchronize(event.cuda()) })
    }

    fn is_done(&self, event: EventId) -> Result<bool> {
        self.enter(event.device)?;
        // SAFETY: a live event.
        match unsafe { sys::cuEventQuery(event.cuda()) } {
            CUresult::CUDA_ERROR_NOT_READY => Ok(false),
            result => check("cuEventQuery", result).map(|()| true),
        }
    }

    fn elapsed_seconds(&self, start: EventId, end: EventId) -> Result<f64> {
        self.enter(end.device)?;
        let mut milliseconds = 0.0_f32;
        // SAFETY: a valid place for the time and two live events, recorded with timing.
        let result = unsafe { sys::cuEventElapsedTime_v2(&raw mut milliseconds, start.cuda(), end.cuda()) };
        check("cuEventElapsedTime", result)?;
        Ok(f64::from(milliseconds) / 1e3)
    }

    fn allocate(&self, stream: StreamId, _name: &str, bytes: u64) -> Result<u64> {
        self.enter(stream.device)?;
        let mut address = 0;
        // SAFETY: a valid place for the address and a live stream.
        check("cuMemAllocAsync", unsafe { sys::cuMemAllocAsync(&raw mut address, bytes as usize, stream.cuda()) })?;
        Ok(address)
    }

    fn free(&self, stream: StreamId, address: u64) -> Result<()> {
        self.enter(stream.device)?;
        // SAFETY: `allocate` returned the address, the runtime frees it once, and the stream waits for all its uses.
        check("cuMemFreeAsync", unsafe { sys::cuMemFreeAsync(address, stream.cuda()) })
    }

    fn allocate_host(&self, device: u32, bytes: u64) -> Result<u64> {
        self.enter(device)?;
        self.pinned.allocate(bytes)
    }

    fn free_host(&self, stream: StreamId, address: u64, bytes: u64) -> Result<()> {
        let free = self.create_event(stream.device, false)?;
        self.record(free, stream)?;
        self.pinned.give(address, bytes, free);
        Ok(())
    }

    fn encode_tensor_map(&self, device: u32, map: &BoxMap) -> Result<[u64; 16]> {
        self.enter(device)?;
        super::tensor_map::encode(map)
    }

    fn fill(&self, stream: StreamId, address: u64, byte: u8, bytes: u64, caller: Caller) -> Result<()> {
        let work = || Work::new(Activity::Fill, "fill", Some(bytes), Some(caller));
        // SAFETY: the runtime owns so many bytes at the address and keeps them until the stream's work is done.
        let fill = || check("cuMemsetD8Async", unsafe { sys::cuMemsetD8Async(address, byte, bytes as usize, stream.cuda()) });
        self.work(stream, work, fill)
    }

    fn write_words(&self, stream: StreamId, address: u64, words: &[u64], caller: Caller) -> Result<()> {
        let work = || Work::new(Activity::Copy, "words", Some(size_of_val(words) as u64), Some(caller));
        // SAFETY: a live stream, and aligned words of memory that the runtime keeps until the stream's work is done.
        self.work(stream, work, || unsafe { word::write(stream.cuda(), address, words) })
    }

    fn writes_words(&self, stream: StreamId) -> Result<bool> {
        Ok(!self.is_capturing(stream)?)
    }

    fn copy(&self, stream: StreamId, copy: Copy) -> Result<()> {
        // SAFETY: a live stream; both ends hold so many bytes and stay until the copy is done: the runtime waits for pageable host memory, and
        // frees pinned and device memory in stream order.
        self.work(stream, || copy::work(&copy), || unsafe { copy::enqueue(stream.cuda(), copy) })
    }

    fn copies(&self, stream: StreamId, copies: &[Copy]) -> Result<()> {
        copies.chunks(copy::MOST).try_for_each(|part| {
            // SAFETY: as in `copy`; the runtime asks for this on streams of its own that it does not capture, and between devices.
            self.work(stream, || copy::work_of(part), || unsafe { copy::enqueue_all(stream.cuda(), part) })
        })
    }

    fn write_value(&self, stream: StreamId, address: u64, value: u64, caller: Caller) -> Result<()> {
        let work = || Work::new(Activity::Signal, format!("signal {value}"), None, Some(caller));
        // SAFETY: a live stream, and an aligned word of memory that the runtime keeps until the stream's work is done.
        let write = || check("cuStreamWriteValue64", unsafe { sys::cuStreamWriteValue64_v2(stream.cuda(), address, value, word::WRITE) });
        self.work(stream, work, write)
    }

    fn wait_value(&self, stream: StreamId, address: u64, value: u64, caller: Caller) -> Result<()> {
        let work = || Work::new(Activity::Wait, format!("wait for signal {value}"), None, Some(caller));
        // SAFETY: as above; the word is of the stream's own device.
        let wait = || check("cuStreamWaitValue64", unsafe { sys::cuStreamWaitValue64_v2(stream.cuda(), address, value, word::WAIT) });
        self.work(stream, work, wait)
    }

    fn word_operations(&self, stream: StreamId, operations: &[WordOperation]) -> Result<()> {
        operations.chunks(word::MOST).try_for_each(|part| {
            // SAFETY: as in `write_value` and `wait_value`.
            self.work(stream, || word::work(part), || unsafe { word::enqueue(stream.cuda(), part) })
        })
    }

    /// Into page-locked memory: a copy to pageable memory would not return before it is done, without a deadline.
    fn read_word(&self, stream: StreamId, address: u64, limit: Duration) -> Result<u64> {
        const BYTES: u64 = size_of::<u64>() as u64;
        self.enter(stream.device)?;
        let place = self.pinned.allocate(BYTES)?;
        let target = ptr::with_exposed_provenance_mut::<u64>(place as usize);
        // SAFETY: a word of live device memory, and a block for it that is given back below, to be used again only after the copy.
        let copied = unsafe { sys::cuMemcpyDtoHAsync_v2(target.cast(), address, BYTES as usize, stream.cuda()) };
        let (start, done) = (Instant::now(), self.create_event(stream.device, false)?);
        self.record(done, stream)?;
        let mut result = check("cuMemcpyDtoHAsync", copied);
        while result.is_ok() && !self.is_done(done)? {
            if start.elapsed() > limit {
                let mend = "the stream that reads signals waits for another: raise CUDA_DEVICE_MAX_CONNECTIONS";
                result = Err(Error::Deadline { what: "reading a word of the device".to_owned(), limit, mend });
            }
            std::hint::spin_loop();
        }
        // SAFETY: the copy is done, or the word is what the block held before and is not used.
        let word = unsafe { target.read_volatile() };
        self.pinned.give(place, BYTES, done);
        result.map(|()| word)
    }

    fn virtual_memory(&self, device: u32) -> Option<Arc<dyn Driver>> {
        Some(Arc::new(VirtualMemory::new(&self.contexts[device as usize])))
    }

    fn load(&self, device: u32, info: &KernelInfo, library: &KernelLibrary) -> Result<FunctionId> {
        let images = library.find(info, self.devices[device as usize].capability)?;
        self.enter(device)?;
        self.functions.load(device, info, &images)
    }

    fn launch(&self, stream: StreamId, launch: &KernelLaunch<'_>) -> Result<()> {
        let work = || Work::new(Activity::Kernel, launch.info.name, None, Some(launch.caller));
        let mut words = ArgumentWords::new();
        launch.args.pack(&mut words);
        // Each parameter is the low bytes of its word, since both ends are little endian.
        let mut parameters = [ptr::null_mut::<c_void>(); ArgumentWords::CAPACITY];
        for (parameter, word) in parameters.iter_mut().zip(words.as_slice()) {
            *parameter = ptr::from_ref(word).cast_mut().cast();
        }
        let (function, grid, threads) = (launch.function.0 as CUfunction, launch.grid, launch.info.threads);
        let (shared, early) = (launch.info.shared_bytes, launch.info.begins_early() && !KernelLibrary::took_stale());
        self.work(stream, work, || {
            // SAFETY: the function was loaded for this device from the kernel that `info` describes, whose parameters are
            // packed from its own argument struct; the driver copies them before it returns. The runtime keeps the memory
            // that they point to until the stream's work is done, and `Kernel::grid` checked their sizes. A kernel that begins early waits for the launches
            // ahead in its first instruction: `#[kernel]` writes the wait, the build refuses an entry without it, and code of other sources is launched late.
            unsafe { function::launch(function, grid, ([threads, shared], early), stream.cuda(), &mut parameters) }
        })
    }

    fn cublaslt(&self) -> Result<usize, String> {
        CublasLt::version()
    }

    fn plan_matmul(&self, device: u32, matmul: &Matmul, memory: &MatmulMemory) -> Result<Option<Box<dyn MatmulPlan>>> {
        self.enter(device)?;
        Ok(self.cublaslt.plan(device, matmul, memory)?.map(|plan| Box::new(plan) as Box<dyn MatmulPlan>))
    }

    fn matmul(&self, stream: StreamId, plan: &dyn MatmulPlan) -> Result<()> {
        self.work(stream, || Work::new(Activity::Kernel, "cublasLtMatmul", None, None), || plan.enqueue(stream))
    }

    /// In relaxed mode: what may not be captured is refused by the runtime, and loading a kernel meanwhile is fine.
    fn begin_capture(&self, origin: StreamId) -> Result<()> {
        self.enter(origin.device)?;
        let mode = CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED;
        // SAFETY: a live stream.
        check("cuStreamBeginCapture", unsafe { sys::cuStreamBeginCapture_v2(origin.cuda(), mode) })
    }

    fn end_capture(&self, origin: StreamId) -> Result<GraphId> {
        self.enter(origin.device)?;
        let mut graph = ptr::null_mut();
        // SAFETY: a live stream in a capture, and a valid place for the graph.
        check("cuStreamEndCapture", unsafe { sys::cuStreamEndCapture(origin.cuda(), &raw mut graph) })?;
        let mut executable: CUgraphExec = ptr::null_mut();
        // SAFETY: a valid place for the executable graph, and the graph just captured. No flags.
        let result = check("cuGraphInstantiate", unsafe { sys::cuGraphInstantiateWithFlags(&raw mut executable, graph, 0) });
        // SAFETY: the graph just captured, which nothing else refers to: the executable is a copy of its own.
        log(check("cuGraphDestroy", unsafe { sys::cuGraphDestroy(graph) }));
        result?;
        Ok(GraphId { device: origin.device, handle: executable as u64 })
    }

    fn launch_graph(&self, stream: StreamId, graph: GraphId, caller: Caller) -> Result<()> {
        let work = || Work::new(Activity::Graph, "replay", None, Some(caller));
        // SAFETY: a live executable graph and stream; the runtime keeps the memory that the graph uses.
        let replay = || check("cuGraphLaunch", unsafe { sys::cuGraphLaunch(graph.handle as CUgraphExec, stream.cuda()) });
        self.work(stream, work, replay)
    }

    /// A replay under way still ends (CUDA driver API, `cuGraphExecDestroy`).
    fn destroy_graph(&self, graph: GraphId) {
        // SAFETY: a live executable graph, not used after this.
        let destroy = || check("cuGraphExecDestroy", unsafe { sys::cuGraphExecDestroy(graph.handle as CUgraphExec) });
        log(self.enter(graph.device).and_then(|()| destroy()));
    }
    fn recorder(&self) -> Option<&Recorder> {
        Some(&self.recorder)
    }

    fn is_capturing(&self, stream: StreamId) -> Result<bool> {
        self.enter(stream.device)?;
        let mut status = CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE;
        // SAFETY: a live stream and a valid place for the status.
        check("cuStreamIsCapturing", unsafe { sys::cuStreamIsCapturing(stream.cuda(), &raw mut status) })?;
        Ok(status != CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE)
    }

    fn start_recording(&self) -> bool {
        self.recorder.start()
    }

    fn recorded(&self) -> Result<Recording> {
        self.recorder.recording(self)
    }

    fn stop_recording(&self) {
        self.recorder.stop(self);
    }
}
