//! `oxtile attention --context-parallel`: ranks that share the sequences write what one device writes.

mod common;

use std::path::Path;

use common::{
    names, oxtile, run, stderr,
    tensors::{Tensors, bytes, floats, halves, integers, random, read, write},
};

/// Runs it on `in`, to a file of this name. Returns what it printed, or why it failed.
fn attend(folder: &Path, output: &str, options: &str) -> Result<String, String> {
    let (input, output) = (folder.join("in"), folder.join(output));
    let mut words: Vec<&dyn AsRef<std::ffi::OsStr>> = vec![&"attention", &"--input", &input, &"--output", &output];
    let options: Vec<_> = options.split_whitespace().collect();
    words.extend(options.iter().map(|option| option as &dyn AsRef<std::ffi::OsStr>));
    let done = run(&words);
    if done.status.success() { Ok(String::from_utf8_lossy(&done.stdout).into_owned()) } else { Err(stderr(&done)) }
}

/// A problem whose queries and keys have this shape.
fn tensors(shape: [usize; 4], packed: bool) -> Tensors {
    let shape = if packed { shape[1..].to_vec() } else { shape.to_vec() };
    let tensor = |(name, seed)| (name, "BF16", shape.clone(), bytes(&random(shape.iter().product(), seed)));
    [("q", 1), ("k", 2), ("v", 3), ("dout", 4)].into_iter().map(tensor).collect()
}

fn array(name: &'static str, values: &[i32]) -> (&'static str, &'static str, Vec<usize>, Vec<u8>) {
    (name, "I32", vec![values.len()], integers(values))
}

/// Holds each tensor of a file against that of one device: to rounding, or to the bit.
fn expect(folder: &Path, name: &str, to_the_bit: bool, what: &str) {
    let [expected, found] = ["one", name].map(|name| read(&folder.join(name)));
    assert!(expected.keys().eq(found.keys()), "{what}");
    for (tensor, (shape, expected)) in &expected {
        let (found_shape, found) = &found[tensor];
        assert_eq!(shape, found_shape, "{what}: {tensor}");
        let values = |bytes: &[u8]| if tensor == "lse" { floats(bytes) } else { halves(bytes).iter().map(|x| x.to_f32()).collect() };
        let (expected, found) = (values(expected), values(found));
        if to_the_bit {
            assert!(expected == found, "{what}: {tensor}");
            continue;
        }
        let pairs = || expected.iter().zip(&found).filter(|(a, b)| a != b).map(|(a, b)| (f64::from(*a), f64::from(*b)));
        let error: f64 = pairs().map(|(a, b)| (a - b) * (a - b)).sum();
        let norm: f64 = expected.iter().filter(|x| x.is_finite()).map(|x| f64::from(x * x)).sum();
        let bound = if tensor == "lse" { 1e-6 } else { 5e-3 };
        assert!((error / norm).sqrt() <= bound, "{what}: {tensor} is off by {:.1e}", (error / norm).sqrt());
    }
}

#[test]
fn dense_files() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    write(&folder.path().join("in"), &tensors([2, 24, 2, 64], false));
    let mask = "--backward --device emulated --causal bottom-right --window 9,0";
    attend(folder.path(), "one", mask).expect("one device");
    let cases = [("ring", "1 2 3 4"), ("pull", "2"), ("gather", "3"), ("all-to-all", "1 2"), ("hierarchical:2", "4"), ("auto", "2")];
    for (schedule, ranks) in cases.iter().flat_map(|(schedule, ranks)| ranks.split(' ').map(move |ranks| (*schedule, ranks))) {
        let said = attend(folder.path(), "many", &format!("{mask} --context-parallel {schedule} --ranks {ranks}")).expect(schedule);
        let lines = ["forward", "backward"].map(|pass| said.lines().find_map(|line| line.strip_prefix(&format!("pass    {pass}: "))));
        let lines = lines.map(|line| line.unwrap_or_else(|| panic!("a line a pass: {said}")));
        // `auto` takes another one, and says which.
        let is_said = |line: &&str| line.contains("attention_") && line.starts_with(schedule) != (schedule == "auto");
        assert!(lines.iter().all(is_said), "{schedule}: {said}");
        expect(folder.path(), "many", lines.iter().all(|line| line.starts_with("all-to-all")), &format!("{schedule} on {ranks}"));
    }
}

