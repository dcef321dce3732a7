//! `oxtile overlap`: what is printed is what the library chooses.

mod common;

use common::{run, stderr};
use oxtile::{
    comm::WorldSize,
    num::bf16,
    overlap::{
        AllGatherConfig, AllReduceConfig, BulkChoice, GatheredFormat, Gathers, Global, Method, OverlapChoice, Rates, ReduceScatterConfig,
    },
};
use serde_json::Value;

fn choice([m, n, k]: [u64; 3], ranks: u32) -> OverlapChoice {
    let world = WorldSize::new(ranks).expect("ranks");
    AllGatherConfig::new(Global { m, n, k }).choose::<bf16, bf16>(world, &Rates::H200).expect("a choice")
}

fn plan(sizes: [u64; 3], ranks: u32, options: &[&str]) -> std::process::Output {
    let (sizes, ranks) = (sizes.map(|size| size.to_string()).join(","), ranks.to_string());
    let mut words: Vec<&dyn AsRef<std::ffi::OsStr>> = vec![&"overlap", &"--plan", &sizes, &"--ranks", &ranks];
    words.extend(options.iter().map(|option| option as &dyn AsRef<std::ffi::OsStr>));
    run(&words)
}

#[test]
fn the_document_is_the_choice() {
    for (sizes, ranks) in [([8192, 8192, 8192], 4), ([64, 64, 64], 2), ([4096, 4096, 8192], 1), ([300, 24, 72], 3)] {
        let done = plan(sizes, ranks, &["--json"]);
        assert!(done.status.success(), "{}", stderr(&done));
        let document: Value = serde_json::from_slice(&done.stdout).expect("one JSON document");
        let OverlapChoice { method, why, predicted, refused, tile, .. } = choice(sizes, ranks);
        assert_eq!((&document["command"], &document["schema"]), (&"overlap".into(), &1.into()));
        assert_eq!(document["method"], format!("{method:?}").to_lowercase());
        assert_eq!(document["why"], why);
        let predicted = predicted.expect("wgmma takes it");
        assert_eq!(document["predicted"]["sequential"], predicted.sequential);
        assert_eq!(document["predicted"]["fused"].as_f64(), predicted.fused);
        assert_eq!(document["refused"].as_array().expect("an array").len(), refused.len());
        assert_eq!(document["tiles"].is_null(), tile.is_none());
        let [m, n, k] = sizes;
        assert_eq!(document["local"], serde_json::json!({ "m": m, "n": n / u64::from(ranks), "k": k }));
    }
}

#[test]
fn the_text_names_the_method_its_time_and_what_was_refused() {
    let done = plan([8192, 8192, 8192], 4, &[]);
    let (text, chosen) = (String::from_utf8_lossy(&done.stdout).into_owned(), choice([8192, 8192, 8192], 4));
    assert_eq!(chosen.method, Method::Fused, "{chosen}");
    let time = chosen.predicted.and_then(|predicted| predicted.fused).expect("a time");
    assert!(text.starts_with("product  8192x8192x8192 over 4 ranks, 8192x2048x8192 on each; bf16, rates of H200s\n"), "{text}");
    assert!(text.contains(&format!("method   fused: {}\n", chosen.why)), "{text}");
    assert!(text.contains(&format!("fused          {time:>10.1}  chosen\n")), "{text}");
    assert!(text.contains("tiles    256 of Tile128x256, 64 a shard: the own one's first"), "{text}");
    let text = String::from_utf8_lossy(&plan([64, 64, 64], 1, &[]).stdout).into_owned();
    assert!(text.contains("method   sequential: ") && text.contains("not fused: one rank gathers nothing"), "{text}");
}

/// Products whose sum the ranks share: the library's choice too.
#[test]
fn sums_are_planned_by_operation() {
    let (world, sizes) = (WorldSize::new(2).expect("ranks"), [16, 8192, 8192]);
    let global = Global { m: 16, n: 8192, k: 8192 };
    let reduce = AllReduceConfig::new(global).choose::<bf16, bf16>(world, &Rates::H200).expect("a choice");
    let scatter = ReduceScatterConfig::new(global).choose::<bf16, bf16>(world, &Rates::H200).expect("a choice");
    let document = |operation: &str| -> Value {
        let done = plan(sizes, 2, &["--json", "--operation", operation]);
        assert!(done.status.success(), "{}", stderr(&done));
        serde_json::from_slice(&done.stdout).expect("one JSON document")
    };
    let (all, some) = (document("all-reduce"), document("reduce-scatter"));
    assert_eq!((&all["operation"], &all["method"]), (&"all_reduce".into(), &"one_shot".into()));
    assert_eq!(all["why"], reduce.why);
    assert_eq!(all["predicted"]["one_shot"].is_number(), reduce.predicted.one_shot.is_some());
    assert_eq!(some["why"], scatter.why);
    // A number that is read again may differ in its last digit.
    let found = some["predicted"]["sequential"].as_f64().expect("a number");
    assert!((found - scatter.predicted.sequential).abs() < 1e-9, "{found}");
    assert_eq!(some["local"], serde_json::json!({ "m": 16, "n": 8192, "k": 4096 }));
    let text = String::from_utf8_lossy(&plan(sizes, 2, &["--operation", "all-reduce"]).stdout).into_owned();
    assert!(text.contains("then all_reduce") && text.contains("  chosen"), "{text}");
}

