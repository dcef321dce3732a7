//! Attention and products of matrices in graphs: no run allocates, or waits for the host.

use oxtile::attention::{
    Attention, AttentionBackward, AttentionConfig, BackwardInputs, GradientOutput, Gradients, Inputs, Order, Output, Outputs,
};
use oxtile::gemm::{Gemm, GemmConfig};
use oxtile::num::bf16;
use oxtile::runtime::Kind;
use oxtile::timeline::{Activity, Timeline};
use oxtile::{Buffer, Graph, Runtime, Stream};

use crate::support::{alias, emulated, everywhere, runtime, stream, streams};

fn filled(stream: &Stream, elements: u64, value: f32) -> Buffer<bf16> {
    Buffer::from_slice(stream, &vec![half::bf16::from_f32(value); elements as usize]).unwrap()
}

/// Each replay adds to what the one before left: keys are merged again, gradients are added again.
#[test]
fn a_graph_holds_both_passes_of_attention() {
    let runtime = runtime();
    let stream = stream(&runtime);
    let config = AttentionConfig {
        queries: 3,
        keys: 5,
        head_size: 64,
        output: Output::Merged,
        gradients: GradientOutput::Added,
        ..AttentionConfig::default()
    };
    // All scores are 0, so that each key has a fifth of the weight.
    let (q, k, v) = (filled(&stream, 3 * 64, 0.0), filled(&stream, 5 * 64, 1.0), filled(&stream, 5 * 64, 3.0));
    let (out, grad_out) = (filled(&stream, 3 * 64, 3.0), filled(&stream, 3 * 64, 2.0));
    let of_keys = Buffer::from_slice(&stream, &[5_f32.ln(); 3]).unwrap();
    let mut running = Buffer::<f32>::zeros(&stream, 3 * 64).unwrap();
    let mut log_sum_exp = Buffer::from_slice(&stream, &[f32::NEG_INFINITY; 3]).unwrap();
    let [mut grad_q, mut grad_k, mut grad_v] = [3, 5, 5].map(|rows| Buffer::<f32>::zeros(&stream, rows * 64).unwrap());

    let attention = Attention::<bf16>::new(&runtime, config).unwrap();
    let backward = AttentionBackward::<bf16>::new(&runtime, config, Order::Deterministic).unwrap();
    let inputs = || Inputs::new(q.view(), k.view(), v.view());
    let mut forward = attention.bind(&stream, inputs(), Outputs::merged(running.view_mut(), log_sum_exp.view_mut())).unwrap();
    let of_backward =
        BackwardInputs { forward: inputs(), out: out.view().into(), log_sum_exp: of_keys.view(), grad_out: grad_out.view().into() };
    let gradients = Gradients::added(grad_q.view_mut(), grad_k.view_mut(), grad_v.view_mut());
    let mut gradients = backward.bind(&stream, of_backward, gradients).unwrap();
    let graph = Graph::capture(&[&stream], || {
        forward.run(&stream)?;
        gradients.run(&stream)
    })
    .unwrap();
    for _ in 0..3 {
        graph.replay(&stream).unwrap();
    }
    stream.synchronize().unwrap();
    drop((graph, forward, gradients));

    assert!(running.to_vec(&stream).unwrap().iter().all(|x| (x - 3.0).abs() < 0.02));
    assert!(log_sum_exp.to_vec(&stream).unwrap().iter().all(|x| (x - 15_f32.ln()).abs() < 1e-5));
    // Three replays of three queries, each with a fifth of 2.
    assert!(grad_v.to_vec(&stream).unwrap().iter().all(|x| (x - 3.6).abs() < 0.02));
    assert!(grad_q.to_vec(&stream).unwrap().iter().chain(&grad_k.to_vec(&stream).unwrap()).all(|x| x.abs() < 1e-5));
}

