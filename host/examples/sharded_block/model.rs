//! The model: an embedding, blocks, a head and a loss.

use oxtile::comm::Member;
use oxtile::cross_entropy::{CrossEntropy, Rule};
use oxtile::embedding::Embedding;
use oxtile::num::bf16;
use oxtile::sharded::{Chain, GradientScatter, Published, ShardSet, WeightId};
use oxtile::symmetric::Arena;
use oxtile::{Buffer, Result, Stream};

use super::attend::Tokens;
use super::block::{Activations, Block};
use super::format::Format;
use super::kernels::{Kernels, Norm, tokens_of};
use super::linear::{Linear, Whole};
use super::shape::Shape;

pub struct Model<'c, F: Format> {
    kernels: Kernels<'c>,
    reader: F::Reader,
    embedding: (WeightId, Embedding<bf16>),
    blocks: Vec<Block>,
    norm: Norm,
    head: Linear,
    cross_entropy: CrossEntropy<bf16>,
    /// The residual that all blocks add to, then its gradient.
    x: Buffer<bf16>,
    logits: Buffer<bf16>,
    losses: Buffer<f32>,
    /// Memory for gradients that all blocks use in turn.
    gradients: Activations,
    dnormed: Buffer<bf16>,
}

impl<'c, F: Format> Model<'c, F> {
    /// The model of a rank, which has `shape.tokens` of the tokens.
    pub fn new(stream: &Stream, shape: Shape, set: &ShardSet<F>, tokens: Tokens, (arena, member): (&'c Arena, &'c Member)) -> Result<Self> {
        let (runtime, width) = (&stream.device().runtime(), shape.width());
        let largest = shape.weights().iter().map(|weight| weight.rows * weight.columns).max().unwrap_or(0);
        let rule = Rule { scale: 1.0 / shape.tokens as f32, ..Rule::default() };
        Ok(Self {
            kernels: Kernels::new(stream, shape, tokens, arena, member)?,
            reader: F::reader(stream, largest)?,
            embedding: (set.find("embedding").expect("a weight of the model"), Embedding::new(runtime, width)?),
            blocks: (0..shape.blocks).map(|number| Block::new(stream, shape, set, number)).collect::<Result<_>>()?,
            norm: Norm::new(stream, shape)?,
            head: Linear::new(runtime, shape, set, "head", 0.0)?,
            cross_entropy: CrossEntropy::new(runtime, shape.vocabulary, rule)?,
            x: tokens_of(stream, shape, width)?,
            logits: tokens_of(stream, shape, shape.vocabulary)?,
            losses: Buffer::uninitialised(stream, shape.tokens)?,
            gradients: Activations::new(stream, shape)?,
            dnormed: tokens_of(stream, shape, width)?,
        })
    }

    /// The weights in the order in which a forward pass takes them.
    pub fn order(set: &ShardSet<F>) -> Vec<WeightId> {
        let mut ids: Vec<_> = set.weights().map(|(id, _)| id).collect();
        // The embedding is named last.
        ids.rotate_right(1);
        ids
    }

    /// Enqueues a forward and a backward pass of a micro-batch, whose gradients are added up at the owners of the weights' rows.
    pub fn run(
        &mut self,
        published: &Published<'_, F>,
        chain: &mut Chain<F>,
        gradients: &GradientScatter<f32>,
        (tokens, targets): (&Buffer<u32>, &Buffer<i32>),
    ) -> Result<()> {
        let Self { kernels, reader, x, logits, norm, .. } = self;
        let stream = &kernels.stream.clone();
        let mut whole = Whole { pass: published.forward(chain)?, reader, stream };
        let (id, embedding) = &self.embedding;
        let gathered = whole.pass.take(*id, stream)?;
        embedding.forward(stream, F::matrix(whole.reader, stream, &gathered)?, tokens.view(), x.view_mut())?;
        for block in &mut self.blocks {
            block.forward(kernels, &mut whole, x)?;
        }
        norm.forward(kernels, x)?;
        self.head.forward(&mut whole, &norm.output, logits)?;
        whole.pass.finish()?;

        // Its first weight arrives while the loss is computed.
        let mut whole = Whole { pass: published.backward(chain)?, reader, stream };
        // From here on the logits are their gradient.
        self.cross_entropy.gradient_in_place(stream, logits.view_mut(), targets.view(), self.losses.view_mut())?;
        self.head.backward(&mut whole, gradients, [&norm.output, logits], &mut self.dnormed)?;
        x.fill_zero(stream)?;
        norm.backward(kernels, &self.dnormed, x)?;
        for block in self.blocks.iter().rev() {
            block.backward(kernels, &mut whole, gradients, &mut self.gradients, x)?;
        }
        whole.pass.finish()?;
        gradients.finish(stream, |_| Ok(()))
    }

    /// The losses of the tokens of the micro-batch that was run last, which the next one does not overwrite.
    pub fn loss(&self) -> Result<Buffer<f32>> {
        let mut kept = Buffer::uninitialised(&self.kernels.stream, self.losses.len())?;
        kept.copy_from(&self.kernels.stream, &self.losses)?;
        Ok(kept)
    }

    /// The loss of a micro-batch. Waits for it.
    pub fn loss_of(&self, losses: &Buffer<f32>) -> Result<f32> {
        Ok(losses.to_vec(&self.kernels.stream)?.iter().sum::<f32>() / self.kernels.shape.tokens as f32)
    }
}
