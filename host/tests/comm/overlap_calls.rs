//! Gathered products beside one another: layers on one memory, memories of one arena, ranks that differ or do not call, and what is refused.

use std::time::Duration;

use half::bf16 as Half;
use oxtile::comm::Team;
use oxtile::gemm::GemmConfig;
use oxtile::gemm::{Activation, Gemm};
use oxtile::kernels::copy::{CopyWords, CopyWordsArgs};
use oxtile::num::{Float, bf16, e4m3};
use oxtile::overlap::{AllGatherConfig, AllGatherGemm, Cut, GatherOperands, Gathers, Global, Method, OverlapConfig, OverlapMemory};
use oxtile::symmetric::{ArenaOptions, PutOrder, SymmetricError};
use oxtile::{Buffer, Error, Graph, PinnedBuffer, Result, Stream};

use crate::arenas::Arenas;
use crate::overlap::{Calls, Case, ROUNDS, by, cut, last, member};
use crate::values::values;

/// Ranks with an operation each, on one memory.
pub struct Ranks {
    pub all: Arenas,
    /// The streams that carry copies.
    pub out: Vec<Stream>,
    pub memories: Vec<OverlapMemory>,
}

impl Ranks {
    pub fn new(ranks: u32, bytes: u64, options: ArenaOptions) -> Result<Self> {
        Self::over(Arenas::with(ranks, 1, options), bytes)
    }

    pub fn over(all: Arenas, bytes: u64) -> Result<Self> {
        let out = all.world.ranks.iter().map(|rank| rank.device().urgent_stream()).collect::<Result<Vec<_>>>()?;
        let memory = |(i, out)| OverlapMemory::take(&all.arenas[i], &member(&all, i), bytes, out);
        let memories = out.iter().enumerate().map(memory).collect::<Result<_>>()?;
        Ok(Self { all, out, memories })
    }

    pub fn gather(&self, i: usize, config: AllGatherConfig) -> Result<AllGatherGemm<bf16, bf16>> {
        AllGatherGemm::new(&self.memories[i], self.all.stream(i), config)
    }
}

/// Layers of other sizes, cuts and methods take one memory by turns.
#[test]
fn layers_share_a_memory() -> Result<()> {
    const METHODS: [Method; 3] = [Method::Fused, Method::Fused, Method::Chunked];
    let layers = [
        by(METHODS[0], Some(cut(1, 2)), [70, 32, 136]),
        by(METHODS[1], Some(last(2, 4)), [264, 16, 72]),
        by(METHODS[2], Some(last(2, 4)), [264, 16, 72]),
    ];
    let case = Case { ranks: 2, config: layers[0], calls: Calls::Eager, seed: 1 };
    let ranks = Ranks::new(2, 264 * 136 * 2, case.options())?;
    let mut results: Vec<Vec<Buffer<bf16>>> = Vec::new();
    let gathers: Vec<Vec<_>> =
        (0..2).map(|i| layers.iter().map(|layer| ranks.gather(i, *layer)).collect::<Result<_>>()).collect::<Result<_>>()?;
    let cases = layers.map(|config| Case { config, ..case });
    for i in 0..2 {
        let d = cases.map(|case| Buffer::uninitialised(ranks.all.stream(i), case.product().m * case.product().n));
        results.push(d.into_iter().collect::<Result<_>>()?);
    }
    // Each layer takes both places, after itself and after the others.
    for (round, layer) in [0, 1, 1, 0, 0, 1, 2, 2, 0, 2, 1].into_iter().enumerate() {
        let (case, operand) = (&cases[layer], round as u64 % ROUNDS);
        for i in 0..2 {
            let stream = ranks.all.stream(i);
            let weight = Buffer::from_slice(stream, &case.weight(i as u32))?;
            let shard = PinnedBuffer::from_slice(stream, &case.shard(&case.operand(operand), i as u32))?;
            let mut product = gathers[i][layer].bind(stream, weight.view(), None, results[i][layer].view_mut())?;
            product.shard(stream)?.copy_from_pinned(stream, &shard)?;
            product.run(stream)?;
        }
        for (i, results) in results.iter().enumerate() {
            ranks.all.arenas[i].ticket(ranks.all.stream(i))?.wait()?;
            let found: Vec<u16> = results[layer].to_vec_as::<Half>(ranks.all.stream(i))?.into_iter().map(Half::to_bits).collect();
            assert!(found == case.expected(METHODS[layer], i as u32)?[operand as usize], "{case:?}, rank {i}, round {round}");
        }
    }
    Ok(())
}

