//! Tensor maps: tensors that kernels copy box by box (TMA).

use std::marker::PhantomData;

use oxtile_tile::launch::{BufferAccess, DeviceTensorMap, DeviceTensorMapMut, DeviceView, DeviceViewMut};
use oxtile_tile::layout::{Linear, Swizzle};
use oxtile_tile::num::Pod;
use oxtile_tile::tensor_map::{self, MAP_ROWS};

use super::uploads::{Uploaded, Uploads};
use crate::runtime::backend::BoxMap;
use crate::runtime::{Error, Result, Stream};

/// Boxes of `ROWS` by `COLUMNS` of a tensor of `RANK` dimensions that kernels read, for tiles of swizzle `S`. Borrows the
/// tensor.
pub struct TensorMap<'a, T, const ROWS: usize, const COLUMNS: usize, S = Linear, const RANK: usize = 2> {
    encoded: Uploaded,
    tensor: BufferAccess<'a>,
    element: PhantomData<fn() -> (T, S)>,
}

/// Boxes of `ROWS` by `COLUMNS` of a tensor that kernels write. Borrows the tensor exclusively.
pub struct TensorMapMut<'a, T, const ROWS: usize, const COLUMNS: usize, S = Linear, const RANK: usize = 2>(
    TensorMap<'a, T, ROWS, COLUMNS, S, RANK>,
);

/// A map apart from its tensor, which each launch lends anew.
pub(crate) struct DetachedMap<T, const ROWS: usize, const COLUMNS: usize, S, const RANK: usize> {
    encoded: Uploaded,
    /// The address and the number of elements of the tensor's view.
    view: (u64, u64),
    element: PhantomData<fn() -> (T, S)>,
}

impl<T: Pod, const ROWS: usize, const COLUMNS: usize, S: Swizzle, const RANK: usize> DetachedMap<T, ROWS, COLUMNS, S, RANK> {
    /// As [`TensorMap::with`].
    pub fn with(uploads: &mut Uploads, stream: &Stream, tensor: DeviceView<'_, T>, layout: impl MapLayout<RANK>) -> Result<Self> {
        let view = (tensor.address(), tensor.len());
        let TensorMap::<'_, T, ROWS, COLUMNS, S, RANK> { encoded, .. } = TensorMap::with(uploads, stream, tensor, layout)?;
        Ok(Self { encoded, view, element: PhantomData })
    }

    /// Lends it, with the same view again.
    pub fn of<'v>(&'v self, tensor: DeviceView<'v, T>) -> DeviceTensorMap<'v, T, ROWS, COLUMNS, S, RANK> {
        assert_eq!((tensor.address(), tensor.len()), self.view, "the map is of this tensor");
        // SAFETY: `encode` made the map of a tensor at this address, which is lent; device allocations are 256-byte aligned.
        unsafe { DeviceTensorMap::from_raw(self.encoded.view().access("map"), tensor.access("tensor")) }
    }

    /// The same, to be written.
    pub fn of_mut<'v>(&'v self, tensor: DeviceViewMut<'v, T>) -> DeviceTensorMapMut<'v, T, ROWS, COLUMNS, S, RANK> {
        assert_eq!((tensor.address(), tensor.len()), self.view, "the map is of this tensor");
        // SAFETY: as `of`; the view was the only one.
        unsafe { DeviceTensorMapMut::from_raw(self.encoded.view().access("map"), tensor.access("tensor")) }
    }
}

/// Elements of each dimension, and from one element to the next in it: outermost first, 1 in the last.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Strided<const RANK: usize> {
    /// Elements.
    pub shape: [u64; RANK],
    /// Strides in elements.
    pub strides: [u64; RANK],
}

impl<const RANK: usize> Strided<RANK> {
    /// A tensor without gaps.
    pub fn dense(shape: [u64; RANK]) -> Self {
        let mut strides = [1_u64; RANK];
        for dimension in (1..RANK).rev() {
            strides[dimension - 1] = strides[dimension].saturating_mul(shape[dimension]);
        }
        Self { shape, strides }
    }

