//! `amax` and `multi_amax` against the oracle, bit for bit.

use oxtile::{Buffer, DeviceTable, Runtime};
use oxtile_kernels::amax::{self, Amax, AmaxArgs, MultiAmax, MultiAmaxArgs, NO_SLOT};
use oxtile_tests::inputs::{Random, Scenario};
use oxtile_tests::oracle;
use oxtile_tile::launch::Kernel;
use oxtile_tile::num::{bf16, f16};

use super::element::TestElement;
use crate::case::{Case, Outcome, Size, equal, stream, text};

pub fn cases() -> Vec<Case> {
    [of_type::<bf16>(), of_type::<f16>(), of_type::<f32>()].into_iter().flatten().collect()
}

fn of_type<T: TestElement>() -> Vec<Case>
where
    Amax<T>: Kernel,
    MultiAmax<T>: Kernel,
{
    let name = T::DTYPE.name();
    let scenarios = Scenario::ALL.map(|s| Case::new(format!("amax::{name}::{s:?}"), Size::Small, move |r| single::<T>(r, s, 5000, 0)));
    // Lengths around vectors and tiles, and starts off the 16-byte boundary.
    let lengths = [(0, 0), (1, 0), (7, 1), (33, 3), (16_384, 0), (20_000, 5)].map(|(length, start)| {
        let name = format!("amax::{name}::length_{length}_from_{start}");
        Case::new(name, Size::Small, move |r| single::<T>(r, Scenario::Exponents, length, start))
    });
    let large = Case::new(format!("amax::{name}::large"), Size::Large, |r| single::<T>(r, Scenario::Outlier, 3_000_017, 1));
    let batches =
        [0, 1, 3, 20].map(|tensors| Case::new(format!("multi_amax::{name}::{tensors}"), Size::Small, move |r| many::<T>(r, tensors, 6000)));
    let batch_large = Case::new(format!("multi_amax::{name}::130_large"), Size::Large, |r| many::<T>(r, 130, 60_000));
    scenarios.into_iter().chain(lengths).chain(batches).chain([large, batch_large]).collect()
}

fn single<T: TestElement>(runtime: &Runtime, scenario: Scenario, length: usize, start: usize) -> Outcome
where
    Amax<T>: Kernel,
{
    let stream = stream(runtime)?;
    let values = scenario.generate(T::DTYPE, start + length, 17);
    let input = T::upload(&stream, &values)?;
    let mut output = text(Buffer::zeros(&stream, 1))?;
    let kernel = text(runtime.load::<Amax<T>>())?;
    let view = input.view().slice(start as u64, (start + length) as u64);
    text(kernel.launch(&stream, AmaxArgs { input: view, output: output.view_mut() }))?;
    let found: Vec<f32> = text(output.to_vec(&stream))?;
    equal("amax", &[found[0].to_bits()], &[oracle::amax::amax(&values[start..]).to_bits()])
}

/// Tensors of random lengths, some empty, some off the boundary, some sharing a slot or without a second one.
fn many<T: TestElement>(runtime: &Runtime, tensors: usize, longest: u64) -> Outcome
where
    MultiAmax<T>: Kernel,
{
    let stream = stream(runtime)?;
    let mut random = Random::new(tensors as u64);
    let (mut buffers, mut slots, mut first_tiles) = (Vec::new(), Vec::new(), vec![0]);
    let mut expected = vec![0f32; tensors + 1];
    let mut ranges = Vec::new();
    for i in 0..tensors {
        let (start, length) = (random.below(5) as usize, if i % 4 == 3 { 0 } else { random.below(longest) as usize });
        let values = Scenario::ALL[i % Scenario::ALL.len()].generate(T::DTYPE, start + length, i as u64);
        let largest = oracle::amax::amax(&values[start..]);
        let second = if i % 2 == 0 { NO_SLOT } else { tensors as u32 };
        slots.extend([i as u32, second]);
        expected[i] = largest;
        if second != NO_SLOT {
            expected[tensors] = expected[tensors].max(largest);
        }
        first_tiles.push(first_tiles[i] + amax::tiles::<T>(length as u64));
        buffers.push(T::upload(&stream, &values)?);
        ranges.push((start as u64, (start + length) as u64));
    }
    let views: Vec<_> = buffers.iter().zip(ranges).map(|(buffer, (start, end))| buffer.view().slice(start, end)).collect();
    let table = text(DeviceTable::new(&stream, &views))?;
    let first_tiles = text(Buffer::from_slice(&stream, &first_tiles))?;
    let slots = text(Buffer::from_slice(&stream, &slots))?;
    let mut outputs: Buffer<f32> = text(Buffer::zeros(&stream, tensors as u64 + 1))?;
    let kernel = text(runtime.load::<MultiAmax<T>>())?;
    let args = MultiAmaxArgs { tensors: table.view(), first_tiles: first_tiles.view(), slots: slots.view(), outputs: outputs.view_mut() };
    text(kernel.launch(&stream, args))?;
    let found: Vec<u32> = text(outputs.to_vec(&stream))?.into_iter().map(f32::to_bits).collect();
    equal("outputs", &found, &expected.into_iter().map(f32::to_bits).collect::<Vec<_>>())
}
