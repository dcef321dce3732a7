//! Every public operation of the DSL is named by a conformance kernel, so that its bytes on the emulator are held to
//! the GPU's. The operations are found by a scan of the DSL's sources.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

use oxtile_conformance::{COVERED, KERNELS};

/// What no kernel can name by itself, and why.
const ALLOWED: &[(&str, &str)] = &[
    (
        "slots::Slots::receive",
        "what other devices store meanwhile: kernels of two ranks, in `host/tests/comm/reduced.rs` and the mutants of `all_reduce`",
    ),
    ("slots::Slots::send", "the same: what is received"),
    ("slots::Slots::from_raw_parts", "an entry makes its slots of its parameters"),
    ("atomic::add_vector_f32", "the cases of `embedding_backward` add by it, on both devices, against f64"),
    ("global::Global::from_raw_parts", "an entry makes its views of its parameters"),
    ("global::GlobalMut::from_raw_parts", "an entry makes its views of its parameters"),
    ("global::GlobalTable::from_raw_parts", "an entry makes its tables of its parameters"),
    ("tensor_map::map::from_raw", "an entry makes its maps of its parameters"),
    ("shared::SharedStorage::at", "`claim` of every kernel with shared memory calls it"),
    ("shared::SharedStorage::name_part", "names a piece of shared memory in the emulator's reports alone"),
    ("shared::name_field", "names a field of shared memory in the emulator's reports alone"),
    ("shared::claim", "`claim` of every kernel with shared memory calls it"),
    ("shared::checked_size", "the derive calls it at compile time"),
    ("shared::max_align", "the derive calls it at compile time"),
    ("epilogue::finish", "writes nothing; the emulator reports its absence"),
    (
        "register_tile::RegisterTile::store",
        "the cases of GEMM whose parts are the blocks of clusters store by nothing else, exact sums bit for bit",
    ),
    ("register_tile::StoredElement::store_two", "the same: what it stores by"),
    (
        "epilogue::store_parts",
        "`epilogue::store` is it; what it leaves the cases of GEMM in tiles of 80, 96, 112 and 176 columns store themselves",
    ),
    ("epilogue::store", "the cases of GEMM store by nothing else, exact sums bit for bit"),
    ("matrix::InFlight::waited", "the second half of `wait`, which is covered; the emulator reports a missing wait"),
    ("matrix::Left::issue", "every multiplication calls it"),
    ("pipeline::copy::prefetch", "a hint, which changes no byte; the emulator checks its range in steps of a ring"),
    ("tensor_map::map::prefetch", "a hint, which changes no byte"),
    ("global::GlobalMut::prefetch", "a hint, which changes no byte"),
    ("pipeline::Pipeline::stages", "where `memory` and the ring's handles are; the cases of GEMM with few rows clear it"),
    ("pipeline::Pipeline::memory", "what `Stage::memory` gives, which is covered"),
    ("pipeline::Pipeline::producer_in_round", "`producer`, which is covered, where the ring has gone round"),
    ("pipeline::Producer::next_stage", "what the ring counts; the backward pass of attention stops or races if it is wrong"),
    ("pipeline::Producer::parity", "what the ring counts; the backward pass of attention stops or races if it is wrong"),
    ("pipeline::Producer::at_place_of", "what another ring counts, which is covered; attention of 8 bits stops or races if it is wrong"),
    ("pipeline::Consumer::next_stage", "what the ring counts; the backward pass of attention stops or races if it is wrong"),
    ("pipeline::Consumer::parity", "what the ring counts; the backward pass of attention stops or races if it is wrong"),
    (
        "pipeline::copy::copy_async_lasting",
        "ptxas 13.0 makes an illegal instruction of what a conformance kernel would be, and the build refuses it; the cases of fused MXFP8 casts show it",
    ),
    ("scheduler::PersistentTiles::is_done", "`next_tile`, which is covered, calls it"),
    ("scheduler::PersistentTiles::place", "`next_tile`, which is covered, calls it"),
    ("register_tile::RegisterTile::add_columns", "the cases of `gemm_scattered` add parts by it, on both devices, exact sums bit for bit"),
    ("register_tile::StoredElement::load", "the same: what it adds"),
    ("shared_tile::SharedTile::rows", "a part of the same tile: the cases of `gemm_scattered` have parts in a stage of operands"),
    ("shared_tile::SharedTile::cast", "the same tile under another type: the cases of `gemm_scattered` have parts in a stage of operands"),
    ("register_tile::OperandTile::apart", "its bits go to a multiplication as they are: the cases of e4m3 attention show it"),
    ("pipeline::Producer::acquire_with", "`acquire` calls it; what else it does the mutants of attention show"),
    ("pipeline::Stage::release_unless", "`release`, which is covered, or nothing"),
    (
        "pipeline::Stage::wait_again",
        "`Consumer::wait`, which is covered, of the same phase: it changes nothing but the machine code's order",
    ),
    ("num::fp8::Fp8::from_byte", "`from_bits`, which is covered, under a name for both formats"),
    ("num::fp8::Fp8::to_byte", "`to_bits`, which is covered, under a name for both formats"),
    ("num::math::anew", "the number itself, by `permute_bytes`, which is covered; it is there for the machine code"),
    ("shared_tile::SharedTile::address_of_chunk", "every copy to a chunk and load of one, which are covered, calls it"),
    ("num::math::opaque", "the number itself, by `permute_bytes`, which is covered; it is there for the machine code"),
    ("warpgroup::ProducerRole::begin_warps", "`begin`, which is covered, with the warp's number; the backward pass of attention uses it"),
    ("warp_matrix::RightTile::load", "holds what `Right::fragments` gives, which is covered; the cases of the portable GEMM show it"),
    ("warp::Word::from_word", "every shuffle calls it"),
    ("warp::Word::to_word", "every shuffle calls it"),
];

