//! Writing: the header first, then each tensor's bytes as they come, the real name last.

use std::{
    collections::{BTreeMap, HashMap, HashSet},
    ops::Range,
    os::unix::fs::FileExt,
    path::Path,
};

use serde::{Serialize, Serializer};
use sha2::{Digest, Sha256};

use super::{Dtype, Header, MAX_HEADER_BYTES, METADATA_KEY, Tensor, WriteError, header::byte_count};
use crate::output::{Completed, Output};

/// A tensor to be written.
#[derive(Clone, Debug, PartialEq)]
pub struct TensorSpec {
    /// Its name.
    pub name: String,
    /// Its element type.
    pub dtype: Dtype,
    /// Its dimensions, outermost first.
    pub shape: Vec<u64>,
}

impl TensorSpec {
    /// That of a tensor of a file.
    pub fn of(tensor: &Tensor) -> Self {
        Self { name: tensor.name.clone(), dtype: tensor.dtype, shape: tensor.shape.clone() }
    }
}

/// Where bytes go in a tensor: runs at equal distances.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Runs {
    /// The first byte.
    pub offset: u64,
    /// Bytes of a run.
    pub bytes: u64,
    /// From the start of a run to that of the next.
    pub stride: u64,
}

impl Runs {
    /// The same places of `length` bytes in the fewest runs: those that follow one another are one.
    pub fn joined(self, length: u64) -> Self {
        if self.stride == self.bytes { Self { bytes: length, ..self } } else { self }
    }
}

/// A safetensors file in the making.
///
/// All sizes are declared up front and the header is written first; [`append`](Self::append) then takes the tensors' bytes
/// in any order and in pieces of any size, and [`write_runs`](Self::write_runs) in any place, so that nothing but the piece at hand is in memory.
/// The bytes go to a file in the output's folder that has not its name yet. [`complete`](Self::complete) makes them durable, and
/// [`Completed::publish`] gives the file its name in one step; what is dropped before leaves nothing.
#[derive(Debug)]
pub struct Writer {
    output: Output,
    tensors: Vec<TensorSpec>,
    metadata: BTreeMap<String, String>,
    places: HashMap<String, Place>,
    data_start: u64,
    bytes: u64,
}

/// Bytes that are read back at a time.
const DIGEST_BYTES: usize = 1 << 20;

/// A digest as text.
pub fn hex(digest: Sha256) -> String {
    digest.finalize().iter().map(|byte| format!("{byte:02x}")).collect()
}

/// A tensor's part of the file.
#[derive(Debug)]
struct Place {
    range: Range<u64>,
    /// Where [`Writer::append`] goes on.
    next: u64,
    /// How many of its bytes are written.
    written: u64,
}

impl Writer {
    /// Creates a file with these tensors that is to be `path`.
    ///
    /// # Errors
    /// If `path` is no file or is one of `inputs` under any name, two tensors share a name, the header is longer than readers take, or the system refuses.
    pub fn create(path: &Path, inputs: &[&Path], tensors: &[TensorSpec], metadata: &BTreeMap<String, String>) -> Result<Self, WriteError> {
        Self::begin(path, inputs, (tensors, metadata), layout(path, tensors, metadata)?)
    }

    /// Creates a file with this header, byte by byte, that is to be `path`.
    ///
    /// # Errors
    /// As [`create`](Self::create).
    pub fn with_header(path: &Path, inputs: &[&Path], text: &str, header: &Header) -> Result<Self, WriteError> {
        let bytes = [&(text.len() as u64).to_le_bytes(), text.as_bytes()].concat();
        let data_start = bytes.len() as u64;
        let place = |tensor: &Tensor| {
            let range = data_start + tensor.range.start..data_start + tensor.range.end;
            (tensor.name.clone(), Place { next: range.start, range, written: 0 })
        };
        let end = header.tensors.last().map_or(0, |tensor| tensor.range.end);
        let places = header.tensors.iter().map(place).collect();
        let specs: Vec<_> = header.tensors.iter().map(TensorSpec::of).collect();
        Self::begin(path, inputs, (&specs, &header.metadata), (bytes, places, data_start + end))
    }

