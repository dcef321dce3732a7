//! What gathered products keep: the operand that they gather, for the gradient of the weight, and the input of their activation.

use half::bf16 as Half;
use oxtile::gemm::{Activation, Epilogue, Gemm};
use oxtile::kernels::copy::{CopyWords, CopyWordsArgs};
use oxtile::num::bf16;
use oxtile::overlap::{AllGatherConfig, Gathers, Method};
use oxtile::{Buffer, EmulatedOptions, Graph, PinnedBuffer, Result};
use oxtile_tile::launch::{DeviceView, DeviceViewMut};

use crate::overlap::{Calls, Case, ROUNDS, by, cut};
use crate::overlap_calls::Ranks;
use crate::overlap_usage::ranks;

/// The gathered operand is kept for the gradient of the weight, or gathered again: both have the same bits, by every method and in every call.
#[test]
fn the_gathered_operand_is_kept_or_gathered_again() -> Result<()> {
    let [m, n, k] = [72, 32, 136];
    for method in [Method::Fused, Method::Chunked, Method::Sequential] {
        let forward = Case { ranks: 2, config: by(method, Some(cut(1, 2)), [m, n, k]), calls: Calls::Eager, seed: 1 };
        let again = AllGatherConfig { gathers: Gathers::SumOfA, transpose_a: true, ..by(Method::Sequential, None, [k, n, m]) };
        let again = Case { config: again, ..forward };
        let ranks = Ranks::new(2, m * k * 2, forward.options())?;
        let made: Vec<_> = (0..2).map(|i| Ok((ranks.gather(i, forward.config)?, ranks.gather(i, again.config)?))).collect::<Result<_>>()?;
        let buffers = |len: u64| (0..2).map(|i| Buffer::<bf16>::uninitialised(ranks.all.stream(i), len)).collect::<Result<Vec<_>>>();
        let (mut kept, mut gradients) = (buffers(m * k)?, buffers(k * n / 2)?);
        for round in 0..ROUNDS {
            for i in 0..2 {
                let stream = ranks.all.stream(i);
                let shard = PinnedBuffer::from_slice(stream, &forward.shard(&forward.operand(round), i as u32))?;
                let (weight, mut d) = (Buffer::from_slice(stream, &forward.weight(i as u32))?, Buffer::uninitialised(stream, m * n / 2)?);
                let of_result = Buffer::from_slice(stream, &again.weight(i as u32))?;
                // Before the calls: a bind waits for its stream.
                let mut product = made[i].0.bind(stream, weight.view(), None, d.view_mut())?;
                let mut gradient = made[i].1.bind(stream, of_result.view(), None, gradients[i].view_mut())?;
                product.keep_gathered(&mut kept[i])?;
                product.shard(stream)?.copy_from_pinned(stream, &shard)?;
                product.run(stream)?;
                gradient.shard(stream)?.copy_from_pinned(stream, &shard)?;
                gradient.run(stream)?;
            }
            for i in 0..2 {
                let stream = ranks.all.stream(i);
                ranks.all.arenas[i].ticket(stream)?.wait()?;
                assert!(kept[i].to_vec_as::<Half>(stream)? == forward.operand(round), "{method:?}, rank {i}, round {round}");
                let plain = Gemm::<bf16, bf16>::new(&ranks.all.world.runtime, again.product())?;
                let of_result = Buffer::from_slice(stream, &again.weight(i as u32))?;
                let mut expected = Buffer::<bf16>::uninitialised(stream, k * n / 2)?;
                plain.run(stream, kept[i].view(), of_result.view(), None, expected.view_mut())?;
                let [found, expected] = [&gradients[i], &expected].map(|buffer| buffer.to_vec_as::<Half>(stream));
                assert!(found? == expected?, "{method:?}, rank {i}, round {round}");
            }
        }
        let stream = ranks.all.stream(0);
        let (weight, mut d) = (Buffer::from_slice(stream, &forward.weight(0))?, Buffer::uninitialised(stream, m * n / 2)?);
        let mut short = Buffer::<bf16>::uninitialised(stream, m * k - 1)?;
        let error = made[0].0.bind(stream, weight.view(), None, d.view_mut())?.keep_gathered(&mut short).unwrap_err();
        assert!(error.to_string().starts_with("GatheredProduct::keep_gathered"), "{error}");
    }
    Ok(())
}

