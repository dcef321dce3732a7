//! Products of 8-bit operands of every layout. Those that do not lie along k are transposed in our call, and by a kernel of ours before the call of cuBLASLt, which takes
//! operands along k alone.

use anyhow::Result;
use oxtile::gemm::{Gemm, GemmConfig, GemmOperands};
use oxtile::quantize::gemm::{OperandFormat, Path, QuantizedGemm, QuantizedGemmConfig, QuantizedMatrix, Scratch};
use oxtile::runtime::{Buffer, Loaded};
use oxtile_kernels::fp8::{Fp8CastTranspose, Fp8CastTransposeArgs, Fp8Transpose, Fp8TransposeArgs, ScaleOptions};
use oxtile_kernels::matrix::MatrixArgument;
use oxtile_tile::num::{bf16, e4m3, e5m2};

use super::gemm::{self, Shape, Value, config, operand};
use crate::bench::{Bench, Gpu, Prepared, Size};

/// Squares, and a layer of Llama 3 8B with 8192 tokens: the gradients of its weights, of which all lie across the sum, and of its inputs.
pub fn benches(size: Size) -> Vec<Bench> {
    let [small, large]: [Shape; 2] = size.pick([([4096; 3], 2), ([8192; 3], 2)], [([16, 32, 48], 1), ([136, 264, 64], 2)]);
    let [weights, inputs] = size.pick([[4096, 14336, 8192], [8192, 4096, 14336]], [[32, 48, 64], [64, 32, 48]]).map(|shape| (shape, 1));
    let squares = [small, large].into_iter().flat_map(|shape| {
        [
            bench::<e4m3>("gemm e4m3 nn", &["gemm_e4m3_nn"], shape),
            bench::<e4m3>("gemm e4m3 tn", &["gemm_e4m3_tn"], shape),
            bench::<e4m3>("gemm e4m3 tt", &["gemm_e4m3_tt"], shape),
            bench::<(e4m3, e5m2)>("gemm e4m3 by e5m2 nt", &["gemm_e4m3_e5m2_nt"], shape),
            bench::<(e4m3, e5m2)>("gemm e4m3 by e5m2 nn", &["gemm_e4m3_e5m2_nn"], shape),
        ]
    });
    let layer = [
        bench::<(e5m2, e4m3)>("gemm e5m2 by e4m3 tn", &["gemm_e5m2_e4m3_tn"], weights),
        bench::<(e5m2, e4m3)>("gemm e5m2 by e4m3 nn", &["gemm_e5m2_e4m3_nn"], inputs),
    ];
    squares.chain(layer).collect()
}

