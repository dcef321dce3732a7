//! FP8.
//!
//! | file | what it holds |
//! |---|---|
//! | `tensor`, `transpose` | one scale for the tensor; with the transpose |
//! | `blocks` | scales of row blocks and of squares |
//! | `shard` | shards of a matrix, rank by rank |
//! | `update_scales` | delayed scaling |

mod blocks;
mod shard;
mod tensor;
mod transpose;
mod update_scales;

use crate::case::Case;

pub fn cases() -> Vec<Case> {
    [tensor::cases(), blocks::cases(), shard::cases(), transpose::cases(), update_scales::cases()].into_iter().flatten().collect()
}
