//! What the tests of the command line share: files made by hand, scalar quantizers, the binary.
#![allow(dead_code, reason = "each test binary uses its part")]

pub mod shards;
pub mod tensors;

use std::{
    os::unix::process::CommandExt,
    path::{Path, PathBuf},
    process::{Command, Output},
};

use oxtile_cli::{
    progress::Progress,
    quantize::{
        self, Codes, DeviceError, Direction, Elements, Format, Outcome, Piece, QuantizeDevice, Quantized, Recipe, Side,
        job::JobError,
        report::{DeviceChoice, Report},
    },
    safetensors::Checkpoint,
};
use oxtile_tests::oracle::{
    self,
    amax::amax,
    formats::{E2M1, E4M3},
    nvfp4_stochastic::{Generator, round},
};

/// A safetensors file with this header and this data.
pub fn file(header: &str, data: &[u8]) -> Vec<u8> {
    let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
    bytes.extend(header.as_bytes());
    bytes.extend(data);
    bytes
}

/// The bytes of a tensor in a file.
pub fn tensor_bytes(path: &Path, name: &str) -> Vec<u8> {
    let checkpoint = Checkpoint::open(path).expect("a valid file");
    let tensor = checkpoint.tensors().iter().find(|tensor| tensor.name == name).expect("the tensor is there");
    let windows = checkpoint.windows(tensor, 1 << 20);
    windows.flat_map(|window| window.expect("mapped").to_vec()).collect()
}

/// Names in a folder, sorted.
pub fn names(folder: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(folder).expect("a readable folder");
    let mut names: Vec<_> = entries.map(|entry| entry.expect("an entry").file_name().to_string_lossy().into_owned()).collect();
    names.sort();
    names
}

/// The command line's binary, which a signal ends even where the tests run under nohup(1).
pub fn oxtile() -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_oxtile"));
    let heed = || {
        // SAFETY: the call takes no pointer and touches no memory.
        unsafe { libc::signal(libc::SIGHUP, libc::SIG_DFL) };
        Ok(())
    };
    // SAFETY: between fork and exec the closure makes one system call and nothing else.
    unsafe { command.pre_exec(heed) };
    command
}

/// Runs the binary to its end.
pub fn run(arguments: &[&dyn AsRef<std::ffi::OsStr>]) -> Output {
    oxtile().args(arguments.iter().map(|argument| argument.as_ref())).output().expect("the binary runs")
}

