//! A team's part of a board.

use std::sync::Arc;
use std::time::Duration;

use super::team::Team;
use crate::bootstrap::board::Board;
use crate::rank::Rank;
use crate::rank::SymmetricError;
use crate::runtime::{Error, Result};

/// The board of a world for the members of a team, by their numbers in it. Giving up here affects only this team; a member
/// whose process is gone is gone here too.
#[derive(Debug)]
pub(super) struct TeamBoard {
    pub board: Arc<dyn Board>,
    pub team: Team,
    /// The beginning of its notes' names, which no other team's have.
    pub scope: String,
}

impl TeamBoard {
    fn world_rank(&self, member: Rank) -> Result<Rank> {
        let why = || format!("{member} is not of a team of {}", self.team.size());
        self.team.world_rank(member).ok_or_else(|| Error::Invalid { what: "Board of a team", why: why() })
    }

    fn key(&self, key: &str) -> String {
        format!("{}{key}", self.scope)
    }

    /// An error with ranks by their numbers in the team. A rank outside is named in the reason, and the member that was waited for as the rank.
    fn of_team(&self, error: Error, from: Rank) -> Error {
        let Error::Symmetric(error) = error else { return error };
        Error::Symmetric(match error {
            SymmetricError::Aborted { rank, why } => match self.team.rank_of(rank) {
                Some(rank) => SymmetricError::Aborted { rank, why },
                None => SymmetricError::Aborted { rank: from, why: format!("{rank} of the world: {why}") },
            },
            SymmetricError::Missing { what, waited, .. } => SymmetricError::Missing { what, ranks: vec![from], waited },
            other => other,
        })
    }
}

impl Board for TeamBoard {
    fn publish(&self, from: Rank, key: &str, note: Vec<u8>) -> Result<()> {
        self.board.publish_to(self.team.members(), self.world_rank(from)?, &self.key(key), note)
    }

    fn publish_to(&self, readers: &[Rank], from: Rank, key: &str, note: Vec<u8>) -> Result<()> {
        let readers: Vec<_> = readers.iter().map(|reader| self.world_rank(*reader)).collect::<Result<_>>()?;
        self.board.publish_to(&readers, self.world_rank(from)?, &self.key(key), note)
    }

    fn read(&self, from: Rank, key: &str, patience: Duration) -> Result<Vec<u8>> {
        let read = self.board.read(self.world_rank(from)?, &self.key(key), patience);
        read.map_err(|error| self.of_team(error, from))
    }

    fn give_up(&self, rank: Rank, scope: Option<&str>, why: &str) {
        if let Some(rank) = self.team.world_rank(rank) {
            self.board.give_up(rank, Some(&scope.map_or_else(|| self.scope.clone(), |scope| self.key(scope))), why);
        }
    }

    fn forget(&self, key: &str) {
        self.board.forget(&self.key(key));
    }

    fn leave(&self, scope: &str) {
        self.board.leave(&self.key(scope));
    }

    fn name(&self) -> Option<String> {
        self.board.name().map(|board| format!("{board}: {}", self.scope))
    }
}
