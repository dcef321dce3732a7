//! The sizes of an attention problem, and what they cost.

use anyhow::Result;
use half::bf16;
use oxtile::attention::{AttentionConfig, Mask};
use oxtile::runtime::Buffer;
use oxtile_tile::num::bf16 as DeviceBf16;

use crate::bench::Gpu;

/// Dense tensors of attention: queries `[batches, queries, heads, head_size]`, keys and values of their own length and heads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Shape {
    pub batches: u64,
    pub queries: u64,
    pub keys: u64,
    pub heads: u64,
    pub key_heads: u64,
    pub head_size: u64,
    pub value_size: u64,
}

impl Shape {
    /// As many keys as queries, values as long as keys.
    pub fn square([batches, length, heads, key_heads, head_size]: [u64; 5]) -> Self {
        Self { batches, queries: length, keys: length, heads, key_heads, head_size, value_size: head_size }
    }

    /// As many key heads as query heads.
    pub fn with_own_keys(self) -> Self {
        Self { key_heads: self.heads, ..self }
    }

    /// Whether FlashAttention-3 is compared with: its usual head size, for which a build of it is likely.
    pub fn is_flash(&self) -> bool {
        [self.head_size, self.value_size] == [128; 2]
    }

    /// As tables print it: batches, length (of queries and keys, if they differ), query and key heads, size of a head (and of
    /// values, if they differ).
    pub fn label(&self) -> String {
        format!("{}x{}x{}:{}x{}", self.batches, pair(self.queries, self.keys), self.heads, self.key_heads, self.sizes())
    }

    /// The size of a head (and of values, if they differ), as tables print it.
    pub fn sizes(&self) -> String {
        pair(self.head_size, self.value_size)
    }

    /// As the peers read it.
    pub fn dimensions(&self) -> Vec<u64> {
        vec![self.batches, self.queries, self.keys, self.heads, self.key_heads, self.head_size, self.value_size]
    }

    /// The problem under a mask.
    pub fn config(&self, mask: Mask) -> AttentionConfig {
        let Self { batches, queries, keys, heads, key_heads, head_size, value_size } = *self;
        let value_size = Some(value_size);
        AttentionConfig { batches, queries, keys, heads, key_heads, head_size, value_size, mask, ..AttentionConfig::default() }
    }

    /// Floating-point operations of the forward pass: `2 (D + V)` for each query and key that sees it; of a causal mask as the field
    /// counts them, half a square and no more.
    pub fn forward_flops(&self, mask: Mask) -> u64 {
        self.seen_twice(mask) * (self.head_size + self.value_size)
    }

    /// Those of the forward pass where a query sees so many keys before its own, and that one, as far as there are any; of square shapes.
    pub fn windowed_flops(&self, left: u64) -> u64 {
        let (seen, length) = (left.min(self.queries.saturating_sub(1)) + 1, self.queries);
        let pairs = seen * length - seen * (seen - 1) / 2;
        2 * self.batches * self.heads * pairs * (self.head_size + self.value_size)
    }

    /// Those of the backward pass, five products: `2 (3 D + 2 V)`.
    pub fn backward_flops(&self, mask: Mask) -> u64 {
        self.seen_twice(mask) * (3 * self.head_size + 2 * self.value_size)
    }

    /// Bytes of queries and result, and of keys and values, of elements of so many bytes.
    pub fn bytes(&self, element: usize) -> u64 {
        let rows = self.queries * self.heads + self.keys * self.key_heads;
        self.batches * rows * (self.head_size + self.value_size) * element as u64
    }

    /// Elements of the queries, of the keys, of the values and of the result.
    pub fn elements(&self) -> [u64; 4] {
        let (of_queries, of_keys) = (self.batches * self.queries * self.heads, self.batches * self.keys * self.key_heads);
        [of_queries * self.head_size, of_keys * self.head_size, of_keys * self.value_size, of_queries * self.value_size]
    }

    /// Rows of the log-sum-exp.
    pub fn rows(&self) -> u64 {
        self.batches * self.queries * self.heads
    }

    /// Twice the pairs of a query and a key that it sees, in all heads; the diagonal cuts its pairs in half.
    fn seen_twice(&self, mask: Mask) -> u64 {
        let (queries, keys) = (self.queries, self.keys);
        let square = queries.min(keys).pow(2);
        let pairs = match mask {
            Mask::Full => 2 * queries * keys,
            Mask::CausalTopLeft => square + 2 * queries.saturating_sub(keys) * keys,
            Mask::CausalBottomRight => square + 2 * keys.saturating_sub(queries) * queries,
        };
        self.batches * self.heads * pairs
    }
}

/// Two numbers, or one if they are the same.
fn pair(a: u64, b: u64) -> String {
    if a == b { a.to_string() } else { format!("{a}:{b}") }
}

/// A bf16 tensor of the pattern.
pub(super) fn tensor(gpu: &Gpu, buffer: usize, elements: u64) -> Result<Buffer<DeviceBf16>> {
    Ok(Buffer::from_slice(&gpu.stream, &gpu.pattern.fill(buffer, elements))?)
}

/// What a peer compares with.
pub(super) fn bytes_of(values: &[bf16]) -> Vec<u8> {
    values.iter().flat_map(|value| value.to_le_bytes()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn operations_are_those_of_the_field() {
        let square = Shape::square([2, 100, 6, 3, 64]);
        assert_eq!(square.forward_flops(Mask::Full), 4 * 2 * 6 * 100 * 100 * 64);
        assert_eq!(square.backward_flops(Mask::Full), 10 * 2 * 6 * 100 * 100 * 64);
        for causal in [Mask::CausalTopLeft, Mask::CausalBottomRight] {
            assert_eq!(2 * square.forward_flops(causal), square.forward_flops(Mask::Full));
        }
        assert_eq!(square.label(), "2x100x6:3x64");
        assert_eq!(square.elements().iter().sum::<u64>() * 2, square.bytes(2));
    }

    /// Against a count of pairs, in which the diagonal is counted whole.
    #[test]
    fn causal_masks_of_other_lengths_than_a_square() {
        for (queries, keys) in [(30, 50), (50, 30)] {
            let shape = Shape { queries, keys, value_size: 32, ..Shape::square([1, 0, 1, 1, 64]) };
            for (mask, diagonal) in [(Mask::CausalTopLeft, 0), (Mask::CausalBottomRight, keys as i64 - queries as i64)] {
                let seen = |i: i64| (0..keys as i64).filter(|j| *j <= i + diagonal).count() as u64;
                let on_it = (0..queries as i64).filter(|i| (0..keys as i64).contains(&(i + diagonal))).count() as u64;
                let pairs: u64 = (0..queries as i64).map(seen).sum();
                assert_eq!(shape.forward_flops(mask), (2 * pairs - on_it) * 96, "{mask:?} {queries}x{keys}");
            }
        }
        assert_eq!(Shape { keys: 7, value_size: 128, ..Shape::square([1, 5, 4, 2, 192]) }.label(), "1x5:7x4:2x192:128");
    }
}
