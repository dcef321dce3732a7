//! The outcome, as one JSON document or as a table for people.

use std::{fmt, ops::Range};

use serde::Serialize;

use super::{Division, Gathers, Layout, Outcome, ShardFormat, layout};
use crate::{
    arguments,
    quantize::{
        Directions,
        job::{TensorOutcome, TensorResult},
        report::{DeviceChoice, SideReport},
    },
    safetensors::{Checkpoint, Tensor, TensorSpec},
    text::{Align, Table, bytes, count, printable, seconds, shape},
};

/// What was written, or planned. Serialized, it is the document that `--json` prints; `schema` counts its incompatible changes.
#[derive(Debug, Serialize)]
pub struct Report {
    command: &'static str,
    schema: u32,
    version: &'static str,
    input: String,
    input_bytes: u64,
    format: &'static str,
    /// `null` where nothing is quantized.
    direction: Option<&'static str>,
    ranks: u32,
    /// The rest is of files that were written, and `null` or empty with `--plan`.
    device: Option<DeviceChoice>,
    model: Option<String>,
    files: Vec<File>,
    tensors: Vec<TensorReport>,
    seconds: Option<f64>,
    /// `null` but with `--plan`.
    plan: Option<Gathers>,
}

#[derive(Debug, Serialize)]
struct File {
    file: String,
    rank: u32,
    bytes: u64,
}

/// A tensor of the input.
#[derive(Debug, Serialize)]
struct TensorReport {
    name: String,
    dtype: &'static str,
    shape: Vec<u64>,
    /// `quantized`, `rounded`, `kept`.
    action: &'static str,
    /// Why it is not quantized; `null` where it is, or nothing is.
    reason: Option<String>,
    /// What each direction cost; empty unless it is quantized.
    sides: Vec<SideReport>,
    /// How many rows each rank has; empty where all have the whole.
    rows: Vec<u64>,
}

impl TensorReport {
    /// A tensor that is not quantized.
    fn copied(tensor: &Tensor, spec: &TensorSpec, division: &Division) -> Self {
        Self {
            name: tensor.name.clone(),
            dtype: tensor.dtype.name(),
            shape: tensor.shape.clone(),
            action: if tensor.dtype == spec.dtype { "kept" } else { "rounded" },
            reason: None,
            sides: Vec::new(),
            rows: counts(&division.ranges),
        }
    }

    /// What the quantization made of a tensor.
    fn quantized(outcome: &TensorOutcome, layout: &Layout<'_>) -> Self {
        let tensor = &outcome.tensor;
        let (spec, division) = layout::kept(tensor, tensor.dtype, layout.world);
        let copied = Self::copied(tensor, &spec, &division);
        match &outcome.result {
            TensorResult::PassedThrough(reason) => Self { reason: Some(reason.to_string()), ..copied },
            TensorResult::Quantized { sides, .. } => {
                let rows = tensor.elements() / tensor.shape.last().copied().unwrap_or(1).max(1);
                let rows = counts(&layout.format.ranges(rows, layout.world));
                Self { action: "quantized", sides: sides.iter().map(SideReport::new).collect(), rows, ..copied }
            }
        }
    }
}

fn counts(ranges: &[Range<u64>]) -> Vec<u64> {
    ranges.iter().map(|range| range.end - range.start).collect()
}

impl Report {
    /// The files that were written.
    pub fn written(request: &arguments::Shard, checkpoint: &Checkpoint, layout: &Layout<'_>, outcome: Outcome) -> Self {
        let file = |(rank, (path, bytes)): (u32, (std::path::PathBuf, u64))| File { file: path.display().to_string(), rank, bytes };
        let tensors = match outcome.quantized.as_slice() {
            [] => {
                let pairs = checkpoint.tensors().iter().zip(&layout.tensors);
                pairs.map(|(tensor, (spec, division))| TensorReport::copied(tensor, spec, division)).collect()
            }
            outcomes => outcomes.iter().map(|outcome| TensorReport::quantized(outcome, layout)).collect(),
        };
        Self {
            device: outcome.device,
            model: Some(outcome.model),
            files: (0..).zip(outcome.files).map(file).collect(),
            tensors,
            seconds: Some(outcome.elapsed.as_secs_f64()),
            ..Self::of(request, checkpoint.bytes())
        }
    }

    /// A plan alone.
    pub fn planned(request: &arguments::Shard, input_bytes: u64, plan: Gathers) -> Self {
        // The passes of a step take both directions.
        let direction = matches!(request.format, ShardFormat::Quantized(_)).then_some(Directions::Both.name());
        Self { direction, plan: Some(plan), ..Self::of(request, input_bytes) }
    }

