//! A rank's products of codes and scales whose rows are scattered: by each method, what they are made of, and the same product in bf16.

use anyhow::{Context, Result};
use oxtile::comm::HostRank;
use oxtile::num::bf16;
use oxtile::overlap::{GemmReduceScatter, OverlapMemory, QuantizedGemmReduceScatter, ScatterMethod, ScatteredProduct};
use oxtile::quantize::{Mxfp8Format, Nvfp4Format, QuantizedTensor};
use oxtile::runtime::Bound;
use oxtile::symmetric::BackendName;
use oxtile::{Buffer, Runtime, Stream};
use serde::{Deserialize, Serialize};

use super::Times;
use super::gate::Gate;
use super::gathered::Sizes;
use super::member::DEADLINE;
use super::part::{Part, Room, times};
use super::quantized::{Casts, Travels};
use super::scattered::config;

/// How it is done.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum By {
    /// By [`ScatterMethod::Fused`].
    Fused,
    /// By [`ScatterMethod::Sequential`].
    Sequential,
    /// The product of all rows of operands that are dequantized already.
    ProductAlone,
    /// The kernels that dequantize both operands.
    Dequantize,
}

impl By {
    fn method(self) -> Option<ScatterMethod> {
        match self {
            Self::Fused => Some(ScatterMethod::Fused),
            Self::Sequential => Some(ScatterMethod::Sequential),
            Self::ProductAlone | Self::Dequantize => None,
        }
    }
}

/// What a rank has of one shape and format.
pub enum ScatteredCodes {
    Mxfp8(Box<Of<Mxfp8Format>>),
    Nvfp4(Box<Of<Nvfp4Format>>),
}

pub struct Of<F: Casts> {
    part: Part,
    kernels: F::Kernels,
    /// Codes of this rank's part of the sum, and what they stand for.
    codes: [QuantizedTensor<F>; 2],
    wide: [Buffer<bf16>; 2],
    /// All rows of this rank's part, and its own rows of the sum.
    whole: Buffer<bf16>,
    d: Buffer<bf16>,
    /// The methods whose results were compared.
    methods: Vec<(ScatterMethod, QuantizedGemmReduceScatter<F, F, bf16>)>,
    /// Dropped after what uses it.
    room: Room<OverlapMemory>,
}

impl ScatteredCodes {
    pub fn new(rank: &HostRank, runtime: &Runtime, backend: BackendName, sizes: Sizes, travels: Travels) -> Result<Self> {
        Ok(match travels {
            Travels::Mxfp8 => Self::Mxfp8(Box::new(Of::new(rank, runtime, backend, sizes)?)),
            Travels::Nvfp4 => Self::Nvfp4(Box::new(Of::new(rank, runtime, backend, sizes)?)),
        })
    }

    /// Whether it is of these.
    pub fn is_of(&self, sizes: Sizes, travels: Travels) -> bool {
        match self {
            Self::Mxfp8(of) => of.part.sizes == sizes && travels == Travels::Mxfp8,
            Self::Nvfp4(of) => of.part.sizes == sizes && travels == Travels::Nvfp4,
        }
    }

    /// Times calls, after those that are not timed.
    pub fn round(&mut self, by: By, calls: u64, rank: &HostRank, gate: &Gate) -> Result<Times> {
        match self {
            Self::Mxfp8(of) => of.round(by, calls, rank, gate),
            Self::Nvfp4(of) => of.round(by, calls, rank, gate),
        }
    }
}

impl<F: Casts> Of<F> {
    fn new(rank: &HostRank, runtime: &Runtime, backend: BackendName, sizes: Sizes) -> Result<Self> {
        let (world, config) = (rank.world(), config(sizes, None));
        let part = Part::new(rank, runtime, sizes, config.product(world)?)?;
        // Of the operands in bf16, beside which it is compared, too.
        let needed = config.bytes::<bf16, bf16>(world)?;
        let room = Room::of(rank, backend, needed, &part.out)?;
        let (stream, kernels, local) = (&part.compute, F::kernels(runtime)?, part.local);
        let shapes = [(&part.a, [local.m, local.k]), (&part.weight, [local.n, local.k])];
        let codes = shapes.map(|(values, shape)| F::whole(&kernels, stream, values.view(), shape));
        let wide = shapes.map(|(values, _)| Buffer::uninitialised(stream, values.len()));
        let results = [local.m, config.rows(world)].map(|rows| Buffer::uninitialised(stream, rows * local.n));
        let ([a, b], [wide_a, wide_b], [whole, d]) = (codes, wide, results);
        let mut of = Self { codes: [a?, b?], wide: [wide_a?, wide_b?], whole: whole?, d: d?, methods: Vec::new(), room, kernels, part };
        of.dequantize()?;
        of.part.compute.synchronize()?;
        Ok(of)
    }

