//! `oxtile attention`.

use std::path::PathBuf;

use clap::{Args, ValueEnum};
use oxtile::{comm::WorldSize, context_parallel::Schedule};

use super::{Device, values};

/// `oxtile attention`.
#[derive(Args, Debug, PartialEq)]
#[command(after_help = MORE)]
pub struct Attention {
    /// The file with queries, keys and values.
    #[arg(short, long, value_name = "FILE", help = INPUT)]
    pub input: PathBuf,
    /// The file to be made.
    #[arg(short, long, value_name = "FILE", help = OUTPUT)]
    pub output: PathBuf,
    /// Gradients too: the input holds dout, that of out; the same bits in every run
    #[arg(long)]
    pub backward: bool,
    /// The causal mask. top-left: query i sees keys up to i; bottom-right: the last query sees all keys
    /// (default: each query sees all keys)
    #[arg(long, value_name = "CORNER", hide_possible_values = true, verbatim_doc_comment)]
    pub causal: Option<Causal>,
    /// Each query sees L keys before and R after the diagonal aligned bottom-right (default: -1,-1, no bound)
    #[arg(long, value_name = "L,R", default_value = "-1,-1", hide_default_value = true, allow_hyphen_values = true, value_parser = bounds)]
    pub window: [Option<u64>; 2],
    /// The factor of scores (default: the head size to the power -1/2)
    #[arg(long, value_name = "X", allow_negative_numbers = true)]
    #[arg(value_parser = values::number("a number from 1e-20 to 1e8", |scale: &f32| (1e-20..=1e8).contains(scale)))]
    pub scale: Option<f32>,
    /// Ranks share the sequences, and reach each other's keys by: auto, fused, ring, pull, gather, all-to-all,
    /// hierarchical:K (K neighbours trade heads, with a ring between such groups); the output is that of
    /// one device (default: one device)
    #[arg(long, value_name = "SCHEDULE", value_parser = schedule, verbatim_doc_comment)]
    pub context_parallel: Option<Schedule>,
    /// Ranks cast q, k and v to E4M3 by scales that all share, and multiply those in the forward pass:
    /// of BF16 and heads of 64 or 128, by auto, gather or all-to-all
    #[arg(long, verbatim_doc_comment)]
    pub fp8: bool,
    /// How many ranks this process plays on the emulator (default: one, of oxtile launch -n RANKS)
    #[arg(long, value_name = "RANKS", allow_negative_numbers = true, value_parser = values::ranks)]
    pub ranks: Option<WorldSize>,
    /// auto: a GPU if there is one, else the emulator; cuda: the first GPU; emulated
    #[arg(long, value_enum, default_value_t, hide_possible_values = true)]
    pub device: Device,
    /// Print one JSON document instead of lines
    #[arg(long)]
    pub json: bool,
}

const INPUT: &str = "\
q [batch, sequence, heads, size], k and v [batch, sequence, key heads, size], BF16 or F16;
or [tokens, heads, size] with cu_seqlens_q and cu_seqlens_kv, I32, one element more than
sequences, and optionally cu_seqlens_q_padded and cu_seqlens_kv_padded, where sequences begin";

const OUTPUT: &str = "\
out, as q; lse, the natural log-sum-exp, F32 [batch, heads, sequence] or [heads, tokens];
with --backward dq, dk and dv, as q, k and v";

const MORE: &str = "\
On GPUs each rank is a process: oxtile launch -n RANKS -- oxtile attention --context-parallel SCHEDULE ... Rank 0 writes the output.
Sequences of [batch, sequence, heads, size] are a multiple of twice the ranks; packed ones may have any length. A causal mask with
--context-parallel takes as many keys as queries, in each sequence.

Examples:
  oxtile attention -i qkv.safetensors -o out.safetensors --causal bottom-right --backward
  oxtile attention -i qkv.safetensors -o out.safetensors --context-parallel ring --ranks 4 --device emulated
  oxtile launch -n 4 -- oxtile attention -i qkv.safetensors -o out.safetensors --context-parallel auto";

/// `--causal`.
#[derive(Clone, Copy, Debug, PartialEq, ValueEnum)]
pub enum Causal {
    /// Query `i` sees keys up to `i`.
    TopLeft,
    /// The last query sees all keys.
    BottomRight,
}

impl Attention {
    pub(super) fn check(&self) -> Result<(), String> {
        if self.ranks.is_some() && self.context_parallel.is_none() {
            return Err(format!("--ranks goes with --context-parallel, which is one of: {SCHEDULES}"));
        }
        if self.fp8 && self.context_parallel.is_none() {
            return Err("--fp8 goes with --context-parallel, which is one of: auto, gather, all-to-all".to_owned());
        }
        if self.ranks.is_some() && self.device == Device::Cuda {
            let mend = "give --device emulated, or start ranks on GPUs by oxtile launch -n RANKS";
            return Err(format!("--ranks plays all ranks on the emulator: {mend}"));
        }
        Ok(())
    }
}

/// What `--context-parallel` takes.
const SCHEDULES: &str = "auto, fused, ring, pull, gather, all-to-all, hierarchical:K, where K neighbours trade heads";

/// A schedule by its name.
fn schedule(text: &str) -> Result<Schedule, String> {
    let named = [Schedule::Auto, Schedule::Fused, Schedule::Ring, Schedule::Pull, Schedule::Gather, Schedule::AllToAll];
    let inner = || text.strip_prefix("hierarchical:")?.parse().ok().and_then(WorldSize::new);
    let schedule =
        named.into_iter().find(|schedule| schedule.to_string() == text).or_else(|| Some(Schedule::Hierarchical { inner: inner()? }));
    schedule.ok_or_else(|| format!("it is none of: {SCHEDULES}"))
}

/// Keys to a bound: no sequence has more.
const FARTHEST: u64 = (1 << 30) - 1;

/// `L,R`.
fn bounds(text: &str) -> Result<[Option<u64>; 2], String> {
    let number = |word: &str| word.parse().ok().filter(|bound| *bound <= FARTHEST);
    let bound = |word: &str| if word == "-1" { Some(None) } else { number(word).map(Some) };
    let both = |(left, right)| Some([bound(left)?, bound(right)?]);
    let bounds = text.split_once(',').and_then(both);
    bounds.ok_or_else(|| format!("it is not L,R: two numbers of keys up to {FARTHEST}, -1 for no bound"))
}

#[cfg(test)]
mod tests {
    use super::{bounds, schedule};

    #[test]
    fn windows() {
        assert_eq!(bounds("128,0"), Ok([Some(128), Some(0)]));
        assert_eq!(bounds("-1,4"), Ok([None, Some(4)]));
        assert_eq!(bounds("1073741823,0"), Ok([Some(1073741823), Some(0)]));
        assert!(["128", "a,0", "1,-2", "1,2,3", ",", "0,1073741824"].map(bounds).iter().all(Result::is_err));
    }

    #[test]
    fn schedules_are_named_as_they_print() {
        for name in ["auto", "ring", "pull", "gather", "all-to-all", "hierarchical:2", "hierarchical:12"] {
            assert_eq!(schedule(name).map(|schedule| schedule.to_string()), Ok(name.to_owned()));
        }
        for name in ["", "Ring", "hierarchical", "hierarchical:0", "hierarchical:-1", "hierarchical:two", "rings"] {
            assert!(schedule(name).is_err(), "{name}");
        }
    }
}
