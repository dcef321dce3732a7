//! Attention at shapes of every kind, beside cuDNN, since a table of a few regular shapes would hide some. `oxtile-benches attention --sweep`.

use oxtile::attention::{Mask, Order};

use super::attention_shape::Shape;
use super::{attention, attention_backward};
use crate::bench::{Bench, Size};

/// The name in the results; `--sweep` runs it, and nothing else does.
pub const FAMILY: &str = "attention_sweep";

/// Which passes are measured. All of them would take longer than a sweep may.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Passes {
    Forward,
    Both,
}
use Passes::{Both, Forward};

/// Batches, queries, keys, query heads, key heads, sizes of a key head and of a value head.
type Sizes = [u64; 7];

/// Torch's causal mask is aligned top-left, ours too where the lengths differ.
const CAUSAL: Mask = Mask::CausalBottomRight;
const TOP_LEFT: Mask = Mask::CausalTopLeft;
const FULL: Mask = Mask::Full;

/// Few elements for much work, so that the sweep does not spend its time filling and comparing tensors.
#[rustfmt::skip]
const SHAPES: [(Mask, Sizes, Passes); 40] = [
    // Lengths, head size 128.
    (FULL, [16, 512, 512, 16, 16, 128, 128], Forward),
    (FULL, [8, 1024, 1024, 16, 16, 128, 128], Forward),
    (FULL, [4, 2048, 2048, 16, 16, 128, 128], Both),
    (FULL, [2, 4096, 4096, 16, 16, 128, 128], Forward),
    (FULL, [1, 8192, 8192, 16, 16, 128, 128], Both),
    (FULL, [1, 16384, 16384, 8, 8, 128, 128], Forward),
    (CAUSAL, [16, 512, 512, 16, 16, 128, 128], Both),
    (CAUSAL, [4, 2048, 2048, 16, 16, 128, 128], Forward),
    (CAUSAL, [1, 8192, 8192, 16, 16, 128, 128], Both),
    (CAUSAL, [1, 16384, 16384, 8, 8, 128, 128], Forward),
    // Heads that share keys.
    (CAUSAL, [2, 2048, 2048, 32, 8, 128, 128], Both),
    (CAUSAL, [1, 4096, 4096, 32, 4, 128, 128], Forward),
    (CAUSAL, [1, 8192, 8192, 16, 2, 128, 128], Both),
    (FULL, [2, 4096, 4096, 16, 1, 128, 128], Forward),
    (CAUSAL, [1, 4096, 4096, 64, 8, 128, 128], Forward),
    // Head size 64.
    (FULL, [8, 1024, 1024, 32, 32, 64, 64], Both),
    (FULL, [2, 4096, 4096, 32, 32, 64, 64], Both),
    (FULL, [1, 16384, 16384, 16, 16, 64, 64], Forward),
    (CAUSAL, [8, 1024, 1024, 32, 32, 64, 64], Forward),
    (CAUSAL, [2, 4096, 4096, 32, 32, 64, 64], Both),
    (CAUSAL, [1, 16384, 16384, 16, 16, 64, 64], Forward),
    (CAUSAL, [2, 4096, 4096, 32, 8, 64, 64], Both),
    // Head sizes 96, 192 with 128, 256.
    (FULL, [2, 4096, 4096, 16, 16, 96, 96], Forward),
    (CAUSAL, [2, 4096, 4096, 16, 16, 96, 96], Forward),
    (CAUSAL, [4, 2048, 2048, 32, 8, 96, 96], Forward),
    (FULL, [2, 4096, 4096, 16, 16, 192, 128], Forward),
    (CAUSAL, [2, 4096, 4096, 16, 16, 192, 128], Forward),
    (CAUSAL, [1, 8192, 8192, 16, 16, 192, 128], Forward),
    (FULL, [2, 4096, 4096, 8, 8, 256, 256], Forward),
    (CAUSAL, [2, 4096, 4096, 8, 8, 256, 256], Forward),
    (CAUSAL, [1, 4096, 4096, 16, 4, 256, 256], Forward),
    // Other keys than queries.
    (FULL, [1, 1024, 8192, 16, 16, 128, 128], Both),
    (FULL, [1, 8192, 1024, 16, 16, 128, 128], Forward),
    (TOP_LEFT, [2, 2048, 4096, 16, 16, 128, 128], Both),
    (FULL, [4, 4096, 77, 16, 16, 64, 64], Forward),
    // Lengths that no tile divides.
    (FULL, [4, 1999, 1999, 16, 16, 128, 128], Both),
    (CAUSAL, [4, 2047, 2047, 16, 16, 128, 128], Forward),
    (FULL, [3, 1537, 2531, 16, 4, 64, 64], Both),
    // Few queries of many keys, as in decoding.
    (FULL, [8, 1, 4096, 32, 8, 128, 128], Forward),
    (FULL, [8, 16, 4096, 32, 8, 128, 128], Forward),
];

