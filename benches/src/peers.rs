//! The other side: torch in a process of its own, which peers/server.py serves.

use std::{
    collections::BTreeMap,
    env,
    io::{BufRead, BufReader, Write},
    path::{Path, PathBuf},
    process::{Child, ChildStdin, ChildStdout, Command, Stdio},
};

use anyhow::{Context, Result, bail};
use serde::{Deserialize, Serialize, de::DeserializeOwned};
use serde_json::{Value, json};

use crate::rounds::Side;

/// The file that serves the peers.
const SERVER: &str = "server.py";
/// The file that serves ranks of torch.distributed.
const RANKS: &str = "ranks.py";

/// What the peers run on.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Versions {
    /// The version of torch.
    pub torch: String,
    /// The version of CUDA that torch was built for.
    pub cuda: String,
    /// The name of torch's device.
    pub device: String,
    /// The version of Python.
    pub python: String,
    /// The versions of the libraries that torch calls (cuDNN, cuBLAS, NCCL, Triton) and of FlashAttention-3, of those that are installed.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub libraries: BTreeMap<String, String>,
}

/// Whether a peer computes what the kernel does.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Check {
    /// All outputs have the same bytes, or are as near as the peer asks for.
    pub equal: bool,
    /// What differs.
    pub detail: String,
}

/// A running server.
pub struct Peers {
    child: Child,
    requests: Option<ChildStdin>,
    answers: BufReader<ChildStdout>,
    /// What it runs on.
    pub versions: Versions,
}

impl Peers {
    /// Starts `python3 server.py`.
    ///
    /// # Errors
    /// No server, no Python, no torch, no GPU that torch sees.
    pub fn start(folder: Option<&Path>) -> Result<Self> {
        Self::launch(folder, SERVER, &[])
    }

    /// Starts `python3 ranks.py`: so many ranks of torch.distributed.
    ///
    /// # Errors
    /// As [`start`](Self::start).
    pub fn start_ranks(folder: Option<&Path>, world: u32) -> Result<Self> {
        Self::launch(folder, RANKS, &[world.to_string()])
    }

    fn launch(folder: Option<&Path>, server: &str, arguments: &[String]) -> Result<Self> {
        let server = find(folder, server)?;
        let mut command = Command::new("python3");
        command.arg(&server).args(arguments).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = command.spawn().context("cannot run python3")?;
        let requests = child.stdin.take();
        let answers = BufReader::new(child.stdout.take().context("python3 has no standard output")?);
        let mut peers = Self { child, requests, answers, versions: Versions::default() };
        peers.versions = peers.ask(&json!({ "do": "hello" }))?;
        Ok(peers)
    }

    /// Fills the peer's buffers and captures its graph; returns what it is.
    ///
    /// # Errors
    /// What the server answers.
    pub fn prepare(&mut self, peer: &str, dimensions: &[u64], sets: usize, pattern: &Path) -> Result<String> {
        #[derive(Deserialize)]
        struct Answer {
            title: String,
        }
        let request = json!({ "do": "prepare", "peer": peer, "dimensions": dimensions, "sets": sets, "pattern": pattern });
        Ok(self.ask::<Answer>(&request)?.title)
    }

    /// Holds the peer's outputs against those in files.
    ///
    /// # Errors
    /// What the server answers.
    pub fn check(&mut self, peer: &str, files: &BTreeMap<&str, PathBuf>) -> Result<Check> {
        self.ask(&json!({ "do": "check", "peer": peer, "files": files }))
    }

    /// Frees the buffers of every peer.
    ///
    /// # Errors
    /// What the server answers.
    pub fn release(&mut self) -> Result<()> {
        self.ask::<Value>(&json!({ "do": "release" })).map(drop)
    }

    fn round(&mut self, peer: &str, replays: usize) -> Result<f64> {
        #[derive(Deserialize)]
        struct Answer {
            milliseconds: f64,
        }
        Ok(self.ask::<Answer>(&json!({ "do": "round", "peer": peer, "replays": replays }))?.milliseconds)
    }

