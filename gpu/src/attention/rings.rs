//! Shared memory of the forward kernels on `wgmma`: the queries of a tile, rings of keys and values, what waits to be stored.
//!
//! | barrier | between |
//! |---|---|
//! | `queries` | the tile's number and queries are there; all warpgroups are done with them |
//! | `keys`, `values` | a stage is full; all warpgroups have multiplied by it |

use oxtile_tile::arch::{Columns, MatrixColumns};
use oxtile_tile::layout::Swizzle128;
use oxtile_tile::num::Pod;
use oxtile_tile::pipeline::{Consumer, Pipeline, Producer};
use oxtile_tile::prelude::*;
use oxtile_tile::register_tile::RegisterElement;
use oxtile_tile::shared::SharedStorage;
use oxtile_tile::tensor_map::TensorMap;

use super::walk::Block;
use super::warpgroup_roles::{Part, WARPGROUP_QUERIES, WarpgroupRoles};

/// The memory of a block; `STAGING` is where results wait, `WORDS` where a tile's number is handed over.
#[derive(SharedStorage)]
pub struct Rings<T: Pod, const D: usize, const V: usize, const KEYS: usize, G: WarpgroupRoles, STAGING: SharedStorage, WORDS: SharedStorage>
{
    queries: Pipeline<G::Parts<Part<T, D>>, 1>,
    keys: Pipeline<Block<T, KEYS, D>, 2>,
    values: Pipeline<Block<T, KEYS, V>, 2>,
    /// Where the result waits.
    pub staging: STAGING,
    /// Which tile the queries are of; it comes and goes with them.
    pub tile: WORDS,
}

/// The filling sides. One thread holds them.
pub struct Producers<T: Pod, const D: usize, const V: usize, const KEYS: usize, G: WarpgroupRoles> {
    queries: Producer<G::Parts<Part<T, D>>, 1>,
    keys: Producer<Block<T, KEYS, D>, 2>,
    values: Producer<Block<T, KEYS, V>, 2>,
}

/// The draining sides. Every lane of every warp that multiplies holds them.
pub struct Consumers<T: Pod, const D: usize, const V: usize, const KEYS: usize, G: WarpgroupRoles> {
    /// Of the queries.
    pub queries: Consumer<G::Parts<Part<T, D>>, 1>,
    /// Of the keys.
    pub keys: Consumer<Block<T, KEYS, D>, 2>,
    /// Of the values.
    pub values: Consumer<Block<T, KEYS, V>, 2>,
}

impl<T, const D: usize, const V: usize, const KEYS: usize, G, STAGING, WORDS> Rings<T, D, V, KEYS, G, STAGING, WORDS>
where
    T: RegisterElement,
    G: WarpgroupRoles,
    STAGING: SharedStorage,
    WORDS: SharedStorage,
{
    /// The block's, ready for use. All threads call it.
    #[inline(always)]
    pub fn begin() -> Self {
        let rings = Self::claim();
        if thread::index() == 0 {
            rings.queries.init(G::CONSUMER_WARPS);
            rings.keys.init(G::CONSUMER_WARPS);
            rings.values.init(G::CONSUMER_WARPS);
        }
        block::sync();
        rings
    }

    /// The filling sides.
    #[inline(always)]
    pub fn producers(&self) -> Producers<T, D, V, KEYS, G> {
        Producers { queries: self.queries.producer(), keys: self.keys.producer(), values: self.values.producer() }
    }

    /// The draining sides.
    #[inline(always)]
    pub fn consumers(&self) -> Consumers<T, D, V, KEYS, G> {
        Consumers { queries: self.queries.consumer(), keys: self.keys.consumer(), values: self.values.consumer() }
    }
}

impl<T, const D: usize, const V: usize, const KEYS: usize, G> Producers<T, D, V, KEYS, G>
where
    T: RegisterElement,
    G: WarpgroupRoles,
    Columns<D>: MatrixColumns,
{
    /// Starts to copy a tile's queries, each part from its place, once those before are done with; `write` says beside them whose they are.
    #[inline(always)]
    pub fn load_queries<const RANK: usize>(
        &mut self,
        q: &TensorMap<T, WARPGROUP_QUERIES, D, Swizzle128, RANK>,
        write: impl FnOnce(),
        place: impl Fn(u32) -> [u32; RANK],
    ) {
        let (stage, full) = self.queries.acquire_with(G::PARTS * Part::<T, D>::SIZE, |_| write());
        for part in 0..G::PARTS {
            q.load(G::part(stage, part), place(part), full);
        }
    }

    /// Starts to copy a block of keys and its values.
    #[inline(always)]
    pub fn load_block<const RANK: usize>(
        &mut self,
        k: &TensorMap<T, KEYS, D, Swizzle128, RANK>,
        v: &TensorMap<T, KEYS, V, Swizzle128, RANK>,
        place: [u32; RANK],
    ) {
        let (stage, full) = self.keys.acquire(Block::<T, KEYS, D>::SIZE);
        k.load(stage, place, full);
        let (stage, full) = self.values.acquire(Block::<T, KEYS, V>::SIZE);
        v.load(stage, place, full);
    }

    /// Says, by `write`, that there are no more tiles.
    #[inline(always)]
    pub fn end(&mut self, write: impl FnOnce()) {
        self.queries.acquire_with(0, |_| write());
    }
}