/// The gradients of a layer: the library's choice of the pair.
#[test]
fn gradients_are_planned_together() {
    let document = |sizes, ranks| -> Value {
        let done = plan(sizes, ranks, &["--json", "--operation", "gradients"]);
        assert!(done.status.success(), "{}", stderr(&done));
        serde_json::from_slice(&done.stdout).expect("one JSON document")
    };
    let sizes = [8192, 28672, 4096];
    let weight = AllGatherConfig::new(Global { m: 28672, n: 4096, k: 8192 });
    let weight = AllGatherConfig { gathers: Gathers::SumOfB, transpose_a: true, ..weight };
    let input = ReduceScatterConfig::new(Global { m: 8192, n: 4096, k: 28672 });
    let choice = BulkChoice::of::<bf16, f32, bf16>(&weight, &input, WorldSize::new(2).expect("ranks"), &Rates::H200).expect("a choice");
    let found = document(sizes, 2);
    assert_eq!((&found["operation"], &found["why"]), (&"gradients".into(), &choice.why.into()));
    assert_eq!(found["method"], if choice.is_bulk { "bulk" } else { "apart" });
    assert_eq!(found["weight"], serde_json::json!({ "m": 28672, "n": 4096, "k": 8192 }));
    let predicted = choice.predicted.expect("there is a model");
    assert!((found["predicted"]["bulk"].as_f64().expect("a number") - predicted.bulk).abs() < 1e-9, "{found}");
    let text = String::from_utf8_lossy(&plan(sizes, 2, &["--operation", "gradients"]).stdout).into_owned();
    assert!(text.contains("input    8192x4096x28672, scatters its rows") && text.contains("  chosen"), "{text}");
    let alone = document([64, 64, 64], 1);
    assert_eq!((&alone["method"], &alone["predicted"]), (&"apart".into(), &Value::Null));
}

#[test]
fn bad_sizes_are_refused() {
    let done = plan([8192, 10, 64], 4, &[]);
    assert_eq!(done.status.code(), Some(1));
    assert!(stderr(&done).contains("--plan: "), "{}", stderr(&done));
    assert!(stderr(&done).contains("n is 10, which 4 ranks do not divide: pad it to 12"), "{}", stderr(&done));
    let done = plan([0, 64, 64], 4, &[]);
    assert_eq!(done.status.code(), Some(2));
    assert!(stderr(&done).contains("invalid value '0,64,64' for '--plan <M,N,K>': it is not M,N,K"), "{}", stderr(&done));
    let done = plan([64, 64, 64], 4, &["--operation", "gradients", "--format", "nvfp4"]);
    assert_eq!(done.status.code(), Some(1));
    assert!(stderr(&done).contains("--format is of gathered operands"), "{}", stderr(&done));
}

#[test]
fn a_format_travels_in_fewer_bytes_and_is_dequantized() {
    let config = AllGatherConfig::new(Global { m: 8192, n: 4096, k: 8192 }).travelling(GatheredFormat::Mxfp8);
    let chosen = config.choose::<bf16, bf16>(WorldSize::new(2).expect("ranks"), &Rates::H200).expect("a choice");
    let predicted = chosen.predicted.expect("wgmma takes it");
    let done = plan([8192, 4096, 8192], 2, &["--format", "mxfp8", "--json"]);
    let document: Value = serde_json::from_slice(&done.stdout).expect("one JSON document");
    assert_eq!((&document["format"], &document["gathered_bytes"]), (&"mxfp8".into(), &(8192_u64 * 8192 + 8192 * 256).into()));
    assert_eq!(document["predicted"]["dequantize"], predicted.dequantize);
    assert_eq!(document["predicted"]["sequential"], predicted.sequential);
    assert_eq!(document["cut"]["panels"], chosen.cut.panels);
    let text = String::from_utf8_lossy(&plan([8192, 4096, 8192], 2, &["--format", "mxfp8"]).stdout).into_owned();
    assert!(text.contains("gathers  69206016 bytes of A, by rows, as mxfp8 codes and scales\n"), "{text}");
    assert!(text.contains(&format!("dequantizing   {:>10.1}\n", predicted.dequantize)), "{text}");
    assert!(text.contains("not fused: kernels that dequantize MXFP8 would need multiprocessors"), "{text}");
    let done = plan([64, 64, 72], 2, &["--format", "nvfp4"]);
    assert!(stderr(&done).contains("72 columns are not a multiple of 16: pad them"), "{}", stderr(&done));
}
