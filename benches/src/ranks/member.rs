//! One rank: its buffers, and what it does in a round.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use oxtile::comm::{Communicator, HostRank, NcclCommunicator, NcclOptions, Rank, ReduceOp, UniqueId};
use oxtile::gemm::{Gemm, GemmConfig};
use oxtile::num::bf16;
use oxtile::symmetric::BackendName;
use oxtile::{Buffer, Event, Runtime, Stream};

use super::gate::Gate;
use super::gathered::Gathered;
use super::layer::Layers;
use super::messages::Messages;
use super::plan::PRODUCT;
use super::quantized::Quantized;
use super::reduced::Reduced;
use super::scattered::Scattered;
use super::scattered_quantized::ScatteredCodes;
use super::symmetric::Symmetric;
use super::weights::{self, Gradients, Passes};
use super::{Request, Times, Work};

/// How long ranks wait for each other.
pub const DEADLINE: Duration = Duration::from_secs(30);

pub struct Member {
    rank: Rank,
    /// The runtime of its device.
    runtime: Runtime,
    /// None on virtual GPUs.
    comm: Option<NcclCommunicator>,
    stream: Stream,
    whole: Buffer<bf16>,
    part: Buffer<bf16>,
    symmetric: Symmetric,
    messages: Option<Messages>,
    product: Option<Product>,
    gathered: Option<Gathered>,
    quantized: Option<Quantized>,
    scattered: Option<Scattered>,
    codes: Option<ScatteredCodes>,
    reduced: Option<Reduced>,
    layers: Option<Layers>,
    passes: Option<Passes>,
    gradients: Option<Gradients>,
}

/// A product of two matrices.
struct Product {
    gemm: Gemm<bf16, bf16>,
    a: Buffer<bf16>,
    b: Buffer<bf16>,
    d: Buffer<bf16>,
}

impl Member {
    pub fn join(id: Option<UniqueId>, rank: HostRank, runtime: Runtime) -> Result<Self> {
        let (device, index, world) = (rank.device().clone(), rank.rank(), rank.world());
        let join = |id| NcclCommunicator::join(&device, id, index, world, &NcclOptions { deadline: DEADLINE, ..NcclOptions::default() });
        let comm = id.map(join).transpose()?;
        let stream = device.stream()?;
        let (whole, part) = (Buffer::zeros(&stream, 0)?, Buffer::zeros(&stream, 0)?);
        let backend = if comm.is_some() { BackendName::Vmm } else { BackendName::Emulated };
        Ok(Self {
            rank: index,
            runtime,
            comm,
            whole,
            part,
            symmetric: Symmetric::new(rank, backend)?,
            messages: None,
            product: None,
            gathered: None,
            quantized: None,
            scattered: None,
            codes: None,
            reduced: None,
            layers: None,
            passes: None,
            gradients: None,
            stream,
        })
    }

    pub fn round(&mut self, request: Request, gate: &Gate) -> Result<Times> {
        if let Work::GatheredProduct(by, sizes) = request.work {
            let rank = self.symmetric.rank();
            let gathered = match &mut self.gathered {
                Some(gathered) => gathered,
                none => none.insert(Gathered::new(rank, &self.runtime, self.symmetric.backend())?),
            };
            return gathered.round((by, sizes), request.calls, rank, self.comm.as_ref(), gate);
        }
        if let Work::QuantizedProduct(by, travels, sizes) = request.work {
            let (rank, backend) = (self.symmetric.rank(), self.symmetric.backend());
            let make = || Quantized::new(rank, &self.runtime, backend, sizes, travels);
            let quantized = made_for(&mut self.quantized, gate, |quantized| quantized.is_of(sizes, travels), make)?;
            return quantized.round(by, travels, request.calls, rank, gate);
        }
        if let Work::ScatteredProduct(by, sizes) = request.work {
            let (rank, backend) = (self.symmetric.rank(), self.symmetric.backend());
            let make = || Scattered::new(rank, &self.runtime, backend, sizes);
            let scattered = made_for(&mut self.scattered, gate, |scattered| scattered.is_of(sizes), make)?;
            return scattered.round(by, request.calls, rank, self.comm.as_ref(), gate);
        }
        if let Work::ScatteredCodes(by, travels, sizes) = request.work {
            let (rank, backend) = (self.symmetric.rank(), self.symmetric.backend());
            let make = || ScatteredCodes::new(rank, &self.runtime, backend, sizes, travels);
            let codes = made_for(&mut self.codes, gate, |codes| codes.is_of(sizes, travels), make)?;
            return codes.round(by, request.calls, rank, gate);
        }
        if let Work::ReducedProduct(by, sizes) = request.work {
            let (rank, backend) = (self.symmetric.rank(), self.symmetric.backend());
            let make = || Reduced::new(rank, &self.runtime, backend, sizes);
            let reduced = made_for(&mut self.reduced, gate, |reduced| reduced.is_of(sizes), make)?;
            return reduced.round(by, request.calls, rank, self.comm.as_ref(), gate);
        }
        if let Work::Layer(by, sizes) = request.work {
            let (rank, backend) = (self.symmetric.rank(), self.symmetric.backend());
            let make = || Layers::new(rank, &self.runtime, backend, sizes);
            let layers = made_for(&mut self.layers, gate, |layers| layers.is_of(sizes), make)?;
            return layers.round(by, request.calls, rank, self.comm.as_ref(), gate);
        }
        if let Work::Weights(by, layers) = request.work {
            return self.weights(by, layers, request.calls, gate);
        }
        let prepared = self.prepare(request);
        // Kernels that wait for other ranks may delay those ranks' allocations. A rank that fails is not waited for.
        gate.pass(DEADLINE)?;
        let warm = prepared
            .and_then(|()| self.enqueue(Request { calls: 1, ..request }))
            .and_then(|_| self.settle())
            .and_then(|()| self.renew(request.work));
        gate.pass(DEADLINE)?;
        warm?;
        let begin = Instant::now();
        let [start, end] = self.enqueue(request)?;
        let issued = begin.elapsed();
        self.settle()?;
        let wall = if request.work == Work::Issue { issued } else { begin.elapsed() };
        if let (Work::Exchange(_), Some(messages)) = (request.work, &mut self.messages) {
            messages.check(&self.stream)?;
        }
        Ok(Times { wall: wall.as_secs_f64() * 1e3, device: end.elapsed_since(&start)?.as_secs_f64() * 1e3, ..Times::default() })
    }

