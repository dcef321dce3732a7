//! What the command line takes and refuses.

use clap_complete::Shell;
use oxtile::{comm::WorldSize, context_parallel::Schedule};

use super::*;
use crate::{
    quantize::{Direction, Directions, Format, Recipe},
    safetensors::Dtype,
    shard::{Embedding, ShardFormat},
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
    let inspect = Inspect { file: "a".into(), histogram: None, tensor: None, against: None, json: false };
    assert_eq!(words("inspect a").expect("valid"), Request::Inspect(inspect));
    let (histogram, tensor, against) = (Some("o".into()), Some("w".into()), Some("b".into()));
    let inspect = Inspect { file: "a".into(), histogram, tensor, against, json: false };
    assert_eq!(words("inspect a --histogram o --tensor w --against b").expect("valid"), Request::Inspect(inspect));
    let launch = || Launch {
        ranks: 4,
        grace: std::time::Duration::from_millis(1500),
        drain: std::time::Duration::from_millis(2500),
        verbose: true,
        command: ["p", "--json", "-n", "--", "--verbose", "x"].map(Into::into).into(),
    };
    for separator in ["", "--"] {
        let line = format!("launch -n 4 --grace 1.5 --drain 2.5 --verbose {separator} p --json -n -- --verbose x");
        assert_eq!(words(&line).expect("valid"), Request::Launch(launch()));
    }
    let (program, arguments) = (launch().program().to_owned(), launch().arguments().len());
    assert_eq!((program, arguments), ("p".into(), 5));
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
    let ranks = |ranks| WorldSize::new(ranks).expect("ranks");
    let attention = Attention {
        input: "a".into(),
        output: "b".into(),
        backward: true,
        causal: Some(Causal::BottomRight),
        window: [None, Some(3)],
        scale: Some(0.5),
        context_parallel: Some(Schedule::Hierarchical { inner: ranks(2) }),
        fp8: true,
        ranks: Some(ranks(4)),
        device: Device::Emulated,
        json: true,
    };
    let line = "attention -i a -o b --backward --causal bottom-right --window -1,3 --scale 0.5 --context-parallel hierarchical:2 \
         --fp8 --ranks 4 --device emulated --json";
    assert_eq!(words(line).expect("valid"), Request::Attention(attention));
    let explain = Explain { kernel: "a".into(), records: "b".into(), kernels: "c".into(), svg: Some("d".into()) };
    assert_eq!(words("explain a --records b --kernels c --svg d").expect("valid"), Request::Explain(explain));
    assert_eq!(words("completions fish").expect("valid"), Request::Completions(Completions { shell: Shell::Fish }));
    assert_eq!(words("man join").expect("valid"), Request::Man(Man { command: Some("join".into()), out_dir: None }));
    assert_eq!(words("man --out-dir a").expect("valid"), Request::Man(Man { command: None, out_dir: Some("a".into()) }));
    let overlap = Overlap {
        plan: [8192, 4096, 64],
        ranks: ranks(4),
        format: overlap::Travels::Bf16,
        operation: overlap::Operation::AllGather,
        json: true,
    };
    assert_eq!(words("overlap --plan 8192,4096,64 --ranks 4 --json").expect("valid"), Request::Overlap(overlap));
    let shard = Shard {
        input: "a".into(),
        output_prefix: Some("b".into()),
        world: ranks(4),
        format: ShardFormat::Quantized(Format::Nvfp4Squares),
        directions: Some(Directions::Both),
        plan: false,
        embedding: None,
        distance: None,
        device: Device::Emulated,
        json: true,
    };
    let line = "shard -i a --output-prefix b --ranks 4 --format NVFP4-squares --direction Both --device emulated --json";
    assert_eq!(words(line).expect("valid"), Request::Shard(shard));
    let plan = Shard {
        input: "a".into(),
        output_prefix: None,
        world: WorldSize::ONE,
        format: ShardFormat::Keep,
        directions: None,
        plan: true,
        embedding: Some(Embedding::Tied),
        distance: Some(0),
        device: Device::Auto,
        json: false,
    };
    assert_eq!(words("shard --input a --ranks 1 --plan --embedding tied --distance 0").expect("valid"), Request::Shard(plan));
    let join = |json| Join { inputs: vec!["a".into(), "b".into(), "c".into()], output: "d".into(), json };
    assert_eq!(words("join --inputs a b c --output d").expect("valid"), Request::Join(join(false)));
    assert_eq!(words("join -i a -i b -i c --json -o d").expect("valid"), Request::Join(join(true)));
    assert_eq!(words("doctor --json").expect("valid"), Request::Doctor(Doctor { json: true }));
    let timeline = Timeline { files: vec!["a".into(), "b".into()], svg: Some("c".into()), merged: Some("d".into()) };
    assert_eq!(words("timeline a --svg c b --merged d").expect("valid"), Request::Timeline(timeline));
    for line in ["", "--help", "-h", "help", "quantize --help", "dequantize -h", "help compare", "launch -n 2 --help"] {
        assert!(matches!(words(line), Ok(Request::Text(_))), "{line}");
    }
    for line in ["help launch", "help launch --help", "help --help launch", "help -h launch"] {
        assert_eq!(words(line).expect("valid"), words("launch --help").expect("valid"), "{line}");
    }
    for line in ["help --help", "help -h", "help -h --help"] {
        assert_eq!(words(line).expect("valid"), words("--help").expect("valid"), "{line}");
    }
    assert_eq!(words("").expect("valid"), words("--help").expect("valid"));
    assert_eq!(words("-V").expect("valid"), Request::Text(format!("oxtile {}\n", env!("CARGO_PKG_VERSION")).into()));
    // What is not given is what the help calls the default.
    let quantize = Quantize { input: "a".into(), output: "b".into(), recipe: Recipe::default(), device: Device::default(), json: false };
    assert_eq!(words("quantize -i a -o b").expect("valid"), Request::Quantize(quantize));
}

