//! The command line, parsed.

mod help;

use std::{ffi::OsString, path::PathBuf};

use lexopt::{Arg, Parser, ValueExt};
use oxtile_build::Arch;

pub use help::HELP;
use help::{BUILD_HELP, COMPARE_HELP, DEMO_HELP, DEQUANTIZE_HELP, INSPECT_HELP, QUANTIZE_HELP};

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
    /// Turn a quantized file back into numbers.
    Dequantize(Dequantize),
    /// Show what is in a file.
    Inspect(Inspect),
    /// Say how far apart two files are.
    Compare(Compare),
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

/// `oxtile dequantize`.
#[derive(Debug, PartialEq)]
pub struct Dequantize {
    /// The quantized file.
    pub input: PathBuf,
    /// The file to be made.
    pub output: PathBuf,
    /// Type of the restored tensors.
    pub dtype: Dtype,
    /// Where it runs.
    pub device: Device,
    /// JSON instead of tables.
    pub json: bool,
}

/// `oxtile compare`.
#[derive(Debug, PartialEq)]
pub struct Compare {
    /// The file that counts as right.
    pub reference: PathBuf,
    /// The file that is measured against it.
    pub other: PathBuf,
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
    /// Every choice, by its name.
    const CHOICES: [(&'static str, Self); 3] =
        [(Self::Auto.name(), Self::Auto), (Self::Cuda.name(), Self::Cuda), (Self::Emulated.name(), Self::Emulated)];

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

/// The types of wide numbers, by their names on the command line.
const WIDE: [(&str, Dtype); 3] = [("f32", Dtype::F32), ("bf16", Dtype::Bf16), ("f16", Dtype::F16)];

/// A command line that makes no sense.
#[derive(Debug, thiserror::Error)]
#[error("{reason}; `oxtile {}--help` shows the usage", .command.map_or(String::new(), |command| format!("{command} ")))]
pub struct UsageError {
    command: Option<&'static str>,
    reason: String,
}

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
        Some("dequantize") => parse_dequantize(&mut parser),
        Some("inspect") => parse_inspect(&mut parser),
        Some("compare") => parse_compare(&mut parser),
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
                "device" => device = choice(parser, COMMAND, "--device", &Device::CHOICES)?,
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

fn parse_dequantize(parser: &mut Parser) -> Result<Request, UsageError> {
    const COMMAND: Option<&str> = Some("dequantize");
    let (mut input, mut output, mut dtype, mut device, mut json) = (None, None, Dtype::F32, Device::Auto, false);
    while let Some(word) = next(parser, COMMAND)? {
        match word {
            Word::Help => return Ok(Request::Help(DEQUANTIZE_HELP)),
            Word::Value(value) => return Err(unexpected(COMMAND, &value.to_string_lossy())),
            Word::Flag(flag) => match flag.as_str() {
                "input" => input = Some(path(parser, COMMAND)?),
                "output" => output = Some(path(parser, COMMAND)?),
                "dtype" => dtype = choice(parser, COMMAND, "--dtype", &WIDE)?,
                "device" => device = choice(parser, COMMAND, "--device", &Device::CHOICES)?,
                "json" => json = true,
                other => return Err(unexpected(COMMAND, &format!("--{other}"))),
            },
        }
    }
    Ok(Request::Dequantize(Dequantize {
        input: required(input, COMMAND, "--input FILE")?,
        output: required(output, COMMAND, "--output FILE")?,
        dtype,
        device,
        json,
    }))
}

fn parse_compare(parser: &mut Parser) -> Result<Request, UsageError> {
    const COMMAND: Option<&str> = Some("compare");
    let (mut files, mut json) = (Vec::new(), false);
    while let Some(word) = next(parser, COMMAND)? {
        match word {
            Word::Help => return Ok(Request::Help(COMPARE_HELP)),
            Word::Value(file) if files.len() < 2 => files.push(PathBuf::from(file)),
            Word::Value(value) => return Err(unexpected(COMMAND, &value.to_string_lossy())),
            Word::Flag(flag) if flag == "json" => json = true,
            Word::Flag(flag) => return Err(unexpected(COMMAND, &format!("--{flag}"))),
        }
    }
    let mut files = files.into_iter();
    let reference = required(files.next(), COMMAND, "REFERENCE")?;
    Ok(Request::Compare(Compare { reference, other: required(files.next(), COMMAND, "OTHER")?, json }))
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
                "dtype" => dtype = choice(parser, COMMAND, "--dtype", &WIDE)?,
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
        let dequantize = Dequantize { input: "a".into(), output: "b".into(), dtype: Dtype::Bf16, device: Device::Cuda, json: true };
        let line = "dequantize -i a --output b --dtype bf16 --device cuda --json";
        assert_eq!(words(line).expect("valid"), Request::Dequantize(dequantize));
        let compare = Compare { reference: "a".into(), other: "b".into(), json: true };
        assert_eq!(words("compare a --json b").expect("valid"), Request::Compare(compare));
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
        for line in [
            "",
            "--help",
            "-h",
            "help",
            "quantize --help",
            "dequantize -h",
            "compare --help",
            "inspect -h",
            "build --help",
            "demo-checkpoint --help",
        ] {
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
        assert!(refusal("dequantize --input a --output b --dtype f64").contains("none of: f32, bf16, f16"));
        assert!(refusal("compare a").contains("OTHER is missing"));
        assert!(refusal("compare a b c").contains("\"c\""));
        assert!(refusal("inspect a b").contains("\"b\""));
        assert!(refusal("inspect --jsno a").contains("--jsno"));
        assert!(refusal("build --manifest-path a --arch h200").contains("unknown architecture `h200`"));
        assert!(refusal("demo-checkpoint --seed x --output a").contains("--seed"));
    }
}