/// The product beside cuBLASLt's of e4m3 along k, after what brings the operands there: the cast from bf16 that transposes, or the transposition of codes, as in our call.
fn bench<T: GemmOperands<bf16, A: Value, B: Value>>(kernel: &'static str, peers: &'static [&'static str], shape: Shape) -> Bench {
    let (config, sets) = (config(kernel, shape), shape.1);
    let prepare = move |gpu: &Gpu| {
        let mut prepared = gemm::prepare::<T>(gpu, &Gemm::new(&gpu.runtime, config)?, config, sets)?;
        if library(config).choose::<bf16>(&gpu.device).is_ok() && (config.transpose_a || !config.transpose_b) {
            for (label, before) in
                [("fp8_cast_transpose, then cuBLASLt", Before::Cast), ("fp8_transpose, then cuBLASLt", Before::Transpose)]
            {
                prepared = prepared.against(label, after(gpu, config, sets, before)?);
            }
        }
        Ok(prepared)
    };
    Bench { prepare: Box::new(prepare), ..gemm::bench::<T>(kernel, peers, shape) }
}

fn library(GemmConfig { m, n, k, .. }: GemmConfig) -> QuantizedGemmConfig {
    QuantizedGemmConfig { path: Some(Path::CublasLt), fast_accumulation: true, ..QuantizedGemmConfig::new(OperandFormat::Fp8, [m, n, k]) }
}

/// What brings an operand along k.
#[derive(Clone, Copy)]
enum Before {
    Cast,
    Transpose,
}

/// An operand as it lies, `[k, outer]`, in both formats, and along k.
struct Across {
    shape: [u64; 2],
    wide: Buffer<bf16>,
    stored: Buffer<e4m3>,
}

/// An operand for the library.
struct Codes {
    across: Option<Across>,
    along_k: Buffer<e4m3>,
}

impl Codes {
    fn new(gpu: &Gpu, buffer: usize, shape @ [k, outer]: [u64; 2], lies_across: bool) -> Result<Self> {
        if !lies_across {
            return Ok(Self { across: None, along_k: operand(gpu, buffer, k * outer)? });
        }
        let (wide, stored) = (operand(gpu, buffer, k * outer)?, operand(gpu, buffer, k * outer)?);
        Ok(Self { across: Some(Across { shape, wide, stored }), along_k: Buffer::uninitialised(&gpu.stream, k * outer)? })
    }
}

/// The kernels before the library, and factors of 1.
struct Steps {
    cast: Loaded<Fp8CastTranspose<bf16, e4m3>>,
    transpose: Loaded<Fp8Transpose<e4m3>>,
    /// An amax that makes the scale 1.
    amax: Buffer<f32>,
    one: Buffer<f32>,
    scale_inverse: Buffer<f32>,
}

impl Steps {
    fn new(gpu: &Gpu) -> Result<Self> {
        let (runtime, stream) = (&gpu.runtime, &gpu.stream);
        let [amax, one, scale_inverse] = [448.0_f32, 1.0, 1.0].map(|value| Buffer::from_slice(stream, &[value]));
        Ok(Self { cast: runtime.load()?, transpose: runtime.load()?, amax: amax?, one: one?, scale_inverse: scale_inverse? })
    }

    fn run(&mut self, gpu: &Gpu, before: Before, Codes { across, along_k }: &mut Codes) -> oxtile::runtime::Result<()> {
        let Some(Across { shape, wide, stored }) = across else { return Ok(()) };
        let transposed = along_k.view_mut();
        match before {
            Before::Cast => {
                let (input, data) = (MatrixArgument::new(wide.view(), *shape), stored.view_mut());
                let (amax, scale_inverse, options) = (self.amax.view(), self.scale_inverse.view_mut(), ScaleOptions::default());
                self.cast.launch(&gpu.stream, Fp8CastTransposeArgs { input, amax, data, transposed, scale_inverse, options })
            }
            Before::Transpose => {
                let input = MatrixArgument::new(stored.view(), *shape);
                self.transpose.launch(&gpu.stream, Fp8TransposeArgs { input, transposed })
            }
        }
    }
}

/// cuBLASLt's product, after what brings the operands along k, in one graph.
fn after(gpu: &Gpu, config: GemmConfig, sets: usize, before: Before) -> Result<Prepared> {
    let GemmConfig { m, n, k, transpose_a, transpose_b, .. } = config;
    let product = QuantizedGemm::<bf16>::new(&gpu.device, library(config))?;
    let set = |set: usize| -> Result<([Codes; 2], Buffer<bf16>, Scratch)> {
        let operands = [Codes::new(gpu, 2 * set, [k, m], transpose_a)?, Codes::new(gpu, 2 * set + 1, [k, n], !transpose_b)?];
        Ok((operands, Buffer::uninitialised(&gpu.stream, m * n)?, product.scratch(&gpu.stream)?))
    };
    let (mut steps, mut sets) = (Steps::new(gpu)?, (0..sets).map(set).collect::<Result<Vec<_>>>()?);
    let graph = Prepared::capture(gpu, || {
        sets.iter_mut().try_for_each(|([a, b], d, scratch)| {
            steps.run(gpu, before, a)?;
            steps.run(gpu, before, b)?;
            let [a, b] = [a, b].map(|codes| QuantizedMatrix::Fp8 { data: codes.along_k.view(), scale_inverse: steps.one.view() });
            product.bind(&gpu.stream, a, b, d.view_mut(), scratch)?.run(&gpu.stream)
        })
    })?;
    Ok(Prepared::new(graph, |_| Ok(Vec::new())))
}
