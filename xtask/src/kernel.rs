//! `kernel NAME`: one kernel at a time, for the person who writes it.

use std::{collections::BTreeMap, path::Path, process::ExitCode, thread, time::Duration};

use anyhow::{Result, bail};
use lexopt::{Arg, Parser, ValueExt};
use oxtile_build::{Arch, CudaTools, Kernel, Manifest, ratchet, sass::Listing, source_hash};

use crate::{kernels, machine, programs, root, say, target};

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

/// Prints the figures of the kernels of that name first, then the hot loop of each: a build of its own, with source lines.
fn report(options: &Options, tools: &CudaTools) -> Result<()> {
    let is_wanted = |name: &str| name.starts_with(&options.name);
    let mut names = Vec::new();
    let mut folders = kernels::CRATES.map(|folder| root().join(folder));
    folders.sort_by_key(|folder| family_at_last(folder, is_wanted).is_none());
    for folder in folders {
        let builder = || kernels::builder(&folder).arch(options.arch.clone());
        let shipped = match family_at_last(&folder, is_wanted) {
            Some(family) => builder().family(family).inspect()?,
            None => builder().inspect()?,
        };
        let wanted: Vec<&Kernel> = shipped.kernels.iter().filter(|kernel| is_wanted(&kernel.meta.name)).collect();
        let Some(first) = wanted.first() else {
            names.extend(shipped.kernels.into_iter().map(|kernel| kernel.meta.name));
            continue;
        };
        for kernel in &wanted {
            figures(kernel, &folder.join("ratchet"))?;
        }
        shipped.findings.iter().filter(|finding| is_wanted(&finding.kernel)).for_each(|finding| println!("MEND {finding}"));
        let lines = builder().family(&first.meta.family).line_tables(true).inspect()?;
        for kernel in lines.kernels.iter().filter(|kernel| is_wanted(&kernel.meta.name)) {
            println!("\n{} on {}", kernel.meta.name, kernel.arch);
            hot_loop(&Listing::of(&kernel.cubin, tools)?);
        }
        return Ok(());
    }
    bail!("no kernel begins with `{}`; there are: {}", options.name, names.join(", "))
}

/// The family of the kernels of that name, if the last build of the crate in `folder` had them and none of another family: it is compiled alone.
fn family_at_last(folder: &Path, is_wanted: impl Fn(&str) -> bool) -> Option<String> {
    let package = match folder.ends_with(kernels::CRATES[0]) {
        true => "oxtile-kernels",
        false => "oxtile-conformance",
    };
    let manifest = Manifest::read(&target().join("oxtile/kernels").join(package)).ok()?;
    let mut families = manifest.kernels.into_iter().filter(|(name, _)| is_wanted(name)).map(|(_, entry)| entry.meta.family);
    let first = families.next()?;
    families.all(|family| family == first).then_some(first)
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
