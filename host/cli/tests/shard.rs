//! `oxtile shard` and `oxtile join`: every rank's file holds the part that the rule gives it, and together they are the whole again.

mod common;

use std::{ffi::OsString, ops::Range, path::Path};

use common::{
    file, names,
    shards::{ODD, checkpoint, command, content, join_words, shard, tensors, words},
};
use half::{bf16, f16};
use oxtile_cli::safetensors::Checkpoint;

/// The rows of a rank: all shards of one length, a multiple of `align`, but for the last with rows.
fn rows_of(rank: usize, ranks: usize, rows: u64, align: u64) -> Range<u64> {
    let mut length = 0;
    while length * (ranks as u64) < rows {
        length += align;
    }
    let start = (rank as u64 * length).min(rows);
    start..(start + length).min(rows)
}

/// Columns of bytes of a matrix of bytes.
fn columns_of(bytes: &[u8], width: usize, range: Range<usize>) -> Vec<u8> {
    bytes.chunks(width).flat_map(|line| line[range.clone()].to_vec()).collect()
}

#[test]
fn kept_tensors_are_divided_by_rows_and_come_back() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let (input, joined) = (folder.path().join("in"), folder.path().join("joined"));
    checkpoint(&input, &tensors());
    for ranks in [1, 2, 3, 4, 5, 71] {
        let mut files = shard(&input, &folder.path().join("p"), ranks, &[]);
        for (rank, file) in files.iter().enumerate() {
            let found = content(file);
            assert_eq!(found.len(), tensors().len());
            for (name, dtype, shape, bytes) in tensors() {
                let part = found.iter().find(|part| part.0 == name).expect("every file has every tensor");
                // Three packed elements of four bits are whole bytes by two rows.
                let rows = shape.first().map(|&rows| rows_of(rank, ranks, rows, if dtype == "F4" { 2 } else { 1 }));
                let (mut expected, mut of) = (shape.clone(), 0..bytes.len());
                if let Some(rows) = rows {
                    expected[0] = rows.end - rows.start;
                    let per_row = bytes.len() as f64 / shape[0].max(1) as f64;
                    of = (rows.start as f64 * per_row) as usize..(rows.end as f64 * per_row) as usize;
                }
                assert_eq!((&part.1, &part.2), (&dtype.to_owned(), &expected), "{name:?} of rank {rank} of {ranks}");
                assert!(part.3 == bytes[of], "{name:?} of rank {rank} of {ranks}");
            }
            let strings = Checkpoint::open(file).expect("valid").metadata().clone();
            assert_eq!((strings["format"].as_str(), strings["oxtile.shard.rank"].as_str()), ("pt", rank.to_string().as_str()));
        }
        files.reverse();
        command(&join_words(&files, &joined));
        assert!(content(&joined) == content(&input), "{ranks} ranks");
        let strings = |path| Checkpoint::open(path).expect("valid").metadata().clone();
        assert_eq!(strings(&joined), strings(&input), "{ranks} ranks");
        assert!(std::fs::read(&joined).expect("readable") == std::fs::read(&input).expect("readable"), "{ranks} ranks: byte by byte");
        files.iter().for_each(|file| std::fs::remove_file(file).expect("it is there"));
        assert_eq!(names(folder.path()), ["in", "joined"], "{ranks} ranks");
    }
}

#[test]
fn quantized_parts_are_those_of_the_whole_and_join_to_it() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let [input, whole, joined] = ["in", "whole", "joined"].map(|name| folder.path().join(name));
    checkpoint(&input, &tensors());
    for (format, align, block) in [("fp8", 1, 1), ("mxfp8", 32, 32), ("nvfp4", 16, 16), ("nvfp4-squares", 16, 16)] {
        for direction in ["row", "column", "both"] {
            let options = ["--format", format, "--direction", direction];
            let mut line = words(&[&"quantize", &"--device", &"emulated", &"-i", &input, &"-o", &whole]);
            line.extend(options.map(OsString::from));
            command(&line);
            for ranks in 1..6 {
                let files = shard(&input, &folder.path().join("p"), ranks, &options);
                command(&join_words(&files, &joined));
                let same = std::fs::read(&joined).expect("readable") == std::fs::read(&whole).expect("readable");
                assert!(same, "{options:?}, {ranks} ranks: the file is that of oxtile quantize");
                for (rank, file) in files.iter().enumerate() {
                    for (part, all) in content(file).into_iter().zip(content(&whole)) {
                        let expected = part_of(&all, rank, ranks, align, block);
                        let what = format!("{options:?}: {:?} of rank {rank} of {ranks}", all.0);
                        assert_eq!((&part.0, &part.1, &part.2), (&all.0, &all.1, &expected.0), "{what}");
                        assert!(part.3 == expected.1, "{what}");
                    }
                }
            }
        }
    }
}

