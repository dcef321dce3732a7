//! Rows of packed sequences that ranks share: orders, indices, halves and valid rows, word for word.

use oxtile::comm::WorldSize;
use oxtile::num::bf16;
use oxtile::thd::{CopyValid, Half, Partition, PartitionIndices, ReadHalf, Reorder};
use oxtile::{Buffer, Runtime};
use oxtile_tests::inputs::Random;
use oxtile_tests::oracle::thd::Shared;

use super::thd::{share, shared};
use crate::case::{Case, Outcome, Size, equal, stream, text};

/// What no kernel writes.
const KEPT: u32 = 0x7777_7777;

pub fn cases() -> Vec<Case> {
    let mut cases = Vec::new();
    for (name, partition) in [("zigzag", Partition::Zigzag), ("contiguous", Partition::Contiguous)] {
        for world in [1, 2, 3, 8] {
            cases.push(Case::new(format!("thd::reorder::{name}::{world}_ranks"), Size::Small, move |runtime| {
                // Words of a row: a vector, an odd number of them, more than a warp has in flight.
                [4, 12, 520].into_iter().try_for_each(|words| reorder(runtime, &of_lengths(partition, world), partition, words))
            }));
            cases.push(Case::new(format!("thd::reorder::{name}::{world}_ranks_of_three_teams"), Size::Small, move |runtime| {
                reorder_of_teams(runtime, &of_lengths(partition, world), partition, 12, 3)
            }));
        }
        cases.push(Case::new(format!("thd::reorder::{name}::1000_sequences"), Size::Large, move |runtime| {
            let mut random = Random::new(2);
            let lengths: Vec<usize> = (0..1000).map(|_| random.below(12) as usize).collect();
            reorder(runtime, &shared(&mut random, &lengths, partition, 4), partition, 16)
        }));
        cases.push(Case::new(format!("thd::reorder::{name}::garbage"), Size::Small, move |runtime| garbage(runtime, partition, false)));
        cases.push(Case::new(format!("thd::reorder::{name}::garbage_scattered"), Size::Large, move |runtime| {
            garbage(runtime, partition, true)
        }));
    }
    for world in [1, 2, 3, 8] {
        cases.push(Case::new(format!("thd::read_half::{world}_ranks"), Size::Small, move |runtime| {
            [4, 36, 516].into_iter().try_for_each(|words| read_half(runtime, world, words))
        }));
    }
    cases.push(Case::new("thd::reorder::golden", Size::Small, golden));
    cases.push(Case::new("thd::reorder::no_sequence", Size::Small, no_sequence));
    cases.push(Case::new("thd::copy_valid", Size::Small, copy_valid));
    cases.push(Case::new("thd::rows::refused", Size::Small, refused));
    cases
}

/// Sequences that are likely to go wrong, and rows after them.
pub fn of_lengths(partition: Partition, world: u32) -> Shared {
    let mut random = Random::new(world.into());
    Shared { tail: 3 * world as usize, ..shared(&mut random, &[0, 5, 0, 1, 17, 40, 0], partition, world) }
}

fn world_of(world: usize) -> WorldSize {
    WorldSize::new(world as u32).expect("a world has ranks")
}

fn reorder(runtime: &Runtime, shared: &Shared, partition: Partition, words: usize) -> Outcome {
    reorder_of_teams(runtime, shared, partition, words, 1)
}

