//! Packed sequences that ranks share: the sequences of launches, against pairs of a query and a key.

use oxtile::comm::{Rank, WorldSize};
use oxtile::thd::{Packed, Partition, Share, StepKeys, StepSequences, Steps};
use oxtile::{Buffer, Runtime, Stream};
use oxtile_tests::inputs::Random;
use oxtile_tests::oracle::thd::{Keys, Pass, Shared};

use crate::case::{Case, Outcome, Size, equal, stream, text};

/// Left and right bounds of masks: full, causal, windows on one side and on both.
const BOUNDS: [[Option<u64>; 2]; 6] =
    [[None, None], [None, Some(0)], [Some(5), Some(0)], [Some(2), Some(3)], [Some(0), None], [None, Some(9)]];

pub fn cases() -> Vec<Case> {
    let mut cases = Vec::new();
    for (name, partition) in [("zigzag", Partition::Zigzag), ("contiguous", Partition::Contiguous)] {
        for world in [1, 2, 3, 4, 8] {
            for is_cross in [false, true] {
                let what = if is_cross { "cross" } else { "equal" };
                cases.push(Case::new(format!("thd::step_sequences::{name}::{world}_ranks::{what}"), Size::Small, move |runtime| {
                    run(runtime, partition, world, is_cross)
                }));
            }
        }
        cases.push(Case::new(format!("thd::step_sequences::{name}::300_sequences"), Size::Large, move |runtime| many(runtime, partition)));
        cases.push(Case::new(format!("thd::step_sequences::{name}::garbage"), Size::Small, move |runtime| garbage(runtime, partition)));
    }
    cases.push(Case::new("thd::step_sequences::two_pieces", Size::Small, two_pieces));
    cases.push(Case::new("thd::step_sequences::golden", Size::Small, golden));
    cases.push(Case::new("thd::step_sequences::no_sequence", Size::Small, no_sequence));
    cases.push(Case::new("thd::step_sequences::refused", Size::Small, refused));
    cases
}

pub fn share(world: u32, rank: u32, partition: Partition) -> Share {
    let world = WorldSize::new(world).expect("a world has ranks");
    Share { world, rank: Rank::new(rank, world).expect("a rank of the world"), partition }
}

/// Sequences of lengths that are likely to go wrong, and of random ones, with as much padding as it takes and more.
pub fn shared(random: &mut Random, lengths: &[usize], partition: Partition, world: u32) -> Shared {
    let is_zigzag = partition == Partition::Zigzag;
    let chunks = world as usize * if is_zigzag { 2 } else { 1 };
    let padded = |random: &mut Random, length: usize| (length.div_ceil(chunks) + random.below(2) as usize) * chunks;
    Shared { lengths: lengths.iter().map(|&length| [length, padded(random, length)]).collect(), tail: 0, world: world as usize, is_zigzag }
}

fn run(runtime: &Runtime, partition: Partition, world: u32, is_cross: bool) -> Outcome {
    let stream = stream(runtime)?;
    let kernel = text(StepSequences::new(runtime))?;
    let mut random = Random::new(u64::from(world) + 10 * u64::from(is_cross));
    let lengths: Vec<usize> = [0, 1, 7, 40, 64].into_iter().chain((0..3).map(|_| random.below(50) as usize)).collect();
    let of_keys: Vec<usize> =
        if is_cross { lengths.iter().rev().map(|length| length + random.below(9) as usize).collect() } else { lengths.clone() };
    let queries = shared(&mut random, &lengths, partition, world);
    let keys = if is_cross { shared(&mut random, &of_keys, partition, world) } else { queries.clone() };
    for (keys_of, of) in [(StepKeys::Owners, Keys::Owners), (StepKeys::Chunks, Keys::Chunks), (StepKeys::Whole, Keys::Whole)] {
        for rank in 0..world {
            for (number, bounds) in BOUNDS.into_iter().enumerate() {
                // The sets of owners are for full masks, and for causal ones of equal numbers of queries and keys.
                if of == Keys::Owners && bounds != [None, None] && (is_cross || bounds != [None, Some(0)]) {
                    continue;
                }
                let [left, right] = bounds;
                let steps = Steps { keys: keys_of, share: share(world, rank, partition), left, right };
                let what = |why| format!("{steps:?}: {why}");
                let on_host = text(StepSequences::on_host(steps, slices(&queries.sums()), slices(&keys.sums())))?;
                let pass = Pass { queries: &queries, keys: &keys, rank: rank as usize, of, bounds };
                pass.judge(&on_host.0, &on_host.1).map_err(what)?;
                if number % 3 == rank as usize % 3 || of == Keys::Owners {
                    let found = launch(&stream, &kernel, steps, &queries.sums(), &keys.sums())?;
                    equal("arrays", &found.0, &on_host.0).map_err(what)?;
                    equal("diagonals", &found.1, &on_host.1).map_err(what)?;
                }
            }
        }
    }
    Ok(())
}

