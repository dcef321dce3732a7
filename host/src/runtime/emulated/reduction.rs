//! How the virtual cluster makes one of the elements of many ranks.

use std::fmt;

use oxtile_tile::num::{Float, bf16, e4m3, e5m2, f16};

use crate::rank::{DType, ReduceOp};

/// An operation on elements of a type.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Reduction {
    pub op: ReduceOp,
    pub dtype: DType,
}

impl fmt::Display for Reduction {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?} of {:?}", self.op, self.dtype)
    }
}

macro_rules! integers {
    ($op:expr, $parts:expr, $t:ty) => {
        fold($parts, |a: [u8; size_of::<$t>()], b| {
            let (a, b) = (<$t>::from_le_bytes(a), <$t>::from_le_bytes(b));
            match $op {
                ReduceOp::Sum => a.wrapping_add(b),
                ReduceOp::Max => a.max(b),
            }
            .to_le_bytes()
        })
    };
}

macro_rules! floats {
    ($op:expr, $parts:expr, $t:ty) => {
        fold($parts, |a: [u8; size_of::<$t>()], b| {
            let (a, b) = (<$t>::from_le_bytes(a), <$t>::from_le_bytes(b));
            match $op {
                ReduceOp::Sum => a + b,
                ReduceOp::Max => a.max(b),
            }
            .to_le_bytes()
        })
    };
}

impl Reduction {
    /// The element-wise reduction of parts of one length, in their order. Sums of 8- and 16-bit floats are kept in `f32` and rounded once.
    pub fn of<'a>(self, parts: impl Iterator<Item = &'a [u8]>) -> Vec<u8> {
        match self.dtype {
            DType::U8 => integers!(self.op, parts, u8),
            DType::U32 => integers!(self.op, parts, u32),
            DType::U64 => integers!(self.op, parts, u64),
            DType::I8 => integers!(self.op, parts, i8),
            DType::I32 => integers!(self.op, parts, i32),
            DType::I64 => integers!(self.op, parts, i64),
            DType::F32 => floats!(self.op, parts, f32),
            DType::F64 => floats!(self.op, parts, f64),
            DType::Bf16 => self.of_narrow(parts, |bits| bf16::from_bits(u16::from_le_bytes(bits)), |x| x.to_bits().to_le_bytes()),
            DType::F16 => self.of_narrow(parts, |bits| f16::from_bits(u16::from_le_bytes(bits)), |x| x.to_bits().to_le_bytes()),
            DType::E4m3 => self.of_narrow(parts, |[bits]| e4m3::from_bits(bits), |x| [x.to_bits()]),
            DType::E5m2 => self.of_narrow(parts, |[bits]| e5m2::from_bits(bits), |x| [x.to_bits()]),
        }
    }

    fn of_narrow<'a, T: Float, const N: usize>(
        self,
        parts: impl Iterator<Item = &'a [u8]>,
        decode: impl Fn([u8; N]) -> T,
        encode: impl Fn(T) -> [u8; N],
    ) -> Vec<u8> {
        let widen = |part: &[u8]| part.as_chunks::<N>().0.iter().flat_map(|bits| decode(*bits).to_f32().to_le_bytes()).collect::<Vec<u8>>();
        let wide: Vec<_> = parts.map(widen).collect();
        let reduced = Self { dtype: DType::F32, ..self }.of(wide.iter().map(Vec::as_slice));
        let (words, _) = reduced.as_chunks::<4>();
        words.iter().flat_map(|word| encode(T::from_f32(f32::from_le_bytes(*word)))).collect()
    }
}

fn fold<'a, const N: usize>(mut parts: impl Iterator<Item = &'a [u8]>, combine: impl Fn([u8; N], [u8; N]) -> [u8; N]) -> Vec<u8> {
    let mut total = parts.next().unwrap_or_default().to_vec();
    for part in parts {
        let (totals, elements) = (total.as_chunks_mut::<N>().0, part.as_chunks::<N>().0);
        totals.iter_mut().zip(elements).for_each(|(total, element)| *total = combine(*total, *element));
    }
    total
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(op: ReduceOp, dtype: DType, parts: &[&[u8]]) -> Vec<u8> {
        Reduction { op, dtype }.of(parts.iter().copied())
    }

    /// Were it rounded at each step, every step would be a tie, and the sum stay at 1.
    #[test]
    fn narrow_sums_are_rounded_once_and_saturate() {
        let sum = |dtype, parts: &[&[u8]]| of(ReduceOp::Sum, dtype, parts);
        // 1 and 8 times 2^-4; 1 and 4 times 2^-3: 1.5.
        let (one, sixteenth, eighth): (&[u8], &[u8], &[u8]) = (&[0x38], &[0x18], &[0x30]);
        assert_eq!(sum(DType::E4m3, &[&[one], &[sixteenth; 8][..]].concat()), [0x3c]);
        assert_eq!(sum(DType::E5m2, &[&[&[0x3c_u8][..]], &[eighth; 4][..]].concat()), [0x3e]);
        // 1 and 128 times 2^-8 in bf16, 2^-11 in f16: 1.5 and 1.0625.
        let bf16 = sum(DType::Bf16, &[&[&[0x80_u8, 0x3f][..]], &[&[0x80_u8, 0x3b][..]; 128][..]].concat());
        assert_eq!(bf16, 0x3fc0_u16.to_le_bytes());
        let f16 = sum(DType::F16, &[&[&[0x00_u8, 0x3c][..]], &[&[0x00_u8, 0x10][..]; 128][..]].concat());
        assert_eq!(f16, 0x3c40_u16.to_le_bytes());
        // 448 and 57344, and below zero.
        assert_eq!(sum(DType::E4m3, &[&[0x7e, 0xfe, 0x7e], &[0x7e, 0xfe, 0xfe]]), [0x7e, 0xfe, 0x00]);
        assert_eq!(sum(DType::E5m2, &[&[0x7b, 0xfb], &[0x7b, 0xfb]]), [0x7b, 0xfb]);
    }

    #[test]
    fn the_largest_is_that_of_the_type() {
        let largest = |dtype, parts: &[&[u8]]| of(ReduceOp::Max, dtype, parts);
        assert_eq!(largest(DType::U8, &[&[0xff], &[1]]), [0xff]);
        assert_eq!(largest(DType::I8, &[&[0xff], &[1]]), [1]);
        // -2 and 0.5.
        assert_eq!(largest(DType::E4m3, &[&[0xc0], &[0x30]]), [0x30]);
        assert_eq!(largest(DType::E5m2, &[&[0xc0], &[0x38]]), [0x38]);
        assert_eq!(largest(DType::I64, &[&(-5_i64).to_le_bytes(), &3_i64.to_le_bytes()]), 3_i64.to_le_bytes());
        assert_eq!(of(ReduceOp::Sum, DType::I8, &[&[100], &[100]]), [200], "it wraps");
    }
}