/// What is kept, of shards that are columns too, and by graphs: each replay keeps what it has gathered.
#[test]
fn every_replay_keeps_what_it_has_gathered() -> Result<()> {
    let layout = |gathers, [transpose_a, transpose_b]: [bool; 2], method, sizes| AllGatherConfig {
        gathers,
        transpose_a,
        transpose_b,
        ..by(method, Some(cut(1, 2)), sizes)
    };
    let configs = [
        layout(Gathers::Rows, [false, false], Method::Fused, [70, 32, 136]),
        layout(Gathers::Rows, [true, false], Method::Fused, [80, 32, 136]),
        layout(Gathers::SumOfA, [true, false], Method::Fused, [40, 32, 200]),
        layout(Gathers::SumOfB, [false, true], Method::Sequential, [16, 16, 40]),
    ];
    for config in configs {
        let case = Case { ranks: 2, config, calls: Calls::Captured, seed: 3 };
        let ranks = ranks(&case, EmulatedOptions::default())?;
        let gathers = [0, 1].map(|i| ranks.gather(i, config)).into_iter().collect::<Result<Vec<_>>>()?;
        let product = case.product();
        let mut memory = Vec::new();
        for i in 0..2 {
            let (stream, rank) = (ranks.all.stream(i), i as u32);
            let own = Buffer::<bf16>::uninitialised(stream, case.shard(&case.operand(0), rank).len() as u64)?;
            let kept = Buffer::<bf16>::uninitialised(stream, case.operand(0).len() as u64)?;
            let weight = Buffer::from_slice(stream, &case.weight(rank))?;
            memory.push((weight, own, Buffer::<bf16>::uninitialised(stream, product.m * product.n)?, kept));
        }
        let (mut bound, mut owns) = (Vec::new(), Vec::new());
        for (i, (weight, own, d, kept)) in memory.iter_mut().enumerate() {
            let mut product = gathers[i].bind(ranks.all.stream(i), weight.view(), None, d.view_mut())?;
            product.keep_gathered(kept)?;
            bound.push(product);
            owns.push(own);
        }
        let mut graphs = Vec::new();
        for (i, (product, own)) in bound.iter_mut().zip(&owns).enumerate() {
            let stream = ranks.all.stream(i);
            graphs.push(Graph::capture(&[stream, &ranks.out[i]], || product.copy_shard(stream, own).and_then(|()| product.run(stream)))?);
        }
        for round in 0..ROUNDS {
            for (i, own) in owns.iter_mut().enumerate() {
                let stream = ranks.all.stream(i);
                own.copy_from_pinned(stream, &PinnedBuffer::from_slice(stream, &case.shard(&case.operand(round), i as u32))?)?;
                graphs[i].replay(stream)?;
            }
            for (i, product) in bound.iter().enumerate() {
                ranks.all.arenas[i].ticket(ranks.all.stream(i))?.wait()?;
                let kept = product.kept().expect("it is kept").to_vec_as::<Half>(ranks.all.stream(i))?;
                assert!(kept == case.operand(round), "{config:?}, round {round}, rank {i}");
            }
        }
    }
    Ok(())
}

