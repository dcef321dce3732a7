//! `oxtile attention`, on the emulator, against f64.

mod common;

use std::path::Path;

use common::{
    names, run, stderr,
    tensors::{Tensors, bytes, floats, halves, integers, random, read, write},
};
use oxtile_tests::oracle::attention_head::Head;

fn attend(folder: &Path, options: &[&str]) -> (bool, String) {
    let (input, output) = (folder.join("in.safetensors"), folder.join("out.safetensors"));
    let mut words: Vec<&dyn AsRef<std::ffi::OsStr>> =
        vec![&"attention", &"--input", &input, &"--output", &output, &"--device", &"emulated"];
    words.extend(options.iter().map(|option| option as &dyn AsRef<std::ffi::OsStr>));
    let done = run(&words);
    (done.status.success(), stderr(&done))
}

/// Rows of one head of `q`, `k` and `v`, by their first rows.
fn expect(head: &Head, found: (&[half::bf16], &[f32]), tensors: [&[half::bf16]; 3], first: [usize; 2]) {
    let size = head.sizes[0];
    let of = |tensor: usize, row: usize, l: usize| f64::from(tensors[tensor][row * size + l].to_f32());
    let expected = head.attend(|i, l| of(0, first[0] + i, l), |j, l| of(1, first[1] + j, l), |j, l| of(2, first[1] + j, l));
    for (i, (found, value)) in found.1.iter().zip(&expected.log_sum_exp).enumerate() {
        assert!((f64::from(*found) - value).abs() <= 1e-5 * value.abs().max(1.0), "lse[{i}] is {found}, expected {value}");
    }
    for (i, (found, value)) in found.0.iter().zip(&expected.out).enumerate() {
        let bound = 0.005 * expected.magnitudes[i] + 0.004 * value.abs();
        assert!((f64::from(found.to_f32()) - value).abs() <= bound, "out[{i}] is {found}, expected {value}");
    }
}

#[test]
fn a_dense_file() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let [q, k, v] = [(5, 1), (9, 2), (9, 3)].map(|(rows, seed)| random(rows * 64, seed));
    let tensor = |name, rows, values: &[half::bf16]| (name, "BF16", vec![1, rows, 1, 64], bytes(values));
    write(&folder.path().join("in.safetensors"), &vec![tensor("q", 5, &q), tensor("k", 9, &k), tensor("v", 9, &v)]);
    for (options, top_left, window, scale) in [
        (&["--causal", "bottom-right"][..], false, [None, Some(0)], 0.125),
        (&["--causal", "top-left", "--scale", "0.5"], true, [None, None], 0.5),
        (&["--window", "2,1"], false, [Some(2), Some(1)], 0.125),
    ] {
        let (done, said) = attend(folder.path(), options);
        assert!(done, "{said}");
        let found = read(&folder.path().join("out.safetensors"));
        assert_eq!([&found["out"].0, &found["lse"].0], [&vec![1, 5, 1, 64], &vec![1, 1, 5]]);
        let head = Head { rows: [5, 9], sizes: [64; 2], top_left, window, scale, cap: None, sink: None };
        expect(&head, (&halves(&found["out"].1), &floats(&found["lse"].1)), [&q, &k, &v], [0, 0]);
    }
}

#[test]
fn a_packed_file_with_padding() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let [q, k, v] = [(12, 1), (20, 2), (20, 3)].map(|(rows, seed)| random(rows * 64, seed));
    let tensor = |name, rows, values: &[half::bf16]| (name, "BF16", vec![rows, 1, 64], bytes(values));
    let array = |name, values: &[i32]| (name, "I32", vec![values.len()], integers(values));
    write(
        &folder.path().join("in.safetensors"),
        &vec![
            tensor("q", 12, &q),
            tensor("k", 20, &k),
            tensor("v", 20, &v),
            array("cu_seqlens_q", &[0, 3, 7]),
            array("cu_seqlens_kv", &[0, 6, 15]),
            array("cu_seqlens_q_padded", &[1, 6, 12]),
            array("cu_seqlens_kv_padded", &[2, 9, 20]),
        ],
    );
    let (done, said) = attend(folder.path(), &["--causal", "bottom-right"]);
    assert!(done, "{said}");
    let found = read(&folder.path().join("out.safetensors"));
    let (out, log_sum_exp) = (halves(&found["out"].1), floats(&found["lse"].1));
    assert_eq!(found["lse"].0, [1, 12]);
    for (rows, first) in [([3, 6], [1, 2]), ([4, 9], [6, 9])] {
        let head = Head { rows, sizes: [64; 2], top_left: false, window: [None, Some(0)], scale: 0.125, cap: None, sink: None };
        let of = first[0]..first[0] + rows[0];
        expect(&head, (&out[of.start * 64..of.end * 64], &log_sum_exp[of]), [&q, &k, &v], first);
    }
    for row in [0, 4, 5, 10, 11] {
        assert!(out[row * 64..(row + 1) * 64].iter().all(|x| x.to_f32() == 0.0), "row {row} is padding");
        assert_eq!(log_sum_exp[row], f32::NEG_INFINITY);
    }
}

