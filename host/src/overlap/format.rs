//! Formats in which a gathered operand travels as codes and scales, and how these lie in a place.

use std::fmt;

use oxtile_tile::launch::DeviceViewMut;
use oxtile_tile::num::{Fp8, bf16, e4m3};

use super::schedule::Chunk;
use crate::quantize::mxfp8::Mxfp8Number;
use crate::quantize::{Compact, Direction, Format, Mxfp8, Mxfp8Format, Nvfp4, Nvfp4Format, QuantizedTensor};
use crate::runtime::{Buffer, Device, Error, Result, Stream};
use crate::symmetric::{Pitched, Rows};

/// How a gathered operand travels that is dequantized where it arrives.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GatheredFormat {
    /// 8-bit codes, and a scale for each 32 neighbours of a row.
    Mxfp8,
    /// 4-bit codes, and a scale for each 16 neighbours of a row. Its amax is agreed on before.
    Nvfp4,
}

/// A format in which rows of an operand travel: [`Mxfp8Format`] and [`Nvfp4Format`].
pub trait GatherFormat: Format<Direction = Direction> {
    /// The format as a value.
    const FORMAT: GatheredFormat;
    /// The kernels that dequantize.
    #[doc(hidden)]
    type Casts: Send + Sync;

    /// Loads them on a device.
    #[doc(hidden)]
    fn load(device: &Device) -> Result<Self::Casts>;

    #[doc(hidden)]
    fn dequantize(casts: &Self::Casts, stream: &Stream, tensor: &QuantizedTensor<Self>, output: DeviceViewMut<'_, bf16>) -> Result<()>
    where
        Self: Sized;

    /// Another handle of an amax.
    #[doc(hidden)]
    fn same(amax: &Self::Amax) -> Self::Amax;

    /// Where an amax lies, and of how many elements it is.
    #[doc(hidden)]
    fn place_of(amax: &Self::Amax) -> [u64; 2];

    /// Fails unless a tensor has as many amaxes as it is decoded by.
    #[doc(hidden)]
    fn check_amax(what: &'static str, amax: &Self::Amax) -> Result<()>;
}

impl<Q: Fp8> GatherFormat for Mxfp8Format<Q>
where
    bf16: Mxfp8Number<Q>,
{
    const FORMAT: GatheredFormat = GatheredFormat::Mxfp8;
    type Casts = Mxfp8<bf16, Q>;

    fn load(device: &Device) -> Result<Self::Casts> {
        let casts = Mxfp8::new(&device.runtime())?;
        casts.prepare_dequantize(device)?;
        Ok(casts)
    }

    fn dequantize(casts: &Self::Casts, stream: &Stream, tensor: &QuantizedTensor<Self>, output: DeviceViewMut<'_, bf16>) -> Result<()> {
        casts.dequantize(stream, tensor, output)
    }

    fn same((): &()) {}

    fn place_of((): &()) -> [u64; 2] {
        [0; 2]
    }

    fn check_amax(_: &'static str, (): &()) -> Result<()> {
        Ok(())
    }
}

impl GatherFormat for Nvfp4Format {
    const FORMAT: GatheredFormat = GatheredFormat::Nvfp4;
    type Casts = Nvfp4<bf16>;

    fn load(device: &Device) -> Result<Self::Casts> {
        let casts = Nvfp4::new(&device.runtime())?;
        casts.prepare_dequantize(device)?;
        Ok(casts)
    }

    fn dequantize(casts: &Self::Casts, stream: &Stream, tensor: &QuantizedTensor<Self>, output: DeviceViewMut<'_, bf16>) -> Result<()> {
        casts.dequantize(stream, tensor, output)
    }

    fn same(amax: &Buffer<f32>) -> Buffer<f32> {
        // SAFETY: the elements of that buffer, whose uses it shares.
        unsafe { amax.window(0, amax.len()) }
    }

    fn place_of(amax: &Buffer<f32>) -> [u64; 2] {
        [amax.address(), amax.len()]
    }

    fn check_amax(what: &'static str, amax: &Buffer<f32>) -> Result<()> {
        Error::check_length(what, 1, amax.len())
    }
}

/// Codes and scales of a matrix in a place: the codes of all rows, then from a multiple of 256 bytes on the scales of all rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Parts {
    /// Bytes of a row's codes, and of its scales.
    pub row: [u64; 2],
    /// Where the scales begin.
    pub scales: u64,
    /// Bytes of all.
    pub bytes: u64,
}

impl GatheredFormat {
    /// Those of a matrix of these rows and columns.
    ///
    /// # Errors
    /// [`Error::Invalid`] for rows that the format cannot hold; [`Error::TooLarge`].
    pub(super) fn parts(self, [rows, columns]: [u64; 2]) -> Result<Parts> {
        fn of<F: GatherFormat>(columns: u64) -> Result<[u64; 2]> {
            let row = [1, columns];
            Ok([F::code_count(row, Direction::Rows)?, F::scale_count::<Compact>(row, Direction::Rows)?])
        }
        let row = match self {
            Self::Mxfp8 => of::<Mxfp8Format<e4m3>>(columns),
            Self::Nvfp4 => of::<Nvfp4Format>(columns),
        }?;
        let lay = || {
            let [codes, scales] = [rows.checked_mul(row[0])?, rows.checked_mul(row[1])?];
            let start = codes.checked_next_multiple_of(256)?;
            Some(Parts { row, scales: start, bytes: start.checked_add(scales)? })
        };
        lay().ok_or(Error::TooLarge { what: "AllGatherConfig", count: rows, element_bytes: row[0].saturating_add(row[1]) })
    }
}

impl Parts {
    /// Where the codes and the scales of a row begin.
    pub fn of_row(&self, row: u64) -> [u64; 2] {
        [row * self.row[0], self.scales + row * self.row[1]]
    }

