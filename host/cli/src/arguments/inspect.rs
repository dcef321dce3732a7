//! `oxtile inspect`.

use std::path::PathBuf;

use super::{
    Request, UsageError,
    help::INSPECT_HELP,
    words::{Word, Words},
};

/// `oxtile inspect`.
#[derive(Debug, PartialEq)]
pub struct Inspect {
    /// The file.
    pub file: PathBuf,
    /// The picture to be drawn, if any.
    pub histogram: Option<Histogram>,
    /// JSON instead of tables.
    pub json: bool,
}

/// `--histogram`, and what belongs to it.
#[derive(Debug, PartialEq)]
pub struct Histogram {
    /// The picture to be made.
    pub output: PathBuf,
    /// The tensor; none is the largest that can be drawn.
    pub tensor: Option<String>,
    /// The file with the values of before.
    pub against: Option<PathBuf>,
}

pub(super) fn parse(words: &mut Words<'_>) -> Result<Request, UsageError> {
    let (mut file, mut output, mut tensor, mut against, mut json) = (None, None, None, None, false);
    while let Some(word) = words.next()? {
        match word {
            Word::Help => return Ok(Request::Help(INSPECT_HELP)),
            Word::Value(value) if file.is_none() => file = Some(value.into()),
            Word::Value(_) => return Err(words.unexpected(&word)),
            Word::Flag(ref flag) => match flag.as_str() {
                "json" => json = true,
                "histogram" => output = Some(words.path("--histogram")?),
                "tensor" => tensor = Some(words.text()?),
                "against" => against = Some(words.path("--against")?),
                _ => return Err(words.unexpected(&word)),
            },
        }
    }
    if output.is_none() && (tensor.is_some() || against.is_some()) {
        return Err(words.error("--tensor and --against go with --histogram OUT.svg"));
    }
    let histogram = output.map(|output| Histogram { output, tensor, against });
    Ok(Request::Inspect(Inspect { file: words.required(file, "FILE")?, histogram, json }))
}
