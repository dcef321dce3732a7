//! Attention over a sequence that is spread over ranks: each rank's part against the whole sequence in `f64`.

use oxtile::attention::{AttentionConfig, GradientOutput, Kernels, Layout, Mask, Output, Sink, Window};
use oxtile::comm::WorldSize;
use oxtile::context_parallel::{ContextParallelConfig, Partition, Schedule};
use oxtile::num::bf16;

use crate::context_case::Case;
use crate::context_ranks::Ranks;
use crate::support::is_long;

pub const BASE: AttentionConfig = AttentionConfig {
    layout: Layout::Bshd,
    batches: 1,
    queries: 48,
    keys: 48,
    heads: 2,
    key_heads: 1,
    head_size: 64,
    value_size: None,
    mask: Mask::CausalBottomRight,
    window: Window { left: None, right: None },
    scale: None,
    soft_cap: None,
    sink: Sink::None,
    output: Output::Rounded,
    diagonals: false,
    max_logit: false,
    kernels: Kernels::Fastest,
    key_parts: None,
    gradients: GradientOutput::Rounded,
};

pub const WINDOWS: [Window; 3] =
    [Window { left: Some(5), right: Some(5) }, Window { left: Some(20), right: None }, Window { left: None, right: Some(9) }];

fn contiguous(case: Case) -> Case {
    Case { config: ContextParallelConfig { partition: Partition::Contiguous, ..case.config }, ..case }
}

/// Runs every eleventh of the cases, or all with `OXTILE_LONG=1`, and names all that fail. No loop inside of another makes eleven of them, so that none of its values is always left out.
/// What every value meets, of two options, is in `context_pairs`.
pub fn all(cases: impl IntoIterator<Item = Case>) {
    let step = if is_long() { 1 } else { 11 };
    let failed: Vec<_> = cases
        .into_iter()
        .step_by(step)
        .filter_map(|case| {
            let result = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| case.run()));
            match result {
                Ok(Ok(())) => None,
                Ok(Err(error)) => Some(format!("{case:?}: {error}")),
                Err(panic) => Some(panic.downcast_ref::<String>().cloned().unwrap_or_else(|| "a panic".to_owned())),
            }
        })
        .collect();
    assert!(failed.is_empty(), "{} failed\n{}", failed.len(), failed.join("\n"));
}

#[test]
fn every_world_and_layout() {
    let worlds = [1, 2, 3, 4, 8];
    let cases = worlds.into_iter().flat_map(|ranks| {
        let rows = if ranks == 8 { 64 } else { 48 };
        let config = AttentionConfig { queries: rows, keys: rows, ..BASE };
        let dense = [Layout::Bshd, Layout::Sbhd].map(|layout| AttentionConfig { layout, batches: 2, heads: 4, key_heads: 2, ..config });
        dense
            .into_iter()
            .flat_map(move |config| [Mask::Full, Mask::CausalTopLeft].map(|mask| Case::new(ranks, AttentionConfig { mask, ..config })))
    });
    all(cases.flat_map(|case| [case.clone(), case.by(Schedule::Gather)]));
}

/// Schedules by other means than messages, and by traded heads.
#[test]
fn other_schedules() {
    let two = WorldSize::new(2).unwrap();
    let config = AttentionConfig { heads: 4, key_heads: 4, ..BASE };
    let options = [
        config,
        AttentionConfig { layout: Layout::Sbhd, batches: 2, sink: Sink::Learnable, ..config },
        AttentionConfig {
            layout: Layout::Bshd,
            batches: 2,
            window: WINDOWS[0],
            mask: Mask::Full,
            sink: Sink::Learnable,
            soft_cap: Some(3.0),
            ..config
        },
    ];
    let pull = options.iter().flat_map(|config| [2, 3].map(|ranks| Case::new(ranks, *config).by(Schedule::Pull)));
    let traded = options.iter().flat_map(|config| {
        let config = AttentionConfig { max_logit: true, ..*config };
        [1, 2, 4].map(|ranks| Case::new(ranks, config)).into_iter().flat_map(|case| [case.clone().by(Schedule::AllToAll), case.by_puts()])
    });
    let grid = options.iter().flat_map(|config| [4, 6].map(|ranks| Case::new(ranks, *config).by(Schedule::Hierarchical { inner: two })));
    // Several ranks have each key head.
    let shared = options.iter().flat_map(|config| {
        [1, 2].into_iter().flat_map(move |key_heads| {
            let case = Case::new(4, AttentionConfig { key_heads, ..*config });
            [case.clone().by(Schedule::AllToAll), case.clone().by_puts(), case.by(Schedule::Hierarchical { inner: two })]
        })
    });
    // Groups of four, and four groups.
    for inner in [4, 2].map(|inner| WorldSize::new(inner).unwrap()) {
        Case::new(8, config).by(Schedule::Hierarchical { inner }).run().unwrap();
    }
    let empty = [
        AttentionConfig { queries: 0, keys: 0, ..config },
        AttentionConfig { batches: 0, ..config },
        AttentionConfig { layout: Layout::Sbhd, batches: 0, ..config },
        AttentionConfig { mask: Mask::Full, keys: 0, ..config },
    ];
    let schedules = [Schedule::AllToAll, Schedule::Hierarchical { inner: two }, Schedule::Pull, Schedule::Ring, Schedule::Gather];
    for (config, schedule) in empty.into_iter().flat_map(|config| schedules.map(|schedule| (config, schedule))) {
        Case::new(4, config).by(schedule).run().unwrap();
    }
    all(pull.chain(traded).chain(grid).chain(shared));
}