/// clap's own checks of the whole definition, and those of the project.
#[test]
fn every_command_and_option_has_its_help() {
    let mut line = command_line();
    line.clone().debug_assert();
    line.build();
    assert_eq!(line.get_subcommands().count(), 18);
    for command in line.get_subcommands().filter(|command| command.get_name() != "help") {
        let name = command.get_name();
        let help = words(&format!("{name} --help")).expect("a help");
        let Request::Text(help) = help else { panic!("{name}: {help:?}") };
        let help = help.to_string();
        assert!(help.starts_with(&command.get_about().expect("what it does").to_string()), "{help}");
        let examples = help.split_once("\nExamples:\n").expect("examples at the end").1;
        assert!(examples.lines().all(|line| line.starts_with("  ")), "{help}");
        // They are commands that the parser takes: up to the next program, without variables before.
        let mut taken = 0;
        for words in examples.split(['\n', '&', '|', '>', '#']).filter_map(|line| Some(line.split_once("oxtile ")?.1)) {
            let example = parse(words.split_whitespace());
            assert!(example.is_ok(), "{words}: {example:?}");
            taken += 1;
        }
        assert!(taken > 0, "{help}");
        for argument in command.get_arguments() {
            let text = argument.get_help().expect("a help").to_string();
            assert!(!text.is_empty() && !text.ends_with('.'), "{name}: {text}");
        }
        for text in help.lines() {
            assert!(text.chars().count() <= 140, "{name}: {text}");
        }
    }
}

