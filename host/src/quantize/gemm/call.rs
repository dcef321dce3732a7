//! The call of cuBLASLt, which is column-major: `D^T = B A^T`, so that our `B` is its `A`.

use oxtile_tile::num::Element;

use super::choice::{OperandFormat, Path, QuantizedGemmConfig};
use crate::quantize::format::ScaleBlock;
use crate::runtime::matmul::*;

impl QuantizedGemmConfig {
    /// The library's part of a path; none if it has none.
    pub(super) fn matmul<O: Element>(&self, path: Path) -> Option<Matmul> {
        let Self { m, n, k, alpha, beta, fast_accumulation, .. } = *self;
        let codes = match path {
            Path::CublasLt => true,
            Path::DequantizeCublasLt => false,
            Path::Wgmma | Path::Dequantize | Path::DequantizePortable => return None,
        };
        let operand = |format: OperandFormat, outer: u64, transposed_along_k: bool| {
            let (element, scale) = if codes { format.narrow() } else { (MatmulElement::Bf16, MatmulScale::None) };
            // Row-major rows are columns here.
            let (rows, columns) = if format.lies_along_k() { (k, outer) } else { (outer, k) };
            MatmulOperand {
                matrix: MatmulMatrix { element, rows, columns },
                transposed: format.lies_along_k() == transposed_along_k,
                scale,
            }
        };
        let element = if O::NAME == f32::NAME { MatmulElement::F32 } else { MatmulElement::Bf16 };
        // The amaxes of NVFP4 are factors of the product.
        let by_device = codes && matches!(self.a, OperandFormat::Nvfp4(_));
        Some(Matmul {
            a: operand(self.b, n, true),
            b: operand(self.a, m, false),
            d: MatmulMatrix { element, rows: n, columns: m },
            // Products of blocks are summed in full precision in any case.
            fast_accumulation: fast_accumulation && codes && self.a == OperandFormat::Fp8,
            factors: if by_device { MatmulFactors::Device } else { MatmulFactors::Host { alpha, beta } },
        })
    }
}

impl OperandFormat {
    fn narrow(self) -> (MatmulElement, MatmulScale) {
        match self {
            Self::Fp8 => (MatmulElement::E4m3, MatmulScale::Tensor),
            Self::Fp8Block(ScaleBlock::Row) => (MatmulElement::E4m3, MatmulScale::Row128),
            Self::Fp8Block(ScaleBlock::Square) => (MatmulElement::E4m3, MatmulScale::Square128),
            Self::Mxfp8(_) => (MatmulElement::E4m3, MatmulScale::Row32),
            Self::Nvfp4(_) => (MatmulElement::E2m1, MatmulScale::Row16),
        }
    }
}

#[cfg(test)]
mod tests {
    use oxtile_tile::num::bf16;

    use super::*;
    use crate::quantize::format::Direction;

    fn matrix(element: MatmulElement, rows: u64, columns: u64) -> MatmulMatrix {
        MatmulMatrix { element, rows, columns }
    }

    #[test]
    fn fp8_along_k_is_the_transposed_form() {
        let config = QuantizedGemmConfig { alpha: 2.0, ..QuantizedGemmConfig::new(OperandFormat::Fp8, [64, 128, 256]) };
        let found = config.matmul::<f32>(Path::CublasLt).unwrap();
        let operand = |columns, transposed| MatmulOperand {
            matrix: matrix(MatmulElement::E4m3, 256, columns),
            transposed,
            scale: MatmulScale::Tensor,
        };
        let expected = Matmul {
            a: operand(128, true),
            b: operand(64, false),
            d: matrix(MatmulElement::F32, 128, 64),
            fast_accumulation: false,
            factors: MatmulFactors::Host { alpha: 2.0, beta: 0.0 },
        };
        assert_eq!(found, expected);
        assert_eq!(config.matmul::<f32>(Path::Wgmma), None);
    }

    #[test]
    fn columnwise_mxfp8_lies_the_other_way() {
        let columns = OperandFormat::Mxfp8(Direction::Columns);
        let found = QuantizedGemmConfig::new(columns, [64, 128, 256]).matmul::<bf16>(Path::CublasLt).unwrap();
        assert_eq!(found.a.matrix, matrix(MatmulElement::E4m3, 128, 256));
        assert_eq!(found.b.matrix, matrix(MatmulElement::E4m3, 64, 256));
        assert_eq!((found.a.transposed, found.b.transposed), (false, true));
        assert_eq!((found.a.scale, found.b.scale), (MatmulScale::Row32, MatmulScale::Row32));
    }

    #[test]
    fn nvfp4_takes_its_factors_from_the_device() {
        let config = QuantizedGemmConfig::new(OperandFormat::Nvfp4(Direction::Columns), [64, 128, 256]);
        let found = config.matmul::<bf16>(Path::CublasLt).unwrap();
        assert_eq!(found.a.matrix, matrix(MatmulElement::E2m1, 256, 128));
        assert_eq!((found.a.transposed, found.b.transposed, found.a.scale), (true, false, MatmulScale::Row16));
        assert_eq!(found.factors, MatmulFactors::Device);
        let wide = config.matmul::<bf16>(Path::DequantizeCublasLt).unwrap();
        assert_eq!((wide.a.matrix.element, wide.a.scale), (MatmulElement::Bf16, MatmulScale::None));
        assert_eq!(wide.factors, MatmulFactors::Host { alpha: 1.0, beta: 0.0 });
    }

    #[test]
    fn blocks_of_128_keep_their_kind() {
        let [row, square] = [ScaleBlock::Row, ScaleBlock::Square].map(OperandFormat::Fp8Block);
        let config = QuantizedGemmConfig { b: square, ..QuantizedGemmConfig::new(row, [64, 128, 256]) };
        let found = config.matmul::<bf16>(Path::CublasLt).unwrap();
        assert_eq!((found.a.scale, found.b.scale), (MatmulScale::Square128, MatmulScale::Row128));
        let fast = QuantizedGemmConfig { fast_accumulation: true, ..config };
        assert!(!fast.matmul::<bf16>(Path::CublasLt).unwrap().fast_accumulation);
    }
}
