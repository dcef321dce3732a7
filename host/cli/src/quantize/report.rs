//! The outcome of a job, as one JSON document or as a table for people.

use std::{fmt, path::Path};

use serde::Serialize;

use super::{Fidelity, Outcome, Recipe, Side, direction_name, job::TensorResult};
use crate::{
    safetensors::Tensor,
    text::{Align, Table, bytes, count, percent, printable, seconds, shape, value},
};

/// What a job did. Serialized, it is the document that `--json` prints; `schema` counts its incompatible changes.
#[derive(Debug, Serialize)]
pub struct Report<'a> {
    command: &'static str,
    schema: u32,
    version: &'static str,
    input: String,
    output: String,
    format: &'static str,
    direction: &'static str,
    interleaved: bool,
    hadamard: bool,
    /// `null` where codes are the nearest.
    seed: Option<u64>,
    #[serde(skip)]
    recipe: Recipe,
    device: DeviceChoice,
    tensors: Vec<TensorReport<'a>>,
    totals: Totals,
}

/// The device that was used, and how it came to be chosen.
#[derive(Clone, Debug, Serialize)]
pub struct DeviceChoice {
    /// What `--device` said.
    pub requested: &'static str,
    /// The device's own name.
    pub name: String,
    /// Why this one.
    pub reason: String,
}

impl fmt::Display for DeviceChoice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.requested {
            // The reason names the device.
            "auto" => f.write_str(&self.reason),
            _ => f.write_str(&self.name),
        }
    }
}

#[derive(Debug, Serialize)]
struct TensorReport<'a> {
    name: &'a str,
    dtype: &'static str,
    shape: &'a [u64],
    #[serde(flatten)]
    result: ResultReport,
}

#[derive(Debug, Serialize)]
#[serde(tag = "action", rename_all = "snake_case")]
enum ResultReport {
    Quantized {
        elements: u64,
        /// One a direction.
        sides: Vec<SideReport>,
        seconds: f64,
    },
    PassedThrough {
        bytes: u64,
        reason: String,
    },
}

/// One direction of a tensor.
#[derive(Debug, Serialize)]
pub struct SideReport {
    direction: &'static str,
    /// What it was cast with; `null` if infinite.
    amax: f32,
    /// `null` without a signal or without noise: `exact` tells them apart.
    snr_db: Option<f64>,
    exact: bool,
    zeros: u64,
    saturated: u64,
    non_finite: u64,
}

/// Over all tensors; zeros, saturated and non-finite elements count in each direction that was made, as `coded_elements` do.
#[derive(Debug, Serialize)]
struct Totals {
    quantized_tensors: usize,
    passed_through_tensors: usize,
    quantized_elements: u64,
    coded_elements: u64,
    zeros: u64,
    saturated: u64,
    non_finite: u64,
    snr_db: Option<f64>,
    input_bytes: u64,
    output_bytes: u64,
    device_seconds: f64,
    seconds: f64,
}

impl<'a> Report<'a> {
    /// Sums up a finished job.
    pub fn new(input: &Path, output: &Path, device: DeviceChoice, outcome: &'a Outcome) -> Self {
        let tensors = outcome.tensors.iter().map(|outcome| TensorReport {
            name: &outcome.tensor.name,
            dtype: outcome.tensor.dtype.name(),
            shape: &outcome.tensor.shape,
            result: ResultReport::new(&outcome.tensor, &outcome.result),
        });
        Self {
            command: "quantize",
            schema: 2,
            version: env!("CARGO_PKG_VERSION"),
            input: input.display().to_string(),
            output: output.display().to_string(),
            format: outcome.recipe.format.name(),
            direction: outcome.recipe.directions.name(),
            interleaved: outcome.recipe.interleave,
            hadamard: outcome.recipe.hadamard,
            seed: outcome.recipe.seed,
            recipe: outcome.recipe,
            device,
            tensors: tensors.collect(),
            totals: Totals::new(outcome),
        }
    }
}

impl ResultReport {
    fn new(tensor: &Tensor, result: &TensorResult) -> Self {
        match result {
            TensorResult::PassedThrough(reason) => Self::PassedThrough { bytes: tensor.bytes(), reason: reason.to_string() },
            TensorResult::Quantized { sides, elapsed } => Self::Quantized {
                elements: tensor.elements(),
                sides: sides.iter().map(SideReport::new).collect(),
                seconds: elapsed.as_secs_f64(),
            },
        }
    }
}

impl SideReport {
    /// What a direction was cast with, and what it cost.
    pub fn new((side, amax, fidelity): &(Side, f32, Fidelity)) -> Self {
        Self {
            direction: direction_name(side.direction),
            amax: *amax,
            snr_db: finite_snr(fidelity),
            exact: fidelity.noise == 0.0,
            zeros: fidelity.zeros,
            saturated: fidelity.saturated,
            non_finite: fidelity.non_finite,
        }
    }

