//! Matrix operands in shared memory (PTX ISA, "Asynchronous Warpgroup Level Matrix Instructions", matrix descriptors).

use crate::format::Format;
use crate::swizzle::Swizzle;
use rustc_hash::FxHashMap as HashMap;
use std::cell::RefCell;
use std::ops::Range;
use std::rc::Rc;

/// Bytes that no swizzle takes apart.
pub(crate) const CHUNK: u32 = 16;

/// A matrix in shared memory, as a descriptor and an instruction describe it.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Operand {
    start: u32,
    /// Between panels.
    leading: u32,
    /// Between atoms of eight rows.
    stride: u32,
    swizzle: Swizzle,
    span: u32,
    mn_major: bool,
    bytes: u32,
}

impl Operand {
    pub fn decode(descriptor: u64, mn_major: bool, format: Format) -> Result<Self, &'static str> {
        let field = |shift: u32| ((descriptor >> shift & 0x3fff) << 4) as u32;
        let (swizzle, span) = match descriptor >> 62 {
            1 => (Swizzle::Bytes128, 128),
            2 => (Swizzle::Bytes64, 64),
            3 => (Swizzle::Bytes32, 32),
            _ => return Err("operands without swizzle are not emulated"),
        };
        if descriptor >> 49 & 7 != 0 {
            return Err("the base offset is not zero: align the tile to eight of its rows");
        }
        if mn_major && format.bytes() != 2 {
            return Err("8-bit operands are K-major");
        }
        Ok(Self { start: field(0), leading: field(16), stride: field(32), swizzle, span, mn_major, bytes: format.bytes() })
    }

    /// Where element (`mn`, `k`) lies.
    fn address(&self, mn: u32, k: u32) -> u32 {
        let (row, byte, panels) = match self.mn_major {
            true => (k, mn * self.bytes % self.span, mn * self.bytes / self.span),
            false => (mn, k * self.bytes, 0),
        };
        self.swizzle.apply(self.start + row % 8 * self.span + row / 8 * self.stride + panels * self.leading + byte)
    }

    /// Elements of [`CHUNK`] bytes, which lie beside each other whatever the swizzle is.
    fn per_chunk(&self) -> usize {
        (CHUNK / self.bytes) as usize
    }

    /// The bytes of some rows of `depth` elements, in order: where each run begins, and its length. A loop comes back to the same operands.
    pub fn runs(&self, known: &Runs, mn: Range<u32>, depth: u32) -> Bytes {
        debug_assert_eq!(depth * self.bytes, 32, "the elements of a row follow from their width");
        let mut known = known.0.borrow_mut();
        Rc::clone(known.entry((*self, mn.clone())).or_insert_with(|| self.find_runs(mn, depth).into()))
    }

    fn find_runs(&self, mn: Range<u32>, depth: u32) -> Vec<(u32, u32)> {
        let mut chunks = Vec::new();
        match self.mn_major {
            true => (0..depth).for_each(|k| chunks.extend(mn.clone().step_by(self.per_chunk()).map(|mn| self.address(mn, k)))),
            false => mn.for_each(|mn| chunks.extend((0..depth).step_by(self.per_chunk()).map(|k| self.address(mn, k)))),
        }
        chunks.sort_unstable();
        chunks.chunk_by(|a, b| a + CHUNK == *b).map(|run| (run[0], CHUNK * run.len() as u32)).collect()
    }

    /// The operand's elements, row by row of `depth`.
    pub fn gather(&self, shared: &[u8], rows: usize, depth: usize, format: Format) -> Vec<f64> {
        let mut elements = vec![0.0; rows * depth];
        let unpack = |mn: usize, k: usize, to: &mut [f64]| {
            let (words, _) = shared[self.address(mn as u32, k as u32) as usize..][..CHUNK as usize].as_chunks::<4>();
            words.iter().enumerate().for_each(|(i, word)| format.unpack(u32::from_le_bytes(*word), 4 * i, to));
        };
        let per_chunk = self.per_chunk();
        match self.mn_major {
            false => {
                for (mn, row) in elements.chunks_exact_mut(depth).enumerate() {
                    row.chunks_exact_mut(per_chunk).enumerate().for_each(|(i, chunk)| unpack(mn, i * per_chunk, chunk));
                }
            }
            true => {
                let mut chunk = [0.0; CHUNK as usize];
                for k in 0..depth {
                    for first in (0..rows).step_by(per_chunk) {
                        unpack(first, k, &mut chunk);
                        (first..).zip(&chunk[..per_chunk]).for_each(|(mn, element)| elements[mn * depth + k] = *element);
                    }
                }
            }
        }
        elements
    }
}

/// Where each run of bytes begins, and its length.
type Bytes = Rc<[(u32, u32)]>;

/// The bytes of some rows of the operands that were read so far. The elements of a row follow from the operand's format.
#[derive(Default)]
pub(crate) struct Runs(RefCell<HashMap<(Operand, Range<u32>), Bytes>>);
