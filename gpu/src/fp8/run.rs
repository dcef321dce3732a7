//! The consecutive elements that a CUDA block of the elementwise kernels takes, one vector a thread and step.

use core::marker::PhantomData;

use oxtile_tile::num::Pod;
use oxtile_tile::prelude::*;

use super::THREADS;

/// A CUDA block's `STEPS * THREADS` vectors of `T`.
pub(super) struct Run<T, const STEPS: usize> {
    start: u64,
    /// Where vectors end in the tensor: 0 if its views are not aligned.
    vectors_end: u64,
    length: u64,
    element: PhantomData<T>,
}

/// One end of a slow path's work.
pub(super) enum Piece {
    /// A whole vector from this element on.
    Vector(u64),
    /// One element.
    Element(u64),
}

impl<T: Pod, const STEPS: usize> Run<T, STEPS> {
    /// Elements a CUDA block.
    pub const ELEMENTS: u32 = THREADS * STEPS as u32 * Self::LANES as u32;
    const LANES: u64 = Vector::<T>::LANES as u64;

    /// The run of CUDA block `block` of a tensor's, of `length` elements at `wide`, its codes at `codes`.
    #[inline(always)]
    pub fn of_block(block: u64, length: u64, wide: u64, codes: u64) -> Self {
        let is_aligned = wide.is_multiple_of(16) && codes.is_multiple_of(Self::LANES);
        Self {
            start: block * u64::from(Self::ELEMENTS),
            vectors_end: if is_aligned { length - length % Self::LANES } else { 0 },
            length,
            element: PhantomData,
        }
    }

    /// Whether all of it is vectors.
    #[inline(always)]
    pub fn is_whole(&self) -> bool {
        self.start + u64::from(Self::ELEMENTS) <= self.vectors_end
    }

    /// The first element of the thread's vector in a step.
    #[inline(always)]
    pub fn element(&self, step: usize) -> u64 {
        self.start + u64::from(step as u32 * THREADS + thread::index()) * Self::LANES
    }

    /// Calls `piece` for what this thread has of a run that is not whole: vectors first, then single elements.
    #[inline(always)]
    pub fn for_each_piece(&self, mut piece: impl FnMut(Piece)) {
        let end = self.length.min(self.start + u64::from(Self::ELEMENTS));
        let mut element = self.element(0);
        while element < end.min(self.vectors_end) {
            piece(Piece::Vector(element));
            element += u64::from(THREADS) * Self::LANES;
        }
        let mut element = self.start.max(self.vectors_end) + u64::from(thread::index());
        while element < end {
            piece(Piece::Element(element));
            element += u64::from(THREADS);
        }
    }
}
