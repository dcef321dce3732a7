//! Casts to formats and back, on a place.

use std::marker::PhantomData;

use candle_core::{DType, Result, Tensor, bail};
use oxtile::num::{bf16, e2m1x2, e4m3, f16, ue8m0};
use oxtile::quantize::fp8::Fp8Number;
use oxtile::quantize::mxfp8::Mxfp8Number;
use oxtile::quantize::nvfp4::Nvfp4Number;
use oxtile::quantize::{
    Amax, CurrentScaling, Direction, Fp8Tensor, Mxfp8, Mxfp8Tensor, Nvfp4, Nvfp4Columns, Nvfp4Tensor, RandomState, ScaleOptions,
};
use oxtile::{Buffer, Runtime, Stream};

use crate::element::Element;
use crate::launch::tensor;
use crate::place::{Place, Work, failed};
use crate::quantize::{Parts, Quantization, Quantized};

/// A matrix to be quantized.
pub struct Quantize<'a> {
    /// The matrix.
    pub matrix: &'a Tensor,
    /// The format.
    pub format: Quantization,
    /// Which elements share a scale.
    pub direction: Direction,
    /// The shapes of what comes of it.
    pub parts: Parts,
}

impl Work for Quantize<'_> {
    type Output = Quantized;

    fn run<P: Place>(self, place: &P) -> Result<Quantized> {
        match self.matrix.dtype() {
            DType::BF16 => self.run_of::<bf16, P>(place),
            DType::F16 => self.run_of::<f16, P>(place),
            DType::F32 => self.run_of::<f32, P>(place),
            other => bail!("oxtile: the matrix is {other:?}: quantization takes BF16, F16, F32"),
        }
    }
}

/// What a matrix becomes: codes, scales, and the amax if the format needs one in between.
struct Buffers<C, S> {
    data: Buffer<C>,
    scales: Buffer<S>,
    amax: Buffer<f32>,
}

impl Quantize<'_> {
    fn run_of<T: Number, P: Place>(self, place: &P) -> Result<Quantized> {
        let guard = self.matrix.storage_and_layout();
        let (input, _loan) = place.read::<T>(place.storage(&guard.0)?, guard.1)?;
        let (runtime, stream, direction) = (place.runtime(), place.stream(), self.direction);
        match self.format {
            Quantization::Mxfp8 => self.fill(place, |shape, Buffers::<e4m3, ue8m0> { mut data, mut scales, amax }| {
                let casts = Mxfp8::<T>::new(runtime)?;
                match direction {
                    Direction::Rows => casts.quantize_rows(stream, input.view(), shape, data.view_mut(), scales.view_mut()),
                    Direction::Columns => casts.quantize_columns(stream, input.view(), shape, data.view_mut(), scales.view_mut()),
                }?;
                Ok(Buffers { data, scales, amax })
            }),
            Quantization::Nvfp4 => self.fill(place, |shape, Buffers::<e2m1x2, e4m3> { data, scales, mut amax }| {
                Amax::<T>::new(runtime)?.run(stream, input.view(), &mut amax)?;
                let mut tensor = Nvfp4Tensor { data, scales, amax, shape, direction };
                T::to_nvfp4(runtime, stream, &input, &mut tensor)?;
                let Nvfp4Tensor { data, scales, amax, .. } = tensor;
                Ok(Buffers { data, scales, amax })
            }),
            Quantization::Fp8 => self.fill(place, |shape, Buffers::<e4m3, f32> { mut data, mut scales, mut amax }| {
                let casts = CurrentScaling::<T>::new(runtime, ScaleOptions::default())?;
                Amax::<T>::new(runtime)?.run(stream, input.view(), &mut amax)?;
                if direction == Direction::Rows {
                    casts.cast(stream, input.view(), amax.view(), data.view_mut(), scales.view_mut())?;
                } else {
                    let mut codes = Buffer::uninitialised(stream, data.len())?;
                    casts.cast(stream, input.view(), amax.view(), codes.view_mut(), scales.view_mut())?;
                    casts.transpose(stream, codes.view(), shape, data.view_mut())?;
                }
                Ok(Buffers { data, scales, amax })
            }),
        }
    }

    /// Makes the parts of a result, which `cast` writes.
    fn fill<C: Element, S: Element, P: Place>(
        &self,
        place: &P,
        cast: impl FnOnce([u64; 2], Buffers<C, S>) -> oxtile::Result<Buffers<C, S>>,
    ) -> Result<Quantized> {
        let &Self { matrix, format, direction, ref parts } = self;
        let shape = matrix.dims2()?;
        let count = |shape: &[usize]| shape.iter().product::<usize>() as u64;
        let (mut codes, mut scales) = (place.allocate::<C>(count(&parts.codes))?, place.allocate::<S>(count(&parts.scales))?);
        let mut amax = place.allocate::<f32>(1)?;
        let ((data, of_codes), (of_data, of_scales)) = (place.write(&mut codes)?, place.write(&mut scales)?);
        let (largest, of_amax) = place.write(&mut amax)?;
        let buffers = Buffers { data, scales: of_data, amax: largest };
        let Buffers { data, scales: of_data, amax: largest } = cast([shape.0 as u64, shape.1 as u64], buffers).map_err(failed)?;
        drop((of_codes, of_scales, of_amax));
        let codes = tensor::<P>(place.give(codes, data)?, parts.codes.as_slice().into());
        let scales = tensor::<P>(place.give(scales, of_data)?, parts.scales.as_slice().into());
        let amax = parts.has_amax.then(|| place.give(amax, largest).map(|amax| tensor::<P>(amax, 1.into()))).transpose()?;
        Ok(Quantized { codes, scales, amax, format, direction, shape })
    }
}

