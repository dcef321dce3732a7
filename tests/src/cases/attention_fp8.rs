//! Attention of 8 bits: masks element by element with values that name their key, the whole against the least that rounded
//! weights can lose.

use oxtile::attention::{Attention, AttentionConfig, Inputs, Layout, Mask, Output, Outputs, Scales};
use oxtile::{Buffer, Error, Kind, Runtime};
use oxtile_tests::inputs::Random;
use oxtile_tests::oracle::attention::{Problem, attention};
use oxtile_tests::oracle::attention_fp8::with_rounded_weights;
use oxtile_tests::oracle::formats::{BF16, E4M3};
use oxtile_tile::num::{bf16, e4m3};

use super::attention::checked;
use super::attention_problem::Row;
use crate::case::{Case, Outcome, Size, agrees, stream, text};

/// Queries and keys: nothing to see, one tile and parts of it, edges on either side, several blocks of keys.
const LENGTHS: [[u64; 2]; 5] = [[1, 1], [3, 0], [65, 130], [200, 65], [129, 257]];
/// The last block is cut where all its keys are worth a multiplication of their own: alone, after one, after two; and one that is whole.
const CUT: [[u64; 2]; 5] = [[40, 32], [65, 128], [129, 256], [20, 64], [40, 96]];
const MASKS: [(&str, Mask); 3] = [("full", Mask::Full), ("top_left", Mask::CausalTopLeft), ("bottom_right", Mask::CausalBottomRight)];

/// Half a unit of bf16, relative.
pub(super) const HALF_UNIT: f64 = 1.0 / 256.0;

pub fn cases() -> Vec<Case> {
    let mut cases = Vec::new();
    for head_size in [64, 128] {
        for (mask_name, mask) in MASKS {
            let one = AttentionConfig { head_size, mask, ..AttentionConfig::default() };
            for [queries, keys] in LENGTHS {
                // The race detector looks at each kernel, on several tiles and steps.
                let size = if [queries, keys] == [129, 257] { checked(mask) } else { Size::Large };
                random(&mut cases, mask_name, AttentionConfig { queries, keys, ..one }, size);
            }
            if mask == Mask::Full {
                for [queries, keys] in CUT {
                    let size = if keys == 256 { checked(mask) } else { Size::Large };
                    random(&mut cases, mask_name, AttentionConfig { queries, keys, ..one }, size);
                }
            }
            let waves = AttentionConfig { batches: 2, heads: 8, key_heads: 1, queries: 1100, keys: 1300, ..one };
            random(&mut cases, mask_name, waves, Size::Waves);
            if head_size == 64 {
                continue;
            }
            let config = AttentionConfig { queries: 129, keys: 257, ..one };
            let name = format!("attention_fp8::d{head_size}::{mask_name}::visible");
            cases.push(Case::new(name, Size::Large, move |r| visible(r, &config)));
            // Maxima that rise from block to block.
            random(&mut cases, mask_name, AttentionConfig { queries: 40, keys: 290, scale: Some(1.0), ..one }, Size::Large);
            // Blocks enough that they are no longer looked for, and some that rise even there.
            random(&mut cases, mask_name, AttentionConfig { queries: 40, keys: 1100, scale: Some(1.0), ..one }, Size::Large);
            let grouped = AttentionConfig { batches: 2, heads: 4, key_heads: 2, queries: 70, keys: 140, ..one };
            random(&mut cases, mask_name, grouped, checked(mask));
            let size = if mask == Mask::CausalBottomRight { Size::Small } else { Size::Large };
            let sbhd = AttentionConfig { layout: Layout::Sbhd, ..grouped };
            cases.push(Case::new(format!("attention_fp8::d{head_size}::{mask_name}::sbhd"), size, move |r| check(r, &sbhd, None)));
            for (name, row) in [("query", Row::Query(37)), ("key", Row::Key(60))] {
                let name = format!("attention_fp8::d{head_size}::{mask_name}::nan {name}");
                cases.push(Case::new(name, Size::Large, move |r| check(r, &grouped, Some(row))));
            }
            // Queries that see no key get zeros, whatever the values are.
            if mask == Mask::CausalBottomRight {
                let few = AttentionConfig { queries: 140, keys: 70, ..grouped };
                let name = format!("attention_fp8::d{head_size}::{mask_name}::nan value");
                cases.push(Case::new(name, Size::Large, move |r| check(r, &few, Some(Row::Value(0)))));
            }
        }
    }
    cases.push(Case::new("attention_fp8::refused", Size::Small, refused));
    cases
}