/// What a rank has of a tensor of a quantized file, by name: dimensions and bytes.
fn part_of(
    (name, dtype, shape, bytes): &(String, String, Vec<u64>, Vec<u8>),
    rank: usize,
    ranks: usize,
    align: u64,
    block: u64,
) -> (Vec<u64>, Vec<u8>) {
    let base = ["brain", "half", "strange", "narrow", "wide.3.w", ODD].into_iter().find(|base| name.starts_with(base));
    let is_code = dtype == "F8_E4M3" || dtype == "U8" || dtype == "F8_E8M0";
    let (rows, is_one) = match base {
        // One number for the matrix.
        Some(_) if *dtype == "F32" && shape == &[1] => (0, true),
        Some("brain") if is_code => (160, false),
        Some("half") if is_code => (64, false),
        Some("strange") if is_code => (48, false),
        Some("narrow") if is_code => (3, false),
        Some("wide.3.w") if is_code => (70, false),
        Some(ODD) if is_code => (1, false),
        _ => (0, shape.is_empty()),
    };
    if is_one {
        return (shape.clone(), bytes.clone());
    }
    if rows == 0 {
        // Kept.
        let range = rows_of(rank, ranks, shape[0], if dtype == "F4" { 2 } else { 1 });
        let per_row = bytes.len() as f64 / shape[0].max(1) as f64;
        let mut dimensions = shape.clone();
        dimensions[0] = range.end - range.start;
        return (dimensions, bytes[(range.start as f64 * per_row) as usize..(range.end as f64 * per_row) as usize].to_vec());
    }
    let range = rows_of(rank, ranks, rows, align);
    let width = *shape.last().expect("a matrix");
    let is_transposed = name.contains("_columnwise") && align != 32;
    if is_transposed {
        // Bytes a row of the matrix takes in a line: a code, half of one, or a scale for 16.
        let of = |row: u64| (row * width).div_ceil(rows) as usize;
        let columns = of(range.start)..of(range.end);
        return (vec![shape[0], columns.len() as u64], columns_of(bytes, width as usize, columns));
    }
    let lines = if name.ends_with("_columnwise_scale") { range.start.div_ceil(block)..range.end.div_ceil(block) } else { range };
    let of = |line: u64| (line * width) as usize;
    (vec![lines.end - lines.start, width], bytes[of(lines.start)..of(lines.end)].to_vec())
}

#[test]
fn matrices_are_rounded_to_bf16_and_the_rest_is_kept() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let (input, joined) = (folder.path().join("in"), folder.path().join("joined"));
    checkpoint(&input, &tensors());
    let files = shard(&input, &folder.path().join("p"), 3, &["--format", "bf16"]);
    command(&join_words(&files, &joined));
    let after = content(&joined);
    for (name, dtype, shape, bytes) in tensors() {
        let found = after.iter().find(|tensor| tensor.0 == name).expect("it is there");
        assert_eq!(found.2, shape, "{name:?}");
        let wide: Vec<f32> = match dtype {
            "F32" => bytes.as_chunks().0.iter().copied().map(f32::from_le_bytes).collect(),
            "F16" => bytes.as_chunks().0.iter().copied().map(|x| f16::from_le_bytes(x).to_f32()).collect(),
            _ => vec![],
        };
        if wide.is_empty() && !(dtype == "F32" && bytes.is_empty()) || shape.len() < 2 {
            assert_eq!((found.1.as_str(), &found.3), (dtype, &bytes), "{name:?} is kept");
            continue;
        }
        assert_eq!(found.1, "BF16", "{name:?}");
        for (x, rounded) in wide.iter().zip(found.3.as_chunks().0) {
            let rounded = bf16::from_le_bytes(*rounded).to_f32();
            assert_eq!(x.is_nan(), rounded.is_nan(), "{name:?}: {x}");
            // To nearest, ties to even: half a unit of the last place at most, by the bits.
            let nearest = ((u64::from(x.to_bits()) + 0x7fff + u64::from(x.to_bits() >> 16 & 1)) >> 16 << 16) as u32;
            assert!(x.is_nan() || rounded.to_bits() == nearest, "{name:?}: {x} became {rounded}");
        }
    }
}

#[test]
fn files_without_tensors_are_divided_too() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let (input, joined) = (folder.path().join("in"), folder.path().join("joined"));
    for format in ["bf16", "mxfp8"] {
        std::fs::write(&input, file("{}", &[])).expect("a writable folder");
        let files = shard(&input, &folder.path().join("p"), 2, &["--format", format]);
        command(&join_words(&files, &joined));
        assert!(content(&joined).is_empty());
    }
}