/// Heads that are put: every layout, mask and number of ranks, heads with strides of their own, and the bits of messages.
#[test]
fn heads_are_put() {
    let layouts =
        [(Layout::Bshd, 1), (Layout::Bshd, 2), (Layout::Sbhd, 2)].map(|(layout, batches)| AttentionConfig { layout, batches, ..BASE });
    let cases = layouts.into_iter().flat_map(|config| {
        [(2, 48), (3, 48), (4, 48), (8, 64)].map(|(ranks, rows)| {
            let heads = u64::from(ranks) * 2;
            Case::new(ranks, AttentionConfig { queries: rows, keys: rows, heads, key_heads: heads / 2, ..config }).by_puts()
        })
    });
    all(cases.flat_map(|case| [case.clone(), contiguous(case)]));
    let lengths = vec![[7, 16], [0, 0], [24, 24], [1, 8]];
    let config = AttentionConfig { layout: Layout::Packed, batches: 4, queries: 56, keys: 56, heads: 8, ..BASE };
    for (key_heads, ranks) in [(4, 4), (2, 4), (8, 2)] {
        let case = Case { lengths: lengths.clone(), ..Case::new(ranks, AttentionConfig { key_heads, ..config }) };
        case.by_puts().run().unwrap();
    }
    // Several groups of heads, which are on their way while others are attended to.
    let wide = Case::new(2, AttentionConfig { heads: 16, key_heads: 16, head_size: 128, ..BASE });
    let whole = wide.whole();
    let [by_messages, by_puts] = [wide.clone().by(Schedule::AllToAll), wide.by_puts()].map(|case| case.results_of(&whole).unwrap());
    for (one, other) in by_messages.iter().zip(&by_puts) {
        let same = [(&one.out, &other.out), (&one.grad_q, &other.grad_q), (&one.grad_k, &other.grad_k), (&one.grad_v, &other.grad_v)];
        assert!(same.iter().all(|(one, other)| one == other), "other bits than by messages");
    }
}

#[test]
fn every_option() {
    let options = [
        AttentionConfig { soft_cap: Some(3.0), ..BASE },
        AttentionConfig { sink: Sink::OffByOne, ..BASE },
        AttentionConfig { sink: Sink::Learnable, heads: 4, key_heads: 2, ..BASE },
        AttentionConfig { sink: Sink::Learnable, layout: Layout::Sbhd, batches: 2, ..BASE },
        AttentionConfig { head_size: 128, ..BASE },
        AttentionConfig { head_size: 192, value_size: Some(128), ..BASE },
        AttentionConfig { head_size: 256, ..BASE },
        AttentionConfig { mask: Mask::Full, queries: 24, keys: 60, ..BASE },
        AttentionConfig { queries: 12, keys: 12, ..BASE },
        AttentionConfig { queries: 0, keys: 0, ..BASE },
        AttentionConfig { queries: 300, keys: 300, head_size: 128, ..BASE },
    ];
    let windows = WINDOWS.into_iter().flat_map(|window| {
        [Mask::Full, Mask::CausalBottomRight].map(|mask| AttentionConfig { window, mask, sink: Sink::Learnable, ..BASE })
    });
    let cases = options.into_iter().chain(windows).flat_map(|config| [Case::new(3, config), Case::new(2, config)]);
    let cases = cases.flat_map(|case| [case.clone(), case.by(Schedule::Gather)]);
    all(cases.flat_map(|case| [case.clone(), contiguous(case)]));
}

#[test]
fn packed_sequences() {
    let lengths = [vec![[7, 12], [4, 12], [0, 0], [24, 24], [1, 12]], vec![[0, 12], [0, 0]], vec![[40, 48]], vec![[12, 12], [12, 12]]];
    let options = [
        BASE,
        AttentionConfig { mask: Mask::Full, ..BASE },
        AttentionConfig { window: WINDOWS[0], mask: Mask::Full, sink: Sink::Learnable, ..BASE },
        AttentionConfig { window: WINDOWS[1], ..BASE },
        AttentionConfig { sink: Sink::OffByOne, soft_cap: Some(3.0), ..BASE },
    ];
    let cases = lengths.into_iter().flat_map(|lengths| {
        let rows = lengths.iter().map(|[_, padded]| padded).sum::<u64>() + 12;
        options.into_iter().flat_map(move |config| {
            let attention = AttentionConfig {
                layout: Layout::Packed,
                batches: lengths.len() as u64,
                queries: rows,
                keys: rows,
                key_heads: 2,
                ..config
            };
            let lengths = lengths.clone();
            [1, 2].into_iter().flat_map(move |ranks| {
                let case = Case { lengths: lengths.clone(), ..Case::new(ranks, attention) };
                let three = Case { ranks: 3, ..case.clone() };
                let traded = [case.clone().by(Schedule::AllToAll), case.clone().by_puts()];
                let schedules = [case.clone(), case.by(Schedule::Gather), three.by(Schedule::Gather)].into_iter().chain(traded);
                schedules.into_iter().flat_map(|case| [contiguous(case.clone()), case])
            })
        })
    });
    all(cases);
}

