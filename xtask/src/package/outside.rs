//! Programs outside the workspace, as a user would have them: they depend on the unpacked packages and on what the registry has, and on nothing of this checkout.

use std::{
    fs,
    io::Write,
    path::{Path, PathBuf},
    process::{Command, Stdio},
    time::Instant,
};

use anyhow::{Context, Result, ensure};

use super::Package;
use crate::{root, say, target};

/// The program that finds every kernel inside itself. It has no emulator.
const FIND: &str = include_str!("outside/find.rs");

/// The program that is timed in the rounds of `oxtile-benches`, and how that starts it: by Python, as the other peers.
const TIMED: &str = include_str!("outside/timed.rs");
const SERVER: &str = "import os, sys\n\n# The kernels inside the program, not those of a checkout.\nos.environ.pop(\"OXTILE_KERNELS\", None)\n\
                      program = os.path.join(os.path.dirname(os.path.abspath(__file__)), \"timed\")\n\
                      os.execv(program, [program, *sys.argv[1:]])\n";

/// The page of the crate, whose program trains attention: a user's first.
const PAGE: &str = "host/README.md";

const WORKSPACE: &str = "[workspace]\nresolver = \"3\"\nmembers = [\"attend\", \"find\", \"timed\"]\n\n\
                         # As the crate's page advises.\n[profile.dev.package]\ncorosensei = { opt-level = 3 }\noxtile-emulator = { opt-level = 3 }\n\
                         oxtile-tile = { opt-level = 3 }\n\
                         # It compares hundreds of megabytes.\ntimed = { opt-level = 3 }\n\n[profile.dev]\ndebug = false\n\n[patch.crates-io]\n";

/// Builds and runs the programs, and installs `oxtile`.
pub fn run(packages: &[Package]) -> Result<()> {
    let folder = target().join("packages/outside");
    // Files of a package have one time, whatever changed: cargo would take what it built of other packages.
    if folder.exists() {
        fs::remove_dir_all(&folder).with_context(|| format!("cannot empty {}", folder.display()))?;
    }
    write_programs(&folder, packages)?;
    let start = Instant::now();
    // The features of each program alone.
    outside(&folder, &["run", "--quiet", "--package", "attend"])?;
    say(&format!("attention with gradients from the packages alone ({:.0} s)", start.elapsed().as_secs_f64()));
    let start = Instant::now();
    outside(&folder, &["build", "--quiet", "--package", "timed"])?;
    let peers = target().join("packages/peers");
    let program = folder.join("target/debug/timed");
    write(&peers, "server.py", SERVER)?;
    fs::copy(&program, peers.join("timed")).with_context(|| format!("cannot copy {} to {}", program.display(), peers.display()))?;
    answers(&peers)?;
    say(&format!(
        "the packages as a peer: oxtile-benches attention attention_backward --peers {} ({:.0} s)",
        peers.display(),
        start.elapsed().as_secs_f64()
    ));
    let start = Instant::now();
    outside(&folder, &["run", "--quiet", "--package", "find"])?;
    say(&format!("every kernel inside a program ({:.0} s)", start.elapsed().as_secs_f64()));
    let start = Instant::now();
    document(&folder)?;
    say(&format!("documents, without a network ({:.0} s)", start.elapsed().as_secs_f64()));
    let start = Instant::now();
    install(&folder, packages)?;
    say(&format!("cargo install oxtile-cli ({:.0} s)", start.elapsed().as_secs_f64()));
    Ok(())
}

/// Documents the crates that programs name, as docs.rs does: without a GPU and a network, with the features of all these programs.
fn document(folder: &Path) -> Result<()> {
    const DOCUMENTED: [&str; 4] = ["oxtile", "oxtile-kernels", "oxtile-tile", "oxtile-emulator"];
    let arguments =
        ["doc", "--quiet", "--offline", "--no-deps"].into_iter().chain(DOCUMENTED.into_iter().flat_map(|name| ["--package", name]));
    outside(folder, &arguments.collect::<Vec<_>>())?;
    for name in DOCUMENTED {
        let page = folder.join("target/doc").join(name.replace('-', "_")).join("index.html");
        ensure!(page.is_file(), "cargo doc wrote no {}", page.display());
    }
    Ok(())
}

