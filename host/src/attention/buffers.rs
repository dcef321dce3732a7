//! Results and gradients in new buffers, for a program that has none of its own.
//!
//! Rows of packed tensors that no sequence has are zeros, and -inf in the log-sum-exp.

use oxtile_kernels::fill::{FillRows, FillRowsArgs};
use oxtile_tile::num::Pod;

use super::backward::{AttentionBackward, BackwardElement};
use super::backward_tensors::{BackwardInputs, Gradients};
use super::config::{Layout, Sink};
use super::forward::{Attention, AttentionElement};
use super::tensors::{Inputs, Outputs};
use crate::runtime::{Buffer, Result, Stream};
use crate::tensor::{Heads, shape::numel};

/// What a forward pass wrote, without gaps, in the [`Layout`](super::Layout) that is configured.
pub struct ResultBuffers<T> {
    /// The result.
    pub out: Buffer<T>,
    /// The natural logarithm of each row's sum of exponentials.
    pub log_sum_exp: Buffer<f32>,
    /// Each head's largest scaled score, if the configuration asks for it.
    pub max_logit: Option<Buffer<f32>>,
}

/// What a backward pass wrote: gradients of the shapes of their tensors, without gaps.
pub struct GradientBuffers<T> {
    /// The gradient of the queries.
    pub q: Buffer<T>,
    /// The gradient of the keys.
    pub k: Buffer<T>,
    /// The gradient of the values.
    pub v: Buffer<T>,
    /// The gradient of the sink, if that is [learnable](Sink::Learnable).
    pub sink: Option<Buffer<f32>>,
}

impl<T: AttentionElement> Attention<T> {
    /// Allocates results, in stream order, and attends once: what attends often gives its own buffers to [`bind`](Self::bind).
    ///
    /// # Errors
    /// As [`forward`](Self::forward) and [`Buffer::uninitialised`]; [`Error::Invalid`](crate::Error::Invalid) if the configured
    /// [`Output`](super::Output) is not `Rounded`.
    pub fn attend(&self, stream: &Stream, inputs: Inputs<'_, T>) -> Result<ResultBuffers<T::Out>> {
        let config = self.config();
        let shape = config.whole_result().shape;
        let mut results = ResultBuffers {
            out: rows(stream, config.layout, &shape)?,
            log_sum_exp: Buffer::uninitialised(stream, numel(&shape[..3])?)?,
            max_logit: config.max_logit.then(|| Buffer::uninitialised(stream, config.heads)).transpose()?,
        };
        if config.layout == Layout::Packed {
            fill(stream, &mut results.log_sum_exp, f32::NEG_INFINITY)?;
        }
        let max_logit = results.max_logit.as_mut().map(Buffer::view_mut);
        let outputs = Outputs { max_logit, ..Outputs::new(results.out.view_mut(), results.log_sum_exp.view_mut()) };
        self.forward(stream, inputs, outputs)?;
        Ok(results)
    }
}

impl<T: Pod> ResultBuffers<T> {
    /// What the backward pass reads: the inputs that gave these results, and the gradient of `out`.
    pub fn backward<'a>(&'a self, forward: Inputs<'a, T>, grad_out: impl Into<Heads<'a, T>>) -> BackwardInputs<'a, T> {
        BackwardInputs { forward, out: self.out.view().into(), log_sum_exp: self.log_sum_exp.view(), grad_out: grad_out.into() }
    }
}

impl<T: BackwardElement> AttentionBackward<T> {
    /// Allocates gradients, in stream order, and computes them once: what does so often gives its own buffers to [`bind`](Self::bind).
    ///
    /// # Errors
    /// As [`backward`](Self::backward) and [`Buffer::uninitialised`]; [`Error::Invalid`](crate::Error::Invalid) if the configured
    /// [`GradientOutput`](super::GradientOutput) is not `Rounded`.
    pub fn gradients(&self, stream: &Stream, inputs: BackwardInputs<'_, T>) -> Result<GradientBuffers<T>> {
        let config = self.config();
        let [q, k, v] = config.whole_inputs().map(|tensor| tensor.shape);
        let sink = (config.sink == Sink::Learnable).then(|| Buffer::uninitialised(stream, config.heads)).transpose()?;
        let rows = |shape: &[u64]| rows(stream, config.layout, shape);
        let mut gradients = GradientBuffers { q: rows(&q)?, k: rows(&k)?, v: rows(&v)?, sink };
        let GradientBuffers { q, k, v, sink } = &mut gradients;
        let sink = sink.as_mut().map(Buffer::view_mut);
        self.backward(stream, inputs, Gradients { sink, ..Gradients::new(q.view_mut(), k.view_mut(), v.view_mut()) })?;
        Ok(gradients)
    }
}

/// A new buffer of this shape, all rows of which are written: of packed tensors those that no sequence has before the others.
fn rows<T: Pod>(stream: &Stream, layout: Layout, shape: &[u64]) -> Result<Buffer<T>> {
    match layout {
        Layout::Packed => Buffer::zeros(stream, numel(shape)?),
        Layout::Bshd | Layout::Sbhd => Buffer::uninitialised(stream, numel(shape)?),
    }
}

/// Fills a buffer with a number, in stream order.
fn fill(stream: &Stream, target: &mut Buffer<f32>, number: f32) -> Result<()> {
    let mut values = Buffer::<f32>::named(stream, "number", 2)?;
    values.write_words(stream, &[u64::from(number.to_bits()) << 32 | u64::from(number.to_bits())])?;
    let kernel = stream.device().runtime().load::<FillRows>()?;
    kernel.launch(stream, FillRowsArgs { values: values.view(), target: target.view_mut(), rows: 1 })
}
