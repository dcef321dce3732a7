//! `oxtile inspect --histogram`: what is drawn, that it is well-formed, and what is refused.

mod common;

use std::path::{Path, PathBuf};

use common::{assert_well_formed, file, names, run, small_checkpoint, stderr};

/// A file of one tensor of f32, 4 by 32.
fn one_tensor(folder: &Path, file_name: &str, name: &str, numbers: impl Fn(usize) -> f32) -> PathBuf {
    let header = format!(r#"{{"{name}":{{"dtype":"F32","shape":[4,32],"data_offsets":[0,512]}}}}"#);
    let path = folder.join(file_name);
    std::fs::write(&path, file(&header, &(0..128).flat_map(|i| numbers(i).to_le_bytes()).collect::<Vec<_>>())).expect("a writable folder");
    path
}

fn quantized(input: &Path, options: &[&str]) -> PathBuf {
    let output = input.with_extension("quantized");
    let done =
        common::oxtile().args(["quantize", "--device", "emulated"]).args(options).arg("-i").arg(input).arg("-o").arg(&output).output();
    let done = done.expect("the binary runs");
    assert!(done.status.success(), "{}", stderr(&done));
    output
}

fn draw(words: &[&dyn AsRef<std::ffi::OsStr>], picture: &Path) -> String {
    let done = common::oxtile().arg("inspect").args(words.iter().map(|word| word.as_ref())).arg("--histogram").arg(picture).output();
    let done = done.expect("the binary runs");
    assert!(done.status.success(), "{}", stderr(&done));
    let said = String::from_utf8(done.stdout).expect("UTF-8");
    assert!(said.contains(&format!("in {}", picture.display())), "{said}");
    std::fs::read_to_string(picture).expect("the picture")
}

#[test]
fn before_after_and_scales() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    // Half of them 1, a quarter 4, one 1/64, the rest zero.
    let number = |i| match i {
        0..64 => 1.0,
        64..96 => -4.0,
        96 => 1.0 / 64.0,
        _ => 0.0,
    };
    let input = one_tensor(folder.path(), "in", "w", number);
    let output = quantized(&input, &["--format", "nvfp4"]);
    let picture = folder.path().join("picture.svg");
    let drawn = draw(&[&output, &"--against", &input], &picture);
    assert_well_formed(&drawn);
    for expected in [
        ">w  [4x32]<",
        ">before: F32, 128 values, 24.219 % zero<",
        ">after: E2M1 elements, an E4M3 scale for every 16 of a row, one for the tensor, 128 values, 24.219 % zero<",
        ">8 scales, 3 distinct octaves<",
        ">magnitude of a value, in octaves<",
        ">share of the values<",
        ">what the codes of a block are multiplied by, in octaves<",
        ">share of the blocks<",
        "<title>2^0 to 2^1: 64 of 128, 50 %</title>",
        "<title>2^2 to 2^3: 32 of 128, 25 %</title>",
        "<title>zero: 31 of 128, 24 %</title>",
        "2<tspan dy=\"-5\" font-size=\"10\">-6</tspan>",
        ">100 %<",
        ">0.1 %<",
    ] {
        assert!(drawn.contains(expected), "{expected} in\n{drawn}");
    }
    // Before and after have the same halves; the blocks of ones are half of all.
    assert_eq!(drawn.matches("64 of 128").count(), 2);
    assert!(drawn.contains(": 4 of 8, 50 %"));
    assert_eq!(drawn, draw(&[&output, &"--against", &input, &"--tensor", &"w"], &picture), "the same picture again");
}

