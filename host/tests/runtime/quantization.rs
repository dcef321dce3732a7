//! The host's side of quantization: shapes, alignment, what is loaded. The kernels' bits are shown elsewhere.

use oxtile::comm::SingleRank;
use oxtile::num::{self, Float, e4m3};
use oxtile::quantize::{
    Amax, Compact, Direction, Format, InterleavedMxfp8, MultiAmax, MultiAmaxPlan, Mxfp8, Mxfp8Format, Mxfp8Pair, Mxfp8Tensor, Nvfp4,
    Nvfp4Columns, Nvfp4Format, Nvfp4MappedTensor, Nvfp4Pair, Nvfp4ScaledRows, Nvfp4Squares, Nvfp4Tensor, RandomState,
};
use oxtile::{Buffer, Error, Graph};

use crate::support::{emulated, runtime, stream};

/// Numbers that MXFP8 holds exactly: in each block of 32, codes of E4M3 times one power of two, 448 times it among them.
fn exact(rows: u64, columns: u64) -> Vec<f32> {
    let element = |row: u64, column: u64| {
        let scale = ((row * 5 + column / 32 * 3) % 21) as i32 - 10;
        let code = if column.is_multiple_of(32) { 0x7e } else { (row * 31 + column * 7) % 0x7f };
        let sign = if column.is_multiple_of(3) { -1.0 } else { 1.0 };
        sign * e4m3::from_bits(code as u8).to_f32() * 2_f32.powi(scale)
    };
    (0..rows).flat_map(|row| (0..columns).map(move |column| element(row, column))).collect()
}

#[test]
fn what_mxfp8_holds_exactly_comes_back() {
    let runtime = runtime();
    let stream = stream(&runtime);
    let casts = Mxfp8::<f32>::new(&runtime).unwrap();
    for shape in [[4, 64], [3, 40], [5, 1], [0, 64], [64, 0], [33, 32]] {
        let values = exact(shape[0], shape[1]);
        let input = Buffer::from_slice(&stream, &values).unwrap();
        let tensor = casts.quantize(&stream, input.view(), shape, Direction::Rows).unwrap();
        assert_eq!(tensor.scales.len(), shape[0] * shape[1].div_ceil(32));
        let mut output = Buffer::zeros(&stream, input.len()).unwrap();
        casts.dequantize(&stream, &tensor, output.view_mut()).unwrap();
        assert_eq!(output.to_vec(&stream).unwrap(), values, "shape {shape:?}");
    }
}

/// What rows hold exactly, the columns of the transpose do.
#[test]
fn what_columns_hold_exactly_comes_back() {
    let runtime = runtime();
    let stream = stream(&runtime);
    let casts = Mxfp8::<f32>::new(&runtime).unwrap();
    for [rows, columns] in [[64, 4], [40, 8], [33, 5], [0, 64], [64, 0]] {
        let transposed = exact(columns, rows);
        let values: Vec<f32> = (0..rows * columns).map(|i| transposed[(i % columns * rows + i / columns) as usize]).collect();
        let input = Buffer::from_slice(&stream, &values).unwrap();
        let pair = casts.quantize_both(&stream, input.view(), [rows, columns]).unwrap();
        let alone = casts.quantize(&stream, input.view(), [rows, columns], Direction::Columns).unwrap();
        let by_rows = casts.quantize(&stream, input.view(), [rows, columns], Direction::Rows).unwrap();
        for (found, expected) in [(&pair.columns, &alone), (&pair.rows, &by_rows)] {
            assert_eq!(found.data.to_vec(&stream).unwrap(), expected.data.to_vec(&stream).unwrap());
            assert_eq!(found.scales.to_vec(&stream).unwrap(), expected.scales.to_vec(&stream).unwrap());
        }
        let mut output = Buffer::zeros(&stream, input.len()).unwrap();
        casts.dequantize(&stream, &pair.columns, output.view_mut()).unwrap();
        assert_eq!(output.to_vec(&stream).unwrap(), values, "shape {rows}x{columns}");
    }
}

