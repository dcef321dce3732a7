//! Shapes, and tables of many tensors.

mod map;
pub mod shape;
mod table;

pub use map::{TensorMap, TensorMapMut};
pub use table::DeviceTable;
