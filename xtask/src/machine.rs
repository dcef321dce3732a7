//! `setup` and `doctor`: what a machine needs and what it has.

use std::{path::Path, process::Command, process::ExitCode};

use anyhow::{Result, ensure};
use oxtile_build::{Arch, CudaTools, Toolchain};

use crate::libraries::{Found, Nccl, symmetric};
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
    Arch::of_capability(nvidia_smi("compute_cap")?.lines().next()?)
}

/// Prints what was found, and how to mend what was not. Only what the build needs makes it fail.
pub fn doctor() -> Result<ExitCode> {
    let mut healthy = true;
    match Toolchain::find() {
        Ok(toolchain) => {
            let note = if toolchain.is_pinned() { "" } else { " (not the pinned release: the ratchet does not bind)" };
            report("compiler", &format!("{}{note}", toolchain.version));
            report("rust-src", "beside it");
        }
        Err(error) => healthy = fault("compiler", &error.to_string()),
    }
    match CudaTools::find(&root()) {
        Ok(tools) => report("ptxas", &format!("{} at {}", tools.release, tools.ptxas.display())),
        Err(error) => healthy = fault("ptxas", &error.to_string()),
    }
    match library("libcuda.so.1") {
        true => report("driver", &nvidia_smi("driver_version").unwrap_or_else(|| "libcuda.so.1 is there".into())),
        false => absent("driver", "no libcuda.so.1; install NVIDIA's driver (the emulator needs none)"),
    }
    match nvidia_smi("name") {
        Some(names) => names.lines().for_each(|name| report("gpu", name)),
        None => absent("gpu", "none seen by nvidia-smi; kernels run on the emulator"),
    }
    let nccl = Nccl::find();
    found("nccl", &nccl.found);
    for (name, back_end) in symmetric(&nccl) {
        let named = |text: String| format!("{name}: {text}");
        found("symmetric", &back_end.map(named).map_err(named));
    }
    Ok(if healthy { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

fn report(what: &str, found: &str) {
    println!("ok      {what:<9} {found}");
}

fn found(what: &str, found: &Found) {
    match found {
        Ok(found) => report(what, found),
        Err(mend) => absent(what, mend),
    }
}

fn absent(what: &str, mend: &str) {
    println!("absent  {what:<9} {mend}");
}

fn fault(what: &str, mend: &str) -> bool {
    println!("MISSING {what:<9} {mend}");
    false
}

/// Whether the dynamic loader would find a library.
fn library(name: &str) -> bool {
    let listed = |program: &str| {
        let output = Command::new(program).arg("-p").output().ok();
        output.is_some_and(|output| String::from_utf8_lossy(&output.stdout).contains(name))
    };
    let folders = std::env::var_os("LD_LIBRARY_PATH").unwrap_or_default();
    std::env::split_paths(&folders).any(|folder: std::path::PathBuf| folder.join(name).exists())
        || listed("ldconfig")
        || listed("/sbin/ldconfig")
        || Path::new("/usr/lib/x86_64-linux-gnu").join(name).exists()
}

fn nvidia_smi(field: &str) -> Option<String> {
    let output = Command::new("nvidia-smi").args([&format!("--query-gpu={field}"), "--format=csv,noheader"]).output().ok()?;
    let text = String::from_utf8_lossy(&output.stdout).trim().to_owned();
    (output.status.success() && !text.is_empty()).then_some(text)
}
