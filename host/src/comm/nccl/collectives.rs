//! The collectives, as NCCL enqueues them.

use std::ffi::{c_int, c_void};
use std::panic::Location;
use std::ptr;
use std::sync::Arc;

use oxtile_tile::launch::{DeviceView, DeviceViewMut};
use oxtile_tile::num::Pod;

use super::communicator::NcclCommunicator;
use super::library::{Comm, CudaStream, Functions, Nccl, NcclVersion, SUCCESS};
use crate::comm::group;
use crate::comm::operand::Operand;
use crate::comm::{Communicator, DType, Rank, ReduceOp, Reducible, WorldSize};
use crate::recording::{Activity, Work};
use crate::runtime::emulated::{Call, Reduction};
use crate::runtime::{Error, Result, Stream, lock, order, recorder};

impl Communicator for NcclCommunicator {
    fn rank(&self) -> Rank {
        self.handle.rank
    }

    fn world(&self) -> WorldSize {
        self.handle.world
    }

    fn all_reduce<'a, T: Reducible>(&self, stream: &Stream, buffer: impl Into<DeviceViewMut<'a, T>>, op: ReduceOp) -> Result<()> {
        const WHAT: &str = "Communicator::all_reduce";
        self.check_dtype(WHAT, T::DTYPE)?;
        let buffer = Operand::written(stream, WHAT, &buffer.into())?;
        let (at, count) = (address(&buffer), count::<T>(&buffer)?);
        let call = Call::AllReduce { reduction: Reduction { op, dtype: T::DTYPE }, bytes: buffer.bytes };
        self.enqueue(stream, WHAT, Some(call), &[buffer], |nccl, comm, stream| {
            // SAFETY: `enqueue` vouches for the memory, the stream and the communicator.
            unsafe { (nccl.all_reduce)(at, at, count, data_type(T::DTYPE), operator(op), comm, stream) }
        })
    }

    fn all_gather<'a, T: Pod>(
        &self,
        stream: &Stream,
        shard: impl Into<DeviceView<'a, T>>,
        output: impl Into<DeviceViewMut<'a, T>>,
    ) -> Result<()> {
        const WHAT: &str = "Communicator::all_gather";
        let (shard, output) = (shard.into(), output.into());
        self.check_whole(WHAT, shard.len(), output.len())?;
        let uses = [Operand::read(stream, WHAT, shard)?, Operand::written(stream, WHAT, &output)?];
        let (from, to, bytes) = (address(&uses[0]), address(&uses[1]), count::<u8>(&uses[0])?);
        let call = Call::AllGather { shard_bytes: bytes as u64 };
        self.enqueue(stream, WHAT, Some(call), &uses, |nccl, comm, stream| {
            // SAFETY: `enqueue` vouches for the memory, the stream and the communicator.
            unsafe { (nccl.all_gather)(from, to, bytes, U8, comm, stream) }
        })
    }

    fn reduce_scatter<'a, T: Reducible>(
        &self,
        stream: &Stream,
        input: impl Into<DeviceView<'a, T>>,
        shard: impl Into<DeviceViewMut<'a, T>>,
        op: ReduceOp,
    ) -> Result<()> {
        const WHAT: &str = "Communicator::reduce_scatter";
        let (input, shard) = (input.into(), shard.into());
        self.check_dtype(WHAT, T::DTYPE)?;
        self.check_whole(WHAT, shard.len(), input.len())?;
        let uses = [Operand::read(stream, WHAT, input)?, Operand::written(stream, WHAT, &shard)?];
        let (from, to, count) = (address(&uses[0]), address(&uses[1]), count::<T>(&uses[1])?);
        let call = Call::ReduceScatter { reduction: Reduction { op, dtype: T::DTYPE }, shard_bytes: uses[1].bytes };
        self.enqueue(stream, WHAT, Some(call), &uses, |nccl, comm, stream| {
            // SAFETY: `enqueue` vouches for the memory, the stream and the communicator.
            unsafe { (nccl.reduce_scatter)(from, to, count, data_type(T::DTYPE), operator(op), comm, stream) }
        })
    }

    fn broadcast<'a, T: Pod>(&self, stream: &Stream, buffer: impl Into<DeviceViewMut<'a, T>>, root: Rank) -> Result<()> {
        const WHAT: &str = "Communicator::broadcast";
        let buffer = Operand::written(stream, WHAT, &buffer.into())?;
        let (from, at, bytes) = (self.peer(WHAT, root)?, address(&buffer), count::<u8>(&buffer)?);
        let call = Call::Broadcast { root, bytes: bytes as u64 };
        self.enqueue(stream, WHAT, Some(call), &[buffer], |nccl, comm, stream| {
            // SAFETY: `enqueue` vouches for the memory, the stream and the communicator.
            unsafe { (nccl.broadcast)(at, at, bytes, U8, from, comm, stream) }
        })
    }

    fn all_to_all<'a, T: Pod>(
        &self,
        stream: &Stream,
        input: impl Into<DeviceView<'a, T>>,
        output: impl Into<DeviceViewMut<'a, T>>,
    ) -> Result<()> {
        const WHAT: &str = "Communicator::all_to_all";
        let (input, output) = (input.into(), output.into());
        let world = self.handle.world.get() as usize;
        self.check_whole(WHAT, input.len() / world as u64, input.len())?;
        self.check_whole(WHAT, input.len() / world as u64, output.len())?;
        let uses = [Operand::read(stream, WHAT, input)?, Operand::written(stream, WHAT, &output)?];
        let (from, to, part) = (address(&uses[0]), address(&uses[1]), count::<u8>(&uses[0])? / world);
        let messages = (0..world).flat_map(|peer| {
            let at = peer * part;
            // Within the views: there are as many parts as ranks.
            [
                Message::Send(from.wrapping_byte_add(at), part, peer as c_int),
                Message::Receive(to.wrapping_byte_add(at), part, peer as c_int),
            ]
        });
        let call = Call::AllToAll { bytes: uses[0].bytes };
        self.enqueue(stream, WHAT, Some(call), &uses, |nccl, comm, stream| {
            // SAFETY: `enqueue` vouches for the memory, the stream and the communicator.
            unsafe { transfer(messages, nccl, comm, stream) }
        })
    }

    fn exchange<T: Pod>(
        &self,
        stream: &Stream,
        sends: &[(Rank, DeviceView<'_, T>)],
        receives: &[(Rank, DeviceViewMut<'_, T>)],
    ) -> Result<()> {
        const WHAT: &str = "Communicator::exchange";
        let (mut messages, mut uses) = (Vec::new(), Vec::new());
        for (to, view) in sends {
            let operand = Operand::read(stream, WHAT, *view)?;
            messages.push(Message::Send(address(&operand), count::<u8>(&operand)?, self.peer(WHAT, *to)?));
            uses.push(operand);
        }
        for (from, view) in receives {
            let operand = Operand::written(stream, WHAT, view)?;
            messages.push(Message::Receive(address(&operand), count::<u8>(&operand)?, self.peer(WHAT, *from)?));
            uses.push(operand);
        }
        self.enqueue(stream, WHAT, None, &uses, |nccl, comm, stream| {
            // SAFETY: `enqueue` vouches for the memory, the stream and the communicator.
            unsafe { transfer(messages, nccl, comm, stream) }
        })
    }

    fn group<R>(&self, body: impl FnOnce() -> Result<R>) -> Result<R> {
        self.run_group(body)
    }

    fn split(&self, colour: Option<u32>, key: u32) -> Result<Option<Self>> {
        self.split_off(colour, key)
    }

    /// A reduction of one byte of every rank.
    fn wait(&self, stream: &Stream) -> Result<()> {
        self.synchronize(stream)
    }

    fn barrier(&self, stream: &Stream) -> Result<()> {
        self.all_reduce(stream, lock(&self.token).view_mut(), ReduceOp::Max)
    }
}

impl NcclCommunicator {
    /// Orders a call after the other uses of what it reads and writes, whose memory was found to be the stream's, and makes it.
    #[track_caller]
    fn enqueue(
        &self,
        stream: &Stream,
        what: &'static str,
        compared: Option<Call>,
        uses: &[Operand],
        call: impl FnOnce(&Functions, Comm, CudaStream) -> c_int,
    ) -> Result<()> {
        self.check_stream(stream, what)?;
        let is_grouped = group::join(self.id(), what, uses)?;
        if let Some(compared) = compared {
            self.handle.agree(|| compared.to_string())?;
        }
        // A graph of this call keeps the communicator.
        if let Some(capture) = stream.0.capture() {
            capture.keep(Arc::clone(&self.handle) as _);
        }
        let raw = ptr::with_exposed_provenance_mut(stream.raw() as usize);
        let _enqueue = stream.0.runtime.enqueue();
        order(&stream.0, |wait_for| uses.iter().for_each(|operand| operand.add_use(&stream.0, wait_for)))?;
        let (backend, caller) = (&*stream.0.runtime.backend, Location::caller());
        stream.0.note(what, Some(caller));
        let only_reads = uses.iter().all(|operand| !operand.writes);
        let moved = || uses.iter().filter(|operand| operand.writes != only_reads).map(|operand| operand.bytes).sum();
        let name = what.trim_start_matches("Communicator::");
        let work = || Work::new(Activity::Collective, name, Some(moved()), Some(caller));
        let open = match is_grouped {
            true => group::record(backend.recorder(), backend, stream.0.id, work).map(|()| None)?,
            false => recorder::begin(backend, stream.0.id, work)?,
        };
        // The memory was checked to be the device's, and is freed after the stream's work; the callers checked the lengths.
        let done = self.handle.call(what, |nccl, comm| call(nccl, comm, raw));
        done.and(open.map_or(Ok(()), |open| recorder::end(backend, open)))
    }

    fn check_dtype(&self, what: &'static str, dtype: DType) -> Result<()> {
        check_reducible(what, dtype, &Nccl::load()?.version, self.device.capability())
    }

    fn peer(&self, what: &'static str, rank: Rank) -> Result<c_int> {
        let world = self.handle.world.get();
        if rank.index() < world {
            return Ok(rank.index() as c_int);
        }
        Err(Error::Invalid { what, why: format!("{rank} is not of this world, which has ranks 0 to {}", world - 1) })
    }

    /// Fails unless `whole` is one `shard` of every rank.
    fn check_whole(&self, what: &'static str, shard: u64, whole: u64) -> Result<()> {
        let expected = shard.checked_mul(u64::from(self.handle.world.get()));
        if expected == Some(whole) { Ok(()) } else { Err(Error::Length { what, expected: expected.unwrap_or(u64::MAX), found: whole }) }
    }
}

/// `ncclUint8`, also for bytes of any meaning.
const U8: c_int = 1;

/// The number of an element type in `ncclDataType_t`.
fn data_type(of: DType) -> c_int {
    match of {
        DType::I8 => 0,
        DType::U8 => U8,
        DType::I32 => 2,
        DType::U32 => 3,
        DType::I64 => 4,
        DType::U64 => 5,
        DType::F16 => 6,
        DType::F32 => 7,
        DType::F64 => 8,
        DType::Bf16 => 9,
        DType::E4m3 => 10,
        DType::E5m2 => 11,
    }
}

/// Fails for a type that this NCCL, or its device, does not reduce: 8-bit floats came with 2.24, for compute capability 9.0 (NCCL release notes;
/// `ncclInvalidArgument` on older devices).
fn check_reducible(what: &'static str, dtype: DType, version: &NcclVersion, capability: (u32, u32)) -> Result<()> {
    let why = match dtype {
        DType::E4m3 | DType::E5m2 if version.number < (2, 24, 0) => {
            format!("{version} does not reduce {dtype:?}: take 2.24 or newer, or reduce in bf16")
        }
        DType::E4m3 | DType::E5m2 if capability < (9, 0) => {
            format!("NCCL reduces {dtype:?} on devices of compute capability 9.0 or newer, this one has {}.{}", capability.0, capability.1)
        }
        _ => return Ok(()),
    };
    Err(Error::Invalid { what, why })
}

/// The number of an operator in `ncclRedOp_t`.
fn operator(op: ReduceOp) -> c_int {
    match op {
        ReduceOp::Sum => 0,
        ReduceOp::Max => 2,
    }
}

/// One end of a message: address, bytes, peer.
enum Message {
    Send(*const c_void, usize, c_int),
    Receive(*mut c_void, usize, c_int),
}

/// Enqueues messages as one group, which is ended whatever happens. Returns the first code that is not success.
///
/// # Safety
/// The communicator and the stream are live, the peers of its world, and the memory there until the stream's work is done.
unsafe fn transfer(messages: impl IntoIterator<Item = Message>, nccl: &Functions, comm: Comm, stream: CudaStream) -> c_int {
    // SAFETY: the caller vouches for all of it.
    let one = |message| unsafe {
        match message {
            Message::Send(from, bytes, to) => (nccl.send)(from, bytes, U8, to, comm, stream),
            Message::Receive(to, bytes, from) => (nccl.receive)(to, bytes, U8, from, comm, stream),
        }
    };
    // SAFETY: no arguments; the end follows.
    let start = unsafe { (nccl.group_start)() };
    let first = messages.into_iter().map(one).find(|code| *code != SUCCESS).unwrap_or(SUCCESS);
    // SAFETY: no arguments; the start came before.
    let end = unsafe { (nccl.group_end)() };
    [start, first, end].into_iter().find(|code| *code != SUCCESS).unwrap_or(SUCCESS)
}

/// Where an operand lies; null for one of an empty buffer.
fn address(operand: &Operand) -> *mut c_void {
    ptr::with_exposed_provenance_mut(operand.address as usize)
}

/// How many `T` an operand has.
fn count<T>(operand: &Operand) -> Result<usize> {
    let bytes = operand.bytes / size_of::<T>().max(1) as u64;
    usize::try_from(bytes).map_err(|_| Error::TooLarge { what: "NcclCommunicator", count: operand.bytes, element_bytes: 1 })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn eight_bit_floats_need_a_library_and_a_device_that_reduce_them() {
        let version = |minor| NcclVersion { number: (2, minor, 3), library: "libnccl.so.2".to_owned() };
        for dtype in [DType::E4m3, DType::E5m2] {
            check_reducible("call", dtype, &version(24), (9, 0)).unwrap();
            check_reducible("call", dtype, &version(30), (10, 0)).unwrap();
            let error = check_reducible("call", dtype, &version(23), (9, 0)).unwrap_err().to_string();
            assert!(error.starts_with("call: NCCL 2.23.3 (libnccl.so.2) does not reduce E"), "{error}");
            assert!(check_reducible("call", dtype, &version(24), (8, 9)).unwrap_err().to_string().contains("this one has 8.9"));
        }
        check_reducible("call", DType::Bf16, &version(18), (8, 0)).unwrap();
    }

    /// `ncclDataType_t` of nccl.h 2.24.
    #[test]
    fn types_have_their_numbers() {
        use DType::{Bf16, E4m3, E5m2, F16, F32, F64, I8, I32, I64, U8, U32, U64};
        let all = [I8, U8, I32, U32, I64, U64, F16, F32, F64, Bf16, E4m3, E5m2];
        assert!(all.iter().map(|dtype| data_type(*dtype)).eq(0..12));
    }
}