    fn begin(
        path: &Path,
        inputs: &[&Path],
        (tensors, metadata): (&[TensorSpec], &BTreeMap<String, String>),
        (header, places, bytes): Layout,
    ) -> Result<Self, WriteError> {
        let output = Output::create(path, inputs)?;
        output.file().write_all_at(&header, 0).map_err(|error| output.error("write", error))?;
        Ok(Self { output, tensors: tensors.into(), metadata: metadata.clone(), places, data_start: header.len() as u64, bytes })
    }

    /// Size of the finished file in bytes.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// The file.
    pub fn output(&self) -> &Output {
        &self.output
    }

    /// SHA-256 of all tensors' bytes, in the order in which they lie in the file.
    ///
    /// # Errors
    /// If the system refuses.
    pub fn data_digest(&self) -> Result<String, WriteError> {
        let (mut digest, mut window) = (Sha256::new(), vec![0; DIGEST_BYTES]);
        for start in (self.data_start..self.bytes).step_by(DIGEST_BYTES) {
            let window = &mut window[..DIGEST_BYTES.min((self.bytes - start) as usize)];
            self.output.file().read_exact_at(window, start).map_err(|error| self.output.error("read back", error))?;
            digest.update(window);
        }
        Ok(hex(digest))
    }

    /// Puts other free-form strings of the same length in the place of some.
    ///
    /// # Errors
    /// If the system refuses.
    ///
    /// # Panics
    /// If there is no such string, or it takes another number of bytes.
    pub fn restate(&mut self, strings: &[(&str, &str)]) -> Result<(), WriteError> {
        for (key, value) in strings {
            let before = self.metadata.get_mut(*key).expect("the string is there");
            assert_eq!(before.len(), value.len(), "a string keeps its length");
            (*value).clone_into(before);
        }
        let (header, _, bytes) = layout(self.output.path(), &self.tensors, &self.metadata)?;
        assert_eq!(bytes, self.bytes, "the header keeps its length");
        self.output.file().write_all_at(&header, 0).map_err(|error| self.output.error("write", error))
    }

    /// Appends to a tensor's data.
    ///
    /// # Errors
    /// If there is no such tensor, it would outgrow its declared size, or the system refuses.
    pub fn append(&mut self, tensor: &str, data: &[u8]) -> Result<(), WriteError> {
        let place = self.place(tensor)?;
        let offset = place.next - place.range.start;
        place.next += data.len() as u64;
        self.write_runs(tensor, Runs { offset, bytes: data.len() as u64, stride: 0 }, data)
    }

    /// Writes to places of a tensor's data that nothing was written to before: one run after another.
    ///
    /// # Errors
    /// As [`append`](Self::append).
    pub fn write_runs(&mut self, tensor: &str, runs: Runs, data: &[u8]) -> Result<(), WriteError> {
        let runs = runs.joined(data.len() as u64);
        let place = self.place(tensor)?;
        let (start, size) = (place.range.start, place.range.end - place.range.start);
        let room = size - place.written;
        place.written += data.len() as u64;
        let count = (data.len() as u64).div_ceil(runs.bytes.max(1));
        let end = runs.offset + count.saturating_sub(1) * runs.stride + runs.bytes.min(data.len() as u64);
        if data.len() as u64 > room || end > size {
            return Err(
                self.size_error(tensor, format!("{} more bytes, up to byte {end}, where {room} of {size} are still to come", data.len()))
            );
        }
        let mut offset = start + runs.offset;
        for run in data.chunks(runs.bytes.max(1) as usize) {
            self.output.file().write_all_at(run, offset).map_err(|error| self.output.error("write", error))?;
            offset += runs.stride;
        }
        Ok(())
    }

