//! Attention: `softmax(scale Q K^T + mask) V` for every head of every batch, without a matrix of scores in memory.
//!
//! | file | what it holds |
//! |---|---|
//! | `forward` | the kernel of forward attention on Hopper |
//! | `problem` | its compile-time policies: what is computed, of which tensors |
//! | `dense`, `arriving`, `packed`, `options` | the problems: dense tensors; those of one rank, whose keys arrive meanwhile; packed (varlen) sequences; windows, caps, sinks, largest logits |
//! | `arriving_options` | dense tensors of one rank, whose keys arrive meanwhile, with options |
//! | `arriving_packed`, `chunk_schedule` | packed sequences of one rank, whose keys arrive meanwhile; where their chunks lie, and their order |
//! | `target`, `running`, `ring_step` | where the result goes; the running result of ring attention, into which each step merges its own; the step |
//! | `forward_split`, `combine`, `parts` | dense attention whose keys are divided among blocks (flash-decoding), its parts put together, and what goes between them |
//! | `forward_fp8` | the forward kernel of e4m3 tensors, whose values are transposed in shared memory |
//! | `fp8_problem` | its compile-time policies, and the tensors, scales and results that its problems share |
//! | `fp8_dense`, `fp8_packed`, `fp8_options` | its problems: dense tensors; packed (varlen) sequences; windows, caps, sinks |
//! | `warpgroup_roles` | which warps compute a tile |
//! | `rings` | queries, keys and values in shared memory, and what fills them |
//! | `walk` | a warpgroup's loop over blocks of keys |
//! | `forward_portable` | dense and packed tensors, masks and windows, on any GPU from sm_80 on |
//! | `forward_portable_general` | the same with sinks, caps, merged results, and heads of any size |
//! | `portable` | what these two take |
//! | `panels` | heads of any size in portable kernels: rows, copies, products, results |
//! | `softmax` | the online softmax: of rows whose scores come block by block |
//! | `mask` | which keys a query sees: causal masks, sliding windows |
//! | `sequence` | where the sequences of a batch lie |
//! | `shape` | how many of everything there are |
//! | `scores` | the factor and the cap of scores |
//! | `epilogue` | the end of a tile |
//! | `workspace` | what blocks share |
//! | `schedule` | which tile a block computes next |
//! | `backward` | the kernel of the backward pass: roles, copies |
//! | `backward_problem` | what it computes: tiles, tensors, masks, results |
//! | `backward_dense` | dense tensors, full or causal |
//! | `backward_arriving` | those of one rank, whose keys arrive meanwhile and belong to other ranks |
//! | `backward_arriving_packed`, `backward_chunks`, `backward_chunk_sums` | packed sequences of one rank, whose keys arrive meanwhile; tiles of their chunks; what follows |
//! | `backward_general` | everything else, of heads up to 128 |
//! | `backward_prepare`, `backward_convert` | what goes before and after it where tensors are dense |
//! | `backward_reduce` | the sum of its parts, where tiles are split or gradients are added |
//! | `backward_sequence_rows` | the same where they hold sequences |
//! | `backward_tensors` | what these kernels share as parameters |
//! | `backward_sums` | tensors in `f32` that gradients are added to |
//! | `backward_walk` | a warpgroup's loop over blocks of queries |
//! | `backward_adder` | the warps that have gradients of queries added up |
//! | `backward_workspace` | what a block has in shared memory |
//! | `backward_mask`, `backward_schedule`, `backward_sequence` | mask, schedule and sequences from the keys' side |
//! | `backward_portable` | the gradients of everything, on any GPU from sm_80 on |
//! | `backward_wide` | what the kernels of wide heads on Hopper share |
//! | `backward_wide_keys`, `backward_wide_queries` | the gradients of keys and values, and of queries, of heads up to 256 |
//! | `backward_statistics` | what is kept of queries: the sums of `O dO`; the gradients of sinks |
//!
//! Source: Shah et al., "FlashAttention-3", 2024: overlap of a block's softmax with the next block's product.

mod arriving;
mod arriving_options;
mod arriving_packed;
mod backward;
mod backward_adder;
mod backward_arriving;
mod backward_arriving_packed;
mod backward_chunk_sums;
mod backward_chunks;
mod backward_convert;
mod backward_dense;
mod backward_general;
mod backward_mask;
mod backward_portable;
mod backward_prepare;
mod backward_problem;
mod backward_reduce;
mod backward_schedule;
mod backward_sequence;
mod backward_sequence_rows;
mod backward_statistics;
mod backward_sums;
mod backward_tensors;
mod backward_walk;
mod backward_wide;
mod backward_wide_keys;
mod backward_wide_queries;
mod backward_workspace;
mod chunk_schedule;
mod combine;
mod dense;
mod epilogue;
mod forward;
mod forward_fp8;
mod forward_portable;
mod forward_portable_general;
mod forward_split;
mod fp8_dense;
mod fp8_options;
mod fp8_packed;
mod fp8_problem;
mod mask;
mod options;
mod packed;
mod panels;
mod parts;
mod portable;
mod problem;
mod ring_step;
mod rings;
mod running;
mod schedule;
mod scores;
mod sequence;
mod shape;
mod softmax;
mod target;
mod walk;
mod warpgroup_roles;
mod workspace;

pub use arriving::*;
pub use arriving_options::*;
pub use arriving_packed::*;
pub use backward::*;
pub use backward_arriving::*;
pub use backward_arriving_packed::*;
pub use backward_chunk_sums::*;
pub use backward_convert::*;
pub use backward_dense::*;
pub use backward_general::*;
pub use backward_mask::Missing;
pub use backward_portable::*;
pub use backward_prepare::*;
pub use backward_reduce::*;
pub use backward_schedule::KeyHeads;
pub use backward_sequence::QueryBlocks;
pub use backward_sequence_rows::*;
pub use backward_statistics::*;
pub use backward_sums::*;
pub use backward_tensors::*;
pub use backward_wide::*;
pub use backward_wide_keys::*;
pub use backward_wide_queries::*;
pub use backward_workspace::{BACKWARD_KEYS, WARPGROUP_KEYS};
pub use chunk_schedule::{ChunkSchedule, ChunkTile, Chunks, ChunksArgument, MOST_KEY_BLOCKS};
pub use combine::*;
pub use dense::*;
pub use forward::*;
pub use forward_fp8::*;
pub use forward_portable::*;
pub use forward_portable_general::*;
pub use forward_split::*;
pub use fp8_dense::*;
pub use fp8_options::*;
pub use fp8_packed::*;
pub use fp8_problem::*;
pub use mask::{FAR, Mask, Span, Window};
pub use options::*;
pub use packed::*;
pub use panels::{PORTABLE_PANEL, PORTABLE_ROWS, portable_general_keys};
pub use parts::{MOST_PARTS, Parts, PartsArgument, PartsMut, PartsMutArgument};
pub use portable::{Inputs, InputsArgument, LogSumExp, LogSumExpArgument, SizedInputs, SizedInputsArgument};
pub use problem::*;
pub use ring_step::{LEFT, RIGHT, RingStep, RingStepArgument, RowMaps, RowMapsArgument, WARP_ROWS};
pub use running::*;
pub use schedule::{TileOrder, TileOrderArgument};
pub use scores::Scores;
pub use sequence::{MAP_ROWS, Sequence, Sequences, SequencesArgument, place};
pub use shape::{Heads, Shape};
pub use target::*;
pub use warpgroup_roles::{Narrow, Pair, WARPGROUP_QUERIES, WarpgroupRoles, Wide};
pub use workspace::Workspace;
