//! The host's side of groups: what is refused and how it is said, what a graph may hold. The kernels' bits are shown elsewhere.

use oxtile::comm::SingleRank;
use oxtile::num::bf16;
use oxtile::quantize::grouped::*;
use oxtile::quantize::{Direction, MultiAmax};
use oxtile::{Buffer, Error, Graph};

use crate::support::{emulated, runtime, stream};

#[test]
fn an_error_names_the_member() {
    let runtime = emulated(0, 1);
    let stream = stream(&runtime);
    let (long, short) = (Buffer::<f32>::zeros(&stream, 96).unwrap(), Buffer::<f32>::zeros(&stream, 32).unwrap());
    let error = TensorGroup::new(&stream, &[(long.view(), [3, 32]), (short.view(), [2, 32])]).unwrap_err();
    assert_eq!(error.to_string(), "TensorGroup::new: member 1: 32 elements where its shape [2, 32] has 64");

    let group = TensorGroup::new(&stream, &[(short.view(), [1, 32]), (long.view(), [3, 32]), (long.view(), [12, 8])]).unwrap();
    let casts = GroupedNvfp4::<f32>::new(&runtime).unwrap();
    let alone = SingleRank::new(&runtime.device(0).unwrap());
    let amax = MultiAmax::new(&runtime).unwrap().local_amax(&stream, &group).unwrap().reduce(&alone, &stream).unwrap();
    let error = casts.quantize(&stream, &group, Direction::Rows, &amax).unwrap_err();
    assert_eq!(error.to_string(), "NVFP4: member 2: 8 columns are not a multiple of 16: pad them");
    let error = casts.quantize(&stream, &group, Direction::Columns, &amax).unwrap_err();
    assert_eq!(error.to_string(), "NVFP4: member 0: 1 rows are not a multiple of 16: pad them");

    let shifted = TensorGroup::new(&stream, &[(long.view().slice(1, 33), [1, 32])]).unwrap();
    let amax = MultiAmax::new(&runtime).unwrap().local_amax(&stream, &shifted).unwrap().reduce(&alone, &stream).unwrap();
    let error = casts.quantize(&stream, &shifted, Direction::Rows, &amax).unwrap_err();
    assert_eq!(error.to_string(), "GroupedNvfp4::quantize_into: member 0 does not start at a multiple of 16 bytes: copy it");
}

#[test]
fn outputs_of_other_shapes_are_refused() {
    let runtime = emulated(0, 1);
    let stream = stream(&runtime);
    let input = Buffer::<f32>::zeros(&stream, 64).unwrap();
    let casts = GroupedMxfp8::<f32>::new(&runtime).unwrap();
    let one = TensorGroup::new(&stream, &[(input.view(), [2, 32])]).unwrap();
    let other = TensorGroup::new(&stream, &[(input.view(), [1, 64])]).unwrap();
    let mut output = casts.quantize(&stream, &other, Direction::Rows).unwrap();
    let error = casts.quantize_into(&stream, &one, &mut output).unwrap_err();
    let expected = "GroupedMxfp8::quantize_into: member 0: the output is [1, 64], the input [2, 32]: make the output of the group's shapes";
    assert_eq!(error.to_string(), expected);
    let none = TensorGroup::new(&stream, &[]).unwrap();
    assert!(matches!(casts.quantize_into(&stream, &none, &mut output), Err(Error::Length { expected: 0, found: 1, .. })));
}

#[test]
fn a_rank_gathers_its_own_shards() {
    let runtime = emulated(0, 1);
    let stream = stream(&runtime);
    let input = Buffer::<f32>::zeros(&stream, 64).unwrap();
    let group = TensorGroup::new(&stream, &[(input.view(), [2, 32])]).unwrap();
    let quantized = GroupedMxfp8::<f32>::new(&runtime).unwrap().quantize(&stream, &group, Direction::Rows).unwrap();
    let (gather, alone) = (GatherShards::<Mxfp8Format>::new(&runtime).unwrap(), SingleRank::new(&runtime.device(0).unwrap()));
    let error = gather.run(&alone, &stream, &quantized, &[3]).unwrap_err();
    assert_eq!(error.to_string(), "GatherShards::run, shards: member 0: 2 rows where rank 0 has rows 0..3 of 3: cast those");
    assert!(matches!(gather.run(&alone, &stream, &quantized, &[]), Err(Error::Length { expected: 1, found: 0, .. })));
    let whole = gather.run(&alone, &stream, &quantized, &[2]).unwrap();
    assert_eq!(whole.shape(0), [2, 32]);
}