#[test]
fn views_off_the_boundary_are_quantized_too() {
    let runtime = runtime();
    let stream = stream(&runtime);
    let casts = Mxfp8::<num::bf16>::new(&runtime).unwrap();
    let values = exact(2, 64);
    let shifted: Vec<_> = std::iter::once(9.0).chain(values.iter().copied()).map(half::bf16::from_f32).collect();
    let input = Buffer::from_slice(&stream, &shifted).unwrap();
    let tensor = casts.quantize(&stream, input.view().slice(1, 129), [2, 64], Direction::Rows).unwrap();
    let mut output = Buffer::zeros(&stream, 128).unwrap();
    casts.dequantize(&stream, &tensor, output.view_mut()).unwrap();
    let restored: Vec<half::bf16> = output.to_vec_as(&stream).unwrap();
    assert_eq!(restored, shifted[1..]);
}

#[test]
fn shapes_that_do_not_fit_are_errors() {
    let runtime = emulated(0, 1);
    let stream = stream(&runtime);
    let casts = Mxfp8::<f32>::new(&runtime).unwrap();
    let input = Buffer::zeros(&stream, 64).unwrap();
    let error = casts.quantize(&stream, input.view(), [1, 65], Direction::Rows).unwrap_err();
    assert_eq!(error.to_string(), "Mxfp8::quantize_rows, input: 64 elements where 65 are needed");
    assert!(matches!(casts.quantize(&stream, input.view(), [u64::MAX, 2], Direction::Rows), Err(Error::Invalid { .. })));
    assert_eq!(<Mxfp8Format>::scale_count::<Compact>([3, 65], Direction::Rows).unwrap(), 9);
    assert_eq!(<Mxfp8Format>::scale_count::<Compact>([33, 65], Direction::Columns).unwrap(), 130);
}

/// Numbers that NVFP4 holds exactly: an amax of 2688, and in each block codes of E2M1 times one power of two, 6 times it among them.
fn exact_fours(rows: u64, columns: u64) -> Vec<f32> {
    let codes = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0];
    let element = |row: u64, column: u64| {
        if (row, column) == (0, 0) {
            return -2688.0;
        }
        let scale = if row == 0 && column < 16 { 448.0 } else { 2_f32.powi(((row * 5 + column / 16 * 3) % 12) as i32 - 5) };
        let code = if column.is_multiple_of(16) { 7 } else { (row + column * 3) % 8 };
        scale * if column.is_multiple_of(3) { -codes[code as usize] } else { codes[code as usize] }
    };
    (0..rows).flat_map(|row| (0..columns).map(move |column| element(row, column))).collect()
}

#[test]
fn what_nvfp4_holds_exactly_comes_back() {
    let runtime = runtime();
    let stream = stream(&runtime);
    let casts = Nvfp4::<f32>::new(&runtime).unwrap();
    for shape in [[4, 64], [3, 48], [1, 16], [0, 64], [64, 0], [33, 32]] {
        let values = exact_fours(shape[0], shape[1]);
        let input = Buffer::from_slice(&stream, &values).unwrap();
        let tensor = casts.quantize(&stream, input.view(), shape).unwrap();
        assert_eq!((tensor.data.len(), tensor.scales.len()), (input.len() / 2, input.len() / 16));
        assert_eq!(tensor.amax.to_vec(&stream).unwrap(), [if values.is_empty() { 0.0 } else { 2688.0 }]);
        let mut output = Buffer::zeros(&stream, input.len()).unwrap();
        casts.dequantize(&stream, &tensor, output.view_mut()).unwrap();
        // 2688 * fp32(1/2688) is 1 within one rounding.
        let restored = output.to_vec(&stream).unwrap();
        let close = |(a, b): (&f32, &f32)| (a - b).abs() <= b.abs() * f32::EPSILON;
        assert!(restored.len() == values.len() && restored.iter().zip(&values).all(close), "shape {shape:?}");
    }
}

