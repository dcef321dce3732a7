//! Ranks run at a tiny size on the virtual cluster, with a stand-in for torch.

use std::io::Write;
use std::process::{Command, Stdio};

use anyhow::{Result, anyhow};
use oxtile_benches::{
    bench::Size,
    peers::Peers,
    ranks, render,
    results::{Document, RanksAre, Record},
    run::Options,
};

/// Answers for two of the peers; one of them fails.
const SERVER: &str = r#"
import json, sys
for line in sys.stdin:
    request = json.loads(line)
    if request.get("do") == "hello":
        answer = {"ok": True, "torch": "0", "cuda": "0", "device": "none", "python": "3"}
    else:
        how, sizes = request["collective"]["gathered_product"]
        assert sizes == [96, 64, 136] and request["calls"] > 0, request
        answer = {"ok": True, "wall": 9.0, "device": 3.0 * request["calls"]}
        if how == "torch_fused":
            answer = {"ok": False, "error": "no such operation"}
    print(json.dumps(answer), flush=True)
"#;

/// Answers for torch's context parallelism; one rotation fails.
const ATTENTION: &str = r#"
import json, sys
for line in sys.stdin:
    request = json.loads(line)
    if request.get("do") == "hello":
        answer = {"ok": True, "torch": "0", "cuda": "0", "device": "none", "python": "3"}
    else:
        asked = request["collective"]["context_parallel"]
        rotation, kernels = asked["by"]["torch"]
        row = {"tokens": 16, "heads": 2, "key_heads": 2, "head_size": 64, "is_causal": True, "sequences": None}
        assert asked["row"] == row and asked["passes"] in ("forward", "both") and kernels in ("cudnn", "flash"), asked
        answer = {"ok": True, "wall": 9.0, "device": 3.0 * request["calls"], "idle": [0.25, 0.0]}
        if rotation == "alltoall":
            answer = {"ok": False, "error": "not available"}
    print(json.dumps(answer), flush=True)
"#;

fn run(world: u32, families: &[&str], rounds: usize, peers: Result<Peers>) -> Document {
    let families = families.iter().map(|&family| family.to_owned()).collect();
    let options = Options { families, sweep: None, only: None, rounds, size: Size::Smoke, peers: false, peers_folder: None, seed: 7 };
    ranks::run(world, &options, peers, &mut |_| (), &mut |_| Ok(())).unwrap()
}

fn of<'a>(document: &'a Document, family: &str) -> Vec<&'a Record> {
    document.records.iter().filter(|record| record.family == family).collect()
}

fn labels(record: &Record) -> Vec<&str> {
    record.sides.iter().map(|side| side.label.as_str()).collect()
}

