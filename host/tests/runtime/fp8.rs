//! The host's side of FP8: shapes, alignment, what is loaded, what stays on the device. The kernels' bits are shown elsewhere.

use oxtile::comm::SingleRank;
use oxtile::num::{Float, bf16, e4m3};
use oxtile::quantize::{
    Amax, AmaxAlgorithm, BlockScaling, CurrentScaling, DelayedScales, DelayedScaling, Direction, Fp8BlockTensor, Fp8Pair, Fp8Tensor,
    HadamardAmax, Nvfp4FourOverSix, Nvfp4MappedTensor, ScaleBlock, ScaleOptions, Shard, ShardCasts,
};
use oxtile::{Buffer, Error, Graph};

use crate::support::{emulated, runtime, stream};

/// Numbers that E4M3 holds exactly beside an amax of 224: half of its own.
fn exact(elements: u64) -> Vec<f32> {
    let element = |i: u64| if i == 0 { -224.0 } else { e4m3::from_bits((i * 31 % 0x7f) as u8).to_f32() / 2.0 };
    (0..elements).map(element).collect()
}

#[test]
fn what_current_scaling_holds_exactly_comes_back_and_transposed() {
    let runtime = runtime();
    let stream = stream(&runtime);
    let casts = CurrentScaling::<f32>::new(&runtime, ScaleOptions::default()).unwrap();
    for [rows, columns] in [[4, 64], [3, 40], [5, 1], [0, 64], [64, 0], [130, 17]] {
        let values = exact(rows * columns);
        let input = Buffer::from_slice(&stream, &values).unwrap();
        let pair = casts.quantize_both(&stream, input.view(), [rows, columns]).unwrap();
        let inverse = if values.is_empty() { 1.0 } else { 0.5 };
        assert_eq!(pair.tensor.scales.to_vec(&stream).unwrap(), [inverse]);
        let mut output = Buffer::zeros(&stream, input.len()).unwrap();
        casts.dequantize(&stream, &pair.tensor, output.view_mut()).unwrap();
        assert_eq!(output.to_vec(&stream).unwrap(), values, "shape {rows}x{columns}");
        let (data, transposed) = (pair.tensor.data.to_vec(&stream).unwrap(), pair.transposed.to_vec(&stream).unwrap());
        assert!((0..rows * columns).all(|i| transposed[(i % columns * rows + i / columns) as usize] == data[i as usize]));
    }
}

#[test]
fn both_ways_to_the_transpose_give_the_same() {
    let runtime = runtime();
    let stream = stream(&runtime);
    let options = ScaleOptions { epsilon: 1e-3, power_of_two: true };
    let casts = CurrentScaling::<bf16>::new(&runtime, options).unwrap();
    let shifted: Vec<_> = std::iter::once(9.0).chain((0..48 * 64).map(|i| (i as f32).sin())).map(half::bf16::from_f32).collect();
    let aligned = Buffer::<bf16>::from_slice(&stream, &shifted[1..]).unwrap();
    let off = Buffer::<bf16>::from_slice(&stream, &shifted).unwrap();
    let one = casts.quantize_both(&stream, aligned.view(), [48, 64]).unwrap();
    let two = casts.quantize_both(&stream, off.view().slice(1, off.len()), [48, 64]).unwrap();
    assert_eq!(one.tensor.data.to_vec(&stream).unwrap(), two.tensor.data.to_vec(&stream).unwrap());
    assert_eq!(one.transposed.to_vec(&stream).unwrap(), two.transposed.to_vec(&stream).unwrap());
    let inverse = one.tensor.scales.to_vec(&stream).unwrap()[0];
    assert_eq!((inverse, inverse.to_bits() << 9), (2_f32.powi(-8), 0));
}