    /// The number of elements from the first to the last, gaps included; `None` if there are none, or it overflows.
    pub(crate) fn extent(&self) -> Option<u64> {
        let mut last = 0_u64;
        for (&length, &stride) in self.shape.iter().zip(&self.strides) {
            last = last.checked_add(length.checked_sub(1)?.checked_mul(stride)?)?;
        }
        last.checked_add(1)
    }

    /// Whether it lies in a view of `len` elements.
    fn check(&self, len: u64) -> Result<()> {
        let refuse = |why: String| Err(Error::Invalid { what: "tensor map", why });
        if self.shape.contains(&0) {
            return refuse("the tensor is empty: TMA has nothing to address, so launch nothing".to_owned());
        }
        if self.strides[RANK - 1] != 1 || self.extent().is_none_or(|extent| extent > len) {
            return refuse(format!("{self:?} does not lie in a view of {len} elements with neighbours in the last dimension"));
        }
        Ok(())
    }
}

/// `[batches, rows, heads, size]`.
impl Strided<4> {
    /// A tensor without gaps, of which a row has the heads of all batches.
    pub(crate) fn sbhd([batches, rows, heads, size]: [u64; 4]) -> Self {
        let Strided { strides: [row, batch, head, one], .. } = Self::dense([rows, batches, heads, size]);
        Self { shape: [batches, rows, heads, size], strides: [batch, row, head, one] }
    }

    /// Whether elements of the same index are at the same place.
    pub(crate) fn lies_as(&self, other: &Self) -> bool {
        let same = |i: usize| self.shape[i] <= 1 || self.strides[i] == other.strides[i];
        self.shape == other.shape && (self.shape.contains(&0) || (0..4).all(same))
    }
}

/// A tensor of rows of heads, of which sequences are some rows that follow each other. Strides are in elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SequenceRows {
    /// Rows.
    pub rows: u64,
    /// The distance from one row to the next.
    pub row: u64,
    /// Heads.
    pub heads: u64,
    /// The distance from one head to the next.
    pub head: u64,
    /// Elements of a row of a head.
    pub size: u64,
}

/// A matrix of which groups are some rows that follow each other, without gaps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GroupRows {
    /// Rows.
    pub rows: u64,
    /// Elements of a row.
    pub width: u64,
}

/// How a tensor lies in memory, as a map of `RANK` dimensions addresses it.
#[doc(hidden)]
pub trait MapLayout<const RANK: usize>: Copy {
    /// The dimensions of the map of a tensor in a view of `len` elements.
    fn dimensions(&self, len: u64) -> Result<Strided<RANK>>;
}

impl<const RANK: usize> MapLayout<RANK> for Strided<RANK> {
    fn dimensions(&self, len: u64) -> Result<Self> {
        self.check(len).map(|()| *self)
    }
}

/// Two dimensions more than the tensor has.
impl MapLayout<5> for SequenceRows {
    fn dimensions(&self, len: u64) -> Result<Strided<5>> {
        let Self { rows, row, heads, head, size } = *self;
        Strided { shape: [heads, rows, size], strides: [head, row, 1] }.check(len)?;
        let Some(back) = (1_u64 << 34).checked_sub(row) else {
            let why = format!("rows are {row} elements apart: at most {}", 1_u64 << 34);
            return Err(Error::Invalid { what: "tensor map", why });
        };
        // The device address of a row is that of the tensor for whatever moves the edge: `place` in `oxtile_kernels::attention`.
        Ok(Strided { shape: [UNBOUNDED, UNBOUNDED, heads, u64::from(MAP_ROWS), size], strides: [back, row, head, row, 1] })
    }
}

