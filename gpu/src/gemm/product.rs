//! The loops of a block: one thread loads operands, one or two warpgroups multiply them.

use oxtile_tile::arch::{Columns, MatrixColumns, MatrixElement};
use oxtile_tile::epilogue;
use oxtile_tile::num::opaque;
use oxtile_tile::pipeline::{self, Producer};
use oxtile_tile::prelude::*;
use oxtile_tile::register_tile::{RegisterTile, StoredElement};
use oxtile_tile::sync::{self, NamedBarrier};
use oxtile_tile::warpgroup;

use super::arrival::Arrival;
use super::cluster_sum::Room;
use super::division::Division;
use super::order::WorkOrder;
use super::place::Place;
use super::sharing::Sharing;
use super::stage::{Rows, Stage};
use super::tensors::{Exchanged, Tensors};
use super::tile_shape::{BlockTile, Shared, TileShape};
use super::{FEW, PART, Shape};

/// The step of a tile after which the tile before has landed in most cases: a few microseconds.
const LANDED: u32 = 8;

impl<
    const ROW_PARTS: usize,
    const COLUMN_PARTS: usize,
    const COLUMNS: usize,
    const PANELS: usize,
    const BOX: usize,
    const STAGES: usize,
    const CLUSTER: u32,
    const WARPGROUPS: u32,
    const PRODUCER: u32,
    const CONSUMER: u32,