#[test]
fn rows_of_a_tensor_are_quantized_with_its_amax() {
    let runtime = runtime();
    let stream = stream(&runtime);
    let casts = Nvfp4::<f32>::new(&runtime).unwrap();
    let input = Buffer::from_slice(&stream, &exact_fours(6, 32)).unwrap();
    let whole = casts.quantize(&stream, input.view(), [6, 32]).unwrap();
    let (mut data, mut scales) = (Buffer::zeros(&stream, 48).unwrap(), Buffer::zeros(&stream, 6).unwrap());
    let rows = input.view().slice(96, 192);
    casts.quantize_rows(&stream, rows, [3, 32], whole.amax.view(), data.view_mut(), scales.view_mut()).unwrap();
    assert_eq!(data.to_vec(&stream).unwrap(), whole.data.to_vec(&stream).unwrap()[48..]);
    assert_eq!(scales.to_vec(&stream).unwrap(), whole.scales.to_vec(&stream).unwrap()[6..]);
}

#[test]
fn rows_that_nvfp4_does_not_take_are_errors() {
    let runtime = emulated(0, 1);
    let stream = stream(&runtime);
    let casts = Nvfp4::<f32>::new(&runtime).unwrap();
    let input = Buffer::zeros(&stream, 80).unwrap();
    let error = casts.quantize(&stream, input.view(), [2, 40]).unwrap_err();
    assert_eq!(error.to_string(), "NVFP4: 40 columns are not a multiple of 16: pad them");
    let error = casts.quantize(&stream, input.view(), [1, 64]).unwrap_err();
    assert_eq!(error.to_string(), "Nvfp4::quantize_rows, input: 80 elements where 64 are needed");
    assert!(casts.quantize(&stream, input.view().slice(1, 65), [1, 64]).is_err(), "an input off the boundary");
    assert_eq!(Nvfp4Format::scale_count::<Compact>([3, 64], Direction::Rows).unwrap(), 12);
}

/// Casts by rows into what is there allocate nothing: they are captured once and replayed on other values.
#[test]
fn a_graph_holds_casts_of_rows() {
    const SHAPE: [u64; 2] = [2, 32];
    let runtime = runtime();
    let stream = stream(&runtime);
    let (casts, interleaving) = (Nvfp4::<f32>::new(&runtime).unwrap(), InterleavedMxfp8::<f32>::new(&runtime).unwrap());
    let scaled_rows = Nvfp4ScaledRows::<f32>::new(&runtime).unwrap();
    // The amax that ranks have agreed on before.
    let largest = Buffer::from_slice(&stream, &[224.0_f32; 64]).unwrap();
    let agreed = Amax::new(&runtime)
        .unwrap()
        .local_amax(&stream, largest.view())
        .unwrap()
        .reduce(&SingleRank::new(&stream.device()), &stream)
        .unwrap();
    let mut input = Buffer::<f32>::zeros(&stream, 64).unwrap();
    let mut shard = Nvfp4Tensor::uninitialised(&stream, SHAPE, Direction::Rows).unwrap();
    let mut interleaved = Mxfp8Tensor::uninitialised(&stream, SHAPE, Direction::Rows).unwrap();
    let mut of_rows = Nvfp4MappedTensor::of_scaled_rows(&stream, SHAPE).unwrap();
    let graph = Graph::capture(&[&stream], || {
        casts.cast_shard(&stream, input.view(), &agreed, &mut shard)?;
        interleaving.quantize_rows_into(&stream, input.view(), &mut interleaved)?;
        scaled_rows.quantize_into(&stream, input.view(), &mut of_rows)
    })
    .unwrap();
    for value in [224.0_f32, 28.0, 112.0] {
        input.copy_from_slice(&stream, &[value; 64]).unwrap();
        graph.replay(&stream).unwrap();
        assert_eq!(shard.amax.to_vec(&stream).unwrap(), [224.0]);
        assert_eq!(shard.scales.to_vec(&stream).unwrap()[3].to_f32(), 2.0 * value);
        assert_eq!(interleaved.scales.to_vec(&stream).unwrap()[0].to_f32(), value / 448.0);
        assert_eq!(interleaved.data.to_vec(&stream).unwrap()[63].to_f32(), 448.0);
        assert_eq!(of_rows.amax.to_vec(&stream).unwrap(), [value; 2]);
        assert_eq!(of_rows.scales.to_vec(&stream).unwrap()[3].to_f32(), 448.0);
        for codes in [&shard.data, &of_rows.data] {
            assert_eq!(codes.to_vec(&stream).unwrap()[31].to_bits(), 0x77, "twice the code of 6");
        }
    }
}

