//! Where the elements of a product's matrices are: a compile-time policy.

use oxtile_tile::tensor_map::MAP_ROWS;

/// The coordinates in tensor maps of `RANK` dimensions, of elements by their row and column as the matrix is stored.
pub trait Place<const RANK: usize>: Copy {
    /// In the map of `A`.
    fn a(&self, at: [u32; 2]) -> [u32; RANK];

    /// In the map of `B`.
    fn b(&self, at: [u32; 2]) -> [u32; RANK];

    /// In the map of `D`.
    fn d(&self, at: [u32; 2]) -> [u32; RANK];

    /// The product's first row in the matrix that has `D`, and the one after its last, of a product of `m` rows.
    fn rows(&self, m: u32) -> [u32; 2];
}

/// Each matrix is one of the product's.
#[derive(Clone, Copy)]
pub struct Alone;

impl Place<2> for Alone {
    #[inline(always)]
    fn a(&self, at: [u32; 2]) -> [u32; 2] {
        at
    }

    #[inline(always)]
    fn b(&self, at: [u32; 2]) -> [u32; 2] {
        at
    }

    #[inline(always)]
    fn d(&self, at: [u32; 2]) -> [u32; 2] {
        at
    }

    #[inline(always)]
    fn rows(&self, m: u32) -> [u32; 2] {
        [0, m]
    }
}

/// Rows of a matrix that belong together, from `first` to before `end`.
#[derive(Clone, Copy)]
pub struct Range {
    pub first: u32,
    pub end: u32,
}

impl Range {
    /// The coordinates of an element of the range in a map whose edge is moved to the end of the range: what is after it is loaded as zero and not stored.
    ///
    /// The map has the dimensions `[huge, huge, MAP_ROWS, width]` with strides of `[2^34 - width, width, width, 1]` elements: the last row of the range has
    /// the last index that the map allows, the second coordinate takes that back, and the first makes the sum a multiple of 2^64 bytes
    /// (as [`place`](crate::attention::place) does it for sequences).
    #[inline(always)]
    fn at(&self, [row, column]: [u32; 2]) -> [u32; 4] {
        [MAP_ROWS, self.end, MAP_ROWS - (self.end - self.first) + row, column]
    }
}

/// A group of a grouped product, of which each matrix is a range of rows of a larger one: of tokens, or of the weights of all groups. By the sum, tokens are
/// multiplied by tokens, and the result is of weights; else tokens are multiplied by weights.
#[derive(Clone, Copy)]
pub struct Group<const BY_SUM: bool> {
    pub tokens: Range,
    pub weights: Range,
}

impl<const BY_SUM: bool> Place<4> for Group<BY_SUM> {
    #[inline(always)]
    fn a(&self, at: [u32; 2]) -> [u32; 4] {
        self.tokens.at(at)
    }

    #[inline(always)]
    fn b(&self, at: [u32; 2]) -> [u32; 4] {
        if BY_SUM { self.tokens.at(at) } else { self.weights.at(at) }
    }

    #[inline(always)]
    fn d(&self, at: [u32; 2]) -> [u32; 4] {
        if BY_SUM { self.weights.at(at) } else { self.tokens.at(at) }
    }

    #[inline(always)]
    fn rows(&self, _: u32) -> [u32; 2] {
        let Range { first, end } = if BY_SUM { self.weights } else { self.tokens };
        [first, end]
    }
}
