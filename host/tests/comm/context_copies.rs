//! How often bytes are copied by traded heads, of what is recorded.

use oxtile::attention::AttentionConfig;
use oxtile::num::bf16;
use oxtile::timeline::{Activity, Timeline};

use crate::context_case::Case;
use crate::context_parallel::BASE;
use crate::context_ranks::Ranks;

/// Bytes that copies of rank 0 move in a forward and in a backward pass.
fn moved(case: &Case) -> [u64; 2] {
    let ranks = Ranks::new(case).unwrap();
    let operations = ranks.operations::<bf16>().unwrap();
    let mut tensors = ranks.tensors::<bf16>(&case.whole()).unwrap();
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
        let recording = timeline.finish().unwrap();
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
