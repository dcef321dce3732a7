//! A stand-in for the library whose ranks are the threads that call it: its addresses name rank and place, and there is no memory at them.

use std::cell::Cell;
use std::ffi::{c_int, c_uint, c_void};
use std::ptr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use super::super::Step;
use super::library::{Attributes, Functions, INITIALIZED, UniqueId, WITH_UNIQUE_ID};
use super::world::{Enter, Heap, Request, World};
use crate::bootstrap::board::LocalBoard;
use crate::comm::{Board, Meeting, Rank, WorldSize};
use crate::rank::SymmetricError;
use crate::runtime::{Error, Result};

thread_local! {
    static RANK: Cell<Option<c_int>> = const { Cell::new(None) };
}
static FREED: AtomicU32 = AtomicU32::new(0);

/// Sizes that it refuses: too many bytes, a call that never returns, memory that a peer does not reach.
const TOO_MANY: u64 = 1 << 30;
const ENDLESS: u64 = TOO_MANY + 1;
const UNREACHED: u64 = 3 << 12;

unsafe extern "C" fn version(_: *mut c_int, _: *mut c_int, _: *mut c_int) {}

unsafe extern "C" fn get_unique_id(id: *mut UniqueId) -> c_int {
    // SAFETY: the caller gives a valid place.
    unsafe { *id = UniqueId::from_bytes([7; UniqueId::BYTES]) };
    0
}

unsafe extern "C" fn set_unique_id(rank: c_int, ranks: c_int, id: *const UniqueId, attributes: *mut Attributes) -> c_int {
    // SAFETY: the caller gives an id and attributes.
    unsafe {
        assert_eq!((*id).bytes(), &[7; UniqueId::BYTES], "the id is rank 0's");
        (*attributes).set(rank, ranks, id);
    }
    0
}

unsafe extern "C" fn init(flags: c_uint, attributes: *mut Attributes) -> c_int {
    // SAFETY: the caller gives attributes.
    let rank = unsafe { (*attributes).rank() };
    let is_first = RANK.replace(Some(rank)).is_none();
    if flags == WITH_UNIQUE_ID && is_first { 0 } else { 7 }
}

/// The address of a rank's memory, with the size as the place.
fn address(rank: c_int, bytes: u64) -> *mut c_void {
    ptr::without_provenance_mut((rank as usize + 1) << 40 | bytes as usize)
}

unsafe extern "C" fn malloc(bytes: usize) -> *mut c_void {
    let rank = RANK.get().expect("it was initialised on this thread");
    match bytes as u64 {
        TOO_MANY => ptr::null_mut(),
        ENDLESS => loop {
            std::thread::park();
        },
        bytes => address(rank, bytes),
    }
}

unsafe extern "C" fn free(_: *mut c_void) {
    FREED.fetch_add(1, Ordering::AcqRel);
}

unsafe extern "C" fn pointer(own: *const c_void, rank: c_int) -> *mut c_void {
    let bytes = own.addr() as u64 & ((1 << 40) - 1);
    // One thread makes all calls.
    if bytes == UNREACHED || RANK.get().is_none() { ptr::null_mut() } else { address(rank, bytes) }
}

unsafe extern "C" fn initialised() -> c_int {
    INITIALIZED
}

/// What 3.3 and 3.4 leave where there is no device: they report success, but nothing can be allocated.
unsafe extern "C" fn half_way() -> c_int {
    INITIALIZED - 1
}

const WORKING: Functions = Functions { version, get_unique_id, set_unique_id, init, status: initialised, malloc, free, ptr: pointer };
static FUNCTIONS: Functions = WORKING;
static WITHOUT_A_DEVICE: Functions = Functions { status: half_way, ..WORKING };

/// A process's world, not joined yet.
pub fn leaked() -> &'static World {
    Box::leak(Box::new(World::new(&FUNCTIONS, "a stand-in".to_owned()).unwrap()))
}

fn enter() -> Enter {
    Arc::new(|| Ok(()))
}

fn open(world: &World, meeting: &Meeting, bytes: u64) -> Result<Heap> {
    let request = Request { bytes, device: meeting.rank().index(), deadline: Duration::from_secs(5), enter: enter() };
    let heap = world.open(meeting, &request, |_| Ok(())).inspect_err(|error| meeting.give_up(&error.to_string()))?;
    assert_eq!(heap.peers[meeting.rank().index() as usize], heap.own);
    Ok(heap)
}

