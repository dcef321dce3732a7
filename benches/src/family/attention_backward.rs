//! Attention, backward: deterministic and fast.

use anyhow::Result;
use oxtile::attention::{Attention, AttentionBackward, AttentionConfig, BackwardInputs, Gradients, Inputs, Mask, Order, Outputs};
use oxtile::runtime::Buffer;
use oxtile_tile::num::bf16;

use crate::bench::{Bench, Gpu, Output, Prepared, Size};

/// The family's name.
pub const FAMILY: &str = "attention_backward";

/// Batches, length of queries and keys, heads, heads of keys, head size.
type Shape = [u64; 5];

/// What the bench is called in each order, its mask, and its peer.
type Kind = ([(&'static str, Order); 2], Mask, &'static [&'static str]);

const FULL: Kind = (
    [("attention backward full, fast", Order::Fast), ("attention backward full", Order::Deterministic)],
    Mask::Full,
    &["attention_backward_full"],
);
const CAUSAL: Kind = (
    [("attention backward causal, fast", Order::Fast), ("attention backward causal", Order::Deterministic)],
    Mask::CausalBottomRight,
    &["attention_backward_causal"],
);

/// 32768 tokens in sequences of 2048 to 16384, full and causal, of both head sizes; shared heads of keys.
pub fn benches(size: Size) -> Vec<Bench> {
    let lengths = size.pick([2048, 4096, 8192, 16384], [64, 65, 128, 130]);
    let [tokens, heads] = size.pick([32768, 2048], [130, 128]);
    let mut benches = Vec::new();
    for head_size in [128, 64] {
        for length in lengths {
            let heads = heads / head_size;
            let shape = [(tokens / length).max(1), length, heads, heads, head_size];
            benches.extend(both(shape, FULL).into_iter().chain(both(shape, CAUSAL)));
        }
    }
    let [batches, length, heads, key_heads] = size.pick([4, 8192, 16, 4], [1, 70, 4, 2]);
    benches.extend(both([batches, length, heads, key_heads, 128], CAUSAL));
    benches
}

fn both(shape: Shape, (orders, mask, peers): Kind) -> [Bench; 2] {
    orders.map(|(kernel, order)| bench(kernel, shape, mask, order, peers))
}

fn bench(kernel: &'static str, shape: Shape, mask: Mask, order: Order, peers: &'static [&'static str]) -> Bench {
    let [batches, length, heads, key_heads, head_size] = shape;
    Bench {
        family: FAMILY,
        kernel,
        shape: format!("{batches}x{length}x{heads}:{key_heads}x{head_size}"),
        dimensions: shape.to_vec(),
        bytes: 4 * batches * length * (heads + key_heads) * head_size * size_of::<bf16>() as u64,
        sets: 1,
        ceiling: None,
        peers,
        prepare: Box::new(move |gpu| prepare(gpu, shape, mask, order)),
    }
}

fn prepare(gpu: &Gpu, [batches, length, heads, key_heads, head_size]: Shape, mask: Mask, order: Order) -> Result<Prepared> {
    let config =
        AttentionConfig { batches, queries: length, keys: length, heads, key_heads, head_size, mask, ..AttentionConfig::default() };
    let tensor = |buffer: usize, heads: u64| -> Result<Buffer<bf16>> {
        let values = gpu.pattern.fill(buffer, batches * length * heads * head_size);
        Ok(Buffer::from_slice(&gpu.stream, &values.into_iter().map(|x| bf16::from_bits(x.to_bits())).collect::<Vec<_>>())?)
    };
    let (q, k, v, grad_out) = (tensor(0, heads)?, tensor(1, key_heads)?, tensor(2, key_heads)?, tensor(3, heads)?);
    let mut out = Buffer::<bf16>::uninitialised(&gpu.stream, q.len())?;
    let mut log_sum_exp = Buffer::<f32>::uninitialised(&gpu.stream, batches * heads * length)?;
    let forward = Attention::<bf16>::new(&gpu.runtime, config)?;
    forward.forward(&gpu.stream, Inputs::new(q.view(), k.view(), v.view()), Outputs::new(out.view_mut(), log_sum_exp.view_mut()))?;
    let backward = AttentionBackward::<bf16>::new(&gpu.runtime, config, order)?;
    let gradient = |length: u64| Buffer::<bf16>::uninitialised(&gpu.stream, length);
    let (mut dq, mut dk, mut dv) = (gradient(q.len())?, gradient(k.len())?, gradient(v.len())?);
    let graph = {
        let inputs = BackwardInputs {
            q: q.view(),
            k: k.view(),
            v: v.view(),
            out: out.view(),
            log_sum_exp: log_sum_exp.view(),
            grad_out: grad_out.view(),
        };
        let gradients = Gradients { q: dq.view_mut(), k: dk.view_mut(), v: dv.view_mut() };
        let mut bound = backward.bind(&gpu.stream, inputs, gradients)?;
        Prepared::capture(gpu, || bound.run(&gpu.stream))?
    };
    Ok(Prepared::new(graph, move |stream| {
        let mut outputs = Vec::new();
        for (name, gradient) in ["dq", "dk", "dv"].into_iter().zip([&dq, &dk, &dv]) {
            let values: Vec<half::bf16> = gradient.to_vec_as(stream)?;
            outputs.push(Output { name, bytes: values.iter().flat_map(|value| value.to_le_bytes()).collect() });
        }
        Ok(outputs)
    }))
}
