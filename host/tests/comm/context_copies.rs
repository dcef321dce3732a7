//! Copies and launches of passes, of what is recorded: how often bytes are copied by traded heads, and what runs beside the one launch.

use oxtile::attention::{AttentionConfig, Layout};
use oxtile::context_parallel::Schedule;
use oxtile::num::bf16;
use oxtile::timeline::{Activity, Recording, Timeline};

use crate::context_case::Case;
use crate::context_parallel::BASE;
use crate::context_ranks::Ranks;

/// What all ranks do in a forward and in a backward pass.
fn recorded(case: &Case) -> [Recording; 2] {
    let ranks = Ranks::new(case).unwrap();
    let operations = ranks.operations::<bf16>().unwrap();
    let mut tensors = ranks.tensors::<bf16>(&case.whole()).unwrap();
    ranks.set_sequences(&operations, &tensors).unwrap();
    [false, true].map(|is_backward| {
        let mut passes: Vec<_> = operations
            .iter()
            .zip(&ranks.world.streams)
            .zip(&mut tensors)
            .map(|((operation, stream), tensors)| {
                let pass = if is_backward { tensors.backward(case, operation, stream) } else { tensors.forward(case, operation, stream) };
                pass.unwrap()
            })
            .collect();
        ranks.world.streams.iter().for_each(|stream| stream.synchronize().unwrap());
        let timeline = Timeline::start(&ranks.world.runtime).unwrap();
        passes.iter_mut().zip(&ranks.world.streams).for_each(|(pass, stream)| pass.run(stream).unwrap());
        ranks.world.streams.iter().for_each(|stream| stream.synchronize().unwrap());
        timeline.finish().unwrap()
    })
}

/// Bytes that copies of rank 0 move in a forward and in a backward pass.
fn moved(case: &Case) -> [u64; 2] {
    recorded(case).map(|recording| {
        let copies = recording.spans.iter().filter(|span| (span.rank, span.activity) == (0, Activity::Copy));
        copies.filter_map(|span| span.bytes).sum()
    })
}

/// Two ranks: each gives half of its heads away, and keeps the other half. What it keeps, and what comes back, is copied once, or twice where it goes around: all heads but those of the first
/// group, and all results but those of the last one. Own results are copied once as well, and through no block.
#[test]
fn own_results_go_straight_to_their_tensor() {
    let attention = AttentionConfig { queries: 16, keys: 16, heads: 16, key_heads: 16, head_size: 128, ..BASE };
    let case = Case::new(2, attention).by_puts();
    // Of 8 heads a rank each of the four groups has two.
    let [end, all] = [2, 8];
    let head = 8 * 128 * 2;
    // Tensors of own tokens and of own heads; each is as large as what goes to, and comes from, the other rank.
    let given = |tensors: u64, numbers: u64, head: u64| (all + end + 2 * (all - end)) * (tensors * head + numbers);
    let taken = |tensors: u64, numbers: u64, head: u64| (all + 2 * (end + 2 * (all - end))) * (tensors * head + numbers);
    // A number for each head and token.
    let numbers = 8 * 4;
    assert_eq!(moved(&case), [given(3, 0, head) + taken(1, numbers, head), given(5, numbers, head) + taken(3, 0, head)]);
}

/// One launch attends in each pass of each rank; beside it are copies, flags and, in the backward pass, kernels of attention that prepare and finish gradients. No rank takes part in a collective.
#[test]
fn one_launch_attends() {
    let dense = AttentionConfig { queries: 512, keys: 512, ..BASE };
    let packed = AttentionConfig { layout: Layout::Packed, batches: 2, ..dense };
    for case in [Case::new(2, dense), Case { lengths: vec![[500, 504], [3, 8]], ..Case::new(2, packed) }] {
        let [forward, backward] = recorded(&case.by(Schedule::Fused));
        let names = |recording: &Recording, rank: u32| -> Vec<String> {
            let of_rank = recording.spans.iter().filter(|span| (span.rank, span.activity) == (rank, Activity::Kernel));
            of_rank.map(|span| span.name.clone()).collect()
        };
        for rank in 0..2 {
            let [forward, backward] = [names(&forward, rank), names(&backward, rank)];
            assert!(matches!(&forward[..], [one] if one.starts_with("attention_forward__") && one.contains("arriving")), "{forward:?}");
            let main = backward.iter().filter(|name| name.starts_with("attention_backward_arriving")).count();
            assert!(main == 1 && backward.iter().all(|name| name.starts_with("attention_backward_")), "{backward:?}");
        }
        let spans = forward.spans.iter().chain(&backward.spans);
        assert!(spans.clone().all(|span| span.activity != Activity::Collective));
        // Copies are those of keys and values to the other rank.
        let copies = spans.filter(|span| span.activity == Activity::Copy);
        assert!(copies.clone().count() >= 8 && copies.into_iter().all(|copy| copy.name.starts_with("put to device")));
    }
}