    fn place(&mut self, tensor: &str) -> Result<&mut Place, WriteError> {
        if !self.places.contains_key(tensor) {
            return Err(self.size_error(tensor, "was never declared".into()));
        }
        Ok(self.places.get_mut(tensor).expect("just seen"))
    }

    fn size_error(&self, tensor: &str, reason: String) -> WriteError {
        WriteError::Size { file: self.output.path().into(), name: tensor.into(), reason }
    }

    /// Makes the file durable, without its name.
    ///
    /// # Errors
    /// If a tensor is not complete or the system refuses; nothing is left then.
    pub fn complete(self) -> Result<Completed, WriteError> {
        let missing = |place: &Place| place.range.end - place.range.start - place.written;
        if let Some((name, place)) = self.places.iter().find(|(_, place)| missing(place) > 0) {
            return Err(self.size_error(name, format!("{} bytes were never written", missing(place))));
        }
        self.output.complete()
    }
}

/// Where the bytes of tensors go: a file, or the files of shards.
pub trait TensorSink {
    /// As [`Writer::append`].
    ///
    /// # Errors
    /// As [`Writer::append`].
    fn append(&mut self, tensor: &str, data: &[u8]) -> Result<(), WriteError>;

    /// As [`Writer::write_runs`].
    ///
    /// # Errors
    /// As [`Writer::write_runs`].
    fn write_runs(&mut self, tensor: &str, runs: Runs, data: &[u8]) -> Result<(), WriteError>;
}

impl TensorSink for Writer {
    fn append(&mut self, tensor: &str, data: &[u8]) -> Result<(), WriteError> {
        Writer::append(self, tensor, data)
    }

    fn write_runs(&mut self, tensor: &str, runs: Runs, data: &[u8]) -> Result<(), WriteError> {
        Writer::write_runs(self, tensor, runs, data)
    }
}

type Layout = (Vec<u8>, HashMap<String, Place>, u64);

/// The header of a file of these tensors as this program writes it, without its length.
///
/// # Errors
/// As [`Writer::create`].
pub fn header_bytes(path: &Path, tensors: &[TensorSpec], metadata: &BTreeMap<String, String>) -> Result<Vec<u8>, WriteError> {
    layout(path, tensors, metadata).map(|(header, ..)| header[size_of::<u64>()..].to_vec())
}

/// The length and header bytes, each tensor's place in the file, and the file's size.
fn layout(path: &Path, tensors: &[TensorSpec], metadata: &BTreeMap<String, String>) -> Result<Layout, WriteError> {
    let size_error = |name: &str, reason| WriteError::Size { file: path.into(), name: name.into(), reason };
    let mut names = HashSet::new();
    if let Some(twice) = tensors.iter().find(|tensor| !names.insert(&tensor.name)) {
        return Err(WriteError::DuplicateName { file: path.into(), name: twice.name.clone() });
    }
    if tensors.iter().any(|tensor| tensor.name == METADATA_KEY) {
        return Err(WriteError::ReservedName { file: path.into() });
    }
    // Widest elements first: then every tensor is aligned to its element size.
    let mut order: Vec<&TensorSpec> = tensors.iter().collect();
    order.sort_by_key(|tensor| std::cmp::Reverse(tensor.dtype.bits()));
    let (mut entries, mut end) = (Vec::new(), 0u64);
    for tensor in order {
        let bytes = byte_count(tensor.dtype, &tensor.shape).map_err(|reason| size_error(&tensor.name, reason))?;
        let start = end;
        end = start.checked_add(bytes).ok_or_else(|| size_error(&tensor.name, "the file would pass 2^64 bytes".into()))?;
        entries.push((tensor, start..end));
    }
    let mut json = serde_json::to_vec(&JsonHeader { entries: &entries, metadata }).expect("strings and numbers are JSON");
    // The data section begins on a multiple of 8, as the format suggests.
    json.resize(json.len().next_multiple_of(8), b' ');
    if json.len() as u64 > MAX_HEADER_BYTES {
        return Err(WriteError::HeaderTooLong { file: path.into(), bytes: json.len() as u64, tensors: tensors.len() });
    }
    let mut header = (json.len() as u64).to_le_bytes().to_vec();
    header.append(&mut json);

    let data_start = header.len() as u64;
    let place = |(tensor, range): (&TensorSpec, Range<u64>)| {
        let range = data_start + range.start..data_start + range.end;
        (tensor.name.clone(), Place { next: range.start, range, written: 0 })
    };
    Ok((header, entries.into_iter().map(place).collect(), data_start + end))
}

