//! Attention of heads above 128: the backward pass beside the kernels for any GPU and cuDNN, packed sequences beside dense tensors.

use oxtile::attention::{AttentionConfig, Kernels, Mask, Order};

use super::attention_packed::Packed;
use super::attention_shape::Shape;
use super::{attention, attention_backward};
use crate::bench::{Bench, Size};

/// The family's name.
pub const FAMILY: &str = "attention_wide";

/// Elements of heads of `Q` and of `V`.
const SIZES: [[u64; 2]; 2] = [[192, 128], [256, 256]];

/// 32768 tokens in sequences of 2048 to 16384, and in 12 of random lengths, full and causal. The kernels for any GPU are beside one row of each size, as
/// they take eight times as long.
pub fn benches(size: Size) -> Vec<Bench> {
    let lengths = size.pick(&[2048, 8192, 16384][..], &[9]);
    let [tokens, width, sequences] = size.pick([32768, 2048, 12], [70, 256, 3]);
    let masks = [Mask::Full, Mask::CausalBottomRight];
    let mut benches = Vec::new();
    for &[head_size, value_size] in size.pick(&SIZES[..], &SIZES[..1]) {
        let heads = (width / (head_size + value_size) * 2).max(1);
        for &length in lengths {
            let shape = Shape { value_size, ..Shape::square([(tokens / length).max(1), length, heads, heads, head_size]) };
            benches.extend(masks.map(|mask| attention_backward::bench(shape, mask, Order::Deterministic)));
        }
        let shape = Shape { value_size, ..Shape::square([tokens / lengths[0] / 4 + 1, lengths[0], heads, heads, head_size]) };
        benches.push(beside_portable(shape, Mask::CausalBottomRight));
        let packed = Packed::cut(tokens, sequences, [heads, heads, head_size]).with_values(value_size);
        for mask in masks {
            benches.push(attention_backward::random(packed.clone(), mask, Order::Deterministic));
            benches.push(attention::packed(packed.clone(), mask));
        }
    }
    benches.into_iter().map(|bench| Bench { family: FAMILY, ..bench }).collect()
}

/// One shape, beside the kernels for any GPU, and cuDNN.
fn beside_portable(shape: Shape, mask: Mask) -> Bench {
    let order = Order::Deterministic;
    Bench {
        prepare: Box::new(move |gpu| {
            let fastest = shape.config(mask);
            let portable = AttentionConfig { kernels: Kernels::Portable, ..fastest };
            let rival = attention_backward::prepare(gpu, shape, portable, order)?;
            Ok(attention_backward::prepare(gpu, shape, fastest, order)?.against("ours on mma", rival))
        }),
        ..attention_backward::bench(shape, mask, order)
    }
}
