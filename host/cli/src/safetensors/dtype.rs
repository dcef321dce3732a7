//! Element types of the format, by the names it gives them.

use std::fmt;

macro_rules! dtypes {
    ($($(#[$doc:meta])* $variant:ident = $name:literal, $bits:literal;)*) => {
        /// The element type of a stored tensor.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        pub enum Dtype {
            $($(#[$doc])* $variant,)*
        }

        impl Dtype {
            /// Every element type the format knows.
            pub const ALL: &[Dtype] = &[$(Dtype::$variant),*];

            /// The name written in a header.
            pub const fn name(self) -> &'static str {
                match self {
                    $(Dtype::$variant => $name,)*
                }
            }

            /// Size of one element in bits; 4 and 6 for the packed types.
            pub const fn bits(self) -> u64 {
                match self {
                    $(Dtype::$variant => $bits,)*
                }
            }
        }
    };
}

dtypes! {
    /// One byte, 0 or 1.
    Bool = "BOOL", 8;
    /// OCP MX E2M1, two a byte.
    F4 = "F4", 4;
    /// OCP MX E2M3, packed.
    F6E2M3 = "F6_E2M3", 6;
    /// OCP MX E3M2, packed.
    F6E3M2 = "F6_E3M2", 6;
    /// Unsigned byte.
    U8 = "U8", 8;
    /// Signed byte.
    I8 = "I8", 8;
    /// OCP FP8 E5M2.
    F8E5M2 = "F8_E5M2", 8;
    /// OCP FP8 E4M3 (finite only, one NaN a sign).
    F8E4M3 = "F8_E4M3", 8;
    /// OCP MX scale: the value is 2^(code - 127), 0xFF is NaN.
    F8E8M0 = "F8_E8M0", 8;
    /// E4M3 with bias 8 and 0x80 as its only NaN.
    F8E4M3Fnuz = "F8_E4M3FNUZ", 8;
    /// E5M2 with bias 16 and 0x80 as its only NaN.
    F8E5M2Fnuz = "F8_E5M2FNUZ", 8;
    /// Signed 16-bit integer.
    I16 = "I16", 16;
    /// Unsigned 16-bit integer.
    U16 = "U16", 16;
    /// IEEE 754 binary16.
    F16 = "F16", 16;
    /// bfloat16.
    Bf16 = "BF16", 16;
    /// Signed 32-bit integer.
    I32 = "I32", 32;
    /// Unsigned 32-bit integer.
    U32 = "U32", 32;
    /// IEEE 754 binary32.
    F32 = "F32", 32;
    /// A pair of binary32: real, imaginary.
    C64 = "C64", 64;
    /// IEEE 754 binary64.
    F64 = "F64", 64;
    /// Signed 64-bit integer.
    I64 = "I64", 64;
    /// Unsigned 64-bit integer.
    U64 = "U64", 64;
}

impl Dtype {
    /// The type with this name in a header, if the format knows it.
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.iter().copied().find(|dtype| dtype.name() == name)
    }
}

impl fmt::Display for Dtype {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}
