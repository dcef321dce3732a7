//! What the model of gathered products chooses, against what two GPUs took for each method.

use std::path::Path;

use oxtile::comm::WorldSize;
use oxtile::gemm::{GemmConfig, GemmTile};
use oxtile::num::bf16;
use oxtile::overlap::{AllGatherConfig, Global, Method, OverlapChoice, Rates};
use serde_json::Value;

/// A shape that was measured: the choice for it, and the median milliseconds of each method.
struct Measured {
    shape: String,
    choice: OverlapChoice,
    times: [f64; 3],
    /// Whether a product of all rows or of a shard takes a kernel now that there was not when the methods were measured: its times are of another kernel.
    is_sooner: bool,
}

const METHODS: [(Method, &str); 3] = [(Method::Fused, "fused"), (Method::Chunked, "chunked"), (Method::Sequential, "sequential")];

impl Measured {
    fn of(record: &Value) -> Self {
        let shape = record["shape"].as_str().unwrap();
        let (sizes, ranks) = shape.split_once(", ").unwrap();
        let sizes: Vec<u64> = sizes.split('x').map(|size| size.parse().unwrap()).collect();
        let ranks = ranks.split_once(' ').unwrap().0.parse().unwrap();
        let [m, n, k] = sizes[..] else { panic!("{shape}: three sizes") };
        assert_eq!(record["kernel"], "ag-gemm bf16 nt, device", "{shape}");
        let config = AllGatherConfig { transpose_b: true, ..AllGatherConfig::new(Global { m, n, k }) };
        let choice = config.choose::<bf16, bf16>(WorldSize::new(ranks).unwrap(), &Rates::H200).unwrap();
        let is_sooner = [m, m / u64::from(ranks)].into_iter().any(|m| {
            let product = GemmConfig { m, n: n / u64::from(ranks), k, transpose_b: true, ..GemmConfig::default() };
            let product = product.choose::<bf16, bf16>().unwrap();
            let tile = product.decision.tile().unwrap();
            let is_known = matches!(tile, GemmTile::Tile128x256 | GemmTile::Tile128x128 | GemmTile::Tile64x128);
            !is_known || product.why.contains("cluster")
        });
        let side = |label: &str| record["sides"].as_array().unwrap().iter().find(|side| side["label"] == label).unwrap();
        let times = METHODS.map(|(_, label)| {
            let mut times: Vec<f64> = side(label)["milliseconds"].as_array().unwrap().iter().map(|time| time.as_f64().unwrap()).collect();
            assert!(times.len() >= 20, "{shape}: {} rounds", times.len());
            times.sort_by(f64::total_cmp);
            (times[(times.len() - 1) / 2] + times[times.len() / 2]) / 2.0
        });
        Self { shape: shape.to_owned(), choice, times, is_sooner }
    }

    fn time(&self, method: Method) -> f64 {
        self.times[METHODS.iter().position(|(known, _)| *known == method).unwrap()]
    }
}

/// The measured shapes of a file of results.
fn measured(file: &str) -> Vec<Measured> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../benches/results").join(file);
    let text = std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    let results: Value = serde_json::from_str(&text).unwrap();
    results["records"].as_array().unwrap().iter().filter(|record| record["kernel"] == "ag-gemm bf16 nt, device").map(Measured::of).collect()
}

/// In the same rounds: of 60 shapes of two H200s, three times, and of the three shapes of the goals on two H200s, three times, and on two H100s.
#[test]
fn what_is_chosen_is_never_slower_than_sequential() {
    let files = [
        ("overlap_shapes_2.json", 60),
        ("tuning/overlap_shapes_two_h200_56840705.json", 60),
        ("tuning/overlap_shapes_two_h200_52da086e.json", 60),
        ("overlap_2.json", 3),
        ("tuning/overlap_two_h200_fb241ea3.json", 3),
        ("tuning/overlap_two_h200_e5b10a0c.json", 3),
        ("tuning/overlap_two_h100_a41a39d.json", 3),
    ];
    for (file, count) in files {
        let shapes = measured(file);
        assert_eq!(shapes.len(), count, "{file}");
        for shape in shapes.iter().filter(|shape| !shape.is_sooner) {
            let (chosen, sequential) = (shape.time(shape.choice.method), shape.time(Method::Sequential));
            let best = shape.times.into_iter().fold(f64::INFINITY, f64::min);
            let what = format!("{file}, {}: {}; measured {:?}", shape.shape, shape.choice, shape.times);
            assert!(chosen <= 1.02 * sequential, "{:.3} of sequential: {what}", chosen / sequential);
            assert!(chosen <= 1.05 * best, "{:.3} of the best: {what}", chosen / best);
        }
        // Most are as they were measured.
        assert!(2 * shapes.iter().filter(|shape| shape.is_sooner).count() < shapes.len(), "{file}");
    }
}

/// The ratio of two methods' times, from which the choice follows, is at most 1.2 times what is predicted, and at least 0.7 times.
#[test]
fn ratios_of_methods_are_as_predicted() {
    for shape in measured("overlap_shapes_2.json") {
        let predicted = shape.choice.predicted.expect("a kernel on wgmma takes it");
        for (method, time) in [(Method::Fused, predicted.fused), (Method::Chunked, predicted.chunked)] {
            let found = shape.time(method) / shape.time(Method::Sequential);
            let expected = time.expect("it is not refused") / predicted.sequential;
            let ratio = found / expected;
            assert!((0.7..1.2).contains(&ratio), "{}, {method:?}: {ratio:.3} times what is predicted", shape.shape);
        }
    }
}