/// A rank that does not call is named, with the chunk that does not come.
#[test]
fn a_rank_that_does_not_call_is_named() -> Result<()> {
    for method in [Method::Fused, Method::Sequential] {
        let config = by(method, Some(cut(1, 1)), [70, 32, 136]);
        let case = Case { ranks: 2, config, calls: Calls::Eager, seed: 1 };
        let options = ArenaOptions { deadline: Duration::from_millis(300), ..case.options() };
        let ranks = Ranks::new(2, 70 * 136 * 2, options)?;
        let gathers = [ranks.gather(0, config)?, ranks.gather(1, config)?];
        let stream = ranks.all.stream(0);
        let (weight, mut d) = (Buffer::from_slice(stream, &case.weight(0))?, Buffer::uninitialised(stream, 70 * 16)?);
        let mut product = gathers[0].bind(stream, weight.view(), None, d.view_mut())?;
        product.shard(stream)?.fill_zero(stream)?;
        product.run(stream)?;
        let error = ranks.all.arenas[0].ticket(stream)?.wait().unwrap_err().to_string();
        assert!(error.contains("rank 1") && error.contains("chunk"), "{method:?}: {error}");
    }
    Ok(())
}

/// Members that made different operations learn of it before the first call, in every build.
#[test]
fn other_operations_on_other_ranks_are_refused() -> Result<()> {
    let config = by(Method::Fused, Some(cut(1, 2)), [72, 32, 136]);
    // A field more is a member more of this list, or, of formats, of that in `overlap_quantized`.
    #[rustfmt::skip]
    let AllGatherConfig { sizes: _, gathers: _, transpose_a: _, transpose_b: _, alpha: _, beta: _, activation: _, format: _, overlap } = config;
    let OverlapConfig { method: _, cut: _, order: _, margin: _ } = overlap;
    let cut_by = |cut| AllGatherConfig { overlap: OverlapConfig { cut: Some(cut), ..overlap }, ..config };
    let others = [
        AllGatherConfig { overlap: OverlapConfig { method: Some(Method::Sequential), ..config.overlap }, ..config },
        cut_by(cut(1, 1)),
        cut_by(cut(2, 2)),
        cut_by(last(1, 2)),
        cut_by(Cut { halving: true, ..cut(1, 2) }),
        AllGatherConfig { overlap: OverlapConfig { margin: 2, ..config.overlap }, ..config },
        AllGatherConfig { sizes: Global { m: 80, ..config.sizes }, ..config },
        AllGatherConfig { transpose_a: true, ..config },
        AllGatherConfig { transpose_b: true, ..config },
        AllGatherConfig { alpha: 2.0, ..config },
        AllGatherConfig { beta: 1.0, ..config },
        AllGatherConfig { activation: Activation::Gelu, ..config },
        AllGatherConfig { sizes: Global { n: 48, ..config.sizes }, ..config },
        AllGatherConfig { sizes: Global { k: 128, ..config.sizes }, ..config },
        AllGatherConfig { overlap: OverlapConfig { order: Some(PutOrder::ByPeer), ..config.overlap }, ..config },
        AllGatherConfig { gathers: Gathers::SumOfA, transpose_a: true, ..by(Method::Fused, Some(cut(1, 2)), [64, 32, 136]) },
    ];
    for other in others {
        let ranks = Ranks::new(2, 80 * 136 * 2, Case { ranks: 2, config, calls: Calls::Eager, seed: 1 }.options())?;
        let (gather, _other) = (ranks.gather(0, config)?, ranks.gather(1, other)?);
        let stream = ranks.all.stream(0);
        let (weight, mut d) = (Buffer::<bf16>::zeros(stream, 136 * 16)?, Buffer::<bf16>::zeros(stream, 72 * 16)?);
        let error = gather.bind(stream, weight.view(), None, d.view_mut()).unwrap_err();
        assert!(matches!(error, Error::Mismatch { .. }), "{other:?}: {error}");
    }
    Ok(())
}

