//! Low-precision quantization on GPU kernels written in Rust, and the runtime that launches them on GPUs or on the CPU
//! emulator.
//!
//! ```
//! use oxtile::quantize::{Amax, Direction, Mxfp8};
//! use oxtile::{Buffer, Result, Runtime};
//!
//! # fn main() -> Result<()> {
//! let runtime = Runtime::checked(1)?; // or Runtime::cuda()
//! let stream = runtime.device(0)?.stream()?;
//!
//! let weights = Buffer::from_slice(&stream, &[0.5_f32; 4 * 64])?;
//! let mut amax = Buffer::zeros(&stream, 1)?;
//! Amax::new(&runtime)?.run(&stream, weights.view(), &mut amax)?;
//! let quantized = Mxfp8::<f32>::new(&runtime)?.quantize(&stream, weights.view(), [4, 64], Direction::Rows)?;
//!
//! assert_eq!(amax.to_vec(&stream)?, [0.5]);
//! // 0.5 / 448, rounded up to a power of two: 2^-9, whose code is 127 - 9.
//! assert!(quantized.scales.to_vec(&stream)?.iter().all(|scale| scale.to_bits() == 118));
//! # Ok(()) }
//! ```
//!
//! | noun | module |
//! |---|---|
//! | devices, streams, buffers, graphs | [`runtime`] |
//! | shapes, tensor maps, tables of tensors | [`tensor`] |
//! | formats | [`quantize`] |
//! | matrix multiplication | [`gemm`] |
//! | attention | [`attention`] |
//! | RMS norm, rotary embedding, embedding, cross entropy | [`rms_norm`], [`rotary`], [`embedding`], [`cross_entropy`] |
//! | the AdamW optimizer | [`adamw`] |
//! | sums of parts of ranks, in rank order | [`sum_parts`] |
//! | packed sequences that ranks share | [`thd`] |
//! | how the ranks of a job find one another | [`bootstrap`] |
//! | ranks and collectives | [`comm`] |
//! | products that overlap with communication | [`overlap`] |
//! | attention over a sequence that ranks share | [`context_parallel`] |
//! | weights in shards, gathered on demand; their gradients | [`sharded`] |
//! | memory that other ranks reach, one-sided operations | [`symmetric`] |
//! | what ran when | [`timeline`], recorded as `recording` |
//! | which kernel is taken, and why | [`Choice`] (`choice`) |
//! | values of ranks, which the modules above give out | `rank` |
//! | a test under several seeds | [`testing`] |
//!
//! [`quantize`], [`gemm`], [`attention`], [`symmetric`], [`overlap`], [`sharded`] and the modules from RMS norm to AdamW use Oxtile's own kernels. They are the feature `kernels`, which is on by default. A crate
//! that has kernels of its own and uses none of these compiles faster without it.
#![deny(missing_docs)]
#![cfg_attr(not(feature = "kernels"), allow(dead_code, unused_imports, reason = "the modules of the kernels are the only callers"))]

#[cfg(feature = "kernels")]
pub mod adamw;
#[cfg(feature = "kernels")]
pub mod attention;
pub mod bootstrap;
mod choice;
pub mod comm;
#[cfg(feature = "kernels")]
pub mod context_parallel;
#[cfg(feature = "kernels")]
pub mod cross_entropy;
#[cfg(feature = "kernels")]
pub mod embedding;
#[cfg(feature = "kernels")]
pub mod gemm;
#[cfg(feature = "kernels")]
pub mod overlap;
#[cfg(feature = "kernels")]
pub mod quantize;
mod rank;
mod recording;
#[cfg(feature = "kernels")]
pub mod rms_norm;
#[cfg(feature = "kernels")]
pub mod rotary;
pub mod runtime;
#[cfg(feature = "kernels")]
pub mod sharded;
#[cfg(feature = "kernels")]
pub mod sum_parts;
#[cfg(feature = "kernels")]
pub mod symmetric;
pub mod tensor;
pub mod testing;
#[cfg(feature = "kernels")]
pub mod thd;
pub mod timeline;

pub use choice::Choice;
#[cfg(feature = "kernels")]
pub use oxtile_kernels as kernels;
pub use oxtile_tile::num;
pub use runtime::{
    Bound, Buffer, Device, EmulatedOptions, Error, Event, Graph, HostElement, Kind, Loaded, PinnedBuffer, Result, Runtime, Stream,
};
pub use tensor::DeviceTable;

/// The README's kernel is compiled and run.
#[cfg(doctest)]
#[doc = include_str!("../../README.md")]
struct Readme;

/// So is the program of the crate's page in a registry.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct CrateReadme;

/// So are those of the page on communication.
#[cfg(doctest)]
#[doc = include_str!("../../docs/communication.md")]
struct Communication;

/// So are those of the guide to matrix kernels.
#[cfg(doctest)]
#[doc = include_str!("../../docs/kernels.md")]
struct MatrixKernels;

/// So are those of the page on context parallelism.
#[cfg(doctest)]
#[doc = include_str!("../../docs/context-parallel.md")]
struct ContextParallelism;

/// So are those of the page on sharded weights.
#[cfg(doctest)]
#[doc = include_str!("../../docs/sharded-weights.md")]
struct ShardedWeights;
