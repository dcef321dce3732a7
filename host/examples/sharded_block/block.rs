//! A transformer block: attention and an MLP, each with a norm before it and a residual around it.

use oxtile::attention::{BackwardInputs, Gradients, Inputs, Outputs};
use oxtile::num::bf16;
use oxtile::sharded::{GradientScatter, ShardSet};
use oxtile::tensor::{Heads, HeadsMut};
use oxtile::{Buffer, Result, Stream};

use super::format::Format;
use super::kernels::{Kernels, Norm, tokens_of};
use super::linear::{Linear, Whole};
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

    /// Adds to the residual `x` what attention and the MLP find.
    pub fn forward<F: Format>(&mut self, kernels: &Kernels<'_>, whole: &mut Whole<'_, F>, x: &mut Buffer<bf16>) -> Result<()> {
        let Self { saved, norms: [before_attention, before_mlp], log_sum_exp, .. } = self;
        let (stream, shape) = (&kernels.stream, kernels.shape);
        before_attention.forward(kernels, x)?;
        self.qkv.forward(whole, &before_attention.output, &mut saved.qkv)?;
        let queries_and_keys = HeadsMut::bshd(saved.qkv.view_mut(), qkv(shape))?.heads(0..2 * shape.heads)?;
        kernels.rotary.turn_in_place(stream, queries_and_keys, kernels.angles())?;
        let outputs = Outputs::new(saved.attended.view_mut(), log_sum_exp.view_mut());
        kernels.attention.forward(stream, inputs(&saved.qkv, shape)?, outputs)?;
        self.out.forward(whole, &saved.attended, x)?;

        before_mlp.forward(kernels, x)?;
        self.up.forward(whole, &before_mlp.output, &mut saved.up)?;
        kernels.gate(&saved.up, &mut saved.gated)?;
        self.down.forward(whole, &saved.gated, x)
    }

    /// Turns the gradient `dx` of the residual after the block into that of the residual before it. `d` is memory for gradients.
    pub fn backward<F: Format>(
        &self,
        kernels: &mut Kernels<'_>,
        whole: &mut Whole<'_, F>,
        gradients: &GradientScatter<f32>,
        d: &mut Activations,
        dx: &mut Buffer<bf16>,
    ) -> Result<()> {
        let Self { saved, norms: [before_attention, before_mlp], log_sum_exp, .. } = self;
        let shape = kernels.shape;
        self.down.backward(whole, gradients, [&saved.gated, dx], &mut d.gated)?;
        kernels.gate_backward(&saved.up, &d.gated, &mut d.up)?;
        self.up.backward(whole, gradients, [&before_mlp.output, &d.up], &mut d.normed)?;
        before_mlp.backward(kernels, &d.normed, dx)?;

        self.out.backward(whole, gradients, [&saved.attended, dx], &mut d.attended)?;
        let forward = inputs(&saved.qkv, shape)?;
        let (out, grad_out) = (saved.attended.view().into(), d.attended.view().into());
        let (dq, of_keys) = HeadsMut::bshd(d.qkv.view_mut(), qkv(shape))?.split_heads(shape.heads)?;
        let (dk, dv) = of_keys.split_heads(shape.heads)?;
        let inputs = BackwardInputs { forward, out, log_sum_exp: log_sum_exp.view(), grad_out };
        kernels.attention.backward(&kernels.stream, inputs, Gradients::new(dq, dk, dv))?;
        let queries_and_keys = HeadsMut::bshd(d.qkv.view_mut(), qkv(shape))?.heads(0..2 * shape.heads)?;
        kernels.rotary.turn_back_in_place(&kernels.stream, queries_and_keys, kernels.angles())?;
        self.qkv.backward(whole, gradients, [&before_attention.output, &d.qkv], &mut d.normed)?;
        before_attention.backward(kernels, &d.normed, dx)
    }
}

fn inputs(of: &Buffer<bf16>, shape: Shape) -> Result<Inputs<'_, bf16>> {
    let heads = |part| Heads::bshd(of.view(), qkv(shape))?.heads(part * shape.heads..(part + 1) * shape.heads);
    Ok(Inputs::new(heads(0)?, heads(1)?, heads(2)?))
}
