//! Embedding: the rows of a table that tokens name, and the gradient of the table.
//!
//! Floors: 4 bytes an element forward; 2 backward, and the 4 of a sum, which the L2 cache reads and writes. Rows of the table that many tokens name
//! come from caches.

use oxtile_tile::prelude::*;

use crate::row::{ByBlock, ByElements, ByWarp, Part, Row, Split};

/// Row `i` of `output` is row `tokens[i]` of `table`, of `width` elements each. A token that the table does not have ends the launch with an
/// error. NaN stay NaN, with a payload that is not specified.
#[kernel(threads = S::THREADS, grid = forward_grid)]
#[instances(T = [bf16, f16], S = [ByWarp<2>, ByBlock<128, 2>, ByBlock<256, 4>, ByElements])]
pub fn embedding<T: Half, S: Split>(table: Global<T>, tokens: Global<u32>, output: GlobalMut<T>, width: u32) {
    let row = Row::<S>::first(width);
    if row.is_in(output.len()) {
        let start = start_of(tokens.load(row.index), width, table.len());
        let part = S::load(table, start, width, 0.0);
        row.store(&output, |i| part.piece(i));
    }
}

/// Adds row `i` of `gradient` to row `tokens[i]` of `table_gradient`, which holds what was there before.
///
/// By atomic additions in `f32`, whose order varies: the last bits of rows that several tokens name differ from run to run. (The same bits would take
/// the tokens in order: a sort, and another launch.) From sm_90 on, rows of four elements and more whose tensors begin
/// at multiples of 16 bytes are added four elements at a time. A token that the table does not have ends the launch with an error.
#[kernel(threads = ByElements::THREADS, grid = backward_grid)]
#[instances(T = [bf16, f16])]
pub fn embedding_backward<T: Half>(gradient: Global<T>, tokens: Global<u32>, table_gradient: GlobalMut<f32>, width: u32) {
    let row = Row::<ByElements>::first(width);
    let start = start_of(tokens.load(row.index), width, table_gradient.len());
    if atomic::ADDS_VECTORS && width.is_multiple_of(4) && (gradient.start() | table_gradient.start()).is_multiple_of(16) {
        for at in thread::stride(width.into(), 4) {
            let [low, high] = gradient.load_pair(row.index * u64::from(width) + at).map(|word| T::X2::from_bits(word).to_f32());
            atomic::add_vector_f32(&table_gradient, start + at, [low[0], low[1], high[0], high[1]]);
        }
        return;
    }
    let part = row.load(gradient);
    for i in 0..ByElements::pieces(width) {
        for (j, x) in part.piece(i).into_iter().enumerate() {
            let at = ByElements::element(i, j as u32);
            if at < width {
                atomic::add_f32(&table_gradient, start + u64::from(at), x);
            }
        }
    }
}

/// Where the row of a token begins.
#[inline(always)]
fn start_of(token: u32, width: u32, elements: u64) -> u64 {
    let start = u64::from(token) * u64::from(width);
    if start >= elements {
        thread::trap();
    }
    start
}

fn forward_grid<T: Half, S: Split>(args: &EmbeddingArgs<'_, T, S>, _: &DeviceLimits) -> Result<Grid, LaunchError> {
    let width = u64::from(args.width);
    LaunchError::check_multiple("table", width, args.table.len())?;
    LaunchError::check_length("output", args.tokens.len().saturating_mul(width), args.output.len())?;
    S::check(args.width, &[("table", args.table.address()), ("output", args.output.address())])?;
    let rows = Grid::rows("output", args.output.len(), width)?;
    Ok(Grid::x(rows.x.div_ceil(S::ROWS)))
}

fn backward_grid<T: Half>(args: &EmbeddingBackwardArgs<'_, T>, _: &DeviceLimits) -> Result<Grid, LaunchError> {
    let width = u64::from(args.width);
    ByElements::check(args.width, &[])?;
    LaunchError::check_multiple("table_gradient", width, args.table_gradient.len())?;
    LaunchError::check_length("gradient", args.tokens.len().saturating_mul(width), args.gradient.len())?;
    Grid::rows("gradient", args.gradient.len(), width)
}
