//! Every format, direction and option through the binary on the emulator, there and back, held to the oracle.

mod common;

use std::path::{Path, PathBuf};

use common::{file, names, run, stderr};
use half::{bf16, f16};
use oxtile_cli::{
    quantize::{Codes, Direction, Directions, Format, Names, Recipe, Side, direction_name},
    safetensors::{Checkpoint, Dtype},
};

/// Matrices of each type, whose shapes some formats take and others do not, and what no format takes.
fn checkpoint(folder: &Path) -> PathBuf {
    let mut random = 1u64;
    // Roughly normal, with a factor a tensor, some zeros and one outlier.
    let mut numbers = |count: usize, factor: f32| -> Vec<f32> {
        let number = |i: usize| {
            let mut sum = 0.0;
            for _ in 0..6 {
                random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                sum += (random >> 40) as f32 / 16_777_216.0 - 0.5;
            }
            if i.is_multiple_of(37) { 0.0 } else { sum * factor * if i == count / 2 { 50.0 } else { 1.0 } }
        };
        (0..count).map(number).collect()
    };
    let tensors: [(&str, &str, &[u64], Vec<u8>); 9] = [
        ("wide", "F32", &[32, 160], numbers(32 * 160, 3.0).into_iter().flat_map(f32::to_le_bytes).collect()),
        ("brain", "BF16", &[2, 80, 96], numbers(160 * 96, 0.02).into_iter().flat_map(|x| bf16::from_f32(x).to_le_bytes()).collect()),
        ("half", "F16", &[64, 32], numbers(64 * 32, 0.5).into_iter().flat_map(|x| f16::from_f32(x).to_le_bytes()).collect()),
        ("long", "BF16", &[1, 272], numbers(272, 1.0).into_iter().flat_map(|x| bf16::from_f32(x).to_le_bytes()).collect()),
        ("ragged", "F32", &[24, 40], numbers(24 * 40, 1.0).into_iter().flat_map(f32::to_le_bytes).collect()),
        ("odd", "F32", &[3, 5], numbers(15, 1.0).into_iter().flat_map(f32::to_le_bytes).collect()),
        ("vector", "F32", &[32], numbers(32, 1.0).into_iter().flat_map(f32::to_le_bytes).collect()),
        ("mask", "BOOL", &[2, 32], [0, 1].repeat(32)),
        ("empty", "F32", &[0, 32], vec![]),
    ];
    let (mut entries, mut data) = (Vec::new(), Vec::new());
    for (name, dtype, shape, bytes) in tensors {
        let begin = data.len();
        data.extend(bytes);
        entries.push(format!(r#""{name}":{{"dtype":"{dtype}","shape":{shape:?},"data_offsets":[{begin},{}]}}"#, data.len()));
    }
    let path = folder.join("in.safetensors");
    std::fs::write(&path, file(&format!("{{{}}}", entries.join(",")), &data)).expect("a writable folder");
    path
}

/// Every recipe that exists.
fn recipes() -> Vec<Recipe> {
    let mut recipes = Vec::new();
    for format in Format::ALL {
        for directions in Directions::ALL {
            for (interleave, hadamard, seed) in
                [(false, false, None), (true, false, None), (true, true, None), (false, false, Some(7)), (false, true, Some(8))]
            {
                recipes.push(Recipe { format, directions, interleave, hadamard, seed });
            }
        }
    }
    recipes.retain(|recipe| recipe.check().is_ok());
    recipes
}

fn options(recipe: &Recipe) -> Vec<String> {
    let mut options = vec!["--format".into(), recipe.format.name().into(), "--direction".into(), recipe.directions.name().into()];
    options.extend(recipe.interleave.then(|| "--interleave".into()));
    options.extend(recipe.hadamard.then(|| "--hadamard".into()));
    options.extend(recipe.seed.into_iter().flat_map(|seed| ["--stochastic".into(), seed.to_string()]));
    options
}

/// Runs a command of the binary on the emulator.
fn convert(command: &str, input: &Path, output: &Path, options: &[String]) {
    let words = ["--device", "emulated"].map(String::from);
    let done = common::oxtile().args([command, "-i"]).arg(input).arg("-o").arg(output).args(words).args(options).output();
    let done = done.expect("the binary runs");
    assert!(done.status.success(), "{command} {options:?}: {}", stderr(&done));
}

fn tensor(checkpoint: &Checkpoint, name: &str) -> Vec<u8> {
    let tensor = checkpoint.tensors().iter().find(|tensor| tensor.name == name).unwrap_or_else(|| panic!("{name} is there"));
    checkpoint.windows(tensor, 1 << 20).flat_map(|window| window.expect("mapped").to_vec()).collect()
}

/// The interleaved scales, compact.
fn compact(side: &Side, scales: &[u8]) -> Vec<u8> {
    let [outer, blocks] = side.extents().map(|n| n as usize);
    let [lines, length] = side.compact_scales().map(|n| n as usize);
    let at = |line, place| if lines == outer { (line, place) } else { (place, line) };
    let places = (0..lines).flat_map(|line| (0..length).map(move |place| at(line, place)));
    places.map(|(i, j)| scales[oxtile_tests::oracle::interleave::offset(i, j, blocks)]).collect()
}

/// What a tensor of the quantized file stands for, by the oracle, in this type.
fn expected(recipe: &Recipe, quantized: &Checkpoint, name: &str, direction: Direction, shape: &[u64], dtype: Dtype) -> Vec<u8> {
    let columns = shape[shape.len() - 1];
    let shape = [shape.iter().product::<u64>() / columns, columns];
    let side = Side { format: recipe.format, direction, interleave: recipe.interleave, shape };
    let names = Names::of(name, recipe.format, direction);
    let scales = tensor(quantized, &names.scales);
    let codes = Codes { data: tensor(quantized, &names.codes), scales: if side.interleave { compact(&side, &scales) } else { scales } };
    let amax = f32::from_le_bytes(tensor(quantized, &names.amax).try_into().expect("four bytes"));
    let hadamard = recipe.hadamard && direction == Direction::Columns;
    let values = common::restore(&side, hadamard, &codes, amax).into_iter();
    match dtype {
        Dtype::F32 => values.flat_map(f32::to_le_bytes).collect(),
        Dtype::F16 => values.flat_map(|value| f16::from_f32(value).to_le_bytes()).collect(),
        _ => values.flat_map(|value| bf16::from_f32(value).to_le_bytes()).collect(),
    }
}

#[test]
fn every_recipe_agrees_with_the_oracle_there_and_back() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let input = checkpoint(folder.path());
    let [quantized, oracle, restored] = ["quantized", "oracle", "restored"].map(|name| folder.path().join(name));
    let before = Checkpoint::open(&input).expect("valid");
    let recipes = recipes();
    assert_eq!(recipes.len(), 3 * 2 + (3 * 3 + 2 * 2) + 3 * 2 + 3 + 3, "formats, directions and options");
    let mut back = 0;
    for recipe in recipes {
        convert("quantize", &input, &quantized, &options(&recipe));
        let outcome = common::quantize_by(recipe, &input, &oracle).expect("a valid checkpoint");
        assert!(std::fs::read(&quantized).expect("readable") == std::fs::read(&oracle).expect("readable"), "{recipe:?}: the bytes differ");
        let taken: Vec<_> =
            outcome.tensors.iter().filter(|t| !matches!(t.result, oxtile_cli::quantize::job::TensorResult::PassedThrough(_))).collect();
        assert!(!taken.is_empty() && taken.len() < before.tensors().len(), "{recipe:?}");
        for &direction in recipe.directions.each() {
            convert("dequantize", &quantized, &restored, &["--direction".into(), direction_name(direction).into()]);
            let (codes, after) = (Checkpoint::open(&quantized).expect("valid"), Checkpoint::open(&restored).expect("valid"));
            let described = |checkpoint: &Checkpoint| {
                let mut tensors: Vec<_> = checkpoint.tensors().iter().map(|t| (t.name.clone(), t.dtype, t.shape.clone())).collect();
                tensors.sort_by(|a, b| a.0.cmp(&b.0));
                tensors
            };
            assert_eq!(described(&after), described(&before), "{recipe:?}: names, types and shapes are those of before");
            for tensor_before in before.tensors() {
                let (name, dtype) = (&tensor_before.name, tensor_before.dtype);
                let found = tensor(&after, name);
                if taken.iter().any(|outcome| outcome.tensor.name == *name) {
                    let expected = expected(&recipe, &codes, name, direction, &tensor_before.shape, dtype);
                    assert!(same_numbers(&found, &expected, dtype), "{recipe:?} by {direction:?}s: {name} comes back otherwise");
                    back += 1;
                } else {
                    assert_eq!(found, tensor(&before, name), "{recipe:?}: {name} is copied");
                }
            }
        }
    }
    assert!(back > 70, "{back} tensors came back");
    assert_eq!(names(folder.path()), ["in.safetensors", "oracle", "quantized", "restored"]);
}

/// Equal bits; zeros of a transform back may have either sign.
fn same_numbers(a: &[u8], b: &[u8], dtype: Dtype) -> bool {
    let value = |bytes: &[u8]| match dtype {
        Dtype::F32 => f32::from_le_bytes(bytes.try_into().expect("four bytes")),
        Dtype::F16 => f16::from_le_bytes(bytes.try_into().expect("two bytes")).to_f32(),
        _ => bf16::from_le_bytes(bytes.try_into().expect("two bytes")).to_f32(),
    };
    let size = dtype.bits() as usize / 8;
    a.len() == b.len() && a.chunks(size).zip(b.chunks(size)).all(|(a, b)| value(a) == value(b))
}

#[test]
fn the_direction_must_be_there() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let (input, output) = (checkpoint(folder.path()), folder.path().join("out"));
    convert("quantize", &input, &output, &["--direction".into(), "column".into()]);
    let refused =
        run(&[&"dequantize", &"-i", &output, &"-o", &folder.path().join("back"), &"--direction", &"row", &"--device", &"emulated"]);
    assert_eq!(refused.status.code(), Some(1));
    assert!(stderr(&refused).contains("it holds no codes by rows, but by column: name another --direction"), "{}", stderr(&refused));
    assert_eq!(names(folder.path()), ["in.safetensors", "out"]);
}