#[test]
fn refusals_name_the_word_the_mend_and_the_help() {
    for (line, expected) in [
        (
            "quantize --output b",
            "the following required arguments were not provided: --input <FILE>; `oxtile quantize --help` shows the usage",
        ),
        ("quantise", "unrecognized subcommand 'quantise'; tip: some similar subcommands exist: 'dequantize', 'quantize'; `oxtile --help`"),
        ("render", "unrecognized subcommand 'render'; the commands are quantize, dequantize, compare, inspect,"),
        ("help launches", "unrecognized subcommand 'launches'; the commands are quantize,"),
        ("help launches", "help; `oxtile --help` shows"),
        ("inspect --jsno a", "unexpected argument '--jsno' found; tip: a similar argument exists: '--json'; `oxtile inspect"),
        ("doctor --colour", "unexpected argument '--colour' found; the options are --json, --help;"),
        ("inspect -x a", "unexpected argument '-x' found"),
        ("inspect -x a", "; the options are --histogram, --tensor, --against, --json, --help;"),
        ("--quiet", "unexpected argument '--quiet' found; the options are --help, --version; `oxtile --help`"),
        ("timeline a --json", "unexpected argument '--json' found"),
        ("launch -n 2 --port 5 p", "unexpected argument '--port' found"),
        ("compare a b c", "unexpected argument 'c' found"),
        ("inspect a b", "unexpected argument 'b' found"),
        ("new a b", "unexpected argument 'b' found"),
        ("compare a", "not provided: <OTHER>; `oxtile compare --help`"),
        ("new", "not provided: <NAME>; `oxtile new --help`"),
        ("timeline --svg a", "not provided: <FILE>..."),
        ("timeline a", "not provided: <--svg <OUT.svg>|--merged <OUT.json>>; `oxtile timeline --help`"),
        ("overlap --ranks 4", "not provided: --plan <M,N,K>; `oxtile overlap --help`"),
        ("join --output b", "not provided: --inputs <FILE>...; `oxtile join --help`"),
        ("join --inputs a", "not provided: --output <FILE>"),
        ("launch p", "not provided: --ranks <RANKS>"),
        ("launch -n 2", "not provided: <PROGRAM>..."),
        ("shard -i a --ranks 2", "not provided: <--output-prefix <PREFIX>|--plan>"),
        ("shard -i a --output-prefix b", "not provided: --ranks <RANKS>"),
        ("quantize --input", "a value is required for '--input <FILE>' but none was supplied"),
        ("quantize --input --output b", "a value is required for '--input <FILE>' but none was supplied"),
        ("join --inputs --output b", "a value is required for '--inputs <FILE>...' but none was supplied"),
        ("quantize --stochastic", "a value is required for '--stochastic <SEED>'"),
        ("quantize --input a --input b --output c", "the argument '--input <FILE>' cannot be used multiple times"),
        ("doctor --json --json", "the argument '--json' cannot be used multiple times"),
        ("shard -i a --output-prefix b --ranks 2 --plan", "the argument '--output-prefix <PREFIX>' cannot be used with '--plan'"),
        ("shard -i a --ranks 2 --plan --format fp8 --direction row", "the argument '--plan' cannot be used with '--direction <DIRECTION>'"),
        ("man join --out-dir a", "the argument '[COMMAND]' cannot be used with '--out-dir <FOLDER>'"),
        ("man joins", "invalid value 'joins' for '[COMMAND]': the commands are quantize, dequantize,"),
        ("completions csh", "invalid value 'csh' for '<SHELL>' [possible values: bash, elvish, fish, powershell, zsh]; tip:"),
    ] {
        let said = refusal(line);
        assert!(said.contains(expected) && said.ends_with("--help` shows the usage"), "{line}: {said}");
        assert!(said.lines().count() == 1 && !said.contains("Usage: "), "{line}: {said}");
    }
    for (command, option) in [("inspect", None), ("quantize", Some("-i")), ("launch -n 2", None), ("explain", None)] {
        let line = command.split_whitespace().chain(option).chain([""]);
        let said = parse(line).expect_err("a refusal").to_string();
        assert!(said.contains("a value is required for") || said.contains("PROGRAM is \"\""), "{command}: {said}");
    }
}

