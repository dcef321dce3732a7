//! How a row of logits is read: its pieces, and whether shared memory holds it between the two passes.

#![allow(clippy::needless_range_loop, reason = "an iterator leaves an array in local memory")]

use oxtile_tile::prelude::*;

use super::{PIECE, THREADS, UNROLL};

/// How a row is read.
pub trait Reading: 'static {
    /// Logits that shared memory holds between the two passes; 0 if they are read again.
    const KEPT: u32;
    /// Whether rows are whole vectors, at multiples of 16 bytes.
    const IS_OF_VECTORS: bool;
    /// Pieces of a thread in flight together: a group.
    const UNROLL: usize;
    /// The memory that holds them.
    type Memory<T: Half>: Memory<T>;

    /// The place in its row of element `j` of the thread's piece `i`.
    #[inline(always)]
    fn element(i: u32, j: usize) -> u32 {
        if Self::IS_OF_VECTORS {
            (i * THREADS + thread::index()) * PIECE as u32 + j as u32
        } else {
            (i * PIECE as u32 + j as u32) * THREADS + thread::index()
        }
    }

    /// Whether it takes rows of so many elements, at these addresses.
    fn takes(width: u64, addresses: &[u64]) -> bool {
        let is_whole = width.is_multiple_of(PIECE as u64) && addresses.iter().all(|address| address.is_multiple_of(16));
        (is_whole || !Self::IS_OF_VECTORS) && (Self::KEPT == 0 || width <= u64::from(Self::KEPT))
    }
}

/// Whole vectors, kept in shared memory.
pub struct Once;
/// Whole vectors, read twice.
pub struct Twice;
/// Elements, read twice.
pub struct Elements;

impl Reading for Once {
    const KEPT: u32 = KEPT as u32;
    const IS_OF_VECTORS: bool = true;
    const UNROLL: usize = UNROLL;
    type Memory<T: Half> = SharedArray<T, KEPT>;
}

impl Reading for Twice {
    const KEPT: u32 = 0;
    const IS_OF_VECTORS: bool = true;
    const UNROLL: usize = UNROLL;
    type Memory<T: Half> = ();
}

impl Reading for Elements {
    const KEPT: u32 = 0;
    const IS_OF_VECTORS: bool = false;
    const UNROLL: usize = 1;
    type Memory<T: Half> = ();
}

/// Logits that half of a multiprocessor's shared memory holds.
pub(super) const KEPT: usize = 56 * 1024;

/// Memory for a row between two passes.
pub trait Memory<T>: SharedStorage + Copy {
    /// Keeps a vector of this thread.
    fn keep(self, at: u32, vector: Vector<T>);
    /// Gives it back, if it was kept.
    fn kept(self, at: u32) -> Option<Vector<T>>;
}

impl<T: Half> Memory<T> for SharedArray<T, KEPT> {
    #[inline(always)]
    fn keep(self, at: u32, vector: Vector<T>) {
        self.store_vector(at, vector);
    }

    #[inline(always)]
    fn kept(self, at: u32) -> Option<Vector<T>> {
        Some(self.load_vector(at))
    }
}

impl<T: Half> Memory<T> for () {
    #[inline(always)]
    fn keep(self, _: u32, _: Vector<T>) {}

    #[inline(always)]
    fn kept(self, _: u32) -> Option<Vector<T>> {
        None
    }
}

/// A row of logits, of which a thread reads and writes its own pieces alone.
pub(super) struct Logits<T: Half, R: Reading> {
    /// Where they are, unless the gradient's place holds them.
    pub logits: Option<Global<T>>,
    /// Where the gradient goes.
    pub gradient: GlobalMut<T>,
    /// Where the row is kept.
    pub kept: R::Memory<T>,
    /// The row's first element.
    pub start: u64,
    /// Its elements.
    pub width: u32,
}

/// The pieces of a group, of which the first [`Reading::UNROLL`] are there.
pub(super) type Group = [[f32; PIECE]; UNROLL];

impl<T: Half, R: Reading> Logits<T, R> {
    /// One logit.
    #[inline(always)]
    pub fn load(&self, at: u32) -> f32 {
        let at = self.start + u64::from(at);
        self.logits.map_or_else(|| self.gradient.load(at), |logits| logits.load(at)).to_f32()
    }

    /// The thread's pieces of a group, and -Inf after the end of the row. All loads first.
    #[inline(always)]
    pub fn read(&self, group: u32) -> Group {
        if !R::IS_OF_VECTORS {
            return self.elements(group);
        }
        let vectors: [Vector<T>; UNROLL] = core::array::from_fn(|piece| {
            let at = Self::element(group, piece, 0);
            let start = self.start + u64::from(at);
            match self.logits {
                _ if at >= self.width => Vector::<T>::from_f32([f32::NEG_INFINITY; PIECE]),
                Some(logits) => logits.load_vector(start),
                None => self.gradient.load_vector(start),
            }
        });
        for piece in 0..UNROLL {
            if Self::element(group, piece, 0) < self.width {
                self.kept.keep(Self::element(group, piece, 0), vectors[piece]);
            }
        }
        vectors.map(|vector| vector.to_f32())
    }

    /// The same, as they were read before.
    #[inline(always)]
    pub fn read_again(&self, group: u32) -> Group {
        if R::KEPT == 0 {
            return self.read(group);
        }
        core::array::from_fn(|piece| {
            let at = Self::element(group, piece, 0);
            let kept = if at < self.width { self.kept.kept(at) } else { None };
            kept.map_or([f32::NEG_INFINITY; PIECE], |vector| vector.to_f32())
        })
    }

    /// Writes the thread's pieces of a group of the gradient, of what `value` gives for each element by its piece, its number there, and its place
    /// in the row.
    #[inline(always)]
    pub fn write(&self, group: u32, value: impl Fn((usize, usize), u32) -> f32) {
        for piece in 0..R::UNROLL {
            let at = Self::element(group, piece, 0);
            if !R::IS_OF_VECTORS {
                for j in 0..PIECE {
                    let at = Self::element(group, piece, j);
                    if at < self.width {
                        self.gradient.store(self.start + u64::from(at), T::from_f32(value((piece, j), at)));
                    }
                }
            } else if at < self.width {
                let values = core::array::from_fn(|j| value((piece, j), at + j as u32));
                self.gradient.store_vector(self.start + u64::from(at), Vector::<T>::from_f32(values));
            }
        }
    }

    #[inline(always)]
    fn elements(&self, group: u32) -> Group {
        let piece = core::array::from_fn(|j| {
            let at = Self::element(group, 0, j);
            if at < self.width { self.load(at) } else { f32::NEG_INFINITY }
        });
        [piece; UNROLL]
    }

    #[inline(always)]
    fn element(group: u32, piece: usize, j: usize) -> u32 {
        R::element(group * R::UNROLL as u32 + piece as u32, j)
    }
}
