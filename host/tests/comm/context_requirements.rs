//! What context parallelism has to hold, and the tests that show it: the requirements that followed from the bugs of TransformerEngine's context parallelism (R-CP-1 to 14) and of its pull request
//! #2737 (R-NVS-1 to 17).

use crate::sharded_requirements::{check, check_prints};

/// A name, what must hold, and where it is shown, as in `sharded_requirements`.
const SHOWN: [(&str, &str, &[&str]); 31] = [
    (
        "R-CP-1",
        "what reads keys comes after their arrival, and nothing by luck",
        &["context_calls::the_same_bits_in_many_orders", "context_protocol::what_pull_may_not_leave_out"],
    ),
    ("R-CP-2", "no pass reads from the device or waits on the host", &["context_calls::a_first_call_may_be_captured"]),
    ("R-CP-3", "padding has gradients of zero", &["context_parallel::packed_sequences", "context_bugs::arguments_that_are_tampered_with"]),
    (
        "R-CP-4",
        "what is seen ends at the length",
        &["context_parallel::packed_sequences", "context_parallel::packed_sequences_of_many_ranks"],
    ),
    ("R-CP-5", "lengths and offsets are two arrays", &["context_bugs::arguments_that_are_tampered_with"]),
    (
        "R-CP-6",
        "windows are exact in each sequence, to the right too",
        &["context_bugs::transformer_engine_has_the_window_of_the_longest_sequence", "context_parallel::packed_sequences"],
    ),
    ("R-CP-7", "memory is of an operation, whichever stream a pass is on", &["context_tensors::passes_may_be_on_different_streams"]),
    (
        "R-CP-8",
        "merges and maxima come one after another, from the first step on",
        &[
            "context_calls::the_same_bits_in_every_order",
            "context_largest::in_every_order",
            "src/context_parallel/launches.rs::every_half_begins_and_ends_once",
        ],
    ),
    (
        "R-CP-9",
        "ranks are told apart, each part by itself, of 16 and of 8 bits",
        &[
            "context_calls::every_rank_is_seen_for_itself",
            "context_fp8::every_rank_casts_by_the_scales_of_all",
            "context_fp8::transformer_engine_keeps_gradients_of_8_bits",
        ],
    ),
    (
        "R-CP-10",
        "what sees nothing is zeros and -inf",
        &["context_parallel::packed_sequences", "context_largest::of_nothing_and_below_zero", "context_parallel::every_option"],
    ),
    ("R-CP-11", "passes keep nothing but the caller's tensors", &["context_calls::layers_take_turns"]),
    ("R-CP-12", "keys and values travel in one call", &["context_bugs::messages_that_are_tampered_with"]),
    (
        "R-CP-13",
        "no length is divided by the ranks",
        &["context_bugs::arguments_that_are_tampered_with", "context_refusals::what_cannot_be_is_refused"],
    ),
    ("R-CP-14", "what is kept between passes is a struct", &["context_tensors::tensors_may_be_heads_of_others"]),
    ("R-NVS-1", "every schedule runs", &["context_parallel::other_schedules", "context_parallel::every_world_and_layout"]),
    ("R-NVS-2", "memory outlives the forward pass", &["context_calls::layers_take_turns"]),
    ("R-NVS-3", "state is in one object", &["context_tensors::passes_may_differ"]),
    ("R-NVS-4", "what is not there is named", &["src/symmetric/nvshmem/library.rs::what_is_no_library_is_named"]),
    ("R-NVS-5", "what reads a transfer waits for it", &["context_protocol::what_pull_may_not_leave_out"]),
    ("R-NVS-6", "what is set up is set up once", &["context_calls::a_first_call_may_be_captured"]),
    ("R-NVS-7", "the library prints nothing", &["context_requirements::the_library_prints_nothing"]),
    ("R-NVS-8", "memory is sized before it is taken, and what has no room is refused", &["context_refusals::an_arena_that_is_too_small"]),
    ("R-NVS-9", "READY comes before a get", &["context_protocol::what_pull_may_not_leave_out"]),
    (
        "R-NVS-10",
        "memory is written again when others have read it",
        &["context_protocol::what_pull_may_not_leave_out", "context_calls::ranks_run_ahead"],
    ),
    ("R-NVS-11", "no pass allocates", &["context_calls::a_first_call_may_be_captured"]),
    ("R-NVS-12", "a step gets, and gives back, once", &["src/context_parallel/launches.rs::every_pair_of_chunks_is_seen_once"]),
    ("R-NVS-13", "both passes have one rule of owners", &["src/context_parallel/launches.rs::steps_are_permutations"]),
    // Not built (ADR 19): no rank computes what another one does.
    ("R-NVS-14", "no tile is computed twice", &["src/context_parallel/launches.rs::every_pair_of_chunks_is_seen_once"]),
    (
        "R-NVS-15",
        "flags come after data",
        &["context_protocol::what_pull_may_not_leave_out", "context_protocol::what_traded_heads_may_not_leave_out"],
    ),
    ("R-NVS-16", "devices wait, and graphs hold it", &["context_calls::a_first_call_may_be_captured"]),
    (
        "R-NVS-17",
        "sizes have 64 bits, and flags are reset by what waits for them",
        &["context_refusals::what_no_device_holds_is_refused", "context_protocol::what_pull_may_not_leave_out"],
    ),
];

#[test]
fn every_requirement_is_shown_by_tests_that_are_there() {
    check(&SHOWN, (1..=14).map(|number| format!("R-CP-{number}")).chain((1..=17).map(|number| format!("R-NVS-{number}"))));
}

#[test]
fn the_library_prints_nothing() {
    check_prints(&["src/context_parallel", "src/thd"]);
}
