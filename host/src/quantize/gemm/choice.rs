//! Which path a multiplication takes, and why.

use std::fmt;

use oxtile_tile::num::{Element, bf16, e4m3};

use crate::choice::Choice;
use crate::gemm::{GemmConfig, GemmElement, GemmKernel};
use crate::quantize::format::{Direction, ScaleBlock};
use crate::runtime::matmul::MatmulMemory;
use crate::runtime::{Device, Error, Result};

/// What is multiplied: `D = alpha A B^T + beta D`. Made complete by `..QuantizedGemmConfig::new(format, [m, n, k])`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct QuantizedGemmConfig {
    /// Rows of `A` and `D`.
    pub m: u64,
    /// Rows of `B`, columns of `D`.
    pub n: u64,
    /// Columns of `A` and `B`.
    pub k: u64,
    /// Format of `A`.
    pub a: OperandFormat,
    /// Format of `B`.
    pub b: OperandFormat,
    /// Factor of the product.
    pub alpha: f32,
    /// Factor of `D` as it was; 0 leaves it unread.
    pub beta: f32,
    /// Whether all products of FP8 codes with one scale may be summed inside the tensor cores, in about 14 bits. If not, which is the default, the library brings
    /// their sums to `f32` on the way, and the kernel on `wgmma` is not taken. Operands of other formats have no such choice: of codes in blocks the
    /// tensor cores sum the 128 products of a block so, and `f32` holds the sum of the blocks; what is dequantized is summed as other `bf16`.
    pub fast_accumulation: bool,
    /// The path to take; none for the first that can be taken.
    pub path: Option<Path>,
}

/// The format of an operand, E4M3 or E2M1, its blocks along `k`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OperandFormat {
    /// FP8 with one scale.
    Fp8,
    /// FP8 with one scale for 128 neighbours along `k`, or for a 128x128 square.
    Fp8Block(ScaleBlock),
    /// MXFP8: rowwise of `[m, k]`, or columnwise of the matrix that is stored as its transpose, `[k, m]`.
    Mxfp8(Direction),
    /// NVFP4, of either direction: columnwise codes are those of the transpose.
    Nvfp4(Direction),
}

/// A way to multiply.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Path {
    /// cuBLASLt multiplies the codes. Of [`OperandFormat::Mxfp8`] and [`OperandFormat::Nvfp4`], which begin at sm_100, the call is built and
    /// its description tested; no such GPU has run it yet.
    CublasLt,
    /// [`Gemm`](crate::gemm::Gemm) multiplies the codes, on `wgmma`.
    Wgmma,
    /// Both operands are dequantized to `bf16`, then [`Gemm`](crate::gemm::Gemm) multiplies.
    Dequantize,
    /// Both operands are dequantized to `bf16`, then cuBLASLt multiplies.
    DequantizeCublasLt,
    /// Both operands are dequantized to `bf16`, then a kernel on `mma.sync` multiplies ([`Gemm::portable`](crate::gemm::Gemm::portable)),
    /// on any GPU. It is taken where none of the others can be.
    DequantizePortable,
}

impl Path {
    /// All, in the order in which they are tried.
    pub const ALL: [Self; 5] = [Self::CublasLt, Self::Wgmma, Self::Dequantize, Self::DequantizeCublasLt, Self::DequantizePortable];
}

/// The facts on which paths depend.
pub(super) struct Facts {
    pub capability: (u32, u32),
    pub multiprocessors: u32,
    /// The library's version, or why there is none.
    pub cublaslt: Result<usize, String>,
}

impl fmt::Display for OperandFormat {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Fp8 => "FP8",
            Self::Fp8Block(ScaleBlock::Row) => "FP8 in blocks of 1x128",
            Self::Fp8Block(ScaleBlock::Square) => "FP8 in squares of 128x128",
            Self::Mxfp8(_) => "MXFP8",
            Self::Nvfp4(_) => "NVFP4",
        })
    }
}

