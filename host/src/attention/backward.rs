//! The pass backward: the gradients of queries, keys and values.

use std::fmt;

use oxtile_kernels::attention::{
    AttentionBackward as Main, AttentionBackwardArgs as MainArgs, AttentionBackwardConvert as Convert,
    AttentionBackwardConvertArgs as ConvertArgs, AttentionBackwardPrepare as Prepare, AttentionBackwardPrepareArgs as PrepareArgs, FAR,
    KEYS,
};
use oxtile_tile::arch::{Columns, MatrixColumns};
use oxtile_tile::launch::{DeviceView, DeviceViewMut, Kernel};
use oxtile_tile::layout::Swizzle128;
use oxtile_tile::num::{Float, Pod, bf16, f16};
use oxtile_tile::register_tile::{RegisterElement, StoredElement};

use super::config::{AttentionConfig, Mask, refuse};
use super::dense::by_head;
use super::forward::BoundAttention;
use crate::gemm::Choice;
use crate::runtime::{Buffer, Error, Loaded, Result, Runtime, Stream};
use crate::tensor::{TensorMap, TensorMapMut};

/// How the gradients of queries are added up, to which blocks of keys contribute.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Order {
    /// In the order of keys: the same bits every time.
    #[default]
    Deterministic,
    /// As they come: faster where multiprocessors would wait for each other. The last bits vary. Gradients of keys and values are the
    /// same in both.
    Fast,
}

/// The backward pass of attention with elements of `T`: `bf16` or `f16`.
pub struct AttentionBackward<T> {
    config: AttentionConfig,
    order: Order,
    instance: Box<dyn Instance<T>>,
}

/// What the backward pass reads: `out` and its log-sum-exp may be those of more keys than these are, as in a step of a ring
/// of ranks; the gradients of the steps then add up to those of all keys.
#[derive(Clone, Copy)]
pub struct BackwardInputs<'a, T> {
    /// Queries.
    pub q: DeviceView<'a, T>,
    /// Keys.
    pub k: DeviceView<'a, T>,
    /// Values.
    pub v: DeviceView<'a, T>,
    /// The result of the pass forward.
    pub out: DeviceView<'a, T>,
    /// The log-sum-exp of the pass forward.
    pub log_sum_exp: DeviceView<'a, f32>,
    /// The gradient of the result.
    pub grad_out: DeviceView<'a, T>,
}

/// What it writes, each of its tensor's shape.
pub struct Gradients<'a, T> {
    /// Of the queries.
    pub q: DeviceViewMut<'a, T>,
    /// Of the keys.
    pub k: DeviceViewMut<'a, T>,
    /// Of the values.
    pub v: DeviceViewMut<'a, T>,
}

impl<T: BackwardElement> AttentionBackward<T> {
    /// Checks the configuration and loads its kernels.
    ///
    /// # Errors
    /// As [`AttentionConfig::choose_backward`] and [`Runtime::load`].
    pub fn new(runtime: &Runtime, config: AttentionConfig, order: Order) -> Result<Self> {
        config.choose_backward::<T>()?;
        Ok(Self { config, order, instance: T::load(runtime, config.head_size, config.backward_queries())? })
    }

