//! What a quantized file says about itself, under keys that begin with `oxtile.`.
//!
//! | key | value |
//! |---|---|
//! | `oxtile.format` | a [`Format`]'s name |
//! | `oxtile.format_version` | [`VERSION`] |
//! | `oxtile.direction` | `row`, `column`, `both` |
//! | `oxtile.layout` | `compact`, `interleaved` |
//! | `oxtile.hadamard` | `true`, `false` |
//! | `oxtile.seed` | of stochastic rounding; missing where codes are the nearest |
//! | `oxtile.tensors` | a JSON object: for each quantized tensor its `dtype` and `shape` of before |
//! | `oxtile.producer` | the program and its version |

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::{Directions, Format, Recipe};
use crate::{
    safetensors::{Dtype, Object, TensorSpec},
    text::printable,
};

/// Key that names the format; a file that has it is a quantized one.
pub const FORMAT_KEY: &str = "oxtile.format";
/// Key that names the rank of a shard; a file that has it is one of `oxtile shard`.
pub const SHARD_KEY: &str = "oxtile.shard.rank";
/// What begins every key of Oxtile's.
pub const PREFIX: &str = "oxtile.";
/// Counts the incompatible changes of what a quantized file looks like.
pub const VERSION: &str = "2";

const VERSION_KEY: &str = "oxtile.format_version";
const DIRECTION_KEY: &str = "oxtile.direction";
const LAYOUT_KEY: &str = "oxtile.layout";
const HADAMARD_KEY: &str = "oxtile.hadamard";
const SEED_KEY: &str = "oxtile.seed";
const TENSORS_KEY: &str = "oxtile.tensors";
const PRODUCER_KEY: &str = "oxtile.producer";

