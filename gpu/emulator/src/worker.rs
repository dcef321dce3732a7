//! State of one OS thread's share of a launch, reached by the emulated threads that run on it.

use crate::clock::Knowledge;
use crate::cost::Totals;
use crate::fault::{Fault, FaultKind};
use crate::grid::Grid;
use crate::history::GridBlocks;
use crate::launch::Mode;
use crate::memory::{Allocation, Memory, Snapshot, nearest};
use crate::operand::Runs;
use crate::phases::Phases;
use crate::random::Random;
use crate::report::{BoxCopy, SiteUse, SyncSite};
use crate::schedule::{Deed, Deeds, Schedule, What};
use crate::shared_layout::SharedNames;
use crate::site::Site;
use crate::stack::{PooledStack, StackPool};
use rustc_hash::FxHashMap as HashMap;
use std::cell::{Cell, OnceCell, RefCell};
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::ptr;
use std::sync::Arc;

pub(crate) struct Worker {
    grid: Arc<Grid>,
    fault: RefCell<Option<Fault>>,
    stacks: RefCell<StackPool>,
    pub steps: Cell<u64>,
    /// Grows when something happened that others may wait for.
    progress: Cell<u64>,
    /// The allocations read and written last, the latest first. `snapshots` keeps them alive.
    cache: [[Cell<*const Allocation>; CACHED]; 2],
    snapshots: RefCell<Vec<Snapshot>>,
    pub random: Random,
    checked: bool,
    /// Numbers of this grid's blocks in the memory's history, and what they know at their start.
    history: OnceCell<(Range<u32>, Knowledge)>,
    ended: Cell<bool>,
    pub totals: RefCell<Totals>,
    /// What the threads knew that have ended.
    pub learnt: RefCell<Knowledge>,
    /// The names of the shared memory's pieces.
    pub shared: SharedNames,
    /// The bytes of matrix operands.
    pub runs: Runs,
    sites: RefCell<HashMap<(usize, usize), Seen>>,
    /// Where the turn of the thread now running ends, by a schedule: after so many places at which it may stop. None where the seed decides.
    pub turn_end: Cell<Option<u32>>,
    /// What pictures of the run need, where they are wanted.
    pub explained: Option<Explained>,
    /// Whether what threads do is told.
    tells: bool,
    /// What the thread did in its turn, where that is told.
    pub deeds: Deeds,
}

/// What pictures of a run need.
#[derive(Default)]
pub(crate) struct Explained {
    /// Of the first block.
    pub phases: RefCell<Phases>,
    pub boxes: RefCell<BTreeSet<BoxCopy>>,
}

/// Slots of the allocation cache.
pub(crate) const READ: usize = 0;
pub(crate) const WRITE: usize = 1;

/// Allocations of the cache for each slot: a kernel reads a few tensors by turns.
const CACHED: usize = 4;

