//! Whether all ranks of a group call the same, in one order: compared on their hosts before anything is enqueued.
//!
//! Collectives that do not fit together hang, or give garbage without an error. Each comparison costs the ranks a meeting, so this is
//! for debug builds.

use std::fmt;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::bootstrap::board::{Board, gather_of};
use crate::rank::{Rank, WorldSize};
use crate::runtime::runtime::lock;
use crate::runtime::{Error, Result};

/// What a rank publishes of its call.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
enum Note {
    /// Kind, reduction, size and root.
    Call(String),
    /// Ranks of one colour go on as a group, in the order of keys.
    Split { colour: Option<u32>, key: u32 },
}

impl fmt::Display for Note {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Call(call) => f.write_str(call),
            Self::Split { .. } => f.write_str("split"),
        }
    }
}

/// One rank's calls in a group.
#[derive(Debug)]
pub(crate) struct Sequence {
    board: Arc<dyn Board>,
    /// The group's name: the same on its ranks, and no other group's.
    name: String,
    /// This rank on the board.
    me: Rank,
    /// The group's ranks on the board, in the group's order.
    members: Vec<Rank>,
    patience: Duration,
    calls: Mutex<u64>,
}

impl Sequence {
    /// The calls of all ranks of a board together.
    pub fn new(board: Arc<dyn Board>, name: &str, me: Rank, members: Vec<Rank>, patience: Duration) -> Self {
        Self { board, name: name.to_owned(), me, members, patience, calls: Mutex::new(0) }
    }

    /// The group's name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The group's ranks on the board, in the group's order.
    pub fn members(&self) -> &[Rank] {
        &self.members
    }

    /// This rank publishes nothing more here; a rank that waits for it gets the reason.
    pub fn give_up(&self, why: &str) {
        self.board.give_up(self.me, Some(&self.scope()), why);
    }

    /// Waits until all ranks have come to their next call, and compares them.
    ///
    /// # Errors
    /// [`Error::Mismatch`], the same on every rank; the ranks that did not come, or are gone.
    pub fn agree(&self, call: impl fmt::Display) -> Result<()> {
        self.meet(&Note::Call(call.to_string()), self.patience).map(drop)
    }

    /// As [`agree`](Self::agree) for a split: the calls of the part that this rank goes on in.
    pub fn split(&self, colour: Option<u32>, key: u32) -> Result<Option<Self>> {
        self.split_within(colour, key, self.patience)
    }

    /// The same with another patience.
    pub fn split_within(&self, colour: Option<u32>, key: u32, patience: Duration) -> Result<Option<Self>> {
        let (number, notes) = self.meet(&Note::Split { colour, key }, patience)?;
        let Some(mine) = colour else { return Ok(None) };
        let place = |(rank, note): (&Rank, Note)| match note {
            Note::Split { colour, key } if colour == Some(mine) => Some((key, *rank)),
            _ => None,
        };
        // A stable sort: equal keys keep the order of ranks.
        let mut part: Vec<_> = self.members.iter().zip(notes).filter_map(place).collect();
        part.sort_by_key(|(key, _)| *key);
        let name = format!("part {mine} of {}, split by its call {number}", self.name);
        let members = part.into_iter().map(|(_, rank)| rank).collect();
        Ok(Some(Self::new(Arc::clone(&self.board), &name, self.me, members, self.patience)))
    }

    /// The number of this call, and what all ranks publish of it, in the group's order.
    fn meet(&self, mine: &Note, patience: Duration) -> Result<(u64, Vec<Note>)> {
        // Held until all have come: calls of one rank come one after another.
        let mut calls = lock(&self.calls);
        let number = *calls;
        *calls += 1;
        // The key begins with the name: giving up that name gives up its calls.
        let key = |number: u64| format!("{}{number}", self.scope());
        self.board.publish_to(&self.members, self.me, &key(number), serde_json::to_vec(mine).unwrap_or_default())?;
        let found = gather_of(&*self.board, &self.members, &key(number), patience)?;
        let unknown = || Note::Call("something else".to_owned());
        let notes: Vec<Note> = found.iter().map(|note| serde_json::from_slice(note).unwrap_or_else(|_| unknown())).collect();
        // All have come to this call, so no rank reads the notes of the one before any more.
        if let Some(last) = number.checked_sub(1) {
            self.board.forget(&key(last));
        }
        let fits = |note: &Note| match (note, &notes[0]) {
            (Note::Split { .. }, Note::Split { .. }) => true,
            (note, first) => note == first,
        };
        match notes.iter().position(|note| !fits(note)) {
            None => Ok((number, notes)),
            // By their places in the group, as the program knows them.
            Some(at) => Err(Error::Mismatch {
                group: self.name.clone(),
                sequence: number,
                rank: self.place(at),
                found: notes[at].to_string(),
                other: self.place(0),
                expected: notes[0].to_string(),
            }),
        }
    }

    /// The beginning of its notes' keys, which no other group's have.
    fn scope(&self) -> String {
        format!("{}: call ", self.name)
    }

