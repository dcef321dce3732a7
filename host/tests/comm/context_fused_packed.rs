//! Packed sequences in one launch, whose kernel finds the keys of each chunk at their owner: each rank's part against the whole, and the bits of one device.

use oxtile::attention::{AttentionConfig, Layout, Mask};
use oxtile::context_parallel::{ContextParallel, ContextParallelConfig, Partition, Schedule};
use oxtile::num::{bf16, f16};
use oxtile::runtime::Mode;

use crate::context_calls::{captured, run_ahead, same_bits, two_layers};
use crate::context_case::{Case, Element};
use crate::context_parallel::BASE;
use crate::context_ranks::Ranks;
use crate::support::{is_long, seeds};
use crate::values::values;

const MASKS: [Mask; 2] = [Mask::Full, Mask::CausalBottomRight];

/// Each of these with either mask, in quick runs by turns.
fn by_turns<T: Clone>(all: Vec<T>) -> impl Iterator<Item = (T, Mask)> {
    let is_taken = |at: usize, of: usize| is_long() || of == at % 2;
    let of = move |(at, one): (usize, T)| [0, 1].into_iter().filter(move |of| is_taken(at, *of)).map(move |of| (one.clone(), MASKS[of]));
    all.into_iter().enumerate().flat_map(of)
}

/// A forward pass in one launch of these sequences, and some rows after them.
fn case(ranks: u32, lengths: Vec<[u64; 2]>, attention: AttentionConfig) -> Case {
    let rows = lengths.iter().map(|[_, padded]| padded).sum::<u64>() + 2 * u64::from(ranks);
    let batches = lengths.len() as u64;
    let attention = AttentionConfig { layout: Layout::Packed, batches, queries: rows, keys: rows, ..attention };
    Case { lengths, ..Case::new(ranks, attention).fused() }
}

/// Empty sequences, of one token, of padding alone, and whole ones, in every world; key heads that are shared.
#[test]
fn every_world() {
    for ranks in 1..=4 {
        let unit = 2 * u64::from(ranks);
        let lengths = [
            vec![[3 * unit - 2, 3 * unit], [1, unit], [0, 0], [0, unit], [unit, unit]],
            vec![[0, unit], [0, 0]],
            vec![[0, 0], [20 * unit + 1, 21 * unit], [1, 2 * unit]],
        ];
        for (lengths, mask) in by_turns(lengths.to_vec()) {
            case(ranks, lengths, AttentionConfig { heads: 4, key_heads: 2, mask, ..BASE }).run().unwrap();
        }
    }
}

/// Chunks of several blocks of keys, the last of which is whole, half full, or of one key; a length that ends in the first, a middle and the last block of a chunk; heads of
/// several sections.
#[test]
fn chunks_of_several_blocks() {
    let of_chunks = |chunk: u64, length: u64| [length, 4 * chunk];
    let lengths = [
        vec![of_chunks(129, 516), of_chunks(128, 300), of_chunks(64, 255)],
        vec![of_chunks(200, 401), of_chunks(256, 1024), of_chunks(1, 3)],
        vec![of_chunks(260, 520), of_chunks(5, 20), of_chunks(130, 131)],
    ];
    for ((at, lengths), mask) in by_turns(lengths.into_iter().enumerate().collect()) {
        let (head_size, heads) = if at == 0 { (128, 6) } else { (64, 2) };
        let attention = AttentionConfig { heads, key_heads: heads, head_size, mask, ..BASE };
        let case = case(2, lengths, attention);
        // What each rank has is told apart from what others have.
        let mut whole = case.whole();
        case.tell_ranks_apart(&mut whole);
        let expected = whole.solve();
        for (rank, found) in case.world().ranks().zip(case.results_of(&whole).unwrap()) {
            case.compare(rank, &found, &expected);
        }
    }
}

/// Random lengths of random worlds, masks and heads.
#[test]
fn random_sequences() {
    let count = if is_long() { 200 } else { 4 };
    for seed in 1..=count {
        let mut numbers = values(seed, 64).into_iter().map(|x| (x.to_f32().abs() * 1e4) as u64);
        let mut below = |bound: u64| numbers.next().unwrap() % bound;
        let ranks = 1 + below(4) as u32;
        let unit = 2 * u64::from(ranks);
        let lengths = (0..1 + below(5)).map(|_| {
            let most = if below(3) == 0 { 60 } else { 8 };
            let padded = below(most) * unit;
            [padded - below(padded.min(unit) + 1), padded]
        });
        let lengths = lengths.collect();
        let [key_heads, group] = [1 + below(3), 1 + below(2)];
        let attention = AttentionConfig { heads: key_heads * group, key_heads, mask: MASKS[below(2) as usize], ..BASE };
        Case { seed, ..case(ranks, lengths, attention) }.run().unwrap();
    }
}

