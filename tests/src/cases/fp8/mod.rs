//! FP8.

mod tensor;
mod transpose;

use crate::case::Case;

pub fn cases() -> Vec<Case> {
    [tensor::cases(), transpose::cases()].into_iter().flatten().collect()
}
