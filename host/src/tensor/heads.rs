//! Tensors of heads that carry their shape: without gaps, or parts of larger tensors.

use std::fmt;
use std::ops::Range;

use oxtile_tile::launch::{DeviceView, DeviceViewMut};

use super::map::Strided;
use super::shape::numel;
use crate::runtime::{Error, Result};

/// A tensor `[batches, rows, heads, size]` that is read: a view of memory, and strides of any order with any gaps. The elements of a row of a head are
/// neighbours. It names a part of a larger tensor without a copy: rows, heads, or one of several tensors in one buffer.
///
/// A plain view converts into one row of one head: `Attention` takes such a tensor as one without gaps, of its configuration's shape and layout.
///
/// ```
/// use oxtile::num::bf16;
/// use oxtile::tensor::Heads;
/// use oxtile::{Buffer, Result, Runtime};
///
/// # fn main() -> Result<()> {
/// let runtime = Runtime::emulated(1)?; // or Runtime::cuda()
/// let stream = runtime.device(0)?.stream()?;
/// // Two sequences of 8 tokens, each with 4 key heads of 64 elements, and after them the 4 heads of its values.
/// let buffer = Buffer::<bf16>::zeros(&stream, 2 * 8 * (4 + 4) * 64)?;
/// let both = Heads::bshd(buffer.view(), [2, 8, 4 + 4, 64])?;
/// let (keys, values) = (both.heads(0..4)?, both.heads(4..8)?);
/// // The second half of each sequence.
/// assert_eq!(keys.rows(4..8)?.shape(), [2, 4, 4, 64]);
/// assert_eq!(values.strides(), [8 * 8 * 64, 8 * 64, 64]);
/// # Ok(()) }
/// ```
pub struct Heads<'a, T> {
    /// From the first element to the last.
    view: DeviceView<'a, T>,
    layout: Strided<4>,
}

/// A tensor as [`Heads`] that is written. No other view lends its elements; [`split_rows`](Self::split_rows) and [`split_heads`](Self::split_heads)
/// make two of one, whose elements may take turns in memory. The stream sanitizer takes them to touch all from their first element to
/// their last.
pub struct HeadsMut<'a, T>(Heads<'a, T>);

impl<T> Clone for Heads<'_, T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for Heads<'_, T> {}

/// The dimensions of rows and of heads.
const ROWS: usize = 1;
const HEADS: usize = 2;

impl<'a, T> Heads<'a, T> {
    /// A tensor without gaps that lies as `[batches, rows, heads, size]`, which is also its `shape`.
    ///
    /// # Errors
    /// [`Error::Length`] if the view does not have as many elements.
    pub fn bshd(view: DeviceView<'a, T>, shape: [u64; 4]) -> Result<Self> {
        Self::from(view).shaped("Heads", Strided::dense(shape))
    }

    /// A tensor without gaps of shape `[batches, rows, heads, size]` that lies as `[rows, batches, heads, size]`.
    ///
    /// # Errors
    /// As [`bshd`](Self::bshd).
    pub fn sbhd(view: DeviceView<'a, T>, shape: [u64; 4]) -> Result<Self> {
        Self::from(view).shaped("Heads", Strided::sbhd(shape))
    }

    /// A tensor without gaps that lies as `[rows, heads, size]`, which is also its `shape`: packed sequences, which count as one batch.
    ///
    /// # Errors
    /// As [`bshd`](Self::bshd).
    pub fn packed(view: DeviceView<'a, T>, [rows, heads, size]: [u64; 3]) -> Result<Self> {
        Self::bshd(view, [1, rows, heads, size])
    }

    /// A tensor of shape `[batches, rows, heads, size]` that begins at the view's first element, and `strides` in elements from one batch, row
    /// and head to the next.
    ///
    /// # Errors
    /// [`Error::Invalid`] if it ends after the view.
    pub fn strided(view: DeviceView<'a, T>, shape: [u64; 4], strides: [u64; 3]) -> Result<Self> {
        let [batch, row, head] = strides;
        let layout = Strided { shape, strides: [batch, row, head, 1] };
        let end = if numel(&shape)? == 0 { Some(0) } else { layout.extent() };
        if let Some(end) = end.filter(|end| *end <= view.len()) {
            return Ok(Self { view: view.slice(0, end), layout });
        }
        let end = end.map_or("2^64 or later".to_owned(), |end| end.to_string());
        let why = format!(
            "[batches, rows, heads, size] of {shape:?} with strides of {strides:?} elements end at element {end}, the view at {}: give a longer view, or fewer rows",
            view.len()
        );
        Err(Error::Invalid { what: "Heads", why })
    }