impl OperandFormat {
    /// Whether rows of the stored codes run along `k`.
    pub(super) fn lies_along_k(self) -> bool {
        self != Self::Mxfp8(Direction::Columns)
    }
}

impl QuantizedGemmConfig {
    /// The plain product of two matrices of one format, `A` `[m, k]` and `B` `[n, k]`.
    pub fn new(format: OperandFormat, [m, n, k]: [u64; 3]) -> Self {
        Self { m, n, k, a: format, b: format, alpha: 1.0, beta: 0.0, fast_accumulation: false, path: None }
    }

    /// The path for results of `O` on a device, and why the ones before it are not taken.
    ///
    /// # Errors
    /// [`Error::Invalid`] for a size beyond 2^31 - 1, and if the pinned path is refused: with the reason.
    pub fn choose<O: Element>(&self, device: &Device) -> Result<Choice<Path>>
    where
        bf16: GemmElement<O>,
        e4m3: GemmElement<O>,
    {
        let backend = &device.runtime.backend;
        let multiprocessors = device.limits().multiprocessors;
        let facts = Facts { capability: device.capability(), multiprocessors, cublaslt: backend.cublaslt() };
        self.choose_by(&facts, |path, why| {
            let Some(matmul) = self.matmul::<O>(path) else { return Ok(Ok(why)) };
            let plan = backend.plan_matmul(device.index(), &matmul, &MatmulMemory::ANY)?;
            Ok(plan.map(|_| why).ok_or_else(|| "cuBLASLt has no algorithm for this shape".to_owned()))
        })
    }

    /// A path that the rules allow is taken only if `confirm` agrees.
    pub(super) fn choose_by<O: Element>(
        &self,
        facts: &Facts,
        confirm: impl Fn(Path, String) -> Result<Result<String, String>>,
    ) -> Result<Choice<Path>>
    where
        bf16: GemmElement<O>,
        e4m3: GemmElement<O>,
    {
        let mut refused = Vec::new();
        for path in Path::ALL.into_iter().filter(|path| self.path.is_none_or(|pinned| pinned == *path)) {
            let answer = match self.check::<O>(path, facts)? {
                Ok(why) => confirm(path, why)?,
                refusal => refusal,
            };
            match answer {
                Ok(why) => return Ok(Choice { decision: path, kernel: self.product_kernel::<O>(path, facts)?, why, refused }),
                Err(why) => refused.push((path, why)),
            }
        }
        // The last path refuses nothing, so a path is pinned.
        let reasons: Vec<_> = refused.iter().map(|(path, why)| format!("{path:?}: {why}")).collect();
        let why = format!("the pinned path cannot be taken: {}: leave `path` open, or pin another", reasons.join("; "));
        Err(Error::Invalid { what: "QuantizedGemmConfig", why })
    }

