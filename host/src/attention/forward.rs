//! The pass forward: tensors bound, kernels launched.

use std::fmt;

use oxtile_kernels::attention::{AttentionForward, AttentionForwardArgs, KEYS};
use oxtile_tile::arch::{Columns, MatrixColumns};
use oxtile_tile::launch::Kernel;
use oxtile_tile::layout::Swizzle128;
use oxtile_tile::num::{Pod, bf16, f16};
use oxtile_tile::register_tile::{RegisterElement, StoredElement};

use super::config::{AttentionConfig, Layout, Mask};
use super::tensors::{Inputs, Outputs, Target};
use crate::runtime::{Buffer, Error, Loaded, Result, Runtime, Stream};
use crate::tensor::{Strided, TensorMap, TensorMapMut};

/// Attends with elements of `T`: `bf16` or `f16`.
pub struct Attention<T> {
    config: AttentionConfig,
    instance: Option<Box<dyn Instance<T>>>,
}

/// Attention of given tensors, ready to be enqueued any number of times, in a graph's capture too. Runs that overlap,
/// on streams that do not wait for each other, need one each.
pub struct BoundAttention<'a>(pub(super) Box<Launch<'a>>);

pub(super) type Launch<'a> = dyn FnMut(&Stream) -> Result<()> + Send + 'a;

impl<T: AttentionElement> Attention<T> {
    /// Checks the configuration and loads its kernel.
    ///
    /// # Errors
    /// As [`AttentionConfig::choose`] and [`Runtime::load`].
    pub fn new(runtime: &Runtime, config: AttentionConfig) -> Result<Self> {
        let launches = !config.choose::<T>()?.kernel.is_empty();
        Ok(Self { config, instance: launches.then(|| T::load(runtime, config.head_size, config.mask != Mask::Full)).transpose()? })
    }

    /// Binds tensors; encodes their tensor maps on the device and waits for those to be there.
    ///
    /// # Errors
    /// [`Error::Length`] if a view does not have the configuration's size, [`Error::Invalid`] if one is missing or too many; as
    /// [`TensorMap::strided`].
    pub fn bind<'a>(&'a self, stream: &Stream, inputs: Inputs<'a, T>, outputs: Outputs<'a, T>) -> Result<BoundAttention<'a>> {
        inputs.check(&self.config)?;
        outputs.check(&self.config)?;
        match &self.instance {
            Some(instance) => instance.bind(stream, self.config, inputs, outputs),
            None => Ok(BoundAttention(Box::new(|_| Ok(())))),
        }
    }

    /// Binds tensors and attends once.
    ///
    /// # Errors
    /// As [`bind`](Self::bind) and [`BoundAttention::run`].
    pub fn forward(&self, stream: &Stream, inputs: Inputs<'_, T>, outputs: Outputs<'_, T>) -> Result<()> {
        self.bind(stream, inputs, outputs)?.run(stream)
    }
}

impl BoundAttention<'_> {
    /// Enqueues it.
    ///
    /// # Errors
    /// As [`Loaded::launch`].
    pub fn run(&mut self, stream: &Stream) -> Result<()> {
        (self.0)(stream)
    }
}

/// An element of `Q`, `K` and `V`.
pub trait AttentionElement: Pod {
    /// The entry for heads of a size; none if there is none.
    fn name(head_size: u64, causal: bool) -> Option<&'static str>;

    /// Loads it.
    #[doc(hidden)]
    fn load(runtime: &Runtime, head_size: u64, causal: bool) -> Result<Box<dyn Instance<Self>>>;
}

/// A loaded kernel of any head size and mask.
#[doc(hidden)]
pub trait Instance<T>: Send + Sync {
    fn bind<'a>(
        &'a self,
        stream: &Stream,
        config: AttentionConfig,
        inputs: Inputs<'a, T>,
        outputs: Outputs<'a, T>,
    ) -> Result<BoundAttention<'a>>;
}

