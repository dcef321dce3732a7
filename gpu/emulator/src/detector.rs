//! The race and initialisation detectors of one block in check mode.

use crate::clock::{Alike, Gathered, Knowledge, View};
use crate::cost::Costs;
use crate::fault::{Coordinates, FaultKind, Involved};
use crate::history::{Grids, Releases};
use crate::initialisation::bit_ranges;
use crate::launch::unflatten;
use crate::memory::{Allocation, Memory};
use crate::order::{Scope, Space};
use crate::shadow::{Access, Conflict, Manner, Record, Scopes, Shadow};
use crate::site::Site;
use crate::worker::Worker;
use std::cell::{Cell, RefCell};

/// A thread's asynchronous copies of one kind, in the order of issue.
#[derive(Default)]
pub(crate) struct Stream {
    /// Slots of its source reads and destination writes.
    pub slots: Option<[u32; 2]>,
    pub issued: u32,
    /// Copies issued before each commit.
    pub commits: Vec<u32>,
    /// Where the last was issued.
    pub site: Option<Site>,
    /// Copies whose completion was waited for: source reads, and all.
    pub waited: [u32; 2],
    /// Copies whose completion an mbarrier observes.
    pub handed: u32,
}

/// What the detector knows of one thread.
pub(crate) struct ThreadState {
    pub view: View,
    /// Learnt by relaxed reads, to be acquired by a fence: by the least scope that it must have.
    acquirable: [Knowledge; Scope::ALL.len()],
    /// What fences made releasable by relaxed writes, by scope: what a wide fence releases is releasable at narrower scopes too.
    releasable: [Option<Knowledge>; Scope::ALL.len()],
    pub copies: Stream,
    pub bulk: Stream,
}

/// Shadow of the shared memory.
struct Shared {
    shadow: Shadow,
    initialised: Vec<u64>,
    releases: Releases,
}

pub(crate) struct Detector {
    /// Number of the block among all checked blocks of the memory.
    pub block: u32,
    threads: Vec<RefCell<ThreadState>>,
    shared: RefCell<Shared>,
    slots: Cell<u32>,
    pub alike: Alike,
    pub costs: RefCell<Costs>,
}

