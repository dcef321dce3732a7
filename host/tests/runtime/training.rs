//! What a training step takes beside matrices, by the library: which kernel is taken, and what is refused. The kernels' numbers are shown elsewhere.

use half::bf16 as Half;
use oxtile::adamw::{Adamw, AdamwConfig, Weights};
use oxtile::cross_entropy::{CrossEntropy, Rule};
use oxtile::embedding::Embedding;
use oxtile::num::bf16;
use oxtile::rms_norm::{RmsNorm, Saved};
use oxtile::rotary::{Angles, Pairing, Rotary};
use oxtile::tensor::{Heads, HeadsMut};
use oxtile::{Buffer, Error, Graph, Stream};

use crate::support::{runtime, stream};

fn filled(stream: &Stream, value: f32, count: usize) -> Buffer<bf16> {
    Buffer::from_slice(stream, &vec![Half::from_f32(value); count]).unwrap()
}

fn values(stream: &Stream, buffer: &Buffer<bf16>) -> Vec<f32> {
    buffer.to_vec_as::<Half>(stream).unwrap().into_iter().map(Half::to_f32).collect()
}

/// Every width from a warp's to those that no registers hold, odd ones, and views that begin anywhere.
#[test]
fn rms_norm_takes_rows_of_any_width_anywhere() {
    let runtime = runtime();
    let stream = stream(&runtime);
    for (width, start) in [(64, 0), (64, 8), (64, 1), (7, 0), (1, 3), (2048, 0), (2056, 0), (16_384, 0), (16_392, 0)] {
        let elements = 3 * width + start;
        let norm = RmsNorm::<bf16>::new(&runtime, width as u64, 0.0).unwrap();
        let (input, weight, gradient) = (filled(&stream, -4.0, elements), filled(&stream, 0.5, width), filled(&stream, 2.0, elements));
        let [mut output, mut input_gradient] = [(); 2].map(|()| filled(&stream, 7.0, elements));
        let mut inverse_rms = Buffer::<f32>::zeros(&stream, 3).unwrap();
        let x = input.view().slice(start as u64, elements as u64);
        let y = output.view_mut().split_at(start as u64).1;
        norm.forward(&stream, x, weight.view(), y, Some(inverse_rms.view_mut())).unwrap();
        let mut weight_gradient = norm.weight_gradient(&stream, 3).unwrap();
        let saved = Saved { input: x, weight: weight.view(), inverse_rms: inverse_rms.view() };
        let g = gradient.view().slice(start as u64, elements as u64);
        let dx = input_gradient.view_mut().split_at(start as u64).1;
        norm.backward(&stream, g, saved, dx, &mut weight_gradient).unwrap();
        let is_all = |buffer: &Buffer<bf16>, value: f32| values(&stream, buffer)[start..].iter().all(|x| (x - value).abs() < 1e-5);
        assert!(is_all(&output, -0.5), "{width} from {start}");
        // Equal numbers stay equal, whatever they are: nothing changes the result.
        assert!(is_all(&input_gradient, 0.0), "{width} from {start}");
        assert!(values(&stream, &weight_gradient.sums).iter().all(|x| *x == -6.0), "{width} from {start}");
    }
}

#[test]
fn a_graph_holds_rms_norm() {
    let runtime = runtime();
    let stream = stream(&runtime);
    let norm = RmsNorm::<bf16>::new(&runtime, 64, 0.0).unwrap();
    let (input, weight, mut output) = (filled(&stream, 3.0, 128), filled(&stream, 2.0, 64), filled(&stream, 7.0, 128));
    let mut inverse_rms = Buffer::<f32>::zeros(&stream, 2).unwrap();
    let mut weight_gradient = norm.weight_gradient(&stream, 2).unwrap();
    let mut input_gradient = filled(&stream, 7.0, 128);
    let graph = Graph::capture(&[&stream], || {
        norm.forward(&stream, input.view(), weight.view(), output.view_mut(), Some(inverse_rms.view_mut()))?;
        let saved = Saved { input: input.view(), weight: weight.view(), inverse_rms: inverse_rms.view() };
        norm.backward(&stream, input.view(), saved, input_gradient.view_mut(), &mut weight_gradient)
    });
    let graph = graph.unwrap();
    graph.replay(&stream).unwrap();
    graph.replay(&stream).unwrap();
    stream.synchronize().unwrap();
    drop(graph);
    assert_eq!(values(&stream, &output), [2.0; 128]);
    assert_eq!(values(&stream, &weight_gradient.sums), [6.0; 64]);
}

