//! What a [`Memory`](crate::Memory) remembers across the checked grids that use it.

use crate::clock::{Clock, Knowledge};
use crate::order::Scope;
use crate::shadow::{Record, Scopes, Shadow};
use rustc_hash::FxHashMap as HashMap;
use std::cell::Cell;
use std::ops::Range;

/// A grid's blocks, numbered through all grids of the memory.
#[derive(Clone)]
pub(crate) struct GridBlocks {
    pub blocks: Range<u32>,
    pub kernel: String,
    pub device: u32,
    pub grid: [u32; 3],
    pub block: [u32; 3],
    pub cluster: [u32; 3],
    /// It is no grid: its one block is a stream.
    pub is_stream: bool,
    /// What it knew when it started, until it has ended.
    pub start: Clock,
}

impl GridBlocks {
    pub fn block_index(&self, number: u32) -> [u32; 3] {
        crate::launch::unflatten(u64::from(number - self.blocks.start), self.grid)
    }

    fn cluster_of(&self, number: u32) -> [u32; 3] {
        let index = self.block_index(number);
        std::array::from_fn(|d| index[d] / self.cluster[d].max(1))
    }
}

/// All grids that ran checked on one memory.
#[derive(Default)]
pub(crate) struct Grids {
    all: Vec<GridBlocks>,
    /// The index of the grid that was asked for last.
    last: Cell<usize>,
}

impl Grids {
    pub fn of(&self, block: u32) -> &GridBlocks {
        if let Some(last) = self.all.get(self.last.get()).filter(|last| last.blocks.contains(&block)) {
            return last;
        }
        self.last.set(self.at(block));
        &self.all[self.last.get()]
    }

    fn at(&self, block: u32) -> usize {
        self.all.partition_point(|grid| grid.blocks.end <= block)
    }
}

impl Scopes for Grids {
    fn includes(&self, scope: Scope, a: u32, b: u32) -> bool {
        match scope {
            Scope::Block => a == b,
            Scope::Cluster => self.same_grid(a, b) && self.of(a).cluster_of(a) == self.of(a).cluster_of(b),
            Scope::Device => self.of(a).device == self.of(b).device,
            Scope::System => true,
        }
    }

    fn same_grid(&self, a: u32, b: u32) -> bool {
        self.of(a).blocks.contains(&b)
    }

    fn knew(&self, block: u32, access: &Record) -> bool {
        self.of(block).start.knows(access.block, access.slot, access.time)
    }
}

/// What blocks have released for one another, which a scope around each of them takes in.
pub(crate) struct Release {
    pub knowledge: Knowledge,
    pub scope: Scope,
    /// One of the blocks.
    block: u32,
}

/// What a write to a word and the atomics after it released, each at its own scope. A release is one at each narrower scope too: a read has its own scope.
#[derive(Default)]
pub(crate) struct Sequence(Vec<Release>);

impl Sequence {
    /// Begins a new sequence.
    pub fn clear(&mut self) {
        self.0.clear();
    }

    /// A block releases at a scope.
    pub fn release(&mut self, grids: &Grids, scope: Scope, block: u32, knowledge: &Knowledge) {
        Scope::ALL[..=scope as usize].iter().for_each(|scope| self.release_at(grids, *scope, block, knowledge));
    }

    /// A block releases at a scope, and not at narrower ones.
    pub fn release_at(&mut self, grids: &Grids, scope: Scope, block: u32, knowledge: &Knowledge) {
        match self.0.iter_mut().find(|known| known.scope == scope && grids.includes(scope, known.block, block)) {
            Some(known) => known.knowledge.join(knowledge),
            None => self.0.push(Release { knowledge: knowledge.clone(), scope, block }),
        }
    }

    /// What a read of a block sees by its scope, narrower releases of one write first.
    pub fn seen(&self, grids: &Grids, scope: Scope, block: u32) -> impl Iterator<Item = &Release> {
        self.0.iter().filter(move |known| known.scope <= scope && grids.includes(known.scope, known.block, block))
    }

    /// What was released at the scope of the system.
    pub fn of_system(&self) -> Option<&Knowledge> {
        self.0.iter().find(|known| known.scope == Scope::System).map(|known| &known.knowledge)
    }

    /// Keeps some releases. Returns whether any is left.
    fn keep(&mut self, keep: impl FnMut(&Release) -> bool) -> bool {
        self.0.retain(keep);
        !self.0.is_empty()
    }
}

/// Release sequences by address.
pub(crate) type Releases = HashMap<u64, Sequence>;

/// Shadow of global memory, and the grids.
#[derive(Default)]
pub(crate) struct History {
    pub grids: Grids,
    pub shadow: Shadow,
    pub releases: Releases,
    finished: Vec<Range<u32>>,
    running: u32,
}

impl History {
    /// A grid starts, of so many blocks.
    pub fn begin(&mut self, grid: GridBlocks, blocks: u32) -> Range<u32> {
        self.running += 1;
        self.number(grid, blocks)
    }

    /// Numbers the blocks; `grid.blocks` is set here.
    pub fn number(&mut self, mut grid: GridBlocks, blocks: u32) -> Range<u32> {
        let start = self.grids.all.last().map_or(0, |last| last.blocks.end);
        let numbers = start..start.checked_add(blocks).expect("fewer than 2^32 blocks run checked on one memory");
        grid.blocks = numbers.clone();
        self.grids.all.push(grid);
        numbers
    }

    /// What a grid that starts now knows: all of the grids that have ended.
    pub fn start(&self) -> Knowledge {
        Knowledge::after(&self.finished)
    }

    /// The grid has ended; neighbouring ranges are merged. What happened is ordered before all that comes, if
    /// no other grid is running; what flags between devices released is kept.
    pub fn finish(&mut self, blocks: Range<u32>) {
        self.running -= 1;
        let at = self.grids.at(blocks.start);
        self.grids.all[at].start = Clock::default();
        if self.running == 0 {
            self.shadow = Shadow::default();
        }
        let is_alone = self.running == 0;
        // No thread is left that reads by a scope within the grid.
        let is_read = |release: &Release| match release.scope {
            Scope::System => true,
            Scope::Device => !is_alone,
            Scope::Cluster | Scope::Block => !is_alone && !blocks.contains(&release.block),
        };
        self.releases.retain(|_, sequence| sequence.keep(is_read));
        self.finished.push(blocks);
        self.finished.sort_by_key(|range| range.start);
        self.finished.dedup_by(|next, last| {
            let adjacent = last.end >= next.start;
            if adjacent {
                last.end = last.end.max(next.end);
            }
            adjacent
        });
    }

    /// The range is freed or newly allocated.
    pub fn forget(&mut self, start: u64, bytes: u64) {
        self.shadow.forget(start, bytes);
        self.releases.retain(|address, _| !(start..start + bytes).contains(address));
    }
}