/// A synchronisation operation, where it stands and how it was used.
type Seen = (&'static str, Site, SiteUse);

impl Worker {
    pub fn new(grid: &Arc<Grid>) -> Self {
        Self {
            grid: Arc::clone(grid),
            fault: RefCell::new(None),
            stacks: RefCell::new(StackPool::new(grid.options.stack_bytes)),
            steps: Cell::new(0),
            progress: Cell::new(0),
            cache: [const { [const { Cell::new(ptr::null()) }; CACHED] }; 2],
            snapshots: RefCell::new(vec![Arc::clone(&grid.snapshot)]),
            random: Random::new(grid.options.seed),
            checked: grid.options.mode == Mode::Check,
            history: OnceCell::new(),
            ended: Cell::new(false),
            totals: RefCell::default(),
            learnt: RefCell::default(),
            shared: SharedNames::default(),
            runs: Runs::default(),
            sites: RefCell::default(),
            turn_end: Cell::new(None),
            explained: (grid.options.explain && grid.options.mode == Mode::Check).then(Explained::default),
            tells: grid.options.schedule.as_ref().is_some_and(|schedule| schedule.about().is_some()),
            deeds: Deeds::default(),
        }
    }

    #[inline(always)]
    pub fn grid(&self) -> &Grid {
        &self.grid
    }

    /// Leaves the stacks to the next run on this OS thread.
    pub fn keep_stacks(&self) {
        self.stacks.borrow_mut().keep();
    }

    pub fn memory(&self) -> &Memory {
        &self.grid.memory
    }

    /// The numbers of this grid's blocks in the memory's history, and what they know at their start, in check mode. The first call enters the
    /// grid there.
    pub fn history(&self) -> Option<&(Range<u32>, Knowledge)> {
        if !self.checked {
            return None;
        }
        let launch = &self.grid.launch;
        Some(self.history.get_or_init(|| {
            let mut history = self.grid.memory.history();
            let mut start = history.start();
            start.join(&self.grid.options.known.at_start());
            let grid = GridBlocks {
                blocks: 0..0,
                kernel: launch.kernel.clone(),
                device: launch.device,
                grid: launch.grid,
                block: launch.block,
                cluster: launch.cluster,
                is_stream: false,
                start: start.generic.clone(),
            };
            let count = u32::try_from(launch.blocks()).expect("fewer than 2^32 blocks run checked");
            (history.begin(grid, count), start)
        }))
    }

    /// The grid has ended: later grids are ordered after it.
    pub fn finish(&self) {
        if let Some((blocks, _)) = self.history.get()
            && !self.ended.replace(true)
        {
            self.grid.memory.history().finish(blocks.clone());
        }
    }

    /// Notes a synchronisation operation and applies the mutation: the count to use, or nothing to skip it.
    #[inline(always)]
    pub fn synchronise(&self, operation: &'static str, site: Site, count: u32) -> Option<u32> {
        if self.checked { self.mutate(operation, site, Some(count)) } else { Some(count) }
    }

    /// The same for an operation without a count: whether to do it.
    #[inline(always)]
    pub fn performs(&self, operation: &'static str, site: Site) -> bool {
        !self.checked || self.mutate(operation, site, None).is_some()
    }

    fn mutate(&self, operation: &'static str, site: Site, count: Option<u32>) -> Option<u32> {
        self.note(site, || What::Synchronisation(operation));
        let mut sites = self.sites.borrow_mut();
        // The addresses of the two constants are cheaper to look up than their contents.
        let key = (std::ptr::from_ref(site).addr(), operation.as_ptr().addr());
        let (_, _, seen) = sites.entry(key).or_insert((operation, site, SiteUse { visits: 0, count }));
        seen.visits += 1;
        seen.count = seen.count.min(count);
        let given = count.unwrap_or(0);
        match &self.grid.options.mutation {
            Some(mutation) if mutation.is_at(operation, site) => mutation.change.apply(given),
            _ => Some(given),
        }
    }

    /// Notes what the thread now running does, where that is told.
    #[inline(always)]
    pub fn note(&self, site: Site, what: impl FnOnce() -> What) {
        if self.tells {
            let about = self.grid.options.schedule.as_ref().and_then(Schedule::about);
            self.deeds.add(Deed { site, what: what() }, about.unwrap_or_default());
        }
    }

    /// The synchronisation sites seen so far.
    pub fn sites(&self) -> BTreeMap<SyncSite, SiteUse> {
        let mut sites: BTreeMap<SyncSite, SiteUse> = BTreeMap::new();
        for (operation, site, seen) in self.sites.borrow().values() {
            sites.entry(SyncSite::new(operation, site)).and_modify(|known| known.add(seen)).or_insert(*seen);
        }
        sites
    }

    #[inline(always)]
    pub fn is_checked(&self) -> bool {
        self.checked
    }

    #[inline(always)]
    pub fn productive(&self) {
        self.progress.set(self.progress.get() + 1);
    }

    pub fn progress(&self) -> u64 {
        self.progress.get()
    }

    /// Records why the run ends; the first fault stands.
    pub fn set_fault(&self, fault: Fault) {
        self.fault.borrow_mut().get_or_insert(fault);
    }

    pub fn take_fault(&self) -> Option<Fault> {
        self.fault.borrow_mut().take()
    }

    pub fn has_fault(&self) -> bool {
        self.fault.borrow().is_some()
    }

    pub fn take_stack(&self) -> Result<PooledStack, Fault> {
        self.stacks.borrow_mut().take().map_err(|error| Fault {
            kind: FaultKind::Launch,
            kernel: self.grid.launch.kernel.clone(),
            thread: None,
            message: format!("no memory for the stack of an emulated thread ({} bytes): {error}", self.grid.options.stack_bytes),
            involved: Vec::new(),
            mend: "lower Options::resident_blocks or Options::stack_bytes",
        })
    }

    pub fn give_stack(&self, stack: PooledStack) {
        self.stacks.borrow_mut().give(stack);
    }

    /// The live allocation that holds `bytes` bytes at `address`.
    #[inline(always)]
    pub fn locate(&self, slot: usize, address: u64, bytes: u64) -> Option<&Allocation> {
        self.cached(slot, 0, address, bytes).or_else(|| self.locate_slowly(slot, address, bytes))
    }

    /// The allocation at this place of the cache, if it is the one.
    #[inline(always)]
    fn cached(&self, slot: usize, place: usize, address: u64, bytes: u64) -> Option<&Allocation> {
        // SAFETY: null, or an allocation that `snapshots` keeps alive as long as `self`.
        let last = unsafe { self.cache[slot][place].get().as_ref() };
        last.filter(|allocation| allocation.contains(address, bytes) && !allocation.is_freed())
    }

    #[cold]
    fn locate_slowly(&self, slot: usize, address: u64, bytes: u64) -> Option<&Allocation> {
        let cache = &self.cache[slot];
        if let Some(place) = (1..CACHED).find(|place| self.cached(slot, *place, address, bytes).is_some()) {
            cache[0].swap(&cache[place]);
            return self.cached(slot, 0, address, bytes);
        }
        let mut snapshots = self.snapshots.borrow_mut();
        let fits = |live: &Snapshot| {
            let found = nearest(live, address).filter(|a| a.contains(address, bytes) && !a.is_freed());
            found.map(Arc::as_ptr)
        };
        let found = snapshots.last().and_then(fits).or_else(|| {
            let fresh = self.grid.memory.snapshot();
            let found = fits(&fresh)?;
            snapshots.push(fresh);
            Some(found)
        })?;
        (1..CACHED).rev().for_each(|place| cache[place].set(cache[place - 1].get()));
        cache[0].set(found);
        // SAFETY: as in `cached`.
        Some(unsafe { &*found })
    }

    /// Notes that a kernel wrote bytes.
    #[inline(always)]
    pub fn written(&self, allocation: &Allocation, offset: u64, bytes: u64) {
        self.productive();
        if self.checked {
            allocation.initialisation.set(offset, bytes);
        } else {
            allocation.initialisation.assume();
        }
    }

    /// A name for an address that no live allocation holds `bytes` bytes at, and the class of the fault.
    #[cold]
    pub fn describe_miss(&self, address: u64, bytes: u64) -> (FaultKind, String) {
        if let Some(freed) = self.grid.memory.freed_at(address) {
            let text =
                format!("{bytes} bytes at offset {} of `{}` ({} bytes), which was freed", address - freed.start, freed.name, freed.bytes);
            return (FaultKind::UseAfterFree, text);
        }
        let live = self.grid.memory.snapshot();
        let text = match nearest(&live, address) {
            Some(a) if address - a.start < a.bytes + (1 << 20) => {
                let name = self.tensor_name(a.start).unwrap_or(&a.name);
                format!("{bytes} bytes at offset {} of `{name}`, which has {} bytes", address - a.start, a.bytes)
            }
            _ => match live.iter().find(|a| a.start > address && a.start - address <= 1 << 20) {
                Some(a) => format!("{bytes} bytes at {} bytes before `{}`", a.start - address, a.name),
                None => format!("{bytes} bytes at {address:#x}, near no allocation"),
            },
        };
        (FaultKind::OutOfBounds, text)
    }

    /// The kernel's parameter that holds an address, else its allocation.
    pub fn name_at(&self, address: u64) -> Option<String> {
        let allocation = || self.grid.memory.find(address).map(|found| found.name);
        self.tensor_name(address).map(str::to_owned).or_else(allocation)
    }

    fn tensor_name(&self, address: u64) -> Option<&str> {
        let tensors = &self.grid.launch.tensors;
        tensors.iter().find(|t| address.wrapping_sub(t.address) < t.bytes).map(|t| &*t.name)
    }

    /// "`name` at offset n" for an address inside an allocation.
    pub fn describe(&self, allocation: &Allocation, address: u64) -> String {
        let tensors = &self.grid.launch.tensors;
        match tensors.iter().find(|t| address.wrapping_sub(t.address) < t.bytes) {
            Some(t) => format!("offset {} of `{}` ({} bytes)", address - t.address, t.name, t.bytes),
            None => format!("offset {} of `{}` ({} bytes)", address - allocation.start, allocation.name, allocation.bytes),
        }
    }
}
