//! What was done, for people and for programs.

use std::{fmt, path::PathBuf};

use oxtile::{
    comm::WorldSize,
    context_parallel::{self, PassPlan, Schedule},
};
use serde::{Serialize, Serializer, ser::SerializeStruct};

use super::Plan;
use crate::text::path;

/// What `oxtile attention` prints.
#[derive(Debug)]
pub struct Report {
    /// The device, or why it was chosen.
    pub device: String,
    /// The kernels, and why; empty where ranks share the sequences.
    pub kernels: Vec<String>,
    /// How ranks shared the sequences.
    pub context_parallel: Option<Passes>,
    /// The input.
    pub input: PathBuf,
    /// The output.
    pub output: PathBuf,
    /// Shapes and options.
    pub plan: Plan,
    /// Wall time.
    pub seconds: f64,
}

/// The passes of ranks that share sequences, as rank 0 makes them.
#[derive(Debug, Serialize)]
pub struct Passes {
    /// The schedule that was asked for.
    requested: String,
    ranks: u32,
    /// Memory of a rank.
    bytes: u64,
    forward: Pass,
    /// If gradients are asked for.
    backward: Option<Pass>,
    /// The same as lines.
    #[serde(skip)]
    lines: Vec<String>,
}

#[derive(Debug, Serialize)]
struct Pass {
    schedule: String,
    kernels: Vec<&'static str>,
    launches: u32,
    /// Bytes from other ranks.
    received: u64,
    /// Bytes of device memory, of which the other pass may use the same.
    memory: u64,
    why: String,
    refused: Vec<Refusal>,
}

#[derive(Debug, Serialize)]
struct Refusal {
    schedule: String,
    why: String,
}

impl Passes {
    /// What a plan says of the passes that are made.
    pub fn new(plan: &context_parallel::Plan, requested: Schedule, world: WorldSize, has_backward: bool) -> Self {
        let refusal = |(schedule, why): &(Schedule, String)| Refusal { schedule: schedule.to_string(), why: why.clone() };
        let of = |pass: &PassPlan| Pass {
            schedule: pass.schedule.to_string(),
            kernels: pass.kernels.clone(),
            launches: pass.launches,
            received: pass.received,
            memory: pass.memory,
            why: pass.why.clone(),
            refused: pass.refused.iter().map(refusal).collect(),
        };
        let (forward, backward) = (&plan.forward, has_backward.then_some(&plan.backward));
        let lines = [format!("forward: {forward}")].into_iter().chain(backward.map(|backward| format!("backward: {backward}"))).collect();
        let (requested, ranks, bytes) = (requested.to_string(), world.get(), plan.bytes);
        Self { requested, ranks, bytes, forward: of(forward), backward: backward.map(of), lines }
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Plan { q, k, v, .. } = &self.plan;
        writeln!(f, "device  {}", self.device)?;
        for kernel in &self.kernels {
            writeln!(f, "kernel  {kernel}")?;
        }
        if let Some(Passes { lines, bytes, .. }) = &self.context_parallel {
            lines.iter().try_for_each(|line| writeln!(f, "pass    {line}"))?;
            writeln!(f, "memory  {bytes} bytes on each rank")?;
        }
        writeln!(f, "input   {}: q {:?}, k {:?}, v {:?}, {}", path(&self.input), q.shape, k.shape, v.shape, q.dtype)?;
        let outputs: Vec<String> = self.plan.outputs().iter().map(|spec| format!("{} {:?}", spec.name, spec.shape)).collect();
        writeln!(f, "output  {}: {}", path(&self.output), outputs.join(", "))?;
        writeln!(f, "time    {:.2} s", self.seconds)
    }
}

/// A tensor of the output.
#[derive(Serialize)]
struct Output {
    name: String,
    dtype: &'static str,
    shape: Vec<u64>,
}

impl Serialize for Report {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let outputs = self.plan.outputs().into_iter().map(|spec| Output { name: spec.name, dtype: spec.dtype.name(), shape: spec.shape });
        let mut document = serializer.serialize_struct("Report", 10)?;
        document.serialize_field("command", "attention")?;
        document.serialize_field("schema", &1)?;
        document.serialize_field("version", env!("CARGO_PKG_VERSION"))?;
        document.serialize_field("input", &self.input.display().to_string())?;
        document.serialize_field("output", &self.output.display().to_string())?;
        document.serialize_field("device", &self.device)?;
        document.serialize_field("kernels", &self.kernels)?;
        document.serialize_field("context_parallel", &self.context_parallel)?;
        document.serialize_field("tensors", &outputs.collect::<Vec<_>>())?;
        document.serialize_field("seconds", &self.seconds)?;
        document.end()
    }
}
