//! Packed sequences whose keys have other lengths than their queries, of every schedule, in both passes.

use oxtile::attention::{AttentionConfig, Layout, Mask, Sink};
use oxtile::comm::WorldSize;
use oxtile::context_parallel::Schedule;

use crate::context_case::Case;
use crate::context_parallel::{BASE, WINDOWS};
use crate::support::is_long;

/// Lengths and padded lengths, in chunks of all ranks; lengths are less by the third number.
type Lengths = [[u64; 3]; 5];

/// Queries of a sequence: some, none of as many keys, all, few, and padding alone.
const QUERIES: Lengths = [[2, 2, 1], [0, 0, 0], [3, 3, 0], [1, 1, 3], [0, 1, 0]];
/// Its keys: more, some, padding alone, none, and all.
const KEYS: Lengths = [[3, 3, 2], [1, 1, 1], [0, 2, 0], [0, 0, 0], [2, 2, 0]];
/// Padding alone.
const NONE: Lengths = [[0, 1, 0], [0, 0, 0], [0, 3, 0], [0, 1, 0], [0, 1, 0]];

/// A full mask of such sequences. Beside them are rows that no sequence has.
fn case(ranks: u32, [queries, keys]: [Lengths; 2], chunk: u64, attention: AttentionConfig) -> Case {
    let unit = 2 * u64::from(ranks) * chunk;
    let of = |lengths: Lengths| lengths.map(|[some, all, less]| [(some * unit).saturating_sub(less), all * unit]).to_vec();
    let rows = 9 * unit;
    let attention = AttentionConfig { layout: Layout::Packed, batches: 5, queries: rows, keys: rows, mask: Mask::Full, ..attention };
    Case { lengths: of(queries), key_lengths: Some(of(keys)), ..Case::new(ranks, attention) }
}

/// Runs it; what ranks have is told apart.
fn run(case: &Case) {
    let mut whole = case.whole();
    case.tell_ranks_apart(&mut whole);
    let expected = whole.solve();
    for (rank, found) in case.world().ranks().zip(case.results_of(&whole).unwrap()) {
        case.compare(rank, &found, &expected);
    }
}

/// Of so many ranks ring, pull, gathered keys, and one launch of the forward pass; of two traded heads by messages and by puts; groups.
fn schedules(ranks: u32, lengths: [Lengths; 2], attention: AttentionConfig) -> Vec<Case> {
    let inner = WorldSize::new(2).unwrap();
    let of = |ranks: u32| case(ranks, lengths, 1, AttentionConfig { heads: 2, key_heads: 2, ..attention });
    let by_keys = [Schedule::Ring, Schedule::Pull, Schedule::Gather].map(|schedule| of(ranks).by(schedule));
    let mut cases = vec![of(2).by(Schedule::AllToAll), of(2).by_puts(), of(4).by(Schedule::Hierarchical { inner })];
    cases.extend(by_keys);
    if attention.sink == Sink::None {
        cases.push(of(ranks).fused());
    }
    cases
}

#[test]
fn every_schedule() {
    schedules(3, [QUERIES, KEYS], BASE).iter().for_each(run);
    // More queries than keys where there were fewer.
    schedules(2, [KEYS, QUERIES], BASE).iter().for_each(run);
    // Both bounds of a window count from the last key of its sequence. The gradient of a sink is a sum over all rows: keys of ranks are not told apart, as what is rounded of the
    // largest would hide the others.
    let window = AttentionConfig { window: WINDOWS[0], sink: Sink::Learnable, head_size: 8, ..BASE };
    schedules(2, [QUERIES, KEYS], window).iter().for_each(|case| case.run().unwrap());
}

/// Batches that have no query, and no key: nothing is attended to, and all gradients are zero.
#[test]
fn batches_without_queries_or_without_keys() {
    for lengths in [[NONE, KEYS], [QUERIES, NONE], [NONE, NONE]] {
        schedules(2, lengths, BASE).iter().for_each(run);
    }
    for mut case in schedules(2, [NONE, NONE], BASE) {
        case.config.attention.mask = Mask::CausalBottomRight;
        run(&case);
    }
}

/// Both passes in one launch each: chunks of whole blocks of 128 keys, of fewer, and of none beside those of queries.
#[test]
fn both_passes_in_one_launch() {
    let pairs = [[QUERIES, KEYS], [KEYS, QUERIES], [NONE, KEYS], [QUERIES, NONE]];
    let sizes = [(2, 60, 64), (2, 60, 128), (3, 130, 128)];
    for ((ranks, chunk, head_size), lengths) in
        sizes.into_iter().take(if is_long() { 3 } else { 1 }).flat_map(|size| pairs.map(|pair| (size, pair)))
    {
        let attention = AttentionConfig { heads: 1, key_heads: 1, head_size, ..BASE };
        run(&case(ranks, lengths, chunk, attention).by(Schedule::Fused));
    }
}
