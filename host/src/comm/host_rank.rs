//! Ranks of one host, whose arenas other ranks reach.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use super::meeting::{ArenaRank, Meeting};
use super::team::Team;
use super::team_board::TeamBoard;
use super::virtual_rank::VirtualRank;
use crate::bootstrap::board::{Board, LocalBoard};
use crate::bootstrap::{Environment, Store, StoreBoard};
use crate::rank::{Rank, WorldSize};
use crate::runtime::runtime::lock;
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
    /// The cluster's rank, where ranks are threads on a virtual cluster.
    on_cluster: Option<Arc<VirtualRank>>,
    /// The board of the store, where ranks are processes.
    store: Option<Arc<StoreBoard>>,
    /// How many arenas it has opened.
    arenas: AtomicU64,
    /// How often it has become a member of each team.
    teams: Mutex<BTreeMap<Team, u64>>,
    /// Whether it is a rank of a team.
    is_member: bool,
    /// Whether it ended in order, so that the others need not be told.
    is_closed: bool,
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
        let mut rank = Self::on(rank, world, device, board.clone(), None);
        rank.store = Some(board);
        Ok(rank)
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
        let rank = |(rank, device)| Self::on(rank, world, device, Arc::clone(&board), VirtualRank::on(device).map(Arc::new));
        Ok(world.ranks().zip(devices).map(rank).collect())
    }

    fn on(rank: Rank, world: WorldSize, device: &Device, board: Arc<dyn Board>, on_cluster: Option<Arc<VirtualRank>>) -> Self {
        let (arenas, teams) = (AtomicU64::new(0), Mutex::default());
        Self { rank, world, device: device.clone(), board, on_cluster, store: None, arenas, teams, is_member: false, is_closed: false }
    }

    /// This rank as a member of a team, with arenas of the team's own: ranks are the numbers in the team, and a failure in it is an error
    /// of its members alone. Every member calls it the same number of times. `None` for a rank outside.
    ///
    /// Keep the member, and this rank, until the team's arenas are closed, and then [close](Self::close) it: a member that is dropped before that is gone
    /// from the team, and a rank that drops the world's is gone from all teams. A team whose member failed stays unusable; ask again for a new one.
    ///
    /// # Errors
    /// [`Error::Invalid`] for a team of a world of another size.
    pub fn team(&self, team: &Team) -> Result<Option<Self>> {
        if team.world() != self.world {
            let why = format!("the team is of a world of {}, this one has {}", team.world(), self.world);
            return Err(Error::Invalid { what: "HostRank::team", why });
        }
        let Some(rank) = team.rank_of(self.rank) else { return Ok(None) };
        let mut teams = lock(&self.teams);
        let number = teams.entry(team.clone()).or_default();
        let board = TeamBoard { board: Arc::clone(&self.board), team: team.clone(), scope: format!("{team:?}, number {number}: ") };
        *number += 1;
        let mut member = Self::on(rank, team.size(), &self.device, Arc::new(board), self.on_cluster.clone());
        member.is_member = true;
        Ok(Some(member))
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

    /// Waits until every rank has come here: then no rank needs another's process any more. Close the arenas before. A member of a
    /// [team](Self::team) does not wait, and leaves nothing on the boards; nor do ranks that are [threads](Self::threads), which share the process.
    ///
    /// # Errors
    /// As [`StoreBoard::close`].
    pub fn close(mut self) -> Result<()> {
        self.is_closed = self.is_member;
        self.store.as_ref().map_or(Ok(()), |store| store.close())
    }
}

impl ArenaRank for HostRank {
    fn device(&self) -> &Device {
        &self.device
    }

    fn next_meeting(&self) -> Meeting {
        self.on_cluster.iter().for_each(|rank| rank.drive());
        let number = self.arenas.fetch_add(1, Ordering::Relaxed);
        Meeting::new(Arc::clone(&self.board), self.rank, self.world, format!("arena {number}"))
    }
}

impl Drop for HostRank {
    fn drop(&mut self) {
        if !self.is_closed {
            self.board.give_up(self.rank, None, "it is gone");
        }
    }
}

impl fmt::Debug for HostRank {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("HostRank").field("rank", &self.rank).field("world", &self.world).finish_non_exhaustive()
    }
}
