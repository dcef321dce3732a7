//! What the kernels on wgmma of the backward pass share: tensor maps, and memory between launches.

use oxtile_kernels::attention::{
    BackwardTensorsArgument, BlockStatisticsArgument, KEYS, KeyGradientsArgument, KeyOrderArgument, PART, QuerySumsArgument,
};
use oxtile_tile::launch::{DeviceView, DeviceViewMut};
use oxtile_tile::layout::Swizzle128;
use oxtile_tile::num::Pod;
use oxtile_tile::register_tile::RegisterElement;

use crate::runtime::{Buffer, Result, Stream};
use crate::tensor::{MapLayout, TensorMap, TensorMapMut, Uploads};

/// The tensor maps of what the main kernel reads.
pub(super) struct BackwardMaps<'a, T, const D: usize, const QUERIES: usize, const RANK: usize> {
    q: TensorMap<'a, T, QUERIES, D, Swizzle128, RANK>,
    grad_out: TensorMap<'a, T, QUERIES, D, Swizzle128, RANK>,
    k: TensorMap<'a, T, KEYS, D, Swizzle128, RANK>,
    v: TensorMap<'a, T, KEYS, D, Swizzle128, RANK>,
}

impl<'a, T: Pod, const D: usize, const QUERIES: usize, const RANK: usize> BackwardMaps<'a, T, D, QUERIES, RANK> {
    /// The maps of `Q`, `dO`, `K` and `V`, with these layouts.
    pub(super) fn new(
        uploads: &mut Uploads,
        stream: &Stream,
        [q, grad_out, k, v]: [DeviceView<'a, T>; 4],
        [of_q, of_out, of_k, of_v]: [impl MapLayout<RANK>; 4],
    ) -> Result<Self> {
        Ok(Self {
            q: TensorMap::with(uploads, stream, q, of_q)?,
            grad_out: TensorMap::with(uploads, stream, grad_out, of_out)?,
            k: TensorMap::with(uploads, stream, k, of_k)?,
            v: TensorMap::with(uploads, stream, v, of_v)?,
        })
    }
}

/// The tensor maps of the gradients of keys and values.
pub(super) struct KeyGradientMaps<'a, T: RegisterElement, const D: usize, const RANK: usize> {
    k: TensorMapMut<'a, T, PART, D, Swizzle128, RANK>,
    v: TensorMapMut<'a, T, PART, D, Swizzle128, RANK>,
}

impl<'a, T: RegisterElement, const D: usize, const RANK: usize> KeyGradientMaps<'a, T, D, RANK> {
    /// The maps of gradients with these layouts.
    pub(super) fn new(
        uploads: &mut Uploads,
        stream: &Stream,
        [k, v]: [DeviceViewMut<'a, T>; 2],
        [of_k, of_v]: [impl MapLayout<RANK>; 2],
    ) -> Result<Self> {
        Ok(Self { k: TensorMapMut::with(uploads, stream, k, of_k)?, v: TensorMapMut::with(uploads, stream, v, of_v)? })
    }

    /// The argument of a launch.
    pub(super) fn argument(&mut self) -> KeyGradientsArgument<'_, T, D, RANK> {
        KeyGradientsArgument { k: self.k.view_mut(), v: self.v.view_mut() }
    }
}

/// Blocks of `size` queries between the kernels: their statistics, the sums of their gradients, and which tile of keys adds next.
pub(super) struct QueryBlockMemory {
    offsets: Buffer<f32>,
    deltas: Buffer<f32>,
    sums: Buffer<f32>,
    turns: Buffer<u32>,
    counter: Buffer<u32>,
    blocks: u32,
    size: u32,
}

impl QueryBlockMemory {
    /// Memory for so many blocks of each of `heads` heads, of rows of `columns`.
    pub(super) fn new(stream: &Stream, heads: u64, blocks: u64, size: usize, columns: usize) -> Result<Self> {
        let rows = heads * blocks * size as u64;
        Ok(Self {
            offsets: Buffer::uninitialised(stream, rows)?,
            deltas: Buffer::uninitialised(stream, rows)?,
            sums: Buffer::uninitialised(stream, rows * columns as u64)?,
            turns: Buffer::zeros(stream, heads * blocks)?,
            counter: Buffer::zeros(stream, 1)?,
            blocks: blocks as u32,
            size: size as u32,
        })
    }

    /// The statistics, to be written.
    pub(super) fn statistics(&mut self) -> BlockStatisticsArgument<'_> {
        let Self { offsets, deltas, blocks, size, .. } = self;
        BlockStatisticsArgument {
            offsets: offsets.view_mut(),
            deltas: deltas.view_mut(),
            blocks: *blocks,
            size: *size,
            rows: *blocks * *size,
        }
    }

    /// The sums of gradients.
    pub(super) fn sums(&mut self) -> QuerySumsArgument<'_> {
        QuerySumsArgument { values: self.sums.view_mut(), turns: self.turns.view_mut(), blocks: self.blocks }
    }

    /// What the main kernel takes: tensors and statistics, sums, and the order of tiles.
    pub(super) fn main<'s, T: RegisterElement, const D: usize, const QUERIES: usize, const RANK: usize>(
        &'s mut self,
        maps: &'s BackwardMaps<'_, T, D, QUERIES, RANK>,
        section: u32,
        ordered: bool,
    ) -> (BackwardTensorsArgument<'s, T, D, QUERIES, RANK>, QuerySumsArgument<'s>, KeyOrderArgument<'s>) {
        let tensors = BackwardTensorsArgument {
            q: maps.q.view(),
            grad_out: maps.grad_out.view(),
            k: maps.k.view(),
            v: maps.v.view(),
            offsets: self.offsets.view(),
            deltas: self.deltas.view(),
        };
        let sums = QuerySumsArgument { values: self.sums.view_mut(), turns: self.turns.view_mut(), blocks: self.blocks };
        (tensors, sums, KeyOrderArgument { counter: self.counter.view_mut(), section, ordered })
    }
}
