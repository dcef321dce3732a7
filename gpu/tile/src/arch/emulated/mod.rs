//! The emulator's side of the instruction layer.

mod convert;

/// The emulated device.
#[derive(Debug, Clone, Copy)]
pub struct Emulated;