    fn place(&self, at: usize) -> Rank {
        let world = WorldSize::new(self.members.len() as u32).unwrap_or(WorldSize::ONE);
        Rank::new(at as u32, world).unwrap_or(Rank::ZERO)
    }
}

/// The notes of the last call.
impl Drop for Sequence {
    fn drop(&mut self) {
        self.board.leave(&self.scope());
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bootstrap::board::LocalBoard;
    use crate::bootstrap::{Store, threads};
    use crate::rank::SymmetricError;

    const PATIENCE: Duration = Duration::from_secs(10);

    /// What a program of `size` ranks, a thread each, returns on every rank.
    fn ranks<R: Send>(size: u32, patience: Duration, body: impl Fn(u32, Sequence) -> R + Sync) -> Vec<R> {
        let board = Arc::new(LocalBoard::default());
        let world: Vec<Rank> = WorldSize::new(size).unwrap().ranks().collect();
        std::thread::scope(|scope| {
            let start = |rank: &Rank| {
                let sequence = Sequence::new(board.clone(), "the world", *rank, world.clone(), patience);
                let (body, rank) = (&body, rank.index());
                scope.spawn(move || body(rank, sequence))
            };
            let threads: Vec<_> = world.iter().map(start).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        })
    }

    #[test]
    fn ranks_that_call_the_same_go_on_and_leave_little() {
        let notes = |sequence: &Sequence| format!("{:?}", sequence.board).matches("call ").count();
        let left = ranks(3, PATIENCE, |_, sequence| {
            (0..100).try_for_each(|i| sequence.agree(format!("all_reduce of {i}"))).unwrap();
            notes(&sequence)
        });
        assert!(left.iter().all(|left| *left <= 2 * 3), "{left:?}");
    }

    #[test]
    fn calls_that_differ_are_named_on_every_rank() {
        let errors = ranks(3, PATIENCE, |rank, sequence| {
            sequence.agree("barrier").unwrap();
            sequence.agree(if rank == 2 { "all_gather of 8 bytes" } else { "all_reduce of 8 bytes" }).unwrap_err().to_string()
        });
        let expected = "call 1 of the world: rank 2 called all_gather of 8 bytes, rank 0 called all_reduce of 8 bytes: every rank calls the \
                        same collectives with the same arguments, in one order";
        assert_eq!(errors, [expected; 3]);
    }

    #[test]
    fn a_rank_that_does_not_come_is_named() {
        let results = ranks(2, Duration::from_millis(50), |rank, sequence| if rank == 1 { Ok(()) } else { sequence.agree("barrier") });
        let error = results[0].clone().unwrap_err();
        assert!(matches!(&error, Error::Symmetric(SymmetricError::Missing { ranks, .. }) if ranks[0].index() == 1), "{error}");
        assert!(error.to_string().starts_with("the world: call 0"), "{error}");
    }

    #[test]
    fn parts_of_a_split_call_on_their_own() {
        let results = ranks(4, PATIENCE, |rank, sequence| {
            // 2 and 0, then 3 and 1: the order of keys.
            let part = sequence.split((rank != 1).then_some(rank % 2), 4 - rank).unwrap();
            let Some(part) = part else { return Vec::new() };
            part.agree(format!("barrier of {}", rank % 2)).unwrap();
            part.members.iter().map(|rank| rank.index()).collect()
        });
        assert_eq!(results, [vec![2, 0], vec![], vec![2, 0], vec![3]]);
    }

    /// A rank holds no notes of groups that it is not in, or has left.
    #[test]
    fn parts_leave_nothing_on_the_boards_of_processes() {
        let world = WorldSize::new(3).unwrap();
        let stores = threads(world, PATIENCE).unwrap();
        let rank = |store: Store| {
            let (me, board) = (store.rank(), Arc::new(store.into_board().unwrap()));
            let whole = Sequence::new(board.clone(), "the world", me, world.ranks().collect(), PATIENCE);
            for round in 0..3 {
                let part = whole.split(Some(u32::from(me.index() == round)), 0).unwrap().unwrap();
                (0..20).try_for_each(|_| part.agree("barrier")).unwrap();
            }
            whole.agree("barrier").unwrap();
            let left = board.count();
            // No rank leaves before all have counted.
            board.close().unwrap();
            left
        };
        let left: Vec<_> = std::thread::scope(|scope| {
            let threads: Vec<_> = stores.into_iter().map(|store| scope.spawn(|| rank(store))).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        });
        // The notes of the world's last call, and of a faster rank's closing.
        assert!(left.iter().all(|left| *left <= 3 + 2), "{left:?}");
    }

    #[test]
    fn a_split_is_no_other_call() {
        let errors = ranks(2, PATIENCE, |rank, sequence| match rank {
            0 => sequence.agree("barrier").unwrap_err().to_string(),
            _ => sequence.split(Some(0), 0).unwrap_err().to_string(),
        });
        assert!(errors.iter().all(|error| error.contains("rank 1 called split, rank 0 called barrier")), "{errors:?}");
    }
}
