//! The slots in which parts of small sums arrive, and the kernel that adds them.

use std::sync::{Arc, Mutex, OnceLock};

use oxtile_kernels::all_reduce::{AllReduce, AllReduceArgs, LANES, MailArgument, VECTOR};
use oxtile_kernels::sum_parts::Summed;
use oxtile_tile::launch::{BufferAccess, DeviceSlots, DeviceTable, DeviceView, DeviceViewMut, Kernel};

use crate::gemm::GemmConfig;
use crate::overlap::memory::Inner as Parts;
use crate::overlap::scattered::ScatterOperands;
use crate::runtime::runtime::lock;
use crate::runtime::{Buffer, Device, Kind, Loaded, Result, Runtime, Stream};
use crate::symmetric::{Flags, SymmetricBuffer};

/// The most bytes of a sum that one launch a rank makes.
pub(super) const MOST_BYTES: u64 = 256 << 10;
/// Places of a slot, which calls take in turn.
const PLACES: u64 = 2;
/// The fewest vectors that are worth a block: a warp or two.
const FEWEST: u64 = 64;

/// Operands whose products may be summed over ranks, of results of `O`.
pub trait ReduceOperands<O: Summed>: ScatterOperands<O> {
    /// Loads the kernel of small sums.
    #[doc(hidden)]
    fn small_sum(runtime: &Runtime) -> Result<Box<dyn SmallSum<O>>>;
}

/// A loaded kernel.
#[doc(hidden)]
pub trait SmallSum<O: Summed>: Send + Sync {
    /// Loads it on the device.
    fn prepare(&self, device: &Device) -> Result<()>;
    /// Launches it.
    fn launch(&self, stream: &Stream, args: AllReduceArgs<'_, O>) -> Result<()>;
}

impl<O: Summed> SmallSum<O> for Loaded<AllReduce<O>>
where
    AllReduce<O>: Kernel,
{
    fn prepare(&self, device: &Device) -> Result<()> {
        Loaded::prepare(self, device)
    }

    fn launch(&self, stream: &Stream, args: AllReduceArgs<'_, O>) -> Result<()> {
        Loaded::launch(self, stream, args)
    }
}

macro_rules! small_sums {
    ($($t:ident)*) => { $(
        impl ReduceOperands<oxtile_tile::num::$t> for oxtile_tile::num::$t {
            fn small_sum(runtime: &Runtime) -> Result<Box<dyn SmallSum<Self>>> {
                Ok(Box::new(runtime.load::<AllReduce<Self>>()?))
            }
        }
    )* };
}
small_sums!(bf16 f16);

/// Slots at every rank, `[source, PLACES, LANES, slot]`, and a flag for each rank, which nothing sets: a verdict names it.
pub(super) struct Mailbox {
    inbox: SymmetricBuffer<u8>,
    flags: Flags,
    /// Of the slots of a lane.
    bytes: u64,
    opened: OnceLock<Opened>,
}

/// What is known once all ranks are there.
struct Opened {
    /// Where this rank's slots lie at each member, and their length in elements of 16 bits.
    entries: Buffer<u64>,
    addresses: Vec<u64>,
    /// The members' numbers in the world.
    ranks: Buffer<u32>,
    /// The calls of each lane so far: of all operations on the mailbox.
    calls: Mutex<Buffer<u64>>,
}

/// A sum of which this rank has a part.
pub(super) struct Sum<'a, O: Summed> {
    pub part: DeviceView<'a, O>,
    pub sum: DeviceViewMut<'a, O>,
    /// Its columns, and what follows it.
    pub config: GemmConfig,
    pub bias: Option<DeviceView<'a, O>>,
}

/// Blocks of a launch: as many as are resident together.
fn lanes(device: &Device) -> u64 {
    u64::from(LANES.min(device.limits().multiprocessors))
}