/// Steps of packed sequences begin and round as those of dense ones: also where the owner of the first or of the last step has no key of a sequence, and a half is done before the other.
#[test]
fn packed_steps_begin_and_round() {
    let lengths = [vec![[1, 12], [12, 12], [0, 0], [5, 12]], vec![[2, 12], [0, 12], [7, 12], [3, 12]]];
    for (ranks, schedule) in [(2, Schedule::Ring), (3, Schedule::Pull)] {
        for (mask, lengths) in [Mask::Full, Mask::CausalBottomRight].into_iter().flat_map(|mask| lengths.iter().map(move |l| (mask, l))) {
            let attention = AttentionConfig { layout: Layout::Packed, batches: 4, queries: 60, keys: 60, heads: 1, mask, ..BASE };
            let case = Case { lengths: lengths.clone(), ..Case::new(ranks, attention).by(schedule) };
            case.run().unwrap();
            // Rank 0 has two halves, of which the early one is done after its own keys: one launch more than steps under a causal mask. A pass that merges all has one a step.
            let found = Ranks::new(&case).unwrap();
            let launches = found.operations::<bf16>().unwrap()[0].plan().forward.launches;
            assert_eq!(launches, ranks + u32::from(mask != Mask::Full), "{case:?}");
        }
    }
}

/// Packed sequences of four and eight ranks: one long, empty, short and padded ones, of each schedule that takes them; in quick runs three of the eight.
#[test]
fn packed_sequences_of_many_ranks() {
    let lengths = vec![[50, 64], [1, 16], [0, 0], [0, 16], [16, 16]];
    let rows = lengths.iter().map(|[_, padded]| padded).sum::<u64>() + 16;
    let cases = [4, 8].into_iter().flat_map(|ranks| {
        let schedules = [Schedule::Ring, Schedule::AllToAll, Schedule::Pull, Schedule::Gather];
        schedules.into_iter().zip([Mask::CausalBottomRight, Mask::Full].into_iter().cycle()).map(move |(schedule, mask)| {
            // Ranks that trade heads have one each.
            let heads = if schedule == Schedule::AllToAll { ranks.into() } else { 2 };
            (ranks, schedule, AttentionConfig { mask, heads, key_heads: heads / 2, ..BASE })
        })
    });
    for (ranks, schedule, config) in cases.step_by(if is_long() { 1 } else { 3 }) {
        let attention = AttentionConfig { layout: Layout::Packed, batches: 5, queries: rows, keys: rows, ..config };
        Case { lengths: lengths.clone(), ..Case::new(ranks, attention).by(schedule) }.run().unwrap();
    }
}

/// Packed sequences whose heads are traded within groups of ranks, and whose keys travel between the groups: 2 by 2, 2 by 3, 3 by 2, 4 by 2 and 2 by 4.
#[test]
fn packed_sequences_of_groups() {
    let options = [
        BASE,
        AttentionConfig { mask: Mask::Full, sink: Sink::Learnable, ..BASE },
        AttentionConfig { window: WINDOWS[0], mask: Mask::Full, soft_cap: Some(3.0), ..BASE },
    ];
    let grids = [(4, 2), (6, 2), (6, 3), (8, 4), (8, 2)];
    let cases = options.into_iter().flat_map(|config| {
        grids.into_iter().map(move |(ranks, inner)| {
            let (unit, size) = (2 * u64::from(ranks), WorldSize::new(inner).unwrap());
            // A long sequence, one of a row, an empty one, padding alone, and rows after the last one.
            let lengths = vec![[3 * unit - 2, 3 * unit], [1, unit], [0, 0], [0, unit], [unit, unit]];
            let (rows, heads) = (7 * unit, 2 * u64::from(inner));
            let attention =
                AttentionConfig { layout: Layout::Packed, batches: 5, queries: rows, keys: rows, heads, key_heads: heads / 2, ..config };
            Case { lengths, ..Case::new(ranks, attention).by(Schedule::Hierarchical { inner: size }) }
        })
    });
    let shared = |case: Case| {
        let attention = AttentionConfig { key_heads: 1, ..case.config.attention };
        Case { config: ContextParallelConfig { attention, ..case.config }, ..case }
    };
    // Each grid, and contiguous parts, whatever is sampled.
    let cases: Vec<_> = cases.flat_map(|case| [case.clone(), contiguous(case.clone()), shared(case)]).collect();
    cases[..if is_long() { 0 } else { 4 }].iter().for_each(|case| case.run().unwrap());
    all(cases);
}
