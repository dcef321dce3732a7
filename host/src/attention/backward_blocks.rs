//! What the kernels on wgmma of the backward pass share: tensor maps, and memory between launches.

use std::sync::{Arc, Mutex};

use oxtile_kernels::attention::{
    BACKWARD_KEYS, BackwardTensorsArgument, BlockStatisticsArgument, KeyGradientsArgument, QuerySumsArgument, WARPGROUP_KEYS,
};
use oxtile_tile::launch::{DeviceTensorMapMut, DeviceViewMut};
use oxtile_tile::layout::Swizzle128;
use oxtile_tile::register_tile::RegisterElement;

use super::backward_tensors::Three;
use crate::runtime::memory::Memory;
use crate::runtime::runtime::lock;
use crate::runtime::{Buffer, Result, Stream};
use crate::tensor::{Heads, HeadsMut, MapLayout, Strided, TensorMap, TensorMapMut, Uploads};

/// Tensor maps, and blocks of `QUERIES` queries between the kernels: their statistics, the sums of their gradients, and which tile of keys
/// adds next.
pub(super) struct Blocks<'a, T: RegisterElement, const D: usize, const QUERIES: usize, const RANK: usize> {
    q: TensorMap<'a, T, QUERIES, D, Swizzle128, RANK>,
    grad_out: TensorMap<'a, T, QUERIES, D, Swizzle128, RANK>,
    k: TensorMap<'a, T, BACKWARD_KEYS, D, Swizzle128, RANK>,
    v: TensorMap<'a, T, BACKWARD_KEYS, D, Swizzle128, RANK>,
    /// Rounded gradients of queries, if there are any.
    grad_q: Option<TensorMapMut<'a, T, QUERIES, D, Swizzle128, RANK>>,
    /// Those of keys and values.
    grad_kv: Option<[TensorMapMut<'a, T, WARPGROUP_KEYS, D, Swizzle128, RANK>; 2]>,
    offsets: Buffer<f32>,
    deltas: Buffer<f32>,
    sums: Buffer<f32>,
    turns: Buffer<u32>,
    counter: Buffer<u32>,
    blocks: u32,
    /// Whether there are queries. The general kernels are chosen only where there are both.
    pub(super) has_queries: bool,
    /// Whether there are keys.
    pub(super) has_keys: bool,
}

/// Sums of gradients of queries, which bound operations share: they are run one after another.
#[derive(Default)]
pub(crate) struct Workspace(Mutex<Vec<Arc<Memory>>>);

impl Workspace {
    /// So many sums: shared, or of an operation alone.
    fn sums(shared: Option<&Self>, stream: &Stream, len: u64) -> Result<Buffer<f32>> {
        let Some(Self(shared)) = shared else { return Buffer::uninitialised(stream, len) };
        let mut shared = lock(shared);
        if let Some(memory) = shared.iter().find(|memory| memory.bytes == len * 4) {
            // SAFETY: it was allocated for as many elements of this type.
            return Ok(unsafe { Buffer::of(Arc::clone(memory), len) });
        }
        let sums = Buffer::uninitialised(stream, len)?;
        shared.push(Arc::clone(sums.memory()));
        Ok(sums)
    }
}

/// What kernels take of them.
pub(super) struct BlockArguments<'s, T: RegisterElement, const D: usize, const QUERIES: usize, const RANK: usize> {
    pub(super) tensors: BackwardTensorsArgument<'s, T, D, QUERIES, RANK>,
    pub(super) sums: QuerySumsArgument<'s>,
    pub(super) grad_q: Option<DeviceTensorMapMut<'s, T, QUERIES, D, Swizzle128, RANK>>,
    pub(super) grad_kv: Option<KeyGradientsArgument<'s, T, D, RANK>>,
    /// The counter of tiles of keys.
    pub(super) counter: DeviceViewMut<'s, u32>,
}

