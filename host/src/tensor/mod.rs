//! Shapes, and tables of many tensors.

pub mod shape;
mod table;

pub use table::DeviceTable;
