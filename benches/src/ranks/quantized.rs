//! A rank's products whose operand is gathered as codes and scales: by every method, and what they are made of.

use std::time::Instant;

use anyhow::{Context, Result, bail};
use oxtile::comm::{HostRank, Team};
use oxtile::gemm::{Gemm, GemmConfig};
use oxtile::kernels::copy::CopyWords;
use oxtile::num::bf16;
use oxtile::overlap::{AllGatherConfig, GatherFormat, GatheredFormat, Method, OverlapMemory, QuantizedAllGatherGemm, QuantizedProduct};
use oxtile::quantize::{Direction, Mxfp8, Mxfp8Format, Nvfp4, Nvfp4Format, QuantizedTensor};
use oxtile::runtime::{Bound, Loaded};
use oxtile::symmetric::{Arena, ArenaOptions, BackendName};
use oxtile::{Buffer, Runtime, Stream};
use oxtile_tile::launch::DeviceView;
use serde::{Deserialize, Serialize};

use super::Times;
use super::expected::{self, Sample};
use super::gate::Gate;
use super::gathered::{STEP, Sizes, config as elements, pattern, values};
use super::member::DEADLINE;

/// How the operand travels.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Travels {
    Mxfp8,
    Nvfp4,
}

/// How it is done.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum By {
    /// By [`Method::Chunked`].
    Chunked,
    /// By [`Method::Sequential`].
    Sequential,
    /// The product on an operand that is gathered and dequantized already.
    ProductAlone,
    /// The kernel that dequantizes the whole.
    Dequantize,
}

impl Travels {
    pub fn name(self) -> &'static str {
        match self {
            Self::Mxfp8 => "mxfp8",
            Self::Nvfp4 => "nvfp4",
        }
    }

    pub fn format(self) -> GatheredFormat {
        match self {
            Self::Mxfp8 => GatheredFormat::Mxfp8,
            Self::Nvfp4 => GatheredFormat::Nvfp4,
        }
    }
}

/// The product of [`elements`], whose operand travels in a format.
pub fn config(sizes: Sizes, travels: Travels, method: Option<Method>) -> AllGatherConfig {
    elements(sizes, method).travelling(travels.format())
}

/// What a rank has of one shape and format.
pub enum Quantized {
    Mxfp8(Box<Of<Mxfp8Format>>),
    Nvfp4(Box<Of<Nvfp4Format>>),
}

/// The casts of a format.
pub trait Casts: GatherFormat {
    type Kernels;

    fn kernels(runtime: &Runtime) -> Result<Self::Kernels>;
    fn whole(kernels: &Self::Kernels, stream: &Stream, rows: DeviceView<'_, bf16>, shape: [u64; 2]) -> Result<QuantizedTensor<Self>>
    where
        Self: Sized;
    fn wide(kernels: &Self::Kernels, stream: &Stream, whole: &QuantizedTensor<Self>, wide: &mut Buffer<bf16>) -> Result<()>
    where
        Self: Sized;
    /// Casts a shard, with the amax of the whole.
    fn shard(
        kernels: &Self::Kernels,
        stream: &Stream,
        rows: DeviceView<'_, bf16>,
        whole: &QuantizedTensor<Self>,
        shard: &mut QuantizedTensor<Self>,
    ) -> Result<()>
    where
        Self: Sized;
}

pub struct Of<F: Casts> {
    sizes: Sizes,
    runtime: Runtime,
    compute: Stream,
    copy: Loaded<CopyWords>,
    local: GemmConfig,
    gemm: Gemm<bf16, bf16>,
    kernels: F::Kernels,
    /// The operand cast as a whole, and this rank's rows of it.
    whole: QuantizedTensor<F>,
    own: Buffer<bf16>,
    wide: Buffer<bf16>,
    weight: Buffer<bf16>,
    d: Buffer<bf16>,
    /// The methods whose results were compared. Dropped before the arena is closed.
    methods: Vec<(Method, QuantizedAllGatherGemm<F, bf16>)>,
    room: Option<(OverlapMemory, Arena)>,
}

impl Quantized {
    pub fn new(rank: &HostRank, runtime: &Runtime, backend: BackendName, sizes: Sizes, travels: Travels) -> Result<Self> {
        Ok(match travels {
            Travels::Mxfp8 => Self::Mxfp8(Of::new(rank, runtime, backend, sizes, travels)?.into()),
            Travels::Nvfp4 => Self::Nvfp4(Of::new(rank, runtime, backend, sizes, travels)?.into()),
        })
    }

    /// Whether it is of these.
    pub fn is_of(&self, sizes: Sizes, travels: Travels) -> bool {
        match self {
            Self::Mxfp8(of) => of.sizes == sizes && travels == Travels::Mxfp8,
            Self::Nvfp4(of) => of.sizes == sizes && travels == Travels::Nvfp4,
        }
    }