/// Sequences of any length, at any place: the file's order is not that of the ranks.
#[test]
fn packed_files() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let sums = [0, 7, 11, 11, 30];
    let arrays = ["cu_seqlens_q", "cu_seqlens_kv"].map(|name| array(name, &sums));
    let offsets = ["cu_seqlens_q_padded", "cu_seqlens_kv_padded"].map(|name| array(name, &[25, 1, 5, 6, 40]));
    write(&folder.path().join("in"), &[tensors([1, 40, 2, 64], true), arrays.into(), offsets.into()].concat());
    for (mask, cases) in [("--causal top-left", [("pull", 3), ("all-to-all", 2)]), ("--window 3,2", [("ring", 2), ("gather", 2)])] {
        let mask = format!("--backward --device emulated {mask}");
        attend(folder.path(), "one", &mask).expect("one device");
        for (schedule, ranks) in cases {
            attend(folder.path(), "many", &format!("{mask} --context-parallel {schedule} --ranks {ranks}")).expect(schedule);
            expect(folder.path(), "many", schedule == "all-to-all", &format!("{schedule} on {ranks}, {mask}"));
        }
    }
}

/// Sequences whose queries and keys have other lengths, longer and shorter ones: a chunk has more blocks of queries than of keys, or fewer.
#[test]
fn packed_files_of_other_lengths() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let arrays = [("cu_seqlens_q", [0, 599, 658]), ("cu_seqlens_kv", [0, 78, 657])].map(|(name, sums)| array(name, &sums));
    write(&folder.path().join("in"), &[tensors([1, 672, 1, 64], true), arrays.into()].concat());
    attend(folder.path(), "one", "--backward --device emulated").expect("one device");
    for (schedule, ranks) in [("fused", 2), ("pull", 2), ("gather", 3)] {
        let options = format!("--backward --device emulated --context-parallel {schedule} --ranks {ranks}");
        let said = attend(folder.path(), "many", &options).expect(schedule);
        // One launch is asked for forward alone: the backward pass is chosen.
        assert!(said.contains(&format!("forward: {schedule}, ")), "{said}");
        expect(folder.path(), "many", false, &format!("{schedule} on {ranks}"));
    }
}

/// What would change the result and is not taken is refused, not left out in silence.
#[test]
fn a_bias_is_refused_by_name() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let bias = ("bias", "BF16", vec![1, 2, 24, 24], bytes(&random(1152, 5)));
    write(&folder.path().join("in"), &[tensors([1, 24, 2, 64], false), vec![bias]].concat());
    for options in ["--device emulated", "--context-parallel ring --ranks 2"] {
        let error = attend(folder.path(), "out", options).expect_err("there is no such option");
        assert!(error.contains("`bias`") && error.contains("no additive bias"), "{error}");
    }
}

/// Fewer queries than keys, of 16-bit floats, on a full mask; and a file without rows.
#[test]
fn other_files() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let half = |name, rows: usize, seed| {
        let values = random(rows * 128, seed).into_iter().flat_map(|x| half::f16::from_f32(x.to_f32()).to_le_bytes());
        (name, "F16", vec![1, rows, 2, 64], values.collect())
    };
    write(&folder.path().join("in"), &vec![half("q", 8, 1), half("k", 16, 2), half("v", 16, 3)]);
    attend(folder.path(), "one", "--device emulated").expect("one device");
    attend(folder.path(), "many", "--context-parallel all-to-all --ranks 2").expect("ranks");
    expect(folder.path(), "many", true, "f16");
    let empty = |name| (name, "BF16", vec![1 << 20, 0, 2, 64], Vec::new());
    write(&folder.path().join("in"), &["q", "k", "v", "dout"].map(empty).to_vec());
    attend(folder.path(), "many", "--backward --context-parallel ring --ranks 2").expect("no rows");
    assert_eq!(read(&folder.path().join("many"))["lse"].0, [1 << 20, 2, 0]);
}

/// 8 bits: what ranks write is near what one device writes of 16, the same by either schedule but for gradients, and the plan names the kernel.
#[test]
fn eight_bits() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    write(&folder.path().join("in"), &tensors([2, 24, 2, 64], false));
    let mask = "--backward --device emulated --causal bottom-right";
    attend(folder.path(), "one", mask).expect("one device");
    let mut outputs = Vec::new();
    for (schedule, ranks) in [("gather", 3), ("all-to-all", 2), ("auto", 2)] {
        let said = attend(folder.path(), "many", &format!("{mask} --fp8 --context-parallel {schedule} --ranks {ranks}")).expect(schedule);
        let is_forward = |line: &&str| line.starts_with("pass ") && line.contains(" forward: ");
        let (_, line) = said.lines().find(is_forward).and_then(|line| line.split_once(": ")).expect("a line a pass");
        assert!(line.contains("fp8") && (schedule == "auto" || line.starts_with(schedule)), "{schedule}: {said}");
        let [one, many] = ["one", "many"].map(|name| read(&folder.path().join(name)));
        for tensor in ["out", "dq", "dk", "dv"] {
            let values = |bytes: &[u8]| halves(bytes).iter().map(|x| f64::from(x.to_f32())).collect::<Vec<_>>();
            let (one, many) = (values(&one[tensor].1), values(&many[tensor].1));
            let error: f64 = one.iter().zip(&many).map(|(a, b)| (a - b) * (a - b)).sum();
            let norm: f64 = one.iter().map(|a| a * a).sum();
            let error = (error / norm).sqrt();
            assert!(error > 1e-3 && error < 8e-2, "{schedule}: {tensor} is off by {error:.1e}");
        }
        outputs.push(many["out"].clone());
    }
    assert!(outputs.iter().all(|out| *out == outputs[0]), "other bits by another schedule");
}