    /// The copies of a chunk of whole rows: codes, then scales.
    pub fn copies(&self, chunk: &Chunk) -> Vec<Rows> {
        let (count, starts) = (chunk.rows.end - chunk.rows.start, self.of_row(chunk.rows.start));
        let copy = |(start, width)| {
            let place = Pitched { start, pitch: width };
            Rows { count, width, from: place, to: place }
        };
        starts.into_iter().zip(self.row).map(copy).collect()
    }

    /// The bytes of all rows but these.
    pub fn others(&self, rows: u64, own: &std::ops::Range<u64>) -> Vec<std::ops::Range<u64>> {
        let [start, end] = [self.of_row(own.start), self.of_row(own.end)];
        let [first, last] = [self.of_row(0), self.of_row(rows)];
        let ranges = [0, 1].into_iter().flat_map(|part| [first[part]..start[part], end[part]..last[part]]);
        ranges.filter(|range| !range.is_empty()).collect()
    }
}

impl fmt::Display for GatheredFormat {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Mxfp8 => "MXFP8",
            Self::Nvfp4 => "NVFP4",
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_and_scales_lie_one_after_the_other() {
        let parts = GatheredFormat::Mxfp8.parts([3, 72]).unwrap();
        // Three blocks a row, the last one of 8.
        assert_eq!(parts, Parts { row: [72, 3], scales: 256, bytes: 265 });
        let chunk = Chunk { number: 0, rows: 1..3, columns: 0..72 };
        let copies = parts.copies(&chunk);
        assert_eq!(copies.iter().map(|rows| (rows.count, rows.width, rows.to.start)).collect::<Vec<_>>(), [(2, 72, 72), (2, 3, 259)]);
        assert_eq!(parts.others(3, &(1..2)), [0..72, 144..216, 256..259, 262..265]);
        assert_eq!(parts.others(3, &(3..3)), [0..216, 256..265]);
        let parts = GatheredFormat::Nvfp4.parts([64, 32]).unwrap();
        assert_eq!(parts, Parts { row: [16, 2], scales: 1024, bytes: 1152 });
        let error = GatheredFormat::Nvfp4.parts([64, 40]).unwrap_err().to_string();
        assert!(error.contains("40 columns are not a multiple of 16: pad them"), "{error}");
        assert!(matches!(GatheredFormat::Mxfp8.parts([u64::MAX, 64]), Err(Error::TooLarge { .. })));
    }
}
