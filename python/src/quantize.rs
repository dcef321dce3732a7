//! Quantization and its inverse.

use oxtile::num::{bf16, e2m1x2, e4m3, f16, ue8m0};
use oxtile::quantize::fp8::Fp8Number;
use oxtile::quantize::mxfp8::Mxfp8Number;
use oxtile::quantize::nvfp4::Nvfp4Number;
use oxtile::quantize::{
    Amax, Compact, CurrentScaling, Direction, Format, Fp8Format, Fp8Tensor, Mxfp8, Mxfp8Format, Mxfp8Tensor, Nvfp4, Nvfp4Columns,
    Nvfp4Format, Nvfp4Tensor, RandomState, ScaleOptions,
};
use oxtile::{Buffer, HostElement, Result, Runtime, Stream};
use pyo3::prelude::*;

use crate::array::{Array, Type};
use crate::error::{raise, wrong_type, wrong_value};
use crate::session::Session;

/// A format and a direction.
#[derive(Clone, Copy)]
struct Cast {
    format: Name,
    direction: Direction,
}

#[derive(Clone, Copy, PartialEq)]
enum Name {
    Mxfp8,
    Nvfp4,
    Fp8,
}

impl Cast {
    fn new(format: &str, direction: &str) -> PyResult<Self> {
        let format = match format {
            "mxfp8" => Name::Mxfp8,
            "nvfp4" => Name::Nvfp4,
            "fp8" => Name::Fp8,
            other => return Err(wrong_value(format!("format is {other:?}: mxfp8, nvfp4 or fp8"))),
        };
        let direction = match direction {
            "rows" => Direction::Rows,
            "columns" => Direction::Columns,
            other => return Err(wrong_value(format!("direction is {other:?}: rows or columns"))),
        };
        Ok(Self { format, direction })
    }

    /// Rows and columns of codes and of scales, and whether there is an amax.
    fn shapes(self, shape: [u64; 2]) -> Result<([u64; 2], [u64; 2], bool)> {
        fn of<F: Format<Direction = Direction>>(what: &'static str, shape: [u64; 2], direction: Direction) -> Result<([u64; 2], [u64; 2])> {
            F::check(what, shape, direction)?;
            // Fails where there are too many.
            F::code_count(shape, direction)?;
            F::scale_count::<Compact>(shape, direction)?;
            Ok((F::SHAPES.codes(shape, direction), F::SHAPES.scales(shape, direction)))
        }
        let (codes, scales) = match self.format {
            Name::Mxfp8 => of::<Mxfp8Format>("mxfp8", shape, self.direction)?,
            Name::Nvfp4 => of::<Nvfp4Format>("nvfp4", shape, self.direction)?,
            Name::Fp8 => of::<Fp8Format>("fp8", shape, self.direction)?,
        };
        Ok((codes, scales, self.format == Name::Nvfp4))
    }
}

/// The shapes of codes and scales of a matrix, and whether it has an amax.
#[pyfunction]
pub fn quantized_shapes(format: &str, direction: &str, shape: [u64; 2]) -> PyResult<([u64; 2], [u64; 2], bool)> {
    Cast::new(format, direction)?.shapes(shape).map_err(raise)
}

/// A matrix that is quantized, or restored.
struct Matrix {
    session: Session,
    cast: Cast,
    shape: [u64; 2],
    wide: Array,
    codes: Array,
    scales: Array,
    amax: Option<Array>,
}

/// Quantizes a matrix: `tensors` are the matrix, and where codes, scales and, if there is one, the amax go.
#[pyfunction]
pub fn quantize(py: Python<'_>, tensors: Vec<Bound<'_, PyAny>>, format: &str, direction: &str, stream: u64) -> PyResult<()> {
    let [input, codes, scales, amax @ ..] = &tensors[..] else { return Err(wrong_value("quantize takes three tensors or four")) };
    let wide = Array::read("x", input)?;
    let written = [Array::written("codes", codes)?, Array::written("scales", scales)?];
    let amax = amax.first().map(|amax| Array::written("amax", amax)).transpose()?;
    let matrix = Matrix::new(wide, written, amax, format, direction, stream)?;
    match matrix.wide.element {
        Type::Bf16 => matrix.quantize::<bf16>(py),
        Type::F16 => matrix.quantize::<f16>(py),
        Type::F32 => matrix.quantize::<f32>(py),
        other => Err(wrong_type(format!("x is {other}: quantization takes bfloat16, float16 and float32"))),
    }
}

