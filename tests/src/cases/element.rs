//! The wide element types as the cases handle them: generated as f32 values that the type holds
//! exactly, compared as bits.

use oxtile::{Buffer, HostElement, Stream};
use oxtile_kernels::magnitude::Magnitude;
use oxtile_kernels::mxfp8::Wide;
use oxtile_tests::inputs::{Dtype, codes};
use oxtile_tests::oracle::formats::{BF16, F16};
use oxtile_tile::num::{bf16, f16};

use crate::case::text;

/// bf16, f16 or f32.
pub trait TestElement: Magnitude + Wide + HostElement<Device = Self> {
    const DTYPE: Dtype;

    fn encode(values: &[f32]) -> Vec<Self>;
    fn bits(self) -> u32;

    fn upload(stream: &Stream, values: &[f32]) -> Result<Buffer<Self>, String> {
        text(Buffer::from_slice(stream, &Self::encode(values)))
    }
}

impl TestElement for f32 {
    const DTYPE: Dtype = Dtype::F32;

    fn encode(values: &[f32]) -> Vec<Self> {
        values.to_vec()
    }

    fn bits(self) -> u32 {
        self.to_bits()
    }
}

macro_rules! half_element {
    ($half:ident, $dtype:ident) => {
        impl TestElement for $half {
            const DTYPE: Dtype = Dtype::$dtype;

            fn encode(values: &[f32]) -> Vec<Self> {
                codes(Dtype::$dtype, values).into_iter().map($half::from_bits).collect()
            }

            fn bits(self) -> u32 {
                self.to_bits().into()
            }
        }
    };
}

half_element!(bf16, Bf16);
half_element!(f16, F16);

/// The bits of the value rounded to `T` by the oracle; one pattern for every NaN.
pub fn rounded_bits<T: TestElement>(value: f32) -> u32 {
    match T::DTYPE.name() {
        _ if value.is_nan() => u32::MAX,
        "f32" => value.to_bits(),
        "f16" => F16.encode(f64::from(value)),
        _ => BF16.encode(f64::from(value)),
    }
}

/// The bits of a kernel's value, to be held against [`rounded_bits`].
pub fn comparable_bits<T: TestElement>(value: T) -> u32 {
    if value.to_f32().is_nan() { u32::MAX } else { value.bits() }
}