#[test]
fn what_cannot_be_is_refused_with_its_mend() -> Result<()> {
    let config = by(Method::Fused, None, [70, 32, 136]);
    let ranks = Ranks::new(2, 70 * 136 * 2, Case { ranks: 2, config, calls: Calls::Eager, seed: 1 }.options())?;
    let refused = |config| ranks.gather(0, config).unwrap_err().to_string();
    let larger = refused(by(Method::Fused, None, [71, 32, 136]));
    assert_eq!(larger, "AllGatherGemm::new: an operation that needs 19312 bytes for a memory of 19040: take the most of all layers");
    let odd = refused(by(Method::Sequential, None, [70, 33, 136]));
    assert_eq!(odd, "Global::local: n is 33, which 2 ranks do not divide: pad it to 34");
    let unaligned = refused(by(Method::Fused, None, [70, 32, 132]));
    assert!(unaligned.contains("Fused cannot do it: k is 132, no multiple of 8"), "{unaligned}");
    let sums = refused(AllGatherConfig { gathers: Gathers::SumOfA, transpose_a: true, ..by(Method::Chunked, None, [64, 32, 64]) });
    assert!(sums.contains("the parts of a sum would be added up in the result's type"), "{sums}");
    let slabs = refused(by(Method::Fused, Some(cut(1, 9)), [70, 32, 136]));
    assert_eq!(slabs, "AllGatherConfig: 9 slabs: take 1 to 4");
    let margin = refused(AllGatherConfig { overlap: OverlapConfig { margin: 132, ..config.overlap }, ..config });
    assert_eq!(margin, "AllGatherConfig: a margin of 132 leaves none of 4 multiprocessors");

    let (gather, _other) = (ranks.gather(0, config)?, ranks.gather(1, config)?);
    let stream = ranks.all.stream(0);
    let (weight, mut d) = (Buffer::<bf16>::zeros(stream, 136 * 16)?, Buffer::<bf16>::zeros(stream, 70 * 16)?);
    let mut product = gather.bind(stream, weight.view(), None, d.view_mut())?;
    let unwritten = product.run(stream).unwrap_err().to_string();
    assert!(unwritten.starts_with("GatheredProduct::run: the shard of this call was not written"), "{unwritten}");
    Ok(())
}

/// A product of two ranks with all that may follow it, by the fused kernel and by the plain one; `T` is built from small numbers.
fn fused_and_plain<T: GatherOperands<bf16>>(values: impl Fn(&Stream, u64, u64) -> Result<Buffer<T>>, scaled: bool) -> Result<()> {
    let sizes = Global { m: 72, n: 64, k: 272 };
    let overlap = OverlapConfig { method: Some(Method::Fused), cut: Some(cut(2, 2)), ..OverlapConfig::default() };
    let (beta, activation) = if scaled { (0.0, Activation::Identity) } else { (0.5, Activation::Gelu) };
    let config = AllGatherConfig { transpose_b: true, alpha: 0.75, beta, activation, overlap, ..AllGatherConfig::new(sizes) };
    let options = Case { ranks: 2, config, calls: Calls::Eager, seed: 1 }.options();
    let ranks = Ranks::new(2, config.bytes::<T, bf16>()?, options)?;
    let product = config.product(ranks.all.world.size())?;
    let gathers = [0, 1].map(|i| AllGatherGemm::<T, bf16>::new(&ranks.memories[i], ranks.all.stream(i), config));
    let gathers = gathers.into_iter().collect::<Result<Vec<_>>>()?;
    let shard = sizes.m / 2 * sizes.k;
    let operands = |i: usize| {
        let (stream, seed) = (ranks.all.stream(i), 8 + i as u64);
        let (a, b) = (Buffer::from_slice(stream, &[1.5_f32])?, Buffer::from_slice(stream, &[0.25_f32])?);
        Ok((values(stream, 7, sizes.m * sizes.k)?, values(stream, seed, product.n * product.k)?, a, b))
    };
    let all = [0, 1].into_iter().map(operands).collect::<Result<Vec<_>>>()?;
    let mut found: Vec<Buffer<bf16>> = Vec::new();
    for (i, gather) in gathers.iter().enumerate() {
        let (stream, (whole, weight, a, b)) = (ranks.all.stream(i), &all[i]);
        let bias = Buffer::from_slice(stream, &self::values(3, product.n))?;
        let (mut d, mut own) = (Buffer::zeros(stream, sizes.m * product.n)?, Buffer::<T>::zeros(stream, shard)?);
        let mine = whole.view().slice(i as u64 * shard, (i as u64 + 1) * shard).cast();
        let copy = ranks.all.world.runtime.load::<CopyWords>()?;
        copy.launch(stream, CopyWordsArgs { source: mine, target: own.view_mut().cast() })?;
        if scaled {
            let many = Buffer::<f32>::zeros(stream, 2)?;
            let refused = gather.bind_scaled(stream, weight.view(), [many.view(), b.view()], None, d.view_mut());
            assert!(matches!(refused, Err(Error::Length { what: "AllGatherGemm::bind, scale", .. })));
        }
        let mut bound = match scaled {
            true => gather.bind_scaled(stream, weight.view(), [a.view(), b.view()], Some(bias.view()), d.view_mut())?,
            false => gather.bind(stream, weight.view(), Some(bias.view()), d.view_mut())?,
        };
        bound.copy_shard(stream, &own)?;
        bound.run(stream)?;
        drop(bound);
        found.push(d);
    }
    let plans = product.plans::<T, bf16>(&ranks.all.world.runtime.device(0)?);
    let plan = *plans.iter().find(|plan| plan.parts == 1).expect("a plan is not split");
    let plain = Gemm::<T, bf16>::planned(&ranks.all.world.runtime, product, plan)?;
    for (i, found) in found.iter().enumerate() {
        let (stream, (whole, weight, a, b)) = (ranks.all.stream(i), &all[i]);
        let (bias, mut d) = (Buffer::from_slice(stream, &self::values(3, product.n))?, Buffer::zeros(stream, sizes.m * product.n)?);
        let mut bound = match scaled {
            true => plain.bind_scaled(stream, (whole.view(), weight.view()), [a.view(), b.view()], Some(bias.view()), d.view_mut())?,
            false => plain.bind(stream, whole.view(), weight.view(), Some(bias.view()), d.view_mut())?,
        };
        bound.run(stream)?;
        drop(bound);
        ranks.all.arenas[i].ticket(stream)?.wait()?;
        let (found, expected) = (found.to_vec_as::<Half>(stream)?, d.to_vec_as::<Half>(stream)?);
        assert!(found == expected && found.iter().any(|value| *value != Half::ZERO), "rank {i}");
    }
    Ok(())
}