/// Standard error of a run.
pub fn stderr(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

/// Every tag is closed in its order, and every attribute of a picture is quoted: what XML asks for. It loads nothing.
pub fn assert_well_formed(picture: &str) {
    let mut open = Vec::new();
    let mut rest = picture;
    while let Some(start) = rest.find('<') {
        assert!(!rest[..start].contains('>') || open.last() == Some(&"style"), "a stray > in {:?}", &rest[..start]);
        let end = start + rest[start..].find('>').expect("a tag ends");
        let tag = &rest[start + 1..end];
        match tag.strip_prefix('/') {
            Some(name) => assert_eq!(open.pop(), Some(name), "closed in order"),
            None if tag.ends_with('/') => {}
            None => open.push(tag.split_whitespace().next().expect("a name")),
        }
        assert_eq!(tag.matches('"').count() % 2, 0, "{tag}");
        rest = &rest[end + 1..];
    }
    assert!(open.is_empty(), "{open:?} stay open");
    for loaded in ["<script", "@import", "href", "url(", "<image", "<foreignObject"] {
        assert!(!picture.contains(loaded), "{loaded}: the picture loads nothing");
    }
    assert_eq!(picture.matches("http").count(), 1, "the name space alone");
    assert!(picture.contains("prefers-color-scheme:dark") && picture.contains("role=\"img\""));
}

/// Quantizes to MXFP8 with the scalar quantizer.
pub fn quantize(input: &Path, output: &Path) -> Result<Outcome, JobError> {
    quantize_by(Recipe::default(), input, output)
}

/// Quantizes with the scalar quantizer.
pub fn quantize_by(recipe: Recipe, input: &Path, output: &Path) -> Result<Outcome, JobError> {
    quantize::run(input, output, recipe, &mut Scalar, &mut Progress::hidden())
}

/// Quantizes with the scalar quantizer and returns the JSON report.
pub fn quantize_json(input: &Path, output: &Path) -> String {
    let outcome = quantize(input, output).expect("a valid checkpoint");
    let device = DeviceChoice { requested: "auto", name: "scalar".into(), reason: "a test".into() };
    serde_json::to_string_pretty(&Report::new(input, output, device, &outcome)).expect("a report is JSON")
}

/// A small checkpoint with every kind of tensor that a job meets; its path.
pub fn small_checkpoint(folder: &Path) -> PathBuf {
    let header = r#"{"__metadata__":{"format":"pt"},
        "matrix":{"dtype":"F32","shape":[2,64],"data_offsets":[0,512]},
        "half":{"dtype":"F16","shape":[1,32],"data_offsets":[512,576]},
        "brain":{"dtype":"BF16","shape":[2,1,32],"data_offsets":[576,704]},
        "bias":{"dtype":"F32","shape":[3],"data_offsets":[704,716]},
        "narrow":{"dtype":"F32","shape":[2,3],"data_offsets":[716,740]},
        "ids":{"dtype":"I64","shape":[1,2],"data_offsets":[740,756]},
        "scalar":{"dtype":"F32","shape":[],"data_offsets":[756,760]},
        "empty":{"dtype":"F32","shape":[0,32],"data_offsets":[760,760]}}"#;
    let matrix = (0..128).map(|i| (i as f32 - 60.0) * 0.37);
    let mut data: Vec<u8> = matrix.flat_map(f32::to_le_bytes).collect();
    data.extend((0..32).flat_map(|i| half::f16::from_f32(i as f32 / 3.0).to_le_bytes()));
    data.extend((0..64).flat_map(|i| half::bf16::from_f32(i as f32 * 1e-3).to_le_bytes()));
    data.extend((0..9).flat_map(|i| (i as f32).to_le_bytes()));
    data.extend((0..2i64).flat_map(i64::to_le_bytes));
    data.extend(42f32.to_le_bytes());
    let path = folder.join("small.safetensors");
    std::fs::write(&path, file(header, &data)).expect("a writable folder");
    path
}

/// The formats by their definitions, on the oracles of the kernels' own tests, which share no code with the kernels.
pub struct Scalar;

impl QuantizeDevice for Scalar {
    fn name(&self) -> String {
        "scalar".into()
    }

    fn amax(&mut self, recipe: &Recipe, [_, columns]: [u64; 2], input: Elements<'_>) -> Result<[f32; 2], DeviceError> {
        let values = input.to_f32();
        Ok([amax(&values), amax(&by_columns(recipe.hadamard, &values, columns))])
    }

    fn quantize(&mut self, recipe: &Recipe, piece: &Piece, input: Elements<'_>) -> Result<Quantized, DeviceError> {
        // Row blocks of FP8 take the largest number of the input's type where a scale would be infinite.
        let largest = match input {
            Elements::F32(_) => f32::MAX,
            Elements::F16(_) => 65504.0,
            Elements::Bf16(_) => half::bf16::MAX.to_f32(),
        };
        let values = input.to_f32();
        let mut output = Quantized { amax: amax(&values), ..Quantized::default() };
        for &direction in recipe.directions.each() {
            output.sides[direction as usize] = Some(cast(recipe, direction, piece, &values, largest));
        }
        Ok(output)
    }

    fn interleave(&mut self, side: &Side, compact: &[u8]) -> Result<Vec<u8>, DeviceError> {
        let [outer, blocks] = side.extents().map(|n| n as usize);
        let is_turned = (side.format, side.direction) == (Format::Mxfp8, Direction::Columns);
        let scale = |i: usize, j: usize| compact[if is_turned { j * outer + i } else { i * blocks + j }];
        Ok(oracle::interleave::interleave(outer, blocks, scale))
    }
}

/// The columns one after another, transformed or not.
fn by_columns(hadamard: bool, values: &[f32], columns: u64) -> Vec<f32> {
    let turned = oracle::nvfp4::transpose(values, columns as usize);
    if hadamard { oracle::nvfp4::hadamard(&turned) } else { turned }
}

