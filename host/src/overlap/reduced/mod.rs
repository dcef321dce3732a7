//! A product and an all-reduce as one operation: rows are summed by their owners and put to all ranks, or small sums are made in one launch.
//!
//! | file | what it holds |
//! |---|---|
//! | `config` | what is computed, by which method, and why |
//! | `memory` | where complete sums arrive |
//! | `spread` | finished rows on their way to all members |
//! | `mailbox` | slots for the parts of small sums, and the kernel that adds them |
//! | `call` | one call |

mod call;
mod config;
mod mailbox;
mod memory;
mod spread;

pub use call::ReducedProduct;
pub use config::{AllReduceChoice, AllReduceConfig, AllReduceMethod, AllReduceTimes};
pub use mailbox::ReduceOperands;
pub use memory::AllReduceMemory;
pub(super) use spread::Spread;

use std::fmt;
use std::ops::Range;

use oxtile_kernels::sum_parts::Summed;
use oxtile_tile::launch::{DeviceView, DeviceViewMut};

use call::By;
use mailbox::SmallSum;

use super::choice::Rates;
use super::scattered::{GemmReduceScatter, ReduceScatterConfig, ScatterCall, ScatterMethod};
use crate::gemm::{Gemm, GemmConfig, Matrices};
use crate::runtime::{Buffer, Error, Result, Stream};

/// A product whose sum the members of a team share, and which all of them get.
///
/// Each rank has a part of the sum: columns of `A` and rows of `B`. The result lies in the [`AllReduceMemory`], where the others write their part of it, and stays until the next call of an operation on that memory.
///
/// - By [`AllReduceMethod::Fused`] each rank sums some of the rows, as [`GemmReduceScatter`] does, a panel at a time, and puts each finished panel to all others while the next one is multiplied.
/// - By [`AllReduceMethod::Sequential`] it sums them at once, when all parts are there, and puts them after that.
/// - By [`AllReduceMethod::OneShot`] one launch after the plain product stores each rank's part at all others and adds all parts, in the order of the ranks: few microseconds for results of 256 KiB at most.
///
/// Parts travel in the type of the result and are summed in `f32`; the factor, the bias and the activation come after the whole sum, once. All ranks have the same bits, in every run. The methods differ in what is rounded: an
/// owner's own part is not, while by `OneShot` all parts are.
///
/// 1. all ranks take an [`OverlapMemory`](super::OverlapMemory) and an [`AllReduceMemory`], and make the operation ([`new`](Self::new)), which neither waits nor meets anyone;
/// 2. all [bind](Self::bind) it, which compares what they made;
/// 3. each call [runs](ReducedProduct::run) the product of what is in the bound matrices then.
///
/// A call does not wait on the host and allocates no device memory. Any may be captured, the first too. After a call, wait for a [ticket](crate::symmetric::Arena::ticket) of the stream: it names the rank that did not come. By `OneShot` what lacks a part is NaN then, and later work of the stream is done; by the other methods the stream is held. A wait of the host for the stream is the same error.
///
/// ```
/// use oxtile::comm::{EmulatedCommunicator, Team, WorldSize};
/// use oxtile::num::bf16;
/// use oxtile::overlap::{AllReduceConfig, AllReduceMemory, GemmAllReduce, Global, OverlapMemory};
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
/// let config = AllReduceConfig::new(Global { m: 16, n: 64, k: 64 });
/// let parts = OverlapMemory::take(&arena, &member, config.bytes::<bf16, bf16>(WorldSize::ONE)?, &out)?;
/// let memory = AllReduceMemory::take(&parts, config.result_bytes::<bf16>()?)?;
/// let reduce = GemmAllReduce::<bf16, bf16>::new(&memory, &compute, config)?;
///
/// let (a, weight) = (Buffer::zeros(&compute, 16 * 64)?, Buffer::zeros(&compute, 64 * 64)?);
/// let mut product = reduce.bind(&compute, a.view(), weight.view(), None)?;
/// product.run(&compute)?;
/// arena.ticket(&compute)?.wait()?;
/// assert_eq!(product.result().len(), 16 * 64); // a kernel may take it
/// # drop(product);
/// # drop((reduce, memory, parts));
/// # arena.close().unwrap().finish()
/// # }
/// ```
pub struct GemmAllReduce<T: ReduceOperands<O>, O: Summed> {
    memory: AllReduceMemory,
    config: AllReduceConfig,
    choice: AllReduceChoice,
    made: Made<T, O>,
}

/// Why all rows are no kernel.
const NOT_WHOLE: &str = "rows go to all ranks";

enum Made<T: ReduceOperands<O>, O: Summed> {
    /// The rows of each run of own rows lie in the result.
    Scattered {
        scatter: Box<GemmReduceScatter<T, O>>,
        rows: Vec<Buffer<O>>,
    },
    OneShot(OneShot<T, O>),
}

/// The plain product, and the sum of all ranks'.
struct OneShot<T: ReduceOperands<O>, O: Summed> {
    gemm: Gemm<T, O>,
    part: Buffer<O>,
    kernel: Box<dyn SmallSum<O>>,
    number: u64,
    note: String,
}

