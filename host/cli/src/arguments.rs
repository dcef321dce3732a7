//! The command line, parsed.

use std::{ffi::OsString, path::PathBuf};

use lexopt::{Arg, Parser, ValueExt};
use oxtile_build::Arch;

use crate::{quantize::Format, safetensors::Dtype};

/// What the user asks for.
#[derive(Debug, PartialEq)]
pub enum Request {
    /// Print a help text.
    Help(&'static str),
    /// Print the version.
    Version,
    /// Quantize a checkpoint.
    Quantize(Quantize),
    /// Show what is in a file.
    Inspect(Inspect),
    /// Compile kernels.
    Build(Build),
    /// Make a checkpoint to try things on.
    DemoCheckpoint(DemoCheckpoint),
}

/// `oxtile quantize`.
#[derive(Debug, PartialEq)]
pub struct Quantize {
    /// The checkpoint.
    pub input: PathBuf,
    /// The file to be made.
    pub output: PathBuf,
    /// What the tensors are quantized to.
    pub format: Format,
    /// Where it runs.
    pub device: Device,
    /// JSON instead of tables.
    pub json: bool,
}

/// `--device`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Device {
    /// A GPU if there is one, else the emulator.
    Auto,
    /// The first GPU.
    Cuda,
    /// The emulator.
    Emulated,
}

impl Device {
    /// Its name on the command line.
    pub const fn name(self) -> &'static str {
        match self {
            Device::Auto => "auto",
            Device::Cuda => "cuda",
            Device::Emulated => "emulated",
        }
    }
}

/// `oxtile inspect`.
#[derive(Debug, PartialEq)]
pub struct Inspect {
    /// The file.
    pub file: PathBuf,
    /// JSON instead of tables.
    pub json: bool,
}

/// `oxtile build`.
#[derive(Debug, PartialEq)]
pub struct Build {
    /// `Cargo.toml` of the crate that holds the kernels.
    pub manifest: PathBuf,
    /// Architectures; none is the default one.
    pub archs: Vec<Arch>,
    /// The only family to build.
    pub family: Option<String>,
    /// Where the kernels go.
    pub out_dir: Option<PathBuf>,
    /// With bounds checks.
    pub checked: bool,
}

/// `oxtile demo-checkpoint`.
#[derive(Debug, PartialEq)]
pub struct DemoCheckpoint {
    /// What the values are made from.
    pub seed: u64,
    /// The file to be made.
    pub output: PathBuf,
    /// Type of its weights.
    pub dtype: Dtype,
}

/// A command line that makes no sense.
#[derive(Debug, thiserror::Error)]
#[error("{reason}; `oxtile {}--help` shows the usage", .command.map_or(String::new(), |command| format!("{command} ")))]
pub struct UsageError {
    command: Option<&'static str>,
    reason: String,
}

/// The help of `oxtile` itself.
pub const HELP: &str = "\
oxtile: low-precision checkpoints with GPU kernels written in Rust

Usage: oxtile COMMAND [OPTIONS]

Commands:
  quantize         Quantize the matrices of a safetensors file to MXFP8 or NVFP4
  inspect          Show the tensors of a safetensors file and what their values are like
  build            Compile the kernels of a Rust crate for the GPU
  demo-checkpoint  Make a 22.7 M-parameter checkpoint from a seed, to try the others on

Options:
  -h, --help       Show this, or with a command that command's options
  -V, --version    Show the version
";

const QUANTIZE_HELP: &str = "\
Quantize the matrices of a safetensors file to MXFP8 or NVFP4

Usage: oxtile quantize --input FILE --output FILE [OPTIONS]

Options:
  -i, --input FILE     The checkpoint to read; F32, F16 and BF16 tensors are quantized
  -o, --output FILE    The checkpoint to write; it appears only when it is complete
      --format FORMAT  mxfp8 (the default): E4M3 elements, an E8M0 scale for every 32 of a row
                       nvfp4: E2M1 elements, an E4M3 scale for every 16 of a row, one for the tensor
      --device DEVICE  auto (the default): a GPU if there is one, else the emulator; cuda; emulated
      --json           Print one JSON document instead of tables
  -h, --help           Show this