/// Parts of the DSL that are not operations of a kernel: instructions, what the host knows, what the emulator computes by.
const NOT_OPERATIONS: [&str; 5] = ["arch/", "launch/", "layout.rs", "num/software.rs", "lib.rs"];

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("tests/ is in the workspace")
}

/// The Rust files below a folder, by their path from it.
fn sources(folder: &Path) -> Vec<(String, String)> {
    fn walk(folder: &Path, found: &mut Vec<PathBuf>) {
        for entry in fs::read_dir(folder).expect("a folder of sources") {
            let path = entry.expect("a readable folder").path();
            if path.is_dir() { walk(&path, found) } else { found.push(path) }
        }
    }
    let mut files = Vec::new();
    walk(folder, &mut files);
    let name = |path: &Path| path.strip_prefix(folder).expect("below the folder").to_string_lossy().into_owned();
    files.iter().map(|path| (name(path), fs::read_to_string(path).expect("a readable source file"))).collect()
}

/// The first identifier of `text`.
fn identifier(text: &str) -> String {
    text.trim_start_matches('$').chars().take_while(|c| c.is_alphanumeric() || *c == '_').collect()
}

/// What stands after the generics of `impl<..>`.
fn after_generics(text: &str) -> &str {
    let mut depth = 0;
    for (i, c) in text.char_indices() {
        depth += i32::from(c == '<') - i32::from(c == '>');
        if depth == 0 {
            return text[i..].trim_start_matches('>').trim_start();
        }
    }
    text
}

