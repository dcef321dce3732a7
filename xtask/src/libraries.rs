//! What the dynamic loader finds of NVIDIA's libraries, and which symmetric memory that allows. Asked as `oxtile` asks for it, without
//! linking it: a kernel that does not compile does not keep `doctor` from answering.

use std::error::Error;
use std::ffi::c_int;

use libloading::Library;

/// What there is, or why not and how to mend it.
pub type Found = Result<String, String>;

/// `CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED`, `..._HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED` and
/// `..._CAN_USE_64_BIT_STREAM_MEM_OPS` of `cuda.h`: what `vmm` asks a device for.
const NEEDED: [(c_int, &str); 3] =
    [(102, "virtual memory management"), (103, "memory that is shared by file descriptors"), (122, "signals of 64 bits on streams")];

const INSTALL: &str =
    "`python3 -m pip install nvidia-nccl-cu13`, and name its libnccl.so.2 in OXTILE_NCCL or its folder in LD_LIBRARY_PATH";

/// NCCL: the file in `OXTILE_NCCL`, else `libnccl.so.2`, else `libnccl.so`.
pub struct Nccl {
    /// Name and version.
    pub found: Found,
    /// Whether it registers windows: since 2.27.
    windows: bool,
}

impl Nccl {
    pub fn find() -> Self {
        let named = std::env::var("OXTILE_NCCL").ok();
        let names = named.map_or_else(|| vec!["libnccl.so.2".to_owned(), "libnccl.so".to_owned()], |name| vec![name]);
        let mut reasons = Vec::new();
        for name in names {
            match version(&name) {
                Ok((number, windows)) if number >= 21_801 => {
                    let found = format!("{}.{}.{} ({name})", number / 10_000, number / 100 % 100, number % 100);
                    return Self { found: Ok(found), windows };
                }
                Ok((number, _)) => reasons.push(format!("{name} is version {number}, older than 2.18.1")),
                Err(reason) => reasons.push(reason),
            }
        }
        Self { found: Err(format!("{}; {INSTALL}", reasons.join("; "))), windows: false }
    }
}

/// As `ncclGetVersion` counts, and whether there are windows.
fn version(name: &str) -> Result<(c_int, bool), String> {
    let reason = |error: libloading::Error| error.source().map_or_else(|| format!("{name}: {error}"), ToString::to_string);
    // SAFETY: NCCL's library by its usual name, or the one that the user named, with whatever it does when loaded.
    let library = unsafe { Library::new(name) }.map_err(reason)?;
    // SAFETY: the signature is that of `nccl.h`.
    let get = unsafe { library.get::<unsafe extern "C" fn(*mut c_int) -> c_int>("ncclGetVersion\0") };
    let get = get.map_err(|_| format!("{name} has no ncclGetVersion"))?;
    let mut number = 0;
    // SAFETY: a valid place for the number.
    unsafe { get(&raw mut number) };
    // SAFETY: the symbol is looked for, and not called.
    let windows = unsafe { library.get::<unsafe extern "C" fn()>("ncclCommWindowRegister\0") }.is_ok();
    Ok((number, windows))
}

