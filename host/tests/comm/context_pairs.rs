//! Options of context parallelism by pairs: a sample in which each value of an option meets each value of every other one.
//!
//! All options together are some millions of cases. In long runs each schedule has a sample of its own.

use std::collections::BTreeSet;

use oxtile::attention::{AttentionConfig, Layout, Mask, Sink, Window};
use oxtile::comm::WorldSize;
use oxtile::context_parallel::{ContextParallelConfig, Partition, Schedule};
use oxtile::num::f16;

use crate::context_case::Case;
use crate::context_parallel::BASE;
use crate::support::{WORLDS, is_long};

/// An option and one of its values, by their numbers.
type Value = (usize, usize);

/// Choices of a value for each option, so many of each, in which no two clash, and any two that do not are together in one at least, if any choice has them.
/// Another first turn gives other ones.
fn sample(sizes: &[usize], clash: &impl Fn(Value, Value) -> bool, first: usize) -> Vec<Vec<usize>> {
    let mut open = pairs(sizes, clash);
    let mut choices: Vec<Vec<usize>> = Vec::new();
    while let Some(pair) = open.pop_first() {
        let rest: Vec<usize> = (0..sizes.len()).filter(|option| pair.iter().all(|(of, _)| of != option)).collect();
        let turn = first + choices.len();
        let Some(mut values) = completed(pair.to_vec(), &rest, sizes, clash, &open, turn) else { continue };
        values.sort_unstable();
        open.retain(|pair| !pair.iter().all(|value| values.contains(value)));
        choices.push(values.into_iter().map(|(_, value)| value).collect());
    }
    choices
}

/// All pairs of values of two options that do not clash.
fn pairs(sizes: &[usize], clash: &impl Fn(Value, Value) -> bool) -> BTreeSet<[Value; 2]> {
    let values = || sizes.iter().enumerate().flat_map(|(option, size)| (0..*size).map(move |value| (option, value)));
    let all = values().flat_map(|one| values().filter(move |other| one.0 < other.0).map(move |other| [one, other]));
    all.filter(|[one, other]| !clash(*one, *other)).collect()
}

/// Values, with one of each option of the rest: first those that are in most open pairs, of equal ones by turns.
fn completed(
    values: Vec<Value>,
    rest: &[usize],
    sizes: &[usize],
    clash: &impl Fn(Value, Value) -> bool,
    open: &BTreeSet<[Value; 2]>,
    turn: usize,
) -> Option<Vec<Value>> {
    let Some((option, rest)) = rest.split_first() else { return Some(values) };
    let pair = |one: Value, other: Value| [one.min(other), one.max(other)];
    let mut next: Vec<Value> = (0..sizes[*option]).map(|value| (*option, (value + turn) % sizes[*option])).collect();
    next.retain(|value| values.iter().all(|of| !clash(of.min(value).to_owned(), *of.max(value))));
    next.sort_by_key(|value| std::cmp::Reverse(values.iter().filter(|of| open.contains(&pair(**of, *value))).count()));
    next.into_iter().find_map(|value| completed([&values[..], &[value]].concat(), rest, sizes, clash, open, turn))
}

/// What is chosen.
const SCHEDULE: usize = 0;
const WORLD: usize = 1;
const SEQUENCES: usize = 2;
const LAYOUT: usize = 3;
const PARTITION: usize = 4;
const MASK: usize = 5;
const WINDOW: usize = 6;
const SINK: usize = 7;
const SOFT_CAP: usize = 8;
const GROUP: usize = 9;
const HEAD_SIZE: usize = 10;
const ELEMENT: usize = 11;
const MAX_LOGIT: usize = 12;

/// Of how many samples the cheapest one is run.
const SAMPLES: usize = 200;

/// Of each option how many values there are.
const SIZES: [usize; 13] =
    [SCHEDULES.len(), WORLDS.len(), 3, LAYOUTS.len(), 2, MASKS.len(), WINDOWS.len(), 3, 2, GROUPS.len(), HEAD_SIZES.len(), 2, 2];

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum By {
    Ring,
    Pull,
    Gather,
    Heads,
    Puts,
    Groups,
    /// The forward pass in one launch, the backward pass by ring.
    Fused,
    /// Both passes in one launch each.
    BothFused,
    /// The same of packed sequences, without options.
    FusedPacked,
    BothFusedPacked,
}

const SCHEDULES: [By; 10] =
    [By::Ring, By::Pull, By::Gather, By::Heads, By::Puts, By::Groups, By::Fused, By::BothFused, By::FusedPacked, By::BothFusedPacked];
