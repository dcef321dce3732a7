//! Attention of 8 bits of packed sequences, and with options, against f64: rows of no sequence hold NaN, so that none of them is used, what the kernel does
//! not write is seen, and what windows leave out is seen key by key.

use oxtile::attention::{Attention, AttentionConfig, Inputs, Layout, Mask, Outputs, Padding, Scales, Sequences, Sink, Window};
use oxtile::{Buffer, Kind, Runtime};
use oxtile_tests::inputs::Random;
use oxtile_tests::oracle::attention_fp8::head_with_rounded_weights;
use oxtile_tests::oracle::attention_head::Head;
use oxtile_tests::oracle::formats::{BF16, E4M3};
use oxtile_tile::num::{bf16, e4m3};

use super::attention_fp8::HALF_UNIT;
use super::attention_general::{Found, Tensors, UNTOUCHED, UNTOUCHED_SUM};
use super::attention_problem::{Place, Problem};
use crate::case::{Case, Outcome, Size, agrees, stream, text};

/// Half a unit of weights that are subnormal, of the largest weight.
const SUBNORMAL: f64 = 1.0 / (1 << 14) as f64;

const MASKS: [(&str, Mask); 3] = [("full", Mask::Full), ("top_left", Mask::CausalTopLeft), ("bottom_right", Mask::CausalBottomRight)];

/// Queries and keys: nothing to see, nothing that sees, blocks of keys that are whole, cut after each of their thirds, and by one more or less; more tiles than one.
const LENGTHS: [[usize; 2]; 13] =
    [[0, 5], [1, 0], [1, 1], [95, 96], [96, 95], [97, 193], [193, 97], [0, 0], [20, 64], [33, 128], [200, 40], [7, 290], [65, 65]];

/// Some for the race detector: more blocks of keys than stages, a tile that is cut, nothing to see.
const FEW: [[usize; 2]; 4] = [[40, 290], [0, 3], [5, 0], [70, 97]];

pub fn cases() -> Vec<Case> {
    let mut cases = Vec::new();
    for head_size in [64, 128] {
        let base = AttentionConfig { heads: 2, head_size, ..AttentionConfig::default() };
        packed(&mut cases, AttentionConfig { layout: Layout::Packed, ..base });
        options(&mut cases, base);
    }
    cases
}

/// Sequences one after the other, with `gap` rows between them.
fn apart(lengths: &[[usize; 2]], gap: usize) -> Vec<[[usize; 2]; 2]> {
    let mut at = [gap; 2];
    let mut place = |side: usize, rows: usize| {
        at[side] += rows + gap;
        [at[side] - rows - gap, rows]
    };
    lengths.iter().map(|&[queries, keys]| [place(0, queries), place(1, keys)]).collect()
}

