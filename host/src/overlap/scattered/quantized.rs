//! A product of codes and scales, and a reduce-scatter, as one operation.

use std::fmt;
use std::ops::Range;

use oxtile_tile::launch::{DeviceView, DeviceViewMut};
use oxtile_tile::num::{Pod, bf16};

use super::call::{Dequantize, ScatteredProduct};
use super::{GemmReduceScatter, ReduceScatterConfig, ScatterChoice, ScatterOperands};
use crate::gemm::{Epilogue, GemmConfig};
use crate::overlap::format::GatherFormat;
use crate::overlap::memory::OverlapMemory;
use crate::quantize::{Compact, Direction, QuantizedTensor};
use crate::runtime::{Bound, Buffer, Error, Result, Stream};

/// A [`GemmReduceScatter`] of operands in low-precision formats, `A` in `F` and `B` in `G`, each MXFP8 or NVFP4: a row-parallel layer whose activations and weights are codes and scales.
///
/// A call dequantizes `B` to bf16 first. Then it dequantizes a panel of another member's rows of `A`, multiplies it, and has it put, while it dequantizes and multiplies the next one; the own rows come last. What is dequantized lies in a room of the memory, which all operations on it
/// share: of `A` as many rows as one rank gets.
///
/// Parts travel as they do there, in the type of the result, and are added in the same order by the same kernels. So the result has the bits of [`GemmReduceScatter`] on the dequantized operands, by each method. Operands need no amax that ranks agree on: each rank's part of the sum is dequantized by its own.
///
/// The steps are those of [`GemmReduceScatter`]. Which method is taken is [chosen](ReduceScatterConfig::choose) as for operands in bf16: the model does not count what dequantizing takes.
///
/// ```
/// use oxtile::comm::{EmulatedCommunicator, Team, WorldSize};
/// use oxtile::num::bf16;
/// use oxtile::overlap::{Global, OverlapMemory, QuantizedGemmReduceScatter, ReduceScatterConfig};
/// use oxtile::quantize::{Direction, Mxfp8, Mxfp8Format};
/// use oxtile::symmetric::{Arena, ArenaOptions};
/// use oxtile::{Buffer, Result, Runtime};
///
/// # fn main() -> Result<()> {
/// let runtime = Runtime::checked(1)?;
/// let rank = EmulatedCommunicator::world_of(&runtime, WorldSize::ONE)?.remove(0);
/// let arena = Arena::open(&rank, ArenaOptions::default())?;
/// let (compute, out) = (rank.device().stream()?, rank.device().urgent_stream()?);
/// let member = Team::all(arena.world()).member(arena.rank()).unwrap();
///
/// let config = ReduceScatterConfig { transpose_b: true, ..ReduceScatterConfig::new(Global { m: 64, n: 64, k: 64 }) };
/// let memory = OverlapMemory::take(&arena, &member, config.bytes::<bf16, bf16>(WorldSize::ONE)?, &out)?;
/// let scatter = QuantizedGemmReduceScatter::<Mxfp8Format, Mxfp8Format, bf16>::new(&memory, &compute, config)?;
///
/// let (casts, values) = (Mxfp8::<bf16>::new(&runtime)?, Buffer::zeros(&compute, 64 * 64)?);
/// let a = casts.quantize(&compute, values.view(), [64, 64], Direction::Rows)?;
/// let weight = casts.quantize(&compute, values.view(), [64, 64], Direction::Rows)?;
/// let mut d = Buffer::zeros(&compute, config.rows(WorldSize::ONE) * 64)?;
/// let mut product = scatter.bind(&compute, &a, &weight, None, d.view_mut())?;
/// product.run(&compute)?;
/// arena.ticket(&compute)?.wait()?;
/// # drop(product);
/// # drop((scatter, memory));
/// # arena.close().unwrap().finish()
/// # }
/// ```
pub struct QuantizedGemmReduceScatter<F: GatherFormat, G: GatherFormat, O: Pod>
where
    bf16: ScatterOperands<O>,
{
    scatter: GemmReduceScatter<bf16, O>,
    casts: (F::Casts, G::Casts),
    /// `B` in bf16, and after it rows of `A`: a panel's, or all own rows.
    room: Buffer<bf16>,
}

