//! Files that appear whole: they are written under another name, which no other thread or process has, and renamed.

use std::{
    fs,
    path::{Path, PathBuf},
    process,
    sync::atomic::{AtomicUsize, Ordering},
};

use crate::Error;

/// A name beside a file that this call alone gives.
pub(crate) fn name(path: &Path) -> PathBuf {
    static NEXT: AtomicUsize = AtomicUsize::new(0);
    let mut name = path.file_name().unwrap_or_default().to_owned();
    name.push(format!(".{}-{}", process::id(), NEXT.fetch_add(1, Ordering::Relaxed)));
    path.with_file_name(name)
}

/// Renames a draft to the file that it is of.
pub(crate) fn publish(draft: &Path, path: &Path) -> Result<(), Error> {
    fs::rename(draft, path).map_err(|error| {
        let _ = fs::remove_file(draft);
        Error::file("write", path)(error)
    })
}

/// Writes a file so that a reader sees the old one or the new one, never half of one.
pub(crate) fn write(path: &Path, bytes: impl AsRef<[u8]>) -> Result<(), Error> {
    let draft = name(path);
    fs::write(&draft, bytes).map_err(|error| {
        let _ = fs::remove_file(&draft);
        Error::file("write", &draft)(error)
    })?;
    publish(&draft, path)
}