A tensor NAME of two or more dimensions, M the product of all but the last, K the last and a multiple of 32, becomes
  NAME               F8_E4M3  its shape  the elements
  NAME_scale         F8_E8M0  [M, K/32]  their scales
  NAME_amax          F32      [1]        its largest magnitude
or, with K a multiple of 16, in nvfp4
  NAME_packed        U8       [M, K/2]   the elements in pairs, the even one in the low nibble
  NAME_scale         F8_E4M3  [M, K/16]  their scales
  NAME_global_scale  F32      [1]        what the tensor was multiplied by before: 6 * 448 / amax
  NAME_amax          F32      [1]        its largest magnitude
Every other tensor is copied as it is and listed with the reason.
";

const INSPECT_HELP: &str = "\
Show the tensors of a safetensors file and what their values are like

Usage: oxtile inspect FILE [OPTIONS]

Options:
      --json  Print one JSON document instead of tables
  -h, --help  Show this
";

const BUILD_HELP: &str = "\
Compile the kernels of a Rust crate for the GPU, check them and assemble them

Usage: oxtile build --manifest-path FILE [OPTIONS]

Options:
      --manifest-path FILE  Cargo.toml of the crate that holds the kernels
      --arch ARCH,...       Architectures by ptxas's names (default sm_90a)
      --family FAMILY       Build the kernels of one family alone
      --out-dir FOLDER      Where manifest.json, PTX and cubins go
                            (default target/oxtile/kernels/PACKAGE)
      --checked             Compile bounds checks in
  -h, --help                Show this
";

const DEMO_HELP: &str = "\
Make a checkpoint to try things on: the tensors of a 22.7 M-parameter BERT encoder
(6 layers, width 384, vocabulary 30522), with values from a seed

Usage: oxtile demo-checkpoint --output FILE [OPTIONS]

Options:
  -o, --output FILE  The checkpoint to write
      --seed SEED    A number (default 0); the same seed makes the same file
      --dtype DTYPE  f32 (the default), bf16 or f16
  -h, --help         Show this
";

/// Parses a command line without the program's name.
///
/// # Errors
/// A [`UsageError`] that says what is wrong with it.
pub fn parse(arguments: impl IntoIterator<Item = impl Into<OsString>>) -> Result<Request, UsageError> {
    let mut parser = Parser::from_args(arguments);
    let command = match next(&mut parser, None)? {
        None | Some(Word::Help) => return Ok(Request::Help(HELP)),
        Some(Word::Flag(flag)) if flag == "version" => return Ok(Request::Version),
        Some(Word::Flag(flag)) => return Err(unexpected(None, &format!("--{flag}"))),
        Some(Word::Value(command)) => command,
    };
    match command.to_str() {
        Some("quantize") => parse_quantize(&mut parser),
        Some("inspect") => parse_inspect(&mut parser),
        Some("build") => parse_build(&mut parser),
        Some("demo-checkpoint") => parse_demo(&mut parser),
        Some("help") => Ok(Request::Help(HELP)),
        _ => Err(UsageError { command: None, reason: format!("no command is named {command:?}") }),
    }
}

/// One word of the command line. `-h` and `--help` read the same everywhere.
enum Word {
    Help,
    Flag(String),
    Value(OsString),
}

fn next(parser: &mut Parser, command: Option<&'static str>) -> Result<Option<Word>, UsageError> {
    let word = parser.next().map_err(|error| UsageError { command, reason: error.to_string() })?;
    Ok(word.map(|word| match word {
        Arg::Short('h') | Arg::Long("help") => Word::Help,
        Arg::Short('V') => Word::Flag("version".into()),
        Arg::Short('i') => Word::Flag("input".into()),
        Arg::Short('o') => Word::Flag("output".into()),
        Arg::Short(other) => Word::Flag(other.into()),
        Arg::Long(flag) => Word::Flag(flag.into()),
        Arg::Value(value) => Word::Value(value),
    }))
}

fn unexpected(command: Option<&'static str>, word: &str) -> UsageError {
    UsageError { command, reason: format!("unexpected argument {word:?}") }
}