#[test]
fn gathered_products_are_compared_with_what_they_are_made_of() {
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("ranks.py"), SERVER).unwrap();
    let document = run(2, &["overlap"], 2, Peers::start_ranks(Some(folder.path()), 2));
    let products = of(&document, "overlap");
    assert_eq!(products.len(), 9);
    let (pair, products) = products.split_last().unwrap();
    assert_eq!(pair.kernel, "dx and dW1 bf16, device");
    assert_eq!(labels(pair), ["bulk", "one after the other", "products alone", "wire alone"]);
    assert!(pair.sides.iter().all(|side| side.milliseconds.iter().all(|time| *time > 0.0)));
    let (layer, products) = products.split_last().unwrap();
    assert_eq!(layer.kernel, "layer bf16, device");
    assert_eq!(
        labels(layer)[..8],
        [
            "overlapped",
            "overlapped, in a graph",
            "bulk",
            "bulk, in a graph",
            "sequential",
            "sequential, in a graph",
            "products alone",
            "wire alone"
        ]
    );
    assert!(layer.sides.iter().all(|side| side.milliseconds.iter().all(|time| *time > 0.0)) && layer.of_limit(0).is_some());
    let (reduced, products) = products.split_last().unwrap();
    assert_eq!(reduced.kernel, "gemm-ar bf16 nt, device");
    assert_eq!(labels(reduced)[..5], ["fused", "sequential", "one shot", "product alone", "wire alone"]);
    assert!(reduced.sides.iter().all(|side| side.milliseconds.iter().all(|time| *time > 0.0)) && reduced.chosen.is_some());
    let (products, codes) = products.split_at(products.len() - 2);
    for (product, format) in codes.iter().zip(["mxfp8", "nvfp4"]) {
        assert_eq!(product.kernel, format!("gemm-rs {format} nt, device"));
        assert_eq!(labels(product), ["fused", "sequential", "product alone", "dequantizing alone", "wire alone", "bf16 fused"]);
        assert!(product.sides.iter().all(|side| side.milliseconds.len() == 2 && side.milliseconds.iter().all(|time| *time > 0.0)));
    }
    let (scattered, products) = products.split_last().unwrap();
    assert_eq!(scattered.kernel, "gemm-rs bf16 nt, device");
    assert_eq!(labels(scattered)[..4], ["fused", "sequential", "product alone", "wire alone"]);
    assert!(scattered.sides.iter().all(|side| side.milliseconds.iter().all(|time| *time > 0.0)) && scattered.chosen.is_some());
    for (product, format) in products[1..].iter().zip(["mxfp8", "nvfp4"]) {
        assert_eq!(product.kernel, format!("ag-gemm {format} nt, device"));
        let parts = ["chunked", "sequential", "product alone", "dequantizing alone", "wire alone", "bf16 fused", "bf16 sequential"];
        assert_eq!(labels(product), parts);
        assert!(product.sides.iter().all(|side| side.milliseconds.len() == 2 && side.milliseconds.iter().all(|time| *time > 0.0)));
    }
    let product = products[0];
    assert_eq!(labels(product), ["fused", "chunked", "sequential", "product alone", "wire alone", "torch unfused"]);
    assert!(product.sides.iter().all(|side| side.milliseconds.len() == 2 && side.milliseconds.iter().all(|time| *time > 0.0)));
    assert!((product.seconds(5).unwrap().median - 3e-3).abs() < 1e-9);
    assert_eq!([&product.missing[0].peer, &product.missing[0].why], ["torch fused", "no such operation"]);
    assert_eq!(product.flops, 96 * 64 * 136);
    assert_eq!(product.bytes, 48 * 136 * 2);
    assert!((3..5).any(|side| product.of_limit(side) == Some(1.0)), "the slower part is the limit");
    assert_eq!(document.ranks, Some(RanksAre::Threads), "virtual GPUs are of one process");
    let text = render::markdown(&document);
    assert!(text.contains("Ranks are threads of one process."), "{text}");
    assert!(text.contains("| ag-gemm bf16 nt, device | 96x64x136, 2 ranks | torch unfused | 3000.0 [3000.0, 3000.0] |"), "{text}");
}

#[test]
fn a_grid_names_the_method_that_is_chosen() {
    let document = run(3, &["symmetric", "overlap", "overlap_shapes"], 2, Err(anyhow!("not asked for")));
    let shapes = of(&document, "overlap_shapes");
    assert_eq!(labels(shapes[0]), ["fused", "chunked", "sequential"]);
    assert!(labels(shapes[0]).contains(&shapes[0].chosen.as_deref().unwrap()));
    assert!(shapes[0].chosen_over_fastest().unwrap() > 0.0 && shapes[0].missing.is_empty());
    assert_eq!(of(&document, "overlap")[0].missing.len(), 2, "torch is not there");
    assert!(render::markdown(&document).contains("The chosen one takes at most "));
    for family in ["symmetric", "overlap", "overlap_shapes"] {
        assert!(ranks::NAMES.contains(&family) && !of(&document, family).is_empty(), "nothing of {family}");
    }
}

