//! The source hash in a package of a registry.
//!
//! Cargo rewrites the manifests of packages and takes the crates that a kernel crate depends on out of its reach, so that the [source hash](crate::source_hash())
//! cannot be computed there. The package holds it in the file [`FILE`], with a hash of the package's own sources: where these were edited, the hash is another, and
//! programs refuse the kernels that were compiled before.

use std::{fs, path::Path};

use crate::source_hash::{Result, SourceHashError, own_sources, source_hash};

/// The file, beside `Cargo.toml`.
pub const FILE: &str = "SOURCE_HASH";

/// Cargo writes this file into packages alone: a stamp that was left in a checkout is not read.
const PACKAGED: &str = "Cargo.toml.orig";

/// What stands in the file [`FILE`] of the kernel crate in `folder`, a checkout.
///
/// # Errors
/// A source cannot be read.
pub fn stamp(folder: impl AsRef<Path>) -> Result<String> {
    Ok(format!("{}\n{}\n", source_hash(&folder)?, own_sources(folder.as_ref())?))
}

/// The source hash of the packaged kernel crate in `folder`; `None` in a checkout, and in a package without a stamp.
pub(crate) fn stamped(folder: &Path) -> Result<Option<String>> {
    let file = folder.join(FILE);
    if !folder.join(PACKAGED).exists() || !file.exists() {
        return Ok(None);
    }
    let text = fs::read_to_string(&file).map_err(|source| SourceHashError::Read { path: file.clone(), source })?;
    let [whole, own] = text.lines().collect::<Vec<_>>()[..] else {
        let why = "it should have two lines, the hash of all sources and that of the package's own".into();
        return Err(SourceHashError::Manifest { path: file, why });
    };
    let found = own_sources(folder)?;
    Ok(Some(if found == own { whole.to_owned() } else { format!("edited-{found}") }))
}