/// Gradients of a dense file, and of packed ones with padding, whose rows get zeros: sequences in their order, and in another.
#[test]
fn gradients() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let [q, k, v, dout] = [(12, 1), (20, 2), (20, 3), (12, 4)].map(|(rows, seed)| random(rows * 64, seed));
    let array = |name, values: &[i32]| (name, "I32", vec![values.len()], integers(values));
    for offsets in [None, Some([[1, 6, 12], [2, 9, 20]]), Some([[7, 1, 12], [11, 0, 20]])] {
        let packed = offsets.is_some();
        let shape = |rows| if packed { vec![rows, 1, 64] } else { vec![1, rows, 1, 64] };
        let tensor = |name, rows, values: &[half::bf16]| (name, "BF16", shape(rows), bytes(values));
        let mut tensors = vec![tensor("q", 12, &q), tensor("k", 20, &k), tensor("v", 20, &v), tensor("dout", 12, &dout)];
        if let Some([q, kv]) = &offsets {
            tensors.extend([array("cu_seqlens_q", &[0, 3, 7]), array("cu_seqlens_kv", &[0, 6, 15])]);
            tensors.extend([array("cu_seqlens_q_padded", q), array("cu_seqlens_kv_padded", kv)]);
        }
        write(&folder.path().join("in.safetensors"), &tensors);
        let (done, said) = attend(folder.path(), &["--causal", "bottom-right", "--backward"]);
        assert!(done, "{said}");
        let found = read(&folder.path().join("out.safetensors"));
        let shapes = ["dq", "dk", "dv"].map(|name| found[name].0.iter().map(|&n| n as usize).collect::<Vec<_>>());
        assert_eq!(shapes, [shape(12), shape(20), shape(20)]);
        let (out, log_sum_exp) = (halves(&found["out"].1), floats(&found["lse"].1));
        let mut grads = ["dq", "dk", "dv"].map(|name| halves(&found[name].1));
        let sequences = match offsets {
            None => vec![([12, 20], [0, 0])],
            Some([q, kv]) => [[3, 6], [4, 9]].into_iter().zip(q.into_iter().zip(kv).map(|(q, kv)| [q as usize, kv as usize])).collect(),
        };
        for (rows, first) in sequences {
            let head = Head { rows, sizes: [64; 2], top_left: false, window: [None, Some(0)], scale: 0.125, cap: None, sink: None };
            let of = |tensor: &[half::bf16], row: usize, l: usize| f64::from(tensor[row * 64 + l].to_f32());
            let log_sum_exp: Vec<f64> = log_sum_exp[first[0]..first[0] + rows[0]].iter().map(|&x| f64::from(x)).collect();
            let expected = head.differentiate(
                [&|i, l| of(&q, first[0] + i, l), &|j, l| of(&k, first[1] + j, l), &|j, l| of(&v, first[1] + j, l), &|i, l| {
                    of(&dout, first[0] + i, l)
                }],
                &|i, l| of(&out, first[0] + i, l),
                &log_sum_exp,
            );
            for (tensor, grads) in grads.iter_mut().enumerate() {
                let start = first[tensor.min(1)] * 64;
                for (i, (value, magnitude)) in expected.values[tensor].iter().zip(&expected.magnitudes[tensor]).enumerate() {
                    let (found, bound) = (f64::from(grads[start + i].to_f32()), 0.005 * magnitude + 0.004 * value.abs() + 1e-6);
                    assert!((found - value).abs() <= bound, "tensor {tensor}, element {i}: {found}, expected {value}");
                    grads[start + i] = half::bf16::ZERO;
                }
            }
        }
        // What is left are rows of no sequence.
        assert!(grads.iter().flatten().all(|x| x.to_f32() == 0.0));
    }
}

