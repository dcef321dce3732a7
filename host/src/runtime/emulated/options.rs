//! How a virtual cluster is made.

use std::time::Duration;

use oxtile_emulator::Mode;

use super::explore::Exploration;

/// Options of [`Runtime::emulated_with`](crate::runtime::Runtime::emulated_with).
#[derive(Clone, Debug)]
pub struct EmulatedOptions {
    /// How many virtual GPUs.
    pub devices: u32,
    /// What is checked in a kernel, and whether reads of the host are.
    pub mode: Mode,
    /// Determines the order and delays of streams and, in [`Mode::Check`], of threads; `None` takes `OXTILE_SEED`, else 0. One
    /// seed gives one order as long as one thread enqueues.
    pub seed: Option<u64>,
    /// OS threads that run blocks in [`Mode::Fast`]; 0 takes one a core.
    pub workers: usize,
    /// Multiprocessors of a device; persistent kernels launch about as many blocks. A launch that waits for flags holds those of its blocks until it ends, and a
    /// collective that waits for other ranks holds one.
    pub multiprocessors: u32,
    /// Hardware queues of a device, which its streams share by turns: work in one begins in the order in which it was enqueued, so that a stream that waits delays
    /// others. `None` gives each stream its own. A GPU has 8, or `CUDA_DEVICE_MAX_CONNECTIONS`.
    pub hardware_queues: Option<u32>,
    /// Whether uses of memory by streams that nothing orders are errors, [`Error::Race`](crate::Error::Race).
    pub sanitize_streams: bool,
    /// Takes the order from a search of all orders, in place of the seed.
    pub exploration: Option<Exploration>,
    /// How long a wait goes on when nothing can run, while other threads that do not wait drive ranks: they may still enqueue what is missing.
    pub patience: Duration,
    /// How long a kernel may go on in which no block ends, before it is an error that names the lines where threads are. A loop without any operation of the device
    /// is not seen: it hangs.
    pub time_limit: Duration,
    /// How long a host waits for a stream, whether something can run or not: as [`CudaOptions::deadline`](crate::runtime::CudaOptions::deadline).
    pub deadline: Option<Duration>,
}

impl Default for EmulatedOptions {
    fn default() -> Self {
        Self {
            devices: 1,
            mode: Mode::Check,
            seed: None,
            workers: 0,
            multiprocessors: 4,
            hardware_queues: None,
            sanitize_streams: true,
            exploration: None,
            patience: Duration::from_secs(10),
            time_limit: Duration::from_secs(60),
            deadline: None,
        }
    }
}