fn slices(sums: &[Vec<u32>; 2]) -> Packed<&[u32]> {
    Packed { cu_seqlens: &sums[0], cu_seqlens_padded: &sums[1] }
}

fn launch(
    stream: &Stream,
    kernel: &StepSequences,
    steps: Steps,
    queries: &[Vec<u32>; 2],
    keys: &[Vec<u32>; 2],
) -> Result<(Vec<u32>, Vec<i32>), String> {
    let upload = |sums: &Vec<u32>| text(Buffer::from_slice(stream, sums));
    let [q, q_padded, k, k_padded] = [upload(&queries[0])?, upload(&queries[1])?, upload(&keys[0])?, upload(&keys[1])?];
    let [arrays, diagonals] = steps.sizes(queries[0].len() as u64 - 1);
    let (mut arrays, mut diagonals) = (text(Buffer::uninitialised(stream, arrays))?, text(Buffer::uninitialised(stream, diagonals))?);
    let queries = Packed { cu_seqlens: q.view(), cu_seqlens_padded: q_padded.view() };
    let keys = Packed { cu_seqlens: k.view(), cu_seqlens_padded: k_padded.view() };
    text(kernel.run(stream, steps, queries, keys, arrays.view_mut(), diagonals.view_mut()))?;
    Ok((text(arrays.to_vec(stream))?, text(diagonals.to_vec(stream))?))
}

/// More sequences than a block has threads.
fn many(runtime: &Runtime, partition: Partition) -> Outcome {
    let (stream, kernel, mut random) = (stream(runtime)?, text(StepSequences::new(runtime))?, Random::new(3));
    let lengths: Vec<usize> = (0..300).map(|_| random.below(20) as usize).collect();
    let shared = shared(&mut random, &lengths, partition, 2);
    for (keys, of) in [(StepKeys::Owners, Keys::Owners), (StepKeys::Chunks, Keys::Chunks), (StepKeys::Whole, Keys::Whole)] {
        let steps = Steps { keys, share: share(2, 1, partition), left: None, right: Some(0) };
        let (arrays, diagonals) = launch(&stream, &kernel, steps, &shared.sums(), &shared.sums())?;
        Pass { queries: &shared, keys: &shared, rank: 1, of, bounds: [None, Some(0)] }.judge(&arrays, &diagonals)?;
        equal("arrays", &arrays, &text(StepSequences::on_host(steps, slices(&shared.sums()), slices(&shared.sums())))?.0)?;
    }
    Ok(())
}

