//! What `oxtile shard` and `oxtile join` refuse: the error names file, tensor and mend, and nothing that was there is lost.

mod common;

use std::path::{Path, PathBuf};

use common::{
    names, run,
    shards::{checkpoint, command, content, join_words, shard, tensors},
    stderr,
};
use oxtile_cli::safetensors::Checkpoint;

/// What `join` says about files; no output is left, and one from before is as it was.
fn refusal(folder: &Path, files: &[PathBuf]) -> String {
    let output = folder.join("joined");
    std::fs::write(&output, "before").expect("a writable folder");
    let before = names(folder);
    let done = common::oxtile().args(join_words(files, &output)).output().expect("the binary runs");
    let said = stderr(&done);
    assert_eq!((done.status.code(), said.lines().count()), (Some(1), 1), "{said}");
    assert!(!said.contains('\u{1b}') && done.stdout.is_empty(), "{said}");
    assert_eq!((names(folder), std::fs::read(&output).expect("readable")), (before, b"before".to_vec()), "{said}");
    said
}

#[test]
fn what_does_not_belong_together_is_refused() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let (input, path) = (folder.path().join("in"), |name: &str| folder.path().join(name));
    checkpoint(&input, &tensors());
    let of_three = shard(&input, &path("three"), 3, &[]);
    let of_two = shard(&input, &path("two"), 2, &[]);
    let quantized = shard(&input, &path("quantized"), 3, &["--format", "mxfp8"]);
    let both = shard(&input, &path("both"), 3, &["--format", "mxfp8", "--direction", "both"]);
    let mut other = tensors();
    other[0].3[0] ^= 1;
    checkpoint(&path("other"), &other);
    let of_other = shard(&path("other"), &path("another"), 3, &[]);
    let copy = path("copy");
    std::fs::copy(&of_three[1], &copy).expect("a copy");

    let pick = |files: [&PathBuf; 3]| refusal(folder.path(), &files.map(Clone::clone));
    let [a, b, c] = [0, 1, 2].map(|rank| &of_three[rank]);
    let shown = |file: &Path| file.display().to_string();
    let said = refusal(folder.path(), std::slice::from_ref(c));
    assert!(
        said.contains(&format!(
            "{}: it is a shard of 3 ranks, and those of ranks 0 and 1 are missing ({}, {}): name the files of all ranks",
            shown(c),
            shown(a),
            shown(b)
        )),
        "{said}"
    );
    assert!(pick([a, b, a]).contains(&format!("{}: is named twice: name each file once", shown(a))));
    let said = refusal(folder.path(), &[b.clone(), c.clone()]);
    assert!(said.contains("and that of rank 0 is missing"), "{said}");
    let said = pick([a, b, &copy]);
    assert!(
        said.contains(&format!("{}: it is the shard of rank 1, as {} is: name one file of each rank", shown(&copy), shown(b))),
        "{said}"
    );
    let said = pick([a, b, &of_two[0]]);
    assert!(said.contains(&format!("{}: it is a shard of 2 ranks, and {} is one of 3 ranks", shown(&of_two[0]), shown(a))), "{said}");
    let said = pick([a, &quantized[1], c]);
    assert!(
        said.contains("it is a shard of format mxfp8 by row, and") && said.contains("is one of format keep: name the files of one"),
        "{said}"
    );
    let said = pick([&both[0], &quantized[1], &both[2]]);
    assert!(said.contains("of format mxfp8 by row, and") && said.contains("of format mxfp8 by both"), "{said}");
    let said = pick([a, b, &of_other[2]]);
    assert!(said.contains(&format!("{}: it is a shard of the model ", shown(&of_other[2]))), "{said}");
    let said = pick([a, b, &input]);
    assert!(
        said.contains(&format!("{}: its metadata has no `oxtile.shard.rank`: name files that `oxtile shard` wrote", shown(&input))),
        "{said}"
    );
    assert!(pick([a, b, &path("nowhere")]).contains("cannot open"));

    // Cut short in the header, in the data, and grown.
    let bytes = std::fs::read(c).expect("readable");
    for (length, expected) in [
        (4, "has 4 bytes"),
        (100, "cut short"),
        (bytes.len() - 1, "cut short: fetch or make it again"),
        (bytes.len() + 3, "3 bytes belong to no tensor"),
        (bytes.len() + 1, "1 byte belongs to no tensor"),
    ] {
        let mut cut = bytes.clone();
        cut.resize(length, 0);
        std::fs::write(&copy, cut).expect("a writable folder");
        let said = pick([a, b, &copy]);
        assert!(said.contains(expected) && said.contains(&shown(&copy)), "{length} bytes: {said}");
    }
    // The output is none of the inputs.
    let mut line = join_words(&of_three, c);
    let done = common::oxtile().args(&line).output().expect("the binary runs");
    assert!(stderr(&done).contains("is the input file itself"), "{}", stderr(&done));
    assert_eq!(std::fs::read(c).expect("readable"), bytes);
    line.truncate(2);
    assert_eq!(common::oxtile().args(&line).output().expect("the binary runs").status.code(), Some(2));
}

