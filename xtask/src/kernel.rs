//! `kernel NAME`: one kernel at a time, for the person who writes it.

use std::{
    collections::{BTreeMap, BTreeSet},
    path::Path,
    process::ExitCode,
    thread,
    time::Duration,
};

use anyhow::{Result, bail, ensure};
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
        let seen = sources(&root(), options.emulate)?;
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
        while sources(&root(), options.emulate).map_or(true, |now| now == seen) {
            thread::sleep(WATCH_PERIOD);
        }
    }
}

/// Changes when a source of any kernel in a checkout does, or, where they are emulated, of the cases and of what these depend on.
fn sources(checkout: &Path, emulate: bool) -> Result<Vec<String>> {
    let cases = emulate.then_some("tests");
    kernels::CRATES.into_iter().chain(cases).map(|folder| Ok(source_hash(checkout.join(folder))?)).collect()
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
    folders.sort_by_key(|folder| !known(folder).is_ok_and(|kernels| kernels.keys().any(|name| name.starts_with(&options.name))));
    for folder in folders {
        let (named, rest): (BTreeMap<_, _>, BTreeMap<_, _>) =
            known(&folder)?.into_iter().partition(|(name, _)| name.starts_with(&options.name));
        let a_known = named.keys().next().cloned();
        if named.is_empty() {
            others.extend(rest.into_keys());
        }
        // A new kernel is found by its whole name.
        let names: BTreeSet<_> = named.keys().chain([&options.name]).collect();
        let families: BTreeSet<_> = named.values().collect();
        // One build. With line tables and without the others, a kernel may have a few instructions more or less than what is shipped.
        let mut builder = kernels::builder(&folder).arch(options.arch.clone()).line_tables(true).kernels(names);
        // Of one family the others are not even parsed.
        if let [family] = Vec::from_iter(families)[..] {
            builder = builder.family(family);
        }
        let build = builder.inspect()?;
        if build.kernels.is_empty() && build.findings.is_empty() {
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
        build.notes.iter().for_each(|note| println!("note: {note}"));
        build.findings.iter().for_each(|finding| println!("MEND {finding}"));
        for kernel in &build.kernels {
            println!("\n{} on {}", kernel.meta.name, kernel.arch);
            hot_loop(&Listing::of(&kernel.cubin, tools)?);
        }
        // The figures are shown whatever they are; a kernel that no build would take is an error after them.
        let count = build.findings.len();
        ensure!(
            count == 0,
            "{count} thing(s) must be mended as compiled here, the lines that begin with MEND; `cargo xtask build-ptx` decides"
        );
        return Ok(());
    }
    let near = nearest(&options.name, &others).join(", ");
    bail!("no kernel begins with `{}`. Names like it: {near}. Name a new one wholly, with its types: `amax__bf16`", options.name)
}

/// How many names an error lists.
const NEAR: usize = 5;

/// The names that differ least from one that is none: as many letters of it as there are to change.
fn nearest<'a>(name: &str, names: &'a BTreeSet<String>) -> Vec<&'a str> {
    // Of a name without types, those without types.
    let shown = |other: &'a String| if name.contains("__") { other.as_str() } else { other.split("__").next().unwrap_or(other) };
    let mut shown: Vec<_> = names.iter().map(shown).collect();
    shown.dedup();
    shown.sort_by_cached_key(|other| changes(name, other));
    shown.truncate(NEAR);
    shown
}

/// The fewest letters to put in, take out or change (Levenshtein's distance).
fn changes(from: &str, to: &str) -> usize {
    let mut row: Vec<usize> = (0..=to.len()).collect();
    for (i, a) in from.bytes().enumerate() {
        let mut before = std::mem::replace(&mut row[0], i + 1);
        for (j, b) in to.bytes().enumerate() {
            let put = 1 + row[j].min(row[j + 1]);
            before = std::mem::replace(&mut row[j + 1], put.min(before + usize::from(a != b)));
        }
    }
    row[to.len()]
}

/// The kernels that the ratchet or the last build knows, each with its family.
pub fn known(folder: &Path) -> Result<BTreeMap<String, String>> {
    let package = match folder.ends_with(kernels::CRATES[0]) {
        true => "oxtile-kernels",
        false => "oxtile-conformance",
    };
    let mut kernels = ratchet::kernels(&folder.join("ratchet"))?;
    if let Ok(manifest) = Manifest::read(&target().join("oxtile/kernels").join(package)) {
        kernels.extend(manifest.kernels.into_iter().map(|(name, kernel)| (name, kernel.meta.family)));
    }
    Ok(kernels)
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

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    fn copied(from: &Path, to: &Path) {
        fs::create_dir_all(to).unwrap();
        for entry in fs::read_dir(from).unwrap().map(Result::unwrap) {
            let (path, to, name) = (entry.path(), to.join(entry.file_name()), entry.file_name());
            if path.is_dir() && name != "target" {
                copied(&path, &to);
            } else if path.is_file() && (name == "Cargo.toml" || path.extension().is_some_and(|kind| kind == "rs")) {
                fs::copy(path, to).unwrap();
            }
        }
    }

    #[test]
    fn an_edit_of_what_cases_are_made_of_is_seen() {
        let copy = tempfile::tempdir().unwrap();
        fs::copy(root().join("Cargo.toml"), copy.path().join("Cargo.toml")).unwrap();
        ["gpu", "host", "tests"].iter().for_each(|folder| copied(&root().join(folder), &copy.path().join(folder)));
        for (file, of_kernels) in [
            ("gpu/src/amax.rs", true),
            ("gpu/emulator/src/lib.rs", false),
            ("host/src/lib.rs", false),
            ("tests/src/main.rs", false),
            ("tests/oracle/src/lib.rs", false),
        ] {
            let all = || [false, true].map(|emulate| sources(copy.path(), emulate).unwrap());
            let before = all();
            let path = copy.path().join(file);
            fs::write(&path, fs::read_to_string(&path).unwrap() + "\n// edited\n").unwrap();
            let now = all();
            assert_eq!([before[0] != now[0], before[1] != now[1]], [of_kernels, true], "{file}");
        }
    }

    #[test]
    fn a_wrong_name_gets_those_like_it() {
        let names: BTreeSet<_> = ["amax__bf16", "amax__f16", "gemm__bf16__nt", "gemm_any__f16", "rotary__bf16"].map(str::to_owned).into();
        assert_eq!(nearest("gem", &names)[..2], ["gemm", "amax"]);
        assert_eq!(nearest("gemm__f16__nt", &names)[0], "gemm__bf16__nt");
        assert_eq!([changes("", "ab"), changes("kitten", "sitting"), changes("same", "same")], [2, 3, 0]);
    }
}