/// Bias, factors of the operands, `D` as it was and GELU come once, after the whole sum.
#[test]
fn what_follows_the_product_comes_once() -> Result<()> {
    fused_and_plain::<bf16>(|stream, seed, len| Buffer::from_slice(stream, &values(seed, len)), false)?;
    let codes = |seed, len| values(seed, len).into_iter().map(|value| e4m3::from_f32(value.to_f32())).collect::<Vec<_>>();
    fused_and_plain::<e4m3>(|stream, seed, len| Buffer::from_slice(stream, &codes(seed, len)), true)
}

/// Two memories of one arena: what is made on one is not compared with what is made on the other.
#[test]
fn two_memories_of_one_arena() -> Result<()> {
    let configs = [by(Method::Fused, None, [70, 32, 136]), by(Method::Sequential, None, [40, 16, 64])];
    let options = Case { ranks: 2, config: configs[0], calls: Calls::Eager, seed: 1 }.options();
    let all = Arenas::with(2, 1, ArenaOptions { channels: 128, ..options });
    let mut made = Vec::new();
    for (i, arena) in all.arenas.iter().enumerate() {
        for config in configs {
            let out = all.world.ranks[i].device().urgent_stream()?;
            let memory = OverlapMemory::take(arena, &member(&all, i), config.bytes::<bf16, bf16>()?, &out)?;
            made.push((i, config, AllGatherGemm::<bf16, bf16>::new(&memory, all.stream(i), config)?));
        }
    }
    for (i, config, gather) in &made {
        let (stream, GemmConfig { m, n, k, .. }) = (all.stream(*i), config.product(all.world.size())?);
        let (weight, mut d) = (Buffer::<bf16>::zeros(stream, k * n)?, Buffer::<bf16>::zeros(stream, m * n)?);
        gather.bind(stream, weight.view(), None, d.view_mut())?;
    }
    Ok(())
}

