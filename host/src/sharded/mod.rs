//! Weights in shards: every rank keeps some rows of each weight, and pulls whole weights while a layer uses them.
//!
//! | file | what it holds |
//! |---|---|
//! | `format`, `plane` | formats of weights: how they lie, the casts that make them, where a shard lies in the whole |
//! | `split`, `weight` | how rows are divided, and what a weight is |
//! | `set`, `layout`, `amaxes` | the shards of a rank; where they lie; agreement of ranks on amaxes |
//! | `step` | the two halves of a step: values are written and published, then read |
//! | `slots` | which piece of memory a whole weight has |
//! | `footprint` | what all of it takes, before it is taken |
//! | `chain`, `mode` | the order of weights in passes, which are enqueued or in graphs |
//! | `pass`, `pull` | a pass that pulls weights ahead, and the copies of a pull |
//! | `gradient` | gradients that ranks compute whole, summed where their rows are owned |
//! | `memory` | views of memory that is used in turn |

mod amaxes;
mod chain;
mod footprint;
mod format;
mod gradient;
mod layout;
mod memory;
mod mode;
mod pass;
mod plane;
mod pull;
mod set;
mod slots;
mod split;
mod step;
mod weight;

pub use chain::{Chain, ChainConfig, Places};
pub use footprint::Footprint;
pub use format::{Bf16, Fp8, Mxfp8, Nvfp4, Nvfp4Squares, WeightFormat, WideTensor};
pub use gradient::{GradientBytes, GradientCarrier, GradientConfig, GradientScatter};
pub use mode::{Captured, Eager, Mode};
pub use pass::{Gathered, Pass};
pub use pull::PullStreams;
pub use set::ShardSet;
pub use slots::SlotPlan;
pub use split::EqualShards;
pub use step::{Published, Updating};
pub use weight::{Uses, Weight, WeightId};