fn random(cases: &mut Vec<Case>, mask: &str, config: AttentionConfig, size: Size) {
    let AttentionConfig { batches, queries, keys, heads, key_heads, head_size, .. } = config;
    let name = format!("attention_fp8::d{head_size}::{mask}::{batches}x{queries}x{keys}x{heads}x{key_heads}");
    cases.push(Case::new(name, size, move |r| check(r, &config, None)));
}

/// The same for the oracle.
fn problem(config: &AttentionConfig) -> Problem {
    let AttentionConfig { batches, queries, keys, heads, key_heads, head_size, mask, scale, .. } = *config;
    Problem {
        batches: batches as usize,
        queries: queries as usize,
        keys: keys as usize,
        heads: heads as usize,
        key_heads: key_heads as usize,
        head_size: head_size as usize,
        diagonal: match mask {
            Mask::Full => None,
            Mask::CausalTopLeft => Some(0),
            Mask::CausalBottomRight => Some(keys as i64 - queries as i64),
        },
        scale: scale.map_or(1.0 / (head_size as f64).sqrt(), f64::from),
    }
}

/// What the kernel makes of values that are exact in e4m3.
fn attend(runtime: &Runtime, config: &AttentionConfig, inputs: [&[f32]; 3], scales: [&[f32]; 3]) -> Result<(Vec<f64>, Vec<f32>), String> {
    let stream = stream(runtime)?;
    let AttentionConfig { batches, queries, keys, .. } = *config;
    let encode = |&x: &f32| e4m3::from_bits(if x.is_nan() { 0x7f } else { E4M3.encode(x.into()) as u8 });
    let upload = |values: &[f32], rows: u64| {
        let values: Vec<e4m3> = values.iter().map(encode).collect();
        text(Buffer::from_slice(&stream, &if config.layout == Layout::Sbhd { turned(&values, batches, rows) } else { values }))
    };
    let [q, k, v] = [upload(inputs[0], queries), upload(inputs[1], keys), upload(inputs[2], keys)];
    let (q, k, v) = (q?, k?, v?);
    let [q_scale, k_scale, v_scale] = scales.map(|values| text(Buffer::from_slice(&stream, values)));
    let (q_scale, k_scale, v_scale) = (q_scale?, k_scale?, v_scale?);
    // What is not written is seen.
    let mut out = text(Buffer::from_slice(&stream, &vec![bf16::from_bits(0x7bff); q.len() as usize]))?;
    let rows = (config.batches * config.heads * config.queries) as usize;
    let mut log_sum_exp = text(Buffer::from_slice(&stream, &vec![f32::NAN; rows]))?;
    let attention = text(Attention::<e4m3>::new(runtime, *config))?;
    let scales = Some(Scales { q: q_scale.view(), k: k_scale.view(), v: v_scale.view() });
    let outputs = Outputs::new(out.view_mut(), log_sum_exp.view_mut());
    let mut bound = text(attention.bind(&stream, Inputs { scales, ..Inputs::new(q.view(), k.view(), v.view()) }, outputs))?;
    text(bound.run(&stream))?;
    if config.heads > 1 {
        // The second run finds the tile counter as the first left it.
        text(bound.run(&stream))?;
    }
    drop(bound);
    let out: Vec<f64> = text(out.to_vec(&stream))?.into_iter().map(|x| BF16.decode(x.to_bits().into())).collect();
    let out = if config.layout == Layout::Sbhd { turned(&out, queries, batches) } else { out };
    Ok((out, text(log_sum_exp.to_vec(&stream))?))
}

/// `[rows, columns]` of equal parts as `[columns, rows]`.
fn turned<T: Copy>(values: &[T], rows: u64, columns: u64) -> Vec<T> {
    let (rows, columns) = (rows as usize, columns as usize);
    let part = values.len() / (rows * columns).max(1);
    let parts = (0..columns).flat_map(|column| (0..rows).map(move |row| row * columns + column));
    parts.flat_map(|at| values[at * part..(at + 1) * part].iter().copied()).collect()
}

