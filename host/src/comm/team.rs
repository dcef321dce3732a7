//! Some ranks of a world that work together.

use std::fmt;
use std::sync::Arc;

use crate::rank::{Rank, WorldSize};
use crate::runtime::{Error, Result};

/// Ranks of a world, in an order of their own. A rank list and nothing else: making one allocates no device memory,
/// registers nothing and sends nothing, so a schedule may make any number of them.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Team {
    world: WorldSize,
    members: Arc<[Rank]>,
}

/// A rank's place in a team. A rank outside has none: an operation of members takes a `Member`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Member {
    team: Team,
    rank: Rank,
}

impl Team {
    /// All ranks of a world, in their order.
    pub fn all(world: WorldSize) -> Self {
        Self { world, members: world.ranks().collect() }
    }

    /// The ranks named, numbered in the order of the list.
    ///
    /// # Errors
    /// [`Error::Invalid`] for an empty list, a rank twice, or one that the world does not have.
    pub fn new(world: WorldSize, members: &[Rank]) -> Result<Self> {
        let invalid = |why: String| Err(Error::Invalid { what: "Team::new", why });
        if members.is_empty() {
            return invalid("no member is named: a team has at least one".to_owned());
        }
        for (i, member) in members.iter().enumerate() {
            if member.index() >= world.get() {
                return invalid(format!("{member} is not of this world of {world}"));
            }
            if members[..i].contains(member) {
                return invalid(format!("{member} is named twice"));
            }
        }
        Ok(Self { world, members: members.into() })
    }

    /// Every `stride`-th rank from `first` on, `size` of them: the rows and columns of a grid of ranks.
    ///
    /// # Errors
    /// As [`new`](Self::new).
    pub fn strided(world: WorldSize, first: Rank, stride: u32, size: WorldSize) -> Result<Self> {
        let at = |i: u32| stride.checked_mul(i).and_then(|step| step.checked_add(first.index())).and_then(|at| Rank::new(at, world));
        let members: Option<Vec<_>> = (0..size.get()).map(at).collect();
        let why = || format!("{size} from {first} in steps of {stride} leave this world of {world}");
        Self::new(world, &members.ok_or_else(|| Error::Invalid { what: "Team::strided", why: why() })?)
    }

    /// How many members there are.
    pub fn size(&self) -> WorldSize {
        // A team has at least one member, and no more than its world.
        WorldSize::new(self.members.len() as u32).unwrap_or(WorldSize::ONE)
    }

    /// How many ranks its world has.
    pub fn world(&self) -> WorldSize {
        self.world
    }

    /// The members' ranks in the world, in the team's order.
    pub fn members(&self) -> &[Rank] {
        &self.members
    }

    /// The number in the team of a rank of the world; `None` for one outside.
    pub fn rank_of(&self, world_rank: Rank) -> Option<Rank> {
        let at = self.members.iter().position(|member| *member == world_rank)?;
        Rank::new(at as u32, self.size())
    }

    /// The rank in the world of a member; `None` if the team has no such member.
    pub fn world_rank(&self, member: Rank) -> Option<Rank> {
        self.members.get(member.index() as usize).copied()
    }

    /// The place of a rank of the world; `None` for one outside.
    pub fn member(&self, world_rank: Rank) -> Option<Member> {
        Some(Member { rank: self.rank_of(world_rank)?, team: self.clone() })
    }
}

impl Member {
    /// Its number in the team.
    pub fn rank(&self) -> Rank {
        self.rank
    }

    /// Its rank in the world.
    pub fn world_rank(&self) -> Rank {
        self.team.members[self.rank.index() as usize]
    }

    /// The team.
    pub fn team(&self) -> &Team {
        &self.team
    }

    /// The other members by their numbers in the team, beginning after this one and going round: at each step of a schedule that every
    /// member follows, each is named once.
    pub fn others(&self) -> impl ExactSizeIterator<Item = Rank> + use<> {
        let (size, me) = (self.team.size(), self.rank.index());
        (1..size.get()).map(move |step| {
            let index = (u64::from(me) + u64::from(step)) % u64::from(size.get());
            Rank::new(index as u32, size).unwrap_or(Rank::ZERO)
        })
    }

    /// The other members by their ranks in the world, in the order of the team.
    pub(crate) fn others_in_world(&self) -> impl Iterator<Item = Rank> + use<'_> {
        let me = self.world_rank();
        self.team.members.iter().copied().filter(move |rank| *rank != me)
    }
}

impl fmt::Debug for Team {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let members: Vec<_> = self.members.iter().map(|member| member.index()).collect();
        write!(f, "Team{members:?} of {}", self.world)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn world(size: u32) -> WorldSize {
        WorldSize::new(size).unwrap()
    }

    fn ranks(world: WorldSize, indices: &[u32]) -> Vec<Rank> {
        indices.iter().map(|i| Rank::new(*i, world).unwrap()).collect()
    }

    #[test]
    fn members_are_numbered_in_the_order_of_the_list() {
        let world = world(8);
        let team = Team::new(world, &ranks(world, &[6, 2, 4])).unwrap();
        let numbers: Vec<_> = world.ranks().map(|rank| team.rank_of(rank).map(Rank::index)).collect();
        assert_eq!(numbers, [None, None, Some(1), None, Some(2), None, Some(0), None]);
        let two = team.member(ranks(world, &[2])[0]).unwrap();
        assert_eq!((two.rank().index(), two.world_rank().index(), team.size().get()), (1, 2, 3));
        assert_eq!(two.others().map(Rank::index).collect::<Vec<_>>(), [2, 0]);
        assert_eq!(two.others_in_world().map(Rank::index).collect::<Vec<_>>(), [6, 4]);
        assert_eq!(team.world_rank(Rank::new(3, world).unwrap()), None);
    }

    #[test]
    fn a_rank_outside_has_no_place() {
        let world = world(4);
        let team = Team::strided(world, Rank::ZERO, 2, WorldSize::new(2).unwrap()).unwrap();
        assert_eq!(team.members().iter().map(|r| r.index()).collect::<Vec<_>>(), [0, 2]);
        assert_eq!(team.member(Rank::new(1, world).unwrap()), None);
    }

    #[test]
    fn wrong_lists_are_refused() {
        let (four, eight) = (world(4), world(8));
        let error = |list: &[Rank]| Team::new(four, list).unwrap_err().to_string();
        assert_eq!(error(&[]), "Team::new: no member is named: a team has at least one");
        assert_eq!(error(&ranks(eight, &[1, 7])), "Team::new: rank 7 is not of this world of 4 ranks");
        assert_eq!(error(&ranks(four, &[3, 1, 3])), "Team::new: rank 3 is named twice");
        assert!(Team::strided(four, Rank::ZERO, u32::MAX, four).is_err());
        assert!(Team::strided(four, Rank::ZERO, 2, WorldSize::new(3).unwrap()).is_err());
    }
}
