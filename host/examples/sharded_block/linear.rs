//! A product with a weight that is pulled while it is needed, and its gradients.

use oxtile::gemm::{Gemm, GemmConfig};
use oxtile::num::bf16;
use oxtile::runtime::Bound;
use oxtile::sharded::{GradientScatter, Mode, Pass, Places, ShardSet, WeightId};
use oxtile::{Buffer, Result, Runtime, Stream};

use super::format::Format;
use super::kernels::lend;
use super::shape::Shape;

/// The whole weights of a pass, one after another.
pub struct Whole<'p, F: Format, M: Mode> {
    pub pass: Pass<'p, F, M>,
    pub reader: &'p F::Reader,
    pub stream: &'p Stream,
}

impl<F: Format, M: Mode> Whole<'_, F, M> {
    /// Takes the next weight, whose matrix later work finds.
    fn take(&mut self, weight: WeightId) -> Result<()> {
        let gathered = self.pass.take(weight, self.stream)?;
        F::read(self.reader, self.stream, gathered.tensor())
    }
}

/// Where whole weights and their gradients are, at every pass.
pub struct Weights<'m, F: Format> {
    pub stream: &'m Stream,
    pub places: &'m Places<F>,
    pub reader: &'m F::Reader,
    pub gradients: &'m GradientScatter<f32>,
}

/// What the products of a weight read and write: tokens, and their gradients.
pub struct Operands<'m> {
    pub x: &'m Buffer<bf16>,
    pub y: &'m Buffer<bf16>,
    pub dy: &'m Buffer<bf16>,
    pub dx: &'m Buffer<bf16>,
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

    /// Binds the products to their operands and to where the weight is, once for all passes: a graph may hold what is bound, and not the binding.
    pub fn bind<'m, F: Format>(&'m self, weights: &Weights<'m, F>, Operands { x, y, dy, dx }: Operands<'m>) -> Result<BoundLinear<'m>> {
        let &Weights { stream, places, reader, gradients } = weights;
        // The forward pass has the embedding before all trained weights, the backward pass has those in reverse.
        let (number, trained) = (self.weight.index(), gradients.ids().len());
        let [by_rows, by_columns] =
            [places.forward(number + 1)?, places.backward(trained - 1 - number)?].map(|place| F::matrix(reader, &place[0]));
        Ok(BoundLinear {
            weight: self.weight,
            forward: self.forward.bind(stream, x.view(), by_rows, None, lend(y))?,
            of_input: self.of_input.bind(stream, dy.view(), by_columns, None, lend(dx))?,
            of_weight: self.of_weight.bind(stream, dy.view(), x.view(), None, gradients.target(self.weight)?)?,
        })
    }
}

/// The products of a weight with their operands.
pub struct BoundLinear<'m> {
    weight: WeightId,
    forward: Bound<'m>,
    of_input: Bound<'m>,
    of_weight: Bound<'m>,
}

impl BoundLinear<'_> {
    /// Takes the weight by rows, and multiplies.
    pub fn forward<F: Format, M: Mode>(&mut self, whole: &mut Whole<'_, F, M>) -> Result<()> {
        whole.take(self.weight)?;
        self.forward.run(whole.stream)
    }

    /// Sends the gradient of the weight to the owners of its rows, then takes the weight by columns for the gradient of the input.
    pub fn backward<F: Format, M: Mode>(&mut self, whole: &mut Whole<'_, F, M>, gradients: &GradientScatter<f32>) -> Result<()> {
        let stream = whole.stream;
        // The product is bound to what this returns.
        gradients.buffer(self.weight, stream)?;
        self.of_weight.run(stream)?;
        gradients.scatter(self.weight, stream, |_| Ok(()))?;
        whole.take(self.weight)?;
        self.of_input.run(stream)
    }
}
