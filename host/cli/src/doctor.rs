//! `oxtile doctor`: lists what this machine and environment have of what Oxtile uses, and how to mend what is missing.

use std::{collections::BTreeMap, env, fmt, fs, path::Path};

use oxtile::{
    comm::bootstrap::{BootstrapError, Environment, Launcher},
    kernels::KERNELS,
    runtime::{KernelLibrary, KernelPlace},
};
use oxtile_doctor::{Driver, Finding, Status};
use serde::{Deserialize, Serialize};

const BUILD: &str = "`cargo xtask build-ptx` in a checkout, or name a folder of compiled kernels in OXTILE_KERNELS";
/// The compute capability for which kernels are looked up where there is no GPU.
const HOPPER: (u32, u32) = (9, 0);

/// All that was found, for people and for programs.
#[derive(Debug, Serialize)]
pub struct Report {
    command: &'static str,
    schema: u32,
    version: &'static str,
    /// Whether nothing is broken.
    healthy: bool,
    findings: Vec<Finding>,
}

/// Something is broken; what is merely absent is not.
#[derive(Clone, Copy, Debug, thiserror::Error)]
#[error("{broken} of what was found {} broken: see above", if *.broken == 1 { "is" } else { "are" })]
pub struct Broken {
    /// How many findings are.
    pub broken: usize,
}

/// Looks at everything; nothing is changed, and no memory of a GPU is taken.
pub fn run() -> Report {
    let driver = Driver::find();
    let mut findings = oxtile_doctor::examine_with(&driver);
    findings.extend(kernels(&KernelLibrary::default(), driver.gpus().first().map(|gpu| gpu.capability)));
    findings.push(launch(Environment::read()));
    let healthy = findings.iter().all(|finding| finding.status != Status::Broken);
    Report { command: "doctor", schema: 1, version: env!("CARGO_PKG_VERSION"), healthy, findings }
}

impl Report {
    /// Fails if something is broken.
    ///
    /// # Errors
    /// [`Broken`], with how much.
    pub fn check(&self) -> Result<(), Broken> {
        match self.findings.iter().filter(|finding| finding.status == Status::Broken).count() {
            0 => Ok(()),
            broken => Err(Broken { broken }),
        }
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.findings.iter().try_for_each(|finding| writeln!(f, "{finding}"))
    }
}

/// The part of `manifest.json` that names the architectures that kernels are compiled for.
#[derive(Deserialize)]
struct Manifest {
    kernels: BTreeMap<String, Entry>,
}

#[derive(Deserialize)]
struct Entry {
    architectures: BTreeMap<String, serde::de::IgnoredAny>,
}

/// The compiled kernels of the library, and whether they are those of this program and run on the GPU.
fn kernels(library: &KernelLibrary, gpu: Option<(u32, u32)>) -> Vec<Finding> {
    let named = env::var_os("OXTILE_KERNELS").unwrap_or_default();
    let missing = env::split_paths(&named).filter(|folder| !folder.as_os_str().is_empty() && !folder.is_dir());
    let missing = missing.map(|folder| Finding::broken("kernels", format!("OXTILE_KERNELS: {} is no folder", folder.display()), BUILD));
    let mut findings: Vec<_> = missing.collect();
    let Some(kernel) = KERNELS.iter().flat_map(|family| family.instances).find(|kernel| kernel.requires.is_empty()) else {
        return findings;
    };
    let compiled = match library.locate(kernel.package) {
        Ok(None) => {
            findings.push(Finding::absent("kernels", "none are compiled, hence none run on a GPU", BUILD));
            return findings;
        }
        Ok(Some(KernelPlace::Folder(folder))) => compiled(&folder),
        Ok(Some(KernelPlace::Program(counts))) => {
            let counts: Vec<_> = counts.into_iter().map(|(arch, count)| format!("{count} for {arch}")).collect();
            Ok(format!("{} (inside this program)", counts.join(", ")))
        }
        Err(error) => Err(error.to_string()),
    };
    findings.push(match (library.find(kernel, gpu.unwrap_or(HOPPER)), compiled) {
        (Ok(_), Ok(compiled)) => Finding::ok("kernels", compiled),
        (Err(oxtile::Error::WrongArchitecture { .. }), Ok(compiled)) => match gpu {
            Some((major, minor)) => Finding::absent("kernels", format!("{compiled}, none of which runs on {major}.{minor}"), BUILD),
            None => Finding::ok("kernels", compiled),
        },
        (Err(error), _) => Finding::broken("kernels", error.to_string(), BUILD),
        (_, Err(why)) => Finding::broken("kernels", why, BUILD),
    });
    findings
}

/// How many kernels there are for which architecture.
fn compiled(folder: &Path) -> Result<String, String> {
    let path = folder.join("manifest.json");
    let text = fs::read_to_string(&path).map_err(|error| error.to_string());
    let manifest: Manifest = text
        .and_then(|text| serde_json::from_str(&text).map_err(|error| error.to_string()))
        .map_err(|why| format!("{}: {why}", path.display()))?;
    let mut counts = BTreeMap::<_, u32>::new();
    for arch in manifest.kernels.values().flat_map(|entry| entry.architectures.keys()) {
        *counts.entry(arch.as_str()).or_default() += 1;
    }
    let counts: Vec<_> = counts.into_iter().map(|(arch, count)| format!("{count} for {arch}")).collect();
    Ok(format!("{} ({})", counts.join(", "), folder.display()))
}

/// What a launcher has told this process.
fn launch(environment: Result<Environment, BootstrapError>) -> Finding {
    match environment {
        Ok(environment) => {
            let Environment { rank, world, local_rank, launcher, .. } = &environment;
            let spares = match environment.spare_ports {
                0 => String::new(),
                spares => format!(" or one of the {spares} ports after it"),
            };
            let job = environment.job.as_ref().map_or("a job without a name".to_owned(), |job| format!("{job:?}"));
            let launcher = match launcher {
                Launcher::Torchrun => "oxtile launch or torchrun",
                Launcher::OpenMpi => "Open MPI",
                Launcher::Hydra => "MPICH or Intel MPI",
                Launcher::Slurm => "srun",
            };
            let (world, master) = (world.get(), environment.master());
            Finding::ok("launch", format!("{rank} of {world}, {local_rank} on its host, by {launcher}; rank 0 at {master}{spares}; {job}"))
        }
        Err(BootstrapError::NoLauncher) => {
            Finding::absent("launch", "this process is alone: no launcher has set RANK", "`oxtile launch -n RANKS -- PROGRAM` starts ranks")
        }
        Err(error) => Finding::broken("launch", error.to_string(), "start every rank by one launcher, or unset its variables"),
    }
}
