//! A thread block in flight: its threads, their coroutines, its shared memory and barriers.

use crate::async_copy::{self, Transfer};
use crate::barrier::Barrier;
use crate::cluster::Cluster;
use crate::collective::Gathering;
use crate::copy_group;
use crate::detector::Detector;
use crate::fault::{Coordinates, Fault};
use crate::launch::{Launch, unflatten};
use crate::mbarrier::{self, Mbarrier};
use crate::memory::UNWRITTEN_WORD;
use crate::stack::PooledStack;
use crate::thread::{Thread, Waiting, set_current};
use crate::warp::Warp;
use crate::wgmma;
use crate::worker::Worker;
use corosensei::stack::Stack;
use corosensei::{Coroutine, CoroutineResult};
use std::cell::{Cell, RefCell, UnsafeCell};
use std::collections::BTreeMap;
use std::fmt::Write;
use std::ptr;
use std::rc::Rc;

type ThreadCoroutine = Coroutine<(), (), (), PooledStack>;

pub(crate) struct Block {
    worker: Rc<Worker>,
    /// Its number in the grid.
    pub number: u64,
    pub index: [u32; 3],
    pub cluster: Rc<Cluster>,
    /// Its number in the cluster.
    pub rank: u32,
    pub threads: Vec<Thread>,
    coroutines: UnsafeCell<Vec<Option<ThreadCoroutine>>>,
    pub warps: Vec<Warp>,
    shared: UnsafeCell<Vec<u64>>,
    pub barriers: RefCell<Vec<Barrier>>,
    pub mbarriers: RefCell<Vec<Mbarrier>>,
    pub gatherings: RefCell<Vec<Gathering>>,
    #[expect(clippy::vec_box, reason = "one is taken out of the middle: pointers are moved up, not transfers")]
    pub transfers: RefCell<Vec<Box<Transfer>>>,
    pub wgmma: RefCell<wgmma::InFlight>,
    alive: Cell<u32>,
    /// In check mode.
    pub detector: Option<Box<Detector>>,
}

impl Block {
    /// A block whose threads have not begun. It is shared, not boxed: its threads point back to it.
    pub fn new(worker: &Rc<Worker>, number: u64, cluster: &Rc<Cluster>, rank: u32) -> Result<Rc<Self>, Fault> {
        let launch = &worker.grid().launch;
        let count = launch.threads();
        let stacks = (0..count).map(|_| worker.take_stack()).collect::<Result<Vec<_>, _>>()?;
        Ok(Rc::new_cyclic(|this| {
            let thread = |n| Thread::new(this.as_ptr(), n, unflatten(u64::from(n), launch.block));
            let threads: Vec<Thread> = (0..count).map(thread).collect();
            let coroutines = threads.iter().zip(stacks).map(|(thread, stack)| Some(coroutine(launch, thread, stack))).collect();
            Self {
                worker: Rc::clone(worker),
                number,
                index: unflatten(number, launch.grid),
                cluster: Rc::clone(cluster),
                rank,
                threads,
                coroutines: UnsafeCell::new(coroutines),
                warps: (0..count.div_ceil(32)).map(|w| Warp::new((count - w * 32).min(32))).collect(),
                shared: UnsafeCell::new(vec![UNWRITTEN_WORD; (launch.shared_bytes as usize).div_ceil(8)]),
                barriers: RefCell::new(Vec::new()),
                mbarriers: RefCell::new(Vec::new()),
                gatherings: RefCell::new(Vec::new()),
                transfers: RefCell::new(Vec::new()),
                wgmma: RefCell::default(),
                alive: Cell::new(count),
                detector: Detector::of(worker, number),
            }
        }))
    }

    /// Unwinds the threads that have not ended. Device operations of their destructors do nothing.
    fn stop(&self) {
        for (number, thread) in self.threads.iter().enumerate() {
            // SAFETY: no coroutine runs, and the one taken out cannot reach the others.
            let coroutine = unsafe { (&mut *self.coroutines.get())[number].take() };
            thread.unwinding.set(true);
            set_current(thread);
            drop(coroutine);
        }
        set_current(ptr::null());
    }

    #[inline(always)]
    pub fn worker(&self) -> &Worker {
        &self.worker
    }

    #[inline(always)]
    pub fn shared_bytes(&self) -> u32 {
        self.worker().grid().launch.shared_bytes
    }

    /// The shared memory. Only the thread or transfer now running may use it, and not across a suspension.
    #[inline(always)]
    #[expect(clippy::mut_from_ref, reason = "one OS thread runs a block, one emulated thread at a time")]
    pub fn shared(&self) -> &mut [u8] {
        // SAFETY: a block stays on one OS thread, and no caller keeps the slice across a suspension or calls
        // another function of the block while it holds it.
        unsafe {
            let words = &mut *self.shared.get();
            std::slice::from_raw_parts_mut(words.as_mut_ptr().cast(), self.shared_bytes() as usize)
        }
    }

    #[inline(always)]
    pub fn warp(&self, thread: &Thread) -> &Warp {
        &self.warps[thread.warp_number() as usize]
    }