    /// Some rows of each head of each batch.
    ///
    /// # Errors
    /// [`Error::Invalid`] if there are no such rows.
    pub fn rows(self, rows: Range<u64>) -> Result<Self> {
        self.part("rows", ROWS, rows)
    }

    /// Some heads of each row.
    ///
    /// # Errors
    /// [`Error::Invalid`] if there are no such heads.
    pub fn heads(self, heads: Range<u64>) -> Result<Self> {
        self.part("heads", HEADS, heads)
    }

    /// `[batches, rows, heads, size]`.
    pub fn shape(&self) -> [u64; 4] {
        self.layout.shape
    }

    /// Elements from one batch, row and head to the next.
    pub fn strides(&self) -> [u64; 3] {
        let [batch, row, head, _] = self.layout.strides;
        [batch, row, head]
    }

    fn part(self, name: &str, dimension: usize, Range { start, end }: Range<u64>) -> Result<Self> {
        let mut layout = self.layout;
        let count = &mut layout.shape[dimension];
        if start > end || end > *count {
            let why = format!("{name} {start}..{end} of {count}: ranges rise, and end at {count} at most");
            return Err(Error::Invalid { what: "Heads", why });
        }
        *count = end - start;
        // None: there are no elements.
        let range = layout.extent().map_or([0, 0], |extent| [0, extent].map(|at| start * layout.strides[dimension] + at));
        Ok(Self { view: self.view.slice(range[0], range[1]), layout })
    }

    /// The tensor, which must have the shape of `whole`; a plain view becomes `whole`.
    pub(crate) fn shaped(self, what: &'static str, whole: Strided<4>) -> Result<Self> {
        let Self { view, layout: Strided { shape, .. } } = self;
        if shape[..3] == [1; 3] {
            Error::check_length(what, numel(&whole.shape)?, view.len())?;
            return Ok(Self { view, layout: whole });
        }
        if shape == whole.shape {
            return Ok(self);
        }
        let why = format!(
            "its [batches, rows, heads, size] are {shape:?}, those of the configuration are {:?}: give that many, or change the configuration",
            whole.shape
        );
        Err(Error::Invalid { what, why })
    }

    /// From the first element to the last.
    pub(crate) fn view(&self) -> DeviceView<'a, T> {
        self.view
    }

    /// Shape and strides.
    pub(crate) fn layout(&self) -> Strided<4> {
        self.layout
    }
}

impl<'a, T> HeadsMut<'a, T> {
    /// As [`Heads::bshd`].
    ///
    /// # Errors
    /// As [`Heads::bshd`].
    pub fn bshd(view: DeviceViewMut<'a, T>, shape: [u64; 4]) -> Result<Self> {
        Heads::bshd(read(view), shape).map(Self)
    }

    /// As [`Heads::sbhd`].
    ///
    /// # Errors
    /// As [`Heads::bshd`].
    pub fn sbhd(view: DeviceViewMut<'a, T>, shape: [u64; 4]) -> Result<Self> {
        Heads::sbhd(read(view), shape).map(Self)
    }

    /// As [`Heads::packed`].
    ///
    /// # Errors
    /// As [`Heads::bshd`].
    pub fn packed(view: DeviceViewMut<'a, T>, shape: [u64; 3]) -> Result<Self> {
        Heads::packed(read(view), shape).map(Self)
    }

