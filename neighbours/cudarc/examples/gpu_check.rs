//! Oxtile on cudarc's streams on a real GPU, without a test harness: `gpu_check` prints a line for each check, and ends with 1 where one failed.
//!
//! - Attention, forward and backward, on a created stream, the default stream and the per-thread stream, against sums in F64.
//! - The calls return while earlier work of the stream is still running: the host waits for nothing.
//! - Random programs of copies, fills and attention on three streams, whose slices are dropped and allocated meanwhile, give the bytes that one stream gives.
//!
//! `cargo xtask neighbours --gpu` makes a folder with it and its kernels.

use std::process::ExitCode;
use std::sync::Arc;
use std::time::Instant;

use cudarc::driver::{CudaContext, CudaSlice, CudaStream};
use half::bf16;
use oxtile::Runtime;
use oxtile::attention::{Attention, AttentionBackward, AttentionConfig, BackwardInputs, Gradients, Inputs, Mask, Order, Outputs};
use oxtile_cudarc::{Result, on};

/// Roundings to BF16: of probabilities, of sums, of the result.
const BOUND: f64 = 4.0 / 256.0;

/// The same numbers in every run.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        self.0 >> 33
    }

    fn below(&mut self, count: usize) -> usize {
        self.next() as usize % count
    }

    fn tensor(&mut self, elements: u64) -> Vec<bf16> {
        (0..elements).map(|_| bf16::from_f64(self.next() as f64 / f64::from(1 << 30) - 1.0)).collect()
    }
}

fn config(rows: u64, heads: u64, key_heads: u64) -> AttentionConfig {
    let mask = Mask::CausalBottomRight;
    AttentionConfig { queries: rows, keys: rows, heads, key_heads, head_size: 64, mask, ..AttentionConfig::default() }
}

/// Elements of queries and of keys.
fn elements(config: &AttentionConfig) -> [u64; 2] {
    [config.heads, config.key_heads].map(|heads| config.queries * heads * config.head_size)
}

/// Slices of one stream: q, k, v, out, log-sum-exp, the gradient of out, and dq, dk, dv.
struct Tensors {
    inputs: [CudaSlice<bf16>; 3],
    out: CudaSlice<bf16>,
    log_sum_exp: CudaSlice<f32>,
    grad_out: CudaSlice<bf16>,
    gradients: [CudaSlice<bf16>; 3],
}

impl Tensors {
    fn new(stream: &Arc<CudaStream>, config: &AttentionConfig, host: &[Vec<bf16>; 4]) -> Result<Self> {
        let [queries, keys] = elements(config).map(|count| count as usize);
        let [q, k, v, grad_out] = host;
        Ok(Self {
            inputs: [stream.clone_htod(q)?, stream.clone_htod(k)?, stream.clone_htod(v)?],
            out: stream.alloc_zeros(queries)?,
            log_sum_exp: stream.alloc_zeros((config.heads * config.queries) as usize)?,
            grad_out: stream.clone_htod(grad_out)?,
            gradients: [stream.alloc_zeros(queries)?, stream.alloc_zeros(keys)?, stream.alloc_zeros(keys)?],
        })
    }

    /// Both passes, on one stream.
    fn attend(&mut self, runtime: &Runtime, stream: &Arc<CudaStream>, config: AttentionConfig) -> Result<()> {
        on(runtime, stream, |on| {
            let [q, k, v] = &self.inputs;
            let (q, k, v, grad_out) = (on.read(q)?, on.read(k)?, on.read(v)?, on.read(&self.grad_out)?);
            let (mut out, mut log_sum_exp) = (on.write(&mut self.out)?, on.write(&mut self.log_sum_exp)?);
            let inputs = || Inputs::new(q.view(), k.view(), v.view());
            let outputs = Outputs::new(out.view_mut(), log_sum_exp.view_mut());
            Attention::new(runtime, config)?.forward(on.stream(), inputs(), outputs)?;
            let [dq, dk, dv] = &mut self.gradients;
            let (mut dq, mut dk, mut dv) = (on.write(dq)?, on.write(dk)?, on.write(dv)?);
            let inputs = BackwardInputs {
                forward: inputs(),
                out: out.view().into(),
                log_sum_exp: log_sum_exp.view(),
                grad_out: grad_out.view().into(),
            };
            let gradients = Gradients::new(dq.view_mut(), dk.view_mut(), dv.view_mut());
            AttentionBackward::new(runtime, config, Order::Deterministic)?.backward(on.stream(), inputs, gradients)?;
            Ok(())
        })
    }
}

