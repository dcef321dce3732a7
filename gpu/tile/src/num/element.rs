//! Element types of tensors, their names, and the types that may lie in device memory.

/// A type whose every bit pattern is a value and that has no padding: it may be read from and written to device
/// memory as plain bytes.
///
/// # Safety
/// The implementor promises just that, and that the type holds no pointer, reference or interior mutability.
pub unsafe trait Pod: Copy + Send + Sync + 'static {}

/// The type of a tensor's element.
pub trait Element: Copy + Send + Sync + 'static {
    /// The name of the type in instance names and in messages: `bf16`, `f32`, `e4m3`.
    const NAME: &'static str;
    /// The width of one element in bits; 4 for [`e2m1`](super::e2m1), which is stored in pairs.
    const BITS: u32;
}

/// A floating-point element.
pub trait Float: Element {
    /// The largest finite value.
    const MAX: Self;

    /// The value, exactly: every format here is a subset of f32. A NaN stays a NaN.
    fn to_f32(self) -> f32;

    /// The nearest value of this format, by the `cvt` rule of the format (table of [`num`](super)).
    fn from_f32(x: f32) -> Self;

    /// The value without its sign; a NaN stays a NaN.
    fn abs(self) -> Self;

    /// The code of the value without its sign, in the low [`Element::BITS`] bits. Codes of finite values are
    /// ordered as the values are, Inf above them and NaN last.
    fn abs_bits(self) -> u32;
}

macro_rules! plain {
    ($($t:ident)*) => { $(
        // SAFETY: primitive integers and floats have no padding, and every bit pattern is a value.
        unsafe impl Pod for $t {}
        impl Element for $t {
            const NAME: &'static str = stringify!($t);
            const BITS: u32 = 8 * core::mem::size_of::<$t>() as u32;
        }
    )* };
}
plain!(u8 u16 u32 u64 i8 i32 i64 f32 f64);

// SAFETY: an array has no padding between or after its elements, and each of them is Pod.
unsafe impl<T: Pod, const N: usize> Pod for [T; N] {}

impl Float for f32 {
    const MAX: f32 = f32::MAX;

    #[inline(always)]
    fn to_f32(self) -> f32 {
        self
    }

    #[inline(always)]
    fn from_f32(x: f32) -> f32 {
        x
    }

    #[inline(always)]
    fn abs(self) -> f32 {
        f32::from_bits(self.abs_bits())
    }

    #[inline(always)]
    fn abs_bits(self) -> u32 {
        self.to_bits() & 0x7fff_ffff
    }
}

/// A newtype of an unsigned integer, every code of which is a value: bits in, bits out.
macro_rules! coded {
    ($(#[$doc:meta])* $name:ident($bits:ident)) => {
        $(#[$doc])*
        #[allow(non_camel_case_types)]
        #[derive(Clone, Copy, Default, PartialEq, Eq, Hash)]
        #[repr(transparent)]
        pub struct $name($bits);

        impl $name {
            /// The value with this code; of a packed type, with these codes.
            #[inline(always)]
            pub const fn from_bits(bits: $bits) -> Self {
                Self(bits)
            }

            /// The code of the value; of a packed type, the codes.
            #[inline(always)]
            pub const fn to_bits(self) -> $bits {
                self.0
            }
        }

        // SAFETY: a transparent newtype of an unsigned integer, of which every code is a value.
        unsafe impl $crate::num::Pod for $name {}
    };
}

/// A number of a format: [`coded`] and an element of tensors.
macro_rules! number {
    ($(#[$doc:meta])* $name:ident($bits:ident), $width:literal bits) => {
        $crate::num::element::coded! {
            $(#[$doc])*
            ///
            /// Equality compares codes: a NaN equals itself, and +0 differs from -0.
            $name($bits)
        }

        impl $crate::num::Element for $name {
            const NAME: &'static str = stringify!($name);
            const BITS: u32 = $width;
        }
    };
}

/// A packed vector of numbers in one register, first element in the low bits.
macro_rules! packed {
    ($(#[$doc:meta])* $name:ident($bits:ident): [$scalar:ident; $lanes:literal], $lane_bits:ident) => {
        $crate::num::element::coded! {
            $(#[$doc])*
            ///
            /// The first element is in the low bits. Equality compares codes.
            $name($bits)
        }

        impl $name {
            /// The vector of these elements, the first in the low bits.
            #[inline(always)]
            pub fn new(elements: [$scalar; $lanes]) -> Self {
                let mut bits = 0;
                let mut i = 0;
                while i < $lanes {
                    bits |= (elements[i].to_bits() as $bits) << (i as u32 * <$scalar as $crate::num::Element>::BITS);
                    i += 1;
                }
                Self(bits)
            }

            /// The elements, the first from the low bits.
            #[inline(always)]
            pub fn elements(self) -> [$scalar; $lanes] {
                let mut elements = [$scalar::from_bits(0); $lanes];
                let mut i = 0;
                while i < $lanes {
                    let lane = self.0 >> (i as u32 * <$scalar as $crate::num::Element>::BITS);
                    elements[i] = $scalar::from_bits(lane as $lane_bits);
                    i += 1;
                }
                elements
            }
        }

        impl core::fmt::Debug for $name {
            fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
                f.debug_list().entries(self.elements()).finish()
            }
        }
    };
}

/// `Debug` as the type's name and the decoded value.
macro_rules! debug_as_value {
    ($($name:ident)*) => { $(
        impl core::fmt::Debug for $name {
            fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
                write!(f, "{}({:?})", stringify!($name), $crate::num::Float::to_f32(*self))
            }
        }
    )* };
}

pub(super) use {coded, debug_as_value, number, packed};