/// `shared` has an equal part of each sequence, one of `teams`.
fn reorder_of_teams(runtime: &Runtime, shared: &Shared, partition: Partition, words: usize, teams: u32) -> Outcome {
    let stream = stream(runtime)?;
    let whole = text(Buffer::from_slice(&stream, &shared.sums()[1].iter().map(|sum| sum * teams).collect::<Vec<_>>()))?;
    let [_, offsets] = shared.sums();
    let offsets = text(Buffer::from_slice(&stream, &offsets))?;
    let rows = shared.rows() + shared.tail;
    let mut random = Random::new(words as u64);
    let natural: Vec<u32> = (0..rows * words).map(|_| random.bits() as u32).collect();
    let of_rank: Vec<Vec<usize>> = (0..shared.world).map(|rank| shared.rows_of(rank).into_iter().map(|row| row.0).collect()).collect();
    let rank_major: Vec<u32> = of_rank.concat().into_iter().flat_map(|row| natural[row * words..][..words].to_vec()).collect();

    let kernel = text(Reorder::new(runtime, world_of(shared.world), partition))?.of_teams(teams);
    let (of_natural, of_ranks) = (text(Buffer::from_slice(&stream, &natural))?, text(Buffer::from_slice(&stream, &rank_major))?);
    let [mut there, mut back] = [
        text(Buffer::<u32>::uninitialised(&stream, natural.len() as u64))?,
        text(Buffer::<u32>::uninitialised(&stream, natural.len() as u64))?,
    ];
    // Rows of any element.
    let width = 2 * words as u64;
    text(kernel.to_natural(&stream, whole.view(), of_ranks.view().cast::<bf16>(), there.view_mut().cast(), width))?;
    text(kernel.to_rank_major(&stream, whole.view(), of_natural.view().cast::<bf16>(), back.view_mut().cast(), width))?;
    equal("natural", &text(there.to_vec(&stream))?, &natural)?;
    equal("rank-major", &text(back.to_vec(&stream))?, &rank_major)?;

    // A number for each of some heads and each row.
    const HEADS: usize = 3;
    let by_head = |head: usize, rows: &[usize]| rows.iter().map(|row| (head * 1000 + row) as f32).collect::<Vec<_>>();
    let heads = |rows: &[usize]| (0..HEADS).flat_map(|head| by_head(head, rows)).collect::<Vec<_>>();
    let (natural, by_rank) = (heads(&(0..rows).collect::<Vec<_>>()), of_rank.iter().flat_map(|rows| heads(rows)).collect::<Vec<_>>());
    let (of_natural, of_ranks) = (text(Buffer::from_slice(&stream, &natural))?, text(Buffer::from_slice(&stream, &by_rank))?);
    let [mut there, mut back] =
        [text(Buffer::<f32>::zeros(&stream, natural.len() as u64))?, text(Buffer::<f32>::zeros(&stream, natural.len() as u64))?];
    text(kernel.numbers_to_natural(&stream, whole.view(), of_ranks.view(), there.view_mut(), HEADS as u64))?;
    text(kernel.numbers_to_rank_major(&stream, whole.view(), of_natural.view(), back.view_mut(), HEADS as u64))?;
    equal("natural numbers", &text(there.to_vec(&stream))?, &natural)?;
    equal("rank-major numbers", &text(back.to_vec(&stream))?, &by_rank)?;

    for (rank, expected) in of_rank.iter().enumerate() {
        let kernel = text(PartitionIndices::new(runtime, share(shared.world as u32, rank as u32, partition)))?;
        let mut indices = text(Buffer::uninitialised(&stream, expected.len() as u64))?;
        text(kernel.run(&stream, offsets.view(), rows as u64, indices.view_mut()))?;
        let expected: Vec<u32> = expected.iter().map(|&row| row as u32).collect();
        equal("indices", &text(indices.to_vec(&stream))?, &expected)?;
    }
    Ok(())
}

