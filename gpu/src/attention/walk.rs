//! The walk of a warpgroup over a tile's blocks of keys.

use oxtile_tile::arch::{Columns, MatrixColumns};
use oxtile_tile::layout::Swizzle128;
use oxtile_tile::matrix::{self, Left};
use oxtile_tile::pipeline::Consumer;
use oxtile_tile::register_tile::{RegisterElement, RegisterTile};
use oxtile_tile::shared::SharedTile;

use super::mask::Span;
use super::softmax::Softmax;

/// A block of keys, or of values.
pub type Block<T, const KEYS: usize, const D: usize> = SharedTile<T, KEYS, D, Swizzle128>;

/// A block's place in the walk.
#[derive(Clone, Copy)]
pub struct Step {
    /// The block.
    pub block: u32,
    /// Whether it is the walk's first, a constant.
    pub first: bool,
}

/// What a warpgroup does beside a product: always inlined, as a closure of two callers is not at once.
pub trait Beside<L> {
    /// Called once in a walk, beside the last product if there is one.
    fn last(self) -> L;
}

impl Beside<()> for () {
    #[inline(always)]
    fn last(self) {}
}

/// The weighted sum of values, before it is divided by the sum of weights, of 64 queries over the blocks of keys `blocks`, the
/// last first. `edit` changes the scores of a block before they count. Where the softmax is [sparing](Softmax::sparing), blocks after
/// the first [follow](Softmax::follow). `beside` gives
/// what is computed beside the last product.
///
/// In each step
///
/// 1. the product of queries and keys starts;
/// 2. the product of the block before starts: its weights, from registers, and its values;
/// 3. the scores alone are waited for and turned into weights, while the tensor cores multiply the values;
/// 4. that product is waited for, and scaled if a row's maximum has risen.
#[inline(always)]
#[track_caller]
pub fn walk<T: RegisterElement, const D: usize, const V: usize, const KEYS: usize, L>(
    query: impl Left<T, D>,
    keys: &mut Consumer<Block<T, KEYS, D>, 2>,
    values: &mut Consumer<Block<T, KEYS, V>, 2>,
    softmax: &mut Softmax,
    blocks: Span,
    edit: impl Fn(&mut RegisterTile<KEYS>, Step),
    beside: impl Beside<L>,
) -> (RegisterTile<V>, L)
where
    Columns<KEYS>: MatrixColumns,
    Columns<V>: MatrixColumns,
{
    let mut sum = RegisterTile::<V>::zero();
    if blocks.begin >= blocks.end {
        return (sum, beside.last());
    }
    let key = keys.wait();
    let mut scores = matrix::multiply::<T, KEYS, D, false>(query, key.memory().k_major()).wait();
    key.release_after_wait();
    edit(&mut scores, Step { block: blocks.end - 1, first: true });
    softmax.update(&mut scores);
    softmax.settle();
    let mut weights = scores.to_operand::<T>();
    for block in (blocks.begin..blocks.end - 1).rev() {
        let key = keys.wait();
        let scores = matrix::multiply::<T, KEYS, D, false>(query, key.memory().k_major());
        let value = values.wait();
        let product = sum.multiply_add(weights, value.memory().mn_major());
        let mut scores = scores.wait_leaving::<1>();
        key.release_after_wait();
        edit(&mut scores, Step { block, first: false });
        let factors = match softmax.is_sparing() {
            true => {
                let (weights, factors) = softmax.follow(&scores, |weights| *weights);
                scores = weights;
                factors
            }
            false => softmax.update(&mut scores),
        };
        sum = product.wait();
        value.release_after_wait();
        weights = scores.to_operand();
        if let Some(factors) = factors {
            sum.scale_rows(factors);
        }
    }
    let value = values.wait();
    let product = sum.multiply_add(weights, value.memory().mn_major());
    let last = beside.last();
    sum = product.wait();
    value.release_after_wait();
    (sum, last)
}