    /// Passes over weights in shards, or gradients of them. Those of other layers give their memory back first.
    fn weights(&mut self, by: weights::By, layers: weights::Layers, calls: u64, gate: &Gate) -> Result<Times> {
        let of_gradients = by.is_of_gradients();
        if of_gradients || self.passes.as_ref().is_some_and(|passes| !passes.is_of(layers)) {
            self.passes.take().map_or(Ok(()), Passes::close)?;
        }
        if !of_gradients || self.gradients.as_ref().is_some_and(|gradients| !gradients.is_of(layers)) {
            self.gradients.take().map_or(Ok(()), Gradients::close)?;
        }
        let (rank, backend, comm, runtime) = (self.symmetric.rank(), self.symmetric.backend(), self.comm.as_ref(), &self.runtime);
        if of_gradients {
            if self.gradients.is_none() {
                let made = gate.after(DEADLINE, || Gradients::new(rank, runtime, backend, layers, comm.is_some()))?;
                let gradients = self.gradients.insert(made);
                gate.after(DEADLINE, || gradients.check(rank))?;
            }
            return self.gradients.as_mut().context("they were made")?.round(by, calls, comm, gate);
        }
        if self.passes.is_none() {
            let made = gate.after(DEADLINE, || Passes::new(rank, runtime, backend, layers, comm.is_some()))?;
            let passes = self.passes.insert(made);
            gate.after(DEADLINE, || passes.check(rank))?;
        }
        self.passes.as_mut().context("they were made")?.round(by, calls, comm, gate)
    }

    /// The calls of a round send and receive other data than the first one.
    fn renew(&mut self, work: Work) -> Result<()> {
        match (work, &mut self.messages) {
            (Work::Exchange(_), Some(messages)) => {
                messages.renew(self.symmetric.rank(), &self.stream)?;
                self.settle()
            }
            _ => Ok(()),
        }
    }

    /// Buffers of the sizes that it needs.
    fn prepare(&mut self, request: Request) -> Result<()> {
        let world = u64::from(self.symmetric.world().get());
        let needs_nccl = matches!(request.work, Work::AllGather | Work::ReduceScatter | Work::AllReduce | Work::GemmWithNccl);
        if needs_nccl && self.whole.len() != request.bytes / 2 {
            self.whole = Buffer::zeros(&self.stream, request.bytes / 2)?;
            self.part = Buffer::zeros(&self.stream, request.bytes / 2 / world)?;
        }
        match request.work {
            Work::Push(_) | Work::PushInPlace | Work::Issue | Work::Pull(_) | Work::GemmWithPush | Work::GemmWithPushInPlace => {
                self.symmetric.prepare(request.bytes / world)?;
            }
            Work::Put | Work::Get | Work::RoundTrip { .. } => self.symmetric.prepare(request.bytes)?,
            Work::Exchange(_) => {
                let rank = self.symmetric.rank();
                let messages = match &mut self.messages {
                    Some(messages) => messages,
                    none => none.insert(Messages::open(rank, &self.stream)?),
                };
                messages.prepare(rank, &self.stream, request.bytes)?;
            }
            _ => {}
        }
        let has_product = matches!(request.work, Work::Gemm | Work::GemmWithPush | Work::GemmWithPushInPlace | Work::GemmWithNccl);
        if has_product && self.product.is_none() {
            self.product = Some(Product::new(&self.runtime, &self.stream)?);
        }
        Ok(())
    }