    /// Times calls, after two that are not timed.
    pub fn round(&mut self, by: By, travels: Travels, calls: u64, rank: &HostRank, gate: &Gate) -> Result<Times> {
        match self {
            Self::Mxfp8(of) => of.round(by, travels, calls, rank, gate),
            Self::Nvfp4(of) => of.round(by, travels, calls, rank, gate),
        }
    }
}

impl<F: Casts> Of<F> {
    fn new(rank: &HostRank, runtime: &Runtime, backend: BackendName, sizes: Sizes, travels: Travels) -> Result<Self> {
        let (compute, out) = (rank.device().stream()?, rank.device().urgent_stream()?);
        let (world, me, config) = (rank.world(), rank.rank().index() as usize, config(sizes, travels, None));
        let (local, needed) = (config.product(world)?, config.bytes::<bf16, bf16>()?);
        let options = ArenaOptions { backend, bytes: 2 * needed + 4096, deadline: DEADLINE, ..ArenaOptions::default() };
        let arena = Arena::open(rank, options)?;
        let member = Team::all(world).member(rank.rank()).context("every rank is of the world")?;
        let memory = OverlapMemory::take(&arena, &member, needed, &out)?;
        let (pattern, kernels) = (pattern(), F::kernels(runtime)?);
        let wide = Buffer::from_slice(&compute, &values(&pattern, 0, local.m * local.k))?;
        let whole = F::whole(&kernels, &compute, wide.view(), [local.m, local.k])?;
        let rows = local.m / u64::from(world.get());
        let of = Self {
            sizes,
            runtime: runtime.clone(),
            copy: runtime.load()?,
            local,
            gemm: Gemm::new(runtime, local)?,
            own: Buffer::from_slice(&compute, &values(&pattern, me * (rows * local.k) as usize, rows * local.k))?,
            weight: Buffer::from_slice(&compute, &values(&pattern, (3 + me) * STEP, local.n * local.k))?,
            d: Buffer::uninitialised(&compute, local.m * local.n)?,
            methods: Vec::new(),
            room: Some((memory, arena)),
            kernels,
            whole,
            wide,
            compute,
        };
        of.compute.synchronize()?;
        Ok(of)
    }

    fn round(&mut self, by: By, travels: Travels, calls: u64, rank: &HostRank, gate: &Gate) -> Result<Times> {
        if let Some(method) = by.method() {
            self.make(method, travels, rank, gate)?;
        }
        let (compute, arena) = (self.compute.clone(), self.arena()?.clone());
        let settle = || -> Result<()> { Ok(arena.ticket(&compute)?.wait()?) };
        let mut side = gate.after(DEADLINE, || self.bind(by))?;
        // Both places have codes, and an amax.
        gate.after(DEADLINE, || (0..2).try_for_each(|_| side.call(&compute, true)).and_then(|()| settle()))?;
        side.call(&compute, false)?;
        let (begin, start) = (Instant::now(), compute.record()?);
        (0..calls).try_for_each(|_| side.call(&compute, false))?;
        let end = compute.record()?;
        settle()?;
        Ok(Times { wall: begin.elapsed().as_secs_f64() * 1e3, device: end.elapsed_since(&start)?.as_secs_f64() * 1e3, ..Times::default() })
    }

    fn arena(&self) -> Result<&Arena> {
        self.room.as_ref().map(|(_, arena)| arena).context("it was opened")
    }

    /// Makes the product by a method, once, and compares its results: of a call in each place.
    fn make(&mut self, method: Method, travels: Travels, rank: &HostRank, gate: &Gate) -> Result<()> {
        if self.methods.iter().any(|(made, _)| *made == method) {
            return Ok(());
        }
        let Self { sizes, runtime, compute, copy, local, kernels, whole, own, wide, weight, d, room, .. } = self;
        let (memory, arena) = room.as_ref().context("it was opened")?;
        let sample = Sample::of(copy, compute, local.m * local.n);
        let (made, expected) = gate.after(DEADLINE, || {
            let made = QuantizedAllGatherGemm::<F, bf16>::new(memory, compute, config(*sizes, travels, Some(method)))?;
            F::wide(kernels, compute, whole, wide)?;
            expected::multiply(runtime, compute, *local, (method, None, rank.world().get()), [wide, weight], d)?;
            let mut kept = sample.room()?;
            sample.keep(d.view(), &mut kept)?;
            Ok((made, sample.words(&kept)?))
        })?;
        let mut bound = gate.after(DEADLINE, || {
            d.fill_zero(compute)?;
            Ok(made.bind(compute, weight.view(), None, d.view_mut())?)
        })?;
        for call in 0..2 {
            let found = gate.after(DEADLINE, || {
                F::shard(kernels, compute, own.view(), whole, bound.shard(compute)?)?;
                bound.run(compute)?;
                let mut kept = sample.room()?;
                sample.keep(bound.result(), &mut kept)?;
                arena.ticket(compute)?.wait()?;
                sample.words(&kept)
            })?;
            if let Some(differs) = expected::difference(&found, &expected) {
                bail!("{method:?} of {sizes:?} in {travels:?}, call {call} on {}: not the plain product: {differs}", rank.rank());
            }
        }
        drop(bound);
        self.methods.push((method, made));
        Ok(())
    }

