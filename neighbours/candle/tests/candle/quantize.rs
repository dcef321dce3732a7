//! Codes and scales against those of the library on buffers of its own, and back.

use candle_core::{DType, Device, Result, Tensor};
use oxtile::num::{Pod, bf16, e4m3};
use oxtile::quantize::{Amax, CurrentScaling, Mxfp8, Nvfp4, ScaleOptions};
use oxtile::{Buffer, HostElement, Runtime, Stream};
use oxtile_candle::{Direction, Quantization, Quantized, quantize};

use crate::attention_block::numbers;
use crate::{devices, error};

const FORMATS: [Quantization; 3] = [Quantization::Mxfp8, Quantization::Nvfp4, Quantization::Fp8];
const DIRECTIONS: [Direction; 2] = [Direction::Rows, Direction::Columns];

fn bytes<T: HostElement<Device = T> + Pod>(buffer: &Buffer<T>, stream: &Stream) -> Vec<u8> {
    let elements = buffer.to_vec(stream).unwrap();
    // SAFETY: all bytes of elements without padding.
    unsafe { std::slice::from_raw_parts(elements.as_ptr().cast::<u8>(), size_of_val(&elements[..])) }.to_vec()
}

fn of_candle(quantized: &Quantized) -> Result<[Vec<u8>; 3]> {
    let bytes = |tensor: &Tensor| match tensor.dtype() {
        DType::F32 => Ok(tensor.flatten_all()?.to_vec1::<f32>()?.into_iter().flat_map(f32::to_le_bytes).collect()),
        _ => tensor.flatten_all()?.to_vec1::<u8>(),
    };
    Ok([bytes(&quantized.codes)?, bytes(&quantized.scales)?, quantized.amax.as_ref().map_or(Ok(Vec::new()), bytes)?])
}

#[test]
fn bytes_are_those_of_the_library() -> Result<()> {
    let runtime = Runtime::emulated_fast(1).unwrap();
    let stream = runtime.device(0).unwrap().stream().unwrap();
    let shape = [48, 160];
    let matrix = numbers(3, &[48, 160], 4.0, &Device::Cpu)?.to_dtype(DType::BF16)?;
    let elements: Vec<half::bf16> = matrix.flatten_all()?.to_vec1()?;
    let input = Buffer::<bf16>::from_slice(&stream, &elements).unwrap();
    for device in devices()? {
        let matrix = matrix.to_device(&device)?;
        for direction in DIRECTIONS {
            let expected = Mxfp8::<bf16, e4m3>::new(&runtime).unwrap().quantize(&stream, input.view(), shape, direction).unwrap();
            let found = of_candle(&quantize(&matrix, Quantization::Mxfp8, direction)?)?;
            assert_eq!(found, [bytes(&expected.data, &stream), bytes(&expected.scales, &stream), Vec::new()], "{direction:?}");
        }
        let expected = Nvfp4::<bf16>::new(&runtime).unwrap().quantize(&stream, input.view(), shape).unwrap();
        let found = of_candle(&quantize(&matrix, Quantization::Nvfp4, Direction::Rows)?)?;
        assert_eq!(found, [bytes(&expected.data, &stream), bytes(&expected.scales, &stream), bytes(&expected.amax, &stream)]);

        let casts = CurrentScaling::<bf16, e4m3>::new(&runtime, ScaleOptions::default()).unwrap();
        let pair = casts.quantize_both(&stream, input.view(), shape).unwrap();
        let scale = bytes(&pair.tensor.scales, &stream);
        for (direction, codes) in [(Direction::Rows, &pair.tensor.data), (Direction::Columns, &pair.transposed)] {
            let found = of_candle(&quantize(&matrix, Quantization::Fp8, direction)?)?;
            assert_eq!(found, [bytes(codes, &stream), scale.clone(), Vec::new()], "{direction:?}");
        }
        let mut amax = Buffer::<f32>::uninitialised(&stream, 1).unwrap();
        Amax::<bf16>::new(&runtime).unwrap().run(&stream, input.view(), &mut amax).unwrap();
        assert_eq!(of_candle(&quantize(&matrix, Quantization::Nvfp4, Direction::Columns)?)?[2], bytes(&amax, &stream));
    }
    Ok(())
}

#[test]
fn matrices_come_back() -> Result<()> {
    for device in devices()? {
        let matrix = numbers(4, &[64, 96], 2.0, &device)?;
        for dtype in [DType::F32, DType::F16, DType::BF16] {
            let matrix = matrix.to_dtype(dtype)?;
            for (format, direction) in FORMATS.into_iter().flat_map(|format| DIRECTIONS.map(|direction| (format, direction))) {
                let restored = quantize(&matrix, format, direction)?.dequantize(dtype)?;
                assert_eq!((restored.dtype(), restored.dims()), (dtype, matrix.dims()));
                // Half a step of the largest codes: of 6 it is 1 (E2M1), of 448 it is 16 (E4M3).
                let bound = if format == Quantization::Nvfp4 { 1.05 / 6.0 } else { 1.1 * 16.0 / 256.0 };
                let error = error(&restored, &matrix.to_dtype(DType::F32)?)?;
                assert!(error < bound && error > 0.001, "{format:?} {direction:?} {dtype:?}: {error}");
                // What is restored is in the format: quantized again, it stays.
                let again = quantize(&restored, format, direction)?.dequantize(dtype)?;
                if dtype == DType::F32 && format != Quantization::Nvfp4 {
                    assert!(crate::error(&again, &restored)? < 1e-6, "{format:?} {direction:?}");
                }
            }
        }
    }
    Ok(())
}

/// NaN comes back as NaN in its place; of MXFP8 in its block alone.
#[test]
fn nan_comes_back() -> Result<()> {
    for device in devices()? {
        let mut values = numbers(5, &[32, 64], 2.0, &device)?.flatten_all()?.to_vec1::<f32>()?;
        values[7 * 64 + 40] = f32::NAN;
        let matrix = Tensor::from_vec(values, (32, 64), &device)?;
        let restored = quantize(&matrix, Quantization::Mxfp8, Direction::Rows)?.dequantize(DType::F32)?.to_vec2::<f32>()?;
        for (row, values) in restored.iter().enumerate() {
            for (column, x) in values.iter().enumerate() {
                let is_of_its_block = row == 7 && column >= 32;
                assert!(x.is_finite() || is_of_its_block, "{row}, {column}: {x}");
                assert!(!(row == 7 && column == 40) || x.is_nan(), "{x}");
            }
        }
    }
    Ok(())
}