    /// Why a path can be taken, or why it cannot.
    fn check<O: Element>(&self, path: Path, facts: &Facts) -> Result<Result<String, String>>
    where
        bf16: GemmElement<O>,
        e4m3: GemmElement<O>,
    {
        // Sizes are checked whatever the path.
        let product = self.wide_product().choose::<bf16, O>()?;
        let is_empty = self.m == 0 || self.n == 0 || self.k == 0;
        let sm = facts.capability.0 * 10 + facts.capability.1;
        let hopper = |what: &str| if sm == 90 { Ok(()) } else { Err(format!("{what} needs sm_90, this is sm_{sm}")) };
        Ok(match path {
            Path::CublasLt | Path::DequantizeCublasLt if is_empty => Err("a dimension is 0".to_owned()),
            Path::CublasLt => self.check_cublaslt::<O>(sm, facts),
            Path::Wgmma if self.is_in_blocks() => match self.narrow_product().choose_blocks::<e4m3, O>(facts.multiprocessors) {
                Ok((choice, _)) => hopper("wgmma").map(|()| format!("FP8 codes in blocks on tensor cores, {}", choice.why)),
                Err(why) => Err(why),
            },
            Path::Wgmma if !matches!((self.a, self.b), (OperandFormat::Fp8, OperandFormat::Fp8)) => {
                let [row, square] = [ScaleBlock::Row, ScaleBlock::Square].map(OperandFormat::Fp8Block);
                Err(format!("the kernels take FP8 with one scale, or {row} times {square}, not {} and {}", self.a, self.b))
            }
            Path::Wgmma if !self.fast_accumulation => Err("the kernel sums in 14 bits: allow it by `fast_accumulation`".to_owned()),
            Path::Wgmma => {
                let choice = self.narrow_product().choose::<e4m3, O>()?;
                let fits = matches!(choice.decision, GemmKernel::Wgmma { .. });
                hopper("wgmma").and(if fits { Ok(format!("FP8 codes on tensor cores, {}", choice.why)) } else { Err(choice.why) })
            }
            Path::Dequantize => {
                let fits =
                    if matches!(product.decision, GemmKernel::Wgmma { .. }) { hopper("the bf16 product, on wgmma,") } else { Ok(()) };
                fits.map(|()| format!("any format in bf16, {}", product.why))
            }
            Path::DequantizeCublasLt if sm < 80 => Err(format!("bf16 tensor cores begin at sm_80, this is sm_{sm}")),
            Path::DequantizeCublasLt => facts.cublaslt.clone().map(|version| format!("any format in bf16, {}", library(version))),
            Path::DequantizePortable => {
                let why = self.wide_product().choose_portable::<bf16, O>()?.why;
                Ok(format!("any format in bf16, {why}: install cuBLASLt for a faster product"))
            }
        })
    }

    /// The kernel that multiplies on a path; none if the library does.
    fn product_kernel<O: Element>(&self, path: Path, facts: &Facts) -> Result<Option<&'static str>>
    where
        bf16: GemmElement<O>,
        e4m3: GemmElement<O>,
    {
        Ok(match path {
            Path::CublasLt | Path::DequantizeCublasLt => None,
            Path::Wgmma if self.is_in_blocks() => {
                self.narrow_product().choose_blocks::<e4m3, O>(facts.multiprocessors).ok().and_then(|(choice, _)| choice.kernel)
            }
            Path::Wgmma => self.narrow_product().choose::<e4m3, O>()?.kernel,
            Path::Dequantize => self.wide_product().choose::<bf16, O>()?.kernel,
            Path::DequantizePortable => self.wide_product().choose_portable::<bf16, O>()?.kernel,
        })
    }