/// However many sequences have no rows.
#[test]
fn nothing_is_launched_for_empty_tensors() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let empty = |name| (name, "BF16", vec![1 << 29, 0, 1, 96], Vec::new());
    write(&folder.path().join("in.safetensors"), &["q", "k", "v", "dout"].map(empty).to_vec());
    let (input, output) = (folder.path().join("in.safetensors"), folder.path().join("out.safetensors"));
    let done = run(&[&"attention", &"--input", &input, &"--output", &output, &"--device", &"emulated", &"--backward"]);
    let said = String::from_utf8_lossy(&done.stdout).into_owned();
    assert!(done.status.success(), "{}", stderr(&done));
    assert!(["kernel  none: the output is empty", "kernel  none: all tensors are empty"].iter().all(|line| said.contains(line)), "{said}");
    let written = oxtile_cli::safetensors::Checkpoint::open(&output).expect("a safetensors file");
    let mut found: Vec<_> = written.tensors().iter().map(|tensor| (&*tensor.name, &*tensor.shape)).collect();
    found.sort();
    let shape: &[u64] = &[1 << 29, 0, 1, 96];
    assert_eq!(found, [("dk", shape), ("dq", shape), ("dv", shape), ("lse", &[1 << 29, 1, 0]), ("out", shape)]);
}

#[test]
fn what_makes_no_sense_is_refused() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let zeros = |name, shape: &[usize]| (name, "BF16", shape.to_vec(), vec![0; 2 * shape.iter().product::<usize>()]);
    let array = |name, values: &[i32]| (name, "I32", vec![values.len()], integers(values));
    let refused = |tensors: Tensors, options: &[&str], words: &[&str]| {
        write(&folder.path().join("in.safetensors"), &tensors);
        let (done, said) = attend(folder.path(), options);
        assert!(!done && words.iter().all(|word| said.contains(word)), "{said}, where {words:?} are to be named");
        assert_eq!(names(folder.path()), ["in.safetensors"]);
    };
    let [q, k, v] = [zeros("q", &[1, 4, 2, 64]), zeros("k", &[1, 5, 1, 64]), zeros("v", &[1, 5, 1, 64])];
    refused(vec![q.clone(), k.clone()], &[], &["no tensor `v`", "in.safetensors"]);
    refused(vec![q.clone(), zeros("k", &[1, 5, 1, 32]), v.clone()], &[], &["`k`", "[1, 5, 1, 32]", "[1, 5, 1, 64]"]);
    refused(vec![q.clone(), zeros("k", &[5, 1, 64]), v.clone()], &[], &["`k`", "as many dimensions as q"]);
    refused(vec![q.clone(), k.clone(), zeros("v", &[1, 4, 1, 64])], &[], &["`v`", "[1, 5, 1, 64]"]);
    refused(vec![("q", "F32", vec![1, 1, 1, 8], vec![0; 32]), k.clone(), v.clone()], &[], &["`q` is F32", "BF16 or F16"]);
    refused(vec![q.clone(), k.clone(), v.clone(), array("cu_seqlens_q", &[0, 4])], &[], &["cu_seqlens_q", "leave it out"]);
    let wrong = [zeros("q", &[1, 4, 3, 64]), zeros("k", &[1, 5, 2, 64]), zeros("v", &[1, 5, 2, 64])].to_vec();
    refused(wrong, &[], &["in.safetensors: tensor `k`: key_heads is 2", "divisor of heads", "3"]);
    refused(vec![q.clone(), k.clone(), v.clone()], &["--scale", "-1"], &["'-1' for '--scale <X>': it is not a number from 1e-20 to 1e8"]);
    refused(vec![q.clone(), k.clone(), v.clone()], &["--window", "4"], &["--window", "L,R"]);
    refused(vec![q.clone(), k.clone(), v.clone()], &["--window", "0,1073741824"], &["--window", "up to 1073741823, -1 for no bound"]);
    refused(vec![q.clone(), k.clone(), v.clone()], &["--backward"], &["no tensor `dout`", "--backward"]);
    let wrong = vec![q.clone(), k.clone(), v.clone(), zeros("dout", &[1, 4, 2, 32])];
    refused(wrong, &["--backward"], &["`dout`", "[1, 4, 2, 32]", "[1, 4, 2, 64]"]);
    refused(vec![q, k, v], &["--causal", "middle"], &["--causal", "top-left, bottom-right"]);
    let packed = || vec![zeros("q", &[4, 1, 64]), zeros("k", &[5, 1, 64]), zeros("v", &[5, 1, 64])];
    refused(packed(), &[], &["no tensor `cu_seqlens_q`", "sequences"]);
    let with = |sums: &[i32]| [packed(), vec![array("cu_seqlens_q", sums), array("cu_seqlens_kv", &[0, 2, 5])]].concat();
    refused(with(&[0, 3, 2]), &[], &["cu_seqlens_q", "element 2", "at least the element before, 3"]);
    refused(with(&[0, 3, 6]), &[], &["cu_seqlens_q", "element 2, is 6", "at most 4"]);
    refused(with(&[0, 3]), &[], &["cu_seqlens_kv", "one element more than there are sequences"]);
    refused(with(&[-1, 2, 4]), &[], &["cu_seqlens_q", "element 0, is -1", "0 or more"]);
    let offsets = |name, offsets: &[i32]| [with(&[0, 2, 4]), vec![zeros("dout", &[4, 1, 64]), array(name, offsets)]].concat();
    refused(offsets("cu_seqlens_q_padded", &[0, 2, 9]), &[], &["cu_seqlens_q_padded", "element 2, is 9", "at most 4"]);
    refused(offsets("cu_seqlens_q_padded", &[2, 1, 4]), &[], &["cu_seqlens_q_padded", "element 0, is 2", "outside 1 to 2"]);
    refused(offsets("cu_seqlens_kv_padded", &[0, 1, 4]), &["--backward"], &["cu_seqlens_kv_padded", "outside 0 to 1"]);
}