#[test]
fn lengths_that_do_not_fit_are_errors() {
    let runtime = emulated(0, 1);
    let stream = stream(&runtime);
    let casts = CurrentScaling::<f32>::new(&runtime, ScaleOptions::default()).unwrap();
    let input = Buffer::zeros(&stream, 64).unwrap();
    let error = casts.quantize_both(&stream, input.view(), [1, 65]).unwrap_err();
    assert_eq!(error.to_string(), "CurrentScaling::quantize_both, input: 64 elements where 65 are needed");
    assert!(matches!(casts.quantize_both(&stream, input.view(), [u64::MAX, 2]), Err(Error::Invalid { .. })));
    let tensor = casts.quantize(&stream, input.view()).unwrap();
    let mut short = Buffer::zeros(&stream, 63).unwrap();
    let error = casts.dequantize(&stream, &tensor, short.view_mut()).unwrap_err();
    assert_eq!(error.to_string(), "CurrentScaling::dequantize, output: 63 elements where 64 are needed");
}

#[test]
fn delayed_scales_follow_the_amaxes_of_earlier_steps() {
    let runtime = runtime();
    let stream = stream(&runtime);
    let casts = DelayedScaling::<f32>::new(&runtime, AmaxAlgorithm::Max, 1).unwrap();
    let mut scales = DelayedScales::new(&stream, 3, 2).unwrap();
    for (step, (value, expected)) in [(7.0_f32, 32.0_f32), (14.0, 16.0), (7.0, 16.0), (3.5, 32.0)].into_iter().enumerate() {
        let input = Buffer::from_slice(&stream, &[0.5, -value, 1.0, 0.0]).unwrap();
        let before = scales.scales().to_vec(&stream).unwrap()[1];
        let shape = if step % 2 == 0 { [1, 4] } else { [4, 1] };
        let pair = casts.quantize_both(&stream, &mut scales, 1, input.view(), shape).unwrap();
        assert_eq!(pair.tensor.scales.to_vec(&stream).unwrap(), [1.0 / before]);
        assert_eq!(pair.tensor.data.to_vec(&stream).unwrap()[1].to_f32(), -value * before);
        assert_eq!(pair.transposed.to_vec(&stream).unwrap(), pair.tensor.data.to_vec(&stream).unwrap());
        casts.update(&stream, &mut scales, None).unwrap();
        // A history of two: the 14 is there for two steps.
        assert_eq!(scales.scales().to_vec(&stream).unwrap(), [1.0, expected, 1.0], "step {step}");
    }
    let agreed = Buffer::from_slice(&stream, &[0.0_f32, 56.0, 0.0]).unwrap();
    casts.update(&stream, &mut scales, Some(agreed.view())).unwrap();
    assert_eq!(scales.scale_inverses().to_vec(&stream).unwrap(), [1.0, 0.25, 1.0]);
    let input = Buffer::zeros(&stream, 4).unwrap();
    let error = casts.quantize(&stream, &mut scales, 3, input.view()).unwrap_err();
    assert!(error.to_string().contains("there is no tensor 3: the scales are those of 3"), "{error}");
    assert!(matches!(DelayedScales::new(&stream, 3, 0), Err(Error::Invalid { .. })));
}

/// Nothing of a step allocates: casts and update are captured once and replayed for each step.
#[test]
fn a_graph_holds_a_step_of_delayed_scaling() {
    let runtime = runtime();
    let stream = stream(&runtime);
    let casts = DelayedScaling::<f32>::new(&runtime, AmaxAlgorithm::MostRecent, 0).unwrap();
    let mut scales = DelayedScales::new(&stream, 3, 4).unwrap();
    let mut input = Buffer::<f32>::zeros(&stream, 64).unwrap();
    let mut flat = Fp8Tensor::uninitialised(&stream, [1, 64], Direction::Rows).unwrap();
    // Rows of whole vectors, and others.
    let mut pairs = [[4, 16], [32, 2]].map(|shape| Fp8Pair::uninitialised(&stream, shape).unwrap());
    let graph = Graph::capture(&[&stream], || {
        casts.quantize_into(&stream, &mut scales, 0, input.view(), &mut flat)?;
        for (pair, (tensor, shape)) in pairs.iter_mut().zip([(1, [4, 16]), (2, [32, 2])]) {
            casts.quantize_both_into(&stream, &mut scales, tensor, input.view(), shape, pair)?;
        }
        casts.update(&stream, &mut scales, None)
    })
    .unwrap();
    let mut expected = 1.0;
    for value in [224.0_f32, 28.0, 112.0] {
        input.copy_from_slice(&stream, &[value; 64]).unwrap();
        graph.replay(&stream).unwrap();
        for tensor in [&flat, &pairs[0].tensor, &pairs[1].tensor] {
            assert_eq!(tensor.scales.to_vec(&stream).unwrap(), [1.0 / expected]);
            assert_eq!(tensor.data.to_vec(&stream).unwrap()[63].to_f32(), (value * expected).min(448.0));
        }
        for pair in &pairs {
            assert_eq!(pair.transposed.to_vec(&stream).unwrap(), pair.tensor.data.to_vec(&stream).unwrap());
        }
        expected = 448.0 / value;
        assert_eq!(scales.scales().to_vec(&stream).unwrap(), [expected; 3]);
    }
}

