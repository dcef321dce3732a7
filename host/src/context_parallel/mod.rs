//! Attention over a sequence that is spread over ranks, forward and backward.
//!
//! | file | what it holds |
//! |---|---|
//! | `config` | what is computed, and by which schedule |
//! | `plan`, `model` | which schedule is taken, and why, by the times of a model |
//! | `agreement` | all ranks make the same operation |
//! | `context`, `engine` | the operation: made by all ranks, and bound to tensors; what computes a pass |
//! | `transport`, `messages` | over what keys travel |
//! | `launches` | which launches a rank makes, of whose keys |
//! | `local`, `arrays` | a rank's attention as packed sequences, and what its queries see |
//! | `core`, `forward`, `backward` | attention to keys that come from their owners |
//! | `fp8`, `fp8_gathered`, `fp8_traded` | attention of 8 bits, of gathered codes, or of traded ones |
//! | `mover`, `pull` | how keys travel, and gradients go back |
//! | `fused`, `fused_gradients` | a pass in one launch, which waits for keys |
//! | `key_exchange`, `fused_groups` | how keys travel around it; groups of heads, where memory is capped |
//! | `pieces`, `sections` | what arrives for it: the chunks that a rank sees; the heads that arrive together |
//! | `gathered` | keys of all ranks in the order of tokens |
//! | `all_to_all`, `alone`, `head_group`, `trading` | attention by traded heads, some of which travel together; in which order |
//! | `lane`, `lane_numbers`, `carrier` | tensors, and numbers, on their way, and by what they travel |
//! | `detour` | copies within a device by its copy engines |
//! | `sinks`, `numbers` | the gradient of learnable sinks; numbers of all ranks, brought together |
//! | `element`, `memory` | elements, and memory that a pass's operations share |

mod agreement;
mod all_to_all;
mod alone;
mod arrays;
mod backward;
mod carrier;
mod config;
mod context;
mod core;
mod detour;
mod element;
mod engine;
mod forward;
mod fp8;
mod fp8_gathered;
mod fp8_traded;
mod fused;
mod fused_gradients;
mod fused_groups;
mod gathered;
mod head_group;
mod key_exchange;
mod lane;
mod lane_numbers;
mod launches;
mod local;
mod memory;
mod messages;
mod model;
mod mover;
mod numbers;
mod pieces;
mod plan;
mod pull;
mod sections;
mod sinks;
mod trading;
mod transport;

pub use crate::thd::{Partition, Share};
pub use config::{ContextParallelConfig, Schedule};
pub use context::ContextParallel;
pub use element::ContextElement;
pub use fp8::ContextParallelFp8;
pub use plan::{PassPlan, Plan};
pub use transport::Transport;
