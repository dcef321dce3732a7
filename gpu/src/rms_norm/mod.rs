//! RMS norm: `y = x / rms(x) * weight`, where `rms(x)` is `sqrt(mean(x^2) + epsilon)` of each row.
//!
//! Statistics and products are in `f32`, results are rounded once. Floors: 4 bytes an element forward, 6 backward.
//!
//! | file | what it holds |
//! |---|---|
//! | `forward` | [`rms_norm`](fn@rms_norm) |
//! | `backward` | [`rms_norm_backward`](fn@rms_norm_backward): the input's gradient, and parts of the weight's, which [`column_sums`](fn@crate::column_sums::column_sums) adds up |

mod backward;
mod forward;

pub use backward::*;
pub use forward::*;
