//! Two ranks of a virtual cluster share a sequence, and attend forward and backward: `cargo run -p oxtile --example context_parallel`.

use half::bf16;
use oxtile::attention::{AttentionConfig, BackwardInputs, Gradients, Inputs, Mask, Outputs};
use oxtile::comm::{Communicator, EmulatedCommunicator, WorldSize};
use oxtile::context_parallel::{ContextParallel, ContextParallelConfig, Schedule, Share, Transport};
use oxtile::{Buffer, Result, Runtime, num};

const TOKENS: u64 = 64;
/// Elements of a token: two heads of 64.
const WIDTH: u64 = 128;

#[allow(dead_code, reason = "tests take the rest")]
fn main() -> Result<()> {
    let tensor = |step: u64| (0..TOKENS * WIDTH).map(|i| bf16::from_f32((i * step % 97) as f32 / 48.0 - 1.0)).collect::<Vec<_>>();
    let (out, gradients) = attend(&Runtime::emulated(2)?, Schedule::Ring, [7, 11, 13, 17].map(tensor))?;
    for (name, tensor) in ["out", "dq", "dk", "dv"].into_iter().zip([out].into_iter().chain(gradients)) {
        println!("{name}: {:?} ...", &tensor[..4]);
    }
    Ok(())
}

/// The attention of the whole sequence.
pub fn attention() -> AttentionConfig {
    let mask = Mask::CausalBottomRight;
    AttentionConfig { queries: TOKENS, keys: TOKENS, heads: 2, key_heads: 2, head_size: WIDTH / 2, mask, ..AttentionConfig::default() }
}

/// The result for `q`, `k` and `v`, and their gradients for that of the result, by two ranks.
pub fn attend(runtime: &Runtime, schedule: Schedule, whole: [Vec<bf16>; 4]) -> Result<(Vec<bf16>, [Vec<bf16>; 3])> {
    let world = WorldSize::new(2).expect("two ranks");
    let ranks = EmulatedCommunicator::world_of(runtime, world)?;
    let config = ContextParallelConfig::new(attention()).by(schedule);
    let streams = ranks.iter().map(|rank| rank.device().stream()).collect::<Result<Vec<_>>>()?;
    // All ranks make the operation before one of them binds tensors to it. Processes with a GPU each do what follows for their rank alone.
    let operations = ranks.iter().zip(&streams).map(|(rank, stream)| ContextParallel::new(stream, Transport::collective(rank), config));
    let operations = operations.collect::<Result<Vec<ContextParallel<'_, num::bf16>>>>()?;
    println!("{}", operations[0].plan());

    let (shape, part) = ([1, TOKENS, WIDTH], TOKENS * WIDTH / u64::from(world.get()));
    let share = |rank: &EmulatedCommunicator| Share { partition: config.partition, rank: rank.rank(), world };
    let mut tensors = Vec::new();
    for (rank, stream) in ranks.iter().zip(&streams) {
        // Of each tensor this rank's tokens.
        let mut own = Vec::new();
        for whole in &whole {
            let mut tokens = Buffer::<num::bf16>::uninitialised(stream, part)?;
            share(rank).split(stream, shape, &Buffer::from_slice(stream, whole)?, &mut tokens)?;
            own.push(tokens);
        }
        let results = (0..4).map(|_| Buffer::<num::bf16>::uninitialised(stream, part)).collect::<Result<Vec<_>>>()?;
        tensors.push((own, results, Buffer::<f32>::uninitialised(stream, 2 * TOKENS / 2)?));
    }
    for ((operation, stream), (own, results, log_sum_exp)) in operations.iter().zip(&streams).zip(&mut tensors) {
        let inputs = Inputs::new(own[0].view(), own[1].view(), own[2].view());
        let outputs = Outputs::new(results[0].view_mut(), log_sum_exp.view_mut());
        // Bind once, run any number of times: a pass allocates nothing, and no host waits.
        operation.bind_forward(stream, inputs, outputs)?.run(stream)?;
    }
    for ((operation, stream), (own, results, log_sum_exp)) in operations.iter().zip(&streams).zip(&mut tensors) {
        let [out, dq, dk, dv] = &mut results[..] else { unreachable!("four results") };
        let forward = Inputs::new(own[0].view(), own[1].view(), own[2].view());
        let (out, grad_out) = (out.view().into(), own[3].view().into());
        let inputs = BackwardInputs { forward, out, log_sum_exp: log_sum_exp.view(), grad_out };
        let gradients = Gradients::new(dq.view_mut(), dk.view_mut(), dv.view_mut());
        operation.bind_backward(stream, inputs, gradients)?.run(stream)?;
    }
    let mut joined = [(); 4].map(|()| vec![bf16::ZERO; (TOKENS * WIDTH) as usize]);
    for ((rank, stream), (_, results, _)) in ranks.iter().zip(&streams).zip(&tensors) {
        for (whole, part) in joined.iter_mut().zip(results) {
            for (row, token) in part.to_vec_as::<bf16>(stream)?.chunks(WIDTH as usize).zip(0..) {
                let at = (config.partition.token(rank.rank(), world, TOKENS, token) * WIDTH) as usize;
                whole[at..at + WIDTH as usize].copy_from_slice(row);
            }
        }
    }
    let [out, gradients @ ..] = joined;
    Ok((out, gradients))
}
