//! Tensors as values: shapes, strides, and what kernels need to address them.
//!
//! | file | what it holds |
//! |---|---|
//! | `heads` | tensors of heads that carry their shape and strides |
//! | `map` | tensor maps (TMA's descriptors) |
//! | `shape` | shapes, counted and checked |
//! | `table` | tables of many tensors |
//! | `uploads` | what a bind copies to the device together |

mod heads;
mod map;
pub mod shape;
mod table;
mod uploads;

pub use heads::{Heads, HeadsMut};
pub(crate) use map::{DetachedMap, MapLayout};
pub use map::{GroupRows, SequenceRows, Strided, TensorMap, TensorMapMut};
pub use table::DeviceTable;
pub(crate) use table::upload;
pub(crate) use uploads::{Uploaded, UploadedArray, Uploads};
