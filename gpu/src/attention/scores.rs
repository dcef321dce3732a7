//! How scores are made of the products of queries and keys.

use oxtile_tile::arch::{Columns, MatrixColumns};
use oxtile_tile::num::{exp2, fma, reciprocal};
use oxtile_tile::prelude::*;
use oxtile_tile::register_tile::RegisterTile;

/// The factor of scores, and their cap: `limit tanh(score / limit)` replaces a capped score.
#[derive(Clone, Copy, Parameter)]
pub struct Scores {
    /// The factor of what the softmax is computed of, with `log2(e)`: of products, or of capped scores.
    pub scale: f32,
    /// `limit`; 0 where scores have no cap.
    pub cap_limit: f32,
    /// What makes `2 log2(e) score / limit` of a product.
    pub cap_factor: f32,
}

impl Scores {
    /// Whether scores have a cap.
    #[inline(always)]
    pub fn are_capped(&self) -> bool {
        self.cap_limit != 0.0
    }

    /// Caps the scores that these products make.
    #[inline(always)]
    pub fn cap<const KEYS: usize>(&self, products: &mut RegisterTile<KEYS>)
    where
        Columns<KEYS>: MatrixColumns,
    {
        // tanh(x) = 1 - 2 / (1 + e^2x); an exponential of inf gives 1, one of 0 gives -1.
        products.map(|product| fma(-2.0 * self.cap_limit, reciprocal(1.0 + exp2(product * self.cap_factor)), self.cap_limit));
    }
}