/// The kernels of dense tensors, rounded.
#[test]
fn a_graph_holds_dense_attention() {
    let runtime = runtime();
    let stream = stream(&runtime);
    let config = AttentionConfig { queries: 4, keys: 4, head_size: 64, ..AttentionConfig::default() };
    let (q, v) = (filled(&stream, 4 * 64, 0.0), filled(&stream, 4 * 64, 3.0));
    let (of_forward, grad_out) = (filled(&stream, 4 * 64, 3.0), filled(&stream, 4 * 64, 2.0));
    let of_keys = Buffer::from_slice(&stream, &[4_f32.ln(); 4]).unwrap();
    let mut out = filled(&stream, 4 * 64, 0.0);
    let mut log_sum_exp = Buffer::<f32>::zeros(&stream, 4).unwrap();
    let [mut grad_q, mut grad_k, mut grad_v] = [(); 3].map(|()| filled(&stream, 4 * 64, 7.0));

    let attention = Attention::<bf16>::new(&runtime, config).unwrap();
    let backward = AttentionBackward::<bf16>::new(&runtime, config, Order::Fast).unwrap();
    let inputs = || Inputs::new(q.view(), q.view(), v.view());
    let mut forward = attention.bind(&stream, inputs(), Outputs::new(out.view_mut(), log_sum_exp.view_mut())).unwrap();
    let of_backward =
        BackwardInputs { forward: inputs(), out: of_forward.view().into(), log_sum_exp: of_keys.view(), grad_out: grad_out.view().into() };
    let gradients = Gradients::new(grad_q.view_mut(), grad_k.view_mut(), grad_v.view_mut());
    let mut gradients = backward.bind(&stream, of_backward, gradients).unwrap();
    let graph = Graph::capture(&[&stream], || {
        forward.run(&stream)?;
        gradients.run(&stream)
    })
    .unwrap();
    // The second finds counters and sums as the first left them.
    graph.replay(&stream).unwrap();
    graph.replay(&stream).unwrap();
    stream.synchronize().unwrap();
    drop((graph, forward, gradients));

    let all = |buffer: &Buffer<bf16>, value: f32| {
        let values: Vec<half::bf16> = buffer.to_vec_as(&stream).unwrap();
        values.iter().all(|x| x.to_f32() == value)
    };
    // Weights of a quarter are exact.
    assert!(all(&out, 3.0) && all(&grad_v, 2.0) && all(&grad_q, 0.0) && all(&grad_k, 0.0));
    assert!(log_sum_exp.to_vec(&stream).unwrap().iter().all(|x| (x - 4_f32.ln()).abs() < 1e-5));
}

/// Each replay adds the product again.
#[test]
fn a_graph_holds_a_product() {
    let runtime = runtime();
    let stream = stream(&runtime);
    let (a, b) = (filled(&stream, 16 * 8, 0.5), filled(&stream, 8 * 24, 3.0));
    let mut d = Buffer::<f32>::zeros(&stream, 16 * 24).unwrap();
    let gemm = Gemm::<bf16, f32>::new(&runtime, GemmConfig { m: 16, n: 24, k: 8, beta: 1.0, ..GemmConfig::default() }).unwrap();
    let mut bound = gemm.bind(&stream, a.view(), b.view(), None, d.view_mut()).unwrap();
    let graph = Graph::capture(&[&stream], || bound.run(&stream)).unwrap();
    for _ in 0..3 {
        graph.replay(&stream).unwrap();
    }
    stream.synchronize().unwrap();
    drop((graph, bound));
    assert_eq!(d.to_vec(&stream).unwrap(), [36.0; 16 * 24]);
}

/// How often words of the host travel while `bind` is called.
fn uploads<T>(runtime: &Runtime, stream: &Stream, bind: impl FnOnce() -> T) -> usize {
    stream.synchronize().unwrap();
    let timeline = Timeline::start(runtime).unwrap();
    drop(bind());
    stream.synchronize().unwrap();
    let spans = timeline.finish().unwrap().spans;
    let travels = |name: &str| ["words", "copy from host"].contains(&name);
    spans.iter().filter(|span| span.activity == Activity::Copy && travels(&span.name)).count()
}

