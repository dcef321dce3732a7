//! The kernels of heads above 128 on Hopper, bound for the backward pass.

use std::sync::Arc;

use oxtile_kernels::attention::{
    AttentionBackwardSink as Sink, AttentionBackwardWideKeys as OfKeys, AttentionBackwardWideKeysArgs as OfKeysArgs,
    AttentionBackwardWideQueries as OfQueries, AttentionBackwardWideQueriesArgs as OfQueriesArgs, KeySumsArgument, QueryTargetArgument,
    WIDE_ROWS, WideKeyGradientsArgument, WideKeyTargetArgument, WideOrderArgument, WideTensorsArgument,
};
use oxtile_tile::arch::{Columns, MatrixColumns};
use oxtile_tile::launch::Kernel;
use oxtile_tile::layout::Swizzle128;
use oxtile_tile::register_tile::{RegisterElement, StoredElement};

use super::backward::{BackwardElement, Binding};
use super::backward_blocks::map_mut;
use super::backward_deltas::Deltas;
use super::config::GradientOutput;
use super::heads::Rows;
use super::sequences::BoundSequences;
use super::sink::differentiate_sink;
use crate::runtime::{Bound, Buffer, Loaded, Result, Stream};
use crate::tensor::{Heads, HeadsMut, SequenceRows, Strided, TensorMap, TensorMapMut, Uploads};

/// The kernels of the gradients of keys, of queries and of the sink.
type Kernels<T, const D: usize, const V: usize, const QUERIES: usize, const PAIRS: usize, const KEYS: usize> =
    (Loaded<OfKeys<T, D, V, QUERIES, PAIRS>>, Loaded<OfQueries<T, D, V, KEYS>>, Loaded<Sink>);

type Map<'a, T, const ROWS: usize, const SIZE: usize> = TensorMap<'a, T, ROWS, SIZE, Swizzle128, 5>;
type MapMut<'a, T, const SIZE: usize> = TensorMapMut<'a, T, WIDE_ROWS, SIZE, Swizzle128, 5>;

/// Maps of what a kernel reads, by so many queries or keys.
struct Maps<'a, T: RegisterElement, const D: usize, const V: usize, const QUERIES: usize, const KEYS: usize> {
    q: Map<'a, T, QUERIES, D>,
    grad_out: Map<'a, T, QUERIES, V>,
    k: Map<'a, T, KEYS, D>,
    v: Map<'a, T, KEYS, V>,
}

