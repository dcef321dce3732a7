//! `copy_words`: every length around its tile.

use oxtile::Buffer;
use oxtile_kernels::copy::{CopyWords, CopyWordsArgs};
use oxtile_tests::inputs::Random;

use crate::case::{Case, Outcome, Size, equal, stream, text};

pub fn cases() -> Vec<Case> {
    let small = [0, 1, 4, 255, 4095, 4096, 4097, 9000];
    let small = small.map(|length| Case::new(format!("copy_words::{length}"), Size::Small, move |r| copies(r, length)));
    let large = Case::new("copy_words::3000001", Size::Large, |r| copies(r, 3_000_001));
    small.into_iter().chain([large]).collect()
}

fn copies(runtime: &oxtile::Runtime, length: usize) -> Outcome {
    let stream = stream(runtime)?;
    let mut random = Random::new(length as u64);
    let words: Vec<u32> = (0..length).map(|_| random.bits() as u32).collect();
    let source = text(Buffer::from_slice(&stream, &words))?;
    let mut target = text(Buffer::from_slice(&stream, &vec![0xa5a5_a5a5_u32; length]))?;
    let copy = text(runtime.load::<CopyWords>())?;
    text(copy.launch(&stream, CopyWordsArgs { source: source.view(), target: target.view_mut() }))?;
    equal("target", &text(target.to_vec(&stream))?, &words)
}
