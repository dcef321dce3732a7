//! FP8.

mod blocks;
mod tensor;
mod transpose;
mod update_scales;

use crate::case::Case;

pub fn cases() -> Vec<Case> {
    [tensor::cases(), blocks::cases(), transpose::cases(), update_scales::cases()].into_iter().flatten().collect()
}
