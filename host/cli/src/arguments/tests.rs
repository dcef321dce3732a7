//! What the command line takes and refuses.

use super::*;
use crate::{
    quantize::{Direction, Directions, Format, Recipe},
    shard::ShardFormat,
};

fn words(line: &str) -> Result<Request, UsageError> {
    parse(line.split_whitespace())
}

fn refusal(line: &str) -> String {
    words(line).expect_err("a refusal").to_string()
}

#[test]
fn every_option_reaches_its_command() {
    let recipe = Recipe { format: Format::Nvfp4, directions: Directions::Both, interleave: true, hadamard: true, seed: Some(7) };
    let quantize = Quantize { input: "a".into(), output: "b".into(), recipe, device: Device::Emulated, json: true };
    let line = "quantize --input a -o b --format nvfp4 --direction both --interleave --hadamard --stochastic 7 --device=emulated --json";
    assert_eq!(words(line).expect("valid"), Request::Quantize(quantize));
    let dequantize = Dequantize {
        input: "a".into(),
        output: "b".into(),
        dtype: Some(Dtype::Bf16),
        direction: Some(Direction::Columns),
        device: Device::Cuda,
        json: true,
    };
    let line = "dequantize -i a --output b --dtype bf16 --direction column --device cuda --json";
    assert_eq!(words(line).expect("valid"), Request::Dequantize(dequantize));
    let compare = Compare { reference: "a".into(), other: "b".into(), max_relative: Some(0.5), json: true };
    assert_eq!(words("compare a --json b --max-relative 0.5").expect("valid"), Request::Compare(compare));
    let inspect = Inspect { file: "a".into(), histogram: None, json: false };
    assert_eq!(words("inspect a").expect("valid"), Request::Inspect(inspect));
    let histogram = Histogram { output: "o".into(), tensor: Some("w".into()), against: Some("b".into()) };
    let inspect = Inspect { file: "a".into(), histogram: Some(histogram), json: false };
    assert_eq!(words("inspect a --histogram o --tensor w --against b").expect("valid"), Request::Inspect(inspect));
    let launch = || Launch {
        ranks: 4,
        grace: std::time::Duration::from_millis(1500),
        drain: std::time::Duration::from_millis(2500),
        verbose: true,
        program: "p".into(),
        arguments: ["--json", "-n", "--", "x"].map(Into::into).into(),
    };
    for separator in ["", "--"] {
        let line = format!("launch -n 4 --grace 1.5 --drain 2.5 --verbose {separator} p --json -n -- x");
        assert_eq!(words(&line).expect("valid"), Request::Launch(launch()));
    }
    let demo = DemoCheckpoint { seed: 7, output: "a".into(), dtype: Dtype::Bf16 };
    assert_eq!(words("demo-checkpoint --seed 7 --output a --dtype bf16").expect("valid"), Request::DemoCheckpoint(demo));
    let build = Build {
        manifest: "a/Cargo.toml".into(),
        archs: vec!["sm_90a".parse().expect("an architecture"), "sm_120a".parse().expect("an architecture")],
        family: Some("amax".into()),
        out_dir: Some("b".into()),
        checked: true,
        line_tables: true,
        accept: true,
    };
    let line = "build --manifest-path a/Cargo.toml --arch sm_90a,sm_120a --family amax --out-dir b --checked --line-tables --accept";
    assert_eq!(words(line).expect("valid"), Request::Build(build));
    let build = Build {
        manifest: "Cargo.toml".into(),
        archs: Vec::new(),
        family: None,
        out_dir: None,
        checked: false,
        line_tables: false,
        accept: false,
    };
    assert_eq!(words("build").expect("valid"), Request::Build(build));
    let new = New { name: "a".into(), path: Some("b".into()), oxtile: Some("c".into()) };
    assert_eq!(words("new a --path b --oxtile c").expect("valid"), Request::New(new));
    let overlap = Overlap { plan: [8192, 4096, 64], ranks: 4, json: true };
    assert_eq!(words("overlap --plan 8192,4096,64 --ranks 4 --json").expect("valid"), Request::Overlap(overlap));
    let shard = Shard {
        input: "a".into(),
        output_prefix: Some("b".into()),
        world: oxtile::comm::WorldSize::new(4).expect("ranks"),
        format: ShardFormat::Quantized(Format::Nvfp4Squares),
        directions: Directions::Both,
        distances: vec![1, 2, 3],
        device: Device::Emulated,
        json: true,
    };
    let line = "shard -i a --output-prefix b --ranks 4 --format nvfp4-squares --direction both --device emulated --json";
    assert_eq!(words(line).expect("valid"), Request::Shard(shard));
    let plan = Shard {
        input: "a".into(),
        output_prefix: None,
        world: oxtile::comm::WorldSize::ONE,
        format: ShardFormat::Keep,
        directions: Directions::Rows,
        distances: vec![0],
        device: Device::Auto,
        json: false,
    };
    assert_eq!(words("shard --input a --ranks 1 --plan --distance 0").expect("valid"), Request::Shard(plan));
    let join = |json| Join { inputs: vec!["a".into(), "b".into(), "c".into()], output: "d".into(), json };
    assert_eq!(words("join --inputs a b c --output d").expect("valid"), Request::Join(join(false)));
    assert_eq!(words("join -i a -i b -i c --json -o d").expect("valid"), Request::Join(join(true)));
    assert_eq!(words("doctor --json").expect("valid"), Request::Doctor(Doctor { json: true }));
    let timeline = Timeline { files: vec!["a".into(), "b".into()], svg: Some("c".into()), merged: Some("d".into()) };
    assert_eq!(words("timeline a --svg c b --merged d").expect("valid"), Request::Timeline(timeline));
    for line in [
        "",
        "--help",
        "-h",
        "help",
        "quantize --help",
        "dequantize -h",
        "compare --help",
        "inspect -h",
        "new --help",
        "build --help",
        "timeline --help",
        "doctor --help",
        "overlap --help",
        "shard --help",
        "join -h",
        "demo-checkpoint --help",
    ] {
        assert!(matches!(words(line), Ok(Request::Help(_))), "{line}");
    }
    assert_eq!(words("help launch").expect("valid"), words("launch --help").expect("valid"));
    assert_eq!(words("-V").expect("valid"), Request::Version);
}

