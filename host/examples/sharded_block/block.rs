//! A transformer block: attention and an MLP, each with a norm before it and a residual around it.

use oxtile::attention::{BackwardInputs, Gradients, Inputs, Outputs};
use oxtile::num::bf16;
use oxtile::runtime::Bound;
use oxtile::sharded::{GradientScatter, Mode, ShardSet};
use oxtile::tensor::{Heads, HeadsMut};
use oxtile::{Buffer, Result, Stream};

use super::attend::Attend;
use super::format::Format;
use super::kernels::{Kernels, Norm, lend, tokens_of};
use super::linear::{BoundLinear, Linear, Operands, Weights, Whole};
use super::shape::Shape;

/// The heads for queries, keys and values, one after another in each row.
fn qkv(shape: Shape) -> [u64; 4] {
    [1, shape.tokens, 3 * shape.heads, shape.head_size]
}

pub struct Block {
    qkv: Linear,
    out: Linear,
    up: Linear,
    down: Linear,
    norms: [Norm; 2],
    log_sum_exp: Buffer<f32>,
    saved: Activations,
}

/// What lies between the products of a block, or its gradients.
pub struct Activations {
    qkv: Buffer<bf16>,
    attended: Buffer<bf16>,
    up: Buffer<bf16>,
    gated: Buffer<bf16>,
    /// Of gradients alone: that of a norm's output.
    normed: Buffer<bf16>,
}

impl Activations {
    pub fn new(stream: &Stream, shape: Shape) -> Result<Self> {
        let (of, width, hidden) = (|width| tokens_of(stream, shape, width), shape.width(), shape.hidden);
        Ok(Self { qkv: of(3 * width)?, attended: of(width)?, up: of(2 * hidden)?, gated: of(hidden)?, normed: of(width)? })
    }
}

impl Block {
    pub fn new<F: Format>(stream: &Stream, shape: Shape, set: &ShardSet<F>, number: usize) -> Result<Self> {
        let linear = |name, kept| Linear::new(&stream.device().runtime(), shape, set, &format!("{number}.{name}"), kept);
        Ok(Self {
            qkv: linear("qkv", 0.0)?,
            out: linear("out", 1.0)?,
            up: linear("up", 0.0)?,
            down: linear("down", 1.0)?,
            norms: [Norm::new(stream, shape)?, Norm::new(stream, shape)?],
            log_sum_exp: Buffer::uninitialised(stream, shape.heads * shape.tokens)?,
            saved: Activations::new(stream, shape)?,
        })
    }

    /// Binds its products and its attention. `x` is the residual, then its gradient, and `d` memory for gradients.
    pub fn bind<'m, F: Format>(
        &'m self,
        weights: &Weights<'m, F>,
        shape: Shape,
        attend: &'m Attend<'_>,
        (x, d): (&'m Buffer<bf16>, &'m Activations),
    ) -> Result<BoundBlock<'m>> {
        let Self { saved, norms: [before_attention, before_mlp], log_sum_exp, .. } = self;
        let linear = |linear: &'m Linear, x, y, dy, dx| linear.bind(weights, Operands { x, y, dy, dx });
        let outputs = Outputs::new(lend(&saved.attended), lend(log_sum_exp));
        let (out, grad_out) = (saved.attended.view().into(), d.attended.view().into());
        let (dq, of_keys) = HeadsMut::bshd(lend(&d.qkv), qkv(shape))?.split_heads(shape.heads)?;
        let (dk, dv) = of_keys.split_heads(shape.heads)?;
        let backward = BackwardInputs { forward: inputs(&saved.qkv, shape)?, out, log_sum_exp: log_sum_exp.view(), grad_out };
        Ok(BoundBlock {
            qkv: linear(&self.qkv, &before_attention.output, &saved.qkv, &d.qkv, &d.normed)?,
            out: linear(&self.out, &saved.attended, x, x, &d.attended)?,
            up: linear(&self.up, &before_mlp.output, &saved.up, &d.up, &d.normed)?,
            down: linear(&self.down, &saved.gated, x, x, &d.gated)?,
            attention: attend.bind_forward(weights.stream, inputs(&saved.qkv, shape)?, outputs)?,
            attention_backward: attend.bind_backward(weights.stream, backward, Gradients::new(dq, dk, dv))?,
            of: self,
            x,
            d,
        })
    }
}

/// A block whose products and attention have their operands.
pub struct BoundBlock<'m> {
    of: &'m Block,
    x: &'m Buffer<bf16>,
    d: &'m Activations,
    qkv: BoundLinear<'m>,
    out: BoundLinear<'m>,
    up: BoundLinear<'m>,
    down: BoundLinear<'m>,
    attention: Bound<'m>,
    attention_backward: Bound<'m>,
}

impl BoundBlock<'_> {
    /// Adds to the residual what attention and the MLP find.
    pub fn forward<F: Format, M: Mode>(&mut self, kernels: &Kernels, whole: &mut Whole<'_, F, M>) -> Result<()> {
        let (Block { saved, norms: [before_attention, before_mlp], .. }, stream) = (self.of, &kernels.stream);
        before_attention.forward(kernels, self.x)?;
        self.qkv.forward(whole)?;
        kernels.rotary.turn_in_place(stream, queries_and_keys(&saved.qkv, kernels.shape)?, kernels.angles())?;
        self.attention.run(stream)?;
        self.out.forward(whole)?;

        before_mlp.forward(kernels, self.x)?;
        self.up.forward(whole)?;
        kernels.gate(&saved.up, &saved.gated)?;
        self.down.forward(whole)
    }

    /// Turns the gradient of the residual after the block into that of the residual before it.
    pub fn backward<F: Format, M: Mode>(
        &mut self,
        kernels: &mut Kernels,
        whole: &mut Whole<'_, F, M>,
        gradients: &GradientScatter<f32>,
    ) -> Result<()> {
        let (Block { saved, norms: [before_attention, before_mlp], .. }, d) = (self.of, self.d);
        self.down.backward(whole, gradients)?;
        kernels.gate_backward(&saved.up, &d.gated, &d.up)?;
        self.up.backward(whole, gradients)?;
        before_mlp.backward(kernels, &d.normed, self.x)?;

        self.out.backward(whole, gradients)?;
        self.attention_backward.run(&kernels.stream)?;
        kernels.rotary.turn_back_in_place(&kernels.stream, queries_and_keys(&d.qkv, kernels.shape)?, kernels.angles())?;
        self.qkv.backward(whole, gradients)?;
        before_attention.backward(kernels, &d.normed, self.x)
    }
}

fn queries_and_keys(of: &Buffer<bf16>, shape: Shape) -> Result<HeadsMut<'_, bf16>> {
    HeadsMut::bshd(lend(of), qkv(shape))?.heads(0..2 * shape.heads)
}

fn inputs(of: &Buffer<bf16>, shape: Shape) -> Result<Inputs<'_, bf16>> {
    let heads = |part| Heads::bshd(of.view(), qkv(shape))?.heads(part * shape.heads..(part + 1) * shape.heads);
    Ok(Inputs::new(heads(0)?, heads(1)?, heads(2)?))
}
