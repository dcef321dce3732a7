//! The weights of layers, and data for them.

use half::bf16 as Half;
use oxtile::sharded::Weight;
use serde::{Deserialize, Serialize};

/// How weights travel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Format {
    Bf16,
    Mxfp8,
    Nvfp4,
}

impl Format {
    pub fn name(self) -> &'static str {
        match self {
            Self::Bf16 => "bf16",
            Self::Mxfp8 => "mxfp8",
            Self::Nvfp4 => "nvfp4",
        }
    }
}

/// Which layers, each of four weights.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Layers {
    pub count: u64,
    /// Rows and columns of a layer's weights.
    pub shapes: [[u64; 2]; 4],
    pub tokens: u64,
    pub format: Format,
}

impl Layers {
    /// Layers of Llama 70B (<https://huggingface.co/meta-llama/Llama-3.1-70B/blob/main/config.json>), and 8192 tokens a rank.
    pub const LLAMA: Self = Self::of(4, 8192, 1024, 28672, 8192);
    /// What virtual GPUs multiply.
    pub const TINY: Self = Self::of(2, 64, 32, 96, 16);

    /// The query, key and value, output, gate and up, and down projections: of a token's elements, those of its key heads, and those of the gated layer.
    const fn of(count: u64, width: u64, keys: u64, gated: u64, tokens: u64) -> Self {
        let shapes = [[width + 2 * keys, width], [width, width], [2 * gated, width], [width, gated]];
        Self { count, shapes, tokens, format: Format::Bf16 }
    }

    /// Sixteen weights, as a model's layers have them, whose shards have so many bytes.
    pub const fn of_shards(world: u32, bytes: u64) -> Self {
        const COLUMNS: u64 = 8192;
        let shape = [bytes / 2 / COLUMNS * world as u64, COLUMNS];
        Self { count: 4, shapes: [shape; 4], tokens: 128, format: Format::Bf16 }
    }

    pub fn weights(self) -> Vec<Weight> {
        (0..self.places())
            .map(|at| Weight::new(format!("{}.{}", at / 4, ["qkv", "out", "gate_up", "down"][at % 4]), self.shape(at)))
            .collect()
    }

    /// The weights of all layers.
    pub fn places(self) -> usize {
        4 * self.count as usize
    }

    /// Rows and columns of the weight at a place.
    pub fn shape(self, at: usize) -> [u64; 2] {
        self.shapes[at % 4]
    }

    /// Elements of all weights.
    fn elements(self) -> u64 {
        self.count * self.shapes.iter().map(|[rows, columns]| rows * columns).sum::<u64>()
    }

    /// The largest of something of a weight.
    pub fn most(self, of: impl Fn([u64; 2]) -> u64) -> u64 {
        self.shapes.into_iter().map(of).max().unwrap_or(0)
    }

    /// Elements of the largest weight.
    pub fn largest(self) -> u64 {
        self.most(|[rows, columns]| rows * columns)
    }

    /// Bytes of the whole weights, in one direction.
    pub fn bytes(self) -> u64 {
        let elements = self.elements();
        match self.format {
            Format::Bf16 => 2 * elements,
            Format::Mxfp8 => elements + elements / 32,
            Format::Nvfp4 => elements / 2 + elements / 16,
        }
    }

    pub fn flops(self) -> u64 {
        2 * self.tokens * self.elements()
    }

    pub fn text(self, world: u32) -> String {
        let [.., [width, gated]] = self.shapes;
        format!("{} layers of {width} and {gated}, {} tokens, {world} ranks", self.count, self.tokens)
    }
}

/// Elements of the pattern, over and over: those of weight `at`, from element `start` on.
pub fn repeated(pattern: &[Half], at: usize, start: u64, len: u64) -> Vec<Half> {
    let (mut from, len) = ((at * 104_729 + start as usize) % pattern.len(), len as usize);
    let mut all = Vec::with_capacity(len);
    while all.len() < len {
        let end = pattern.len().min(from + len - all.len());
        all.extend_from_slice(&pattern[from..end]);
        from = 0;
    }
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pattern_goes_on_from_anywhere() {
        let pattern: Vec<Half> = (0..7).map(|value| Half::from_f32(value as f32)).collect();
        let whole = repeated(&pattern, 3, 0, 40);
        let first = 3 * 104_729 % 7;
        assert!(whole.iter().enumerate().all(|(at, value)| value.to_f32() == ((first + at) % 7) as f32));
        assert_eq!(repeated(&pattern, 3, 11, 20), whole[11..31]);
        assert!(repeated(&pattern, 0, 5, 0).is_empty());
    }
}
