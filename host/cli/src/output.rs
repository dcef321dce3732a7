//! A file that appears under its name only when it is complete.
//!
//! | file | what it holds |
//! |---|---|
//! | `target` | the file that a name stands for, and what it must not be |
//! | `draft` | the file while it is made: without a name, or with a temporary one |

mod draft;
mod target;

use std::{
    collections::HashMap,
    fs::File,
    io,
    path::{Path, PathBuf},
};

use draft::Draft;
use target::Target;

use crate::safetensors::WriteError;

/// A file in the making. It has no name where the file system knows such files, else a temporary one in the folder of its own. One that is dropped
/// before it is published leaves nothing, and neither does one whose process a signal ends.
#[derive(Debug)]
pub struct Output {
    draft: Draft,
    target: Target,
    path: PathBuf,
}

impl Output {
    /// Begins a file that is to be `path`, or what it links to.
    ///
    /// # Errors
    /// If `path` is no file or is one of `inputs` under any name, or the system refuses.
    pub fn create(path: &Path, inputs: &[&Path]) -> Result<Self, WriteError> {
        let refused = |action| move |error| WriteError::Io { file: path.into(), action, error };
        let target = Target::find(path, inputs)?;
        // What will be private is so from the beginning.
        let mode = if target.is_replaced() { 0o600 } else { draft::MODE };
        let draft = Draft::new(&target.folder, mode).map_err(|error| match target.folder.is_dir() {
            true => refused("create a file in its folder")(plain(error)),
            false => WriteError::NoFolder { file: path.into(), folder: target.folder.clone() },
        })?;
        target.lend_access(draft.file()).map_err(refused("give it the access of the file that it replaces"))?;
        Ok(Self { draft, target, path: path.into() })
    }

    /// The file, to be written.
    pub fn file(&self) -> &File {
        self.draft.file()
    }

    /// What it is to be.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// An error of the system about this file.
    pub fn error(&self, action: &'static str, error: io::Error) -> WriteError {
        WriteError::Io { file: self.path.clone(), action, error }
    }

    /// Makes the file durable, without its name.
    ///
    /// # Errors
    /// If the system refuses.
    pub fn complete(self) -> Result<Completed, WriteError> {
        self.file().sync_all().map_err(|error| self.error("flush to disk", error))?;
        Ok(Completed(self))
    }
}

/// An error without the temporary name that it speaks of.
fn plain(error: io::Error) -> io::Error {
    if error.raw_os_error().is_some() { error } else { error.kind().into() }
}

/// Refuses outputs of which two are to be one file.
///
/// # Errors
/// [`WriteError::Twice`].
pub fn check_apart<'a>(outputs: impl IntoIterator<Item = &'a Output>) -> Result<(), WriteError> {
    let mut places = HashMap::new();
    for Output { path, target, .. } in outputs {
        if let Some(other) = places.insert(target.place(), path) {
            return Err(WriteError::Twice { file: path.clone(), other: other.clone() });
        }
    }
    Ok(())
}

/// A whole file that still lacks its name. Dropped, it leaves nothing.
#[derive(Debug)]
#[must_use = "it has its name only once it is published"]
pub struct Completed(Output);

impl Completed {
    /// What it is to be.
    pub fn path(&self) -> &Path {
        self.0.path()
    }

    /// Gives the file its name, replacing what stood there.
    ///
    /// # Errors
    /// If the system refuses; nothing is left then.
    pub fn publish(self) -> Result<(), WriteError> {
        let Self(Output { draft, target, path }) = self;
        draft.publish(&target).map_err(|error| WriteError::Io { file: path, action: "give it its name", error })?;
        // The name is durable once its folder is. Some file systems cannot flush a folder: the file is whole all the same.
        let _ = File::open(target.folder).and_then(|folder| folder.sync_all());
        Ok(())
    }
}
