//! Emulated memory for the jobs, and launches on it, alone or beside streams.

use std::cell::RefCell;
use std::collections::BTreeSet;
use std::panic::Location;
use std::sync::Arc;

use oxtile_emulator::mutation::Outcome;
use oxtile_emulator::{GridRun, Known, Launch, Memory, Options, Progress, Report};
use oxtile_tests::inputs::Random;
use oxtile_tile::launch::{ArgumentWords, DeviceLimits, DeviceView, DeviceViewMut, Kernel, KernelArgs, Signature};
use oxtile_tile::num::Pod;

pub static OWNER: () = ();
const LIMITS: DeviceLimits = DeviceLimits { multiprocessors: 1, shared_bytes_per_block: 227 * 1024 };

/// Elements in emulated memory.
pub struct Elements<T> {
    pub address: u64,
    pub length: u64,
    pub element: std::marker::PhantomData<T>,
}

impl<T: Pod> Elements<T> {
    pub fn view(&self) -> DeviceView<'_, T> {
        // SAFETY: the memory lives as long as the job's `Device`; the emulator checks every access.
        unsafe { DeviceView::from_raw(self.address, self.length, &OWNER) }
    }

    pub fn view_mut(&mut self) -> DeviceViewMut<'_, T> {
        // SAFETY: as `view`; the exclusive borrow is the only view.
        unsafe { DeviceViewMut::from_raw(self.address, self.length, &OWNER) }
    }
}

/// Emulated memory without a runtime around it: launches run at once, with the mutant's options.
pub struct Device {
    memory: Arc<Memory>,
    options: Options,
    pub report: RefCell<Report>,
    /// Names of the kernels launched so far.
    pub launched: RefCell<BTreeSet<&'static str>>,
    /// Whether blocks down are folded into z, so that there are more of them than tiles.
    folds: bool,
}

impl Device {
    pub fn new(options: &Options) -> Self {
        Self { memory: Memory::new(), options: options.clone(), report: RefCell::default(), launched: RefCell::default(), folds: false }
    }

    /// The same with folded grids.
    pub fn folding(self) -> Self {
        Self { folds: true, ..self }
    }

    /// Uploads 32-bit words, to be seen as elements of `T`.
    pub fn upload<T: Pod>(&self, name: &str, words: &[u32]) -> Elements<T> {
        let bytes: Vec<u8> = words.iter().flat_map(|w| w.to_le_bytes()).collect();
        let address = self.memory.allocate(name, bytes.len() as u64, 0);
        self.memory.write(address, &bytes).expect("fresh memory");
        Elements { address, length: (bytes.len() / size_of::<T>()) as u64, element: std::marker::PhantomData }
    }

    pub fn download<T>(&self, elements: &Elements<T>) -> Vec<u32> {
        let mut bytes = vec![0; (elements.length * size_of::<T>() as u64) as usize];
        self.memory.read(elements.address, &mut bytes).expect("live memory");
        bytes.chunks_exact(4).map(|b| u32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect()
    }

    /// What these bytes hold is garbage: a read of them before they are written again is reported.
    pub fn discard(&self, address: u64, bytes: u64) {
        self.memory.discard(address, bytes).expect("live memory");
    }

    pub fn launch<K: Kernel + Signature>(&self, args: K::Args<'_>) -> Result<(), Outcome> {
        let report = self.begin::<K>(args)?.run().map_err(Outcome::Faulted)?;
        self.report.borrow_mut().merge(&report);
        Ok(())
    }

    /// The same, while streams bring chunks, each one chunk. The seed decides when; the next comes at the latest when nothing but polling is left.
    pub fn launch_beside<K: Kernel + Signature>(&self, args: K::Args<'_>, chunks: &[Chunk]) -> Result<(), Outcome> {
        let mut run = self.begin::<K>(args)?;
        let (mut random, mut chunks) = (Random::new(self.options.seed), chunks.iter());
        while !chunks.as_slice().is_empty() {
            let progress = run.step(1 << (4 + random.below(8))).map_err(Outcome::Faulted)?;
            if progress != Progress::Running || random.below(4) == 0 {
                chunks.next().into_iter().for_each(|chunk| self.bring(chunk));
            }
        }
        let report = run.run().map_err(Outcome::Faulted)?;
        self.report.borrow_mut().merge(&report);
        Ok(())
    }

    /// Two launches of a kernel under way together, whose flags are for one another. The seed decides which goes on.
    pub fn launch_together<K: Kernel + Signature>(&self, args: [K::Args<'_>; 2]) -> Result<(), Outcome> {
        let [one, other] = args;
        let (mut runs, mut random) = ([self.begin::<K>(one)?, self.begin::<K>(other)?], Random::new(self.options.seed));
        let mut waiting = 0;
        // Until none goes on, for good: what is left then ends, or is reported to wait in vain.
        while waiting < 64 {
            let progress = runs[random.below(2) as usize].step(1 << (4 + random.below(8))).map_err(Outcome::Faulted)?;
            waiting = if progress == Progress::Running { 0 } else { waiting + 1 };
        }
        for run in runs {
            let report = run.run().map_err(Outcome::Faulted)?;
            self.report.borrow_mut().merge(&report);
        }
        Ok(())
    }

    /// A stream writes a chunk and sets its flag.
    fn bring(&self, chunk: &Chunk) {
        const DATA: u64 = 1;
        const FLAG: u64 = 2;
        let stream = self.memory.agent("a stream", 0);
        for (address, bytes) in &chunk.rows {
            self.memory.enter(stream, DATA, *address, bytes.len() as u64, Location::caller());
            self.memory.write(*address, bytes).expect("live memory");
        }
        let mut known = Known::default();
        known.learn(stream, FLAG);
        self.memory.publish(stream, chunk.flag, known);
        self.memory.write(chunk.flag, &1_u64.to_le_bytes()).expect("live memory");
    }

    fn begin<K: Kernel + Signature>(&self, args: K::Args<'_>) -> Result<GridRun, Outcome> {
        self.launched.borrow_mut().insert(K::INFO.name);
        let mut grid = K::grid(&args, &LIMITS).expect("arguments that fit");
        if self.folds && grid.blocks() != 0 {
            (grid.y, grid.z) = (grid.y * grid.z / 2 + 1, 2);
        }
        let mut words = ArgumentWords::new();
        args.pack(&mut words);
        let mut launch = Launch::new(K::INFO.name, grid.x, K::INFO.threads, K::emulate)
            .arguments(words.as_slice())
            .shared(K::INFO.shared_bytes)
            .cluster(K::INFO.cluster * grid.cluster);
        launch.grid = [grid.x, grid.y, grid.z];
        GridRun::new(&self.memory, launch, self.options.clone()).map_err(Outcome::Faulted)
    }
}

/// What a stream writes before it sets a flag.
pub struct Chunk {
    /// Bytes at addresses.
    pub rows: Vec<(u64, Vec<u8>)>,
    /// The address of the flag.
    pub flag: u64,
}

pub fn words(count: usize) -> Vec<u32> {
    let mut random = Random::new(4);
    (0..count).map(|_| random.bits() as u32 & 0x7f7f_7f7f).collect()
}
