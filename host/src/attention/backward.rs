//! The backward pass: the gradients of queries, keys and values.

use std::fmt;

use oxtile_kernels::attention::{
    AttentionBackward as Main, AttentionBackwardArgs as MainArgs, AttentionBackwardConvert as Convert,
    AttentionBackwardConvertArgs as ConvertArgs, AttentionBackwardConvertGeneral as ConvertGeneral, AttentionBackwardDeltas as Deltas,
    AttentionBackwardGeneral as General, AttentionBackwardPortable as Portable, AttentionBackwardPrepare as Prepare,
    AttentionBackwardPrepareArgs as PrepareArgs, AttentionBackwardReduce as Reduce, AttentionBackwardReduceArgs as ReduceArgs, KEYS,
    Mask as Bounds, partial_elements,
};
use oxtile_tile::arch::{Columns, MatrixColumns};
use oxtile_tile::launch::Kernel;
use oxtile_tile::layout::Swizzle128;
use oxtile_tile::num::{Float, Pod, bf16, f16};
use oxtile_tile::register_tile::{RegisterElement, StoredElement};

use super::backward_plan::Key;
use super::backward_tensors::{BackwardInputs, GradientTarget, Gradients};
use super::config::{AttentionConfig, Layout};
use super::dense::by_head;
use super::forward::BoundAttention;
use super::tensors::Inputs;
use super::{backward_general, backward_portable};
use crate::runtime::{Buffer, Error, Loaded, Result, Runtime, Stream};
use crate::tensor::{TensorMap, TensorMapMut};

/// How the gradients of queries are added up, to which blocks of keys contribute. The portable kernels are always deterministic.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Order {
    /// In the order of keys: the same bits every time.
    #[default]
    Deterministic,
    /// As they come: faster where multiprocessors would wait for each other. The last bits vary; those of the gradients of
    /// keys and values do not.
    Fast,
}

/// The backward pass of attention with elements of `T`: `bf16` or `f16`. From the forward pass it needs the inputs, `out` and `log_sum_exp`,
/// nothing else; gradients go to the caller's buffers, so that a [run](BoundAttention::run) allocates nothing.
pub struct AttentionBackward<T> {
    config: AttentionConfig,
    order: Order,
    instance: Option<Box<dyn Instance<T>>>,
}

impl<T: BackwardElement> AttentionBackward<T> {
    /// Checks the configuration and loads its kernels.
    ///
    /// # Errors
    /// As [`AttentionConfig::choose_backward_on`] for the first device, and [`Runtime::load`].
    pub fn new(runtime: &Runtime, config: AttentionConfig, order: Order) -> Result<Self> {
        let (key, _) = config.backward_kernel::<T>(config.is_portable_on(&runtime.device(0)?))?;
        Ok(Self { config, order, instance: key.map(|key| T::load(runtime, key)).transpose()? })
    }

    /// Binds tensors, makes tensor maps and the memory that the pass needs in between: one `f32` a query and head, and on Hopper's own
    /// kernels one for each element of `Q`, and two words a query; where few tiles of keys are split, at most 140 MB more. Waits for those
    /// to be there.
    ///
    /// # Errors
    /// [`Error::Length`] if a view does not have the configuration's size, [`Error::Invalid`] if one is missing or too many; as
    /// [`TensorMap::strided`].
    pub fn bind<'a>(&'a self, stream: &Stream, inputs: BackwardInputs<'a, T>, gradients: Gradients<'a, T>) -> Result<BoundAttention<'a>> {
        inputs.check(&self.config)?;
        gradients.check(&self.config)?;
        let Some(instance) = &self.instance else { return Ok(BoundAttention::nothing()) };
        let is_dense = self.config.layout != Layout::Packed;
        // Sequences without rows are none, however many there are.
        let config = if is_dense && self.config.is_empty() { AttentionConfig { batches: 0, ..self.config } } else { self.config };
        instance.bind(stream, config, self.order, inputs, gradients)
    }

    /// Binds tensors and computes their gradients once.
    ///
    /// # Errors
    /// As [`bind`](Self::bind) and [`BoundAttention::run`].
    pub fn backward(&self, stream: &Stream, inputs: BackwardInputs<'_, T>, gradients: Gradients<'_, T>) -> Result<()> {
        self.bind(stream, inputs, gradients)?.run(stream)
    }
}

/// An element of the tensors of the backward pass.
pub trait BackwardElement: Pod {
    /// The entry that computes the gradients of keys.
    #[doc(hidden)]
    fn name(key: Key) -> &'static str;

    /// Loads it and what goes with it.
    #[doc(hidden)]
    fn load(runtime: &Runtime, key: Key) -> Result<Box<dyn Instance<Self>>>;
}

/// The loaded kernels of a head size.
#[doc(hidden)]
pub trait Instance<T>: Send + Sync {
    fn bind<'a>(
        &'a self,
        stream: &Stream,
        config: AttentionConfig,
        order: Order,
        inputs: BackwardInputs<'a, T>,
        gradients: Gradients<'a, T>,
    ) -> Result<BoundAttention<'a>>;
}

