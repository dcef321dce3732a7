//! The Oxtile kernel DSL.
//!
//! Kernels written with it are plain Rust. For `nvptx64` they compile to PTX; on any other target
//! the same source runs on [`oxtile_emulator`](https://docs.rs/oxtile-emulator), one coroutine a CUDA thread.
//!
//! | noun | module |
//! |---|---|
//! | which thread, warp, warpgroup, block, cluster | [`thread`], [`warp`], [`warpgroup`] (with its roles), [`block`], [`cluster`] |
//! | device memory | [`global`]: [`Global`](global::Global), [`GlobalMut`](global::GlobalMut) |
//! | 16 bytes of elements | [`vector`]: [`Vector`](vector::Vector) |
//! | the block's memory | [`shared`]: [`SharedArray`](shared::SharedArray), [`SharedTile`](shared::SharedTile) (`shared_tile`), `#[derive(SharedStorage)]` |
//! | copies, mbarriers, rings of stages | [`pipeline`] |
//! | TMA's descriptors (tensor maps) | [`tensor_map`] |
//! | swizzles, descriptors of matrix operands | [`layout`] |
//! | matrix multiplication | [`matrix`] (`wgmma`), [`warp_matrix`] (`mma.sync`) |
//! | tiles in registers, and in memory as registers hold them; transposition of 8-bit tiles | [`register_tile`], [`fragment_tile`]; `turn` |
//! | how a result leaves, which tile is next | [`epilogue`], [`scheduler`] |
//! | barriers, fences, atomics, flags between devices, chunks that arrive meanwhile, vectors that say by themselves that they have come | [`sync`], [`atomic`], [`flag`], [`arrivals`], [`slots`] |
//! | number formats | [`num`] |
//! | what the host must know | [`launch`] |
//! | instructions, on the device and on the emulator | [`arch`] |
//!
//! Loads and stores are bounds-checked on the emulator. On the device they are unchecked unless the
//! kernels are built with `--checked` (docs/adr/0005-device-bounds.md).
#![no_std]
#![deny(missing_docs)]
#![cfg_attr(target_arch = "nvptx64", feature(asm_experimental_arch, link_llvm_intrinsics, stdarch_nvptx, core_intrinsics))]
#![cfg_attr(target_arch = "nvptx64", allow(internal_features))]

extern crate self as oxtile_tile;

pub mod arch;
pub mod arrivals;
pub mod atomic;
pub mod block;
pub mod cluster;
pub mod epilogue;
pub mod flag;
pub mod fragment_tile;
pub mod global;
pub mod launch;
pub mod layout;
pub mod matrix;
pub mod num;
pub mod pipeline;
pub mod register_tile;
pub mod scheduler;
pub mod shared;
mod shared_tile;
pub mod slots;
pub mod sync;
pub mod tensor_map;
pub mod thread;
mod turn;
pub mod vector;
pub mod warp;
pub mod warp_matrix;
pub mod warpgroup;

pub use oxtile_macros::{Parameter, SharedStorage, kernel};

/// The body of a kernel's emulated thread, for `#[kernel]`. Without the feature `emulator` it is checked and not compiled: a closure that is never called has no code.
#[doc(hidden)]
#[macro_export]
#[cfg(feature = "emulator")]
macro_rules! emulated {
    ($($body:tt)*) => { $($body)* };
}

/// The body of a kernel's emulated thread, for `#[kernel]`. Without the feature `emulator` it is checked and not compiled: a closure that is never called has no code.
#[doc(hidden)]
#[macro_export]
#[cfg(not(feature = "emulator"))]
macro_rules! emulated {
    ($($body:tt)*) => {{
        let _ = || { $($body)* };
        panic!("kernels were compiled without the feature `emulator` of oxtile-tile");
    }};
}

/// What a kernel file imports.
pub mod prelude {
    pub use crate::block::ReduceStorage;
    pub use crate::global::{Global, GlobalMut};
    pub use crate::launch::{DeviceLimits, DeviceView, DeviceViewMut, Grid, LaunchError, Parameter};
    pub use crate::num::{Element, Float, Half, HalfPair, Pod, bf16, f16};
    pub use crate::shared::{SharedArray, SharedStorage};
    pub use crate::vector::Vector;
    pub use crate::{Parameter, SharedStorage, atomic, block, flag, kernel, num, sync, thread, warp};
}