#[test]
fn refusals_name_the_word_and_the_help() {
    assert_eq!(refusal("quantize --output b"), "--input FILE is missing; `oxtile quantize --help` shows the usage");
    assert!(refusal("quantise").contains("no command is named \"quantise\"; did you mean quantize?; `oxtile --help`"));
    assert!(refusal("quantize --input").contains("--input"));
    assert!(refusal("quantize --device tpu").contains("--device \"tpu\" is none of: auto, cuda, emulated"));
    assert!(refusal("quantize --format int4").contains("none of: mxfp8"));
    assert!(refusal("dequantize --input a --output b --dtype f64").contains("none of: f32, bf16, f16"));
    assert!(refusal("compare a").contains("OTHER is missing"));
    assert!(refusal("compare a b c").contains("\"c\""));
    assert!(refusal("inspect a b").contains("\"b\""));
    assert!(
        refusal("inspect --jsno a").contains("unexpected argument \"--jsno\"; did you mean --json?"),
        "{}",
        refusal("inspect --jsno a")
    );
    assert!(refusal("doctor --colour").contains("unexpected argument \"--colour\"; the options are --help, --json;"));
    assert!(refusal("render").contains("no command is named \"render\"; the commands are quantize, dequantize, inspect,"));
    assert!(refusal("inspect -x a").contains("unexpected argument \"-x\"; the options are"));
    assert!(refusal("quantize --input a --input b --output c").contains("--input is given twice: leave one of them out"));
    assert!(
        refusal("quantize --input --output b").contains("--input is followed by \"--output\", which is an option: name a file (./--output")
    );
    let empty = parse(["inspect", ""]).expect_err("a refusal").to_string();
    assert!(empty.contains("\"\" names nothing: leave it out, or name a file; `oxtile inspect --help`"), "{empty}");
    assert!(refusal("new").contains("NAME is missing; `oxtile new --help`"));
    assert!(refusal("new a b").contains("\"b\""));
    assert!(refusal("build --manifest-path a --arch h200").contains("unknown architecture `h200`"));
    assert!(refusal("timeline --svg a").contains("FILE is missing"));
    assert!(refusal("timeline a").contains("--svg OUT or --merged OUT is missing; `oxtile timeline --help`"));
    assert!(refusal("timeline a --json").contains("--json"));
    assert!(refusal("doctor --fast").contains("--fast"));
    assert!(refusal("overlap --plan 1,2 --ranks 4").contains("--plan \"1,2\" is not M,N,K: three numbers from 1 to 2147483647"));
    assert!(refusal("overlap --plan 1,2,3 --ranks 0").contains("--ranks \"0\" is not a number from 1 to "));
    assert!(refusal("overlap --ranks 4").contains("--plan M,N,K is missing; `oxtile overlap --help`"));
    for (options, expected) in [
        ("--ranks 2", "--output-prefix PREFIX is missing, or --plan"),
        ("--output-prefix b", "--ranks RANKS is missing"),
        ("--output-prefix b --ranks 0", "--ranks \"0\" is not a number from 1 to 4096"),
        ("--output-prefix b --ranks 2 --plan", "--plan writes no file: leave --output-prefix out"),
        ("--output-prefix b --ranks 2 --distance 1", "--distance goes with --plan"),
        ("--ranks 2 --plan --distance 65", "--distance \"65\" is not a number from 0 to 64"),
        ("--output-prefix b --ranks 2 --direction both", "--direction goes with a format that quantizes, not with --format keep"),
        ("--ranks 2 --plan --format fp8 --direction row", "--plan counts both directions"),
        ("--output-prefix b --ranks 2 --format fp8-block", "none of: keep, bf16, fp8, mxfp8, nvfp4, nvfp4-squares"),
        ("--output-prefix b/ --ranks 2", "--output-prefix names a folder"),
    ] {
        let said = refusal(&format!("shard -i a {options}"));
        assert!(said.contains(expected) && said.contains("oxtile shard --help"), "{options}: {said}");
    }
    assert!(refusal("join --output b").contains("--inputs FILE... is missing; `oxtile join --help`"));
    assert!(refusal("join --inputs --output b").contains("--inputs"));
    assert!(refusal("join --inputs a").contains("--output FILE is missing"));
    assert!(refusal("demo-checkpoint --seed x --output a").contains("--seed \"x\" is not a whole number"));
    assert!(refusal("help launches").contains("no command is named \"launches\"; did you mean launch?"));
    assert!(refusal("timeline a --svg b --merged b").contains("--svg and --merged name one file"));
    let nameless = parse(["quantize", "-i", "a", "-o", ""]).expect_err("a refusal").to_string();
    assert!(nameless.contains("--output \"\" names no file"), "{nameless}");
    for scale in ["inf", "-1", "0", "NaN", "1e-21", "1e9"] {
        let said = refusal(&format!("attention -i a -o b --scale {scale}"));
        assert!(said.contains(&format!("--scale {scale:?} is not a number from 1e-20 to 1e8")), "{said}");
    }
}

