//! Attention of packed sequences by the kernels that would wait for other ranks: those of a rank alone, whose keys are all its own, give the bits of one device.

use oxtile::attention::{
    Attention, AttentionBackward, AttentionConfig, BackwardInputs, Gradients, Inputs, Layout, Mask, Order, Outputs, Padding, Sequences,
};
use oxtile::comm::{self, HostRank, Team, WorldSize};
use oxtile::context_parallel::{ContextElement, ContextParallel, ContextParallelConfig, Schedule, Transport};
use oxtile::runtime::Kind;
use oxtile::symmetric::{Arena, ArenaOptions, BackendName};
use oxtile::thd::Packed;
use oxtile::{Buffer, Result, Runtime};
use oxtile_tests::inputs::Random;
use oxtile_tile::num::{bf16, f16};

use super::attention::Operand;
use super::gathered_product::turn;
use crate::case::{Case, Outcome, Size, agrees, equal, text};

pub fn cases() -> Vec<Case> {
    let mut cases = Vec::new();
    macro_rules! sequences {
        ($($t:ident $d:literal;)*) => { $(
            for (name, mask) in [("full", Mask::Full), ("causal", Mask::CausalBottomRight)] {
                let of = format!("attention_arriving_packed::{}::{}::{name}", stringify!($t), $d);
                // Of one instance every check; the others, which wait at the same places, in the fast mode. The virtual cluster and mutants check some of them too.
                let size = if (stringify!($t), $d, mask) == ("bf16", 128, Mask::CausalBottomRight) { Size::Small } else { Size::Large };
                cases.push(Case::new(of, size, move |runtime| sequences::<$t>(runtime, $d, mask)));
            }
        )* };
    }
    sequences! { bf16 64; bf16 128; f16 64; f16 128; }
    cases
}

/// The result and the gradients, and the log-sum-exp.
type Found<T> = (Vec<Vec<T>>, Vec<f32>);

