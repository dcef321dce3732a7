//! FP8 with scales of row blocks and of squares, the casts and their inverse against the oracle, bit for bit.

use oxtile::quantize::fp8::Fp8Number;
use oxtile::{Buffer, Runtime, Stream};
use oxtile_kernels::codes::CodesArgument;
use oxtile_kernels::fp8::*;
use oxtile_kernels::matrix::MatrixArgument;
use oxtile_tests::inputs::{Random, Scenario};
use oxtile_tests::oracle::fp8::{BLOCK, Quantized, Rule, dequantize, quantize, transpose};
use oxtile_tile::num::{bf16, e4m3, e5m2, f16};

use super::super::attention_limits::refuses;
use super::super::element::{TestElement, comparable_bits, rounded_bits};
use super::super::mxfp8::{TestFp8, large_of};
use crate::case::{Case, Outcome, Size, equal, stream, text};

/// Rows and columns, rows of whole vectors: parts of a tile, a tile, tiles at edges in both dimensions, and nothing.
const SHAPES: [(usize, usize); 10] = [(16, 48), (1, 1024), (1, 16), (5, 8), (128, 128), (17, 136), (130, 136), (144, 264), (0, 64), (4, 0)];
const LARGE: (usize, usize) = (993, 512);
/// Large ones of whole tiles.
const WHOLE: [(usize, usize); 3] = [(256, 1024), (512, 512), (256, 2048)];

/// What a smaller amax counts as, and whether scales are powers of two.
const RULES: [(f32, bool); 2] = [(0.0, false), (1e-4, true)];

/// Poison, also of what fills up the rows of scales.
const UNWRITTEN: f32 = 7.0;

pub fn cases() -> Vec<Case> {
    macro_rules! instances {
        ($($t:ty, $q:ty;)*) => { [$(of_types::<$t, $q>()),*] };
    }
    let mut cases: Vec<_> =
        instances! { bf16, e4m3; bf16, e5m2; f16, e4m3; f16, e5m2; f32, e4m3; f32, e5m2; }.into_iter().flatten().collect();
    cases.push(Case::new("fp8::blocks::refused", Size::Small, refused));
    cases
}

/// An output that is there must be of the matrix: one that is not wanted is `None`, not empty.
fn refused(r: &Runtime) -> Outcome {
    let stream = stream(r)?;
    let (row_blocks, squares) = (text(r.load::<Fp8CastRowBlocks<bf16, e4m3>>())?, text(r.load::<Fp8CastSquares<bf16, e4m3>>())?);
    let input = text(Buffer::<bf16>::zeros(&stream, 8 * 8))?;
    let (shape, options) = ([8, 8], ScaleOptions::default());
    let output = |shape| Output::<e4m3>::new(&stream, Kind::Squares, shape);
    let (mut square, mut nothing) = (output([8, 8])?, output([0, 0])?);
    let args = Fp8CastSquaresArgs {
        input: MatrixArgument::new(input.view(), shape),
        codes: square.codes(),
        transposed: Some(nothing.codes()),
        options,
    };
    refuses("transposed.data", squares.launch(&stream, args))?;
    let args =
        Fp8CastRowBlocksArgs { input: MatrixArgument::new(input.view(), shape), codes: None, transposed: Some(nothing.codes()), options };
    refuses("transposed.data", row_blocks.launch(&stream, args))?;
    let args =
        Fp8CastRowBlocksArgs { input: MatrixArgument::new(input.view(), shape), codes: Some(nothing.codes()), transposed: None, options };
    refuses("codes.data", row_blocks.launch(&stream, args))
}

/// Row blocks or squares.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Kind {
    Rows,
    Squares,
}

impl Kind {
    /// Rows and columns of a block.
    fn block(self) -> [usize; 2] {
        [if self == Self::Rows { 1 } else { BLOCK }, BLOCK]
    }

    /// Where the scale of block `i, j` of a matrix is, and how many places there are.
    fn layout(self, [rows, columns]: [usize; 2]) -> (impl Fn(usize, usize) -> usize, usize) {
        let (stride, lines) = match self {
            Self::Rows => (rows.next_multiple_of(4), columns.div_ceil(BLOCK)),
            Self::Squares => (columns.div_ceil(BLOCK).next_multiple_of(4), rows.div_ceil(BLOCK)),
        };
        (move |i, j| if self == Self::Rows { j * stride + i } else { i * stride + j }, stride * lines)
    }