/// The second piece of a block's sequences goes on where the first ended.
fn two_pieces(runtime: &Runtime) -> Outcome {
    let (stream, kernel) = (stream(runtime)?, text(StepSequences::new(runtime))?);
    let sums = [(0..=140).map(|i| 3 * i).collect::<Vec<u32>>(), (0..=140).map(|i| 4 * i).collect()];
    let steps = Steps { keys: StepKeys::Whole, share: share(1, 0, Partition::Zigzag), left: None, right: None };
    let (arrays, _) = launch(&stream, &kernel, steps, &sums, &sums)?;
    // Late chunks have one valid row of two, early ones two.
    let ends: Vec<u32> = (0..=280).map(|i: u32| i + i.saturating_sub(140)).collect();
    equal("query_ends", &arrays[..281], &ends)?;
    equal("key_ends", &arrays[281..562], &(0..=280).map(|i| 3 * i).collect::<Vec<u32>>())
}

/// The example of transformer-engine's all-gather of packed sequences on two ranks: 7 and 4 tokens, padded to 8 and 4, causal. Its step 0 has the early
/// chunks, step 1 the late ones.
fn golden(runtime: &Runtime) -> Outcome {
    let (stream, kernel) = (stream(runtime)?, text(StepSequences::new(runtime))?);
    let sums = [vec![0, 7, 11], vec![0, 8, 12]];
    let lengths = |steps: [[u32; 3]; 2]| -> Vec<u32> {
        [1, 0].into_iter().flat_map(|step| [steps[step][1], steps[step][2] - steps[step][1]]).collect()
    };
    // Of each rank cu_q and cu_kv of both steps.
    let of_ranks = [[[[0, 2, 3], [0, 1, 2]], [[0, 2, 3], [0, 7, 11]]], [[[0, 2, 3], [0, 2, 3]], [[0, 4, 6], [0, 6, 9]]]];
    for (rank, [queries, keys]) in of_ranks.into_iter().enumerate() {
        let steps = Steps { keys: StepKeys::Whole, share: share(2, rank as u32, Partition::Zigzag), left: None, right: Some(0) };
        let (arrays, _) = launch(&stream, &kernel, steps, &sums, &sums)?;
        let differences = |ends: &[u32]| -> Vec<u32> { ends.windows(2).map(|ends| ends[1] - ends[0]).collect() };
        equal("queries", &differences(&arrays[..5]), &lengths(queries))?;
        equal("keys", &differences(&arrays[5..10]), &lengths(keys))?;
        equal("query_offsets", &arrays[10..15], &[2, 5, 0, 4, 6])?;
        equal("key_offsets", &arrays[15..20], &[0, 8, 0, 8, 12])?;
    }
    Ok(())
}

/// Whatever the arrays hold, sums do not wrap and nothing outside is read or written.
fn garbage(runtime: &Runtime, partition: Partition) -> Outcome {
    let (stream, kernel, mut random) = (stream(runtime)?, text(StepSequences::new(runtime))?, Random::new(8));
    let mut words = |count: usize| -> Vec<u32> {
        let word = |random: &mut Random| match random.below(4) {
            0 => u32::MAX,
            1 => random.below(1 << 31) as u32 + (1 << 31),
            2 => random.below(40) as u32,
            _ => random.below(1 << 32) as u32,
        };
        (0..count).map(|_| word(&mut random)).collect()
    };
    for keys in [StepKeys::Owners, StepKeys::Chunks, StepKeys::Whole] {
        for bounds in [[None, None], [None, Some(0)], [Some(1 << 29), Some(1 << 29)]] {
            let steps = Steps { keys, share: share(3, 2, partition), left: bounds[0], right: bounds[1] };
            let (arrays, _) = launch(&stream, &kernel, steps, &[words(31), words(31)], &[words(31), words(31)])?;
            for ends in arrays.chunks(61).enumerate().filter(|(number, _)| number % 4 < 2).map(|(_, ends)| ends) {
                if !ends.is_sorted() || ends[0] != 0 {
                    return Err(format!("{steps:?}: ends that fall: {ends:?}"));
                }
            }
        }
    }
    Ok(())
}