impl<'a, T: RegisterElement, const D: usize, const V: usize, const QUERIES: usize, const KEYS: usize> Maps<'a, T, D, V, QUERIES, KEYS> {
    fn new(
        uploads: &mut Uploads,
        stream: &Stream,
        [q, grad_out, k, v]: [Heads<'a, T>; 4],
        layout: impl Fn(Strided<4>) -> SequenceRows,
    ) -> Result<Self> {
        Ok(Self {
            q: TensorMap::with(uploads, stream, q.view(), layout(q.layout()))?,
            grad_out: TensorMap::with(uploads, stream, grad_out.view(), layout(grad_out.layout()))?,
            k: TensorMap::with(uploads, stream, k.view(), layout(k.layout()))?,
            v: TensorMap::with(uploads, stream, v.view(), layout(v.layout()))?,
        })
    }
}

/// Binds tensors.
pub(super) fn bind<'a, T, const D: usize, const V: usize, const QUERIES: usize, const PAIRS: usize, const KEYS: usize>(
    kernels: Arc<Kernels<T, D, V, QUERIES, PAIRS, KEYS>>,
    binding: Binding<'_, 'a, T>,
) -> Result<Bound<'a>>
where
    T: BackwardElement + RegisterElement + StoredElement,
    Columns<D>: MatrixColumns,
    Columns<V>: MatrixColumns,
    Columns<QUERIES>: MatrixColumns,
    Columns<KEYS>: MatrixColumns,
    OfKeys<T, D, V, QUERIES, PAIRS>: Kernel,
    OfQueries<T, D, V, KEYS>: Kernel,
{
    let Binding { stream, config, inputs, delta_kernel, deltas, log_sum_exp, grad_out, mut gradients, .. } = binding;
    let mut deltas = Deltas::new(stream, delta_kernel, deltas, log_sum_exp.len())?;
    let (sink, mut grad_sink) = (inputs.sink, gradients.sink.take());
    // Gradients are added by the numbers of rows.
    let target = if config.gradients == GradientOutput::Added { Rows::Whole } else { Rows::Strided };
    let steps = gradients.row_steps(&config, &inputs, &grad_out, [Rows::Strided, target])?;
    let (mut uploads, layout) = (Uploads::default(), |tensor| config.sequence_rows(tensor));
    let (rounded, added) = gradients.split();
    let mut added = added.map(|tensors| tensors.map(HeadsMut::into_view));
    let mut rounded: Option<(MapMut<'a, T, D>, MapMut<'a, T, D>, MapMut<'a, T, V>)> = match rounded {
        Some([q, k, v]) => Some((
            map_mut(&mut uploads, stream, q, layout)?,
            map_mut(&mut uploads, stream, k, layout)?,
            map_mut(&mut uploads, stream, v, layout)?,
        )),
        None => None,
    };
    let tensors = [inputs.q, grad_out, inputs.k, inputs.v];
    let for_keys = Maps::<T, D, V, QUERIES, WIDE_ROWS>::new(&mut uploads, stream, tensors, layout)?;
    let for_queries = Maps::<T, D, V, WIDE_ROWS, KEYS>::new(&mut uploads, stream, tensors, layout)?;
    let sequences = BoundSequences::new(&mut uploads, &config, inputs.sequences, steps);
    uploads.copy(stream)?;
    let mut counter = Buffer::<u32>::zeros(stream, 1)?;
    let (scale, section_rows) = (config.scale() as f32, config.section_rows(size_of::<T>() as u64));
    let [size, value_size] = [config.head_size, config.value_size()].map(|size| size as u32);
    Ok(Bound::new(move |stream| {
        let ((of_keys, of_queries, of_sink), deltas) = (&*kernels, deltas.run(stream)?);
        // Not a closure, whose results would all live as long as the first.
        macro_rules! tensors {
            ($maps:ident) => {
                WideTensorsArgument {
                    q: $maps.q.view(),
                    grad_out: $maps.grad_out.view(),
                    k: $maps.k.view(),
                    v: $maps.v.view(),
                    statistics: sequences.statistics(log_sum_exp, deltas),
                    sequences: sequences.argument(),
                    heads: sequences.heads,
                    window: config.seen(),
                    scale: config.scores().scale,
                }
            };
        }
        let target = WideKeyTargetArgument {
            rounded: rounded.as_mut().map(|(_, k, v)| WideKeyGradientsArgument { k: k.view_mut(), v: v.view_mut() }),
            added: added.as_mut().map(|[_, k, v]| KeySumsArgument { k: k.reborrow(), v: v.reborrow(), size, value_size }),
            scale,
        };
        let order = WideOrderArgument { counter: counter.view_mut(), section_rows };
        of_keys.launch(stream, OfKeysArgs { tensors: tensors!(for_keys), target, order })?;
        let target = QueryTargetArgument {
            rounded: rounded.as_mut().map(|(q, ..)| q.view_mut()),
            added: added.as_mut().map(|[q, ..]| q.reborrow()),
            size,
            scale,
        };
        let order = WideOrderArgument { counter: counter.view_mut(), section_rows };
        of_queries.launch(stream, OfQueriesArgs { tensors: tensors!(for_queries), target, order })?;
        differentiate_sink(of_sink, stream, &sequences, [log_sum_exp, deltas], sink, &mut grad_sink)
    }))
}
