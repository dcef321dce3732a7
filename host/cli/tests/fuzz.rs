//! Mutated files: whatever the bytes, an error or a correct reading, never a panic.

mod common;

use common::{names, small_checkpoint};
use oxtile::comm::WorldSize;
use oxtile_cli::{
    arguments::{Device, Join, Shard},
    inspect::Inspection,
    join,
    output::Completed,
    progress::Progress,
    safetensors::{Checkpoint, Tensor},
    shard::{self, ShardFormat},
};

/// SplitMix64.
struct Random(u64);

impl Random {
    fn below(&mut self, bound: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((z ^ (z >> 31)) % bound as u64) as usize
    }
}

/// Flips, cuts, inserts, repeats or overwrites a few bytes, mostly in the header.
fn mutate(bytes: &mut Vec<u8>, random: &mut Random) {
    const TOKENS: &[&[u8]] = &[b"{", b"}", b"[", b"]", b"\"", b",", b"0", b"9999999999", b"-1", b"F4", b"null", b"\xff", b"__metadata__"];
    for _ in 0..=random.below(3) {
        let length = bytes.len().max(1);
        let reach = if random.below(4) == 0 { length } else { length.min(700) };
        let at = random.below(reach).min(bytes.len());
        match random.below(6) {
            0 if at < bytes.len() => bytes[at] ^= 1 << random.below(8),
            1 => bytes.truncate(at),
            2 => {
                let end = (at + 1 + random.below(40)).min(bytes.len());
                drop(bytes.drain(at..end));
            }
            3 => drop(bytes.splice(at..at, TOKENS[random.below(TOKENS.len())].iter().copied())),
            4 => {
                let end = (at + random.below(80)).min(bytes.len());
                let copy = bytes[at..end].to_vec();
                drop(bytes.splice(at..at, copy));
            }
            _ if at < bytes.len() => bytes[at] = b"0123456789[]{}\",:"[random.below(17)],
            _ => {}
        }
    }
    // Half of the time the length follows, so that the fault lies in the JSON and not in the length.
    let header_end = bytes.windows(2).rposition(|pair| pair == b"}}").map(|at| at + 2);
    if let (true, Some(end)) = (random.below(2) == 0, header_end.filter(|&end| end >= 10)) {
        bytes[..8].copy_from_slice(&(end as u64 - 8).to_le_bytes());
    }
}

#[test]
fn mutants_are_read_or_refused() {
    const CASES: usize = 6000;
    let folder = tempfile::tempdir().expect("a temporary folder");
    let original = std::fs::read(small_checkpoint(folder.path())).expect("just written");
    let (mutant, output) = (folder.path().join("small.safetensors"), folder.path().join("out.safetensors"));
    let (mut read, mut quantized) = (0, 0);
    for seed in 0..CASES {
        let mut bytes = original.clone();
        mutate(&mut bytes, &mut Random(seed as u64));
        std::fs::write(&mutant, &bytes).expect("a writable folder");
        let inspected = Inspection::of(&mutant, &mut Progress::hidden());
        let Ok(checkpoint) = Checkpoint::open(&mutant) else {
            assert!(inspected.is_err(), "seed {seed}");
            continue;
        };
        read += 1;
        inspected.unwrap_or_else(|error| panic!("seed {seed}: opened, but: {error}"));
        let data: u64 = checkpoint.tensors().iter().map(Tensor::bytes).sum();
        assert!(data < bytes.len() as u64, "seed {seed}: more data than bytes");
        if read % 32 != 0 {
            continue;
        }
        if let Ok(outcome) = common::quantize(&mutant, &output) {
            quantized += 1;
            assert_eq!(outcome.tensors.len(), checkpoint.tensors().len(), "seed {seed}");
            Checkpoint::open(&output).unwrap_or_else(|error| panic!("seed {seed}: {error}"));
            std::fs::remove_file(&output).expect("it is there");
        }
        assert_eq!(names(folder.path()), ["small.safetensors"], "seed {seed}");
    }
    println!("{CASES} mutants: {read} read, {quantized} of every 32nd of them quantized");
    assert!(read > CASES / 50 && read < CASES / 2, "{read} of {CASES} mutants are valid: the mutations are too weak or too wild");
    assert!(quantized > 0, "no mutant reached the output");
}

/// Puts other digits in the place of one or two of the header's, which leaves most headers valid.
fn change_digits(bytes: &mut [u8], random: &mut Random) {
    let digits: Vec<usize> = (8..bytes.len()).filter(|&at| bytes[at].is_ascii_digit()).collect();
    for _ in 0..=random.below(2) {
        bytes[digits[random.below(digits.len())]] = b"0123456789"[random.below(10)];
    }
}

#[test]
fn mutants_of_shards_are_joined_or_refused() {
    const CASES: usize = 3000;
    let folder = tempfile::tempdir().expect("a temporary folder");
    let path = |name: &str| folder.path().join(name);
    let request = Shard {
        input: small_checkpoint(folder.path()),
        output_prefix: Some(path("p")),
        world: WorldSize::new(2).expect("ranks"),
        format: ShardFormat::Keep,
        directions: None,
        plan: false,
        embedding: None,
        distance: None,
        device: Device::Emulated,
        json: false,
    };
    let (_, files) = shard::run(&request, &mut Progress::hidden()).expect("a valid checkpoint");
    files.into_iter().try_for_each(Completed::publish).expect("names");
    let files = [path("p-00001-of-00002.safetensors"), path("p-00002-of-00002.safetensors")];
    let original = files.each_ref().map(|file| std::fs::read(file).expect("just written"));
    let before = names(folder.path());
    let request = Join { inputs: files.to_vec(), output: path("joined"), json: false };
    let tensors = |path: &std::path::Path| -> Vec<_> {
        let file = Checkpoint::open(path).expect("valid");
        file.tensors().iter().map(|tensor| (tensor.name.clone(), tensor.dtype, tensor.shape.clone())).collect()
    };
    join::run(&request, &mut Progress::hidden()).expect("valid shards").1.publish().expect("a name");
    let whole = tensors(&request.output);
    std::fs::remove_file(&request.output).expect("it is there");
    let (mut joined, mut stated) = (0, 0);
    for seed in 0..CASES {
        let random = &mut Random(seed as u64);
        let which = random.below(2);
        let mut bytes = original[which].clone();
        if random.below(2) == 0 {
            change_digits(&mut bytes, random)
        } else {
            mutate(&mut bytes, random)
        }
        std::fs::write(&files[which], &bytes).expect("a writable folder");
        match join::run(&request, &mut Progress::hidden()) {
            Ok((_, file)) => {
                joined += 1;
                file.publish().expect("a name");
                let found = tensors(&request.output);
                assert!(found.len() == whole.len(), "seed {seed}: {found:?}");
                std::fs::remove_file(&request.output).expect("it is there");
            }
            Err(error) => stated += usize::from(!matches!(error, join::JoinError::Read(_))),
        }
        assert_eq!(names(folder.path()), before, "seed {seed}");
        std::fs::write(&files[which], &original[which]).expect("a writable folder");
    }
    println!("{CASES} mutants of shards: {joined} joined, {stated} refused by what they state");
    assert!(joined > 20 && stated > 200, "the mutations are too weak or too wild: {joined} joined, {stated} refused by what they state");
}
