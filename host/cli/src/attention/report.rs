//! What was done, for people.

use std::{fmt, path::PathBuf};

use super::Plan;

/// What `oxtile attention` prints.
#[derive(Debug)]
pub struct Report {
    /// The device, or why it was chosen.
    pub device: String,
    /// The kernels, and why.
    pub kernels: Vec<String>,
    /// The input.
    pub input: PathBuf,
    /// The output.
    pub output: PathBuf,
    /// Shapes and options.
    pub plan: Plan,
    /// Wall time.
    pub seconds: f64,
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Plan { q, k, v, .. } = &self.plan;
        writeln!(f, "device  {}", self.device)?;
        for kernel in &self.kernels {
            writeln!(f, "kernel  {kernel}")?;
        }
        writeln!(f, "input   {}: q {:?}, k {:?}, v {:?}, {}", self.input.display(), q.shape, k.shape, v.shape, q.dtype)?;
        let outputs: Vec<String> = self.plan.outputs().iter().map(|spec| format!("{} {:?}", spec.name, spec.shape)).collect();
        writeln!(f, "output  {}: {}", self.output.display(), outputs.join(", "))?;
        writeln!(f, "time    {:.2} s", self.seconds)
    }
}