#[test]
fn casts_of_rows_refuse_columnwise_tensors() {
    const SHAPE: [u64; 2] = [32, 32];
    let runtime = emulated(0, 1);
    let stream = stream(&runtime);
    let input = Buffer::<f32>::zeros(&stream, 1024).unwrap();
    let casts = Nvfp4::<f32>::new(&runtime).unwrap();
    let agreed = Amax::new(&runtime)
        .unwrap()
        .local_amax(&stream, input.view())
        .unwrap()
        .reduce(&SingleRank::new(&stream.device()), &stream)
        .unwrap();
    let mut shard = Nvfp4Tensor::uninitialised(&stream, SHAPE, Direction::Columns).unwrap();
    let mut interleaved = Mxfp8Tensor::uninitialised(&stream, SHAPE, Direction::Columns).unwrap();
    let mut of_rows = Nvfp4MappedTensor::of_scaled_rows(&stream, SHAPE).unwrap();
    of_rows.direction = Direction::Columns;
    let casts = [
        ("Nvfp4::cast_shard", casts.cast_shard(&stream, input.view(), &agreed, &mut shard)),
        (
            "InterleavedMxfp8::quantize_rows_into",
            InterleavedMxfp8::<f32>::new(&runtime).unwrap().quantize_rows_into(&stream, input.view(), &mut interleaved),
        ),
        (
            "Nvfp4ScaledRows::quantize_into",
            Nvfp4ScaledRows::<f32>::new(&runtime).unwrap().quantize_into(&stream, input.view(), &mut of_rows),
        ),
    ];
    for (name, result) in casts {
        let error = result.unwrap_err();
        assert!(matches!(error, Error::Invalid { .. }));
        assert_eq!(error.to_string(), format!("{name}, tensor: it is columnwise: make one of `Direction::Rows`"));
    }
}

#[test]
fn an_amax_is_set_whatever_was_there() {
    let runtime = runtime();
    let stream = stream(&runtime);
    let amax = Amax::<f32>::new(&runtime).unwrap();
    let mut output = Buffer::from_slice(&stream, &[1e9_f32]).unwrap();
    let input = Buffer::from_slice(&stream, &[1.0_f32, -7.5, f32::NAN, 3.0]).unwrap();
    amax.run(&stream, input.view(), &mut output).unwrap();
    assert_eq!(output.to_vec(&stream).unwrap(), [7.5]);
    amax.run(&stream, input.view().slice(0, 0), &mut output).unwrap();
    assert_eq!(output.to_vec(&stream).unwrap(), [0.0]);
}

#[test]
fn many_tensors_raise_their_slots() {
    let runtime = runtime();
    let stream = stream(&runtime);
    let kernel = MultiAmax::<f32>::new(&runtime).unwrap();
    let tensors = [vec![1.0_f32, -2.0], vec![], vec![3.0; 5000], vec![-0.5]].map(|t| Buffer::from_slice(&stream, &t).unwrap());
    let views = tensors.each_ref().map(Buffer::view);
    let slots = [[Some(0), None], [Some(1), Some(4)], [Some(2), Some(4)], [None, Some(4)]];
    let plan = MultiAmaxPlan::new(&stream, &views, &slots).unwrap();
    let mut outputs = Buffer::from_slice(&stream, &[9.0_f32; 5]).unwrap();
    for _ in 0..2 {
        kernel.run(&stream, &plan, &mut outputs).unwrap();
        assert_eq!(outputs.to_vec(&stream).unwrap(), [2.0, 0.0, 3.0, 0.0, 3.0]);
    }
    let mut short = Buffer::zeros(&stream, 4).unwrap();
    let error = kernel.run(&stream, &plan, &mut short).unwrap_err();
    assert_eq!(error.to_string(), "MultiAmax::run, outputs: 4 elements where 5 are needed");
    assert!(matches!(MultiAmaxPlan::new(&stream, &views, &slots[1..]), Err(Error::Length { expected: 4, found: 3, .. })));
    let none = MultiAmaxPlan::new(&stream, &[], &[]).unwrap();
    kernel.run(&stream, &none, &mut outputs).unwrap();
    assert_eq!(outputs.to_vec(&stream).unwrap(), [0.0; 5]);
}