    /// As [`Heads::strided`]. No two elements may be at the same place.
    ///
    /// # Errors
    /// As [`Heads::strided`], and if rows of heads overlap.
    pub fn strided(view: DeviceViewMut<'a, T>, shape: [u64; 4], strides: [u64; 3]) -> Result<Self> {
        let heads = Heads::strided(read(view), shape, strides)?;
        let mut steps: Vec<_> = strides.into_iter().zip(shape).filter(|(_, count)| *count > 1).collect();
        steps.sort_unstable();
        let mut extent = shape[3];
        for (stride, count) in steps {
            if stride < extent && !heads.view.is_empty() {
                let why = format!(
                    "[batches, rows, heads, size] of {shape:?} overlap with strides of {strides:?} elements, and are written: \
                     give {stride} at least {extent}"
                );
                return Err(Error::Invalid { what: "HeadsMut", why });
            }
            // Strides of a tensor without elements may be any numbers.
            extent = extent.saturating_add(stride.saturating_mul(count - 1));
        }
        Ok(Self(heads))
    }

    /// As [`Heads::rows`].
    ///
    /// # Errors
    /// As [`Heads::rows`].
    pub fn rows(self, rows: Range<u64>) -> Result<Self> {
        self.0.rows(rows).map(Self)
    }

    /// As [`Heads::heads`].
    ///
    /// # Errors
    /// As [`Heads::heads`].
    pub fn heads(self, heads: Range<u64>) -> Result<Self> {
        self.0.heads(heads).map(Self)
    }

    /// The rows before `at`, and those from there on.
    ///
    /// # Errors
    /// As [`Heads::rows`].
    pub fn split_rows(self, at: u64) -> Result<(Self, Self)> {
        Ok((Self(self.0.rows(0..at)?), Self(self.0.rows(at..self.shape()[ROWS])?)))
    }

    /// The heads before `at`, and those from there on: the gradients of keys and values that alternate in one buffer.
    ///
    /// # Errors
    /// As [`Heads::heads`].
    pub fn split_heads(self, at: u64) -> Result<(Self, Self)> {
        Ok((Self(self.0.heads(0..at)?), Self(self.0.heads(at..self.shape()[HEADS])?)))
    }

    /// The same tensor; this one cannot be used meanwhile.
    pub fn reborrow(&mut self) -> HeadsMut<'_, T> {
        HeadsMut(self.0)
    }

    /// `[batches, rows, heads, size]`.
    pub fn shape(&self) -> [u64; 4] {
        self.0.shape()
    }

    /// Elements from one batch, row and head to the next.
    pub fn strides(&self) -> [u64; 3] {
        self.0.strides()
    }

    /// As [`Heads::shaped`].
    pub(crate) fn shaped(self, what: &'static str, whole: Strided<4>) -> Result<Self> {
        self.0.shaped(what, whole).map(Self)
    }

    /// Shape and strides.
    pub(crate) fn layout(&self) -> Strided<4> {
        self.0.layout
    }

    /// From the first element to the last, of which those of the [layout](Self::layout) are written.
    pub(crate) fn into_view(self) -> DeviceViewMut<'a, T> {
        let access = self.0.view.access("heads");
        // SAFETY: an exclusive view was given up for this tensor and those split from it, which share no element. Kernels write the elements of
        // the layout alone: what binds the view to a kernel gives it the layout, or checks that the kernel's own is the same.
        unsafe { DeviceViewMut::from_raw(access.address, self.0.view.len(), access.owner) }
    }
}

/// The same memory for reading. The exclusive view is given up.
fn read<T>(view: DeviceViewMut<'_, T>) -> DeviceView<'_, T> {
    let access = view.access("heads");
    // SAFETY: the view was valid for the owner's lifetime, and is of the same elements.
    unsafe { DeviceView::from_raw(access.address, view.len(), access.owner) }
}

impl<'a, T> From<DeviceView<'a, T>> for Heads<'a, T> {
    fn from(view: DeviceView<'a, T>) -> Self {
        Self { view, layout: Strided::dense([1, 1, 1, view.len()]) }
    }
}

impl<'a, T> From<DeviceViewMut<'a, T>> for HeadsMut<'a, T> {
    fn from(view: DeviceViewMut<'a, T>) -> Self {
        Self(read(view).into())
    }
}

impl<T> fmt::Debug for Heads<'_, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Heads").field("shape", &self.shape()).field("strides", &self.strides()).finish_non_exhaustive()
    }
}

impl<T> fmt::Debug for HeadsMut<'_, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("HeadsMut").field(&self.0).finish()
    }
}
