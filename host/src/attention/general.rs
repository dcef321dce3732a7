//! Being replaced.

use oxtile_tile::launch::{DeviceView, DeviceViewMut};

use super::config::{AttentionConfig, Layout, Sink};
pub(super) use super::sequences::rows_of;
use super::tensors::{Padding, Sequences};
use crate::runtime::{Buffer, Result, Stream};

/// Lengths and offsets of a dense tensor's sequences, as [`Sequences`] has them.
fn dense_sequences(stream: &Stream, config: &AttentionConfig, rows: u64) -> Result<[Buffer<u32>; 2]> {
    let step = if config.layout == Layout::Sbhd { 0 } else { rows };
    let array = |step: u64| (0..=config.batches).map(|batch| (batch * step) as u32).collect::<Vec<u32>>();
    Ok([Buffer::from_slice(stream, &array(rows))?, Buffer::from_slice(stream, &array(step))?])
}

/// Where the sequences lie: given, or made of a dense layout.
pub(super) struct Placement<'a> {
    given: Option<Sequences<'a>>,
    queries: [Buffer<u32>; 2],
    keys: [Buffer<u32>; 2],
}

impl<'a> Placement<'a> {
    pub(super) fn new(stream: &Stream, config: &AttentionConfig, given: Option<Sequences<'a>>) -> Result<Self> {
        let rows = if given.is_some() { [0, 0] } else { [config.queries, config.keys] };
        Ok(Self { given, queries: dense_sequences(stream, config, rows[0])?, keys: dense_sequences(stream, config, rows[1])? })
    }

    /// Sums of queries and of keys, offsets of queries and of keys.
    pub(super) fn arrays(&self) -> [DeviceView<'_, u32>; 4] {
        match &self.given {
            Some(given) => [given.cu_seqlens_q, given.cu_seqlens_kv, given.query_offsets(), given.key_offsets()],
            None => [self.queries[0].view(), self.keys[0].view(), self.queries[1].view(), self.keys[1].view()],
        }
    }

    /// Whether rows of padding are written.
    pub(super) fn padded(&self) -> bool {
        self.given.as_ref().is_some_and(|given| given.padding == Padding::Zeroed)
    }
}

/// Numbers of the softmax: factor of scores, cap and the cap's factor, as the kernel wants them.
pub(super) fn softmax_of(config: &AttentionConfig) -> [f32; 3] {
    let log2e = std::f64::consts::LOG2_E;
    let scale = config.scale();
    match config.soft_cap.map(f64::from) {
        None => [scale * log2e, 0.0, 0.0],
        Some(cap) => [1.0, cap * log2e, 2.0 * log2e * scale / cap],
    }
    .map(|x| x as f32)
}

/// Where scores of sinks come from.
pub(super) fn sink_of<'a>(
    stream: &Stream,
    config: &AttentionConfig,
    given: Option<DeviceView<'a, f32>>,
) -> Result<(Buffer<f32>, Option<DeviceView<'a, f32>>)> {
    let own: &[f32] = if config.sink == Sink::OffByOne { &[0.0] } else { &[] };
    Ok((Buffer::from_slice(stream, own)?, given))
}

/// A view that may not be there, for one launch.
pub(super) fn lend<'s, T>(view: &'s mut Option<DeviceViewMut<'_, T>>, none: &'s mut Buffer<T>) -> DeviceViewMut<'s, T>
where
    T: oxtile_tile::num::Pod,
{
    match view {
        Some(view) => view.slice_mut(0, view.len()),
        None => none.view_mut(),
    }
}
