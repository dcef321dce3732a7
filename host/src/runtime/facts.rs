//! What a kernel was compiled with, wherever its code lies.

use std::path::Path;

use oxtile_tile::launch::KernelInfo;

use super::error::{Error, Result};

/// The launch facts that a kernel was compiled with.
pub(super) struct Facts<'a> {
    pub threads: u32,
    pub cluster: u32,
    pub shared_bytes: u32,
    pub parameters: &'a [String],
    pub words: u32,
}

impl Facts<'_> {
    /// Fails unless the kernel was compiled with the launch facts that this program has of it: ADR 6.
    pub fn check(&self, info: &KernelInfo, manifest: &Path) -> Result<()> {
        let numbers = [
            ("threads", info.threads, self.threads),
            ("cluster", info.cluster, self.cluster),
            ("shared", info.shared_bytes, self.shared_bytes),
            ("words", info.words, self.words),
        ];
        let numbers = numbers.map(|(what, expected, found)| (what, expected.to_string(), found.to_string()));
        let parameters = ("parameters", info.parameters.join(", "), self.parameters.join(", "));
        match [parameters].into_iter().chain(numbers).find(|(_, expected, found)| expected != found) {
            None => Ok(()),
            Some((what, expected, found)) => {
                Err(Error::KernelMismatch { kernel: info.name, manifest: manifest.to_owned(), what, expected, found })
            }
        }
    }
}
