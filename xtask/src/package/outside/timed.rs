//! Attention from the packages alone, timed in the rounds of `oxtile-benches`: it answers as `benches/peers/server.py` does, a JSON request a line.
//!
//!     {"do": "hello"}                                            -> {"torch", "cuda", "device", "python"}, of which it has the device alone
//!     {"do": "prepare", "peer", "dimensions", "sets", "pattern"} -> {"title"}
//!     {"do": "round", "peer", "replays"}                         -> {"milliseconds"}
//!     {"do": "check", "peer", "files": {NAME: PATH}}             -> {"equal", "detail"}
//!     {"do": "release"}                                          -> {}
//!
//! `cargo xtask package --check` builds it, and asks it on the emulator (`--emulated`).

use std::collections::BTreeMap;
use std::error::Error;
use std::fs;
use std::io::{self, BufRead, Write};

use oxtile::attention::{Attention, AttentionBackward, AttentionConfig, BackwardInputs, Gradients, Inputs, Mask, Order, Outputs};
use oxtile::num::bf16;
use oxtile::runtime::Graph;
use oxtile::{Buffer, Runtime, Stream};
use serde_json::{Value, json};

type Result<T> = std::result::Result<T, Box<dyn Error>>;

/// How far the start moves in the pattern from one buffer to the next, as on the other side of the comparison.
const STEP: usize = 104_729;

/// What is computed: the forward pass, or the backward pass in an order; and under which mask.
type Pass = (Option<Order>, Mask);

/// A pass that is captured, and what it writes.
struct Prepared {
    graph: Graph,
    outputs: Vec<(&'static str, Buffer<bf16>)>,
}

struct Server {
    runtime: Runtime,
    stream: Stream,
    prepared: BTreeMap<String, Prepared>,
}

fn main() -> Result<()> {
    let is_emulated = std::env::args().any(|argument| argument == "--emulated");
    // Never the emulator where a GPU is meant: it would take hours.
    let runtime = if is_emulated { Runtime::emulated_fast(1) } else { Runtime::cuda() };
    let server = runtime.and_then(|runtime| Ok((runtime.device(0)?.stream()?, runtime)));
    let mut server = server.map(|(stream, runtime)| Server { runtime, stream, prepared: BTreeMap::new() });
    for line in io::stdin().lock().lines() {
        let answer = match &mut server {
            Ok(server) => server.answer(&line?),
            Err(error) => Err(error.to_string().into()),
        };
        let mut answer = answer.unwrap_or_else(|error| json!({ "ok": false, "error": error.to_string() }));
        answer.as_object_mut().expect("answers are objects").entry("ok").or_insert(Value::Bool(true));
        writeln!(io::stdout().lock(), "{answer}")?;
    }
    Ok(())
}

/// The passes by the names of the peers that the benchmarks ask for: an order for each of the two of a backward pass.
fn pass(peer: &str) -> Result<Pass> {
    Ok(match peer {
        "attention_full" => (None, Mask::Full),
        "attention_causal" => (None, Mask::CausalBottomRight),
        "attention_backward_full" => (Some(Order::Fast), Mask::Full),
        "attention_backward_causal" => (Some(Order::Fast), Mask::CausalBottomRight),
        "flash_attention_3_backward_full" => (Some(Order::Deterministic), Mask::Full),
        "flash_attention_3_backward_causal" => (Some(Order::Deterministic), Mask::CausalBottomRight),
        other => return Err(format!("the packages have no pass for `{other}`").into()),
    })
}

impl Server {
    fn answer(&mut self, line: &str) -> Result<Value> {
        let request: Value = serde_json::from_str(line)?;
        let peer = || request["peer"].as_str().ok_or("no peer is named");
        match request["do"].as_str() {
            Some("hello") => {
                let device = self.stream.device().name().to_owned();
                Ok(json!({ "torch": "none", "cuda": "none", "device": device, "python": "none" }))
            }
            Some("prepare") => {
                let (peer, pass) = (peer()?, pass(peer()?)?);
                let dimensions: [u64; 7] = serde_json::from_value(request["dimensions"].clone())?;
                let pattern = fs::read(request["pattern"].as_str().ok_or("no pattern is named")?)?;
                self.prepared.insert(peer.to_owned(), self.prepare(pass, dimensions, &pattern)?);
                let order = pass.0.map(|order| format!(", {order:?}").to_lowercase());
                Ok(json!({ "title": format!("packaged crates{}", order.unwrap_or_default()) }))
            }
            Some("round") => {
                let milliseconds = self.round(peer()?, request["replays"].as_u64().ok_or("no number of replays")?)?;
                Ok(json!({ "milliseconds": milliseconds }))
            }
            Some("check") => {
                let files: BTreeMap<String, String> = serde_json::from_value(request["files"].clone())?;
                let detail = self.differences(peer()?, &files)?.join("; ");
                Ok(json!({ "equal": detail.is_empty(), "detail": detail }))
            }
            Some("release") => {
                self.prepared.clear();
                Ok(json!({}))
            }
            _ => Err(format!("unknown request {}", request["do"]).into()),
        }
    }

