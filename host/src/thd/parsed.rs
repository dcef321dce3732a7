//! What holds for any `cu_seqlens`: the check of the library against the rule in plain words. Tests by chosen numbers, below, and by found ones (`fuzz/`) share it.

use super::{Packed, Partition, Share, StepKeys, StepSequences, Steps};
use crate::rank::{Rank, WorldSize};

/// The most rows of a tensor, as the documentation has it.
const MOST_ROWS: u64 = (1 << 30) - 1;

/// Whether ranks can share sequences of such sums.
fn is_valid(ends: &[u32], padded: &[u32], chunks: u64) -> bool {
    if ends.len() != padded.len() || padded.first() != Some(&0) {
        return false;
    }
    (1..ends.len()).all(|i| {
        let [length, rows] = [ends, padded].map(|sums| i64::from(sums[i]) - i64::from(sums[i - 1]));
        let is_short = u64::from(ends[i]) <= MOST_ROWS && u64::from(padded[i]) <= MOST_ROWS;
        0 <= length && length <= rows && (rows as u64).is_multiple_of(chunks) && is_short
    })
}

/// Takes sums to be those of queries and keys that so many ranks share. They are taken if the rule allows them, and then the ranks' queries together are all rows,
/// each rank's those of its chunks.
///
/// # Panics
/// Where that does not hold, or for no rank.
pub fn sequences(ends: &[u32], padded: &[u32], ranks: u32, is_zigzag: bool) {
    let world = WorldSize::new(ranks).expect("at least one rank");
    let partition = if is_zigzag { Partition::Zigzag } else { Partition::Contiguous };
    let chunks = if is_zigzag { 2 * u64::from(ranks) } else { ranks.into() };
    let packed = Packed { cu_seqlens: ends, cu_seqlens_padded: padded };
    let said = || format!("{ends:?} in {padded:?}, {ranks} ranks, {partition:?}");
    for rank in world.ranks() {
        let steps = Steps { keys: StepKeys::Whole, share: Share { world, rank, partition }, left: None, right: None };
        let found = StepSequences::on_host(steps, packed, packed);
        assert_eq!(found.is_ok(), is_valid(ends, padded, chunks), "{}: {found:?}", said());
        match found {
            Ok((arrays, diagonals)) => of_rank(rank, ranks, is_zigzag, [ends, padded], &arrays, &diagonals),
            Err(error) => assert!(error.to_string().starts_with("StepSequences: "), "{error}"),
        }
    }
}

/// Compares the arrays of a rank with what its chunks are, counted from the sums.
fn of_rank(rank: Rank, ranks: u32, is_zigzag: bool, [ends, padded]: [&[u32]; 2], arrays: &[u32], diagonals: &[i32]) {
    let batches = ends.len() - 1;
    assert_eq!([arrays.len(), diagonals.len()], [4 * (2 * batches + 1), 2 * batches]);
    let chunks = if is_zigzag { 2 * ranks } else { ranks };
    // The late chunks come first. A contiguous partition has none.
    let of_halves = [is_zigzag.then_some(chunks.wrapping_sub(1 + rank.index())), Some(rank.index())];
    let mut sums = [0, 0];
    for (half, chunk) in of_halves.into_iter().enumerate() {
        for batch in 0..batches {
            let [length, rows] = [ends, padded].map(|sums| sums[batch + 1] - sums[batch]);
            let of_chunk = rows / chunks;
            let begin = chunk.map_or(0, |chunk| chunk * of_chunk);
            let queries = chunk.map_or(0, |_| length.min(begin + of_chunk) - length.min(begin));
            let sequence = half * batches + batch;
            let expected = [sums[0], sums[1]];
            assert_eq!(
                [arrays[sequence], arrays[2 * batches + 1 + sequence]],
                expected,
                "sequence {sequence}, {rank} of {ranks}, {ends:?} in {padded:?}"
            );
            sums = [sums[0] + queries, sums[1].saturating_add(if chunk.is_some() { length } else { 0 })];
            // Keys are as many as queries: without padding before it, query 0 of the chunk is aligned with the key of its own row.
            assert!(chunk.is_none() || diagonals[sequence] == begin.cast_signed(), "{diagonals:?}, {ends:?} in {padded:?}");
        }
    }
    assert_eq!([arrays[2 * batches], arrays[4 * batches + 1]], sums, "{rank} of {ranks}, {ends:?} in {padded:?}");
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(512) })]

        /// Sums of sequences that the ranks can share, but for what is wrong with them: an element, or the number of elements.
        #[test]
        fn sums_are_taken_by_the_rule(
            ranks in 1u32..6,
            is_zigzag: bool,
            lengths in prop::collection::vec((prop_oneof![20 => 0u32..9, 1 => 0u32..1 << 28], 0u32..100), 0..6),
            wrong in prop::option::of((any::<prop::sample::Index>(), prop_oneof![-9i64..9, Just(1 << 30), Just(-1 << 30)], any::<bool>())),
            shorter in prop_oneof![9 => Just([0usize, 0]), 1 => [0usize..2, 0usize..2]],
        ) {
            let chunks = if is_zigzag { 2 * ranks } else { ranks };
            let (mut ends, mut padded) = (vec![0u32], vec![0u32]);
            for (of_chunk, share) in lengths {
                let rows = of_chunk.saturating_mul(chunks);
                ends.push(ends[ends.len() - 1].saturating_add((u64::from(rows) * u64::from(share) / 99) as u32));
                padded.push(padded[padded.len() - 1].saturating_add(rows));
            }
            if let Some((at, by, is_padded)) = wrong {
                let sums = if is_padded { &mut padded } else { &mut ends };
                let at = at.index(sums.len());
                sums[at] = (i64::from(sums[at]) + by).clamp(0, u32::MAX.into()) as u32;
            }
            ends.truncate(ends.len().saturating_sub(shorter[0]));
            padded.truncate(padded.len().saturating_sub(shorter[1]));
            sequences(&ends, &padded, ranks, is_zigzag);
        }

        #[test]
        fn sums_of_any_numbers(ends in prop::collection::vec(0u32..40, 0..4), padded in prop::collection::vec(0u32..40, 0..4), ranks in 1u32..4, is_zigzag: bool) {
            sequences(&ends, &padded, ranks, is_zigzag);
        }
    }
}