fn packed(cases: &mut Vec<Case>, base: AttentionConfig) {
    for (mask_name, mask) in MASKS {
        let config = AttentionConfig { mask, ..base };
        let mut push = |name: &str, problem: Problem, size| push(cases, &format!("packed::{mask_name}::{name}"), problem, size);
        let size = if mask == Mask::CausalTopLeft { Size::Large } else { Size::Small };
        push("few", Problem::packed(config, apart(&FEW, 3)), size);
        let problem = Problem::packed(config, apart(&LENGTHS, 0));
        push("tight", problem.clone(), Size::Large);
        push("tight::visible", visible(problem), Size::Large);
        push("padded", Problem::packed(AttentionConfig { heads: 4, key_heads: 2, ..config }, apart(&LENGTHS, 7)), Size::Large);
        push("padded::kept", Problem { padding: Padding::Kept, ..Problem::packed(config, apart(&LENGTHS, 5)) }, Size::Large);
        // Blocks enough that maxima are no longer looked for, and some that rise even there.
        let long = AttentionConfig { heads: 1, scale: Some(1.0), ..config };
        push("rising", Problem::packed(long, apart(&[[40, 1100], [100, 700]], 5)), Size::Large);
        // A sequence whose tiles are all padding, and two chunks that see the same keys and begin in any order.
        let padding = vec![[[3, 60], [1, 70]], [[200, 0], [90, 4]], [[440, 1], [100, 0]], [[450, 20], [101, 30]]];
        push("long padding", Problem::packed(config, padding), Size::Large);
        let pair = Problem::packed(config, vec![[[240, 30], [0, 150]], [[0, 230], [0, 60]]]);
        push("pair", Problem { padding: Padding::Kept, ..pair }, Size::Large);
        // More tiles than a GPU has multiprocessors.
        let mut random = Random::new(base.head_size);
        let lengths: Vec<_> = (0..24).map(|_| [random.below(900) as usize, random.below(1300) as usize]).collect();
        let waves = AttentionConfig { heads: 8, key_heads: 2, ..config };
        push("waves", Problem::packed(waves, apart(&lengths, 1)), Size::Waves);
    }
    // A block passes over many sequences, most of them without tiles, on its way to its next tile.
    let short: Vec<_> = (0..2048).map(|i| [if i % 16 < 2 { i / 16 % 4 } else { 0 }, i / 64 % 4]).collect();
    push(cases, "packed::thousands", Problem::packed(AttentionConfig { heads: 1, ..base }, apart(&short, 0)), Size::Large);
}

fn options(cases: &mut Vec<Case>, base: AttentionConfig) {
    let window = |left, right| Window { left, right };
    // Every side of the window, with bounds inside a block of keys, between blocks, over several; rows that see nothing.
    let windows = [
        ("left", Mask::Full, window(Some(5), None)),
        ("right", Mask::Full, window(None, Some(3))),
        ("band", Mask::Full, window(Some(130), Some(0))),
        ("nothing", Mask::CausalTopLeft, window(Some(0), None)),
        ("bottom_right", Mask::CausalBottomRight, window(Some(300), Some(9))),
    ];
    let packed = AttentionConfig { layout: Layout::Packed, ..base };
    for (name, mask, window) in windows {
        let size = if name == "band" { Size::Small } else { Size::Large };
        for ([queries, keys], size) in [([70, 300], size), ([250, 60], Size::Large), ([250, 440], Size::Large)] {
            let config = AttentionConfig { queries, keys, mask, window, heads: 1, ..base };
            let name = format!("window::{name}::{queries}x{keys}");
            push(cases, &name, Problem::dense(config), size);
            push(cases, &format!("{name}::visible"), visible(Problem::dense(config)), Size::Large);
        }
        let problem = Problem::packed(AttentionConfig { mask, window, ..packed }, apart(&LENGTHS, 2));
        push(cases, &format!("window::{name}::packed"), problem.clone(), Size::Large);
        push(cases, &format!("window::{name}::packed::visible"), visible(problem.clone()), Size::Large);
        // Keys count as if the last query were aligned with an earlier key, or a later one.
        for ahead in [-40, 25] {
            let diagonals = LENGTHS.iter().map(|&[queries, keys]| keys as i32 - queries as i32 + ahead).collect();
            let config = AttentionConfig { diagonals: true, ..problem.config };
            let problem = Problem { config, diagonals, ..problem.clone() };
            push(cases, &format!("window::{name}::diagonals::{ahead}"), problem, Size::Large);
        }
    }
    let shape = AttentionConfig { queries: 67, keys: 240, ..base };
    let mut dense = |name: &str, config: AttentionConfig, size| push(cases, name, Problem::dense(config), size);
    dense("cap", AttentionConfig { soft_cap: Some(2.0), scale: Some(0.5), ..shape }, Size::Small);
    dense("cap::causal", AttentionConfig { soft_cap: Some(30.0), mask: Mask::CausalBottomRight, ..shape }, Size::Large);
    dense("sink::one", AttentionConfig { sink: Sink::OffByOne, ..shape }, Size::Large);
    dense("sink::learnable", AttentionConfig { sink: Sink::Learnable, mask: Mask::CausalTopLeft, ..shape }, Size::Large);
    dense("sink::nothing seen", AttentionConfig { sink: Sink::Learnable, keys: 0, ..shape }, Size::Large);
    for layout in [Layout::Bshd, Layout::Sbhd] {
        let config = AttentionConfig { layout, batches: 3, heads: 4, key_heads: 2, queries: 40, keys: 110, ..base };
        dense(&format!("{layout:?}"), AttentionConfig { sink: Sink::OffByOne, ..config }, Size::Large);
    }
    let far = Problem::dense(AttentionConfig { sink: Sink::Learnable, keys: 900, ..shape });
    cases.push(Case::new(format!("attention_fp8::d{}::sink::far above", base.head_size), Size::Large, move |runtime| {
        far_sink(runtime, &far)
    }));
    let all = AttentionConfig {
        window: Window { left: Some(100), right: Some(7) },
        soft_cap: Some(5.0),
        sink: Sink::Learnable,
        heads: 4,
        key_heads: 2,
        ..packed
    };
    push(cases, "all", Problem::packed(all, apart(&FEW, 3)), Size::Small);
    push(cases, "all::kept", Problem { padding: Padding::Kept, ..Problem::packed(all, apart(&LENGTHS, 3)) }, Size::Large);
    let waves = AttentionConfig { batches: 2, heads: 8, key_heads: 1, queries: 1100, keys: 1300, ..base };
    push(cases, "waves", Problem::dense(AttentionConfig { window: all.window, soft_cap: Some(5.0), ..waves }), Size::Waves);
}

