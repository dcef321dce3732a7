//! Attention, backward: the gradients of queries, keys and values.
//!
//! A block stays on its multiprocessor and takes 128 keys of one head after another. Their keys and values rest in shared
//! memory while one warp copies two stages of queries, gradients of the result, and two statistics a query, block by block,
//! for each head of queries that shares the keys. Two warpgroups hold 64 keys each, and compute everything transposed, so
//! that weights come out as the tensor cores take them in; for each block of queries
//!
//! 1. scores `S = K Q'` and the gradients of weights `dP = V dO'`;
//! 2. weights `P = exp2(scale S - lse)`, while `dP` is multiplied; gradients of scores `dS = P (dP - delta)`, written to
//!    shared memory in 16 bits;
//! 3. `dV += P dO` from registers; both warpgroups meet;
//! 4. `dQ' = K' dS`, each warpgroup a part, and `dK += dS Q` from registers, under which `dQ'` goes to shared memory, from
//!    where other warps have it added up in device memory.
//!
//! | barrier | between |
//! |---|---|
//! | `tiles` | the tile's number is there; the consumers and the adding warps have it, and its last copies are under way |
//! | `keys` | a tile's keys and values are there; both warpgroups have multiplied by them |
//! | `rows` | a stage of queries and their statistics is full; both warpgroups have multiplied by it |
//! | `EXCHANGE` | gradients of scores of both warpgroups are written; both have stored their result |
//! | `handoff` | both parts of `dQ'` are written; they were read |
//! | warpgroup | its part of the result is written |
//!
//! Sums of `dQ` are `f32`, in fragments (`oxtile_tile::fragment_tile`), which [`AttentionBackwardConvert`] turns into rows. If
//! `ordered`, blocks of keys add to a block of queries one after the other, so that the bits are the same in every run and
//! under every grid; else in any order. The first stores, so nothing need be zero before.
//!
//! Sizes are any: what hangs over an edge is loaded as zero, masked, and not stored. `Q`, `dO` and `dQ` are tensors of
//! `[batches, heads group, rows, D]`, the others of `[batches, heads, keys, D]`, of any strides.
//!
//! Sources: Dao, "FlashAttention-2", 2023, algorithm 2; Shah et al., "FlashAttention-3", 2024.
//!
//! [`AttentionBackwardConvert`]: super::AttentionBackwardConvert

use oxtile_tile::arch::{Columns, MatrixColumns};
use oxtile_tile::fragment_tile::FragmentTile;
use oxtile_tile::layout::Swizzle128;
use oxtile_tile::matrix;
use oxtile_tile::num::{Pod, exp2, fma};
use oxtile_tile::pipeline::{self, Mbarrier, Pipeline};
use oxtile_tile::prelude::*;
use oxtile_tile::register_tile::{self, RegisterElement, RegisterTile, StoredElement};
use oxtile_tile::shared::{Overlay, SharedTile, Tiles};
use oxtile_tile::sync::NamedBarrier;
use oxtile_tile::tensor_map::{TensorMap, TensorMapMut};
use oxtile_tile::warpgroup::{self, Role, Roles};

use super::backward_mask::BlockMask;
use super::backward_schedule::{KeyQueue, KeySchedule, KeyTile};
use super::mask::Mask;

/// Keys of a tile.
pub const KEYS: usize = 2 * PART;
/// Keys of a warpgroup.
const PART: usize = 64;
/// Columns of a panel: one of `dQ'` belongs to a warpgroup.
const PANEL: usize = 64;

type Team = Roles<2, 24, 240>;

/// Both warpgroups.
const EXCHANGE: NamedBarrier = NamedBarrier::new(1, 256);

type Key<T, const D: usize> = SharedTile<T, KEYS, D, Swizzle128>;

/// What a tile multiplies by.
#[derive(SharedStorage, Clone, Copy)]
struct Keys<T: Pod, const D: usize> {
    keys: Key<T, D>,
    values: Key<T, D>,
}

/// A block of queries.
#[derive(SharedStorage, Clone, Copy)]
struct Rows<T: Pod, const D: usize, const QUERIES: usize> {
    queries: SharedTile<T, QUERIES, D, Swizzle128>,
    gradients: SharedTile<T, QUERIES, D, Swizzle128>,
}

/// What is known of each query of a block.
#[derive(SharedStorage, Clone, Copy)]
struct Statistics<const QUERIES: usize> {
    /// `-log2(sum of exponentials)`, -inf where nothing counts.
    offsets: SharedArray<f32, QUERIES>,
    deltas: SharedArray<f32, QUERIES>,
}

