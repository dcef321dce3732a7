//! Attention, backward: deterministic and fast.

use anyhow::Result;
use oxtile::attention::{
    Attention, AttentionBackward, AttentionConfig, BackwardInputs, Gradients, Inputs, Layout, Mask, Order, Outputs, Sequences,
};
use oxtile::runtime::Buffer;
use oxtile_tile::num::bf16;

use super::attention_packed::Packed;
use super::attention_shape::{Shape, bytes_of, tensor};
use crate::bench::{Bench, Gpu, Output, Prepared, Size};

/// The family's name.
pub const FAMILY: &str = "attention_backward";

/// 32768 tokens in sequences of 2048 to 16384, full and causal, of both head sizes; shared key heads, many and few; by the general
/// kernels, packed sequences of both head sizes, of equal and of random lengths, and heads of 96.
pub fn benches(size: Size) -> Vec<Bench> {
    let lengths = size.pick(&[2048, 4096, 8192, 16384][..], &[65]);
    let [tokens, heads] = size.pick([32768, 2048], [130, 128]);
    let mut benches = Vec::new();
    let both = |shape, mask| [Order::Fast, Order::Deterministic].map(|order| bench(shape, mask, order));
    for head_size in [128, 64] {
        for &length in lengths {
            let heads = heads / head_size;
            let shape = Shape::square([(tokens / length).max(1), length, heads, heads, head_size]);
            benches.extend([Mask::Full, Mask::CausalBottomRight].into_iter().flat_map(|mask| both(shape, mask)));
        }
    }
    let [batches, length, heads, key_heads] = size.pick([4, 8192, 16, 4], [1, 20, 4, 2]);
    let shared = Shape::square([batches, length, heads, key_heads, 128]);
    benches.push(grouped(shared, Mask::Full, Order::Fast));
    benches.extend([Order::Fast, Order::Deterministic].map(|order| grouped(shared, Mask::CausalBottomRight, order)));
    // So few tiles of keys that they are split.
    let [batches, length, heads, key_heads] = size.pick([1, 8192, 16, 2], [1, 130, 12, 1]);
    benches.extend(both(Shape::square([batches, length, heads, key_heads, 128]), Mask::CausalBottomRight));
    let [batches, length, heads] = size.pick([8, 4096, 16], [2, 20, 2]);
    for mask in [Mask::Full, Mask::CausalBottomRight] {
        for (heads, head_size) in [(heads, 128), (2 * heads, 64)] {
            let shape = Shape::square([batches, length, heads, heads, head_size]);
            benches.extend([Order::Fast, Order::Deterministic].map(|order| packed(shape, mask, order)));
        }
        benches.extend(both(Shape::square([batches, length, heads, heads, 96]), mask));
    }
    benches.extend(Packed::random(size).into_iter().map(|(sequences, mask)| random(sequences, mask, Order::Fast)));
    benches
}

/// Heads that share keys, beside the same number of query heads with keys of their own, and cuDNN.
fn grouped(shape: Shape, mask: Mask, order: Order) -> Bench {
    let alone = shape.with_own_keys();
    Bench {
        prepare: Box::new(move |gpu| {
            let rival = prepare(gpu, alone, alone.config(mask), order)?;
            Ok(prepare(gpu, shape, shape.config(mask), order)?.against(format!("ours, {}", alone.label()), rival))
        }),
        ..bench(shape, mask, order)
    }
}

/// The same memory as packed sequences, beside the kernels of dense tensors and cuDNN's.
fn packed(shape: Shape, mask: Mask, order: Order) -> Bench {
    Bench {
        kernel: packed_kernel(mask, order),
        prepare: Box::new(move |gpu| {
            let rival = prepare(gpu, shape, shape.config(mask), order)?;
            Ok(prepare_packed(gpu, &Packed::of(shape), mask, order)?.against("ours dense", rival))
        }),
        ..bench(shape, mask, order)
    }
}

/// Packed sequences of random lengths, beside dense tensors of about as much work.
pub(super) fn random(packed: Packed, mask: Mask, order: Order) -> Bench {
    let all = bench(packed.rows(), mask, order);
    Bench {
        kernel: packed_kernel(mask, order),
        shape: packed.label(),
        flops: packed.backward_flops(mask),
        peers: &[],
        prepare: Box::new(move |gpu| {
            let dense = packed.dense();
            let rival = prepare(gpu, dense, dense.config(mask), order)?;
            let label = format!("ours dense, {}, per FLOP", dense.label());
            Ok(prepare_packed(gpu, &packed, mask, order)?.against_work(label, dense.backward_flops(mask), rival))
        }),
        ..all
    }
}

