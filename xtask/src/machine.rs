//! `setup` and `doctor`: what a machine needs and what it has.

use std::{process::Command, process::ExitCode};

use anyhow::{Result, ensure};
use oxtile_build::{Arch, CudaTools, Toolchain};
use oxtile_doctor::{Driver, Finding, Status};

use crate::{cargo, root, say};

/// Makes the machine ready; does nothing where it is.
pub fn setup() -> Result<ExitCode> {
    let (toolchain, tools) = ready()?;
    components()?;
    println!("compiler  {} at {}", toolchain.version, toolchain.rustc.display());
    println!("ptxas     {} at {}", tools.release, tools.ptxas.display());
    Ok(ExitCode::SUCCESS)
}

/// What the other commands need, installed if it is missing.
pub fn ready() -> Result<(Toolchain, CudaTools)> {
    Ok((Toolchain::setup(&say)?, CudaTools::setup(&root(), &say)?))
}

/// Installs rustfmt and clippy where rustup's cargo lacks them. Another cargo has its own way to get them.
pub fn components() -> Result<()> {
    let absent: Vec<&str> = [("fmt", "rustfmt"), ("clippy", "clippy")]
        .into_iter()
        .filter(|(command, _)| !cargo([*command, "--version"]).output().is_ok_and(|output| output.status.success()))
        .map(|(_, component)| component)
        .collect();
    // rustup's cargo says which toolchain it is of.
    let Some(toolchain) = std::env::var_os("RUSTUP_TOOLCHAIN").filter(|_| !absent.is_empty()) else { return Ok(()) };
    say(&format!("rustup: adding {}", absent.join(", ")));
    let status = Command::new("rustup").args(["component", "add", "--toolchain"]).arg(&toolchain).args(&absent).status()?;
    ensure!(status.success(), "rustup could not add {} to {}", absent.join(", "), toolchain.to_string_lossy());
    Ok(())
}

/// The architecture of the first GPU, if there is one and kernels can be built for it.
pub fn gpu_arch() -> Option<Arch> {
    let (major, minor) = Driver::find().gpus().first()?.capability;
    Arch::of_capability(&format!("{major}.{minor}"))
}

/// Prints what was found, and how to mend what was not. Fails if something that the build needs is missing, or something is broken.
pub fn doctor() -> Result<ExitCode> {
    let mut findings = build_tools();
    findings.extend(oxtile_doctor::examine());
    findings.iter().for_each(|finding| println!("{finding}"));
    let is_broken = findings.iter().any(|finding| finding.status == Status::Broken);
    Ok(if is_broken { ExitCode::FAILURE } else { ExitCode::SUCCESS })
}

/// What the build needs, each with its own mend.
fn build_tools() -> Vec<Finding> {
    const MEND: &str = "or run `cargo xtask setup`";
    let mut findings = Vec::new();
    match Toolchain::find() {
        Ok(toolchain) => {
            let note = if toolchain.is_pinned() { "" } else { " (not the pinned release: the ratchet does not bind)" };
            findings.push(Finding::ok("compiler", format!("{}{note}", toolchain.version)));
            findings.push(Finding::ok("rust-src", "beside it"));
        }
        Err(error) => findings.push(Finding::broken("compiler", error.to_string(), MEND)),
    }
    findings.push(match CudaTools::find(&root()) {
        Ok(tools) => Finding::ok("ptxas", format!("{} at {}", tools.release, tools.ptxas.display())),
        Err(error) => Finding::broken("ptxas", error.to_string(), MEND),
    });
    findings
}
