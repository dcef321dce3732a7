//! Ranks run at a tiny size on the virtual cluster, with a stand-in for torch.

use anyhow::{Result, anyhow};
use oxtile_benches::{
    bench::Size,
    peers::Peers,
    ranks, render,
    results::{Document, Record},
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

fn run(world: u32, peers: Result<Peers>) -> Document {
    let options = Options { families: Vec::new(), sweep: None, rounds: 2, size: Size::Smoke, peers: false, peers_folder: None, seed: 7 };
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
    let document = run(2, Peers::start_ranks(Some(folder.path()), 2));
    let products = of(&document, "overlap");
    assert_eq!(products.len(), 1);
    let product = products[0];
    assert_eq!(labels(product), ["fused", "chunked", "sequential", "product alone", "wire alone", "torch unfused"]);
    assert!(product.sides.iter().all(|side| side.milliseconds.len() == 2 && side.milliseconds.iter().all(|time| *time > 0.0)));
    assert!((product.seconds(5).unwrap().median - 3e-3).abs() < 1e-9);
    assert_eq!([&product.missing[0].peer, &product.missing[0].why], ["torch fused", "no such operation"]);
    assert_eq!(product.flops, 96 * 64 * 136);
    assert_eq!(product.bytes, 48 * 136 * 2);
    assert!((3..5).any(|side| product.of_limit(side) == Some(1.0)), "the slower part is the limit");
    let text = render::markdown(&document);
    assert!(text.contains("| ag-gemm bf16 nt, device | 96x64x136, 2 ranks | torch unfused | 3000.0 [3000.0, 3000.0] |"), "{text}");
}

#[test]
fn a_grid_names_the_method_that_is_chosen() {
    let document = run(3, Err(anyhow!("not asked for")));
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
