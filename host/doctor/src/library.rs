//! A library as the dynamic loader finds it.

use std::error::Error;

use libloading::Library;

/// Opens it.
///
/// # Errors
/// The loader's reason, which names the library.
pub fn open(name: &str) -> Result<Library, String> {
    // SAFETY: a library of NVIDIA's by its usual name, or the one that the user named, with whatever it does when loaded.
    unsafe { Library::new(name) }.map_err(|error| error.source().map_or_else(|| format!("{name}: {error}"), ToString::to_string))
}

/// A function of it.
///
/// # Errors
/// The library has none of this name.
///
/// # Safety
/// The type is that of the library's header; the function is not called once the library is closed.
pub unsafe fn function<F: Copy>(library: &Library, name: &str, symbol: &str) -> Result<F, String> {
    // SAFETY: the caller vouches for the type and for the use.
    unsafe { library.get::<F>(symbol.as_bytes()) }.map(|function| *function).map_err(|_| format!("{name} has no {symbol}"))
}

/// The variable's value, unless it is empty.
pub fn named(variable: &str) -> Option<String> {
    std::env::var(variable).ok().filter(|name| !name.is_empty())
}