/// The kernels of a pass, in their order.
struct Kernels<P: Kernel, M: Kernel, R: Kernel, C: Kernel> {
    prepare: Loaded<P>,
    main: Loaded<M>,
    reduce: Loaded<R>,
    convert: Loaded<C>,
}

impl<T, const D: usize, const QUERIES: usize, const SPAN: usize, const MASKED: bool> Instance<T>
    for Kernels<Prepare<T, D>, Main<T, D, QUERIES, SPAN, MASKED>, Reduce<T, D>, Convert<T, D, QUERIES, SPAN>>
where
    T: RegisterElement + StoredElement + Float,
    Columns<D>: MatrixColumns,
    Columns<QUERIES>: MatrixColumns,
    Columns<SPAN>: MatrixColumns,
    Prepare<T, D>: for<'a> Kernel<Args<'a> = PrepareArgs<'a, T, D>>,
    Main<T, D, QUERIES, SPAN, MASKED>: for<'a> Kernel<Args<'a> = MainArgs<'a, T, D, QUERIES, SPAN, MASKED>>,
    Reduce<T, D>: for<'a> Kernel<Args<'a> = ReduceArgs<'a, T, D>>,
    Convert<T, D, QUERIES, SPAN>: for<'a> Kernel<Args<'a> = ConvertArgs<'a, T, D, QUERIES, SPAN>>,
{
    fn bind<'a>(
        &'a self,
        stream: &Stream,
        config: AttentionConfig,
        order: Order,
        inputs: BackwardInputs<'a, T>,
        gradients: Gradients<'a, T>,
    ) -> Result<BoundAttention<'a>> {
        let AttentionConfig { layout, batches, queries, keys, heads, key_heads, head_size, .. } = config;
        let (mut of_queries, mut of_keys) =
            (by_head(layout, batches, queries, heads, head_size), by_head(layout, batches, keys, key_heads, head_size));
        let BackwardInputs { forward: Inputs { mut q, mut k, mut v, .. }, out, log_sum_exp, grad_out: grad_out_rows } = inputs;
        let Gradients {
            q: GradientTarget::Rounded(grad_q), k: GradientTarget::Rounded(grad_k), v: GradientTarget::Rounded(grad_v), ..
        } = gradients
        else {
            return Err(Error::Invalid { what: "AttentionBackward, gradients", why: "these kernels round them".to_owned() });
        };
        let (has_queries, has_keys) = (!q.is_empty(), !k.is_empty());
        // Without queries, or without keys, nothing is loaded by their maps, which must be of something: the others.
        let mut grad_out = grad_out_rows;
        if !has_queries {
            (q, grad_out, of_queries) = (k, k, of_keys);
        }
        if !has_keys {
            (k, v, of_keys) = (q, q, of_queries);
        }
        let q = TensorMap::<_, QUERIES, D, Swizzle128, 4>::strided(stream, q, of_queries)?;
        let grad_out = TensorMap::<_, QUERIES, D, Swizzle128, 4>::strided(stream, grad_out, of_queries)?;
        let k = TensorMap::<_, KEYS, D, Swizzle128, 4>::strided(stream, k, of_keys)?;
        let v = TensorMap::<_, KEYS, D, Swizzle128, 4>::strided(stream, v, of_keys)?;
        let keys_map = |view| TensorMapMut::<_, 64, D, Swizzle128, 4>::strided(stream, view, of_keys);
        let mut of_keys = if has_keys { Some([keys_map(grad_k)?, keys_map(grad_v)?]) } else { None };
        let queries_map = || TensorMapMut::<_, QUERIES, D, Swizzle128, 4>::strided(stream, grad_q, of_queries);
        let mut of_queries = if has_queries { Some(queries_map()?) } else { None };

        let blocks = queries.div_ceil(QUERIES as u64);
        let padded_rows = batches * heads * blocks * QUERIES as u64;
        let ordered = order == Order::Deterministic;
        let mut offsets = Buffer::<f32>::uninitialised(stream, padded_rows)?;
        let mut deltas = Buffer::<f32>::uninitialised(stream, padded_rows)?;
        let mut sums = Buffer::<f32>::uninitialised(stream, padded_rows * D as u64)?;
        let mut turns = Buffer::<u32>::zeros(stream, batches * heads * blocks)?;
        let mut counter = Buffer::<u32>::zeros(stream, 1)?;
        let (splits, key_blocks) = (config.group_parts(QUERIES as u64), keys.div_ceil(KEYS as u64));
        let split_tiles = if splits == 1 { 0 } else { batches * key_heads * splits * key_blocks };
        let mut partials = Buffer::<f32>::uninitialised(stream, split_tiles * partial_elements(D as u64))?;
        let Bounds { first, last, .. } = config.bounds();
        let section = config.section_of_keys(size_of::<T>() as u64, ordered).saturating_mul(splits as u32);
        let (scale, scale_log2) = (config.scale() as f32, config.scale_log2());
        // Row by row, the heads of all sequences of sbhd are those of one.
        let tensor_heads = if layout == Layout::Sbhd { heads * batches } else { heads } as u32;
        let [batches, rows, keys, heads, key_heads] = [batches, queries, keys, heads, key_heads].map(|size| size as u32);
        let [blocks, splits, key_blocks] = [blocks, splits, key_blocks].map(|size| size as u32);
        Ok(BoundAttention::new(move |stream| {
            let args = PrepareArgs {
                out,
                grad_out: grad_out_rows,
                log_sum_exp,
                offsets: offsets.view_mut(),
                deltas: deltas.view_mut(),
                heads: tensor_heads,
                rows,
                padded: blocks * QUERIES as u32,
            };
            self.prepare.launch(stream, args)?;
            if let Some([grad_k, grad_v]) = &mut of_keys {
                let args = MainArgs {
                    q: q.view(),
                    grad_out: grad_out.view(),
                    k: k.view(),
                    v: v.view(),
                    grad_k: grad_k.view_mut(),
                    grad_v: grad_v.view_mut(),
                    offsets: offsets.view(),
                    deltas: deltas.view(),
                    sums: sums.view_mut(),
                    turns: turns.view_mut(),
                    counter: counter.view_mut(),
                    partials: partials.view_mut(),
                    batches,
                    heads: key_heads * splits,
                    group: heads / key_heads / splits,
                    splits,
                    rows,
                    keys,
                    first,
                    last,
                    section,
                    scale: scale_log2,
                    ordered: ordered.into(),
                };
                self.main.launch(stream, args)?;
                if splits > 1 {
                    let (partials, grad_k, grad_v) = (partials.view_mut(), grad_k.view_mut(), grad_v.view_mut());
                    let args = ReduceArgs { partials, grad_k, grad_v, heads: key_heads, splits, key_blocks };
                    self.reduce.launch(stream, args)?;
                }
            }
            let Some(grad_q) = &mut of_queries else { return Ok(()) };
            let args = ConvertArgs { sums: sums.view_mut(), turns: turns.view_mut(), grad_q: grad_q.view_mut(), heads, blocks, scale };
            self.convert.launch(stream, args)
        }))
    }
}

