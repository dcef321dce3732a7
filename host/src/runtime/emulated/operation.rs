//! What waits in the queue of an emulated stream, and how it is done.

use std::alloc::Layout;
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use std::time::Instant;

use oxtile_emulator::{GridRun, Launch, Memory, MemoryError, Options, Report};
use oxtile_tile::flag::POISON;
use oxtile_tile::launch::{Meanwhile, ParameterName};

use super::clock::Clock;
use super::collective::Part;
use super::extent::Extent;
use super::sanitizer::{Access, Kind};
use super::schedule::Graph;
use crate::runtime::backend::{Caller, Copy, Direction};
use crate::runtime::error::{Error, Result};
use crate::runtime::runtime::lock;

/// A piece of work in a queue. A value, so that a captured graph can do it again.
#[derive(Clone)]
pub(super) struct Entry {
    pub operation: Operation,
    /// What the host had waited for when it enqueued the work.
    pub host: Arc<Clock>,
    pub caller: Option<Caller>,
    /// How many operations the cluster had done when it was enqueued.
    pub step: u64,
    /// How many were enqueued before it.
    pub number: u64,
}

/// A launch and the memory that its arguments name.
pub(super) struct Launched {
    pub launch: Launch,
    pub uses: Vec<Use>,
    /// The part of a multiprocessor that a block takes.
    pub share: u64,
    /// What its threads poll, if nothing has answered them: it goes on when a flag or a slot was written.
    pub blocked: Mutex<Option<String>>,
}

/// Memory that an argument of a launch names.
pub(super) struct Use {
    pub address: u64,
    pub bytes: u64,
    pub writes: bool,
    pub meanwhile: Meanwhile,
    pub parameter: ParameterName,
}

/// What there is to do.
#[derive(Clone)]
pub(super) enum Operation {
    Launch(Arc<Launched>),
    Copy(Copy),
    Fill {
        address: u64,
        byte: u8,
        bytes: u64,
    },
    /// Words that the operation itself holds.
    WriteWords {
        address: u64,
        words: Arc<[u64]>,
    },
    /// What is there is not needed any more.
    Discard {
        address: u64,
        bytes: u64,
    },
    Free {
        address: u64,
    },
    FreeHost {
        address: u64,
        bytes: u64,
    },
    Record(Arc<Mark>),
    Wait(Arc<Mark>),
    Replay(Arc<Graph>),
    WriteValue {
        address: u64,
        value: u64,
    },
    WaitValue {
        address: u64,
        value: u64,
    },
    /// A rank comes to a collective and brings its data,
    Arrive(Arc<Part>),
    /// and goes on with the result once all are there.
    Leave(Arc<Part>),
}

/// One record of an event: done once the stream reached it.
pub(super) struct Mark {
    /// The stream that records it.
    pub stream: u64,
    /// The capture that it was recorded in.
    pub capture: Option<u64>,
    reached: Mutex<Option<(Instant, Clock)>>,
}

impl Mark {
    pub fn new(stream: u64, capture: Option<u64>) -> Arc<Self> {
        Arc::new(Self { stream, capture, reached: Mutex::new(None) })
    }

    pub fn reached_at_start(stream: u64) -> Arc<Self> {
        Arc::new(Self { stream, capture: None, reached: Mutex::new(Some((Instant::now(), Clock::default()))) })
    }

    pub fn is_reached(&self) -> bool {
        lock(&self.reached).is_some()
    }

    pub fn instant(&self) -> Option<Instant> {
        lock(&self.reached).as_ref().map(|(instant, _)| *instant)
    }

    pub fn reach(&self, clock: &Clock) {
        *lock(&self.reached) = Some((Instant::now(), clock.clone()));
    }

    pub fn reset(&self) {
        *lock(&self.reached) = None;
    }

    /// Adds what had happened when it was reached.
    pub fn join_into(&self, clock: &mut Clock) {
        if let Some((_, reached)) = &*lock(&self.reached) {
            clock.join(reached);
        }
    }
}

