//! Memory that NCCL allocates and registers: of NCCL 2.27 and later (NCCL User Guide, "Window Registration"; `nccl.h`).

use std::ffi::{c_int, c_void};
use std::fmt;
use std::ptr;

use libloading::Library;

use super::communicator::NcclCommunicator;
use super::library::{Comm, Nccl, NcclVersion, SUCCESS};
use crate::runtime::{Error, Result};

/// `NCCL_WIN_COLL_SYMMETRIC`: every rank passes buffers at one offset of the window.
const SYMMETRIC: c_int = 1;

/// The functions that are called.
pub(crate) struct Windows {
    pub mem_alloc: unsafe extern "C" fn(*mut *mut c_void, usize) -> c_int,
    pub mem_free: unsafe extern "C" fn(*mut c_void) -> c_int,
    pub register: unsafe extern "C" fn(Comm, *mut c_void, usize, *mut *mut c_void, c_int) -> c_int,
    pub deregister: unsafe extern "C" fn(Comm, *mut c_void) -> c_int,
}

impl Windows {
    /// Looks all of them up; the name of one that is missing else.
    ///
    /// # Safety
    /// The library is NCCL, and stays loaded.
    pub(super) unsafe fn find(library: &Library) -> Result<Self, &'static str> {
        macro_rules! symbol {
            ($name:literal) => {
                // SAFETY: the signatures are those of `nccl.h`; the caller vouches for the library.
                *unsafe { library.get(concat!($name, "\0")) }.map_err(|_| $name)?
            };
        }
        Ok(Self {
            mem_alloc: symbol!("ncclMemAlloc"),
            mem_free: symbol!("ncclMemFree"),
            register: symbol!("ncclCommWindowRegister"),
            deregister: symbol!("ncclCommWindowDeregister"),
        })
    }

    /// Those of the library in use.
    ///
    /// # Errors
    /// [`Error::NoLibrary`].
    pub fn load() -> Result<Result<&'static Self, TooOld>> {
        let nccl = Nccl::load()?;
        Ok(nccl.windows.as_ref().map_err(|symbol| TooOld { found: nccl.version.clone(), symbol }))
    }

    /// Memory of the current device, in multiples of its recommended granularity: its address.
    ///
    /// # Errors
    /// [`Error::Nccl`].
    pub fn allocate(&self, bytes: u64) -> Result<u64> {
        let mut address = ptr::null_mut();
        // SAFETY: a valid place for the address.
        done("ncclMemAlloc", unsafe { (self.mem_alloc)(&raw mut address, bytes as usize) })?;
        Ok(address.expose_provenance() as u64)
    }

    /// Gives memory back that [`allocate`](Self::allocate) gave, once, and that nothing uses.
    ///
    /// # Errors
    /// [`Error::Nccl`].
    pub fn free(&self, address: u64) -> Result<()> {
        // SAFETY: the caller vouches for the address.
        done("ncclMemFree", unsafe { (self.mem_free)(ptr::with_exposed_provenance_mut(address as usize)) })
    }
}

impl fmt::Debug for Windows {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Windows").finish_non_exhaustive()
    }
}

/// The library in use has no windows.
#[derive(Debug, thiserror::Error)]
#[error("windows need NCCL 2.27 or newer, and {found} has no {symbol}: install one and name it in OXTILE_NCCL, or use vmm")]
pub(crate) struct TooOld {
    found: NcclVersion,
    symbol: &'static str,
}

fn done(call: &'static str, code: c_int) -> Result<()> {
    let explained = |code| Nccl::load().map_or_else(|_| String::new(), |nccl| nccl.functions.describe(code));
    let last = || Nccl::load().map_or_else(|_| String::new(), |nccl| nccl.functions.last_error(ptr::null_mut()));
    if code == SUCCESS {
        Ok(())
    } else {
        Err(Error::Nccl { call, communicator: "NCCL".into(), code, meaning: explained(code), detail: last() })
    }
}

/// Memory registered with a communicator, on all its ranks: collectives on buffers in it take NCCL's kernels for symmetric memory. It has to
/// be [given back](Self::deregister) before the memory is.
#[derive(Debug)]
pub(crate) struct Window {
    communicator: NcclCommunicator,
    windows: &'static Windows,
    /// `ncclWindow_t`, as a number.
    window: usize,
}

