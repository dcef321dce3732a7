//! Gradients of sharded weights: every rank computes the whole of each, the owners add up their rows.
//!
//! | file | what it holds |
//! |---|---|
//! | `scatter` | the operation |
//! | `config` | how gradients become one, and the memory that it takes |
//! | `exchange` | what its calls enqueue |
//! | `step` | the order of its calls |
//! | `layout` | where rows lie, whole and in parts |
//! | `slots` | where parts arrive, and the flags of the ranks |

mod config;
mod exchange;
mod layout;
mod scatter;
mod slots;
mod step;

pub use config::{GradientBytes, GradientConfig};
pub use scatter::GradientScatter;