fn parse_quantize(parser: &mut Parser) -> Result<Request, UsageError> {
    const COMMAND: Option<&str> = Some("quantize");
    let (mut input, mut output, mut format, mut device, mut json) = (None, None, Format::Mxfp8, Device::Auto, false);
    while let Some(word) = next(parser, COMMAND)? {
        match word {
            Word::Help => return Ok(Request::Help(QUANTIZE_HELP)),
            Word::Value(value) => return Err(unexpected(COMMAND, &value.to_string_lossy())),
            Word::Flag(flag) => match flag.as_str() {
                "input" => input = Some(path(parser, COMMAND)?),
                "output" => output = Some(path(parser, COMMAND)?),
                "format" => format = choice(parser, COMMAND, "--format", &Format::ALL.map(|format| (format.name(), format)))?,
                "device" => {
                    let devices = [Device::Auto, Device::Cuda, Device::Emulated];
                    device = choice(parser, COMMAND, "--device", &devices.map(|device| (device.name(), device)))?;
                }
                "json" => json = true,
                other => return Err(unexpected(COMMAND, &format!("--{other}"))),
            },
        }
    }
    Ok(Request::Quantize(Quantize {
        input: required(input, COMMAND, "--input FILE")?,
        output: required(output, COMMAND, "--output FILE")?,
        format,
        device,
        json,
    }))
}

fn parse_inspect(parser: &mut Parser) -> Result<Request, UsageError> {
    const COMMAND: Option<&str> = Some("inspect");
    let (mut file, mut json) = (None, false);
    while let Some(word) = next(parser, COMMAND)? {
        match word {
            Word::Help => return Ok(Request::Help(INSPECT_HELP)),
            Word::Flag(flag) if flag == "json" => json = true,
            Word::Flag(flag) => return Err(unexpected(COMMAND, &format!("--{flag}"))),
            Word::Value(value) if file.is_none() => file = Some(value.into()),
            Word::Value(value) => return Err(unexpected(COMMAND, &value.to_string_lossy())),
        }
    }
    Ok(Request::Inspect(Inspect { file: required(file, COMMAND, "FILE")?, json }))
}

fn parse_build(parser: &mut Parser) -> Result<Request, UsageError> {
    const COMMAND: Option<&str> = Some("build");
    let (mut manifest, mut archs, mut family, mut out_dir, mut checked) = (None, Vec::new(), None, None, false);
    while let Some(word) = next(parser, COMMAND)? {
        match word {
            Word::Help => return Ok(Request::Help(BUILD_HELP)),
            Word::Value(value) => return Err(unexpected(COMMAND, &value.to_string_lossy())),
            Word::Flag(flag) => match flag.as_str() {
                "manifest-path" => manifest = Some(path(parser, COMMAND)?),
                "arch" => {
                    for name in text(parser, COMMAND)?.split(',') {
                        let arch = name.trim().parse::<Arch>();
                        archs.push(arch.map_err(|error| UsageError { command: COMMAND, reason: error.to_string() })?);
                    }
                }
                "family" => family = Some(text(parser, COMMAND)?),
                "out-dir" => out_dir = Some(path(parser, COMMAND)?),
                "checked" => checked = true,
                other => return Err(unexpected(COMMAND, &format!("--{other}"))),
            },
        }
    }
    let manifest = required(manifest, COMMAND, "--manifest-path FILE")?;
    Ok(Request::Build(Build { manifest, archs, family, out_dir, checked }))
}

fn parse_demo(parser: &mut Parser) -> Result<Request, UsageError> {
    const COMMAND: Option<&str> = Some("demo-checkpoint");
    let (mut seed, mut output, mut dtype) = (0, None, Dtype::F32);
    while let Some(word) = next(parser, COMMAND)? {
        match word {
            Word::Help => return Ok(Request::Help(DEMO_HELP)),
            Word::Value(value) => return Err(unexpected(COMMAND, &value.to_string_lossy())),
            Word::Flag(flag) => match flag.as_str() {
                "seed" => {
                    let value = parser.value().and_then(|value| value.parse());
                    seed = value.map_err(|error| UsageError { command: COMMAND, reason: format!("--seed: {error}") })?;
                }
                "output" => output = Some(path(parser, COMMAND)?),
                "dtype" => {
                    let dtypes = [("f32", Dtype::F32), ("bf16", Dtype::Bf16), ("f16", Dtype::F16)];
                    dtype = choice(parser, COMMAND, "--dtype", &dtypes)?;
                }
                other => return Err(unexpected(COMMAND, &format!("--{other}"))),
            },
        }
    }
    Ok(Request::DemoCheckpoint(DemoCheckpoint { seed, output: required(output, COMMAND, "--output FILE")?, dtype }))
}