    /// Binds tensors, makes tensor maps and the memory that the pass needs in between: one `f32` for each element of `Q`, and three
    /// words a query. Waits for those to be there.
    ///
    /// # Errors
    /// [`Error::Length`] if a view does not have the configuration's size; as [`TensorMap::strided`].
    pub fn bind<'a>(&'a self, stream: &Stream, inputs: BackwardInputs<'a, T>, gradients: Gradients<'a, T>) -> Result<BoundAttention<'a>> {
        let [q, k, v] = self.config.lengths()?;
        let rows = self.config.rows()[0] * self.config.heads;
        let lengths = [
            ("AttentionBackward, q", q, inputs.q.len()),
            ("AttentionBackward, k", k, inputs.k.len()),
            ("AttentionBackward, v", v, inputs.v.len()),
            ("AttentionBackward, out", q, inputs.out.len()),
            ("AttentionBackward, log_sum_exp", rows, inputs.log_sum_exp.len()),
            ("AttentionBackward, grad_out", q, inputs.grad_out.len()),
            ("AttentionBackward, gradients of q", q, gradients.q.len()),
            ("AttentionBackward, gradients of k", k, gradients.k.len()),
            ("AttentionBackward, gradients of v", v, gradients.v.len()),
        ];
        if let Some((what, expected, found)) = lengths.into_iter().find(|(_, expected, found)| expected != found) {
            return Err(Error::Length { what, expected, found });
        }
        self.instance.bind(stream, self.config, self.order, inputs, gradients)
    }

    /// Binds tensors and computes their gradients once.
    ///
    /// # Errors
    /// As [`bind`](Self::bind) and [`BoundAttention::run`].
    pub fn backward(&self, stream: &Stream, inputs: BackwardInputs<'_, T>, gradients: Gradients<'_, T>) -> Result<()> {
        self.bind(stream, inputs, gradients)?.run(stream)
    }
}

impl AttentionConfig {
    /// The kernel of the backward pass for elements of `T`.
    ///
    /// # Errors
    /// As [`validate`](Self::validate).
    pub fn choose_backward<T: BackwardElement>(&self) -> Result<Choice> {
        self.validate()?;
        let Self { batches, queries, keys, heads, key_heads, head_size, .. } = *self;
        self.refuse_general("backward")?;
        if self.value_size() != head_size {
            return refuse("value_size", self.value_size(), format!("as head_size, which is {head_size}, backward"));
        }
        let block = self.backward_queries();
        let Some(kernel) = T::name(head_size, block) else {
            return refuse("head_size", head_size, "64 or 128 backward");
        };
        for (what, rows, heads, block) in [("queries", queries, heads, block), ("keys", keys, key_heads, KEYS as u64)] {
            let tiles = u128::from(batches) * u128::from(heads) * u128::from(rows.div_ceil(block));
            if tiles > i32::MAX as u128 {
                return refuse(what, rows, format!("with batches and heads at most {} blocks of {block}", i32::MAX));
            }
        }
        Ok(Choice { kernel, why: format!("{KEYS} keys by {block} queries on wgmma, head_size {head_size}") })
    }

    /// Queries of a block: as many as registers hold; fewer where a mask leaves much of a larger block empty.
    fn backward_queries(&self) -> u64 {
        match (self.head_size, self.mask) {
            (128, Mask::Full) => 80,
            (128, _) => 64,
            _ => 128,
        }
    }

    /// The first and the last key that query 0 sees.
    fn bounds(&self) -> [i32; 2] {
        if self.mask == Mask::Full { [-FAR, FAR] } else { [-FAR, self.diagonal()] }
    }
}

/// An element of the tensors of the backward pass.
pub trait BackwardElement: Pod {
    /// The entry for heads of a size and blocks of so many queries; none if there is none.
    fn name(head_size: u64, queries: u64) -> Option<&'static str>;

    /// Loads it and what goes with it.
    #[doc(hidden)]
    fn load(runtime: &Runtime, head_size: u64, queries: u64) -> Result<Box<dyn Instance<Self>>>;
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

/// The three kernels of a pass, in their order.
struct Kernels<P: Kernel, M: Kernel, C: Kernel> {
    prepare: Loaded<P>,
    main: Loaded<M>,
    convert: Loaded<C>,
}

impl<T, const D: usize, const QUERIES: usize, const SPAN: usize, const MASKED: bool> Instance<T>
    for Kernels<Prepare<T, D>, Main<T, D, QUERIES, SPAN, MASKED>, Convert<T, D, QUERIES, SPAN>>
where
    T: RegisterElement + StoredElement + Float,
    Columns<D>: MatrixColumns,
    Columns<QUERIES>: MatrixColumns,
    Columns<SPAN>: MatrixColumns,
    Prepare<T, D>: for<'a> Kernel<Args<'a> = PrepareArgs<'a, T, D>>,
    Main<T, D, QUERIES, SPAN, MASKED>: for<'a> Kernel<Args<'a> = MainArgs<'a, T, D, QUERIES, SPAN, MASKED>>,
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
        let (has_queries, has_keys) = (!inputs.q.is_empty(), !inputs.k.is_empty());
        if !has_queries && !has_keys {
            return Ok(BoundAttention::nothing());
        }
        // Without queries, or without keys, nothing is loaded by their maps, which must be of something: the others.
        let (mut q, mut grad_out, mut k, mut v) = (inputs.q, inputs.grad_out, inputs.k, inputs.v);
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
        let mut of_keys = if has_keys { Some([keys_map(gradients.k)?, keys_map(gradients.v)?]) } else { None };
        let queries_map = || TensorMapMut::<_, QUERIES, D, Swizzle128, 4>::strided(stream, gradients.q, of_queries);
        let mut of_queries = if has_queries { Some(queries_map()?) } else { None };