/// Tensor maps and arrays travel together.
#[test]
fn a_bind_copies_once() {
    let runtime = emulated(1, 1);
    let stream = stream(&runtime);
    let (a, b) = (filled(&stream, 16 * 8, 0.5), filled(&stream, 8 * 24, 3.0));
    let mut d = Buffer::<f32>::zeros(&stream, 16 * 24).unwrap();
    let gemm = Gemm::<bf16, f32>::new(&runtime, GemmConfig { m: 16, n: 24, k: 8, ..GemmConfig::default() }).unwrap();
    let copies = uploads(&runtime, &stream, || gemm.bind(&stream, a.view(), b.view(), None, d.view_mut()).unwrap());
    assert_eq!(copies, 1, "{gemm:?}");

    let config = AttentionConfig { queries: 3, keys: 5, head_size: 64, ..AttentionConfig::default() };
    let (q, k, mut out) = (filled(&stream, 3 * 64, 0.0), filled(&stream, 5 * 64, 1.0), filled(&stream, 3 * 64, 0.0));
    let mut log_sum_exp = Buffer::<f32>::zeros(&stream, 3).unwrap();
    let attention = Attention::<bf16>::new(&runtime, config).unwrap();
    let inputs = Inputs::new(q.view(), k.view(), k.view());
    let outputs = Outputs::new(out.view_mut(), log_sum_exp.view_mut());
    let copies = uploads(&runtime, &stream, || attention.bind(&stream, inputs, outputs).unwrap());
    assert_eq!(copies, 1, "{attention:?}");
}

/// Streams that fork and join in a graph, by kernels that begin early. It holds events and graphs to their order, not kernels to their wait: on an H200 it passes too where
/// the wait is cut out of the kernels, which the build refuses (`Meta::begins_too_early` of `oxtile-build`).
#[test]
fn products_of_two_streams_of_a_graph_wait_for_each_other() {
    const N: u64 = 64;
    for runtime in everywhere() {
        let [first, second] = streams(&runtime);
        let values =
            |seed: u64| -> Vec<half::bf16> { (0..N * N).map(|i| half::bf16::from_f32((i * 7 + i / N + seed) as f32 % 8.0)).collect() };
        // Column `c` of a product with this matrix is column `from(c)`.
        let from = |column: u64| (5 * column + 3) % N;
        let moving: Vec<_> = (0..N * N).map(|i| half::bf16::from_f32(f32::from(u8::from(i / N == from(i % N))))).collect();
        let (moving, mut input) =
            (Buffer::<bf16>::from_slice(&first, &moving).unwrap(), Buffer::<bf16>::from_slice(&first, &values(0)).unwrap());
        let [mut once, mut twice, mut sum] = [(); 3].map(|()| filled(&first, N * N, 0.0));
        // Handles of their own: events alone order the streams.
        let [input_again, once_again, once_again_too, twice_again, sum_again] =
            [alias(&input), alias(&once), alias(&once), alias(&twice), alias(&sum)];
        let config = GemmConfig { m: N, n: N, k: N, ..GemmConfig::default() };
        let plain = Gemm::<bf16, bf16>::new(&runtime, config).unwrap();
        let adding = Gemm::<bf16, bf16>::new(&runtime, GemmConfig { beta: 1.0, ..config }).unwrap();
        let mut to_once = plain.bind(&first, input_again.view(), moving.view(), None, once.view_mut()).unwrap();
        let mut to_twice = plain.bind(&second, once_again.view(), moving.view(), None, twice.view_mut()).unwrap();
        let mut to_sum = plain.bind(&first, once_again_too.view(), moving.view(), None, sum.view_mut()).unwrap();
        let mut sum_too = alias(&sum_again);
        let mut add = adding.bind(&first, twice_again.view(), moving.view(), None, sum_too.view_mut()).unwrap();
        let graph = Graph::capture(&[&first, &second], || {
            to_once.run(&first)?;
            second.wait(&first.record()?)?;
            to_twice.run(&second)?;
            to_sum.run(&first)?;
            first.wait(&second.record()?)?;
            add.run(&first)
        })
        .unwrap();
        let replays = if runtime.kind() == Kind::Cuda { 100 } else { 2 };
        for seed in 0..replays {
            let values = values(seed);
            input.copy_from_slice(&first, &values).unwrap();
            graph.replay(&first).unwrap();
            let found: Vec<half::bf16> = sum_again.to_vec_as(&first).unwrap();
            let at = |row: u64, column| values[(row * N + column) as usize].to_f32();
            let is_right = |i: u64| {
                let (row, column) = (i / N, from(from(i % N)));
                found[i as usize].to_f32() == at(row, column) + at(row, from(column))
            };
            assert!((0..N * N).all(is_right), "replay {seed}");
        }
    }
}
