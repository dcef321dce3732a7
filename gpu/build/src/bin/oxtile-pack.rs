//! `oxtile-pack CRATE ARCH PACK`: builds the kernels of the crate in a folder and writes the pack. `cargo xtask package` runs it.

use std::{env, error::Error, fs, process::ExitCode};

use oxtile_build::{Arch, Build, Builder, pack};

fn main() -> ExitCode {
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}

fn run() -> Result<(), Box<dyn Error>> {
    let arguments: Vec<String> = env::args().skip(1).collect();
    let [folder, arch, to] = &arguments[..] else { return Err("usage: oxtile-pack CRATE ARCH PACK".into()) };
    let arch: Arch = arch.parse()?;
    let build = Builder::new(folder).arch(arch.clone()).on_step(|step| eprintln!("  {step}")).inspect()?;
    let Build { findings, out_dir, kernels, .. } = &build;
    // What only costs speed on an architecture that nothing was tuned for is no reason to leave a kernel out.
    let wrong: Vec<_> = findings.iter().filter(|finding| !finding.slow).map(ToString::to_string).collect();
    if !wrong.is_empty() {
        return Err(wrong.join("\n").into());
    }
    let package = out_dir.file_name().unwrap_or_default().to_string_lossy();
    let pack = pack::pack(&package, &build, &arch)?;
    fs::write(to, &pack).map_err(|error| format!("cannot write {to}: {error}"))?;
    println!("{to}: {} kernels, {} bytes", kernels.len(), pack.len());
    Ok(())
}