/// Two dimensions more than the matrix has.
impl MapLayout<4> for GroupRows {
    fn dimensions(&self, len: u64) -> Result<Strided<4>> {
        let Self { rows, width } = *self;
        Strided::dense([rows, width]).check(len)?;
        // The device address of a row is that of the matrix for whatever moves the edge: `Range` in `oxtile_kernels::gemm`.
        Ok(Strided { shape: [UNBOUNDED, UNBOUNDED, u64::from(MAP_ROWS), width], strides: [(1 << 34) - width, width, width, 1] })
    }
}

/// Makes a map, and copies it alone.
#[track_caller]
fn copied<M>(stream: &Stream, encode: impl FnOnce(&mut Uploads) -> Result<M>) -> Result<M> {
    let mut uploads = Uploads::default();
    let map = encode(&mut uploads)?;
    uploads.copy(stream)?;
    Ok(map)
}

/// An extent beyond every index, of a dimension without a bound.
const UNBOUNDED: u64 = 0x7fff_0000;

impl<'a, T: Pod, const ROWS: usize, const COLUMNS: usize, S: Swizzle, const RANK: usize> TensorMap<'a, T, ROWS, COLUMNS, S, RANK> {
    /// Encodes a tensor without gaps, its shape outermost first, and copies the map to the stream's device, in stream order.
    ///
    /// # Errors
    /// [`Error::Length`] if the view is no such tensor; [`Error::Invalid`] or a driver error for what TMA
    /// cannot do: an address or a stride that is no multiple of 16 bytes, an empty tensor, a box over 256 elements.
    pub fn new(stream: &Stream, tensor: DeviceView<'a, T>, shape: [u64; RANK]) -> Result<Self> {
        Self::dense(stream, tensor.len(), shape, tensor.access("tensor"))
    }

    /// As `new`, for a part of a tensor, or for one whose dimensions lie in another order; the view may be longer.
    ///
    /// # Errors
    /// As [`new`](Self::new).
    pub fn strided(stream: &Stream, tensor: DeviceView<'a, T>, layout: Strided<RANK>) -> Result<Self> {
        copied(stream, |uploads| Self::with(uploads, stream, tensor, layout))
    }

    /// The map of the sequences of a tensor, with an edge that the kernel moves to the end of each. `RANK` is 5.
    ///
    /// # Errors
    /// As [`new`](Self::new).
    pub fn sequences(stream: &Stream, tensor: DeviceView<'a, T>, rows: SequenceRows) -> Result<Self>
    where
        SequenceRows: MapLayout<RANK>,
    {
        copied(stream, |uploads| Self::with(uploads, stream, tensor, rows))
    }

    /// As [`new`](Self::new) for any layout, copied with other uploads.
    pub(crate) fn with(uploads: &mut Uploads, stream: &Stream, tensor: DeviceView<'a, T>, layout: impl MapLayout<RANK>) -> Result<Self> {
        Self::encode(uploads, stream, layout.dimensions(tensor.len())?, tensor.access("tensor"))
    }

    fn dense(stream: &Stream, len: u64, shape: [u64; RANK], tensor: BufferAccess<'a>) -> Result<Self> {
        let expected = crate::tensor::shape::numel(&shape)?;
        if len != expected {
            return Err(Error::Length { what: "tensor map", expected, found: len });
        }
        copied(stream, |uploads| Self::encode(uploads, stream, Strided::dense(shape).dimensions(len)?, tensor))
    }

    fn encode(uploads: &mut Uploads, stream: &Stream, layout: Strided<RANK>, tensor: BufferAccess<'a>) -> Result<Self> {
        let element_bytes = size_of::<T>() as u64;
        let strides: Vec<u64> = layout.strides.iter().rev().skip(1).map(|stride| stride.saturating_mul(element_bytes)).collect();
        let is_off = |bytes: &&u64| !bytes.is_multiple_of(16);
        let invalid = |why| Error::Invalid { what: "tensor map", why };
        if is_off(&&tensor.address) {
            let why = format!("the tensor begins at {:#x}, no multiple of 16 bytes: begin the view at one, or copy it", tensor.address);
            return Err(invalid(why));
        }
        if let Some(off) = strides.iter().find(is_off) {
            return Err(invalid(format!("the tensor has strides of {strides:?} bytes, of which {off} is no multiple of 16: pad the rows")));
        }
        let mut box_dimensions = vec![1; RANK];
        box_dimensions[0] = tensor_map::TensorMap::<T, ROWS, COLUMNS, S, RANK>::PANEL_COLUMNS as u32;
        box_dimensions[1] = ROWS as u32;
        let map = BoxMap {
            address: tensor.address,
            element_bytes: element_bytes as u32,
            dimensions: layout.shape.iter().rev().copied().collect(),
            strides,
            box_dimensions,
            swizzle: S::MODE,
        };
        let words = stream.0.runtime.backend.encode_tensor_map(stream.0.id.device, &map)?;
        Ok(Self { encoded: uploads.add(&words), tensor, element: PhantomData })
    }

    /// Lends the map to a kernel.
    pub fn view(&self) -> DeviceTensorMap<'_, T, ROWS, COLUMNS, S, RANK> {
        // SAFETY: `encode` made the map of this tensor, which is borrowed; device allocations are 256-byte aligned.
        unsafe { DeviceTensorMap::from_raw(self.encoded.view().access("map"), self.tensor) }
    }
}