#[test]
fn another_seed_gives_other_codes_and_the_same_seed_the_same() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let input = checkpoint(folder.path());
    let made = |seed: &str| {
        let output = folder.path().join("out");
        convert("quantize", &input, &output, &["--format", "nvfp4", "--stochastic", seed].map(String::from));
        let checkpoint = Checkpoint::open(&output).expect("valid");
        assert_eq!(checkpoint.metadata()["oxtile.seed"], seed);
        tensor(&checkpoint, "brain_packed")
    };
    let first = made("1");
    assert!(first == made("1"));
    assert!(first != made("2"));
}

#[test]
fn both_commands_say_what_they_did() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let (input, output, back) = (checkpoint(folder.path()), folder.path().join("out"), folder.path().join("back"));
    let recipe = ["--format", "nvfp4", "--direction", "both", "--interleave", "--hadamard", "--stochastic", "3"];
    let done =
        common::oxtile().args(["quantize", "--device", "emulated"]).args(recipe).arg("-i").arg(&input).arg("-o").arg(&output).output();
    let printed = String::from_utf8(done.expect("the binary runs").stdout).expect("UTF-8");
    for expected in [
        "one for the tensor; by rows and by columns; scales interleaved; columns Hadamard-transformed; stochastic rounding, seed 3",
        "F32 is not BF16, the one type that --hadamard takes: convert it before, or leave --hadamard out",
        "1 rows (all dimensions but the last) are not a multiple of 16",
        "BOOL is not F32, F16 or BF16",
        "no elements",
        "tensors 1 quantized of 9",
    ] {
        assert!(printed.contains(expected), "{expected} in\n{printed}");
    }
    let done = run(&[&"dequantize", &"--device", &"emulated", &"-i", &output, &"-o", &back, &"--direction", &"column"]);
    let printed = String::from_utf8(done.stdout).expect("UTF-8");
    assert!(printed.contains("format  nvfp4, from its codes by columns"), "{printed}");
    assert!(printed.lines().any(|line| line.split_whitespace().collect::<Vec<_>>() == ["brain", "BF16", "2x80x96"]), "{printed}");
}

#[test]
fn a_full_disk_leaves_nothing_of_transposed_codes() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    checkpoint(folder.path());
    for format in ["nvfp4", "fp8-block"] {
        // Blocks of 512 bytes or of 1024, as the shell has them: the header fits, the codes do not.
        let options = format!("--device emulated -i in.safetensors -o out --format {format} --direction both");
        let script = format!("ulimit -f 6; exec {:?} quantize {options}", env!("CARGO_BIN_EXE_oxtile"));
        let done = std::process::Command::new("sh").args(["-c", &script]).current_dir(folder.path()).output().expect("a shell");
        assert_eq!(done.status.code(), Some(1), "{}", stderr(&done));
        assert!(stderr(&done).contains("out: cannot write: File too large"), "{}", stderr(&done));
        assert_eq!(names(folder.path()), ["in.safetensors"]);
    }
}
