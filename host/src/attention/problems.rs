//! Tensors bound to the forward kernel on wgmma, by problem: dense tensors, packed sequences, tensors of any layout with options.

use std::marker::PhantomData;
use std::sync::Arc;

use oxtile_kernels::attention::{
    AttentionForward, AttentionForwardArgs, Chosen, Dense, DenseArgument, Optioned, OptionsArgument, Packed, PackedArgument, Policy,
    Target, TileOrderArgument, WarpgroupRoles, Workspace,
};
use oxtile_tile::arch::{Columns, MatrixColumns};
use oxtile_tile::launch::{DeviceViewMut, Kernel};
use oxtile_tile::register_tile::{RegisterElement, StoredElement};

use super::config::Mask;
use super::forward::{AttentionElement, Binding};
use super::heads::{ForwardMaps, Rows, by_head};
use super::results::{BoundResult, ResultTarget};
use super::sequences::{BoundSequences, row_steps};
use super::sink::BoundSink;
use super::tensors::Inputs;
use crate::runtime::{Bound, Buffer, Loaded, Result};
use crate::tensor::{Strided, Uploads};

/// Binds dense tensors.
pub(super) fn bind_dense<'a, T, const D: usize, const V: usize, const KEYS: usize, G, P, R, const CAUSAL: bool>(
    kernel: Arc<Loaded<AttentionForward<T, D, V, KEYS, G, P>>>,
    Binding { stream, config, inputs, outputs }: Binding<'_, 'a, T>,
) -> Result<Bound<'a>>
where
    T: AttentionElement<Out = T> + RegisterElement + StoredElement,
    G: WarpgroupRoles,
    P: Policy<Of<T, D, V, KEYS> = Dense<T, D, V, KEYS, R, CAUSAL>>,
    R: Target<T, V, 4> + ResultTarget<T, V, 4>,
    Columns<D>: MatrixColumns,
    Columns<V>: MatrixColumns,
    Columns<KEYS>: MatrixColumns,
    AttentionForward<T, D, V, KEYS, G, P>: Kernel,
{
    let mut uploads = Uploads::default();
    let Inputs { q, k, v, .. } = inputs;
    let layouts = [config.folded(q.layout()), by_head(k.layout()), by_head(v.layout())];
    let maps = ForwardMaps::<_, KEYS, D, V, 4>::new(&mut uploads, stream, [q, k, v], layouts)?;
    let of_out = config.folded(outputs.out.layout());
    let Strided { strides: [batch, head, row, _], .. } = of_out;
    let mut result = BoundResult::new(&mut uploads, stream, &config, outputs, (of_out, [batch, head, row]))?;
    uploads.copy(stream)?;
    let mut counter = Buffer::<u32>::zeros(stream, 1)?;
    let (shape, diagonal, section, scale) =
        (config.shape(config.rows_and_heads()), config.diagonal(), config.section(size_of::<T>() as u64), config.scale_log2());
    Ok(Bound::new(move |stream| {
        let problem = DenseArgument {
            q: maps.q.view(),
            k: maps.k.view(),
            v: maps.v.view(),
            target: R::argument(&mut result),
            shape,
            diagonal,
            order: TileOrderArgument { counter: counter.view_mut(), section },
            scale,
        };
        kernel.launch(stream, AttentionForwardArgs { problem, marker: PhantomData })
    }))
}

