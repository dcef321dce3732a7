//! A product with a weight that is pulled while it is needed, and its gradients.

use oxtile::gemm::{Gemm, GemmConfig};
use oxtile::num::bf16;
use oxtile::sharded::{GradientScatter, Pass, ShardSet, WeightId};
use oxtile::{Buffer, Result, Runtime, Stream};

use super::format::Format;
use super::shape::Shape;

/// The whole weights of a pass, one after another.
pub struct Whole<'p, F: Format> {
    pub pass: Pass<'p, F>,
    pub reader: &'p mut F::Reader,
    pub stream: &'p Stream,
}

/// The products of a weight.
pub struct Linear {
    weight: WeightId,
    /// `y = x W^T`
    forward: Gemm<bf16, bf16>,
    /// `dx = dy W`
    of_input: Gemm<bf16, bf16>,
    /// `dW = dy^T x`
    of_weight: Gemm<bf16, f32>,
}

impl Linear {
    /// The products of a weight of the set. `kept` is the factor of what the result held before: 1 where it is added to a residual.
    pub fn new<F: Format>(runtime: &Runtime, shape: Shape, set: &ShardSet<F>, name: &str, kept: f32) -> Result<Self> {
        let (weight, found) = set.weights().find(|(_, weight)| weight.name == name).expect("the set has all weights of the model");
        let (rows, columns, tokens) = (found.rows, found.columns, shape.tokens);
        let config = GemmConfig::default();
        Ok(Self {
            weight,
            forward: Gemm::new(runtime, GemmConfig { m: tokens, n: rows, k: columns, transpose_b: true, beta: kept, ..config })?,
            of_input: Gemm::new(runtime, GemmConfig { m: tokens, n: columns, k: rows, ..config })?,
            of_weight: Gemm::new(runtime, GemmConfig { m: rows, n: columns, k: tokens, transpose_a: true, ..config })?,
        })
    }

    /// Takes the weight by rows, and multiplies.
    pub fn forward<F: Format>(&self, whole: &mut Whole<'_, F>, x: &Buffer<bf16>, y: &mut Buffer<bf16>) -> Result<()> {
        let gathered = whole.pass.take(self.weight, whole.stream)?;
        let matrix = F::matrix(whole.reader, whole.stream, &gathered)?;
        self.forward.run(whole.stream, x.view(), matrix, None, y.view_mut())
    }

    /// Sends the gradient of the weight to the owners of its rows, then takes the weight by columns for the gradient of the input.
    pub fn backward<F: Format>(
        &self,
        whole: &mut Whole<'_, F>,
        gradients: &GradientScatter<f32>,
        [x, dy]: [&Buffer<bf16>; 2],
        dx: &mut Buffer<bf16>,
    ) -> Result<()> {
        let stream = whole.stream;
        self.of_weight.run(stream, dy.view(), x.view(), None, gradients.buffer(self.weight, stream)?)?;
        gradients.scatter(self.weight, stream, |_| Ok(()))?;
        let gathered = whole.pass.take(self.weight, stream)?;
        let matrix = F::matrix(whole.reader, stream, &gathered)?;
        self.of_input.run(stream, dy.view(), matrix, None, dx.view_mut())
    }
}