    fn bind(&mut self, by: By) -> Result<Side<'_, F>> {
        let Self { compute, gemm, kernels, whole, own, wide, weight, d, methods, .. } = self;
        Ok(match by.method() {
            Some(method) => {
                let (_, made) = methods.iter().find(|(made, _)| *made == method).context("it was made")?;
                Side::Gathered(made.bind(compute, weight.view(), None, d.view_mut())?, kernels, whole, own)
            }
            None if by == By::ProductAlone => Side::Product(gemm.bind(compute, wide.view(), weight.view(), None, d.view_mut())?),
            None => Side::Dequantize(kernels, whole, wide),
        })
    }

    /// Every rank closes it together.
    fn close(&mut self) -> Result<()> {
        self.methods.clear();
        let Some((memory, arena)) = self.room.take() else { return Ok(()) };
        drop(memory);
        Ok(arena.close().map_err(oxtile::Error::from)?.finish()?)
    }
}

impl<F: Casts> Drop for Of<F> {
    fn drop(&mut self) {
        // An arena that cannot be closed keeps its memory, until the process ends.
        let _ = self.close();
    }
}

/// What one call is.
enum Side<'a, F: Casts> {
    Gathered(QuantizedProduct<'a, F, bf16>, &'a F::Kernels, &'a QuantizedTensor<F>, &'a Buffer<bf16>),
    Product(Bound<'a>),
    Dequantize(&'a F::Kernels, &'a QuantizedTensor<F>, &'a mut Buffer<bf16>),
}

impl<F: Casts> Side<'_, F> {
    /// Writes the shard if it `casts`.
    fn call(&mut self, stream: &Stream, casts: bool) -> Result<()> {
        match self {
            Self::Gathered(product, kernels, whole, own) => {
                let shard = product.shard(stream)?;
                if casts {
                    F::shard(kernels, stream, own.view(), whole, shard)?;
                }
                Ok(product.run(stream)?)
            }
            Self::Product(product) => Ok(product.run(stream)?),
            Self::Dequantize(kernels, whole, wide) => F::wide(kernels, stream, whole, wide),
        }
    }
}

impl By {
    fn method(self) -> Option<Method> {
        match self {
            Self::Chunked => Some(Method::Chunked),
            Self::Sequential => Some(Method::Sequential),
            Self::ProductAlone | Self::Dequantize => None,
        }
    }
}

impl Casts for Mxfp8Format {
    type Kernels = Mxfp8<bf16>;

    fn kernels(runtime: &Runtime) -> Result<Self::Kernels> {
        Ok(Mxfp8::new(runtime)?)
    }

    fn whole(kernels: &Self::Kernels, stream: &Stream, rows: DeviceView<'_, bf16>, shape: [u64; 2]) -> Result<QuantizedTensor<Self>> {
        Ok(kernels.quantize(stream, rows, shape, Direction::Rows)?)
    }

    fn wide(kernels: &Self::Kernels, stream: &Stream, whole: &QuantizedTensor<Self>, wide: &mut Buffer<bf16>) -> Result<()> {
        Ok(kernels.dequantize(stream, whole, wide.view_mut())?)
    }

    fn shard(
        kernels: &Self::Kernels,
        stream: &Stream,
        rows: DeviceView<'_, bf16>,
        _: &QuantizedTensor<Self>,
        shard: &mut QuantizedTensor<Self>,
    ) -> Result<()> {
        Ok(kernels.quantize_rows(stream, rows, shard.shape, shard.data.view_mut(), shard.scales.view_mut())?)
    }
}

impl Casts for Nvfp4Format {
    type Kernels = Nvfp4<bf16>;

    fn kernels(runtime: &Runtime) -> Result<Self::Kernels> {
        Ok(Nvfp4::new(runtime)?)
    }

    fn whole(kernels: &Self::Kernels, stream: &Stream, rows: DeviceView<'_, bf16>, shape: [u64; 2]) -> Result<QuantizedTensor<Self>> {
        Ok(kernels.quantize(stream, rows, shape)?)
    }

    fn wide(kernels: &Self::Kernels, stream: &Stream, whole: &QuantizedTensor<Self>, wide: &mut Buffer<bf16>) -> Result<()> {
        Ok(kernels.dequantize(stream, whole, wide.view_mut())?)
    }

    fn shard(
        kernels: &Self::Kernels,
        stream: &Stream,
        rows: DeviceView<'_, bf16>,
        whole: &QuantizedTensor<Self>,
        shard: &mut QuantizedTensor<Self>,
    ) -> Result<()> {
        shard.amax.copy_from(stream, &whole.amax)?;
        let QuantizedTensor { data, scales, amax, shape, .. } = shard;
        Ok(kernels.quantize_rows(stream, rows, *shape, amax.view(), data.view_mut(), scales.view_mut())?)
    }
}
