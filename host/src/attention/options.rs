//! Tensors of any layout bound to the forward kernel with options.

use oxtile_kernels::attention::{
    AttentionForward, AttentionForwardArgs, ChosenArgument, Optioned, OptionsArgument, PART, RoundedArgument, Team, Workspace,
};
use oxtile_tile::arch::{Columns, MatrixColumns};
use oxtile_tile::launch::{DeviceViewMut, Kernel};
use oxtile_tile::layout::Swizzle128;
use oxtile_tile::register_tile::{RegisterElement, StoredElement};

use super::config::{Layout, Output};
use super::dense::BoundRunning;
use super::forward::{Binding, BoundAttention};
use super::sequences::{Placement, SequenceKeys, rows_of};
use super::sink::BoundSink;
use super::tensors::Outputs;
use crate::runtime::{Buffer, Loaded, Result};
use crate::tensor::{TensorMap, TensorMapMut, Uploads};

/// Where the result goes.
enum Chosen<'a, T, const V: usize> {
    Running(BoundRunning<'a, T>),
    Rounded(TensorMapMut<'a, T, PART, V, Swizzle128, 5>, DeviceViewMut<'a, f32>),
}

/// Binds tensors of any layout.
pub(super) fn bind<'a, T, const D: usize, const V: usize, const KEYS: usize, G>(
    kernel: &'a Loaded<AttentionForward<T, D, V, KEYS, G, Optioned>>,
    binding: Binding<'_, 'a, T>,
) -> Result<BoundAttention<'a>>
where
    T: RegisterElement + StoredElement,
    G: Team,
    Columns<D>: MatrixColumns,
    Columns<V>: MatrixColumns,
    Columns<KEYS>: MatrixColumns,
    AttentionForward<T, D, V, KEYS, G, Optioned>: Kernel,
{
    let Binding { stream, config, inputs, outputs } = binding;
    let mut uploads = Uploads::default();
    let keys = SequenceKeys::<T, KEYS, D, V>::new(&mut uploads, stream, &config, &inputs)?;
    let [of_queries, of_out] = [config.head_size, config.value_size()].map(|size| rows_of(&config, config.queries, config.heads, size));
    let q = TensorMap::<_, PART, D, Swizzle128, 5>::sequences_in(&mut uploads, stream, inputs.q, of_queries)?;
    let Outputs { out, log_sum_exp, mut max_logit } = outputs;
    let mut target = match config.output {
        Output::Rounded => Chosen::Rounded(TensorMapMut::sequences_in(&mut uploads, stream, out.rounded()?, of_out)?, log_sum_exp),
        _ => {
            let outputs = Outputs { out, log_sum_exp, max_logit: None };
            Chosen::Running(BoundRunning::new(&config, outputs, [0, of_out.head, of_out.row])?)
        }
    };
    let placement = Placement::new(&mut uploads, &config, inputs.sequences);
    let sink = BoundSink::new(&mut uploads, &config, inputs.sink);
    uploads.copy(stream)?;
    let mut workspace = Buffer::<u32>::zeros(stream, Workspace::words(config.heads))?;
    let section_keys = config.section_keys(size_of::<T>() as u64);
    let log_rows = if config.layout == Layout::Packed { 0 } else { config.queries as u32 };
    Ok(BoundAttention::new(move |stream| {
        let (running, rounded) = match &mut target {
            Chosen::Running(running) => (Some(running.argument()), None),
            Chosen::Rounded(out, log_sum_exp) => (None, Some(RoundedArgument { out: out.view_mut(), log_sum_exp: log_sum_exp.reborrow() })),
        };
        let problem = OptionsArgument {
            q: q.view(),
            k: keys.k.view(),
            v: keys.v.view(),
            target: ChosenArgument { running, rounded },
            sequences: placement.argument([of_queries.rows as u32, keys.rows]),
            heads: config.kernel_heads(),
            log_rows,
            window: config.seen(),
            scores: config.kernel_scores(),
            sink: sink.argument(),
            max_logit: max_logit.as_mut().map(DeviceViewMut::reborrow),
            workspace: workspace.view_mut(),
            section_keys,
        };
        kernel.launch(stream, AttentionForwardArgs { problem, marker: std::marker::PhantomData })
    }))
}