/// Random values of random scales, which are small fractions, so that their products with e4m3 numbers are exact; of the first batch a row
/// that is NaN, if one is given.
fn check(runtime: &Runtime, config: &AttentionConfig, nan: Option<Row>) -> Outcome {
    let problem = problem(config);
    let mut random = Random::new(config.queries * 1000 + config.keys + config.head_size);
    let Problem { batches, queries, keys, heads, key_heads, head_size, .. } = problem;
    let mut values = |count: usize| -> Vec<f32> { (0..count).map(|_| E4M3.round(random.normal().into()) as f32).collect() };
    let (mut q, mut k, mut v) = (
        values(batches * queries * heads * head_size),
        values(batches * keys * key_heads * head_size),
        values(batches * keys * key_heads * head_size),
    );
    match nan {
        Some(Row::Query(row)) => q[row * heads * head_size..(row + 1) * heads * head_size].fill(f32::NAN),
        Some(Row::Key(row)) => k[row * key_heads * head_size..(row + 1) * key_heads * head_size].fill(f32::NAN),
        Some(Row::Value(row)) => v[row * key_heads * head_size..(row + 1) * key_heads * head_size].fill(f32::NAN),
        None => {}
    }
    let mut scales = |count: usize| -> Vec<f32> { (0..count).map(|_| (4 + random.below(8)) as f32 / 8.0).collect() };
    let (q_scale, k_scale, v_scale) = (scales(heads), scales(1), scales(key_heads));
    let worth = |values: &[f32], scales: &[f32]| -> Vec<f32> {
        values.chunks(head_size).enumerate().flat_map(|(at, row)| row.iter().map(move |x| x * scales[at % scales.len()])).collect()
    };
    let [real_q, real_k, real_v] = [worth(&q, &q_scale), worth(&k, &k_scale), worth(&v, &v_scale)];
    let expected = attention(&problem, &real_q, &real_k, &real_v);
    let rounded = with_rounded_weights(&problem, &real_q, &real_k, &real_v);
    let (out, log_sum_exp) = attend(runtime, config, [&q, &k, &v], [&q_scale, &k_scale, &v_scale])?;
    for (i, (&found, &value)) in log_sum_exp.iter().zip(&expected.log_sum_exp).enumerate() {
        // Scores are summed by the tensor cores with fewer bits than f32 has, which the emulator does not imitate.
        let bound = if runtime.kind() == Kind::Cuda { 6e-3 } else { 1e-5 };
        if !agrees(f64::from(found), value, bound * value.abs().max(1.0)) {
            return Err(format!("log_sum_exp[{i}] is {found}, expected {value}"));
        }
    }
    for (i, (&found, &value)) in out.iter().zip(&expected.out).enumerate() {
        // A weight is off by at most 1/16 of itself, or by half a unit of what is subnormal.
        let bound = (1.0 / 16.0 + 4e-3) * expected.magnitudes[i] + HALF_UNIT * value.abs() + 1e-4;
        if !agrees(found, value, bound) {
            return Err(format!("out[{i}] is {found}, expected {value} within {bound}"));
        }
    }
    if nan.is_some() {
        return Ok(());
    }
    let error = |found: &[f64]| {
        let squares = |values: &mut dyn Iterator<Item = f64>| values.map(|x| x * x).sum::<f64>();
        let norm = squares(&mut expected.out.iter().copied());
        if norm == 0.0 { 0.0 } else { (squares(&mut found.iter().zip(&expected.out).map(|(a, b)| a - b)) / norm).sqrt() }
    };
    let (mine, least) = (error(&out), error(&rounded));
    // Few elements round by chance.
    let allowed = if out.len() > 100_000 { 1.1 } else { 1.5 };
    let bound = allowed * least.hypot(0.6 * HALF_UNIT);
    if mine <= bound { Ok(()) } else { Err(format!("relative Frobenius error {mine:.3e}, where rounded weights alone lose {least:.3e}")) }
}