impl<'a, T: Pod, const ROWS: usize, const COLUMNS: usize, S: Swizzle, const RANK: usize> TensorMapMut<'a, T, ROWS, COLUMNS, S, RANK> {
    /// As [`TensorMap::new`]; takes the view, so that nothing else lends the matrix while the map is there:
    ///
    /// ```compile_fail,E0382
    /// # use oxtile::{Buffer, Stream, tensor::TensorMapMut};
    /// # fn twice(stream: &Stream, matrix: &mut Buffer<u32>) -> oxtile::Result<()> {
    /// let view = matrix.view_mut();
    /// let mut one = TensorMapMut::<_, 8, 32>::new(stream, view, [8, 32])?;
    /// let other = TensorMapMut::<_, 8, 32>::new(stream, view, [8, 32])?;
    /// # one.view_mut();
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// As [`TensorMap::new`].
    pub fn new(stream: &Stream, tensor: DeviceViewMut<'a, T>, shape: [u64; RANK]) -> Result<Self> {
        Ok(Self(TensorMap::dense(stream, tensor.len(), shape, tensor.access("tensor"))?))
    }

    /// As [`TensorMap::strided`], with the view taken as [`new`](Self::new) does.
    ///
    /// # Errors
    /// As [`TensorMap::new`].
    pub fn strided(stream: &Stream, tensor: DeviceViewMut<'a, T>, layout: Strided<RANK>) -> Result<Self> {
        copied(stream, |uploads| Self::with(uploads, stream, tensor, layout))
    }

    /// As [`TensorMap::sequences`], with the view taken as [`new`](Self::new) does.
    ///
    /// # Errors
    /// As [`TensorMap::new`].
    pub fn sequences(stream: &Stream, tensor: DeviceViewMut<'a, T>, rows: SequenceRows) -> Result<Self>
    where
        SequenceRows: MapLayout<RANK>,
    {
        copied(stream, |uploads| Self::with(uploads, stream, tensor, rows))
    }

    /// As [`TensorMap::with`], with the view taken as [`new`](Self::new) does.
    pub(crate) fn with(uploads: &mut Uploads, stream: &Stream, tensor: DeviceViewMut<'a, T>, layout: impl MapLayout<RANK>) -> Result<Self> {
        Ok(Self(TensorMap::encode(uploads, stream, layout.dimensions(tensor.len())?, tensor.access("tensor"))?))
    }

    /// Lends the map to a kernel.
    pub fn view_mut(&mut self) -> DeviceTensorMapMut<'_, T, ROWS, COLUMNS, S, RANK> {
        // SAFETY: as `TensorMap::view`; the map took the only view of the tensor.
        unsafe { DeviceTensorMapMut::from_raw(self.0.encoded.view().access("map"), self.0.tensor) }
    }
}
