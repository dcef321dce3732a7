//! The model: an embedding, blocks, a head and a loss.

use oxtile::comm::Member;
use oxtile::cross_entropy::{CrossEntropy, Rule};
use oxtile::embedding::Embedding;
use oxtile::num::bf16;
use oxtile::sharded::{Chain, GradientScatter, Mode, Places, Published, ShardSet, WeightId};
use oxtile::symmetric::Arena;
use oxtile::{Buffer, Result, Stream};

use super::attend::{Attend, Tokens};
use super::block::{Activations, Block, BoundBlock};
use super::format::Format;
use super::kernels::{Kernels, Norm, lend, tokens_of};
use super::linear::{BoundLinear, Linear, Operands, Weights, Whole};
use super::shape::Shape;

/// The products and the memory of a model.
pub struct Model<'c, F: Format> {
    shape: Shape,
    attend: Attend<'c>,
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
            shape,
            attend: Attend::new(stream, shape, tokens, arena, member)?,
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

    /// Binds the products and attention to where whole weights and gradients are, and loads the other kernels.
    pub fn bind<'m>(
        &'m self,
        stream: &'m Stream,
        tokens: Tokens,
        places: &'m Places<F>,
        gradients: &'m GradientScatter<f32>,
    ) -> Result<BoundModel<'m, 'c, F>> {
        let (shape, weights) = (self.shape, Weights { stream, places, reader: &self.reader, gradients });
        let memory = (&self.x, &self.gradients);
        let of_head = Operands { x: &self.norm.output, y: &self.logits, dy: &self.logits, dx: &self.dnormed };
        Ok(BoundModel {
            of: self,
            gradients,
            kernels: Kernels::new(stream, shape, tokens)?,
            blocks: self.blocks.iter().map(|block| block.bind(&weights, shape, &self.attend, memory)).collect::<Result<_>>()?,
            head: self.head.bind(&weights, of_head)?,
            tokens: Buffer::uninitialised(stream, shape.tokens)?,
            targets: Buffer::uninitialised(stream, shape.tokens)?,
        })
    }

    /// The loss of a micro-batch. Waits for it.
    pub fn loss_of(&self, stream: &Stream, losses: &Buffer<f32>) -> Result<f32> {
        Ok(losses.to_vec(stream)?.iter().sum::<f32>() / self.shape.tokens as f32)
    }
}

/// A model whose products have their operands: its passes allocate nothing, and a graph may hold them.
pub struct BoundModel<'m, 'c, F: Format> {
    of: &'m Model<'c, F>,
    pub gradients: &'m GradientScatter<f32>,
    kernels: Kernels,
    blocks: Vec<BoundBlock<'m>>,
    head: BoundLinear<'m>,
    /// Of the micro-batch: where every pass finds them.
    tokens: Buffer<u32>,
    targets: Buffer<i32>,
}

impl<F: Format> BoundModel<'_, '_, F> {
    /// Gives the next micro-batch to the passes that are enqueued from here on.
    pub fn give(&mut self, tokens: &Buffer<u32>, targets: &Buffer<i32>) -> Result<()> {
        self.tokens.copy_from(&self.kernels.stream, tokens)?;
        self.targets.copy_from(&self.kernels.stream, targets)
    }

    /// Enqueues a forward and a backward pass, whose gradients are added up at the owners of the weights' rows; those of the first micro-batch of a step replace what was there.
    pub fn run<M: Mode>(&mut self, published: &Published<'_, F>, chain: &mut Chain<F, M>, is_first: bool) -> Result<()> {
        let Self { of, gradients, kernels, blocks, head, tokens, targets } = self;
        let Model { reader, embedding: (id, embedding), norm, cross_entropy, x, logits, losses, dnormed, .. } = of;
        let stream = &kernels.stream.clone();
        if is_first {
            gradients.replace_grads(stream)?;
        }
        let mut whole = Whole { pass: published.forward(chain)?, reader, stream };
        let gathered = whole.pass.take(*id, stream)?;
        F::read(reader, stream, gathered.tensor())?;
        embedding.forward(stream, F::matrix(reader, gathered.tensor()), tokens.view(), lend(x))?;
        for block in &mut *blocks {
            block.forward(kernels, &mut whole)?;
        }
        norm.forward(kernels, x)?;
        head.forward(&mut whole)?;
        whole.pass.finish()?;

        // Its first weight arrives while the loss is computed.
        let mut whole = Whole { pass: published.backward(chain)?, reader, stream };
        // From here on the logits are their gradient.
        cross_entropy.gradient_in_place(stream, lend(logits), targets.view(), lend(losses))?;
        head.backward(&mut whole, gradients)?;
        kernels.zero(x)?;
        norm.backward(kernels, dnormed, x)?;
        for block in blocks.iter_mut().rev() {
            block.backward(kernels, &mut whole, gradients)?;
        }
        whole.pass.finish()?;
        gradients.finish(stream, |_| Ok(()))
    }

    /// The losses of the tokens of the micro-batch that was run last, which the next one does not overwrite.
    pub fn loss(&self) -> Result<Buffer<f32>> {
        let mut kept = Buffer::uninitialised(&self.kernels.stream, self.of.losses.len())?;
        kept.copy_from(&self.kernels.stream, &self.of.losses)?;
        Ok(kept)
    }
}