    fn dequantize(&mut self) -> Result<()> {
        let Self { part, kernels, codes, wide, .. } = self;
        codes.iter().zip(wide).try_for_each(|(codes, wide)| F::wide(kernels, &part.compute, codes, wide))
    }

    fn round(&mut self, by: By, calls: u64, rank: &HostRank, gate: &Gate) -> Result<Times> {
        if let Some(method) = by.method() {
            self.make(method, rank, gate)?;
        }
        let (compute, arena) = (self.part.compute.clone(), self.room.open()?.1.clone());
        let mut side = gate.after(DEADLINE, || self.bind(by))?;
        times(&compute, &arena, calls, gate, |stream| side.call(stream))
    }

    /// Makes the product by a method, once, and compares its result with that of the dequantized operands by the same method: the bits are the same.
    fn make(&mut self, method: ScatterMethod, rank: &HostRank, gate: &Gate) -> Result<()> {
        if self.methods.iter().any(|(made, _)| *made == method) {
            return Ok(());
        }
        let Self { part: Part { compute, sizes, .. }, codes: [a, b], wide: [wide_a, wide_b], d, methods, room, .. } = self;
        let ((memory, arena), config) = (room.open()?, config(*sizes, Some(method)));
        let settle = || -> Result<()> { Ok(arena.ticket(compute)?.wait()?) };
        let exact = gate.after(DEADLINE, || Ok(GemmReduceScatter::<bf16, bf16>::new(memory, compute, config)?))?;
        let mut bound = gate.after(DEADLINE, || Ok(exact.bind(compute, wide_a.view(), wide_b.view(), None, d.view_mut())?))?;
        gate.after(DEADLINE, || bound.run(compute).map_err(Into::into).and_then(|()| settle()))?;
        drop(bound);
        let expected = gate.after(DEADLINE, || {
            let expected = d.to_vec(compute)?;
            d.fill_zero(compute)?;
            Ok(expected)
        })?;
        drop(exact);
        let made = gate.after(DEADLINE, || Ok(QuantizedGemmReduceScatter::<F, F, bf16>::new(memory, compute, config)?))?;
        let mut bound = gate.after(DEADLINE, || Ok(made.bind(compute, a, b, None, d.view_mut())?))?;
        gate.after(DEADLINE, || bound.run(compute).map_err(Into::into).and_then(|()| settle()))?;
        drop(bound);
        gate.after(DEADLINE, || {
            let found = d.to_vec(compute)?;
            let wrong = found.iter().zip(&expected).position(|(found, expected)| found.to_bits() != expected.to_bits());
            wrong.map_or(Ok(()), |at| Err(anyhow::anyhow!("{method:?} of {sizes:?} on {}: element {at} is not that of bf16", rank.rank())))
        })?;
        methods.push((method, made));
        Ok(())
    }

    fn bind(&mut self, by: By) -> Result<Side<'_, F>> {
        let Self { part: Part { compute, gemm, .. }, kernels, codes, wide, whole, d, methods, .. } = self;
        Ok(match by.method() {
            Some(method) => {
                let (_, made) = methods.iter().find(|(made, _)| *made == method).context("it was made")?;
                Side::Scattered(Box::new(made.bind(compute, &codes[0], &codes[1], None, d.view_mut())?))
            }
            None if by == By::ProductAlone => Side::Product(gemm.bind(compute, wide[0].view(), wide[1].view(), None, whole.view_mut())?),
            None => Side::Dequantize(kernels, codes, wide),
        })
    }
}

/// What one call is.
enum Side<'a, F: Casts> {
    Scattered(Box<ScatteredProduct<'a, bf16, bf16>>),
    Product(Bound<'a>),
    Dequantize(&'a F::Kernels, &'a [QuantizedTensor<F>; 2], &'a mut [Buffer<bf16>; 2]),
}

impl<F: Casts> Side<'_, F> {
    fn call(&mut self, stream: &Stream) -> Result<()> {
        match self {
            Self::Scattered(product) => Ok(product.run(stream)?),
            Self::Product(product) => Ok(product.run(stream)?),
            Self::Dequantize(kernels, codes, wide) => {
                codes.iter().zip(wide.iter_mut()).try_for_each(|(codes, wide)| F::wide(kernels, stream, codes, wide))
            }
        }
    }
}
