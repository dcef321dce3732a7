//! NVSHMEM's host library: the file in `OXTILE_NVSHMEM`, else `libnvshmem_host.so.3`.

use std::ffi::c_int;

use crate::{
    Finding,
    library::{function, named, open},
};

const INSTALL: &str = "`python3 -m pip install nvidia-nvshmem-cu13`, and name its libnvshmem_host.so.3 in OXTILE_NVSHMEM";

/// What was found.
pub struct Nvshmem {
    pub finding: Finding,
    /// Its version in words.
    pub version: Option<String>,
}

impl Nvshmem {
    pub fn find() -> Self {
        Self::search(named("OXTILE_NVSHMEM"))
    }

    fn search(named: Option<String>) -> Self {
        let is_named = named.is_some();
        let name = named.unwrap_or_else(|| "libnvshmem_host.so.3".to_owned());
        match version(&name) {
            Ok([major, minor, patch]) if major >= 3 => {
                let version = format!("{major}.{minor}.{patch} ({name})");
                Self { finding: Finding::ok("nvshmem", &version), version: Some(version) }
            }
            Ok([major, minor, patch]) => {
                let why = format!("{name} is version {major}.{minor}.{patch}, older than 3.0");
                Self { finding: Finding::broken("nvshmem", why, INSTALL), version: None }
            }
            Err(why) if is_named => Self { finding: Finding::broken("nvshmem", why, INSTALL), version: None },
            Err(why) => Self { finding: Finding::absent("nvshmem", why, INSTALL), version: None },
        }
    }
}

fn version(name: &str) -> Result<[c_int; 3], String> {
    let library = open(name)?;
    type Version = unsafe extern "C" fn(*mut c_int, *mut c_int, *mut c_int);
    // SAFETY: the signature is that of `nvshmem_api.h`.
    let get = unsafe { function::<Version>(&library, name, "nvshmemx_vendor_get_version_info") }?;
    let [mut major, mut minor, mut patch] = [0; 3];
    // SAFETY: valid places for the numbers.
    unsafe { get(&raw mut major, &raw mut minor, &raw mut patch) };
    Ok([major, minor, patch])
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Status;

    #[test]
    fn a_library_that_is_not_nvshmem_is_named() {
        assert_eq!(version("libc.so.6").unwrap_err(), "libc.so.6 has no nvshmemx_vendor_get_version_info");
        let named = Nvshmem::search(Some("libc.so.6".into())).finding;
        assert_eq!(named.status, Status::Broken, "it was named: {named}");
        assert!(named.mend.is_some_and(|mend| mend.contains("nvidia-nvshmem-cu13")));
    }
}
