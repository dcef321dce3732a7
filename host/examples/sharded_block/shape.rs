//! The sizes of the model, and its weights.

use oxtile::sharded::Weight;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shape {
    /// Tokens of a micro-batch: one sequence.
    pub tokens: u64,
    pub vocabulary: u64,
    pub heads: u64,
    pub head_size: u64,
    /// Elements of a token between the products of an MLP.
    pub hidden: u64,
    pub blocks: usize,
}

impl Shape {
    /// What virtual GPUs train in seconds.
    pub const TINY: Self = Self { tokens: 64, vocabulary: 128, heads: 2, head_size: 64, hidden: 128, blocks: 2 };
    /// The widths of Llama 8B (<https://huggingface.co/meta-llama/Llama-3.1-8B/blob/main/config.json>) with 32 key heads, in four blocks, and a quarter of its vocabulary.
    pub const LLAMA_8B: Self = Self { tokens: 8192, vocabulary: 32064, heads: 32, head_size: 128, hidden: 14336, blocks: 4 };

    /// Elements of a token.
    pub fn width(self) -> u64 {
        self.heads * self.head_size
    }

    /// All weights, in the order of the forward pass; the last one is the embedding, which is not trained.
    pub fn weights(self) -> Vec<Weight> {
        let (width, hidden) = (self.width(), self.hidden);
        let block = |block| {
            let weight = |name, shape| Weight::new(format!("{block}.{name}"), shape);
            [
                weight("qkv", [3 * width, width]),
                weight("out", [width, width]),
                weight("up", [2 * hidden, width]),
                weight("down", [width, hidden]),
            ]
        };
        let ends = [Weight::new("head", [self.vocabulary, width]), Weight::new("embedding", [self.vocabulary, width]).forward_only()];
        (0..self.blocks).flat_map(block).chain(ends).collect()
    }
}
