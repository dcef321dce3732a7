//! The kernels of dense tensors, full and causal: their arguments.

use oxtile_kernels::attention::{AttentionForward, AttentionForwardArgs, PART, Team};
use oxtile_tile::arch::{Columns, MatrixColumns};
use oxtile_tile::launch::Kernel;
use oxtile_tile::layout::Swizzle128;
use oxtile_tile::register_tile::{RegisterElement, StoredElement};

use super::config::{AttentionConfig, Layout};
use super::forward::{Binding, BoundAttention, Instance};
use super::tensors::Inputs;
use crate::runtime::{Buffer, Loaded, Result, Stream};
use crate::tensor::{Strided, TensorMap, TensorMapMut};

/// A dense tensor of heads, seen as `[batches, heads, rows, size]`.
pub(super) fn by_head(layout: Layout, batches: u64, rows: u64, heads: u64, size: u64) -> Strided<4> {
    let row = heads * size;
    let [batch, row] = if layout == Layout::Sbhd { [row, batches * row] } else { [rows * row, row] };
    Strided { shape: [batches, heads, rows, size], strides: [batch, size, row, 1] }
}

/// Tensor maps of keys and values. Without keys nothing is loaded by them; as they must be of something, they are of the queries then.
pub(super) fn keys_by_head<'a, T: RegisterElement, const KEYS: usize, const D: usize, const V: usize>(
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
    Ok((TensorMap::strided(stream, *k, of_k)?, TensorMap::strided(stream, *v, of_v)?))
}

impl<T, const D: usize, const V: usize, const KEYS: usize, G, const CAUSAL: bool> Instance<T>
    for Loaded<AttentionForward<T, D, V, KEYS, G, CAUSAL>>
where
    T: RegisterElement + StoredElement,
    G: Team + Send + Sync,
    Columns<D>: MatrixColumns,
    Columns<V>: MatrixColumns,
    Columns<KEYS>: MatrixColumns,
    AttentionForward<T, D, V, KEYS, G, CAUSAL>: for<'a> Kernel<Args<'a> = AttentionForwardArgs<'a, T, D, V, KEYS, G, CAUSAL>>,
{
    fn bind<'a>(&'a self, binding: Binding<'_, 'a, T>) -> Result<BoundAttention<'a>> {
        let Binding { stream, config, inputs, outputs } = binding;
        let AttentionConfig { batches, keys, head_size, .. } = config;
        let [rows, heads] = config.rows_and_heads();
        let (out, mut log_sum_exp) = (outputs.out.rounded()?, outputs.log_sum_exp);
        let (k, v) = keys_by_head::<_, KEYS, D, V>(stream, &config, &inputs)?;
        let q = TensorMap::<_, PART, D, Swizzle128, 4>::strided(stream, inputs.q, config.queries_by_head(head_size))?;
        let of_out = config.queries_by_head(config.value_size());
        let mut out = TensorMapMut::<_, PART, V, Swizzle128, 4>::strided(stream, out, of_out)?;
        let mut counter = Buffer::<u32>::zeros(stream, 1)?;
        let [batches, rows, keys, group] = [batches, rows, keys, heads / config.key_heads].map(|size| size as u32);
        let log_sum_exp_length = log_sum_exp.len();
        let (diagonal, section, scale) = (config.diagonal(), config.section(size_of::<T>() as u64), config.scale_log2());
        Ok(BoundAttention::new(move |stream| {
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
                marker: std::marker::PhantomData,
            };
            self.launch(stream, args)
        }))
    }
}
