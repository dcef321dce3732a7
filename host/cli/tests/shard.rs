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
fn a_plan_by_hand() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let input = folder.path().join("in");
    let zeros = |name, rows: u64, columns: u64| (name, "BF16", vec![rows, columns], vec![0; (rows * columns * 2) as usize]);
    let layers = ["h.10.w", "h.2.w", "h.9.w"].map(|name| zeros(name, 64, 128));
    let mut made = vec![zeros("embed", 256, 128)];
    made.extend(layers);
    made.push(("norm", "F32", vec![128], vec![0; 512]));
    checkpoint(&input, &made);
    let plan = |options: &[&str]| {
        let mut line = words(&[&"shard", &"--plan", &"--json", &"--ranks", &"4", &"--input", &input]);
        line.extend(options.iter().map(OsString::from));
        serde_json::from_str::<serde_json::Value>(&command(&line)).expect("JSON")["plan"].clone()
    };
    let kept = plan(&[]);
    let (large, small) = (256 * 128 * 2, 64 * 128 * 2);
    assert_eq!((&kept["weights"], &kept["order"], &kept["elements"]), (&4.into(), &"layers".into(), &(256 * 128 + 3 * 64 * 128).into()));
    // There is no head: the embedding is one, in both passes.
    assert_eq!((&kept["tied"], &kept["lookups"]), (&"embed".into(), &serde_json::json!([])));
    let all = large + 3 * small;
    assert_eq!((&kept["shard_bytes"], &kept["master_bytes"]), (&(all / 4).into(), &0.into()));
    let pulled = (all + large) / 4 * 3;
    assert_eq!((&kept["forward_bytes"], &kept["backward_bytes"]), (&pulled.into(), &pulled.into()));
    assert_eq!((&kept["gradient_bytes"], &kept["largest_bytes"]), (&(all * 2 / 4 * 3).into(), &large.into()));
    assert_eq!(kept["step_bytes"], 2 * pulled + all * 2 / 4 * 3);
    // Two buffers of the largest gradient in F32, two slots of its parts of the three others, and the rank's rows of all.
    let gradients = [2 * 2 * large, 2 * 2 * large / 4 * 3, 2 * all / 4];
    let stated = ["gradient_buffer_bytes", "gradient_slot_bytes", "main_gradient_bytes"].map(|key| kept[key].as_u64().expect("a number"));
    assert_eq!(stated, gradients);
    let held = all / 4 + gradients.iter().sum::<u64>();
    let distances = kept["distances"].as_array().expect("an array");
    let found: Vec<_> = distances.iter().map(|d| (d["distance"].clone(), d["slots"].clone(), d["peak_bytes"].clone())).collect();
    // Of two uses of the embedding at distance 2 each has two neighbours, and the weight between them is near all four.
    let expected = [(1, 1), (2, 3), (3, 3)].map(|(distance, count)| {
        let slots: Vec<u64> = std::iter::once(large).chain(std::iter::repeat_n(small, count)).collect();
        (distance.into(), slots.into(), (held + large + small * count as u64).into())
    });
    assert_eq!(found, expected);
    let taken = |pass: &str| {
        let taken = distances[0][pass].as_array().expect("an array").iter().map(|taken| (taken["weight"].clone(), taken["slot"].clone()));
        taken.collect::<Vec<_>>()
    };
    let slots =
        ["embed", "h.2.w", "h.9.w", "h.10.w", "embed"].into_iter().zip([0, 1, 0, 1, 0]).map(|(name, slot)| (name.into(), slot.into()));
    assert_eq!(taken("forward"), slots.collect::<Vec<_>>());
    // MXFP8: codes, and scales of rows or of columns, at multiples of 256 bytes; 64 rows are those of two ranks. The embedding is looked up: it has no codes by columns.
    let quantized = plan(&["--format", "mxfp8", "--distance", "1", "--embedding", "lookup"]);
    let [large, small] = [256 * 128, 64 * 128].map(|elements| elements + elements / 32);
    assert_eq!(quantized["forward_bytes"], large * 3 / 4 + 3 * small, "rank 2 has nothing of the small ones");
    assert_eq!(quantized["backward_bytes"], 3 * small);
    assert_eq!(quantized["shard_bytes"], large / 4 + 2 * 3 * (32 * 128 + 256), "32 rows, and 128 scales that fill 256 bytes");
    assert_eq!(quantized["master_bytes"], 2 * (256 / 4 + 3 * 32) * 128);
    assert_eq!(quantized["distances"][0]["slots"], serde_json::json!([large, small]));
    assert_eq!((&quantized["lookups"], &quantized["tied"]), (&serde_json::json!(["embed"]), &serde_json::Value::Null));
    let backward = quantized["distances"][0]["backward"].as_array().expect("an array").len();
    assert_eq!(backward, 3);
    let listed = names(folder.path());
    let text = command(&words(&[&"shard", &"--plan", &"--ranks", &"4", &"-i", &input]));
    assert!(text.contains("weights 4, 57.3 k elements, in the order of their layers\n"), "{text}");
    assert!(text.contains("embed is the head too, in both passes (--embedding lookup: in the forward pass alone)\n"), "{text}");
    assert!(text.contains("received, forward pass       135.2 kB\n"), "{text}");
    assert!(text.contains("travel a step, all three     442.4 kB\n"), "{text}");
    assert!(text.contains("gathers ahead  slots  gathered weights      peak\n            1      2           81.9 kB  "), "{text}");
    assert_eq!(names(folder.path()), listed, "a plan writes nothing");
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