struct JsonHeader<'a> {
    entries: &'a [(&'a TensorSpec, Range<u64>)],
    metadata: &'a BTreeMap<String, String>,
}

#[derive(Serialize)]
#[serde(untagged)]
enum JsonEntry<'a> {
    Metadata(&'a BTreeMap<String, String>),
    Tensor { dtype: &'static str, shape: &'a [u64], data_offsets: [u64; 2] },
}

impl Serialize for JsonHeader<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let metadata = (!self.metadata.is_empty()).then_some((METADATA_KEY, JsonEntry::Metadata(self.metadata)));
        let tensors = self.entries.iter().map(|(tensor, range)| {
            let data_offsets = [range.start, range.end];
            (tensor.name.as_str(), JsonEntry::Tensor { dtype: tensor.dtype.name(), shape: &tensor.shape, data_offsets })
        });
        serializer.collect_map(metadata.into_iter().chain(tensors))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The bytes of a header with a string of this length.
    fn header(string: usize) -> Result<usize, WriteError> {
        layout(Path::new("out"), &[], &[("k".to_owned(), "x".repeat(string))].into()).map(|(header, ..)| header.len())
    }

    /// `{"__metadata__":{"k":""}}` has 25 bytes.
    #[test]
    fn the_longest_header_is_that_of_readers() {
        let most = MAX_HEADER_BYTES as usize - 25;
        assert_eq!(header(most).expect("it fits") as u64, 8 + MAX_HEADER_BYTES);
        let error = header(most + 1).expect_err("it does not").to_string();
        assert!(
            error.starts_with("out: the header of its 0 tensors would have 100000008 bytes, more than the format's limit of 100000000"),
            "{error}"
        );
    }

    #[test]
    fn the_name_of_the_strings_is_none_of_a_tensor() {
        let tensor = TensorSpec { name: METADATA_KEY.into(), dtype: Dtype::F32, shape: vec![] };
        let error = layout(Path::new("out"), &[tensor], &BTreeMap::new()).expect_err("a refusal").to_string();
        assert!(error.contains("no tensor can be named `__metadata__`"), "{error}");
    }

    #[test]
    fn runs_that_follow_one_another_are_one() {
        let runs = Runs { offset: 3, bytes: 1, stride: 1 };
        assert_eq!(runs.joined(100), Runs { offset: 3, bytes: 100, stride: 1 });
        let apart = Runs { stride: 2, ..runs };
        assert_eq!(apart.joined(100), apart);
    }

    /// A column of single bytes is one call of the system, not one a byte.
    #[test]
    fn runs_that_follow_one_another_are_written_at_once() {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let tensor = TensorSpec { name: "w".into(), dtype: Dtype::U8, shape: vec![10_000] };
        let mut writer = Writer::create(&folder.path().join("out"), &[], &[tensor], &BTreeMap::new()).expect("a new file");
        let writes = || {
            let io = std::fs::read_to_string("/proc/thread-self/io").expect("counts of this thread");
            let count = io.lines().find_map(|line| line.strip_prefix("syscw: ")).expect("that of writes");
            count.parse::<u64>().expect("a number")
        };
        let before = writes();
        writer.write_runs("w", Runs { offset: 0, bytes: 1, stride: 1 }, &[7; 10_000]).expect("room");
        assert_eq!(writes() - before, 1);
        writer.complete().and_then(Completed::publish).expect("it is complete");
    }
}
