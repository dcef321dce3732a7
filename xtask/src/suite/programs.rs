//! The test programs of the workspace. Some run at a time: many wait for deadlines, or compile on one thread.

use std::{
    collections::VecDeque,
    ffi::OsString,
    path::PathBuf,
    process::Command,
    sync::{Mutex, PoisonError},
    thread,
};

use anyhow::{Context, Result, ensure};
use serde_json::Value;

use super::tally::Tally;
use crate::{cargo, programs::compiled_cases, target};

/// Programs that run at a time.
const AT_A_TIME: usize = 2;

/// Those that take longest, by their names: they begin first.
const LONGEST: [&str; 10] =
    ["oxtile-tests", "comm", "external_crate", "own_crate", "vmm", "kernel_errors", "launch", "smoke", "ranks", "doc tests"];

/// A program, or all tests in documentation.
struct Program {
    /// `comm`, or of a library or a program itself `oxtile_build`.
    name: String,
    command: Command,
}

/// What is run.
pub struct Programs(VecDeque<Program>);

impl Programs {
    /// What compiles them, and says in JSON where they are.
    pub fn compiling() -> Command {
        cargo(["test", "--workspace", "--no-run", "--quiet", "--message-format=json-render-diagnostics"])
    }

    /// Those that cargo has compiled, and the case binary and the tests in documentation.
    pub fn of(said: &str) -> Result<Self> {
        let libraries = libraries()?;
        let artifacts = said.lines().filter(|line| line.starts_with('{')).map(serde_json::from_str::<Value>);
        let mut programs = VecDeque::new();
        for artifact in artifacts {
            let artifact = artifact.context("cargo does not speak JSON")?;
            if artifact["profile"]["test"] == true {
                programs.push_back(
                    program(&artifact, &libraries).with_context(|| format!("cargo says too little of a test program: {artifact}"))?,
                );
            }
        }
        programs.push_back(Program { name: "oxtile-tests".into(), command: compiled_cases() });
        programs.push_back(Program { name: "doc tests".into(), command: cargo(["test", "--workspace", "--no-fail-fast", "--doc", "--"]) });
        let place = |program: &Program| LONGEST.iter().position(|name| *name == program.name).unwrap_or(LONGEST.len());
        programs.make_contiguous().sort_by_key(place);
        Ok(Self(programs))
    }

    /// Runs them with these variables and filters. What each writes is printed when it has ended.
    pub fn run(self, tally: &mut Tally, variables: &[(&str, OsString)], filters: &[OsString]) {
        let (waiting, counted) = (Mutex::new(self.0), Mutex::new(tally));
        let next = || waiting.lock().unwrap_or_else(PoisonError::into_inner).pop_front();
        let work = || {
            while let Some(Program { name, mut command }) = next() {
                let (mut own, mut written) = (Tally::default(), String::new());
                command.envs(variables.iter().cloned()).args(filters);
                let ran = own.tests(&name, &mut command, |line| written.extend([line, "\n"]));
                ran.unwrap_or_else(|error| own.fail(format!("{name}: {error:#}")));
                let mut tally = counted.lock().unwrap_or_else(PoisonError::into_inner);
                print!("{written}");
                tally.absorb(own);
            }
        };
        thread::scope(|scope| (0..AT_A_TIME).for_each(|_| _ = scope.spawn(work)));
    }
}

/// The program of one of cargo's messages, as `cargo test` runs it: in the folder of its package, with the variables of the package.
fn program(artifact: &Value, libraries: &OsString) -> Option<Program> {
    let (path, manifest) = (artifact["executable"].as_str()?, PathBuf::from(artifact["manifest_path"].as_str()?));
    let (folder, name) = (manifest.parent()?.to_owned(), artifact["target"]["name"].as_str()?);
    // `path+file:///checkout/host#oxtile@0.1.0`, or without the name where it is that of the folder.
    let id = artifact["package_id"].as_str()?.rsplit_once('#')?.1;
    let (package, version) = id.split_once('@').unwrap_or((folder.file_name()?.to_str()?, id));
    let mut command = Command::new(path);
    command.current_dir(&folder).env("CARGO", env!("CARGO")).env("CARGO_MANIFEST_DIR", &folder).env("CARGO_MANIFEST_PATH", &manifest);
    command.env("CARGO_PKG_NAME", package).env("CARGO_PKG_VERSION", version).env("CARGO_TARGET_DIR", target());
    command.env("LD_LIBRARY_PATH", libraries);
    Some(Program { name: name.into(), command })
}

