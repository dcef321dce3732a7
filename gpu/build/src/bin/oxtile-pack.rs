//! `oxtile-pack CRATE ARCH PACK`: builds the kernels of the crate in a folder and writes the pack. `oxtile-pack --hash PACK` prints the hash of the sources
//! of a pack. `cargo xtask package` runs both.

use std::{
    env,
    error::Error,
    fs,
    process::{self, ExitCode},
};

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
    let [folder, arch, to] = match &arguments[..] {
        [hash, file] if hash == "--hash" => {
            let bytes = fs::read(file).map_err(|error| format!("cannot read {file}: {error}"))?;
            println!("{}", pack::source_hash_of(&bytes).ok_or_else(|| format!("{file} is no pack of version {}", pack::VERSION))?);
            return Ok(());
        }
        [folder, arch, to] => [folder, arch, to],
        _ => return Err("usage: oxtile-pack CRATE ARCH PACK, or oxtile-pack --hash PACK".into()),
    };
    let arch: Arch = arch.parse()?;
    let build = Builder::new(folder).arch(arch.clone()).on_step(|step| eprintln!("  {step}")).inspect()?;
    let Build { findings, out_dir, kernels, .. } = &build;
    // What only costs speed on an architecture that nothing was tuned for is no reason to leave a kernel out.
    let wrong: Vec<_> = findings.iter().filter(|finding| !finding.is_slow()).map(ToString::to_string).collect();
    if !wrong.is_empty() {
        return Err(wrong.join("\n").into());
    }
    let package = out_dir.file_name().unwrap_or_default().to_string_lossy();
    let pack = pack::pack(&package, &build, &arch)?;
    // Under another name first: a pack that is cut off by a full disk is not taken for one.
    let draft = format!("{to}.{}", process::id());
    let written = fs::write(&draft, &pack).and_then(|()| fs::rename(&draft, to));
    if let Err(error) = written {
        let _ = fs::remove_file(&draft);
        return Err(format!("cannot write {to}: {error}").into());
    }
    println!("{to}: {} kernels, {} bytes", kernels.len(), pack.len());
    Ok(())
}
