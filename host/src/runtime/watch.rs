//! Lets an arena end a host's wait for a stream when another rank has failed, which will never signal what the stream waits for.

use std::hash::{BuildHasher, BuildHasherDefault, DefaultHasher};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use super::error::Result;
use super::patience;
use super::runtime::lock;

/// Looks at a host's wait, every so often.
pub(crate) trait Watch: Send + Sync {
    /// Whether it has nothing more to say.
    fn is_over(&self) -> bool;

    /// Looks at a wait that has lasted so long; an error ends it.
    fn look(&self, waited: Duration) -> Result<()>;

    /// What happened during a wait that is over.
    fn check(&self) -> Result<()>;
}

/// Between two looks.
pub(crate) const LOOK: Duration = Duration::from_millis(20);

/// The watchers of a stream.
#[derive(Default)]
pub(crate) struct Watchers {
    /// A hash of their addresses, in any order; 0 if there are none: without an arena a wait costs only one read of this word more.
    addresses: AtomicU64,
    all: Mutex<Vec<Arc<dyn Watch>>>,
}

impl Watchers {
    pub fn add(&self, watch: &Arc<dyn Watch>) {
        let mut all = lock(&self.all);
        all.retain(|known| !known.is_over() && address(known) != address(watch));
        all.push(Arc::clone(watch));
        self.note(&all);
    }

    /// The stream comes after another's work: what watches that stream watches this one too.
    pub fn follow(&self, other: &Self) {
        let theirs = other.addresses.load(Ordering::Acquire);
        if theirs != 0 && theirs != self.addresses.load(Ordering::Acquire) {
            other.present().iter().for_each(|watch| self.add(watch));
        }
    }

    /// The watchers that are still alive.
    pub fn present(&self) -> Vec<Arc<dyn Watch>> {
        if self.addresses.load(Ordering::Acquire) == 0 {
            return Vec::new();
        }
        let mut all = lock(&self.all);
        all.retain(|watch| !watch.is_over());
        self.note(&all);
        all.clone()
    }

    fn note(&self, all: &[Arc<dyn Watch>]) {
        let hashes = all.iter().map(|watch| BuildHasherDefault::<DefaultHasher>::default().hash_one(address(watch)).max(1));
        self.addresses.store(hashes.fold(0, u64::wrapping_add), Ordering::Release);
    }
}

/// Its address, which names it as long as a handle is held.
fn address(watch: &Arc<dyn Watch>) -> usize {
    Arc::as_ptr(watch).addr()
}

/// The looks at one wait.
pub(crate) struct Looks<'a> {
    watchers: &'a [Arc<dyn Watch>],
    start: Instant,
    next: Duration,
}

impl<'a> Looks<'a> {
    pub fn new(watchers: &'a [Arc<dyn Watch>]) -> Self {
        Self { watchers, start: Instant::now(), next: LOOK }
    }

    /// Until the next one, if there is any.
    pub fn left(&self) -> Option<Duration> {
        (!self.watchers.is_empty()).then(|| self.next.saturating_sub(self.start.elapsed()))
    }

    /// Looks.
    pub fn look(&mut self) -> Result<()> {
        let waited = self.start.elapsed();
        self.watchers.iter().try_for_each(|watch| watch.look(waited))?;
        self.next = self.start.elapsed() + LOOK;
        Ok(())
    }
}

/// What happened during a wait that is over: what it waited for may have been let go.
pub(crate) fn check(watchers: &[Arc<dyn Watch>]) -> Result<()> {
    watchers.iter().try_for_each(|watch| watch.check())
}

/// Waits until `done`, at most for the limit, while others look. Whether it is done.
pub(crate) fn wait_until(watchers: &[Arc<dyn Watch>], limit: Option<Duration>, mut done: impl FnMut() -> Result<bool>) -> Result<bool> {
    let mut looks = Looks::new(watchers);
    patience::wait_until(limit.unwrap_or(Duration::MAX), || {
        let is_done = done()?;
        if !is_done && looks.left().is_some_and(|left| left.is_zero()) {
            looks.look()?;
        }
        Ok(is_done)
    })
}