    /// The error for people.
    pub fn snr(&self) -> String {
        match self.snr_db {
            Some(snr) => format!("{snr:.2}"),
            None if self.exact => "exact".into(),
            None => "-".into(),
        }
    }
}

impl Totals {
    fn new(outcome: &Outcome) -> Self {
        let (mut all, mut device_seconds, mut quantized, mut elements) = (Fidelity::default(), 0.0, 0, 0);
        for outcome in &outcome.tensors {
            if let TensorResult::Quantized { sides, elapsed } = &outcome.result {
                sides.iter().for_each(|(_, _, fidelity)| all.merge(fidelity));
                device_seconds += elapsed.as_secs_f64();
                elements += outcome.tensor.elements();
                quantized += 1;
            }
        }
        Self {
            quantized_tensors: quantized,
            passed_through_tensors: outcome.tensors.len() - quantized,
            quantized_elements: elements,
            coded_elements: all.elements,
            zeros: all.zeros,
            saturated: all.saturated,
            non_finite: all.non_finite,
            snr_db: finite_snr(&all),
            input_bytes: outcome.input_bytes,
            output_bytes: outcome.output_bytes,
            device_seconds,
            seconds: outcome.elapsed.as_secs_f64(),
        }
    }
}

/// JSON has no infinity.
fn finite_snr(fidelity: &Fidelity) -> Option<f64> {
    fidelity.snr_db().filter(|snr| snr.is_finite())
}

impl fmt::Display for Report<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "input   {}, {}", self.input, bytes(self.totals.input_bytes))?;
        writeln!(f, "output  {}, {}", self.output, bytes(self.totals.output_bytes))?;
        writeln!(f, "format  {}: {}", self.format, self.recipe.description())?;
        writeln!(f, "device  {}", self.device)?;
        let (quantized, passed_through) = self.tables();
        if quantized.is_empty() {
            writeln!(f, "\nNo tensor could be quantized.")?;
        } else {
            write!(f, "\nQuantized\n{quantized}")?;
        }
        if !passed_through.is_empty() {
            write!(f, "\nPassed through unchanged\n{passed_through}")?;
        }
        write!(f, "\n{}", self.totals)
    }
}

impl Report<'_> {
    fn tables(&self) -> (Table, Table) {
        use Align::{Left, Right};
        let mut quantized = Table::new(&[
            ("tensor", Left),
            ("dtype", Left),
            ("shape", Right),
            ("by", Left),
            ("amax", Right),
            ("SNR dB", Right),
            ("zero %", Right),
            ("saturated %", Right),
            ("time", Right),
        ]);
        let mut passed_through = Table::new(&[("tensor", Left), ("dtype", Left), ("shape", Right), ("size", Right), ("reason", Left)]);
        for tensor in &self.tensors {
            let name = printable(tensor.name).into_owned();
            let (dtype, shape) = (tensor.dtype.to_string(), shape(tensor.shape));
            match &tensor.result {
                ResultReport::PassedThrough { bytes: size, reason } => {
                    passed_through.row([name, dtype, shape, bytes(*size), reason.clone()]);
                }
                ResultReport::Quantized { elements, sides, seconds: time } => {
                    for side in sides {
                        let snr = side.snr();
                        let (zeros, saturated) = (percent(side.zeros, *elements), percent(side.saturated, *elements));
                        let (by, amax) = (side.direction.to_owned(), value(f64::from(side.amax)));
                        quantized.row([name.clone(), dtype.clone(), shape.clone(), by, amax, snr, zeros, saturated, seconds(*time)]);
                    }
                }
            }
        }
        (quantized, passed_through)
    }
}

impl fmt::Display for Totals {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let tensors = self.quantized_tensors + self.passed_through_tensors;
        writeln!(f, "tensors {} quantized of {tensors}, {} elements", self.quantized_tensors, count(self.quantized_elements))?;
        let ratio = self.output_bytes as f64 / self.input_bytes as f64 * 100.0;
        writeln!(f, "size    {} to {}, {ratio:.1} %", bytes(self.input_bytes), bytes(self.output_bytes))?;
        if let Some(snr) = self.snr_db {
            writeln!(
                f,
                "error   SNR {snr:.2} dB, {} % zero, {} % saturated",
                percent(self.zeros, self.coded_elements),
                percent(self.saturated, self.coded_elements),
            )?;
        }
        if self.non_finite > 0 {
            writeln!(f, "caution {} infinite or NaN elements in the input, not part of the SNR", self.non_finite)?;
        }
        let rate = (self.quantized_elements as f64 / self.seconds) as u64;
        writeln!(f, "time    {}, {} of it in the device, {} elements/s", seconds(self.seconds), seconds(self.device_seconds), count(rate))
    }
}
