//! NCCL: the file in `OXTILE_NCCL`, else `libnccl.so.2`, else `libnccl.so`.

use std::ffi::c_int;

use crate::{
    Finding,
    library::{function, named, open},
};

/// As `ncclGetVersion` counts: 2.18.1.
const OLDEST: c_int = 21_801;
const INSTALL: &str =
    "`python3 -m pip install nvidia-nccl-cu13`, and name its libnccl.so.2 in OXTILE_NCCL or its folder in LD_LIBRARY_PATH";

/// What was found.
pub struct Nccl {
    pub finding: Finding,
    /// Its version in words.
    pub version: Option<String>,
    /// Whether it registers windows: since 2.27.
    pub has_windows: bool,
}

impl Nccl {
    pub fn find() -> Self {
        Self::search(named("OXTILE_NCCL"))
    }

    fn search(named: Option<String>) -> Self {
        let is_named = named.is_some();
        let names = named.map_or_else(|| vec!["libnccl.so.2".to_owned(), "libnccl.so".to_owned()], |name| vec![name]);
        let (mut reasons, mut is_there) = (Vec::new(), is_named);
        for name in names {
            match version(&name) {
                Ok((number, has_windows)) if number >= OLDEST => {
                    let version = format!("{}.{}.{} ({name})", number / 10_000, number / 100 % 100, number % 100);
                    return Self { finding: Finding::ok("nccl", &version), version: Some(version), has_windows };
                }
                Ok((number, _)) => {
                    is_there = true;
                    reasons.push(format!("{name} is version {number}, older than 2.18.1"));
                }
                Err(reason) => reasons.push(reason),
            }
        }
        let reasons = reasons.join("; ");
        let finding = if is_there { Finding::broken("nccl", reasons, INSTALL) } else { Finding::absent("nccl", reasons, INSTALL) };
        Self { finding, version: None, has_windows: false }
    }
}

/// As `ncclGetVersion` counts, and whether there are windows.
fn version(name: &str) -> Result<(c_int, bool), String> {
    let library = open(name)?;
    // SAFETY: the signature is that of `nccl.h`.
    let get = unsafe { function::<unsafe extern "C" fn(*mut c_int) -> c_int>(&library, name, "ncclGetVersion") }?;
    let mut number = 0;
    // SAFETY: a valid place for the number.
    unsafe { get(&raw mut number) };
    // SAFETY: the symbol is looked for, and not called.
    let windows = unsafe { function::<unsafe extern "C" fn()>(&library, name, "ncclCommWindowRegister") };
    Ok((number, windows.is_ok()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Status;

    #[test]
    fn a_library_that_is_not_nccl_is_named() {
        assert_eq!(version("libc.so.6").unwrap_err(), "libc.so.6 has no ncclGetVersion");
        let named = Nccl::search(Some("/nowhere/libnccl.so.2".into())).finding;
        assert_eq!(named.status, Status::Broken, "it was named: {named}");
        assert!(named.found.contains("/nowhere/libnccl.so.2") && named.mend.is_some_and(|mend| mend.contains("OXTILE_NCCL")));
    }
}
