//! The output folder: PTX, cubins and the manifest that names them.

use std::{
    fs::{self, File},
    io,
    path::Path,
};

use crate::{
    Arch, Build, Error, Manifest,
    manifest::{self, remove_strays},
};

/// The file that a build locks while it writes the folder: builds of other families wait.
const LOCK: &str = ".lock";

/// Writes what was built of these families for these architectures, and removes files whose kernel is gone.
///
/// The manifest is written last, and an old one is removed before the first file that changes: a build that ends half way leaves no
/// manifest that names files of other sources.
pub(crate) fn write(build: &Build, mut manifest: Manifest, families: &[String], archs: &[Arch]) -> Result<(), Error> {
    let folder = &build.out_dir;
    fs::create_dir_all(folder).map_err(Error::file("create", folder))?;
    let path = folder.join(LOCK);
    // Unlocked where the function ends, also by an error.
    let lock = File::create(&path).map_err(Error::file("write", &path))?;
    match lock.lock() {
        // Some network file systems have no locks.
        Err(error) if error.kind() != io::ErrorKind::Unsupported => return Err(Error::file("lock", &path)(error)),
        _ => {}
    }
    if let Ok(old) = Manifest::read(folder) {
        manifest.keep(old, families, archs, &build.kernels)?;
    }
    for kernel in &build.kernels {
        manifest.add(kernel);
        for (from, kind) in [(&kernel.ptx, "ptx"), (&kernel.cubin, "cubin")] {
            copy(from, &folder.join(kernel.file_name(kind)), || remove_manifest(folder))?;
        }
    }
    manifest.write(folder)?;
    remove_strays(folder, &manifest)
}

/// Copies a file unless the same bytes are there.
fn copy(from: &Path, to: &Path, before_change: impl FnOnce() -> Result<(), Error>) -> Result<(), Error> {
    let bytes = fs::read(from).map_err(Error::file("read", from))?;
    if fs::read(to).is_ok_and(|old| old == bytes) {
        return Ok(());
    }
    before_change()?;
    fs::write(to, bytes).map_err(Error::file("write", to))
}

fn remove_manifest(folder: &Path) -> Result<(), Error> {
    let path = folder.join(manifest::FILE);
    if path.exists() { fs::remove_file(&path).map_err(Error::file("remove", &path)) } else { Ok(()) }
}
