//! Attention, forward, of e4m3 tensors, beside our bf16 kernel.

use anyhow::Result;
use oxtile::attention::{Attention, AttentionConfig, Inputs, Layout, Mask, Outputs, Scales, Sequences, Sink, Window};
use oxtile::runtime::Buffer;
use oxtile_tile::num::{Float, bf16, e4m3};

use super::attention;
use super::attention_packed::Packed;
use super::attention_shape::{Shape, bytes_of};
use crate::bench::{Bench, Gpu, Output, Prepared, Size};

/// The family's name.
pub const FAMILY: &str = "attention_fp8";

/// 32768 tokens in sequences of 2048 to 16384, full and causal; the smaller heads at one length; packed sequences of lengths from 2048 to 16384, and of
/// random ones; windows, and caps with sinks.
pub fn benches(size: Size) -> Vec<Bench> {
    let [tokens, elements] = size.pick([32768, 2048], [130, 128]);
    let shapes = size.pick(&[(2048, 128), (4096, 128), (8192, 128), (16384, 128), (8192, 64)][..], &[(65, 64)]);
    let shape = |&(length, head_size): &(u64, u64)| {
        let heads = (elements / head_size).max(1);
        Shape::square([(tokens / length).max(1), length, heads, heads, head_size])
    };
    let both = |shape: Shape| [Mask::Full, Mask::CausalBottomRight].map(|mask| bench(shape, mask));
    let mut benches: Vec<Bench> = shapes.iter().map(shape).flat_map(both).collect();
    for heads in size.pick([[16, 16, 128], [32, 32, 64]], [[1, 1, 128], [2, 1, 64]]) {
        let [rows, sequences] = size.pick([32768, 12], [70, 3]);
        for sequences in [Packed::mixed(size, heads), Packed::cut(rows, sequences, heads)] {
            benches.extend([Mask::Full, Mask::CausalBottomRight].map(|mask| packed(sequences.clone(), mask)));
        }
        let [length, left] = size.pick([8192, 1024], [65, 9]);
        let [heads, _, head_size] = heads;
        let shape = Shape::square([(tokens / length).max(1), length, heads, heads, head_size]);
        let config = shape.config(Mask::CausalBottomRight);
        let window = AttentionConfig { window: Window { left: Some(left), right: None }, ..config };
        benches.push(Bench { flops: shape.windowed_flops(left), ..optioned("attention forward e4m3 causal, window", shape, window) });
        let capped = AttentionConfig { soft_cap: Some(30.0), sink: Sink::OffByOne, ..config };
        benches.push(optioned("attention forward e4m3 causal, cap and sink", shape, capped));
    }
    benches
}

/// Packed sequences, beside our bf16 kernel of them.
fn packed(packed: Packed, mask: Mask) -> Bench {
    let rows = packed.rows();
    Bench {
        kernel: if mask == Mask::Full { "attention forward e4m3 packed, full" } else { "attention forward e4m3 packed, causal" },
        shape: packed.label(),
        flops: packed.forward_flops(mask),
        prepare: Box::new(move |gpu| {
            let ours = prepare(gpu, rows, packed.config(mask), &packed.offsets())?;
            Ok(ours.against("ours in bf16", attention::prepare_packed(gpu, &packed, mask)?))
        }),
        ..bench(rows, mask)
    }
}

/// A configuration with options, beside our bf16 kernel of it.
fn optioned(kernel: &'static str, shape: Shape, config: AttentionConfig) -> Bench {
    Bench {
        kernel,
        prepare: Box::new(
            move |gpu| Ok(prepare(gpu, shape, config, &[])?.against("ours in bf16", attention::prepare(gpu, shape, config)?)),
        ),
        ..bench(shape, config.mask)
    }
}

fn bench(shape: Shape, mask: Mask) -> Bench {
    let kernel = if mask == Mask::Full { "attention forward e4m3 full" } else { "attention forward e4m3 causal" };
    Bench {
        family: FAMILY,
        kernel,
        shape: shape.label(),
        dimensions: shape.dimensions(),
        // Three tensors of one byte an element, and the result of two.
        bytes: shape.bytes(size_of::<e4m3>()) + shape.elements()[3],
        flops: shape.forward_flops(mask),
        sets: 1,
        ceiling: None,
        peers: &[],
        prepare: Box::new(move |gpu| {
            let config = shape.config(mask);
            Ok(prepare(gpu, shape, config, &[])?.against("ours in bf16", attention::prepare(gpu, shape, config)?))
        }),
    }
}

/// Sequences, if they are packed, lie at these offsets.
fn prepare(gpu: &Gpu, shape: Shape, config: AttentionConfig, offsets: &[u32]) -> Result<Prepared> {
    let attention = Attention::<e4m3>::new(&gpu.runtime, config)?;
    let tensor = |buffer: usize, elements: u64| -> Result<Buffer<e4m3>> {
        let values = gpu.pattern.fill(buffer, elements);
        Ok(Buffer::from_slice(&gpu.stream, &values.into_iter().map(|x| e4m3::from_f32(x.to_f32())).collect::<Vec<_>>())?)
    };
    let [of_q, of_k, of_v, of_out] = shape.elements();
    let (q, k, v) = (tensor(0, of_q)?, tensor(1, of_k)?, tensor(2, of_v)?);
    let one = Buffer::from_slice(&gpu.stream, &[1_f32])?;
    let mut out = Buffer::<bf16>::uninitialised(&gpu.stream, of_out)?;
    let mut log_sum_exp = Buffer::<f32>::uninitialised(&gpu.stream, shape.rows())?;
    let offsets = Buffer::from_slice(&gpu.stream, offsets)?;
    let graph = {
        let sequences = (config.layout == Layout::Packed).then(|| Sequences::new(offsets.view(), offsets.view()));
        let scales = Some(Scales { q: one.view(), k: one.view(), v: one.view() });
        let outputs = Outputs::new(out.view_mut(), log_sum_exp.view_mut());
        let mut bound = attention.bind(&gpu.stream, Inputs { scales, sequences, ..Inputs::new(q.view(), k.view(), v.view()) }, outputs)?;
        Prepared::capture(gpu, || bound.run(&gpu.stream))?
    };
    Ok(Prepared::new(graph, move |stream| Ok(vec![Output { name: "out", bytes: bytes_of(&out.to_vec_as(stream)?) }])))
}
