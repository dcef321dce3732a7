//! `fill_rows`: numbers repeated, over and over.

use oxtile::Buffer;
use oxtile_kernels::fill::{FillRows, FillRowsArgs};

use crate::case::{Case, Outcome, Size, equal, stream, text};

pub fn cases() -> Vec<Case> {
    let shapes = [(1, 1, 0), (1, 3, 700), (3, 5, 45), (2, 300, 1200), (4, 1, 4)];
    let case = |(values, rows, elements)| {
        Case::new(format!("fill_rows::{values}x{rows}::{elements}"), Size::Small, move |r| fills(r, values, rows, elements))
    };
    shapes.map(case).into()
}

fn fills(runtime: &oxtile::Runtime, values: usize, rows: u32, elements: usize) -> Outcome {
    let stream = stream(runtime)?;
    let numbers: Vec<f32> = (0..values).map(|i| if i == 0 { f32::NEG_INFINITY } else { i as f32 }).collect();
    let source = text(Buffer::from_slice(&stream, &numbers))?;
    let mut target = text(Buffer::from_slice(&stream, &vec![f32::NAN; elements]))?;
    let fill = text(runtime.load::<FillRows>())?;
    text(fill.launch(&stream, FillRowsArgs { values: source.view(), target: target.view_mut(), rows }))?;
    let mut expected = Vec::new();
    while expected.len() < elements {
        numbers.iter().for_each(|number| expected.extend(std::iter::repeat_n(number.to_bits(), rows as usize)));
    }
    expected.truncate(elements);
    let found: Vec<_> = text(target.to_vec(&stream))?.into_iter().map(f32::to_bits).collect();
    equal("target", &found, &expected)
}