    /// The inverses of a cast as the kernels lay them out.
    fn laid_out(self, cast: &Quantized, shape: [usize; 2]) -> Vec<f32> {
        let (place, places) = self.layout(shape);
        let across = shape[1].div_ceil(BLOCK).max(1);
        let mut out = vec![UNWRITTEN; places];
        cast.inverses.iter().enumerate().for_each(|(k, inverse)| out[place(k / across, k % across)] = *inverse);
        out
    }
}

fn of_types<T: TestElement + Fp8Number<Q>, Q: TestFp8>() -> Vec<Case> {
    let name = format!("{}::{}", T::DTYPE.name(), Q::NAME);
    let mut cases = Vec::new();
    for kind in [Kind::Rows, Kind::Squares] {
        // Specials of the input and of the codes are handled apart: three pairs of types show both.
        let shows_specials = (T::DTYPE.name() == "f32") == (Q::NAME == "e5m2");
        for scenario in Scenario::ALL.into_iter().filter(|_| shows_specials) {
            cases.push(Case::new(format!("fp8::blocks::{kind:?}::{name}::{scenario:?}"), Size::Small, move |r| {
                RULES.into_iter().try_for_each(|rule| {
                    // The matrix alone takes a kernel of its own.
                    cast::<T, Q>(r, kind, scenario, [18, 152], rule, [true, true])?;
                    cast::<T, Q>(r, kind, scenario, [18, 152], rule, [true, false])
                })
            }));
        }
        let shapes = SHAPES.map(|s| (s, Size::Small)).into_iter().chain([(LARGE, large_of::<T, Q>())]);
        for ((rows, columns), size) in shapes.chain(WHOLE.map(|s| (s, Size::Twin))) {
            let shape = [rows, columns];
            cases.push(Case::new(format!("fp8::blocks::{kind:?}::{name}::{rows}x{columns}"), size, move |r| {
                cast::<T, Q>(r, kind, Scenario::Normal, shape, RULES[0], [true, true])?;
                cast::<T, Q>(r, kind, Scenario::Normal, shape, RULES[0], [true, false])?;
                if kind == Kind::Rows { cast::<T, Q>(r, kind, Scenario::Normal, shape, RULES[0], [false, true]) } else { Ok(()) }
            }));
            let title = format!("fp8::dequantize_blocks::{kind:?}::{name}::{rows}x{columns}");
            cases.push(Case::new(title, size, move |r| back::<T, Q>(r, kind, shape)));
        }
    }
    cases
}

/// What a cast writes, poisoned.
struct Output<Q> {
    data: Buffer<Q>,
    inverses: Buffer<f32>,
}

impl<Q: TestFp8> Output<Q> {
    fn new(stream: &Stream, kind: Kind, shape: [usize; 2]) -> Result<Self, String> {
        let (elements, places) = (shape[0] * shape[1], kind.layout(shape).1);
        let data = text(Buffer::from_slice(stream, &vec![Q::of_code(0xa5); elements]))?;
        Ok(Self { data, inverses: text(Buffer::from_slice(stream, &vec![UNWRITTEN; places]))? })
    }

    fn codes(&mut self) -> CodesArgument<'_, Q, f32> {
        CodesArgument { data: self.data.view_mut(), scales: self.inverses.view_mut() }
    }

    fn equals(&self, stream: &Stream, what: &str, data: &[u8], inverses: &[f32]) -> Outcome {
        let found: Vec<u8> = text(self.data.to_vec(stream))?.into_iter().map(Q::code).collect();
        equal(&format!("inverses of the {what}"), &text(self.inverses.to_vec(stream))?, inverses)?;
        equal(&format!("codes of the {what}"), &found, data)
    }
}

