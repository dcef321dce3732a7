//! `kernel NAME`: one kernel at a time, for the person who writes it.

use std::{
    collections::{BTreeMap, BTreeSet},
    path::Path,
    process::ExitCode,
    thread,
    time::Duration,
};

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

/// Prints the figures of the kernels of that name first, then the hot loop of each.
fn report(options: &Options, tools: &CudaTools) -> Result<()> {
    let mut others = BTreeSet::new();
    let mut folders = kernels::CRATES.map(|folder| root().join(folder));
    folders.sort_by_key(|folder| !known(folder).is_ok_and(|names| names.iter().any(|name| name.starts_with(&options.name))));
    for folder in folders {
        let (mut names, rest): (BTreeSet<_>, BTreeSet<_>) = known(&folder)?.into_iter().partition(|name| name.starts_with(&options.name));
        let a_known = names.first().cloned();
        if names.is_empty() {
            others.extend(rest);
        }
        // A new kernel is found by its whole name.
        names.insert(options.name.clone());
        // One build. With line tables and without the others, a kernel may have a few instructions more or less than what is shipped.
        let build = kernels::builder(&folder).arch(options.arch.clone()).line_tables(true).kernels(names).inspect()?;
        if build.kernels.is_empty() {
            match a_known {
                Some(name) => {
                    bail!("`{name}` has no code for {}: it needs another architecture (`requires` of its #[kernel])", options.arch)
                }
                None => continue,
            }
        }
        for kernel in &build.kernels {
            figures(kernel, &folder.join("ratchet"))?;
        }
        build.findings.iter().for_each(|finding| println!("MEND {finding}"));
        for kernel in &build.kernels {
            println!("\n{} on {}", kernel.meta.name, kernel.arch);
            hot_loop(&Listing::of(&kernel.cubin, tools)?);
        }
        return Ok(());
    }
    let others = others.into_iter().collect::<Vec<_>>().join(", ");
    bail!("no kernel begins with `{}`. Name a new one wholly, with its types: `amax__bf16`. There are: {others}", options.name)
}

/// The names of the kernels that the ratchet or the last build knows.
fn known(folder: &Path) -> Result<BTreeSet<String>> {
    let package = match folder.ends_with(kernels::CRATES[0]) {
        true => "oxtile-kernels",
        false => "oxtile-conformance",
    };
    let mut names = ratchet::kernels(&folder.join("ratchet"))?;
    if let Ok(manifest) = Manifest::read(&target().join("oxtile/kernels").join(package)) {
        names.extend(manifest.kernels.into_keys());
    }
    Ok(names)
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
    let names: BTreeSet<_> = operations.keys().chain(expected.keys()).collect();
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
