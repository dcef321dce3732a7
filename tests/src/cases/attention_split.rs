//! Attention whose keys are divided among blocks, and heads that are rows of one, against f64.

use oxtile::attention::{Attention, AttentionConfig, Kernels, Layout, Mask, Sink};
use oxtile::{Error, Runtime};
use oxtile_tile::num::{bf16, f16};

use super::attention;
use super::attention_problem::Problem;
use crate::case::{Case, Outcome, Size, text};

const MASKS: [(&str, Mask); 3] = [("full", Mask::Full), ("top_left", Mask::CausalTopLeft), ("bottom_right", Mask::CausalBottomRight)];

pub fn cases() -> Vec<Case> {
    let mut cases = Vec::new();
    let base =
        AttentionConfig { head_size: 64, queries: 3, keys: 300, heads: 4, key_heads: 2, splits: Some(2), ..AttentionConfig::default() };
    for (name, mask) in MASKS {
        // The race detector looks at each kernel once, on parts of one block and of two.
        push(&mut cases, name, AttentionConfig { mask, ..base }, mask == Mask::CausalBottomRight);
        // Two tiles; the causal ones see less than the last parts have.
        let tiles = AttentionConfig { mask, queries: 140, heads: 1, key_heads: 1, splits: Some(3), ..base };
        let problem = Problem { one_hot: true, ..Problem::dense(tiles) };
        cases.push(Case::new(format!("attention_split::{name}::visible"), Size::Large, move |r| problem.check::<bf16>(r)));
        // A single query: heads are rows of one, unless it sees its first key alone.
        for splits in [1, 2] {
            let config = AttentionConfig { mask, batches: 2, queries: 1, heads: 6, splits: Some(splits), ..base };
            push(&mut cases, &format!("{name}::single::{splits}"), config, mask == Mask::Full);
        }
    }
    push(&mut cases, "more parts than blocks", AttentionConfig { keys: 140, splits: Some(5), ..base }, false);
    push(&mut cases, "most parts", AttentionConfig { keys: 1000, splits: Some(32), scale: Some(1.0), ..base }, false);
    push(&mut cases, "no keys", AttentionConfig { keys: 0, ..base }, false);
    for queries in [1, 5] {
        let config = AttentionConfig { layout: Layout::Sbhd, batches: 2, queries, ..base };
        push(&mut cases, &format!("sbhd::{queries}"), config, false);
    }
    for (size, value) in [(40, 24), (128, 128), (192, 128), (256, 256), (136, 200)] {
        let config = AttentionConfig { head_size: size, value_size: Some(value), keys: 290, mask: Mask::CausalBottomRight, ..base };
        push(&mut cases, &format!("sizes::{size}x{value}"), config, size == value);
        let halves = AttentionConfig { queries: 1, keys: 150, ..config };
        cases
            .push(Case::new(format!("attention_split::f16::{size}x{value}"), Size::Large, move |r| Problem::dense(halves).check::<f16>(r)));
    }
    cases.push(Case::new("attention_split::chosen", Size::Small, chosen));
    cases
}

fn push(cases: &mut Vec<Case>, name: &str, config: AttentionConfig, checked: bool) {
    let size = if checked { Size::Small } else { Size::Large };
    cases.push(Case::new(format!("attention_split::{name}"), size, move |runtime| Problem::dense(config).check::<bf16>(runtime)));
}

/// Which kernel a device takes, and what is refused.
fn chosen(runtime: &Runtime) -> Outcome {
    let device = text(runtime.device(0))?;
    let few = AttentionConfig { head_size: 64, queries: 1, keys: 4096, heads: 4, key_heads: 4, ..AttentionConfig::default() };
    let expect = |config: AttentionConfig, kernel: &str, why: &str| {
        let choice = text(config.choose_on::<bf16>(&device))?;
        if choice.kernel == kernel && choice.why.contains(why) { Ok(()) } else { Err(format!("{config:?} takes {choice:?}")) }
    };
    let (split, whole) = ("attention_forward_split__bf16__d64__v64__keys128__narrow", "attention_forward__bf16__d64__v64__keys128__narrow");
    // One tile, whatever the device: four heads that are rows of one.
    expect(AttentionConfig { key_heads: 1, ..few }, split, "4 heads that share keys as rows of one")?;
    expect(AttentionConfig { key_heads: 1, ..few }, split, "keys in")?;
    expect(AttentionConfig { keys: 300, ..few }, whole, "all keys")?;
    expect(AttentionConfig { splits: Some(1), ..few }, whole, "all keys")?;
    expect(AttentionConfig { batches: 1 << 10, ..few }, whole, "all keys")?;
    expect(AttentionConfig { splits: Some(7), keys: 300, ..few }, split, "keys in 7 parts")?;
    // A query that sees its first key alone has nothing to divide.
    expect(AttentionConfig { mask: Mask::CausalTopLeft, ..few }, &format!("{whole}__causal"), "causal")?;
    let refuse = |config: AttentionConfig, words: &[&str]| match Attention::<bf16>::new(runtime, config) {
        Err(error @ Error::Invalid { .. }) if words.iter().all(|word| error.to_string().contains(word)) => Ok(()),
        other => Err(format!("{other:?}, where {words:?} are to be named")),
    };
    refuse(AttentionConfig { splits: Some(33), ..few }, &["splits is 33", "from 1 to 32"])?;
    refuse(AttentionConfig { splits: Some(0), ..few }, &["splits is 0"])?;
    refuse(AttentionConfig { splits: Some(2), sink: Sink::OffByOne, ..few }, &["splits is 2", "1 with sink"])?;
    refuse(AttentionConfig { splits: Some(2), kernels: Kernels::Portable, ..few }, &["splits", "2"])?;
    // As the device has it, and the second run as the first.
    attention::check::<bf16>(runtime, &AttentionConfig { key_heads: 1, keys: 1100, ..few }, 1.0)
}
