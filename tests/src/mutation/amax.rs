//! Mutants of the maxima.

use oxtile_emulator::mutation::Outcome;
use oxtile_kernels::amax::{Amax, AmaxArgs, MultiAmax, MultiAmaxArgs, NO_SLOT};
use oxtile_tile::launch::DeviceTable;
use oxtile_tile::num::bf16;

use super::Job;
use super::device::{Device, Elements, words};

pub const JOBS: &[Job] =
    &[Job { name: "amax", run: amax, equivalents: &[] }, Job { name: "multi_amax", run: multi_amax, equivalents: &[] }];

fn amax(device: &Device) -> Result<Vec<u32>, Outcome> {
    let (input, mut output) = (device.upload::<bf16>("input", &words(9000)), device.upload("output", &[0]));
    device.launch::<Amax<bf16>>(AmaxArgs { input: input.view(), output: output.view_mut() })?;
    Ok(device.download(&output))
}

/// More tensors than blocks, so that a block meets several.
fn multi_amax(device: &Device) -> Result<Vec<u32>, Outcome> {
    let tensors: Vec<Elements<bf16>> = [300, 9000, 20, 70, 100, 8200, 40, 50].map(|n| device.upload("tensor", &words(n))).into();
    let entries = tensors.iter().flat_map(|t| [t.address as u32, (t.address >> 32) as u32, t.length as u32, 0]);
    let entries: Elements<u64> = device.upload("tensors", &entries.collect::<Vec<_>>());
    let mut first = vec![0u32, 0];
    for tensor in &tensors {
        first.extend([first[first.len() - 2] + oxtile_kernels::amax::tiles::<bf16>(tensor.length) as u32, 0]);
    }
    let first: Elements<u64> = device.upload("first_tiles", &first);
    let slots: Vec<u32> = (0..8).flat_map(|i| [i, if i % 2 == 0 { 8 } else { NO_SLOT }]).collect();
    let (slots, mut outputs) = (device.upload("slots", &slots), device.upload("outputs", &[0; 9]));
    // SAFETY: the entries name live memory; nothing tracks owners here.
    let table = unsafe { DeviceTable::from_raw(entries.view(), &[]) };
    let args = MultiAmaxArgs { tensors: table, first_tiles: first.view(), slots: slots.view(), outputs: outputs.view_mut() };
    device.launch::<MultiAmax<bf16>>(args)?;
    Ok(device.download(&outputs))
}
