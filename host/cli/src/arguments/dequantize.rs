//! `oxtile dequantize`.

use std::path::PathBuf;

use super::{
    Device, Request, UsageError, WIDE,
    help::DEQUANTIZE_HELP,
    words::{Word, Words},
};
use crate::{
    quantize::{Direction, direction_name},
    safetensors::Dtype,
};

/// `oxtile dequantize`.
#[derive(Debug, PartialEq)]
pub struct Dequantize {
    /// The quantized file.
    pub input: PathBuf,
    /// The file to be made.
    pub output: PathBuf,
    /// Type of the restored tensors; none is the one that each had.
    pub dtype: Option<Dtype>,
    /// Which codes are taken; none is those by rows, where there are any.
    pub direction: Option<Direction>,
    /// Where it runs.
    pub device: Device,
    /// JSON instead of tables.
    pub json: bool,
}

pub(super) fn parse(words: &mut Words<'_>) -> Result<Request, UsageError> {
    let (mut input, mut output, mut dtype, mut direction, mut device, mut json) = (None, None, None, None, Device::Auto, false);
    while let Some(word) = words.next()? {
        match &word {
            Word::Help => return Ok(Request::Help(DEQUANTIZE_HELP)),
            Word::Value(_) => return Err(words.unexpected(&word)),
            Word::Flag(flag) => match flag.as_str() {
                "input" => input = Some(words.path("--input")?),
                "output" => output = Some(words.path("--output")?),
                "dtype" => dtype = Some(words.choice("--dtype", &WIDE)?),
                "direction" => {
                    let choices = [Direction::Rows, Direction::Columns].map(|direction| (direction_name(direction), direction));
                    direction = Some(words.choice("--direction", &choices)?);
                }
                "device" => device = words.choice("--device", &Device::CHOICES)?,
                "json" => json = true,
                _ => return Err(words.unexpected(&word)),
            },
        }
    }
    let (input, output) = (words.required(input, "--input FILE")?, words.required(output, "--output FILE")?);
    Ok(Request::Dequantize(Dequantize { input, output, dtype, direction, device, json }))
}
