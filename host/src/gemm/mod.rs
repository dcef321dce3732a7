//! Matrix multiplication: `D = alpha A B + beta D`, then a bias and GELU if asked for.
//!
//! `A` is `[m, k]`, `B` is `[k, n]`, `D` is `[m, n]`, all row-major without gaps; an operand may be stored as its
//! transpose instead. Products are summed in `f32`. Any shape is right, but of operands of two 8-bit types, which take
//! Hopper's `wgmma`; [`GemmConfig::choose`] says which is fast. The tensor cores take 8-bit operands along `k` alone: others are
//! transposed first, in the same call ([`GemmKernel::WgmmaTransposed`]).
//!
//! | file | what it holds |
//! |---|---|
//! | `config` | what is computed |
//! | `epilogue` | what a binding adds: bias, kept inputs, gradients of biases |
//! | `choice` | which kernel a product takes, and why |
//! | `plan` | how a product is divided among the multiprocessors, and how long that takes |
//! | `table` | the kernels of each pair of elements |
//! | `product` | a product that is loaded, and matrices bound to it |
//! | `wgmma` | matrices bound to the kernels on wgmma |
//! | `transposed` | the same, after 8-bit operands are transposed |
//! | `portable` | matrices bound to the kernels on `mma.sync` |
//! | `any` | matrices bound to the kernel without tensor cores |
//! | `grouped` | products of groups of rows, such as those of experts |
//! | `blocks` | matrices bound to the kernel of FP8 codes with scales of blocks |
//!
//! ```
//! use oxtile::gemm::{Gemm, GemmConfig};
//! use oxtile::num::bf16;
//! use oxtile::{Buffer, Result, Runtime};
//!
//! # fn main() -> Result<()> {
//! let runtime = Runtime::checked(1)?; // or Runtime::cuda()
//! let stream = runtime.device(0)?.stream()?;
//! let config = GemmConfig { m: 16, n: 24, k: 8, ..GemmConfig::default() };
//!
//! let (a, b) = (vec![half::bf16::from_f32(0.5); 16 * 8], vec![half::bf16::from_f32(3.0); 8 * 24]);
//! let (a, b) = (Buffer::from_slice(&stream, &a)?, Buffer::from_slice(&stream, &b)?);
//! let mut d = Buffer::<f32>::zeros(&stream, 16 * 24)?;
//! Gemm::<bf16, f32>::new(&runtime, config)?.run(&stream, a.view(), b.view(), None, d.view_mut())?;
//!
//! assert_eq!(d.to_vec(&stream)?[0], 12.0);
//! # Ok(()) }
//! ```

mod any;
mod blocks;
mod choice;
mod config;
mod epilogue;
mod grouped;
mod plan;
mod portable;
mod product;
mod table;
mod transposed;
mod wgmma;

pub(crate) use choice::wgmma_of;
pub use choice::{GemmKernel, GemmTile};
pub use config::{Activation, GemmConfig};
pub use epilogue::Epilogue;
pub(crate) use epilogue::Unfinished;
pub use grouped::GroupedGemm;
pub use plan::GemmPlan;
pub use product::Gemm;
pub(crate) use product::Matrices;
pub use table::{GemmElement, GemmOperands};
pub(crate) use wgmma::Maps;