const LAYOUTS: [Layout; 3] = [Layout::Bshd, Layout::Sbhd, Layout::Packed];
const MASKS: [Mask; 3] = [Mask::Full, Mask::CausalTopLeft, Mask::CausalBottomRight];
/// None, and some that are to sequences of up to 80 rows as those of models are to theirs.
const WINDOWS: [Window; 6] = [
    window(None, None),
    window(Some(5), Some(5)),
    window(Some(20), None),
    window(None, Some(9)),
    window(Some(20), Some(0)),
    window(Some(12), Some(12)),
];
const SINKS: [Sink; 3] = [Sink::None, Sink::OffByOne, Sink::Learnable];
/// Query heads of a key head.
const GROUPS: [u64; 3] = [1, 4, 8];
const HEAD_SIZES: [(u64, Option<u64>); 4] = [(64, None), (128, None), (192, Some(128)), (256, None)];

const fn window(left: Option<u64>, right: Option<u64>) -> Window {
    Window { left, right }
}

/// Sequences are as short as can be, longer than that, or have other keys than queries.
const LONGER: usize = 1;
const CROSS: usize = 2;

/// Whether an operation refuses two values together, of which the first is of the earlier option; or there are other tests of them.
fn clash(one: Value, (option, value): Value) -> bool {
    let is_packed = |by: By| matches!(by, By::FusedPacked | By::BothFusedPacked);
    let is_one_launch = |by: By| is_packed(by) || matches!(by, By::Fused | By::BothFused);
    let are_both = |by: By| matches!(by, By::BothFused | By::BothFusedPacked);
    match (one, option) {
        ((SCHEDULE, by), _) => match (SCHEDULES[by], option) {
            (By::Groups, WORLD) => WORLDS[value] < 4,
            (by, WORLD) => are_both(by) && WORLDS[value] > 2,
            // Chunks are whole blocks of 128 keys, of few heads.
            (by, SEQUENCES) if are_both(by) => value == LONGER || value == CROSS,
            (by, GROUP) => are_both(by) && GROUPS[value] > 4,
            // Caps have heads of 128 there.
            (By::BothFused, SOFT_CAP) => value > 0,
            (by, LAYOUT) => is_one_launch(by) && is_packed(by) != (LAYOUTS[value] == Layout::Packed),
            (by, WINDOW | SINK | SOFT_CAP | MAX_LOGIT) => is_packed(by) && value > 0,
            (by, PARTITION) => is_one_launch(by) && value > 0,
            (by, HEAD_SIZE) => is_one_launch(by) && HEAD_SIZES[value].0 > 128,
            (by, SEQUENCES) => is_one_launch(by) && value == CROSS,
            _ => false,
        },
        ((SEQUENCES, CROSS), MASK) => MASKS[value] != Mask::Full,
        _ => false,
    }
}

/// The problem of a choice.
fn case(choice: &[usize]) -> Case {
    let (by, ranks) = (SCHEDULES[choice[SCHEDULE]], WORLDS[choice[WORLD]]);
    let (n, group) = (u64::from(ranks), GROUPS[choice[GROUP]]);
    // Ranks that trade heads share a key head, or have one each.
    let inner = if by == By::Groups { 2 } else { n };
    let key_heads = match by {
        By::Heads | By::Puts | By::Groups if !group.is_multiple_of(inner) => inner,
        _ => 1,
    };
    let unit = 2 * n * if matches!(by, By::BothFused | By::BothFusedPacked) { 128 } else { 1 };
    let long = unit * (20 / n);
    let (lengths, key_lengths) = match choice[SEQUENCES] {
        LONGER => (vec![[long - 3, long], [1, unit], [0, 0], [0, unit], [unit, unit]], None),
        CROSS => (vec![[long - 3, long], [0, unit], [unit, unit]], Some(vec![[unit - 1, unit], [2 * unit, 2 * unit], [0, unit]])),
        _ => (vec![[unit - 1, unit], [0, 0]], None),
    };
    let is_packed = LAYOUTS[choice[LAYOUT]] == Layout::Packed;
    let [queries, keys] = match choice[SEQUENCES] {
        // As much room for queries as for keys, which are fewer.
        _ if is_packed => [lengths.iter().map(|[_, all]| all).sum::<u64>() + unit; 2],
        LONGER => [long; 2],
        CROSS => [unit, long],
        _ => [unit; 2],
    };
    let (head_size, value_size) = HEAD_SIZES[choice[HEAD_SIZE]];
    let attention = AttentionConfig {
        layout: LAYOUTS[choice[LAYOUT]],
        batches: if is_packed { lengths.len() as u64 } else { 1 + u64::from(group == 1) },
        queries,
        keys,
        heads: key_heads * group,
        key_heads,
        head_size,
        value_size,
        mask: MASKS[choice[MASK]],
        window: WINDOWS[choice[WINDOW]],
        sink: SINKS[choice[SINK]],
        soft_cap: (choice[SOFT_CAP] == 1).then_some(3.0),
        max_logit: choice[MAX_LOGIT] == 1,
        ..BASE
    };
    let case = Case { lengths, key_lengths, ..Case::new(ranks, attention) };
    let case = match by {
        By::Ring => case,
        By::Pull => case.by(Schedule::Pull),
        By::Gather => case.by(Schedule::Gather),
        By::Heads => case.by(Schedule::AllToAll),
        By::Puts => case.by_puts(),
        By::Groups => case.by(Schedule::Hierarchical { inner: WorldSize::new(2).unwrap() }),
        By::Fused | By::FusedPacked => case.fused(),
        By::BothFused | By::BothFusedPacked => case.by(Schedule::Fused),
    };
    let partition = [Partition::Zigzag, Partition::Contiguous][choice[PARTITION]];
    Case { config: ContextParallelConfig { partition, ..case.config }, ..case }
}

