//! Matrices bound to the kernels on wgmma.

use std::marker::PhantomData;

use oxtile_kernels::gemm::{self, FEW, GemmArgs, MOST_FEW, SplitArgument, TileLoops, TileShape};
use oxtile_tile::arch::MatrixElement;
use oxtile_tile::launch::{BufferAccess, DeviceTensorMap, DeviceTensorMapMut, DeviceViewMut, Kernel};
use oxtile_tile::layout::Swizzle128;
use oxtile_tile::register_tile::StoredElement;

use super::config::GemmConfig;
use super::plan::GemmPlan;
use super::product::Matrices;
use super::table::Instance;
use crate::runtime::{Bound, Buffer, Loaded, Result, Stream};
use crate::tensor::{Strided, TensorMap, TensorMapMut, Uploads};

impl<A, B, const DEPTH: usize, O, const WIDTH: usize, S, const BOX: usize, const M_MAJOR: bool, const N_MAJOR: bool> Instance<A, B, O>
    for Loaded<gemm::Gemm<A, B, DEPTH, O, WIDTH, S, BOX, M_MAJOR, N_MAJOR>>
where
    A: MatrixElement,
    B: MatrixElement,
    O: StoredElement,
    S: TileLoops<BOX>,
    gemm::Gemm<A, B, DEPTH, O, WIDTH, S, BOX, M_MAJOR, N_MAJOR>: Kernel,
{
    fn bind<'a>(&'a self, stream: &Stream, config: GemmConfig, plan: GemmPlan, matrices: Matrices<'a, A, B, O>) -> Result<Bound<'a>> {
        let (scales, bias) = (matrices.scales, matrices.bias);
        // Where rows lie along M, boxes of few of them would be narrower than their swizzle.
        let is_few = !M_MAJOR && S::ROWS == 64 && config.m <= MOST_FEW.into();
        let of_a = Strided::dense([config.m, config.k]);
        let mut uploads = Uploads::default();
        let few = is_few.then(|| TensorMap::<_, FEW, DEPTH, Swizzle128>::with(&mut uploads, stream, matrices.a, of_a)).transpose()?;
        let mut maps = Maps::<A, B, DEPTH, O, WIDTH, BOX>::with(&mut uploads, stream, config, matrices)?;
        uploads.copy(stream)?;
        let mut parts = Parts::new::<S>(stream, [config.m, config.n], plan)?;
        Ok(Bound::new(move |stream| {
            let (a, b, d, old) = maps.arguments();
            let (shape, fusion, split) = (config.shape(), config.fusion(scales, bias), parts.argument());
            let few = few.as_ref().map(TensorMap::view);
            self.launch(stream, GemmArgs { a, few, b, d, old, shape, fusion, split, marker: PhantomData })
        }))
    }
}

/// The tensor maps of a product's matrices, as the kernels on wgmma take them.
pub(crate) struct Maps<'a, A, B, const DEPTH: usize, O, const WIDTH: usize, const BOX: usize = 64> {
    a: TensorMap<'a, A, 64, DEPTH, Swizzle128>,
    b: TensorMap<'a, B, BOX, DEPTH, Swizzle128>,
    d: TensorMapMut<'a, O, 64, WIDTH, Swizzle128>,
    /// Where the result lies, and how many elements it has.
    result: (BufferAccess<'a>, u64),
}

/// The arguments of a product that are matrices: the operands, and the result to be stored and as it was.
type MatrixArguments<'m, A, B, const DEPTH: usize, O, const WIDTH: usize, const BOX: usize> = (
    DeviceTensorMap<'m, A, 64, DEPTH, Swizzle128>,
    DeviceTensorMap<'m, B, BOX, DEPTH, Swizzle128>,
    DeviceTensorMapMut<'m, O, 64, WIDTH, Swizzle128>,
    DeviceViewMut<'m, O>,
);

impl<'a, A: MatrixElement, B: MatrixElement, const DEPTH: usize, O: StoredElement, const WIDTH: usize, const BOX: usize>
    Maps<'a, A, B, DEPTH, O, WIDTH, BOX>
{
    /// Encodes them, and copies them in stream order.
    pub fn new(stream: &Stream, config: GemmConfig, matrices: Matrices<'a, A, B, O>) -> Result<Self> {
        let mut uploads = Uploads::default();
        let maps = Self::with(&mut uploads, stream, config, matrices)?;
        uploads.copy(stream)?;
        Ok(maps)
    }

    /// Encodes them, to be copied with others.
    fn with(uploads: &mut Uploads, stream: &Stream, config: GemmConfig, Matrices { a, b, d, .. }: Matrices<'a, A, B, O>) -> Result<Self> {
        let (GemmConfig { m, n, k, .. }, [m_major, n_major]) = (config, config.majors());
        let (of_a, of_b) = (if m_major { [k, m] } else { [m, k] }, if n_major { [k, n] } else { [n, k] });
        let result = (d.access("old"), d.len());
        let a = TensorMap::with(uploads, stream, a, Strided::dense(of_a))?;
        let b = TensorMap::with(uploads, stream, b, Strided::dense(of_b))?;
        let d = TensorMapMut::with(uploads, stream, d, Strided::dense([m, n]))?;
        Ok(Self { a, b, d, result })
    }

    /// What a launch takes.
    pub fn arguments(&mut self) -> MatrixArguments<'_, A, B, DEPTH, O, WIDTH, BOX> {
        let (memory, length) = self.result;
        // SAFETY: the map `d` holds the only view of this memory, and is borrowed with it. The kernels read an element of the matrix as it was before
        // they store that element, in the same warpgroup.
        let old = unsafe { DeviceViewMut::from_raw(memory.address, length, memory.owner) };
        (self.a.view(), self.b.view(), self.d.view_mut(), old)
    }
}

/// The sums of parts of tiles, in memory of their own; none of those that are the blocks of clusters.
pub(super) struct Parts {
    plan: GemmPlan,
    memory: Option<(Buffer<f32>, Buffer<u32>)>,
}

impl Parts {
    pub fn new<S: TileShape>(stream: &Stream, [m, n]: [u64; 2], plan: GemmPlan) -> Result<Self> {
        let tiles = m.div_ceil(u64::from(S::CLUSTER * S::ROWS)) * n.div_ceil(u64::from(S::COLUMNS));
        let split = if plan.in_clusters { 0 } else { tiles.saturating_sub(plan.whole) };
        let counters = split * u64::from(S::CLUSTER * S::WARPGROUPS);
        let memory = if counters == 0 {
            None
        } else {
            let sums = Buffer::named(stream, "sums of parts", counters * plan.parts * u64::from(S::PIECE))?;
            Some((sums, Buffer::zeros(stream, counters)?))
        };
        Ok(Self { plan, memory })
    }

    pub fn argument(&mut self) -> SplitArgument<'_> {
        let (sums, tickets) = self.memory.as_mut().map(|(sums, tickets)| (sums.view_mut(), tickets.view_mut())).unzip();
        SplitArgument { whole: self.plan.whole as u32, parts: self.plan.parts as u32, sums, tickets }
    }
}
