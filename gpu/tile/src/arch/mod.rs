//! The instruction layer: one trait an instruction family, two sides.
//!
//! [`Target`] is `Nvptx` when this crate is compiled for `nvptx64`, `Emulated` otherwise. The code
//! above calls `<Target as Barrier>::sync(..)`, the same for both. `asm!`, `link_name` and
//! `cfg(target_arch)` live here alone.
//!
//! Encoding rule for the device side (docs/style.md): whatever must be executed by several threads
//! together is an `llvm.nvvm.*` intrinsic, because `asm!` is not convergent and LLVM may copy it
//! into the arms of a branch; single-thread and pure instructions are `asm!`.
//!
//! | file | what it holds |
//! |---|---|
//! | `families` | the traits of what all kernels use: identity, memory, atomics, barriers, warps, mbarriers, copies, fences |
//! | `matrix` | those of matrix kernels: multiplication by warpgroups and by warps, moves of matrices, registers |
//! | `cluster` | that of clusters |
//! | `convert`, `approximate` | those of number formats, and of functions that hardware approximates |
//! | `nvptx` | the device side |
//! | `emulated` | the emulator's side, with files of the same names |

mod approximate;
mod cluster;
mod convert;
mod families;
mod matrix;

#[cfg(target_arch = "nvptx64")]
mod nvptx;
#[cfg(target_arch = "nvptx64")]
pub use nvptx::Nvptx;
/// The side in force: the device.
#[cfg(target_arch = "nvptx64")]
pub type Target = Nvptx;

#[cfg(not(target_arch = "nvptx64"))]
mod emulated;
#[cfg(not(target_arch = "nvptx64"))]
pub use emulated::Emulated;
/// The side in force: the emulator.
#[cfg(not(target_arch = "nvptx64"))]
pub type Target = Emulated;

pub use approximate::Approximate;
pub use cluster::Cluster;
pub use convert::Convert;
pub use families::*;
pub use matrix::*;