/// A matrix to be restored.
#[derive(Clone, Copy)]
pub struct Dequantize<'a> {
    /// The matrix, whose parts were checked.
    pub quantized: &'a Quantized,
}

/// A matrix to be restored as elements of `T`.
pub struct Restore<'a, T> {
    quantized: &'a Quantized,
    element: PhantomData<fn() -> T>,
}

impl<'a> Dequantize<'a> {
    /// As elements of `T`.
    pub fn to<T>(self) -> Restore<'a, T> {
        Restore { quantized: self.quantized, element: PhantomData }
    }
}

impl<T: Number> Work for Restore<'_, T> {
    type Output = Tensor;

    fn run<P: Place>(self, place: &P) -> Result<Tensor> {
        let Quantized { codes, scales, amax, format, direction, shape } = self.quantized;
        let (direction, dims) = (*direction, *shape);
        let shape = [dims.0 as u64, dims.1 as u64];
        let mut memory = place.allocate::<T>(shape[0] * shape[1])?;
        let (mut output, of_output) = place.write(&mut memory)?;
        let (runtime, stream) = (place.runtime(), place.stream());
        let (codes, scales) = (codes.storage_and_layout(), scales.storage_and_layout());
        let (codes, scales) = ((place.storage(&codes.0)?, codes.1), (place.storage(&scales.0)?, scales.1));
        match format {
            Quantization::Mxfp8 => {
                let ((data, _data), (scales, _scales)) = (place.read(codes.0, codes.1)?, place.read(scales.0, scales.1)?);
                let tensor: Mxfp8Tensor = Mxfp8Tensor { data, scales, amax: (), shape, direction };
                Mxfp8::<T>::new(runtime).and_then(|casts| casts.dequantize(stream, &tensor, output.view_mut())).map_err(failed)?;
            }
            Quantization::Nvfp4 => {
                let Some(amax) = amax else { bail!("oxtile: Nvfp4 needs an amax") };
                let amax = amax.storage_and_layout();
                let ((data, _data), (scales, _scales)) = (place.read(codes.0, codes.1)?, place.read(scales.0, scales.1)?);
                let (amax, _amax) = place.read(place.storage(&amax.0)?, amax.1)?;
                let tensor = Nvfp4Tensor { data, scales, amax, shape, direction };
                T::of_nvfp4(runtime, stream, &tensor, &mut output).map_err(failed)?;
            }
            Quantization::Fp8 => {
                let ((data, _data), (scales, _scales)) = (place.read(codes.0, codes.1)?, place.read(scales.0, scales.1)?);
                let restore = || {
                    let casts = CurrentScaling::<T>::new(runtime, ScaleOptions::default())?;
                    let data = match direction {
                        Direction::Rows => data,
                        Direction::Columns => {
                            let mut turned = Buffer::uninitialised(stream, data.len())?;
                            casts.transpose(stream, data.view(), [shape[1], shape[0]], turned.view_mut())?;
                            turned
                        }
                    };
                    let tensor: Fp8Tensor = Fp8Tensor { data, scales, amax: (), shape, direction: Direction::Rows };
                    casts.dequantize(stream, &tensor, output.view_mut())
                };
                restore().map_err(failed)?;
            }
        }
        drop(of_output);
        Ok(tensor::<P>(place.give(memory, output)?, dims.into()))
    }
}

/// A number type with its kernels.
pub trait Number: Mxfp8Number<e4m3> + Nvfp4Number + Fp8Number<e4m3> + Element {
    /// Casts a matrix with the tensor's amax.
    fn to_nvfp4(runtime: &Runtime, stream: &Stream, input: &Buffer<Self>, tensor: &mut Nvfp4Tensor) -> oxtile::Result<()>;

    /// Restores a matrix.
    fn of_nvfp4(runtime: &Runtime, stream: &Stream, tensor: &Nvfp4Tensor, output: &mut Buffer<Self>) -> oxtile::Result<()>;
}

macro_rules! numbers {
    ($($t:ty)*) => { $(
        impl Number for $t {
            fn to_nvfp4(runtime: &Runtime, stream: &Stream, input: &Buffer<Self>, tensor: &mut Nvfp4Tensor) -> oxtile::Result<()> {
                if tensor.direction == Direction::Columns {
                    return Nvfp4Columns::<Self>::new(runtime)?.cast_columns(stream, input.view(), &RandomState::none(stream)?, tensor);
                }
                let Nvfp4Tensor { data, scales, amax, shape, .. } = tensor;
                Nvfp4::<Self>::new(runtime)?.quantize_rows(stream, input.view(), *shape, amax.view(), data.view_mut(), scales.view_mut())
            }

            fn of_nvfp4(runtime: &Runtime, stream: &Stream, tensor: &Nvfp4Tensor, output: &mut Buffer<Self>) -> oxtile::Result<()> {
                match tensor.direction {
                    Direction::Rows => Nvfp4::<Self>::new(runtime)?.dequantize(stream, tensor, output.view_mut()),
                    Direction::Columns => Nvfp4Columns::<Self>::new(runtime)?.dequantize_columns(stream, tensor, output.view_mut()),
                }
            }
        }
    )* };
}

numbers! { bf16 f16 f32 }