/// The result for a warpgroup's keys.
type Finished<T, const D: usize> = SharedTile<T, PART, D, Swizzle128>;

/// The warpgroups' parts of `dQ'`.
type Parts<const SPAN: usize> = Tiles<FragmentTile<SPAN>, 2>;

/// What is only small comes last: tiles are aligned to 1024 bytes.
#[derive(SharedStorage)]
struct Shared<T: Pod, const D: usize, const QUERIES: usize, const SPAN: usize> {
    rows: Pipeline<Rows<T, D, QUERIES>, 2>,
    /// Gradients of the scores of two blocks of queries in turn; at last the gradients of each warpgroup's keys.
    scores: Tiles<Overlay<SharedTile<T, QUERIES, KEYS, Swizzle128>, Finished<T, D>>, 2>,
    /// At last the gradients of each warpgroup's values.
    outgoing: Overlay<Parts<SPAN>, Tiles<Finished<T, D>, 2>>,
    keys: Pipeline<Keys<T, D>, 1>,
    /// Of both stages of rows, with which they come and go.
    statistics: Tiles<Statistics<QUERIES>, 2>,
    tiles: Pipeline<SharedArray<u32, 4>, 1>,
    handoff: Handoff,
}

/// Warps that have parts of `dQ'` added up, in turn: what takes one longer than a block of queries does no harm.
const ADDERS: u32 = 2;

/// Between the warpgroups that write `dQ'` and the warps that have it added up.
#[derive(SharedStorage, Clone, Copy)]
struct Handoff {
    /// One for each of those warps.
    full: Tiles<Mbarrier, { ADDERS as usize }>,
    empty: Mbarrier,
}