/// Dimensions that only an empty tensor can have are refused, not allocated.
#[test]
fn huge_empty_tensors_are_refused_at_once() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let zeros = |name, shape: &[usize]| (name, "BF16", shape.to_vec(), vec![0; 2 * shape.iter().product::<usize>()]);
    let empty = |name, shape: &[usize]| (name, "BF16", shape.to_vec(), Vec::new());
    let sums = |name| (name, "I32", vec![2], integers(&[0, 4]));
    let cases = [
        (
            vec![empty("q", &[1, 1 << 40, 8, 0]), empty("k", &[1, 4, 8, 0]), zeros("v", &[1, 4, 8, 8])],
            "tensor `q`: queries is 1099511627776: at most 1073741823",
        ),
        (
            vec![empty("q", &[1 << 30, 1 << 30, 4, 0]), empty("k", &[1 << 30, 1, 4, 0]), empty("v", &[1 << 30, 1, 4, 0])],
            "tensor `q`: batches is 1073741824",
        ),
        (vec![empty("q", &[1, 1 << 30, 1, 0]), empty("k", &[1, 4, 1, 0]), zeros("v", &[1, 4, 1, 8])], "tensor `q`: queries is 1073741824"),
        (
            vec![empty("q", &[1 << 30, 1, 0]), empty("k", &[4, 1, 0]), zeros("v", &[4, 1, 8]), sums("cu_seqlens_q"), sums("cu_seqlens_kv")],
            "tensor `q`: queries is 1073741824",
        ),
        (
            vec![empty("q", &[1, 1 << 29, 1, 0]), empty("k", &[1, 4, 1, 0]), zeros("v", &[1, 4, 1, 8])],
            "tensor `q`: head_size is 0: a multiple of 8",
        ),
    ];
    for (tensors, expected) in cases {
        write(&folder.path().join("in.safetensors"), &tensors);
        // In 2 GB of address space, and in seconds of this process.
        let script = "ulimit -v 2000000; exec timeout 20 \"$0\" attention -i in.safetensors -o out --device emulated";
        let done = std::process::Command::new("sh").args(["-c", script, env!("CARGO_BIN_EXE_oxtile")]).current_dir(folder.path()).output();
        let done = done.expect("a shell");
        assert!(done.status.code() == Some(1) && stderr(&done).contains(expected), "{expected}: {} {}", done.status, stderr(&done));
        assert_eq!(names(folder.path()), ["in.safetensors"]);
    }
}

/// A file with a hole may be larger than any memory: an error, as of a file that cannot be read.
#[test]
fn a_tensor_that_memory_does_not_hold_is_refused() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let (rows, bytes) = (1_u64 << 20, 1_u64 << 31);
    let keys = 256 * 8;
    let header = format!(
        r#"{{"q":{{"dtype":"BF16","shape":[1,{rows},8,128],"data_offsets":[0,{bytes}]}},
            "k":{{"dtype":"BF16","shape":[1,1,8,128],"data_offsets":[{bytes},{0}]}},
            "v":{{"dtype":"BF16","shape":[1,1,8,128],"data_offsets":[{0},{1}]}}}}"#,
        bytes + keys,
        bytes + 2 * keys
    );
    let path = folder.path().join("in.safetensors");
    std::fs::write(&path, common::file(&header, &[])).expect("a writable folder");
    let file = std::fs::File::options().write(true).open(&path).expect("the file");
    file.set_len(8 + header.len() as u64 + bytes + 2 * keys).expect("a file with a hole");
    let script = "ulimit -v 1500000; exec \"$0\" attention -i in.safetensors -o out --device emulated";
    let done = std::process::Command::new("sh").args(["-c", script, env!("CARGO_BIN_EXE_oxtile")]).current_dir(folder.path()).output();
    let done = done.expect("a shell");
    assert!(done.status.code() == Some(1) && stderr(&done).contains("out of memory"), "{} {}", done.status, stderr(&done));
    assert_eq!(names(folder.path()), ["in.safetensors"]);
}