#[test]
fn an_amax_of_the_wrong_length_is_refused_and_loses_nothing() {
    let runtime = runtime();
    let stream = stream(&runtime);
    let input = Buffer::from_slice(&stream, &[1.0_f32, -3.0]).unwrap();
    let mut output = Buffer::from_slice(&stream, &[5.0_f32, 7.0]).unwrap();
    let error = Amax::<f32>::new(&runtime).unwrap().run(&stream, input.view(), &mut output).unwrap_err();
    assert_eq!(error.to_string(), "Amax::run, output: 2 elements where 1 are needed");
    assert_eq!(output.to_vec(&stream).unwrap(), [5.0, 7.0]);
}

#[test]
fn a_slot_that_is_not_there_raises_nothing() {
    use oxtile::kernels::amax::{self, MultiAmaxArgs};
    use oxtile::tensor::DeviceTable;
    let runtime = emulated(1, 1);
    let stream = stream(&runtime);
    let input = Buffer::from_slice(&stream, &[1.0_f32, -3.0]).unwrap();
    let (tensors, first_tiles) = (DeviceTable::new(&stream, &[input.view()]).unwrap(), Buffer::from_slice(&stream, &[0_u64, 1]).unwrap());
    let slots = Buffer::from_slice(&stream, &[1_u32, 9]).unwrap();
    let mut outputs = Buffer::<f32>::zeros(&stream, 2).unwrap();
    let args = MultiAmaxArgs { tensors: tensors.view(), first_tiles: first_tiles.view(), slots: slots.view(), outputs: outputs.view_mut() };
    runtime.load::<amax::MultiAmax<f32>>().unwrap().launch(&stream, args).unwrap();
    assert_eq!(outputs.to_vec(&stream).unwrap(), [0.0, 3.0]);
}

/// A pair's tensors are of one matrix: else its columns would be read as those of another.
#[test]
fn pairs_of_two_shapes_are_refused() {
    let runtime = emulated(0, 1);
    let stream = stream(&runtime);
    let input = Buffer::<num::bf16>::zeros(&stream, 32 * 64).unwrap();
    let why = "a tensor of [64, 32] where one of [32, 64] goes: make it of this shape";
    let of = |shape, direction| Mxfp8Tensor::<e4m3>::uninitialised(&stream, shape, direction).unwrap();
    let mut pair = Mxfp8Pair { rows: of([32, 64], Direction::Rows), columns: of([64, 32], Direction::Columns) };
    let casts = Mxfp8::<num::bf16>::new(&runtime).unwrap();
    let error = casts.quantize_both_into(&stream, input.view(), &mut pair).unwrap_err().to_string();
    assert!(error.contains(why), "{error}");
    let mut twice = Mxfp8Pair { rows: of([32, 64], Direction::Rows), columns: of([32, 64], Direction::Rows) };
    let error = casts.quantize_both_into(&stream, input.view(), &mut twice).unwrap_err().to_string();
    assert!(error.contains("it is rowwise"), "{error}");

    let of = |shape, direction| Nvfp4Tensor::uninitialised(&stream, shape, direction).unwrap();
    let mut pair = Nvfp4Pair { rows: of([32, 64], Direction::Rows), columns: of([64, 32], Direction::Columns) };
    let random = RandomState::new(&stream, 1, 0).unwrap();
    let columns = Nvfp4Columns::<num::bf16>::new(&runtime).unwrap();
    let error = columns.cast_both(&stream, input.view(), &random, &mut pair).unwrap_err().to_string();
    assert!(error.contains(why), "{error}");
    let error = Nvfp4Squares::<num::bf16>::new(&runtime).unwrap().cast(&stream, input.view(), &mut pair).unwrap_err().to_string();
    assert!(error.contains(why), "{error}");
}
