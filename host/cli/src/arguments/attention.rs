//! `oxtile attention`.

use std::path::PathBuf;

use oxtile::{
    comm::{WorldSize, bootstrap::MOST_RANKS},
    context_parallel::Schedule,
};

use super::{
    Device, Request, UsageError,
    help::ATTENTION_HELP,
    words::{Word, Words},
};

/// `oxtile attention`.
#[derive(Debug, PartialEq)]
pub struct Attention {
    /// The file with queries, keys and values.
    pub input: PathBuf,
    /// The file to be made.
    pub output: PathBuf,
    /// The causal mask, if any.
    pub causal: Option<Causal>,
    /// Keys seen before and after the diagonal; none is no bound.
    pub window: [Option<u64>; 2],
    /// The factor of scores, if not that of the head size.
    pub scale: Option<f32>,
    /// Whether the gradients are computed too.
    pub backward: bool,
    /// How the ranks that share the sequences reach each other's keys; none is one device.
    pub context_parallel: Option<Schedule>,
    /// How many ranks this process plays; none is one, which a launcher started.
    pub ranks: Option<u32>,
    /// Where it runs.
    pub device: Device,
    /// JSON instead of lines.
    pub json: bool,
}

/// `--causal`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Causal {
    /// Query `i` sees keys up to `i`.
    TopLeft,
    /// The last query sees all keys.
    BottomRight,
}

pub(super) fn parse(words: &mut Words<'_>) -> Result<Request, UsageError> {
    let (mut input, mut output, mut causal, mut window, mut scale) = (None, None, None, [None; 2], None);
    let (mut backward, mut device, mut json) = (false, Device::Auto, false);
    let (mut context_parallel, mut ranks) = (None, None);
    while let Some(word) = words.next()? {
        match &word {
            Word::Help => return Ok(Request::Help(ATTENTION_HELP)),
            Word::Value(_) => return Err(words.unexpected(&word)),
            Word::Flag(flag) => match flag.as_str() {
                "input" => input = Some(words.path("--input")?),
                "output" => output = Some(words.path("--output")?),
                "causal" => {
                    causal = Some(words.choice("--causal", &[("top-left", Causal::TopLeft), ("bottom-right", Causal::BottomRight)])?);
                }
                "window" => {
                    let text = words.text()?;
                    window = bounds(&text).ok_or_else(|| {
                        words.error(format!("--window {text:?} is not L,R: two numbers of keys up to {FARTHEST}, -1 for no bound"))
                    })?;
                }
                "backward" => backward = true,
                "scale" => {
                    scale = Some(words.number("--scale", "a number from 1e-20 to 1e8", |scale: &f32| (1e-20..=1e8).contains(scale))?)
                }
                "context-parallel" => {
                    let text = words.text()?;
                    context_parallel =
                        Some(schedule(&text).ok_or_else(|| words.error(format!("--context-parallel {text:?} is none of: {SCHEDULES}")))?);
                }
                "ranks" => {
                    let expected = format!("a number from 1 to {MOST_RANKS}");
                    ranks = Some(words.number("--ranks", &expected, |ranks| (1..=MOST_RANKS).contains(ranks))?);
                }
                "device" => device = words.choice("--device", &Device::CHOICES)?,
                "json" => json = true,
                _ => return Err(words.unexpected(&word)),
            },
        }
    }
    let (input, output) = (words.required(input, "--input FILE")?, words.required(output, "--output FILE")?);
    if ranks.is_some() && context_parallel.is_none() {
        return Err(words.error(format!("--ranks is for --context-parallel, one of: {SCHEDULES}")));
    }
    if ranks.is_some() && device == Device::Cuda {
        return Err(words
            .error("--ranks plays all ranks on the emulator: give --device emulated, or start ranks on GPUs by oxtile launch -n RANKS"));
    }
    Ok(Request::Attention(Attention { input, output, causal, window, scale, backward, context_parallel, ranks, device, json }))
}

/// What `--context-parallel` takes.
const SCHEDULES: &str = "auto, ring, pull, gather, all-to-all, hierarchical:K, where K neighbours trade heads";

/// A schedule by its name.
fn schedule(text: &str) -> Option<Schedule> {
    let named = [Schedule::Auto, Schedule::Ring, Schedule::Pull, Schedule::Gather, Schedule::AllToAll];
    let inner = || text.strip_prefix("hierarchical:")?.parse().ok().and_then(WorldSize::new);
    named.into_iter().find(|schedule| schedule.to_string() == text).or_else(|| Some(Schedule::Hierarchical { inner: inner()? }))
}

/// Keys to a bound: no sequence has more.
const FARTHEST: u64 = (1 << 30) - 1;

/// `L,R`.
fn bounds(text: &str) -> Option<[Option<u64>; 2]> {
    let number = |word: &str| word.parse().ok().filter(|bound| *bound <= FARTHEST);
    let bound = |word: &str| if word == "-1" { Some(None) } else { number(word).map(Some) };
    let (left, right) = text.split_once(',')?;
    Some([bound(left)?, bound(right)?])
}

#[cfg(test)]
mod tests {
    use super::{bounds, schedule};

    #[test]
    fn windows() {
        assert_eq!(bounds("128,0"), Some([Some(128), Some(0)]));
        assert_eq!(bounds("-1,4"), Some([None, Some(4)]));
        assert_eq!(bounds("1073741823,0"), Some([Some(1073741823), Some(0)]));
        assert_eq!(["128", "a,0", "1,-2", "1,2,3", ",", "0,1073741824"].map(bounds), [None; 6]);
    }

    #[test]
    fn schedules_are_named_as_they_print() {
        for name in ["auto", "ring", "pull", "gather", "all-to-all", "hierarchical:2", "hierarchical:12"] {
            assert_eq!(schedule(name).map(|schedule| schedule.to_string()).as_deref(), Some(name));
        }
        assert_eq!(["", "Ring", "hierarchical", "hierarchical:0", "hierarchical:-1", "hierarchical:two", "rings"].map(schedule), [None; 7]);
    }
}
