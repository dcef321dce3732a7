//! Every benchmark runs, at a tiny size, on the emulator.

use oxtile_benches::{
    bench::Size,
    chart, family, render,
    results::{Clock, Document},
    run::{Options, Outcome, Sweep, run},
};

fn options(families: &[&str]) -> Options {
    let families = families.iter().map(|family| (*family).to_owned()).collect();
    Options { families, sweep: None, only: None, rounds: 2, size: Size::Smoke, peers: false, peers_folder: None, seed: 7 }
}

#[test]
fn every_benchmark_runs() {
    let Outcome { document, failures } = run(&options(&[]), &mut |_| (), &mut |_| Ok(())).unwrap();
    assert_eq!(failures, Vec::<String>::new());
    for family in family::NAMES {
        assert!(document.records.iter().any(|record| record.family == family), "nothing of {family}");
    }
    for record in &document.records {
        let name = record.name();
        assert_eq!(record.order.len(), 2, "{name}");
        assert!(record.sides.iter().all(|side| side.milliseconds.len() == 2), "{name}");
        assert!(record.sides.iter().flat_map(|side| &side.milliseconds).all(|&time| time > 0.0), "{name}");
        assert_eq!(record.bytes == 0, record.clock == Clock::Host, "{name}");
        assert_eq!(document.share(record, 0).is_some(), record.ceiling.is_some(), "{name}: its ceiling was not measured");
    }
    assert!(render::markdown(&document).contains("| mxfp8_cast_rows e4m3 | 64x256 bf16 |"));
    assert!(render::markdown(&document).contains("| mxfp8_dequantize_columns e4m3 | 32x96 bf16 |"));
    assert!(render::markdown(&document).contains("| nvfp4_dequantize_rows | 16x96 bf16 |"));
}

#[test]
fn a_family_brings_its_ceilings_and_nothing_else() {
    let mut kept = Vec::new();
    let mut keep = |document: &Document| {
        kept.push(document.records.len());
        Ok(())
    };
    let document = run(&options(&["amax"]), &mut |_| (), &mut keep).unwrap().document;
    assert_eq!(kept, (1..=document.records.len()).collect::<Vec<_>>(), "the document is kept after each");
    let others: Vec<_> = document.records.iter().filter(|record| record.family != "amax").collect();
    assert!(!others.is_empty() && others.iter().all(|record| record.family == "copy"));
}

#[test]
fn a_text_chooses_benchmarks_by_their_names() {
    let only = |text: &str| run(&Options { only: Some(text.to_owned()), ..options(&["amax"]) }, &mut |_| (), &mut |_| Ok(()));
    let all = run(&options(&["amax"]), &mut |_| (), &mut |_| Ok(())).unwrap().document;
    let last = all.records.last().expect("benchmarks of amax").name();
    let names: Vec<_> = only(&last).unwrap().document.records.iter().map(|record| record.name()).collect();
    assert_eq!(names, std::slice::from_ref(&last));
    let error = only("gemv").unwrap_err().to_string();
    assert!(error.starts_with("`gemv` is in no name of:\n") && error.contains(&last), "{error}");
}

#[test]
fn what_cannot_be_run_is_said() {
    let error = run(&options(&["gemv"]), &mut |_| (), &mut |_| Ok(())).unwrap_err().to_string();
    assert_eq!(error, format!("there is no family `gemv`: name some of {}", family::NAMES.join(", ")));
    let few = Options { rounds: 29, size: Size::Full, ..options(&[]) };
    let error = run(&few, &mut |_| (), &mut |_| Ok(())).unwrap_err().to_string();
    assert_eq!(error, "29 rounds are too few for quartiles: ask for 30 or more");
}

/// Stands in for torch: one peer cannot be prepared, one fails in its rounds, the others answer.
const SERVER: &str = r#"
import json, os, sys
for line in sys.stdin:
    request = json.loads(line)
    do, peer = request["do"], request.get("peer")
    answer = {"ok": True}
    if do == "hello":
        answer |= {"torch": "0", "cuda": "0", "device": "none", "python": "3"}
    elif do == "prepare":
        assert os.path.getsize(request["pattern"]) > 0
        answer |= {"title": "the peer of " + peer}
        if peer == "multi_amax_foreach":
            answer = {"ok": False, "error": "no such function"}
    elif do == "check":
        sizes = {name: os.path.getsize(path) for name, path in request["files"].items()}
        answer |= {"equal": peer != "copy", "detail": str(sizes)}
    elif do == "round":
        answer |= {"milliseconds": 2.0 * request["replays"]}
        if peer == "mxfp8_dequantize_compiled":
            answer = {"ok": False, "error": "out of memory"}
    print(json.dumps(answer), flush=True)
"#;

