//! Attention, forward.

use anyhow::Result;
use oxtile::attention::{Attention, AttentionConfig, Inputs, Layout, Mask, Output as Target, Outputs, Sequences};
use oxtile::runtime::Buffer;
use oxtile_tile::num::bf16;

use super::attention_packed::Packed;
use super::attention_shape::{Shape, bytes_of, tensor};
use super::gemm;
use crate::bench::{Bench, Gpu, Output, Prepared, Size};

/// The family's name.
pub const FAMILY: &str = "attention";

/// 32768 tokens in sequences of 2048 to 16384, full and causal, of four head sizes; shared key heads; packed sequences of random
/// lengths; cuBLASLt's product, whose rate the kernels are held to.
pub fn benches(size: Size) -> Vec<Bench> {
    let lengths = size.pick(&[2048, 4096, 8192, 16384][..], &[65]);
    let [tokens, heads] = size.pick([32768, 2048], [130, 128]);
    let mut benches = Vec::new();
    for [head_size, value_size] in [[128, 128], [64, 64], [256, 256], [192, 128]] {
        for &length in lengths {
            let heads = (heads / (head_size + value_size) * 2).max(1);
            let shape = Shape { value_size, ..Shape::square([(tokens / length).max(1), length, heads, heads, head_size]) };
            benches.extend([Mask::Full, Mask::CausalBottomRight].map(|mask| bench(shape, mask)));
        }
    }
    let [batches, length, heads, key_heads] = size.pick([4, 8192, 16, 4], [1, 20, 4, 2]);
    let shared = Shape::square([batches, length, heads, key_heads, 128]);
    benches.extend([Mask::Full, Mask::CausalBottomRight].map(|mask| grouped(shared, mask)));
    benches.extend(Packed::random(size).into_iter().map(|(sequences, mask)| packed(sequences, mask)));
    benches.push(packed(Packed::short(size), Mask::Full));
    benches.extend(rings(size));
    benches.push(Bench { family: FAMILY, ..gemm::yardstick(size) });
    benches
}

/// Heads that share keys, beside the same number of query heads with keys of their own, and cuDNN.
fn grouped(shape: Shape, mask: Mask) -> Bench {
    let alone = shape.with_own_keys();
    Bench {
        prepare: Box::new(move |gpu| {
            let rival = prepare(gpu, alone, alone.config(mask))?;
            Ok(prepare(gpu, shape, shape.config(mask))?.against(format!("ours, {}", alone.label()), rival))
        }),
        ..bench(shape, mask)
    }
}

/// Steps of a ring: merged results, beside the rounded ones of the same tensors; the first and the last step where one is enough to see.
fn rings(size: Size) -> Vec<Bench> {
    let lengths = size.pick(&[2048, 8192][..], &[65]);
    let [tokens, width] = size.pick([32768, 1024], [130, 64]);
    let mut benches = Vec::new();
    for (head_size, &length) in [128, 64].into_iter().flat_map(|head_size| lengths.iter().map(move |length| (head_size, length))) {
        let heads = (width / head_size).max(1);
        let shape = Shape::square([(tokens / length).max(1), length, heads, heads, head_size]);
        let steps = if head_size == 128 { &[Target::Merged, Target::First, Target::Last][..] } else { &[Target::Merged] };
        for &output in steps {
            benches.extend([Mask::Full, Mask::CausalBottomRight].map(|mask| ring(shape, mask, output)));
        }
    }
    benches
}

fn ring(shape: Shape, mask: Mask, output: Target) -> Bench {
    let kernel = match (output, mask) {
        (Target::First, Mask::Full) => "attention forward ring, first, full",
        (Target::First, _) => "attention forward ring, first, causal",
        (Target::Last, Mask::Full) => "attention forward ring, last, full",
        (Target::Last, _) => "attention forward ring, last, causal",
        (_, Mask::Full) => "attention forward ring, full",
        (..) => "attention forward ring, causal",
    };
    Bench {
        kernel,
        peers: &[],
        prepare: Box::new(move |gpu| {
            let rival = prepare(gpu, shape, shape.config(mask))?;
            let step = AttentionConfig { output, ..shape.config(mask) };
            Ok(prepare(gpu, shape, step)?.against("ours, rounded".to_owned(), rival))
        }),
        ..bench(shape, mask)
    }
}