/// Nothing of current scaling and of scales for blocks allocates: the casts are captured once and replayed on other values, a smaller amax
/// after a larger one.
#[test]
fn a_graph_holds_current_scaling_and_blocks() {
    let runtime = runtime();
    let stream = stream(&runtime);
    let one = CurrentScaling::<f32>::new(&runtime, ScaleOptions::default()).unwrap();
    let blocks = BlockScaling::<f32>::new(&runtime, ScaleOptions::default()).unwrap();
    let mut input = Buffer::<f32>::zeros(&stream, 64).unwrap();
    let mut amaxes = [0; 3].map(|_| Buffer::<f32>::zeros(&stream, 1).unwrap());
    let mut flat = Fp8Tensor::uninitialised(&stream, [1, 64], Direction::Rows).unwrap();
    // Rows of whole vectors, and others.
    let mut pairs = [[4, 16], [32, 2]].map(|shape| (shape, Fp8Pair::uninitialised(&stream, shape).unwrap()));
    let of_blocks = |shape, block| Fp8BlockTensor::uninitialised(&stream, shape, block).unwrap();
    let mut alone = of_blocks([4, 16], ScaleBlock::Row);
    let mut both = [of_blocks([4, 16], ScaleBlock::Square), of_blocks([16, 4], ScaleBlock::Square)];
    // Half a matrix, whose amax ranks have agreed on before: 448.
    let shards = ShardCasts::<f32>::new(&runtime, ScaleOptions::default()).unwrap();
    let shard = Shard { shape: [8, 16], start: 64 };
    let largest = Buffer::from_slice(&stream, &[448.0_f32; 64]).unwrap();
    let agreed = shards.local_amax(&stream, largest.view(), shard).unwrap();
    let agreed = agreed.reduce(&SingleRank::new(&stream.device()), &stream).unwrap();
    let (mut codes, mut inverses) = (Buffer::zeros(&stream, 64).unwrap(), Buffer::zeros(&stream, 4).unwrap());
    let graph = Graph::capture(&[&stream], || {
        let [amax, of_pairs @ ..] = &mut amaxes;
        one.quantize_into(&stream, input.view(), amax, &mut flat)?;
        for ((shape, pair), amax) in pairs.iter_mut().zip(of_pairs) {
            one.quantize_both_into(&stream, input.view(), *shape, amax, pair)?;
        }
        blocks.quantize_into(&stream, input.view(), &mut alone)?;
        blocks.quantize_both_into(&stream, input.view(), &mut both)?;
        shards.cast_into(&stream, input.view(), shard, &agreed, codes.view_mut(), &mut inverses)
    })
    .unwrap();
    for value in [224.0_f32, 28.0, 112.0] {
        input.copy_from_slice(&stream, &[value; 64]).unwrap();
        graph.replay(&stream).unwrap();
        for tensor in [&flat, &pairs[0].1.tensor, &pairs[1].1.tensor] {
            assert_eq!(tensor.scales.to_vec(&stream).unwrap(), [value / 448.0]);
            assert_eq!(tensor.data.to_vec(&stream).unwrap()[63].to_f32(), 448.0);
        }
        for (_, pair) in &pairs {
            assert_eq!(pair.transposed.to_vec(&stream).unwrap(), pair.tensor.data.to_vec(&stream).unwrap());
        }
        for tensor in [&alone, &both[0], &both[1]] {
            assert_eq!(tensor.scales.to_vec(&stream).unwrap()[0], value / 448.0);
            assert_eq!(tensor.data.to_vec(&stream).unwrap()[63].to_f32(), 448.0);
        }
        assert_eq!(codes.to_vec(&stream).unwrap()[63].to_f32(), value);
        assert_eq!(inverses.to_vec(&stream).unwrap(), [1.0, 0.0, 0.0, 0.0]);
    }
    let mut wrong = [of_blocks([4, 16], ScaleBlock::Row), of_blocks([4, 16], ScaleBlock::Row)];
    let error = blocks.quantize_both_into(&stream, input.view(), &mut wrong).unwrap_err();
    assert!(error.to_string().contains("it is [4, 16] in blocks Row beside a matrix [4, 16] in blocks Row: make one of both"), "{error}");
}