/// The result and the gradients of q, k and v in F64.
fn reference(config: &AttentionConfig, host: &[Vec<bf16>; 4]) -> [Vec<f64>; 4] {
    let (rows, size) = (config.queries as usize, config.head_size as usize);
    let (heads, key_heads) = (config.heads as usize, config.key_heads as usize);
    let [q, k, v, grad] = host.each_ref().map(|tensor| tensor.iter().map(|x| x.to_f64()).collect::<Vec<_>>());
    let row = |i: usize, h: usize, heads: usize| (i * heads + h) * size;
    let dot = |a: &[f64], at: usize, b: &[f64], bt: usize| (0..size).map(|d| a[at + d] * b[bt + d]).sum::<f64>();
    let (mut out, mut dq, mut dk, mut dv) = (vec![0.0; q.len()], vec![0.0; q.len()], vec![0.0; k.len()], vec![0.0; k.len()]);
    for (h, i) in (0..heads).flat_map(|h| (0..rows).map(move |i| (h, i))) {
        let (at, key) = (row(i, h, heads), |j| row(j, h * key_heads / heads, key_heads));
        let scale = config.scale();
        let powers: Vec<f64> = (0..=i).map(|j| (scale * dot(&q, at, &k, key(j))).exp()).collect();
        let sum: f64 = powers.iter().sum();
        let probabilities: Vec<f64> = powers.iter().map(|power| power / sum).collect();
        for (j, p) in probabilities.iter().enumerate() {
            (0..size).for_each(|d| out[at + d] += p * v[key(j) + d]);
        }
        let delta = dot(&out, at, &grad, at);
        for (j, p) in probabilities.iter().enumerate() {
            let ds = scale * p * (dot(&grad, at, &v, key(j)) - delta);
            for d in 0..size {
                dv[key(j) + d] += p * grad[at + d];
                dq[at + d] += ds * k[key(j) + d];
                dk[key(j) + d] += ds * q[at + d];
            }
        }
    }
    [out, dq, dk, dv]
}

/// The largest difference as a part of the largest magnitude.
fn error(found: &[bf16], expected: &[f64]) -> f64 {
    let largest = expected.iter().fold(0.0_f64, |largest, x| largest.max(x.abs()));
    let differences = found.iter().zip(expected).map(|(found, expected)| (found.to_f64() - expected).abs());
    // NaN stays.
    differences.fold(0.0, |most: f64, x| if most.is_nan() || x <= most { most } else { x }) / largest
}

fn results(runtime: &Runtime, streams: &[(&str, Arc<CudaStream>)]) -> Result<bool> {
    let config = config(150, 4, 2);
    let mut random = Random(1);
    let [queries, keys] = elements(&config);
    let host = [queries, keys, keys, queries].map(|count| random.tensor(count));
    let expected = reference(&config, &host);
    let mut passed = true;
    for (name, stream) in streams {
        let mut tensors = Tensors::new(stream, &config, &host)?;
        tensors.attend(runtime, stream, config)?;
        let [dq, dk, dv] = &tensors.gradients;
        for ((what, found), expected) in [("out", &tensors.out), ("dq", dq), ("dk", dk), ("dv", dv)].into_iter().zip(&expected) {
            let error = error(&stream.clone_dtoh(found)?, expected);
            let good = error < BOUND;
            println!("{} {name}: {what} is off by {error:.5} of the largest", mark(good));
            passed &= good;
        }
    }
    Ok(passed)
}

/// Enqueues many passes and looks whether the stream is still at work when the last call has returned.
fn nothing_is_waited_for(runtime: &Runtime, streams: &[(&str, Arc<CudaStream>)]) -> Result<bool> {
    let config = config(8192, 16, 16);
    let mut random = Random(2);
    let [queries, keys] = elements(&config);
    let host = [queries, keys, keys, queries].map(|count| random.tensor(count));
    let mut passed = true;
    for (name, stream) in streams {
        let mut tensors = Tensors::new(stream, &config, &host)?;
        // Kernels are loaded by the first call.
        tensors.attend(runtime, stream, config)?;
        stream.synchronize()?;
        let (start, calls) = (Instant::now(), 30);
        for _ in 0..calls {
            tensors.attend(runtime, stream, config)?;
        }
        let enqueued = start.elapsed();
        let event = stream.record_event(None)?;
        let is_running = !event.is_complete();
        event.synchronize()?;
        let done = start.elapsed();
        let good = is_running && enqueued < done / 2;
        println!("{} {name}: {calls} calls returned after {enqueued:.1?}, their work was done after {done:.1?}", mark(good));
        passed &= good;
    }
    Ok(passed)
}

const SLOTS: usize = 5;

/// One step of a random program.
#[derive(Clone, Copy, Debug)]
enum Step {
    /// Attention of three slots to a fourth.
    Attend([usize; 4]),
    Copy(usize, usize),
    Fill(usize),
    /// The slot is dropped, and allocated again on the step's stream.
    Replace(usize),
}

