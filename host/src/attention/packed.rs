//! The kernels of packed sequences, full and causal: their arguments.

use oxtile_kernels::attention::{AttentionForwardPacked, AttentionForwardPackedArgs, PART, Team};
use oxtile_tile::arch::{Columns, MatrixColumns};
use oxtile_tile::launch::Kernel;
use oxtile_tile::layout::Swizzle128;
use oxtile_tile::register_tile::{RegisterElement, StoredElement};

use super::config::{AttentionConfig, Mask};
use super::forward::{Binding, BoundAttention, Instance};
use super::general::{Placement, SequenceKeys, rows_of};
use crate::runtime::{Buffer, Loaded, Result};
use crate::tensor::{TensorMap, TensorMapMut};

impl<T, const D: usize, const V: usize, const KEYS: usize, G, const CAUSAL: bool> Instance<T>
    for Loaded<AttentionForwardPacked<T, D, V, KEYS, G, CAUSAL>>
where
    T: RegisterElement + StoredElement,
    G: Team + Send + Sync,
    Columns<D>: MatrixColumns,
    Columns<V>: MatrixColumns,
    Columns<KEYS>: MatrixColumns,
    AttentionForwardPacked<T, D, V, KEYS, G, CAUSAL>: for<'a> Kernel<Args<'a> = AttentionForwardPackedArgs<'a, T, D, V, KEYS, G, CAUSAL>>,
{
    fn bind<'a>(&'a self, binding: Binding<'_, 'a, T>) -> Result<BoundAttention<'a>> {
        let Binding { stream, config, inputs, outputs } = binding;
        let AttentionConfig { batches, queries, heads, head_size, .. } = config;
        let (out, mut log_sum_exp) = (outputs.out.rounded()?, outputs.log_sum_exp);
        let SequenceKeys { k, v, rows: key_rows } = SequenceKeys::<T, KEYS, D, V>::new(stream, &config, &inputs)?;
        let of_rows = |size| rows_of(&config, queries, heads, size);
        let q = TensorMap::<_, PART, D, Swizzle128, 5>::sequences(stream, inputs.q, of_rows(head_size))?;
        let mut out = TensorMapMut::<_, PART, V, Swizzle128, 5>::sequences(stream, out, of_rows(config.value_size()))?;
        let placement = Placement::new(stream, &config, inputs.sequences)?;
        let mut counter = Buffer::<u32>::zeros(stream, 1)?;
        let log_sum_exp_length = log_sum_exp.len();
        let [batches, heads, group, query_rows] = [batches, heads, config.group(), queries].map(|size| size as u32);
        let (section_keys, scale) = (config.section_keys(size_of::<T>() as u64), config.scale_log2());
        Ok(BoundAttention::new(move |stream| {
            let [query_ends, key_ends, query_offsets, key_offsets] = placement.arrays();
            let args = AttentionForwardPackedArgs {
                q: q.view(),
                k: k.view(),
                v: v.view(),
                out: out.view_mut(),
                log_sum_exp: log_sum_exp.slice_mut(0, log_sum_exp_length),
                query_ends,
                key_ends,
                query_offsets,
                key_offsets,
                counter: counter.view_mut(),
                batches,
                heads,
                group,
                query_rows,
                key_rows,
                section_keys,
                padded: u32::from(placement.padded()),
                top_left: u32::from(config.mask == Mask::CausalTopLeft),
                scale,
                marker: std::marker::PhantomData,
            };
            self.launch(stream, args)
        }))
    }
}