/// Computes `grad_k`, `grad_v` and the sums of `dQ / scale`.
///
/// `QUERIES` are computed together; a warpgroup's part of `dQ'` is 64 by `SPAN`. `offsets` and `deltas` are `[batches, heads
/// group, blocks QUERIES]` ([`AttentionBackwardPrepare`](super::AttentionBackwardPrepare)), `sums` has as many rows of
/// `D`; `turns` is a zero for each block of queries, and counts who has added to it; `counter` is one zero, and is zero again
/// afterwards. If `MASKED`, query `i` sees keys `i + first` to `i + last`; else all. `section` heads of keys are computed together.
#[kernel(threads = Team::THREADS, grid = grid, shared = Shared<T, D, QUERIES, SPAN>, requires = sm_90a)]
#[instances(T = [bf16, f16], D = [128], QUERIES = [80], SPAN = [80], MASKED = [false])]
#[instances(T = [bf16, f16], D = [128], QUERIES = [64], SPAN = [64], MASKED = [true])]
#[instances(T = [bf16, f16], D = [64], QUERIES = [128], SPAN = [64], MASKED = [true])]
#[expect(clippy::too_many_arguments, reason = "tensors and sizes of attention")]
pub fn attention_backward<T: RegisterElement + StoredElement, const D: usize, const QUERIES: usize, const SPAN: usize, const MASKED: bool>(
    q: TensorMap<T, QUERIES, D, Swizzle128, 4>,
    grad_out: TensorMap<T, QUERIES, D, Swizzle128, 4>,
    k: TensorMap<T, KEYS, D, Swizzle128, 4>,
    v: TensorMap<T, KEYS, D, Swizzle128, 4>,
    grad_k: TensorMapMut<T, PART, D, Swizzle128, 4>,
    grad_v: TensorMapMut<T, PART, D, Swizzle128, 4>,
    offsets: Global<f32>,
    deltas: Global<f32>,
    sums: GlobalMut<f32>,
    turns: GlobalMut<u32>,
    counter: GlobalMut<u32>,
    batches: u32,
    heads: u32,
    group: u32,
    rows: u32,
    keys: u32,
    first: i32,
    last: i32,
    section: u32,
    scale: f32,
    ordered: u32,
) where
    Columns<D>: MatrixColumns,
    Columns<QUERIES>: MatrixColumns,
    Columns<SPAN>: MatrixColumns,
{
    let shared = Shared::<T, D, QUERIES, SPAN>::claim();
    if thread::index() == 0 {
        shared.tiles.init(Team::CONSUMER_WARPS + ADDERS + 1);
        shared.keys.init(Team::CONSUMER_WARPS);
        shared.rows.init(Team::CONSUMER_WARPS);
        for adder in 0..ADDERS {
            shared.handoff.full.tile(adder).init(Team::CONSUMER_WARPS);
        }
        shared.handoff.empty.init(1);
        pipeline::publish_barriers();
    }
    block::sync();
    let schedule = KeySchedule { key_blocks: keys.div_ceil(KEYS as u32), heads: heads * batches, section };
    let mask = BlockMask::<QUERIES, MASKED>(Mask { queries: rows, keys, first, last });
    let blocks = rows.div_ceil(QUERIES as u32);
    // Where a head's blocks of queries begin.
    let first_block = |tile: KeyTile, member: u32| (tile.head * group + member) * blocks;
    match Team::role() {
        Role::Producer(role) => match role.begin_warps() {
            0 => {
                let (mut tiles, mut key_ring, mut ring) = (shared.tiles.consumer(), shared.keys.producer(), shared.rows.producer());
                let mut step = 0;
                loop {
                    let number = tiles.wait();
                    let Some(tile) = tile_of(&number) else { break };
                    if thread::lane() == 0 {
                        let (stage, full) = key_ring.acquire(Keys::<T, D>::SIZE);
                        let [batch, key_head] = tile.place(heads);
                        k.load(stage.keys, [batch, key_head, tile.key(), 0], full);
                        v.load(stage.values, [batch, key_head, tile.key(), 0], full);
                        let (seen, mut block) = (mask.blocks(tile.block), mask.start(tile.block, ordered != 0));
                        for member in 0..group {
                            let (head, first) = (key_head * group + member, first_block(tile, member));
                            for _ in seen.begin..seen.end {
                                let (stage, full) = ring.acquire(Rows::<T, D, QUERIES>::SIZE + Statistics::<QUERIES>::SIZE);
                                q.load(stage.queries, [batch, head, block * QUERIES as u32, 0], full);
                                grad_out.load(stage.gradients, [batch, head, block * QUERIES as u32, 0], full);
                                let row = u64::from(first + block) * QUERIES as u64;
                                let statistics = shared.statistics.tile(step % 2);
                                full.load(statistics.offsets, &offsets, row);
                                full.load(statistics.deltas, &deltas, row);
                                (step, block) = (step + 1, seen.after(block));
                            }
                        }
                    }
                    // Now the next tile is taken: whoever is done first takes the first.
                    number.release();
                }
            }
            3 if thread::lane() == 0 => {
                let mut tiles = shared.tiles.producer();
                let queue = KeyQueue { counter, tiles: schedule.tiles() };
                let mut more = true;
                while more {
                    tiles.acquire_with(0, |number| {
                        let tile = schedule.tile(queue.take());
                        more = tile.is_some();
                        let KeyTile { block, head } = tile.unwrap_or(KeyTile { block: 0, head: 0 });
                        number.store_vector(0, [more.into(), block, head, 0]);
                    });
                }
            }
            warp @ 1..=ADDERS => {
                let mut numbers = shared.tiles.consumer();
                let adder = Adder::<SPAN> { number: warp - 1, parts: shared.outgoing.first(), handoff: shared.handoff, sums, turns };
                let mut step = 0;
                while let Some(tile) = next_tile(&mut numbers) {
                    // One lane: others would wait for phases of the handoffs that are long past.
                    if thread::lane() == 0 {
                        let (seen, mut block) = (mask.blocks(tile.block), mask.start(tile.block, ordered != 0));
                        for member in 0..group {
                            for _ in seen.begin..seen.end {
                                if step % ADDERS == adder.number {
                                    let turn = (ordered != 0).then(|| mask.earlier(tile.block, block));
                                    adder.add(first_block(tile, member) + block, turn, step / ADDERS % 2);
                                }
                                (step, block) = (step + 1, seen.after(block));
                            }
                        }
                    }
                }
            }
            _ => {}
        },
        Role::Consumer(role) => {
            let part = role.begin();
            let (mut tiles, mut key_ring, mut ring) = (shared.tiles.consumer(), shared.keys.consumer(), shared.rows.consumer());
            let (outgoing, handoff) = (shared.outgoing, shared.handoff);
            // Which part of dQ' is this warpgroup's: a panel of columns, or half of the queries where there is one panel.
            let (panel, span) = (part % (D / PANEL) as u32, part / (D / PANEL) as u32 * SPAN as u32);
            let mut step = 0;
            while let Some(tile) = next_tile(&mut tiles) {
                let held = key_ring.wait();
                let Keys { keys, values } = held.memory();
                let (mut dk, mut dv) = (RegisterTile::<D>::zero(), RegisterTile::<D>::zero());
                let (seen, mut block) = (mask.blocks(tile.block), mask.start(tile.block, ordered != 0));
                for _ in 0..group {
                    for _ in seen.begin..seen.end {
                        let (scores_shared, statistics) = (shared.scores.tile(step % 2).first(), shared.statistics.tile(step % 2));
                        let stage = ring.wait();
                        let Rows { queries, gradients } = stage.memory();
                        // Read before multiplications are issued, behind which shared memory is read.
                        let offsets = ByColumn::load(statistics.offsets);
                        let scores = matrix::multiply(keys.k_major_rows::<PART>(part * PART as u32), queries.k_major());
                        let d_weights = matrix::multiply(values.k_major_rows::<PART>(part * PART as u32), gradients.k_major());
                        let mut weights = scores.wait_leaving::<1>();
                        if mask.cuts(tile.block, block) {
                            mask.hide(&mut weights, tile.key() + part * PART as u32, block);
                        }
                        weights.map_pairs(|_, pair, values| [0, 1].map(|i| exp2(fma(values[i], scale, offsets.pair(pair)[i]))));
                        stage.wait_again();
                        let deltas = ByColumn::load(statistics.deltas);
                        let mut d_scores = d_weights.wait();
                        d_scores.map_pairs(|half, pair, values| {
                            let weights = weights.pair(half, pair);
                            [0, 1].map(|i| weights[i] * (values[i] - deltas.pair(pair)[i]))
                        });
                        let d_scores = d_scores.to_operand::<T>();
                        d_scores.store_transposed(scores_shared, [0, part * PART as u32]);
                        let dv_sum = dv.multiply_add(weights.to_operand::<T>(), gradients.mn_major());
                        sync::fence_proxy_async();
                        EXCHANGE.sync();
                        let dq = matrix::multiply(keys.mn_major_panel::<PANEL>(panel), scores_shared.k_major_rows::<SPAN>(span));
                        let dk_sum = dk.multiply_add(d_scores, queries.mn_major());
                        let dq = dq.wait_leaving::<1>();
                        dv = dv_sum.waited();
                        handoff.empty.wait((step % 2) ^ 1);
                        dq.store_fragments(outgoing.first().tile(part));
                        sync::fence_proxy_async();
                        warp::sync();
                        handoff.full.tile(step % ADDERS).arrive_if(thread::lane() == 0);
                        dk = dk_sum.wait();
                        stage.release_after_wait();
                        (step, block) = (step + 1, seen.after(block));
                    }
                }
                held.release();
                // The last parts of both warpgroups were read: none multiplies by scores any more.
                handoff.empty.wait((step % 2) ^ 1);
                dk.map(|x| x * core::f32::consts::LN_2 * scale);
                let (dv_shared, dk_shared) = (outgoing.second().tile(part), shared.scores.tile(part).second());
                dv.store_columns(0, dv_shared);
                dk.store_columns(0, dk_shared);
                sync::fence_proxy_async();
                warpgroup::sync(part);
                if warpgroup::is_leader() {
                    let [batch, head] = tile.place(heads);
                    let at = [batch, head, tile.key() + part * PART as u32, 0];
                    grad_v.store(at, dv_shared);
                    grad_k.store(at, dk_shared);
                    pipeline::commit_stores();
                    pipeline::wait_stores_read::<0>();
                }
                EXCHANGE.sync();
            }
        }
    }
}

