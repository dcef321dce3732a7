//! Attention, forward.

use anyhow::Result;
use oxtile::attention::{Attention, AttentionConfig, BoundAttention, Inputs, Mask, Outputs};
use oxtile::runtime::Buffer;
use oxtile_tile::num::bf16;

use crate::bench::{Bench, Gpu, Output, Prepared, Size};

/// The family's name.
pub const FAMILY: &str = "attention";

/// Batches, length of queries and keys, heads, heads of keys, head size.
type Shape = [u64; 5];

/// 32768 tokens in sequences of 2048 to 16384, full and causal, of three head sizes; shared heads of keys.
pub fn benches(size: Size) -> Vec<Bench> {
    let lengths = size.pick([2048, 4096, 8192, 16384], [64, 65, 128, 130]);
    let [tokens, heads] = size.pick([32768, 2048], [130, 128]);
    let mut benches = Vec::new();
    for head_size in [128, 64, 256] {
        for length in lengths {
            let heads = (heads / head_size).max(1);
            let shape = [(tokens / length).max(1), length, heads, heads, head_size];
            benches.push(bench("attention forward full", &["attention_full"], shape, Mask::Full));
            benches.push(bench("attention forward causal", &["attention_causal"], shape, Mask::CausalBottomRight));
        }
    }
    let [batches, length, heads, key_heads] = size.pick([4, 8192, 16, 4], [1, 70, 4, 2]);
    benches.push(bench(
        "attention forward causal",
        &["attention_causal"],
        [batches, length, heads, key_heads, 128],
        Mask::CausalBottomRight,
    ));
    benches
}

fn bench(kernel: &'static str, peers: &'static [&'static str], shape: Shape, mask: Mask) -> Bench {
    let [batches, length, heads, key_heads, head_size] = shape;
    Bench {
        family: FAMILY,
        kernel,
        shape: format!("{batches}x{length}x{heads}:{key_heads}x{head_size}"),
        dimensions: shape.to_vec(),
        bytes: 2 * batches * length * (heads + key_heads) * head_size * size_of::<bf16>() as u64,
        sets: 1,
        ceiling: None,
        peers,
        prepare: Box::new(move |gpu| prepare(gpu, shape, mask)),
    }
}

fn prepare(gpu: &Gpu, [batches, length, heads, key_heads, head_size]: Shape, mask: Mask) -> Result<Prepared> {
    let config =
        AttentionConfig { batches, queries: length, keys: length, heads, key_heads, head_size, mask, ..AttentionConfig::default() };
    let attention = Attention::<bf16>::new(&gpu.runtime, config)?;
    let tensor = |buffer: usize, heads: u64| -> Result<Buffer<bf16>> {
        let values = gpu.pattern.fill(buffer, batches * length * heads * head_size);
        Ok(Buffer::from_slice(&gpu.stream, &values.into_iter().map(|x| bf16::from_bits(x.to_bits())).collect::<Vec<_>>())?)
    };
    let (q, k, v) = (tensor(0, heads)?, tensor(1, key_heads)?, tensor(2, key_heads)?);
    let mut out = Buffer::<bf16>::uninitialised(&gpu.stream, q.len())?;
    let mut log_sum_exp = Buffer::<f32>::uninitialised(&gpu.stream, batches * heads * length)?;
    let graph = {
        let inputs = Inputs::new(q.view(), k.view(), v.view());
        let mut bound: BoundAttention<'_> = attention.bind(&gpu.stream, inputs, Outputs::new(out.view_mut(), log_sum_exp.view_mut()))?;
        Prepared::capture(gpu, || bound.run(&gpu.stream))?
    };
    Ok(Prepared::new(graph, move |stream| {
        let out: Vec<half::bf16> = out.to_vec_as(stream)?;
        Ok(vec![Output { name: "out", bytes: out.iter().flat_map(|value| value.to_le_bytes()).collect() }])
    }))
}
