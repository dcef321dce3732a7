//! Small kernels for every operation of the DSL; [`COVERED`] tells which is where.
//!
//! Each runs on the emulator and on the GPU with the same input, and the bytes must be equal. The
//! GPU's bytes are committed (`tests/golden/gpu.bin`), so that a machine without one still holds
//! the emulator to them. Where the two disagree the emulator is wrong.
//!
//! A kernel takes `input` words and writes `output` words, and runs as one block unless its job gives more.
//!
//! | file | what it holds |
//! |---|---|
//! | `coverage` | which kernel runs which operation |
//! | `memory`, `views`, `copies` | loads, stores, atomics; views and tables; asynchronous copies |
//! | `exchange`, `order`, `cluster` | shuffles, votes, barriers; fences and flags; clusters |
//! | `convert`, `formats` | conversions and arithmetic; packed number types |
//! | `matrix`, `turned`, `fragments`, `warp_matrix` | matrix products by warpgroups, of transposed 8-bit tiles, of parts of tiles; by warps |
//! | `reductions` | reductions of a row over a block; functions that hardware approximates |
//! | `roles` | roles of warpgroups |
//! | `parameters` | structs of parameters |
#![no_std]
#![deny(missing_docs)]

pub mod cluster;
pub mod convert;
pub mod copies;
mod coverage;
pub mod exchange;
pub mod formats;
pub mod fragments;
pub mod matrix;
pub mod memory;
pub mod order;
pub mod parameters;
pub mod reductions;
pub mod roles;
pub mod turned;
pub mod views;
pub mod warp_matrix;

pub use coverage::COVERED;
use oxtile_tile::launch::KernelFamily;

oxtile_tile::source_hash!();

/// Every kernel of this crate.
pub const KERNELS: &[KernelFamily] = &[
    cluster::CLUSTER_SHARE,
    cluster::CLUSTER_WRITE,
    convert::CONVERT_FROM_F32,
    convert::CONVERT_FROM_BYTES,
    convert::HALF_PAIRS,
    convert::ARITHMETIC,
    convert::TRUNCATION,
    copies::COPY_ASYNC_CHUNKS,
    copies::COPY_ASYNC_RING,
    copies::COPY_ASYNC_TILE,
    copies::COPY_ASYNC_WIDTHS,
    copies::BULK_PIPELINE,
    copies::BULK_STORE,
    copies::TENSOR_BOXES,
    exchange::SHUFFLES,
    exchange::VOTES,
    exchange::WARP_REDUCTIONS,
    exchange::BLOCK_MAXIMUM,
    exchange::NAMED_BARRIERS,
    fragments::FRAGMENT_SUMS,
    formats::SMALL_FORMATS,
    formats::HALF_FORMATS,
    matrix::MATRIX_LAYOUTS,
    matrix::MATRIX_REGISTERS,
    matrix::MATRIX_STACKS,
    memory::IDENTITY,
    memory::LOADS_AND_STORES,
    memory::SHARED_MEMORY,
    memory::ATOMICS,
    memory::MAXIMA,
    memory::LAST_BLOCK,
    memory::MESSAGE,
    order::FENCES,
    order::FLAGS,
    order::ARRIVING_CHUNK,
    order::WARP_ROUND,
    order::CLOCK,
    order::MBARRIER_PHASES,
    parameters::NESTED,
    reductions::APPROXIMATIONS,
    reductions::ROW_REDUCTIONS,
    roles::TEAM_ROLES,
    turned::TURNED_PRODUCTS,
    views::ODD_VIEW,
    views::LANES,
    views::TABLE_SUMS,
    views::PARTS,
    views::PLACES,
    warp_matrix::WARP_CHUNKS,
    warp_matrix::WARP_PRODUCTS,
    warp_matrix::WARP_PRODUCTS_8,
];

/// Threads of a block in these kernels.
pub const THREADS: u32 = 128;