    fn of(request: &arguments::Shard, input_bytes: u64) -> Self {
        Self {
            command: "shard",
            schema: 1,
            version: env!("CARGO_PKG_VERSION"),
            input: request.input.display().to_string(),
            input_bytes,
            format: request.format.name(),
            direction: matches!(request.format, ShardFormat::Quantized(_)).then_some(request.directions().name()),
            ranks: request.world.get(),
            device: None,
            model: None,
            files: Vec::new(),
            tensors: Vec::new(),
            seconds: None,
            plan: None,
        }
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "input   {}, {}", self.input, bytes(self.input_bytes))?;
        if let (Some(first), Some(last)) = (self.files.first(), self.files.last()) {
            let largest = self.files.iter().map(|file| file.bytes).max().unwrap_or(0);
            let until = if self.files.len() > 1 { format!(" to {}", last.file) } else { String::new() };
            writeln!(f, "output  {}{until}, {} at most", first.file, bytes(largest))?;
        }
        let by = match self.direction {
            None => String::new(),
            Some(both) if both == Directions::Both.name() => ", by row and by column".to_owned(),
            Some(direction) => format!(", by {direction}"),
        };
        writeln!(f, "format  {}{by}\nranks   {}", self.format, self.ranks)?;
        if let Some(device) = &self.device {
            writeln!(f, "device  {device}")?;
        }
        if let Some(plan) = &self.plan {
            return write!(f, "{plan}");
        }
        if !self.tensors.is_empty() {
            write!(f, "\n{}", self.table())?;
        }
        if self.direction.is_some() && !self.tensors.iter().any(|tensor| tensor.action == "quantized") {
            writeln!(f, "\nnothing is quantized: no tensor is a matrix that {} takes", self.format)?;
        }
        writeln!(f, "\nmodel   {}", self.model.as_deref().unwrap_or_default())?;
        writeln!(f, "time    {}", seconds(self.seconds.unwrap_or_default()))
    }
}

impl Report {
    fn table(&self) -> Table {
        use Align::{Left, Right};
        let headings = [("tensor", Left), ("dtype", Left), ("shape", Right), ("rows a rank", Right), ("SNR dB", Right), ("", Left)];
        let mut table = Table::new(&headings);
        for tensor in &self.tensors {
            let most = tensor.rows.iter().max().map_or("all".to_owned(), u64::to_string);
            let snr = tensor.sides.iter().map(SideReport::snr).collect::<Vec<_>>().join(" ");
            let reason = tensor.reason.as_ref().map_or(String::new(), |reason| format!(": {reason}"));
            let action = format!("{}{reason}", tensor.action);
            table.row([printable(&tensor.name).into_owned(), tensor.dtype.into(), shape(&tensor.shape), most, snr, action]);
        }
        table
    }
}

impl fmt::Display for Gathers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.weights == 0 {
            return writeln!(f, "weights none: no tensor is a matrix of F32, F16 or BF16, so nothing is gathered");
        }
        let order = if self.order == "layers" { "in the order of their layers" } else { "in the order of the file" };
        writeln!(f, "weights {}, {} elements, {order}", self.weights, count(self.elements))?;
        if self.wide > 0 {
            writeln!(f, "        {} stay in BF16: their columns are no whole blocks of the format", self.wide)?;
        }
        if self.rounded > 0 {
            writeln!(f, "        {} of F32 or F16 are held in BF16, as oxtile::sharded does", self.rounded)?;
        }
        if let Some(tied) = &self.tied {
            writeln!(f, "        {tied} is the head too, in both passes (--embedding lookup: in the forward pass alone)")?;
        }
        for lookup in &self.lookups {
            writeln!(f, "        {lookup} is looked up, in the forward pass alone (--embedding tied: that of tokens is the head too)")?;
        }
        writeln!(f, "\nA rank at most")?;
        let lines = [
            ("shards", self.shard_bytes),
            ("masters in BF16, to cast", self.master_bytes),
            ("slots of gradients", self.gradient_slot_bytes),
            ("buffers of gradients", self.gradient_buffer_bytes),
            ("main gradients in F32", self.main_gradient_bytes),
            ("received, forward pass", self.forward_bytes),
            ("received, backward pass", self.backward_bytes),
            ("sent, gradients in F32", self.gradient_bytes),
            ("travel a step, all three", self.step_bytes),
            ("largest weight, gathered", self.largest_bytes),
        ];
        lines.iter().try_for_each(|(what, size)| writeln!(f, "{what:<26} {:>10}", bytes(*size)))?;
        let right = |heading| (heading, Align::Right);
        let mut table = Table::new(&["gathers ahead", "slots", "gathered weights", "peak"].map(right));
        for distance in &self.distances {
            let sizes = [distance.bytes, distance.peak_bytes].map(bytes);
            let [gathered, peak] = sizes;
            table.row([distance.distance.to_string(), distance.slots.len().to_string(), gathered, peak]);
        }
        writeln!(f, "\n{table}")?;
        writeln!(f, "The peak is that of shards, masters, gathered weights and gradients. Not in it: what an optimizer")?;
        writeln!(f, "keeps (values and moments in F32), tensors of one dimension, activations.")
    }
}