    pub fn make_ready(&self, thread: u32) {
        let ready = &self.warps[thread as usize / 32].ready;
        ready.set(ready.get() | 1 << (thread % 32));
    }

    pub fn is_done(&self) -> bool {
        self.alive.get() == 0
    }

    /// Runs one lane until it suspends or ends. A fault or panic of the kernel unwinds out of here.
    #[inline(always)]
    pub fn resume(&self, warp: u32, lane: u32) {
        let number = (warp * 32 + lane) as usize;
        let thread = &self.threads[number];
        // SAFETY: only this function and `new` touch the coroutines, and a coroutine cannot call it.
        let slot = unsafe { &mut (&mut *self.coroutines.get())[number] };
        let coroutine = slot.as_mut().expect("a ready lane has not ended");
        set_current(thread);
        let result = coroutine.resume(());
        set_current(ptr::null());
        if let CoroutineResult::Return(()) = result {
            let ended = slot.take().expect("it was just resumed");
            self.worker().give_stack(ended.into_stack());
            self.thread_ended(thread);
        }
    }

    pub fn has_transfers(&self) -> bool {
        !self.transfers.borrow().is_empty()
    }

    /// Every thread has ended: nothing asynchronous may be left.
    pub fn finish(&self) -> Result<(), Fault> {
        if let Some(detector) = &self.detector {
            detector.costs.borrow_mut().close(&mut self.worker().totals.borrow_mut());
            if !self.worker().grid().options.known.is_empty() {
                detector.tell(&mut self.worker().learnt.borrow_mut());
            }
        }
        async_copy::finish(self)?;
        mbarrier::check_finished(self)
    }

    fn thread_ended(&self, thread: &Thread) {
        thread.waiting.set(Waiting::Exited);
        self.alive.set(self.alive.get() - 1);
        self.warp(thread).exit(thread);
        copy_group::check_waited(thread);
        wgmma::check_waited(thread);
        self.worker().productive();
    }

    /// Which threads wait on what, one line for each group of threads that wait alike.
    pub fn describe_waiting(&self) -> String {
        let mut groups: BTreeMap<String, Vec<u32>> = BTreeMap::new();
        for thread in &self.threads {
            groups.entry(self.describe(thread)).or_default().push(thread.number);
        }
        let mut text = String::new();
        for (what, threads) in groups {
            let _ = write!(text, "\n    block {}, threads {}: {what}", Coordinates(self.index), ranges(&threads));
        }
        text
    }

    fn describe(&self, thread: &Thread) -> String {
        let what = match thread.waiting.get() {
            Waiting::Nothing => "ready".to_owned(),
            Waiting::Turn => "polls memory".to_owned(),
            Waiting::Rendezvous { mask } => self.warp(thread).describe(mask),
            Waiting::Warpgroup => "a collective of its warpgroup".to_owned(),
            Waiting::Cluster => "the barrier of its cluster".to_owned(),
            Waiting::Barrier { id } => self.barriers.borrow()[id as usize].describe(id),
            Waiting::Mbarrier { offset, parity } => self.describe_mbarrier("waits on", offset, parity),
            Waiting::Poll { offset, parity } => self.describe_mbarrier("polls", offset, parity),
            Waiting::CopyGroups { pending } => format!("cp.async groups, until {pending} are in flight"),
            Waiting::BulkGroups { pending, read_only: false } => format!("bulk groups, until {pending} are in flight"),
            Waiting::BulkGroups { pending, .. } => format!("bulk groups, until {pending} have sources to read"),
            Waiting::Sleep => "sleeps (nanosleep)".to_owned(),
            Waiting::Exited => return "have ended".to_owned(),
        };
        match thread.site.get() {
            Some(site) => format!("{what} at {site}"),
            None => what,
        }
    }
}

impl Drop for Block {
    fn drop(&mut self) {
        self.stop();
    }
}

/// The coroutine of a thread, which must stay where it is as long as the coroutine exists.
fn coroutine(launch: &Launch, thread: &Thread, stack: PooledStack) -> ThreadCoroutine {
    thread.stack_limit.set(stack.limit().get());
    let thread: *const Thread = thread;
    let body = launch.body;
    let arguments: *const [u64] = &*launch.arguments;
    Coroutine::with_stack(stack, move |yielder, ()| {
        // SAFETY: the block owns the coroutine and the threads, whose vector never grows, and through its worker
        // the grid with the arguments; it drops the coroutine first.
        let (thread, arguments) = unsafe { (&*thread, &*arguments) };
        thread.yielder.set(yielder);
        body(arguments);
    })
}

/// `0..32, 64` for a sorted list.
pub(crate) fn ranges(numbers: &[u32]) -> String {
    let mut text = String::new();
    let mut rest = numbers;
    while let Some(&first) = rest.first() {
        let length = rest.iter().enumerate().take_while(|&(i, &n)| n == first + i as u32).count();
        let separator = if text.is_empty() { "" } else { ", " };
        let _ = match length {
            1 => write!(text, "{separator}{first}"),
            _ => write!(text, "{separator}{first}..{}", first + length as u32),
        };
        rest = &rest[length..];
    }
    text
}
