//! The outcome of a job, as one JSON document or as a table for people.

use std::fmt;

use serde::Serialize;

use super::Outcome;
use crate::{
    arguments::Dequantize,
    quantize::{direction_name, report::DeviceChoice},
    safetensors::TensorSpec,
    text::{Align, Table, bytes, count, printable, seconds, shape},
};

/// What a job did. Serialized, it is the document that `--json` prints; `schema` counts its incompatible changes.
#[derive(Debug, Serialize)]
pub struct Report {
    command: &'static str,
    schema: u32,
    version: &'static str,
    input: String,
    output: String,
    format: &'static str,
    direction: &'static str,
    device: DeviceChoice,
    restored: Vec<Restored>,
    copied_tensors: usize,
    input_bytes: u64,
    output_bytes: u64,
    seconds: f64,
}

#[derive(Debug, Serialize)]
struct Restored {
    name: String,
    dtype: &'static str,
    shape: Vec<u64>,
}

impl Report {
    /// Of a finished job.
    pub fn new(request: &Dequantize, device: DeviceChoice, outcome: Outcome) -> Self {
        let restored = |spec: TensorSpec| Restored { name: spec.name, dtype: spec.dtype.name(), shape: spec.shape };
        Self {
            command: "dequantize",
            schema: 2,
            version: env!("CARGO_PKG_VERSION"),
            input: request.input.display().to_string(),
            output: request.output.display().to_string(),
            format: outcome.recipe.format.name(),
            direction: direction_name(outcome.direction),
            device,
            restored: outcome.restored.into_iter().map(restored).collect(),
            copied_tensors: outcome.copied,
            input_bytes: outcome.bytes[0],
            output_bytes: outcome.bytes[1],
            seconds: outcome.elapsed.as_secs_f64(),
        }
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "input   {}, {}", self.input, bytes(self.input_bytes))?;
        writeln!(f, "output  {}, {}", self.output, bytes(self.output_bytes))?;
        writeln!(f, "format  {}, from its codes by {}s", self.format, self.direction)?;
        writeln!(f, "device  {}", self.device)?;
        if !self.restored.is_empty() {
            let mut table = Table::new(&[("tensor", Align::Left), ("dtype", Align::Left), ("shape", Align::Right)]);
            for Restored { name, dtype, shape: dimensions } in &self.restored {
                table.row([printable(name).into(), (*dtype).into(), shape(dimensions)]);
            }
            write!(f, "\nRestored\n{table}")?;
        }
        let elements = self.restored.iter().map(|tensor| tensor.shape.iter().product::<u64>()).sum();
        writeln!(f, "\ntensors {} restored, {} elements; {} copied", self.restored.len(), count(elements), self.copied_tensors)?;
        writeln!(f, "time    {}", seconds(self.seconds))
    }
}