impl<T: ReduceOperands<O>, O: Summed> GemmAllReduce<T, O> {
    /// Chooses the method, loads its kernels, and takes room for what is put to the others, which all operations on one memory share. Waits for no other rank.
    ///
    /// # Errors
    /// As [`AllReduceConfig::choose`]; [`Error::Invalid`] for memory that is too small; as [`GemmReduceScatter::new`] and [`Gemm::new`].
    pub fn new(memory: &AllReduceMemory, stream: &Stream, config: AllReduceConfig) -> Result<Self> {
        const WHAT: &str = "GemmAllReduce::new";
        let (parts, device) = (&memory.parts().0, stream.device());
        parts.arena.check_stream(stream)?;
        let ranks = parts.member.team().size();
        memory.check_room(WHAT, config.result_bytes::<O>()?)?;
        let choice = config.choose::<T, O>(ranks, &Rates::of(&device))?;
        let product = config.product(ranks)?;
        let made = match choice.method {
            AllReduceMethod::Fused | AllReduceMethod::Sequential => {
                let is_fused = choice.method == AllReduceMethod::Fused;
                let method = if is_fused { ScatterMethod::Fused } else { ScatterMethod::Sequential };
                let (asked, config) = (config, config.scattered(method));
                let config = ReduceScatterConfig { panels: Some(choice.panels), ..config };
                let becomes = format!("rows that all get, by {asked:?} in {} bytes", memory.bytes());
                let scatter = GemmReduceScatter::<T, O>::made(
                    memory.parts(),
                    stream,
                    config,
                    ([NOT_WHOLE; 2].map(|why| Err(why.to_owned())), is_fused),
                    &becomes,
                )?;
                let own = scatter.own_rows().map(|rows| (rows.start * product.n, (rows.end - rows.start) * product.n));
                Made::Scattered { rows: own.map(|(first, len)| memory.0.rows_of(first, len)).collect(), scatter: Box::new(scatter) }
            }
            AllReduceMethod::OneShot => {
                let runtime = device.runtime();
                let kernel = T::small_sum(&runtime)?;
                kernel.prepare(&device)?;
                let (gemm, part) = (Gemm::new(&runtime, product)?, parts.room::<O>(stream, 1, product.m * product.n)?);
                // Whatever may fail comes before the operation has a number, which the other members count too.
                let number = parts.next_operation();
                let (elements, results) = (std::any::type_name::<T>(), std::any::type_name::<O>());
                let note = format!("{config:?} of {elements} into {results} by OneShot in {:?}", parts.member.team());
                parts.arena.note(&parts.operation(number), &note)?;
                Made::OneShot(OneShot { gemm, part, kernel, number, note })
            }
        };
        Ok(Self { memory: memory.clone(), config, choice, made })
    }

    /// The method, and why.
    pub fn choice(&self) -> &AllReduceChoice {
        &self.choice
    }

    /// Binds this rank's part of `A`, `[m, k / ranks]`, and of `B`, `[k / ranks, n]` or its transpose, and a bias of one value a column if there is one. Every rank names the same bias, which is added once. Compares the
    /// operation with the other members', and waits for them to make it. One operation may be bound to the weights of many layers.
    ///
    /// # Errors
    /// [`Error::Mismatch`] for another operation on another member; [`Error::Length`] for a view of another size; ranks that do not come; as [`Gemm::bind`].
    pub fn bind<'a>(
        &'a self,
        stream: &Stream,
        a: DeviceView<'a, T>,
        weight: DeviceView<'a, T>,
        bias: Option<DeviceView<'a, O>>,
    ) -> Result<ReducedProduct<'a, T, O>> {
        let (inner, parts) = (&self.memory.0, &self.memory.parts().0);
        let GemmConfig { m, n, k, .. } = self.config.product(parts.member.team().size())?;
        Error::check_length("GemmAllReduce::bind, a", m * k, a.len())?;
        Error::check_length("GemmAllReduce::bind, b", k * n, weight.len())?;
        if let Some(bias) = bias {
            Error::check_length("GemmAllReduce::bind, bias", n, bias.len())?;
        }
        let by = match &self.made {
            Made::Scattered { scatter, rows } => {
                // SAFETY: the rows of each run lie apart, and the two places' products of one share them. Only the call of one of them is enqueued at a time, by the product that is made here, and all calls on
                // the memory are in order.
                let lent = |run: usize| unsafe { DeviceViewMut::from_raw(rows[run].address(), rows[run].len(), rows[run].owner()) };
                let rows_of_a = |rows: Range<u64>| a.slice(rows.start * k, rows.end * k);
                let (sent, own) = scatter.bind_products(stream, (rows_of_a, weight), (bias, self.config.activation), lent)?;
                By::Scattered(ScatterCall::spreading(scatter, sent, own, Spread::new(inner, scatter.shards(), rows)))
            }
            Made::OneShot(of) => {
                if let Some(address) = bias.map(|bias| bias.address()).filter(|address| !address.is_multiple_of(16)) {
                    let why = format!("the bias begins at {address:#x}, no multiple of 16 bytes: copy it to a buffer of its own");
                    return Err(Error::Invalid { what: "GemmAllReduce::bind", why });
                }
                parts.arena.compare_notes(&parts.operation(of.number), of.number, &of.note, parts.others())?;
                inner.mailbox.open(parts, stream)?;
                let part = &of.part;
                // SAFETY: the room is written by this product alone, and read by the sum after it; calls on the memory are in order.
                let d = unsafe { DeviceViewMut::from_raw(part.address(), part.len(), part.owner()) };
                let product = of.gemm.bind_matrices(stream, Matrices { a, b: weight, scales: None, bias: None, d })?;
                By::OneShot { product, of, bias }
            }
        };
        let result = inner.elements::<O>(m * n);
        Ok(ReducedProduct::new(self, result, by))
    }
}

impl<T: ReduceOperands<O>, O: Summed> fmt::Debug for GemmAllReduce<T, O> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("GemmAllReduce").field("config", &self.config).field("method", &self.choice.method).finish_non_exhaustive()
    }
}
