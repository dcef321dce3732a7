//! The general kernel for GPUs other than Hopper: its arguments.

use oxtile_kernels::attention::{
    AttentionForwardPortableGeneral, AttentionForwardPortableGeneralArgs, PORTABLE_QUERIES, Window as Seen, Workspace,
};
use oxtile_tile::arch::{Columns, MatrixColumns};
use oxtile_tile::launch::Kernel;
use oxtile_tile::register_tile::RegisterElement;

use super::config::{AttentionConfig, Layout, refuse};
use super::forward::{Binding, BoundAttention, Instance};
use super::general::{Placement, lend, sink_of, softmax_of};
use super::portable::check_aligned;
use super::tensors::{Inputs, Outputs, Target};
use crate::runtime::{Buffer, Loaded, Result};

impl<T, const PANELS: usize, const KEYS: usize> Instance<T> for Loaded<AttentionForwardPortableGeneral<T, PANELS, KEYS>>
where
    T: RegisterElement,
    Columns<KEYS>: MatrixColumns,
    AttentionForwardPortableGeneral<T, PANELS, KEYS>: for<'a> Kernel<Args<'a> = AttentionForwardPortableGeneralArgs<'a, T, PANELS, KEYS>>,
{
    fn bind<'a>(&'a self, binding: Binding<'_, 'a, T>) -> Result<BoundAttention<'a>> {
        let Binding { stream, config, inputs, outputs } = binding;
        let AttentionConfig { layout, batches, queries, keys, heads, head_size, .. } = config;
        let Inputs { q, k, v, sequences, sink } = inputs;
        let Outputs { out, mut log_sum_exp, mut max_logit } = outputs;
        check_aligned("Attention, q", q)?;
        check_aligned("Attention, k", k)?;
        check_aligned("Attention, v", v)?;
        let (mut out, mut running) = match out {
            Target::Rounded(out) => (Some(out), None),
            Target::Merged(running) => (None, Some(running)),
            Target::Last { .. } => return refuse("output", "Last", "Rounded or Merged on a GPU without wgmma"),
        };
        let placement = Placement::new(stream, &config, sequences)?;
        let (own_sink, sink) = sink_of(stream, &config, sink)?;
        let words = if config.max_logit { Workspace::words(heads) } else { 0 };
        let mut workspace = Buffer::<u32>::zeros(stream, words)?;
        let mut no_out = Buffer::<T>::zeros(stream, 0)?;
        let mut nothing = [Buffer::<f32>::zeros(stream, 0)?, Buffer::<f32>::zeros(stream, 0)?];
        let log_sum_exp_length = log_sum_exp.len();
        let (packed, sbhd) = (layout == Layout::Packed, layout == Layout::Sbhd);
        let [query_rows, key_rows] = if sbhd { [queries, keys] } else { config.rows() };
        let Seen { left, right, top_left } = config.seen();
        let [scale, cap_limit, cap_factor] = softmax_of(&config);
        Ok(BoundAttention::new(move |stream| {
            let [query_ends, key_ends, query_offsets, key_offsets] = placement.arrays();
            let [no_running, no_logit] = &mut nothing;
            let args = AttentionForwardPortableGeneralArgs {
                q,
                k,
                v,
                out: lend(&mut out, &mut no_out),
                running: lend(&mut running, no_running),
                log_sum_exp: log_sum_exp.slice_mut(0, log_sum_exp_length),
                max_logit: lend(&mut max_logit, no_logit),
                sink: sink.unwrap_or(own_sink.view()),
                query_ends,
                key_ends,
                query_offsets,
                key_offsets,
                workspace: workspace.view_mut(),
                query_rows: query_rows as u32,
                key_rows: key_rows as u32,
                padded: u32::from(placement.padded()),
                batches: batches as u32,
                heads: heads as u32,
                group: config.group() as u32,
                head_step: if sbhd { heads as u32 } else { 0 },
                row_tiles: queries.div_ceil(PORTABLE_QUERIES as u64) as u32,
                log_rows: if packed { 0 } else { queries as u32 },
                size: head_size as u32,
                value_size: config.value_size() as u32,
                left,
                right,
                top_left: u32::from(top_left),
                scale,
                cap_limit,
                cap_factor,
            };
            self.launch(stream, args)
        }))
    }
}
