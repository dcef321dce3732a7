//! Ranks of one host, whose arenas other ranks reach.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use super::board::{Board, LocalBoard};
use super::bootstrap::{Environment, Store, StoreBoard};
use super::meeting::{ArenaRank, Meeting};
use super::rank::{Rank, WorldSize};
use crate::runtime::{Device, Error, Result};

/// A rank of a host, with its device and the board on which it meets the others to open [arenas](crate::symmetric::Arena): a process
/// ([`connect`](Self::connect)) or a thread of one process ([`threads`](Self::threads)).
///
/// A rank that is dropped tells the others that it is gone. End with [`close`](Self::close).
pub struct HostRank {
    rank: Rank,
    world: WorldSize,
    device: Device,
    board: Arc<dyn Board>,
    /// Of ranks that are processes.
    store: Option<Arc<StoreBoard>>,
    /// How many it has opened.
    arenas: AtomicU64,
}

impl HostRank {
    /// This process as a rank, once all ranks have come. `timeout` is how long it waits for them, now and in [`close`](Self::close).
    ///
    /// # Errors
    /// As [`Store::connect`].
    pub fn connect(environment: &Environment, device: &Device, timeout: Duration) -> Result<Self> {
        Self::from_store(Store::connect(environment, timeout)?, device)
    }

    /// The rank of a store, which all ranks make a board of.
    ///
    /// # Errors
    /// As [`Store::into_board`].
    pub fn from_store(store: Store, device: &Device) -> Result<Self> {
        let (rank, world, board) = (store.rank(), store.world(), Arc::new(store.into_board()?));
        Ok(Self { rank, world, device: device.clone(), board: board.clone(), store: Some(board), arenas: AtomicU64::new(0) })
    }

    /// A rank for each device, to be handed to a thread each. A device may be named more than once
    /// ([`share_devices`](crate::symmetric::ArenaOptions::share_devices)).
    ///
    /// # Errors
    /// [`Error::Invalid`] for no device.
    pub fn threads(devices: &[Device]) -> Result<Vec<Self>> {
        let none = || Error::Invalid { what: "HostRank::threads", why: "no device is named: a world has at least one rank".to_owned() };
        let world = u32::try_from(devices.len()).ok().and_then(WorldSize::new).ok_or_else(none)?;
        let board: Arc<dyn Board> = Arc::new(LocalBoard::default());
        let rank = |(rank, device): (Rank, &Device)| {
            let (device, board) = (device.clone(), Arc::clone(&board));
            Self { rank, world, device, board, store: None, arenas: AtomicU64::new(0) }
        };
        Ok(world.ranks().zip(devices).map(rank).collect())
    }

    /// This rank.
    pub fn rank(&self) -> Rank {
        self.rank
    }

    /// How many ranks there are.
    pub fn world(&self) -> WorldSize {
        self.world
    }

    /// Its device.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// Waits until every rank has come here: then none needs another's process any more. Arenas are closed before.
    ///
    /// # Errors
    /// As [`StoreBoard::close`].
    pub fn close(self) -> Result<()> {
        self.store.as_ref().map_or(Ok(()), |store| store.close())
    }
}

impl ArenaRank for HostRank {
    fn device(&self) -> &Device {
        &self.device
    }

    fn next_meeting(&self) -> Meeting {
        let number = self.arenas.fetch_add(1, Ordering::Relaxed);
        Meeting::new(Arc::clone(&self.board), self.rank, self.world, format!("arena {number}"))
    }
}

impl Drop for HostRank {
    fn drop(&mut self) {
        self.board.give_up(self.rank, "", "it is gone");
    }
}

impl fmt::Debug for HostRank {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("HostRank").field("rank", &self.rank).field("world", &self.world).finish_non_exhaustive()
    }
}
