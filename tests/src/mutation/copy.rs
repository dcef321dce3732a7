//! Mutants of copies, fills and sums of parts.

use std::marker::PhantomData;

use oxtile_emulator::mutation::Outcome;
use oxtile_kernels::copy::{CopyWords, CopyWordsArgs};
use oxtile_kernels::fill::{FillRows, FillRowsArgs};
use oxtile_kernels::sum_parts::{AddParts, AddPartsArgs, Kept, LargestPart, LargestPartArgs, Places, SumParts, SumPartsArgs, Zero};

use super::Job;
use super::device::{Device, words};

pub const JOBS: &[Job] = &[
    Job { name: "copy_words", run: copy_words, equivalents: &[] },
    Job { name: "fill_rows", run: fill_rows, equivalents: &[] },
    Job { name: "sum_parts", run: sum_parts, equivalents: &[] },
    Job { name: "add_parts", run: add_parts, equivalents: &[] },
    Job { name: "largest_part", run: largest_part, equivalents: &[] },
];

fn copy_words(device: &Device) -> Result<Vec<u32>, Outcome> {
    let (source, mut target) = (device.upload("source", &words(5000)), device.upload("target", &[0; 5000]));
    device.launch::<CopyWords>(CopyWordsArgs { source: source.view(), target: target.view_mut() })?;
    Ok(device.download(&target))
}

fn fill_rows(device: &Device) -> Result<Vec<u32>, Outcome> {
    let (values, mut target) = (device.upload("values", &words(3)), device.upload("target", &[0; 700]));
    device.launch::<FillRows>(FillRowsArgs { values: values.view(), target: target.view_mut(), rows: 100 })?;
    Ok(device.download(&target))
}

/// Whole vectors, and elements at the end.
fn sum_parts(device: &Device) -> Result<Vec<u32>, Outcome> {
    let parts = words(3 * 2060).into_iter().map(|word| word & 0x3fff_ffff).collect::<Vec<_>>();
    let (parts, mut sum) = (device.upload("parts", &parts), device.upload("sum", &[0; 2057]));
    device.launch::<SumParts<f32, f32>>(SumPartsArgs { parts: parts.view(), sum: sum.view_mut(), count: 3, stride: 2060 })?;
    Ok(device.download(&sum))
}

/// The same, scaled and added to what the target held; and in rows, of which those of the second part lie apart, written to a target that is not read.
fn add_parts(device: &Device) -> Result<Vec<u32>, Outcome> {
    let floats = |count: usize| words(count).into_iter().map(|word| word & 0x3fff_ffff).collect::<Vec<_>>();
    let (parts, mut target) = (device.upload("parts", &floats(3 * 2060)), device.upload("target", &floats(2057)));
    let places = Places { count: 3, rank: 0, stride: 2060, width: 2057, pitch: 0 };
    let args = AddPartsArgs { parts: parts.view(), apart: None, target: target.view_mut(), places, scale: 0.25, marker: PhantomData };
    device.launch::<AddParts<f32, Kept>>(args)?;
    let (apart, mut written) = (device.upload("apart", &floats(3 * 80)), device.upload("written", &floats(3 * 68)));
    let places = Places { count: 3, rank: 1, stride: 208, width: 68, pitch: 80 };
    let (parts, apart) = (parts.view(), Some(apart.view()));
    let args = AddPartsArgs { parts, apart, target: written.view_mut(), places, scale: 0.25, marker: PhantomData };
    device.launch::<AddParts<f32, Zero>>(args)?;
    Ok([device.download(&target), device.download(&written)].concat())
}

/// The largest of three parts, which lie apart.
fn largest_part(device: &Device) -> Result<Vec<u32>, Outcome> {
    let parts = words(3 * 700).into_iter().map(|word| word & 0xbfff_ffff).collect::<Vec<_>>();
    let (parts, mut largest) = (device.upload("parts", &parts), device.upload("largest", &[0; 697]));
    device.launch::<LargestPart>(LargestPartArgs { parts: parts.view(), largest: largest.view_mut(), count: 3, stride: 700 })?;
    Ok(device.download(&largest))
}
