//! The collectives, as NCCL enqueues them.

use std::ffi::{c_int, c_void};
use std::panic::Location;
use std::ptr;
use std::sync::Arc;

use oxtile_tile::num::Pod;

use super::communicator::NcclCommunicator;
use super::library::{Comm, CudaStream, Functions, Nccl, NcclVersion, SUCCESS};
use crate::comm::group;
use crate::comm::{Communicator, DType, Rank, ReduceOp, Reducible, WorldSize};
use crate::recording::{Activity, Work};
use crate::runtime::emulated::{Call, Reduction};
use crate::runtime::{Buffer, Error, Memory, Result, Stream, lock, order, recorder};

impl Communicator for NcclCommunicator {
    fn rank(&self) -> Rank {
        self.handle.rank
    }

    fn world(&self) -> WorldSize {
        self.handle.world
    }

    fn all_reduce<T: Reducible>(&self, stream: &Stream, buffer: &mut Buffer<T>, op: ReduceOp) -> Result<()> {
        self.check_dtype("Communicator::all_reduce", T::DTYPE)?;
        let (at, count) = (address(buffer), count(buffer)?);
        let call = Call::AllReduce { reduction: Reduction { op, dtype: T::DTYPE }, bytes: byte_count(buffer)? as u64 };
        self.enqueue(stream, "Communicator::all_reduce", Some(call), &[], &[buffer.memory()], |nccl, comm, stream| {
            // SAFETY: `enqueue` vouches for the memory, the stream and the communicator.
            unsafe { (nccl.all_reduce)(at, at, count, data_type(T::DTYPE), operator(op), comm, stream) }
        })
    }

    fn all_gather<T: Pod>(&self, stream: &Stream, shard: &Buffer<T>, output: &mut Buffer<T>) -> Result<()> {
        const WHAT: &str = "Communicator::all_gather";
        self.check_whole(WHAT, shard.len(), output.len())?;
        let (from, to, bytes) = (address(shard), address(output), byte_count(shard)?);
        let call = Call::AllGather { shard_bytes: bytes as u64 };
        self.enqueue(stream, WHAT, Some(call), &[shard.memory()], &[output.memory()], |nccl, comm, stream| {
            // SAFETY: `enqueue` vouches for the memory, the stream and the communicator.
            unsafe { (nccl.all_gather)(from, to, bytes, U8, comm, stream) }
        })
    }

    fn reduce_scatter<T: Reducible>(&self, stream: &Stream, input: &Buffer<T>, shard: &mut Buffer<T>, op: ReduceOp) -> Result<()> {
        const WHAT: &str = "Communicator::reduce_scatter";
        self.check_dtype(WHAT, T::DTYPE)?;
        self.check_whole(WHAT, shard.len(), input.len())?;
        let (from, to, count) = (address(input), address(shard), count(shard)?);
        let call = Call::ReduceScatter { reduction: Reduction { op, dtype: T::DTYPE }, shard_bytes: byte_count(shard)? as u64 };
        self.enqueue(stream, WHAT, Some(call), &[input.memory()], &[shard.memory()], |nccl, comm, stream| {
            // SAFETY: `enqueue` vouches for the memory, the stream and the communicator.
            unsafe { (nccl.reduce_scatter)(from, to, count, data_type(T::DTYPE), operator(op), comm, stream) }
        })
    }

    fn broadcast<T: Pod>(&self, stream: &Stream, buffer: &mut Buffer<T>, root: Rank) -> Result<()> {
        const WHAT: &str = "Communicator::broadcast";
        let (from, at, bytes) = (self.peer(WHAT, root)?, address(buffer), byte_count(buffer)?);
        let call = Call::Broadcast { root, bytes: bytes as u64 };
        self.enqueue(stream, WHAT, Some(call), &[], &[buffer.memory()], |nccl, comm, stream| {
            // SAFETY: `enqueue` vouches for the memory, the stream and the communicator.
            unsafe { (nccl.broadcast)(at, at, bytes, U8, from, comm, stream) }
        })
    }