/// Runs steps, and returns the slots. Attention goes to the stream of the step's number; cudarc's own copies and fills to that of their slot, since of reads on two streams cudarc
/// remembers the last alone (0.19.10).
fn program(runtime: &Runtime, streams: &[Arc<CudaStream>], steps: &[(usize, Step)], first: &[Vec<bf16>]) -> Result<Vec<Vec<bf16>>> {
    let config = config(200, 2, 2);
    let mut slots = first.iter().map(|slot| streams[0].clone_htod(slot)).collect::<Result<Vec<_>, _>>()?;
    for (stream, step) in steps {
        let stream = &streams[*stream];
        match *step {
            Step::Copy(from, to) => {
                let [of_from, of_to] = [from, to].map(|slot| Arc::clone(slots[slot].stream()));
                let copied = of_from.clone_dtod(&slots[from])?;
                of_to.memcpy_dtod(&copied, &mut slots[to])?;
            }
            Step::Fill(slot) => Arc::clone(slots[slot].stream()).memset_zeros(&mut slots[slot])?,
            Step::Replace(slot) => {
                let len = slots[slot].len();
                slots[slot] = stream.alloc_zeros(len)?;
            }
            Step::Attend([q, k, v, to]) => {
                // The log-sum-exp is dropped while the kernel may run.
                let mut log_sum_exp = stream.alloc_zeros::<f32>((config.heads * config.queries) as usize)?;
                let mut out = stream.alloc_zeros::<bf16>(slots[to].len())?;
                on(runtime, stream, |on| {
                    let (q, k, v) = (on.read(&slots[q])?, on.read(&slots[k])?, on.read(slots[v].as_view())?);
                    let (mut out, mut log_sum_exp) = (on.write(&mut out)?, on.write(log_sum_exp.as_view_mut())?);
                    let outputs = Outputs::new(out.view_mut(), log_sum_exp.view_mut());
                    Attention::new(runtime, config)?.forward(on.stream(), Inputs::new(q.view(), k.view(), v.view()), outputs)?;
                    Ok::<_, oxtile_cudarc::Error>(())
                })?;
                slots[to] = out;
            }
        }
    }
    slots.iter().map(|slot| Ok(slot.stream().clone_dtoh(slot)?)).collect()
}

fn random_programs(runtime: &Runtime, streams: &[Arc<CudaStream>]) -> Result<bool> {
    const PROGRAMS: u64 = 100;
    let elements = elements(&config(200, 2, 2))[0];
    let mut wrong = 0;
    for seed in 0..PROGRAMS {
        let mut random = Random(seed + 10);
        let first: Vec<_> = (0..SLOTS).map(|_| random.tensor(elements)).collect();
        let steps: Vec<_> = (0..40)
            .map(|_| {
                let mut slot = || random.below(SLOTS);
                let slots = [slot(), slot(), slot(), slot()];
                let step = match random.below(8) {
                    0 => Step::Copy(slots[0], slots[1]),
                    1 => Step::Fill(slots[0]),
                    2 => Step::Replace(slots[0]),
                    _ => Step::Attend(slots),
                };
                (random.below(streams.len()), step)
            })
            .collect();
        let alone: Vec<_> = steps.iter().map(|(_, step)| (0, *step)).collect();
        let (found, expected) = (program(runtime, streams, &steps, &first)?, program(runtime, &streams[..1], &alone, &first)?);
        let bits = |slots: &[Vec<bf16>]| slots.iter().flatten().map(|x| x.to_bits()).collect::<Vec<_>>();
        wrong += u64::from(bits(&found) != bits(&expected));
    }
    println!("{} {wrong} of {PROGRAMS} random programs on {} streams differ from the same on one", mark(wrong == 0), streams.len());
    Ok(wrong == 0)
}

fn refusals(context: &Arc<CudaContext>, stream: &Arc<CudaStream>) -> Result<bool> {
    let emulator = Runtime::emulated_fast(1)?;
    let of_emulator = on(&emulator, stream, |_| Ok::<_, oxtile_cudarc::Error>(())).unwrap_err().to_string();
    let good = of_emulator.contains("Runtime::cuda()");
    println!("{} a runtime of the emulator is refused: {of_emulator}", mark(good));
    context.check_err()?;
    Ok(good)
}

fn mark(good: bool) -> &'static str {
    if good { "ok  " } else { "FAIL" }
}

fn run() -> Result<bool> {
    let context = CudaContext::new(0)?;
    let runtime = Runtime::cuda()?;
    println!("{}, compute capability {:?}", context.name()?, context.compute_capability()?);
    // Before any stream is created cudarc tracks no events: the per-thread and the default stream stand alone, as in candle.
    let alone = [("per-thread stream, no events", context.per_thread_stream()), ("default stream, no events", context.default_stream())];
    let mut passed = results(&runtime, &alone)? & nothing_is_waited_for(&runtime, &alone)?;
    let created = [("created stream", context.new_stream()?), ("per-thread stream", context.per_thread_stream())];
    passed &= results(&runtime, &created)? & nothing_is_waited_for(&runtime, &created)?;
    let streams = [context.new_stream()?, context.new_stream()?, context.per_thread_stream()];
    passed &= random_programs(&runtime, &streams)?;
    passed &= refusals(&context, &streams[0])?;
    Ok(passed)
}

fn main() -> ExitCode {
    match run() {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}
