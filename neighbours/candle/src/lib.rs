//! Attention with gradients, and quantization, on [candle](https://docs.rs/candle-core)'s tensors.
//!
//! ```
//! use candle_core::{DType, Device, Var};
//! use oxtile_candle::{AttentionOptions, Mask, attention};
//!
//! # fn main() -> candle_core::Result<()> {
//! let device = Device::Cpu; // or Device::new_cuda(0)?
//! let random = |heads| Var::randn_f64(0.0, 1.0, (1, 128, heads, 64), DType::BF16, &device);
//! let (q, k, v) = (random(4)?, random(2)?, random(2)?); // [batches, rows, heads, size]
//! let out = attention(&q, &k, &v, &AttentionOptions { mask: Mask::CausalBottomRight, ..AttentionOptions::default() })?;
//! let gradients = out.sum_all()?.backward()?;
//! assert_eq!(gradients.get(&k).unwrap().dims(), [1, 128, 2, 64]);
//! # Ok(()) }
//! ```
//!
//! | function | what it computes |
//! |---|---|
//! | [`attention`] | `softmax(scale Q K^T + mask) V` with gradients: dense tensors |
//! | [`attention_packed`] | the same of packed sequences |
//! | [`quantize`], [`Quantized::dequantize`] | a matrix to MXFP8, NVFP4 or FP8, and back |
//!
//! On a GPU (feature `cuda`) the kernels read candle's memory and write to memory that candle allocated, in the order of the device's stream: no copy, and the host waits for nothing. On the
//! CPU a call copies its tensors to an emulator, which runs the same kernels: for tests and small trials, since it takes seconds where a GPU takes microseconds. Its results are those of
//! a GPU to the bit where the format defines bits.
//!
//! Tensors are contiguous: call `contiguous()` on others. Bad arguments are candle errors with Oxtile's own words. Second derivatives are not there: a gradient has none.
//!
//! | file | what it holds |
//! |---|---|
//! | `attention` | the operation that candle's autograd knows, and its arguments' checks |
//! | `launch` | one forward or backward pass on a place |
//! | `quantize`, `cast` | matrices in other formats, and their kernels |
//! | `place` | where a tensor lies, as a trait: `cpu` by the emulator, `cuda` |
//! | `element` | elements of candle's and of Oxtile's |
//! | `check` | what tensors are refused |

mod attention;
mod cast;
mod check;
mod cpu;
#[cfg(feature = "cuda")]
mod cuda;
mod element;
mod launch;
mod place;
mod quantize;

pub use attention::{AttentionOptions, attention, attention_packed};
pub use candle_core;
pub use oxtile;
pub use oxtile::attention::{Mask, Order, Window};
pub use oxtile::quantize::Direction;
pub use quantize::{Quantization, Quantized, quantize};
