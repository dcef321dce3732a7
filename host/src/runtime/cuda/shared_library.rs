//! Whether NVIDIA's libraries are there, before their first call: cudarc panics where they are not.

use libloading::Library;

/// Whether a library can be loaded under one of these names, each of which cudarc tries too.
///
/// Not cudarc's own look: it is not compiled where another crate of the program links CUDA.
pub(super) fn is_present(names: &[&str]) -> bool {
    // SAFETY: opens a library of NVIDIA's by its usual names, and runs its initialisers.
    names.iter().any(|name| unsafe { Library::new(*name) }.is_ok())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_name_of_several_is_enough() {
        assert!(is_present(&["libno-such-library.so.1", "libc.so.6"]));
        assert!(!is_present(&["libno-such-library.so.1"]));
    }
}
