//! Tensor maps: matrices that kernels copy box by box (TMA).

use std::marker::PhantomData;

use oxtile_tile::launch::{BufferAccess, DeviceTensorMap, DeviceTensorMapMut, DeviceView, DeviceViewMut};
use oxtile_tile::num::Pod;

use crate::runtime::backend::MatrixMap;
use crate::runtime::{Buffer, Error, Result, Stream};

/// Boxes of `ROWS` by `COLUMNS` of a matrix that kernels read. Borrows the matrix.
pub struct TensorMap<'a, T, const ROWS: usize, const COLUMNS: usize> {
    encoded: Buffer<u64>,
    matrix: BufferAccess<'a>,
    element: PhantomData<fn() -> T>,
}

/// Boxes of `ROWS` by `COLUMNS` of a matrix that kernels write. Borrows the matrix exclusively.
pub struct TensorMapMut<'a, T, const ROWS: usize, const COLUMNS: usize>(TensorMap<'a, T, ROWS, COLUMNS>);

impl<'a, T: Pod, const ROWS: usize, const COLUMNS: usize> TensorMap<'a, T, ROWS, COLUMNS> {
    /// Encodes a row-major matrix `[rows, columns]` and copies the map to the stream's device; waits for that copy.
    ///
    /// # Errors
    /// [`Error::Length`] if the view is no such matrix; [`Error::Invalid`] or a driver error for what the copy engine
    /// cannot do: an address or a row that is no multiple of 16 bytes, an empty matrix, a box over 256 elements.
    pub fn new(stream: &Stream, matrix: DeviceView<'a, T>, shape: [u64; 2]) -> Result<Self> {
        Self::encode(stream, matrix.address(), matrix.len(), shape, matrix.access("matrix"))
    }

    fn encode(stream: &Stream, address: u64, len: u64, [rows, columns]: [u64; 2], matrix: BufferAccess<'a>) -> Result<Self> {
        let expected = crate::tensor::shape::numel(&[rows, columns])?;
        if len != expected {
            return Err(Error::Length { what: "tensor map", expected, found: len });
        }
        let refuse = |why: String| Err(Error::Invalid { what: "tensor map", why });
        if expected == 0 {
            return refuse("the matrix is empty: the copy engine has nothing to address, so launch nothing".to_owned());
        }
        let row_bytes = columns * size_of::<T>() as u64;
        if !address.is_multiple_of(16) || !row_bytes.is_multiple_of(16) {
            return refuse(format!(
                "the matrix starts at {address:#x} with rows of {row_bytes} bytes: both must be multiples of 16, so pad the rows"
            ));
        }
        let map =
            MatrixMap { address, element_bytes: size_of::<T>() as u32, rows, columns, box_rows: ROWS as u32, box_columns: COLUMNS as u32 };
        let words = stream.0.runtime.backend.encode_tensor_map(stream.0.id.device, &map)?;
        Ok(Self { encoded: Buffer::from_slice(stream, &words)?, matrix, element: PhantomData })
    }

    /// Lends the map to a kernel.
    pub fn view(&self) -> DeviceTensorMap<'_, T, ROWS, COLUMNS> {
        // SAFETY: `encode` made the map of this matrix, which is borrowed; device allocations are 256-byte aligned.
        unsafe { DeviceTensorMap::from_raw(self.encoded.view().access("map"), self.matrix) }
    }
}

impl<'a, T: Pod, const ROWS: usize, const COLUMNS: usize> TensorMapMut<'a, T, ROWS, COLUMNS> {
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
    pub fn new(stream: &Stream, matrix: DeviceViewMut<'a, T>, shape: [u64; 2]) -> Result<Self> {
        Ok(Self(TensorMap::encode(stream, matrix.address(), matrix.len(), shape, matrix.access("matrix"))?))
    }

    /// Lends the map to a kernel.
    pub fn view_mut(&mut self) -> DeviceTensorMapMut<'_, T, ROWS, COLUMNS> {
        // SAFETY: as `TensorMap::view`; the map took the only view of the matrix.
        unsafe { DeviceTensorMapMut::from_raw(self.0.encoded.view().access("map"), self.0.matrix) }
    }
}