impl Operation {
    /// Whether the queue may go on to it.
    pub fn is_ready(&self, memory: &Memory) -> bool {
        match self {
            Self::WaitValue { address, value } => is_at_least(memory, *address, *value),
            Self::Wait(mark) => mark.is_reached(),
            Self::Replay(graph) => graph.is_idle(),
            Self::Leave(part) => part.all_are_there(),
            Self::Launch(launched) => lock(&launched.blocked).is_none(),
            _ => true,
        }
    }

    /// Whether its order among other queues matters to anything but races.
    pub fn is_visible(&self) -> bool {
        match self {
            Self::Launch(launched) => launched.may_poll(),
            _ => matches!(self, Self::WriteValue { .. } | Self::WaitValue { .. } | Self::Arrive(_) | Self::Leave(_)),
        }
    }

    pub fn is_launch(&self) -> bool {
        matches!(self, Self::Launch(_))
    }

    /// The address and value of the word that it writes.
    pub fn written_word(&self) -> Option<(u64, u64)> {
        if let Self::WriteValue { address, value } = self { Some((*address, *value)) } else { None }
    }

    /// Whether it gives memory back.
    pub fn is_free(&self) -> bool {
        matches!(self, Self::Free { .. } | Self::FreeHost { .. })
    }

    /// Whether something may have to come after it: a use of memory. Freed memory is gone for every stream, and the rest passes on what others know.
    pub fn has_time(&self) -> bool {
        !(self.is_free() || matches!(self, Self::Record(_) | Self::Wait(_) | Self::Replay(_)))
    }

    /// What keeps a queue from going on, for the report of a deadlock.
    pub fn waits_for(&self) -> String {
        match self {
            Self::Wait(_) => "an event that nothing records".to_owned(),
            Self::Replay(_) => "the graph's replay before".to_owned(),
            Self::Leave(part) => part.missing(),
            Self::WaitValue { address, value } => format!("a signal of at least {value} at {address:#x}"),
            Self::Launch(launched) => {
                let polled = lock(&launched.blocked).clone().unwrap_or_default();
                format!("flags that kernel `{}` polls:{polled}", launched.launch.kernel)
            }
            _ => "nothing".to_owned(),
        }
    }

    /// Does what touches memory alone; the rest is the scheduler's.
    pub fn execute(&self, memory: &Arc<Memory>, options: Options) -> Result<()> {
        match self {
            Self::Launch(launched) => launched.run(memory, options).map(drop),
            Self::Copy(bytes) => copy(memory, *bytes),
            Self::Fill { address, byte, bytes } => fill(memory, *address, *byte, *bytes),
            Self::WriteWords { address, words } => {
                memory.write(*address, &words.iter().flat_map(|word| word.to_le_bytes()).collect::<Vec<_>>()).map_err(misuse)
            }
            Self::Discard { address, bytes } => memory.discard(*address, *bytes).map_err(misuse),
            Self::Free { address } => memory.free(*address).map_err(misuse),
            Self::FreeHost { address, bytes } => {
                free_host(*address, *bytes);
                Ok(())
            }
            Self::WriteValue { address, value } => memory.write(*address, &value.to_le_bytes()).map_err(misuse),
            Self::Record(_) | Self::Wait(_) | Self::Replay(_) | Self::Arrive(_) | Self::Leave(_) | Self::WaitValue { .. } => Ok(()),
        }
    }