/// Lays the programs out, with the versions of dependencies that the workspace is tested with.
fn write_programs(folder: &Path, packages: &[Package]) -> Result<()> {
    let write = |place: &str, text: &str| write(folder, place, text);
    let page = root().join(PAGE);
    let text = fs::read_to_string(&page).with_context(|| format!("cannot read {}", page.display()))?;
    let program = block(&text, "rust").with_context(|| format!("{} has no program", page.display()))?;
    let patches: String = packages.iter().map(|package| patch(package, "\n")).collect();
    write("Cargo.toml", &format!("{WORKSPACE}{patches}"))?;
    fs::copy(root().join("Cargo.lock"), folder.join("Cargo.lock")).context("cannot copy Cargo.lock")?;
    let version = env!("CARGO_PKG_VERSION");
    let manifest = |name: &str, options: &str| {
        let package = format!("[package]\nname = \"{name}\"\nversion = \"1.0.0\"\nedition = \"2024\"\n\n[dependencies]\n");
        format!("{package}oxtile = {{ version = \"{version}\"{options} }}\n")
    };
    write("attend/Cargo.toml", &manifest("attend", ""))?;
    write("attend/src/main.rs", program)?;
    write("timed/Cargo.toml", &format!("{}serde_json = \"1\"\n", manifest("timed", "")))?;
    write("timed/src/main.rs", TIMED)?;
    let without_emulator = ", default-features = false, features = [\"cuda-13000\", \"sm80\", \"sm90a\", \"sm100a\"]";
    write("find/Cargo.toml", &manifest("find", without_emulator))?;
    write("find/src/main.rs", FIND)
}

/// Writes a file in a folder, which need not exist yet.
fn write(folder: &Path, place: &str, text: &str) -> Result<()> {
    let path = folder.join(place);
    let written = fs::create_dir_all(path.parent().unwrap_or(folder)).and_then(|()| fs::write(&path, text));
    written.with_context(|| format!("cannot write {}", path.display()))
}

