//! Attention, forward.
//!
//! A block stays on its multiprocessor and computes the result for a tile of queries of one head after another. One thread
//! copies their queries, and keeps two stages of keys and two of values full, the last block of keys first ([`Rings`]). Two
//! warpgroups have 64 queries each and walk over the blocks of keys ([`walk`]). What is stored waits in a tile of the warpgroup, whose
//! barrier it passes before and after it writes there.
//!
//! What is computed, of which tensors, and where the result goes is a compile-time [`Problem`]. The thread that copies tells the others which
//! tile comes next.
//!
//! Sizes are any: what hangs over an edge is loaded as zero, masked, and not stored. A query that sees no key
//! gets zeros and a log-sum-exp of -inf. Scores, weights and sums are `f32`, weights are rounded to `T` for their
//! product. Scores below -1e30 count as masked; NaN and +inf give NaN in their rows.

use core::marker::PhantomData;

use oxtile_tile::arch::{Columns, MatrixColumns};
use oxtile_tile::num::opaque;
use oxtile_tile::pipeline;
use oxtile_tile::prelude::*;
use oxtile_tile::register_tile::{RegisterElement, Rows, StoredElement};
use oxtile_tile::warpgroup;

use super::mask::Span;
use super::problem::{
    ArrivingCausal, ArrivingFull, ArrivingOptioned, ArrivingPackedCausal, ArrivingPackedFull, Causal, Full, Optioned, PackedCausal,
    PackedFull, PackedRingCausal, PackedRingFull, Policy, Problem, ProblemTile, RingCausal, RingFull, Seen, Staging, Tiles,
};
use super::rings::Rings;
use super::running::NO_LOGS;
use super::walk::{Beside, walk};
use super::warpgroup_roles::{Narrow, Pair, Role, WARPGROUP_QUERIES, WarpgroupRoles, Wide};

type Of<T, const D: usize, const V: usize, const KEYS: usize, P> = <P as Policy>::Of<T, D, V, KEYS>;
type Shared<T, const D: usize, const V: usize, const KEYS: usize, G, P> = Rings<
    T,
    D,
    V,
    KEYS,
    G,
    <Of<T, D, V, KEYS, P> as Problem<T, D, V, KEYS>>::Staging<G>,
    <Of<T, D, V, KEYS, P> as Problem<T, D, V, KEYS>>::Message,
>;

