//! Gradients of sharded weights: every rank computes the whole of each, the owners add up their rows.
//!
//! | file | what it holds |
//! |---|---|
//! | `scatter` | the operation |
//! | `bytes` | the memory of it |
//! | `main_gradients` | what the owners keep |
//! | `config` | how gradients become one, and the memory that it takes |
//! | `exchange` | what its calls enqueue |
//! | `step` | the order of its calls |
//! | `layout` | where rows lie, whole and in parts |
//! | `link` | how parts come to the owner of their rows |
//! | `slots` | by copy engines, into an arena, with flags of the ranks |
//! | `messages`, `order` | by the messages of a communicator, as across hosts; whether all ranks scatter in one order then |

mod bytes;
mod config;
mod exchange;
mod layout;
mod link;
mod main_gradients;
mod messages;
mod order;
mod scatter;
mod slots;
mod step;

pub use config::{GradientBytes, GradientCarrier, GradientConfig};
pub use scatter::GradientScatter;