/// Where the loader looks for the compiler's libraries, which tests of macros need, and then where it would look.
fn libraries() -> Result<OsString> {
    let said = Command::new("rustc").args(["--print", "target-libdir"]).output().context("cannot run rustc")?;
    ensure!(said.status.success(), "rustc does not say where its libraries are");
    let own = PathBuf::from(String::from_utf8_lossy(&said.stdout).trim());
    let inherited = std::env::var_os("LD_LIBRARY_PATH").unwrap_or_default();
    let all = [own, target().join("debug/deps")].into_iter().chain(std::env::split_paths(&inherited));
    // An empty one would be the folder that a program runs in.
    let all = all.filter(|folder| !folder.as_os_str().is_empty());
    std::env::join_paths(all).context("a folder of the target directory has a colon in its name")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shell(name: &str, lines: &str) -> Program {
        let mut command = Command::new("sh");
        command.args(["-c", lines]);
        Program { name: name.into(), command }
    }

    #[test]
    fn programs_are_those_with_tests_in_the_order_of_their_length() {
        let artifact = |name: &str, is_test: bool, id: &str| {
            format!(
                r#"{{"reason":"compiler-artifact","package_id":"path+file:///checkout/host{id}","manifest_path":"/checkout/host/Cargo.toml","target":{{"name":"{name}"}},"profile":{{"test":{is_test}}},"executable":"/target/{name}"}}"#
            )
        };
        let said = [artifact("oxtile", true, "#oxtile@0.1.0"), artifact("oxtile-cli", false, "#0.1.0"), artifact("comm", true, "#0.2.0")];
        let programs = Programs::of(&said.join("\n")).unwrap().0;
        let names: Vec<_> = programs.iter().map(|program| program.name.as_str()).collect();
        assert_eq!(names, ["oxtile-tests", "comm", "doc tests", "oxtile"]);
        let variable = |program: &Program, name: &str| {
            let found = program.command.get_envs().find(|(variable, _)| *variable == name);
            found.and_then(|(_, value)| Some(value?.to_str()?.to_owned()))
        };
        assert_eq!(variable(&programs[1], "CARGO_PKG_NAME").as_deref(), Some("host"));
        assert_eq!(variable(&programs[3], "CARGO_PKG_NAME").as_deref(), Some("oxtile"));
        assert_eq!(programs[3].command.get_current_dir(), Some("/checkout/host".as_ref()));
        assert!(Programs::of("{").is_err());
        assert!(Programs::of(r#"{"profile":{"test":true}}"#).is_err());
    }

    #[test]
    fn all_are_run_and_counted() {
        let failing = "echo test result: FAILED. 1 passed\\; 3 failed\\; 4 ignored; echo test gemm ... FAILED";
        let missing = Program { name: "gone".into(), command: Command::new("/nothing") };
        let programs =
            [shell("a", "test $X = 1 && echo test result: ok. 2 passed"), shell("b", failing), missing, shell("c", "test $X = 1")];
        // The last says nothing, which is a failure too.
        let mut tally = Tally::default();
        Programs(programs.into()).run(&mut tally, &[("X", "1".into())], &[]);
        assert_eq!(tally.counts(), [3, 5, 4]);
        let mut failures = tally.failures().to_vec();
        failures.sort();
        assert_eq!(failures[0], "b: gemm");
        assert_eq!(failures[1], "c: it ended without a summary");
        assert!(failures[2].starts_with("gone: cannot run gone"), "{failures:?}");
    }
}
