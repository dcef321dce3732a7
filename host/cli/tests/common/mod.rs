//! What the tests of the command line share: files made by hand, scalar quantizers, the binary.
#![allow(dead_code, reason = "each test binary uses its part")]

use std::{
    path::{Path, PathBuf},
    process::{Command, Output},
};

use oxtile_cli::{
    progress::Progress,
    quantize::{
        self, DeviceError, Elements, Format, Outcome, QuantizeDevice, QuantizedRows, Scheme,
        job::JobError,
        report::{DeviceChoice, Report},
    },
};

/// A safetensors file with this header and this data.
pub fn file(header: &str, data: &[u8]) -> Vec<u8> {
    let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
    bytes.extend(header.as_bytes());
    bytes.extend(data);
    bytes
}

/// Names in a folder, sorted.
pub fn names(folder: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(folder).expect("a readable folder");
    let mut names: Vec<_> = entries.map(|entry| entry.expect("an entry").file_name().to_string_lossy().into_owned()).collect();
    names.sort();
    names
}

/// The command line's binary.
pub fn oxtile() -> Command {
    Command::new(env!("CARGO_BIN_EXE_oxtile"))
}

/// Runs the binary to its end.
pub fn run(arguments: &[&dyn AsRef<std::ffi::OsStr>]) -> Output {
    oxtile().args(arguments.iter().map(|argument| argument.as_ref())).output().expect("the binary runs")
}

/// Standard error of a run.
pub fn stderr(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

/// Quantizes to MXFP8 with the scalar quantizer.
pub fn quantize(input: &Path, output: &Path) -> Result<Outcome, JobError> {
    quantize_to(Format::Mxfp8, input, output)
}

/// Quantizes with the scalar quantizer.
pub fn quantize_to(format: Format, input: &Path, output: &Path) -> Result<Outcome, JobError> {
    quantize::run(input, output, format, &mut Scalar, &mut Progress::hidden())
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

/// The formats by their definitions, one element at a time. It shares no code with the kernels.
pub struct Scalar;

impl QuantizeDevice for Scalar {
    fn name(&self) -> String {
        "scalar".into()
    }

    fn amax(&mut self, input: Elements<'_>) -> Result<f32, DeviceError> {
        Ok(amax(&values(input)))
    }

    fn quantize(&mut self, scheme: Scheme, rows: usize, columns: usize, input: Elements<'_>) -> Result<QuantizedRows, DeviceError> {
        let input = values(input);
        assert_eq!(input.len(), rows * columns, "the elements are a matrix");
        assert_eq!(columns % scheme.format().block() as usize, 0, "rows are whole blocks");
        Ok(match scheme {
            Scheme::Mxfp8 => mxfp8(&input),
            Scheme::Nvfp4 { amax } => nvfp4(&input, amax),
        })
    }
}

fn values(input: Elements<'_>) -> Vec<f32> {
    match input {
        Elements::F32(input) => input.to_vec(),
        Elements::F16(input) => input.iter().map(|x| x.to_f32()).collect(),
        Elements::Bf16(input) => input.iter().map(|x| x.to_f32()).collect(),
    }
}

fn amax(input: &[f32]) -> f32 {
    input.iter().fold(0f32, |amax, x| amax.max(x.abs()))
}

fn mxfp8(input: &[f32]) -> QuantizedRows {
    let (mut data, mut scales) = (Vec::new(), Vec::new());
    for block in input.chunks_exact(32) {
        let scale = e8m0_round_up(amax(block) * (1.0 / 448.0));
        scales.push(scale);
        data.extend(block.iter().map(|&x| e4m3(f64::from(x) * 2f64.powi(127 - i32::from(scale)))));
    }
    QuantizedRows { data, scales, amax: amax(input) }
}

/// TransformerEngine `core_nvfp4.cuh`; the amax is no NaN.
fn nvfp4(input: &[f32], tensor_amax: f32) -> QuantizedRows {
    let encode = match (2688.0 / tensor_amax).min(f32::MAX) {
        encode if tensor_amax == 0.0 || encode == 0.0 => 1.0,
        encode => encode,
    };
    let (mut data, mut scales) = (Vec::new(), Vec::new());
    for block in input.chunks_exact(16) {
        let scale = e4m3(f64::from((amax(block) * (encode * (1.0 / 6.0))).min(f32::MAX)));
        let multiplier = (1.0 / (e4m3_magnitude(scale) as f32 * (1.0 / encode))).min(f32::MAX);
        scales.push(scale);
        data.extend(block.chunks_exact(2).map(|pair| e2m1(pair[0] * multiplier) | e2m1(pair[1] * multiplier) << 4));
    }
    QuantizedRows { data, scales, amax: tensor_amax }
}

/// The nearest E2M1 code, ties to the even one, saturating.
fn e2m1(value: f32) -> u8 {
    if value.is_nan() {
        return 7;
    }
    let distance = |code: &u8| ([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0][usize::from(*code)] - value.abs().min(6.0)).abs();
    let nearest = (0..8u8).min_by(|a, b| distance(a).total_cmp(&distance(b)).then((a & 1).cmp(&(b & 1))));
    nearest.expect("there are codes") | if value.is_sign_negative() { 8 } else { 0 }
}

/// The least power of two that is not below a non-negative number, between 2^-127 and 2^127, as an E8M0 code.
fn e8m0_round_up(value: f32) -> u8 {
    (0..=254u8).find(|&code| 2f64.powi(i32::from(code) - 127) >= f64::from(value)).unwrap_or(254)
}

/// The nearest E4M3 code, ties to the even one, saturating.
fn e4m3(value: f64) -> u8 {
    let sign = if value.is_sign_negative() { 0x80 } else { 0 };
    if value.is_nan() {
        return 0x7f;
    }
    let distance = |code: u8| (e4m3_magnitude(code) - value.abs().min(448.0)).abs();
    let nearest = (0..=0x7eu8).min_by(|&a, &b| distance(a).total_cmp(&distance(b)).then((a & 1).cmp(&(b & 1))));
    sign | nearest.expect("there are codes")
}

/// The value of a non-negative E4M3 code.
fn e4m3_magnitude(code: u8) -> f64 {
    match (i32::from(code >> 3), f64::from(code & 7)) {
        (0, mantissa) => mantissa * 2f64.powi(-9),
        (exponent, mantissa) => (8.0 + mantissa) * 2f64.powi(exponent - 10),
    }
}
