//! All-gather of codes and scales, and product, as one operation.

use std::fmt;
use std::ops::Range;

use oxtile_tile::launch::{DeviceView, DeviceViewMut};
use oxtile_tile::num::{Pod, bf16};

use super::choice::{OverlapChoice, Rates};
use super::config::{AllGatherConfig, Method};
use super::format::{GatherFormat, Parts};
use super::memory::{OverlapMemory, PLACES};
use super::products::ShardProducts;
use super::quantized_call::QuantizedProduct;
use super::schedule::Schedule;
use super::table::GatherOperands;
use super::transfer::Transfer;
use crate::comm::Rank;
use crate::gemm::{Gemm, GemmConfig, Matrices, wgmma_of};
use crate::quantize::format::TensorAmax;
use crate::quantize::{Direction, QuantizedTensor};
use crate::runtime::{Bound, Buffer, Error, Result, Stream};

/// A product whose operand `A` the members of a team gather in a low-precision format: MXFP8 or NVFP4. Codes and scales travel, which are 0.52 or 0.28 of the bytes of bf16, and are dequantized to
/// bf16 where they arrive, a chunk at a time.
///
/// Each rank has a shard of the rows of `A`, and its own part of `B` in bf16. A chunk is rows: copy engines put its codes and its scales, and one flag is told after both. By
/// [`Method::Chunked`] a shard is dequantized and multiplied once it is there, by [`Method::Sequential`] each chunk is dequantized once it is there, and multiplied after the whole gather.
/// [`Method::Fused`] is refused: kernels that dequantize would need multiprocessors that a kernel that waits holds.
///
/// The result has the bits of [`Gemm`] on the dequantized whole, of all rows or of each shard.
///
/// The steps are those of [`AllGatherGemm`](super::AllGatherGemm); the shard is a [`QuantizedTensor`], for a cast to write. The scales of NVFP4 follow from an amax, of which each rank has a copy: agree on it
/// before the shards are cast ([`Nvfp4::cast_shard`](crate::quantize::Nvfp4::cast_shard)).
///
/// ```
/// use oxtile::comm::{EmulatedCommunicator, Team, WorldSize};
/// use oxtile::num::bf16;
/// use oxtile::overlap::{AllGatherConfig, GatheredFormat, Global, OverlapMemory, QuantizedAllGatherGemm};
/// use oxtile::quantize::{Mxfp8, Mxfp8Format};
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
/// let config = AllGatherConfig::new(Global { m: 64, n: 64, k: 64 }).travelling(GatheredFormat::Mxfp8);
/// let memory = OverlapMemory::take(&arena, &member, config.bytes::<bf16, bf16>()?, &out)?;
/// let gather = QuantizedAllGatherGemm::<Mxfp8Format, bf16>::new(&memory, &compute, config)?;
///
/// let casts = Mxfp8::<bf16>::new(&runtime)?;
/// let rows = Buffer::zeros(&compute, 64 * 64)?;
/// let (weight, mut d) = (Buffer::zeros(&compute, 64 * 64)?, Buffer::zeros(&compute, 64 * 64)?);
/// let mut product = gather.bind(&compute, weight.view(), None, d.view_mut())?;
/// let shard = product.shard(&compute)?;
/// casts.quantize_rows(&compute, rows.view(), shard.shape, shard.data.view_mut(), shard.scales.view_mut())?;
/// product.run(&compute)?;
/// arena.ticket(&compute)?.wait()?;
/// # drop(product);
/// # drop((gather, memory));
/// # arena.close().unwrap().finish()
/// # }
/// ```
pub struct QuantizedAllGatherGemm<F: GatherFormat, O: Pod>
where
    bf16: GatherOperands<O>,
{
    pub(super) memory: OverlapMemory,
    config: AllGatherConfig,
    choice: OverlapChoice,
    pub(super) schedule: Schedule,
    pub(super) parts: Parts,
    product: GemmConfig,
    work: Work<O>,
    pub(super) casts: F::Casts,
    /// The dequantized operand.
    pub(super) wide: Buffer<bf16>,
    number: u64,
    note: String,
}

