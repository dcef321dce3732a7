//! What products that overlap have to hold, and the tests that show it: the requirements that followed from the bugs of TransformerEngine's overlap of communication and products
//! (R-OVL-1 to 14).

use crate::sharded_requirements::{check, check_prints, code};

/// A name, what must hold, and where it is shown, as in `sharded_requirements`.
const SHOWN: [(&str, &str, &[&str]); 14] = [
    ("R-OVL-1", "sizes over all ranks and of one rank are two types", &["src/overlap/sizes.rs::compile_fail"]),
    ("R-OVL-2", "a rank and a number of ranks are two types", &["src/overlap/choice.rs::compile_fail"]),
    ("R-OVL-3", "what is made is whole: nothing is initialised later", &["overlap_requirements::nothing_is_initialised_after_it_was_made"]),
    ("R-OVL-4", "there is one set of defaults", &["src/overlap/config.rs::defaults_are_pinned"]),
    ("R-OVL-5", "no library's type is in the interface", &["overlap_requirements::the_interface_names_no_library"]),
    ("R-OVL-6", "what fails half-way gives back what it took", &["overlap_usage::what_fails_half_way_gives_back_what_it_took"]),
    (
        "R-OVL-7",
        "what is made is ready: the first call may be captured, and no call allocates or waits",
        &[
            "overlap::every_method_has_the_bits_of_a_plain_product",
            "overlap_usage::after_the_first_call_nothing_is_allocated_and_no_host_waits",
        ],
    ),
    (
        "R-OVL-8",
        "an operation, and a graph of it, keep the arena",
        &["overlap_calls::teams_gather_side_by_side", "overlap_turns::layers_of_one_graph"],
    ),
    (
        "R-OVL-9",
        "what cannot be is refused with its reason, and what is chosen was compared with what was measured",
        &[
            "src/overlap/choice.rs::every_refusal_has_its_reason",
            "overlap_calls::what_cannot_be_is_refused_with_its_mend",
            "overlap_model::what_is_chosen_is_never_slower_than_sequential",
        ],
    ),
    ("R-OVL-10", "ranks compare the whole configuration", &["overlap_calls::other_operations_on_other_ranks_are_refused"]),
    (
        "R-OVL-11",
        "the gathered operand is kept, or gathered again",
        &["overlap_kept::the_gathered_operand_is_kept_or_gathered_again", "overlap_kept::every_replay_keeps_what_it_has_gathered"],
    ),
    (
        "R-OVL-12",
        "every method may be captured; a capture of one stream of two is refused before anything is put",
        &[
            "overlap::every_method_has_the_bits_of_a_plain_product",
            "overlap_calls::a_call_that_is_refused_is_made_again",
            "overlap_turns::what_is_made_is_refused_in_a_graph",
        ],
    ),
    ("R-OVL-13", "what is not run here is named and counted", &["overlap_requirements::what_is_skipped_is_counted"]),
    (
        "R-OVL-14",
        "a wait that is not answered is an error with the rank and the chunk, and ends the arena",
        &["overlap_calls::a_rank_that_does_not_call_is_named", "late_flags::a_verdict_that_is_ignored_is_reported_under_every_seed"],
    ),
];

const FOLDERS: &[&str] = &["src/overlap"];

#[test]
fn every_requirement_is_shown_by_tests_that_are_there() {
    check(&SHOWN, (1..=14).map(|number| format!("R-OVL-{number}")));
}

#[test]
fn the_library_prints_nothing() {
    check_prints(FOLDERS);
}

/// A public function that makes something returns it whole: there is none to call before the first use.
#[test]
fn nothing_is_initialised_after_it_was_made() {
    let names = ["init", "initialize", "initialise", "setup", "configure", "prepare_for"];
    let is_later = |line: &str| names.iter().any(|name| line.starts_with("pub fn ") && line[7..].starts_with(name));
    let later: Vec<_> = code(FOLDERS).into_iter().filter(|(_, line)| is_later(line)).collect();
    assert!(later.is_empty(), "{later:?}");
}

/// It is made of the project's own types, so that it builds where no library is.
#[test]
fn the_interface_names_no_library() {
    let libraries = ["cudarc", "libloading", "sys::", "CUstream", "CUdevice", "nccl"];
    let named: Vec<_> = code(FOLDERS).into_iter().filter(|(_, line)| libraries.iter().any(|library| line.contains(library))).collect();
    assert!(named.is_empty(), "{named:?}");
}

/// The programs that run what needs a GPU say how much of it they leave out, and why. That no test is left out by an attribute is a test of the whole project.
#[test]
fn what_is_skipped_is_counted() {
    let ignoring = |(file, line): (String, String)| line.contains(".with_ignored_flag(").then_some(file);
    let says: std::collections::BTreeSet<_> = code(&["tests", "tests/vmm"]).into_iter().filter_map(ignoring).collect();
    assert!(says.len() >= 3, "{says:?}");
    for file in says {
        let text = std::fs::read_to_string(&file).unwrap();
        assert!(text.contains("skipped: {"), "{file} leaves tests out and does not say why");
    }
}
