//! The gradient of learnable sinks, which all ranks' rows have a share in.

use oxtile_kernels::attention::AttentionBackwardSink;

use super::arrays::Arrays;
use super::config::ContextParallelConfig;
use super::local::Local;
use super::memory::Scratch;
use crate::attention::Sink;
use crate::runtime::{Loaded, Result, Stream};
use crate::sum_parts::SumParts;
use crate::thd::StepKeys;

/// What its gradient takes.
pub(super) struct SinkMemory {
    pub kernel: Loaded<AttentionBackwardSink>,
    pub sum: SumParts<f32, f32>,
    /// All rows that see anything.
    pub arrays: Arrays,
    /// A score of each head.
    pub scores: Scratch<f32>,
}

impl SinkMemory {
    /// Takes it, if the sink is learnable.
    pub fn new(stream: &Stream, config: &ContextParallelConfig, local: &Local) -> Result<Option<Self>> {
        if config.attention.sink != Sink::Learnable {
            return Ok(None);
        }
        let runtime = stream.device().runtime();
        Ok(Some(Self {
            kernel: runtime.load()?,
            sum: SumParts::new(&runtime)?,
            arrays: Arrays::new(stream, config, local, StepKeys::Whole)?,
            scores: Scratch::new(stream, "sinks", local.packed.heads)?,
        }))
    }

    /// Device memory.
    pub fn bytes(&self) -> u64 {
        self.arrays.bytes() + self.scores.bytes()
    }
}