/// A value that cannot be what `oxtile quantize` wrote.
#[derive(Debug, PartialEq, thiserror::Error)]
pub enum MetadataError {
    /// Not written by `oxtile quantize`.
    #[error("its metadata has no `{FORMAT_KEY}`: name a file that `oxtile quantize` wrote")]
    NotQuantized,
    /// The file of one rank, if that is a number.
    #[error("it is the shard of {}: put the shards together with `oxtile join` before", .0.map_or("a rank".into(), |rank| format!("rank {rank}")))]
    Shard(Option<u32>),
    /// Another version of the layout.
    #[error("its metadata says {VERSION_KEY} = {0:?}, and this program reads {VERSION:?}: quantize the checkpoint again with this version")]
    Version(String),
    /// A key that belongs there.
    #[error("its metadata has no `{0}`: the file is damaged, quantize the checkpoint again")]
    Missing(&'static str),
    /// A word that is none of a few.
    #[error("its metadata says {key} = {found:?}, which is none of: {choices}")]
    Choice {
        /// The key.
        key: &'static str,
        /// Its value.
        found: String,
        /// What it may be.
        choices: String,
    },
    /// The object of tensors.
    #[error("its metadata under `{TENSORS_KEY}` is not what it should be ({0}): the file is damaged, quantize the checkpoint again")]
    Tensors(String),
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Original {
    dtype: String,
    shape: Vec<u64>,
}

/// Adds what a quantized file says about itself; `tensors` are the quantized ones as they were before.
pub fn write<'a>(recipe: &Recipe, tensors: impl Iterator<Item = (&'a str, Dtype, &'a [u64])>, metadata: &mut BTreeMap<String, String>) {
    let original = |(name, dtype, shape): (&'a str, Dtype, &'a [u64])| (name, Original { dtype: dtype.name().into(), shape: shape.into() });
    let tensors: BTreeMap<_, _> = tensors.map(original).collect();
    let entries = [
        (FORMAT_KEY, recipe.format.name().to_owned()),
        (VERSION_KEY, VERSION.into()),
        (DIRECTION_KEY, recipe.directions.name().into()),
        (LAYOUT_KEY, if recipe.interleave { "interleaved" } else { "compact" }.into()),
        (HADAMARD_KEY, recipe.hadamard.to_string()),
        (TENSORS_KEY, serde_json::to_string(&tensors).expect("strings and numbers are JSON")),
        (PRODUCER_KEY, format!("oxtile {}", env!("CARGO_PKG_VERSION"))),
    ];
    metadata.extend(entries.map(|(key, value)| (key.to_owned(), value)));
    metadata.extend(recipe.seed.map(|seed| (SEED_KEY.to_owned(), seed.to_string())));
}

/// The recipe, and the tensors as they were before the quantization, by name.
///
/// # Errors
/// A [`MetadataError`] that names the key.
pub fn read(metadata: &BTreeMap<String, String>) -> Result<(Recipe, Vec<TensorSpec>), MetadataError> {
    let get = |key: &'static str| metadata.get(key).ok_or(MetadataError::Missing(key));
    if let Some(rank) = metadata.get(SHARD_KEY) {
        return Err(MetadataError::Shard(rank.parse().ok()));
    }
    if !metadata.contains_key(FORMAT_KEY) {
        return Err(MetadataError::NotQuantized);
    }
    if get(VERSION_KEY)? != VERSION {
        return Err(MetadataError::Version(get(VERSION_KEY)?.clone()));
    }
    let format = choice(FORMAT_KEY, get(FORMAT_KEY)?, &Format::ALL.map(|format| (format.name(), format)))?;
    let directions = Directions::ALL.map(|directions| (directions.name(), directions));
    let recipe = Recipe {
        format,
        directions: choice(DIRECTION_KEY, get(DIRECTION_KEY)?, &directions)?,
        interleave: choice(LAYOUT_KEY, get(LAYOUT_KEY)?, &[("compact", false), ("interleaved", true)])?,
        hadamard: choice(HADAMARD_KEY, get(HADAMARD_KEY)?, &[("true", true), ("false", false)])?,
        // What the numbers were drawn from does not matter any more.
        seed: None,
    };
    recipe.check().map_err(MetadataError::Tensors)?;
    let Object::<Original>(mut tensors) =
        serde_json::from_str(get(TENSORS_KEY)?).map_err(|error| MetadataError::Tensors(printable(&error.to_string()).into()))?;
    tensors.sort_by(|a, b| a.0.cmp(&b.0));
    let specs = tensors.into_iter().map(|(name, Original { dtype, shape })| match Dtype::from_name(&dtype) {
        Some(dtype @ (Dtype::F32 | Dtype::F16 | Dtype::Bf16)) => Ok(TensorSpec { name, dtype, shape }),
        _ => Err(MetadataError::Tensors(format!("{name:?} is said to have been {dtype:?}, none of F32, F16 and BF16"))),
    });
    Ok((recipe, specs.collect::<Result<_, _>>()?))
}

fn choice<T: Copy>(key: &'static str, found: &str, choices: &[(&str, T)]) -> Result<T, MetadataError> {
    let chosen = choices.iter().find(|(name, _)| *name == found).map(|&(_, choice)| choice);
    chosen.ok_or_else(|| {
        let choices = choices.iter().map(|&(name, _)| name).collect::<Vec<_>>().join(", ");
        MetadataError::Choice { key, found: found.into(), choices }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn written(recipe: Recipe) -> BTreeMap<String, String> {
        let mut metadata = BTreeMap::new();
        write(&recipe, [("w", Dtype::Bf16, [2, 3, 32].as_slice())].into_iter(), &mut metadata);
        metadata
    }

    #[test]
    fn what_is_written_is_read() {
        let recipe = Recipe { format: Format::Nvfp4, directions: Directions::Both, interleave: true, hadamard: true, seed: Some(u64::MAX) };
        let metadata = written(recipe);
        assert_eq!(metadata[SEED_KEY], "18446744073709551615");
        let (read, tensors) = read(&metadata).expect("just written");
        assert_eq!(read, Recipe { seed: None, ..recipe });
        assert_eq!(tensors, [TensorSpec { name: "w".into(), dtype: Dtype::Bf16, shape: vec![2, 3, 32] }]);
    }

    #[test]
    fn damage_is_named() {
        let refusal = |key: &str, value: Option<&str>| {
            let mut metadata = written(Recipe::default());
            metadata.remove(key);
            metadata.extend(value.map(|value| (key.to_owned(), value.to_owned())));
            read(&metadata).expect_err("a refusal").to_string()
        };
        assert!(refusal(FORMAT_KEY, None).contains("has no `oxtile.format`: name a file"));
        assert!(refusal(SHARD_KEY, Some("2")).contains("is the shard of rank 2: put the shards together with `oxtile join`"));
        assert!(refusal(FORMAT_KEY, Some("int4")).contains("\"int4\", which is none of: mxfp8, nvfp4, nvfp4-squares, fp8, fp8-block"));
        assert!(refusal(VERSION_KEY, Some("1")).contains("quantize the checkpoint again with this version"));
        assert!(refusal(DIRECTION_KEY, Some("up")).contains("none of: row, column, both"));
        assert!(refusal(LAYOUT_KEY, None).contains("no `oxtile.layout`"));
        assert!(refusal(HADAMARD_KEY, Some("true")).contains("--hadamard goes with --format nvfp4"));
        assert!(refusal(SHARD_KEY, Some("\u{1b}[2J")).contains("is the shard of a rank: put"));
        assert!(refusal(TENSORS_KEY, Some("[")).contains("oxtile.tensors"));
        let twice = r#"{"w":{"dtype":"F32","shape":[1]},"w":{"dtype":"F32","shape":[2]}}"#;
        assert!(refusal(TENSORS_KEY, Some(twice)).contains("key \"w\" stands there twice"));
        let escape = refusal(TENSORS_KEY, Some(r#"{"w":{"dtype":"F32","shape":[1],"\u001b[2J":1}}"#));
        assert!(escape.contains("unknown field `\\u{1b}[2J`"), "{escape}");
        assert!(refusal(TENSORS_KEY, Some(r#"{"w":{"dtype":"I8","shape":[1]}}"#)).contains("\"I8\", none of F32"));
        assert!(refusal(TENSORS_KEY, Some(r#"{"w":{"dtype":"F32","shape":[-1]}}"#)).contains("-1"));
    }
}
