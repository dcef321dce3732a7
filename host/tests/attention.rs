//! Which kernels configurations of attention take, and what is refused of them before anything is loaded: the field is named, and what it
//! may be.

use oxtile::attention::{
    Attention, AttentionBackward, AttentionConfig, BackwardInputs, BackwardKernel, ForwardKernel, Gradients, Inputs, Kernels, Layout, Mask,
    Order, Outputs, Padding, Problem, Sequences, Sink, Window,
};
use oxtile::num::{Float, bf16, e4m3};
use oxtile::{Buffer, Choice, Device, Result, Runtime};

/// The kernel of a pass, and why.
type Chosen = (Option<&'static str>, String);

fn chosen<D>(choice: Choice<D>) -> Chosen {
    (choice.kernel, choice.why)
}

/// The forward kernel on an emulated GPU, and the main kernel of the backward pass.
fn passes(config: &AttentionConfig) -> [Result<Chosen>; 2] {
    let device = device();
    [config.choose_on::<bf16>(&device).map(chosen), config.choose_backward_on::<bf16>(&device).map(chosen)]
}

fn device() -> Device {
    Runtime::emulated(1).and_then(|runtime| runtime.device(0)).expect("the emulator has a device")
}

/// The choice is refused, and its error has these words.
#[track_caller]
fn refused<C: std::fmt::Debug>(choice: Result<C>, words: &str) {
    let error = choice.expect_err(words).to_string();
    assert!(error.contains(words), "{error}");
}

#[test]
fn rows_that_kernels_do_not_count_are_refused_by_the_configurations_fields() {
    let left = Window { left: Some(1), right: None };
    let general = AttentionConfig { batches: 1 << 20, queries: 1 << 10, keys: 1, head_size: 8, window: left, ..AttentionConfig::default() };
    for kernels in [Kernels::Fastest, Kernels::Portable] {
        let config = AttentionConfig { kernels, ..general };
        for choice in passes(&config) {
            refused(choice, "queries is 1024: with batches, which is 1048576, at most 1073741823 rows: attend to fewer at a time");
        }
        // As many as 32 bits do not count.
        for choice in passes(&AttentionConfig { queries: 1 << 12, ..config }) {
            refused(choice, "queries is 4096: with batches, which is 1048576, at most 1073741823 rows");
        }
        for choice in passes(&AttentionConfig { queries: 1, keys: 1 << 12, ..config }) {
            refused(choice, "keys is 4096: with batches, which is 1048576, at most 10737");
        }
        // Sequences of sbhd have rows in common.
        let choices = passes(&AttentionConfig { layout: Layout::Sbhd, ..config });
        assert!(choices.iter().all(|choice| choice.is_ok()), "{choices:?}");
        let choices = passes(&AttentionConfig { queries: (1 << 10) - 1, ..config });
        assert!(choices.iter().all(|choice| choice.is_ok()), "{choices:?}");
    }
    // Batches of the dense kernels are not counted as rows.
    let dense = AttentionConfig { head_size: 64, window: Window::default(), kernels: Kernels::Fastest, ..general };
    let choices = passes(&dense);
    assert!(choices.iter().all(|choice| choice.is_ok()), "{choices:?}");
    refused(
        dense
            .choose_backward::<bf16>()
            .map(chosen)
            .and(AttentionConfig { key_parts: Some(2), heads: 2, ..dense }.choose::<bf16>().map(chosen)),
        "key_parts is 2: 1 where",
    );
}

#[test]
fn caps_that_the_kernels_tangent_is_too_coarse_for_are_refused() {
    let config = |cap| AttentionConfig { queries: 1, keys: 1, head_size: 64, soft_cap: Some(cap), ..AttentionConfig::default() };
    for cap in [1000.1, 1e6, f32::INFINITY, f32::NAN, 0.0, -1.0] {
        for choice in passes(&config(cap)) {
            refused(choice, &format!("soft_cap is {cap}: from 1e-20 to 1000, or none"));
        }
    }
    let choices = passes(&config(1000.0));
    assert!(choices.iter().all(|choice| choice.is_ok()), "{choices:?}");
}

#[test]
fn heads_of_keys_are_never_none() {
    let config = AttentionConfig { queries: 1, keys: 1, head_size: 64, heads: 0, ..AttentionConfig::default() };
    for choice in passes(&AttentionConfig { key_heads: 0, ..config }) {
        refused(choice, "key_heads is 0: at least 1");
    }
    assert!(passes(&config).iter().all(|choice| choice.is_ok()));
}

#[test]
fn factors_that_scores_would_overflow_by_are_refused() {
    let config = |scale| AttentionConfig { queries: 1, keys: 1, head_size: 64, scale: Some(scale), ..AttentionConfig::default() };
    for scale in [3e38, 1.1e8, f32::INFINITY, f32::NAN, 0.0, -1.0, 1e-40, 9e-21] {
        for choice in passes(&config(scale)) {
            refused(choice, &format!("scale is {scale}: from 1e-20 to 1e8, or none for 1 / sqrt(head_size)"));
        }
    }
    for scale in [1e-20, 1e8] {
        let choices = passes(&config(scale));
        assert!(choices.iter().all(|choice| choice.is_ok()), "{choices:?}");
    }
}

#[test]
fn nothing_is_launched_for_empty_tensors() {
    let empty = AttentionConfig { batches: 1 << 29, head_size: 96, ..AttentionConfig::default() };
    for config in
        [empty, AttentionConfig { batches: 0, queries: 3, keys: 4, ..empty }, AttentionConfig { kernels: Kernels::Portable, ..empty }]
    {
        for (choice, why) in passes(&config).into_iter().zip(["the output is empty", "all tensors are empty"]) {
            assert_eq!(choice.expect("a choice"), (None, why.to_owned()));
        }
    }
    // Gradients of keys that no query sees are zeros.
    let unseen = AttentionConfig { batches: 1, keys: 4, ..empty };
    assert_ne!(unseen.choose_backward::<bf16>().expect("a choice").kernel, None);
}

/// However many sequences there are, and though a sink has a gradient.
#[test]
fn sequences_without_rows_are_none() -> Result<()> {
    let runtime = Runtime::emulated(1)?;
    let stream = runtime.device(0)?.stream()?;
    for sink in [Sink::None, Sink::Learnable] {
        let config = AttentionConfig { batches: 1 << 29, head_size: 96, sink, ..AttentionConfig::default() };
        let (mut rows, mut sums) = ([(); 4].map(|()| Buffer::<bf16>::zeros(&stream, 0)), Buffer::<f32>::zeros(&stream, 0)?);
        let (scores, mut grad_sink) = (Buffer::from_slice(&stream, &[1.0_f32])?, Buffer::from_slice(&stream, &[f32::NAN])?);
        let learnable = sink == Sink::Learnable;
        let empty = Buffer::<bf16>::zeros(&stream, 0)?;
        let forward = || Inputs { sink: learnable.then(|| scores.view()), ..Inputs::new(empty.view(), empty.view(), empty.view()) };
        let [out, dq, dk, dv] = rows.each_mut().map(|buffer| buffer.as_mut().expect("nothing is there").view_mut());
        Attention::new(&runtime, config)?.forward(&stream, forward(), Outputs::new(out, sums.view_mut()))?;
        let inputs =
            BackwardInputs { forward: forward(), out: empty.view().into(), log_sum_exp: sums.view(), grad_out: empty.view().into() };
        let gradients = Gradients { sink: learnable.then(|| grad_sink.view_mut()), ..Gradients::new(dq, dk, dv) };
        AttentionBackward::new(&runtime, config, Order::Deterministic)?.backward(&stream, inputs, gradients)?;
        assert_eq!(grad_sink.to_vec(&stream)?[0].is_nan(), !learnable, "{sink:?}");
    }
    Ok(())
}

#[test]
fn portable_kernels_are_taken_where_they_are_asked_for() {
    let portable = AttentionConfig { queries: 8, keys: 8, head_size: 64, kernels: Kernels::Portable, ..AttentionConfig::default() };
    let [forward, backward] = [portable.choose::<bf16>().map(chosen), portable.choose_backward::<bf16>().map(chosen)];
    for choice in passes(&portable).into_iter().chain([forward, backward]) {
        assert!(choice.as_ref().is_ok_and(|(kernel, _)| kernel.is_some_and(|name| name.contains("_portable__bf16"))), "{choice:?}");
    }
    refused(portable.choose::<e4m3>(), "kernels is Portable: Fastest of 8 bits");
    refused(AttentionConfig { key_parts: Some(2), ..portable }.choose::<bf16>(), "key_parts is 2: 1 or none");
}

#[test]
fn what_only_the_backward_pass_does_not_count_is_refused_of_it() {
    let capped = AttentionConfig { queries: 1, keys: 1, head_size: 64, soft_cap: Some(9.0), ..AttentionConfig::default() };
    let choose = |config: AttentionConfig| config.choose_backward::<bf16>();
    refused(choose(AttentionConfig { heads: 65536, ..capped }), "heads is 65536: at most 65535 with soft_cap");
    refused(choose(AttentionConfig { batches: 1 << 25, ..capped }), "batches is 33554432: at most 22");
    refused(
        choose(AttentionConfig { queries: 1 << 21, heads: 1 << 10, ..capped }),
        "queries is 2097152: with batches and heads at most 2147483647 rows",
    );
    let most_keys = (1 << 30) - 128;
    for config in [capped, AttentionConfig { soft_cap: None, ..capped }] {
        refused(choose(AttentionConfig { keys: most_keys + 1, ..config }), "keys is 1073741697: ");
        choose(AttentionConfig { keys: most_keys, ..config }).expect("as many are counted");
    }
    // What packed sequences have in common is counted once.
    let packed =
        AttentionConfig { layout: Layout::Packed, batches: 4096, queries: 1 << 20, keys: 1 << 20, heads: 64, key_heads: 64, ..capped };
    choose(packed).expect("16384 blocks of a head");
}

/// What is written to new buffers is what is written to given ones: with a sink and the largest scores, keys of fewer heads and values of another size.
#[test]
fn results_in_new_buffers_are_those_in_given_ones() -> Result<()> {
    let runtime = Runtime::checked(1)?;
    let stream = runtime.device(0)?.stream()?;
    let config = AttentionConfig {
        batches: 2,
        queries: 5,
        keys: 9,
        heads: 2,
        head_size: 64,
        sink: Sink::Learnable,
        max_logit: true,
        mask: Mask::CausalBottomRight,
        ..AttentionConfig::default()
    };
    let buffer = |elements: usize, step: f32| {
        let waves: Vec<_> = (0..elements).map(|i| bf16::from_f32((step * i as f32).sin())).collect();
        Buffer::from_slice(&stream, &waves)
    };
    let [rows, keys] = [2 * 5 * 2 * 64, 2 * 9 * 64];
    let (q, k, v, grad_out) = (buffer(rows, 1.0)?, buffer(keys, 2.0)?, buffer(keys, 3.0)?, buffer(rows, 0.5)?);
    let sink = Buffer::from_slice(&stream, &[0.5_f32, -1.0])?;
    let inputs = || Inputs { sink: Some(sink.view()), ..Inputs::new(q.view(), k.view(), v.view()) };

    let attention = Attention::new(&runtime, config)?;
    let new = attention.attend(&stream, inputs())?;
    let mut out = Buffer::<bf16>::zeros(&stream, rows as u64)?;
    let (mut sums, mut largest) = (Buffer::<f32>::zeros(&stream, 2 * 5 * 2)?, Buffer::<f32>::zeros(&stream, 2)?);
    let given = Outputs { max_logit: Some(largest.view_mut()), ..Outputs::new(out.view_mut(), sums.view_mut()) };
    attention.forward(&stream, inputs(), given)?;
    assert_eq!(new.out.to_vec(&stream)?, out.to_vec(&stream)?);
    assert_eq!(new.log_sum_exp.to_vec(&stream)?, sums.to_vec(&stream)?);
    assert_eq!(new.max_logit.as_ref().expect("asked for").to_vec(&stream)?, largest.to_vec(&stream)?);

    let backward = AttentionBackward::new(&runtime, AttentionConfig { max_logit: false, ..config }, Order::Deterministic)?;
    let gradients = backward.gradients(&stream, new.backward(inputs(), grad_out.view()))?;
    let [mut dq, mut dk, mut dv] = [Buffer::<bf16>::zeros(&stream, rows as u64)?, buffer(keys, 0.0)?, buffer(keys, 0.0)?];
    let mut dsink = Buffer::<f32>::zeros(&stream, 2)?;
    let given = Gradients { sink: Some(dsink.view_mut()), ..Gradients::new(dq.view_mut(), dk.view_mut(), dv.view_mut()) };
    backward.backward(&stream, new.backward(inputs(), grad_out.view()), given)?;
    for (new, given) in [(&gradients.q, &dq), (&gradients.k, &dk), (&gradients.v, &dv)] {
        assert_eq!(new.to_vec(&stream)?, given.to_vec(&stream)?);
    }
    assert_eq!(gradients.sink.as_ref().expect("learnable").to_vec(&stream)?, dsink.to_vec(&stream)?);
    assert!(gradients.q.to_vec(&stream)?.iter().any(|x| x.to_f32() != 0.0));
    Ok(())
}

/// A choice names what comes before it, and why that is not taken.
#[test]
fn what_is_refused_has_a_reason() -> Result<()> {
    let window = Window { left: Some(5), right: None };
    let config = AttentionConfig { queries: 8, keys: 8, head_size: 64, window, sink: Sink::Learnable, ..AttentionConfig::default() };
    let forward = config.choose::<bf16>()?;
    let dense = ForwardKernel::Wgmma { problem: Problem::Dense { causal: false, ring: false }, sizes: [64, 64] };
    assert_eq!(forward.decision, ForwardKernel::Wgmma { problem: Problem::Options, sizes: [64, 64] });
    assert_eq!(forward.refused, [(dense, "it does not have window, sink".to_owned())]);
    let backward = config.choose_backward::<bf16>()?;
    let dense = BackwardKernel::Dense { head_size: 64, masked: true };
    assert_eq!(backward.decision, BackwardKernel::General { size: 64, capped: false });
    assert_eq!(backward.refused, [(dense, "it does not have sink".to_owned())]);

    let portable = AttentionConfig { kernels: Kernels::Portable, ..config };
    let (asked, plain) = ("`kernels` is Portable".to_owned(), ForwardKernel::Portable { head_size: 64 });
    assert_eq!(portable.choose::<bf16>()?.refused, [(forward.decision, asked.clone()), (plain, "it does not have sink".to_owned())]);
    assert_eq!(portable.choose_backward::<bf16>()?.refused, [(backward.decision, asked)]);
    // What is taken first refuses nothing.
    let first = AttentionConfig { mask: Mask::CausalTopLeft, window: Window::default(), sink: Sink::None, ..config };
    assert_eq!((first.choose::<bf16>()?.refused, first.choose_backward::<bf16>()?.refused), (Vec::new(), Vec::new()));
    Ok(())
}

/// Results in new buffers are written wherever sequences lie, and gradients are computed of them.
#[test]
fn rows_that_no_sequence_has_are_zeros() -> Result<()> {
    let runtime = Runtime::checked(1)?;
    let stream = runtime.device(0)?.stream()?;
    let config = AttentionConfig {
        layout: Layout::Packed,
        batches: 1,
        queries: 8,
        keys: 8,
        heads: 1,
        key_heads: 1,
        head_size: 64,
        ..AttentionConfig::default()
    };
    let numbers: Vec<_> = (0..8 * 64).map(|i| half::bf16::from_f32((i as f32).sin())).collect();
    let tensor = Buffer::<bf16>::from_slice(&stream, &numbers)?;
    for (sums, padding) in [([2_u32, 5], Padding::Zeroed), ([2, 5], Padding::Kept), ([0, 8], Padding::Kept)] {
        let sums_of = Buffer::from_slice(&stream, &sums)?;
        let sequences = Some(Sequences { padding, ..Sequences::new(sums_of.view(), sums_of.view()) });
        let inputs = || Inputs { sequences, ..Inputs::new(tensor.view(), tensor.view(), tensor.view()) };
        let results = Attention::<bf16>::new(&runtime, config)?.attend(&stream, inputs())?;
        let gradients = AttentionBackward::new(&runtime, config, Order::Deterministic)?;
        let gradients = gradients.gradients(&stream, results.backward(inputs(), tensor.view()))?;
        let rows = sums[0] as usize..sums[1] as usize;
        for tensor in [&results.out, &gradients.q, &gradients.k, &gradients.v] {
            for (row, values) in tensor.to_vec_as::<half::bf16>(&stream)?.chunks(64).enumerate() {
                assert_eq!(values.iter().any(|value| value.to_f32() != 0.0), rows.contains(&row), "row {row}");
            }
        }
        for (row, value) in results.log_sum_exp.to_vec(&stream)?.into_iter().enumerate() {
            assert_eq!(value.is_finite(), rows.contains(&row), "row {row}: {value}");
        }
    }
    Ok(())
}