/// The fault of an access, without thread coordinates.
pub(crate) type Bad = Box<(FaultKind, String, Vec<Involved>, &'static str)>;

impl Detector {
    /// That of a block, in check mode.
    pub fn of(worker: &Worker, block: u64) -> Option<Box<Self>> {
        let (blocks, start) = worker.history()?;
        let launch = &worker.grid().launch;
        Some(Box::new(Self::new(blocks.start + block as u32, launch.threads(), launch.shared_bytes, start)))
    }

    fn new(block: u32, threads: u32, shared_bytes: u32, start: &Knowledge) -> Self {
        let state = |slot| ThreadState {
            view: View { knowledge: start.clone(), block, slot, now: 1 },
            acquirable: Default::default(),
            releasable: Default::default(),
            copies: Stream::default(),
            bulk: Stream::default(),
        };
        let shared =
            Shared { shadow: Shadow::default(), initialised: vec![0; (shared_bytes as usize).div_ceil(64)], releases: Releases::default() };
        Self {
            block,
            threads: (0..threads).map(|slot| RefCell::new(state(slot))).collect(),
            shared: RefCell::new(shared),
            slots: Cell::new(threads),
            alike: Alike::default(),
            costs: RefCell::new(Costs::default()),
        }
    }

    /// Adds what all threads know.
    pub fn tell(&self, learnt: &mut Knowledge) {
        self.threads.iter().for_each(|thread| learnt.join(&thread.borrow().view.knowledge));
    }

    /// A new agent of this block.
    pub fn slot(&self) -> u32 {
        self.slots(1)
    }

    /// The first of so many new agents.
    pub fn slots(&self, count: u32) -> u32 {
        self.slots.replace(self.slots.get() + count)
    }

    pub fn thread(&self, number: u32) -> &RefCell<ThreadState> {
        &self.threads[number as usize]
    }

    /// Adds what a thread knows to a barrier's knowledge; its later accesses are not part of it.
    pub fn release(&self, thread: u32, target: &mut Gathered) {
        self.thread(thread).borrow_mut().view.gather_into(target);
    }

    /// Replaces what a thread knows by knowledge that its own is part of.
    pub fn adopt(&self, thread: u32, source: &Knowledge) {
        self.thread(thread).borrow_mut().view.knowledge = source.clone();
    }

    /// Orders these threads' accesses among each other.
    pub fn meet(&self, threads: impl Iterator<Item = u32> + Clone) {
        let mut gathered = Gathered::default();
        threads.clone().for_each(|thread| self.release(thread, &mut gathered));
        threads.for_each(|thread| self.adopt(thread, &gathered.all));
    }

    fn record(&self, thread: u32, view: &View, access: &Access) -> Record {
        Record {
            block: self.block,
            slot: view.slot,
            time: view.now,
            thread: thread as u16,
            manner: access.manner,
            writes: access.writes,
            site: access.site,
        }
    }

    /// A thread's access to shared memory.
    pub fn shared_access(&self, worker: &Worker, thread: u32, access: &Access) -> Result<(), Bad> {
        let state = self.thread(thread).borrow();
        let record = self.record(thread, &state.view, access);
        self.enter_shared(worker, access, &record, &state.view)
    }

    /// A thread's access to the shared memory of another block of its cluster, whose detector is `theirs`.
    pub fn cluster_access(&self, worker: &Worker, thread: u32, theirs: &Self, access: &Access) -> Result<(), Bad> {
        let state = self.thread(thread).borrow();
        let record = self.record(thread, &state.view, access);
        theirs.enter_shared(worker, access, &record, &state.view)?;
        // A plain write ends what was released there.
        theirs.shared.borrow_mut().releases.remove(&access.address);
        Ok(())
    }

    /// An access to shared memory by any agent of the block.
    pub fn enter_shared(&self, worker: &Worker, access: &Access, record: &Record, view: &View) -> Result<(), Bad> {
        self.enter_shared_by(worker, access, record, std::slice::from_ref(view))
    }

    /// An access to shared memory by several agents, with a view of each.
    pub fn enter_shared_by(&self, worker: &Worker, access: &Access, record: &Record, views: &[View]) -> Result<(), Bad> {
        let mut shared = self.shared.borrow_mut();
        let missing = bit_ranges(access.address, access.bytes).find_map(|(word, mask)| {
            let missing = mask & !shared.initialised[word];
            (missing != 0).then(|| word as u64 * 64 + u64::from(missing.trailing_zeros()))
        });
        if let (true, Some(at)) = (access.reads, missing) {
            let place = worker.shared.place(access.address as u32, 1);
            let unwritten = if at == access.address { ", which".to_owned() } else { format!("; {}", worker.shared.place(at as u32, 1)) };
            let message = format!("a read of {} bytes at {place}{unwritten} was never written", access.bytes);
            let mend = "write it first, and let a barrier stand between the write and the read";
            return Err(Box::new((FaultKind::Uninitialised, message, at_site(access.site), mend)));
        }
        let history = worker.memory().history();
        let entered = shared.shadow.access(Space::Shared, access.address, access.bytes, record, views, &history.grids);
        if let Err((conflict, other, at)) = entered {
            let place = worker.shared.place(at as u32, 1);
            return Err(describe(&history.grids, conflict, record, &other, &place, Space::Shared));
        }
        if access.writes {
            for (word, mask) in bit_ranges(access.address, access.bytes) {
                shared.initialised[word] |= mask;
            }
        }
        Ok(())
    }

    /// A thread's access to global memory.
    pub fn global_access(&self, worker: &Worker, thread: u32, allocation: &Allocation, access: &Access) -> Result<(), Bad> {
        let state = self.thread(thread).borrow();
        let record = self.record(thread, &state.view, access);
        self.enter_global(worker, allocation, access, &record, &state.view)
    }

    /// An access to global memory by any agent of the block.
    pub fn enter_global(&self, worker: &Worker, allocation: &Allocation, access: &Access, record: &Record, view: &View) -> Result<(), Bad> {
        let offset = access.address - allocation.start;
        if let (true, Some(at)) = (access.reads, allocation.initialisation.first_missing(offset, access.bytes)) {
            let place = worker.describe(allocation, access.address);
            let message = format!("a read of {} bytes at {place}; byte {at} of it was never written", access.bytes);
            let mend = "fill the tensor before the launch, or let the kernel write it first";
            return Err(Box::new((FaultKind::Uninitialised, message, at_site(access.site), mend)));
        }
        let mut history = worker.memory().history();
        let history = &mut *history;
        let views = std::slice::from_ref(view);
        let entered = history.shadow.access(Space::Global, access.address, access.bytes, record, views, &history.grids);
        entered.map_err(|(conflict, other, at)| {
            let place = worker.describe(allocation, at);
            describe(&history.grids, conflict, record, &other, &place, Space::Global)
        })
    }

    /// A strong read: acquires what the release sequence that it reads from published, now or at a later fence.
    pub fn observe(&self, memory: &Memory, thread: u32, (space, address): (Space, u64), scope: Scope, acquire: bool) {
        let mut history = memory.history();
        let mut shared = self.shared.borrow_mut();
        let history = &mut *history;
        let releases = if space == Space::Shared { &mut shared.releases } else { &mut history.releases };
        let Some(sequence) = releases.get(&address) else { return };
        let mut state = self.thread(thread).borrow_mut();
        let mut last = None;
        for release in sequence.seen(&history.grids, scope, self.block) {
            let target = if acquire { &mut state.view.knowledge } else { &mut state.acquirable[release.scope as usize] };
            // One write released the same at several scopes.
            if !last.replace(&release.knowledge).is_some_and(|last| last.is_shared_with(&release.knowledge)) {
                target.join(&release.knowledge);
            }
        }
    }

    /// A write: publishes knowledge if it releases, now or through an earlier fence. A read-modify-write
    /// continues the release sequence of the write before it; any other write ends that.
    pub fn publish(
        &self,
        memory: &Memory,
        thread: u32,
        (space, address): (Space, u64),
        scope: Option<Scope>,
        release: bool,
        modifies: bool,
    ) {
        let mut history = memory.history();
        let mut shared = self.shared.borrow_mut();
        let history = &mut *history;
        let releases = if space == Space::Shared { &mut shared.releases } else { &mut history.releases };
        let mut state = self.thread(thread).borrow_mut();
        let fenced = state.releasable.iter().any(Option::is_some);
        let Some(scope) = scope.filter(|_| release || fenced) else {
            if !modifies {
                releases.remove(&address);
            }
            return;
        };
        let sequence = releases.entry(address).or_default();
        if !modifies {
            sequence.clear();
        }
        if release {
            let mut knowledge = Knowledge::default();
            state.view.release_into(&mut knowledge);
            sequence.release(&history.grids, scope, self.block, &knowledge);
            return;
        }
        for (scope, knowledge) in Scope::ALL.into_iter().zip(&state.releasable[..=scope as usize]) {
            if let Some(knowledge) = knowledge {
                sequence.release_at(&history.grids, scope, self.block, knowledge);
            }
        }
    }

    /// `fence.acq_rel`: what relaxed reads saw of blocks in its scope is acquired, what follows by relaxed writes is released.
    pub fn fence(&self, thread: u32, scope: Scope) {
        let mut state = self.thread(thread).borrow_mut();
        let state = &mut *state;
        for learnt in &mut state.acquirable[..=scope as usize] {
            state.view.knowledge.join(&std::mem::take(learnt));
        }
        let mut knowledge = Knowledge::default();
        state.view.release_into(&mut knowledge);
        state.releasable[..=scope as usize].fill(Some(knowledge));
    }
}

fn at_site(location: Site) -> Vec<Involved> {
    vec![Involved { location, action: String::new() }]
}

fn describe(grids: &Grids, conflict: Conflict, new: &Record, old: &Record, place: &str, space: Space) -> Bad {
    let by_stream = grids.of(old.block).is_stream;
    let (kind, message, mend) = match (conflict, space) {
        (Conflict::ReadOnlyWritten, _) if !grids.same_grid(new.block, old.block) => (
            FaultKind::Race,
            format!("{place} is loaded as read-only (ld.global.nc) and was written while the kernel was under way"),
            "take it as a GlobalMut, or by a bulk copy: the flag that was waited for does not order read-only loads",
        ),
        (Conflict::Unordered, _) if by_stream => (
            FaultKind::Race,
            format!("an access to {place}, which a stream writes, and nothing orders the two"),
            "let the thread wait for the flag that the stream sets after it (Arrivals::wait), or the kernel's stream for the other one",
        ),
        (Conflict::Unfenced, _) if by_stream => (
            FaultKind::MissingProxyFence,
            format!("an asynchronous copy meets a stream's write to {place} with no proxy fence between the flag and the copy"),
            "let the thread that waited for the flag call fence_proxy_async_global before it issues the copy",
        ),
        (Conflict::Unordered, _) => (
            FaultKind::Race,
            format!("two accesses to {place} are not ordered, and one is a write"),
            "put a barrier, an mbarrier wait or a release-acquire pair of wide enough scope between them; wait for a copy before using its bytes",
        ),
        (Conflict::Unfenced, Space::Shared) => (
            FaultKind::MissingProxyFence,
            format!("an asynchronous copy meets a generic write to {place} with no proxy fence between them"),
            "let the writing threads call fence_proxy_async(Shared) before the barrier that precedes the copy",
        ),
        (Conflict::Unfenced, Space::Global) => (
            FaultKind::MissingProxyFence,
            format!("an asynchronous copy meets a generic write to {place} with no proxy fence between them"),
            "let the writing threads call fence_proxy_async(Global) before they signal",
        ),
        (Conflict::ReadOnlyWritten, _) => (
            FaultKind::Race,
            format!("{place} is loaded as read-only (ld.global.nc) and written by the same grid"),
            "load it with ReadOrder::Weak, or write another buffer",
        ),
    };
    let involved = [new, old].map(|record| Involved { location: record.site, action: access_by(grids, record, new.block) });
    Box::new((kind, message, involved.into(), mend))
}

fn access_by(grids: &Grids, record: &Record, home: u32) -> String {
    let grid = grids.of(record.block);
    let verb = match (record.manner, record.writes) {
        (Manner::Strong(_), true) => "strong write",
        (Manner::Strong(_), false) => "strong read",
        (Manner::Async | Manner::Reduce | Manner::Operand, true) => "asynchronous write",
        (Manner::Async | Manner::Reduce | Manner::Operand, false) => "asynchronous read",
        (_, true) => "write",
        (_, false) => "read",
    };
    let threads = grid.block.iter().product::<u32>();
    let copy = if record.slot >= threads { " by a copy issued" } else { "" };
    if grid.is_stream {
        return format!("{verb} by {} of device {}", grid.kernel, grid.device);
    }
    let thread = unflatten(u64::from(record.thread), grid.block);
    let mut text = format!("{verb}{copy} by thread {}", Coordinates(thread));
    // Of one block, the report's second line has it.
    if grid.blocks.len() > 1 {
        text += &format!(" of block {}", Coordinates(grid.block_index(record.block)));
    }
    if !grids.same_grid(record.block, home) {
        text += &format!(" of kernel `{}` on device {}", grid.kernel, grid.device);
    }
    text
}
