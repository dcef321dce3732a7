//! What was done, for people.

use std::{fmt, path::PathBuf};

use super::Plan;

/// What `oxtile attention` prints.
#[derive(Debug)]
pub struct Report {
    /// The device, or why it was chosen.
    pub device: String,
    /// The kernel, and why.
    pub kernel: String,
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
        writeln!(f, "kernel  {}", self.kernel)?;
        writeln!(f, "input   {}: q {:?}, k {:?}, v {:?}, {}", self.input.display(), q.shape, k.shape, v.shape, q.dtype)?;
        let [out, log_sum_exp] = [self.plan.out_shape(), self.plan.statistics_shape()];
        writeln!(f, "output  {}: out {out:?}, lse {log_sum_exp:?}", self.output.display())?;
        writeln!(f, "time    {:.2} s", self.seconds)
    }
}
