//! FP8.

mod blocks;
mod shard;
mod tensor;
mod transpose;
mod update_scales;

use crate::case::Case;

pub fn cases() -> Vec<Case> {
    [tensor::cases(), blocks::cases(), shard::cases(), transpose::cases(), update_scales::cases()].into_iter().flatten().collect()
}
