//! `oxtile shard` and `oxtile join`.

use std::path::PathBuf;

use oxtile::comm::{WorldSize, bootstrap::MOST_RANKS};

use super::{
    Device, Request, UsageError,
    help::{JOIN_HELP, SHARD_HELP},
    words::{Word, Words},
};
use crate::{quantize::Directions, shard::ShardFormat};

/// `oxtile shard`.
#[derive(Debug, PartialEq)]
pub struct Shard {
    /// The checkpoint.
    pub input: PathBuf,
    /// How the names of the files begin; none with `--plan`.
    pub output_prefix: Option<PathBuf>,
    /// How many ranks.
    pub world: WorldSize,
    /// What becomes of the tensors before they are divided.
    pub format: ShardFormat,
    /// The directions that matrices are quantized in.
    pub directions: Directions,
    /// The numbers of gathers that run ahead, of a plan.
    pub distances: Vec<u32>,
    /// Where it runs.
    pub device: Device,
    /// JSON instead of tables.
    pub json: bool,
}

/// `oxtile join`.
#[derive(Debug, PartialEq)]
pub struct Join {
    /// The files of all ranks.
    pub inputs: Vec<PathBuf>,
    /// The file to be made.
    pub output: PathBuf,
    /// JSON instead of lines.
    pub json: bool,
}

/// No more gathers run ahead.
const MOST_DISTANCE: u32 = 64;

pub(super) fn parse(words: &mut Words<'_>) -> Result<Request, UsageError> {
    let (mut input, mut output_prefix, mut ranks, mut plan, mut distance) = (None, None, None, false, None);
    let (mut format, mut directions, mut device, mut json) = (ShardFormat::Keep, None, Device::Auto, false);
    while let Some(word) = words.next()? {
        match &word {
            Word::Help => return Ok(Request::Help(SHARD_HELP)),
            Word::Value(_) => return Err(words.unexpected(&word)),
            Word::Flag(flag) => match flag.as_str() {
                "input" => input = Some(words.path("--input")?),
                "output-prefix" => output_prefix = Some(words.path("--output-prefix")?),
                "ranks" => {
                    let expected = format!("a number from 1 to {MOST_RANKS}");
                    ranks = Some(words.number("--ranks", &expected, |ranks| (1..=MOST_RANKS).contains(ranks))?);
                }
                "format" => format = words.choice("--format", &ShardFormat::CHOICES)?,
                "direction" => {
                    let choices = Directions::ALL.map(|directions| (directions.name(), directions));
                    directions = Some(words.choice("--direction", &choices)?);
                }
                "plan" => plan = true,
                "distance" => {
                    let expected = format!("a number from 0 to {MOST_DISTANCE}");
                    distance = Some(words.number("--distance", &expected, |distance| *distance <= MOST_DISTANCE)?);
                }
                "device" => device = words.choice("--device", &Device::CHOICES)?,
                "json" => json = true,
                _ => return Err(words.unexpected(&word)),
            },
        }
    }
    let input = words.required(input, "--input FILE")?;
    let world = words.required(ranks.and_then(WorldSize::new), "--ranks RANKS")?;
    if plan != output_prefix.is_none() {
        return Err(words.error(match plan {
            true => "--plan writes no file: leave --output-prefix out",
            false => "--output-prefix PREFIX is missing, or --plan",
        }));
    }
    if distance.is_some() && !plan {
        return Err(words.error("--distance goes with --plan"));
    }
    if directions.is_some() && !matches!(format, ShardFormat::Quantized(_)) {
        return Err(words.error(format!("--direction goes with a format that quantizes, not with --format {}", format.name())));
    }
    if directions.is_some() && plan {
        return Err(words.error("--plan counts both directions: leave --direction out"));
    }
    if output_prefix.as_ref().is_some_and(|prefix| prefix.as_os_str().as_encoded_bytes().ends_with(b"/")) {
        return Err(words.error("--output-prefix names a folder: add how the files' names begin"));
    }
    let directions = directions.unwrap_or_default();
    let distances = distance.map_or_else(|| vec![1, 2, 3], |distance| vec![distance]);
    Ok(Request::Shard(Shard { input, output_prefix, world, format, directions, distances, device, json }))
}

pub(super) fn parse_join(words: &mut Words<'_>) -> Result<Request, UsageError> {
    let (mut inputs, mut output, mut json) = (Vec::new(), None, false);
    while let Some(word) = words.next()? {
        match &word {
            Word::Help => return Ok(Request::Help(JOIN_HELP)),
            Word::Value(_) => return Err(words.unexpected(&word)),
            Word::Flag(flag) => match flag.as_str() {
                "input" | "inputs" => inputs.extend(words.paths("--inputs")?),
                "output" => output = Some(words.path("--output")?),
                "json" => json = true,
                _ => return Err(words.unexpected(&word)),
            },
        }
    }
    let inputs = words.required(Some(inputs).filter(|inputs| !inputs.is_empty()), "--inputs FILE...")?;
    let output = words.required(output, "--output FILE")?;
    Ok(Request::Join(Join { inputs, output, json }))
}
