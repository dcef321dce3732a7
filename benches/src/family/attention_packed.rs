//! Packed sequences of attention, and the dense tensors of as much work that they are compared with.

use oxtile::attention::{AttentionConfig, Layout, Mask};

use super::attention_shape::Shape;
use crate::{bench::Size, random::Random};

/// The seed of the places at which random lengths are cut: the same in every run.
const SEED: u64 = 5;
/// Rows that tiles of queries and of keys divide, and so those of the dense tensors.
const TILE: u64 = 128;

/// Packed sequences `[rows, heads, size]`, as many keys as queries in each.
#[derive(Clone, Debug)]
pub(super) struct Packed {
    lengths: Vec<u64>,
    /// All rows as one sequence.
    rows: Shape,
}

impl Packed {
    /// Rows of such heads, cut at random places into so many sequences.
    pub fn cut(rows: u64, sequences: u64, [heads, key_heads, head_size]: [u64; 3]) -> Self {
        let places = Random::new(SEED).order(rows as usize - 1);
        let mut ends: Vec<u64> = places.into_iter().take(sequences as usize - 1).map(|place| place as u64 + 1).chain([rows]).collect();
        ends.sort_unstable();
        let lengths = ends.iter().scan(0, |start, &end| Some(end - std::mem::replace(start, end)));
        Self { lengths: lengths.collect(), rows: Shape::square([1, rows, heads, key_heads, head_size]) }
    }

    /// Sequences of lengths from 2048 to 16384, of which no tile divides some: 32768 rows.
    pub fn mixed(size: Size, heads: [u64; 3]) -> Self {
        let lengths = size.pick(&[2048, 16384, 3111, 8192, 3033][..], &[40, 97]);
        let [heads, key_heads, head_size] = heads;
        Self { lengths: lengths.to_vec(), rows: Shape::square([1, lengths.iter().sum(), heads, key_heads, head_size]) }
    }

    /// The same rows with values of another size.
    pub fn with_values(self, value_size: u64) -> Self {
        Self { rows: Shape { value_size, ..self.rows }, ..self }
    }

    /// The memory of dense tensors.
    pub fn of(dense: Shape) -> Self {
        let rows = dense.batches * dense.queries;
        Self { lengths: vec![dense.queries; dense.batches as usize], rows: Shape { batches: 1, queries: rows, keys: rows, ..dense } }
    }

    /// The sequences of the benchmarks: 32768 rows of each set of heads in 12 sequences, under both masks.
    pub fn random(size: Size) -> Vec<(Self, Mask)> {
        let [rows, sequences] = size.pick([32768, 12], [70, 3]);
        let heads = size.pick(&[[16, 16, 128], [16, 4, 128], [32, 32, 64]][..], &[[1, 1, 128], [2, 1, 128], [1, 1, 64]]);
        let all =
            heads.iter().flat_map(|&heads| [Mask::Full, Mask::CausalBottomRight].map(|mask| (Self::cut(rows, sequences, heads), mask)));
        all.collect()
    }

    /// The same rows in sequences of 16, each less than a tile.
    pub fn short(size: Size) -> Self {
        let [batches, length, heads] = size.pick([2048, 16, 16], [5, 3, 1]);
        Self::of(Shape::square([batches, length, heads, heads, 128]))
    }

    /// All rows as one sequence: the sizes of the tensors.
    pub fn rows(&self) -> Shape {
        self.rows
    }

    /// As tables print it: sequences, of rows in all, and heads.
    pub fn label(&self) -> String {
        let Shape { queries, heads, key_heads, .. } = self.rows;
        format!("{} of {queries}x{heads}:{key_heads}x{}", self.lengths.len(), self.rows.sizes())
    }

    /// The problem under a mask.
    pub fn config(&self, mask: Mask) -> AttentionConfig {
        AttentionConfig { layout: Layout::Packed, batches: self.lengths.len() as u64, ..self.rows.config(mask) }
    }

