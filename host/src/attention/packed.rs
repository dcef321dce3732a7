//! Packed sequences bound to the forward kernel, with a rounded or a running result.

use oxtile_kernels::attention::{
    AttentionForward, AttentionForwardArgs, PART, Packed, PackedArgument, Policy, Rounded, RoundedArgument, Running, Team,
};
use oxtile_tile::arch::{Columns, MatrixColumns};
use oxtile_tile::launch::{DeviceViewMut, Kernel};
use oxtile_tile::layout::Swizzle128;
use oxtile_tile::register_tile::{RegisterElement, StoredElement};

use super::config::{AttentionConfig, Mask};
use super::dense::{BoundRunning, BoundTarget};
use super::forward::{Binding, BoundAttention};
use super::sequences::{Placement, SequenceKeys, rows_of};
use super::tensors::Outputs;
use crate::runtime::{Buffer, Loaded, Result, Stream};
use crate::tensor::{TensorMap, TensorMapMut, Uploads};

impl<T: RegisterElement + StoredElement, const V: usize> BoundTarget<T, V, 5> for Rounded<T, V, 5>
where
    Columns<V>: MatrixColumns,
{
    type Bound<'a> = (TensorMapMut<'a, T, PART, V, Swizzle128, 5>, DeviceViewMut<'a, f32>);

    fn bind<'a>(uploads: &mut Uploads, stream: &Stream, config: &AttentionConfig, outputs: Outputs<'a, T>) -> Result<Self::Bound<'a>> {
        let (out, rows) = (outputs.out.rounded()?, rows_of(config, config.queries, config.heads, config.value_size()));
        Ok((TensorMapMut::sequences_in(uploads, stream, out, rows)?, outputs.log_sum_exp))
    }

    fn argument<'s>((out, log_sum_exp): &'s mut Self::Bound<'_>) -> Self::Argument<'s> {
        RoundedArgument { out: out.view_mut(), log_sum_exp: log_sum_exp.reborrow() }
    }
}

impl<T: RegisterElement, const V: usize> BoundTarget<T, V, 5> for Running<T, true>
where
    Columns<V>: MatrixColumns,
{
    type Bound<'a> = BoundRunning<'a, T>;

    fn bind<'a>(_: &mut Uploads, _: &Stream, config: &AttentionConfig, outputs: Outputs<'a, T>) -> Result<BoundRunning<'a, T>> {
        let rows = rows_of(config, config.queries, config.heads, config.value_size());
        BoundRunning::new(config, outputs, [0, rows.head, rows.row])
    }

    fn argument<'s>(bound: &'s mut BoundRunning<'_, T>) -> Self::Argument<'s> {
        bound.argument()
    }
}

/// Binds packed sequences.
pub(super) fn bind<'a, T, const D: usize, const V: usize, const KEYS: usize, G, P, R, const CAUSAL: bool>(
    kernel: &'a Loaded<AttentionForward<T, D, V, KEYS, G, P>>,
    binding: Binding<'_, 'a, T>,
) -> Result<BoundAttention<'a>>
where
    T: RegisterElement + StoredElement,
    G: Team,
    P: Policy<Of<T, D, V, KEYS> = Packed<T, D, V, KEYS, R, CAUSAL>>,
    R: BoundTarget<T, V, 5>,
    Columns<D>: MatrixColumns,
    Columns<V>: MatrixColumns,
    Columns<KEYS>: MatrixColumns,
    AttentionForward<T, D, V, KEYS, G, P>: Kernel,
{
    let Binding { stream, config, inputs, outputs } = binding;
    let mut uploads = Uploads::default();
    let keys = SequenceKeys::<T, KEYS, D, V>::new(&mut uploads, stream, &config, &inputs)?;
    let of_queries = rows_of(&config, config.queries, config.heads, config.head_size);
    let q = TensorMap::<_, PART, D, Swizzle128, 5>::sequences_in(&mut uploads, stream, inputs.q, of_queries)?;
    let mut target = R::bind(&mut uploads, stream, &config, outputs)?;
    let placement = Placement::new(&mut uploads, &config, inputs.sequences);
    uploads.copy(stream)?;
    let mut counter = Buffer::<u32>::zeros(stream, 1)?;
    let (section_keys, scale) = (config.section_keys(size_of::<T>() as u64), config.scale_log2());
    Ok(BoundAttention::new(move |stream| {
        let problem = PackedArgument {
            q: q.view(),
            k: keys.k.view(),
            v: keys.v.view(),
            target: R::argument(&mut target),
            sequences: placement.argument([of_queries.rows as u32, keys.rows]),
            heads: config.kernel_heads(),
            counter: counter.view_mut(),
            section_keys,
            top_left: config.mask == Mask::CausalTopLeft,
            scale,
        };
        kernel.launch(stream, AttentionForwardArgs { problem, marker: std::marker::PhantomData })
    }))
}
