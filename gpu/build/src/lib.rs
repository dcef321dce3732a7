//! Compiles any crate that uses `#[kernel]` to PTX with stock rustc, assembles it and checks the result.
//!
//! ```no_run
//! # fn main() -> Result<(), oxtile_build::Error> {
//! let build = oxtile_build::Builder::new("kernels/Cargo.toml")
//!     .arch("sm_90a".parse()?)
//!     .out_dir("target/kernels")
//!     .build()?;
//! for kernel in &build.kernels {
//!     println!("{} on {}: {} registers", kernel.meta.name, kernel.arch, kernel.usage.registers);
//! }
//! # Ok(()) }
//! ```
//!
//! The steps, one module each: [`toolchain`] finds the compiler, [`cuda_tools`] the assembler; `dependencies` looks for what
//! cannot be compiled for a GPU; `compile` runs rustc once a family and architecture where the crate has a feature for each of its families, else once an architecture; [`ptx`] cuts the module into one
//! file an entry and writes the launch bounds into it, which it reads
//! from the metadata comments that `#[kernel]` leaves in the PTX; [`assemble`] runs ptxas; [`lint`] and [`ratchet`] judge
//! the result; [`manifest`] lists what was built, for the program that loads it.
//!
//! With `default-features = false` only [`mod@source_hash`] is left, for the build script of a kernel crate.
//!
//! | file | what it holds |
//! |---|---|
//! | `builder`, `run` | what a build is asked for; its steps |
//! | `dependencies` | what cannot be compiled for a GPU, found before rustc runs |
//! | `toolchain`, `recipe`, `compile` | the compiler, its flags, a run of it |
//! | `ptx`, `labels` | a PTX module, cut into one file an entry; labels as if each were alone |
//! | `arch`, `cuda_tools`, `assemble` | architectures, NVIDIA's tools, ptxas |
//! | `machine_code`, `sass` | instructions of a cubin: counted, and listed |
//! | `lint`, `ratchet`, `causes` | what no kernel may have; the figures that each was accepted with; source lines of findings |
//! | `manifest`, `source_hash` | what was built, and from which sources |
//! | `output`, `draft` | the folder in which it lies; files that appear whole |
//! | `pack`, `bin` | compiled kernels for a program to hold, and the program that packs them |
//! | `stamp` | the source hash in a package of a registry |
//! | `own` | this crate's own sources, which are in the keys of what is kept |
//! | `tool`, `error` | how programs are run; what can go wrong |
#![deny(missing_docs)]

pub mod recipe;
pub mod source_hash;
pub mod stamp;

#[cfg(feature = "compile")]
pub mod arch;
#[cfg(feature = "compile")]
pub mod assemble;
#[cfg(feature = "compile")]
mod builder;
#[cfg(feature = "compile")]
mod causes;
#[cfg(feature = "compile")]
mod compile;
#[cfg(feature = "compile")]
pub mod cuda_tools;
#[cfg(feature = "compile")]
mod dependencies;
#[cfg(feature = "compile")]
mod draft;
#[cfg(feature = "compile")]
mod error;
#[cfg(feature = "compile")]
mod labels;
#[cfg(feature = "compile")]
pub mod lint;
#[cfg(feature = "compile")]
pub mod machine_code;
#[cfg(feature = "compile")]
pub mod manifest;
#[cfg(feature = "compile")]
mod output;
#[cfg(feature = "compile")]
mod own;
#[cfg(feature = "pack")]
pub mod pack;
#[cfg(feature = "compile")]
pub mod ptx;
#[cfg(feature = "compile")]
pub mod ratchet;
#[cfg(feature = "compile")]
mod run;
#[cfg(feature = "compile")]
pub mod sass;
#[cfg(feature = "compile")]
mod tool;
#[cfg(feature = "compile")]
pub mod toolchain;

pub use source_hash::source_hash;

#[cfg(feature = "compile")]
pub use {
    arch::Arch,
    builder::{Build, Builder, Kernel},
    cuda_tools::CudaTools,
    error::Error,
    manifest::Manifest,
    toolchain::Toolchain,
};
