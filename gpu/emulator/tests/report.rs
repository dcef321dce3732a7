//! Bank conflicts and coalescing, from real addresses.

mod common;
use common::*;
use oxtile_emulator::tensor_map::{self, Swizzle, TensorMap};
use oxtile_emulator::{BoxCopy, Options, Report, SharedField, SharedLayout, device};

fn report(body: fn(&[u64])) -> Report {
    Job::new("costs", 1, 32, 1024, 4096, body).run(explained(3)).unwrap()
}

fn explained(seed: u64) -> Options {
    Options { explain: true, ..Options::check(seed) }
}

fn cost(report: &Report, operation: &str) -> (u64, u64, u64) {
    let line = report.lines.iter().find(|line| line.operation == operation).unwrap();
    (line.requests, line.transactions, line.ideal)
}

#[test]
fn bank_conflicts_are_counted() {
    let straight = report(|_| shared_store(thread() * 4, 0));
    assert_eq!(cost(&straight, "shared_write"), (1, 1, 1));
    let strided = report(|_| shared_store(thread() * 8, 0));
    assert_eq!(cost(&strided, "shared_write"), (1, 2, 1));
    let column = report(|_| shared_store(thread() * 128, 0));
    assert_eq!(cost(&column, "shared_write"), (1, 32, 1));
    let vectors = report(|_| device::shared_write(thread() * 16, [0; 16]));
    assert_eq!(cost(&vectors, "shared_write"), (1, 4, 4));
    let same = report(|_| {
        shared_store(thread() * 4, 0);
        device::warp_sync(u32::MAX);
        shared_load(0);
    });
    assert_eq!(cost(&same, "shared_read"), (1, 1, 1));
}

#[test]
fn sectors_are_counted() {
    let coalesced = report(|a| _ = load(a[0] + u64::from(thread()) * 4));
    assert_eq!(cost(&coalesced, "global_read"), (1, 4, 4));
    let strided = report(|a| _ = load(a[0] + u64::from(thread()) * 32));
    assert_eq!(cost(&strided, "global_read"), (1, 32, 4));
    let text = strided.to_string();
    assert!(text.contains("global_read: 1 requests, 32 sectors (ideal 4)"), "{text}");
}

/// Rows of 33 words: a column has a bank a row. Rows of 32 words, whose 16-byte chunks are permuted by the row as a swizzle of 128 bytes has them: a column of chunks too.
#[test]
fn padding_and_swizzles_have_no_conflicts() {
    let padded = report(|_| shared_store(thread() * 33 * 4, 0));
    assert_eq!(cost(&padded, "shared_write"), (1, 1, 1));
    for seed in SEEDS {
        let run = |body: fn(&[u64])| Job::new("costs", 1, 32, 1024, 4096, body).run(explained(seed)).unwrap();
        let chunks = run(|_| device::shared_write(thread() * 128, [0; 16]));
        assert_eq!(cost(&chunks, "shared_write"), (1, 32, 4), "a quarter of the warp after another, eight rows of one chunk each");
        let swizzled = run(|_| device::shared_write((thread() * 128) ^ (thread() % 8 * 16), [0; 16]));
        assert_eq!(cost(&swizzled, "shared_write"), (1, 4, 4), "whichever lane comes first");
        let pairs = run(|_| device::shared_write(thread() * 16, [0; 8]));
        assert_eq!(cost(&pairs, "shared_write"), (1, 4, 2), "halves of a warp");
    }
}

/// A tile, an mbarrier and words that nothing uses.
const LAYOUT: SharedLayout = SharedLayout { name: "Shared", bytes: 1056, piece };

fn piece(offset: u32, bytes: u32) -> String {
    match (offset, bytes) {
        (0, 1024) => "tile".to_owned(),
        (0..1024, _) => format!("tile[{}]", offset / 4),
        (1024..1032, _) => "full".to_owned(),
        (1032..1040, _) => String::new(),
        _ => format!("sums[{}]", (offset - 1040) / 4),
    }
}

/// Lane 0 copies a box of 8 rows of 128 bytes twice; warp 1 waits for each copy and lets the next come.
fn copies(arguments: &[u64]) {
    device::claim_shared(LAYOUT);
    if thread() == 0 {
        device::mbarrier_init(1024, 1);
        device::fence_mbarrier_init();
    }
    device::barrier_sync(0, 64);
    for round in 0..2 {
        if thread() == 0 {
            device::mbarrier_arrive_expect_transaction(1024, 1024);
            device::tensor_load(0, arguments[2], [0i32, 0], 1024);
        }
        if thread() >= 32 {
            device::mbarrier_wait_parity(1024, round);
        }
        device::barrier_sync(0, 64);
    }
}

#[test]
fn what_pictures_need_is_told_where_it_is_wanted() {
    let job = || {
        let mut job = Job::new("copies", 2, 64, 256, 1056, copies);
        let map = job.memory.allocate("map", 128, 0);
        let dimensions = vec![64, 8];
        let (strides, box_dimensions) = (vec![128], vec![64, 8]);
        let described = TensorMap { address: job.input, element_bytes: 2, dimensions, strides, box_dimensions, swizzle: Swizzle::Bytes128 };
        job.memory.write(map, &tensor_map::encode(&described).unwrap()).unwrap();
        job.launch.arguments.push(map);
        job
    };
    let plain = job().run(Options::check(3)).unwrap();
    assert!(plain.lines.is_empty() && plain.shared.is_none() && plain.boxes.is_empty() && plain.phases.is_empty());
    let Report { shared, boxes, phases, .. } = job().run(explained(3)).unwrap();
    let field = |name: &str, offset, bytes| SharedField { name: name.to_owned(), offset, bytes };
    assert_eq!(shared, Some(("Shared".to_owned(), vec![field("tile", 0, 1024), field("full", 1024, 16), field("sums", 1040, 16)])));
    assert_eq!(boxes, [BoxCopy { place: "`tile` of `Shared`".to_owned(), dimensions: vec![64, 8], element_bytes: 2, swizzle: 128 }]);
    // Of the first block alone.
    let [first, second] = &phases[..] else { panic!("{phases:#?}") };
    for (number, phase) in [first, second].into_iter().enumerate() {
        assert_eq!((phase.mbarrier.as_str(), phase.offset, phase.phase), ("the mbarrier `full` of `Shared`", 1024, number as u64));
        assert!(phase.arrivals.keys().eq([&0]) && phase.waits.keys().eq([&1]), "{phase:#?}");
        let (ended, [copied, _], [waited, went_on]) = (phase.ended.unwrap(), phase.copies.unwrap(), phase.waits[&1]);
        assert!(phase.arrivals[&0][0] <= copied && copied <= ended && ended <= went_on && waited <= went_on, "{phase:#?}");
    }
    assert!(first.ended < second.ended);
}