macro_rules! elements {
    ($($t:ident: $([$d:literal $queries:literal $span:literal $masked:literal])* / $([$size:literal $rows:literal $part:literal $capped:literal])* / $([$panels:literal $step:literal $parts:literal])*;)*) => { $(
        impl BackwardElement for $t {
            fn name(key: Key) -> &'static str {
                match key {
                    $(Key::Dense { head_size: $d, queries: $queries } => <Main<$t, $d, $queries, $span, $masked> as Kernel>::INFO.name,)*
                    $(Key::General { size: $size, capped: $capped } => <General<$t, $size, $rows, $part, $capped> as Kernel>::INFO.name,)*
                    $(Key::Portable { panels: $panels } => <Portable<$t, $panels, $step, $parts, true> as Kernel>::INFO.name,)*
                    _ => "",
                }
            }

            fn load(runtime: &Runtime, key: Key) -> Result<Box<dyn Instance<Self>>> {
                match key {
                    $(Key::Dense { head_size: $d, queries: $queries } => Ok(Box::new(Kernels {
                        prepare: runtime.load::<Prepare<$t, $d>>()?,
                        main: runtime.load::<Main<$t, $d, $queries, $span, $masked>>()?,
                        reduce: runtime.load::<Reduce<$t, $d>>()?,
                        convert: runtime.load::<Convert<$t, $d, $queries, $span>>()?,
                    })),)*
                    $(Key::General { size: $size, capped: $capped } => Ok(Box::new(backward_general::Kernels::<
                        Deltas<$t>,
                        General<$t, $size, $rows, $part, $capped>,
                        ConvertGeneral<$t, $size, $rows, $part>,
                    >::load(runtime)?)),)*
                    $(Key::Portable { panels: $panels } => Ok(Box::new(backward_portable::Kernels::<
                        Deltas<$t>,
                        Portable<$t, $panels, $step, $parts, true>,
                        Portable<$t, $panels, $step, $parts, false>,
                    >::load(runtime)?)),)*
                    _ => Err(Error::Invalid { what: "AttentionBackward", why: format!("no kernel for {key:?}") }),
                }
            }
        }
    )* };
}

elements! {
    bf16: [64 128 64 true] [128 64 64 true] [128 80 80 false] / [64 128 64 false] [64 96 48 true] [128 64 64 false] [128 64 64 true] / [1 64 1] [2 32 2] [4 16 2];
    f16: [64 128 64 true] [128 64 64 true] [128 80 80 false] / [64 128 64 false] [64 96 48 true] [128 64 64 false] [128 64 64 true] / [1 64 1] [2 32 2] [4 16 2];
}

impl<T> fmt::Debug for AttentionBackward<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("AttentionBackward").field("config", &self.config).field("order", &self.order).finish_non_exhaustive()
    }
}