    /// By the tables of cuBLAS Library, 2.1.5 and 3.4 (`cublasLtMatmul`).
    fn check_cublaslt<O>(&self, sm: u32, facts: &Facts) -> Result<String, String> {
        use OperandFormat::{Fp8, Fp8Block, Mxfp8, Nvfp4};
        let version = facts.cublaslt.clone()?;
        let multiple = match (self.a, self.b) {
            (Fp8, Fp8) if sm >= 89 => 16,
            (Fp8, Fp8) => return Err(format!("FP8 tensor cores begin at sm_89, this is sm_{sm}")),
            (Fp8Block(ScaleBlock::Square), Fp8Block(ScaleBlock::Square)) => {
                return Err("cuBLASLt takes squares for one operand at most".to_owned());
            }
            (Fp8Block(_), Fp8Block(_)) if sm == 90 => 16,
            (Fp8Block(_), Fp8Block(_)) => return Err(format!("cuBLASLt takes FP8 in blocks of 128 on sm_90 alone, this is sm_{sm}")),
            (Mxfp8(_), Mxfp8(_)) if sm >= 100 => 32,
            (Nvfp4(_), Nvfp4(_)) if sm >= 100 => 32,
            (Mxfp8(_), Mxfp8(_)) | (Nvfp4(_), Nvfp4(_)) => {
                return Err(format!("tensor cores take {} from sm_100 on, this is sm_{sm}", self.a));
            }
            (a, b) => return Err(format!("cuBLASLt takes operands of one format, not {a} and {b}")),
        };
        // Rows of 16 bytes along every stored dimension.
        let stored_along = |along_k: bool, outer: (&'static str, u64)| if along_k { ("k", self.k) } else { outer };
        let rows = [
            (stored_along(self.a.lies_along_k(), ("m", self.m)), multiple),
            (stored_along(self.b.lies_along_k(), ("n", self.n)), multiple),
            (("k", self.k), multiple),
            (("n", self.n), 16 / size_of::<O>() as u64),
            (("n", self.n), 16),
        ];
        match rows.into_iter().find(|((_, size), multiple)| !size.is_multiple_of(*multiple)) {
            Some(((name, size), multiple)) => Err(format!("{name} is {size}, no multiple of {multiple}, which cuBLASLt asks for")),
            None => Ok(format!("{} codes on tensor cores, {}", self.a, library(version))),
        }
    }

    /// Whether the operands are what the kernel of blocks takes.
    pub(super) fn is_in_blocks(&self) -> bool {
        (self.a, self.b) == (OperandFormat::Fp8Block(ScaleBlock::Row), OperandFormat::Fp8Block(ScaleBlock::Square))
    }

    /// The product of the dequantized operands.
    pub(super) fn wide_product(&self) -> GemmConfig {
        let (transpose_a, transpose_b) = (!self.a.lies_along_k(), self.b.lies_along_k());
        GemmConfig { transpose_a, transpose_b, ..self.narrow_product() }
    }

    /// The product of the codes.
    pub(super) fn narrow_product(&self) -> GemmConfig {
        let Self { m, n, k, alpha, beta, .. } = *self;
        GemmConfig { m, n, k, alpha, beta, transpose_b: true, ..GemmConfig::default() }
    }
}

fn library(version: usize) -> String {
    format!("cuBLASLt {}.{}", version / 10_000, version / 100 % 100)
}

#[cfg(test)]
mod tests {
    use super::*;
    use Path::*;

    const MXFP8: OperandFormat = OperandFormat::Mxfp8(Direction::Rows);
    const NVFP4: OperandFormat = OperandFormat::Nvfp4(Direction::Rows);
    const ROWS: OperandFormat = OperandFormat::Fp8Block(ScaleBlock::Row);
    const SQUARES: OperandFormat = OperandFormat::Fp8Block(ScaleBlock::Square);

    fn choose(config: QuantizedGemmConfig, capability: (u32, u32), library: bool) -> Result<Choice<Path>> {
        let cublaslt = if library { Ok(13_01_00) } else { Err("libcublasLt was not found".to_owned()) };
        config.choose_by::<bf16>(&Facts { capability, multiprocessors: 132, cublaslt }, |_, why| Ok(Ok(why)))
    }

    fn path(format: OperandFormat, capability: (u32, u32), library: bool) -> Path {
        choose(QuantizedGemmConfig::new(format, [64, 128, 256]), capability, library).unwrap().decision
    }

    #[test]
    fn each_format_takes_what_the_gpu_has() {
        for (format, paths) in [
            (OperandFormat::Fp8, [DequantizeCublasLt, CublasLt, CublasLt, CublasLt]),
            (ROWS, [DequantizeCublasLt, DequantizeCublasLt, CublasLt, DequantizeCublasLt]),
            (SQUARES, [DequantizeCublasLt, DequantizeCublasLt, Dequantize, DequantizeCublasLt]),
            (MXFP8, [DequantizeCublasLt, DequantizeCublasLt, Dequantize, CublasLt]),
            (OperandFormat::Mxfp8(Direction::Columns), [DequantizeCublasLt, DequantizeCublasLt, Dequantize, CublasLt]),
            (NVFP4, [DequantizeCublasLt, DequantizeCublasLt, Dequantize, CublasLt]),
        ] {
            let found = [(8, 0), (8, 9), (9, 0), (10, 0)].map(|capability| path(format, capability, true));
            assert_eq!(found, paths, "{format}");
        }
    }