    /// The calls, between two events.
    fn enqueue(&mut self, request: Request) -> Result<[Event; 2]> {
        match request.work {
            Work::AllGather | Work::ReduceScatter | Work::AllReduce => {
                let start = self.stream.record()?;
                (0..request.calls).try_for_each(|_| self.collective(request.work))?;
                Ok([start, self.stream.record()?])
            }
            Work::Push(way) => self.symmetric.push(way, false, request.calls),
            Work::PushInPlace => self.symmetric.push(0, true, request.calls),
            Work::Issue => self.symmetric.push(0, false, request.calls),
            Work::Pull(way) => self.symmetric.pull(way, request.calls),
            Work::Put => self.symmetric.put(request.calls),
            Work::Get => self.symmetric.get(request.calls),
            Work::RoundTrip { is_batch } => self.symmetric.round_trip(self.rank, is_batch, request.calls),
            Work::Exchange(cut) => {
                let messages = self.messages.as_mut().context("they were prepared")?;
                messages.gather(cut, &self.stream, request.calls)
            }
            Work::Gemm => self.products(request.calls),
            Work::GemmWithPush | Work::GemmWithPushInPlace => {
                let is_in_place = request.work == Work::GemmWithPushInPlace;
                self.symmetric.push(0, is_in_place, self.gathers(request.calls))?;
                self.products(request.calls)
            }
            Work::GemmWithNccl => {
                let (side, gathers) = (self.symmetric.copies().clone(), self.gathers(request.calls));
                let (Some(comm), part, whole) = (&self.comm, &self.part, &mut self.whole) else { bail!("there is no NCCL") };
                (0..gathers).try_for_each(|_| comm.all_gather(&side, part, &mut *whole))?;
                self.products(request.calls)
            }
            Work::GatheredProduct(..)
            | Work::QuantizedProduct(..)
            | Work::ScatteredProduct(..)
            | Work::ScatteredCodes(..)
            | Work::ReducedProduct(..)
            | Work::Layer(..)
            | Work::Weights(..)
            | Work::ContextParallel { .. }
            | Work::Choice { .. } => {
                bail!("it has rounds of its own")
            }
        }
    }

    /// So many gathers that they take longer than the products beside them: three shards to and from the peers for each.
    fn gathers(&self, products: u64) -> u64 {
        let peers = u64::from(self.symmetric.world().get()) - 1;
        products * 3_u64.div_ceil(peers.max(1))
    }

    fn collective(&mut self, work: Work) -> Result<()> {
        let comm = self.comm.as_ref().context("there is no NCCL")?;
        match work {
            Work::AllGather => comm.all_gather(&self.stream, &self.part, &mut self.whole)?,
            Work::ReduceScatter => comm.reduce_scatter(&self.stream, &self.whole, &mut self.part, ReduceOp::Sum)?,
            _ => comm.all_reduce(&self.stream, &mut self.whole, ReduceOp::Sum)?,
        }
        Ok(())
    }

    fn products(&mut self, calls: u64) -> Result<[Event; 2]> {
        let Product { gemm, a, b, d } = self.product.as_mut().context("it was prepared")?;
        let mut bound = gemm.bind(&self.stream, a.view(), b.view(), None, d.view_mut())?;
        let start = self.stream.record()?;
        (0..calls).try_for_each(|_| bound.run(&self.stream))?;
        Ok([start, self.stream.record()?])
    }

    /// Waits for all of its streams.
    fn settle(&self) -> Result<()> {
        self.symmetric.settle()?;
        match &self.comm {
            Some(comm) => comm.synchronize(&self.stream)?,
            None => self.stream.synchronize()?,
        }
        Ok(())
    }
}

/// Returns what is `there` if it is of this request. Otherwise drops it, so that its memory is free, and makes another, all ranks together.
fn made_for<'a, T>(
    there: &'a mut Option<T>,
    gate: &Gate,
    is_of: impl FnOnce(&T) -> bool,
    make: impl FnOnce() -> Result<T>,
) -> Result<&'a mut T> {
    if !there.as_ref().is_some_and(is_of) {
        *there = None;
        *there = Some(gate.after(DEADLINE, make)?);
    }
    there.as_mut().context("it was made")
}

impl Product {
    fn new(runtime: &Runtime, stream: &Stream) -> Result<Self> {
        let n = PRODUCT;
        let config = GemmConfig { m: n, n, k: n, transpose_b: true, ..GemmConfig::default() };
        // Random signs and sizes, on which the power of a product, and so its clock, depends.
        let mut state = 1_u64;
        let mut value = || {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            bf16::from_bits((state >> 48) as u16 & 0x80ff | 0x3f00)
        };
        let mut operand = || -> Result<Buffer<bf16>> {
            let values: Vec<bf16> = (0..n * n).map(|_| value()).collect();
            Ok(Buffer::from_slice(stream, &values)?)
        };
        let (a, b) = (operand()?, operand()?);
        Ok(Self { gemm: Gemm::new(runtime, config)?, a, b, d: Buffer::uninitialised(stream, n * n)? })
    }
}