/// The tile whose number is in a stage; none behind the last. All lanes of the warp call it.
#[inline(always)]
#[track_caller]
fn tile_of(stage: &pipeline::Stage<SharedArray<u32, 4>>) -> Option<KeyTile> {
    let [is_there, block, head, _] = stage.memory().load_vector(0);
    let [is_there, block, head] = [is_there, block, head].map(|word| warp::shuffle(word, 0));
    (is_there != 0).then_some(KeyTile { block, head })
}

/// The next tile, likewise.
#[inline(always)]
#[track_caller]
fn next_tile(tiles: &mut pipeline::Consumer<SharedArray<u32, 4>, 1>) -> Option<KeyTile> {
    let stage = tiles.wait();
    let tile = tile_of(&stage);
    stage.release();
    tile
}

/// A number for each column of a tile, of which a thread holds those of its columns.
struct ByColumn<const COLUMNS: usize>
where
    Columns<COLUMNS>: MatrixColumns,
{
    /// Half as many as the registers of the tile: its rows share them.
    bits: <Columns<COLUMNS> as MatrixColumns>::Words,
}

impl<const COLUMNS: usize> ByColumn<COLUMNS>
where
    Columns<COLUMNS>: MatrixColumns,
{
    #[inline(always)]
    #[track_caller]
    fn load(source: SharedArray<f32, COLUMNS>) -> Self {
        let mut bits = <Columns<COLUMNS> as MatrixColumns>::ZERO_WORDS;
        let mut pair = 0;
        while pair < RegisterTile::<COLUMNS>::PAIRS {
            let [a, b] = source.load_pair(register_tile::column(pair as u32));
            (bits.as_mut()[2 * pair], bits.as_mut()[2 * pair + 1]) = (a.to_bits(), b.to_bits());
            pair += 1;
        }
        Self { bits }
    }

    #[inline(always)]
    fn pair(&self, pair: usize) -> [f32; 2] {
        [0, 1].map(|i| f32::from_bits(self.bits.as_ref()[2 * pair + i]))
    }
}

