//! Runs ptxas on one entry and remembers the result by the content of its PTX.

use std::{
    fs,
    path::{Path, PathBuf},
    process::{Command, Output},
};

use serde::{Deserialize, Serialize};

use crate::{Arch, CudaTools, Error, draft, machine_code::MachineCode, own, source_hash::hex_digest, tool};

/// What an entry takes of a multiprocessor, as ptxas and its machine code tell.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Usage {
    /// Registers a thread (at entry, where the kernel uses setmaxnreg).
    pub registers: u32,
    /// Machine instructions.
    pub instructions: u32,
    /// Bytes of stack frame a thread.
    pub stack: u32,
    /// Bytes of registers spilled to and reloaded from local memory.
    pub spills: u32,
    /// Loads from and stores to local memory.
    pub local_accesses: u32,
    /// `cp.async` with a cache policy that the architecture cannot run: see [`lint::check`](crate::lint).
    pub broken_copies: u32,
    /// Bytes of static shared memory a block.
    pub static_shared: u32,
    /// ptxas's advisories by their codes, `C7508 'setmaxnreg' ignored; ...`.
    pub advisories: Vec<String>,
}

/// An assembled entry.
#[derive(Clone, Debug)]
pub(crate) struct Assembled {
    pub ptx: PathBuf,
    pub cubin: PathBuf,
    pub usage: Usage,
}

/// The directive of PTX that names a source line.
const SOURCE_LINE: &str = ".loc";

/// Assembles the PTX of one entry, or takes the result of an earlier run on the same text from `cache`.
///
/// Line tables are kept where the PTX has any. Without them `-lineinfo` would put the PTX itself into the cubin, two thirds of its size; the machine code
/// is the same.
pub(crate) fn assemble(ptx: &str, arch: &Arch, tools: &CudaTools, cache: &Path) -> Result<Assembled, Error> {
    let key = hex_digest([ptx, arch.as_str(), &tools.release, &own::assembling()]);
    let folder = cache.join(&key[..32]);
    let (source, cubin, report) = (folder.join("ptx"), folder.join("cubin"), folder.join("usage.json"));
    if let Ok(text) = fs::read_to_string(&report)
        && let Ok(usage) = serde_json::from_str(&text)
        && cubin.exists()
    {
        return Ok(Assembled { ptx: source, cubin, usage });
    }
    fs::create_dir_all(&folder).map_err(Error::file("create", &folder))?;
    // Another build may assemble the same text, or read it: each file appears whole, the report last.
    draft::write(&source, ptx)?;
    let drafted = draft::name(&cubin);
    let mut ptxas = Command::new(&tools.ptxas);
    ptxas.arg(format!("-arch={arch}")).arg("-v").arg(&source).arg("-o").arg(&drafted);
    if ptx.lines().any(|line| line.split_whitespace().next() == Some(SOURCE_LINE)) {
        ptxas.arg("-lineinfo");
    }
    let read = |output: Output| Ok((parse(&String::from_utf8_lossy(&[output.stdout, output.stderr].concat())), MachineCode::of(&drafted)?));
    let (mut usage, code) = tool::run("assembling", &mut ptxas).and_then(read).inspect_err(|_| _ = fs::remove_file(&drafted))?;
    draft::publish(&drafted, &cubin)?;
    (usage.instructions, usage.local_accesses) = (code.instructions, code.local_accesses);
    if ptx.contains("cp.async.cg.shared.global.L2::cache_hint") {
        usage.broken_copies = code.nameless_copies;
    }
    let text = serde_json::to_string(&usage).map_err(|error| Error::content(&report, error))?;
    draft::write(&report, text)?;
    Ok(Assembled { ptx: source, cubin, usage })
}

/// Reads what `ptxas -v` writes on a module with one entry; functions that were not inlined add to the stack and spills.
fn parse(log: &str) -> Usage {
    let mut usage = Usage::default();
    for line in log.lines() {
        usage.stack += number_before(line, " bytes stack frame");
        usage.spills += number_before(line, " bytes spill stores") + number_before(line, " bytes spill loads");
        usage.registers = usage.registers.max(number_before(line, " registers"));
        usage.static_shared = usage.static_shared.max(number_before(line, " bytes smem"));
        if let Some(code) = line.find("(C7").or_else(|| line.find(" C7")) {
            usage.advisories.push(line[code..].trim().to_owned());
        }
    }
    usage
}

