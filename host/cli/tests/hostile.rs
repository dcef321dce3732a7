//! Broken, cut and hostile files: each gives an error that names the file and the fault, and leaves nothing behind.

mod common;

use std::path::Path;

use common::{file, names, run, stderr};

/// A file, and what the error about it must say.
type Case = (&'static str, Vec<u8>, &'static [&'static str]);

/// Twelve data bytes of one tensor, described by this entry.
fn entry(entry: &str) -> Vec<u8> {
    file(&format!(r#"{{"a":{entry}}}"#), &[0; 12])
}

fn with_length(length: u64, rest: &[u8]) -> Vec<u8> {
    let mut bytes = length.to_le_bytes().to_vec();
    bytes.extend(rest);
    bytes
}

fn two(first: [u64; 2], second: [u64; 2], data: usize) -> Vec<u8> {
    let entry = |[begin, end]: [u64; 2]| format!(r#"{{"dtype":"U8","shape":[{}],"data_offsets":[{begin},{end}]}}"#, end - begin);
    file(&format!(r#"{{"a":{},"b":{}}}"#, entry(first), entry(second)), &vec![0; data])
}

fn container_cases() -> Vec<Case> {
    let valid = r#"{"a":{"dtype":"F32","shape":[3],"data_offsets":[0,12]}}"#;
    let nested = format!(r#"{{"a":{}{}}}"#, "[".repeat(100_000), "]".repeat(100_000));
    let nested_metadata = format!(r#"{{"__metadata__":{}1{}}}"#, r#"{"k":"#.repeat(5000), "}".repeat(5000));
    let noise: Vec<u8> = (0..4096u32).map(|i| (i.wrapping_mul(2_654_435_761) >> 13) as u8).collect();
    let mut not_utf8 = file(valid, &[0; 12]);
    not_utf8[10] = 0xff;
    vec![
        ("empty file", vec![], &["has 0 bytes"]),
        ("seven bytes", vec![0; 7], &["has 7 bytes"]),
        ("length 0", with_length(0, b""), &["header is empty"]),
        ("length 2^63", with_length(1 << 63, valid.as_bytes()), &["9223372036854775808", "cut short"]),
        ("length 2^64-1", with_length(u64::MAX, valid.as_bytes()), &["18446744073709551615"]),
        ("length one too long", with_length(valid.len() as u64 + 1, valid.as_bytes()), &["declares a header of 56 bytes, but 55"]),
        ("length one too short", with_length(valid.len() as u64 - 1, valid.as_bytes()), &["JSON", "EOF"]),
        ("header cut", file(valid, &[0; 12])[..30].to_vec(), &["declares a header of 55 bytes, but 22"]),
        ("noise", noise, &["declares a header"]),
        ("noise after a length", with_length(64, &[7; 80]), &["does not begin with '{'", "0x07"]),
        ("leading space", file(&format!(" {valid}"), &[0; 12]), &["does not begin with '{'"]),
        ("an array", file("[1,2]", &[]), &["does not begin with '{'"]),
        ("not UTF-8", not_utf8, &["not UTF-8 from its byte 2"]),
        ("not JSON", file("{nonsense}", &[]), &["JSON", "line 1 column 2"]),
        ("unclosed", file(r#"{"a":{"dtype":"F32""#, &[]), &["JSON"]),
        ("text after the object", file(&format!("{valid}x"), &[0; 12]), &["JSON", "trailing"]),
        ("deep nesting", file(&nested, &[]), &["tensor `a`", "header entry"]),
        ("deep nesting in metadata", file(&nested_metadata, &[]), &["__metadata__", "\"k\""]),
        ("name twice", file(&format!("{},{}", &valid[..valid.len() - 1], &valid[1..]), &[0; 12]), &["\"a\"", "twice"]),
        ("metadata twice", file(r#"{"__metadata__":{},"__metadata__":{}}"#, &[]), &["__metadata__", "twice"]),
        ("metadata key twice", file(r#"{"__metadata__":{"k":"1","k":"2"}}"#, &[]), &["__metadata__", "\"k\"", "twice"]),
        ("metadata of numbers", file(r#"{"__metadata__":{"k":1}}"#, &[]), &["__metadata__", "\"k\"", "string"]),
        ("metadata no object", file(r#"{"__metadata__":"x"}"#, &[]), &["__metadata__", "object"]),
        ("data without tensors", file("{}", &[0; 5]), &["5 bytes belong to no tensor"]),
    ]
}

fn tensor_cases() -> Vec<Case> {
    vec![
        ("entry no object", entry("3"), &["tensor `a`", "expected an object"]),
        ("no dtype", entry(r#"{"shape":[3],"data_offsets":[0,12]}"#), &["tensor `a`", "dtype", "missing"]),
        ("no shape", entry(r#"{"dtype":"F32","data_offsets":[0,12]}"#), &["tensor `a`", "shape", "missing"]),
        ("no offsets", entry(r#"{"dtype":"F32","shape":[3]}"#), &["tensor `a`", "data_offsets", "missing"]),
        ("dtype twice", entry(r#"{"dtype":"F32","dtype":"F32","shape":[3],"data_offsets":[0,12]}"#), &["`a`", "twice"]),
        ("unknown dtype", entry(r#"{"dtype":"F31","shape":[3],"data_offsets":[0,12]}"#), &["`a`", "dtype", "F31", "BF16"]),
        ("dtype no string", entry(r#"{"dtype":32,"shape":[3],"data_offsets":[0,12]}"#), &["`a`", "dtype", "string"]),
        ("negative size", entry(r#"{"dtype":"F32","shape":[-3],"data_offsets":[0,12]}"#), &["`a`", "shape", "-3"]),
        ("fractional size", entry(r#"{"dtype":"F32","shape":[3.5],"data_offsets":[0,12]}"#), &["`a`", "shape", "3.5"]),
        ("size 2^64", entry(r#"{"dtype":"F32","shape":[18446744073709551616],"data_offsets":[0,12]}"#), &["`a`", "shape"]),
        ("shape no array", entry(r#"{"dtype":"F32","shape":3,"data_offsets":[0,12]}"#), &["`a`", "shape", "sequence"]),
        (
            "product overflows",
            entry(r#"{"dtype":"U8","shape":[4294967296,4294967296],"data_offsets":[0,12]}"#),
            &["`a`", "shape", "64 bits"],
        ),
        (
            "product wraps to the right size",
            entry(r#"{"dtype":"F32","shape":[4611686018427387907],"data_offsets":[0,12]}"#),
            &["`a`", "shape", "64 bits"],
        ),
        ("one offset", entry(r#"{"dtype":"F32","shape":[3],"data_offsets":[12]}"#), &["`a`", "data_offsets"]),
        ("three offsets", entry(r#"{"dtype":"F32","shape":[3],"data_offsets":[0,12,12]}"#), &["`a`", "data_offsets"]),
        ("negative offset", entry(r#"{"dtype":"F32","shape":[3],"data_offsets":[-12,0]}"#), &["`a`", "data_offsets", "-12"]),
        ("offsets swapped", entry(r#"{"dtype":"F32","shape":[3],"data_offsets":[12,0]}"#), &["`a`", "end 0 lies before begin 12"]),
        ("shape too large", entry(r#"{"dtype":"F32","shape":[4],"data_offsets":[0,12]}"#), &["`a`", "span 12 bytes", "takes 16"]),
        ("shape too small", entry(r#"{"dtype":"F16","shape":[3],"data_offsets":[0,12]}"#), &["`a`", "span 12 bytes", "takes 6"]),
        ("half a byte", entry(r#"{"dtype":"F4","shape":[23],"data_offsets":[0,12]}"#), &["`a`", "shape", "92 bits"]),
        ("data cut", file(r#"{"a":{"dtype":"F32","shape":[3],"data_offsets":[0,12]}}"#, &[0; 11]), &["`a`", "end at 12", "11 data bytes"]),
        ("data too long", file(r#"{"a":{"dtype":"F32","shape":[3],"data_offsets":[0,12]}}"#, &[0; 14]), &["2 bytes belong to no tensor"]),
        (
            "end 2^64-1",
            entry(r#"{"dtype":"U8","shape":[18446744073709551615],"data_offsets":[0,18446744073709551615]}"#),
            &["`a`", "64 bits"],
        ),
        (
            "far beyond the file",
            entry(r#"{"dtype":"U8","shape":[1],"data_offsets":[1152921504606846975,1152921504606846976]}"#),
            &["`a`", "data_offsets"],
        ),
        ("overlap", two([0, 8], [4, 12], 12), &["`b`", "begin at 4", "inside `a`"]),
        ("the same bytes twice", two([0, 8], [0, 8], 8), &["`b`", "inside `a`"]),
        ("hole", two([0, 4], [8, 12], 12), &["`b`", "4 bytes after the end of `a`"]),
        ("hole at the start", two([4, 8], [8, 12], 12), &["`a`", "the start of the data"]),
        ("terminal escapes in a name", file("{\"\\u001b[2J\":1}", &[]), &["`\\u{1b}[2J`"]),
    ]
}

#[test]
fn every_broken_file_is_refused_and_leaves_nothing() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let input = folder.path().join("broken.safetensors");
    let cases: Vec<_> = container_cases().into_iter().chain(tensor_cases()).collect();
    assert!(cases.len() >= 50, "the table is whole");
    for (title, bytes, expected) in cases {
        std::fs::write(&input, bytes).expect("a writable folder");
        let inspected = run(&[&"inspect", &input]);
        assert_refused(title, &inspected, &input, expected);

        let quantized = common::quantize(&input, &folder.path().join("out.safetensors"));
        let text = quantized.expect_err(title).to_string();
        assert_eq!(stderr(&inspected), format!("oxtile: {text}\n"), "{title}: both commands say the same");
        assert_eq!(names(folder.path()), ["broken.safetensors"], "{title}");
    }
}

fn assert_refused(title: &str, output: &std::process::Output, file: &Path, expected: &[&str]) {
    let text = stderr(output);
    assert_eq!(output.status.code(), Some(1), "{title}: {text}");
    assert!(output.stdout.is_empty(), "{title}: prints nothing");
    for part in [file.to_str().expect("UTF-8")].iter().chain(expected) {
        assert!(text.contains(part), "{title}: {part:?} is not in: {text}");
    }
    assert!(!text.contains('\u{1b}') && text.lines().count() == 1, "{title}: one clean line: {text}");
}

#[test]
fn what_is_no_file_is_refused() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let missing = folder.path().join("missing.safetensors");
    assert_refused("missing", &run(&[&"inspect", &missing]), &missing, &["cannot open", "No such file"]);
    assert_refused("folder", &run(&[&"inspect", &folder.path()]), folder.path(), &["is a directory"]);
    let device = Path::new("/dev/zero");
    assert_refused("device", &run(&[&"inspect", &device]), device, &["is a device"]);
    let pipe = folder.path().join("pipe");
    let made = std::process::Command::new("mkfifo").arg(&pipe).status().expect("mkfifo runs");
    assert!(made.success());
    assert_refused("pipe", &run(&[&"inspect", &pipe]), &pipe, &["is a pipe"]);
}

#[test]
fn what_looks_odd_but_is_legal_is_read() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let input = folder.path().join("legal.safetensors");
    let tensor = |dtype: &str, shape: &str, end: u64| {
        file(&format!(r#"{{"":{{"dtype":"{dtype}","shape":{shape},"data_offsets":[0,{end}]}}}}"#), &vec![0; end as usize])
    };
    let cases = [
        ("no tensor", file("{}", &[])),
        ("a key that the format does not name", entry(r#"{"dtype":"F32","shape":[3],"data_offsets":[0,12],"x":{"y":[0]}}"#)),
        ("padded header", file("{}      ", &[])),
        ("only metadata", file(r#"{"__metadata__":{"":"ü"}}"#, &[])),
        ("scalar", tensor("F64", "[]", 8)),
        ("no element", tensor("F32", "[32,0,32]", 0)),
        ("packed nibbles", tensor("F4", "[2,32]", 32)),
        ("packed six bits", tensor("F6_E3M2", "[4]", 3)),
        ("complex", tensor("C64", "[2]", 16)),
    ];
    for (title, bytes) in cases {
        std::fs::write(&input, bytes).expect("a writable folder");
        let inspected = run(&[&"inspect", &input]);
        assert!(inspected.status.success(), "{title}: {}", stderr(&inspected));
        let output = folder.path().join("out.safetensors");
        common::quantize(&input, &output).unwrap_or_else(|error| panic!("{title}: {error}"));
        assert!(run(&[&"inspect", &output]).status.success(), "{title}: the output is read back");
    }
}

/// A header of tensors of BF16, each of one row of 32, whose data is zeros.
fn many(names: impl Iterator<Item = String>) -> Vec<u8> {
    let entries: Vec<_> = names
        .enumerate()
        .map(|(i, name)| format!(r#"{name:?}:{{"dtype":"BF16","shape":[1,32],"data_offsets":[{},{}]}}"#, 64 * i, 64 * i + 64))
        .collect();
    file(&format!("{{{}}}", entries.join(",")), &vec![0; 64 * entries.len()])
}

/// Names, shapes and metadata of any length make lines that are short, in every table.
#[test]
fn long_cells_are_shortened() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let ones = "1,".repeat(100_000);
    let cases = [
        ("many tensors", many((0..1500).map(|i| format!("model.layers.{}.mlp.experts.{}.w", i / 7, i % 7)))),
        ("a long name", many(["n".repeat(65_536)].into_iter())),
        ("a long name among many", many((0..2000).map(|i| format!("t{i}")).chain(["n".repeat(60_000)]))),
        ("a long shape", file(&format!(r#"{{"n":{{"dtype":"F32","shape":[{ones}32],"data_offsets":[0,128]}}}}"#), &[0; 128])),
    ];
    for (title, bytes) in cases {
        let [input, output] = ["in", "out"].map(|name| folder.path().join(name));
        std::fs::write(&input, bytes).expect("a writable folder");
        let quantized = run(&[&"quantize", &"--device", &"emulated", &"-i", &input, &"-o", &output]);
        for done in [quantized, run(&[&"inspect", &output]), run(&[&"inspect", &input]), run(&[&"compare", &input, &input])] {
            assert!(done.status.success(), "{title}: {}", stderr(&done));
            let longest = String::from_utf8_lossy(&done.stdout).lines().map(|line| line.chars().count()).max();
            assert!(longest.is_some_and(|longest| longest < 9 * 122), "{title}: a line of {longest:?} characters");
        }
    }
}

/// Escapes in names, keys and words of metadata come out as text, on one line.
#[test]
fn files_do_not_drive_the_terminal() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let input = folder.path().join("in\n\u{1b}[2J\u{2028}");
    let hole = file(
        "{\"\\u001b]0;owned\\u0007\\n\\u061c\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0,1]},\
         \"b\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[2,3]}}",
        &[0; 3],
    );
    let stated = |tensors: &str| {
        let words = [
            ("format", "mxfp8"),
            ("format_version", "2"),
            ("direction", "row"),
            ("layout", "compact"),
            ("hadamard", "false"),
            ("tensors", tensors),
        ];
        let words: serde_json::Map<_, _> = words.iter().map(|(key, value)| (format!("oxtile.{key}"), (*value).into())).collect();
        file(&serde_json::json!({ "__metadata__": words }).to_string(), &[])
    };
    let unknown = stated("{\"w\":{\"dtype\":\"F32\",\"shape\":[1,32],\"\u{1b}[2J\":1}}".replace('\u{1b}', "\\u001b").as_str());
    let shard = file(&serde_json::json!({ "__metadata__": { "oxtile.shard.rank": "\u{1b}[2J" } }).to_string(), &[]);
    let output = folder.path().join("out");
    for (title, bytes) in [("hole", hole), ("unknown field", unknown), ("shard", shard)] {
        std::fs::write(&input, bytes).expect("a writable folder");
        let commands: [&[&dyn AsRef<std::ffi::OsStr>]; 5] = [
            &[&"inspect", &input],
            &[&"inspect", &input, &"--histogram", &output],
            &[&"compare", &input, &input],
            &[&"dequantize", &"--device", &"emulated", &"-i", &input, &"-o", &output],
            &[&"attention", &"--device", &"emulated", &"-i", &input, &"-o", &output],
        ];
        for words in commands {
            let done = run(words);
            let printed = [stderr(&done), String::from_utf8_lossy(&done.stdout).into_owned()].concat();
            let drives = |c: char| c != '\n' && (c.is_control() || matches!(c, '\u{61c}' | '\u{2028}'));
            assert!(!printed.contains(drives), "{title}: {printed:?}");
            assert!(stderr(&done).lines().count() <= 1, "{title}: {printed}");
        }
    }
}

/// A matrix that would be restored by the name of the header's strings.
#[test]
fn a_matrix_is_not_named_as_the_strings() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let (input, output) = (folder.path().join("in"), folder.path().join("out"));
    let name = "__metadata__";
    let metadata = serde_json::json!({
        "oxtile.format": "nvfp4", "oxtile.format_version": "2", "oxtile.direction": "row", "oxtile.layout": "compact", "oxtile.hadamard": "false",
        "oxtile.tensors": format!(r#"{{"{name}":{{"dtype":"F32","shape":[1,16]}}}}"#),
    });
    let entry = |dtype: &str, shape: &[u64], begin: u64, end: u64| serde_json::json!({ "dtype": dtype, "shape": shape, "data_offsets": [begin, end] });
    let header = serde_json::json!({
        name: metadata, "__metadata___packed": entry("U8", &[1, 8], 8, 16), "__metadata___scale": entry("F8_E4M3", &[1, 1], 16, 17),
        "__metadata___global_scale": entry("F32", &[1], 0, 4), "__metadata___amax": entry("F32", &[1], 4, 8),
    });
    std::fs::write(&input, file(&header.to_string(), &[0; 17])).expect("a writable folder");
    let done = run(&[&"dequantize", &"--device", &"emulated", &"-i", &input, &"-o", &output]);
    assert_refused("a reserved name", &done, &output, &["no tensor can be named `__metadata__`"]);
    assert_eq!(names(folder.path()), ["in"]);
}
