//! Vector clocks: which accesses of which agents happened before a point of a thread.
//!
//! An agent is a thread or a stream of asynchronous copies. Agents are numbered by (block, slot); blocks are
//! numbered through all grids of a [`Memory`](crate::Memory), so that edges between grids count. Clocks share
//! their parts: after a barrier, all threads of a block hold one and the same.

use crate::order::Space;
use std::cell::RefCell;
use std::ops::Range;
use std::sync::Arc;

/// Nothing is known where there are no parts: a clock that is not used costs nothing.
#[derive(Clone, Default)]
pub(crate) struct Clock(Option<Arc<Parts>>);

#[derive(Clone, Default)]
struct Parts {
    /// Blocks of grids that had ended: everything of them is known.
    finished: Vec<Range<u32>>,
    /// The latest known time of each slot, by block, sorted. None is of `finished`: clocks do not grow with each grid.
    blocks: Vec<(u32, Arc<Vec<u32>>)>,
}

impl Clock {
    /// A clock that knows all of these blocks.
    pub fn after(finished: &[Range<u32>]) -> Self {
        Self(Some(Arc::new(Parts { finished: finished.to_vec(), blocks: Vec::new() })))
    }

    pub fn is_empty(&self) -> bool {
        self.0.is_none()
    }

    /// Whether both are one and the same in memory.
    fn is(&self, other: &Self) -> bool {
        self.address() == other.address()
    }

    fn address(&self) -> usize {
        self.0.as_ref().map_or(0, |parts| Arc::as_ptr(parts).addr())
    }

    /// A number that clocks made one after another do not share: they take 64 bytes each.
    fn place(&self) -> usize {
        self.address() / 64
    }

    pub fn knows(&self, block: u32, slot: u32, time: u32) -> bool {
        let finished = self.0.as_ref().map_or(&[][..], |parts| &parts.finished);
        self.time(block, slot) >= time || has(finished, block)
    }

    /// The latest known time of a slot, zero if none.
    pub fn time(&self, block: u32, slot: u32) -> u32 {
        let Some(Parts { blocks, .. }) = self.0.as_deref() else { return 0 };
        let Ok(at) = blocks.binary_search_by_key(&block, |entry| entry.0) else { return 0 };
        blocks[at].1.get(slot as usize).copied().unwrap_or(0)
    }

    /// Learns of a slot's accesses up to a time.
    pub fn learn(&mut self, block: u32, slot: u32, time: u32) {
        if self.time(block, slot) >= time {
            return;
        }
        let blocks = &mut Arc::make_mut(self.0.get_or_insert_default()).blocks;
        let at = blocks.binary_search_by_key(&block, |entry| entry.0).unwrap_or_else(|at| {
            blocks.insert(at, (block, Arc::default()));
            at
        });
        let times = Arc::make_mut(&mut blocks[at].1);
        if times.len() <= slot as usize {
            times.resize(slot as usize + 1, 0);
        }
        times[slot as usize] = time;
    }

    /// Learns all that another clock knows.
    pub fn join(&mut self, other: &Self) {
        let Some(theirs) = &other.0 else { return };
        let Some(ours) = &mut self.0 else {
            *self = other.clone();
            return;
        };
        if Arc::ptr_eq(ours, theirs) {
            return;
        }
        if !covers(&ours.finished, &theirs.finished) {
            let both = [&ours.finished[..], &theirs.finished].concat();
            let ours = Arc::make_mut(ours);
            ours.finished = merged(both);
            ours.blocks.retain(|(block, _)| !has(&ours.finished, *block));
        }
        let mut at = 0;
        for (block, times) in &theirs.blocks {
            // Both are sorted, and mostly know the same blocks.
            while ours.blocks.get(at).is_some_and(|known| known.0 < *block) {
                at += 1;
            }
            join_block(ours, at, *block, times);
        }
    }
}

/// Learns the times of a block, which is at this place or is to be inserted there, unless all of it is known. Times that are all as late as the known ones are shared.
fn join_block(parts: &mut Arc<Parts>, at: usize, block: u32, theirs: &Arc<Vec<u32>>) {
    let Some((_, ours)) = parts.blocks.get(at).filter(|known| known.0 == block) else {
        if has(&parts.finished, block) {
            return;
        }
        Arc::make_mut(parts).blocks.insert(at, (block, Arc::clone(theirs)));
        return;
    };
    if Arc::ptr_eq(ours, theirs) {
        return;
    }
    let [ours_is_later, theirs_is_later] = are_later(ours, theirs);
    if !theirs_is_later {
        return;
    }
    let ours = &mut Arc::make_mut(parts).blocks[at].1;
    if !ours_is_later {
        *ours = Arc::clone(theirs);
        return;
    }
    let ours = Arc::make_mut(ours);
    if ours.len() < theirs.len() {
        ours.resize(theirs.len(), 0);
    }
    take_later(ours, theirs);
}

