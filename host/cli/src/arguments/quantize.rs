//! `oxtile quantize`.

use std::path::PathBuf;

use super::{
    Device, Request, UsageError,
    help::QUANTIZE_HELP,
    words::{Word, Words},
};
use crate::quantize::{Directions, Format, Recipe};

/// `oxtile quantize`.
#[derive(Debug, PartialEq)]
pub struct Quantize {
    /// The checkpoint.
    pub input: PathBuf,
    /// The file to be made.
    pub output: PathBuf,
    /// What the tensors are quantized to, and how.
    pub recipe: Recipe,
    /// Where it runs.
    pub device: Device,
    /// JSON instead of tables.
    pub json: bool,
}

pub(super) fn parse(words: &mut Words<'_>) -> Result<Request, UsageError> {
    let (mut input, mut output, mut recipe, mut device, mut json) = (None, None, Recipe::default(), Device::Auto, false);
    while let Some(word) = words.next()? {
        match &word {
            Word::Help => return Ok(Request::Help(QUANTIZE_HELP)),
            Word::Value(_) => return Err(words.unexpected(&word)),
            Word::Flag(flag) => match flag.as_str() {
                "input" => input = Some(words.path("--input")?),
                "output" => output = Some(words.path("--output")?),
                "format" => recipe.format = words.choice("--format", &Format::ALL.map(|format| (format.name(), format)))?,
                "direction" => {
                    let choices = Directions::ALL.map(|directions| (directions.name(), directions));
                    recipe.directions = words.choice("--direction", &choices)?;
                }
                "interleave" => recipe.interleave = true,
                "hadamard" => recipe.hadamard = true,
                "stochastic" => recipe.seed = Some(words.seed("--stochastic")?),
                "device" => device = words.choice("--device", &Device::CHOICES)?,
                "json" => json = true,
                _ => return Err(words.unexpected(&word)),
            },
        }
    }
    recipe.check().map_err(|reason| words.error(reason))?;
    let (input, output) = (words.required(input, "--input FILE")?, words.required(output, "--output FILE")?);
    Ok(Request::Quantize(Quantize { input, output, recipe, device, json }))
}
