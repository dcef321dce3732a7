//! One emulated CUDA thread, and which one is running.

use crate::block::{Block, ranges};
use crate::copy_group::{InFlight, Kind};
use crate::detector::{Bad, Detector};
use crate::fault::{Fault, FaultKind, Involved};
use crate::meeting::Meetings;
use crate::site::Site;
use crate::warp::same;
use crate::wgmma;
use crate::worker::Worker;
use corosensei::Yielder;
use std::cell::{Cell, RefCell};
use std::ptr;

thread_local! {
    static CURRENT: Cell<*const Thread> = const { Cell::new(ptr::null()) };
}

/// Places that a thread passes at most before others get their turn.
const LONGEST_TURN: u32 = 1024;

/// What a suspended thread waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Waiting {
    /// It was never resumed, or it was preempted.
    Nothing,
    /// It was preempted before an access that it may be polling with.
    Turn,
    /// Other lanes of its warp.
    Rendezvous {
        mask: u32,
    },
    /// The other threads of its warpgroup.
    Warpgroup,
    /// The other threads of its cluster.
    Cluster,
    Barrier {
        id: u32,
    },
    Mbarrier {
        offset: u32,
        parity: u8,
    },
    CopyGroups {
        pending: u32,
    },
    BulkGroups {
        pending: u32,
        read_only: bool,
    },
    /// It polls an mbarrier or sleeps: it can be resumed, which is no progress.
    Poll {
        offset: u32,
        parity: u8,
    },
    Sleep,
    Exited,
}

// It is passed in a register: written to memory in parts and read back whole, it took two fifths of `suspend` in a profile.
const _: () = assert!(size_of::<Waiting>() == 8);

impl Waiting {
    pub fn is_idle(self) -> bool {
        matches!(self, Self::Poll { .. } | Self::Sleep | Self::Turn)
    }
}

pub(crate) struct Thread {
    block: *const Block,
    /// Linear number in the block.
    pub number: u32,
    pub index: [u32; 3],
    pub yielder: Cell<*const Yielder<(), ()>>,
    pub waiting: Cell<Waiting>,
    /// Where it waits.
    pub site: Cell<Option<Site>>,
    /// Lowest address of its stack, where the guard page lies.
    pub stack_limit: Cell<usize>,
    /// The global address of its last strong read; no address is 0.
    pub polled: Cell<u64>,
    /// Fast mode: its strong loads and atomics since it last let others run.
    pub strong: Cell<u32>,
    /// How many places it has passed at which it may stop.
    pub places: Cell<u32>,
    /// The asynchronous copies that it issued.
    pub copies: Cell<u32>,
    /// Committed groups of `cp.async`, and of bulk copies.
    pub copy_groups: Cell<u32>,
    pub bulk_groups: Cell<u32>,
    /// Its copies in groups that are not done, of each kind.
    in_flight: [RefCell<InFlight>; 2],
    /// When its warp last met.
    pub meetings: Meetings,
    /// Its matrix instructions.
    pub wgmma: wgmma::Stream,
    /// The run has ended, and only destructors of this thread run.
    pub unwinding: Cell<bool>,
}

/// Payload of the unwinding that ends a run; the fault lies in the worker.
pub(crate) struct Stopped;

impl Thread {
    /// Its copies in groups of a kind that are not done.
    pub fn in_flight(&self, kind: Kind) -> &RefCell<InFlight> {
        match kind {
            Kind::Copy => &self.in_flight[0],
            Kind::Bulk => &self.in_flight[1],
        }
    }

    pub fn new(block: *const Block, number: u32, index: [u32; 3]) -> Self {
        Self {
            block,
            number,
            index,
            yielder: Cell::new(ptr::null()),
            waiting: Cell::new(Waiting::Nothing),
            site: Cell::new(None),
            stack_limit: Cell::new(0),
            polled: Cell::new(0),
            strong: Cell::new(0),
            places: Cell::new(0),
            copies: Cell::new(0),
            copy_groups: Cell::new(0),
            bulk_groups: Cell::new(0),
            in_flight: Default::default(),
            meetings: Meetings::default(),
            wgmma: wgmma::Stream::default(),
            unwinding: Cell::new(false),
        }
    }

    #[inline(always)]
    pub fn lane(&self) -> u32 {
        self.number % 32
    }

    #[inline(always)]
    pub fn warp_number(&self) -> u32 {
        self.number / 32
    }

    #[inline(always)]
    pub fn block(&self) -> &Block {
        // SAFETY: a block owns its threads, and an `Rc` holds it at this address from `Block::new` on.
        unsafe { &*self.block }
    }

    #[inline(always)]
    pub fn worker(&self) -> &Worker {
        self.block().worker()
    }

