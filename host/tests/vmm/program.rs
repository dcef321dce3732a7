//! What the ranks do with their memory, and a driver that fails where it is told to.

use std::fs;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use oxtile::comm::bootstrap::StoreBoard;
use oxtile::comm::{Meeting, Rank};
use oxtile::symmetric::vmm::{Driver, FlatOptions, FlatView, Handle, Memfd};
use oxtile::{Error, Result};

pub const DEADLINE: Duration = Duration::from_secs(3);
/// The deadline of what nothing delays.
pub const PATIENCE: Duration = Duration::from_secs(10);

/// Two hundred words, so that the size is not a multiple of the granularity.
const WORDS: u64 = 200;

pub fn options() -> FlatOptions {
    FlatOptions { bytes: 8 * WORDS, layout: 7, share_devices: false, deadline: DEADLINE }
}

/// A device that no other rank has.
pub fn device(rank: Rank) -> [u8; 16] {
    [rank.index() as u8; 16]
}

/// What happens at a call of the driver.
pub type Fault = Box<dyn Fn() -> Result<()> + Send + Sync>;

/// [`Memfd`] with a fault at one call: `create`, `export` (when the descriptor is there), `map` (the first one of another rank's memory).
pub struct Faulty {
    memory: Memfd,
    call: String,
    fault: Fault,
    maps: AtomicU32,
}

impl Faulty {
    pub fn new(device: [u8; 16], call: &str, fault: Fault) -> Self {
        Self { memory: Memfd::new(device), call: call.to_owned(), fault, maps: AtomicU32::new(0) }
    }

    fn at(&self, call: &str) -> Result<()> {
        if call == self.call { (self.fault)() } else { Ok(()) }
    }
}

impl std::fmt::Debug for Faulty {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Faulty")
    }
}

/// The error of a driver.
pub fn refused() -> Error {
    Error::Invalid { what: "the driver", why: "it was told to refuse".to_owned() }
}

impl Driver for Faulty {
    fn check(&self) -> Result<()> {
        self.memory.check()
    }
    fn device(&self) -> Result<[u8; 16]> {
        self.memory.device()
    }
    fn check_reaches(&self, device: [u8; 16]) -> Result<()> {
        self.at("reach")?;
        self.memory.check_reaches(device)
    }
    fn has_multicast(&self) -> bool {
        self.memory.has_multicast()
    }
    fn granularity(&self) -> Result<u64> {
        self.memory.granularity()
    }
    fn create(&self, bytes: u64) -> Result<Handle> {
        self.at("create")?;
        self.memory.create(bytes)
    }
    fn export(&self, handle: Handle) -> Result<OwnedFd> {
        let descriptor = self.memory.export(handle)?;
        self.at("export")?;
        Ok(descriptor)
    }
    fn import(&self, descriptor: OwnedFd) -> Result<Handle> {
        self.at("import")?;
        self.memory.import(descriptor)
    }
    fn release(&self, handle: Handle) -> Result<()> {
        self.memory.release(handle)
    }
    fn reserve(&self, bytes: u64) -> Result<u64> {
        self.at("reserve")?;
        self.memory.reserve(bytes)
    }
    fn unreserve(&self, address: u64, bytes: u64) -> Result<()> {
        self.memory.unreserve(address, bytes)
    }
    fn map(&self, address: u64, bytes: u64, handle: Handle) -> Result<()> {
        // The first is that of its own.
        if self.maps.fetch_add(1, Ordering::Relaxed) == 1 {
            self.at("map")?;
        }
        self.memory.map(address, bytes, handle)
    }
    fn set_access(&self, address: u64, bytes: u64) -> Result<()> {
        if self.maps.load(Ordering::Relaxed) == 2 {
            self.at("access")?;
        }
        self.memory.set_access(address, bytes)
    }
    fn unmap(&self, address: u64, bytes: u64) -> Result<()> {
        self.memory.unmap(address, bytes)
    }
}

/// Opens a view; every rank writes words to every rank, and reads what it and its neighbour got.
pub fn write_and_read(driver: Arc<dyn Driver>, board: &Arc<StoreBoard>, name: &str, options: FlatOptions) -> Result<()> {
    write_and_read_with(driver, board, name, options, PATIENCE, &|_, _| ())
}

