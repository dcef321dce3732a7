//! Products of quantized matrices, each by the path that the device takes and by the others that it has.

use anyhow::Result;
use oxtile::quantize::gemm::{OperandFormat, Path, QuantizedGemm, QuantizedGemmConfig, QuantizedMatrix};
use oxtile::quantize::{BlockScaling, CurrentScaling, Direction, Fp8BlockTensor, Fp8Tensor, Mxfp8, Mxfp8Tensor, Nvfp4, Nvfp4Tensor};
use oxtile::quantize::{ScaleBlock, ScaleOptions};
use oxtile::runtime::Buffer;
use oxtile_tile::num::bf16;

use super::gemm::{self, FAMILY};
use crate::bench::{Bench, Gpu, Output, Prepared, Size};

const FP8: OperandFormat = OperandFormat::Fp8;
const BLOCKS: OperandFormat = OperandFormat::Fp8Block(ScaleBlock::Row);
const SQUARES: OperandFormat = OperandFormat::Fp8Block(ScaleBlock::Square);
const MXFP8: OperandFormat = OperandFormat::Mxfp8(Direction::Rows);
const NVFP4: OperandFormat = OperandFormat::Nvfp4(Direction::Rows);

/// Each format at a large shape.
pub fn benches(size: Size) -> Vec<Bench> {
    let shape = size.pick([8192, 8192, 8192], [16, 32, 64]);
    let of = |format| QuantizedGemmConfig::new(format, shape);
    let pinned = |format, path| QuantizedGemmConfig { path: Some(path), fast_accumulation: path == Path::Wgmma, ..of(format) };
    let mut benches = vec![
        bench("quantized_gemm fp8, as chosen", of(FP8)),
        bench("quantized_gemm fp8, wgmma", pinned(FP8, Path::Wgmma)),
        bench("quantized_gemm fp8, dequantized", pinned(FP8, Path::Dequantize)),
        bench("quantized_gemm fp8 1x128, as chosen", of(BLOCKS)),
        bench("quantized_gemm fp8 1x128, dequantized", pinned(BLOCKS, Path::Dequantize)),
        bench("quantized_gemm mxfp8, as chosen", of(MXFP8)),
        bench("quantized_gemm nvfp4, as chosen", of(NVFP4)),
    ];
    benches.extend(size.pick(BLOCK_SHAPES, &[[16, 32, 144]]).iter().map(|shape| of_squares(*shape)));
    benches
}

/// Activations in blocks times weights in squares: a large square, and products of DeepSeek-V3.
const BLOCK_SHAPES: &[[u64; 3]] = &[
    [8192, 8192, 8192],
    [4096, 7168, 16384],
    [4096, 4096, 7168],
    [4096, 24576, 1536],
    [4096, 7168, 2048],
    [4096, 2112, 7168],
    [128, 7168, 16384],
    [64, 24576, 1536],
    [64, 7168, 16384],
    [64, 2112, 7168],
];

/// On `wgmma`, beside cuBLASLt where it takes the product, and beside our product of bf16.
fn of_squares(shape: [u64; 3]) -> Bench {
    let config = QuantizedGemmConfig { b: SQUARES, path: Some(Path::Wgmma), ..QuantizedGemmConfig::new(BLOCKS, shape) };
    let prepare = move |gpu: &Gpu| {
        let mut prepared = prepare(gpu, config)?;
        let library = QuantizedGemmConfig { path: Some(Path::CublasLt), ..config };
        if library.choose::<bf16>(&gpu.device).is_ok() {
            prepared = prepared.against("cuBLASLt", self::prepare(gpu, library)?);
        }
        Ok(prepared.against("gemm bf16 nt", gemm::prepare_nt(gpu, shape)?))
    };
    Bench { prepare: Box::new(prepare), ..bench("quantized_gemm fp8 1x128 by squares, wgmma", config) }
}

fn bench(kernel: &'static str, config: QuantizedGemmConfig) -> Bench {
    let QuantizedGemmConfig { m, n, k, .. } = config;
    let code = if config.a == NVFP4 { 0.5 } else { 1.0 };
    Bench {
        family: FAMILY,
        kernel,
        shape: format!("{m}x{n}x{k}"),
        dimensions: vec![m, n, k],
        bytes: (code * ((m + n) * k) as f64) as u64 + 2 * m * n,
        flops: 2 * m * n * k,
        sets: 1,
        ceiling: None,
        peers: &[],
        prepare: Box::new(move |gpu| prepare(gpu, config)),
    }
}

/// An operand in any of the formats.
enum Quantized {
    Fp8(Fp8Tensor),
    Fp8Block(Fp8BlockTensor),
    Mxfp8(Mxfp8Tensor),
    Nvfp4(Nvfp4Tensor),
}

impl Quantized {
    fn cast(gpu: &Gpu, format: OperandFormat, shape: [u64; 2], set: usize) -> Result<Self> {
        let (runtime, stream) = (&gpu.runtime, &gpu.stream);
        let input = Buffer::<bf16>::from_slice(stream, &gpu.pattern.fill(set, shape[0] * shape[1]))?;
        Ok(match format {
            OperandFormat::Fp8 => Self::Fp8(CurrentScaling::<bf16>::new(runtime, ScaleOptions::default())?.quantize(stream, input.view())?),
            OperandFormat::Fp8Block(block) => {
                Self::Fp8Block(BlockScaling::<bf16>::new(runtime, ScaleOptions::default())?.quantize(stream, input.view(), shape, block)?)
            }
            OperandFormat::Mxfp8(direction) => {
                Self::Mxfp8(Mxfp8::<bf16>::new(runtime)?.quantize(stream, input.view(), shape, direction)?)
            }
            OperandFormat::Nvfp4(_) => Self::Nvfp4(Nvfp4::<bf16>::new(runtime)?.quantize(stream, input.view(), shape)?),
        })
    }

    fn matrix(&self) -> QuantizedMatrix<'_> {
        match self {
            Self::Fp8(tensor) => tensor.into(),
            Self::Fp8Block(tensor) => tensor.into(),
            Self::Mxfp8(tensor) => tensor.into(),
            Self::Nvfp4(tensor) => tensor.into(),
        }
    }
}

fn prepare(gpu: &Gpu, config: QuantizedGemmConfig) -> Result<Prepared> {
    let QuantizedGemmConfig { m, n, k, a, b, .. } = config;
    let (left, right) = (Quantized::cast(gpu, a, [m, k], 0)?, Quantized::cast(gpu, b, [n, k], 1)?);
    let mut d = Buffer::<bf16>::uninitialised(&gpu.stream, m * n)?;
    let gemm = QuantizedGemm::<bf16>::new(&gpu.device, config)?;
    let mut scratch = gemm.scratch(&gpu.stream)?;
    let graph = {
        let mut bound = gemm.bind(&gpu.stream, left.matrix(), right.matrix(), d.view_mut(), &mut scratch)?;
        Prepared::capture(gpu, || bound.run(&gpu.stream))?
    };
    Ok(Prepared::new(graph, move |stream| {
        let values: Vec<half::bf16> = d.to_vec_as(stream)?;
        Ok(vec![Output { name: "d", bytes: values.iter().flat_map(|value| value.to_le_bytes()).collect() }])
    }))
}