/// No rows: no gradient of the input, and zeros for the weight.
#[test]
fn the_weight_gradient_of_no_rows_is_zero() {
    let runtime = runtime();
    let stream = stream(&runtime);
    let norm = RmsNorm::<bf16>::new(&runtime, 8, 1e-5).unwrap();
    let (nothing, weight, mut output) = (filled(&stream, 0.0, 0), filled(&stream, 1.0, 8), filled(&stream, 0.0, 0));
    let none = Buffer::<f32>::zeros(&stream, 0).unwrap();
    let mut weight_gradient = norm.weight_gradient(&stream, 0).unwrap();
    let saved = Saved { input: nothing.view(), weight: weight.view(), inverse_rms: none.view() };
    norm.backward(&stream, nothing.view(), saved, output.view_mut(), &mut weight_gradient).unwrap();
    assert_eq!(values(&stream, &weight_gradient.sums), [0.0; 8]);
}

#[test]
fn cross_entropy_is_the_same_in_place_and_at_any_width() {
    let runtime = runtime();
    let stream = stream(&runtime);
    for width in [8, 9, 1000, 57_352] {
        let rule = Rule { scale: 0.5, ..Rule::default() };
        let entropy = CrossEntropy::<bf16>::new(&runtime, width as u64, rule).unwrap();
        let (logits, mut gradient, mut in_place) =
            (filled(&stream, 1.5, 2 * width), filled(&stream, 7.0, 2 * width), filled(&stream, 1.5, 2 * width));
        let targets = Buffer::from_slice(&stream, &[width as i32 - 1, -100]).unwrap();
        let mut losses = [(); 3].map(|()| Buffer::<f32>::zeros(&stream, 2).unwrap());
        entropy.losses(&stream, logits.view(), targets.view(), losses[0].view_mut()).unwrap();
        entropy.gradient(&stream, logits.view(), targets.view(), gradient.view_mut(), losses[1].view_mut()).unwrap();
        entropy.gradient_in_place(&stream, in_place.view_mut(), targets.view(), losses[2].view_mut()).unwrap();
        for losses in &losses {
            let losses = losses.to_vec(&stream).unwrap();
            assert!((losses[0] - (width as f32).ln()).abs() < 1e-5 && losses[1] == 0.0, "{width}: {losses:?}");
        }
        let (gradient, in_place) = (values(&stream, &gradient), values(&stream, &in_place));
        assert_eq!(gradient, in_place);
        let target = 0.5 * (1.0 / width as f32 - 1.0);
        assert!((gradient[width - 1] - target).abs() < 2e-3 && gradient[width..].iter().all(|x| *x == 0.0), "{width}");
    }
}

