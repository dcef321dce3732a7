//! Reading: the header at once, the data one window at a time.

use std::{
    collections::BTreeMap,
    fs::{File, FileType, Metadata},
    io::{self, Read},
    ops::{Deref, Range},
    os::unix::fs::{FileExt, FileTypeExt, MetadataExt},
    path::{Path, PathBuf},
};

use super::{Fault, Header, Index, MAX_HEADER_BYTES, ReadError, Tensor};

/// An open safetensors file whose header has been checked in full.
///
/// Its data is read window by window, so that memory does not grow with the file. A file that is cut meanwhile is an error, where a map of it
/// would end the process.
#[derive(Debug)]
pub struct Checkpoint {
    path: PathBuf,
    file: File,
    opened: Stamp,
    /// Where the data section begins, in bytes from the start of the file.
    data_start: u64,
    header: Header,
}

/// What tells one state of a file from another.
#[derive(Debug, PartialEq)]
struct Stamp {
    bytes: u64,
    modified: (i64, i64),
}

impl Stamp {
    fn of(metadata: &Metadata) -> Self {
        Self { bytes: metadata.len(), modified: (metadata.mtime(), metadata.mtime_nsec()) }
    }
}

impl Checkpoint {
    /// Opens a file and checks its header against every rule of the format.
    ///
    /// # Errors
    /// A [`ReadError`] that names the file, and the tensor and field where one is at fault.
    pub fn open(path: &Path) -> Result<Self, ReadError> {
        Self::open_or_fault(path).map_err(|fault| ReadError { file: path.into(), fault })
    }

    fn open_or_fault(path: &Path) -> Result<Self, Fault> {
        let open_fault = |error| Fault::Io { action: "open", error };
        // Before `open`: opening a pipe would wait for its writer.
        let metadata = std::fs::metadata(path).map_err(open_fault)?;
        if let Some(kind) = kind_if_not_file(metadata.file_type()) {
            return Err(Fault::NotAFile(kind));
        }
        if Index::is_named(path) {
            return Err(Fault::NamedIndex);
        }
        let mut file = File::open(path).map_err(open_fault)?;
        let opened = Stamp::of(&file.metadata().map_err(open_fault)?);
        let (header_bytes, data_start) = read_header(&mut file, opened.bytes)?;
        let header = Header::parse(&header_bytes, opened.bytes - data_start)?;
        Ok(Self { path: path.into(), file, opened, data_start, header })
    }

    /// The path it was opened by.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Size of the file in bytes.
    pub fn bytes(&self) -> u64 {
        self.opened.bytes
    }

    /// Its header, byte by byte.
    ///
    /// # Errors
    /// If the system refuses, or the file has changed since it was opened.
    pub fn header_text(&self) -> Result<String, ReadError> {
        let fault = |fault| ReadError { file: self.path.clone(), fault };
        let mut header = vec![0; (self.data_start - LENGTH_BYTES) as usize];
        self.file.read_exact_at(&mut header, LENGTH_BYTES).map_err(|error| fault(Fault::Io { action: "read", error }))?;
        self.verify_unchanged()?;
        String::from_utf8(header).map_err(|error| fault(Fault::HeaderUtf8(error.utf8_error().valid_up_to())))
    }

    /// Its tensors, in the order of their data.
    pub fn tensors(&self) -> &[Tensor] {
        &self.header.tensors
    }

    /// Its free-form strings.
    pub fn metadata(&self) -> &BTreeMap<String, String> {
        &self.header.metadata
    }

    /// Reads a part of a tensor's data; `range` is in bytes from the tensor's first, and not empty.
    ///
    /// # Errors
    /// If the system refuses, or the file has changed since it was opened.
    ///
    /// # Panics
    /// If `range` is empty or reaches beyond the tensor.
    pub fn window(&self, tensor: &Tensor, range: Range<u64>) -> Result<Window, ReadError> {
        assert!(range.start < range.end && range.end <= tensor.bytes(), "a window lies inside its tensor");
        let fault = |fault| ReadError { file: self.path.clone(), fault };
        self.verify_unchanged()?;
        let refused = |error| fault(Fault::Io { action: "read", error });
        let bytes = range.end - range.start;
        let mut window = self.room(bytes)?;
        window.resize(bytes as usize, 0);
        let read = self.file.read_exact_at(&mut window, self.data_start + tensor.range.start + range.start);
        match read {
            Ok(()) => Ok(Window(window)),
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => Err(fault(Fault::Changed)),
            Err(error) => Err(refused(error)),
        }
    }

