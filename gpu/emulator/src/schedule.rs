//! Which thread or copy goes on when, in a checked run: as the seed has it, noted, or as it is given.

use crate::order::Space;
use crate::site::Site;
use std::cell::Cell;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// What goes on in a [`Turn`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Actor {
    /// A thread, by its number in the block.
    Thread(u32),
    /// An asynchronous copy.
    Copy {
        /// The thread that issued it.
        thread: u32,
        /// How many copies that thread had issued before.
        number: u32,
    },
}

/// One scheduling decision: a thread or a copy goes on before all others, until it is so far.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Turn {
    /// The block, by its number in the grid.
    pub block: u64,
    /// What goes on.
    pub actor: Actor,
    /// How far: of a thread how many places it has passed at which it may stop, of a copy how many of its three stages.
    pub until: u32,
}

/// The turns of a checked run, for [`Options::schedule`](crate::Options::schedule). A clone is another handle on the same record.
///
/// A run with a schedule notes every turn. One with given turns takes these in their order: where the thread of the next turn cannot go on, the others run until it
/// can. What the turns leave open, and all after the last of them, is the default order: the lowest thread that can go on runs until it waits or ends; a copy goes on
/// where no thread can, and threads that poll come last, one after another.
#[derive(Clone, Debug)]
pub struct Schedule {
    given: Option<Arc<[Turn]>>,
    /// The source lines that the story is about, if one is told.
    about: Option<Arc<[Site]>>,
    record: Arc<Mutex<Record>>,
}

#[derive(Debug, Default)]
struct Record {
    turns: Vec<Turn>,
    story: Vec<Sentence>,
}

/// What a run did in a turn, or in several alike, in words.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Sentence {
    /// Such as "thread (3, 0, 0) of block (0, 0, 0) runs until src/x.rs:40:12 (write of `sums[3]` of `Shared`)".
    pub text: String,
    /// Whether a given turn asked for it, it passed a line that the story is about, or it ended the run. The rest is the default order.
    pub matters: bool,
}

impl Schedule {
    /// The order of the seed.
    pub fn seeded() -> Self {
        Self { given: None, about: None, record: Arc::default() }
    }

    /// These turns, and the default order where they leave it open.
    pub fn given(turns: &[Turn]) -> Self {
        Self { given: Some(turns.into()), ..Self::seeded() }
    }

    /// The same schedule, whose run is told in words.
    pub fn told(self, about: &[Site]) -> Self {
        Self { about: Some(about.into()), ..self }
    }

    /// The turns of the run so far. Each is a decision: given to another run of the same launch, they repeat it.
    pub fn turns(&self) -> Vec<Turn> {
        self.record().turns.clone()
    }

    /// What the run did so far, if it is told.
    pub fn story(&self) -> Vec<Sentence> {
        self.record().story.clone()
    }

    pub(crate) fn turns_given(&self) -> Option<&Arc<[Turn]>> {
        self.given.as_ref()
    }

    pub(crate) fn about(&self) -> Option<&[Site]> {
        self.about.as_deref()
    }

    /// Notes a turn as it begins.
    pub(crate) fn begin(&self, turn: Turn) {
        self.record().turns.push(turn);
    }

    /// The turn that began last has come so far.
    pub(crate) fn end(&self, until: u32) {
        if let Some(last) = self.record().turns.last_mut() {
            last.until = until;
        }
    }

    pub(crate) fn tell(&self, sentence: Sentence) {
        self.record().story.push(sentence);
    }

    fn record(&self) -> MutexGuard<'_, Record> {
        self.record.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// An operation of a thread, as a story tells it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Deed {
    pub site: Site,
    pub what: What,
}

#[derive(Clone, Copy, Debug)]
pub(crate) enum What {
    Synchronisation(&'static str),
    Access { verb: &'static str, space: Space, address: u64, bytes: u32 },
}

/// What the thread now running did in its turn.
#[derive(Default)]
pub(crate) struct Deeds {
    /// The last operation.
    pub last: Cell<Option<Deed>>,
    /// The last one at a line that the story is about.
    pub about: Cell<Option<Deed>>,
}

impl Deeds {
    pub fn add(&self, deed: Deed, about: &[Site]) {
        self.last.set(Some(deed));
        if about.contains(&deed.site) {
            self.about.set(Some(deed));
        }
    }
}
