//! Every order that streams, events and signals allow.

use std::collections::HashSet;
use std::fmt;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::{Arc, Mutex};

use crate::runtime::error::{Error, Result};
use crate::runtime::runtime::lock;

/// A search under way, for [`EmulatedOptions::exploration`](super::EmulatedOptions::exploration). Made by [`explore`].
#[derive(Clone)]
pub struct Exploration(Arc<Mutex<Search>>);

#[derive(Default)]
struct Search {
    /// What is chosen at each point of this run, and among how many.
    path: Vec<(usize, usize)>,
    depth: usize,
    seen: HashSet<u64>,
}

/// What a search went through.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Explored {
    /// Runs that came to their end.
    pub schedules: u64,
    /// Different states in which more than one stream could go on.
    pub states: usize,
}

/// Runs a program under every order in which its streams can set signals, wait for them and meet in collectives. Other operations are done
/// as soon as they can be: their order changes nothing that the stream sanitizer does not report, but for streams that poison let go, which it
/// does not check. A state that was seen before is not
/// gone through again. Launches with flags are refused: they run in pieces, whose orders are not searched.
///
/// The program makes a runtime with the exploration in its options, enqueues from this thread alone, always the same, waits, and checks
/// its results. It passes errors of the runtime on: one of them ends a run that comes to a known state.
///
/// # Errors
/// The first error of a run.
pub fn explore(mut program: impl FnMut(&Exploration) -> Result<()>) -> Result<Explored> {
    let exploration = Exploration(Arc::default());
    let mut schedules = 0;
    loop {
        match program(&exploration) {
            Ok(()) => schedules += 1,
            Err(Error::SeenBefore) => {}
            Err(error) => return Err(error),
        }
        if !lock(&exploration.0).advance() {
            return Ok(Explored { schedules, states: lock(&exploration.0).seen.len() });
        }
    }
}

impl Search {
    /// The next path, depth first; false if there is none.
    fn advance(&mut self) -> bool {
        self.depth = 0;
        while let Some((chosen, of)) = self.path.pop() {
            if chosen + 1 < of {
                self.path.push((chosen + 1, of));
                return true;
            }
        }
        false
    }
}

impl Exploration {
    /// Which of `count` streams goes on in this state.
    pub(super) fn choose(&self, count: usize, state: impl Hash) -> Result<usize> {
        let search = &mut *lock(&self.0);
        if search.depth == search.path.len() {
            let mut hasher = DefaultHasher::new();
            state.hash(&mut hasher);
            if !search.seen.insert(hasher.finish()) {
                return Err(Error::SeenBefore);
            }
            search.path.push((0, count));
        }
        search.depth += 1;
        Ok(search.path[search.depth - 1].0)
    }
}

impl fmt::Debug for Exploration {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Exploration").field("states", &lock(&self.0).seen.len()).finish_non_exhaustive()
    }
}
