//! Attention against f64: masks element by element with values that name their key, the rest within a bound.

use oxtile::attention::{Attention, AttentionConfig, AttentionElement, Inputs, Mask, Outputs};
use oxtile::{Buffer, Error, HostElement, Runtime};
use oxtile_tests::inputs::Random;
use oxtile_tests::oracle::attention::{Problem, attention};
use oxtile_tests::oracle::formats::{BF16, F16, Format};
use oxtile_tile::num::{Element, bf16, f16};

use crate::case::{Case, Outcome, Size, agrees, stream, text};

pub(super) trait Operand: AttentionElement<Out = Self> + HostElement<Device = Self> {
    const FORMAT: &'static Format;
    /// Half a unit in the last place, relative.
    const HALF_UNIT: f64;
    fn of(bits: u16) -> Self;
    fn bits(self) -> u16;
}

macro_rules! operands {
    ($($t:ident $format:ident $bits:literal;)*) => { $(
        impl Operand for $t {
            const FORMAT: &'static Format = &$format;
            const HALF_UNIT: f64 = 1.0 / (1 << $bits) as f64;
            fn of(bits: u16) -> Self {
                Self::from_bits(bits)
            }
            fn bits(self) -> u16 {
                self.to_bits()
            }
        }
    )* };
}
operands! { bf16 BF16 8; f16 F16 11; }

/// Queries and keys: nothing to see, one tile and parts of it, edges on either side, several blocks of keys.
const LENGTHS: [[u64; 2]; 8] = [[1, 1], [3, 0], [64, 64], [65, 130], [128, 128], [130, 65], [129, 257], [300, 300]];
/// Those of which every weight is looked at.
const VISIBLE: [[u64; 2]; 3] = [[65, 130], [130, 65], [129, 257]];

const MASKS: [(&str, Mask); 3] = [("full", Mask::Full), ("top_left", Mask::CausalTopLeft), ("bottom_right", Mask::CausalBottomRight)];

pub fn cases() -> Vec<Case> {
    let mut cases = Vec::new();
    for head_size in [64, 128] {
        for (mask_name, mask) in MASKS {
            let one = AttentionConfig { head_size, mask, ..AttentionConfig::default() };
            for &[queries, keys] in if head_size == 64 { &LENGTHS[..] } else { &LENGTHS[4..7] } {
                // The race detector looks at two kernels of each head size, on one step and on several.
                let size = if [[65, 130], [129, 257]].contains(&[queries, keys]) { checked(mask) } else { Size::Large };
                random::<bf16>(&mut cases, mask_name, AttentionConfig { queries, keys, ..one }, size);
            }
            for [queries, keys] in VISIBLE {
                let config = AttentionConfig { queries, keys, ..one };
                let name = format!("attention::d{head_size}::{mask_name}::{queries}x{keys}::visible");
                cases.push(Case::new(name, Size::Large, move |r| visible::<bf16>(r, &config)));
            }
            if head_size == 128 && mask == Mask::CausalTopLeft {
                // A block of keys that no query sees.
                random::<bf16>(&mut cases, mask_name, AttentionConfig { queries: 100, keys: 300, ..one }, Size::Large);
            }
            random::<f16>(&mut cases, mask_name, AttentionConfig { queries: 70, keys: 140, ..one }, checked(mask));
            // Scores of which few count, and maxima that rise from block to block.
            random::<bf16>(&mut cases, mask_name, AttentionConfig { queries: 40, keys: 290, scale: Some(1.0), ..one }, Size::Large);
            if head_size == 64 {
                // Blocks enough that maxima are no longer looked for, and some that rise even there.
                random::<bf16>(
                    &mut cases,
                    mask_name,
                    AttentionConfig { queries: 40, keys: 1100, scale: Some(1.0), key_parts: Some(1), ..one },
                    Size::Large,
                );
            }
            let grouped = AttentionConfig { batches: 2, heads: 4, key_heads: 2, queries: 70, keys: 140, ..one };
            random::<bf16>(&mut cases, mask_name, grouped, if head_size == 64 { checked(mask) } else { Size::Large });
            // More tiles than a GPU has multiprocessors.
            let waves = AttentionConfig { batches: 2, heads: 8, key_heads: 1, queries: 1100, keys: 130, ..one };
            random::<bf16>(&mut cases, mask_name, waves, Size::Waves);
        }
    }
    cases.push(Case::new("attention::refused", Size::Small, refused));
    cases.push(Case::new("attention::empty", Size::Small, empty));
    cases
}