#[test]
fn the_files_of_an_index_are_planned_as_one_model() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let zeros = |name, rows: u64| (name, "BF16", vec![rows, 128], vec![0; (rows * 256) as usize]);
    let made = [
        zeros("lm_head.weight", 256),
        zeros("model.embed_tokens.weight", 256),
        zeros("model.layers.0.w", 64),
        zeros("model.layers.1.w", 64),
    ];
    checkpoint(&folder.path().join("all"), &made);
    checkpoint(&folder.path().join("one.safetensors"), &made[2..]);
    checkpoint(&folder.path().join("two.safetensors"), &made[..2]);
    let index = folder.path().join("model.safetensors.index.json");
    let map = |head: &str| {
        let map = serde_json::json!({ "metadata": { "total_size": 1 }, "weight_map": {
            "model.layers.0.w": "one.safetensors", "model.layers.1.w": "one.safetensors", head: "two.safetensors", "model.embed_tokens.weight": "two.safetensors",
        } });
        std::fs::write(&index, map.to_string()).expect("a writable folder");
    };
    map("lm_head.weight");
    let plan = |input: &Path| {
        let line = words(&[&"shard", &"--plan", &"--json", &"--ranks", &"4", &"--input", &input, &"--format", &"mxfp8"]);
        serde_json::from_str::<serde_json::Value>(&command(&line)).expect("JSON")["plan"].clone()
    };
    let planned = plan(&index);
    assert_eq!(planned, plan(&folder.path().join("all")));
    let names: Vec<_> =
        planned["distances"][0]["forward"].as_array().expect("an array").iter().map(|taken| taken["weight"].clone()).collect();
    assert_eq!(names, ["model.embed_tokens.weight", "model.layers.0.w", "model.layers.1.w", "lm_head.weight"], "the head is last");
    assert_eq!(planned["lookups"], serde_json::json!(["model.embed_tokens.weight"]));

    let listed = common::names(folder.path());
    let refused = |line: &[OsString]| {
        let done = common::oxtile().args(line).output().expect("the binary runs");
        assert_eq!((done.status.code(), common::names(folder.path())), (Some(1), listed.clone()), "{}", common::stderr(&done));
        common::stderr(&done)
    };
    let prefix = folder.path().join("p");
    let cut = words(&[&"shard", &"-i", &index, &"--ranks", &"2", &"--output-prefix", &prefix]);
    assert!(
        refused(&cut).contains("is the index of 2 files: shard each of them, with an --output-prefix of its own; --plan reads the index")
    );
    assert!(refused(&words(&[&"inspect", &index])).contains("is an index by its name, no file of tensors: name one of the files"));
    let planned = words(&[&"shard", &"-i", &index, &"--ranks", &"2", &"--plan"]);
    map("head");
    assert!(refused(&planned).contains("tensor `head`: two.safetensors does not have it"));
    std::fs::write(&index, r#"{"weight_map": {"w": "../one.safetensors"}}"#).expect("a writable folder");
    assert!(refused(&planned).contains("`../one.safetensors` is no file of its folder"));
    std::fs::write(&index, "[").expect("a writable folder");
    assert!(refused(&planned).contains("is not the index of a checkpoint: "));
}

#[test]
fn weights_that_a_format_does_not_take_are_planned_in_bf16() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let input = folder.path().join("in");
    // Seven rows are filled up by `oxtile::sharded`; 31 columns are whole blocks of no NVFP4.
    let floats = |name, rows: u64, columns: u64| (name, "F32", vec![rows, columns], vec![0; (rows * columns * 4) as usize]);
    checkpoint(&input, &[floats("a", 7, 64), floats("b", 7, 31)]);
    let text = |options: &[&str]| {
        let mut line = words(&[&"shard", &"--ranks", &"2", &"--input", &input]);
        line.extend(options.iter().map(OsString::from));
        command(&line)
    };
    let planned = text(&["--plan", "--format", "nvfp4"]);
    assert!(planned.contains("1 stay in BF16: their columns are no whole blocks of the format"), "{planned}");
    assert!(planned.contains("2 of F32 or F16 are held in BF16"), "{planned}");
    assert!(planned.contains("format  nvfp4, by row and by column\n"), "{planned}");
    assert!(!text(&["--plan", "--format", "mxfp8"]).contains("stay in BF16"));
    checkpoint(&input, &[("v", "F32", vec![2], vec![0; 8])]);
    assert!(text(&["--plan"]).contains("weights none: no tensor is a matrix"));
    let prefix = folder.path().join("p").display().to_string();
    let text = text(&["--format", "fp8", "--device", "emulated", "--output-prefix", &prefix]);
    assert!(text.contains("nothing is quantized: no tensor is a matrix that fp8 takes"), "{text}");
}