/// `module::Type::function` of the public functions and trait methods of one file, formatted by rustfmt.
fn operations(file: &str, source: &str) -> BTreeSet<String> {
    let module = file.trim_end_matches(".rs").trim_end_matches("/mod").replace('/', "::");
    let (mut owner, mut in_trait) = (String::new(), false);
    let mut found = BTreeSet::new();
    for line in source.lines() {
        let code = line.trim_start().trim_start_matches("pub ").trim_start_matches("unsafe ");
        if let Some(rest) = code.strip_prefix("impl").filter(|rest| rest.starts_with([' ', '<'])) {
            (owner, in_trait) = (identifier(after_generics(rest)), false);
        } else if let Some(rest) = code.strip_prefix("trait ") {
            (owner, in_trait) = (identifier(rest), line.trim_start().starts_with("pub "));
        } else if line.starts_with('}') {
            (owner, in_trait) = (String::new(), false);
        }
        let code = code.trim_start_matches("const ").trim_start_matches("unsafe ");
        if let Some(rest) = code.strip_prefix("fn ").filter(|_| in_trait || line.trim_start().starts_with("pub ")) {
            let owner = if owner.is_empty() { String::new() } else { format!("{owner}::") };
            found.insert(format!("{module}::{owner}{}", identifier(rest)));
        }
    }
    found
}

fn all_operations() -> BTreeSet<String> {
    let files = sources(&root().join("gpu/tile/src"));
    let counted = files.iter().filter(|(file, _)| NOT_OPERATIONS.iter().all(|other| !file.starts_with(other)));
    counted.flat_map(|(file, source)| operations(file, source)).collect()
}

#[test]
fn the_scan_finds_each_kind_of_function() {
    let source = "pub fn free() {}\nfn private() {}\nimpl<T: Into<u8>, const N: usize> Array<T, N> {\n    pub const fn len(self) {}\n    \
                  pub(crate) fn inner(self) {}\n}\npub unsafe trait Word {\n    unsafe fn bits(self);\n}\nimpl Word for u32 {\n    \
                  unsafe fn bits(self) {}\n}\n        impl $name {\n            pub fn new() {}\n        }\n";
    let expected = ["num::a::Array::len", "num::a::Word::bits", "num::a::free", "num::a::name::new"];
    assert_eq!(operations("num/a.rs", source).iter().collect::<Vec<_>>(), expected);
}

#[test]
fn every_operation_is_covered() {
    let operations = all_operations();
    assert!(operations.len() > 100, "the scan found {} operations: it looks in the wrong place", operations.len());
    let covered: BTreeSet<_> = COVERED.iter().flat_map(|(_, operations)| *operations).map(|name| (*name).to_owned()).collect();
    let allowed: BTreeSet<_> = ALLOWED.iter().map(|(name, _)| (*name).to_owned()).collect();
    let known: BTreeSet<_> = covered.union(&allowed).cloned().collect();
    let missing: Vec<_> = operations.difference(&known).collect();
    assert!(missing.is_empty(), "add them to a kernel of tests/conformance and to its COVERED: {missing:#?}");
    let gone: Vec<_> = known.difference(&operations).collect();
    assert!(gone.is_empty(), "listed, but not in gpu/tile/src: {gone:#?}");
    assert!(covered.is_disjoint(&allowed), "both covered and excused: {:?}", covered.intersection(&allowed));
}

#[test]
fn a_kernel_names_what_it_covers() {
    let files = sources(&root().join("tests/conformance/src"));
    let words: BTreeMap<_, BTreeSet<_>> =
        files.iter().map(|(file, source)| (file, source.split(|c: char| !c.is_alphanumeric() && c != '_').collect())).collect();
    let kernels: BTreeSet<_> = KERNELS.iter().map(|family| family.name).collect();
    for (kernel, operations) in COVERED {
        assert!(kernels.contains(kernel), "COVERED lists `{kernel}`, which is no kernel");
        let (file, _) = files.iter().find(|(_, source)| source.contains(&format!("\npub fn {kernel}("))).expect("the kernel's file");
        for operation in *operations {
            let function = operation.rsplit("::").next().expect("a path");
            assert!(words[file].contains(function), "`{kernel}` is said to cover {operation}, but {file} does not name it");
        }
    }
}
