//! What the file of a shard states about itself, under keys that begin with `oxtile.shard.`.
//!
//! | key | value |
//! |---|---|
//! | `oxtile.shard.version` | [`VERSION`] |
//! | `oxtile.shard.rank`, `oxtile.shard.ranks` | which rank's it is, from 0, of how many |
//! | `oxtile.shard.format` | a [`ShardFormat`]'s name |
//! | `oxtile.shard.direction` | `row`, `column`, `both`; missing where nothing is quantized |
//! | `oxtile.shard.model` | SHA-256 of what was divided, the same in all files of one model |
//! | `oxtile.shard.tensors` | a JSON object: for each tensor the `shape` of the whole, `by` what it is divided (`rows`, `columns`, `none`), and the `first` of those |
//! | `oxtile.shard.data` | SHA-256 of this file's data |
//! | `oxtile.shard.joined` | a JSON object: the free-form strings of the joined file that differ from those of this one; missing where none do |
//! | `oxtile.shard.header` | in rank 0's file the header of the joined one, its strings empty: where `oxtile` would write another one |
//!
//! All other strings are those of the input, and stand in the joined file too. In files of version 1 `joined` has all strings, and there is neither `data` nor `header`.

use std::collections::BTreeMap;

use oxtile::comm::WorldSize;
use serde::{Deserialize, Serialize};

use super::{By, ShardFormat};
use crate::{
    quantize::{Directions, metadata::SHARD_KEY},
    safetensors::Object,
    text::printable,
};

/// Counts the incompatible changes of what a shard's file looks like.
pub const VERSION: &str = "2";
/// The version before, which is still read.
const OLD_VERSION: &str = "1";
/// What begins every key of a shard.
pub const PREFIX: &str = "oxtile.shard.";
/// The fingerprint's key.
pub const MODEL_KEY: &str = "oxtile.shard.model";
/// The key of the data's digest.
pub const DATA_KEY: &str = "oxtile.shard.data";
/// A digest before it is known: as long as one.
pub const NO_DIGEST: &str = "0000000000000000000000000000000000000000000000000000000000000000";

const VERSION_KEY: &str = "oxtile.shard.version";
const RANKS_KEY: &str = "oxtile.shard.ranks";
const FORMAT_KEY: &str = "oxtile.shard.format";
const DIRECTION_KEY: &str = "oxtile.shard.direction";
const TENSORS_KEY: &str = "oxtile.shard.tensors";
const JOINED_KEY: &str = "oxtile.shard.joined";
const HEADER_KEY: &str = "oxtile.shard.header";
const KEYS: [&str; 10] =
    [VERSION_KEY, SHARD_KEY, RANKS_KEY, FORMAT_KEY, DIRECTION_KEY, MODEL_KEY, DATA_KEY, TENSORS_KEY, JOINED_KEY, HEADER_KEY];

/// What a shard states.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Stated {
    /// Whose it is.
    pub rank: u32,
    /// Of how many.
    pub ranks: WorldSize,
    /// What became of the tensors before they were divided.
    pub format: ShardFormat,
    /// The directions that matrices are quantized in, where any are.
    pub directions: Option<Directions>,
    /// The fingerprint of what was divided.
    pub model: String,
    /// What each tensor is of the whole.
    pub tensors: BTreeMap<String, Part>,
    /// SHA-256 of this file's data; none in files of version 1.
    pub data: Option<String>,
    /// The free-form strings of the joined file.
    pub joined: BTreeMap<String, String>,
    /// The frame (`safetensors::frame`) of the joined file's header, in the file of rank 0, where it is not the one that this program would write.
    pub header: Option<String>,
}

/// What a tensor of a shard is of the whole.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Part {
    /// The dimensions of the whole.
    pub shape: Vec<u64>,
    /// Along which dimension it is divided.
    pub by: By,
    /// The first row, or column, of this part.
    pub first: u64,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct JsonPart {
    shape: Vec<u64>,
    by: String,
    first: u64,
}

/// Strings that `oxtile shard` did not write.
#[derive(Debug, PartialEq, thiserror::Error)]
pub enum StatedError {
    /// No shard.
    #[error("its metadata has no `{SHARD_KEY}`: name files that `oxtile shard` wrote")]
    NoShard,
    /// Another version.
    #[error(
        "its metadata says {VERSION_KEY} = {0:?}, and this program reads {OLD_VERSION:?} and {VERSION:?}: shard the checkpoint again with this version"
    )]
    Version(String),
    /// A string that is missing, or is not what it should be.
    #[error("its metadata under `{key}` is not what it should be ({reason}): the file is damaged, shard the checkpoint again")]
    Damaged {
        /// The key.
        key: &'static str,
        /// What is wrong.
        reason: String,
    },
}