    /// Where sequences begin, and the last ends.
    pub fn offsets(&self) -> Vec<u32> {
        let ends = self.lengths.iter().scan(0, |end, length| {
            *end += *length as u32;
            Some(*end)
        });
        [0].into_iter().chain(ends).collect()
    }

    /// Each sequence as a shape of its own.
    fn sequences(&self) -> impl Iterator<Item = Shape> {
        self.lengths.iter().map(|&length| Shape { queries: length, keys: length, ..self.rows })
    }

    /// Floating-point operations of the forward pass, as of so many dense tensors.
    pub fn forward_flops(&self, mask: Mask) -> u64 {
        self.sequences().map(|sequence| sequence.forward_flops(mask)).sum()
    }

    /// Those of the backward pass.
    pub fn backward_flops(&self, mask: Mask) -> u64 {
        self.sequences().map(|sequence| sequence.backward_flops(mask)).sum()
    }

    /// Dense tensors of about as many rows and as much work, their lengths a multiple of a tile's: the best case of such kernels. Sequences of
    /// one length are dense tensors.
    pub fn dense(&self) -> Shape {
        if let [first, rest @ ..] = &self.lengths[..]
            && rest.iter().all(|length| length == first)
        {
            return Shape { batches: self.lengths.len() as u64, queries: *first, keys: *first, ..self.rows };
        }
        let squares = self.lengths.iter().map(|length| length.pow(2)).sum::<u64>() as f64;
        // Sequences of the length that a row's own has on average.
        let batches = (self.rows.queries as f64).powi(2) / squares;
        let batches = batches.round().max(1.0);
        let length = ((squares / batches).sqrt() / TILE as f64).round().max(1.0) as u64 * TILE;
        Shape { batches: batches as u64, queries: length, keys: length, ..self.rows }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn random_lengths_fill_the_rows_and_no_tile_divides_them() {
        for (packed, mask) in Packed::random(Size::Full) {
            assert_eq!((packed.lengths.len(), packed.lengths.iter().sum::<u64>()), (12, 32768));
            assert!(packed.lengths.iter().all(|length| *length > 0 && length % 16 != 0), "{:?}", packed.lengths);
            let offsets = packed.offsets();
            assert_eq!((offsets.len(), offsets[0], offsets[12]), (13, 0, 32768));
            assert!(offsets.windows(2).zip(&packed.lengths).all(|(pair, length)| u64::from(pair[1] - pair[0]) == *length));
            let work = |shape: Shape| shape.forward_flops(mask) as f64 / packed.forward_flops(mask) as f64;
            assert!((work(packed.dense()) - 1.0).abs() < 0.05, "the dense tensors do {} of the work", work(packed.dense()));
            let rows = packed.dense().batches * packed.dense().queries;
            assert!((rows as f64 / 32768.0 - 1.0).abs() < 0.05, "the dense tensors have {rows} rows");
        }
    }

    #[test]
    fn equal_lengths_are_the_dense_tensors() {
        let dense = Shape::square([8, 256, 16, 4, 128]);
        let packed = Packed::of(dense);
        assert_eq!(packed.dense(), dense);
        assert_eq!(Packed::short(Size::Full).dense(), Shape::square([2048, 16, 16, 16, 128]));
        assert_eq!(Packed::mixed(Size::Full, [16, 16, 128]).label(), "5 of 32768x16:16x128");
        assert_eq!(packed.rows().elements(), dense.elements());
        for mask in [Mask::Full, Mask::CausalBottomRight] {
            assert_eq!(packed.forward_flops(mask), dense.forward_flops(mask));
            assert_eq!(packed.backward_flops(mask), dense.backward_flops(mask));
        }
        assert_eq!((packed.label(), packed.config(Mask::Full).batches), ("8 of 2048x16:4x128".to_owned(), 8));
    }
}
