//! Rounds of calls of a product of ranks, eager and by graphs, each of another operand.

use half::bf16 as Half;
use oxtile::kernels::copy::{CopyWords, CopyWordsArgs};
use oxtile::num::bf16;
use oxtile::overlap::{GatheredProduct, ReducedProduct, ScatteredProduct};
use oxtile::{Buffer, Graph, PinnedBuffer, Result, Stream};
use oxtile_tile::launch::DeviceView;

use crate::arenas::Arenas;
use crate::overlap::Calls;

/// A product that is bound.
pub trait Product {
    fn run(&mut self, stream: &Stream) -> Result<()>;
    fn result(&self) -> DeviceView<'_, bf16>;
}

macro_rules! products {
    ($($product:ident)*) => { $(
        impl Product for $product<'_, bf16, bf16> {
            fn run(&mut self, stream: &Stream) -> Result<()> {
                self.run(stream)
            }

            fn result(&self) -> DeviceView<'_, bf16> {
                self.result()
            }
        }
    )* };
}
products!(ScatteredProduct ReducedProduct);

/// A gathered product, whose shard is copied before each call.
pub struct Copied<'a> {
    product: GatheredProduct<'a, bf16, bf16>,
    own: Buffer<bf16>,
    /// What copies, if it is not the stream of the calls.
    beside: Option<Stream>,
}

impl<'a> Copied<'a> {
    pub fn new(product: GatheredProduct<'a, bf16, bf16>, own: &Buffer<bf16>, beside: Option<Stream>) -> Result<Self> {
        // SAFETY: the shard is written by copies on the stream of the calls, between them.
        let own = unsafe { Buffer::<bf16>::borrow_raw(&own.device(), own.address(), own.len()) }?;
        Ok(Self { product, own, beside })
    }
}

impl Product for Copied<'_> {
    fn run(&mut self, stream: &Stream) -> Result<()> {
        let Self { product, own, beside } = self;
        match beside {
            None => product.copy_shard(stream, own)?,
            Some(beside) => {
                beside.wait(&stream.record()?)?;
                product.shard(stream)?.copy_from(beside, own)?;
            }
        }
        product.run(stream)
    }

    fn result(&self) -> DeviceView<'_, bf16> {
        self.product.result()
    }
}

/// A rank's product, with the streams of its copies and of its calls.
pub struct Bound<'a, P> {
    out: &'a Stream,
    compute: &'a Stream,
    product: P,
    /// `A`, which the product reads, to be written between calls.
    a: Buffer<bf16>,
}

impl<'a, P: Product> Bound<'a, P> {
    pub fn new([out, compute]: [&'a Stream; 2], product: P, a: &Buffer<bf16>) -> Result<Self> {
        // SAFETY: the operand is written by copies on the stream of the calls, between them.
        let a = unsafe { Buffer::<bf16>::borrow_raw(&compute.device(), a.address(), a.len()) }?;
        Ok(Self { out, compute, product, a })
    }
}

/// The bits of each rank's result in each of so many rounds, of the operand of that rank and round. No host waits between them.
pub fn rounds<P: Product>(
    all: &Arenas,
    mut bound: Vec<Bound<'_, P>>,
    (calls, count): (Calls, u64),
    a: impl Fn(u32, u64) -> Vec<Half>,
) -> Result<Vec<Vec<Vec<u16>>>> {
    let copy = all.world.runtime.load::<CopyWords>()?;
    let mut graphs = Vec::new();
    for Bound { out, compute, product, .. } in bound.iter_mut().filter(|_| calls != Calls::Eager) {
        let calls = if calls == Calls::Mixed { 2 } else { 1 };
        graphs.push(Graph::capture(&[*compute, *out], || (0..calls).try_for_each(|_| product.run(compute)))?);
    }
    let mut found: Vec<Vec<Buffer<u32>>> = bound.iter().map(|_| Vec::new()).collect();
    for round in 0..count {
        for (i, Bound { compute, product, a: operand, .. }) in bound.iter_mut().enumerate() {
            operand.copy_from_pinned(compute, &PinnedBuffer::from_slice(compute, &a(i as u32, round))?)?;
            if calls == Calls::Captured || (calls == Calls::Mixed && round % 2 == 0) {
                graphs[i].replay(compute)?;
            } else {
                product.run(compute)?;
            }
            let mut kept = Buffer::<u32>::named(compute, "kept", product.result().len() / 2)?;
            copy.launch(compute, CopyWordsArgs { source: product.result().cast(), target: kept.view_mut() })?;
            found[i].push(kept);
        }
    }
    let bits = |compute: &Stream, kept: &Buffer<u32>| -> Result<Vec<u16>> {
        Ok(kept.to_vec(compute)?.into_iter().flat_map(|word| [word as u16, (word >> 16) as u16]).collect())
    };
    let of_rank = |(i, (of, found)): (usize, (&Bound<'_, P>, &Vec<Buffer<u32>>))| {
        all.arenas[i].ticket(of.compute)?.wait()?;
        found.iter().map(|kept| bits(of.compute, kept)).collect()
    };
    bound.iter().zip(&found).enumerate().map(of_rank).collect()
}