fn number_before(line: &str, unit: &str) -> u32 {
    let before = line.split_once(unit).map(|(before, _)| before);
    before.and_then(|text| text.rsplit(|c: char| !c.is_ascii_digit()).next()?.parse().ok()).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use std::{
        thread,
        time::{Duration, Instant},
    };

    use super::*;

    #[test]
    fn the_log_of_ptxas_is_read() {
        let log = "ptxas info    : 0 bytes gmem\n\
            ptxas info    : (C7508) 'setmaxnreg' ignored; unable to determine register count at entry\n\
            ptxas info    : Compiling entry function 'k' for 'sm_90a'\n\
            ptxas info    : Function properties for k\n    \
            16 bytes stack frame, 24 bytes spill stores, 32 bytes spill loads\n\
            ptxas info    : Used 168 registers, used 3 barriers, 16 bytes cumulative stack size, 48 bytes smem, 368 bytes cmem[0]\n";
        let usage = parse(log);
        assert_eq!((usage.registers, usage.stack, usage.spills, usage.static_shared), (168, 16, 56, 48));
        assert_eq!(usage.advisories, ["(C7508) 'setmaxnreg' ignored; unable to determine register count at entry"]);
    }

    /// A kernel whose threads copy 16 bytes each, once for every copy.
    fn copies(arch: &str, copies: &[&str]) -> String {
        format!(
            ".version 8.8\n.target {arch}\n.address_size 64\n.extern .shared .align 16 .b8 arena[];\n\
             .visible .entry k(.param .u64 p)\n.maxntid 128, 1, 1\n{{\n.reg .b32 %r<4>;\n.reg .b64 %rd<4>;\n\
             mov.u32 %r1, %tid.x;\nshl.b32 %r1, %r1, 4;\nmov.u32 %r2, arena;\nadd.s32 %r2, %r2, %r1;\n\
             ld.param.u64 %rd1, [p];\ncvta.to.global.u64 %rd1, %rd1;\nmul.wide.u32 %rd2, %r1, 1;\nadd.s64 %rd1, %rd1, %rd2;\n\
             createpolicy.fractional.L2::evict_last.b64 %rd3, 1.0;\n{}\ncp.async.wait_all;\nret;\n}}\n",
            copies.join("\n")
        )
    }

    #[test]
    fn copies_with_a_policy_at_a_uniform_address_are_broken_and_plain_ones_are_not() {
        const LASTING: &str = "cp.async.cg.shared.global.L2::cache_hint [%r2], [%rd1], 16, %rd3;";
        const PLAIN: &str = "cp.async.cg.shared.global [%r2+2048], [%rd1+2048], 16;";
        let tools = CudaTools::find(Path::new(env!("CARGO_MANIFEST_DIR"))).unwrap();
        let cache = tempfile::tempdir().unwrap();
        for arch in ["sm_90a", "sm_100a", "sm_120a"] {
            let broken =
                |those: &[&str]| assemble(&copies(arch, those), &arch.parse().unwrap(), &tools, cache.path()).unwrap().usage.broken_copies;
            assert_eq!([broken(&[PLAIN]), broken(&[LASTING]), broken(&[LASTING, PLAIN, PLAIN])], [0, 1, 1], "{arch}");
        }
    }

    /// Waits until a file is there.
    fn wait_for(path: &Path) {
        let begin = Instant::now();
        while !path.exists() {
            assert!(begin.elapsed() < Duration::from_secs(60), "{} did not appear", path.display());
            thread::sleep(Duration::from_millis(5));
        }
    }

    #[test]
    fn a_build_does_not_see_the_half_file_of_another() {
        let tools = CudaTools::find(Path::new(env!("CARGO_MANIFEST_DIR"))).unwrap();
        let (cache, folder) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let [started, go, half, end, slow] = ["started", "go", "half", "end", "ptxas"].map(|name| folder.path().join(name));
        // Stops when it has written a part of the cubin, its last argument.
        let (place, ptxas) = (folder.path().display(), tools.ptxas.display());
        let script = format!(
            "#!/bin/sh\ncd {place}\n: >started\nwhile [ ! -e go ]; do sleep 0.01; done\nfor out; do :; done\nprintf half >\"$out\"\n\
             : >half\nwhile [ ! -e end ]; do sleep 0.01; done\nexec {ptxas} \"$@\"\n"
        );
        // By another process: a program is not run while one that another test starts has it open.
        let mut write = Command::new("sh");
        write.args(["-c", "printf %s \"$2\" >\"$1\" && chmod +x \"$1\"", "sh"]).arg(&slow).arg(script);
        assert!(write.status().unwrap().success());
        let (text, arch) = (copies("sm_90a", &[]), "sm_90a".parse().unwrap());
        let by = |ptxas: &Path| assemble(&text, &arch, &CudaTools { ptxas: ptxas.into(), ..tools.clone() }, cache.path()).unwrap();
        thread::scope(|scope| {
            let other = scope.spawn(|| by(&slow));
            wait_for(&started);
            let own = by(&tools.ptxas);
            fs::write(&go, "").unwrap();
            wait_for(&half);
            let read = fs::read(&own.cubin).unwrap();
            fs::write(&end, "").unwrap();
            assert!(read.starts_with(b"\x7fELF"), "{} bytes", read.len());
            assert_eq!(own.usage, other.join().unwrap().usage);
            assert_eq!(fs::read(&own.cubin).unwrap(), read);
        });
        let files = fs::read_dir(fs::read_dir(cache.path()).unwrap().next().unwrap().unwrap().path()).unwrap();
        let mut names: Vec<_> = files.map(|file| file.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        assert_eq!(names, ["cubin", "ptx", "usage.json"]);
    }

    #[test]
    fn a_report_that_does_not_say_all_is_none() {
        let report = serde_json::to_value(Usage::default()).unwrap();
        for field in report.as_object().unwrap().keys() {
            let mut old = report.clone();
            old.as_object_mut().unwrap().remove(field);
            assert!(serde_json::from_value::<Usage>(old).is_err(), "{field}");
        }
    }
}
