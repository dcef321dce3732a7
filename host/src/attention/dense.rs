//! Dense tensors bound to the forward kernel, with a rounded or a running result.

use oxtile_kernels::attention::{
    AttentionForward, AttentionForwardArgs, Dense, DenseArgument, PART, Policy, Rounded, RoundedArgument, Running, RunningArgument, Shape,
    Target as KernelTarget, Team, TileOrderArgument,
};
use oxtile_tile::arch::{Columns, MatrixColumns};
use oxtile_tile::launch::{DeviceViewMut, Kernel};
use oxtile_tile::layout::Swizzle128;
use oxtile_tile::register_tile::{RegisterElement, StoredElement};

use super::config::{AttentionConfig, Layout, Output};
use super::forward::{Binding, BoundAttention};
use super::tensors::{Inputs, Outputs, Target};
use crate::runtime::{Buffer, Error, Loaded, Result, Stream};
use crate::tensor::{Strided, TensorMap, TensorMapMut, Uploads};

/// A dense tensor of heads, seen as `[batches, heads, rows, size]`.
pub(super) fn by_head(layout: Layout, batches: u64, rows: u64, heads: u64, size: u64) -> Strided<4> {
    let row = heads * size;
    let [batch, row] = if layout == Layout::Sbhd { [row, batches * row] } else { [rows * row, row] };
    Strided { shape: [batches, heads, rows, size], strides: [batch, size, row, 1] }
}

/// Tensor maps of keys and values. Without keys nothing is loaded by them; as they must be of something, they are of the queries then.
pub(super) fn keys_by_head_in<'a, T: RegisterElement, const KEYS: usize, const D: usize, const V: usize>(
    uploads: &mut Uploads,
    stream: &Stream,
    config: &AttentionConfig,
    inputs: &Inputs<'a, T>,
) -> Result<(TensorMap<'a, T, KEYS, D, Swizzle128, 4>, TensorMap<'a, T, KEYS, V, Swizzle128, 4>)> {
    let AttentionConfig { layout, batches, keys, key_heads, head_size, .. } = *config;
    let of_keys = |size| by_head(layout, batches, keys, key_heads, size);
    let (Inputs { q, k, v, .. }, of_queries) = (inputs, config.queries_by_head(head_size));
    let ((k, of_k), (v, of_v)) = match keys {
        0 => ((q, of_queries), (q, of_queries)),
        _ => ((k, of_keys(head_size)), (v, of_keys(config.value_size()))),
    };
    Ok((TensorMap::strided_in(uploads, stream, *k, of_k)?, TensorMap::strided_in(uploads, stream, *v, of_v)?))
}

/// The same, copied alone.
pub(super) fn keys_by_head<'a, T: RegisterElement, const KEYS: usize, const D: usize, const V: usize>(
    stream: &Stream,
    config: &AttentionConfig,
    inputs: &Inputs<'a, T>,
) -> Result<(TensorMap<'a, T, KEYS, D, Swizzle128, 4>, TensorMap<'a, T, KEYS, V, Swizzle128, 4>)> {
    let mut uploads = Uploads::default();
    let maps = keys_by_head_in(&mut uploads, stream, config, inputs)?;
    uploads.copy(stream)?;
    Ok(maps)
}

impl AttentionConfig {
    /// Sizes of dense tensors, as the kernels want them.
    pub(super) fn shape(&self) -> Shape {
        let [queries, heads] = self.rows_and_heads();
        let [batches, heads, group, queries, keys] =
            [self.batches, heads, heads / self.key_heads, queries, self.keys].map(|size| size as u32);
        Shape { batches, heads, group, queries, keys }
    }
}

/// A result that a kernel's target is bound to.
pub(super) trait BoundTarget<T: RegisterElement, const V: usize, const RANK: usize>: KernelTarget<T, V, RANK> + 'static
where
    Columns<V>: MatrixColumns,
{
    /// What is kept between launches.
    type Bound<'a>: Send;

    /// Binds the result, which the output's layout says how to find.
    fn bind<'a>(uploads: &mut Uploads, stream: &Stream, config: &AttentionConfig, outputs: Outputs<'a, T>) -> Result<Self::Bound<'a>>;

    /// The argument of a launch.
    fn argument<'s>(bound: &'s mut Self::Bound<'_>) -> Self::Argument<'s>;
}

impl<T: RegisterElement + StoredElement, const V: usize> BoundTarget<T, V, 4> for Rounded<T, V, 4>
where
    Columns<V>: MatrixColumns,
{
    type Bound<'a> = (TensorMapMut<'a, T, PART, V, Swizzle128, 4>, DeviceViewMut<'a, f32>);

    fn bind<'a>(uploads: &mut Uploads, stream: &Stream, config: &AttentionConfig, outputs: Outputs<'a, T>) -> Result<Self::Bound<'a>> {
        let (out, layout) = (outputs.out.rounded()?, config.queries_by_head(config.value_size()));
        Ok((TensorMapMut::strided_in(uploads, stream, out, layout)?, outputs.log_sum_exp))
    }

    fn argument<'s>((out, log_sum_exp): &'s mut Self::Bound<'_>) -> Self::Argument<'s> {
        RoundedArgument { out: out.view_mut(), log_sum_exp: log_sum_exp.reborrow() }
    }
}