/// Attends, with heads of up to `D` elements of queries and `V` of values, `KEYS` keys at a time.
#[kernel(threads = G::THREADS, grid = grid, shared = Shared<T, D, V, KEYS, G, P>, requires = sm_90a)]
#[instances(T = [bf16, f16], D = [64], V = [64], KEYS = [128], G = [Narrow], P = [Full, Causal, RingFull, RingCausal])]
#[instances(T = [bf16, f16], D = [64], V = [64], KEYS = [128], G = [Narrow], P = [PackedFull, PackedCausal, PackedRingFull, PackedRingCausal])]
#[instances(T = [bf16, f16], D = [128], V = [128], KEYS = [128], G = [Pair], P = [Full, Causal, RingFull, RingCausal])]
#[instances(T = [bf16, f16], D = [128], V = [128], KEYS = [128], G = [Pair], P = [PackedFull, PackedCausal, PackedRingFull, PackedRingCausal])]
#[instances(T = [bf16, f16], D = [64], V = [64], KEYS = [128], G = [Narrow], P = [ArrivingFull, ArrivingCausal])]
#[instances(T = [bf16, f16], D = [128], V = [128], KEYS = [128], G = [Pair], P = [ArrivingFull, ArrivingCausal])]
#[instances(T = [bf16, f16], D = [64], V = [64], KEYS = [128], G = [Narrow], P = [ArrivingPackedFull, ArrivingPackedCausal])]
#[instances(T = [bf16, f16], D = [128], V = [128], KEYS = [128], G = [Pair], P = [ArrivingPackedFull, ArrivingPackedCausal])]
#[instances(T = [bf16, f16], D = [192], V = [128], KEYS = [128], G = [Wide], P = [ArrivingFull, ArrivingCausal])]
#[instances(T = [bf16, f16], D = [256], V = [256], KEYS = [80], G = [Wide], P = [ArrivingFull, ArrivingCausal])]
#[instances(T = [bf16, f16], D = [192], V = [128], KEYS = [128], G = [Wide], P = [Full, Causal, RingFull, RingCausal, Optioned])]
#[instances(T = [bf16, f16], D = [256], V = [256], KEYS = [80], G = [Wide], P = [Full, Causal, RingFull, RingCausal])]
#[instances(T = [bf16, f16], D = [192], V = [128], KEYS = [128], G = [Wide], P = [ArrivingOptioned])]
#[instances(T = [bf16, f16], D = [64], V = [64], KEYS = [128], G = [Pair], P = [Optioned, ArrivingOptioned])]
#[instances(T = [bf16, f16], D = [128], V = [128], KEYS = [128], G = [Wide], P = [Optioned, ArrivingOptioned])]
#[instances(T = [bf16, f16], D = [256], V = [256], KEYS = [64], G = [Wide], P = [Optioned, ArrivingOptioned])]
pub fn attention_forward<T, const D: usize, const V: usize, const KEYS: usize, G, P>(problem: Of<T, D, V, KEYS, P>)
where
    T: RegisterElement + StoredElement,
    G: WarpgroupRoles,
    P: Policy,
    Columns<D>: MatrixColumns,
    Columns<V>: MatrixColumns,
    Columns<KEYS>: MatrixColumns,
{
    let shared = Shared::<T, D, V, KEYS, G, P>::begin();
    let (turn_words, stores_by_tma) = (Of::<T, D, V, KEYS, P>::TURN, Of::<T, D, V, KEYS, P>::STORES_BY_TMA);
    match G::role() {
        Role::Copies(role) => {
            if !G::begin_copies(role) {
                return;
            }
            let (mut rings, mut tiles, mut turn) = (shared.producers(), problem.tiles(G::QUERIES), 0);
            while let Some(tile) = tiles.tile() {
                tiles.ask();
                let tell = || Of::<T, D, V, KEYS, P>::tell(&tiles, Some(tile), shared.tile, turn);
                problem.load_queries(&mut rings, &tile, tell);
                let blocks = problem.mask(&tile).blocks::<KEYS>(Span { begin: tile.row(), end: tile.row() + G::QUERIES });
                let first = if Of::<T, D, V, KEYS, P>::WINDOWED { blocks.begin } else { 0 };
                for block in (first..blocks.end).rev() {
                    tiles.await_block(&tile, block);
                    problem.load_block(&mut rings, &tile, block);
                }
                tiles.advance();
                turn ^= turn_words;
            }
            tiles.leave();
            rings.end(|| Of::<T, D, V, KEYS, P>::tell(&tiles, None, shared.tile, turn));
        }
        Role::Multiplies(role) => {
            let part = G::begin_multiplies(role);
            Of::<T, D, V, KEYS, P>::begin::<G>(shared.staging, part);
            let (mut rings, mut turn) = (shared.consumers(), 0);
            loop {
                let stage = rings.queries.wait();
                let Some(tile) = problem.told(G::QUERIES, shared.tile, turn) else { break };
                // Steps of rings have no registers for addresses that the compiler would hold over the walk.
                let query_part = G::part(stage.memory(), if stores_by_tma || G::IN_PLACE { part } else { opaque(part) });
                let query = G::query(query_part);
                let stage = stage.release_unless(G::IN_PLACE);
                let (mask, row) = (problem.mask(&tile), tile.row() + part * WARPGROUP_QUERIES as u32);
                let blocks = mask.blocks::<KEYS>(Span { begin: tile.row(), end: tile.row() + G::QUERIES });
                let seen = Seen {
                    mask,
                    row,
                    whole: mask.whole_blocks::<KEYS>(Span { begin: row, end: row + WARPGROUP_QUERIES as u32 }),
                    gaps: problem.gaps(&tile),
                };
                let mut softmax = problem.softmax::<G>(&tile);
                // Copied, as the compiler makes other code of a tile that others refer to.
                let merged = (!stores_by_tma).then_some(tile);
                let fetch = || {
                    if let Some(tile) = &merged {
                        problem.fetch::<G>(tile, row, shared.staging, part);
                    }
                };
                // Beside the first product, if the next rows find their place in shared memory by then.
                if !stores_by_tma && (G::IN_PLACE || blocks.begin >= blocks.end) {
                    fetch();
                }
                let logs = OldLogs {
                    problem: &problem,
                    tile: merged.filter(|_| !G::IN_PLACE),
                    words: shared.tile,
                    turn,
                    part,
                    element: PhantomData,
                };
                let (sum, logs) = walk::<T, D, V, KEYS, _>(
                    query,
                    &mut rings.keys,
                    &mut rings.values,
                    &mut softmax,
                    blocks,
                    |scores, step| {
                        if !stores_by_tma && !G::IN_PLACE && step.first {
                            fetch();
                        }
                        problem.edit(scores, step, &seen);
                    },
                    logs,
                );
                let tile = problem.told_again(tile, shared.tile, turn);
                turn ^= turn_words;
                let staging = Staging { queries: query_part, memory: shared.staging, part, parity: rings.queries.parity() ^ 1, logs };
                problem.store::<G>(&tile, tile.row() + part * WARPGROUP_QUERIES as u32, sum, softmax.finish(), staging);
                if let Some(stage) = stage {
                    if stores_by_tma && warpgroup::is_leader() {
                        pipeline::wait_stores_read::<0>();
                    }
                    stage.release_after_wait();
                }
            }
            if stores_by_tma && !G::IN_PLACE && warpgroup::is_leader() {
                pipeline::wait_stores_read::<0>();
            }
            problem.end::<G>(shared.staging);
        }
    }
}

