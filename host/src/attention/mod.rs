//! Attention: `softmax(scale Q K^T + mask) V`, forward and backward.
//!
//! `Q` and the output are `[batches, queries, heads, head_size]`, `K` and `V` are `[batches, keys, key_heads, head_size]`, or in
//! another [`Layout`], or parts of larger tensors ([`Heads`](crate::tensor::Heads)): some rows of each sequence, keys and values that take turns in
//! one buffer. Query head `h` sees key head `h / (heads / key_heads)`. The log-sum-exp is natural, of the scaled scores. A
//! query that sees no key gets zeros and -inf.
//!
//! Which strides a kernel takes, beyond those without gaps; the others are refused by name when tensors are bound. Rows of a head are always
//! neighbours in their elements, and what maps address has strides of whole 16 bytes. The log-sum-exp and the row sums of `O dO` have no gaps.
//!
//! | kernels | of tensors and gradients | of running results and sums |
//! |---|---|---|
//! | dense, forward and backward, of 16 and of 8 bits; divided keys | any | any; sums: whole heads, alike for keys and values |
//! | packed sequences, of 16 and of 8 bits | any of rows and heads | the same |
//! | options, of 16 and of 8 bits, general backward, backward of heads above 128 | batches whole rows apart (bshd), or neighbours in a row (sbhd), alike for queries and results, for keys and values | running: the same; sums: row ranges |
//! | portable | row ranges: gaps between batches alone | the same |
//! | row sums of `O dO` | gaps between batches alone | |
//!
//! | file | what it holds |
//! |---|---|
//! | `config` | what is computed, checked as a whole: sizes, causal masks, sliding windows, sinks, results merged into those of a ring |
//! | `arguments` | what a configuration is to the kernels: sizes, masks, the order of tiles |
//! | `choice` | which kernel a configuration takes, and why |
//! | `tensors` | what is read and written |
//! | `buffers` | results and gradients in new buffers, for a program that has none of its own |
//! | `table` | a row of the tables of kernels |
//! | `forward` | the forward pass, and the table of its kernels |
//! | `problems` | tensors bound to the kernel on wgmma: dense, packed (varlen), with options |
//! | `heads`, `sequences`, `results`, `sink` | what these bind: tensor maps, sequences, the result, what the softmax counts beside keys |
//! | `arriving`, `arriving_backward` | tensors of a rank whose keys arrive while the kernel runs, bound to either pass |
//! | `arriving_packed`, `arriving_backward_packed` | the same of packed sequences |
//! | `divided_keys` | few queries of many keys, which are divided among blocks (flash-decoding) |
//! | `fp8` | 8-bit tensors with scales: dense, packed (varlen), with options |
//! | `portable` | the kernels for GPUs other than Hopper |
//! | `backward` | the backward pass, in one call or in two, and the table of its kernels |
//! | `backward_choice` | which of them a configuration takes, and why |
//! | `group_parts` | among how many tiles query heads that share keys are split |
//! | `backward_tensors` | what it reads and writes |
//! | `backward_deltas` | the row sums of `O dO`, which it needs first |
//! | `backward_dense` | tensors bound to the kernels of dense tensors |
//! | `backward_general` | tensors bound to its kernels of everything else |
//! | `backward_portable` | tensors bound to its kernels for GPUs other than Hopper |
//! | `backward_wide` | tensors bound to its kernels of heads above 128 |
//! | `backward_blocks` | what the kernels on wgmma share |
//!
//! ```
//! use oxtile::attention::{Attention, AttentionConfig, Inputs, Mask};
//! use oxtile::num::bf16;
//! use oxtile::{Buffer, Result, Runtime};
//!
//! # fn main() -> Result<()> {
//! let runtime = Runtime::checked(1)?; // or Runtime::cuda()
//! let stream = runtime.device(0)?.stream()?;
//! let config = AttentionConfig { queries: 3, keys: 3, head_size: 64, mask: Mask::CausalBottomRight, ..AttentionConfig::default() };
//!
//! let (q, v) = (vec![half::bf16::ZERO; 3 * 64], [2.0, 4.0, 9.0].map(|x| [half::bf16::from_f32(x); 64]));
//! let (q, v) = (Buffer::from_slice(&stream, &q)?, Buffer::from_slice(&stream, v.as_flattened())?);
//! let results = Attention::<bf16>::new(&runtime, config)?.attend(&stream, Inputs::new(q.view(), q.view(), v.view()))?;
//!
//! let out: Vec<half::bf16> = results.out.to_vec_as(&stream)?;
//! assert_eq!([0, 64, 128].map(|i| out[i].to_f32()), [2.0, 3.0, 5.0]);
//! assert!((results.log_sum_exp.to_vec(&stream)?[2] - 3_f32.ln()).abs() < 1e-6);
//! # Ok(()) }
//! ```

mod arguments;
mod arriving;
mod arriving_backward;
mod arriving_backward_packed;
mod arriving_packed;
mod backward;
mod backward_blocks;
mod backward_choice;
mod backward_deltas;
mod backward_dense;
mod backward_general;
mod backward_portable;
mod backward_tensors;
mod backward_wide;
mod buffers;
mod choice;
mod config;
mod divided_keys;
mod forward;
mod fp8;
mod group_parts;
mod heads;
mod portable;
mod problems;
mod results;
mod sequences;
mod sink;
mod table;
mod tensors;

pub use arriving::ArrivingElement;
pub(crate) use arriving::{ArrivingAttention, ArrivingChunks, ArrivingPlaces, ArrivingTensors, Waiting};
pub use arriving_backward::ArrivingGradients;
pub(crate) use arriving_backward::{
    ArrivingBackward, ArrivingBackwardTensors, BoundArriving, SlotPlaces, packed_slot_elements, slot_elements,
};
pub(crate) use arriving_packed::ArrivingSequences;
pub use backward::{AttentionBackward, BackwardElement, Order};
pub use backward_choice::BackwardKernel;
pub use backward_tensors::{BackwardInputs, BackwardStep, GradientTarget, Gradients};
pub use buffers::{GradientBuffers, ResultBuffers};
pub use choice::{ForwardKernel, Problem};
pub use config::{AttentionConfig, GradientOutput, Kernels, Layout, Mask, Output, Sink, Window};
pub use forward::{Attention, AttentionElement};
pub use tensors::{Inputs, Outputs, Padding, Scales, Sequences, Target};