/// The back ends of symmetric memory by name, in the order of preference.
pub fn symmetric(nccl: &Nccl) -> [(&'static str, Found); 4] {
    let devices = devices();
    let nvshmem = nvshmem(&devices);
    let windows = match (&devices, &nccl.found) {
        (Err(why), _) => Err(why.clone()),
        (_, Err(_)) => Err("there is no NCCL: see above".to_owned()),
        (_, Ok(found)) if !nccl.windows => Err(format!("NCCL {found} has no windows: use 2.27 or newer, or vmm")),
        (Ok(_), Ok(_)) if std::env::var("NCCL_NVLS_ENABLE").as_deref() != Ok("0") => {
            Err("windows would use NVLink multicast: set NCCL_NVLS_ENABLE=0".to_owned())
        }
        (Ok(devices), Ok(found)) => Ok(format!("{devices}, NCCL {found}")),
    };
    [("vmm", devices), ("nccl", windows), ("emulated", Ok("always".to_owned())), ("nvshmem", nvshmem)]
}

/// NVSHMEM's host library, where there is memory for it to share: the file in `OXTILE_NVSHMEM`, else `libnvshmem_host.so.3`.
fn nvshmem(devices: &Found) -> Found {
    let name = std::env::var("OXTILE_NVSHMEM").unwrap_or_else(|_| "libnvshmem_host.so.3".to_owned());
    let version = nvshmem_version(&name);
    let mend = "`python3 -m pip install nvidia-nvshmem-cu13`, and name its libnvshmem_host.so.3 in OXTILE_NVSHMEM";
    let version = version.map_err(|reason| format!("{reason}; {mend}"))?;
    let devices = devices.as_ref().map_err(Clone::clone)?;
    match std::env::var("NVSHMEM_DISABLE_NVLS").as_deref() {
        Ok("1") => Ok(format!("{devices}, NVSHMEM {version}; never run by its authors")),
        _ => Err("its teams would use NVLink multicast: set NVSHMEM_DISABLE_NVLS=1".to_owned()),
    }
}

fn nvshmem_version(name: &str) -> Result<String, String> {
    let reason = |error: libloading::Error| error.source().map_or_else(|| format!("{name}: {error}"), ToString::to_string);
    // SAFETY: NVSHMEM's library by its usual name, or the one that the user named, with whatever it does when loaded.
    let library = unsafe { Library::new(name) }.map_err(reason)?;
    // SAFETY: the signature is that of `nvshmem_api.h`.
    let get = unsafe { library.get::<unsafe extern "C" fn(*mut c_int, *mut c_int, *mut c_int)>("nvshmemx_vendor_get_version_info\0") };
    let get = get.map_err(|_| format!("{name} has no nvshmemx_vendor_get_version_info"))?;
    let [mut major, mut minor, mut patch] = [0; 3];
    // SAFETY: valid places for the numbers.
    unsafe { get(&raw mut major, &raw mut minor, &raw mut patch) };
    Ok(format!("{major}.{minor}.{patch} ({name})"))
}

/// How many GPUs do what `vmm` needs.
fn devices() -> Found {
    let none = |why: String| format!("{why}; the virtual cluster needs no GPU: use emulated");
    // SAFETY: the driver's library by its usual name.
    let library = unsafe { Library::new("libcuda.so.1") }.map_err(|_| none("no libcuda.so.1".to_owned()))?;
    let missing = |_| "libcuda.so.1 is no CUDA driver".to_owned();
    // SAFETY: the signatures are those of `cuda.h`.
    let (init, count, attribute) = unsafe {
        (
            library.get::<unsafe extern "C" fn(u32) -> c_int>("cuInit\0").map_err(missing)?,
            library.get::<unsafe extern "C" fn(*mut c_int) -> c_int>("cuDeviceGetCount\0").map_err(missing)?,
            library.get::<unsafe extern "C" fn(*mut c_int, c_int, c_int) -> c_int>("cuDeviceGetAttribute\0").map_err(missing)?,
        )
    };
    let mut found = 0;
    // SAFETY: no flags; a valid place for the count.
    let failed = unsafe { (init(0), count(&raw mut found)) };
    if failed != (0, 0) || found == 0 {
        return Err(none(format!("the driver sees no GPU (codes {} and {})", failed.0, failed.1)));
    }
    for device in 0..found {
        for (number, what) in NEEDED {
            let mut has = 0;
            // SAFETY: a valid place for the answer, and a device below the count.
            let code = unsafe { attribute(&raw mut has, number, device) };
            if code != 0 || has == 0 {
                return Err(format!("GPU {device} has no {what}: use NCCL's collectives"));
            }
        }
    }
    Ok(format!("{found} GPU(s)"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_library_that_is_not_nccl_is_named() {
        assert_eq!(version("libc.so.6").unwrap_err(), "libc.so.6 has no ncclGetVersion");
        assert!(version("/nowhere/libnccl.so.2").unwrap_err().contains("/nowhere/libnccl.so.2"));
    }

    #[test]
    fn a_library_that_is_not_nvshmem_is_named() {
        assert_eq!(nvshmem_version("libc.so.6").unwrap_err(), "libc.so.6 has no nvshmemx_vendor_get_version_info");
        assert!(
            nvshmem(&Ok("1 GPU(s)".into())).is_err_and(|why| why.contains("nvidia-nvshmem-cu13") || why.contains("NVSHMEM_DISABLE_NVLS"))
        );
    }

    #[test]
    fn windows_need_their_library() {
        let without = Nccl { found: Err("no libnccl.so.2".into()), windows: false };
        let old = Nccl { found: Ok("2.26.2 (libnccl.so.2)".into()), windows: false };
        for nccl in [without, old] {
            let found = symmetric(&nccl);
            let [(_, vmm), (_, windows), (_, emulated), _] = &found;
            let why = windows.as_ref().unwrap_err();
            assert!(vmm.is_err() || why.contains("NCCL"), "{why}");
            assert!(emulated.is_ok());
        }
    }
}