fn packed_kernel(mask: Mask, order: Order) -> &'static str {
    match (mask, order) {
        (Mask::Full, Order::Fast) => "attention backward packed, full, fast",
        (Mask::Full, Order::Deterministic) => "attention backward packed, full",
        (_, Order::Fast) => "attention backward packed, causal, fast",
        (_, Order::Deterministic) => "attention backward packed, causal",
    }
}

/// One shape, beside cuDNN, and FlashAttention-3 if it may have been built for the heads.
pub(super) fn bench(shape: Shape, mask: Mask, order: Order) -> Bench {
    let (kernel, peers): (_, &[&str]) = match (mask, order) {
        (Mask::Full, Order::Fast) => ("attention backward full, fast", &["attention_backward_full", "flash_attention_3_backward_full"]),
        (Mask::Full, Order::Deterministic) => ("attention backward full", &["attention_backward_full", "flash_attention_3_backward_full"]),
        (Mask::CausalBottomRight, Order::Fast) => {
            ("attention backward causal, fast", &["attention_backward_causal", "flash_attention_3_backward_causal"])
        }
        (Mask::CausalBottomRight, Order::Deterministic) => {
            ("attention backward causal", &["attention_backward_causal", "flash_attention_3_backward_causal"])
        }
        (Mask::CausalTopLeft, Order::Fast) => ("attention backward causal, top-left, fast", &["attention_backward_causal"]),
        (Mask::CausalTopLeft, Order::Deterministic) => ("attention backward causal, top-left", &["attention_backward_causal"]),
    };
    let peers = if shape.is_flash() { peers } else { &peers[..1] };
    Bench {
        family: FAMILY,
        kernel,
        shape: shape.label(),
        dimensions: shape.dimensions(),
        bytes: 2 * shape.bytes(size_of::<bf16>()),
        flops: shape.backward_flops(mask),
        sets: 1,
        ceiling: None,
        peers,
        prepare: Box::new(move |gpu| prepare(gpu, shape, shape.config(mask), order)),
    }
}

/// The configuration is of the shape, and says by which kernels.
pub(super) fn prepare(gpu: &Gpu, shape: Shape, config: AttentionConfig, order: Order) -> Result<Prepared> {
    capture(gpu, shape, config, &[], order)
}

fn prepare_packed(gpu: &Gpu, packed: &Packed, mask: Mask, order: Order) -> Result<Prepared> {
    capture(gpu, packed.rows(), packed.config(mask), &packed.offsets(), order)
}

/// Sequences, if they are packed, lie at these offsets.
fn capture(gpu: &Gpu, shape: Shape, config: AttentionConfig, offsets: &[u32], order: Order) -> Result<Prepared> {
    let [of_q, of_k, of_v, of_out] = shape.elements();
    let (q, k, v, grad_out) = (tensor(gpu, 0, of_q)?, tensor(gpu, 1, of_k)?, tensor(gpu, 2, of_v)?, tensor(gpu, 3, of_out)?);
    let mut out = Buffer::<bf16>::uninitialised(&gpu.stream, of_out)?;
    let mut log_sum_exp = Buffer::<f32>::uninitialised(&gpu.stream, shape.rows())?;
    let offsets = Buffer::from_slice(&gpu.stream, offsets)?;
    let inputs = || Inputs {
        sequences: (config.layout == Layout::Packed).then(|| Sequences::new(offsets.view(), offsets.view())),
        ..Inputs::new(q.view(), k.view(), v.view())
    };
    let forward = Attention::<bf16>::new(&gpu.runtime, config)?;
    forward.forward(&gpu.stream, inputs(), Outputs::new(out.view_mut(), log_sum_exp.view_mut()))?;
    let backward = AttentionBackward::<bf16>::new(&gpu.runtime, config, order)?;
    let gradient = |length: u64| Buffer::<bf16>::uninitialised(&gpu.stream, length);
    let (mut dq, mut dk, mut dv) = (gradient(of_q)?, gradient(of_k)?, gradient(of_v)?);
    let graph = {
        let inputs =
            BackwardInputs { forward: inputs(), out: out.view().into(), log_sum_exp: log_sum_exp.view(), grad_out: grad_out.view().into() };
        let gradients = Gradients::new(dq.view_mut(), dk.view_mut(), dv.view_mut());
        let mut bound = backward.bind(&gpu.stream, inputs, gradients)?;
        Prepared::capture(gpu, || bound.run(&gpu.stream))?
    };
    Ok(Prepared::new(graph, move |stream| {
        let gradients = ["dq", "dk", "dv"].into_iter().zip([&dq, &dk, &dv]);
        gradients.map(|(name, gradient)| Ok(Output { name, bytes: bytes_of(&gradient.to_vec_as(stream)?) })).collect()
    }))
}