    fn all_to_all<T: Pod>(&self, stream: &Stream, input: &Buffer<T>, output: &mut Buffer<T>) -> Result<()> {
        const WHAT: &str = "Communicator::all_to_all";
        let world = self.handle.world.get() as usize;
        self.check_whole(WHAT, input.len() / world as u64, input.len())?;
        self.check_whole(WHAT, input.len() / world as u64, output.len())?;
        let (from, to, part) = (address(input), address(output), byte_count(input)? / world);
        let messages = (0..world).flat_map(|peer| {
            let at = peer * part;
            // Within the buffers: there are as many parts as ranks.
            [
                Message::Send(from.wrapping_byte_add(at), part, peer as c_int),
                Message::Receive(to.wrapping_byte_add(at), part, peer as c_int),
            ]
        });
        let call = Call::AllToAll { bytes: byte_count(input)? as u64 };
        self.enqueue(stream, WHAT, Some(call), &[input.memory()], &[output.memory()], |nccl, comm, stream| {
            // SAFETY: `enqueue` vouches for the memory, the stream and the communicator.
            unsafe { transfer(messages, nccl, comm, stream) }
        })
    }

    fn exchange<T: Pod>(&self, stream: &Stream, sends: &[(Rank, &Buffer<T>)], receives: &mut [(Rank, &mut Buffer<T>)]) -> Result<()> {
        const WHAT: &str = "Communicator::exchange";
        let mut messages = Vec::with_capacity(sends.len() + receives.len());
        for (to, buffer) in sends {
            messages.push(Message::Send(address(buffer), byte_count(buffer)?, self.peer(WHAT, *to)?));
        }
        for (from, buffer) in receives.iter() {
            messages.push(Message::Receive(address(buffer), byte_count(buffer)?, self.peer(WHAT, *from)?));
        }
        let reads: Vec<_> = sends.iter().map(|(_, buffer)| buffer.memory()).collect();
        let writes: Vec<_> = receives.iter().map(|(_, buffer)| buffer.memory()).collect();
        self.enqueue(stream, WHAT, None, &reads, &writes, |nccl, comm, stream| {
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
    fn barrier(&self, stream: &Stream) -> Result<()> {
        self.all_reduce(stream, &mut lock(&self.token), ReduceOp::Max)
    }
}

impl NcclCommunicator {
    /// Orders a call after the other uses of what it reads and writes, and makes it.
    #[track_caller]
    fn enqueue(
        &self,
        stream: &Stream,
        what: &'static str,
        compared: Option<Call>,
        reads: &[&Arc<Memory>],
        writes: &[&Arc<Memory>],
        call: impl FnOnce(&Functions, Comm, CudaStream) -> c_int,
    ) -> Result<()> {
        self.check_stream(stream, what)?;
        reads.iter().chain(writes).try_for_each(|memory| memory.check_stream(&stream.0, what))?;
        let uses = reads.iter().map(|memory| (*memory, false)).chain(writes.iter().map(|memory| (*memory, true)));
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
        order(&stream.0, |wait_for| {
            reads.iter().for_each(|memory| memory.add_use(&stream.0, false, wait_for));
            writes.iter().for_each(|memory| memory.add_use(&stream.0, true, wait_for));
        })?;
        let (backend, caller) = (&*stream.0.runtime.backend, Location::caller());
        stream.0.note(what, Some(caller));
        let moved = || if writes.is_empty() { reads } else { writes }.iter().map(|memory| memory.bytes).sum();
        let name = what.trim_start_matches("Communicator::");
        let work = || Work::new(Activity::Collective, name, Some(moved()), Some(caller));
        let open = match is_grouped {
            true => group::record(backend.recorder(), backend, stream.0.id, work).map(|()| None)?,
            false => recorder::begin(backend, stream.0.id, work)?,
        };
        // The memory was checked to be the device's, and is freed behind the stream's work; the callers checked the lengths.
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

/// `ncclUint8`, which also carries bytes of any meaning.
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

/// Enqueues messages as one group, which is ended whatever happens; the first code that is not success.
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

/// Where a buffer lies; null for an empty one.
fn address<T: Pod>(buffer: &Buffer<T>) -> *mut c_void {
    ptr::with_exposed_provenance_mut(buffer.address() as usize)
}

fn count<T: Pod>(buffer: &Buffer<T>) -> Result<usize> {
    usize::try_from(buffer.len()).map_err(|_| too_large(buffer))
}

fn byte_count<T: Pod>(buffer: &Buffer<T>) -> Result<usize> {
    count(buffer)?.checked_mul(size_of::<T>()).ok_or_else(|| too_large(buffer))
}

fn too_large<T: Pod>(buffer: &Buffer<T>) -> Error {
    Error::TooLarge { what: "NcclCommunicator", count: buffer.len(), element_bytes: size_of::<T>() as u64 }
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
