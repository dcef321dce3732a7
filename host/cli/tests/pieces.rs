//! Tensors that take several pieces: their codes and scales are put together in order.

mod common;

use std::path::Path;

use common::{file, tensor_bytes};
use oxtile_cli::{
    progress::Progress,
    quantize::{self, Codes, DeviceError, Direction, Directions, Elements, Format, Piece, QuantizeDevice, Quantized, Recipe, Side},
};

/// Marks every element and every block by its place, which the test's tensor holds as its values.
#[derive(Default)]
struct Marking {
    calls: usize,
    amax_calls: usize,
}

/// The mark of a place, as a code.
fn mark(place: u32, marks: u32) -> u8 {
    (place % marks) as u8
}

impl Marking {
    fn codes(side: Side, input: &[f32]) -> Codes {
        let [rows, columns] = side.shape.map(|n| n as usize);
        let turned: Vec<u32> = match side.is_transposed() {
            true => (0..columns).flat_map(|column| (0..rows).map(move |row| input[row * columns + column] as u32)).collect(),
            false => input.iter().map(|&x| x as u32).collect(),
        };
        let codes = turned.len() / side.format.shapes().elements as usize;
        let data = turned.iter().step_by(turned.len() / codes).map(|&place| mark(place, 251)).collect();
        let [_, length] = side.lines().map(|n| n as usize);
        let first_of_blocks = |block: usize| turned.chunks(length).flat_map(move |line| line.iter().step_by(block).copied());
        let scales = match (side.format, side.direction) {
            (Format::Mxfp8, Direction::Columns) => {
                turned.chunks(32 * length).flat_map(|lines| lines[..length].iter().map(|&x| mark(x, 241))).collect()
            }
            (Format::Mxfp8, Direction::Rows) => first_of_blocks(32).map(|place| mark(place / 32, 241)).collect(),
            (Format::Nvfp4, _) => first_of_blocks(16).map(|place| mark(place / 16, 241)).collect(),
            _ => first_of_blocks(128).flat_map(|place| (place as f32).to_le_bytes()).collect(),
        };
        Codes { data, scales }
    }
}

impl QuantizeDevice for Marking {
    fn name(&self) -> String {
        "marking".into()
    }

    fn amax(&mut self, _: &Recipe, _: [u64; 2], input: Elements<'_>) -> Result<[f32; 2], DeviceError> {
        self.amax_calls += 1;
        Ok([input.to_f32().into_iter().fold(0f32, f32::max); 2])
    }

    fn quantize(&mut self, recipe: &Recipe, piece: &Piece, input: Elements<'_>) -> Result<Quantized, DeviceError> {
        let input = input.to_f32();
        assert_eq!(input.len() as u64, piece.shape.iter().product::<u64>());
        self.calls += 1;
        let amax = input.iter().fold(0f32, |amax, x| amax.max(*x));
        assert!(!recipe.format.has_tensor_amax() || piece.amax == [6_720_095.0; 2], "every piece gets the tensor's amax");
        let mut output = Quantized { amax, ..Quantized::default() };
        for side in Side::each(recipe, piece.shape) {
            output.sides[side.direction as usize] = Some(Self::codes(side, &input));
        }
        Ok(output)
    }

    fn interleave(&mut self, side: &Side, compact: &[u8]) -> Result<Vec<u8>, DeviceError> {
        // Reversed, that one sees that it was called, and padded.
        let mut interleaved = vec![0; side.scale_shape().iter().product::<u64>() as usize];
        interleaved.iter_mut().zip(compact.iter().rev()).for_each(|(to, from)| *to = *from);
        Ok(interleaved)
    }
}

const ROWS: u32 = 70_001;
const COLUMNS: u32 = 96;

/// A tensor `w` of the places of its elements, all of which are f32, and one more that is copied.
fn places(folder: &Path, rows: u32) -> std::path::PathBuf {
    let elements = rows * COLUMNS;
    assert!(elements < 1 << 24);
    let header = format!(
        r#"{{"w":{{"dtype":"F32","shape":[{rows},{COLUMNS}],"data_offsets":[0,{0}]}},
            "ids":{{"dtype":"U32","shape":[{elements}],"data_offsets":[{0},{1}]}}}}"#,
        elements * 4,
        elements * 8
    );
    let mut data: Vec<u8> = (0..elements).flat_map(|i| (i as f32).to_le_bytes()).collect();
    data.extend((0..elements).flat_map(u32::to_le_bytes));
    let path = folder.join("in");
    std::fs::write(&path, file(&header, &data)).expect("a writable folder");
    path
}