/// The tokens that two ranks hold of sequences of 8 and 4 rows (transformer-engine's example), and its drawing of lengths 8, 8, 8 and 16 on four.
fn golden(runtime: &Runtime) -> Outcome {
    let stream = stream(runtime)?;
    let check = |world: u32, offsets: &[u32], rank: u32, expected: &[u32]| {
        let kernel = text(PartitionIndices::new(runtime, share(world, rank, Partition::Zigzag)))?;
        let sums = text(Buffer::from_slice(&stream, offsets))?;
        let mut indices = text(Buffer::uninitialised(&stream, expected.len() as u64))?;
        text(kernel.run(&stream, sums.view(), (expected.len() * world as usize) as u64, indices.view_mut()))?;
        equal("indices", &text(indices.to_vec(&stream))?, expected)
    };
    check(2, &[0, 8, 12], 0, &[0, 1, 6, 7, 8, 11])?;
    check(2, &[0, 8, 12], 1, &[2, 3, 4, 5, 9, 10])?;
    check(4, &[0, 8, 16, 24, 40], 0, &[0, 7, 8, 15, 16, 23, 24, 25, 38, 39])?;
    check(4, &[0, 8, 16, 24, 40], 3, &[3, 4, 11, 12, 19, 20, 30, 31, 32, 33])
}

/// Rows that belong to no sequence are cut into a chunk a rank.
fn no_sequence(runtime: &Runtime) -> Outcome {
    reorder(runtime, &Shared { lengths: Vec::new(), tail: 6, world: 3, is_zigzag: true }, Partition::Zigzag, 4)
}

fn read_half(runtime: &Runtime, world: u32, words: usize) -> Outcome {
    const GROUPS: usize = 2;
    let (stream, shared) = (stream(runtime)?, Shared { tail: 2 * world as usize, ..of_lengths(Partition::Zigzag, world) });
    let offsets = text(Buffer::from_slice(&stream, &shared.sums()[1]))?;
    let rows = (shared.rows() + shared.tail) / shared.world;
    let whole: Vec<u32> = (0..(GROUPS * rows * words) as u32).collect();
    let of_whole = text(Buffer::from_slice(&stream, &whole))?;
    let kernel = text(ReadHalf::new(runtime, world_of(shared.world)))?;
    for (which, is_late) in [(Half::Early, false), (Half::Late, true)] {
        let mut expected = Vec::new();
        for group in 0..GROUPS {
            let taken = shared.step_rows(Some(is_late));
            let row = |row: usize| whole[(group * rows + row) * words..][..words].to_vec();
            expected.extend(taken.iter().flat_map(|taken| row(taken.row)));
            expected.extend(vec![KEPT; (rows / 2 - taken.len()) * words]);
        }
        let mut half = text(Buffer::from_slice(&stream, &vec![KEPT; expected.len()]))?;
        let extent = [(rows / 2) as u64, words as u64];
        text(kernel.run(&stream, offsets.view(), which, of_whole.view(), half.view_mut(), extent))?;
        equal("half", &text(half.to_vec(&stream))?, &expected)?;
    }
    Ok(())
}

fn copy_valid(runtime: &Runtime) -> Outcome {
    const WORDS: usize = 12;
    let (stream, kernel) = (stream(runtime)?, text(CopyValid::new(runtime))?);
    // The first begins after row 0, the second is empty, the third is all of its rows, the last one ends beyond the tensor.
    let (ends, offsets) = ([4_u32, 7, 7, 12, 20], [2_u32, 8, 8, 14]);
    let rows = 17;
    let source: Vec<u32> = (0..(rows * WORDS) as u32).collect();
    let is_valid = |row: usize| [2..5, 8..13, 14..22].iter().any(|rows| rows.contains(&row));
    let expected: Vec<u32> = source.iter().map(|&word| if is_valid(word as usize / WORDS) { word } else { KEPT }).collect();
    let of = |words: &[u32]| text(Buffer::from_slice(&stream, words));
    let (of_source, ends, offsets) = (of(&source)?, of(&ends)?, of(&offsets)?);
    let mut target = of(&vec![KEPT; source.len()])?;
    text(kernel.run(&stream, ends.view(), offsets.view(), of_source.view(), target.view_mut(), WORDS as u64))?;
    equal("target", &text(target.to_vec(&stream))?, &expected)?;
    // Without sequences nothing is copied.
    let mut target = of(&vec![KEPT; source.len()])?;
    text(kernel.run(&stream, ends.view().slice(0, 1), offsets.view().slice(0, 0), of_source.view(), target.view_mut(), WORDS as u64))?;
    equal("target", &text(target.to_vec(&stream))?, &vec![KEPT; source.len()])
}

