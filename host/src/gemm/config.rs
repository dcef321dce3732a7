//! What is computed.

use oxtile_kernels::gemm::{self, FusionArgument};
use oxtile_tile::launch::DeviceView;
use oxtile_tile::num::Pod;

/// What is computed. Made complete by `..GemmConfig::default()`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct GemmConfig {
    /// Rows of `A` and `D`.
    pub m: u64,
    /// Columns of `B` and `D`.
    pub n: u64,
    /// Columns of `A`, rows of `B`.
    pub k: u64,
    /// Whether `A` is stored as its transpose, `[k, m]`.
    pub transpose_a: bool,
    /// Whether `B` is stored as its transpose, `[n, k]`.
    pub transpose_b: bool,
    /// Factor of the product.
    pub alpha: f32,
    /// Factor of `D` as it was; 0 leaves it unread.
    pub beta: f32,
    /// What comes last.
    pub activation: Activation,
}

/// A function of every element.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Activation {
    /// None.
    #[default]
    Identity,
    /// `x / 2 (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3)))`.
    Gelu,
    /// The product, rounded, times the derivative of GELU at a matrix that is bound as [`Epilogue::input`](super::Epilogue::input): the gradient of that matrix, of a product that is the gradient of
    /// its GELU. Of the products whose binding takes an [`Epilogue`](super::Epilogue).
    GeluGradient,
}

impl Activation {
    /// Why a product whose binding takes no [`Epilogue`](super::Epilogue) does not have it, if it does not.
    pub(crate) fn check_alone(self) -> Result<(), String> {
        match self {
            Self::Identity | Self::Gelu => Ok(()),
            Self::GeluGradient => Err("GeluGradient reads a matrix, which only Gemm, AllGatherGemm and GemmReduceScatter take: \
                                       take Identity, and `activation::Backward<Gelu>` after the product"
                .to_owned()),
        }
    }
}

impl Default for GemmConfig {
    fn default() -> Self {
        Self { m: 0, n: 0, k: 0, transpose_a: false, transpose_b: false, alpha: 1.0, beta: 0.0, activation: Activation::Identity }
    }
}

impl GemmConfig {
    /// The sizes as kernels take them; [`choose`](Self::choose) refuses larger ones.
    pub(crate) fn shape(&self) -> gemm::Shape {
        let [m, n, k] = [self.m, self.n, self.k].map(|size| size as u32);
        gemm::Shape { m, n, k }
    }

    /// What follows the product, with its factors and bias in device memory.
    pub(crate) fn fusion<'a, O: Pod>(
        &self,
        scales: Option<[DeviceView<'a, f32>; 2]>,
        bias: Option<DeviceView<'a, O>>,
    ) -> FusionArgument<'a, O> {
        let [a_scale, b_scale] = scales.map_or([None; 2], |scales| scales.map(Some));
        FusionArgument { bias, a_scale, b_scale, alpha: self.alpha, beta: self.beta, gelu: self.activation == Activation::Gelu }
    }

    /// Whether the operands' rows lie along `m` and `n` and not along `k`.
    pub(crate) fn majors(&self) -> [bool; 2] {
        [self.transpose_a, !self.transpose_b]
    }
}