> BlockTile<ROW_PARTS, COLUMN_PARTS, COLUMNS, PANELS, BOX, STAGES, CLUSTER, WARPGROUPS, PRODUCER, CONSUMER>
where
    Columns<COLUMNS>: MatrixColumns,
{
    /// Fills the ring, by one thread.
    #[inline(always)]
    pub(super) fn produce<A, B, const DEPTH: usize, O, const WIDTH: usize, const RANK: usize, W, const M_MAJOR: bool, const N_MAJOR: bool>(
        tensors: &Tensors<A, B, DEPTH, O, WIDTH, RANK, W, BOX>,
        mut order: W::Order,
        mut ring: Producer<Stage<A, B, DEPTH, ROW_PARTS, COLUMN_PARTS, PANELS, BOX>, STAGES>,
        rank: u32,
    ) where
        A: MatrixElement,
        B: MatrixElement,
        O: StoredElement,
        W: Division<RANK>,
    {
        let mut arrival = tensors.division.arrival(tensors.shape, DEPTH as u32);
        let mut sharing = tensors.division.sharing(tensors.shape, <Self as TileShape>::COLUMNS);
        let rows = if ROW_PARTS == 1 { tensors.few_rows() } else { Rows::Parts(tensors.a) };
        let bytes = Stage::<A, B, DEPTH, ROW_PARTS, COLUMN_PARTS, PANELS, BOX>::bytes(rows);
        while let Some(work) = order.next_work() {
            let [row, column] = work.tile;
            arrival.begin(move || (row * CLUSTER + rank) * Self::ROWS, Self::ROWS);
            for step in work.first..work.first + work.steps {
                let place = arrival.wait(step);
                let (stage, full) = ring.acquire(bytes);
                let origin = [(row * CLUSTER + rank) * Self::ROWS, column * <Self as TileShape>::COLUMNS, place * DEPTH as u32];
                stage.load::<CLUSTER, RANK, M_MAJOR, N_MAJOR>((rows, &tensors.b), work.place, origin, rank, full);
            }
            if W::Sharing::SHARES
                && let Some(Exchanged { parts: Some(parts), .. }) = &tensors.exchanged
                && let Some(row) = sharing.own((row * CLUSTER + rank) * Self::ROWS)
            {
                type Of<A, B, const DEPTH: usize, const ROWS: usize, const COLUMNS: usize, const PANELS: usize, const BOX: usize> =
                    Stage<A, B, DEPTH, ROWS, COLUMNS, PANELS, BOX>;
                sharing.wait(row, Self::ROWS);
                for source in 0..sharing.sources() {
                    for half in 0..ROW_PARTS as u32 {
                        let (stage, full) = ring.acquire(Of::<A, B, DEPTH, ROW_PARTS, COLUMN_PARTS, PANELS, BOX>::PART_BYTES);
                        let columns = Of::<A, B, DEPTH, ROW_PARTS, COLUMN_PARTS, PANELS, BOX>::PART_COLUMNS;
                        let column = column * <Self as TileShape>::COLUMNS + half * columns;
                        stage.load_part(parts, [source, row, column], full);
                    }
                }
            }
        }
    }

    /// Multiplies what is in the ring, by warpgroup `number`.
    #[inline(always)]
    pub(super) fn consume<A, B, const DEPTH: usize, O, const WIDTH: usize, const RANK: usize, W, const M_MAJOR: bool, const N_MAJOR: bool>(
        tensors: &Tensors<A, B, DEPTH, O, WIDTH, RANK, W, BOX>,
        mut order: W::Order,
        shared: Shared<A, B, DEPTH, O, WIDTH, ROW_PARTS, COLUMN_PARTS, PANELS, BOX, STAGES>,
        rank: u32,
        number: u32,
    ) where
        A: MatrixElement,
        B: MatrixElement,
        O: StoredElement,
        W: Division<RANK>,
    {
        let Tensors { d, exchanged, old, shape: Shape { m, n, .. }, fusion, division, .. } = tensors;
        let mut ring = shared.ring.consumer();
        let mut sharing = division.sharing(tensors.shape, <Self as TileShape>::COLUMNS);
        let factor = fusion.factor();
        let part = [number / COLUMN_PARTS as u32, number % COLUMN_PARTS as u32];
        let staging = shared.staging.tile(part[0]).tile(part[1]);
        if ROW_PARTS == 1 && tensors.few.is_some() {
            // Meanwhile the first stages are filled. A loop at run time: unrolled it would be long.
            let first = m.next_multiple_of(FEW as u32);
            for stage in 0..opaque(STAGES as u32) {
                let threads = const { WARPGROUPS * warpgroup::THREADS };
                shared.ring.stages().tile(stage).clear(first, [thread::index() % threads, threads]);
            }
            sync::fence_proxy_async();
            const { NamedBarrier::new(1, WARPGROUPS * warpgroup::THREADS) }.sync();
        }
        let counters = [rank * WARPGROUPS + number, CLUSTER * WARPGROUPS];
        while let Some(work) = order.next_work() {
            let [row, column] = work.tile;
            let origin = [
                (row * CLUSTER + rank) * Self::ROWS + part[0] * PART as u32,
                column * <Self as TileShape>::COLUMNS + part[1] * COLUMNS as u32,
            ];
            let [first, end] = work.place.rows(*m);
            if let Some(of_tile) = work.part {
                division.split().prefetch(of_tile, counters);
            }
            let mut stage = ring.wait();
            let (left, right) = stage.memory().operands::<COLUMNS, M_MAJOR, N_MAJOR>(part);
            let mut product = RegisterTile::zero().multiply_add(left, right);
            for step in 1..work.steps {
                let next = ring.wait();
                let (left, right) = next.memory().operands::<COLUMNS, M_MAJOR, N_MAJOR>(part);
                product = product.multiply_add(left, right);
                product.wait_earlier();
                release::<_, CLUSTER>(stage);
                stage = next;
                if W::Sharing::SHARES && step == LANDED {
                    sharing.land();
                }
            }
            let mut tile = product.wait();
            if Self::IN_CLUSTERS && W::IN_CLUSTERS && division.split().is_in_clusters() {
                Room(shared.ring.stages()).add_and_store::<_, COLUMNS, _, _, _>(&tile, tensors, origin, (number, division.split().parts));
                return;
            }
            release::<_, CLUSTER>(stage);
            if let Some(of_tile) = work.part {
                let (rows, word) = (m.saturating_sub(origin[0]), shared.last.tile(part[0]).tile(part[1]));
                if !division.split().add(&mut tile, of_tile, counters, rows, (word, number)) {
                    continue;
                }
            }
            let mut origin = origin;
            if W::Sharing::SHARES
                && let Some(Exchanged { others, .. }) = exchanged
            {
                sharing.land();
                let Some(row) = sharing.own(origin[0]) else {
                    if let Some(others) = others {
                        let [owner, row] = sharing.place(origin[0]);
                        epilogue::store_parts(others, [owner, row, origin[1]], &tile, staging, number);
                        sharing.leave(origin[0]);
                    }
                    continue;
                };
                origin[0] = row;
                for _ in 0..sharing.sources() {
                    let mut half = 0;
                    while half < ROW_PARTS {
                        let stage = ring.wait();
                        stage.memory().add_part::<O, WIDTH, COLUMNS>(&mut tile, part[0], half);
                        warp::sync();
                        release::<_, CLUSTER>(stage);
                        half += 1;
                    }
                }
            }
            fusion.apply::<_, true>(&mut tile, factor, old, [end, *n], [first + origin[0], origin[1]]);
            let rest = epilogue::store_parts(d, work.place.d(origin), &tile, staging, number);
            if rest < COLUMNS {
                tile.store(old, origin, [end, *n], rest);
            }
        }
        sharing.land();
    }
}

/// Gives a stage back to all producers of the cluster.
#[inline(always)]
#[track_caller]
fn release<S: Copy, const CLUSTER: u32>(stage: pipeline::Stage<S>) {
    if CLUSTER == 1 {
        stage.release_after_wait();
    } else {
        stage.release_to_cluster::<CLUSTER>();
    }
}