impl Window {
    /// A collective of the communicator's ranks, which waits for all of them, at most for the deadline. None, on every rank, where NCCL registers nothing:
    /// it answers with success and no window where not every GPU reaches every other one's memory, or windows
    /// (`NCCL_WIN_ENABLE`) or the driver's virtual memory (`NCCL_CUMEM_ENABLE`) are switched off (`ncclCommWindowRegister` in
    /// `src/dev_runtime.cc`, and `symmetricSupport` in `src/init.cc`, of NCCL 2.28). Multicast does not matter for it.
    ///
    /// # Errors
    /// As a collective's.
    pub fn register(communicator: NcclCommunicator, windows: &'static Windows, address: u64, bytes: u64) -> Result<Option<Self>> {
        let mut window = ptr::null_mut();
        let memory = ptr::with_exposed_provenance_mut(address as usize);
        communicator.call("ncclCommWindowRegister", |comm| {
            // SAFETY: a live communicator, memory that the caller keeps until this is deregistered, and a valid place for the window.
            unsafe { (windows.register)(comm, memory, bytes as usize, &raw mut window, SYMMETRIC) }
        })?;
        let is_there = !window.is_null();
        Ok(is_there.then(|| Self { communicator, windows, window: window.expose_provenance() }))
    }

    /// The communicator.
    pub fn communicator(&self) -> &NcclCommunicator {
        &self.communicator
    }

    /// Gives the window back; no collective is under way on it.
    ///
    /// # Errors
    /// As a collective's.
    pub fn deregister(self) -> Result<()> {
        let window = ptr::with_exposed_provenance_mut(self.window);
        // SAFETY: a window of this communicator, given back once.
        self.communicator.call("ncclCommWindowDeregister", |comm| unsafe { (self.windows.deregister)(comm, window) })
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::super::fake::{FUNCTIONS, Fake};
    use super::super::handle::Handle;
    use super::*;
    use crate::rank::{Rank, WorldSize};
    use crate::runtime::Runtime;

    unsafe extern "C" fn mem_alloc(_: *mut *mut c_void, _: usize) -> c_int {
        SUCCESS
    }

    unsafe extern "C" fn mem_free(_: *mut c_void) -> c_int {
        SUCCESS
    }

    /// A call for no bytes gets no window.
    unsafe extern "C" fn register(_: Comm, _: *mut c_void, bytes: usize, window: *mut *mut c_void, flags: c_int) -> c_int {
        assert_eq!(flags, SYMMETRIC);
        // SAFETY: the caller gives a valid place.
        unsafe { *window = ptr::without_provenance_mut(bytes) };
        SUCCESS
    }

    unsafe extern "C" fn deregister(_: Comm, window: *mut c_void) -> c_int {
        if window.is_null() { 4 } else { SUCCESS }
    }

    #[test]
    fn success_without_a_window_is_none() {
        static WINDOWS: Windows = Windows { mem_alloc, mem_free, register, deregister };
        let device = Runtime::emulated(1).unwrap().device(0).unwrap();
        let (_, id) = Fake::leaked();
        let handle = Handle::join(&FUNCTIONS, id, Rank::ZERO, WorldSize::ONE, Duration::from_secs(10)).unwrap();
        let communicator = NcclCommunicator::new(handle, &device).unwrap();
        let window = Window::register(communicator.clone(), &WINDOWS, 1 << 21, 1 << 21).unwrap();
        window.expect("a window").deregister().unwrap();
        assert!(Window::register(communicator, &WINDOWS, 1 << 21, 0).unwrap().is_none());
    }

    #[test]
    fn a_library_without_windows_says_which_has_them() {
        // SAFETY: the C library, which is loaded already; nothing is called.
        let library = unsafe { Library::new("libc.so.6") }.unwrap();
        // SAFETY: nothing of it is called.
        let symbol = unsafe { Windows::find(&library) }.unwrap_err();
        let old = TooOld { found: NcclVersion { number: (2, 26, 2), library: "libnccl.so.2".into() }, symbol };
        let text = old.to_string();
        assert!(text.contains("NCCL 2.27 or newer, and NCCL 2.26.2 (libnccl.so.2) has no ncclMemAlloc"), "{text}");
    }
}
