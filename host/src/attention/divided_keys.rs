//! Few queries and many keys: how many parts the keys are divided into, and the arguments of the two kernels.

use std::marker::PhantomData;
use std::sync::Arc;

use oxtile_kernels::attention::{
    AttentionCombine, AttentionCombineArgs, AttentionForwardSplit, AttentionForwardSplitArgs, CombinedArgument, FAR, MOST_PARTS,
    PartsArgument, PartsMutArgument, SplitInputsArgument, WarpgroupRoles,
};
use oxtile_tile::arch::{Columns, MatrixColumns};
use oxtile_tile::launch::Kernel;
use oxtile_tile::register_tile::{RegisterElement, StoredElement};

use super::choice::Problem;
use super::config::{AttentionConfig, Mask};
use super::forward::{AttentionElement, Binding};
use super::heads::{ForwardMaps, by_head};
use super::portable::check_aligned;
use super::tensors::Inputs;
use crate::runtime::{Bound, Buffer, Device, Loaded, Result};
use crate::tensor::{Strided, Uploads};

/// The time of putting parts together, in blocks of keys of a tile: that of a launch.
const COMBINING: u64 = 3;

impl AttentionConfig {
    /// Parts of the keys, 1 if they are not divided.
    pub(super) fn parts(&self) -> u64 {
        self.key_parts.unwrap_or(1)
    }

    /// The configuration with its keys divided to suit a device, unless it sets the number of parts or they cannot be divided.
    pub(super) fn divided_for<T: AttentionElement>(self, device: &Device) -> Self {
        let Some(entry) = self.wgmma_entry::<T>(Problem::Divided).ok().filter(|_| self.key_parts.is_none() && !self.is_beyond_dense())
        else {
            return self;
        };
        let ([rows, heads], [queries, keys]) = (self.rows_and_heads(), entry.tile);
        let tiles = rows.div_ceil(queries).saturating_mul(heads).saturating_mul(self.batches);
        let seen = if self.mask == Mask::CausalTopLeft { self.keys.min(self.queries) } else { self.keys };
        let multiprocessors = device.limits().multiprocessors.into();
        Self { key_parts: Some(fastest_parts(tiles, seen.div_ceil(keys), multiprocessors)), ..self }
    }

    /// Whether heads that share keys are rows of one head: each has a single query, which sees all keys, and then they lie as rows
    /// do, in the results too.
    pub(super) fn folds(&self) -> bool {
        self.queries == 1 && self.group() > 1 && self.mask != Mask::CausalTopLeft && !self.is_beyond_dense()
    }

    /// Rows of queries of a head, and heads, as the kernels of dense tensors have them.
    pub(super) fn rows_and_heads(&self) -> [u64; 2] {
        if self.folds() { [self.group(), self.key_heads] } else { [self.queries, self.heads] }
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

/// The kernel of the parts, and the one that puts them together.
pub(super) type Kernels<T, const D: usize, const V: usize, const KEYS: usize, G> =
    (Loaded<AttentionForwardSplit<T, D, V, KEYS, G>>, Loaded<AttentionCombine<T>>);

/// Binds dense tensors.
pub(super) fn bind<'a, T, const D: usize, const V: usize, const KEYS: usize, G>(
    kernels: Arc<Kernels<T, D, V, KEYS, G>>,
    Binding { stream, config, inputs, outputs }: Binding<'_, 'a, T>,
) -> Result<Bound<'a>>
where
    T: AttentionElement<Out = T> + RegisterElement + StoredElement,
    G: WarpgroupRoles,
    Columns<D>: MatrixColumns,
    Columns<V>: MatrixColumns,
    Columns<KEYS>: MatrixColumns,
    AttentionForwardSplit<T, D, V, KEYS, G>: Kernel,
    AttentionCombine<T>: Kernel,
{
    let (out, mut log_sum_exp) = (outputs.out.rounded()?, outputs.log_sum_exp);
    let Strided { shape: [batches, heads, rows, size], strides: [batch_stride, head_stride, row_stride, _] } = config.folded(out.layout());
    let mut out = out.into_view();
    check_aligned("Attention, out", out.as_view())?;
    let (mut uploads, Inputs { q, k, v, .. }) = (Uploads::default(), inputs);
    let layouts = [config.folded(q.layout()), by_head(k.layout()), by_head(v.layout())];
    let maps = ForwardMaps::<_, KEYS, D, V, 4>::new(&mut uploads, stream, [q, k, v], layouts)?;
    uploads.copy(stream)?;
    let part_rows = config.parts() * batches * heads * rows;
    let mut sums = Buffer::<f32>::uninitialised(stream, part_rows * size)?;
    let mut logs = Buffer::<f32>::uninitialised(stream, part_rows)?;
    let shape = config.shape([rows, heads]);
    let [heads, rows, count, size] = [heads, rows, config.parts(), size].map(|size| size as u32);
    let diagonal = if config.mask == Mask::Full || config.folds() { FAR } else { config.diagonal() };
    let scale = config.scale_log2();
    Ok(Bound::new(move |stream| {
        let (attend, combine) = &*kernels;
        let args = AttentionForwardSplitArgs {
            inputs: SplitInputsArgument { q: maps.q.view(), k: maps.k.view(), v: maps.v.view() },
            parts: PartsMutArgument { sums: sums.view_mut(), logs: logs.view_mut(), count, size },
            shape,
            diagonal,
            scale,
            marker: PhantomData,
        };
        attend.launch(stream, args)?;
        let (out, log_sum_exp) = (out.reborrow(), log_sum_exp.reborrow());
        let args = AttentionCombineArgs {
            parts: PartsArgument { sums: sums.view(), logs: logs.view(), count, size },
            result: CombinedArgument { out, log_sum_exp, heads, rows, batch_stride, head_stride, row_stride },
        };
        combine.launch(stream, args)
    }))
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