#[test]
fn values_that_make_no_sense_are_refused_with_those_that_do() {
    let number = "18446744073709551615";
    for (line, option, expected) in [
        ("quantize --device tpu", "--device <DEVICE>", "[possible values: auto, cuda, emulated]"),
        ("quantize --format int4", "--format <FORMAT>", "[possible values: mxfp8, nvfp4, nvfp4-squares, fp8, fp8-block]"),
        ("quantize --direction up", "--direction <DIRECTION>", "[possible values: row, column, both]"),
        ("quantize --stochastic -1", "--stochastic <SEED>", &format!("it is not a whole number from 0 to {number}")),
        ("dequantize --dtype f64", "--dtype <DTYPE>", "[possible values: f32, bf16, f16]"),
        ("dequantize --direction both", "--direction <DIRECTION>", "[possible values: row, column]"),
        ("build --arch h200", "--arch <ARCH,...>", "unknown architecture `h200`"),
        ("overlap --plan 1,2", "--plan <M,N,K>", "it is not M,N,K: three numbers from 1 to 2147483647"),
        ("overlap --ranks 0", "--ranks <RANKS>", "it is not a number from 1 to 4096"),
        ("shard --ranks 4097", "--ranks <RANKS>", "it is not a number from 1 to 4096"),
        ("shard --distance 65", "--distance <D>", "it is not a number from 0 to 64"),
        ("shard --format fp8-block", "--format <FORMAT>", "[possible values: keep, bf16, fp8, mxfp8, nvfp4, nvfp4-squares]"),
        ("demo-checkpoint --seed x", "--seed <SEED>", "it is not a whole number"),
        ("launch -n 0", "--ranks <RANKS>", "it is not a number from 1 to 4096"),
        ("launch -n x", "--ranks <RANKS>", "it is not a number from 1 to 4096"),
        ("launch -n -1", "--ranks <RANKS>", "it is not a number from 1 to 4096"),
        ("launch --grace -1", "--grace <SECONDS>", "it is not a number of seconds from 0 to 3600"),
        ("launch --grace nan", "--grace <SECONDS>", "it is not a number of seconds from 0 to 3600"),
        ("launch --drain 3601", "--drain <SECONDS>", "it is not a number of seconds from 0 to 3600"),
        ("compare --max-relative -1", "--max-relative <X>", "it is not a number from 0 on"),
        ("compare --max-relative NaN", "--max-relative <X>", "it is not a number from 0 on"),
        ("attention --causal middle", "--causal <CORNER>", "[possible values: top-left, bottom-right]"),
        ("attention --window -2,0", "--window <L,R>", "it is not L,R: two numbers of keys up to 1073741823, -1 for no bound"),
        (
            "attention --context-parallel rings",
            "--context-parallel <SCHEDULE>",
            "it is none of: auto, fused, ring, pull, gather, all-to-all,",
        ),
    ] {
        let (value, said) = (line.rsplit(' ').next().expect("a value"), refusal(line));
        assert!(said.starts_with(&format!("invalid value '{value}' for '{option}'")) && said.contains(expected), "{line}: {said}");
    }
    for scale in ["inf", "-1", "0", "NaN", "1e-21", "1e9"] {
        let said = refusal(&format!("attention -i a -o b --scale {scale}"));
        assert!(said.contains(&format!("'{scale}' for '--scale <X>': it is not a number from 1e-20 to 1e8")), "{said}");
    }
}