impl<F: GatherFormat, G: GatherFormat, O: Pod> QuantizedGemmReduceScatter<F, G, O>
where
    bf16: ScatterOperands<O>,
{
    /// Chooses the method, loads kernels, and takes room for what is dequantized and what is put to the others, which all operations on one memory share. Waits for no other rank.
    ///
    /// # Errors
    /// As [`GemmReduceScatter::new`]; [`Error::Invalid`] for rows that a format cannot hold.
    pub fn new(memory: &OverlapMemory, stream: &Stream, config: ReduceScatterConfig) -> Result<Self> {
        const WHAT: &str = "QuantizedGemmReduceScatter::new";
        let ranks = memory.member().team().size();
        let product = config.product(ranks)?;
        F::check(WHAT, [product.m, product.k], Direction::Rows)?;
        G::check(WHAT, shape_of_b(&product), Direction::Rows)?;
        let becomes = format!("rows of each rank, A in {}, B in {}", std::any::type_name::<F>(), std::any::type_name::<G>());
        // What may fail comes before the operation has a number, which members compare.
        let room = memory.0.room(stream, 0, (product.n + config.rows(ranks)) * product.k)?;
        let device = stream.device();
        let casts = (F::load(&device)?, G::load(&device)?);
        Ok(Self {
            scatter: GemmReduceScatter::made(memory, stream, config, ([NOT_WHOLE; 2].map(|why| Err(why.to_owned())), false), &becomes)?,
            casts,
            room,
        })
    }

    /// The method, and why.
    pub fn choice(&self) -> &ScatterChoice {
        self.scatter.choice()
    }

    /// Binds this rank's part of `A`, `[m, k / ranks]`, and of `B`, `[k / ranks, n]` or its transpose, both [rowwise](Direction::Rows), and the rest as [`GemmReduceScatter::bind`]. Each [call](ScatteredProduct::run) reads the codes, the scales and the amaxes that are there then.
    ///
    /// # Errors
    /// As [`GemmReduceScatter::bind`]; [`Error::Invalid`] for a tensor of another shape or direction.
    pub fn bind<'a>(
        &'a self,
        stream: &Stream,
        a: &'a QuantizedTensor<F>,
        weight: &'a QuantizedTensor<G>,
        bias: Option<DeviceView<'a, O>>,
        d: DeviceViewMut<'a, O>,
    ) -> Result<ScatteredProduct<'a, bf16, O>> {
        self.bind_epilogue(stream, a, weight, Epilogue::of_bias(bias), d)
    }

    /// As [`bind`](Self::bind), with an [`Epilogue`] of whole sums, as [`GemmReduceScatter::bind_epilogue`] takes it.
    ///
    /// # Errors
    /// As [`bind`](Self::bind) and [`GemmReduceScatter::bind_epilogue`].
    pub fn bind_epilogue<'a>(
        &'a self,
        stream: &Stream,
        a: &'a QuantizedTensor<F>,
        weight: &'a QuantizedTensor<G>,
        epilogue: Epilogue<'a, O>,
        d: DeviceViewMut<'a, O>,
    ) -> Result<ScatteredProduct<'a, bf16, O>> {
        let Self { scatter, casts: (casts_of_a, casts_of_b), room } = self;
        let product @ GemmConfig { m, n, k, .. } = scatter.product;
        check("QuantizedGemmReduceScatter::bind, a", a, [m, k])?;
        check("QuantizedGemmReduceScatter::bind, b", weight, shape_of_b(&product))?;
        let wide_b = room.view().slice(0, n * k);
        let wide_a = |count: u64| room.view().slice(n * k, (n + count) * k);
        let of_a = |rows: Range<u64>| Ok(dequantize(casts_of_a, rows_of(a, &rows)?, wide_a(rows.end - rows.start)));
        let whole_b = 0..weight.shape[0];
        let own = scatter.shards.shard(scatter.memory.member().rank().index());
        let operands = Dequantize { weight: dequantize(casts_of_b, rows_of(weight, &whole_b)?, wide_b), own: of_a(own)? };
        let bound = scatter.bind_rows(stream, (|rows: Range<u64>| wide_a(rows.end - rows.start), wide_b), epilogue, d)?;
        bound.dequantizing(operands, |target, panel| {
            let (first, rows) = (scatter.shards.shard(target).start, scatter.shards.panel(target, panel));
            of_a(first + rows.start..first + rows.end)
        })
    }
}