fn no_sequence(runtime: &Runtime) -> Outcome {
    let (stream, kernel) = (stream(runtime)?, text(StepSequences::new(runtime))?);
    let steps = Steps { keys: StepKeys::Owners, share: share(2, 0, Partition::Zigzag), left: None, right: Some(0) };
    let sums = [vec![0], vec![0]];
    let found = launch(&stream, &kernel, steps, &sums, &sums)?;
    equal("arrays", &found.0, &[0; 8])?;
    equal("of the host", &text(StepSequences::on_host(steps, slices(&sums), slices(&sums)))?.0, &[0; 8])
}

/// What the host knows to be wrong is named, with what would be right.
fn refused(runtime: &Runtime) -> Outcome {
    let (stream, kernel) = (stream(runtime)?, text(StepSequences::new(runtime))?);
    let steps = Steps { keys: StepKeys::Whole, share: share(2, 1, Partition::Zigzag), left: None, right: None };
    let refused = |result: oxtile::Result<()>, expected: &str| match result {
        Err(error) if error.to_string().contains(expected) => Ok(()),
        Err(error) => Err(format!("refused by `{error}`, expected `{expected}`")),
        Ok(()) => Err(format!("taken, expected `{expected}`")),
    };
    let on_host = |steps: Steps, ends: &[u32], offsets: &[u32], expected: &str| {
        let packed = Packed { cu_seqlens: ends, cu_seqlens_padded: offsets };
        refused(StepSequences::on_host(steps, packed, packed).map(drop), expected)
    };
    on_host(steps, &[0, 3], &[0, 6], "sequence 0 has 3 rows in 6 padded ones: pad it to a multiple of 4")?;
    on_host(steps, &[0, 3, 12], &[0, 4, 12], "sequence 1 has 9 rows in 8 padded ones")?;
    on_host(steps, &[0, 3, 2], &[0, 4, 8], "sequence 1 ends before it begins")?;
    on_host(steps, &[0, 3], &[4, 8], "cu_seqlens_padded begins with 4: begin with 0")?;
    on_host(steps, &[0, 3], &[0, 4, 8], "cu_seqlens of 2 elements and cu_seqlens_padded of 3")?;
    on_host(steps, &[], &[], "cu_seqlens of 0 elements")?;
    on_host(steps, &[0, 1 << 30], &[0, 1 << 30], "sequence 0 ends at row 1073741824")?;
    let of_one = Share { world: WorldSize::ONE, ..steps.share };
    on_host(Steps { share: of_one, ..steps }, &[0], &[0], "rank 1 of 1 ranks: give a rank of that world")?;
    on_host(Steps { share: share(65_537, 0, Partition::Zigzag), ..steps }, &[0], &[0], "at most 65536 share rows")?;
    let (two, three) = (
        Packed { cu_seqlens: &[0, 4][..], cu_seqlens_padded: &[0, 4] },
        Packed { cu_seqlens: &[0, 4, 4][..], cu_seqlens_padded: &[0, 4, 4] },
    );
    refused(StepSequences::on_host(steps, two, three).map(drop), "queries of 1 sequences, keys of 2")?;
    let (sums, mut arrays, mut diagonals) =
        (text(Buffer::<u32>::zeros(&stream, 3))?, text(Buffer::<u32>::zeros(&stream, 20))?, text(Buffer::<i32>::zeros(&stream, 4))?);
    let mut launch = |count: u64, arrays_count: u64, diagonals_count: u64, expected: &str| {
        let packed = Packed { cu_seqlens: sums.view(), cu_seqlens_padded: sums.view().slice(0, count) };
        let (arrays, diagonals) = (arrays.view_mut().split_at(arrays_count).0, diagonals.view_mut().split_at(diagonals_count).0);
        refused(kernel.run(&stream, steps, packed, packed, arrays, diagonals), expected)
    };
    launch(2, 20, 4, "`queries.cu_seqlens_padded` has 2 elements; the other arguments ask for 3")?;
    launch(3, 19, 4, "`arrays` has 19 elements; the other arguments ask for 20")?;
    launch(3, 20, 3, "`diagonals` has 3 elements; the other arguments ask for 4")
}