/// Restores a matrix as elements of this name: `tensors` are where it goes, and codes, scales and, if there is one, the amax.
#[pyfunction]
pub fn dequantize(
    py: Python<'_>,
    tensors: Vec<Bound<'_, PyAny>>,
    format: &str,
    direction: &str,
    element: &str,
    stream: u64,
) -> PyResult<()> {
    let [output, codes, scales, amax @ ..] = &tensors[..] else { return Err(wrong_value("dequantize takes three tensors or four")) };
    let wide = Array::written("output", output)?;
    let read = [Array::read("codes", codes)?, Array::read("scales", scales)?];
    let amax = amax.first().map(|amax| Array::read("amax", amax)).transpose()?;
    let matrix = Matrix::new(wide, read, amax, format, direction, stream)?;
    match element {
        "bfloat16" if matrix.wide.holds(Type::Bf16) => matrix.dequantize::<bf16>(py),
        "float16" if matrix.wide.holds(Type::F16) => matrix.dequantize::<f16>(py),
        "float32" if matrix.wide.holds(Type::F32) => matrix.dequantize::<f32>(py),
        other => Err(wrong_type(format!("output is {}, for elements of {other:?}", matrix.wide.element))),
    }
}

impl Matrix {
    fn new(wide: Array, [codes, scales]: [Array; 2], amax: Option<Array>, format: &str, direction: &str, stream: u64) -> PyResult<Self> {
        let cast = Cast::new(format, direction)?;
        let &[rows, columns] = &wide.shape[..] else {
            return Err(wrong_value(format!("{} has shape {:?}, not [rows, columns]", wide.name, wide.shape)));
        };
        let shape = [rows, columns];
        let (of_codes, of_scales, has_amax) = cast.shapes(shape).map_err(raise)?;
        let bytes = |array: &Array, expected: u64, of: &str| match array.bytes() == expected {
            true => Ok(()),
            false => Err(wrong_value(format!("{} has {} bytes, not the {expected} of {of}", array.name, array.bytes()))),
        };
        bytes(&codes, of_codes.iter().product(), &format!("{format} codes {of_codes:?} of a matrix {shape:?} by {direction}"))?;
        let size = if cast.format == Name::Fp8 { 4 } else { 1 };
        bytes(
            &scales,
            of_scales.iter().product::<u64>() * size,
            &format!("{format} scales {of_scales:?} of a matrix {shape:?} by {direction}"),
        )?;
        if amax.is_some() != has_amax {
            return Err(wrong_value(format!("{format} {} an amax", if has_amax { "needs" } else { "has not" })));
        }
        amax.as_ref().map_or(Ok(()), |amax| bytes(amax, 4, "one float32"))?;
        for other in [&codes, &scales].into_iter().chain(&amax) {
            other.check_place(&wide)?;
        }
        Ok(Self { session: Session::open(wide.place, stream)?, cast, shape, wide, codes, scales, amax })
    }

    fn quantize<T: Number>(&self, py: Python<'_>) -> PyResult<()> {
        let Self { session, shape, cast: Cast { format, direction }, .. } = self;
        let (shape, direction) = (*shape, *direction);
        let (runtime, stream) = (&session.runtime, &session.stream);
        let input = session.read::<T>(&self.wide)?;
        match format {
            Name::Mxfp8 => {
                let (mut data, mut scales) = (session.target::<e4m3>(&self.codes)?, session.target::<ue8m0>(&self.scales)?);
                let cast = || {
                    let casts = Mxfp8::<T>::new(runtime)?;
                    match direction {
                        Direction::Rows => casts.quantize_rows(stream, input.view(), shape, data.view_mut(), scales.view_mut()),
                        Direction::Columns => casts.quantize_columns(stream, input.view(), shape, data.view_mut(), scales.view_mut()),
                    }?;
                    session.finish()
                };
                py.detach(cast).map_err(raise)?;
                session.give(&self.codes, &data)?;
                session.give(&self.scales, &scales)
            }
            Name::Nvfp4 => {
                let mut tensor = self.nvfp4(true)?;
                let cast = || {
                    Amax::<T>::new(runtime)?.run(stream, input.view(), &mut tensor.amax)?;
                    T::nvfp4(runtime, stream, &input, &mut tensor)?;
                    session.finish()
                };
                py.detach(cast).map_err(raise)?;
                session.give(&self.codes, &tensor.data)?;
                session.give(&self.scales, &tensor.scales)?;
                self.amax.as_ref().map_or(Ok(()), |amax| session.give(amax, &tensor.amax))
            }
            Name::Fp8 => {
                let (mut data, mut scale) = (session.target::<e4m3>(&self.codes)?, session.target::<f32>(&self.scales)?);
                let cast = || {
                    let casts = CurrentScaling::<T>::new(runtime, ScaleOptions::default())?;
                    let mut amax = Buffer::uninitialised(stream, 1)?;
                    Amax::<T>::new(runtime)?.run(stream, input.view(), &mut amax)?;
                    match direction {
                        Direction::Rows => casts.cast(stream, input.view(), amax.view(), data.view_mut(), scale.view_mut())?,
                        Direction::Columns => {
                            let mut codes = Buffer::uninitialised(stream, data.len())?;
                            casts.cast(stream, input.view(), amax.view(), codes.view_mut(), scale.view_mut())?;
                            casts.transpose(stream, codes.view(), shape, data.view_mut())?;
                        }
                    }
                    session.finish()
                };
                py.detach(cast).map_err(raise)?;
                session.give(&self.codes, &data)?;
                session.give(&self.scales, &scale)
            }
        }
    }