/// The same of one head whose values name their keys, so that each that counts is seen.
fn visible(problem: Problem) -> Problem {
    Problem { one_hot: true, config: AttentionConfig { heads: 1, key_heads: 1, ..problem.config }, ..problem }
}

fn push(cases: &mut Vec<Case>, name: &str, problem: Problem, size: Size) {
    let name = format!("attention_fp8::d{}::{name}", problem.config.head_size);
    cases.push(Case::new(name, size, move |runtime| check(runtime, &problem)));
}

/// What elements of queries, keys and values are worth, of each head.
struct Worth([Vec<f32>; 3]);

impl Worth {
    /// Small fractions, so that products with e4m3 numbers are exact: one for all keys, one for each other head. Ones where values name their keys.
    fn of(config: &AttentionConfig, one_hot: bool) -> Self {
        let mut random = Random::new(config.queries);
        let counts = [config.heads, config.key_heads, config.key_heads];
        Self(counts.map(|count| (0..count).map(|_| if one_hot { 1.0 } else { (4 + random.below(8)) as f32 / 8.0 }).collect()))
    }

    fn get(&self, tensor: usize, head: usize) -> f64 {
        let scales = &self.0[tensor];
        f64::from(scales[head % scales.len()])
    }
}

/// What the kernel makes of values that are exact in e4m3.
fn run(runtime: &Runtime, problem: &Problem, tensors: &Tensors, worth: &Worth) -> Result<Found, String> {
    let stream = stream(runtime)?;
    let AttentionConfig { layout, sink, head_size, .. } = problem.config;
    let encode = |&x: &f32| e4m3::from_bits(if x.is_nan() { 0x7f } else { E4M3.encode(x.into()) as u8 });
    let upload = |values: &[f32]| text(Buffer::from_slice(&stream, &values.iter().map(encode).collect::<Vec<_>>()));
    let (q, k, v) = (upload(&tensors.q)?, upload(&tensors.k)?, upload(&tensors.v)?);
    let numbers = |values: &[f32]| text(Buffer::from_slice(&stream, values));
    let [q_scale, k_scale, v_scale] = [numbers(&worth.0[0])?, numbers(&worth.0[1])?, numbers(&worth.0[2])?];
    let sink_scores = numbers(&tensors.sink)?;
    let array = |values: Vec<u32>| text(Buffer::from_slice(&stream, &values));
    let [queries, keys, query_offsets, key_offsets] = problem.arrays();
    let arrays = [array(queries)?, array(keys)?, array(query_offsets)?, array(key_offsets)?];
    let diagonals = text(Buffer::from_slice(&stream, &problem.diagonals))?;
    let sequences = (layout == Layout::Packed).then(|| Sequences {
        cu_seqlens_q_padded: Some(arrays[2].view()),
        cu_seqlens_kv_padded: Some(arrays[3].view()),
        diagonals: problem.config.diagonals.then(|| diagonals.view()),
        padding: problem.padding,
        ..Sequences::new(arrays[0].view(), arrays[1].view())
    });
    let mut out = text(Buffer::from_slice(&stream, &vec![bf16::from_bits(BF16.encode(UNTOUCHED.into()) as u16); q.len() as usize]))?;
    let mut log_sum_exp = text(Buffer::from_slice(&stream, &vec![UNTOUCHED_SUM; (q.len() / head_size) as usize]))?;
    let attention = text(Attention::<e4m3>::new(runtime, problem.config))?;
    let mut attend = |runs: u32| {
        let inputs = Inputs {
            sequences,
            sink: (sink == Sink::Learnable).then(|| sink_scores.view()),
            scales: Some(Scales { q: q_scale.view(), k: k_scale.view(), v: v_scale.view() }),
            ..Inputs::new(q.view(), k.view(), v.view())
        };
        let mut bound = text(attention.bind(&stream, inputs, Outputs::new(out.view_mut(), log_sum_exp.view_mut())))?;
        for _ in 0..runs {
            text(bound.run(&stream))?;
        }
        drop(bound);
        Ok::<_, String>((text(out.to_vec(&stream))?, text(log_sum_exp.to_vec(&stream))?))
    };
    // The second run finds the counter as the first left it.
    let found = attend(2)?;
    let bits = |(out, sums): &(Vec<bf16>, Vec<f32>)| -> Vec<u32> {
        out.iter().map(|x| x.to_bits().into()).chain(sums.iter().map(|x| x.to_bits())).collect()
    };
    if runtime.kind() == Kind::Cuda && bits(&attend(1)?) != bits(&found) {
        return Err("another run gives other bits".to_owned());
    }
    let (out, log_sum_exp) = found;
    let out = out.into_iter().map(|x| BF16.decode(x.to_bits().into())).collect();
    Ok(Found { out, log_sum_exp, max_logit: Vec::new() })
}

