//! Which host types hold the elements of device memory.

use oxtile_tile::num::{Pod, bf16, e2m1x2, e2m1x8, e4m3, e5m2, f16, ue8m0};

/// A host type with the same bits as an element in device memory: the element type itself, and
/// [`half::bf16`] and [`half::f16`] for the kernels' own 16-bit types.
///
/// # Safety
/// The type has the size and bit patterns of `Device`: every bit pattern of one is a value of the other.
pub unsafe trait HostElement: Copy + Send + Sync + 'static {
    /// The element type in device memory.
    type Device: Pod;
}

macro_rules! same_type {
    ($($t:ty)*) => { $(
        // SAFETY: the same type.
        unsafe impl HostElement for $t {
            type Device = $t;
        }
    )* };
}
same_type!(u8 u16 u32 u64 i8 i32 i64 f32 f64 bf16 f16 e4m3 e5m2 e2m1x2 e2m1x8 ue8m0);

// SAFETY: both are transparent newtypes of a u16 that holds a bfloat16.
unsafe impl HostElement for half::bf16 {
    type Device = bf16;
}

// SAFETY: both are transparent newtypes of a u16 that holds an IEEE binary16.
unsafe impl HostElement for half::f16 {
    type Device = f16;
}

/// Bytes of `count` elements of `T`.
pub(crate) fn byte_count<T>(what: &'static str, count: u64) -> super::error::Result<u64> {
    let element_bytes = size_of::<T>() as u64;
    match count.checked_mul(element_bytes) {
        Some(bytes) if i64::try_from(bytes).is_ok() => Ok(bytes),
        _ => Err(super::error::Error::TooLarge { what, count, element_bytes }),
    }
}