/// Two processes, a thread each, whose worlds `world` makes.
fn ranks<R: Send>(world: impl Fn(Rank) -> Arc<World>, body: impl Fn(&World, &dyn Fn(&str) -> Meeting) -> R + Sync) -> Vec<R> {
    let (size, board) = (WorldSize::new(2).unwrap(), Arc::new(LocalBoard::default()));
    let (body, board) = (&body, &board);
    std::thread::scope(|scope| {
        let rank = |rank: Rank| {
            let world = world(rank);
            scope.spawn(move || body(&world, &|name| Meeting::new(Arc::clone(board) as Arc<dyn Board>, rank, size, name)))
        };
        let threads: Vec<_> = size.ranks().map(rank).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

fn process(version: &str) -> Arc<World> {
    Arc::new(World::new(&FUNCTIONS, version.to_owned()).unwrap())
}

#[test]
fn ranks_join_once_and_reach_each_other() {
    let before = FREED.load(Ordering::Acquire);
    let heaps = ranks(
        |_| process("3.8.0"),
        |world, meeting| {
            // The second time a process does not join again.
            ["arena 0", "arena 1"].map(|name| {
                let heap = open(world, &meeting(name), 1 << 12).unwrap();
                world.close(&heap, Duration::from_secs(5), enter()).unwrap();
                heap.peers
            })
        },
    );
    let expected: Vec<u64> = (1..3).map(|rank| rank << 40 | 1 << 12).collect();
    assert!(heaps.iter().flatten().all(|peers| *peers == expected), "{heaps:?}");
    assert_eq!(FREED.load(Ordering::Acquire), before + 4);
}

#[test]
fn what_is_not_there_is_named_on_every_rank() {
    for error in ranks(|_| process("3.8.0"), |world, meeting| open(world, &meeting("arena"), TOO_MANY).unwrap_err()) {
        let Error::Symmetric(SymmetricError::Step { rank, step: Step::Create, why }) = &error else { panic!("{error}") };
        assert!(*rank == Rank::ZERO && why.contains("NVSHMEM_SYMMETRIC_SIZE"), "{error}");
    }
    for error in ranks(|_| process("3.8.0"), |world, meeting| open(world, &meeting("arena"), UNREACHED).unwrap_err()) {
        assert!(error.to_string().contains("does not reach the memory of rank"), "{error}");
    }
}

#[test]
fn versions_that_differ_are_an_error_of_all() {
    let version = |rank: Rank| process(["3.8.0", "3.4.5"][rank.index() as usize]);
    for error in ranks(version, |world, meeting| open(world, &meeting("arena"), 1 << 12).unwrap_err()) {
        assert!(matches!(&error, Error::Symmetric(SymmetricError::Rendezvous { .. })), "{error}");
        assert!(error.to_string().contains("3.8.0") && error.to_string().contains("3.4.5"), "{error}");
    }
}

/// To allocate then would end the process.
#[test]
fn a_device_that_could_not_be_had_is_an_error() {
    let world = |_| Arc::new(World::new(&WITHOUT_A_DEVICE, "3.4.5".to_owned()).unwrap());
    for error in ranks(world, |world, meeting| open(world, &meeting("arena"), 1 << 12).unwrap_err()) {
        assert!(error.to_string().contains("nvshmemx_init_status failed with code 1"), "{error}");
    }
}

#[test]
fn a_process_is_one_rank() {
    let one = process("3.8.0");
    let errors = ranks(|_| Arc::clone(&one), |world, meeting| open(world, &meeting("arena"), 1 << 12).unwrap_err().to_string());
    assert!(errors.iter().any(|error| error.contains("start a process a rank")), "{errors:?}");
}

#[test]
fn an_allocation_that_hangs_ends_by_the_deadline() {
    let errors = ranks(
        |_| process("3.8.0"),
        |world, meeting| {
            let (meeting, deadline) = (meeting("arena"), Duration::from_millis(300));
            let request = Request { bytes: ENDLESS, device: 0, deadline, enter: enter() };
            world.open(&meeting, &request, |_| Ok(())).unwrap_err()
        },
    );
    assert!(errors.iter().all(|error| matches!(error, Error::Deadline { .. })), "{errors:?}");
}
