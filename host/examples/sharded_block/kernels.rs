//! What the blocks share: kernels without weights that are trained, and memory that is used in turn.

use std::marker::PhantomData;

use oxtile::kernels::activation::{Activate, ActivateArgs, GatedBackward, GatedForward, Silu};
use oxtile::num::{Pod, bf16};
use oxtile::rms_norm::{RmsNorm, Saved, WeightGradient};
use oxtile::rotary::{Angles, Pairing, Rotary};
use oxtile::runtime::Loaded;
use oxtile::sum_parts::SumParts;
use oxtile::{Buffer, Result, Stream};
use oxtile_tile::launch::DeviceViewMut;

use super::attend::Tokens;
use super::shape::Shape;

pub struct Kernels {
    pub stream: Stream,
    pub shape: Shape,
    pub rotary: Rotary<bf16>,
    angles: [Buffer<f32>; 2],
    gate: Loaded<Activate<GatedForward<Silu>, bf16>>,
    gate_backward: Loaded<Activate<GatedBackward<Silu>, bf16>>,
    norm: RmsNorm<bf16>,
    /// The gains of the norms: ones, which are not trained.
    gains: Buffer<bf16>,
    unused: WeightGradient<bf16>,
    sum: SumParts<bf16, bf16>,
    addends: Buffer<bf16>,
}

impl Kernels {
    pub fn new(stream: &Stream, shape: Shape, tokens: Tokens) -> Result<Self> {
        let (runtime, width) = (&stream.device().runtime(), shape.width());
        let (cosines, sines) = Angles::tables(0..tokens.whole, shape.head_size, 10_000.0);
        let (numbers, row) = (tokens.numbers(), cosines.len() / tokens.whole as usize);
        let own = |table: Vec<f32>| numbers.iter().flat_map(|token| table[*token as usize * row..][..row].to_vec()).collect::<Vec<_>>();
        let norm = RmsNorm::new(runtime, width, 1e-5)?;
        Ok(Self {
            rotary: Rotary::new(runtime, Pairing::Halves)?,
            angles: [Buffer::from_slice(stream, &own(cosines))?, Buffer::from_slice(stream, &own(sines))?],
            gate: runtime.load()?,
            gate_backward: runtime.load()?,
            gains: Buffer::from_slice(stream, &vec![half::bf16::ONE; width as usize])?,
            unused: norm.weight_gradient(stream, shape.tokens)?,
            norm,
            sum: SumParts::new(runtime)?,
            addends: tokens_of(stream, shape, 2 * width)?,
            shape,
            stream: stream.clone(),
        })
    }

    pub fn angles(&self) -> Angles<'_> {
        Angles { cosines: self.angles[0].view(), sines: self.angles[1].view() }
    }

    /// Fills a buffer with zeros: the sum of no parts.
    pub fn zero(&self, buffer: &Buffer<bf16>) -> Result<()> {
        self.sum.run(&self.stream, self.gains.view().slice(0, 0), 0, 0, lend(buffer))
    }

    /// `silu(up[.., ..hidden]) * up[.., hidden..]`
    pub fn gate(&self, up: &Buffer<bf16>, output: &Buffer<bf16>) -> Result<()> {
        let args = ActivateArgs { input: up.view(), gradient: None, output: lend(output), columns: self.shape.hidden, marker: PhantomData };
        self.gate.launch(&self.stream, args)
    }

    /// The gradient of `up`, given that of the output.
    pub fn gate_backward(&self, up: &Buffer<bf16>, gradient: &Buffer<bf16>, output: &Buffer<bf16>) -> Result<()> {
        let (gradient, output) = (Some(gradient.view()), lend(output));
        let args = ActivateArgs { input: up.view(), gradient, output, columns: 2 * self.shape.hidden, marker: PhantomData };
        self.gate_backward.launch(&self.stream, args)
    }
}

/// Memory of the model, to be written by one piece of work.
pub fn lend<T: Pod>(buffer: &Buffer<T>) -> DeviceViewMut<'_, T> {
    let access = buffer.view().access("memory of the model");
    // SAFETY: an address, a length and an owner of a live buffer. All work on memory of the model is enqueued on one stream, no kernel takes two views of a buffer of which one is written,
    // and the host reads the buffers after the stream alone.
    unsafe { DeviceViewMut::from_raw(access.address, buffer.len(), access.owner) }
}

/// A buffer of so many elements a token.
pub fn tokens_of(stream: &Stream, shape: Shape, width: u64) -> Result<Buffer<bf16>> {
    Buffer::uninitialised(stream, shape.tokens * width)
}

/// An RMS norm at its place in the model, with what its backward pass needs.
pub struct Norm {
    input: Buffer<bf16>,
    inverse_rms: Buffer<f32>,
    pub output: Buffer<bf16>,
}

impl Norm {
    pub fn new(stream: &Stream, shape: Shape) -> Result<Self> {
        let inverse_rms = Buffer::uninitialised(stream, shape.tokens)?;
        let tokens = || tokens_of(stream, shape, shape.width());
        Ok(Self { input: tokens()?, inverse_rms, output: tokens()? })
    }

    pub fn forward(&self, kernels: &Kernels, x: &Buffer<bf16>) -> Result<()> {
        let Kernels { stream, norm, gains, sum, .. } = kernels;
        // A copy: the residual is added to.
        sum.round(stream, x.view(), lend(&self.input))?;
        norm.forward(stream, self.input.view(), gains.view(), lend(&self.output), Some(lend(&self.inverse_rms)))
    }

    /// Adds the gradient of the input, given that of the output, to the gradient `dx` of the residual that the input was.
    pub fn backward(&self, kernels: &mut Kernels, gradient: &Buffer<bf16>, dx: &Buffer<bf16>) -> Result<()> {
        let Kernels { stream, shape, norm, gains, unused, sum, addends, .. } = kernels;
        let elements = shape.tokens * shape.width();
        let (residual, of_input) = addends.view_mut().split_at(elements);
        let saved = Saved { input: self.input.view(), weight: gains.view(), inverse_rms: self.inverse_rms.view() };
        sum.round(stream, dx.view(), residual)?;
        norm.backward(stream, gradient.view(), saved, of_input, unused)?;
        sum.run(stream, addends.view(), 2, elements, lend(dx))
    }
}
