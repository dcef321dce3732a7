//! What is measured: a kernel, a shape, the bytes that must move, and a captured graph of launches.

use anyhow::{Result, ensure};
use oxtile::runtime::{Device, Event, Graph, Kind, Runtime, Stream};

use crate::{pattern::Pattern, rounds::Side};

/// Device time that the replays of one round should take at least, so that an event's resolution does not show.
const ROUND_SECONDS: f64 = 2e-3;
/// About the rates of an H200's memory and of its tensor cores in bf16; they only set how many replays a round has.
const BYTES_A_SECOND: f64 = 4e12;
const FLOPS_A_SECOND: f64 = 6e14;

/// Where the benchmarks run.
pub struct Gpu {
    /// The GPU's runtime, or an emulated one.
    pub runtime: Runtime,
    /// The first device.
    pub device: Device,
    /// The one stream that everything runs on.
    pub stream: Stream,
    /// The input data.
    pub pattern: Pattern,
}

/// The sizes of a run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Size {
    /// The shapes of the tables, for a GPU.
    Full,
    /// The same code on tiny shapes, for the emulator.
    Smoke,
}

impl Size {
    /// The value for this size.
    pub fn pick<T>(self, full: T, smoke: T) -> T {
        match self {
            Self::Full => full,
            Self::Smoke => smoke,
        }
    }
}

/// Fills the buffers of a benchmark and captures its graph.
pub type Prepare = dyn Fn(&Gpu) -> Result<Prepared>;

/// Reads back what the first launch of a graph wrote.
pub type ReadOutputs = dyn Fn(&Stream) -> Result<Vec<Output>>;

/// One kernel at one shape.
pub struct Bench {
    /// The kernel's family, one page and one results file each.
    pub family: &'static str,
    /// The kernel with its instance, such as `mxfp8_cast_rows e4m3`.
    pub kernel: &'static str,
    /// The shape as the tables print it.
    pub shape: String,
    /// The shape as the peers read it.
    pub dimensions: Vec<u64>,
    /// Bytes that one launch must move: each input read once, each output written once.
    pub bytes: u64,
    /// Floating-point operations of one launch, where they are compared; else 0.
    pub flops: u64,
    /// Buffer sets that the launches of one graph walk through, so that no launch finds its input in the L2 cache.
    pub sets: usize,
    /// The copy whose rate is the ceiling, by [`name`](Self::name).
    pub ceiling: Option<String>,
    /// The implementations to compare with, as peers/server.py names them.
    pub peers: &'static [&'static str],
    /// Fills the buffers and captures the graph.
    pub prepare: Box<Prepare>,
}

impl Bench {
    /// The name that other benchmarks refer to.
    pub fn name(&self) -> String {
        format!("{} {}", self.kernel, self.shape)
    }

    /// Replays of the graph in one round.
    pub fn replays(&self, kind: Kind) -> usize {
        match kind {
            Kind::Cuda => {
                let launch = (self.bytes as f64 / BYTES_A_SECOND).max(self.flops as f64 / FLOPS_A_SECOND);
                (ROUND_SECONDS / (launch * self.sets as f64)).ceil() as usize
            }
            Kind::Emulated => 1,
        }
    }
}

/// A benchmark that is ready to be replayed. The graph keeps its buffers alive.
pub struct Prepared {
    /// One launch a buffer set.
    pub graph: Graph,
    /// Other kernels of ours, timed in the same rounds.
    pub rivals: Vec<Rival>,
    /// Reads back what the first launch wrote.
    pub outputs: Box<ReadOutputs>,
}

/// Another kernel of ours, timed in the same rounds.
pub struct Rival {
    /// What it is.
    pub label: String,
    /// One launch a buffer set.
    pub graph: Graph,
    /// Floating-point operations of one launch, if their number differs from the benchmark's.
    pub flops: Option<u64>,
}

/// One output of a kernel, for the peers to compare with theirs.
pub struct Output {
    /// Which one, such as `scales`.
    pub name: &'static str,
    /// Its bytes.
    pub bytes: Vec<u8>,
}

impl Prepared {
    /// Runs `launches` once, so that every kernel is loaded, and then captures them.
    ///
    /// # Errors
    /// What the launches or the capture give.
    pub fn capture(gpu: &Gpu, mut launches: impl FnMut() -> oxtile::runtime::Result<()>) -> Result<Graph> {
        launches()?;
        gpu.stream.synchronize()?;
        Ok(Graph::capture(&[&gpu.stream], launches)?)
    }

    /// A graph and how to read what its first launch wrote.
    pub fn new(graph: Graph, outputs: impl Fn(&Stream) -> Result<Vec<Output>> + 'static) -> Self {
        Self { graph, rivals: Vec::new(), outputs: Box::new(outputs) }
    }

    /// The benchmark with another kernel of ours for the same to be timed beside it.
    pub fn against(self, label: impl Into<String>, rival: Self) -> Self {
        self.beside(Rival { label: label.into(), graph: rival.graph, flops: None })
    }

    /// The benchmark with another kernel of ours for other work, of so many floating-point operations: it is compared by rates.
    pub fn against_work(self, label: impl Into<String>, flops: u64, rival: Self) -> Self {
        self.beside(Rival { label: label.into(), graph: rival.graph, flops: Some(flops) })
    }

    fn beside(mut self, rival: Rival) -> Self {
        self.rivals.push(rival);
        self
    }
}

/// Our side of a comparison: replays of the graph between two device events.
pub struct Replays<'a> {
    /// The kernel.
    pub label: &'a str,
    /// The stream to replay on.
    pub stream: &'a Stream,
    /// What is replayed.
    pub graph: &'a Graph,
    /// How often.
    pub count: usize,
}

impl Side for Replays<'_> {
    fn label(&self) -> &str {
        self.label
    }

    fn round(&mut self) -> Result<f64> {
        // One replay ahead keeps the device busy while the host enqueues what is timed.
        self.graph.replay(self.stream)?;
        let start: Event = self.stream.record()?;
        for _ in 0..self.count {
            self.graph.replay(self.stream)?;
        }
        let end = self.stream.record()?;
        let milliseconds = end.elapsed_since(&start)?.as_secs_f64() * 1e3;
        ensure!(milliseconds > 0.0, "the device events of a round show no time between them");
        Ok(milliseconds)
    }
}