#[test]
fn peers_are_compared_and_those_that_fail_are_named() {
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("server.py"), SERVER).unwrap();
    let with_peers = Options { peers: true, peers_folder: Some(folder.path().to_owned()), ..options(&["amax", "mxfp8"]) };
    let Outcome { document, failures } = run(&with_peers, &mut |_| (), &mut |_| Ok(())).unwrap();
    assert_eq!(failures, Vec::<String>::new());
    let record = |kernel: &str| document.records.iter().find(|record| record.kernel == kernel).unwrap();
    let labels = |kernel: &str| record(kernel).sides.iter().map(|side| side.label.clone()).collect::<Vec<_>>();

    let copy = &record("copy_words").sides[1];
    assert_eq!(copy.milliseconds, [2.0, 2.0]);
    assert_eq!(copy.check.as_ref().unwrap().detail, "{'target': 36864}");
    assert_eq!(labels("multi_amax"), ["oxtile", "the peer of multi_amax_compiled"]);
    assert_eq!(record("multi_amax").missing[0].why, "no such function");
    assert_eq!(labels("mxfp8_cast_rows e4m3"), ["oxtile", "the peer of mxfp8_cast_compiled"]);
    assert_eq!(labels("mxfp8_dequantize_rows e4m3"), ["oxtile"]);
    let why = &record("mxfp8_dequantize_rows e4m3").missing[0].why;
    assert!(why.starts_with("a round failed: warming up: `the peer of mxfp8_dequantize_compiled`: out of memory"), "{why}");
    let text = render::markdown(&document);
    assert!(text.contains("- copy_words 36 KiB: the peer of copy computes something else: {'target': 36864}"), "{text}");
}

#[test]
fn a_sweep_of_attention_is_tabled_and_drawn() {
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("server.py"), SERVER).unwrap();
    let sweep = Options {
        sweep: Some(Sweep::Shapes),
        peers: true,
        peers_folder: Some(folder.path().to_owned()),
        rounds: 1,
        ..options(&["attention"])
    };
    let Outcome { document, failures } = run(&sweep, &mut |_| (), &mut |_| Ok(())).unwrap();
    assert_eq!(failures, Vec::<String>::new());
    let names: Vec<_> = document.records.iter().map(|record| record.name()).collect();
    let [cross, backward] = ["forward causal, top-left 1x9:12x2:1x64", "backward causal, top-left, fast 1x9:12x2:1x64"];
    assert_eq!(names, [cross, "forward full 1x5:3x1:1x96", backward].map(|name| format!("attention {name}")));
    assert!(document.records.iter().all(|record| record.family == "attention_sweep" && record.sides.len() == 2));
    // 4 batches H D, of 9 x 12 keys the 9^2 / 2 that a top-left mask leaves.
    assert_eq!(document.records[0].flops, 2 * 2 * 81 * 64);
    assert!(render::markdown(&document).contains("| TFLOP/s | peer |"));
    assert_eq!(chart::svg(&document).matches("<rect x=").count(), 3);

    let files = document.write(folder.path()).unwrap();
    assert_eq!(files, [folder.path().join("attention_sweep.json")]);
    let error =
        |sweep, families| run(&Options { sweep: Some(sweep), ..options(families) }, &mut |_| (), &mut |_| Ok(())).unwrap_err().to_string();
    assert_eq!(error(Sweep::Shapes, &["amax"]), "there are sweeps of `attention` and of `gemm`: name one of them");
    assert_eq!(error(Sweep::Plans, &["attention"]), "there are plans of `gemm` alone: name that");
}

#[test]
fn without_peers_the_kernels_run_alone() {
    let nowhere = Options { peers: true, peers_folder: Some("/nowhere".into()), ..options(&["copy"]) };
    let mut said = Vec::new();
    let document = run(&nowhere, &mut |what| said.push(what.to_owned()), &mut |_| Ok(())).unwrap().document;
    assert!(said[0].starts_with("no peers: there is no server.py in /nowhere"), "{said:?}");
    assert!(document.machine.peers.is_err() && document.records.iter().all(|record| record.sides.len() == 1));
}

#[test]
fn products_run_at_every_shape_and_by_every_plan() {
    // By every plan: that of the choice, and of one or more kernels.
    for (sweep, least, most) in [(Sweep::Shapes, 1, 1), (Sweep::Plans, 2, 3)] {
        let Outcome { document, failures } =
            run(&Options { sweep: Some(sweep), rounds: 1, ..options(&["gemm"]) }, &mut |_| (), &mut |_| Ok(())).unwrap();
        assert!(failures.is_empty(), "{failures:?}");
        let sides = || document.records.iter().map(|record| record.sides.len());
        assert!(document.records.iter().all(|record| record.family == "gemm_shapes"));
        assert!(sides().min() >= Some(least) && sides().max() >= Some(most), "{:?}", sides().collect::<Vec<_>>());
    }
}