/// Added to a block's turns when the first to add has stored.
const STORED: u32 = 1 << 31;

/// A warp that has parts of `dQ'` added up.
struct Adder<const SPAN: usize> {
    /// Which of them.
    number: u32,
    parts: Parts<SPAN>,
    handoff: Handoff,
    sums: GlobalMut<f32>,
    turns: GlobalMut<u32>,
}

impl<const SPAN: usize> Adder<SPAN> {
    /// Has the parts added to the sums of a block of queries; if `turn` is given, after as many others. One thread calls it.
    #[inline(always)]
    #[track_caller]
    fn add(&self, block: u32, turn: Option<u32>, parity: u32) {
        let start = u64::from(block) * (2 * FragmentTile::<SPAN>::ELEMENTS) as u64;
        let its_turn = turn.map(|turn| self.wait(block, turn));
        self.handoff.full.tile(self.number).wait(parity);
        // Not before the parts are there: others wait for who comes first, which must wait for nothing.
        let first = its_turn.unwrap_or_else(|| self.claim(block));
        if first {
            self.parts.store_to(&self.sums, start)
        } else {
            self.parts.add_to(&self.sums, start)
        }
        pipeline::commit_stores();
        pipeline::wait_stores_read::<0>();
        self.handoff.empty.arrive();
        if let Some(turn) = turn {
            pipeline::wait_stores::<0>();
            atomic::store_release(&self.turns, block.into(), turn + 1);
        } else if first {
            pipeline::wait_stores::<0>();
            sync::fence_device();
            atomic::add_u32(&self.turns, block.into(), STORED);
        }
    }

    /// Waits until `turn` others have added to a block; whether there are none.
    #[inline(always)]
    #[track_caller]
    fn wait(&self, block: u32, turn: u32) -> bool {
        while atomic::load_acquire(&self.turns, block.into()) != turn {}
        turn == 0
    }

    /// Joins those who add to a block; the first of them stores, and the others wait for that.
    #[inline(always)]
    #[track_caller]
    fn claim(&self, block: u32) -> bool {
        let others = atomic::take_ticket(&self.turns, block.into());
        if others != 0 && others < STORED {
            while atomic::load_acquire(&self.turns, block.into()) < STORED {}
        }
        others == 0
    }
}

fn grid<T: RegisterElement + StoredElement, const D: usize, const QUERIES: usize, const SPAN: usize, const MASKED: bool>(
    args: &AttentionBackwardArgs<'_, T, D, QUERIES, SPAN, MASKED>,
    device: &DeviceLimits,
) -> Result<Grid, LaunchError>
where
    Columns<D>: MatrixColumns,
    Columns<QUERIES>: MatrixColumns,
    Columns<SPAN>: MatrixColumns,
{
    const { assert!(QUERIES * D == 2 * SPAN * PANEL, "the warpgroups' parts make dQ") };
    let blocks = u64::from(args.rows.div_ceil(QUERIES as u32)) * u64::from(args.heads) * u64::from(args.group) * u64::from(args.batches);
    LaunchError::check_length("offsets", blocks * QUERIES as u64, args.offsets.len())?;
    LaunchError::check_length("deltas", blocks * QUERIES as u64, args.deltas.len())?;
    LaunchError::check_length("sums", blocks * (QUERIES * D) as u64, args.sums.len())?;
    LaunchError::check_length("turns", blocks, args.turns.len())?;
    LaunchError::check_length("counter", 1, args.counter.len())?;
    LaunchError::check_limit("rows", blocks, (1 << 31) - 1)?;
    LaunchError::check_limit("keys", u64::from(args.keys), (1 << 30) - KEYS as u64)?;
    let tiles = u64::from(args.keys.div_ceil(KEYS as u32)) * u64::from(args.heads) * u64::from(args.batches);
    LaunchError::check_limit("keys", tiles, (1 << 31) - 1)?;
    Ok(Grid::x(tiles.min(u64::from(device.multiprocessors)) as u32))
}
