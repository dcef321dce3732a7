//! Elements of candle's and of Oxtile's.

use candle_core::WithDType;
use oxtile::HostElement;
use oxtile::num::{Pod, bf16, e2m1x2, e4m3, f16, ue8m0};

/// An element of a kernel's tensors, and the type that holds it in candle's.
///
/// # Safety
/// Both types have one size and alignment, and every bit pattern of one is a value of the other.
pub unsafe trait Element: Pod + HostElement<Device = Self> {
    /// The element in candle's tensors.
    type Host: Host;
}

/// An element of candle's tensors.
#[cfg(not(feature = "cuda"))]
pub trait Host: WithDType + HostElement {}
#[cfg(not(feature = "cuda"))]
impl<T: WithDType + HostElement> Host for T {}

/// An element of candle's tensors.
#[cfg(feature = "cuda")]
pub trait Host: WithDType + HostElement + candle_core::cuda_backend::CudaDType + cudarc::driver::DeviceRepr {}
#[cfg(feature = "cuda")]
impl<T: WithDType + HostElement + candle_core::cuda_backend::CudaDType + cudarc::driver::DeviceRepr> Host for T {}

macro_rules! elements {
    ($($t:ty: $host:ty),*) => { $(
        const _: () = assert!(size_of::<$t>() == size_of::<$host>() && align_of::<$t>() == align_of::<$host>());

        // SAFETY: one size and alignment (above); both are `HostElement`: of each, every bit pattern is a value.
        unsafe impl Element for $t {
            type Host = $host;
        }
    )* };
}

elements! { bf16: half::bf16, f16: half::f16, f32: f32, u32: u32, e4m3: u8, ue8m0: u8, e2m1x2: u8 }

/// The elements of candle's as those of a kernel.
pub fn of_candle<T: Element>(elements: &[T::Host]) -> &[T] {
    // SAFETY: as many elements of the same size and alignment, all of whose bit patterns are values (`Element`).
    unsafe { std::slice::from_raw_parts(elements.as_ptr().cast(), elements.len()) }
}

/// The same, to be written.
pub fn of_candle_mut<T: Element>(elements: &mut [T::Host]) -> &mut [T] {
    // SAFETY: as above; the exclusive borrow is passed on.
    unsafe { std::slice::from_raw_parts_mut(elements.as_mut_ptr().cast(), elements.len()) }
}