/// The tables are on the device after the first run, so that a capture copies nothing; a first run in a capture is refused.
#[test]
fn a_graph_holds_a_group_that_ran_once() {
    let runtime = runtime();
    let stream = stream(&runtime);
    let values: Vec<_> = (0..2 * 33 * 40).map(|i| half::bf16::from_f32((i % 37) as f32 - 18.0)).collect();
    let input = Buffer::<bf16>::from_slice(&stream, &values).unwrap();
    let members = [(input.view().slice(0, 1320), [33, 40]), (input.view().slice(1320, 2640), [40, 33])];
    let casts = GroupedMxfp8::<bf16>::new(&runtime).unwrap();
    let group = TensorGroup::new(&stream, &members).unwrap();
    let expected = casts.quantize(&stream, &group, Direction::Columns).unwrap();
    let mut output = Quantized::uninitialised(&stream, &[[33, 40], [40, 33]], Direction::Columns, ()).unwrap();
    let graph = Graph::capture(&[&stream], || casts.quantize_into(&stream, &group, &mut output)).unwrap();
    graph.replay(&stream).unwrap();
    for member in 0..2 {
        assert_eq!(output.to_vecs(&stream, member).unwrap(), expected.to_vecs(&stream, member).unwrap());
    }
    let fresh = TensorGroup::new(&stream, &members).unwrap();
    let refused = Graph::capture(&[&stream], || casts.quantize_into(&stream, &fresh, &mut output));
    assert!(matches!(refused, Err(Error::NotCapturable { .. })));
}

/// Both directions are cast with one amax, which the columns then have, whatever they had before; another number of them is refused.
#[test]
fn both_directions_keep_the_amax_they_were_cast_with() {
    let runtime = runtime();
    let stream = stream(&runtime);
    let (small, large) = (Buffer::from_slice(&stream, &[1.5_f32; 256]).unwrap(), Buffer::from_slice(&stream, &[6.0_f32; 256]).unwrap());
    let casts = GroupedNvfp4::<f32>::new(&runtime).unwrap();
    let alone = SingleRank::new(&runtime.device(0).unwrap());
    let [of_small, of_large] = [&small, &large].map(|values| TensorGroup::new(&stream, &[(values.view(), [16, 16])]).unwrap());
    let amax = |group| MultiAmax::new(&runtime).unwrap().local_amax(&stream, group).unwrap().reduce(&alone, &stream).unwrap();
    let output = |direction, amax| Quantized::<Nvfp4Format>::uninitialised(&stream, &[[16, 16]], direction, amax).unwrap();
    let mut outputs = [output(Direction::Rows, amax(&of_small)), output(Direction::Columns, amax(&of_large))];
    casts.quantize_both_into(&stream, &of_small, &mut outputs).unwrap();
    for output in &outputs {
        assert_eq!(output.amax().slots().to_vec(&stream).unwrap(), [1.5]);
        assert_eq!(casts.dequantize(&stream, output).unwrap().to_vec(&stream, 0).unwrap(), [1.5; 256]);
    }

    let two = TensorGroup::new(&stream, &[(small.view(), [16, 16]), (large.view(), [16, 16])]).unwrap();
    let of_two = output(Direction::Rows, amax(&two));
    let error = casts.dequantize(&stream, &of_two).unwrap_err();
    assert_eq!(error.to_string(), "GroupedNvfp4::dequantize_into: 2 elements where 1 are needed");
}