/// What happens in a phase.
pub type At<'a> = &'a dyn Fn(&str, Seen<'_>);
/// Waits until all ranks have all notes that were pinned before.
pub type Seen<'a> = &'a dyn Fn() -> Result<()>;

/// The same with patience for the others, and with something that happens in the middle of what it writes (`copy`), when the others wait for it to
/// have read (`wait`), and when it is through and has not given its memory back (`teardown`).
pub fn write_and_read_with(
    driver: Arc<dyn Driver>,
    board: &Arc<StoreBoard>,
    name: &str,
    options: FlatOptions,
    patience: Duration,
    at: At<'_>,
) -> Result<()> {
    let (me, world) = (board.rank(), board.world());
    let meeting = Meeting::new(board.clone(), me, world, name);
    let view = FlatView::open(&driver, &meeting, options, |address| {
        word(address, 0).store(1000, Ordering::Relaxed);
        Ok(())
    })?;
    let seen = |what: &str| format!("{what}: seen");
    meeting.publish(&seen("mapped"), Vec::new())?;
    assert!(view.stride() >= 8 * WORDS && view.stride().is_multiple_of(driver.granularity()?));
    for to in world.ranks() {
        assert_eq!(view.address(to), view.address(Rank::ZERO) + u64::from(to.index()) * view.stride());
        assert_eq!(word(view.address(to), 0).load(Ordering::Acquire), 1000, "it was cleared before any rank reached it");
        word(view.address(to), 1 + u64::from(me.index())).store(value(me, to), Ordering::Release);
        if to.index() == world.get() / 2 {
            at("copy", &|| meeting.gather(&seen("mapped"), patience).map(drop));
        }
        word(view.address(to), WORDS - 1 - u64::from(me.index())).store(value(to, me), Ordering::Release);
    }
    let all_here = |what: &str| {
        meeting.publish(what, Vec::new())?;
        meeting.gather(what, patience)?;
        meeting.publish(&seen(what), Vec::new())
    };
    all_here("written")?;
    at("wait", &|| meeting.gather(&seen("written"), patience).map(drop));
    // All of them as one range: base and stride are all that is needed.
    for at in world.ranks() {
        let address = view.base() + u64::from(at.index()) * view.stride();
        for from in world.ranks() {
            let [one, other] = [1 + u64::from(from.index()), WORDS - 1 - u64::from(from.index())].map(|i| word(address, i));
            assert_eq!(one.load(Ordering::Acquire), value(from, at), "{from} wrote to {at}, {me} reads");
            assert_eq!(other.load(Ordering::Acquire), value(at, from));
        }
    }
    all_here("read")?;
    at("teardown", &|| meeting.gather(&seen("read"), patience).map(drop));
    Ok(())
}

fn value(from: Rank, to: Rank) -> u64 {
    1 << 40 | u64::from(from.index()) << 8 | u64::from(to.index())
}

/// A word that several processes use.
fn word<'a>(address: u64, index: u64) -> &'a AtomicU64 {
    // SAFETY: the address is that of a mapping of at least `WORDS` words, which lives as long as the view of the caller.
    unsafe { AtomicU64::from_ptr(std::ptr::with_exposed_provenance_mut((address + 8 * index) as usize)) }
}

/// What this process has once it has no more than before, or after a moment in which it still has: a thread that was joined stays in /proc
/// for a little.
pub fn resources_after(before: [usize; 3]) -> [usize; 3] {
    let start = Instant::now();
    let mut after = resources();
    while after != before && start.elapsed() < Duration::from_secs(2) {
        thread::sleep(Duration::from_millis(1));
        after = resources();
    }
    after
}

/// Descriptors, threads, and mappings of shared files of this process.
pub fn resources() -> [usize; 3] {
    let count = |folder: &str| fs::read_dir(folder).expect("proc is mounted").count();
    let maps = fs::read_to_string("/proc/self/maps").expect("proc is mounted");
    [count("/proc/self/fd"), count("/proc/self/task"), maps.lines().filter(|line| line.contains("memfd:oxtile")).count()]
}