/// Binds packed sequences.
pub(super) fn bind_packed<'a, T, const D: usize, const V: usize, const KEYS: usize, G, P, R, const CAUSAL: bool>(
    kernel: Arc<Loaded<AttentionForward<T, D, V, KEYS, G, P>>>,
    Binding { stream, config, inputs, outputs }: Binding<'_, 'a, T>,
) -> Result<Bound<'a>>
where
    T: AttentionElement<Out = T> + RegisterElement + StoredElement,
    G: WarpgroupRoles,
    P: Policy<Of<T, D, V, KEYS> = Packed<T, D, V, KEYS, R, CAUSAL>>,
    R: Target<T, V, 5> + ResultTarget<T, V, 5>,
    Columns<D>: MatrixColumns,
    Columns<V>: MatrixColumns,
    Columns<KEYS>: MatrixColumns,
    AttentionForward<T, D, V, KEYS, G, P>: Kernel,
{
    let mut uploads = Uploads::default();
    let Inputs { q, k, v, .. } = inputs;
    let layouts = [q, k, v].map(|tensor| config.sequence_rows(tensor.layout()));
    let maps = ForwardMaps::<_, KEYS, D, V, 5>::new(&mut uploads, stream, [q, k, v], layouts)?;
    let of_out = config.sequence_rows(outputs.out.layout());
    let mut result = BoundResult::new(&mut uploads, stream, &config, outputs, (of_out, [0, of_out.head, of_out.row]))?;
    let sequences = BoundSequences::new(&mut uploads, &config, inputs.sequences, [0; 2]);
    uploads.copy(stream)?;
    let mut counter = Buffer::<u32>::zeros(stream, 1)?;
    let (section_keys, scale) = (config.section_keys(size_of::<T>() as u64), config.scale_log2());
    Ok(Bound::new(move |stream| {
        let problem = PackedArgument {
            q: maps.q.view(),
            k: maps.k.view(),
            v: maps.v.view(),
            target: R::argument(&mut result),
            sequences: sequences.argument(),
            heads: sequences.heads,
            counter: counter.view_mut(),
            section_keys,
            top_left: config.mask == Mask::CausalTopLeft,
            scale,
        };
        kernel.launch(stream, AttentionForwardArgs { problem, marker: PhantomData })
    }))
}

/// Binds tensors of any layout.
pub(super) fn bind_options<'a, T, const D: usize, const V: usize, const KEYS: usize, G>(
    kernel: Arc<Loaded<AttentionForward<T, D, V, KEYS, G, Optioned>>>,
    Binding { stream, config, inputs, mut outputs }: Binding<'_, 'a, T>,
) -> Result<Bound<'a>>
where
    T: AttentionElement<Out = T> + RegisterElement + StoredElement,
    G: WarpgroupRoles,
    Columns<D>: MatrixColumns,
    Columns<V>: MatrixColumns,
    Columns<KEYS>: MatrixColumns,
    AttentionForward<T, D, V, KEYS, G, Optioned>: Kernel,
{
    let mut uploads = Uploads::default();
    let steps = row_steps(&config, &inputs, &outputs, Rows::Strided)?;
    let Inputs { q, k, v, .. } = inputs;
    let layouts = [q, k, v].map(|tensor| config.sequence_rows(tensor.layout()));
    let maps = ForwardMaps::<_, KEYS, D, V, 5>::new(&mut uploads, stream, [q, k, v], layouts)?;
    let (of_out, mut max_logit) = (config.sequence_rows(outputs.out.layout()), outputs.max_logit.take());
    let mut result = BoundResult::new(&mut uploads, stream, &config, outputs, (of_out, [0, of_out.head, of_out.row]))?;
    let sequences = BoundSequences::new(&mut uploads, &config, inputs.sequences, steps);
    let sink = BoundSink::new(&mut uploads, &config, inputs.sink);
    uploads.copy(stream)?;
    let mut workspace = Buffer::<u32>::zeros(stream, Workspace::words(config.heads))?;
    let section_keys = config.section_keys(size_of::<T>() as u64);
    Ok(Bound::new(move |stream| {
        let problem = OptionsArgument {
            q: maps.q.view(),
            k: maps.k.view(),
            v: maps.v.view(),
            target: Chosen::argument(&mut result),
            sequences: sequences.argument(),
            heads: sequences.heads,
            log_rows: sequences.log_rows,
            window: config.seen(),
            scores: config.scores(),
            sink: sink.argument(),
            max_logit: max_logit.as_mut().map(DeviceViewMut::reborrow),
            workspace: workspace.view_mut(),
            section_keys,
        };
        kernel.launch(stream, AttentionForwardArgs { problem, marker: PhantomData })
    }))
}