/// Packed sequences, beside dense tensors of about as much work.
pub(super) fn packed(packed: Packed, mask: Mask) -> Bench {
    let all = bench(packed.rows(), mask);
    Bench {
        kernel: if mask == Mask::Full { "attention forward packed, full" } else { "attention forward packed, causal" },
        shape: packed.label(),
        flops: packed.forward_flops(mask),
        peers: &[],
        prepare: Box::new(move |gpu| {
            let dense = packed.dense();
            let rival = prepare(gpu, dense, dense.config(mask))?;
            let label = format!("ours dense, {}, per FLOP", dense.label());
            Ok(prepare_packed(gpu, &packed, mask)?.against_work(label, dense.forward_flops(mask), rival))
        }),
        ..all
    }
}

/// One shape, beside cuDNN, and FlashAttention-3 if it may have been built for the heads.
pub(super) fn bench(shape: Shape, mask: Mask) -> Bench {
    let (kernel, peers): (_, &[&str]) = match mask {
        Mask::Full => ("attention forward full", &["attention_full", "flash_attention_3_full"]),
        Mask::CausalTopLeft => ("attention forward causal, top-left", &["attention_causal"]),
        Mask::CausalBottomRight => ("attention forward causal", &["attention_causal", "flash_attention_3_causal"]),
    };
    let peers = if shape.is_flash() { peers } else { &peers[..1] };
    Bench {
        family: FAMILY,
        kernel,
        shape: shape.label(),
        dimensions: shape.dimensions(),
        bytes: shape.bytes(size_of::<bf16>()),
        flops: shape.forward_flops(mask),
        sets: 1,
        ceiling: None,
        peers,
        prepare: Box::new(move |gpu| prepare(gpu, shape, shape.config(mask))),
    }
}

/// The kernel that a configuration takes, on bf16 tensors of the pattern.
pub(super) fn prepare(gpu: &Gpu, shape: Shape, config: AttentionConfig) -> Result<Prepared> {
    capture(gpu, shape, config, &[])
}

/// The same of packed sequences.
pub(super) fn prepare_packed(gpu: &Gpu, packed: &Packed, mask: Mask) -> Result<Prepared> {
    capture(gpu, packed.rows(), packed.config(mask), &packed.offsets())
}

/// Sequences, if they are packed, lie at these offsets.
fn capture(gpu: &Gpu, shape: Shape, config: AttentionConfig, offsets: &[u32]) -> Result<Prepared> {
    let attention = Attention::<bf16>::new(&gpu.runtime, config)?;
    let [of_q, of_k, of_v, of_out] = shape.elements();
    let (q, k, v) = (tensor(gpu, 0, of_q)?, tensor(gpu, 1, of_k)?, tensor(gpu, 2, of_v)?);
    let mut out = Buffer::<bf16>::uninitialised(&gpu.stream, of_out)?;
    // As if other keys had been seen.
    let mut log_sum_exp = Buffer::<f32>::zeros(&gpu.stream, shape.rows())?;
    let mut running = Buffer::<f32>::zeros(&gpu.stream, if config.output == Target::Rounded { 0 } else { of_out })?;
    let offsets = Buffer::from_slice(&gpu.stream, offsets)?;
    let graph = {
        let sequences = (config.layout == Layout::Packed).then(|| Sequences::new(offsets.view(), offsets.view()));
        let inputs = Inputs { sequences, ..Inputs::new(q.view(), k.view(), v.view()) };
        let log_sum_exp = log_sum_exp.view_mut();
        let outputs = match config.output {
            Target::Rounded => Outputs::new(out.view_mut(), log_sum_exp),
            Target::Last => Outputs::last(running.view(), out.view_mut(), log_sum_exp),
            Target::Merged | Target::First => Outputs::merged(running.view_mut(), log_sum_exp),
        };
        let mut bound = attention.bind(&gpu.stream, inputs, outputs)?;
        Prepared::capture(gpu, || bound.run(&gpu.stream))?
    };
    Ok(Prepared::new(graph, move |stream| Ok(vec![Output { name: "out", bytes: bytes_of(&out.to_vec_as(stream)?) }])))
}
