//! The instruction layer: one trait an instruction family, two sides.

mod convert;

#[cfg(target_arch = "nvptx64")]
mod nvptx;
#[cfg(target_arch = "nvptx64")]
pub use nvptx::Nvptx;
/// The side in force: the device.
#[cfg(target_arch = "nvptx64")]
pub type Target = Nvptx;

#[cfg(not(target_arch = "nvptx64"))]
mod emulated;
#[cfg(not(target_arch = "nvptx64"))]
pub use emulated::Emulated;
/// The side in force: the emulator.
#[cfg(not(target_arch = "nvptx64"))]
pub type Target = Emulated;

pub use convert::Convert;
