//! NVSHMEM's host library: found at run time, its functions looked up once.
//!
//! Source: `nvshmem_api.h`, `nvshmemx_api.h`, `nvshmem_types.h`, `nvshmem_uniqueid.h` and `nvshmem_constants.h` of NVSHMEM 3.8. The attributes are
//! those of version 1, which every release since 3.0 takes.

use std::error::Error as _;
use std::ffi::{c_int, c_uint, c_void};
use std::ptr;
use std::sync::OnceLock;

use libloading::Library;

use crate::comm::{Rank, WorldSize};
use crate::runtime::{Error, Result};

/// `NVSHMEMX_INIT_WITH_UNIQUEID`.
pub(super) const WITH_UNIQUE_ID: c_uint = 1 << 3;
/// `NVSHMEM_STATUS_IS_INITIALIZED`: the device is in use too. Below it the ranks have joined at most.
pub(super) const INITIALIZED: c_int = 2;

/// What every structure begins with: version 1, and its size.
const fn version_of<T>() -> c_int {
    (1 << 16) + size_of::<T>() as c_int
}

/// What all ranks share, made by one of them: `nvshmemx_uniqueid_t`.
#[derive(Clone, Copy)]
#[repr(C)]
pub(super) struct UniqueId {
    version: c_int,
    internal: [u8; Self::BYTES],
}

impl UniqueId {
    /// The rest of the structure.
    pub const BYTES: usize = 124;

    pub fn bytes(&self) -> &[u8; Self::BYTES] {
        &self.internal
    }

    pub fn from_bytes(internal: [u8; Self::BYTES]) -> Self {
        Self { version: version_of::<Self>(), internal }
    }
}

/// `nvshmemx_init_attr_v1`.
#[repr(C)]
pub(super) struct Attributes {
    version: c_int,
    mpi: *mut c_void,
    arguments: Arguments,
}

/// `nvshmemx_init_args_v1`.
#[repr(C)]
struct Arguments {
    version: c_int,
    id: IdArguments,
    padding: [u8; 96],
}

/// `nvshmemx_uniqueid_args_v1`.
#[repr(C)]
struct IdArguments {
    version: c_int,
    id: *const UniqueId,
    rank: c_int,
    ranks: c_int,
}

const _: () = assert!(size_of::<UniqueId>() == 128 && size_of::<Attributes>() == 144);
const _: () = assert!(size_of::<Arguments>() == 128 && size_of::<IdArguments>() == 24);

impl Attributes {
    fn new() -> Self {
        let id = IdArguments { version: version_of::<IdArguments>(), id: ptr::null(), rank: -1, ranks: -1 };
        let arguments = Arguments { version: version_of::<Arguments>(), id, padding: [0; 96] };
        Self { version: version_of::<Self>(), mpi: ptr::null_mut(), arguments }
    }

    #[cfg(test)]
    pub fn set(&mut self, rank: c_int, ranks: c_int, id: *const UniqueId) {
        self.arguments.id = IdArguments { rank, ranks, id, ..self.arguments.id };
    }

    #[cfg(test)]
    pub fn rank(&self) -> c_int {
        self.arguments.id.rank
    }
}

/// The functions that are called.
#[derive(Clone, Copy)]
pub(super) struct Functions {
    pub version: unsafe extern "C" fn(*mut c_int, *mut c_int, *mut c_int),
    pub get_unique_id: unsafe extern "C" fn(*mut UniqueId) -> c_int,
    pub set_unique_id: unsafe extern "C" fn(c_int, c_int, *const UniqueId, *mut Attributes) -> c_int,
    pub init: unsafe extern "C" fn(c_uint, *mut Attributes) -> c_int,
    pub status: unsafe extern "C" fn() -> c_int,
    pub malloc: unsafe extern "C" fn(usize) -> *mut c_void,
    pub free: unsafe extern "C" fn(*mut c_void),
    pub ptr: unsafe extern "C" fn(*const c_void, c_int) -> *mut c_void,
}

