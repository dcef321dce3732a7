//! The values that options take.

use std::str::FromStr;

use clap::builder::{PossibleValuesParser, TypedValueParser};
use oxtile::comm::{WorldSize, bootstrap::MOST_RANKS};

use crate::safetensors::Dtype;

/// The types of wide numbers, by their names.
pub const WIDE: [(&str, Dtype); 3] = [("f32", Dtype::F32), ("bf16", Dtype::Bf16), ("f16", Dtype::F16)];

/// Seeds, for errors.
pub const SEED: &str = "a whole number from 0 to 18446744073709551615";

/// One of a few values, by its name.
pub fn choice<T: Copy + Send + Sync + 'static>(choices: impl IntoIterator<Item = (&'static str, T)>) -> impl TypedValueParser<Value = T> {
    let choices: Vec<_> = choices.into_iter().collect();
    let names: Vec<_> = choices.iter().map(|(name, _)| *name).collect();
    // An option may take its words in capitals, too.
    let value = move |name: String| choices.iter().find(|(known, _)| known.eq_ignore_ascii_case(&name)).expect("clap knows the names").1;
    PossibleValuesParser::new(names).map(value)
}

/// A number that `is_good`; `expected` says which.
pub fn number<T: FromStr>(expected: &'static str, is_good: fn(&T) -> bool) -> impl Fn(&str) -> Result<T, String> + Clone {
    move |text| text.parse().ok().filter(is_good).ok_or_else(|| format!("it is not {expected}"))
}

/// How many ranks.
///
/// # Errors
/// Which numbers there are.
pub fn ranks(text: &str) -> Result<WorldSize, String> {
    let ranks = text.parse().ok().filter(|ranks| *ranks <= MOST_RANKS).and_then(WorldSize::new);
    ranks.ok_or_else(|| format!("it is not a number from 1 to {MOST_RANKS}"))
}
