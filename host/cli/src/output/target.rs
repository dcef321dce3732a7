//! The file that a name stands for, and what it must not be.

use std::{
    ffi::OsStr,
    fs::{File, Metadata, Permissions},
    io,
    os::unix::{
        ffi::OsStrExt,
        fs::{MetadataExt, PermissionsExt, fchown},
    },
    path::{Path, PathBuf},
};

use crate::safetensors::{WriteError, kind_if_not_file};

/// Links that are followed at most, as the system does.
const MOST_LINKS: usize = 40;

/// Where an output is to be.
#[derive(Debug)]
pub struct Target {
    /// The file itself, no link.
    pub file: PathBuf,
    /// Its folder.
    pub folder: PathBuf,
    /// The file that it replaces.
    before: Option<Metadata>,
}

impl Target {
    /// What an output's path stands for, which must not be one of `inputs`.
    ///
    /// # Errors
    /// If it is no file or is one of `inputs` under any name, or the system refuses.
    pub fn find(path: &Path, inputs: &[&Path]) -> Result<Self, WriteError> {
        let bytes = path.as_os_str().as_bytes();
        let before = match std::fs::metadata(path) {
            Ok(metadata) => Some(metadata),
            Err(error) if error.kind() == io::ErrorKind::NotFound => None,
            Err(error) => return Err(WriteError::Io { file: path.into(), action: "look at it", error }),
        };
        let kind = match &before {
            Some(metadata) => kind_if_not_file(metadata.file_type()),
            None => (bytes.ends_with(b"/") || bytes.ends_with(b"/.") || path.file_name().is_none()).then_some("folder's name"),
        };
        if let Some(kind) = kind {
            return Err(WriteError::NotAFile { file: path.into(), kind });
        }
        // Device and inode: a symbolic or hard link to the input is the input.
        let identity = |metadata: &Metadata| (metadata.dev(), metadata.ino());
        if let Some(before) = &before {
            let is_same = |input: &&&Path| std::fs::metadata(input).is_ok_and(|input| identity(&input) == identity(before));
            if let Some(input) = inputs.iter().find(is_same) {
                return Err(WriteError::SameFile { file: path.into(), linked: place(input) != place(path) });
            }
        }
        let followed =
            |path: &Path| resolved(path).map_err(|error| WriteError::Io { file: path.into(), action: "follow its links", error });
        let file = followed(path)?;
        if let Some(trace) = oxtile::timeline::trace_file()
            && place(&followed(&trace)?) == place(&file)
        {
            return Err(WriteError::Trace(path.into()));
        }
        Ok(Self { folder: folder_of(&file), file, before })
    }

    /// Folder and name, the folder without links: the same for two targets that are one.
    pub fn place(&self) -> (PathBuf, Option<&OsStr>) {
        place(&self.file)
    }

    /// Gives a file the owner and the permissions of the one that it replaces. Where the system does not let the group be kept, the group of the new
    /// file may do no more than all may.
    pub fn lend_access(&self, file: &File) -> io::Result<()> {
        let Some(before) = &self.before else { return Ok(()) };
        let own = file.metadata()?;
        let mut mode = before.mode() & 0o777;
        // With a list of access (acl(5)), the bits of the group are the most that the list may give, not what the group has.
        let list = access_list(&self.file);
        let is_lent =
            list.as_ref().is_some_and(|list| rustix::fs::fsetxattr(file, ACCESS_LIST, list, rustix::fs::XattrFlags::empty()).is_ok());
        if list.is_some() && !is_lent {
            mode &= 0o707;
        } else if list.is_none() {
            // What the folder gives new files would be widened by the bits of the group.
            let _ = rustix::fs::fremovexattr(file, ACCESS_LIST);
        }
        if (before.uid(), before.gid()) != (own.uid(), own.gid())
            && fchown(file, Some(before.uid()), Some(before.gid())).is_err()
            && before.gid() != own.gid()
            && fchown(file, None, Some(before.gid())).is_err()
        {
            mode &= 0o707 | (mode & 0o007) << 3;
        }
        // A file system that knows no modes refuses to set them, also to what they are.
        if file.metadata()?.mode() & 0o777 == mode { Ok(()) } else { file.set_permissions(Permissions::from_mode(mode)) }
    }

    /// Whether it replaces a file.
    pub fn is_replaced(&self) -> bool {
        self.before.is_some()
    }
}

/// The attribute of a file in which Linux keeps its list of access.
const ACCESS_LIST: &str = "system.posix_acl_access";

/// The list of access of a file that has one beside its mode.
fn access_list(file: &Path) -> Option<Vec<u8>> {
    let mut list = vec![0; 1 << 16];
    let length = rustix::fs::getxattr(file, ACCESS_LIST, &mut list[..]).ok()?;
    list.truncate(length);
    Some(list)
}

/// The folder of a file.
fn folder_of(file: &Path) -> PathBuf {
    match file.parent() {
        Some(folder) if !folder.as_os_str().is_empty() => folder.into(),
        _ => ".".into(),
    }
}

/// The end of a chain of links, whether it is there or not.
fn resolved(path: &Path) -> io::Result<PathBuf> {
    let mut path = path.to_owned();
    for _ in 0..MOST_LINKS {
        match std::fs::symlink_metadata(&path) {
            Ok(metadata) if metadata.is_symlink() => path = folder_of(&path).join(std::fs::read_link(&path)?),
            _ => return Ok(path),
        }
    }
    Err(io::Error::from_raw_os_error(libc::ELOOP))
}

/// Folder and name, the folder without links.
fn place(file: &Path) -> (PathBuf, Option<&OsStr>) {
    let folder = folder_of(file);
    (folder.canonicalize().unwrap_or(folder), file.file_name())
}
