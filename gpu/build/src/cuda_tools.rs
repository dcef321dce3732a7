//! NVIDIA's binary tools: ptxas assembles, nvdisasm shows the machine code, cuobjdump looks into cubins.

use std::{
    env,
    path::{Path, PathBuf},
    process::Command,
};

use crate::{Error, recipe::PINNED_PTXAS, tool};

/// The variable that names the folder of ptxas and nvdisasm.
pub const OVERRIDE: &str = "OXTILE_CUDA_BIN";

/// The wheels that hold the tools, as `pip` is asked for them.
const WHEELS: [&str; 3] = ["nvidia-cuda-nvcc==13.0.88", "nvidia-cuda-cuobjdump==13.5.37", "nvidia-cuda-nvdisasm==13.5.37"];

/// Where pip puts the programs below the folder it is given.
const BIN: &str = "nvidia/cu13/bin";

/// The tools found.
#[derive(Clone, Debug)]
pub struct CudaTools {
    /// The PTX assembler.
    pub ptxas: PathBuf,
    /// The disassembler.
    pub nvdisasm: PathBuf,
    /// The release of ptxas, `13.0.88`.
    pub release: String,
}

impl CudaTools {
    /// Finds the tools: the folder in `OXTILE_CUDA_BIN`, or what pip unpacked there, else `.oxtile/cuda` in `start` or a folder above it or in
    /// the working directory or a folder above that, else the toolkit of `CUDA_HOME` or `CUDA_PATH`, `/usr/local/cuda`, `PATH`.
    pub fn find(start: &Path) -> Result<Self, Error> {
        Self::find_near(&[start.to_owned()])
    }

    /// As [`find`](Self::find), in and above each of these folders.
    pub(crate) fn find_near(starts: &[PathBuf]) -> Result<Self, Error> {
        if let Some(folder) = env::var_os(OVERRIDE) {
            return Self::in_named(Path::new(&folder));
        }
        let starts = starts.iter().map(|start| std::path::absolute(start).map_err(Error::file("resolve", start)));
        let starts = starts.chain([Ok(env::current_dir().unwrap_or_default())]).collect::<Result<Vec<_>, _>>()?;
        let own = starts.iter().flat_map(|start| start.ancestors()).map(|folder| folder.join(".oxtile/cuda").join(BIN));
        let toolkits = ["CUDA_HOME", "CUDA_PATH"].into_iter().filter_map(env::var_os).map(|home| PathBuf::from(home).join("bin"));
        let path = tool::in_path("ptxas").and_then(|ptxas| Some(ptxas.parent()?.to_owned()));
        let mut folders = own.chain(toolkits).chain([PathBuf::from("/usr/local/cuda/bin")]).chain(path);
        folders.find_map(|bin| Self::at(&bin).ok()).ok_or_else(|| Error::Missing {
            what: "no ptxas and nvdisasm (looked in .oxtile/cuda here and above, in CUDA_HOME, /usr/local/cuda and PATH)".into(),
            mend: format!(
                "run `cargo xtask setup` in an Oxtile checkout, or `python3 -m pip install --no-deps --target .oxtile/cuda {}`, \
                 or name the folder that holds them in {OVERRIDE}",
                WHEELS.join(" ")
            ),
        })
    }

    /// The tools in a folder that was named: there, or below it, where pip puts them.
    fn in_named(folder: &Path) -> Result<Self, Error> {
        let below = folder.join(BIN);
        Self::at(if !folder.join("ptxas").exists() && below.is_dir() { &below } else { folder })
    }

    /// The tools in one folder.
    pub fn at(bin: &Path) -> Result<Self, Error> {
        let program = |name: &str| {
            let path = bin.join(name);
            if path.is_file() {
                return Ok(path);
            }
            let mend = format!("install the CUDA toolkit's {name} there, or set {OVERRIDE} to the folder that holds it");
            Err(Error::Missing { what: format!("{} does not exist", path.display()), mend })
        };
        let (ptxas, nvdisasm) = (program("ptxas")?, program("nvdisasm")?);
        let version = tool::output("asking ptxas for its version", Command::new(&ptxas).arg("--version"))?;
        let release = version.split_once(", V").map(|(_, rest)| rest.split_whitespace().next().unwrap_or_default());
        let release = release.unwrap_or("unknown").to_owned();
        Ok(Self { ptxas, nvdisasm, release })
    }

    /// Whether this is the release whose counts the ratchet holds.
    pub fn is_pinned(&self) -> bool {
        self.release == PINNED_PTXAS
    }

    /// Makes the tools ready if they are not: `pip` unpacks NVIDIA's wheels into `root/.oxtile/cuda`. `say` is called with each step.
    pub fn setup(root: &Path, say: &dyn Fn(&str)) -> Result<Self, Error> {
        if let Ok(tools) = Self::find(root) {
            return Ok(tools);
        }
        let folder = root.join(".oxtile/cuda");
        say(&format!("pip: {} into {}", WHEELS.join(", "), folder.display()));
        let mut pip = Command::new("python3");
        pip.args(["-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps", "--upgrade", "--target"]);
        tool::output("installing NVIDIA's binary tools (this needs Python 3 with pip)", pip.arg(&folder).args(WHEELS))?;
        Self::find(root)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_named_folder_may_be_the_one_that_pip_was_given() {
        let tools = CudaTools::find(Path::new(env!("CARGO_MANIFEST_DIR"))).unwrap();
        let bin = tools.ptxas.parent().unwrap();
        let folder = tempfile::tempdir().unwrap();
        let below = folder.path().join(BIN);
        std::fs::create_dir_all(below.parent().unwrap()).unwrap();
        std::os::unix::fs::symlink(bin, &below).unwrap();
        assert_eq!(CudaTools::in_named(folder.path()).unwrap().ptxas, below.join("ptxas"));
        assert_eq!(CudaTools::in_named(bin).unwrap().ptxas, tools.ptxas);
        let error = CudaTools::in_named(Path::new("/nowhere")).unwrap_err().to_string();
        assert!(error.starts_with("/nowhere/ptxas does not exist"), "{error}");
    }
}