#[test]
fn context_parallelism_is_compared_with_one_gpu_and_torch() {
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("ranks.py"), ATTENTION).unwrap();
    let document = run(2, &["context_parallel"], 1, Peers::start_ranks(Some(folder.path()), 2));
    let records = of(&document, "context_parallel");
    let shapes: Vec<_> = records.iter().map(|record| record.shape.as_str()).collect();
    let [dense, packed] = ["16x2:2x64 causal, 2 ranks", "2 of 16x3:1x64 full, 2 ranks"];
    assert_eq!(shapes, [dense, dense, packed, packed]);
    let torch = ["torch all-gather, cuDNN", "torch all-gather, flash"];
    let ours = ["auto", "all-to-all", "gather", "ring", "pull", "8 bits", "one GPU", "one GPU, each at once", "wire alone"];
    assert_eq!(labels(records[0]), ours.into_iter().chain(torch).collect::<Vec<_>>());
    for record in &records {
        assert!(record.sides.iter().all(|side| side.milliseconds.len() == 1 && side.milliseconds[0] > 0.0));
        for (at, side) in record.sides.iter().enumerate() {
            let Some(ranks) = side.ranks.as_ref() else {
                assert_eq!(side.label, "one GPU", "each rank's end is known");
                continue;
            };
            assert!(ranks.idle.len() == 1 && ranks.idle.iter().all(|round| round.len() == 2 && round.contains(&0.0)), "{:?}", ranks.idle);
            let is_ours = !side.label.starts_with("torch") && !["wire alone", "one GPU, each at once"].contains(&side.label.as_str());
            assert_eq!(ranks.passes.is_empty(), !is_ours);
            assert_eq!(
                side.check.as_ref().map(|check| (check.equal, check.detail.as_str())),
                is_ours.then_some((true, "")),
                "{}",
                side.label
            );
            assert!(record.efficiency_of_slowest(at).unwrap().median > 0.0);
            assert!(record.efficiency(at).unwrap().median > 0.0 && record.of_limit(at).unwrap() > 0.0);
        }
    }
    // 16 tokens of 2 heads of 64: 4 operations for each pair and element, half of them seen; 14 with the backward pass.
    assert_eq!([records[0].flops, records[1].flops], [4, 14].map(|times| times * 16 * 16 * 2 * 64 / 2));
    let missing: Vec<_> = records[0].missing.iter().map(|missing| missing.why.as_str()).collect();
    assert!(missing[0].contains("fused cannot be taken: chunks are of 4 rows"), "{missing:?}");
    assert_eq!(missing[1..], ["not available"; 2]);
    let refused = records[2].missing.iter().find(|missing| missing.peer == "all-to-all").unwrap();
    assert!(refused.why.contains("heads is 3"), "{}", refused.why);
    let refused = records[2].missing.iter().find(|missing| missing.peer == "8 bits").unwrap();
    assert!(refused.why.contains("Bshd or Sbhd"), "{}", refused.why);
    // Keys and values of 8 tokens from the other rank, of 2 bytes.
    let of_ring = records[0].sides[3].ranks.as_ref().unwrap();
    assert_eq!(
        (of_ring.passes[0].schedule.as_str(), of_ring.received(), records[0].bytes),
        ("ring", 8 * 2 * 64 * 2 * 2, 8 * 2 * 64 * 2 * 2)
    );
    let text = render::markdown(&document);
    assert!(text.contains("fastest by ") && text.contains("the backward pass, by the difference"), "{text}");
    assert!(!text.contains("computes something else") && !text.contains("fastest by 8 bits"), "{text}");
}

#[test]
fn what_is_chosen_is_held_against_all_that_can_be_taken() {
    let document = run(2, &["context_parallel_auto"], 2, Err(anyhow!("not asked for")));
    let records = of(&document, "context_parallel_auto");
    let names: Vec<_> = records.iter().map(|record| (record.kernel.as_str(), record.shape.as_str())).collect();
    let [dense, packed] = ["16x2:2x64 causal, 2 ranks", "2 of 16x3:1x64 full, 2 ranks"];
    let [forward, backward] = ["forward pass, device", "backward pass, device"];
    assert_eq!(names, [(forward, dense), (backward, dense), (forward, packed), (backward, packed)], "{:?}", records[0].missing);
    for record in &records {
        let labels = labels(record);
        assert!(labels.contains(&record.chosen.as_deref().unwrap()), "{:?} of {labels:?}", record.chosen);
        assert_eq!(labels.len() + record.missing.len(), 5, "{labels:?}, {:?}", record.missing);
        for side in &record.sides {
            assert!(side.milliseconds.len() == 2 && side.milliseconds.iter().all(|time| *time > 0.0));
            let ranks = side.ranks.as_ref().unwrap();
            assert!(ranks.passes.len() == 1 && ranks.passes[0].schedule == side.label, "{}: {:?}", side.label, ranks.passes);
            // The first one that was made is what others are compared with.
            assert!(side.check.as_ref().is_none_or(|check| check.equal), "{}: {:?}", side.label, side.check);
        }
        assert!(record.sides.iter().filter(|side| side.check.is_none()).count() <= 1);
    }
    let why = |record: &Record, schedule: &str| {
        record.missing.iter().find(|missing| missing.peer == schedule).map(|missing| missing.why.clone()).unwrap_or_default()
    };
    assert!(why(records[1], "fused").contains("chunks are of 4 rows"), "{:?}", records[1].missing);
    assert!(why(records[2], "all-to-all").contains("heads is 3"), "{:?}", records[2].missing);
    // 16 tokens of 2 heads of 64: 4 operations for each pair and element, half of them seen; 10 backward.
    assert_eq!([records[0].flops, records[1].flops], [4, 10].map(|times| times * 16 * 16 * 2 * 64 / 2));
    let text = render::markdown(&document);
    assert!(text.contains("| pass | configuration | chosen |") && text.contains("\n4 passes of 2 configurations: "), "{text}");
    assert!(!text.contains("not measured") && !text.contains("computes something else"), "{text}");
}