    /// The detector, in check mode.
    #[inline(always)]
    pub fn detector(&self) -> Option<&Detector> {
        self.block().detector.as_deref()
    }

    /// Gives control back to the scheduler.
    pub fn suspend(&self, waiting: Waiting, site: Site) {
        self.waiting.set(waiting);
        self.site.set(Some(site));
        self.strong.set(0);
        self.places.set(self.places.get().wrapping_add(1));
        // SAFETY: the thread's coroutine stored its yielder before any kernel code ran, and it lives on that
        // coroutine's stack, which is the one running.
        unsafe { (*self.yielder.get()).suspend(()) };
        self.waiting.set(Waiting::Nothing);
    }

    /// Lets other threads run, stays ready itself.
    pub fn give_way(&self, waiting: Waiting, site: Site) {
        self.block().make_ready(self.number);
        self.suspend(waiting, site);
    }

    /// Check mode: whether the thread stops here, before an operation: once in so many times by the seed, else where its turn ends. One that nothing else stops lets
    /// the others run where it polls, and after many operations, for it may poll by plain ones.
    pub fn turn_ends(&self, once_in: usize, polls: bool) -> bool {
        let (worker, here) = (self.worker(), self.places.get().wrapping_add(1));
        let ends = match worker.turn_end.get() {
            None => worker.random.once_in(once_in),
            Some(u32::MAX) => polls || here.is_multiple_of(LONGEST_TURN),
            Some(end) => here == end,
        };
        if !ends {
            self.places.set(here);
        }
        ends
    }

    #[cold]
    pub fn fault(&self, kind: FaultKind, site: Site, message: String, mend: &'static str) -> Fault {
        Fault {
            kind,
            kernel: self.worker().grid().launch.kernel.clone(),
            thread: Some((self.block().index, self.index)),
            message,
            involved: vec![Involved { location: site, action: String::new() }],
            mend,
        }
    }

    /// Ends the run.
    #[cold]
    pub fn fail(&self, kind: FaultKind, site: Site, message: String, mend: &'static str) -> ! {
        self.stop(self.fault(kind, site, message, mend))
    }

    /// Ends the run if an access was bad.
    pub fn judge(&self, result: Result<(), Bad>, site: Site) {
        if let Err(bad) = result
            && !self.worker().grid().options.is_pardoned()
        {
            let mut fault: Fault = self.fault(bad.0, site, bad.1, bad.3);
            fault.involved = bad.2;
            if matches!(fault.kind, FaultKind::Race | FaultKind::Uninitialised) {
                fault.message.push_str(&self.missed_barrier());
            }
            self.stop(fault)
        }
    }

    /// The block barrier at which others wait and to which this thread has not come: it may go around it.
    #[cold]
    fn missed_barrier(&self) -> String {
        let threads = &self.block().threads;
        let at_barrier = |thread: &&Self| matches!(thread.waiting.get(), Waiting::Barrier { .. });
        let Some(site) = threads.iter().find(at_barrier).and_then(|thread| thread.site.get()) else { return String::new() };
        let there = threads.iter().filter(at_barrier).filter(|thread| same(thread.site.get(), site));
        let numbers: Vec<u32> = there.map(|thread| thread.number).collect();
        let (verb, threads) = if numbers.len() == 1 { ("waits", "thread") } else { ("wait", "threads") };
        format!("; {threads} {} {verb} at the barrier at {site}, to which this thread has not come", ranges(&numbers))
    }

    #[cold]
    pub fn stop(&self, fault: Fault) -> ! {
        self.worker().set_fault(fault);
        self.unwinding.set(true);
        std::panic::resume_unwind(Box::new(Stopped))
    }
}

/// The thread now running.
#[inline(always)]
#[track_caller]
pub(crate) fn current<'a>() -> &'a Thread {
    let thread = CURRENT.get();
    if thread.is_null() {
        outside();
    }
    // SAFETY: `resume` of the block set it to a thread of a block that lives as long as its coroutine runs,
    // and the caller is that coroutine.
    unsafe { &*thread }
}

/// The thread now running, unless it is being unwound. To raise a fault or to suspend would abort the process then, so
/// that operations of destructors must do nothing.
#[inline(always)]
#[track_caller]
pub(crate) fn acting<'a>() -> Option<&'a Thread> {
    let thread = current();
    (!thread.unwinding.get()).then_some(thread)
}

/// The thread now running, if any.
pub(crate) fn running<'a>() -> Option<&'a Thread> {
    // SAFETY: as in `current`.
    unsafe { CURRENT.get().as_ref() }
}

#[inline(always)]
pub(crate) fn set_current(thread: *const Thread) {
    CURRENT.set(thread);
}

#[cold]
#[track_caller]
fn outside() -> ! {
    panic!("a device operation was called outside a kernel; kernels run under oxtile_emulator::GridRun")
}