#[test]
fn what_makes_no_sense_is_refused() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let refused = |options: &str, words: &[&str]| {
        let said = attend(folder.path(), "out", options).expect_err(options);
        assert!(said.lines().count() == 1 && words.iter().all(|word| said.contains(word)), "{said}, where {words:?} are to be named");
        assert_eq!(names(folder.path()), ["in"]);
    };
    write(&folder.path().join("in"), &tensors([1, 24, 4, 64], false));
    refused("--context-parallel rings --ranks 2", &["'rings'", "ring, pull", "hierarchical:K"]);
    refused("--context-parallel hierarchical:0 --ranks 2", &["'hierarchical:0'", "hierarchical:K"]);
    refused("--context-parallel ring --ranks 0", &["'0' for '--ranks <RANKS>'", "from 1 to"]);
    refused("--ranks 2", &["--ranks", "--context-parallel"]);
    refused("--context-parallel ring --ranks 2 --device cuda", &["--device emulated", "oxtile launch"]);
    refused("--context-parallel ring --ranks 5", &["/in: ", "queries is 24", "multiple of 10", "pad the sequence to 30"]);
    refused("--context-parallel all-to-all --ranks 3", &["heads is 4", "3 ranks", "ring"]);
    refused("--fp8", &["--fp8 goes with --context-parallel"]);
    refused("--fp8 --context-parallel ring --ranks 2", &["ring cannot be taken of 8 bits", "gather or all-to-all"]);
    refused("--fp8 --context-parallel gather --ranks 2 --window 3,0", &["window", "ContextParallel of bf16"]);
    refused("--context-parallel hierarchical:3 --ranks 4", &["hierarchical:3", "4 ranks", "1, 2, 4"]);
    let tensors = tensors([1, 24, 4, 64], false);
    write(&folder.path().join("in"), &tensors[..2].to_vec());
    refused("--context-parallel ring --ranks 2", &["no tensor `v`"]);
    write(&folder.path().join("in"), &tensors[..3].to_vec());
    refused("--context-parallel ring --ranks 2 --backward", &["no tensor `dout`"]);
    let packed = |name, rows: usize| (name, "BF16", vec![rows, 1, 64], vec![0; rows * 128]);
    let arrays = vec![array("cu_seqlens_q", &[0, 4, 8]), array("cu_seqlens_kv", &[0, 4, 9])];
    write(&folder.path().join("in"), &[vec![packed("q", 8), packed("k", 9), packed("v", 9)], arrays].concat());
    refused("--context-parallel ring --ranks 2 --causal top-left", &["sequence 1 has 4 queries and 5 keys", "as many keys as queries"]);
}

/// Without a launcher, and as ranks of one on a machine without GPUs.
#[test]
fn what_ranks_need_is_named() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    write(&folder.path().join("in"), &tensors([1, 8, 2, 64], false));
    let attend = |launcher: &[&str], options: &[&str]| {
        let mut command = oxtile();
        ["RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID"].into_iter().for_each(|name| _ = command.env_remove(name));
        let program = if launcher.is_empty() { None } else { Some(env!("CARGO_BIN_EXE_oxtile")) };
        let (input, output) = (folder.path().join("in"), folder.path().join("out"));
        command.args(launcher).args(program).arg("attention").arg("--input").arg(input).arg("--output").arg(output);
        let done = command.args(["--context-parallel", "ring"]).args(options).env("CUDA_VISIBLE_DEVICES", "").output().expect("it runs");
        assert_eq!((done.status.code(), names(folder.path())), (Some(1), vec!["in".to_owned()]));
        stderr(&done)
    };
    let said = attend(&[], &[]);
    assert!(said.contains("--ranks RANKS --device emulated") && said.contains("oxtile launch -n RANKS"), "{said}");
    let launcher = ["launch", "-n", "2", "--"];
    for (options, words) in [
        (&["--ranks", "2"][..], ["--ranks plays all ranks in one process", "of 2 ranks"]),
        (&["--device", "emulated"], ["it is told --device emulated", "--ranks 2 --device emulated"]),
        (&[], ["a GPU each", "--ranks 2 --device emulated"]),
    ] {
        let said = attend(&launcher, options);
        assert!(words.iter().all(|word| said.contains(word)), "{said}, where {words:?} are to be named");
    }
}
