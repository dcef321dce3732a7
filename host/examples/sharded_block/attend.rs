//! Attention of a rank's tokens: to a sequence of its own, or to one that all ranks share.

use oxtile::attention::{Attention, AttentionBackward, AttentionConfig, BackwardInputs, Gradients, Inputs, Mask, Order, Outputs};
use oxtile::comm::{Member, Rank, WorldSize};
use oxtile::context_parallel::{ContextParallel, ContextParallelConfig, Partition, Schedule, Transport};
use oxtile::num::bf16;
use oxtile::runtime::Bound;
use oxtile::symmetric::Arena;
use oxtile::{Result, Stream};

use super::shape::Shape;

/// Which tokens of a sequence a rank has.
#[derive(Clone, Copy, Debug)]
pub struct Tokens {
    /// Of the whole sequence.
    pub whole: u64,
    /// The ranks that share it, by which schedule; none if it is this rank's alone.
    pub shared: Option<(Rank, WorldSize, Schedule)>,
}

impl Tokens {
    /// The numbers of this rank's tokens in the sequence.
    pub fn numbers(self) -> Vec<u64> {
        match self.shared {
            None => (0..self.whole).collect(),
            Some((rank, world, _)) => {
                let own = 0..self.whole / u64::from(world.get());
                own.map(|row| Partition::Zigzag.token(rank, world, self.whole, row)).collect()
            }
        }
    }

    /// What attends to all ranks' tokens.
    fn config(self, shape: Shape) -> AttentionConfig {
        AttentionConfig {
            queries: self.whole,
            keys: self.whole,
            heads: shape.heads,
            key_heads: shape.heads,
            head_size: shape.head_size,
            mask: Mask::CausalBottomRight,
            ..AttentionConfig::default()
        }
    }

    /// The same with where the tokens of a shared sequence are.
    fn shared_config(self, shape: Shape) -> Option<ContextParallelConfig> {
        let (_, _, schedule) = self.shared?;
        Some(ContextParallelConfig { partition: Partition::Zigzag, ..ContextParallelConfig::new(self.config(shape)).by(schedule) })
    }

    /// Bytes that its attention takes from each rank's arena.
    pub fn arena_bytes(self, shape: Shape) -> u64 {
        let shared = self.shared.zip(self.shared_config(shape));
        shared.map_or(0, |((_, world, _), config)| config.arena_bytes(world, size_of::<bf16>() as u64))
    }
}

pub enum Attend<'c> {
    Alone(Attention<bf16>, AttentionBackward<bf16>),
    Shared(ContextParallel<'c, bf16>),
}

impl<'c> Attend<'c> {
    pub fn new(stream: &Stream, shape: Shape, tokens: Tokens, arena: &'c Arena, member: &'c Member) -> Result<Self> {
        let (runtime, config) = (&stream.device().runtime(), tokens.config(shape));
        Ok(match tokens.shared_config(shape) {
            None => Self::Alone(Attention::new(runtime, config)?, AttentionBackward::new(runtime, config, Order::Deterministic)?),
            Some(config) => Self::Shared(ContextParallel::new(stream, Transport::symmetric(arena, member), config)?),
        })
    }

    pub fn bind_forward<'m>(&'m self, stream: &Stream, inputs: Inputs<'m, bf16>, outputs: Outputs<'m, bf16>) -> Result<Bound<'m>> {
        match self {
            Self::Alone(attention, _) => attention.bind(stream, inputs, outputs),
            Self::Shared(context) => context.bind_forward(stream, inputs, outputs),
        }
    }

    pub fn bind_backward<'m>(
        &'m self,
        stream: &Stream,
        inputs: BackwardInputs<'m, bf16>,
        gradients: Gradients<'m, bf16>,
    ) -> Result<Bound<'m>> {
        match self {
            Self::Alone(_, attention) => attention.bind(stream, inputs, gradients),
            Self::Shared(context) => context.bind_backward(stream, inputs, gradients),
        }
    }
}
