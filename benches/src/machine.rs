//! What the numbers were measured on.

use std::{collections::BTreeMap, env, fs, process::Command};

use serde::{Deserialize, Serialize};

use crate::peers::Versions;

/// What nvidia-smi is asked for.
const QUERIES: [&str; 9] = [
    "name",
    "driver_version",
    "clocks.sm",
    "clocks.mem",
    "clocks.max.sm",
    "power.draw",
    "power.limit",
    "temperature.gpu",
    "clocks_event_reasons.active",
];

/// Answers of nvidia-smi, by query; empty where there is none.
pub type Readings = BTreeMap<String, String>;

/// The machine, the programs and the state of the GPU around a run.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Machine {
    /// The device's name, from the driver.
    pub device: String,
    /// The commit of the kernels and of this program, or that it is unknown.
    pub commit: String,
    /// What the peers ran on, or why there were none.
    pub peers: Result<Versions, String>,
    /// The GPU before the first round.
    pub before: Readings,
    /// The GPU right after the last round.
    pub after: Readings,
}

/// Reads the GPU's state.
pub fn readings() -> Readings {
    let query = format!("--query-gpu={}", QUERIES.join(","));
    let Ok(answer) = Command::new("nvidia-smi").args([&query, "--format=csv,noheader", "--id=0"]).output() else {
        return Readings::new();
    };
    if !answer.status.success() {
        return Readings::new();
    }
    parse(&String::from_utf8_lossy(&answer.stdout))
}

fn parse(line: &str) -> Readings {
    let values = line.trim().split(',').map(|value| value.trim().to_owned());
    QUERIES.iter().map(|query| (*query).to_owned()).zip(values).collect()
}

/// The commit: `OXTILE_COMMIT`, else the file `commit` beside the executable.
pub fn commit() -> String {
    let file = || fs::read_to_string(env::current_exe().ok()?.with_file_name("commit")).ok();
    let commit = env::var("OXTILE_COMMIT").ok().or_else(file).unwrap_or_default();
    if commit.trim().is_empty() { "unknown".to_owned() } else { commit.trim().to_owned() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn readings_are_named() {
        let readings = parse("NVIDIA H200, 580.1, 1980 MHz, 3201 MHz, 1980 MHz, 120.5 W, 700.00 W, 40, 0x0000000000000000\n");
        assert_eq!(readings["name"], "NVIDIA H200");
        assert_eq!(readings["power.draw"], "120.5 W");
        assert_eq!(readings.len(), QUERIES.len());
    }
}
