//! A file that appears under its name only when it is complete.

use std::{
    fs::{File, Permissions},
    io,
    os::unix::fs::{MetadataExt, PermissionsExt},
    path::{Path, PathBuf},
};

use tempfile::NamedTempFile;

use crate::{
    interrupt,
    safetensors::{WriteError, kind_if_not_file},
};

/// A file in the making, at a temporary name in the folder of its own. One that is dropped before it is finished leaves nothing,
/// and neither does one that a signal ends.
#[derive(Debug)]
pub struct Output {
    temporary: NamedTempFile,
    // After `temporary`, hence dropped after it: the file is on the list for as long as it exists.
    _registered: interrupt::Registration,
    path: PathBuf,
}

impl Output {
    /// Begins a file that is to be `path`.
    ///
    /// # Errors
    /// If `path` is no file or is one of `inputs` under any name, or the system refuses.
    pub fn create(path: &Path, inputs: &[&Path]) -> Result<Self, WriteError> {
        check_target(path, None)?;
        inputs.iter().try_for_each(|input| check_target(path, Some(input)))?;
        let folder = match path.parent() {
            Some(folder) if !folder.as_os_str().is_empty() => folder,
            _ => Path::new("."),
        };
        let mut builder = tempfile::Builder::new();
        // The user's umask decides, as for any file a program creates.
        builder.prefix(".oxtile-").suffix(".partial").permissions(Permissions::from_mode(0o666));
        let (temporary, registered) = interrupt::removed_on_signal(|| builder.tempfile_in(folder)).map_err(|error| WriteError::Io {
            file: path.into(),
            action: "create a temporary file beside it",
            error,
        })?;
        Ok(Self { temporary, _registered: registered, path: path.into() })
    }

    /// The file, to be written.
    pub fn file(&self) -> &File {
        self.temporary.as_file()
    }

    /// What it is to be.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// An error of the system about this file.
    pub fn error(&self, action: &'static str, error: io::Error) -> WriteError {
        WriteError::Io { file: self.path.clone(), action, error }
    }

    /// Makes the file durable under its temporary name.
    ///
    /// # Errors
    /// If the system refuses.
    pub fn complete(&self) -> Result<(), WriteError> {
        self.file().sync_all().map_err(|error| self.error("flush to disk", error))
    }

    /// Makes the file durable and gives it its name, replacing what stood there.
    ///
    /// # Errors
    /// If the system refuses; nothing is left then.
    pub fn finish(self) -> Result<(), WriteError> {
        self.complete()?;
        let path = self.path;
        let folder = self.temporary.path().parent().map(Path::to_path_buf);
        let renamed = self.temporary.persist(&path);
        renamed.map_err(|failed| WriteError::Io { file: path, action: "rename the temporary file to it", error: failed.error })?;
        // The rename is durable once its folder is. Some file systems cannot flush a folder: the file is whole all the same.
        if let Some(folder) = folder {
            let _ = File::open(folder).and_then(|folder| folder.sync_all());
        }
        Ok(())
    }
}

/// Refuses a target that is the input, or that a rename would wrongly replace.
fn check_target(path: &Path, input: Option<&Path>) -> Result<(), WriteError> {
    let target = match std::fs::metadata(path) {
        Ok(metadata) => metadata,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(error) => return Err(WriteError::Io { file: path.into(), action: "look at it", error }),
    };
    if let Some(kind) = kind_if_not_file(target.file_type()) {
        return Err(WriteError::NotAFile { file: path.into(), kind });
    }
    // Device and inode: a symbolic or hard link to the input is the input.
    let identity = |metadata: std::fs::Metadata| (metadata.dev(), metadata.ino());
    let same = input.filter(|input| std::fs::metadata(input).map(identity).ok() == Some(identity(target)));
    match same {
        Some(input) => Err(WriteError::SameFile { file: path.into(), linked: input != path }),
        None => Ok(()),
    }
}