/// Takes what is later, with the widest vectors that the machine has: without them a greatest number takes six operations.
#[multiversion::multiversion(targets("x86_64+avx512f", "x86_64+avx2"))]
fn take_later(ours: &mut [u32], theirs: &[u32]) {
    for (our, their) in ours.iter_mut().zip(theirs) {
        *our = (*our).max(*their);
    }
}

/// Of each whether any time is later than the other's of its slot, which is 0 where there is none.
#[multiversion::multiversion(targets("x86_64+avx512f", "x86_64+avx2"))]
fn are_later(ours: &[u32], theirs: &[u32]) -> [bool; 2] {
    let both = ours.len().min(theirs.len());
    // The differences of what is less, without an early end: the loop is vectorised.
    let mut less = [0, 0];
    for (our, their) in ours.iter().zip(theirs) {
        let greatest = *our.max(their);
        less = [less[0] | (greatest ^ their), less[1] | (greatest ^ our)];
    }
    let rest = |times: &[u32]| times[both..].iter().any(|time| *time > 0);
    [less[0] != 0 || rest(ours), less[1] != 0 || rest(theirs)]
}

/// The same blocks in as few ranges as there can be: clocks that join one another again and again do not grow.
fn merged(mut ranges: Vec<Range<u32>>) -> Vec<Range<u32>> {
    ranges.sort_unstable_by_key(|range| range.start);
    let mut merged: Vec<Range<u32>> = Vec::new();
    for range in ranges {
        match merged.last_mut() {
            Some(last) if range.start <= last.end => last.end = last.end.max(range.end),
            _ => merged.push(range),
        }
    }
    merged
}

fn has(ranges: &[Range<u32>], block: u32) -> bool {
    ranges.iter().any(|range| range.contains(&block))
}

fn covers(ours: &[Range<u32>], theirs: &[Range<u32>]) -> bool {
    theirs.iter().all(|their| ours.iter().any(|our| our.start <= their.start && their.end <= our.end))
}

/// What a thread knows: through generic accesses, and past which proxy fences.
#[derive(Clone, Default)]
pub(crate) struct Knowledge {
    pub generic: Clock,
    /// What the asynchronous proxy may rely on in shared memory.
    pub async_shared: Clock,
    /// What the asynchronous proxy may rely on in global memory.
    pub async_global: Clock,
}

impl Knowledge {
    pub fn after(finished: &[Range<u32>]) -> Self {
        let clock = Clock::after(finished);
        Self { generic: clock.clone(), async_shared: clock.clone(), async_global: clock }
    }

    /// Whether both are one and the same in memory, and thus equal.
    pub fn is_shared_with(&self, other: &Self) -> bool {
        self.generic.is(&other.generic) && self.async_shared.is(&other.async_shared) && self.async_global.is(&other.async_global)
    }

    pub fn join(&mut self, other: &Self) {
        self.generic.join(&other.generic);
        self.async_shared.join(&other.async_shared);
        self.async_global.join(&other.async_global);
    }

    /// Learns of a finished asynchronous copy; its completion is also a proxy fence.
    pub fn learn_copy(&mut self, block: u32, slot: u32, time: u32) {
        self.generic.learn(block, slot, time);
        self.async_shared.learn(block, slot, time);
        self.async_global.learn(block, slot, time);
    }

    pub fn fenced(&mut self, space: Space) -> &mut Clock {
        match space {
            Space::Shared => &mut self.async_shared,
            Space::Global => &mut self.async_global,
        }
    }
}

/// What those that came to a barrier know. Mostly they know the same, and it is joined once.
#[derive(Default)]
pub(crate) struct Gathered {
    pub all: Knowledge,
    /// What was joined last.
    last: Knowledge,
}

/// Joins of the threads of a block. Mostly the threads know the same and learn the same: the last steps are kept. A step that is kept costs two comparisons of pointers, and the threads go on sharing what they know.
pub(crate) struct Alike {
    joins: RefCell<[Option<Step<Clock>>; KEPT]>,
    lessons: RefCell<[Option<Step<Lesson>>; KEPT]>,
}

impl Default for Alike {
    fn default() -> Self {
        Self { joins: RefCell::new([const { None }; KEPT]), lessons: RefCell::new([const { None }; KEPT]) }
    }
}

/// A block, a slot and a time.
type Lesson = (u32, u32, u32);