impl Stated {
    /// Adds it to the input's strings, which the file has too.
    pub fn write(&self, strings: &mut BTreeMap<String, String>) {
        let json = |part: &Part| JsonPart { shape: part.shape.clone(), by: part.by.name().into(), first: part.first };
        let tensors: BTreeMap<_, _> = self.tensors.iter().map(|(name, part)| (name, json(part))).collect();
        let entries = [
            (VERSION_KEY, VERSION.to_owned()),
            (SHARD_KEY, self.rank.to_string()),
            (RANKS_KEY, self.ranks.get().to_string()),
            (FORMAT_KEY, self.format.name().into()),
            (MODEL_KEY, self.model.clone()),
            (TENSORS_KEY, serde_json::to_string(&tensors).expect("strings and numbers are JSON")),
        ];
        let other: BTreeMap<_, _> = self.joined.iter().filter(|(key, value)| is_own(key) || strings.get(*key) != Some(value)).collect();
        let other = (!other.is_empty()).then(|| (JOINED_KEY.to_owned(), serde_json::to_string(&other).expect("strings are JSON")));
        strings.retain(|key, _| !is_own(key));
        strings.extend(other);
        let optional = [(DATA_KEY, &self.data), (HEADER_KEY, &self.header)];
        strings.extend(optional.into_iter().filter_map(|(key, value)| Some((key.to_owned(), value.clone()?))));
        strings.extend(entries.map(|(key, value)| (key.to_owned(), value)));
        strings.extend(self.directions.map(|directions| (DIRECTION_KEY.to_owned(), directions.name().to_owned())));
    }

    /// Reads it from a file's strings.
    ///
    /// # Errors
    /// A [`StatedError`] that names the key.
    pub fn read(strings: &BTreeMap<String, String>) -> Result<Self, StatedError> {
        if !strings.contains_key(SHARD_KEY) {
            return Err(StatedError::NoShard);
        }
        let get = |key| strings.get(key).ok_or_else(|| damaged(key, "it is missing"));
        let is_old = match get(VERSION_KEY)?.as_str() {
            VERSION => false,
            OLD_VERSION => true,
            other => return Err(StatedError::Version(other.into())),
        };
        let number = |key| get(key)?.parse::<u32>().map_err(|_| damaged(key, format!("{:?} is not a number", strings[key])));
        let ranks = WorldSize::new(number(RANKS_KEY)?).ok_or_else(|| damaged(RANKS_KEY, "there are no ranks"))?;
        let rank = number(SHARD_KEY)?;
        if rank >= ranks.get() {
            return Err(damaged(SHARD_KEY, format!("{ranks} have no rank {rank}")));
        }
        let directions = strings.contains_key(DIRECTION_KEY).then(|| {
            let choices = Directions::ALL.map(|directions| (directions.name(), directions));
            choice(DIRECTION_KEY, get(DIRECTION_KEY)?, &choices)
        });
        let tensors: Vec<(String, JsonPart)> = json(TENSORS_KEY, get(TENSORS_KEY)?)?;
        let part = |(name, JsonPart { shape, by, first }): (String, JsonPart)| {
            Ok((name, Part { shape, by: choice(TENSORS_KEY, &by, &By::CHOICES)?, first }))
        };
        let stated = match strings.get(JOINED_KEY) {
            None if is_old => return Err(damaged(JOINED_KEY, "it is missing")),
            Some(text) => json::<String>(JOINED_KEY, text)?,
            None => Vec::new(),
        };
        let data = if is_old { None } else { Some(get(DATA_KEY)?.clone()) };
        let header = strings.get(HEADER_KEY).filter(|_| !is_old).cloned();
        let input = strings.iter().filter(|(key, _)| !is_old && !is_own(key)).map(|(key, value)| (key.clone(), value.clone()));
        Ok(Self {
            rank,
            ranks,
            format: choice(FORMAT_KEY, get(FORMAT_KEY)?, &ShardFormat::CHOICES)?,
            directions: directions.transpose()?,
            model: get(MODEL_KEY)?.clone(),
            tensors: tensors.into_iter().map(part).collect::<Result<_, _>>()?,
            data,
            joined: input.chain(stated).collect(),
            header,
        })
    }

    /// Format and directions, for people.
    pub fn recipe(&self) -> String {
        let by = self.directions.map_or(String::new(), |directions| format!(" by {}", directions.name()));
        format!("{}{by}", self.format.name())
    }
}

/// Whether a string is of a shard, not of the input.
fn is_own(key: &str) -> bool {
    KEYS.contains(&key)
}

/// A frame of a header that cannot be one.
pub fn damaged_header(reason: impl Into<String>) -> StatedError {
    damaged(HEADER_KEY, reason)
}

fn damaged(key: &'static str, reason: impl Into<String>) -> StatedError {
    StatedError::Damaged { key, reason: reason.into() }
}

/// The members of an object.
fn json<'a, T: Deserialize<'a>>(key: &'static str, text: &'a str) -> Result<Vec<(String, T)>, StatedError> {
    serde_json::from_str(text).map(|Object(members)| members).map_err(|error| damaged(key, printable(&error.to_string())))
}

