//! The general kernel for GPUs other than Hopper: its arguments.

use oxtile_kernels::attention::{
    AttentionForwardPortableGeneral, AttentionForwardPortableGeneralArgs, MaxLogitArgument, PortableGeneralResultsArgument,
    SizedInputsArgument, Workspace,
};
use oxtile_tile::arch::{Columns, MatrixColumns};
use oxtile_tile::launch::Kernel;
use oxtile_tile::register_tile::RegisterElement;

use super::forward::{Binding, BoundAttention, Instance};
use super::portable::{Sizes, check_aligned};
use super::sequences::Placement;
use super::sink::BoundSink;
use super::tensors::{Inputs, Outputs, Target};
use crate::runtime::{Buffer, Error, Loaded, Result, nothing_mut};
use crate::tensor::Uploads;

impl<T, const PANELS: usize, const KEYS: usize> Instance<T> for Loaded<AttentionForwardPortableGeneral<T, PANELS, KEYS>>
where
    T: RegisterElement,
    Columns<KEYS>: MatrixColumns,
    AttentionForwardPortableGeneral<T, PANELS, KEYS>: Kernel,
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
            Target::Last { .. } => return Err(Error::Invalid { what: "Attention, out", why: "this kernel merges every step".to_owned() }),
        };
        let mut uploads = Uploads::default();
        let (placement, sink) = (Placement::new(&mut uploads, &config, sequences), BoundSink::new(&mut uploads, &config, sink));
        uploads.copy(stream)?;
        let words = if config.max_logit { Workspace::words(config.heads) } else { 0 };
        let mut workspace = Buffer::<u32>::zeros(stream, words)?;
        let (sizes, window) = (Sizes::of(&config), config.seen());
        let [size, value_size] = [config.head_size, config.value_size()].map(|size| size as u32);
        Ok(BoundAttention::new(move |stream| {
            let args = AttentionForwardPortableGeneralArgs {
                inputs: SizedInputsArgument { q, k, v, size, value_size, sink: sink.argument() },
                results: PortableGeneralResultsArgument {
                    out: out.as_mut().map_or_else(nothing_mut, |out| out.slice_mut(0, out.len())),
                    running: running.as_mut().map(|running| running.slice_mut(0, running.len())),
                    log_sum_exp: sizes.log_sum_exp(&mut log_sum_exp),
                    max_logit: max_logit
                        .as_mut()
                        .map(|values| MaxLogitArgument { values: values.slice_mut(0, values.len()), workspace: workspace.view_mut() }),
                },
                sequences: sizes.sequences(&placement),
                heads: sizes.heads,
                row_tiles: sizes.row_tiles,
                window,
                scores: config.kernel_scores(),
            };
            self.launch(stream, args)
        }))
    }
}
