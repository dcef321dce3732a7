//! Few queries and many keys: how many parts the keys are divided into, and the arguments of the two kernels.

use oxtile_kernels::attention::{
    AttentionCombine, AttentionCombineArgs, AttentionForwardSplit, AttentionForwardSplitArgs, CombinedArgument, FAR, MOST_PARTS, PART,
    PartsArgument, PartsMutArgument, Shape, SplitInputsArgument, Team,
};
use oxtile_tile::arch::{Columns, MatrixColumns};
use oxtile_tile::launch::Kernel;
use oxtile_tile::layout::Swizzle128;
use oxtile_tile::register_tile::{RegisterElement, StoredElement};

use super::config::{AttentionConfig, Mask};
use super::dense::{by_head, keys_by_head};
use super::forward::{AttentionElement, Binding, BoundAttention, Instance};
use super::plan::{Facts, Key, Kind};
use super::portable::check_aligned;
use crate::runtime::{Buffer, Device, Loaded, Result};
use crate::tensor::{Strided, TensorMap};

/// What putting parts together takes, in blocks of keys of a tile: a launch.
const COMBINING: u64 = 3;

impl AttentionConfig {
    /// Parts of the keys, 1 if they are not divided.
    pub(super) fn parts(&self) -> u64 {
        self.key_parts.unwrap_or(1)
    }

    /// The same with the keys divided as suits a device, unless it says how or cannot be divided.
    pub(super) fn divided_for<T: AttentionElement>(self, device: &Device) -> Self {
        let key = Key { kind: Kind::Split, ..self.key() };
        let Some(Facts { step: [queries, keys], .. }) = T::facts(key).filter(|_| self.key_parts.is_none() && !self.needs_general()) else {
            return self;
        };
        let [rows, heads] = self.rows_and_heads();
        let tiles = rows.div_ceil(queries.into()).saturating_mul(heads).saturating_mul(self.batches);
        let seen = if self.mask == Mask::CausalTopLeft { self.keys.min(self.queries) } else { self.keys };
        let multiprocessors = device.limits().multiprocessors.into();
        Self { key_parts: Some(fastest_parts(tiles, seen.div_ceil(keys.into()), multiprocessors)), ..self }
    }

    /// Whether heads that share keys are rows of one head: each has a single query, which sees all keys, and then they lie as rows
    /// do, in the results too.
    pub(super) fn folds(&self) -> bool {
        self.queries == 1 && self.group() > 1 && self.mask != Mask::CausalTopLeft && !self.needs_general()
    }

    /// Rows of queries of a head, and heads, as the kernels of dense tensors have them.
    pub(super) fn rows_and_heads(&self) -> [u64; 2] {
        if self.folds() { [self.group(), self.key_heads] } else { [self.queries, self.heads] }
    }

    /// A tensor of queries or of results, of rows of `size`, as those kernels have it: `[batches, heads, rows, size]`.
    pub(super) fn queries_by_head(&self, size: u64) -> Strided<4> {
        let [rows, heads] = self.rows_and_heads();
        match self.folds() {
            true => Strided { shape: [self.batches, heads, rows, size], strides: [self.heads * size, rows * size, size, 1] },
            false => by_head(self.layout, self.batches, rows, heads, size),
        }
    }
}

/// The number of parts that takes least time, where every block of keys of a tile takes as long and each multiprocessor computes one part
/// of a tile at a time.
fn fastest_parts(tiles: u64, blocks: u64, multiprocessors: u64) -> u64 {
    if tiles >= multiprocessors {
        return 1;
    }
    let time = |parts: u64| {
        let combining = if parts > 1 { COMBINING } else { 0 };
        (tiles * parts).div_ceil(multiprocessors.max(1)) * blocks.div_ceil(parts) + combining
    };
    (1..=blocks.clamp(1, MOST_PARTS.into())).min_by_key(|parts| time(*parts)).unwrap_or(1)
}

impl<T, const D: usize, const V: usize, const KEYS: usize, G> Instance<T>
    for (Loaded<AttentionForwardSplit<T, D, V, KEYS, G>>, Loaded<AttentionCombine<T>>)
where
    T: RegisterElement + StoredElement,
    G: Team + Send + Sync,
    Columns<D>: MatrixColumns,
    Columns<V>: MatrixColumns,
    Columns<KEYS>: MatrixColumns,
    AttentionForwardSplit<T, D, V, KEYS, G>: Kernel,
    AttentionCombine<T>: Kernel,
{
    fn bind<'a>(&'a self, binding: Binding<'_, 'a, T>) -> Result<BoundAttention<'a>> {
        let Binding { stream, config, inputs, outputs } = binding;
        let (attend, combine) = self;
        let (mut out, mut log_sum_exp) = (outputs.out.rounded()?, outputs.log_sum_exp);
        check_aligned("Attention, out", out.as_view())?;
        let (k, v) = keys_by_head::<_, KEYS, D, V>(stream, &config, &inputs)?;
        let q = TensorMap::<_, PART, D, Swizzle128, 4>::strided(stream, inputs.q, config.queries_by_head(config.head_size))?;
        let Strided { shape: [batches, heads, rows, size], strides: [batch_stride, head_stride, row_stride, _] } =
            config.queries_by_head(config.value_size());
        let part_rows = config.parts() * batches * heads * rows;
        let mut sums = Buffer::<f32>::uninitialised(stream, part_rows * size)?;
        let mut logs = Buffer::<f32>::uninitialised(stream, part_rows)?;
        let group = (heads / config.key_heads) as u32;
        let [batches, heads, rows, keys, count, size] = [batches, heads, rows, config.keys, config.parts(), size].map(|size| size as u32);
        let shape = Shape { batches, heads, group, queries: rows, keys };
        let diagonal = if config.mask == Mask::Full || config.folds() { FAR } else { config.diagonal() };
        let (scale, out_length, log_sum_exp_length) = (config.scale_log2(), out.len(), log_sum_exp.len());
        Ok(BoundAttention::new(move |stream| {
            let args = AttentionForwardSplitArgs {
                inputs: SplitInputsArgument { q: q.view(), k: k.view(), v: v.view() },
                parts: PartsMutArgument { sums: sums.view_mut(), logs: logs.view_mut(), count, size },
                shape,
                diagonal,
                scale,
                marker: std::marker::PhantomData,
            };
            attend.launch(stream, args)?;
            let args = AttentionCombineArgs {
                parts: PartsArgument { sums: sums.view(), logs: logs.view(), count, size },
                result: CombinedArgument {
                    out: out.slice_mut(0, out_length),
                    log_sum_exp: log_sum_exp.slice_mut(0, log_sum_exp_length),
                    heads,
                    rows,
                    batch_stride,
                    head_stride,
                    row_stride,
                },
            };
            combine.launch(stream, args)
        }))
    }
}

#[cfg(test)]
mod tests {
    use super::fastest_parts;

    #[test]
    fn parts_fill_the_multiprocessors() {
        // 64 tiles of 32 blocks: two parts each are one wave.
        assert_eq!(fastest_parts(64, 32, 132), 2);
        // One tile: no more parts than blocks, nor than may be.
        assert_eq!([fastest_parts(1, 9, 132), fastest_parts(1, 1000, 132)], [9, 32]);
        // A second wave would cost what parts save.
        assert_eq!([fastest_parts(132, 32, 132), fastest_parts(128, 32, 132)], [1, 1]);
        // Nor do a few blocks pay for putting them together.
        assert_eq!([fastest_parts(1, 4, 132), fastest_parts(1, 0, 132), fastest_parts(0, 32, 132)], [1, 1, 1]);
    }
}