#[test]
fn options_that_do_not_go_together_are_refused_with_those_that_do() {
    let quantize = |options: &str| format!("quantize -i a -o b {options}");
    for (options, expected) in [
        ("--interleave --format fp8", "--interleave goes with --format mxfp8, nvfp4 or nvfp4-squares, not with --format fp8"),
        ("--interleave --format fp8-block", "--interleave goes with --format mxfp8, nvfp4 or nvfp4-squares, not with --format fp8-block"),
        ("--hadamard --direction column", "--hadamard goes with --format nvfp4, not with --format mxfp8"),
        ("--hadamard --format nvfp4", "it goes with --direction column or both, not with row"),
        ("--stochastic 1 --format fp8", "--stochastic goes with --format nvfp4, not with --format fp8"),
        ("--direction up", "--direction \"up\" is none of: row, column, both"),
        ("--format int4", "none of: mxfp8, nvfp4, nvfp4-squares, fp8, fp8-block"),
        ("--stochastic -1 --format nvfp4", "--stochastic \"-1\" is not a whole number from 0 to 18446744073709551615"),
        ("--stochastic", "--stochastic"),
    ] {
        let said = refusal(&quantize(options));
        assert!(said.contains(expected) && said.contains("oxtile quantize --help"), "{options}: {said}");
    }
    for (line, expected) in [
        ("launch p", "-n RANKS is missing"),
        ("launch -n 2", "PROGRAM is missing"),
        ("launch -n 0 p", "-n \"0\" is not a number from 1 to 4096"),
        ("launch -n x p", "-n \"x\" is not a number from 1 to 4096"),
        ("launch -n 2 --grace -1 p", "--grace \"-1\" is not a number of seconds from 0 to 3600"),
        ("launch -n 2 --grace nan p", "--grace \"nan\""),
        ("launch -n 2 --drain 3601 p", "--drain \"3601\" is not a number of seconds from 0 to 3600"),
        ("launch -n 2 --port 5 p", "unexpected argument \"--port\""),
    ] {
        let said = refusal(line);
        assert!(said.contains(expected), "{line}: {said}");
    }
    assert!(refusal("inspect a --tensor b").contains("--tensor and --against go with --histogram OUT.svg"));
    assert!(refusal("compare a b --max-relative -1").contains("is not a number from 0 on"));
    assert!(refusal("compare a b --max-relative NaN").contains("is not a number from 0 on"));
    assert!(refusal("dequantize -i a -o b --direction both").contains("none of: row, column"));
}
