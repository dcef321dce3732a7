//! The walk of a warpgroup over the blocks of queries that see a tile of keys.

use oxtile_tile::arch::{Columns, MatrixColumns};
use oxtile_tile::matrix;
use oxtile_tile::num::{exp2, fma};
use oxtile_tile::pipeline::{self, Consumer};
use oxtile_tile::prelude::*;
use oxtile_tile::register_tile::{self, RegisterElement, RegisterTile, StoredElement};
use oxtile_tile::shared::Tiles;
use oxtile_tile::warpgroup;

use super::backward_tensors::KeyGradients;
use super::backward_workspace::{EXCHANGE, Handoff, Keys, Outgoing, PANEL, Rows, Scores, Shared, Statistics, UNCUT, WARPGROUP_KEYS};

/// One of the two warpgroups that multiply.
pub(super) struct Walk<T: RegisterElement, const D: usize, const QUERIES: usize, const SPAN: usize> {
    /// Which of them.
    part: u32,
    rows: Consumer<Rows<T, D, QUERIES>, 2>,
    statistics: Tiles<Statistics<QUERIES>, 2>,
    scores: Scores<T, D, QUERIES>,
    outgoing: Outgoing<T, D, SPAN>,
    handoff: Handoff,
}

/// The gradients of a warpgroup's keys, but for a factor, and of its values.
pub(super) struct Sums<const D: usize>
where
    Columns<D>: MatrixColumns,
{
    pub keys: RegisterTile<D>,
    pub values: RegisterTile<D>,
}

impl<T, const D: usize, const QUERIES: usize, const SPAN: usize> Walk<T, D, QUERIES, SPAN>
where
    T: RegisterElement + StoredElement,
    Columns<D>: MatrixColumns,
    Columns<QUERIES>: MatrixColumns,
    Columns<SPAN>: MatrixColumns,
{
    /// At its beginning.
    #[inline(always)]
    pub fn new<const WORDS: usize>(part: u32, shared: &Shared<T, D, QUERIES, SPAN, WORDS>) -> Self {
        let Shared { rows, statistics, scores, outgoing, handoff, .. } = *shared;
        Self { part, rows: rows.consumer(), statistics, scores, outgoing, handoff }
    }

    /// Multiplies a tile of keys by the next `steps` blocks of queries. `edit` changes the scores of a block before they count, and is
    /// told its number if it is [cut](Statistics::cut); `bend` their gradients, given weights and the
    /// [offsets](Statistics::offsets). Exponentials are those of scores times `scale`.
    #[inline(always)]
    pub fn multiply(
        &mut self,
        Keys { keys, values }: Keys<T, D>,
        steps: u32,
        scale: f32,
        edit: impl Fn(&mut RegisterTile<QUERIES>, Option<u32>),
        bend: impl Fn(&mut RegisterTile<QUERIES>, &RegisterTile<QUERIES>, SharedArray<f32, QUERIES>),
    ) -> Sums<D> {
        // Which part of dQ' is this warpgroup's: a panel of columns, or half of the queries where there is one panel.
        let (panel, span) = (self.part % (D / PANEL) as u32, self.part / (D / PANEL) as u32 * SPAN as u32);
        let (mut dk, mut dv) = (RegisterTile::<D>::zero(), RegisterTile::<D>::zero());
        for _ in 0..steps {
            let turn = self.rows.next_stage();
            let (scores_shared, statistics) = (self.scores.tile(turn).first(), self.statistics.tile(turn));
            let stage = self.rows.wait();
            let Rows { queries, gradients } = stage.memory();
            // Read before multiplications are issued: after them a read of shared memory waits for theirs.
            let (offsets, cut) = (ByColumn::load(statistics.offsets), statistics.cut.load(0));
            let scores = matrix::multiply(keys.k_major_rows::<WARPGROUP_KEYS>(self.part * WARPGROUP_KEYS as u32), queries.k_major());
            let d_weights = matrix::multiply(values.k_major_rows::<WARPGROUP_KEYS>(self.part * WARPGROUP_KEYS as u32), gradients.k_major());
            let mut weights = scores.wait_leaving::<1>();
            edit(&mut weights, (cut != UNCUT).then_some(cut));
            weights.map_pairs(|_, pair, values| [0, 1].map(|i| exp2(fma(values[i], scale, offsets.pair(pair)[i]))));
            stage.wait_again();
            let deltas = ByColumn::load(statistics.deltas);
            let mut d_scores = d_weights.wait();
            d_scores.map_pairs(|half, pair, values| {
                let weights = weights.pair(half, pair);
                [0, 1].map(|i| weights[i] * (values[i] - deltas.pair(pair)[i]))
            });
            bend(&mut d_scores, &weights, statistics.offsets);
            let d_scores = d_scores.to_operand::<T>();
            d_scores.store_transposed(scores_shared, [0, self.part * WARPGROUP_KEYS as u32]);
            let dv_sum = dv.multiply_add(weights.to_operand::<T>(), gradients.mn_major());
            sync::fence_proxy_async();
            EXCHANGE.sync();
            let dq = matrix::multiply(keys.mn_major_panel::<PANEL>(panel), scores_shared.k_major_rows::<SPAN>(span));
            let dk_sum = dk.multiply_add(d_scores, queries.mn_major());
            let dq = dq.wait_leaving::<1>();
            dv = dv_sum.waited();
            self.wait_for_adders(turn);
            dq.store_fragments(self.outgoing.first().tile(self.part));
            sync::fence_proxy_async();
            warp::sync();
            self.handoff.full.tile(turn).arrive_if(thread::lane() == 0);
            dk = dk_sum.wait();
            stage.release_after_wait();
        }
        Sums { keys: dk, values: dv }
    }

    /// Waits until the last parts of `dQ'` of both warpgroups were read: none multiplies by scores any more.
    #[inline(always)]
    #[track_caller]
    fn wait_for_adders(&self, turn: u32) {
        self.handoff.empty.wait(turn ^ 1);
    }

    /// Writes a tile's gradients to shared memory, from where the warpgroup's first thread has them stored at `at`. Both warpgroups call it.
    #[inline(always)]
    #[track_caller]
    pub fn store<const RANK: usize>(&self, sums: &Sums<D>, gradients: &KeyGradients<T, D, RANK>, at: [u32; RANK]) {
        self.wait_for_adders(self.rows.next_stage());
        let (of_keys, of_values) = (self.scores.tile(self.part).second(), self.outgoing.second().tile(self.part));
        sums.values.store_columns(0, of_values);
        sums.keys.store_columns(0, of_keys);
        sync::fence_proxy_async();
        warpgroup::sync(self.part);
        if warpgroup::is_leader() {
            gradients.v.store(at, of_values);
            gradients.k.store(at, of_keys);
            pipeline::commit_stores();
            pipeline::wait_stores_read::<0>();
        }
        EXCHANGE.sync();
    }
}

/// A number for each column of a tile, of which a thread holds those of its columns.
pub(super) struct ByColumn<const COLUMNS: usize>
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
    pub fn load(source: SharedArray<f32, COLUMNS>) -> Self {
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
    pub fn pair(&self, pair: usize) -> [f32; 2] {
        [0, 1].map(|i| f32::from_bits(self.bits.as_ref()[2 * pair + i]))
    }
}
