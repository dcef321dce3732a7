//! Attention: `softmax(scale Q K^T + mask) V` for every head of every batch, without a matrix of scores in memory.
//!
//! | file | what it holds |
//! |---|---|
//! | `forward` | the kernel: tiles, roles, the loop over blocks of keys |
//! | `forward_fp8` | the same of 8-bit elements, whose values are transposed on the way |
//! | `softmax` | the softmax of rows whose scores come block by block |
//! | `mask` | which keys a query sees |
//! | `sequence` | where the sequences of a batch lie |
//! | `schedule` | which tile a block computes next |
//!
//! Source: Shah et al., "FlashAttention-3", 2024: overlap of a block's softmax with the next block's product.

mod forward;
mod forward_fp8;
mod mask;
mod schedule;
mod sequence;
mod softmax;

pub use forward::*;
pub use forward_fp8::*;
pub use mask::{FAR, Mask, Span, Window};
pub use sequence::{MAP_ROWS, Sequence, Sequences, place};