/// Shapes of the same code for the emulator.
const TINY: [(Mask, Sizes, Passes); 2] = [(TOP_LEFT, [1, 9, 12, 2, 1, 64, 64], Both), (FULL, [1, 5, 3, 1, 1, 96, 96], Forward)];

/// All shapes forward, and then those that go backward.
pub fn benches(size: Size) -> Vec<Bench> {
    let shapes = size.pick(&SHAPES[..], &TINY[..]);
    let forward = shapes.iter().map(|&(mask, sizes, _)| attention::bench(shape(sizes), mask));
    let backward = shapes.iter().filter(|(_, _, passes)| *passes == Both);
    let backward = backward.map(|&(mask, sizes, _)| attention_backward::bench(shape(sizes), mask, Order::Fast));
    forward.chain(backward).map(|bench| Bench { family: FAMILY, ..bench }).collect()
}

fn shape([batches, queries, keys, heads, key_heads, head_size, value_size]: Sizes) -> Shape {
    Shape { batches, queries, keys, heads, key_heads, head_size, value_size }
}

#[cfg(test)]
mod tests {
    use super::*;
    use oxtile_tile::num::bf16;
    use std::collections::BTreeSet;

    #[test]
    fn every_shape_has_a_kernel_and_no_two_are_the_same() {
        for (mask, sizes, passes) in SHAPES {
            let config = shape(sizes).config(mask);
            assert!(config.choose::<bf16>().unwrap().kernel.is_some_and(|kernel| kernel.starts_with("attention_forward")), "{sizes:?}");
            assert!(passes == Forward || config.choose_backward::<bf16>().is_ok(), "{sizes:?}");
            assert!(mask != CAUSAL || sizes[1] == sizes[2], "{sizes:?}: the peer's mask is aligned top-left");
        }
        let names: BTreeSet<String> = benches(Size::Full).iter().map(Bench::name).collect();
        assert_eq!(names.len(), SHAPES.len() + SHAPES.iter().filter(|(_, _, passes)| *passes == Both).count());
    }

    #[test]
    fn every_kind_of_shape_is_there() {
        let any = |what: &dyn Fn(Mask, Sizes) -> bool| SHAPES.iter().any(|&(mask, sizes, _)| what(mask, sizes));
        for sizes in [[64, 64], [96, 96], [128, 128], [192, 128], [256, 256]] {
            for causal in [false, true] {
                assert!(any(&|mask, [.., d, v]| [d, v] == sizes && (mask != FULL) == causal), "{sizes:?}, causal {causal}");
            }
        }
        for group in [1, 4, 8, 16] {
            assert!(any(&|_, [_, _, _, heads, key_heads, ..]| heads == group * key_heads), "{group} heads on one");
        }
        assert!(any(&|_, [_, queries, keys, ..]| queries < keys) && any(&|_, [_, queries, keys, ..]| queries > keys));
        assert!(any(&|_, [_, queries, ..]| queries == 1) && any(&|_, [_, queries, ..]| queries % 64 != 0 && queries > 1000));
    }
}
