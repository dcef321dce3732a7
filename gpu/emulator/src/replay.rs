//! The turns of a run with a schedule: which comes next, and what is noted of it.

use crate::async_copy;
use crate::block::Block;
use crate::schedule::{Actor, Schedule, Turn};
use crate::site::Site;
use crate::story::Story;
use crate::thread::{Thread, Waiting};
use crate::warp::lanes;
use std::cell::{Cell, RefCell};
use std::rc::Rc;

/// What goes on next, by the place of its block among those in flight.
#[derive(Clone, Copy)]
pub(crate) enum Next {
    /// A thread by its number, until it has passed so many places.
    Thread(usize, u32, u32),
    /// A copy, by its place in the block's queue.
    Copy(usize, usize),
}

/// Where the thread or copy of a given turn is.
enum Standing {
    /// It is so far already, or has ended.
    Over,
    Ready(Next),
    Waits,
}

/// A run by a schedule.
pub(crate) struct Replay {
    schedule: Schedule,
    /// The given turn that is next.
    next: Cell<usize>,
    /// Whether what goes on now was given.
    is_given: Cell<bool>,
    /// Whether the thread of the given turn polled: another comes first.
    polled: Cell<bool>,
    /// The thread that polled last, by block and number.
    last_poll: Cell<(u64, u32)>,
    /// The thread under way.
    running: Cell<Option<(u64, u32)>>,
    story: Option<RefCell<Story>>,
}

impl Replay {
    pub fn new(schedule: &Schedule) -> Self {
        Self {
            schedule: schedule.clone(),
            next: Cell::new(0),
            is_given: Cell::new(false),
            polled: Cell::new(false),
            last_poll: Cell::new((0, 0)),
            running: Cell::new(None),
            story: schedule.about().map(|_| RefCell::default()),
        }
    }

    /// Whether turns are given: the seed chooses nothing.
    pub fn is_given(&self) -> bool {
        self.schedule.turns_given().is_some()
    }

    /// What goes on next; `started` blocks have begun. None if nothing can.
    pub fn choose(&self, blocks: &[Rc<Block>], started: u64) -> Option<Next> {
        let head = self.head(blocks, started);
        let polled = self.polled.replace(false);
        if let Some(next) = head.filter(|_| !polled) {
            self.is_given.set(true);
            return Some(next);
        }
        let other = self.default(blocks);
        // The thread of the given turn polls, and no other can go on.
        let is_head = matches!((head, other), (Some(Next::Thread(a, n, _)), Some(Next::Thread(b, m, _))) if (a, n) == (b, m));
        self.is_given.set(is_head || other.is_none());
        if is_head { head } else { other.or(head) }
    }

    /// The given turn that is next, if what it names can go on.
    fn head(&self, blocks: &[Rc<Block>], started: u64) -> Option<Next> {
        let given = self.schedule.turns_given()?;
        while let Some(turn) = given.get(self.next.get()) {
            match standing(turn, blocks, started) {
                Standing::Over => {
                    self.next.set(self.next.get() + 1);
                    self.polled.set(false);
                }
                Standing::Ready(next) => return Some(next),
                Standing::Waits => return None,
            }
        }
        None
    }

    fn default(&self, blocks: &[Rc<Block>]) -> Option<Next> {
        let lowest = |wanted: &dyn Fn(&Thread) -> bool| {
            let first = |(at, block): (usize, &Rc<Block>)| {
                ready(block).find(|thread| wanted(thread)).map(|thread| (block.number, thread.number, at))
            };
            blocks.iter().enumerate().filter_map(first).min()
        };
        let thread = |(_, number, at)| Next::Thread(at, number, u32::MAX);
        if let Some(busy) = lowest(&|thread| !thread.waiting.get().is_idle()) {
            return Some(thread(busy));
        }
        let copying = (0..blocks.len()).filter(|&at| blocks[at].has_transfers()).min_by_key(|&at| blocks[at].number);
        if let Some(at) = copying {
            return Some(Next::Copy(at, async_copy::chosen(&blocks[at], 0).0));
        }
        let last = self.last_poll.get();
        let polling = lowest(&|thread| (thread.block().number, thread.number) > last).or_else(|| lowest(&|_| true))?;
        self.last_poll.set((polling.0, polling.1));
        Some(thread(polling))
    }

    /// A thread's turn begins.
    pub fn begin(&self, block: &Block, thread: &Thread) {
        self.running.set(Some((block.number, thread.number)));
        self.schedule.begin(Turn { block: block.number, actor: Actor::Thread(thread.number), until: u32::MAX });
    }

    /// It is over.
    pub fn end(&self, block: &Block, thread: &Thread) {
        self.running.set(None);
        // One that ended stopped nowhere.
        let beyond = u32::from(thread.waiting.get() == Waiting::Exited);
        self.schedule.end(thread.places.get().wrapping_add(beyond));
        self.polled.set(self.is_given.get() && thread.waiting.get().is_idle());
        self.tell(block, thread, false);
    }

    /// A copy takes a stage.
    pub fn copy(&self, block: &Block, turn: &Turn, site: Site) {
        self.schedule.begin(*turn);
        if let Some(story) = &self.story {
            story.borrow_mut().copy(&self.schedule, block, turn, site, self.is_given.get());
        }
    }

    /// The run has ended, one way or the other. A thread that was stopped goes on, when the turn is repeated, to where it stopped.
    pub fn finish(&self, blocks: &[Rc<Block>]) {
        if let Some((block, thread)) = self.running.take()
            && let Some(block) = blocks.iter().find(|other| other.number == block)
        {
            let thread = &block.threads[thread as usize];
            self.schedule.end(thread.places.get().wrapping_add(1));
            self.tell(block, thread, true);
        }
        if let Some(story) = &self.story {
            story.borrow_mut().flush(&self.schedule);
        }
    }

    fn tell(&self, block: &Block, thread: &Thread, is_last: bool) {
        if let Some(story) = &self.story {
            story.borrow_mut().thread(&self.schedule, block, thread, self.is_given.get(), is_last);
        }
    }
}

/// The threads of a block that can be resumed, lowest first.
fn ready(block: &Block) -> impl Iterator<Item = &Thread> {
    let of_warp = |(number, warp): (usize, &crate::warp::Warp)| lanes(warp.ready.get()).map(move |lane| number * 32 + lane);
    block.warps.iter().enumerate().flat_map(of_warp).map(|number| &block.threads[number])
}

fn standing(turn: &Turn, blocks: &[Rc<Block>], started: u64) -> Standing {
    let Some(at) = blocks.iter().position(|block| block.number == turn.block) else {
        return if turn.block < started { Standing::Over } else { Standing::Waits };
    };
    let block = &blocks[at];
    match turn.actor {
        Actor::Thread(number) => {
            let Some(thread) = block.threads.get(number as usize) else { return Standing::Over };
            let is_ready = block.warp(thread).ready.get() >> thread.lane() & 1 != 0;
            let is_over = thread.places.get() >= turn.until || block.warp(thread).alive.get() >> thread.lane() & 1 == 0;
            match (is_over, is_ready) {
                (true, _) => Standing::Over,
                (_, true) => Standing::Ready(Next::Thread(at, number, turn.until)),
                _ => Standing::Waits,
            }
        }
        Actor::Copy { thread, number } => match async_copy::find(block, thread, number) {
            Some((place, stage)) if stage < turn.until => Standing::Ready(Next::Copy(at, place)),
            Some(_) => Standing::Over,
            None if block.threads.get(thread as usize).is_none_or(|thread| thread.copies.get() > number) => Standing::Over,
            None => Standing::Waits,
        },
    }
}
