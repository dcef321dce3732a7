//! Packs: compiled kernels inside the program. `gpu/build/src/pack.rs` says what stands in them.

use std::collections::BTreeMap;
use std::fmt;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, OnceLock, PoisonError};

use oxtile_tile::launch::KernelInfo;
use ruzstd::decoding::StreamingDecoder;
use serde::Deserialize;

use super::error::{Error, Result};
use super::facts::Facts;

/// How the path of what is inside the program begins.
pub(super) const INSIDE: &str = "this program";

const MAGIC: &[u8; 8] = b"OXTPACK\0";
const VERSION: u32 = 1;
const HEADER_BYTES: usize = 20;

/// The most that an index or the cubins of a family may be: a length that was garbled shall not take all memory.
const MOST_BYTES: usize = 256 << 20;

/// The packs of this build, one for each architecture's feature; empty in a checkout.
const PACKS: &[&[u8]] = &[
    #[cfg(feature = "sm80")]
    oxtile_cubins_sm80::PACK,
    #[cfg(feature = "sm90a")]
    oxtile_cubins_sm90a::PACK,
    #[cfg(feature = "sm100a")]
    oxtile_cubins_sm100a::PACK,
];

#[derive(Deserialize)]
struct Index {
    package: String,
    source_hash: String,
    architecture: String,
    frames: Vec<FrameBytes>,
    kernels: BTreeMap<String, Entry>,
}

#[derive(Deserialize)]
struct FrameBytes {
    packed_bytes: usize,
    bytes: usize,
}

#[derive(Deserialize)]
struct Entry {
    threads: [u32; 3],
    cluster: u32,
    #[serde(rename = "shared")]
    shared_bytes: u32,
    #[serde(rename = "params")]
    parameters: Vec<String>,
    words: u32,
    frame: usize,
    offset: usize,
    bytes: usize,
}

/// The cubins of one family, unpacked when first asked for.
struct Frame {
    packed: &'static [u8],
    bytes: usize,
    cubins: OnceLock<Result<Vec<u8>, String>>,
}

/// The compiled kernels of one package for one architecture. It lives as long as the process, as the program's bytes do, and there is one for each of these.
pub(super) struct Pack {
    index: Index,
    frames: Vec<Frame>,
}

/// A cubin inside the program.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) struct Cubin(pub &'static [u8]);

impl fmt::Debug for Cubin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} bytes", self.0.len())
    }
}

impl fmt::Debug for Pack {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.path().display().to_string())
    }
}

/// The packs that the features of this library hold.
pub(super) fn built_in() -> Result<&'static [&'static Pack]> {
    static READ: OnceLock<Result<Vec<&'static Pack>, String>> = OnceLock::new();
    let read = || PACKS.iter().filter(|pack| !pack.is_empty()).map(|pack| read(pack)).collect();
    READ.get_or_init(read).as_deref().map_err(|why| Error::KernelFile { path: INSIDE.into(), why: why.clone() })
}