fn choice<T: Copy>(key: &'static str, found: &str, choices: &[(&str, T)]) -> Result<T, StatedError> {
    let chosen = choices.iter().find(|(name, _)| *name == found).map(|&(_, choice)| choice);
    chosen.ok_or_else(|| {
        let choices = choices.iter().map(|&(name, _)| name).collect::<Vec<_>>().join(", ");
        damaged(key, format!("{found:?} is none of: {choices}"))
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::quantize::Format;

    fn stated() -> Stated {
        Stated {
            rank: 1,
            ranks: WorldSize::new(3).expect("ranks"),
            format: ShardFormat::Quantized(Format::Nvfp4Squares),
            directions: Some(Directions::Both),
            model: NO_DIGEST.into(),
            data: Some(NO_DIGEST.into()),
            header: Some("{}".into()),
            tensors: [("a \"b\"\n".into(), Part { shape: vec![5, 0], by: By::Columns, first: 4 })].into(),
            joined: [("k".into(), "\u{0}".into())].into(),
        }
    }

    #[test]
    fn what_is_written_is_read() {
        let mut strings = BTreeMap::new();
        stated().write(&mut strings);
        assert_eq!(Stated::read(&strings).expect("just written"), stated());
        assert!(strings.keys().all(|key| key.starts_with(PREFIX)));
        // Strings of the input are there once; one that has a shard's name is no string of the shard.
        let strings_of = |pairs: &[(&str, &str)]| pairs.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned())).collect::<BTreeMap<_, _>>();
        let input = strings_of(&[("k", "v"), ("long", "x"), (HEADER_KEY, "theirs")]);
        let joined = strings_of(&[("k", "other"), ("long", "x"), (HEADER_KEY, "theirs")]);
        let plain = Stated { directions: None, format: ShardFormat::Keep, header: None, joined, ..stated() };
        strings.clone_from(&input);
        plain.write(&mut strings);
        assert_eq!(Stated::read(&strings).expect("just written"), plain);
        assert_eq!(strings[JOINED_KEY], r#"{"k":"other","oxtile.shard.header":"theirs"}"#);
        assert_eq!(strings["k"], "v");
        assert_eq!((plain.recipe(), stated().recipe()), ("keep".to_owned(), "nvfp4-squares by both".to_owned()));
    }

    /// As version 1 wrote them.
    #[test]
    fn files_of_the_version_before_are_read() {
        let mut strings = BTreeMap::new();
        stated().write(&mut strings);
        // That version had neither: these are the input's.
        for key in [DATA_KEY, HEADER_KEY] {
            strings.insert(key.into(), "theirs".into());
        }
        strings.insert(VERSION_KEY.into(), "1".into());
        strings.insert("of the input".into(), "alone".into());
        assert_eq!(Stated::read(&strings).expect("version 1"), Stated { data: None, header: None, ..stated() });
        strings.remove(JOINED_KEY);
        let said = Stated::read(&strings).expect_err("a refusal").to_string();
        assert!(said.contains("`oxtile.shard.joined` is not what it should be (it is missing): the file is damaged"), "{said}");
    }

    #[test]
    fn damage_is_named() {
        let refusal = |key: &str, value: Option<&str>| {
            let mut strings = BTreeMap::new();
            stated().write(&mut strings);
            strings.remove(key);
            strings.extend(value.map(|value| (key.to_owned(), value.to_owned())));
            Stated::read(&strings).expect_err("a refusal").to_string()
        };
        assert!(refusal(SHARD_KEY, None).contains("has no `oxtile.shard.rank`: name files that `oxtile shard` wrote"));
        assert!(refusal(VERSION_KEY, Some("3")).contains("shard the checkpoint again with this version"));
        assert!(refusal(SHARD_KEY, Some("3")).contains("3 ranks have no rank 3"));
        assert!(refusal(SHARD_KEY, Some("-1")).contains("\"-1\" is not a number"));
        assert!(refusal(RANKS_KEY, Some("0")).contains("`oxtile.shard.ranks` is not what it should be (there are no ranks)"));
        assert!(refusal(FORMAT_KEY, Some("int4")).contains("none of: keep, bf16, fp8, mxfp8, nvfp4, nvfp4-squares"));
        assert!(refusal(DIRECTION_KEY, Some("up")).contains("none of: row, column, both"));
        assert!(refusal(TENSORS_KEY, Some(r#"{"w":{"shape":[1],"by":"rank","first":0}}"#)).contains("none of: none, rows, columns"));
        let part = r#""w":{"shape":[1],"by":"rows","first":0"#;
        assert!(refusal(TENSORS_KEY, Some(&format!("{{{part}}},{part}}}}}"))).contains("key \"w\" stands there twice"));
        let escape = refusal(TENSORS_KEY, Some(&format!("{{{part},\"\\u001b[2J\":1}}}}")));
        assert!(escape.contains("unknown field `\\u{1b}[2J`"), "{escape}");
        assert!(refusal(JOINED_KEY, Some(r#"{"k":"a","k":"b"}"#)).contains("key \"k\" stands there twice"));
        assert!(refusal(TENSORS_KEY, Some("[")).contains("oxtile.shard.tensors"));
        assert!(refusal(DATA_KEY, None).contains("`oxtile.shard.data` is not what it should be (it is missing): the file is damaged"));
        assert!(refusal(MODEL_KEY, None).contains("`oxtile.shard.model` is not what it should be (it is missing): the file is damaged"));
    }
}