/// Replaces text of a file's header; the header keeps its length.
fn altered(file: &Path, from: &str, to: &str) -> Vec<u8> {
    let mut bytes = std::fs::read(file).expect("readable");
    let length = u64::from_le_bytes(bytes[..8].try_into().expect("8 bytes")) as usize;
    let header = String::from_utf8(bytes[8..8 + length].to_vec()).expect("UTF-8");
    assert!(header.contains(from), "{from} is not in {header}");
    let mut changed = header.replacen(from, to, 1);
    let padding = (length - changed.trim_end().len()) as i64;
    assert!(padding >= 0, "{to} is too long");
    changed.truncate(changed.trim_end().len());
    changed.push_str(&" ".repeat(padding as usize));
    bytes[8..8 + length].copy_from_slice(changed.as_bytes());
    bytes
}

#[test]
fn damaged_parts_are_refused() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let input = folder.path().join("in");
    checkpoint(&input, &tensors());
    let files = shard(&input, &folder.path().join("p"), 2, &[]);
    let damaged = folder.path().join("damaged");
    let part = |from: &str, to: &str| {
        std::fs::write(&damaged, altered(&files[1], from, to)).expect("a writable folder");
        refusal(folder.path(), &[files[0].clone(), damaged.clone()])
    };
    let quoted = |text: &str| text.replace('"', "\\\"");
    let vector = |shape: u64, by: &str, first: u64| quoted(&format!(r#""vector":{{"shape":[{shape}],"by":"{by}","first":{first}}}"#));
    let stated = vector(33, "rows", 17);
    let damage = "the file is damaged or another's, shard the checkpoint again";
    for (from, to, expected) in [
        (stated.as_str(), vector(33, "rows", 16), "tensor `vector` begins at row 16, and the rows before it end at 17"),
        (&stated, vector(34, "rows", 17), "tensor `vector` is a part of 34 by rows, and of 33 by rows in"),
        (&stated, vector(33, "none", 17), "tensor `vector` is a part of 33 by none, and of 33 by rows in"),
        (&stated, vector(33, "rank", 17), "\"rank\" is none of: none, rows, columns"),
        (&quoted(r#""vector":"#), quoted(r#""victor":"#), "tensor `victor` is named in its metadata, and is missing"),
        (r#""oxtile.shard.rank":"1""#, r#""oxtile.shard.rank":"2""#.into(), "2 ranks have no rank 2"),
        (r#""oxtile.shard.version":"2""#, r#""oxtile.shard.version":"9""#.into(), "oxtile.shard.version = \"9\""),
        (r#""vector":{"dtype":"F32""#, r#""vector":{"dtype":"I32""#.into(), "tensor `vector` is I32, and F32 in"),
        (r#""vector":{"dtype":"F32","shape":[16]"#, r#""vector":{"dtype":"F16","shape":[32]"#.into(), "tensor `vector` is F16, and F32 in"),
        (
            r#""mask":{"dtype":"BOOL","shape":[1,32]"#,
            r#""mask":{"dtype":"BOOL","shape":[2,16]"#.into(),
            "tensor `mask` is 2x16, which is no part of 2x32 by rows",
        ),
        (r#""mask":{"#, r#""musk":{"#.into(), "tensor `musk` is not in"),
    ] {
        let said = part(from, &to);
        assert!(said.contains(expected) && said.contains("damaged: "), "{to}: {said}");
        assert!(said.contains(damage) || !expected.starts_with("tensor"), "{to}: {said}");
    }
    // Fewer rows than the whole has, and more.
    let alone = shard(&input, &folder.path().join("alone"), 1, &[]);
    for (rows, expected) in [(34, "tensor `vector` ends at 33 of 34 rows"), (32, "tensor `vector` ends at 33 of 32 rows")] {
        std::fs::write(&damaged, altered(&alone[0], &vector(33, "rows", 0), &vector(rows, "rows", 0))).expect("a writable folder");
        let said = refusal(folder.path(), std::slice::from_ref(&damaged));
        assert!(said.contains(expected), "{said}");
    }
    // A row fewer in both places, and a scalar that differs.
    let mut cut = tensors();
    cut[6] = ("vector", "F32", vec![32], cut[6].3[..128].to_vec());
    let shorter = folder.path().join("shorter");
    checkpoint(&shorter, &cut);
    let of_shorter = shard(&shorter, &folder.path().join("s"), 2, &[]);
    let model = |file: &Path| Checkpoint::open(file).expect("valid").metadata()["oxtile.shard.model"].clone();
    let short = altered(&of_shorter[1], &model(&of_shorter[1]), &model(&files[0]));
    std::fs::write(&damaged, short).expect("a writable folder");
    let said = refusal(folder.path(), &[files[0].clone(), damaged.clone()]);
    assert!(said.contains("tensor `vector` is a part of 32 by rows, and of 33 by rows in"), "{said}");

    let mut bytes = std::fs::read(&files[1]).expect("readable");
    let scalar =
        Checkpoint::open(&files[1]).expect("valid").tensors().iter().find(|t| t.name == "scalar").expect("it is there").range.clone();
    let start = 8 + u64::from_le_bytes(bytes[..8].try_into().expect("8 bytes")) + scalar.start;
    bytes[start as usize] ^= 1;
    std::fs::write(&damaged, bytes).expect("a writable folder");
    let said = refusal(folder.path(), &[files[0].clone(), damaged.clone()]);
    assert!(said.contains("damaged: tensor `scalar` differs from that of") && said.contains("where all ranks have the same"), "{said}");
}

/// The file with other strings in its metadata.
fn restated(file: &Path, change: impl Fn(&mut serde_json::Map<String, serde_json::Value>)) -> Vec<u8> {
    let bytes = std::fs::read(file).expect("readable");
    let end = 8 + u64::from_le_bytes(bytes[..8].try_into().expect("8 bytes")) as usize;
    let mut header: serde_json::Value = serde_json::from_slice(&bytes[8..end]).expect("JSON");
    change(header["__metadata__"].as_object_mut().expect("strings"));
    common::file(&header.to_string(), &bytes[end..])
}

/// Whether the first byte of a shard's data is of a tensor that every file has, and whether the last one is.
fn whole_at(file: &Path) -> [bool; 2] {
    let opened = Checkpoint::open(file).expect("valid");
    let parts: serde_json::Value = serde_json::from_str(&opened.metadata()["oxtile.shard.tensors"]).expect("JSON");
    let filled = || opened.tensors().iter().filter(|tensor| tensor.bytes() > 0);
    let [first, last] = [filled().min_by_key(|tensor| tensor.range.start), filled().max_by_key(|tensor| tensor.range.start)];
    [first, last].map(|tensor| parts[&tensor.expect("a tensor").name]["by"] == "none")
}

#[test]
fn a_file_of_this_version_has_a_digest_and_strings_of_an_older_one_are_the_inputs() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let (input, joined) = (folder.path().join("in"), folder.path().join("joined"));
    let theirs = ["header", "data"].map(|word| (format!("oxtile.shard.{word}"), "theirs".to_owned()));
    let strings: std::collections::BTreeMap<_, _> = theirs.into();
    let header = serde_json::json!({ "__metadata__": strings, "w": { "dtype": "U8", "shape": [4], "data_offsets": [0, 4] } });
    std::fs::write(&input, common::file(&header.to_string(), &[1, 2, 3, 4])).expect("a writable folder");
    let files = shard(&input, &folder.path().join("p"), 2, &[]);
    let whole = std::fs::read(&files[1]).expect("readable");
    let without = restated(&files[1], |all| drop(all.remove("oxtile.shard.data")));
    std::fs::write(&files[1], without).expect("a writable folder");
    let said = refusal(folder.path(), &files);
    assert!(said.contains("`oxtile.shard.data` is not what it should be (it is missing)"), "{said}");
    std::fs::write(&files[1], whole).expect("a writable folder");
    // A digest of any length is not printed whole.
    let long = restated(&files[0], |all| drop(all.insert("oxtile.shard.data".into(), "\u{1b}".repeat(100_000).into())));
    let whole = std::fs::read(&files[0]).expect("readable");
    std::fs::write(&files[0], long).expect("a writable folder");
    assert!(refusal(folder.path(), &files).len() < 2000);
    std::fs::write(&files[0], whole).expect("a writable folder");
    for file in &files {
        let old = restated(file, |all| {
            all.extend(strings.iter().map(|(key, value)| (key.clone(), value.clone().into())));
            all.insert("oxtile.shard.version".into(), "1".into());
            all.insert("oxtile.shard.joined".into(), serde_json::to_string(&strings).expect("JSON").into());
        });
        std::fs::write(file, old).expect("a writable folder");
    }
    let text = command(&join_words(&files, &joined));
    assert!(text.contains("data    not checked in 2 files"), "{text}");
    assert_eq!(Checkpoint::open(&joined).expect("valid").metadata(), &strings);
    assert!(content(&joined) == content(&input));
}

#[test]
fn damaged_data_is_refused_and_that_of_older_files_is_not_checked() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let (input, joined) = (folder.path().join("in"), folder.path().join("joined"));
    checkpoint(&input, &tensors());
    for options in [&[][..], &["--format", "nvfp4", "--direction", "both"]] {
        let files = shard(&input, &folder.path().join("p"), 3, options);
        let common = whole_at(&files[0]);
        let damaged = folder.path().join("damaged");
        for rank in 0..3 {
            let whole = std::fs::read(&files[rank]).expect("readable");
            let start = 8 + u64::from_le_bytes(whole[..8].try_into().expect("8 bytes")) as usize;
            // The last byte, and the first; what every file has is found by the others' bytes.
            for at in [whole.len() - 1, start] {
                let mut flipped = whole.clone();
                flipped[at] ^= 1;
                std::fs::write(&damaged, flipped).expect("a writable folder");
                let mut named = files.clone();
                named[rank].clone_from(&damaged);
                let said = refusal(folder.path(), &named);
                let expected = if at == start && common[0] || at != start && common[1] {
                    "where all ranks have the same".to_owned()
                } else {
                    format!("{}: its data is not what `oxtile shard` wrote (SHA-256 ", damaged.display())
                };
                assert!(said.contains(&expected), "byte {at} of rank {rank}: {said}");
            }
        }
        let text = command(&join_words(&files, &joined));
        assert!(text.contains("data    as written (SHA-256)\n"), "{text}");
        let after = std::fs::read(&joined).expect("readable");
        // As version 1 wrote them: all strings of the joined file, and no digest.
        let strings = serde_json::to_string(Checkpoint::open(&joined).expect("valid").metadata()).expect("JSON");
        for file in &files {
            let old = restated(file, |all| {
                all.retain(|key, _| !["data", "header"].iter().any(|word| key == &format!("oxtile.shard.{word}")));
                all.insert("oxtile.shard.version".into(), "1".into());
                all.insert("oxtile.shard.joined".into(), strings.clone().into());
            });
            std::fs::write(file, old).expect("a writable folder");
        }
        let text = command(&join_words(&files, &joined));
        assert!(text.contains("data    not checked in 3 files, which state no SHA-256: an older version wrote them\n"), "{text}");
        match options {
            [] => assert!(content(&joined) == content(&input)),
            _ => assert!(after == std::fs::read(&joined).expect("readable")),
        }
    }
}

#[test]
fn a_header_of_something_else_is_refused() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let input = folder.path().join("in");
    std::fs::write(&input, common::file(r#"{ "w":{"dtype":"U8","shape":[2],"data_offsets":[0,2]} }"#, &[1, 2])).expect("a writable folder");
    let files = shard(&input, &folder.path().join("p"), 1, &[]);
    for (frame, expected) in [
        (r#"{"v":{"dtype":"U8","shape":[2],"data_offsets":[0,2]}}"#, "it is of other tensors or strings"),
        (r#"{"w":{"dtype":"U8","shape":[3],"data_offsets":[0,3]}}"#, "tensor `w`, field data_offsets: "),
        ("{", "EOF"),
    ] {
        let made = restated(&files[0], |strings| drop(strings.insert("oxtile.shard.header".into(), frame.into())));
        std::fs::write(&files[0], made).expect("a writable folder");
        let said = refusal(folder.path(), &files);
        assert!(said.contains("`oxtile.shard.header` is not what it should be") && said.contains(expected), "{said}");
    }
}

/// Other writers name the parts of a checkpoint as shards are named.
#[test]
fn files_that_are_no_shards_of_the_checkpoint_are_not_replaced() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let (input, prefix) = (folder.path().join("in"), folder.path().join("model"));
    checkpoint(&input, &tensors());
    let first = folder.path().join("model-00001-of-00002.safetensors");
    let second = folder.path().join("model-00002-of-00002.safetensors");
    let other = folder.path().join("other");
    checkpoint(&other, &[("other.w", "U8", vec![2], vec![1, 2])]);
    let of_other = shard(&other, &folder.path().join("o"), 2, &[]);
    for (taken, with) in [(&first, &other), (&second, &other), (&second, &of_other[1])] {
        std::fs::copy(with, taken).expect("a copy");
        let before = std::fs::read(taken).expect("readable");
        let listed = names(folder.path());
        let done = run(&[&"shard", &"-i", &input, &"--ranks", &"2", &"--output-prefix", &prefix]);
        let said = stderr(&done);
        let expected =
            format!("{}: is there, and is no shard of the same tensors: choose another --output-prefix, or remove it", taken.display());
        assert!(done.status.code() == Some(1) && said.contains(&expected), "{said}");
        assert!(std::fs::read(taken).expect("readable") == before && names(folder.path()) == listed);
        std::fs::remove_file(taken).expect("it is there");
    }
    // Shards of the same tensors are, in whichever format.
    for options in [&["--format", "nvfp4"][..], &[], &["--format", "mxfp8", "--direction", "both"]] {
        shard(&input, &prefix, 2, options);
    }
    // Those without tensors are, and those whose names are the input's with more than a format adds.
    let (named, empty) = (folder.path().join("named"), folder.path().join("empty"));
    checkpoint(&named, &[("vector_norm", "U8", vec![2], vec![1, 2])]);
    checkpoint(&empty, &[]);
    for with in [&named, &empty] {
        let taken = folder.path().join("taken");
        let before: Vec<_> = shard(with, &taken, 2, &[]).iter().map(|file| std::fs::read(file).expect("readable")).collect();
        let done = run(&[&"shard", &"-i", &input, &"--ranks", &"2", &"--output-prefix", &taken]);
        assert!(done.status.code() == Some(1) && stderr(&done).contains("is no shard of the same tensors"), "{}", stderr(&done));
        let again = shard(with, &taken, 2, &[]);
        assert!(again.iter().map(|file| std::fs::read(file).expect("readable")).eq(before));
        again.iter().for_each(|file| std::fs::remove_file(file).expect("it is there"));
    }
    // A folder that is not there.
    let nowhere = folder.path().join("nowhere");
    let done = run(&[&"shard", &"-i", &input, &"--ranks", &"2", &"--output-prefix", &nowhere.join("p")]);
    assert!(stderr(&done).contains(&format!("there is no folder {}: make it, or name another", nowhere.display())), "{}", stderr(&done));
}

#[test]
fn shards_are_not_taken_for_checkpoints() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let [input, output] = ["in", "out"].map(|name| folder.path().join(name));
    checkpoint(&input, &tensors());
    let files = shard(&input, &folder.path().join("p"), 2, &["--format", "mxfp8"]);
    let before = names(folder.path());
    let refused = |words: &[&dyn AsRef<std::ffi::OsStr>]| {
        let done = run(words);
        assert_eq!((done.status.code(), names(folder.path())), (Some(1), before.clone()), "{}", stderr(&done));
        stderr(&done)
    };
    let join = "put the shards together with `oxtile join` before";
    for format in ["keep", "bf16", "nvfp4"] {
        assert!(refused(&[&"shard", &"-i", &files[0], &"--ranks", &"2", &"--output-prefix", &output, &"--format", &format]).contains(join));
    }
    assert!(
        refused(&[&"quantize", &"-i", &files[1], &"-o", &output, &"--device", &"emulated"]).contains("the input is the shard of rank 1")
    );
    assert!(refused(&[&"dequantize", &"-i", &files[0], &"-o", &output, &"--device", &"emulated"]).contains(join));
    // A quantized file can be kept, and nothing else.
    let whole = folder.path().join("joined");
    command(&join_words(&files, &whole));
    let again = shard(&whole, &folder.path().join("again"), 3, &[]);
    let back = folder.path().join("back");
    command(&join_words(&again, &back));
    assert!(content(&back) == content(&whole));
    for format in ["bf16", "mxfp8"] {
        let done = run(&[&"shard", &"-i", &whole, &"--ranks", &"2", &"--output-prefix", &output, &"--format", &format]);
        assert!(stderr(&done).contains("the input is quantized already"), "{}", stderr(&done));
    }
}

#[test]
fn a_failure_leaves_the_files_of_before() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let (input, prefix) = (folder.path().join("in.safetensors"), folder.path().join("p"));
    checkpoint(&input, &tensors());
    let files = shard(&input, &prefix, 3, &[]);
    let read = || files.iter().map(|file| std::fs::read(file).expect("readable")).collect::<Vec<_>>();
    let (before, listed) = (read(), names(folder.path()));
    // Blocks of 512 bytes or of 1024: the headers fit, the data does not.
    let script = format!("ulimit -f 8; exec {:?} shard --ranks 3 -i in.safetensors --output-prefix p", env!("CARGO_BIN_EXE_oxtile"));
    let done = std::process::Command::new("sh").args(["-c", &script]).current_dir(folder.path()).output().expect("a shell");
    assert_eq!(done.status.code(), Some(1), "{}", stderr(&done));
    assert!(stderr(&done).contains("cannot write: File too large"), "{}", stderr(&done));
    assert!(read() == before && names(folder.path()) == listed);
    // More files than may be open.
    let script = format!("ulimit -n 24; exec {:?} shard --ranks 40 -i in.safetensors --output-prefix p", env!("CARGO_BIN_EXE_oxtile"));
    let done = std::process::Command::new("sh").args(["-c", &script]).current_dir(folder.path()).output().expect("a shell");
    assert!(
        stderr(&done).contains("Too many open files") && stderr(&done).contains("40 ranks are as many files at a time: raise `ulimit -n`"),
        "{}",
        stderr(&done)
    );
    assert_eq!(names(folder.path()), listed);
    // Too few to read the shards that are there: whichever step fails, the error is that one.
    let many = shard(&input, &folder.path().join("q"), 40, &[]);
    let refused = (40..50).filter(|most| {
        let script =
            format!("ulimit -n {most}; exec {:?} shard --ranks 40 -i in.safetensors --output-prefix q", env!("CARGO_BIN_EXE_oxtile"));
        let done = std::process::Command::new("sh").args(["-c", &script]).current_dir(folder.path()).output().expect("a shell");
        let said = stderr(&done);
        assert!(done.status.success() || said.contains("40 ranks are as many files at a time: raise `ulimit -n`"), "{most}: {said}");
        !done.status.success()
    });
    assert!((1..10).contains(&refused.count()), "some limits are too low, and not all");
    many.iter().for_each(|file| std::fs::remove_file(file).expect("it is there"));
    // A name that is taken by a folder: none of the files is replaced.
    std::fs::remove_file(&files[1]).expect("it is there");
    std::fs::create_dir(&files[1]).expect("a writable folder");
    let done = run(&[&"shard", &"-i", &input, &"--ranks", &"3", &"--output-prefix", &prefix]);
    assert!(stderr(&done).contains("is a directory; name a file for the output"), "{}", stderr(&done));
    assert!(std::fs::read(&files[0]).expect("readable") == before[0] && names(folder.path()) == listed);
    // The input is one of the files.
    let done = run(&[&"shard", &"-i", &files[0], &"--ranks", &"3", &"--output-prefix", &prefix]);
    assert_eq!(done.status.code(), Some(1));
    std::fs::rename(&input, folder.path().join("p-00001-of-00002.safetensors")).expect("a name");
    let done = run(&[&"shard", &"-i", &folder.path().join("p-00001-of-00002.safetensors"), &"--ranks", &"2", &"--output-prefix", &prefix]);
    assert!(stderr(&done).contains("is the input file itself"), "{}", stderr(&done));
}
