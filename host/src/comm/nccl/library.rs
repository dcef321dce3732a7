//! NCCL's shared library: found at run time, its functions looked up once.
//!
//! The functions are declared here and not taken from a binding: results are plain integers, since a library newer than
//! the binding may return codes that it has no name for, and a missing function is an error instead of a panic.
//! Source: `nccl.h` of NCCL 2.28.

use std::error::Error as _;
use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::fmt;
use std::sync::OnceLock;

use libloading::Library;

use super::windows::Windows;
use crate::runtime::{Error, Result};

/// A `ncclComm_t`.
pub(super) type Comm = *mut c_void;
/// A `cudaStream_t`, which is a `CUstream`.
pub(super) type CudaStream = *mut c_void;

/// `ncclSuccess`.
pub(super) const SUCCESS: c_int = 0;
/// `ncclInProgress`.
pub(super) const IN_PROGRESS: c_int = 7;

/// The first release with every function called here (`ncclCommSplit`), as `ncclGetVersion` counts: 2.18.1.
const OLDEST: c_int = 21_801;

/// What all ranks of a world share, made by one of them: `ncclUniqueId`.
///
/// It must reach every rank, and anyone who has it can join: keep it from others.
#[derive(Clone, Copy, PartialEq, Eq)]
#[repr(C)]
pub struct UniqueId([u8; Self::BYTES]);

impl UniqueId {
    /// Its size.
    pub const BYTES: usize = 128;

    /// The bytes, to send to other ranks.
    pub fn as_bytes(&self) -> &[u8; Self::BYTES] {
        &self.0
    }

    /// What [`as_bytes`](Self::as_bytes) gave on the rank that made it.
    pub fn from_bytes(bytes: [u8; Self::BYTES]) -> Self {
        Self(bytes)
    }
}

impl fmt::Debug for UniqueId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("UniqueId").finish_non_exhaustive()
    }
}

/// The part of `ncclConfig_t` that every release since 2.18 has; NCCL reads as much as `size` says.
#[repr(C)]
pub(super) struct Config {
    size: usize,
    magic: c_uint,
    version: c_uint,
    blocking: c_int,
    cga_cluster_size: c_int,
    min_ctas: c_int,
    max_ctas: c_int,
    net_name: *const c_char,
    split_share: c_int,
}

impl Config {
    /// Calls return when what they ask for is enqueued. (The other mode starts a thread for every call: the deadline is
    /// the watchdog's.)
    pub fn blocking() -> Self {
        const UNDEFINED: c_int = c_int::MIN;
        Self {
            size: size_of::<Self>(),
            magic: 0xcafe_beef,
            version: OLDEST as c_uint,
            blocking: 1,
            cga_cluster_size: UNDEFINED,
            min_ctas: UNDEFINED,
            max_ctas: UNDEFINED,
            net_name: std::ptr::null(),
            split_share: UNDEFINED,
        }
    }
}

macro_rules! functions {
    ($($field:ident = $symbol:literal ($($argument:ty),*) $(-> $result:ty)?;)*) => {
        /// The functions that are called, by their names without `nccl` and `Comm`.
        pub(super) struct Functions {
            $(pub $field: functions!(@type ($($argument),*) $(-> $result)?),)*
        }

        impl Functions {
            /// Looks all of them up. The error is the name of one that is missing.
            ///
            /// # Safety
            /// The library is NCCL, and stays loaded.
            unsafe fn find(library: &Library) -> Result<Self, &'static str> {
                // SAFETY: the signatures are those of `nccl.h`; the caller vouches for the library.
                Ok(Self { $($field: *unsafe { library.get(concat!($symbol, "\0")) }.map_err(|_| $symbol)?,)* })
            }
        }
    };
    (@type ($($argument:ty),*)) => { unsafe extern "C" fn($($argument),*) -> c_int };
    (@type ($($argument:ty),*) -> $result:ty) => { unsafe extern "C" fn($($argument),*) -> $result };
}

functions! {
    get_version = "ncclGetVersion" (*mut c_int);
    get_unique_id = "ncclGetUniqueId" (*mut UniqueId);
    init = "ncclCommInitRankConfig" (*mut Comm, c_int, UniqueId, c_int, *mut Config);
    split = "ncclCommSplit" (Comm, c_int, c_int, *mut Comm, *mut Config);
    count = "ncclCommCount" (Comm, *mut c_int);
    user_rank = "ncclCommUserRank" (Comm, *mut c_int);
    async_error = "ncclCommGetAsyncError" (Comm, *mut c_int);
    finalize = "ncclCommFinalize" (Comm);
    destroy = "ncclCommDestroy" (Comm);
    abort = "ncclCommAbort" (Comm);
    error_string = "ncclGetErrorString" (c_int) -> *const c_char;
    last_error = "ncclGetLastError" (Comm) -> *const c_char;
    group_start = "ncclGroupStart" ();
    group_end = "ncclGroupEnd" ();
    all_reduce = "ncclAllReduce" (*const c_void, *mut c_void, usize, c_int, c_int, Comm, CudaStream);
    all_gather = "ncclAllGather" (*const c_void, *mut c_void, usize, c_int, Comm, CudaStream);
    reduce_scatter = "ncclReduceScatter" (*const c_void, *mut c_void, usize, c_int, c_int, Comm, CudaStream);
    broadcast = "ncclBroadcast" (*const c_void, *mut c_void, usize, c_int, c_int, Comm, CudaStream);
    send = "ncclSend" (*const c_void, usize, c_int, c_int, Comm, CudaStream);
    receive = "ncclRecv" (*mut c_void, usize, c_int, c_int, Comm, CudaStream);
}

