//! The outcome, as one JSON document or as lines for people.

use std::{fmt, time::Duration};

use serde::Serialize;

use super::{Joined, Shards};
use crate::{
    arguments,
    safetensors::Checkpoint,
    text::{bytes, seconds},
};

/// What was put together. Serialized, it is the document that `--json` prints; `schema` counts its incompatible changes.
#[derive(Debug, Serialize)]
pub struct Report {
    command: &'static str,
    schema: u32,
    version: &'static str,
    /// By rank.
    inputs: Vec<String>,
    output: String,
    format: &'static str,
    /// `null` where nothing is quantized.
    direction: Option<&'static str>,
    ranks: u32,
    model: String,
    /// Files whose data was not checked: they state no digest, as those of older versions.
    unchecked: usize,
    tensors: usize,
    input_bytes: u64,
    output_bytes: u64,
    seconds: f64,
}

impl Report {
    /// Sums up a finished job.
    pub fn new(request: &arguments::Join, shards: &Shards, joined: &[Joined<'_>], output_bytes: u64, elapsed: Duration) -> Self {
        let stated = shards.stated();
        Self {
            command: "join",
            schema: 1,
            version: env!("CARGO_PKG_VERSION"),
            inputs: shards.files().map(|file| file.path().display().to_string()).collect(),
            output: request.output.display().to_string(),
            format: stated.format.name(),
            direction: stated.directions.map(|directions| directions.name()),
            ranks: stated.ranks.get(),
            model: stated.model.clone(),
            unchecked: shards.pairs().filter(|(_, stated)| stated.data.is_none()).count(),
            tensors: joined.len(),
            input_bytes: shards.files().map(Checkpoint::bytes).sum(),
            output_bytes,
            seconds: elapsed.as_secs_f64(),
        }
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let by = self.direction.map_or(String::new(), |direction| format!(", by {direction}"));
        writeln!(f, "inputs  {} files, {}", self.ranks, bytes(self.input_bytes))?;
        writeln!(f, "output  {}, {}", self.output, bytes(self.output_bytes))?;
        writeln!(f, "format  {}{by}\nmodel   {}", self.format, crate::text::printable(&self.model))?;
        writeln!(f, "tensors {}", self.tensors)?;
        match self.unchecked {
            0 => writeln!(f, "data    as written (SHA-256)")?,
            some => writeln!(f, "data    not checked in {some} files, which state no SHA-256: an older version wrote them")?,
        }
        writeln!(f, "time    {}", seconds(self.seconds))
    }
}