    #[test]
    fn without_the_library_hopper_dequantizes_unless_sums_may_be_short() {
        let config = QuantizedGemmConfig::new(OperandFormat::Fp8, [64, 128, 256]);
        let choice = choose(config, (9, 0), false).unwrap();
        assert_eq!(choice.decision, Dequantize);
        assert_eq!(choice.refused[0], (CublasLt, "libcublasLt was not found".to_owned()));
        assert!(choice.refused[1].1.contains("fast_accumulation"), "{choice:?}");
        let fast = QuantizedGemmConfig { fast_accumulation: true, ..config };
        let choice = choose(fast, (9, 0), false).unwrap();
        assert_eq!(choice.decision, Wgmma);
        assert!(choice.kernel.is_some_and(|kernel| kernel.starts_with("gemm__e4m3__e4m3__depth128__bf16")), "{choice:?}");
        assert_eq!(choose(config, (9, 0), true).unwrap().kernel, None);
    }

    #[test]
    fn without_the_library_hopper_multiplies_blocks_by_squares_and_no_other_pair() {
        let blocks = QuantizedGemmConfig { b: SQUARES, ..QuantizedGemmConfig::new(ROWS, [64, 128, 256]) };
        let choice = choose(blocks, (9, 0), false).unwrap();
        assert_eq!((choice.decision, choice.kernel), (Wgmma, Some("gemm_blocks__bf16__width64__tile64x128")));
        assert!(choice.why.starts_with("FP8 codes in blocks on tensor cores, 64 by 128 tiles on wgmma"), "{choice:?}");
        let many = choose(QuantizedGemmConfig { m: 4096, n: 7168, k: 2048, ..blocks }, (9, 0), false).unwrap();
        assert_eq!(many.kernel, Some("gemm_blocks__bf16__width64__tile128x128"));
        assert_eq!(choose(blocks, (9, 0), true).unwrap().decision, CublasLt);
        let refusal = |config: QuantizedGemmConfig, capability| {
            let choice = choose(config, capability, false).unwrap();
            choice.refused.into_iter().find(|(path, _)| *path == Wgmma).map(|(_, why)| why).unwrap_or_default()
        };
        assert_eq!(refusal(blocks, (10, 0)), "wgmma needs sm_90, this is sm_100");
        assert!(refusal(QuantizedGemmConfig { k: 40, ..blocks }, (9, 0)).starts_with("k is 40, no multiple of 16"));
        let pairs = "the kernels take FP8 with one scale, or FP8 in blocks of 1x128 times FP8 in squares of 128x128, not ";
        assert_eq!(refusal(QuantizedGemmConfig { a: SQUARES, ..blocks }, (9, 0)), format!("{pairs}{SQUARES} and {SQUARES}"));
        assert_eq!(refusal(QuantizedGemmConfig { a: SQUARES, b: ROWS, ..blocks }, (9, 0)), format!("{pairs}{SQUARES} and {ROWS}"));
        assert_eq!(refusal(QuantizedGemmConfig { b: ROWS, ..blocks }, (9, 0)), format!("{pairs}{ROWS} and {ROWS}"));
    }

    #[test]
    fn blocks_are_divided_among_the_multiprocessors_of_the_device() {
        let blocks = QuantizedGemmConfig { b: SQUARES, ..QuantizedGemmConfig::new(ROWS, [128, 128, 8192]) };
        let why = |multiprocessors| {
            let facts = Facts { capability: (9, 0), multiprocessors, cublaslt: Err("absent".to_owned()) };
            blocks.choose_by::<bf16>(&facts, |_, why| Ok(Ok(why))).unwrap().why
        };
        assert!(why(132).contains("parts along k"), "{}", why(132));
        assert!(!why(1).contains("parts along k"), "{}", why(1));
    }