    /// The memory that it uses.
    pub fn accesses(&self, memory: &Memory) -> Vec<Access> {
        let of = |extent, kind, what: &'static str| Access { extent, kind, on_host: false, what: what.into() };
        let access = |address, bytes, kind, what| of(Extent::range(address, bytes), kind, what);
        let on_host = |access, on_host| Access { on_host, ..access };
        match self {
            Self::Launch(launched) => launched.accesses(),
            Self::Copy(copy) => vec![
                on_host(of(source_of(copy), Kind::Read, "a copy reads"), copy.direction == Direction::HostToDevice),
                on_host(of(target_of(copy), Kind::Write, "a copy writes"), matches!(copy.direction, Direction::DeviceToHost { .. })),
            ],
            Self::Fill { address, bytes, .. } => vec![access(*address, *bytes, Kind::Write, "a fill writes")],
            Self::WriteWords { address, words } => {
                vec![access(*address, size_of_val(&**words) as u64, Kind::Write, "words are written")]
            }
            Self::Discard { address, bytes } => vec![access(*address, *bytes, Kind::Write, "it is discarded")],
            Self::Free { address } => {
                let bytes = memory.find(*address).map_or(0, |found| found.bytes);
                vec![access(*address, bytes, Kind::Free, "it is freed")]
            }
            Self::FreeHost { address, bytes } => vec![on_host(access(*address, *bytes, Kind::Free, "it is freed"), true)],
            // A rank that another rank no longer waits for may be late.
            Self::WriteValue { value, .. } if *value >= POISON => Vec::new(),
            Self::WriteValue { address, .. } => vec![access(*address, 8, Kind::SignalWrite, "a signal is written")],
            Self::WaitValue { address, .. } => vec![access(*address, 8, Kind::SignalWait, "a signal is waited for")],
            Self::Arrive(part) | Self::Leave(part) => part.accesses(),
            Self::Record(_) | Self::Wait(_) | Self::Replay(_) => Vec::new(),
        }
    }
}

impl Use {
    /// Whether other streams and kernels use it meanwhile, by words at system scope.
    pub fn is_strong(&self) -> bool {
        self.meanwhile != Meanwhile::Nothing
    }

    /// Whether these are flags.
    pub fn are_flags(&self) -> bool {
        self.meanwhile == Meanwhile::Flags
    }
}

impl Launched {
    /// Runs the kernel to its end.
    pub fn run(&self, memory: &Arc<Memory>, options: Options) -> Result<Report> {
        Ok(GridRun::new(memory, self.launch.clone(), options)?.run()?)
    }

    /// Whether it polls flags or slots, or sets them.
    pub fn may_poll(&self) -> bool {
        self.uses.iter().any(Use::is_strong)
    }

    pub fn accesses(&self) -> Vec<Access> {
        let access = |used: &Use| {
            let &Use { address, bytes, writes, parameter, .. } = used;
            let (kind, verb) = match (used.is_strong(), writes) {
                (true, _) => (Kind::SignalWait, "polls or sets"),
                (false, true) => (Kind::Write, "writes"),
                (false, false) => (Kind::Read, "reads"),
            };
            Access {
                extent: Extent::range(address, bytes),
                kind,
                on_host: false,
                what: format!("kernel `{}` {verb} `{parameter}`", self.launch.kernel).into(),
            }
        };
        self.uses.iter().map(access).collect()
    }
}

/// The word now, if it is there.
pub(super) fn word(memory: &Memory, address: u64) -> Option<u64> {
    let mut bytes = [0; 8];
    memory.read(address, &mut bytes).ok().map(|()| u64::from_le_bytes(bytes))
}

/// A word that is gone delays nothing: what follows reports it.
fn is_at_least(memory: &Memory, address: u64, value: u64) -> bool {
    word(memory, address).is_none_or(|word| word.wrapping_sub(value).cast_signed() >= 0)
}

fn copy(memory: &Memory, copy: Copy) -> Result<()> {
    let bytes = copy.bytes as usize;
    match copy.direction {
        Direction::HostToDevice => {
            let source = std::ptr::with_exposed_provenance::<u8>(copy.source as usize);
            // SAFETY: the runtime keeps the host memory alive and unwritten until the copy is done: it waits for
            // pageable slices, and a pinned buffer is freed in stream order and waits before the host writes it.
            memory.write(copy.target, unsafe { std::slice::from_raw_parts(source, bytes) })
        }
        Direction::DeviceToHost { .. } => {
            let target = std::ptr::with_exposed_provenance_mut::<u8>(copy.target as usize);
            // SAFETY: as above, and nothing else reads it until the copy is done.
            memory.read(copy.source, unsafe { std::slice::from_raw_parts_mut(target, bytes) })
        }
        Direction::DeviceToDevice => (0..copy.rows.count).try_for_each(|row| {
            let (target, source) = (copy.target + row * copy.rows.target_pitch, copy.source + row * copy.rows.source_pitch);
            memory.copy(target, source, copy.bytes)
        }),
    }
    .map_err(misuse)
}

