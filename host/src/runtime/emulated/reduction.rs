//! How the virtual cluster makes one of the elements of many ranks.

use std::fmt;

use oxtile_tile::num::{Float, bf16, f16};

use crate::comm::{DType, ReduceOp};

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
    /// The element-wise reduction of parts of one length, in their order. Sums of 16-bit floats are kept in `f32` and rounded once.
    pub fn of<'a>(self, parts: impl Iterator<Item = &'a [u8]>) -> Vec<u8> {
        match self.dtype {
            DType::U8 => integers!(self.op, parts, u8),
            DType::U32 => integers!(self.op, parts, u32),
            DType::U64 => integers!(self.op, parts, u64),
            DType::I32 => integers!(self.op, parts, i32),
            DType::F32 => floats!(self.op, parts, f32),
            DType::F64 => floats!(self.op, parts, f64),
            DType::Bf16 => self.of_halves(parts, |bits| bf16::from_bits(bits).to_f32(), |x| bf16::from_f32(x).to_bits()),
            DType::F16 => self.of_halves(parts, |bits| f16::from_bits(bits).to_f32(), |x| f16::from_f32(x).to_bits()),
        }
    }

    fn of_halves<'a>(self, parts: impl Iterator<Item = &'a [u8]>, widen: impl Fn(u16) -> f32, narrow: impl Fn(f32) -> u16) -> Vec<u8> {
        let wide: Vec<Vec<u8>> = parts.map(|part| halves(part).flat_map(|bits| widen(bits).to_le_bytes()).collect()).collect();
        let sum = Self { dtype: DType::F32, ..self }.of(wide.iter().map(Vec::as_slice));
        let (words, _) = sum.as_chunks::<4>();
        words.iter().flat_map(|word| narrow(f32::from_le_bytes(*word)).to_le_bytes()).collect()
    }
}

fn halves(bytes: &[u8]) -> impl Iterator<Item = u16> {
    bytes.as_chunks::<2>().0.iter().map(|half| u16::from_le_bytes(*half))
}

fn fold<'a, const N: usize>(mut parts: impl Iterator<Item = &'a [u8]>, combine: impl Fn([u8; N], [u8; N]) -> [u8; N]) -> Vec<u8> {
    let mut total = parts.next().unwrap_or_default().to_vec();
    for part in parts {
        let (totals, elements) = (total.as_chunks_mut::<N>().0, part.as_chunks::<N>().0);
        totals.iter_mut().zip(elements).for_each(|(total, element)| *total = combine(*total, *element));
    }
    total
}
