//! Shapes, tensors of heads, tensor maps (TMA's descriptors), tables of many tensors, and small arrays uploaded together.
//!
//! | file | what it holds |
//! |---|---|
//! | `shape` | shapes and their products |
//! | `heads` | tensors `[batches, rows, heads, size]` with strides |
//! | `map` | TMA's descriptors |
//! | `table` | tables of many tensors |
//! | `uploads` | small arrays uploaded together |

mod heads;
mod map;
pub mod shape;
mod table;
mod uploads;

pub use heads::{Heads, HeadsMut};
pub(crate) use map::MapLayout;
pub use map::{SequenceRows, Strided, TensorMap, TensorMapMut};
pub use table::DeviceTable;
pub(crate) use table::upload;
pub(crate) use uploads::{UploadedArray, Uploads};
