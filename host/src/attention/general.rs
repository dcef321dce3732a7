//! The kernels of everything else: their arguments.

use oxtile_kernels::attention::{AttentionForwardGeneral, AttentionForwardGeneralArgs, PART, Team, Window as Seen, Workspace};
use oxtile_tile::arch::{Columns, MatrixColumns};
use oxtile_tile::launch::{DeviceView, DeviceViewMut, Kernel};
use oxtile_tile::layout::Swizzle128;
use oxtile_tile::register_tile::{RegisterElement, StoredElement};

use super::config::{AttentionConfig, Layout, Sink};
use super::forward::{Binding, BoundAttention, Instance};
use super::tensors::{Inputs, Outputs, Padding, Sequences, Target};
use crate::runtime::{Buffer, Loaded, Result, Stream};
use crate::tensor::{SequenceRows, TensorMap, TensorMapMut};

/// A tensor of heads as rows that sequences are parts of: the layouts are told apart here and by the offsets.
pub(super) fn rows_of(config: &AttentionConfig, rows: u64, heads: u64, size: u64) -> SequenceRows {
    match config.layout {
        Layout::Bshd => SequenceRows { rows: config.batches * rows, row: heads * size, heads, head: size, size },
        Layout::Sbhd => {
            let heads = config.batches * heads;
            SequenceRows { rows, row: heads * size, heads, head: size, size }
        }
        Layout::Packed => SequenceRows { rows, row: heads * size, heads, head: size, size },
    }
}

/// Keys and values as sequences are parts of them.
pub(super) struct SequenceKeys<'a, T: RegisterElement, const KEYS: usize, const D: usize, const V: usize> {
    pub(super) k: TensorMap<'a, T, KEYS, D, Swizzle128, 5>,
    pub(super) v: TensorMap<'a, T, KEYS, V, Swizzle128, 5>,
    /// Rows of both.
    pub(super) rows: u32,
}

impl<'a, T: RegisterElement, const KEYS: usize, const D: usize, const V: usize> SequenceKeys<'a, T, KEYS, D, V> {
    /// Without keys nothing is loaded by these maps, which must be of something: the queries.
    pub(super) fn new(stream: &Stream, config: &AttentionConfig, inputs: &Inputs<'a, T>) -> Result<Self> {
        let AttentionConfig { queries, keys, heads, key_heads, head_size, .. } = *config;
        let of_keys = |size| rows_of(config, keys, key_heads, size);
        let ((k, of_k), (v, of_v)) = match of_keys(head_size).rows {
            0 => [(inputs.q, rows_of(config, queries, heads, head_size)); 2].into(),
            _ => ((inputs.k, of_keys(head_size)), (inputs.v, of_keys(config.value_size()))),
        };
        let rows = if keys == 0 { 0 } else { of_k.rows as u32 };
        Ok(Self { k: TensorMap::sequences(stream, k, of_k)?, v: TensorMap::sequences(stream, v, of_v)?, rows })
    }
}

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

impl<T, const D: usize, const V: usize, const KEYS: usize, G> Instance<T> for Loaded<AttentionForwardGeneral<T, D, V, KEYS, G>>
where
    T: RegisterElement + StoredElement,
    G: Team + Send + Sync,
    Columns<D>: MatrixColumns,
    Columns<V>: MatrixColumns,
    Columns<KEYS>: MatrixColumns,
    AttentionForwardGeneral<T, D, V, KEYS, G>: for<'a> Kernel<Args<'a> = AttentionForwardGeneralArgs<'a, T, D, V, KEYS, G>>,
{
    fn bind<'a>(&'a self, binding: Binding<'_, 'a, T>) -> Result<BoundAttention<'a>> {
        let Binding { stream, config, inputs, outputs } = binding;
        let AttentionConfig { layout, batches, queries, heads, head_size, .. } = config;
        let value_size = config.value_size();
        let [of_q, of_out] = [head_size, value_size].map(|size| rows_of(&config, queries, heads, size));
        let SequenceKeys { k, v, rows: key_rows } = SequenceKeys::<T, KEYS, D, V>::new(stream, &config, &inputs)?;
        let Inputs { q, sequences, sink, .. } = inputs;
        let Outputs { out, mut log_sum_exp, mut max_logit } = outputs;
        let q = TensorMap::<_, PART, D, Swizzle128, 5>::sequences(stream, q, of_q)?;
        let (out, mut running) = match out {
            Target::Rounded(out) => ((out, of_out), None),
            Target::Merged(running) => {
                let access = running.access("running");
                // SAFETY: the memory is there as long as the running result, which has at least as many bytes. The kernel does not
                // store through this map, as it is given a running result.
                let view = unsafe { DeviceViewMut::<T>::from_raw(access.address, running.len(), access.owner) };
                ((view, of_out), Some(running))
            }
        };
        let mut out = TensorMapMut::<_, PART, V, Swizzle128, 5>::sequences(stream, out.0, out.1)?;
        let placement = Placement::new(stream, &config, sequences)?;
        let (own_sink, sink) = sink_of(stream, &config, sink)?;
        let mut workspace = Buffer::<u32>::zeros(stream, Workspace::words(heads))?;
        let mut nothing = [Buffer::<f32>::zeros(stream, 0)?, Buffer::<f32>::zeros(stream, 0)?];
        let [scale, cap_limit, cap_factor] = softmax_of(&config);
        let Seen { left, right, top_left } = config.seen();
        let packed = layout == Layout::Packed;
        let section_keys = config.section_keys(size_of::<T>() as u64);
        let log_sum_exp_length = log_sum_exp.len();
        Ok(BoundAttention::new(move |stream| {
            let [query_ends, key_ends, query_offsets, key_offsets] = placement.arrays();
            let [no_running, no_logit] = &mut nothing;
            let args = AttentionForwardGeneralArgs {
                q: q.view(),
                k: k.view(),
                v: v.view(),
                out: out.view_mut(),
                running: lend(&mut running, no_running),
                log_sum_exp: log_sum_exp.slice_mut(0, log_sum_exp_length),
                max_logit: lend(&mut max_logit, no_logit),
                sink: sink.unwrap_or(own_sink.view()),
                query_ends,
                key_ends,
                query_offsets,
                key_offsets,
                workspace: workspace.view_mut(),
                batches: batches as u32,
                heads: heads as u32,
                group: config.group() as u32,
                sequence_heads: if layout == Layout::Sbhd { heads as u32 } else { 0 },
                query_rows: of_q.rows as u32,
                key_rows,
                section_keys,
                row_stride: of_out.row,
                value_size: value_size as u32,
                statistics_batch: if packed { 0 } else { heads * queries },
                statistics_head: queries,
                packed: u32::from(packed),
                padded: u32::from(placement.padded()),
                left,
                right,
                top_left: u32::from(top_left),
                scale,
                cap_limit,
                cap_factor,
                marker: std::marker::PhantomData,
            };
            self.launch(stream, args)
        }))
    }
}
