//! Kernels of a library in place of those that this program was compiled with: `OXTILE_REPLACEMENT`, `OXTILE_REPLACED`, `OXTILE_CHANGED`.

use std::collections::{BTreeMap, BTreeSet};
use std::env;
use std::process::exit;

use libloading::os::unix::{Library, RTLD_LOCAL, RTLD_NOW};
use oxtile_emulator::replacement::{self, Body, Replacements};

/// The exit status where kernels cannot be replaced: `EX_TEMPFAIL` of sysexits.h.
pub const UNLOADABLE: u8 = 75;

/// Loads the kernels that the environment names. A launch of another kernel of the changed families ends the program.
///
/// # Errors
/// The library lacks a kernel, or needs a function that this program does not have.
pub fn load() -> Result<(), String> {
    fn list<T: FromIterator<String>>(name: &str) -> T {
        env::var(name).unwrap_or_default().split(',').filter(|word| !word.is_empty()).map(str::to_owned).collect()
    }
    let (names, changed): (Vec<_>, BTreeSet<_>) = (list("OXTILE_REPLACED"), list("OXTILE_CHANGED"));
    let mut kernels = BTreeMap::new();
    if let Some(path) = env::var_os("OXTILE_REPLACEMENT").filter(|path| !path.is_empty()) {
        // SAFETY: the library has no initialisers of its own: `cargo xtask kernel` compiled it from the kernels, which are `no_std`.
        let library = unsafe { Library::open(Some(path), RTLD_NOW | RTLD_LOCAL) }.map_err(|error| error.to_string())?;
        for name in names {
            let symbol = format!("{}{name}", replacement::SYMBOL);
            // SAFETY: `#[kernel]` exports this symbol with this type; compiler, emulator and DSL are those of this program, of which `cargo xtask kernel` made sure.
            let body = unsafe { library.get::<Body>(symbol.as_bytes()) }.map_err(|error| error.to_string())?;
            kernels.insert(name, *body);
        }
        // Its functions are called until the program ends.
        std::mem::forget(library);
    }
    let missing = |kernel: &str| {
        eprintln!("OXTILE_REPLACEMENT: `{kernel}` is launched, which an edit has changed");
        exit(UNLOADABLE.into());
    };
    if !(kernels.is_empty() && changed.is_empty()) {
        replacement::replace(Replacements { kernels, changed, missing });
    }
    Ok(())
}