/// The log-sum-exps that a warpgroup's rows had, loaded beside the last product of their walk.
struct OldLogs<'a, T: RegisterElement, const D: usize, const V: usize, const KEYS: usize, P: Problem<T, D, V, KEYS>> {
    problem: &'a P,
    tile: Option<P::Tile>,
    words: P::Message,
    turn: u32,
    part: u32,
    element: PhantomData<fn() -> T>,
}

impl<T: RegisterElement, const D: usize, const V: usize, const KEYS: usize, P: Problem<T, D, V, KEYS>> Beside<Rows>
    for OldLogs<'_, T, D, V, KEYS, P>
{
    #[inline(always)]
    #[track_caller]
    fn last(self) -> Rows {
        let Some(tile) = self.tile else { return NO_LOGS };
        let tile = self.problem.told_again(tile, self.words, self.turn);
        self.problem.logs(&tile, tile.row() + self.part * WARPGROUP_QUERIES as u32)
    }
}

fn grid<T, const D: usize, const V: usize, const KEYS: usize, G, P>(
    args: &AttentionForwardArgs<'_, T, D, V, KEYS, G, P>,
    device: &DeviceLimits,
) -> Result<Grid, LaunchError>
where
    T: RegisterElement + StoredElement,
    G: WarpgroupRoles,
    P: Policy,
    Columns<D>: MatrixColumns,
    Columns<V>: MatrixColumns,
    Columns<KEYS>: MatrixColumns,
{
    // A block for each multiprocessor, which takes one tile after the other.
    let tiles = Of::<T, D, V, KEYS, P>::check(&args.problem, G::QUERIES)?;
    Ok(Grid::x(tiles.min(device.multiprocessors.into()) as u32))
}
