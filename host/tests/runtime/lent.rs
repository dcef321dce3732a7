//! What adapters of other libraries rely on: streams and memory that they lend, kept alive for as long as they are needed, and calls that only enqueue.

use std::sync::Arc;

use oxtile::attention::{
    Attention, AttentionBackward, AttentionConfig, BackwardInputs, Gradients, Inputs, Kernels, Layout, Mask, Order, Outputs, Sequences,
    Window,
};
use oxtile::num::bf16;
use oxtile::timeline::Timeline;
use oxtile::{Buffer, Graph, Runtime, Stream};

use crate::support::{Copier, emulated, filled, runtime, stream};

#[test]
fn a_lent_stream_is_kept_until_the_last_buffer_that_was_used_on_it_is_gone() {
    for runtime in [runtime(), emulated(1, 1)] {
        let theirs = stream(&runtime);
        let (device, handle) = (theirs.device(), Arc::new(theirs.clone()));
        // SAFETY: a stream of the device, there as long as the handle that is kept.
        let ours = unsafe { Stream::lent(&device, theirs.raw(), Arc::clone(&handle) as _) }.unwrap();
        drop(theirs);
        let zeros = Buffer::<u32>::zeros(&ours, 64).unwrap();
        drop(ours);
        assert_eq!(Arc::strong_count(&handle), 2, "the buffer is freed on the stream");
        assert_eq!(zeros.to_vec(&handle).unwrap(), [0; 64]);
        drop(zeros);
        assert_eq!(Arc::strong_count(&handle), 1, "nothing needs the stream any more");
    }
}

#[test]
fn lent_memory_is_kept_by_its_buffer_and_by_a_graph_with_work_on_it() {
    for runtime in [runtime(), emulated(1, 1)] {
        let stream = stream(&runtime);
        let copier = Copier::new(&runtime);
        let (theirs, expected) = filled(&stream, 64, 5);
        let theirs = Arc::new(theirs);
        let mut target = Buffer::zeros(&stream, 64).unwrap();
        // SAFETY: 64 words, there as long as what is kept, which frees them in stream order.
        let ours = unsafe { Buffer::lent(&stream.device(), theirs.address(), 64, Arc::clone(&theirs) as _) }.unwrap();
        let graph = Graph::capture(&[&stream], || copier.copy(&stream, &ours, &mut target)).unwrap();
        drop(ours);
        assert_eq!(Arc::strong_count(&theirs), 2, "the graph reads it");
        graph.replay(&stream).unwrap();
        assert_eq!(target.to_vec(&stream).unwrap(), expected);
        drop(graph);
        assert_eq!(Arc::strong_count(&theirs), 1, "nothing reads it any more");
    }
}

/// The elements of each tensor: 120 rows of 64, or 30 of 256.
const ELEMENTS: u64 = 3 * 40 * 64;

/// Attends and finds the gradients by one call each, from tensors that are on the device. Returns the largest gradient.
fn attend(runtime: &Runtime, config: AttentionConfig) -> f32 {
    let stream = stream(runtime);
    let values: Vec<_> = (0..ELEMENTS).map(|i| half::bf16::from_f32((i * 37 % 101) as f32 / 50.0 - 1.0)).collect();
    let input = Buffer::from_slice(&stream, &values).unwrap();
    let ends = Buffer::from_slice(&stream, &[0_u32, 50, 120]).unwrap();
    let mut results = [(); 4].map(|()| Buffer::<bf16>::uninitialised(&stream, ELEMENTS).unwrap());
    let mut log_sum_exp = Buffer::<f32>::uninitialised(&stream, ELEMENTS / config.head_size).unwrap();
    let (forward, backward) =
        (Attention::<bf16>::new(runtime, config).unwrap(), AttentionBackward::<bf16>::new(runtime, config, Order::Deterministic).unwrap());
    stream.synchronize().unwrap();

    let timeline = Timeline::start(runtime).unwrap();
    let sequences = (config.layout == Layout::Packed).then(|| Sequences::new(ends.view(), ends.view()));
    let inputs = || Inputs { sequences, ..Inputs::new(input.view(), input.view(), input.view()) };
    let [out, dq, dk, dv] = &mut results;
    forward.forward(&stream, inputs(), Outputs::new(out.view_mut(), log_sum_exp.view_mut())).unwrap();
    let inputs =
        BackwardInputs { forward: inputs(), out: out.view().into(), log_sum_exp: log_sum_exp.view(), grad_out: input.view().into() };
    backward.backward(&stream, inputs, Gradients::new(dq.view_mut(), dk.view_mut(), dv.view_mut())).unwrap();
    let recording = timeline.finish().unwrap();
    // Virtual devices work only while the host waits for them.
    assert!(recording.spans.iter().all(|span| !span.is_finished), "the host waited: {:?}", recording.spans);
    assert!(!recording.spans.is_empty(), "nothing was enqueued");

    let gradients: Vec<half::bf16> = dv.to_vec_as(&stream).unwrap();
    gradients.into_iter().map(|gradient| gradient.to_f32().abs()).fold(0.0, f32::max)
}

#[test]
fn attention_and_its_gradients_are_enqueued_without_a_wait_of_the_host() {
    let dense = AttentionConfig { batches: 3, queries: 40, keys: 40, head_size: 64, ..AttentionConfig::default() };
    let causal = AttentionConfig { mask: Mask::CausalBottomRight, ..dense };
    let window = AttentionConfig { window: Window { left: Some(9), right: Some(0) }, ..dense };
    let packed = AttentionConfig { layout: Layout::Packed, batches: 2, queries: 120, keys: 120, ..causal };
    let small = AttentionConfig { batches: 1, queries: 120, keys: 120, head_size: 64, ..causal };
    let divided = AttentionConfig { key_parts: Some(2), ..small };
    let wide = AttentionConfig { batches: 1, queries: 30, keys: 30, head_size: 256, ..causal };
    for config in [dense, causal, window, packed, divided, wide] {
        for kernels in [Kernels::Fastest, Kernels::Portable] {
            let config = AttentionConfig { kernels, key_parts: config.key_parts.filter(|_| kernels == Kernels::Fastest), ..config };
            let largest = attend(&Runtime::emulated(1).unwrap(), config);
            assert!(largest > 0.1 && largest < 100.0, "{largest}: {config:?}");
        }
    }
}