/// A running result between launches.
pub(super) struct BoundRunning<'a, T> {
    sums: DeviceViewMut<'a, f32>,
    log_sum_exp: DeviceViewMut<'a, f32>,
    rounded: Option<DeviceViewMut<'a, T>>,
    begins: bool,
    size: u32,
    strides: [u64; 3],
}

impl<'a, T> BoundRunning<'a, T> {
    /// Binds the result of a step, whose batches, heads and rows follow each other in so many elements.
    pub(super) fn new(config: &AttentionConfig, outputs: Outputs<'a, T>, strides: [u64; 3]) -> Result<Self> {
        let (sums, rounded) = match outputs.out {
            Target::Merged(sums) => (sums, None),
            Target::Last { running, out } => {
                let access = running.access("running");
                // SAFETY: the kernel only reads the running result of a step that rounds; the view borrows it as long.
                let sums = unsafe { DeviceViewMut::from_raw(access.address, running.len(), access.owner) };
                (sums, Some(out))
            }
            Target::Rounded(_) => {
                return Err(Error::Invalid { what: "Attention, out", why: "this kernel merges its result".to_owned() });
            }
        };
        let (begins, size) = (config.output == Output::First, config.value_size() as u32);
        Ok(Self { sums, log_sum_exp: outputs.log_sum_exp, rounded, begins, size, strides })
    }

    /// The argument of a launch.
    pub(super) fn argument<const STEPS: bool>(&mut self) -> RunningArgument<'_, T, STEPS>
    where
        T: RegisterElement,
    {
        let [batch_stride, head_stride, row_stride] = self.strides;
        RunningArgument {
            sums: self.sums.reborrow(),
            log_sum_exp: self.log_sum_exp.reborrow(),
            rounded: self.rounded.as_mut().map(DeviceViewMut::reborrow),
            begins: self.begins,
            size: self.size,
            batch_stride,
            head_stride,
            row_stride,
        }
    }
}

impl<T: RegisterElement, const V: usize> BoundTarget<T, V, 4> for Running<T, true>
where
    Columns<V>: MatrixColumns,
{
    type Bound<'a> = BoundRunning<'a, T>;

    fn bind<'a>(_: &mut Uploads, _: &Stream, config: &AttentionConfig, outputs: Outputs<'a, T>) -> Result<BoundRunning<'a, T>> {
        let Strided { strides: [batch, head, row, _], .. } = config.queries_by_head(config.value_size());
        BoundRunning::new(config, outputs, [batch, head, row])
    }

    fn argument<'s>(bound: &'s mut BoundRunning<'_, T>) -> Self::Argument<'s> {
        bound.argument()
    }
}

/// Binds dense tensors.
pub(super) fn bind<'a, T, const D: usize, const V: usize, const KEYS: usize, G, P, R, const CAUSAL: bool>(
    kernel: &'a Loaded<AttentionForward<T, D, V, KEYS, G, P>>,
    binding: Binding<'_, 'a, T>,
) -> Result<BoundAttention<'a>>
where
    T: RegisterElement + StoredElement,
    G: Team,
    P: Policy<Of<T, D, V, KEYS> = Dense<T, D, V, KEYS, R, CAUSAL>>,
    R: BoundTarget<T, V, 4>,
    Columns<D>: MatrixColumns,
    Columns<V>: MatrixColumns,
    Columns<KEYS>: MatrixColumns,
    AttentionForward<T, D, V, KEYS, G, P>: Kernel,
{
    let Binding { stream, config, inputs, outputs } = binding;
    let mut uploads = Uploads::default();
    let (k, v) = keys_by_head_in::<_, KEYS, D, V>(&mut uploads, stream, &config, &inputs)?;
    let of_queries = config.queries_by_head(config.head_size);
    let q = TensorMap::<_, PART, D, Swizzle128, 4>::strided_in(&mut uploads, stream, inputs.q, of_queries)?;
    let mut target = R::bind(&mut uploads, stream, &config, outputs)?;
    uploads.copy(stream)?;
    let mut counter = Buffer::<u32>::zeros(stream, 1)?;
    let (shape, diagonal, section, scale) = (config.shape(), config.diagonal(), config.section(size_of::<T>() as u64), config.scale_log2());
    Ok(BoundAttention::new(move |stream| {
        let problem = DenseArgument {
            q: q.view(),
            k: k.view(),
            v: v.view(),
            target: R::argument(&mut target),
            shape,
            diagonal,
            order: TileOrderArgument { counter: counter.view_mut(), section },
            scale,
        };
        kernel.launch(stream, AttentionForwardArgs { problem, marker: std::marker::PhantomData })
    }))
}
