//! A checkpoint of several files, which an index names.

use std::{collections::BTreeSet, ffi::OsStr, fs::File, io::Read, path::Path};

use serde::Deserialize;

use super::{Checkpoint, Fault, Object, ReadError, Tensor};
use crate::text::printable;

/// The longest index that is read, in bytes: as long as a header may be.
const MOST_BYTES: u64 = super::MAX_HEADER_BYTES;

/// The files of an index as `model.safetensors.index.json`, whose `weight_map` names the file of each tensor, in the index' folder.
///
/// Source: `save_pretrained` of Hugging Face's transformers.
#[derive(Debug)]
pub struct Index {
    parts: Vec<Checkpoint>,
}

#[derive(Deserialize)]
struct Json {
    weight_map: Object<String>,
}

impl Index {
    /// Whether a path is named as an index is.
    pub fn is_named(path: &Path) -> bool {
        path.extension() == Some(OsStr::new("json"))
    }

    /// Opens all files of an index, and checks that each has the tensors that the index says, and no other.
    ///
    /// # Errors
    /// A [`ReadError`] that names the index, or the file at fault.
    pub fn open(path: &Path) -> Result<Self, ReadError> {
        let fault = |fault| ReadError { file: path.into(), fault };
        let json = Self::read(path).map_err(fault)?;
        let wrong = |reason: String| fault(Fault::Index(reason));
        let (map, folder) = (json.weight_map.0, path.parent().unwrap_or(Path::new("")));
        let names: BTreeSet<&str> = map.iter().map(|(_, file)| file.as_str()).collect();
        if names.is_empty() {
            return Err(wrong("it names no file".to_owned()));
        }
        if let Some(name) = names.iter().find(|name| Path::new(name).file_name() != Some(OsStr::new(name))) {
            return Err(wrong(format!("`{}` is no file of its folder", printable(name))));
        }
        let mut parts = Vec::new();
        for name in names {
            let part = Checkpoint::open(&folder.join(name))?;
            let said: BTreeSet<&str> = map.iter().filter(|(_, file)| file == name).map(|(tensor, _)| tensor.as_str()).collect();
            let there: BTreeSet<&str> = part.tensors().iter().map(|tensor| tensor.name.as_str()).collect();
            if let Some(tensor) = said.symmetric_difference(&there).next() {
                let where_it_is =
                    if there.contains(tensor) { "has it, and the index names it for none of its files" } else { "does not have it" };
                return Err(wrong(format!("tensor `{}`: {} {where_it_is}", printable(tensor), printable(name))));
            }
            parts.push(part);
        }
        Ok(Self { parts })
    }

    fn read(path: &Path) -> Result<Json, Fault> {
        let metadata = std::fs::metadata(path).map_err(|error| Fault::Io { action: "open", error })?;
        if let Some(kind) = super::kind_if_not_file(metadata.file_type()) {
            return Err(Fault::NotAFile(kind));
        }
        let file = File::open(path).map_err(|error| Fault::Io { action: "open", error })?;
        let mut text = Vec::new();
        // No further, also where the file grows meanwhile.
        file.take(MOST_BYTES + 1).read_to_end(&mut text).map_err(|error| Fault::Io { action: "read", error })?;
        if text.len() as u64 > MOST_BYTES {
            return Err(Fault::Index(format!("it has more than {MOST_BYTES} bytes, and no index has")));
        }
        if text.trim_ascii_start().first() != Some(&b'{') {
            return Err(Fault::Index("it is no JSON object".to_owned()));
        }
        serde_json::from_slice(&text).map_err(|error| Fault::Index(printable(&error.to_string()).into_owned()))
    }

    /// The files, by name.
    pub fn parts(&self) -> &[Checkpoint] {
        &self.parts
    }

    /// The tensors of all files.
    pub fn tensors(&self) -> impl Iterator<Item = &Tensor> {
        self.parts.iter().flat_map(Checkpoint::tensors)
    }

    /// Bytes of all files.
    pub fn bytes(&self) -> u64 {
        self.parts.iter().map(Checkpoint::bytes).sum()
    }
}