/// What a copy writes.
fn target_of(copy: &Copy) -> Extent {
    Extent::rows(copy.target, copy.bytes, copy.rows.count, copy.rows.target_pitch)
}

/// What a copy reads.
fn source_of(copy: &Copy) -> Extent {
    Extent::rows(copy.source, copy.bytes, copy.rows.count, copy.rows.source_pitch)
}

/// Refuses a copy to the host of bytes that nothing wrote. `given` says to which kernels memory was last given, by its address.
pub(super) fn check_written(memory: &Memory, copy: &Copy, given: &BTreeMap<u64, String>) -> Result<()> {
    let Direction::DeviceToHost { element_bytes } = copy.direction else { return Ok(()) };
    let Some(byte) = memory.first_unwritten(copy.source, copy.bytes).map_err(misuse)? else { return Ok(()) };
    let found = memory.find(copy.source);
    let given = found.as_ref().and_then(|found| given.get(&(copy.source - found.offset))).cloned().unwrap_or_default();
    let buffer = found.map_or_else(String::new, |found| found.name);
    Err(Error::Unwritten { buffer, element: byte / element_bytes, elements: copy.bytes / element_bytes, given, at: copy.caller })
}

fn fill(memory: &Memory, address: u64, byte: u8, bytes: u64) -> Result<()> {
    let piece = vec![byte; bytes.min(PIECE) as usize];
    let mut offsets = (0..bytes).step_by(PIECE as usize);
    let write = |offset: u64| memory.write(address + offset, &piece[..(bytes - offset).min(PIECE) as usize]);
    offsets.try_for_each(write).map_err(misuse)
}

/// Bytes that a fill handles at once.
const PIECE: u64 = 1 << 20;

/// The emulator's memory disagrees with the runtime's bookkeeping.
pub(super) fn misuse(error: MemoryError) -> Error {
    Error::Invalid { what: "emulated memory", why: error.to_string() }
}

fn host_layout(bytes: u64) -> Result<Layout> {
    let layout = usize::try_from(bytes).ok().and_then(|bytes| Layout::from_size_align(bytes.max(1), 4096).ok());
    layout.ok_or(Error::TooLarge { what: "PinnedBuffer", count: bytes, element_bytes: 1 })
}

/// Fails where so many bytes are not to be had: an allocation of the emulator that fails would end the process.
pub(super) fn check_memory(bytes: u64) -> Result<()> {
    /// Less is taken to be there.
    const LARGE: u64 = 1 << 30;
    let is_there = bytes < LARGE || usize::try_from(bytes).is_ok_and(|bytes| Vec::<u8>::new().try_reserve_exact(bytes).is_ok());
    if is_there { Ok(()) } else { Err(Error::Invalid { what: "Buffer", why: format!("{bytes} bytes of memory are not to be had") }) }
}

pub(super) fn allocate_host(bytes: u64) -> Result<u64> {
    let layout = host_layout(bytes)?;
    // SAFETY: the layout's size is not zero.
    let pointer = unsafe { std::alloc::alloc(layout) };
    if pointer.is_null() {
        return Err(Error::Invalid { what: "PinnedBuffer", why: format!("{bytes} bytes of host memory are not to be had") });
    }
    Ok(pointer.expose_provenance() as u64)
}

fn free_host(address: u64, bytes: u64) {
    if let Ok(layout) = host_layout(bytes) {
        // SAFETY: `allocate_host` returned this address for this many bytes; the runtime frees each once.
        unsafe { std::alloc::dealloc(std::ptr::with_exposed_provenance_mut(address as usize), layout) };
    }
}