#[test]
fn the_same_input_gives_the_same_files_and_another_other_ones() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let input = folder.path().join("in");
    checkpoint(&input, &tensors());
    let made =
        || shard(&input, &folder.path().join("p"), 2, &[]).iter().map(|file| std::fs::read(file).expect("readable")).collect::<Vec<_>>();
    let first = made();
    assert!(made() == first);
    let mut other = tensors();
    other[8].3[239] ^= 1;
    checkpoint(&input, &other);
    let second = made();
    // The last byte of the last row is rank 1's; the fingerprint is in both.
    assert!(second[0] != first[0] && second[1] != first[1]);
}

#[test]
fn the_text_names_tensors_files_and_reasons() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let (input, prefix) = (folder.path().join("in"), folder.path().join("p"));
    checkpoint(&input, &tensors());
    let line =
        words(&[&"shard", &"-i", &input, &"--output-prefix", &prefix, &"--ranks", &"3", &"--device", &"emulated", &"--format", &"nvfp4"]);
    let text = command(&line);
    for expected in [
        "-00001-of-00003.safetensors to ",
        "format  nvfp4, by row\nranks   3\n",
        "last dimension 5 is not a multiple of 16",
        "kept: F64 is not F32",
        "quantized\n",
    ] {
        assert!(text.contains(expected), "{expected} in\n{text}");
    }
    assert!(!text.contains('\u{1b}'), "names cannot drive the terminal");
    let row = |name: &str| {
        text.lines().find(|line| line.starts_with(name)).expect("a line").split_whitespace().map(str::to_owned).collect::<Vec<_>>()
    };
    assert_eq!(row("wide.3.w")[..4], ["wide.3.w", "F32", "70x64", "32"]);
    assert_eq!(row("scalar")[..4], ["scalar", "F64", "scalar", "all"]);
}

/// A checkpoint whose header has spaces, tensors and keys in an order of their own, and strings in other words, as other writers leave it.
fn foreign(path: &Path, strings: &str, pad: &str) {
    let header = format!(
        "{{{pad}\"__metadata__\": {strings}, \"b.weight\": {{\"shape\": [3, 2], \"dtype\":\"U8\", \"data_offsets\": [0, 6], \"extra\": null}},\n\"a.weight\" : \
         {{\"dtype\": \"F32\", \"data_offsets\": [6, 14], \"shape\": [2]}}}} "
    );
    std::fs::write(path, file(&header, &(0..14).collect::<Vec<u8>>())).expect("a writable folder");
}

#[test]
fn a_kept_file_comes_back_byte_by_byte_whatever_its_header() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let (input, joined) = (folder.path().join("in"), folder.path().join("joined"));
    let strings = r#"{"zeta": "1", "format":"pt", "odd": "\u00fc\/", "oxtile.shard.joined": "theirs"}"#;
    for (strings, pad) in [(strings, ""), ("{}", "   "), (r#"{"a":"","b":"\n"}"#, "\n\t")] {
        foreign(&input, strings, pad);
        for ranks in [1, 2, 3] {
            let files = shard(&input, &folder.path().join("p"), ranks, &[]);
            command(&join_words(&files, &joined));
            assert!(std::fs::read(&joined).expect("readable") == std::fs::read(&input).expect("readable"), "{strings}, {ranks} ranks");
            // The header is kept once.
            let has_header =
                |file: &std::path::PathBuf| Checkpoint::open(file).expect("valid").metadata().contains_key("oxtile.shard.header");
            assert_eq!(files.iter().filter(|file| has_header(file)).count(), 1);
        }
    }
}

/// Strings are in each shard once, so the longest ones that a file may have are no more than its shards may have.
#[test]
fn long_strings_are_kept_once() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let (input, joined) = (folder.path().join("in"), folder.path().join("joined"));
    let long = "\u{fc}\"".repeat(5_000_000);
    foreign(&input, &serde_json::json!({ "long": long, "format": "pt" }).to_string(), "");
    let bytes = std::fs::metadata(&input).expect("it is there").len();
    let files = shard(&input, &folder.path().join("p"), 2, &[]);
    for file in &files {
        let taken = std::fs::metadata(file).expect("it is there").len();
        assert!(taken < bytes + 2000, "{taken} bytes of {bytes}");
    }
    command(&join_words(&files, &joined));
    assert!(std::fs::read(&joined).expect("readable") == std::fs::read(&input).expect("readable"));
}