impl Functions {
    /// Looks all of them up. The error is the name of one that is missing.
    ///
    /// # Safety
    /// The library is NVSHMEM's, and stays loaded.
    unsafe fn find(library: &Library) -> Result<Self, &'static str> {
        macro_rules! symbol {
            ($name:literal) => {
                // SAFETY: the signatures are those of NVSHMEM's headers; the caller vouches for the library.
                *unsafe { library.get(concat!($name, "\0")) }.map_err(|_| $name)?
            };
        }
        Ok(Self {
            version: symbol!("nvshmemx_vendor_get_version_info"),
            get_unique_id: symbol!("nvshmemx_get_uniqueid"),
            set_unique_id: symbol!("nvshmemx_set_attr_uniqueid_args"),
            init: symbol!("nvshmemx_hostlib_init_attr"),
            status: symbol!("nvshmemx_init_status"),
            malloc: symbol!("nvshmem_malloc"),
            free: symbol!("nvshmem_free"),
            ptr: symbol!("nvshmem_ptr"),
        })
    }

    /// The id that the ranks of a new world share, or the code of a failure.
    pub fn unique_id(&self) -> Result<UniqueId, c_int> {
        let mut id = UniqueId::from_bytes([0; UniqueId::BYTES]);
        // SAFETY: a valid place for the id, which holds its own size.
        let code = unsafe { (self.get_unique_id)(&raw mut id) };
        if code == 0 { Ok(id) } else { Err(code) }
    }

    /// Makes this process a rank, on the current device; returns when all ranks have come, or with the call that failed and its code.
    pub fn join(&self, id: &UniqueId, rank: Rank, world: WorldSize) -> Result<(), (&'static str, c_int)> {
        let mut attributes = Attributes::new();
        // SAFETY: the id and the attributes outlive both calls; the rank is below its world.
        let code = unsafe {
            match (self.set_unique_id)(rank.index() as c_int, world.get() as c_int, id, &raw mut attributes) {
                0 => (self.init)(WITH_UNIQUE_ID, &raw mut attributes),
                code => code,
            }
        };
        if code != 0 {
            return Err(("nvshmemx_hostlib_init_attr", code));
        }
        // 3.3 and 3.4 report success where the device could not be had, and end the process in `nvshmem_malloc`; 3.8 does not.
        // SAFETY: the function takes nothing, and returns how far the call above came.
        let status = unsafe { (self.status)() };
        if status >= INITIALIZED { Ok(()) } else { Err(("nvshmemx_init_status", status)) }
    }

    /// Allocates memory of this size on every rank; all ranks call. Its address here, or none if there is too little.
    pub fn allocate(&self, bytes: u64) -> Option<u64> {
        // SAFETY: NVSHMEM is initialised, since there is a world that allocates.
        let address = unsafe { (self.malloc)(bytes as usize) };
        (!address.is_null()).then(|| address.expose_provenance() as u64)
    }

    /// Gives memory back that [`allocate`](Self::allocate) gave, once, and that no rank uses any more. All ranks call.
    pub fn give_back(&self, address: u64) {
        // SAFETY: the caller vouches for the address.
        unsafe { (self.free)(ptr::with_exposed_provenance_mut(address as usize)) }
    }

    /// The address here of a rank's instance of this rank's memory; none if this device does not reach it.
    pub fn peer(&self, address: u64, rank: Rank) -> Option<u64> {
        // SAFETY: an address of the symmetric heap, and a rank of its world.
        let address = unsafe { (self.ptr)(ptr::with_exposed_provenance(address as usize), rank.index() as c_int) };
        (!address.is_null()).then(|| address.expose_provenance() as u64)
    }
}

/// The library in use: loaded once and never unloaded.
pub(super) struct Nvshmem {
    pub functions: Functions,
    /// Its version, and the name that it was loaded by.
    pub version: String,
}

impl Nvshmem {
    /// The file in `OXTILE_NVSHMEM`, else `libnvshmem_host.so.3`, as the dynamic loader finds it.
    ///
    /// # Errors
    /// [`Error::NoLibrary`] with what was looked for and how to mend it.
    pub fn load() -> Result<&'static Self> {
        static FOUND: OnceLock<Result<Nvshmem>> = OnceLock::new();
        let named = || std::env::var("OXTILE_NVSHMEM").unwrap_or_else(|_| "libnvshmem_host.so.3".to_owned());
        FOUND.get_or_init(|| Self::open(&named())).as_ref().map_err(Clone::clone)
    }

    fn open(name: &str) -> Result<Self> {
        let reason = |error: libloading::Error| missing(error.source().map_or_else(|| format!("{name}: {error}"), ToString::to_string));
        // SAFETY: NVSHMEM's library by its usual name, or the one that the user named, with whatever it does when loaded. It stays loaded.
        let library: &'static Library = Box::leak(Box::new(unsafe { Library::new(name) }.map_err(reason)?));
        // SAFETY: a library under NVSHMEM's name; leaked, so it stays.
        let functions = unsafe { Functions::find(library) }.map_err(|symbol| missing(format!("{name} has no {symbol}")))?;
        let [mut major, mut minor, mut patch] = [0; 3];
        // SAFETY: valid places for the numbers.
        unsafe { (functions.version)(&raw mut major, &raw mut minor, &raw mut patch) };
        if major < 3 {
            return Err(missing(format!("{name} is version {major}.{minor}.{patch}, older than 3.0")));
        }
        Ok(Self { functions, version: format!("{major}.{minor}.{patch} ({name})") })
    }
}

fn missing(why: String) -> Error {
    let mend = "install NVSHMEM 3 (PyPI's nvidia-nvshmem-cu13 will do) and name its libnvshmem_host.so.3 in OXTILE_NVSHMEM, or use vmm";
    Error::NoLibrary { library: "NVSHMEM", why: format!("{why}: {mend}") }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_no_library_is_named() {
        for (name, why) in [("/nowhere/libnvshmem_host.so.3", "/nowhere/"), ("libc.so.6", "libc.so.6 has no nvshmemx_vendor")] {
            let error = Nvshmem::open(name).err().unwrap();
            let text = error.to_string();
            assert!(matches!(error, Error::NoLibrary { .. }) && text.contains(why) && text.contains("nvidia-nvshmem-cu13"), "{text}");
        }
    }
}