    fn prepare(&self, (order, mask): Pass, dimensions: [u64; 7], pattern: &[u8]) -> Result<Prepared> {
        let (runtime, stream) = (&self.runtime, &self.stream);
        let [batches, queries, keys, heads, key_heads, head_size, value_size] = dimensions;
        let sizes = AttentionConfig { batches, queries, keys, heads, key_heads, head_size, ..AttentionConfig::default() };
        let config = AttentionConfig { value_size: Some(value_size), mask, ..sizes };
        let (rows, of_keys) = (batches * queries * heads, batches * keys * key_heads);
        let tensor = |buffer, elements| Buffer::from_slice(stream, &fill(pattern, buffer, elements));
        let (q, k, v) = (tensor(0, rows * head_size)?, tensor(1, of_keys * head_size)?, tensor(2, of_keys * value_size)?);
        let new = |elements| Buffer::<bf16>::uninitialised(stream, elements);
        let (mut out, mut sums) = (new(rows * value_size)?, Buffer::<f32>::uninitialised(stream, rows)?);
        let inputs = || Inputs::new(q.view(), k.view(), v.view());
        let forward = Attention::<bf16>::new(runtime, config)?;
        let Some(order) = order else {
            let graph = {
                let mut bound = forward.bind(stream, inputs(), Outputs::new(out.view_mut(), sums.view_mut()))?;
                captured(stream, || bound.run(stream))?
            };
            return Ok(Prepared { graph, outputs: vec![("out", out)] });
        };
        forward.forward(stream, inputs(), Outputs::new(out.view_mut(), sums.view_mut()))?;
        let grad_out = tensor(3, rows * value_size)?;
        let (mut dq, mut dk, mut dv) = (new(rows * head_size)?, new(of_keys * head_size)?, new(of_keys * value_size)?);
        let graph = {
            let results =
                BackwardInputs { forward: inputs(), out: out.view().into(), log_sum_exp: sums.view(), grad_out: grad_out.view().into() };
            let gradients = Gradients::new(dq.view_mut(), dk.view_mut(), dv.view_mut());
            let mut bound = AttentionBackward::<bf16>::new(runtime, config, order)?.bind(stream, results, gradients)?;
            captured(stream, || bound.run(stream))?
        };
        Ok(Prepared { graph, outputs: vec![("dq", dq), ("dk", dk), ("dv", dv)] })
    }

    /// The time of so many replays between two events, after one that keeps the device busy while the host enqueues them.
    fn round(&self, peer: &str, replays: u64) -> Result<f64> {
        let graph = &self.prepared.get(peer).ok_or("it was not prepared")?.graph;
        graph.replay(&self.stream)?;
        let start = self.stream.record()?;
        for _ in 0..replays {
            graph.replay(&self.stream)?;
        }
        let end = self.stream.record()?;
        Ok(end.elapsed_since(&start)?.as_secs_f64() * 1e3)
    }

    /// Where the outputs are not those in the files, to the byte.
    fn differences(&self, peer: &str, files: &BTreeMap<String, String>) -> Result<Vec<String>> {
        let prepared = self.prepared.get(peer).ok_or("it was not prepared")?;
        prepared.graph.replay(&self.stream)?;
        let mut differences = Vec::new();
        for (name, output) in &prepared.outputs {
            let expected = fs::read(files.get(*name).ok_or_else(|| format!("no file of `{name}`"))?)?;
            let found: Vec<u8> = output.to_vec(&self.stream)?.iter().flat_map(|x| x.to_bits().to_le_bytes()).collect();
            let wrong = found.iter().zip(&expected).filter(|(found, expected)| found != expected).count();
            if wrong > 0 || found.len() != expected.len() {
                differences.push(format!("{name}: {wrong} of {} bytes differ, the other side has {}", found.len(), expected.len()));
            }
        }
        Ok(differences)
    }
}

/// Runs a pass once, so that its kernels are loaded, and captures it.
fn captured(stream: &Stream, mut run: impl FnMut() -> oxtile::Result<()>) -> Result<Graph> {
    run()?;
    stream.synchronize()?;
    Ok(Graph::capture(&[stream], run)?)
}

/// A buffer of the pattern, by its number: its values from another start, again and again.
fn fill(pattern: &[u8], buffer: usize, elements: u64) -> Vec<bf16> {
    let (values, _) = pattern.as_chunks::<2>();
    let values = values.iter().map(|bytes| bf16::from_bits(u16::from_le_bytes(*bytes)));
    values.cycle().skip(STEP * buffer % (pattern.len() / 2)).take(elements as usize).collect()
}
