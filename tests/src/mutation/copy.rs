//! Mutants of the copy.

use oxtile_emulator::mutation::Outcome;
use oxtile_kernels::copy::{CopyWords, CopyWordsArgs};

use super::Job;
use super::device::{Device, words};

pub const JOBS: &[Job] = &[Job { name: "copy_words", run: copy_words, equivalents: &[] }];

fn copy_words(device: &Device) -> Result<Vec<u32>, Outcome> {
    let (source, mut target) = (device.upload("source", &words(5000)), device.upload("target", &[0; 5000]));
    device.launch::<CopyWords>(CopyWordsArgs { source: source.view(), target: target.view_mut() })?;
    Ok(device.download(&target))
}