#[test]
fn what_is_turned_and_turned_back_is_the_same() {
    let runtime = runtime();
    let stream = stream(&runtime);
    let shape = [1, 4, 2, 32];
    let tensor = filled(&stream, 1.0, 4 * 2 * 32);
    let (cosines, sines) = Angles::tables(0..4, 32, 10_000.0);
    assert!(
        cosines[0] == 1.0 && sines[0] == 0.0 && (cosines[16] - 1_f32.cos()).abs() < 1e-7,
        "the first row does not turn, the second by 1"
    );
    let (cosines, sines) = (Buffer::from_slice(&stream, &cosines).unwrap(), Buffer::from_slice(&stream, &sines).unwrap());
    let angles = Angles { cosines: cosines.view(), sines: sines.view() };
    for pairing in [Pairing::Halves, Pairing::Neighbours] {
        let rotary = Rotary::<bf16>::new(&runtime, pairing).unwrap();
        let mut turned = filled(&stream, 7.0, 4 * 2 * 32);
        rotary
            .turn(&stream, Heads::bshd(tensor.view(), shape).unwrap(), HeadsMut::bshd(turned.view_mut(), shape).unwrap(), angles)
            .unwrap();
        assert!(values(&stream, &turned)[64..].iter().any(|x| (x - 1.0).abs() > 0.1));
        rotary.turn_back_in_place(&stream, HeadsMut::bshd(turned.view_mut(), shape).unwrap(), angles).unwrap();
        assert!(values(&stream, &turned).iter().all(|x| (x - 1.0).abs() < 2e-2), "{pairing:?}");
    }
}

#[test]
fn what_does_not_fit_is_refused() {
    let runtime = runtime();
    let stream = stream(&runtime);
    let text = |error: Error| error.to_string();
    let refusals = [
        text(RmsNorm::<bf16>::new(&runtime, 0, 0.0).unwrap_err()),
        text(CrossEntropy::<bf16>::new(&runtime, 8, Rule { smoothing: 1.0, ..Rule::default() }).unwrap_err()),
        text(Embedding::<bf16>::new(&runtime, 1 << 31).unwrap_err()),
    ];
    assert_eq!(
        refusals,
        [
            "RmsNorm: rows of 0 elements: give a width of 1 to 2147483647",
            "CrossEntropy: smoothing by 1: give 0 or more, and less than 1",
            "Embedding: rows of 2147483648 elements: give a width of 1 to 2147483647",
        ]
    );
    let (tensor, mut output) = (filled(&stream, 1.0, 64), filled(&stream, 1.0, 64));
    let table = Buffer::<f32>::zeros(&stream, 16).unwrap();
    let angles = Angles { cosines: table.view(), sines: table.view() };
    let (input, of_output) =
        (Heads::bshd(tensor.view(), [1, 2, 1, 32]).unwrap(), HeadsMut::bshd(output.view_mut(), [1, 1, 2, 32]).unwrap());
    let error = Rotary::<bf16>::new(&runtime, Pairing::Halves).unwrap().turn(&stream, input, of_output, angles).unwrap_err();
    let expected = "Rotary: an input of [batches, rows, heads, size] [1, 2, 1, 32] and an output of [1, 1, 2, 32]: give both one shape";
    assert_eq!(text(error), expected);
    let [mut weights, mut first, mut second] = [(); 3].map(|()| Buffer::<f32>::zeros(&stream, 64).unwrap());
    let weights = Weights { values: weights.view_mut(), first: first.view_mut(), second: second.view_mut(), rounded: None };
    let error = Adamw::<bf16>::new(&runtime, AdamwConfig::default()).unwrap().step(&stream, 0, tensor.view(), weights).unwrap_err();
    assert_eq!(text(error), "Adamw::step: step 0: count steps from 1");
    let norm = RmsNorm::<bf16>::new(&runtime, 8, 1e-5).unwrap();
    let mut place = norm.weight_gradient(&stream, 1).unwrap();
    let (weight, inverse_rms) = (filled(&stream, 1.0, 8), Buffer::<f32>::zeros(&stream, 8).unwrap());
    let saved = Saved { input: tensor.view(), weight: weight.view(), inverse_rms: inverse_rms.view() };
    let many = filled(&stream, 1.0, 8 * 1000);
    let of_many = Buffer::<f32>::zeros(&stream, 1000).unwrap();
    let mut result = filled(&stream, 1.0, 8 * 1000);
    let saved = Saved { input: many.view(), inverse_rms: of_many.view(), ..saved };
    let error = norm.backward(&stream, many.view(), saved, result.view_mut(), &mut place).unwrap_err();
    assert!(matches!(error, Error::Length { what: "RmsNorm::backward, weight_gradient", .. }), "{error}");
}
