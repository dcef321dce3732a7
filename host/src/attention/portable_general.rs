//! The general kernel for GPUs other than Hopper: its arguments.

use oxtile_kernels::attention::{
    AttentionForwardPortableGeneral, AttentionForwardPortableGeneralArgs, MaxLogitArgument, PortableGeneralResultsArgument, Scores,
    SizedInputsArgument, Workspace,
};
use oxtile_tile::arch::{Columns, MatrixColumns};
use oxtile_tile::launch::Kernel;
use oxtile_tile::register_tile::RegisterElement;

use super::config::Sink;
use super::forward::{Binding, BoundAttention, Instance};
use super::general::{Placement, softmax_of};
use super::portable::{Sizes, check_aligned};
use super::tensors::{Inputs, Outputs, Target};
use crate::runtime::{Buffer, Loaded, Result, nothing_mut};

impl<T, const PANELS: usize, const KEYS: usize> Instance<T> for Loaded<AttentionForwardPortableGeneral<T, PANELS, KEYS>>
where
    T: RegisterElement,
    Columns<KEYS>: MatrixColumns,
    AttentionForwardPortableGeneral<T, PANELS, KEYS>: for<'a> Kernel<Args<'a> = AttentionForwardPortableGeneralArgs<'a, T, PANELS, KEYS>>,
{
    fn bind<'a>(&'a self, binding: Binding<'_, 'a, T>) -> Result<BoundAttention<'a>> {
        let Binding { stream, config, inputs, outputs } = binding;
        let Inputs { q, k, v, sequences, sink } = inputs;
        let Outputs { out, mut log_sum_exp, mut max_logit } = outputs;
        check_aligned("Attention, q", q)?;
        check_aligned("Attention, k", k)?;
        check_aligned("Attention, v", v)?;
        let (mut out, mut running) = match out {
            Target::Rounded(out) => (Some(out), None),
            Target::Merged(running) => (None, Some(running)),
        };
        let placement = Placement::new(stream, &config, sequences)?;
        let zero = (config.sink == Sink::OffByOne).then(|| Buffer::from_slice(stream, &[0_f32])).transpose()?;
        let words = if config.max_logit { Workspace::words(config.heads) } else { 0 };
        let mut workspace = Buffer::<u32>::zeros(stream, words)?;
        let (sizes, window) = (Sizes::of(&config), config.seen());
        let [size, value_size] = [config.head_size, config.value_size()].map(|size| size as u32);
        let [scale, cap_limit, cap_factor] = softmax_of(&config);
        Ok(BoundAttention::new(move |stream| {
            let args = AttentionForwardPortableGeneralArgs {
                inputs: SizedInputsArgument { q, k, v, size, value_size },
                results: PortableGeneralResultsArgument {
                    out: out.as_mut().map_or_else(nothing_mut, |out| out.slice_mut(0, out.len())),
                    running: running.as_mut().map(|running| running.slice_mut(0, running.len())),
                    log_sum_exp: sizes.log_sum_exp(&mut log_sum_exp),
                },
                max_logit: max_logit
                    .as_mut()
                    .map(|values| MaxLogitArgument { values: values.slice_mut(0, values.len()), workspace: workspace.view_mut() }),
                sink: sink.or(zero.as_ref().map(Buffer::view)),
                sequences: sizes.sequences(&placement),
                heads: sizes.heads,
                row_tiles: sizes.row_tiles,
                window,
                scores: Scores { scale, cap_limit, cap_factor },
            };
            self.launch(stream, args)
        }))
    }
}
