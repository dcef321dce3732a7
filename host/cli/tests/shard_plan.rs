//! `oxtile shard --plan`: the memory and traffic of a checkpoint's weights, of one file or of the files of an index.

mod common;

use std::{ffi::OsString, path::Path};

use common::{
    names,
    shards::{checkpoint, command, words},
};

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
    assert!(refused(&planned).contains("is not the index of a checkpoint: it is no JSON object; an index has"));
    // All of it is a hole: nothing is written.
    std::fs::File::create(&index).and_then(|file| file.set_len(100_000_001)).expect("a writable folder");
    assert!(refused(&planned).contains("it has more than 100000000 bytes, and no index has; an index has"));
    std::fs::write(&index, r#"{"weight_map": {}}"#).expect("a writable folder");
    assert!(refused(&planned).contains("is not the index of a checkpoint: it names no file; an index has"));
    // What has no end, or waits for a writer, is not read.
    std::fs::remove_file(&index).expect("it is there");
    std::os::unix::fs::symlink("/dev/zero", &index).expect("a link");
    assert!(refused(&planned).contains("is a device, not a regular file"));
}

#[test]
fn what_is_said_of_an_embedding_that_is_not_there_is_refused() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let input = folder.path().join("in");
    let zeros = |name| (name, "BF16", vec![64, 32], vec![0; 64 * 32 * 2]);
    checkpoint(&input, &[zeros("shared.weight"), zeros("layers.0.w")]);
    for said in ["tied", "lookup"] {
        let done = common::run(&[&"shard", &"--plan", &"-i", &input, &"--ranks", &"2", &"--embedding", &said]);
        let expected = format!("--embedding {said}: no weight has the name of an embedding of tokens");
        assert!(done.status.code() == Some(1) && common::stderr(&done).contains(&expected), "{}", common::stderr(&done));
    }
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