/// Runs a choice; what it fails with.
fn failed(choice: &[usize]) -> Option<String> {
    let case = case(choice);
    let run = || match choice[ELEMENT] {
        0 => case.run().map_err(|error| error.to_string()),
        _ => {
            let whole = case.whole();
            let expected = whole.solve();
            let found = case.results_in::<f16>(&whole).map_err(|error| error.to_string())?;
            case.world().ranks().zip(found).for_each(|(rank, found)| case.compare_within(rank, &found, &expected, 2e-3));
            Ok(())
        }
    };
    match std::panic::catch_unwind(std::panic::AssertUnwindSafe(run)) {
        Ok(done) => done.err().map(|error| format!("{case:?}: {error}")),
        Err(panic) => Some(panic.downcast_ref::<String>().cloned().unwrap_or_else(|| format!("{case:?}: a panic"))),
    }
}

/// What a choice costs, roughly: launches on all ranks, of so many heads and sequences.
fn cost(choice: &[usize]) -> u64 {
    let AttentionConfig { heads, batches, head_size, .. } = case(choice).config.attention;
    let n = u64::from(WORLDS[choice[WORLD]]);
    let launches = match SCHEDULES[choice[SCHEDULE]] {
        By::Ring | By::Pull | By::Fused | By::FusedPacked => n * n,
        By::Groups => n * n / 4,
        By::Gather | By::BothFused | By::BothFusedPacked => n,
        By::Heads | By::Puts => 1,
    };
    launches * heads * batches * head_size * head_size
}

/// The cheapest of some samples.
fn quick() -> Vec<Vec<usize>> {
    let samples = (0..SAMPLES).map(|first| sample(&SIZES, &clash, first));
    samples.min_by_key(|choices| choices.iter().map(|choice| cost(choice)).sum::<u64>()).expect("some samples")
}

#[test]
fn every_pair_of_values_is_in_the_sample() {
    let choices = quick();
    for [one, other] in pairs(&SIZES, &clash) {
        let has = |choice: &Vec<usize>, (option, value): Value| choice[option] == value;
        assert!(choices.iter().any(|choice| has(choice, one) && has(choice, other)), "{one:?} and {other:?} are in no choice");
    }
    for choice in &choices {
        let values: Vec<Value> = choice.iter().copied().enumerate().collect();
        let clashes = values.iter().flat_map(|one| values.iter().map(move |other| (*one, *other))).filter(|(one, other)| one.0 < other.0);
        assert!(clashes.into_iter().all(|(one, other)| !clash(one, other)), "{choice:?}");
    }
}

#[test]
fn every_pair_of_options() {
    let of_schedule = |by: usize| {
        let is_other = move |(option, value): Value| option == SCHEDULE && value != by;
        sample(&SIZES, &|one, other| is_other(one) || is_other(other) || clash(one, other), 0)
    };
    let choices = if is_long() { (0..SIZES[SCHEDULE]).flat_map(of_schedule).collect() } else { quick() };
    let failed: Vec<_> = choices.iter().filter_map(|choice| failed(choice)).collect();
    assert!(failed.is_empty(), "{} of {} failed\n{}", failed.len(), choices.len(), failed.join("\n"));
}
