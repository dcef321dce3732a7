//! Every benchmark runs, at a tiny size, on the emulator.

use oxtile_benches::{
    bench::Size,
    family, render,
    results::Clock,
    run::{Options, Outcome, run},
};

fn options(families: &[&str]) -> Options {
    let families = families.iter().map(|family| (*family).to_owned()).collect();
    Options { families, rounds: 2, size: Size::Smoke, peers: false, peers_folder: None, seed: 7 }
}

#[test]
fn every_benchmark_runs() {
    let Outcome { document, failures } = run(&options(&[]), &mut |_| ()).unwrap();
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
}

#[test]
fn a_family_brings_its_ceilings_and_nothing_else() {
    let document = run(&options(&["amax"]), &mut |_| ()).unwrap().document;
    let others: Vec<_> = document.records.iter().filter(|record| record.family != "amax").collect();
    assert!(!others.is_empty() && others.iter().all(|record| record.family == "copy"));
}

#[test]
fn what_cannot_be_run_is_said() {
    let error = run(&options(&["gemm"]), &mut |_| ()).unwrap_err().to_string();
    assert_eq!(error, "there is no family `gemm`: name some of copy, amax, mxfp8, launch");
    let few = Options { rounds: 29, size: Size::Full, ..options(&[]) };
    let error = run(&few, &mut |_| ()).unwrap_err().to_string();
    assert_eq!(error, "29 rounds are too few for quartiles: ask for 30 or more");
}