impl Mailbox {
    /// Takes the slots of results of so many bytes from the arena, as far as they are small, empties them, and takes the flags. Waits for the device, not for other ranks.
    pub fn take(parts: &Parts, bytes: u64) -> Result<Self> {
        let bytes = bytes.min(MOST_BYTES).div_ceil(lanes(&parts.out.device())).next_multiple_of(16).max(16 * FEWEST);
        // Of ranks, not of members: teams of other sizes take as much.
        let ranks = u64::from(parts.arena.world().get());
        let mut inbox = parts.arena.buffer(ranks * PLACES * u64::from(LANES) * bytes)?;
        // No rank stores in them before: each compares this rank's note of an operation first, which is written after this.
        inbox.fill(u8::MAX)?;
        let flags = parts.arena.flags("part of a small sum", 1)?;
        Ok(Self { inbox, flags, bytes, opened: OnceLock::new() })
    }

    /// Before the first call: meets all ranks, and uploads where their slots lie. Nothing where it was done.
    pub fn open(&self, parts: &Parts, stream: &Stream) -> Result<()> {
        if self.opened.get().is_some() {
            return Ok(());
        }
        let (all, member) = (self.inbox.addresses()?, &parts.member);
        let members = member.team().members();
        let of_rank = self.bytes * PLACES * u64::from(LANES);
        let at = u64::from(member.rank().index()) * of_rank;
        let addresses: Vec<u64> = members.iter().map(|rank| all[rank.index() as usize] + at).collect();
        let entries: Vec<u64> = addresses.iter().flat_map(|address| [*address, of_rank / 2]).collect();
        let ranks: Vec<u32> = members.iter().map(|rank| rank.index()).collect();
        let opened = Opened {
            entries: Buffer::from_slice(stream, &entries)?,
            addresses,
            ranks: Buffer::from_slice(stream, &ranks)?,
            calls: Mutex::new(Buffer::zeros(stream, LANES.into())?),
        };
        // Another thread may have been faster: then all is there already.
        let _ = self.opened.set(opened);
        Ok(())
    }

    /// Enqueues the sum of all members' parts: every member calls it, with a part of the same size, after [`open`](Self::open). Without a part of some member it is NaN.
    pub fn sum<O: Summed>(&self, parts: &Parts, stream: &Stream, kernel: &dyn SmallSum<O>, of: Sum<'_, O>) -> Result<()> {
        let Some(Opened { entries, addresses, ranks, calls }) = self.opened.get() else { return Ok(()) };
        // On the virtual cluster, which has no clock, a deadline is over before a kernel's verdict: then these stand for the ranks that may not have come. On a GPU the verdict is first.
        let is_emulated = stream.0.runtime.kind() == Kind::Emulated;
        let awaited: Vec<_> = parts.others().filter(|_| is_emulated).map(|other| (0, other)).collect();
        let (waits, mut calls) = (self.flags.waits(stream, &awaited)?, lock(calls));
        let bytes = self.bytes * PLACES * u64::from(LANES);
        // SAFETY: so many elements of any bits lie there, since the slots are those of all ranks, of which the members are some; buffers of arenas are aligned to 256 bytes.
        let inbox =
            unsafe { Buffer::<O>::of(Arc::clone(self.inbox.local().memory()), addresses.len() as u64 * bytes / size_of::<O>() as u64) };
        // SAFETY: kernels of small sums alone use the memory, as slots; `take` has emptied them.
        let inbox = unsafe { DeviceSlots::new(inbox.view()) };
        let own = inbox.access("mail.slots");
        let members: Vec<_> = addresses.iter().map(|address| BufferAccess { address: *address, bytes, ..own }).collect();
        // SAFETY: each entry is where a member's slots for this rank lie, which the arena maps, and in which no other rank stores; `members` names them.
        let slots = unsafe { DeviceTable::from_raw(entries.view(), &members) };
        let vectors = of.sum.len() / u64::from(VECTOR);
        let each = vectors.div_ceil(lanes(&stream.device())).max(FEWEST) as u32;
        let slot = (self.bytes / size_of::<O>() as u64) as u32;
        let me = parts.member.rank().index();
        let mail = MailArgument { slots, inbox, ranks: ranks.view(), calls: calls.view_mut(), slot, each, me };
        let Sum { part, sum, config, bias } = of;
        let (columns, fusion) = (config.shape().n, config.fusion(None, bias));
        kernel.launch(stream, AllReduceArgs { part, sum, columns, mail, waits, fusion })
    }
}