/// What f64 makes of a head of a sequence, whose diagonal may be given.
fn head(problem: &Problem, batch: usize, sink: Option<f64>) -> Head {
    let head = problem.head(batch, sink);
    let Some(&diagonal) = problem.diagonals.get(batch) else { return head };
    let ahead = i64::from(diagonal) - (head.rows[1] as i64 - head.rows[0] as i64);
    Head { window: [head.window[0].map(|left| left - ahead), head.window[1].map(|right| right + ahead)], ..head }
}

/// A sink whose weight is 2^17 times that of a usual key, which would round the keys' to nothing if it scaled them.
fn far_sink(runtime: &Runtime, problem: &Problem) -> Outcome {
    let (mut tensors, worth) = (problem.tensors_in(&E4M3, 0), Worth::of(&problem.config, false));
    tensors.sink.fill(12.0);
    compare(problem, &tensors, &worth, &run(runtime, problem, &tensors, &worth)?, runtime.kind())
}

fn check(runtime: &Runtime, problem: &Problem) -> Outcome {
    let lengths = (0..problem.config.batches as usize).map(|batch| problem.lengths(batch)[1]);
    let keys = if problem.one_hot { lengths.max().unwrap_or(0).max(1) } else { 1 };
    for first_key in (0..keys).step_by(problem.config.head_size as usize) {
        let (tensors, worth) = (problem.tensors_in(&E4M3, first_key), Worth::of(&problem.config, problem.one_hot));
        compare(problem, &tensors, &worth, &run(runtime, problem, &tensors, &worth)?, runtime.kind())?;
    }
    Ok(())
}