#[test]
fn options_that_do_not_go_together_are_refused_with_those_that_do() {
    for (line, expected) in [
        (
            "quantize -i a -o b --interleave --format fp8",
            "--interleave goes with --format mxfp8, nvfp4 or nvfp4-squares, not with --format fp8",
        ),
        ("quantize -i a -o b --interleave --format fp8-block", "not with --format fp8-block"),
        ("quantize -i a -o b --hadamard --direction column", "--hadamard goes with --format nvfp4, not with --format mxfp8"),
        ("quantize -i a -o b --hadamard --format nvfp4", "it goes with --direction column or both, not with row"),
        ("quantize -i a -o b --stochastic 1 --format fp8", "--stochastic goes with --format nvfp4, not with --format fp8"),
        (
            "shard -i a --output-prefix b --ranks 2 --direction both",
            "--direction goes with a format that quantizes, not with --format keep",
        ),
        ("shard -i a --output-prefix b --ranks 2 --distance 1", "--distance goes with --plan"),
        ("shard -i a --output-prefix b --ranks 2 --embedding tied", "--embedding goes with --plan"),
        (
            "shard -i a --output-prefix b --ranks 2 --format bf16 --device cuda",
            "--device goes with a format that quantizes, not with --format bf16",
        ),
        ("shard -i a --plan --ranks 2 --format fp8 --device cuda", "--device goes with --output-prefix: a plan runs nothing"),
        ("shard -i a --output-prefix b/ --ranks 2", "--output-prefix names a folder: add how the files' names begin"),
        ("timeline a --svg b --merged b", "--svg and --merged name one file"),
        ("inspect a --tensor b", "--tensor and --against go with --histogram OUT.svg"),
        ("inspect a --against b", "--tensor and --against go with --histogram OUT.svg"),
        ("attention -i a -o b --ranks 2", "--ranks goes with --context-parallel, which is one of: auto, fused, ring,"),
        (
            "attention -i a -o b --context-parallel ring --ranks 2 --device cuda",
            "give --device emulated, or start ranks on GPUs by oxtile launch",
        ),
    ] {
        let (command, said) = (line.split(' ').next().expect("a command"), refusal(line));
        assert!(said.contains(expected) && said.ends_with(&format!("; `oxtile {command} --help` shows the usage")), "{line}: {said}");
    }
}

/// A file whose name begins with a dash is taken where nothing else can be meant; else the error says how it is written.
#[test]
fn files_whose_names_begin_with_a_dash() {
    for line in ["inspect -- -a", "inspect ./-a"] {
        let Request::Inspect(inspect) = words(line).expect("valid") else { panic!("{line}") };
        assert_eq!(inspect.file.file_name(), Some("-a".as_ref()), "{line}");
    }
    for line in ["dequantize -i-a -o-b", "dequantize --input=-a --output=-b", "dequantize -i=-a -o=-b"] {
        let Request::Dequantize(dequantize) = words(line).expect("valid") else { panic!("{line}") };
        assert_eq!((dequantize.input, dequantize.output), ("-a".into(), "-b".into()), "{line}");
    }
    for (line, word) in [
        ("inspect -file", "-file"),
        ("inspect --json -file", "-file"),
        ("compare a -b.st", "-b.st"),
        ("compare -a.st -b.st", "-a.st"),
        ("quantize -i -file -o b", "-file"),
        ("quantize --input -file -o b", "-file"),
        ("quantize -i -o.st -o b", "-o.st"),
        ("quantize --input -o.st -o b", "-o.st"),
        ("quantize -i a --output -input.st", "-input.st"),
        ("join --inputs a -b.st --output c", "-b.st"),
        ("timeline -a.json", "-a.json"),
        ("inspect a --histogram -a.svg", "-a.svg"),
    ] {
        let (command, said) = (line.split(' ').next().expect("a command"), refusal(line));
        let end = format!("; if '{word}' is a file, write './{word}'; `oxtile {command} --help` shows the usage");
        assert!(said.ends_with(&end) && !said.contains("tip: to pass"), "{line}: {said}");
    }
    // None of these words can be a file.
    for line in ["inspect -x", "inspect --file", "quantize -i -o b", "quantize --input --output b", "doctor -json", "-file", "help -file"] {
        assert!(!refusal(line).contains("is a file"), "{line}: {}", refusal(line));
    }
}

/// An error is one line, and takes nothing from a word that looks like a part of clap's errors.
#[test]
fn words_of_a_stranger_stay_words() {
    for word in ["--a\n\nUsage: b", "--\u{1b}[2J", "--tip: x", "--error: x"] {
        let said = parse(["inspect", word]).expect_err("a refusal").to_string();
        assert!(said.starts_with("unexpected argument '--") && said.ends_with("`oxtile inspect --help` shows the usage"), "{said}");
    }
}