/// A whole sequence, an empty one, one that ends within a chunk, and rows after them. Chunks are multiples of a tile's queries and of a block's keys, so that results and gradients
/// of queries have the bits of one device. Those of keys are scaled by another product of factors there.
fn sequences<T: Operand + ContextElement>(runtime: &Runtime, head_size: u64, mask: Mask) -> Outcome {
    let chunk = if head_size == 64 { 384 } else { 256 };
    let (heads, rows) = (1, 4 * chunk + 6);
    let ends = [0, 2 * chunk, 2 * chunk, 3 * chunk + 77].map(|end| end as u32);
    let padded = [0, 2 * chunk, 2 * chunk, 4 * chunk].map(|end| end as u32);
    let sizes = AttentionConfig { batches: 3, queries: rows, keys: rows, heads, key_heads: heads, head_size, ..AttentionConfig::default() };
    let attention = AttentionConfig { layout: Layout::Packed, mask, ..sizes };
    let config = ContextParallelConfig::new(attention).by(Schedule::Fused);
    let mut random = Random::new(head_size);
    let mut values = || -> Vec<T> {
        let value = |_| <T as Operand>::of(<T as Operand>::FORMAT.encode(f64::from(random.normal()) / 2.0) as u16);
        (0..rows * heads * head_size).map(value).collect()
    };
    let inputs = [(); 4].map(|()| values());
    let _turn = turn(runtime);
    let all = || -> Result<[Found<T>; 2]> {
        let device = runtime.device(0)?;
        let rank = HostRank::threads(std::slice::from_ref(&device))?.remove(0);
        let backend = if runtime.kind() == Kind::Cuda { BackendName::Vmm } else { BackendName::Emulated };
        let bytes = config.arena_bytes(WorldSize::ONE, 2);
        let arena = Arena::open(&rank, ArenaOptions { backend, bytes, ..ArenaOptions::default() })?;
        let member = Team::all(WorldSize::ONE).member(comm::Rank::ZERO).expect("of the world");
        let stream = device.stream()?;
        let [q, k, v, grad] = inputs.each_ref().map(|values| Buffer::from_slice(&stream, values));
        let (q, k, v, grad) = (q?, k?, v?, grad?);
        let (ends, padded) = (Buffer::from_slice(&stream, &ends)?, Buffer::from_slice(&stream, &padded)?);
        let sequences = Sequences {
            cu_seqlens_q_padded: Some(padded.view()),
            cu_seqlens_kv_padded: Some(padded.view()),
            padding: Padding::Zeroed,
            ..Sequences::new(ends.view(), ends.view())
        };
        let inputs = |sequences| Inputs { sequences, ..Inputs::new(q.view(), k.view(), v.view()) };
        let zeros = || Buffer::<T>::zeros(&stream, rows * heads * head_size);
        // Rows of no sequence are left by one device: they are zeros before.
        let [mut out, mut grad_q, mut grad_k, mut grad_v] = [zeros()?, zeros()?, zeros()?, zeros()?];
        let mut logs = Buffer::from_slice(&stream, &vec![f32::NEG_INFINITY; (rows * heads) as usize])?;
        let outputs = Outputs::new(out.view_mut(), logs.view_mut());
        Attention::<T>::new(runtime, attention)?.bind(&stream, inputs(Some(sequences)), outputs)?.run(&stream)?;
        let backward = |forward, out, log_sum_exp| BackwardInputs { forward, out, log_sum_exp, grad_out: grad.view().into() };
        let gradients = Gradients::new(grad_q.view_mut(), grad_k.view_mut(), grad_v.view_mut());
        AttentionBackward::<T>::new(runtime, attention, Order::Deterministic)?
            .bind(&stream, backward(inputs(Some(sequences)), out.view().into(), logs.view()), gradients)?
            .run(&stream)?;
        let read = |tensors: [&Buffer<T>; 4]| tensors.into_iter().map(|tensor| tensor.to_vec(&stream)).collect::<Result<Vec<_>>>();
        let expected = (read([&out, &grad_q, &grad_k, &grad_v])?, logs.to_vec(&stream)?);
        let operation = ContextParallel::<T>::new(&stream, Transport::symmetric(&arena, &member), config)?;
        let packed = || Packed { cu_seqlens: ends.view(), cu_seqlens_padded: padded.view() };
        operation.set_sequences(&stream, packed(), packed())?;
        let tensor = || Buffer::<T>::named(&stream, "a result", rows * heads * head_size);
        let [mut out, mut grad_q, mut grad_k, mut grad_v] = [tensor()?, tensor()?, tensor()?, tensor()?];
        let mut logs = Buffer::<f32>::named(&stream, "log_sum_exp", rows * heads)?;
        operation.bind_forward(&stream, inputs(None), Outputs::new(out.view_mut(), logs.view_mut()))?.run(&stream)?;
        let gradients = Gradients::new(grad_q.view_mut(), grad_k.view_mut(), grad_v.view_mut());
        operation.bind_backward(&stream, backward(inputs(None), out.view().into(), logs.view()), gradients)?.run(&stream)?;
        let found = (read([&out, &grad_q, &grad_k, &grad_v])?, logs.to_vec(&stream)?);
        drop(operation);
        arena.close()?.finish()?;
        rank.close()?;
        Ok([expected, found])
    };
    let [(expected, expected_logs), (found, found_logs)] = text(all())?;
    let logs = |values: Vec<f32>| values.into_iter().map(|x| x.to_bits().into()).collect::<Vec<u64>>();
    equal("log_sum_exp", &logs(found_logs), &logs(expected_logs))?;
    let bits = |values: &[T]| values.iter().map(|x| Operand::bits(*x).into()).collect::<Vec<u64>>();
    let number = |x: T| <T as Operand>::FORMAT.decode(Operand::bits(x).into());
    for ((found, expected), name) in found.iter().zip(&expected).zip(["out", "gradient of q", "gradient of k", "gradient of v"]) {
        if ["out", "gradient of q"].contains(&name) {
            equal(name, &bits(found), &bits(expected))?;
        }
        for (at, (found, expected)) in found.iter().zip(expected).map(|(found, expected)| (number(*found), number(*expected))).enumerate() {
            if !agrees(found, expected, 4.0 * T::HALF_UNIT * expected.abs()) {
                return Err(format!("{name}[{at}] is {found}, expected {expected}"));
            }
        }
    }
    Ok(())
}