/// A clock before and after it learnt something.
struct Step<T> {
    before: Clock,
    learnt: T,
    after: Clock,
}

/// Steps kept: three clocks of the warps of a block of four warpgroups.
const KEPT: usize = 48;

impl Alike {
    /// What [`Knowledge::join`] does.
    pub fn join(&self, ours: &mut Knowledge, theirs: &Knowledge) {
        self.join_clock(&mut ours.generic, &theirs.generic);
        self.join_clock(&mut ours.async_shared, &theirs.async_shared);
        self.join_clock(&mut ours.async_global, &theirs.async_global);
    }

    fn join_clock(&self, ours: &mut Clock, theirs: &Clock) {
        if ours.is_empty() || theirs.is_empty() || ours.is(theirs) {
            return ours.join(theirs);
        }
        let kept = &mut self.joins.borrow_mut()[(ours.place() + 5 * theirs.place()) % KEPT];
        match kept {
            Some(step) if step.before.is(ours) && step.learnt.is(theirs) => *ours = step.after.clone(),
            _ => {
                let before = ours.clone();
                ours.join(theirs);
                *kept = Some(Step { before, learnt: theirs.clone(), after: ours.clone() });
            }
        }
    }

    /// What [`Knowledge::learn_copy`] does.
    pub fn learn_copy(&self, ours: &mut Knowledge, block: u32, slot: u32, time: u32) {
        let clocks = [&mut ours.generic, &mut ours.async_shared, &mut ours.async_global];
        for (clock, kind) in clocks.into_iter().zip(0..) {
            let lesson = (block, slot, time);
            let kept = &mut self.lessons.borrow_mut()[(slot as usize * 3 + kind) % KEPT];
            match kept {
                Some(step) if step.before.is(clock) && step.learnt == lesson => *clock = step.after.clone(),
                _ => {
                    let before = clock.clone();
                    clock.learn(block, slot, time);
                    *kept = Some(Step { before, learnt: lesson, after: clock.clone() });
                }
            }
        }
    }
}

/// Knowledge at a point of one agent, its own accesses included.
#[derive(Clone)]
pub(crate) struct View {
    pub knowledge: Knowledge,
    pub block: u32,
    pub slot: u32,
    pub now: u32,
}

impl View {
    /// Whether an agent's access happened before this point.
    pub fn knows(&self, block: u32, slot: u32, time: u32) -> bool {
        (block == self.block && slot == self.slot && time <= self.now) || self.knowledge.generic.knows(block, slot, time)
    }

    /// Whether it did so past a proxy fence.
    pub fn knows_fenced(&self, space: Space, block: u32, slot: u32, time: u32) -> bool {
        let clock = match space {
            Space::Shared => &self.knowledge.async_shared,
            Space::Global => &self.knowledge.async_global,
        };
        clock.knows(block, slot, time)
    }

    /// Adds all of it to a barrier's knowledge and opens a new time: later accesses are not part of it.
    pub fn release_into(&mut self, target: &mut Knowledge) {
        target.join(&self.knowledge);
        target.generic.learn(self.block, self.slot, self.now);
        self.now += 1;
    }

    /// Adds it to what a barrier gathers; knowledge that was joined last is not joined again.
    pub fn gather_into(&mut self, target: &mut Gathered) {
        if !self.knowledge.is_shared_with(&target.last) {
            target.all.join(&self.knowledge);
            target.last = self.knowledge.clone();
        }
        target.all.generic.learn(self.block, self.slot, self.now);
        self.now += 1;
    }

    /// Opens a new time; returns the one that ended.
    pub fn advance(&mut self) -> u32 {
        self.now += 1;
        self.now - 1
    }

    pub fn fence_proxy(&mut self, space: Space) {
        let generic = self.knowledge.generic.clone();
        let clock = self.knowledge.fenced(space);
        clock.join(&generic);
        clock.learn(self.block, self.slot, self.now);
        self.now += 1;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_clock_keeps_no_times_of_blocks_that_have_ended() {
        let blocks = |clock: &Clock| clock.0.as_ref().map_or(0, |parts| parts.blocks.len());
        let mut clock = Clock::default();
        (0..8).for_each(|block| clock.learn(block, 0, 3));
        let before = clock.clone();
        clock.join(&Clock::after(&[0..6, 9..10]));
        assert_eq!(blocks(&clock), 2);
        clock.join(&before);
        assert_eq!(blocks(&clock), 2, "they are known already");
        assert!((0..8).all(|block| clock.knows(block, 0, 3)) && clock.knows(5, 7, 9));
        assert!(!clock.knows(6, 0, 4) && !clock.knows(8, 0, 1));
    }
}