#[test]
fn weights_in_shards_have_all_rows() {
    for world in [2, 3] {
        let document = run(world, &["sharded"], 1, Err(anyhow!("no torch here")));
        let records = of(&document, "sharded");
        let found: Vec<_> = records.iter().map(|record| (record.kernel.as_str(), labels(record))).collect();
        let mut expected = Vec::new();
        for [pass, waits, pull] in [
            ["forward pass, bf16, device", "waits of a forward pass, bf16, device", "host time of a pull, bf16, host"],
            ["forward pass, mxfp8, device", "waits of a forward pass, mxfp8, device", "host time of a pull, mxfp8, host"],
            ["forward pass, nvfp4, device", "waits of a forward pass, nvfp4, device", "host time of a pull, nvfp4, host"],
        ] {
            expected.push((pass, vec!["pass", "pass, 2 ahead", "pass, two streams", "products alone", "pulls alone"]));
            expected.push((waits, vec!["for the first weight", "for all others", "for all others, 2 ahead"]));
            expected.push((pull, vec!["pulls"]));
        }
        expected.push(("gradients, bf16, device", vec!["step", "step that replaces", "products alone", "scatters alone"]));
        assert_eq!(found, expected);
        assert!(records.iter().all(|record| record.sides.iter().all(|side| side.milliseconds.len() == 1)));
        // Four passes of eight pulls.
        assert_eq!(records[2].launches, 32);
        assert!(render::markdown(&document).contains("| waits of a forward pass, nvfp4, device |"));
    }
}

/// What the process of a rank answers and writes to the standard error, and whether it ended well, where it sees no GPU.
fn rank_process(input: &str, ends: bool) -> (String, String, bool) {
    let mut command = Command::new(env!("CARGO_BIN_EXE_oxtile-benches"));
    command.arg(ranks::FLAG).env("CUDA_VISIBLE_DEVICES", "-1").stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut rank = command.spawn().unwrap();
    let mut requests = rank.stdin.take().unwrap();
    requests.write_all(input.as_bytes()).unwrap();
    // Else the input stays open until the process has ended.
    let open = (!ends).then_some(requests);
    let output = rank.wait_with_output().unwrap();
    drop(open);
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
    (text(output.stdout), text(output.stderr), output.status.success())
}

#[test]
fn the_process_of_a_rank_says_why_it_cannot_go_on() {
    let (_, error, is_well) = rank_process("", true);
    assert!(!is_well && error.contains("the first line is no message") && error.contains("--ranks N"), "{error}");
    let (_, error, is_well) = rank_process("\"end\"\n", false);
    assert!(!is_well && error.contains("begins with `begin`, not with End"), "{error}");
    let begin = |world| format!(r#"{{"begin":{{"rank":1,"world":{world},"port":1,"job":"job","id":[],"errand":"comparisons"}}}}"#) + "\n";
    let (answer, error, is_well) = rank_process(&begin(1), false);
    assert_eq!(answer, "{\"answer\":{\"Err\":\"rank 1 is not of a world of 1\"}}\n", "{error}");
    assert!(is_well, "{error}");
    let (answer, ..) = rank_process(&begin(2), false);
    assert!(answer.starts_with(r#"{"answer":{"Err":""#) && answer.matches('\n').count() == 1, "no GPU is an answer: {answer}");
}
