//! The passes of a rank: enqueued in every step, or captured in the first one and replayed.

use oxtile::sharded::{Captured, Chain, ChainConfig, Places, Published, ShardSet};
use oxtile::{Graph, Result, Stream};

use super::format::Format;
use super::model::{BoundModel, Model};

pub enum Passes<F: Format> {
    Eager(Chain<F>),
    /// Of one micro-batch a step.
    Captured(Chain<F, Captured>, Option<Graph>),
}

impl<F: Format> Passes<F> {
    pub fn new(stream: &Stream, set: &ShardSet<F>, is_captured: bool) -> Result<Self> {
        let config = ChainConfig::new(set, Model::order(set))?;
        Ok(if is_captured {
            Self::Captured(Chain::captured(stream, set, &config)?, None)
        } else {
            Self::Eager(Chain::new(stream, set, &config)?)
        })
    }

    /// Where whole weights are.
    pub fn places(&self) -> Places<F> {
        match self {
            Self::Eager(chain) => chain.places(),
            Self::Captured(chain, _) => chain.places(),
        }
    }

    /// Enqueues a forward and a backward pass of the micro-batch that the model was given, which may be the first of its step.
    pub fn run(&mut self, stream: &Stream, model: &mut BoundModel<'_, '_, F>, published: &Published<'_, F>, is_first: bool) -> Result<()> {
        match self {
            Self::Eager(chain) => model.run(published, chain, is_first),
            Self::Captured(_, Some(graph)) => graph.replay(stream),
            Self::Captured(chain, graph) => {
                let (pulls, [send, sum]) = (chain.pulls().clone(), model.gradients.streams());
                let captured = Graph::capture(&[stream, &pulls, send, sum], || model.run(published, chain, is_first))?;
                graph.insert(captured).replay(stream)
            }
        }
    }
}
