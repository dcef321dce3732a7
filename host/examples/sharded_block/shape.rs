//! The sizes of the model, and its weights.

use oxtile::sharded::Weight;

/// Tokens of a micro-batch: one sequence.
pub const TOKENS: u64 = 64;
pub const VOCABULARY: u64 = 128;
/// Elements of a token.
pub const WIDTH: u64 = HEADS * HEAD_SIZE;
pub const HEADS: u64 = 2;
pub const HEAD_SIZE: u64 = 64;
/// Elements of a token between the products of an MLP.
pub const HIDDEN: u64 = 128;
pub const BLOCKS: usize = 2;

/// All weights, in the order of the forward pass; the last one is the embedding, which is not trained.
pub fn weights() -> Vec<Weight> {
    let block = |block| {
        let weight = |name, shape| Weight::new(format!("{block}.{name}"), shape);
        [
            weight("qkv", [3 * WIDTH, WIDTH]),
            weight("out", [WIDTH, WIDTH]),
            weight("up", [2 * HIDDEN, WIDTH]),
            weight("down", [WIDTH, HIDDEN]),
        ]
    };
    let ends = [Weight::new("head", [VOCABULARY, WIDTH]), Weight::new("embedding", [VOCABULARY, WIDTH]).forward_only()];
    (0..BLOCKS).flat_map(block).chain(ends).collect()
}
