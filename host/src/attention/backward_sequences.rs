//! What the kernels of sequences take in the backward pass, whatever they multiply by.

use oxtile_kernels::attention::{
    AttentionBackwardSink as Sink, AttentionBackwardSinkArgs as SinkArgs, Heads, QueryStatisticsArgument, Scores, SequencesArgument, Window,
};
use oxtile_tile::launch::{DeviceView, DeviceViewMut};

use super::config::{AttentionConfig, Layout};
use super::sequences::Placement;
use super::tensors::Sequences;
use crate::runtime::{Loaded, Result, Stream};

/// Sequences, their heads, and how scores are made.
pub(super) struct SequenceArguments<'a> {
    placement: Placement<'a>,
    /// Rows of tensors of queries and of keys.
    rows: [u32; 2],
    pub(super) heads: Heads,
    pub(super) window: Window,
    pub(super) scores: Scores,
    log_sum_exp: DeviceView<'a, f32>,
    /// Rows of a head of the log-sum-exp, if sequences have heads of their own in it.
    statistics_rows: u32,
}

impl<'a> SequenceArguments<'a> {
    pub(super) fn new(
        stream: &Stream,
        config: &AttentionConfig,
        sequences: Option<Sequences<'a>>,
        log_sum_exp: DeviceView<'a, f32>,
    ) -> Result<Self> {
        let AttentionConfig { layout, queries, keys, .. } = *config;
        let rows = if layout == Layout::Sbhd { [queries, keys] } else { config.rows() };
        Ok(Self {
            placement: Placement::copied(stream, config, sequences)?,
            rows: rows.map(|rows| rows as u32),
            heads: config.kernel_heads(),
            window: config.seen(),
            scores: config.kernel_scores(),
            log_sum_exp,
            statistics_rows: if layout == Layout::Packed { 0 } else { queries as u32 },
        })
    }

    pub(super) fn sequences(&self) -> SequencesArgument<'_> {
        self.placement.argument(self.rows)
    }

    /// The log-sum-exp, beside the row sums of `O dO`.
    pub(super) fn statistics<'s>(&self, deltas: DeviceView<'s, f32>) -> QueryStatisticsArgument<'s>
    where
        'a: 's,
    {
        QueryStatisticsArgument { log_sum_exp: self.log_sum_exp, deltas, rows: self.statistics_rows }
    }

    /// Writes the gradient of the sink, if it is wanted.
    pub(super) fn differentiate_sink(
        &self,
        stream: &Stream,
        kernel: &Loaded<Sink>,
        sink: Option<DeviceView<'_, f32>>,
        grad_sink: Option<DeviceViewMut<'_, f32>>,
        deltas: DeviceView<'_, f32>,
    ) -> Result<()> {
        let (Some(sink), Some(grad_sink)) = (sink, grad_sink) else { return Ok(()) };
        let (statistics, sequences) = (self.statistics(deltas), self.sequences());
        kernel.launch(stream, SinkArgs { sink, grad_sink, statistics, sequences, batches: self.heads.batches })
    }
}