/// Chunks that are multiples of a tile's queries and of a block's keys give the bits of one device.
#[test]
fn bits_are_those_of_one_device() {
    let lengths = |chunk: u64, ranks: u64| vec![[2 * ranks * chunk, 2 * ranks * chunk], [ranks * chunk + 77, 2 * ranks * chunk], [0, 0]];
    // Six key heads of 128 elements are two sections.
    for ((ranks, heads, head_size), mask) in by_turns(vec![(2, 6, 128), (3, 1, 128), (2, 1, 64)]) {
        let (attention, chunk) =
            (AttentionConfig { heads, key_heads: heads, head_size, mask, ..BASE }, if head_size == 64 { 384 } else { 128 });
        let case = case(ranks, lengths(chunk, ranks.into()), attention);
        assert!(if head_size == 64 { bits_of::<f16>(&case) } else { bits_of::<bf16>(&case) }, "{mask:?}");
    }
}

fn bits_of<T: Element>(case: &Case) -> bool {
    let whole = case.whole();
    let one = ContextParallelConfig { forward: Schedule::AllToAll, backward: Schedule::AllToAll, ..case.config };
    let one = Case { ranks: 1, config: one, ..case.clone() }.results_in::<T>(&whole).unwrap();
    case.world().ranks().zip(case.results_in::<T>(&whole).unwrap()).all(|(rank, found)| {
        let one = case.of_rank(rank, &one[0]);
        found.out == one.out && found.log_sum_exp == one.log_sum_exp
    })
}

/// Both passes in one launch each: chunks of whole blocks of keys and others, sequences that are short, empty, or end in the early chunk; heads that share keys.
#[test]
fn both_passes() {
    for (ranks, mask) in by_turns(vec![1, 2, 3]) {
        let unit = 2 * u64::from(ranks);
        let mut lengths = vec![[130 * unit - 7, 130 * unit], [64 * unit + 1, 128 * unit]];
        if ranks > 1 {
            lengths.extend([[0, 0], [1, unit]]);
        }
        let attention = AttentionConfig { heads: 2, key_heads: 1, mask, head_size: if ranks == 2 { 128 } else { 64 }, ..BASE };
        let case = case(ranks, lengths, attention).by(Schedule::Fused);
        let mut whole = case.whole();
        case.tell_ranks_apart(&mut whole);
        let expected = whole.solve();
        for (rank, found) in case.world().ranks().zip(case.results_of(&whole).unwrap()) {
            case.compare(rank, &found, &expected);
        }
    }
}

/// Where chunks are multiples of a block of keys, gradients of queries have the bits of one device.
#[test]
fn gradients_of_queries_are_those_of_one_device() {
    for (mask, head_size) in MASKS.into_iter().zip([64, 128]) {
        let attention = AttentionConfig { heads: 1, key_heads: 1, head_size, mask, ..BASE };
        let case = case(2, vec![[512, 512], [300, 512]], attention).by(Schedule::Fused);
        let whole = case.whole();
        let one = Case { ranks: 1, ..case.clone().by(Schedule::AllToAll) }.results_of(&whole).unwrap();
        for (rank, found) in case.world().ranks().zip(case.results_of(&whole).unwrap()) {
            assert!(found.grad_q == case.of_rank(rank, &one[0]).grad_q, "{case:?}, {rank}");
        }
    }
}

/// In a graph before any call, of two layers by turns, by ranks that run ahead, and in any order of streams: always the same bits.
#[test]
fn passes_in_any_order() {
    let attention = AttentionConfig { heads: 2, key_heads: 1, ..BASE };
    let case = case(2, vec![[70, 72], [1, 4], [0, 0], [4, 4]], attention);
    captured(&case).unwrap();
    two_layers(&case).unwrap();
    let both = self::case(2, vec![[516, 516]], AttentionConfig { heads: 1, ..attention }).by(Schedule::Fused);
    captured(&both).unwrap();
    same_bits(&both, if is_long() { seeds() / 4 } else { 2 });
    (1..=seeds() / 32).for_each(|seed| run_ahead(&Case { seed, mode: Mode::Check, ..case.clone() }).unwrap());
    same_bits(&case, seeds() / 16);
}

/// What it does not take is refused by name, with what to take instead.
#[test]
fn what_is_not_taken_is_refused() {
    let refused = |config: ContextParallelConfig, parts: [&str; 2]| {
        let case = case(2, vec![[8, 8]], BASE);
        let ranks = Ranks::new(&case).unwrap();
        let error = ContextParallel::<bf16>::new(&ranks.world.streams[0], ranks.transport(0), config).unwrap_err().to_string();
        assert!(parts.iter().all(|part| error.contains(part)), "{error}");
    };
    let fused = case(2, vec![[8, 8]], BASE).config;
    let of = |attention| ContextParallelConfig { attention, ..fused };
    refused(ContextParallelConfig { partition: Partition::Contiguous, ..fused }, ["fused", "zigzag"]);
    refused(of(AttentionConfig { head_size: 256, ..fused.attention }), ["fused", "head"]);
    refused(fused.by(Schedule::Fused), ["fused", "take pull, gather or all-to-all"]);
    refused(of(AttentionConfig { queries: 8 << 20, keys: 8 << 20, ..fused.attention }), ["fused", "in 16 bits"]);
}