/// Nothing but a kept input.
fn keeping(kept: DeviceViewMut<'_, bf16>) -> Epilogue<'_, bf16> {
    Epilogue { kept: Some(kept), ..Epilogue::default() }
}

/// The input of GELU is what the product without it leaves, by every method and by graphs, and the result is GELU of that.
#[test]
fn the_input_of_the_activation_is_kept() -> Result<()> {
    let sizes = [72, 64, 136];
    for (method, calls) in
        [Method::Fused, Method::Chunked, Method::Sequential].into_iter().zip([Calls::Captured, Calls::Eager, Calls::Captured])
    {
        let linear = AllGatherConfig { transpose_b: true, alpha: 0.5, ..by(method, Some(cut(1, 2)), sizes) };
        let config = AllGatherConfig { activation: Activation::Gelu, ..linear };
        let case = Case { ranks: 2, config: linear, calls, seed: 1 };
        let ranks = Ranks::new(2, config.bytes::<bf16, bf16>()?, case.options())?;
        let gathers = [0, 1].map(|i| ranks.gather(i, config)).into_iter().collect::<Result<Vec<_>>>()?;
        let product = config.product(ranks.all.world.size())?;
        let len = product.m * product.n;
        let mut memory = Vec::new();
        for i in 0..2 {
            let (stream, rank) = (ranks.all.stream(i), i as u32);
            let own = Buffer::<bf16>::uninitialised(stream, case.shard(&case.operand(0), rank).len() as u64)?;
            let [kept, d] = [Buffer::uninitialised(stream, len)?, Buffer::uninitialised(stream, len)?];
            memory.push((Buffer::from_slice(stream, &case.weight(rank))?, own, kept, d));
        }
        let (mut bound, mut owns) = (Vec::new(), Vec::new());
        for (i, (weight, own, kept, d)) in memory.iter_mut().enumerate() {
            bound.push(gathers[i].bind_epilogue(ranks.all.stream(i), weight.view(), None, keeping(kept.view_mut()), d.view_mut())?);
            owns.push(own);
        }
        let mut graphs = Vec::new();
        for (i, (product, own)) in bound.iter_mut().zip(&owns).enumerate().filter(|_| calls == Calls::Captured) {
            let stream = ranks.all.stream(i);
            graphs.push(Graph::capture(&[stream, &ranks.out[i]], || product.copy_shard(stream, own).and_then(|()| product.run(stream)))?);
        }
        let expected = [0, 1].map(|rank| case.expected(method, rank)).into_iter().collect::<Result<Vec<_>>>()?;
        for round in 0..ROUNDS {
            for (i, own) in owns.iter_mut().enumerate() {
                let stream = ranks.all.stream(i);
                own.copy_from_pinned(stream, &PinnedBuffer::from_slice(stream, &case.shard(&case.operand(round), i as u32))?)?;
                match graphs.get(i) {
                    Some(graph) => graph.replay(stream)?,
                    None => bound[i].copy_shard(stream, own).and_then(|()| bound[i].run(stream))?,
                }
            }
            for (i, product) in bound.iter().enumerate() {
                let stream = ranks.all.stream(i);
                ranks.all.arenas[i].ticket(stream)?.wait()?;
                let copy = ranks.all.world.runtime.load::<CopyWords>()?;
                let read = |view: DeviceView<'_, bf16>| -> Result<Vec<Half>> {
                    let mut words = Buffer::<u32>::uninitialised(stream, len / 2)?;
                    copy.launch(stream, CopyWordsArgs { source: view.cast(), target: words.view_mut() })?;
                    Ok(words.to_vec(stream)?.into_iter().flat_map(|word| [word as u16, (word >> 16) as u16]).map(Half::from_bits).collect())
                };
                let (kept, found) = (read(product.input().expect("it is kept"))?, read(product.result())?);
                let bits: Vec<u16> = kept.iter().map(|value| value.to_bits()).collect();
                assert!(bits == expected[i][round as usize], "{method:?}, round {round}, rank {i}: what is kept");
                for (x, found) in kept.into_iter().zip(found).map(|(x, found)| (f64::from(x.to_f32()), f64::from(found.to_f32()))) {
                    let gelu = x / 2.0 * (1.0 + ((2.0 / std::f64::consts::PI).sqrt() * (x + 0.044_715 * x.powi(3))).tanh());
                    assert!(
                        (found - gelu).abs() <= gelu.abs() / 128.0 + 1e-5,
                        "{method:?}, round {round}, rank {i}: GELU of {x} is {gelu}, found {found}"
                    );
                }
            }
        }
    }
    Ok(())
}

/// An input is kept of GELU alone, without what the result was, and at a multiple of 16 bytes.
#[test]
fn what_cannot_be_kept_is_refused() -> Result<()> {
    let config = AllGatherConfig { activation: Activation::Gelu, transpose_b: true, ..by(Method::Sequential, None, [72, 64, 136]) };
    let ranks = Ranks::new(2, 72 * 136 * 2, Case { ranks: 2, config, calls: Calls::Eager, seed: 1 }.options())?;
    let stream = ranks.all.stream(0);
    let configs = [config, AllGatherConfig { activation: Activation::Identity, ..config }, AllGatherConfig { beta: 1.0, ..config }];
    let made: Vec<_> = configs.into_iter().flat_map(|config| [0, 1].map(|i| ranks.gather(i, config))).collect::<Result<_>>()?;
    let weight = Buffer::<bf16>::zeros(stream, 136 * 32)?;
    let (mut kept, mut d) = (Buffer::<bf16>::zeros(stream, 72 * 32 + 1)?, Buffer::<bf16>::zeros(stream, 72 * 32)?);
    let mut refused = |at: usize, start: u64, why: &str| {
        let (_, of) = kept.view_mut().split_at(start);
        let (of, _) = of.split_at(72 * 32);
        let error = made[at].bind_epilogue(stream, weight.view(), None, keeping(of), d.view_mut()).unwrap_err().to_string();
        assert!(error.contains(why), "{error}");
    };
    refused(0, 1, "no multiple of 16 bytes");
    refused(2, 0, "the input of Identity is not kept: take Activation::Gelu, or no Epilogue::kept");
    refused(4, 0, "beta is 1: it is 0 where the input of GELU is kept");
    Ok(())
}