/// Asks the peer on the emulator what the benchmarks will ask it on a GPU. Attention to values that are all 1 gives 1.
fn answers(peers: &Path) -> Result<()> {
    let scratch = peers.with_file_name("scratch");
    fs::create_dir_all(&scratch).with_context(|| format!("cannot create {}", scratch.display()))?;
    let file = |name: &str, value: f32, count: usize| {
        let path = scratch.join(name);
        // bf16: the upper half of f32.
        let bytes: Vec<u8> = std::iter::repeat_n(value, count).flat_map(|x| ((x.to_bits() >> 16) as u16).to_le_bytes()).collect();
        fs::write(&path, bytes).with_context(|| format!("cannot write {}", path.display())).map(|()| path.display().to_string())
    };
    let (pattern, zeros) = (file("pattern", 1.0, 100)?, file("zeros", 0.0, 40 * 2 * 64)?);
    let ones = file("ones", 1.0, 40 * 2 * 64)?;
    let prepare =
        |peer: &str| format!(r#"{{"do":"prepare","peer":"{peer}","dimensions":[1,40,40,2,1,64,64],"sets":1,"pattern":{pattern:?}}}"#);
    let check = |out: &str| format!(r#"{{"do":"check","peer":"attention_causal","files":{{"out":{out:?}}}}}"#);
    let requests = [
        (r#"{"do":"hello"}"#.to_owned(), "\"ok\":true"),
        (prepare("attention_causal"), "\"title\":\"packaged crates\""),
        (r#"{"do":"round","peer":"attention_causal","replays":2}"#.to_owned(), "\"milliseconds\""),
        (check(&ones), "\"equal\":true"),
        (check(&zeros), "\"equal\":false"),
        (prepare("attention_backward_causal"), "packaged crates, fast"),
        (prepare("flash_attention_3_backward_causal"), "packaged crates, deterministic"),
        (r#"{"do":"round","peer":"flash_attention_3_backward_causal","replays":1}"#.to_owned(), "\"milliseconds\""),
        (prepare("gemm"), "no pass for `gemm`"),
        (r#"{"do":"release"}"#.to_owned(), "\"ok\":true"),
    ];
    let mut python = Command::new("python3");
    forget(python.arg(peers.join("server.py")).arg("--emulated").stdin(Stdio::piped()).stdout(Stdio::piped()));
    let mut child = python.spawn().context("cannot run python3")?;
    let lines: String = requests.iter().map(|(request, _)| format!("{request}\n")).collect();
    child.stdin.take().context("python3 has no standard input")?.write_all(lines.as_bytes()).context("the peer reads nothing")?;
    let output = child.wait_with_output().context("the peer does not end")?;
    let text = String::from_utf8_lossy(&output.stdout);
    ensure!(
        output.status.success() && text.lines().count() == requests.len(),
        "the peer answered {text:?} and ended with {}",
        output.status
    );
    for (answer, (request, expected)) in text.lines().zip(&requests) {
        ensure!(answer.contains(expected), "the peer answered {answer} to {request}, without {expected}");
    }
    Ok(())
}

/// A line of a table of patches, or of an option of cargo.
fn patch(package: &Package, end: &str) -> String {
    format!("{}.path = {:?}{end}", package.name, package.folder)
}

/// The first block of a page in a language.
fn block<'a>(page: &'a str, language: &str) -> Option<&'a str> {
    page.split_once(&format!("```{language}\n"))?.1.split_once("```").map(|(block, _)| block)
}

/// Cargo in the folder outside, with nothing of this build around it.
fn outside(folder: &Path, arguments: &[&str]) -> Result<()> {
    let mut cargo = Command::new(env!("CARGO"));
    cargo.current_dir(folder).args(arguments).env("CARGO_TARGET_DIR", folder.join("target"));
    forget(&mut cargo);
    let status = cargo.status().context("cannot run cargo")?;
    ensure!(status.success(), "outside the workspace `cargo {}` failed in {}: see above", arguments.join(" "), folder.display());
    Ok(())
}

/// Takes this workspace's variables from a command: kernels of the checkout, and what cargo set for this program.
fn forget(command: &mut Command) {
    let ours = |name: &str| name.starts_with("OXTILE_") || name.starts_with("CARGO_PKG_") || name == "CARGO_MANIFEST_DIR";
    let names = std::env::vars_os().map(|(name, _)| name).filter(|name| name.to_str().is_some_and(ours));
    names.for_each(|name| _ = command.env_remove(name));
}

/// Installs `oxtile` and asks it what it has: the kernels are inside.
fn install(folder: &Path, packages: &[Package]) -> Result<()> {
    let cli = packages.iter().find(|package| package.name == "oxtile-cli").context("there is no package of oxtile-cli")?;
    let installed = folder.join("installed");
    let to = |path: &Path| path.to_string_lossy().into_owned();
    let patches: Vec<_> = packages.iter().map(|package| format!("patch.crates-io.{}", patch(package, ""))).collect();
    let mut arguments: Vec<String> = ["install", "--quiet", "--debug", "--force", "--path"].map(str::to_owned).into();
    arguments.extend([to(&cli.folder), "--root".into(), to(&installed)]);
    patches.into_iter().for_each(|patch| arguments.extend(["--config".into(), patch]));
    outside(folder, &arguments.iter().map(String::as_str).collect::<Vec<_>>())?;
    let program: PathBuf = installed.join("bin/oxtile");
    let mut doctor = Command::new(&program);
    forget(doctor.arg("doctor"));
    let output = doctor.output().with_context(|| format!("cannot run {}", program.display()))?;
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let kernels = text.lines().find(|line| line.contains("(inside this program)"));
    println!("{}", kernels.with_context(|| format!("the installed oxtile has no kernels inside:\n{text}"))?);
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_page_of_the_crate_has_a_program() {
        let page = fs::read_to_string(root().join(PAGE)).unwrap();
        let program = block(&page, "rust").unwrap();
        assert!(program.contains("fn main()") && program.contains("AttentionBackward"), "{program}");
        assert_eq!(block("no program", "rust"), None);
    }

    #[test]
    fn programs_depend_on_the_packages_alone() {
        let folder = tempfile::tempdir().unwrap();
        let packages = [Package { name: "oxtile", bytes: 1, folder: "/unpacked/oxtile-0.1.0".into() }];
        write_programs(folder.path(), &packages).unwrap();
        let text = |place: &str| fs::read_to_string(folder.path().join(place)).unwrap();
        assert!(text("Cargo.toml").ends_with("[patch.crates-io]\noxtile.path = \"/unpacked/oxtile-0.1.0\"\n"), "{}", text("Cargo.toml"));
        assert!(text("attend/Cargo.toml").ends_with("[dependencies]\noxtile = { version = \"0.1.0\" }\n"), "{}", text("attend/Cargo.toml"));
        let checkout = root().display().to_string();
        assert!(text("timed/Cargo.toml").ends_with("[dependencies]\noxtile = { version = \"0.1.0\" }\nserde_json = \"1\"\n"));
        for place in ["Cargo.toml", "attend/Cargo.toml", "attend/src/main.rs", "find/Cargo.toml", "find/src/main.rs", "timed/src/main.rs"] {
            assert!(!text(place).contains(&checkout), "{place}");
        }
    }
}