/// Whatever the arrays hold, nothing outside the tensors is read or written. Rows that are scattered may meet, which checks would report as a race.
fn garbage(runtime: &Runtime, partition: Partition, is_scattered: bool) -> Outcome {
    const ROWS: usize = 48;
    let (stream, mut random) = (stream(runtime)?, Random::new(4));
    let source = text(Buffer::from_slice(&stream, &[1_u32; 8 * ROWS]))?;
    for round in 0..6 {
        let word = |random: &mut Random| match (round + random.below(3)) % 3 {
            0 => random.below(1 << 32) as u32,
            1 => random.below(60) as u32,
            _ => u32::MAX,
        };
        let arrays: Vec<Buffer<u32>> = (0..2)
            .map(|_| text(Buffer::from_slice(&stream, &(0..9).map(|_| word(&mut random)).collect::<Vec<_>>())))
            .collect::<Result<_, _>>()?;
        let [first, second] = [arrays[0].view(), arrays[1].view()];
        let mut target = text(Buffer::from_slice(&stream, &[KEPT; 8 * ROWS]))?;
        let kernel = text(Reorder::new(runtime, world_of(3), partition))?;
        if is_scattered {
            text(kernel.to_natural(&stream, first, source.view(), target.view_mut(), 8))?;
        } else {
            text(kernel.to_rank_major(&stream, first, source.view(), target.view_mut(), 8))?;
            let half = target.view_mut().split_at(4 * ROWS as u64).0;
            text(text(ReadHalf::new(runtime, world_of(3)))?.run(&stream, first, Half::Late, source.view(), half, [ROWS as u64 / 2, 8]))?;
            text(text(CopyValid::new(runtime))?.run(&stream, first, second, source.view(), target.view_mut(), 8))?;
            let mut indices = text(Buffer::<u32>::uninitialised(&stream, ROWS as u64 / 3))?;
            text(text(PartitionIndices::new(runtime, share(3, 2, partition)))?.run(&stream, first, ROWS as u64, indices.view_mut()))?;
            if let Some(index) = text(indices.to_vec(&stream))?.into_iter().find(|&index| index as usize >= ROWS) {
                return Err(format!("index {index} of {ROWS} rows"));
            }
        }
        if let Some(word) = text(target.to_vec(&stream))?.into_iter().find(|&word| word != 1 && word != KEPT) {
            return Err(format!("{word:x} comes from nowhere"));
        }
    }
    Ok(())
}

/// What does not fit is named, with what would.
fn refused(runtime: &Runtime) -> Outcome {
    let stream = stream(runtime)?;
    let (offsets, source) = (text(Buffer::from_slice(&stream, &[0_u32, 8]))?, text(Buffer::<f32>::zeros(&stream, 65))?);
    let mut target = text(Buffer::<f32>::zeros(&stream, 65))?;
    let kernel = text(Reorder::new(runtime, world_of(3), Partition::Zigzag))?;
    let mut refuses = |[start, end]: [u64; 2], width: u64, expected: &str| {
        let result =
            kernel.to_natural(&stream, offsets.view(), source.view().slice(start, end), target.view_mut().split_at(end - start).0, width);
        match result {
            Err(error) if error.to_string().contains(expected) => Ok(()),
            Err(error) => Err(format!("refused by `{error}`, expected `{expected}`")),
            Ok(()) => Err(format!("launched, expected `{expected}`")),
        }
    };
    refuses([0, 48], 6, "rows of 24 bytes: pad them to a multiple of 16")?;
    refuses([1, 49], 8, "the source starts at")?;
    refuses([0, 32], 8, "`rows` counts 4, which is not a multiple of 3")?;
    refuses([0, 49], 8, "`source` has 49 elements; the other arguments ask for 48")
}
