//! The device's side of the instruction layer.

mod convert;

/// The device: PTX.
#[derive(Debug, Clone, Copy)]
pub struct Nvptx;