        let blocks = queries.div_ceil(QUERIES as u64);
        let padded_rows = batches * heads * blocks * QUERIES as u64;
        let ordered = order == Order::Deterministic;
        let mut offsets = Buffer::<f32>::uninitialised(stream, padded_rows)?;
        let mut deltas = Buffer::<f32>::uninitialised(stream, padded_rows)?;
        let mut sums = Buffer::<f32>::uninitialised(stream, padded_rows * D as u64)?;
        let mut turns = Buffer::<u32>::zeros(stream, batches * heads * blocks)?;
        let mut counter = Buffer::<u32>::zeros(stream, 1)?;
        let [first, last] = config.bounds();
        let section = (config.section(size_of::<T>() as u64) / config.group() as u32).max(1);
        let (scale, scale_log2) = (config.scale() as f32, config.scale_log2());
        let BackwardInputs { out, log_sum_exp, grad_out: grad_out_rows, .. } = inputs;
        let [batches, rows, keys, heads, key_heads, blocks] = [batches, queries, keys, heads, key_heads, blocks].map(|size| size as u32);
        Ok(BoundAttention::new(move |stream| {
            let args = PrepareArgs {
                out,
                grad_out: grad_out_rows,
                log_sum_exp,
                offsets: offsets.view_mut(),
                deltas: deltas.view_mut(),
                heads,
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
                    batches,
                    heads: key_heads,
                    group: heads / key_heads,
                    rows,
                    keys,
                    first,
                    last,
                    section,
                    scale: scale_log2,
                    ordered: ordered.into(),
                };
                self.main.launch(stream, args)?;
            }
            let Some(grad_q) = &mut of_queries else { return Ok(()) };
            let args = ConvertArgs { sums: sums.view_mut(), turns: turns.view_mut(), grad_q: grad_q.view_mut(), heads, blocks, scale };
            self.convert.launch(stream, args)
        }))
    }
}

macro_rules! elements {
    ($($t:ident: $([$d:literal $queries:literal $span:literal $masked:literal])*;)*) => { $(
        impl BackwardElement for $t {
            fn name(head_size: u64, queries: u64) -> Option<&'static str> {
                match (head_size, queries) {
                    $(($d, $queries) => Some(<Main<$t, $d, $queries, $span, $masked> as Kernel>::INFO.name),)*
                    _ => None,
                }
            }

            fn load(runtime: &Runtime, head_size: u64, queries: u64) -> Result<Box<dyn Instance<Self>>> {
                match (head_size, queries) {
                    $(($d, $queries) => Ok(Box::new(Kernels {
                        prepare: runtime.load::<Prepare<$t, $d>>()?,
                        main: runtime.load::<Main<$t, $d, $queries, $span, $masked>>()?,
                        convert: runtime.load::<Convert<$t, $d, $queries, $span>>()?,
                    })),)*
                    _ => Err(Error::Invalid { what: "AttentionBackward", why: format!("no kernel of head_size {head_size}") }),
                }
            }
        }
    )* };
}

elements! {
    bf16: [64 128 64 true] [128 64 64 true] [128 80 80 false];
    f16: [64 128 64 true] [128 64 64 true] [128 80 80 false];
}

impl<T> fmt::Debug for AttentionBackward<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("AttentionBackward").field("config", &self.config).field("order", &self.order).finish_non_exhaustive()
    }
}