/// A shard is cast with as many amaxes as its cast takes, and no fewer.
#[test]
fn amaxes_of_another_cast_are_refused() {
    let runtime = emulated(0, 1);
    let stream = stream(&runtime);
    let ranks = SingleRank::new(&stream.device());
    let input = Buffer::<bf16>::zeros(&stream, 256).unwrap();
    let two = HadamardAmax::new(&runtime).unwrap().local_amax(&stream, input.view(), [16, 16]).unwrap();
    let two = two.reduce(&ranks, &stream).unwrap();
    let casts = CurrentScaling::<bf16>::new(&runtime, ScaleOptions::default()).unwrap();
    let mut tensor = Fp8Tensor::uninitialised(&stream, [16, 16], Direction::Rows).unwrap();
    let error = casts.cast_shard(&stream, input.view(), &two, &mut tensor).unwrap_err();
    assert_eq!(error.to_string(), "CurrentScaling::cast_shard, amax: 2 elements where 1 are needed");
    // One for each row where one is agreed on.
    let one = Amax::new(&runtime).unwrap().local_amax(&stream, input.view()).unwrap().reduce(&ranks, &stream).unwrap();
    let mut of_rows = Nvfp4MappedTensor::of_scaled_rows(&stream, [16, 16]).unwrap();
    let error = Nvfp4FourOverSix::<bf16>::new(&runtime).unwrap().cast_shard(&stream, input.view(), &one, &mut of_rows).unwrap_err();
    assert_eq!(error.to_string(), "the amax of a shard's tensor: 16 elements where 1 are needed");
}

/// A pair of another shape would say that its codes are those of another matrix.
#[test]
fn pairs_of_another_shape_and_margins_out_of_range_are_refused() {
    let runtime = emulated(0, 1);
    let stream = stream(&runtime);
    let input = Buffer::<bf16>::zeros(&stream, 64).unwrap();
    let mut pair = Fp8Pair::uninitialised(&stream, [4, 16]).unwrap();
    let one = CurrentScaling::<bf16>::new(&runtime, ScaleOptions::default()).unwrap();
    let mut amax = Buffer::zeros(&stream, 1).unwrap();
    let error = one.quantize_both_into(&stream, input.view(), [2, 32], &mut amax, &mut pair).unwrap_err().to_string();
    assert!(error.contains("a tensor of [4, 16] where one of [2, 32] goes: make it of this shape"), "{error}");
    let delayed = |margin| DelayedScaling::<bf16>::new(&runtime, AmaxAlgorithm::Max, margin);
    let mut scales = DelayedScales::new(&stream, 1, 1).unwrap();
    let error = delayed(0).unwrap().quantize_both_into(&stream, &mut scales, 0, input.view(), [2, 32], &mut pair).unwrap_err().to_string();
    assert!(error.contains("a tensor of [4, 16] where one of [2, 32] goes"), "{error}");
    for margin in [i32::MIN, -128, 160, i32::MAX] {
        let error = delayed(margin).unwrap_err().to_string();
        assert!(error.contains(&format!("by a margin of {margin} the largest element becomes")), "{error}");
    }
    assert!(delayed(-8).is_ok() && delayed(8).is_ok());
}