    fn dequantize<T: Number>(&self, py: Python<'_>) -> PyResult<()> {
        let Self { session, shape, cast: Cast { format, direction }, .. } = self;
        let (shape, direction) = (*shape, *direction);
        let (runtime, stream) = (&session.runtime, &session.stream);
        let mut output = session.target::<T>(&self.wide)?;
        match format {
            Name::Mxfp8 => {
                let (data, scales) = (session.read(&self.codes)?, session.read(&self.scales)?);
                let tensor: Mxfp8Tensor = Mxfp8Tensor { data, scales, amax: (), shape, direction };
                let restore = || {
                    Mxfp8::<T>::new(runtime)?.dequantize(stream, &tensor, output.view_mut())?;
                    session.finish()
                };
                py.detach(restore).map_err(raise)?;
            }
            Name::Nvfp4 => {
                let tensor = self.nvfp4(false)?;
                let restore = || {
                    T::restore_nvfp4(runtime, stream, &tensor, &mut output)?;
                    session.finish()
                };
                py.detach(restore).map_err(raise)?;
            }
            Name::Fp8 => {
                let (data, scales) = (session.read(&self.codes)?, session.read(&self.scales)?);
                let tensor: Fp8Tensor = Fp8Tensor { data, scales, amax: (), shape, direction: Direction::Rows };
                let restore = || {
                    CurrentScaling::<T>::new(runtime, ScaleOptions::default())?.dequantize(stream, &tensor, output.view_mut())?;
                    session.finish()
                };
                py.detach(restore).map_err(raise)?;
            }
        }
        session.give(&self.wide, &output)
    }

    /// The matrix in NVFP4: to be written, or as it is.
    fn nvfp4(&self, is_target: bool) -> PyResult<Nvfp4Tensor> {
        let Self { session, shape, cast, codes, scales, .. } = self;
        let Some(amax) = &self.amax else { return Err(wrong_value("nvfp4 needs an amax")) };
        let (data, scales, amax) = match is_target {
            true => (session.target::<e2m1x2>(codes)?, session.target::<e4m3>(scales)?, session.target(amax)?),
            false => (session.read(codes)?, session.read(scales)?, session.read(amax)?),
        };
        Ok(Nvfp4Tensor { data, scales, amax, shape: *shape, direction: cast.direction })
    }
}

/// A number type with its kernels.
trait Number: Mxfp8Number<e4m3> + Nvfp4Number + Fp8Number<e4m3> + HostElement<Device = Self> {
    /// Casts a matrix with the tensor's amax.
    fn nvfp4(runtime: &Runtime, stream: &Stream, input: &Buffer<Self>, tensor: &mut Nvfp4Tensor) -> Result<()>;

    /// Restores a matrix.
    fn restore_nvfp4(runtime: &Runtime, stream: &Stream, tensor: &Nvfp4Tensor, output: &mut Buffer<Self>) -> Result<()>;
}

macro_rules! numbers {
    ($($t:ty)*) => { $(
        impl Number for $t {
            fn nvfp4(runtime: &Runtime, stream: &Stream, input: &Buffer<Self>, tensor: &mut Nvfp4Tensor) -> Result<()> {
                if tensor.direction == Direction::Columns {
                    return Nvfp4Columns::<Self>::new(runtime)?.cast_columns(stream, input.view(), &RandomState::none(stream)?, tensor);
                }
                let Nvfp4Tensor { data, scales, amax, shape, .. } = tensor;
                Nvfp4::<Self>::new(runtime)?.quantize_rows(stream, input.view(), *shape, amax.view(), data.view_mut(), scales.view_mut())
            }

            fn restore_nvfp4(runtime: &Runtime, stream: &Stream, tensor: &Nvfp4Tensor, output: &mut Buffer<Self>) -> Result<()> {
                match tensor.direction {
                    Direction::Rows => Nvfp4::<Self>::new(runtime)?.dequantize(stream, tensor, output.view_mut()),
                    Direction::Columns => Nvfp4Columns::<Self>::new(runtime)?.dequantize_columns(stream, tensor, output.view_mut()),
                }
            }
        }
    )* };
}

numbers! { bf16 f16 f32 }