/// Reads the index of a pack, once a process: runtimes that are given the same pack share what was read of it and the families that were unpacked.
pub(super) fn read(bytes: &'static [u8]) -> Result<&'static Pack, String> {
    static KNOWN: Mutex<Vec<(&[u8], &Pack)>> = Mutex::new(Vec::new());
    let mut known = KNOWN.lock().unwrap_or_else(PoisonError::into_inner);
    // The same place, not the same content, which is megabytes: bytes that live as long as the process stay what they are.
    if let Some((_, pack)) = known.iter().find(|(of, _)| std::ptr::eq(*of, bytes)) {
        return Ok(pack);
    }
    let pack: &'static Pack = Box::leak(Box::new(parsed(bytes)?));
    known.push((bytes, pack));
    Ok(pack)
}

/// A pack, of which the index is read.
fn parsed(bytes: &'static [u8]) -> Result<Pack, String> {
    let truncated = || "the pack is truncated: take it as `oxtile-pack` wrote it".to_owned();
    if !bytes.starts_with(MAGIC) {
        return Err(match MAGIC.starts_with(bytes) {
            true => truncated(),
            false => "this is no pack of kernels: it does not begin with OXTPACK".to_owned(),
        });
    }
    let (header, rest) = bytes.split_at_checked(HEADER_BYTES).ok_or_else(truncated)?;
    let word = |at: usize| u32::from_le_bytes([header[at], header[at + 1], header[at + 2], header[at + 3]]);
    if word(8) != VERSION {
        let version = word(8);
        return Err(format!("the pack has version {version}, this program reads version {VERSION}: take both of one release"));
    }
    let (index, mut rest) = rest.split_at_checked(word(12) as usize).ok_or_else(truncated)?;
    let index = unpacked(index, word(16) as usize)?;
    let index: Index = serde_json::from_slice(&index).map_err(|error| format!("the index of the pack: {error}"))?;
    let mut frames = Vec::with_capacity(index.frames.len());
    for frame in &index.frames {
        let (packed, after) = rest.split_at_checked(frame.packed_bytes).ok_or_else(truncated)?;
        frames.push(Frame { packed, bytes: frame.bytes, cubins: OnceLock::new() });
        rest = after;
    }
    let fits = |entry: &Entry| {
        let frame = frames.get(entry.frame);
        frame.is_some_and(|frame| entry.offset.checked_add(entry.bytes).is_some_and(|end| end <= frame.bytes))
    };
    match index.kernels.iter().find(|(_, entry)| !fits(entry)) {
        Some((name, _)) => Err(format!("the index of the pack: `{name}` lies outside its family")),
        None => Ok(Pack { index, frames }),
    }
}

/// The content of a zstd frame, of which the index tells the size and the frame itself a checksum.
fn unpacked(packed: &[u8], bytes: usize) -> Result<Vec<u8>, String> {
    let broken = |why: &dyn fmt::Display| format!("the pack is damaged ({why}): take it as `oxtile-pack` wrote it");
    if bytes > MOST_BYTES {
        return Err(broken(&format_args!("a part of {bytes} bytes")));
    }
    let mut content = Vec::with_capacity(bytes);
    let mut decoder = StreamingDecoder::new(packed).map_err(|error| broken(&error))?;
    // One byte more than there should be, so that more is seen.
    (&mut decoder).take(bytes as u64 + 1).read_to_end(&mut content).map_err(|error| broken(&error))?;
    let decoder = decoder.into_frame_decoder();
    let sums = [decoder.get_checksum_from_data(), decoder.get_calculated_checksum()];
    match content.len() == bytes && sums[0].is_some() && sums[0] == sums[1] {
        true => Ok(content),
        false => Err(broken(&"its size or checksum is another")),
    }
}

impl Pack {
    pub fn package(&self) -> &str {
        &self.index.package
    }

    pub fn source_hash(&self) -> &str {
        &self.index.source_hash
    }

    pub fn architecture(&self) -> &str {
        &self.index.architecture
    }

    /// How many kernels it holds.
    pub fn len(&self) -> usize {
        self.index.kernels.len()
    }

    pub fn has(&self, kernel: &str) -> bool {
        self.index.kernels.contains_key(kernel)
    }

    /// Its name in errors.
    pub fn path(&self) -> PathBuf {
        Path::new(INSIDE).join(&self.index.package).join(format!("{}.pack", self.index.architecture))
    }

    /// The launch facts that a kernel was compiled with.
    pub fn facts(&self, kernel: &str) -> Option<Facts<'_>> {
        let Entry { threads, cluster, shared_bytes, parameters, words, .. } = self.index.kernels.get(kernel)?;
        Some(Facts { threads: threads[0], cluster: *cluster, shared_bytes: *shared_bytes, parameters, words: *words })
    }

    /// The cubin of a kernel; its family is unpacked when first asked for.
    pub fn cubin(&'static self, info: &KernelInfo) -> Result<Cubin> {
        let Some(entry) = self.index.kernels.get(info.name) else {
            return Err(Error::UnknownKernel { kernel: info.name, manifest: self.path() });
        };
        let frame = &self.frames[entry.frame];
        let cubins = frame.cubins.get_or_init(|| unpacked(frame.packed, frame.bytes)).as_ref();
        let cubins = cubins.map_err(|why| Error::KernelFile { path: self.path(), why: why.clone() })?;
        Ok(Cubin(&cubins[entry.offset..][..entry.bytes]))
    }
}
