//! Attention by the kernels that run on any GPU, beside Hopper's and cuDNN.

use oxtile::attention::{AttentionConfig, Kernels, Mask, Order};

use super::attention_shape::Shape;
use super::{attention, attention_backward};
use crate::bench::{Bench, Size};

/// The family's name.
pub const FAMILY: &str = "attention_portable";

/// 16384 tokens in sequences of 4096, full and causal, of both head sizes, forward and backward; shared key heads.
pub fn benches(size: Size) -> Vec<Bench> {
    let shapes = size.pick(&[[4, 4096, 16, 16, 128], [4, 4096, 32, 32, 64], [4, 4096, 16, 4, 128]][..], &[[1, 20, 2, 1, 64]]);
    let all = |&shape: &[u64; 5]| {
        let shape = Shape::square(shape);
        [Mask::Full, Mask::CausalBottomRight].into_iter().flat_map(move |mask| [bench(shape, mask), backward(shape, mask)])
    };
    shapes.iter().flat_map(all).collect()
}

fn bench(shape: Shape, mask: Mask) -> Bench {
    let kernel = if mask == Mask::Full { "attention portable full" } else { "attention portable causal" };
    let fastest = shape.config(mask);
    let portable = AttentionConfig { kernels: Kernels::Portable, ..fastest };
    Bench {
        family: FAMILY,
        kernel,
        prepare: Box::new(move |gpu| {
            Ok(attention::prepare(gpu, shape, portable)?.against("ours on wgmma", attention::prepare(gpu, shape, fastest)?))
        }),
        ..attention::bench(shape, mask)
    }
}

fn backward(shape: Shape, mask: Mask) -> Bench {
    let kernel = if mask == Mask::Full { "attention backward portable full" } else { "attention backward portable causal" };
    let fastest = shape.config(mask);
    let portable = AttentionConfig { kernels: Kernels::Portable, ..fastest };
    let order = Order::Deterministic;
    Bench {
        family: FAMILY,
        kernel,
        prepare: Box::new(move |gpu| {
            let wgmma = attention_backward::prepare(gpu, shape, fastest, order)?;
            Ok(attention_backward::prepare(gpu, shape, portable, order)?.against("ours on wgmma", wgmma))
        }),
        ..attention_backward::bench(shape, mask, order)
    }
}
