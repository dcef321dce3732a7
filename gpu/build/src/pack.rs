//! A pack: the compiled kernels of a crate for one architecture, in one compressed file that goes into a program.
//!
//! | bytes | what |
//! |---|---|
//! | 8 | [`MAGIC`] |
//! | 4 | [`VERSION`], little endian, as the two lengths after it |
//! | 4 | bytes of the compressed index |
//! | 4 | bytes of the index |
//! | | the index: JSON, one zstd frame |
//! | | the cubins: one zstd frame for each family, in the order of the index |
//!
//! Kernels of a family share most of their code: a frame for each family is two fifths of the size of a frame for each kernel, and a program unpacks the
//! families that it uses. The reader is `host/src/runtime/pack.rs`. It shares no code with this file, so that a program links neither this crate nor a C library.

use std::{collections::BTreeMap, fs, io::Write};

use serde::Serialize;
use zstd::stream::write::Encoder;

use crate::{Arch, Build, Error, Kernel};

/// How a pack begins.
pub const MAGIC: &[u8; 8] = b"OXTPACK\0";

/// Changes when a reader of the old format would misread the new one.
pub const VERSION: u32 = 1;

/// The level of zstd: a pack is made once for each release.
const LEVEL: i32 = 22;

/// What a cubin's place in its frame is a multiple of.
const ALIGNMENT: usize = 16;

#[derive(Serialize)]
struct Index<'a> {
    package: &'a str,
    source_hash: &'a str,
    architecture: &'a Arch,
    frames: Vec<Frame<'a>>,
    kernels: BTreeMap<&'a str, Entry<'a>>,
}

/// The cubins of a family.
#[derive(Serialize)]
struct Frame<'a> {
    family: &'a str,
    packed_bytes: usize,
    bytes: usize,
}

#[derive(Serialize)]
struct Entry<'a> {
    threads: [u32; 3],
    cluster: u32,
    shared: u32,
    params: &'a serde_json::Value,
    words: u32,
    frame: usize,
    offset: usize,
    bytes: usize,
}

/// Packs what a build has for one architecture. The same kernels give the same bytes.
///
/// # Errors
/// A cubin cannot be read; there is none for the architecture.
pub fn pack(package: &str, build: &Build, arch: &Arch) -> Result<Vec<u8>, Error> {
    let mut families = BTreeMap::<&str, BTreeMap<&str, &Kernel>>::new();
    for kernel in build.kernels.iter().filter(|kernel| kernel.arch == *arch) {
        families.entry(&kernel.meta.family).or_default().insert(&kernel.meta.name, kernel);
    }
    if families.is_empty() {
        let mend = format!("build it for this architecture: `--arch {arch}`");
        return Err(Error::Missing { what: format!("`{package}` has no kernel for {arch}"), mend });
    }
    let (mut frames, mut kernels, mut packed) = (Vec::new(), BTreeMap::new(), Vec::new());
    for (family, of_family) in families {
        let mut cubins = Vec::new();
        for (name, kernel) in of_family {
            let cubin = fs::read(&kernel.cubin).map_err(Error::file("read", &kernel.cubin))?;
            cubins.resize(cubins.len().next_multiple_of(ALIGNMENT), 0);
            let meta = &kernel.meta;
            let entry = Entry {
                threads: meta.threads,
                cluster: meta.cluster,
                shared: meta.shared,
                params: &meta.params,
                words: meta.words,
                frame: frames.len(),
                offset: cubins.len(),
                bytes: cubin.len(),
            };
            kernels.insert(name, entry);
            cubins.extend(cubin);
        }
        let frame = compressed(&cubins)?;
        frames.push(Frame { family, packed_bytes: frame.len(), bytes: cubins.len() });
        packed.extend(frame);
    }
    let index = Index { package, source_hash: &build.source_hash, architecture: arch, frames, kernels };
    let index = serde_json::to_vec(&index).map_err(|error| Error::content(&build.out_dir, error))?;
    let packed_index = compressed(&index)?;
    let words = [VERSION, packed_index.len() as u32, index.len() as u32].map(u32::to_le_bytes);
    Ok([&MAGIC[..], words.as_flattened(), &packed_index, &packed].concat())
}

/// The hash of the sources that the kernels in a pack were compiled from; `None` if it is no pack of this version.
pub fn source_hash_of(pack: &[u8]) -> Option<String> {
    let rest = pack.strip_prefix(MAGIC)?;
    let (words, rest) = rest.split_first_chunk::<12>()?;
    let [version, packed, _] = [0, 4, 8].map(|at| u32::from_le_bytes([words[at], words[at + 1], words[at + 2], words[at + 3]]));
    let index = zstd::stream::decode_all(rest.get(..packed as usize)?).ok()?;
    let index: serde_json::Value = serde_json::from_slice(&index).ok()?;
    index["source_hash"].as_str().filter(|_| version == VERSION).map(str::to_owned)
}

/// One frame with a checksum. Its window is no larger than its content: the reader allocates that much.
fn compressed(bytes: &[u8]) -> Result<Vec<u8>, Error> {
    let write = || {
        let mut encoder = Encoder::new(Vec::new(), LEVEL)?;
        encoder.set_pledged_src_size(Some(bytes.len() as u64))?;
        encoder.include_checksum(true)?;
        encoder.include_contentsize(true)?;
        encoder.write_all(bytes)?;
        encoder.finish()
    };
    write().map_err(Error::file("write", "a pack in memory"))
}