    /// An empty vector with room for so many elements of what is read.
    ///
    /// # Errors
    /// There is no such memory: a file with holes may be larger than any.
    pub fn room<N>(&self, count: u64) -> Result<Vec<N>, ReadError> {
        let mut elements = Vec::new();
        let is_there = usize::try_from(count).is_ok_and(|count| elements.try_reserve_exact(count).is_ok());
        let refused = || Fault::Io { action: "read", error: io::ErrorKind::OutOfMemory.into() };
        if is_there { Ok(elements) } else { Err(ReadError { file: self.path.clone(), fault: refused() }) }
    }

    /// The whole of a tensor's data.
    ///
    /// # Errors
    /// As [`window`](Self::window).
    pub fn whole(&self, tensor: &Tensor) -> Result<Vec<u8>, ReadError> {
        if tensor.bytes() == 0 { Ok(Vec::new()) } else { Ok(self.window(tensor, 0..tensor.bytes())?.0) }
    }

    /// Reads a tensor's data in pieces of at most `bytes` bytes, in order; nothing for an empty tensor.
    pub fn windows(&self, tensor: &Tensor, bytes: u64) -> impl Iterator<Item = Result<Window, ReadError>> {
        let starts = (0..tensor.bytes()).step_by(usize::try_from(bytes).expect("a window fits the address space"));
        starts.map(move |start| self.window(tensor, start..(start + bytes).min(tensor.bytes())))
    }

    /// Checks that the file has not been written to since it was opened.
    ///
    /// # Errors
    /// [`Fault::Changed`] if its length or modification time differs.
    pub fn verify_unchanged(&self) -> Result<(), ReadError> {
        let fault = |fault| ReadError { file: self.path.clone(), fault };
        let now = self.file.metadata().map_err(|error| fault(Fault::Io { action: "read", error }))?;
        if Stamp::of(&now) == self.opened { Ok(()) } else { Err(fault(Fault::Changed)) }
    }
}

/// A part of a tensor's data.
#[derive(Debug)]
pub struct Window(Vec<u8>);

impl Deref for Window {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.0
    }
}

/// Bytes of a header's length.
const LENGTH_BYTES: u64 = size_of::<u64>() as u64;

/// Reads the header of a file of `file_bytes` bytes; also returns where the data begins.
fn read_header(file: &mut impl Read, file_bytes: u64) -> Result<(Vec<u8>, u64), Fault> {
    let read_fault = |error| Fault::Io { action: "read", error };
    if file_bytes < LENGTH_BYTES {
        return Err(Fault::TooShort(file_bytes));
    }
    let mut length = [0; LENGTH_BYTES as usize];
    file.read_exact(&mut length).map_err(read_fault)?;
    let declared = u64::from_le_bytes(length);
    // Both bounds come before the allocation: the length is not to be trusted.
    let available = file_bytes - LENGTH_BYTES;
    if declared > available {
        return Err(Fault::HeaderBeyondFile { declared, available });
    }
    if declared > MAX_HEADER_BYTES {
        return Err(Fault::HeaderTooLong(declared));
    }
    let mut header = vec![0; declared as usize];
    file.read_exact(&mut header).map_err(read_fault)?;
    Ok((header, LENGTH_BYTES + declared))
}

/// A word for what is no regular file.
pub(crate) fn kind_if_not_file(kind: FileType) -> Option<&'static str> {
    match kind {
        kind if kind.is_file() => None,
        kind if kind.is_dir() => Some("directory"),
        kind if kind.is_fifo() => Some("pipe"),
        kind if kind.is_socket() => Some("socket"),
        _ => Some("device"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_that_is_cut_is_an_error() {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let path = folder.path().join("in");
        let json = br#"{"w":{"dtype":"U8","shape":[65536],"data_offsets":[0,65536]}}"#;
        std::fs::write(&path, [&(json.len() as u64).to_le_bytes()[..], json, &[7; 65536]].concat()).expect("a writable folder");
        let checkpoint = Checkpoint::open(&path).expect("a valid file");
        let [tensor] = checkpoint.tensors() else { panic!("one tensor") };
        let window = checkpoint.window(tensor, 0..65536).expect("it is whole");
        File::options().write(true).open(&path).and_then(|file| file.set_len(4096)).expect("it is cut");
        assert!(window.iter().all(|&byte| byte == 7), "what was read stays");
        for result in
            [checkpoint.window(tensor, 60000..65536).map(|_| ()), checkpoint.whole(tensor).map(|_| ()), checkpoint.verify_unchanged()]
        {
            assert!(matches!(result, Err(ReadError { fault: Fault::Changed, .. })), "{result:?}");
        }
    }
}