fn path(parser: &mut Parser, command: Option<&'static str>) -> Result<PathBuf, UsageError> {
    match parser.value() {
        Ok(value) => Ok(value.into()),
        Err(error) => Err(UsageError { command, reason: error.to_string() }),
    }
}

fn text(parser: &mut Parser, command: Option<&'static str>) -> Result<String, UsageError> {
    parser.value().and_then(|value| value.string()).map_err(|error| UsageError { command, reason: error.to_string() })
}

fn choice<T: Copy>(parser: &mut Parser, command: Option<&'static str>, flag: &str, choices: &[(&str, T)]) -> Result<T, UsageError> {
    let value = parser.value().map_err(|error| UsageError { command, reason: error.to_string() })?;
    let chosen = choices.iter().find(|(name, _)| value == *name).map(|&(_, choice)| choice);
    chosen.ok_or_else(|| {
        let names: Vec<_> = choices.iter().map(|&(name, _)| name).collect();
        UsageError { command, reason: format!("{flag} {value:?} is none of: {}", names.join(", ")) }
    })
}

fn required<T>(value: Option<T>, command: Option<&'static str>, what: &str) -> Result<T, UsageError> {
    value.ok_or_else(|| UsageError { command, reason: format!("{what} is missing") })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(line: &str) -> Result<Request, UsageError> {
        parse(line.split_whitespace())
    }

    fn refusal(line: &str) -> String {
        words(line).expect_err("a refusal").to_string()
    }

    #[test]
    fn every_option_reaches_its_command() {
        let quantize = Quantize { input: "a".into(), output: "b".into(), format: Format::Nvfp4, device: Device::Emulated, json: true };
        assert_eq!(words("quantize --input a -o b --format nvfp4 --device=emulated --json").expect("valid"), Request::Quantize(quantize));
        let inspect = Inspect { file: "a".into(), json: false };
        assert_eq!(words("inspect a").expect("valid"), Request::Inspect(inspect));
        let demo = DemoCheckpoint { seed: 7, output: "a".into(), dtype: Dtype::Bf16 };
        assert_eq!(words("demo-checkpoint --seed 7 --output a --dtype bf16").expect("valid"), Request::DemoCheckpoint(demo));
        let build = Build {
            manifest: "a/Cargo.toml".into(),
            archs: vec!["sm_90a".parse().expect("an architecture"), "sm_120a".parse().expect("an architecture")],
            family: Some("amax".into()),
            out_dir: Some("b".into()),
            checked: true,
        };
        let line = "build --manifest-path a/Cargo.toml --arch sm_90a,sm_120a --family amax --out-dir b --checked";
        assert_eq!(words(line).expect("valid"), Request::Build(build));
        for line in ["", "--help", "-h", "help", "quantize --help", "inspect -h", "build --help", "demo-checkpoint --help"] {
            assert!(matches!(words(line), Ok(Request::Help(_))), "{line}");
        }
        assert_eq!(words("-V").expect("valid"), Request::Version);
    }

    #[test]
    fn refusals_name_the_word_and_the_help() {
        assert_eq!(refusal("quantize --output b"), "--input FILE is missing; `oxtile quantize --help` shows the usage");
        assert!(refusal("quantise").contains("no command is named \"quantise\"; `oxtile --help`"));
        assert!(refusal("quantize --input").contains("--input"));
        assert!(refusal("quantize --device tpu").contains("--device \"tpu\" is none of: auto, cuda, emulated"));
        assert!(refusal("quantize --format int4").contains("none of: mxfp8"));
        assert!(refusal("inspect a b").contains("\"b\""));
        assert!(refusal("inspect --jsno a").contains("--jsno"));
        assert!(refusal("build --manifest-path a --arch h200").contains("unknown architecture `h200`"));
        assert!(refusal("demo-checkpoint --seed x --output a").contains("--seed"));
    }
}