    #[test]
    fn without_library_and_wgmma_there_is_a_path_still() {
        for format in [OperandFormat::Fp8, ROWS, SQUARES, MXFP8, NVFP4] {
            for capability in [(8, 0), (8, 6), (8, 9), (10, 0), (12, 0)] {
                let choice = choose(QuantizedGemmConfig::new(format, [64, 128, 256]), capability, false).unwrap();
                assert_eq!(choice.decision, DequantizePortable, "{format} on {capability:?}");
                assert!(choice.why.contains("install cuBLASLt"), "{choice:?}");
                assert_eq!(choice.kernel, Some("gemm_portable__bf16__bf16__aligned"));
                let of = |path| choice.refused.iter().find(|refused| refused.0 == path).map(|(_, why)| why.as_str());
                assert!(of(Dequantize).is_some_and(|why| why.contains("needs sm_90")), "{choice:?}");
                assert_eq!(of(DequantizeCublasLt), Some("libcublasLt was not found"));
            }
        }
        // Operands that TMA cannot address go to the same kernel by another path.
        assert_eq!(choose(QuantizedGemmConfig::new(OperandFormat::Fp8, [5, 7, 40]), (8, 0), false).unwrap().decision, Dequantize);
        let pinned = QuantizedGemmConfig { path: Some(DequantizePortable), ..QuantizedGemmConfig::new(OperandFormat::Fp8, [64, 128, 256]) };
        assert_eq!(choose(pinned, (9, 0), true).unwrap().decision, DequantizePortable);
    }

    #[test]
    fn shapes_and_mixtures_are_refused_with_the_reason() {
        let reason = |config: QuantizedGemmConfig| {
            let choice = choose(config, (10, 0), true).unwrap();
            choice.refused.into_iter().find(|(path, _)| *path == CublasLt).map(|(_, why)| why).unwrap_or_default()
        };
        let fp8 = QuantizedGemmConfig::new(OperandFormat::Fp8, [64, 128, 256]);
        assert_eq!(reason(fp8), "");
        assert_eq!(reason(QuantizedGemmConfig { m: 7, ..fp8 }), "");
        assert_eq!(reason(QuantizedGemmConfig { k: 40, ..fp8 }), "k is 40, no multiple of 16, which cuBLASLt asks for");
        assert_eq!(reason(QuantizedGemmConfig { n: 24, ..fp8 }), "n is 24, no multiple of 16, which cuBLASLt asks for");
        assert_eq!(reason(QuantizedGemmConfig { b: MXFP8, ..fp8 }), "cuBLASLt takes operands of one format, not FP8 and MXFP8");
        assert_eq!(reason(QuantizedGemmConfig { k: 0, ..fp8 }), "a dimension is 0");
        let columns =
            QuantizedGemmConfig { m: 40, a: OperandFormat::Mxfp8(Direction::Columns), ..QuantizedGemmConfig::new(MXFP8, [64, 128, 256]) };
        assert_eq!(reason(columns), "m is 40, no multiple of 32, which cuBLASLt asks for");
    }

    #[test]
    fn a_pinned_path_is_taken_or_refused() {
        let config = QuantizedGemmConfig { path: Some(Dequantize), ..QuantizedGemmConfig::new(OperandFormat::Fp8, [64, 128, 256]) };
        assert_eq!(choose(config, (9, 0), true).unwrap().decision, Dequantize);
        let error = choose(QuantizedGemmConfig { path: Some(Wgmma), ..config }, (9, 0), true).unwrap_err().to_string();
        assert!(error.contains("the pinned path cannot be taken: Wgmma: the kernel sums in 14 bits"), "{error}");
        let error = choose(QuantizedGemmConfig { m: 1 << 31, ..config }, (9, 0), true).unwrap_err().to_string();
        assert!(error.contains("m is 2147483648"), "{error}");
    }

    #[test]
    fn the_library_has_the_last_word() {
        let config = QuantizedGemmConfig::new(OperandFormat::Fp8, [64, 128, 256]);
        let facts = Facts { capability: (9, 0), multiprocessors: 132, cublaslt: Ok(13_00_00) };
        let refuse = |path, why| Ok(if path == CublasLt { Err("no algorithm".to_owned()) } else { Ok(why) });
        assert_eq!(config.choose_by::<f32>(&facts, refuse).unwrap().decision, Dequantize);
    }
}
