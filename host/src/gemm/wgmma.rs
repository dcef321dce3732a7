//! Matrices bound to the kernels on wgmma.

use std::marker::PhantomData;

use oxtile_kernels::gemm::{self, GemmArgs, SplitArgument, TileShape, WARPGROUPS};
use oxtile_tile::arch::MatrixElement;
use oxtile_tile::launch::{DeviceViewMut, Kernel};
use oxtile_tile::layout::Swizzle128;
use oxtile_tile::register_tile::StoredElement;

use super::config::GemmConfig;
use super::plan::GemmPlan;
use super::product::Matrices;
use super::table::Instance;
use crate::runtime::{Bound, Buffer, Loaded, Result, Stream};
use crate::tensor::{Strided, TensorMap, TensorMapMut, Uploads};

impl<A, B, const DEPTH: usize, O, const WIDTH: usize, S, const M_MAJOR: bool, const N_MAJOR: bool> Instance<A, B, O>
    for Loaded<gemm::Gemm<A, B, DEPTH, O, WIDTH, S, M_MAJOR, N_MAJOR>>
where
    A: MatrixElement,
    B: MatrixElement,
    O: StoredElement,
    S: TileShape,
    gemm::Gemm<A, B, DEPTH, O, WIDTH, S, M_MAJOR, N_MAJOR>: Kernel,
{
    fn bind<'a>(&'a self, stream: &Stream, config: GemmConfig, plan: GemmPlan, matrices: Matrices<'a, A, B, O>) -> Result<Bound<'a>> {
        let (GemmConfig { m, n, k, .. }, Matrices { a, b, scales, bias, d }) = (config, matrices);
        let (of_a, of_b) = (if M_MAJOR { [k, m] } else { [m, k] }, if N_MAJOR { [k, n] } else { [n, k] });
        let (mut uploads, memory, length) = (Uploads::default(), d.access("old"), d.len());
        let a = TensorMap::<_, 64, DEPTH, Swizzle128>::with(&mut uploads, stream, a, Strided::dense(of_a))?;
        let b = TensorMap::<_, 64, DEPTH, Swizzle128>::with(&mut uploads, stream, b, Strided::dense(of_b))?;
        let mut d = TensorMapMut::<_, 64, WIDTH, Swizzle128>::with(&mut uploads, stream, d, Strided::dense([m, n]))?;
        let mut parts = Parts::new::<S>(stream, [m, n], plan)?;
        uploads.copy(stream)?;
        Ok(Bound::new(move |stream| {
            // SAFETY: the map `d` holds the only view of this memory, for as long as the closure lives. The kernel reads an
            // element of the matrix as it was before it stores that element, in the same warpgroup.
            let old = unsafe { DeviceViewMut::from_raw(memory.address, length, memory.owner) };
            let (a, b, d, split) = (a.view(), b.view(), d.view_mut(), parts.argument());
            let (shape, fusion) = (config.shape(), config.fusion(scales, bias));
            self.launch(stream, GemmArgs { a, b, d, old, shape, fusion, split, marker: PhantomData })
        }))
    }
}

/// The sums of parts of tiles, in memory of their own.
struct Parts {
    plan: GemmPlan,
    memory: Option<(Buffer<f32>, Buffer<u32>)>,
}

impl Parts {
    fn new<S: TileShape>(stream: &Stream, [m, n]: [u64; 2], plan: GemmPlan) -> Result<Self> {
        let tiles = m.div_ceil(u64::from(S::CLUSTER * S::ROWS)) * n.div_ceil(u64::from(S::COLUMNS));
        let counters = tiles.saturating_sub(plan.whole) * u64::from(S::CLUSTER * WARPGROUPS);
        let memory = if counters == 0 {
            None
        } else {
            let sums = Buffer::named(stream, "sums of parts", counters * plan.parts * u64::from(S::PIECE))?;
            Some((sums, Buffer::zeros(stream, counters)?))
        };
        Ok(Self { plan, memory })
    }

    fn argument(&mut self) -> SplitArgument<'_> {
        let (sums, tickets) = self.memory.as_mut().map(|(sums, tickets)| (sums.view_mut(), tickets.view_mut())).unzip();
        SplitArgument { whole: self.plan.whole as u32, parts: self.plan.parts as u32, sums, tickets }
    }
}