/// One key after the other is given a value of 1 in a column of its own, and all scores are equal: the columns of a row
/// that are not zero are the keys that its query sees.
fn visible(runtime: &Runtime, config: &AttentionConfig) -> Outcome {
    let problem = problem(config);
    let Problem { queries, keys, head_size, .. } = problem;
    for first in (0..keys.max(1)).step_by(head_size) {
        let mut v = vec![0.0; keys * head_size];
        for (column, key) in (first..keys.min(first + head_size)).enumerate() {
            v[key * head_size + column] = 1.0;
        }
        let inputs = [&vec![0.0; queries * head_size][..], &vec![0.0; keys * head_size], &v];
        let (out, _) = attend(runtime, config, inputs, [&[1.0]; 3])?;
        for (at, &found) in out.iter().enumerate() {
            let (query, key) = (at / head_size, first + at % head_size);
            let seen = (0..keys).filter(|&key| problem.sees(query, key)).count();
            let value = if key < keys && problem.sees(query, key) { 1.0 / seen as f64 } else { 0.0 };
            if (found - value).abs() > 2.0 * HALF_UNIT * value {
                return Err(format!("query {query} gives key {key} the weight {found}, expected {value}"));
            }
        }
    }
    Ok(())
}

fn refused(runtime: &Runtime) -> Outcome {
    let good = AttentionConfig { queries: 8, keys: 8, heads: 4, key_heads: 2, head_size: 64, ..AttentionConfig::default() };
    for (config, words) in [
        (AttentionConfig { head_size: 96, ..good }, "head_size is 96: 64 or 128"),
        (AttentionConfig { output: Output::Merged, ..good }, "output is Merged: Rounded of 8 bits"),
        (AttentionConfig { max_logit: true, ..good }, "max_logit is true: false of 8 bits"),
        (AttentionConfig { key_parts: Some(2), ..good }, "key_parts is 2: 1 or none of 8 bits"),
        (AttentionConfig { value_size: Some(128), ..good }, "value_size is 128: as head_size, which is 64"),
    ] {
        match Attention::<e4m3>::new(runtime, config) {
            Err(error @ Error::Invalid { .. }) if error.to_string().contains(words) => {}
            other => return Err(format!("{other:?}, where `{words}` is to be said")),
        }
    }
    let causal = AttentionConfig { mask: Mask::CausalTopLeft, ..good };
    let packed = AttentionConfig { layout: Layout::Packed, ..good };
    for (config, kernel, why, refused) in [
        (causal, "causal", "8 bits, head_size 64, causal", None),
        (packed, "packedfull", "8 bits, head_size 64, packed, all keys", None),
        (
            AttentionConfig { soft_cap: Some(30.0), ..packed },
            "optioned",
            "with options for layout, soft_cap",
            Some("it does not have soft_cap"),
        ),
    ] {
        let choice = text(config.choose::<e4m3>())?;
        let why_not = choice.refused.first().map(|(_, why)| why.as_str());
        let name = format!("attention_forward_fp8__d64__swizzle64__{kernel}");
        if choice.kernel != Some(name.as_str()) || !choice.why.contains(why) || why_not != refused {
            return Err(format!("{choice:?}"));
        }
    }
    let stream = stream(runtime)?;
    let attention = text(Attention::<e4m3>::new(runtime, good))?;
    let (q, k) = (text(Buffer::<e4m3>::zeros(&stream, 2048))?, text(Buffer::<e4m3>::zeros(&stream, 1024))?);
    let (mut out, mut log_sum_exp) = (text(Buffer::<bf16>::zeros(&stream, 2048))?, text(Buffer::<f32>::zeros(&stream, 32))?);
    let wrong = text(Buffer::<f32>::zeros(&stream, 4))?;
    let mut forward = |scales| {
        let inputs = Inputs { scales, ..Inputs::new(q.view(), k.view(), k.view()) };
        attention.forward(&stream, inputs, Outputs::new(out.view_mut(), log_sum_exp.view_mut()))
    };
    match forward(None) {
        Err(error @ Error::Invalid { .. }) if error.to_string().contains("the element type asks for `scales`, which is none") => {}
        other => return Err(format!("{other:?}")),
    }
    match forward(Some(Scales { q: wrong.view(), k: wrong.view(), v: wrong.view() })) {
        Err(Error::Length { what: "Attention, scales.k", expected: 2, found: 4 }) => Ok(()),
        other => Err(format!("{other:?}")),
    }
}