fn cast<T: TestElement + Fp8Number<Q>, Q: TestFp8>(
    r: &Runtime,
    kind: Kind,
    scenario: Scenario,
    shape: [usize; 2],
    (epsilon, power_of_two): (f32, bool),
    asked: [bool; 2],
) -> Outcome {
    let stream = stream(r)?;
    let values = scenario.generate(T::DTYPE, shape[0] * shape[1], 3);
    let rule = Rule { epsilon, power_of_two, largest: T::DTYPE.largest() };
    let turned_shape = [shape[1], shape[0]];
    let matrix = quantize(&values, shape, kind.block(), Q::FORMAT, rule);
    let turned = quantize(&transpose(&values, shape), turned_shape, kind.block(), Q::FORMAT, rule);
    let input = T::upload(&stream, &values)?;
    let output = |asked: bool, shape| asked.then(|| Output::<Q>::new(&stream, kind, shape)).transpose();
    let (mut of_matrix, mut of_transpose) = (output(asked[0], shape)?, output(asked[1], turned_shape)?);
    let (input, options) = (MatrixArgument::new(input.view(), shape.map(|side| side as u64)), ScaleOptions { epsilon, power_of_two });
    let [codes, transposed] = [&mut of_matrix, &mut of_transpose].map(|output| output.as_mut().map(Output::codes));
    text(match (kind, codes, transposed) {
        (Kind::Rows, Some(CodesArgument { data, scales: scale_inverses }), None) => {
            let args = Fp8CastRowBlocksAloneArgs { input, data, scale_inverses, options };
            text(r.load::<T::CastRowBlocksAlone>())?.launch(&stream, args)
        }
        (Kind::Rows, codes, transposed) => {
            text(r.load::<T::CastRowBlocks>())?.launch(&stream, Fp8CastRowBlocksArgs { input, codes, transposed, options })
        }
        (Kind::Squares, codes, transposed) => {
            let codes = codes.expect("squares are always cast as they are");
            text(r.load::<T::CastSquares>())?.launch(&stream, Fp8CastSquaresArgs { input, codes, transposed, options })
        }
    })?;
    if let Some(of_matrix) = of_matrix {
        of_matrix.equals(&stream, "matrix", &matrix.data, &kind.laid_out(&matrix, shape))?;
    }
    match of_transpose {
        Some(output) => output.equals(&stream, "transpose", &turned.data, &kind.laid_out(&turned, turned_shape)),
        None => Ok(()),
    }
}

/// Every code, NaN and Inf among them, and scales of many magnitudes.
fn back<T: TestElement + Fp8Number<Q>, Q: TestFp8>(r: &Runtime, kind: Kind, shape: [usize; 2]) -> Outcome {
    let stream = stream(r)?;
    let mut random = Random::new(5);
    let (block, elements) = (kind.block(), shape[0] * shape[1]);
    let blocks = shape[0].div_ceil(block[0]) * shape[1].div_ceil(block[1]);
    let cast = Quantized {
        data: (0..elements).map(|i| (i as u64 ^ random.below(256)) as u8).collect(),
        inverses: (0..blocks).map(|_| (1.0 + random.unit()) * 2f32.powi(random.below(40) as i32 - 20)).collect(),
    };
    let expected: Vec<u32> = dequantize(&cast, shape, block, Q::FORMAT).into_iter().map(rounded_bits::<T>).collect();
    let data = text(Buffer::from_slice(&stream, &cast.data.iter().map(|&code| Q::of_code(code)).collect::<Vec<_>>()))?;
    let inverses = text(Buffer::from_slice(&stream, &kind.laid_out(&cast, shape)))?;
    let mut output = text(Buffer::from_slice(&stream, &T::encode(&vec![7.0; elements])))?;
    let (place, _) = kind.layout(shape);
    let args = Fp8DequantizeBlocksArgs {
        input: MatrixArgument::new(data.view(), shape.map(|side| side as u64)),
        scales: BlockScalesArgument {
            inverses: inverses.view(),
            row_shift: block[0].trailing_zeros(),
            row_stride: place(1, 0) as u64,
            block_stride: place(0, 1) as u64,
        },
        output: output.view_mut(),
    };
    text(text(r.load::<T::DequantizeBlocks>())?.launch(&stream, args))?;
    let found: Vec<u32> = text(output.to_vec(&stream))?.into_iter().map(comparable_bits::<T>).collect();
    equal("output", &found, &expected)
}