/// Whether the race detector looks at a case: either alignment of a causal mask is the same kernel, and needs it once.
pub(super) fn checked(mask: Mask) -> Size {
    if mask == Mask::CausalTopLeft { Size::Large } else { Size::Small }
}

/// A case of normal inputs; queries and keys are twice as large where a scale is given.
fn random<T: Operand + Element>(cases: &mut Vec<Case>, mask: &str, config: AttentionConfig, size: Size) {
    let AttentionConfig { batches, queries, keys, heads, key_heads, head_size, scale, .. } = config;
    let name = format!("attention::{}::d{head_size}::{mask}::{batches}x{queries}x{keys}x{heads}x{key_heads}", T::NAME);
    let factor = if scale.is_some() { 2.0 } else { 1.0 };
    cases.push(Case::new(name, size, move |r| check::<T>(r, &config, factor)));
}

/// The same for the oracle.
pub(super) fn problem(config: &AttentionConfig) -> Problem {
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

/// What the kernel makes of values that are exact in `T`.
pub(super) fn attend<T: Operand>(runtime: &Runtime, config: &AttentionConfig, inputs: [&[f32]; 3]) -> Result<(Vec<f64>, Vec<f32>), String> {
    let stream = stream(runtime)?;
    let [q, k, v] = inputs.map(|values| {
        let values: Vec<T> = values.iter().map(|&x| T::of(T::FORMAT.encode(x.into()) as u16)).collect();
        text(Buffer::from_slice(&stream, &values))
    });
    let (q, k, v) = (q?, k?, v?);
    // What is not written is seen.
    let mut out = text(Buffer::from_slice(&stream, &vec![T::of(0x7bff); q.len() as usize]))?;
    let rows = (config.batches * config.heads * config.queries) as usize;
    let mut log_sum_exp = text(Buffer::from_slice(&stream, &vec![-77.0_f32; rows]))?;
    let attention = text(Attention::<T>::new(runtime, *config))?;
    let mut bound =
        text(attention.bind(&stream, Inputs::new(q.view(), k.view(), v.view()), Outputs::new(out.view_mut(), log_sum_exp.view_mut())))?;
    text(bound.run(&stream))?;
    if config.heads > 1 {
        // The second run finds the tile counter as the first left it.
        text(bound.run(&stream))?;
    }
    drop(bound);
    let out = text(out.to_vec(&stream))?.into_iter().map(|x| T::FORMAT.decode(x.bits().into())).collect();
    Ok((out, text(log_sum_exp.to_vec(&stream))?))
}

/// Random values: every element within what rounding of weights and result allows, and the whole within less.
pub(super) fn check<T: Operand>(runtime: &Runtime, config: &AttentionConfig, size: f32) -> Outcome {
    let problem = problem(config);
    let mut random = Random::new(config.queries * 1000 + config.keys + config.head_size);
    let mut values =
        |count: usize, size: f32| -> Vec<f32> { (0..count).map(|_| T::FORMAT.round((size * random.normal()).into()) as f32).collect() };
    let Problem { batches, queries, keys, heads, key_heads, head_size, .. } = problem;
    let q = values(batches * queries * heads * head_size, size);
    let [k, v] = [size, 1.0].map(|size| values(batches * keys * key_heads * head_size, size));
    let expected = attention(&problem, &q, &k, &v);
    let (out, log_sum_exp) = attend::<T>(runtime, config, [&q, &k, &v])?;
    for (i, (&found, &value)) in log_sum_exp.iter().zip(&expected.log_sum_exp).enumerate() {
        let found = f64::from(found);
        if !agrees(found, value, 1e-5 * value.abs().max(1.0)) {
            return Err(format!("log_sum_exp[{i}] is {found}, expected {value}"));
        }
    }
    let (mut error, mut norm) = (0.0, 0.0);
    for (i, (&found, &value)) in out.iter().zip(&expected.out).enumerate() {
        // A weight is off by half a unit of T, and by the approximate exponential of a score that f32 rounds.
        let bound = (T::HALF_UNIT + 2e-4) * expected.magnitudes[i] + T::HALF_UNIT * value.abs() + 2e-7;
        if !agrees(found, value, bound) {
            return Err(format!("out[{i}] is {found}, expected {value} within {bound}"));
        }
        error += (found - value).powi(2);
        norm += value.powi(2);
    }
    let relative = if norm == 0.0 { error } else { (error / norm).sqrt() };
    // What torch's kernels reach in bf16 with rounded weights is 0.6 of half a unit.
    if relative <= 0.75 * T::HALF_UNIT + 1e-5 { Ok(()) } else { Err(format!("relative Frobenius error {relative:.2e}")) }
}

/// One key after the other is given a value of 1 in a column of its own, and all scores are equal: the columns of a row
/// that are not zero are the keys that its query sees.
pub(super) fn visible<T: Operand>(runtime: &Runtime, config: &AttentionConfig) -> Outcome {
    let problem = problem(config);
    let Problem { queries, keys, head_size, .. } = problem;
    for first in (0..keys.max(1)).step_by(head_size) {
        let mut v = vec![0.0; keys * head_size];
        for (column, key) in (first..keys.min(first + head_size)).enumerate() {
            v[key * head_size + column] = 1.0;
        }
        let (out, _) = attend::<T>(runtime, config, [&vec![0.0; queries * head_size], &vec![0.0; keys * head_size], &v])?;
        for (at, &found) in out.iter().enumerate() {
            let (query, key) = (at / head_size, first + at % head_size);
            let seen = (0..keys).filter(|&key| problem.sees(query, key)).count();
            let value = if key < keys && problem.sees(query, key) { 1.0 / seen as f64 } else { 0.0 };
            if (found - value).abs() > 2.0 * T::HALF_UNIT * value {
                return Err(format!("query {query} gives key {key} the weight {found}, expected {value}"));
            }
        }
    }
    Ok(())
}

fn refused(runtime: &Runtime) -> Outcome {
    let good = AttentionConfig { queries: 8, keys: 8, head_size: 64, ..AttentionConfig::default() };
    let expect = |config: AttentionConfig, words: &[&str]| match Attention::<bf16>::new(runtime, config) {
        Err(error @ Error::Invalid { .. }) if words.iter().all(|word| error.to_string().contains(word)) => Ok(()),
        Err(error) => Err(format!("{error}, where {words:?} are to be named")),
        Ok(_) => Err(format!("{config:?} is not refused")),
    };
    expect(AttentionConfig { head_size: 100, ..good }, &["head_size is 100", "a multiple of 8 up to 256"])?;
    expect(AttentionConfig { heads: 6, key_heads: 4, ..good }, &["key_heads is 4", "divisor of heads", "6"])?;
    expect(AttentionConfig { key_heads: 0, ..good }, &["key_heads is 0"])?;
    expect(AttentionConfig { scale: Some(-1.0), ..good }, &["scale is -1", "from 1e-20 to 1e8"])?;
    expect(AttentionConfig { scale: Some(f32::NAN), ..good }, &["scale is NaN", "from 1e-20 to 1e8"])?;
    expect(AttentionConfig { keys: 1 << 30, ..good }, &["keys is 1073741824", "at most"])?;
    expect(AttentionConfig { batches: 1 << 20, heads: 1 << 12, key_heads: 1, ..good }, &["tiles", "at most"])?;
    let choice = text(AttentionConfig { mask: Mask::CausalTopLeft, ..good }.choose::<f16>())?;
    if choice.kernel != Some("attention_forward__f16__d64__v64__keys128__narrow__causal") || !choice.why.contains("128 queries by 128 keys")
    {
        return Err(format!("{choice:?}"));
    }
    let stream = stream(runtime)?;
    let attention = text(Attention::<bf16>::new(runtime, good))?;
    let (q, mut out) = (text(Buffer::<bf16>::zeros(&stream, 512))?, text(Buffer::<bf16>::zeros(&stream, 512))?);
    let mut log_sum_exp = text(Buffer::<f32>::zeros(&stream, 9))?;
    match attention.forward(&stream, Inputs::new(q.view(), q.view(), q.view()), Outputs::new(out.view_mut(), log_sum_exp.view_mut())) {
        Err(Error::Length { what: "Attention, log_sum_exp", expected: 8, found: 9 }) => Ok(()),
        other => Err(format!("{other:?}")),
    }
}

fn empty(runtime: &Runtime) -> Outcome {
    let stream = stream(runtime)?;
    let config = AttentionConfig { queries: 0, keys: 4, head_size: 64, ..AttentionConfig::default() };
    let attention = text(Attention::<bf16>::new(runtime, config))?;
    let (q, k) = (text(Buffer::<bf16>::zeros(&stream, 0))?, text(Buffer::<bf16>::zeros(&stream, 256))?);
    let (mut out, mut log_sum_exp) = (text(Buffer::<bf16>::zeros(&stream, 0))?, text(Buffer::<f32>::zeros(&stream, 0))?);
    text(attention.forward(&stream, Inputs::new(q.view(), k.view(), k.view()), Outputs::new(out.view_mut(), log_sum_exp.view_mut())))
}
