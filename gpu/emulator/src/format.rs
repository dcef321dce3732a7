//! Number formats of matrix operands.

/// What the elements of both operands of a matrix multiplication are.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Format {
    /// bfloat16.
    Bf16,
    /// IEEE binary16.
    F16,
    /// 8 bits: 4 of exponent, 3 of mantissa, no infinity.
    E4m3,
    /// 8 bits: 5 of exponent, 2 of mantissa.
    E5m2,
}

impl Format {
    pub(crate) fn bytes(self) -> u32 {
        match self {
            Self::Bf16 | Self::F16 => 2,
            Self::E4m3 | Self::E5m2 => 1,
        }
    }

    /// Elements along K of an instruction: 32 bytes.
    pub(crate) fn depth(self) -> usize {
        32 / self.bytes() as usize
    }

    /// The most elements along K of an instruction: those of 8 bits.
    pub(crate) const DEEPEST: usize = 32;

    /// Writes the values of a register's elements to a row; `first_byte` is the place of the register in the row's codes.
    #[inline(always)]
    pub(crate) fn unpack(self, word: u32, first_byte: usize, row: &mut [f64]) {
        let row = &mut row[first_byte / self.bytes() as usize..];
        match self {
            Self::Bf16 => row[..2].copy_from_slice(&[word << 16, word & 0xffff_0000].map(|bits| f32::from_bits(bits).into())),
            Self::F16 => row[..2].copy_from_slice(&[word as u16, (word >> 16) as u16].map(|code| self.decode(code))),
            Self::E4m3 | Self::E5m2 => row[..4].copy_from_slice(&word.to_le_bytes().map(|code| self.decode(code.into()))),
        }
    }

    /// The value of a code.
    pub(crate) fn decode(self, code: u16) -> f64 {
        let small = |code: u16, exponents: u32, mantissas: u32| {
            let (sign, rest) = (code >> (exponents + mantissas) & 1, u32::from(code) & ((1 << (exponents + mantissas)) - 1));
            let (exponent, mantissa) = (rest >> mantissas, rest & ((1 << mantissas) - 1));
            // Subnormal numbers have the least normal exponent, and no bit before the point.
            let whole = if exponent == 0 { mantissa } else { mantissa | 1 << mantissas };
            let power = exponent.max(1) as i32 - ((1 << (exponents - 1)) - 1) - mantissas as i32;
            let value = f64::from(whole) * f64::from_bits(u64::from((1023 + power).cast_unsigned()) << 52);
            if sign == 1 { -value } else { value }
        };
        match self {
            Self::Bf16 => f32::from_bits(u32::from(code) << 16).into(),
            Self::F16 | Self::E5m2 => {
                let code = if self == Self::E5m2 { code << 8 } else { code };
                match code & 0x7fff {
                    0x7c00 if code >> 15 == 0 => f64::INFINITY,
                    0x7c00 => f64::NEG_INFINITY,
                    0x7c01.. => f64::NAN,
                    _ => small(code, 5, 10),
                }
            }
            Self::E4m3 if code & 0x7f == 0x7f => f64::NAN,
            Self::E4m3 => small(code, 4, 3),
        }
    }
}
