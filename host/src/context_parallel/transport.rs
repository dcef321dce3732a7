//! Over what keys travel.

use std::fmt;

use super::config::{Schedule, refuse};
use super::messages::Messages;
use super::plan::Means;
use crate::comm::{Communicator, Member, Rank, WorldSize};
use crate::runtime::{Device, Result};
use crate::symmetric::Arena;
use crate::thd::Share;

/// What a schedule may use to reach other ranks.
#[derive(Clone, Copy)]
pub struct Transport<'t> {
    pub(super) messages: Option<&'t dyn Messages>,
    pub(super) memory: Option<(&'t Arena, &'t Member)>,
    /// Messages among neighbours, and between groups of them.
    grid: Option<[&'t dyn Messages; 2]>,
}

impl<'t> Transport<'t> {
    /// Messages: NCCL's within and between hosts, those of the virtual cluster, or of a rank alone.
    pub fn collective(communicator: &'t (impl Communicator + Send + Sync)) -> Self {
        Self { messages: Some(communicator), memory: None, grid: None }
    }

    /// Memory that the other members of a team reach.
    pub fn symmetric(arena: &'t Arena, member: &'t Member) -> Self {
        Self { messages: None, memory: Some((arena, member)), grid: None }
    }

    /// Both, of the same ranks in the same order.
    pub fn both(communicator: &'t (impl Communicator + Send + Sync), arena: &'t Arena, member: &'t Member) -> Self {
        Self { messages: Some(communicator), memory: Some((arena, member)), grid: None }
    }

    /// The same with messages among `inner` neighbours, such as those of a host, and between the ranks of one place in all such groups:
    /// [`Hierarchical`](Schedule::Hierarchical) takes them. Rank `r` of the world is rank `r % inner` among its neighbours, and rank `r / inner` of those of its
    /// place: [`Communicator::split`] makes both.
    #[must_use]
    pub fn with_grid(self, inner: &'t (impl Communicator + Send + Sync), outer: &'t (impl Communicator + Send + Sync)) -> Self {
        Self { grid: Some([inner, outer]), ..self }
    }

    /// This rank, and how many there are.
    pub(super) fn place(&self) -> Result<(Rank, WorldSize)> {
        if let Some((arena, member)) = self.memory {
            arena.check_member("Transport", member)?;
        }
        let by_messages = self.messages.map(|messages| (messages.rank(), messages.world()));
        let by_memory = self.memory.map(|(_, member)| (member.rank(), member.team().size()));
        match (by_messages, by_memory) {
            (Some(one), Some(other)) if one != other => refuse(format!(
                "the transport is {} of {} by messages, and {} of {} by memory: give both the same ranks",
                one.0, one.1, other.0, other.1
            )),
            (Some(place), _) | (None, Some(place)) => Ok(place),
            (None, None) => unreachable!("a transport has at least one"),
        }
    }

    /// What a rank with this device may use.
    pub(super) fn means(&self, device: &Device) -> Means {
        // Slots count ranks of the team, addresses those of the arena.
        let contiguous = self.memory.is_some_and(|(arena, member)| {
            arena.capabilities().contiguous && member.team().members().iter().copied().eq(arena.world().ranks())
        });
        let room = self.memory.map(|(arena, _)| arena.room());
        // Kernels of other ranks may have to wait for one of this rank, on a device that they share.
        let waits = device.is_hopper() && !self.memory.is_some_and(|(arena, _)| arena.may_share_devices());
        Means { messages: self.messages.is_some(), room, held: None, grid: self.grid.is_some(), waits, contiguous }
    }

    /// The same without the memory.
    pub(super) fn by_messages_alone(self) -> Self {
        Self { memory: None, ..self }
    }

    /// Messages for a schedule.
    pub(super) fn messages_for(&self, schedule: Schedule) -> Result<&'t dyn Messages> {
        match self.messages {
            Some(messages) => Ok(messages),
            None => {
                refuse(format!("{schedule} sends messages, and the transport has symmetric memory alone: take pull, or Transport::both"))
            }
        }
    }

    /// Messages among neighbours, and between groups.
    pub(super) fn grid_for(&self, schedule: Schedule, share: Share, inner: WorldSize) -> Result<(&'t dyn Messages, &'t dyn Messages)> {
        let Some([near, far]) = self.grid else {
            return refuse(format!("{schedule} takes messages among neighbours and between groups of them: give Transport::with_grid"));
        };
        let (world, rank, size) = (share.world.get(), share.rank.index(), inner.get());
        let fits = near.world() == inner
            && far.world().get() * size == world
            && near.rank().index() == rank % size
            && far.rank().index() == rank / size;
        if fits {
            return Ok((near, far));
        }
        refuse(format!(
            "{schedule} of {} on {}: the grid is {} of {} among neighbours and {} of {} between groups, where {} of {size} and {} of {} are needed",
            share.rank,
            share.world,
            near.rank(),
            near.world(),
            far.rank(),
            far.world(),
            rank % size,
            rank / size,
            world / size
        ))
    }

    /// Memory for a schedule.
    pub(super) fn memory_for(&self, schedule: Schedule) -> Result<(&'t Arena, &'t Member)> {
        match self.memory {
            Some(memory) => Ok(memory),
            None => refuse(format!(
                "{schedule} reads the memory of other ranks, and the transport has messages alone: take ring, or Transport::both"
            )),
        }
    }
}

impl fmt::Debug for Transport<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let place = (self.messages.is_some(), self.memory.is_some());
        f.debug_struct("Transport").field("messages", &place.0).field("memory", &place.1).finish()
    }
}
