//! `kernel NAME`: one kernel at a time, for the person who writes it.

use std::{collections::BTreeMap, path::Path, process::ExitCode, thread, time::Duration};

use anyhow::{Result, bail};
use lexopt::{Arg, Parser, ValueExt};
use oxtile_build::{Arch, CudaTools, Kernel, ratchet, sass::Listing, source_hash};

use crate::{kernels, machine, programs, root, say};

/// How often `--watch` looks at the sources.
const WATCH_PERIOD: Duration = Duration::from_millis(400);

struct Options {
    name: String,
    arch: Arch,
    watch: bool,
    emulate: bool,
    seed: Option<u64>,
}

/// `kernel NAME [--arch A] [--watch] [--emulate --seed N]`.
pub fn show(arguments: &mut Parser) -> Result<ExitCode> {
    let options = options(arguments)?;
    loop {
        let seen = sources()?;
        let result = if options.emulate {
            programs::emulated_cases(&options.name, options.seed)
        } else {
            machine::ready().and_then(|(_, tools)| report(&options, &tools)).map(|()| ExitCode::SUCCESS)
        };
        if !options.watch {
            return result;
        }
        if let Err(error) = result {
            eprintln!("error: {error:#}");
        }
        say("waiting for an edit (control-C ends)");
        // A file that is being written may be unreadable for a moment.
        while sources().map_or(true, |now| now == seen) {
            thread::sleep(WATCH_PERIOD);
        }
    }
}

/// Changes when a source of any kernel does.
fn sources() -> Result<[String; kernels::CRATES.len()]> {
    let mut hashes = [const { String::new() }; kernels::CRATES.len()];
    for (hash, folder) in hashes.iter_mut().zip(kernels::CRATES) {
        *hash = source_hash(root().join(folder))?;
    }
    Ok(hashes)
}

fn options(arguments: &mut Parser) -> Result<Options> {
    let mut options = Options { name: String::new(), arch: Arch::hopper(), watch: false, emulate: false, seed: None };
    while let Some(argument) = arguments.next()? {
        match argument {
            Arg::Value(name) if options.name.is_empty() => options.name = name.string()?,
            Arg::Long("arch") => options.arch = arguments.value()?.string()?.parse()?,
            Arg::Long("watch") => options.watch = true,
            Arg::Long("emulate") => options.emulate = true,
            Arg::Long("seed") => options.seed = Some(arguments.value()?.parse()?),
            other => return Err(other.unexpected().into()),
        }
    }
    if options.name.is_empty() {
        bail!("which kernel? `cargo xtask kernel NAME`; `cargo xtask build-ptx` lists them");
    }
    if options.seed.is_some() && !options.emulate {
        bail!("--seed chooses an interleaving of the emulator; add --emulate");
    }
    Ok(options)
}

fn report(options: &Options, tools: &CudaTools) -> Result<()> {
    let mut names = Vec::new();
    for folder in kernels::CRATES.map(|folder| root().join(folder)) {
        let builder = || kernels::builder(&folder).arch(options.arch.clone());
        let shipped = builder().inspect()?;
        let wanted: Vec<&Kernel> = shipped.kernels.iter().filter(|kernel| kernel.meta.name.starts_with(&options.name)).collect();
        let Some(first) = wanted.first() else {
            names.extend(shipped.kernels.into_iter().map(|kernel| kernel.meta.name));
            continue;
        };
        // The figures are those of the shipped code; the listing, with its source lines, is of a build of its own.
        let lines = builder().family(&first.meta.family).line_tables(true).inspect()?;
        for kernel in wanted {
            figures(kernel, &folder.join("ratchet"))?;
            if let Some(twin) = lines.kernels.iter().find(|twin| twin.meta.name == kernel.meta.name) {
                hot_loop(&Listing::of(&twin.cubin, tools)?);
            }
            println!();
        }
        shipped.findings.iter().filter(|finding| finding.kernel.starts_with(&options.name)).for_each(|finding| println!("MEND {finding}"));
        return Ok(());
    }
    bail!("no kernel begins with `{}`; there are: {}", options.name, names.join(", "))
}

fn figures(kernel: &Kernel, ratchet: &Path) -> Result<()> {
    let Kernel { meta, arch, usage, operations, .. } = kernel;
    let accepted = ratchet::accepted(ratchet, kernel)?;
    let beside = |accepted: Option<u32>| accepted.map_or("(not in the ratchet)".into(), |figure| format!("(ratchet {figure})"));
    let [x, y, z] = meta.threads;
    println!("{} on {arch}: {x}x{y}x{z} threads, {} bytes of shared memory", meta.name, meta.shared + usage.static_shared);
    println!("  registers     {:>5} {}", usage.registers, beside(accepted.as_ref().map(|accepted| accepted.registers)));
    println!("  instructions  {:>5} {}", usage.instructions, beside(accepted.as_ref().map(|accepted| accepted.instructions)));
    let none = BTreeMap::new();
    let expected = accepted.as_ref().map_or(&none, |accepted| &accepted.operations);
    let names: std::collections::BTreeSet<_> = operations.keys().chain(expected.keys()).collect();
    for name in names {
        let expected = accepted.is_some().then(|| expected.get(name).copied().unwrap_or(0));
        println!("  {name:<12}  {:>5} {}", operations.get(name).copied().unwrap_or(0), beside(expected));
    }
    Ok(())
}

fn hot_loop(listing: &Listing) {
    let Some(body) = listing.hot_loop() else {
        println!("  no loop: {} instructions straight through", listing.instructions.len());
        return;
    };
    println!("  hot loop: {} of {} instructions", body.len(), listing.instructions.len());
    let root = format!("{}/", root().display());
    let mut before = None;
    for instruction in body {
        if instruction.source != before {
            let source = instruction.source.as_deref().unwrap_or("unknown line");
            println!("    {}", source.strip_prefix(&root).unwrap_or(source));
            before.clone_from(&instruction.source);
        }
        println!("      {:05x}  {}", instruction.address, instruction.text);
    }
}
