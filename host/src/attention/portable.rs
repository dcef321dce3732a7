//! Tensors bound to the portable kernels of the forward pass, those for any GPU.

use std::sync::Arc;

use oxtile_kernels::attention::{
    AttentionForwardPortable, AttentionForwardPortableArgs, AttentionForwardPortableGeneral, AttentionForwardPortableGeneralArgs,
    InputsArgument, LogSumExpArgument, MaxLogitArgument, PORTABLE_QUERIES, PortableGeneralResultsArgument, PortableResultsArgument,
    SizedInputsArgument, Workspace,
};
use oxtile_tile::arch::{Columns, MatrixColumns};
use oxtile_tile::launch::{DeviceView, DeviceViewMut, Kernel};
use oxtile_tile::num::Pod;
use oxtile_tile::register_tile::RegisterElement;

use super::config::AttentionConfig;
use super::forward::{AttentionElement, Binding};
use super::heads::Rows;
use super::sequences::{BoundSequences, row_steps};
use super::sink::BoundSink;
use super::tensors::{Inputs, Outputs, Target};
use crate::runtime::{Bound, Buffer, Error, Loaded, Result};
use crate::tensor::Uploads;

/// Copies are of 16 bytes, which lie at multiples of 16.
pub(super) fn check_aligned<T: Pod>(what: &'static str, view: DeviceView<'_, T>) -> Result<()> {
    let address = view.access(what).address;
    if address.is_multiple_of(16) {
        return Ok(());
    }
    Err(Error::Invalid { what, why: format!("it starts at {address:#x}, no multiple of 16 bytes: slice it elsewhere, or copy it") })
}

/// The views of queries, keys and values.
fn aligned_inputs<'a, T: Pod>(Inputs { q, k, v, .. }: &Inputs<'a, T>) -> Result<[DeviceView<'a, T>; 3]> {
    check_aligned("Attention, q", q.view())?;
    check_aligned("Attention, k", k.view())?;
    check_aligned("Attention, v", v.view())?;
    Ok([q.view(), k.view(), v.view()])
}

impl AttentionConfig {
    /// Blocks of queries that the longest sequence may have.
    fn portable_row_tiles(&self) -> u32 {
        self.queries.div_ceil(PORTABLE_QUERIES as u64) as u32
    }
}

/// Binds tensors to the plain kernel.
pub(super) fn bind<'a, T, const D: usize>(
    kernel: Arc<Loaded<AttentionForwardPortable<T, D>>>,
    Binding { stream, config, inputs, outputs }: Binding<'_, 'a, T>,
) -> Result<Bound<'a>>
where
    T: AttentionElement<Out = T> + RegisterElement,
    Columns<D>: MatrixColumns,
    AttentionForwardPortable<T, D>: Kernel,
{
    let ([q, k, v], steps) = (aligned_inputs(&inputs)?, row_steps(&config, &inputs, &outputs, Rows::Whole)?);
    let (mut out, mut log_sum_exp) = (outputs.out.rounded()?.into_view(), outputs.log_sum_exp);
    let mut uploads = Uploads::default();
    let sequences = BoundSequences::new(&mut uploads, &config, inputs.sequences, steps);
    uploads.copy(stream)?;
    Ok(Bound::new(move |stream| {
        let log_sum_exp = LogSumExpArgument { values: log_sum_exp.reborrow(), rows: sequences.log_rows };
        let args = AttentionForwardPortableArgs {
            inputs: InputsArgument { q, k, v },
            results: PortableResultsArgument { out: out.reborrow(), log_sum_exp },
            sequences: sequences.argument(),
            heads: sequences.heads,
            row_tiles: config.portable_row_tiles(),
            window: config.seen(),
            scale: config.scale_log2(),
        };
        kernel.launch(stream, args)
    }))
}

/// Binds tensors to the kernel of everything.
pub(super) fn bind_general<'a, T, const PANELS: usize, const KEYS: usize>(
    kernel: Arc<Loaded<AttentionForwardPortableGeneral<T, PANELS, KEYS>>>,
    Binding { stream, config, inputs, outputs }: Binding<'_, 'a, T>,
) -> Result<Bound<'a>>
where
    T: AttentionElement<Out = T> + RegisterElement,
    Columns<KEYS>: MatrixColumns,
    AttentionForwardPortableGeneral<T, PANELS, KEYS>: Kernel,
{
    let ([q, k, v], steps) = (aligned_inputs(&inputs)?, row_steps(&config, &inputs, &outputs, Rows::Whole)?);
    let Outputs { out, mut log_sum_exp, mut max_logit } = outputs;
    let (mut out, mut running) = match out {
        Target::Rounded(out) => (Some(out.into_view()), None),
        Target::Merged(running) => (None, Some(running.into_view())),
        Target::Last { .. } => return Err(Error::Invalid { what: "Attention, out", why: "this kernel merges every step".to_owned() }),
    };
    let mut uploads = Uploads::default();
    let sequences = BoundSequences::new(&mut uploads, &config, inputs.sequences, steps);
    let sink = BoundSink::new(&mut uploads, &config, inputs.sink);
    uploads.copy(stream)?;
    let words = if config.max_logit { Workspace::words(config.heads) } else { 0 };
    let mut workspace = Buffer::<u32>::zeros(stream, words)?;
    let [size, value_size] = [config.head_size, config.value_size()].map(|size| size as u32);
    Ok(Bound::new(move |stream| {
        let values = max_logit.as_mut().map(DeviceViewMut::reborrow);
        let args = AttentionForwardPortableGeneralArgs {
            inputs: SizedInputsArgument { q, k, v, size, value_size, sink: sink.argument() },
            results: PortableGeneralResultsArgument {
                out: out.as_mut().map(DeviceViewMut::reborrow),
                running: running.as_mut().map(DeviceViewMut::reborrow),
                log_sum_exp: LogSumExpArgument { values: log_sum_exp.reborrow(), rows: sequences.log_rows },
                max_logit: values.map(|values| MaxLogitArgument { values, workspace: workspace.view_mut() }),
            },
            sequences: sequences.argument(),
            heads: sequences.heads,
            row_tiles: config.portable_row_tiles(),
            window: config.seen(),
            scores: config.scores(),
        };
        kernel.launch(stream, args)
    }))
}