/// A call that is refused leaves the ranks in step: nothing of it was put.
#[test]
fn a_call_that_is_refused_is_made_again() -> Result<()> {
    let config = by(Method::Fused, None, [70, 32, 136]);
    let case = Case { ranks: 2, config, calls: Calls::Eager, seed: 1 };
    let ranks = Ranks::new(2, 70 * 136 * 2, case.options())?;
    let gathers = [ranks.gather(0, config)?, ranks.gather(1, config)?];
    let weights = [0, 1].map(|i| Buffer::from_slice(ranks.all.stream(i), &case.weight(i as u32)));
    let mut results = [0, 1].map(|i| Buffer::<bf16>::named(ranks.all.stream(i), "d", 70 * 16).expect("memory"));
    for (i, (weight, d)) in weights.into_iter().zip(&mut results).enumerate() {
        let (stream, other, weight) = (ranks.all.stream(i), ranks.all.stream(1 - i), weight?);
        let mut product = gathers[i].bind(stream, weight.view(), None, d.view_mut())?;
        let shard = Buffer::from_slice(stream, &case.shard(&case.operand(0), i as u32))?;
        assert!(matches!(product.copy_shard(stream, &Buffer::zeros(stream, 3)?), Err(Error::Length { .. })));
        assert!(product.run(stream).unwrap_err().to_string().contains("was not written"));
        // One of another device, which was not copied.
        assert!(matches!(product.copy_shard(stream, &Buffer::zeros(other, shard.len())?), Err(Error::WrongDevice { .. })));
        assert!(product.run(stream).unwrap_err().to_string().contains("was not written"));
        // In a graph alone: the call outside would send what the last graph left.
        let (out, mut given) = (&ranks.out[i], Ok(()));
        let captured = Graph::capture(&[stream, out], || {
            given = product.copy_shard(stream, &shard);
            Err::<(), _>(Error::Invalid { what: "the capture", why: "it is given up".into() })
        });
        assert!(captured.is_err() && given.is_ok());
        assert!(product.run(stream).unwrap_err().to_string().contains("was written in another capture"));
        product.copy_shard(stream, &shard)?;
        assert!(matches!(product.run(other), Err(Error::WrongDevice { .. })));
        product.copy_shard(stream, &shard)?;
        let captured = Graph::capture(&[stream], || product.copy_shard(stream, &shard).and_then(|()| product.run(stream)));
        assert!(captured.unwrap_err().to_string().contains("name both in Graph::capture"));
        product.copy_shard(stream, &shard)?;
        product.run(stream)?;
    }
    for (i, d) in results.iter().enumerate() {
        ranks.all.arenas[i].ticket(ranks.all.stream(i))?.wait()?;
        let found: Vec<u16> = d.to_vec_as::<Half>(ranks.all.stream(i))?.into_iter().map(Half::to_bits).collect();
        assert!(found == case.expected(Method::Fused, i as u32)?[0], "rank {i}");
    }
    Ok(())
}

/// Two teams of one world gather at the same time, each its own operand: ranks 0 and 2, and 3 and 1 in this order. An arena in use is not given back.
#[test]
fn teams_gather_side_by_side() -> Result<()> {
    let config = by(Method::Fused, Some(cut(2, 2)), [76, 32, 136]);
    let case = Case { ranks: 2, config, calls: Calls::Eager, seed: 1 };
    let all = Arenas::with(4, 1, case.options());
    let teams = [[0, 2], [3, 1]].map(|members| Team::new(all.world.size(), &members.map(|index| all.world.rank(index))));
    let teams = teams.into_iter().collect::<Result<Vec<_>>>()?;
    let member = |i: usize| teams.iter().find_map(|team| team.member(all.arenas[i].rank())).expect("every rank is in a team");
    let mut sides = Vec::new();
    for (i, arena) in all.arenas.iter().enumerate() {
        let (stream, out) = (all.stream(i), all.world.ranks[i].device().urgent_stream()?);
        let memory = OverlapMemory::take(arena, &member(i), config.bytes::<bf16, bf16>()?, &out)?;
        let weight = Buffer::from_slice(stream, &case.weight(member(i).rank().index()))?;
        let gather = AllGatherGemm::<bf16, bf16>::new(&memory, stream, config)?;
        sides.push((gather, weight, Buffer::<bf16>::uninitialised(stream, 76 * 16)?));
    }
    for round in 0..ROUNDS {
        for (i, (gather, weight, d)) in sides.iter_mut().enumerate() {
            let (stream, team) = (all.stream(i), u64::from(i as u32 % 2));
            let mut product = gather.bind(stream, weight.view(), None, d.view_mut())?;
            // The second team has the operand of the next round.
            let operand = case.operand((round + team) % ROUNDS);
            let shard = PinnedBuffer::from_slice(stream, &case.shard(&operand, member(i).rank().index()))?;
            product.shard(stream)?.copy_from_pinned(stream, &shard)?;
            product.run(stream)?;
        }
    }
    for (i, (.., d)) in sides.iter().enumerate() {
        all.arenas[i].ticket(all.stream(i))?.wait()?;
        let found: Vec<u16> = d.to_vec_as::<Half>(all.stream(i))?.into_iter().map(Half::to_bits).collect();
        let expected = case.expected(Method::Fused, member(i).rank().index())?;
        let round = (ROUNDS - 1 + i as u64 % 2) % ROUNDS;
        assert!(found == expected[round as usize], "rank {i}");
    }
    let in_use = all.arenas[0].clone().close().map_err(Error::from).unwrap_err();
    assert!(matches!(in_use, Error::Symmetric(SymmetricError::InUse { .. })), "{in_use}");
    drop(sides);
    all.close();
    Ok(())
}
