//! `oxtile overlap`.

use oxtile::comm::bootstrap::MOST_RANKS;

use super::{
    Request, UsageError,
    help::OVERLAP_HELP,
    words::{Word, Words},
};

/// `oxtile overlap`.
#[derive(Debug, PartialEq)]
pub struct Overlap {
    /// M, N and K over all ranks.
    pub plan: [u64; 3],
    /// How many ranks.
    pub ranks: u32,
    /// JSON instead of lines.
    pub json: bool,
}

/// No dimension of a product is larger.
const LARGEST: u64 = i32::MAX as u64;

pub(super) fn parse(words: &mut Words<'_>) -> Result<Request, UsageError> {
    let (mut plan, mut ranks, mut json) = (None, None, false);
    while let Some(word) = words.next()? {
        match &word {
            Word::Help => return Ok(Request::Help(OVERLAP_HELP)),
            Word::Value(_) => return Err(words.unexpected(&word)),
            Word::Flag(flag) => match flag.as_str() {
                "plan" => {
                    let text = words.text()?;
                    let sizes = sizes(&text);
                    plan =
                        Some(sizes.ok_or_else(|| words.error(format!("--plan {text:?} is not M,N,K: three numbers from 1 to {LARGEST}")))?);
                }
                "ranks" => {
                    let expected = format!("a number from 1 to {MOST_RANKS}");
                    ranks = Some(words.number("--ranks", &expected, |ranks| (1..=MOST_RANKS).contains(ranks))?);
                }
                "json" => json = true,
                _ => return Err(words.unexpected(&word)),
            },
        }
    }
    let (plan, ranks) = (words.required(plan, "--plan M,N,K")?, words.required(ranks, "--ranks RANKS")?);
    Ok(Request::Overlap(Overlap { plan, ranks, json }))
}

/// `M,N,K`.
fn sizes(text: &str) -> Option<[u64; 3]> {
    let size = |word: &str| word.parse().ok().filter(|size| (1..=LARGEST).contains(size));
    let sizes: Vec<u64> = text.split(',').map(size).collect::<Option<_>>()?;
    sizes.try_into().ok()
}

#[cfg(test)]
mod tests {
    use super::sizes;

    #[test]
    fn three_sizes() {
        assert_eq!(sizes("8192,4096,64"), Some([8192, 4096, 64]));
        assert_eq!(["1,2", "1,2,3,4", "0,1,1", "1,x,1", "", "1,1,2147483648", "-1,1,1"].map(sizes), [None; 7]);
    }
}
