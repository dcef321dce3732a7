//! What the tests share.

use oxtile::comm::{EmulatedCommunicator, Rank, WorldSize};
use oxtile::runtime::Mode;
use oxtile::{Buffer, EmulatedOptions, Runtime, Stream};

/// The world sizes that every property is shown for.
pub const WORLDS: [u32; 5] = [1, 2, 3, 4, 8];

/// The seeds that a right program is silent under: 1000 with `OXTILE_LONG=1`.
pub fn seeds() -> u64 {
    if is_long() { 1000 } else { 32 }
}

/// Whether everything is run, with `OXTILE_LONG=1`.
pub fn is_long() -> bool {
    std::env::var("OXTILE_LONG").is_ok_and(|value| value == "1")
}

/// The ranks of a virtual cluster, driven from one thread.
pub struct World {
    pub runtime: Runtime,
    pub ranks: Vec<EmulatedCommunicator>,
    pub streams: Vec<Stream>,
}

impl World {
    pub fn new(size: u32, seed: u64) -> Self {
        Self::with(EmulatedOptions { devices: size, mode: Mode::Check, seed: Some(seed), ..EmulatedOptions::default() })
    }

    /// A rank a device.
    pub fn with(options: EmulatedOptions) -> Self {
        Self::over(Runtime::emulated_with(options).unwrap())
    }

    /// A rank a device of a runtime.
    pub fn over(runtime: Runtime) -> Self {
        let size = runtime.device_count();
        let ranks = EmulatedCommunicator::world_of(&runtime, WorldSize::new(size).unwrap()).unwrap();
        let streams = ranks.iter().map(|rank| rank.device().stream().unwrap()).collect();
        Self { runtime, ranks, streams }
    }

    pub fn size(&self) -> WorldSize {
        WorldSize::new(self.ranks.len() as u32).unwrap()
    }

    pub fn rank(&self, index: u32) -> Rank {
        Rank::new(index, self.size()).unwrap()
    }

    /// One buffer a rank, on its stream.
    pub fn buffers(&self, mut of: impl FnMut(u32) -> Vec<u32>) -> Vec<Buffer<u32>> {
        self.streams.iter().zip(0..).map(|(stream, rank)| Buffer::from_slice(stream, &of(rank)).unwrap()).collect()
    }

    pub fn zeros(&self, len: u64) -> Vec<Buffer<u32>> {
        self.streams.iter().map(|stream| Buffer::zeros(stream, len).unwrap()).collect()
    }

    /// What the ranks' buffers hold in the end.
    pub fn read(&self, buffers: &[Buffer<u32>]) -> Vec<Vec<u32>> {
        buffers.iter().zip(&self.streams).map(|(buffer, stream)| buffer.to_vec(stream).unwrap()).collect()
    }
}

/// Numbers that tell rank and place.
pub fn numbers(rank: u32, length: u32) -> Vec<u32> {
    (0..length).map(|i| 1000 * (rank + 1) + i).collect()
}