fn cast(recipe: &Recipe, direction: Direction, piece: &Piece, values: &[f32], largest: f32) -> Codes {
    let [rows, columns] = piece.shape.map(|n| n as usize);
    let (turned, [lines, length]) = match direction {
        Direction::Rows => (values.to_vec(), [rows, columns]),
        Direction::Columns => (by_columns(recipe.hadamard, values, piece.shape[1]), [columns, rows]),
    };
    let tensor_amax = piece.amax[direction as usize];
    let rule = |largest| oracle::fp8::Rule { epsilon: 0.0, power_of_two: false, largest };
    match (recipe.format, direction) {
        (Format::Mxfp8, Direction::Rows) => {
            let oracle::mxfp8::Quantized { data, scales } = oracle::mxfp8::quantize(values, rows, columns, &E4M3);
            Codes { data, scales }
        }
        (Format::Mxfp8, Direction::Columns) => {
            let oracle::mxfp8::Quantized { data, scales } = oracle::mxfp8::quantize_columns(values, rows, columns, &E4M3);
            Codes { data, scales }
        }
        (Format::Nvfp4Squares, _) => {
            let scaling = oracle::nvfp4::squares(&turned, length);
            let cast = oracle::nvfp4::quantize_shared(&turned, &scaling, tensor_amax, |_, x| E2M1.encode(f64::from(x)) as u8);
            Codes { data: cast.data, scales: cast.scales }
        }
        (Format::Nvfp4, _) => {
            let cast = match recipe.seed {
                None => oracle::nvfp4::quantize(&turned, tensor_amax),
                Some(seed) => {
                    let generator = Generator { seed, offset: piece.sequence, bits: 16, columns: direction == Direction::Columns };
                    oracle::nvfp4::quantize_by(&turned, tensor_amax, |i, x| round(x, generator.number(i)))
                }
            };
            Codes { data: cast.data, scales: cast.scales }
        }
        (Format::Fp8, _) => {
            let scale = oracle::fp8::scale(tensor_amax, &E4M3, rule(f32::MAX));
            Codes { data: oracle::fp8::encode(&turned, scale, &E4M3), scales: (1.0 / scale).to_le_bytes().into() }
        }
        (Format::Fp8Block, _) => {
            let cast = oracle::fp8::quantize(&turned, [lines, length], [1, 128], &E4M3, rule(largest));
            Codes { data: cast.data, scales: cast.inverses.into_iter().flat_map(f32::to_le_bytes).collect() }
        }
    }
}

/// The values, row-major, that codes and compact scales of a matrix stand for.
pub fn restore(side: &Side, hadamard: bool, codes: &Codes, amax: f32) -> Vec<f32> {
    let ([rows, columns], [lines, length]) = (side.shape.map(|n| n as usize), side.lines().map(|n| n as usize));
    let Codes { data, scales } = codes.clone();
    let inverses = || scales.as_chunks().0.iter().copied().map(f32::from_le_bytes).collect::<Vec<_>>();
    let values = match (side.format, side.direction) {
        (Format::Mxfp8, Direction::Rows) => oracle::mxfp8::dequantize(&oracle::mxfp8::Quantized { data, scales }, rows, columns, &E4M3),
        (Format::Mxfp8, Direction::Columns) => {
            oracle::mxfp8::dequantize_columns(&oracle::mxfp8::Quantized { data, scales }, rows, columns, &E4M3)
        }
        (Format::Nvfp4 | Format::Nvfp4Squares, _) => oracle::nvfp4::dequantize(&oracle::nvfp4::Quantized { data, scales, amax }),
        (Format::Fp8, _) => oracle::fp8::decode(&data, inverses()[0], &E4M3),
        (Format::Fp8Block, _) => {
            let inverses = inverses();
            oracle::fp8::dequantize(&oracle::fp8::Quantized { data, inverses }, [lines, length], [1, 128], &E4M3)
        }
    };
    let values = if hadamard { without_hadamard(&values) } else { values };
    if side.is_transposed() { oracle::nvfp4::transpose(&values, length) } else { values }
}

/// The inverse of the transform `H D / 4` is `D H / 4`, that is the transform between two changes of signs.
fn without_hadamard(values: &[f32]) -> Vec<f32> {
    // The first of a transformed unit vector is its sign over 4.
    let sign = |i: usize| {
        let mut unit = [0.0; 16];
        unit[i % 16] = 4.0;
        oracle::nvfp4::hadamard(&unit)[0]
    };
    let signs: Vec<f32> = (0..16).map(sign).collect();
    let changed = |values: &[f32]| values.iter().enumerate().map(|(i, x)| x * signs[i % 16]).collect::<Vec<_>>();
    changed(&oracle::nvfp4::hadamard(&changed(values)))
}