    pub(crate) fn ask<T: DeserializeOwned>(&mut self, request: &Value) -> Result<T> {
        let requests = self.requests.as_mut().context("python3 has no standard input")?;
        writeln!(requests, "{request}").context("the peers' server has ended")?;
        let mut line = String::new();
        if self.answers.read_line(&mut line).context("the peers' server cannot be read")? == 0 {
            bail!("the peers' server has ended: {}", self.child.wait()?);
        }
        let answer: Value = serde_json::from_str(&line).with_context(|| format!("the peers' server answered `{}`", line.trim()))?;
        if answer["ok"] != Value::Bool(true) {
            bail!("{}", answer["error"].as_str().unwrap_or("the peers' server gave no reason"));
        }
        serde_json::from_value(answer).context("the peers' server answered another question")
    }
}

impl Drop for Peers {
    fn drop(&mut self) {
        // The server ends with its input.
        self.requests = None;
        let _ = self.child.wait();
    }
}

/// A peer's side of a comparison.
pub struct PeerSide<'a> {
    /// The server, shared by the sides of a comparison.
    pub peers: &'a std::cell::RefCell<Peers>,
    /// The name that the server knows.
    pub peer: &'static str,
    /// What it is.
    pub title: String,
    /// Replays a round.
    pub replays: usize,
}

impl Side for PeerSide<'_> {
    fn label(&self) -> &str {
        &self.title
    }

    fn round(&mut self) -> Result<f64> {
        self.peers.borrow_mut().round(self.peer, self.replays)
    }
}

/// The server: in the folder given, in `OXTILE_PEERS`, beside the executable or in the sources.
fn find(folder: Option<&Path>, server: &str) -> Result<PathBuf> {
    let executable = env::current_exe().ok();
    let beside = executable.as_deref().and_then(Path::parent);
    let sources = executable.iter().flat_map(|program| program.ancestors()).map(|above| above.join("benches/peers"));
    let folders: Vec<PathBuf> = match folder {
        Some(folder) => vec![folder.to_owned()],
        None => env::var_os("OXTILE_PEERS")
            .map(PathBuf::from)
            .into_iter()
            .chain(beside.map(Path::to_owned))
            .chain(beside.map(|folder| folder.join("peers")))
            .chain(sources)
            .collect(),
    };
    let found = folders.iter().map(|folder| folder.join(server)).find(|file| file.is_file());
    found.with_context(|| {
        let looked_in: Vec<_> = folders.iter().map(|folder| folder.display().to_string()).collect();
        format!("there is no {server} in {}: name its folder with --peers", looked_in.join(", "))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A server that answers each request with the next of these lines.
    fn serve(lines: &str) -> Result<Peers> {
        let folder = tempfile::tempdir()?;
        let script = format!("import sys\nfor line in {lines}:\n    sys.stdin.readline()\n    print(line, flush=True)\n");
        std::fs::write(folder.path().join(SERVER), script)?;
        Peers::start(Some(folder.path()))
    }

    const HELLO: &str = r#"'{"ok": true, "torch": "2", "cuda": "13", "device": "H200", "python": "3"}'"#;

    #[test]
    fn the_server_is_asked_and_answers() {
        let mut peers =
            serve(&format!(r#"[{HELLO}, '{{"ok": true, "milliseconds": 1.5}}', '{{"ok": false, "error": "no memory"}}']"#)).unwrap();
        assert_eq!(peers.versions.device, "H200");
        assert_eq!(peers.round("copy", 3).unwrap(), 1.5);
        assert_eq!(peers.release().unwrap_err().to_string(), "no memory");
        assert!(peers.release().unwrap_err().to_string().contains("server has ended"));
    }

    #[test]
    fn no_torch_and_no_server_are_reasons() {
        let error = serve(r#"['{"ok": false, "error": "ModuleNotFoundError: No module named torch"}']"#).err().unwrap();
        assert_eq!(error.to_string(), "ModuleNotFoundError: No module named torch");
        let error = Peers::start(Some(Path::new("/nowhere"))).err().unwrap().to_string();
        assert!(error.contains("there is no server.py in /nowhere"), "{error}");
    }
}