/// What multiplies.
enum Work<O: Pod>
where
    bf16: GatherOperands<O>,
{
    Chunked(ShardProducts<bf16, O>),
    Sequential(Gemm<bf16, O>),
}

/// The products of a call.
pub(super) enum Products<'a> {
    /// By members.
    Chunked(Vec<Bound<'a>>),
    Sequential(Bound<'a>),
}

/// Rows of the operand in a place.
pub(super) struct Piece<F: GatherFormat> {
    /// Of this member, and of its chunk where it is another's.
    pub source: u32,
    pub flag: Option<(u32, Rank)>,
    pub rows: Range<u64>,
    pub tensor: QuantizedTensor<F>,
}

impl<F: GatherFormat, O: Pod> QuantizedAllGatherGemm<F, O>
where
    bf16: GatherOperands<O>,
{
    /// Chooses the method, and loads kernels. The configuration's format is `F`. Takes room for the dequantized operand, which all operations on one memory share, from `stream`'s device. Waits for no other
    /// rank.
    ///
    /// # Errors
    /// As [`AllGatherConfig::choose`]; [`Error::Invalid`] for a configuration of another format, and for memory that is too small; as [`Runtime::load`](crate::Runtime::load).
    pub fn new(memory: &OverlapMemory, stream: &Stream, config: AllGatherConfig) -> Result<Self> {
        const WHAT: &str = "QuantizedAllGatherGemm::new";
        let (inner, device) = (&memory.0, stream.device());
        inner.arena.check_stream(stream)?;
        if config.format != Some(F::FORMAT) {
            let found = config.format.map_or("elements".to_owned(), |format| format.to_string());
            let why = format!(
                "the configuration's operand travels as {found}, the operation's as {0}: take AllGatherConfig::travelling({0})",
                F::FORMAT
            );
            return Err(Error::Invalid { what: WHAT, why });
        }
        memory.check_room(WHAT, config.bytes::<bf16, O>()?)?;
        let ranks = inner.member.team().size();
        let rates = Rates { multiprocessors: device.limits().multiprocessors, ..Rates::H200 };
        let choice = config.choose_where::<bf16, O>(ranks, &rates, wgmma_of(device.capability()))?;
        let (schedule, product, runtime) = (config.schedule::<bf16, O>(ranks, choice.cut), config.product(ranks)?, device.runtime());
        let work = match choice.method {
            Method::Chunked => Work::Chunked(ShardProducts::new(&runtime, &schedule, product)?),
            _ => Work::Sequential(Gemm::new(&runtime, product)?),
        };
        let (parts, wide) = (F::FORMAT.parts([product.m, product.k])?, inner.room(stream, 0, product.m * product.k)?);
        // Whatever may fail comes before the operation has a number, which the other members count too.
        let casts = F::load(&device)?;
        let number = inner.next_operation();
        let (format, results, cut) = (std::any::type_name::<F>(), std::any::type_name::<O>(), schedule.cut);
        let note = format!("{config:?} of {format} into {results} in {:?}, cut {cut:?}, puts {:?}", inner.member.team(), choice.order);
        inner.arena.note(&inner.operation(number), &note)?;
        Ok(Self { memory: memory.clone(), config, choice, schedule, parts, product, work, casts, wide, number, note })
    }

    /// The method, and why.
    pub fn choice(&self) -> &OverlapChoice {
        &self.choice
    }

    /// Binds `B`, a bias of one value a column if there is one, and the result. Compares the operation with the other members', and waits for them to make it; encodes tensor maps and waits for those to be
    /// there.
    ///
    /// # Errors
    /// [`Error::Mismatch`] for another operation on another member; [`Error::Length`] for a view of another size; ranks that do not come; as [`Gemm::bind`].
    pub fn bind<'a>(
        &'a self,
        stream: &Stream,
        weight: DeviceView<'a, bf16>,
        bias: Option<DeviceView<'a, O>>,
        d: DeviceViewMut<'a, O>,
    ) -> Result<QuantizedProduct<'a, F, O>> {
        let (inner, GemmConfig { m, n, k, .. }) = (&self.memory.0, self.product);
        Error::check_length("QuantizedAllGatherGemm::bind, b", k * n, weight.len())?;
        Error::check_length("QuantizedAllGatherGemm::bind, d", m * n, d.len())?;
        if let Some(bias) = bias {
            Error::check_length("QuantizedAllGatherGemm::bind, bias", n, bias.len())?;
        }
        inner.arena.compare_notes(&inner.operation(self.number), self.number, &self.note, inner.others())?;
        inner.open(stream)?;
        let (length, result) = (d.len(), d.access("d"));
        // SAFETY: each part of the result is of one product, or all of it of one; what is lent for it is lent on.
        let d = || unsafe { DeviceViewMut::from_raw(result.address, length, result.owner) };
        let matrices = |a, d| Matrices { a, b: weight, scales: None, bias, d };
        let products = match &self.work {
            Work::Chunked(products) => {
                Products::Chunked(products.bind(stream, &self.schedule, self.product, self.wide.view(), d, matrices)?)
            }
            Work::Sequential(gemm) => Products::Sequential(gemm.bind_matrices(stream, matrices(self.wide.view(), d()))?),
        };
        // SAFETY: what `d` lends is lent on, to be read: between the calls, which need the product that lends it for themselves.
        let result = unsafe { DeviceView::from_raw(result.address, length, result.owner) };
        let amaxes = [F::Amax::zero(stream)?, F::Amax::zero(stream)?];
        let [first, second] = [0, 1].map(|place| self.pieces(place, &amaxes[place]));
        Ok(QuantizedProduct::new(self, result, products, [first, second]))
    }

    pub(super) fn transfer(&self) -> Transfer<'_> {
        Transfer { inner: &self.memory.0, schedule: &self.schedule, order: self.choice.order }
    }

    /// The pieces of a place: the own shard, then the others' chunks as they arrive.
    fn pieces(&self, place: usize, amax: &F::Amax) -> Vec<Piece<F>> {
        let (transfer, me) = (self.transfer(), self.memory.member().rank().index());
        let piece = |source, flag, rows: Range<u64>| Piece { source, flag, tensor: self.tensor(place, &rows, amax), rows };
        let own = piece(me, None, self.schedule.shard(me));
        let others = transfer.arrivals().into_iter().map(|(source, chunk)| {
            let flag = transfer.flag(place, source, &chunk);
            piece(source, Some(flag), chunk.rows)
        });
        [own].into_iter().chain(others).collect()
    }

    /// Rows in a place as a tensor.
    fn tensor(&self, place: usize, rows: &Range<u64>, amax: &F::Amax) -> QuantizedTensor<F> {
        debug_assert!(place < PLACES, "places are numbered");
        let (count, [codes, scales]) = (rows.end - rows.start, self.parts.of_row(rows.start));
        let all = self.memory.0.place::<u8>(place, self.parts.bytes);
        let [of_codes, of_scales] = self.parts.row;
        // SAFETY: codes and scales are of one byte each, and lie in the place, as its parts say. Windows that are written are shards, of which no other window has any byte but those that copies read, which are
        // ordered by the place's uses.
        let (data, scales) = unsafe { (all.window(codes, count * of_codes), all.window(scales, count * of_scales)) };
        QuantizedTensor { data, scales, amax: F::same(amax), shape: [count, self.product.k], direction: Direction::Rows }
    }
}

impl<F: GatherFormat, O: Pod> fmt::Debug for QuantizedAllGatherGemm<F, O>
where
    bf16: GatherOperands<O>,
{
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("QuantizedAllGatherGemm").field("config", &self.config).field("method", &self.choice.method).finish_non_exhaustive()
    }
}