/// Why all rows are no kernel.
const NOT_WHOLE: &str = "codes are dequantized a panel at a time";

/// Rows and columns of `B` as it is stored.
fn shape_of_b(product: &GemmConfig) -> [u64; 2] {
    if product.transpose_b { [product.n, product.k] } else { [product.k, product.n] }
}

/// Fails unless a tensor has this shape, rowwise, and all of its codes and scales.
fn check<F: GatherFormat>(what: &'static str, tensor: &QuantizedTensor<F>, shape: [u64; 2]) -> Result<()> {
    let QuantizedTensor { shape: found, direction, .. } = tensor;
    if (*found, *direction) != (shape, Direction::Rows) {
        let why = format!("a tensor of {found:?} by {direction:?} for one of {shape:?} by Rows: rows are dequantized, a panel at a time");
        return Err(Error::Invalid { what, why });
    }
    tensor.check_lengths(what)?;
    F::check_amax(what, &tensor.amax)
}

/// Rows of a tensor, which share its uses.
fn rows_of<F: GatherFormat>(tensor: &QuantizedTensor<F>, rows: &Range<u64>) -> Result<QuantizedTensor<F>> {
    let of = |count: u64| -> Result<[u64; 2]> {
        let shape = [count, tensor.shape[1]];
        Ok([F::code_count(shape, Direction::Rows)?, F::scale_count::<Compact>(shape, Direction::Rows)?])
    };
    let (count, [first_code, first_scale]) = (rows.end - rows.start, of(rows.start)?);
    let [codes, scales] = of(count)?;
    // SAFETY: codes and scales are of one byte each, and those of a row follow those of the rows before, of which there are as many as was checked. They are read.
    let (data, scales) = unsafe { (tensor.data.window(first_code, codes), tensor.scales.window(first_scale, scales)) };
    Ok(QuantizedTensor { data, scales, amax: F::same(&tensor.amax), shape: [count, tensor.shape[1]], direction: Direction::Rows })
}

/// Dequantizes a tensor into elements of the room. Of a tensor without rows, nothing is enqueued.
fn dequantize<'a, F: GatherFormat>(casts: &'a F::Casts, tensor: QuantizedTensor<F>, wide: DeviceView<'a, bf16>) -> Bound<'a> {
    let (to, len) = (wide.access("dequantized"), wide.len());
    Bound::new(move |stream| {
        if len == 0 {
            return Ok(());
        }
        // SAFETY: elements of the room, which nothing else uses meanwhile: calls on the memory come one after another on one stream, or in the order of events, and so do the steps of a call, each of which writes
        // what the product after it reads.
        let output = unsafe { DeviceViewMut::from_raw(to.address, len, to.owner) };
        F::dequantize(casts, stream, &tensor, output)
    })
}

impl<F: GatherFormat, G: GatherFormat, O: Pod> fmt::Debug for QuantizedGemmReduceScatter<F, G, O>
where
    bf16: ScatterOperands<O>,
{
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("QuantizedGemmReduceScatter").field("scatter", &self.scatter).finish_non_exhaustive()
    }
}