/// A dense tensor of heads, seen as `[batches, heads, rows, size]`.
pub(super) fn by_head(layout: Layout, batches: u64, rows: u64, heads: u64, size: u64) -> Strided<4> {
    let row = heads * size;
    let [batch, row] = if layout == Layout::Sbhd { [row, batches * row] } else { [rows * row, row] };
    Strided { shape: [batches, heads, rows, size], strides: [batch, size, row, 1] }
}

impl<T, const D: usize, const CAUSAL: bool> Instance<T> for Loaded<AttentionForward<T, D, CAUSAL>>
where
    T: RegisterElement + StoredElement,
    Columns<D>: MatrixColumns,
    AttentionForward<T, D, CAUSAL>: for<'a> Kernel<Args<'a> = AttentionForwardArgs<'a, T, D, CAUSAL>>,
{
    fn bind<'a>(
        &'a self,
        stream: &Stream,
        config: AttentionConfig,
        inputs: Inputs<'a, T>,
        outputs: Outputs<'a, T>,
    ) -> Result<BoundAttention<'a>> {
        let AttentionConfig { layout, batches, queries, keys, heads, key_heads, head_size, .. } = config;
        let (Inputs { q, k, v, .. }, Outputs { out: Target::Rounded(out), mut log_sum_exp, .. }) = (inputs, outputs) else {
            return Err(Error::Invalid { what: "Attention, out", why: "this kernel rounds its result".to_owned() });
        };
        let of_queries = by_head(layout, batches, queries, heads, head_size);
        // Without keys nothing is loaded by these maps, which must be of something: the queries.
        let (k, v, of_keys) = if keys == 0 { (q, q, of_queries) } else { (k, v, by_head(layout, batches, keys, key_heads, head_size)) };
        let q = TensorMap::<_, 64, D, Swizzle128, 4>::strided(stream, q, of_queries)?;
        let k = TensorMap::<_, KEYS, D, Swizzle128, 4>::strided(stream, k, of_keys)?;
        let v = TensorMap::<_, KEYS, D, Swizzle128, 4>::strided(stream, v, of_keys)?;
        let mut out = TensorMapMut::<_, 64, D, Swizzle128, 4>::strided(stream, out, of_queries)?;
        let mut counter = Buffer::<u32>::zeros(stream, 1)?;
        let [batches, rows, keys, group] = [batches, queries, keys, heads / key_heads].map(|size| size as u32);
        let log_sum_exp_length = log_sum_exp.len();
        let (diagonal, section, scale) = (config.diagonal(), config.section(size_of::<T>() as u64), config.scale_log2());
        Ok(BoundAttention(Box::new(move |stream| {
            let args = AttentionForwardArgs {
                q: q.view(),
                k: k.view(),
                v: v.view(),
                out: out.view_mut(),
                log_sum_exp: log_sum_exp.slice_mut(0, log_sum_exp_length),
                counter: counter.view_mut(),
                batches,
                heads: heads as u32,
                group,
                rows,
                keys,
                diagonal,
                section,
                scale,
            };
            self.launch(stream, args)
        })))
    }
}

macro_rules! elements {
    ($($t:ident: $([$d:literal $causal:literal])*;)*) => { $(
        impl AttentionElement for $t {
            fn name(head_size: u64, causal: bool) -> Option<&'static str> {
                match (head_size, causal) {
                    $(($d, $causal) => Some(<AttentionForward<$t, $d, $causal> as Kernel>::INFO.name),)*
                    _ => None,
                }
            }

            fn load(runtime: &Runtime, head_size: u64, causal: bool) -> Result<Box<dyn Instance<Self>>> {
                match (head_size, causal) {
                    $(($d, $causal) => Ok(Box::new(runtime.load::<AttentionForward<$t, $d, $causal>>()?)),)*
                    _ => Err(Error::Invalid { what: "Attention", why: format!("no kernel of head_size {head_size}") }),
                }
            }
        }
    )* };
}

elements! {
    bf16: [64 false] [64 true] [128 false] [128 true];
    f16: [64 false] [64 true] [128 false] [128 true];
}

impl<T> fmt::Debug for Attention<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Attention").field("config", &self.config).finish_non_exhaustive()
    }
}