impl<'a, T: RegisterElement, const D: usize, const QUERIES: usize, const RANK: usize> Blocks<'a, T, D, QUERIES, RANK> {
    /// Maps `Q`, `dO`, `K`, `V` and the gradients, which lie as `layout` has it; allocates so many blocks of each of `heads` heads.
    pub(super) fn new<R: MapLayout<RANK>>(
        uploads: &mut Uploads,
        stream: &Stream,
        [q, grad_out, k, v]: [Heads<'a, T>; 4],
        gradients: Three<'a, T>,
        layout: impl Fn(Strided<4>) -> R,
        [heads, blocks]: [u64; 2],
        workspace: Option<&Workspace>,
    ) -> Result<Self> {
        let (has_queries, has_keys) = (!q.view().is_empty(), !k.view().is_empty());
        // Without queries, or without keys, nothing is loaded by their maps, which must be of something: the others.
        let (q, grad_out) = if has_queries { (q, grad_out) } else { (k, k) };
        let (k, v) = if has_keys { (k, v) } else { (q, q) };
        let (mut grad_q, mut grad_kv) = (None, None);
        if let Some([q, k, v]) = gradients {
            if has_queries {
                grad_q = Some(map_mut(uploads, stream, q, &layout)?);
            }
            if has_keys {
                grad_kv = Some([map_mut(uploads, stream, k, &layout)?, map_mut(uploads, stream, v, &layout)?]);
            }
        }
        let rows = heads * blocks * QUERIES as u64;
        Ok(Self {
            q: TensorMap::with(uploads, stream, q.view(), layout(q.layout()))?,
            grad_out: TensorMap::with(uploads, stream, grad_out.view(), layout(grad_out.layout()))?,
            k: TensorMap::with(uploads, stream, k.view(), layout(k.layout()))?,
            v: TensorMap::with(uploads, stream, v.view(), layout(v.layout()))?,
            grad_q,
            grad_kv,
            offsets: Buffer::uninitialised(stream, rows)?,
            deltas: Buffer::uninitialised(stream, rows)?,
            sums: Workspace::sums(workspace, stream, rows * D as u64)?,
            turns: Buffer::zeros(stream, heads * blocks)?,
            counter: Buffer::zeros(stream, 1)?,
            blocks: blocks as u32,
            has_queries,
            has_keys,
        })
    }

    /// The statistics, to be written.
    pub(super) fn statistics(&mut self) -> BlockStatisticsArgument<'_> {
        let (blocks, size) = (self.blocks, QUERIES as u32);
        BlockStatisticsArgument { offsets: self.offsets.view_mut(), deltas: self.deltas.view_mut(), blocks, size, rows: blocks * size }
    }

    /// What is launched with them.
    pub(super) fn arguments(&mut self) -> BlockArguments<'_, T, D, QUERIES, RANK> {
        let (q, grad_out, k, v) = (self.q.view(), self.grad_out.view(), self.k.view(), self.v.view());
        let (offsets, deltas) = (self.offsets.view(), self.deltas.view());
        BlockArguments {
            tensors: BackwardTensorsArgument { q, grad_out, k, v, offsets, deltas },
            sums: QuerySumsArgument { values: self.sums.view_mut(), turns: self.turns.view_mut(), blocks: self.blocks },
            grad_q: self.grad_q.as_mut().map(TensorMapMut::view_mut),
            grad_kv: self.grad_kv.as_mut().map(|[k, v]| KeyGradientsArgument { k: k.view_mut(), v: v.view_mut() }),
            counter: self.counter.view_mut(),
        }
    }
}

/// The map of a gradient.
pub(super) fn map_mut<'a, T: RegisterElement, const ROWS: usize, const D: usize, const RANK: usize, R: MapLayout<RANK>>(
    uploads: &mut Uploads,
    stream: &Stream,
    gradient: HeadsMut<'a, T>,
    layout: impl Fn(Strided<4>) -> R,
) -> Result<TensorMapMut<'a, T, ROWS, D, Swizzle128, RANK>> {
    let layout = layout(gradient.layout());
    TensorMapMut::with(uploads, stream, gradient.into_view(), layout)
}
