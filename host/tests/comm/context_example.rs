//! The program of the example finds what one device finds.

#[path = "../../examples/context_parallel.rs"]
mod example;

use half::bf16;
use oxtile::attention::{Attention, AttentionBackward, BackwardInputs, Gradients, Inputs, Order, Outputs};
use oxtile::context_parallel::Schedule;
use oxtile::{Buffer, Result, Runtime, num};

/// The same by one device.
fn alone(runtime: &Runtime, [q, k, v, grad_out]: &[Vec<bf16>; 4]) -> Result<[Vec<bf16>; 4]> {
    let (stream, config) = (runtime.device(0)?.stream()?, example::attention());
    let upload = |tensor: &Vec<bf16>| Buffer::<num::bf16>::from_slice(&stream, tensor);
    let (q, k, v, grad_out) = (upload(q)?, upload(k)?, upload(v)?, upload(grad_out)?);
    let like = |tensor: &Buffer<num::bf16>| Buffer::<num::bf16>::uninitialised(&stream, tensor.len());
    let (mut out, mut dq, mut dk, mut dv) = (like(&q)?, like(&q)?, like(&k)?, like(&v)?);
    let mut log_sum_exp = Buffer::uninitialised(&stream, config.heads * config.queries)?;
    let inputs = || Inputs::new(q.view(), k.view(), v.view());
    Attention::new(runtime, config)?.forward(&stream, inputs(), Outputs::new(out.view_mut(), log_sum_exp.view_mut()))?;
    let saved =
        BackwardInputs { forward: inputs(), out: out.view().into(), log_sum_exp: log_sum_exp.view(), grad_out: grad_out.view().into() };
    let backward = AttentionBackward::new(runtime, config, Order::Deterministic)?;
    backward.backward(&stream, saved, Gradients::new(dq.view_mut(), dk.view_mut(), dv.view_mut()))?;
    let [out, dq, dk, dv] = [out, dq, dk, dv].map(|tensor| tensor.to_vec_as(&stream));
    Ok([out?, dq?, dk?, dv?])
}

#[test]
fn the_example_finds_what_one_device_finds() {
    let config = example::attention();
    let elements = config.queries * config.heads * config.head_size;
    let tensors =
        [7, 11, 13, 17].map(|step| (0..elements).map(|i| bf16::from_f32((i * step % 97) as f32 / 48.0 - 1.0)).collect::<Vec<_>>());
    let runtime = Runtime::emulated(2).unwrap();
    let expected = alone(&runtime, &tensors).unwrap();
    for schedule in [Schedule::Ring, Schedule::AllToAll] {
        let (out, gradients) = example::attend(&runtime, schedule, tensors.clone()).unwrap();
        for (found, expected) in [out].iter().chain(&gradients).zip(&expected) {
            let close = |(a, b): (&bf16, &bf16)| {
                (a.to_f32() - b.to_f32()).abs() <= if schedule == Schedule::Ring { 0.02 * b.to_f32().abs().max(0.1) } else { 0.0 }
            };
            assert!(found.len() == expected.len() && found.iter().zip(expected).all(close), "{schedule}");
        }
    }
}
