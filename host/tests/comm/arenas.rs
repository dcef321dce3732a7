//! An arena a rank, for tests.

use std::time::Duration;

use oxtile::symmetric::{Arena, ArenaOptions, Channel, Epoch, SymmetricBuffer, SymmetricError};
use oxtile::{Error, Result, Stream};

use crate::support::World;

/// A world with an arena a rank.
pub struct Arenas {
    pub world: World,
    pub arenas: Vec<Arena>,
}

pub const FIRST: Epoch = Epoch::ZERO.next();

pub fn options() -> ArenaOptions {
    ArenaOptions { bytes: 1 << 14, deadline: Duration::from_millis(200), ..ArenaOptions::default() }
}

impl Arenas {
    /// For programs that go well, however busy the machine is.
    pub fn new(size: u32, seed: u64) -> Self {
        Self::with(size, seed, ArenaOptions { deadline: Duration::from_secs(30), ..options() })
    }

    pub fn with(size: u32, seed: u64, options: ArenaOptions) -> Self {
        Self::over(World::new(size, seed), options)
    }

    pub fn over(world: World, options: ArenaOptions) -> Self {
        let arenas = world.ranks.iter().map(|rank| Arena::open(rank, options.clone()).unwrap()).collect();
        Self { world, arenas }
    }

    pub fn buffers(&self, len: u64) -> Vec<SymmetricBuffer<u32>> {
        self.arenas.iter().map(|arena| arena.buffer(len).unwrap()).collect()
    }

    pub fn channels(&self) -> Vec<Channel> {
        self.arenas.iter().map(|arena| arena.channel().unwrap()).collect()
    }

    pub fn stream(&self, rank: usize) -> &Stream {
        &self.world.streams[rank]
    }

    pub fn close(self) {
        let closing: Vec<_> = self.arenas.into_iter().map(|arena| arena.close().unwrap()).collect();
        closing.into_iter().for_each(|arena| arena.finish().unwrap());
    }
}

/// The symmetric error inside.
pub fn symmetric<R: std::fmt::Debug>(result: Result<R>) -> SymmetricError {
    match result.unwrap_err() {
        Error::Symmetric(error) => error,
        other => panic!("{other}"),
    }
}