fn compare(problem: &Problem, tensors: &Tensors, worth: &Worth, found: &Found, kind: Kind) -> Outcome {
    let AttentionConfig { heads, key_heads, head_size, sink, batches, .. } = problem.config;
    let [heads, key_heads, size] = [heads, key_heads, head_size].map(|n| n as usize);
    let (mut seen, mut squares, mut elements) = (vec![false; found.out.len()], [0.0; 3], 0);
    for (batch, head_number) in (0..batches as usize).flat_map(|batch| (0..heads).map(move |head| (batch, head))) {
        let sink = match sink {
            Sink::None => None,
            Sink::OffByOne => Some(0.0),
            Sink::Learnable => Some(f64::from(tensors.sink[head_number])),
        };
        let (of_q, of_k) = (problem.place(batch, 0, heads, size), problem.place(batch, 1, key_heads, size));
        let key_head = head_number * key_heads / heads;
        let of = |tensor: usize, values: &[f32], place: Place, head: usize, row: usize, element: usize| {
            f64::from(values[place.at(row, head, element)]) * worth.get(tensor, head)
        };
        let q = |i, l| of(0, &tensors.q, of_q, head_number, i, l);
        let (k, v) = (|j, l| of(1, &tensors.k, of_k, key_head, j, l), |j, l| of(2, &tensors.v, of_k, key_head, j, l));
        let head = head(problem, batch, sink);
        let (expected, rounded) = (head.attend(q, k, v), head_with_rounded_weights(&head, q, k, v));
        let place = format!("sequence {batch}, head {head_number}");
        for (i, &value) in expected.log_sum_exp.iter().enumerate() {
            let found = f64::from(found.log_sum_exp[problem.statistics(batch, head_number) + i]);
            // Scores are summed by the tensor cores with fewer bits than f32 has, which the emulator does not imitate.
            let bound = if kind == Kind::Cuda { 6e-3 } else { 1e-5 };
            if !agrees(found, value, bound * value.abs().max(1.0)) {
                return Err(format!("{place}: log_sum_exp[{i}] is {found}, expected {value}"));
            }
        }
        for (i, &value) in expected.out.iter().enumerate() {
            let at = of_q.at(i / size, head_number, i % size);
            seen[at] = true;
            // A weight is off by at most 1/16 of itself, or, if it is below 2^-10 of the largest, by half a unit of subnormal numbers, 2^-14 of that; of
            // such weights few are off in one direction. Those of equal scores are exact.
            let bound = match problem.one_hot {
                true => 2.0 * HALF_UNIT * value,
                false => (1.0 / 16.0 + 4e-3) * expected.magnitudes[i] + HALF_UNIT * value.abs() + 4.0 * SUBNORMAL,
            };
            if !agrees(found.out[at], value, bound) {
                let (row, column) = (i / size, i % size);
                return Err(format!("{place}, row {row}, column {column} is {}, expected {value} within {bound}", found.out[at]));
            }
            let terms = [found.out[at] - value, rounded[i] - value, value];
            squares = std::array::from_fn(|number| squares[number] + terms[number].powi(2));
            elements += 1;
        }
    }
    problem.check_rest(found, &seen)?;
    let [mine, least, norm] = squares.map(f64::sqrt);
    // Few elements round by chance.
    let allowed = if elements > 100_000 { 1.1 } else { 1.5 };
    let bound = allowed * least.hypot(0.6 * HALF_UNIT * norm);
    if problem.one_hot || mine <= bound {
        return Ok(());
    }
    Err(format!("relative Frobenius error {:.3e}, where rounded weights alone lose {:.3e}", mine / norm, least / norm))
}