#[test]
fn pieces_are_put_together_in_order() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let (input, output) = (places(folder.path(), ROWS), folder.path().join("out"));
    let elements = ROWS * COLUMNS;
    let mut device = Marking::default();
    quantize::run(&input, &output, Recipe::default(), &mut device, &mut Progress::hidden()).expect("a valid checkpoint");
    assert!(device.calls > 2, "the tensor takes several pieces, not {}", device.calls);
    assert!(tensor_bytes(&output, "w") == (0..elements).map(|i| mark(i, 251)).collect::<Vec<_>>());
    assert!(tensor_bytes(&output, "w_scale") == (0..elements / 32).map(|i| mark(i, 241)).collect::<Vec<_>>());
    assert_eq!(tensor_bytes(&output, "w_amax"), (elements as f32 - 1.0).to_le_bytes());
    assert!(tensor_bytes(&output, "ids") == tensor_bytes(&input, "ids"), "a long copy is whole");

    let mut device = Marking::default();
    quantize::run(&input, &output, Recipe::of(Format::Nvfp4), &mut device, &mut Progress::hidden()).expect("a valid checkpoint");
    assert_eq!((device.calls > 2, device.amax_calls), (true, device.calls), "the amax of all pieces comes before the first cast");
    assert!(tensor_bytes(&output, "w_packed") == (0..elements).step_by(2).map(|i| mark(i, 251)).collect::<Vec<_>>());
    assert!(tensor_bytes(&output, "w_scale") == (0..elements / 16).map(|i| mark(i, 241)).collect::<Vec<_>>());
    let amax = elements as f32 - 1.0;
    assert_eq!(tensor_bytes(&output, "w_amax"), amax.to_le_bytes());
    assert_eq!(tensor_bytes(&output, "w_global_scale"), (2688.0 / amax).to_le_bytes());
}

/// Places in the order of the transpose.
fn turned(rows: u32) -> impl Iterator<Item = u32> {
    (0..COLUMNS).flat_map(move |column| (0..rows).map(move |row| row * COLUMNS + column))
}

#[test]
fn pieces_of_transposed_codes_are_put_together_in_order() {
    // A multiple of 16, not of 128.
    const ROWS: u32 = 70_000;
    let folder = tempfile::tempdir().expect("a temporary folder");
    let (input, output) = (places(folder.path(), ROWS), folder.path().join("out"));
    let both = |format, interleave| Recipe { directions: Directions::Both, interleave, ..Recipe::of(format) };
    let mut device = Marking::default();
    quantize::run(&input, &output, both(Format::Fp8Block, false), &mut device, &mut Progress::hidden()).expect("a valid checkpoint");
    assert_eq!(device.calls, 2, "pieces");
    assert!(tensor_bytes(&output, "w_columnwise") == turned(ROWS).map(|i| mark(i, 251)).collect::<Vec<_>>());
    let scales: Vec<u8> = turned(ROWS).filter(|i| (i / COLUMNS).is_multiple_of(128)).flat_map(|i| (i as f32).to_le_bytes()).collect();
    assert!(tensor_bytes(&output, "w_columnwise_scale") == scales);
    assert!(tensor_bytes(&output, "w") == (0..ROWS * COLUMNS).map(|i| mark(i, 251)).collect::<Vec<_>>());

    // A multiple of 32, not of 128, and as many elements fewer as the marking's amax says.
    let input = places(folder.path(), 69_984);
    quantize::run(&input, &output, both(Format::Mxfp8, true), &mut Marking::default(), &mut Progress::hidden())
        .expect("a valid checkpoint");
    assert!(tensor_bytes(&output, "w_columnwise") == tensor_bytes(&output, "w"));
    let expected: Vec<u8> =
        (0..69_984 / 32).flat_map(|block| (0..COLUMNS).map(move |column| mark(block * 32 * COLUMNS + column, 241))).collect();
    let interleaved = tensor_bytes(&output, "w_columnwise_scale");
    assert!(interleaved.iter().zip(expected.iter().rev()).all(|(a, b)| a == b), "the scales of all pieces came together");
    assert!(interleaved[expected.len()..].iter().all(|&padding| padding == 0) && interleaved.len() > expected.len());
}