#[test]
fn every_format_and_a_plain_file_can_be_drawn() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let input = small_checkpoint(folder.path());
    let picture = folder.path().join("picture.svg");
    let plain = draw(&[&input], &picture);
    assert_well_formed(&plain);
    assert!(plain.contains(">matrix  [2x64]<") && plain.contains(">values: F32, 128 values, 0.781 % zero<") && !plain.contains("Scales"));
    let ids = draw(&[&input, &"--tensor", &"ids"], &picture);
    assert!(ids.contains(">values: I64, 2 values, 50.000 % zero<"), "{ids}");
    let brain = one_tensor(folder.path(), "square", "s", |i| (i as f32 - 60.0) * 0.37);
    for options in [
        &["--format", "mxfp8"][..],
        &["--format", "mxfp8", "--interleave"],
        &["--format", "fp8", "--direction", "column"],
        &["--format", "fp8-block"],
        &["--format", "nvfp4", "--interleave"],
    ] {
        let drawn = draw(&[&quantized(&brain, options), &"--against", &brain], &picture);
        assert_well_formed(&drawn);
        let blocks = drawn.split("share of the blocks").next().expect("a text");
        assert!(blocks.contains("after: E") && drawn.contains("Scales"), "{options:?}");
        // 32 of 128 are between 16 and 24.05 in magnitude or so: after as before, but for rounding.
        assert!(drawn.matches("<title>2^4 to 2^5").count() >= 2, "{options:?}: {drawn}");
    }
}

#[test]
fn hostile_names_do_not_break_the_picture() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let input = one_tensor(folder.path(), "in", r#"</text><script>&\u001b\""#, |i| i as f32);
    let drawn = draw(&[&input], &folder.path().join("picture.svg"));
    assert_well_formed(&drawn);
    assert!(drawn.contains("&lt;/text&gt;&lt;script&gt;&amp;\\u{1b}&quot;"), "{drawn}");
    let input = one_tensor(folder.path(), "in", &"n".repeat(5000), |_| f32::NAN);
    let drawn = draw(&[&input], &folder.path().join("picture.svg"));
    assert!(drawn.contains("n…<") && drawn.contains("0 % zero, 128 NaN"), "{drawn}");
}

#[test]
fn what_cannot_be_drawn_is_refused_and_leaves_nothing() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let input = small_checkpoint(folder.path());
    let other = one_tensor(folder.path(), "other", "matrix", |i| i as f32);
    let picture = folder.path().join("picture.svg");
    let empty = folder.path().join("none");
    std::fs::write(&empty, file("{}", &[])).expect("a writable folder");
    let before = names(folder.path());
    let missing_folder = folder.path().join("no/such/picture.svg");
    let cases: [(&[&dyn AsRef<std::ffi::OsStr>], &str); 8] = [
        (&[&input, &"--histogram", &picture, &"--tensor", &"nothing"], "has no tensor `nothing` with elements that are single numbers"),
        (&[&input, &"--histogram", &picture, &"--tensor", &"empty"], "has no tensor `empty`"),
        (&[&empty, &"--histogram", &picture], "has no tensor with elements"),
        (&[&input, &"--histogram", &picture, &"--tensor", &"matrix", &"--against", &other], "tensor `matrix` is [2x64], but [4x32] in"),
        (&[&input, &"--histogram", &missing_folder], "there is no folder"),
        (&[&input, &"--histogram", &folder.path()], "is a directory"),
        (&[&input, &"--histogram", &input], "is the input file itself"),
        (&[&input, &"--histogram", &other, &"--against", &other, &"--tensor", &"matrix"], "is the input file itself"),
    ];
    for (words, expected) in cases {
        let mut all: Vec<&dyn AsRef<std::ffi::OsStr>> = vec![&"inspect"];
        all.extend(words);
        let done = run(&all);
        assert_eq!(done.status.code(), Some(1), "{expected}");
        assert!(stderr(&done).contains(expected) && stderr(&done).lines().count() == 1, "{}", stderr(&done));
        assert_eq!(names(folder.path()), before, "{expected}");
    }
    let full = format!("ulimit -f 1; exec {:?} inspect in.svg.input --histogram out.svg", env!("CARGO_BIN_EXE_oxtile"));
    std::fs::copy(&input, folder.path().join("in.svg.input")).expect("a copy");
    let done = std::process::Command::new("sh").args(["-c", &full]).current_dir(folder.path()).output().expect("a shell");
    assert!(stderr(&done).contains("out.svg: cannot write: File too large"), "{}", stderr(&done));
    assert!(!folder.path().join("out.svg").exists() && !names(folder.path()).iter().any(|name| name.ends_with(".partial")));
}