/// Which NCCL was found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NcclVersion {
    /// Major, minor and patch.
    pub number: (u32, u32, u32),
    /// The name that it was loaded by.
    pub library: String,
}

impl fmt::Display for NcclVersion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (major, minor, patch) = self.number;
        write!(f, "NCCL {major}.{minor}.{patch} ({})", self.library)
    }
}

/// The library in use: loaded once and never unloaded.
pub(super) struct Nccl {
    pub functions: Functions,
    /// The functions of a library. The error is the name of one that is missing.
    pub windows: Result<Windows, &'static str>,
    pub version: NcclVersion,
}

impl Nccl {
    /// The file in `OXTILE_NCCL`, else `libnccl.so.2`, else `libnccl.so`, as the dynamic loader finds them.
    ///
    /// # Errors
    /// [`Error::NoLibrary`] with what was looked for and how to mend it.
    pub fn load() -> Result<&'static Self> {
        static FOUND: OnceLock<Result<Nccl>> = OnceLock::new();
        FOUND.get_or_init(|| Self::search(std::env::var("OXTILE_NCCL").ok())).as_ref().map_err(Clone::clone)
    }

    fn search(named: Option<String>) -> Result<Self> {
        let names = named.map_or_else(|| vec!["libnccl.so.2".to_owned(), "libnccl.so".to_owned()], |name| vec![name]);
        let mut reasons = Vec::new();
        for name in names {
            // SAFETY: NCCL's library by its usual name, or the one that the user named, with whatever it does when loaded.
            match unsafe { Library::new(&name) } {
                // It stays loaded to the end of the process: what it keeps running cannot be stopped from here.
                Ok(library) => return Self::from_library(Box::leak(Box::new(library)), name),
                Err(error) => reasons.push(error.source().map_or_else(|| format!("{name}: {error}"), ToString::to_string)),
            }
        }
        Err(missing(reasons.join("; ")))
    }

    fn from_library(library: &'static Library, name: String) -> Result<Self> {
        // SAFETY: a library under NCCL's name; leaked, so it stays.
        let functions = unsafe { Functions::find(library) }.map_err(|symbol| missing(format!("{name} has no {symbol}")))?;
        let mut code = 0;
        // SAFETY: a valid place for the number.
        unsafe { (functions.get_version)(&raw mut code) };
        if code < OLDEST {
            return Err(missing(format!("{name} is version {code}, older than 2.18.1")));
        }
        let code = code.unsigned_abs();
        let number = (code / 10_000, code / 100 % 100, code % 100);
        // SAFETY: as above.
        let windows = unsafe { Windows::find(library) };
        Ok(Self { functions, windows, version: NcclVersion { number, library: name } })
    }
}

impl Functions {
    /// What a result code means.
    pub fn describe(&self, code: c_int) -> String {
        // SAFETY: any code is allowed; the string is a constant of the library.
        text(unsafe { (self.error_string)(code) })
    }

    /// What the library says of its last error.
    pub fn last_error(&self, comm: Comm) -> String {
        // SAFETY: the argument is not looked at (NCCL 2.13 and later); a null pointer is allowed.
        text(unsafe { (self.last_error)(comm) })
    }
}

fn text(pointer: *const c_char) -> String {
    if pointer.is_null() {
        return String::new();
    }
    // SAFETY: NCCL returns strings with a terminating zero that live until its next error.
    unsafe { CStr::from_ptr(pointer) }.to_string_lossy().trim().to_owned()
}

fn missing(why: String) -> Error {
    let mend =
        "install NCCL 2.18 or newer (PyPI's nvidia-nccl-cu13 will do) and name the file in OXTILE_NCCL, or its folder in LD_LIBRARY_PATH";
    Error::NoLibrary { library: "NCCL", why: format!("{why}: {mend}") }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_no_library_is_named() {
        let error = Nccl::search(Some("/nowhere/libnccl.so.2".into())).err().unwrap().to_string();
        assert!(error.starts_with("NCCL is not available: ") && error.contains("/nowhere/libnccl.so.2"), "{error}");
    }

    #[test]
    fn another_library_is_not_nccl() {
        let error = Nccl::search(Some("libc.so.6".into())).err().unwrap().to_string();
        assert!(error.contains("libc.so.6 has no ncclGetVersion"), "{error}");
    }
}
