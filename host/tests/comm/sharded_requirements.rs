//! What weights in shards have to hold, and the tests that show it: the requirements that followed from the bugs of TransformerEngine's pull request #2960 (R-ETP-1 to 19), and the
//! invariants of chains of weights (I1 to I9).

use std::path::Path;

/// An example in the documentation that does not compile.
const COMPILE_FAIL: &str = "compile_fail";

/// A name, what must hold, and where it is shown: a test as `file::function` of this folder, or as `path.rs::function` of the library, or an example that does not compile.
const SHOWN: [(&str, &str, &[&str]); 28] = [
    ("R-ETP-1", "a format without alignment is divided as any other", &["sharded::bf16", "src/sharded/split.rs::shards_are_all_rows"]),
    (
        "R-ETP-2",
        "what is still on its way at the end of a graph is drained, or refused",
        &[
            "gradient_calls::a_step_begins_and_ends_in_one_graph",
            "sharded_gradients::captured_passes_and_gradients_have_the_bits_of_eager_ones",
        ],
    ),
    (
        "R-ETP-3",
        "bytes follow from the format's types",
        &["sharded::bf16", "sharded::fp8", "sharded::mxfp8", "sharded::nvfp4", "sharded::nvfp4_squares"],
    ),
    (
        "R-ETP-4",
        "the library prints nothing, and tells of its steps by events with names",
        &["sharded_requirements::the_library_prints_nothing", "sharded_footprint::a_step_is_told_of_by_events_with_names"],
    ),
    (
        "R-ETP-5",
        "a gather comes after the cast, and a product after its gather, in whichever order the edges are left out",
        &["sharded_protocol::what_is_left_out_is_reported", "sharded_protocol::every_order_of_two_and_three_ranks_is_right"],
    ),
    (
        "R-ETP-6",
        "no memory but what was planned",
        &["sharded_footprint::the_footprint_is_what_is_taken", "sharded_soak::steps_take_what_was_planned_and_no_host_waits"],
    ),
    ("R-ETP-7", "a stream a chain: teams do not serialise", &["sharded_soak::chains_of_two_teams_do_not_wait_for_one_another"]),
    (
        "R-ETP-8",
        "after the first step nothing is allocated, and no host waits",
        &["sharded_soak::steps_take_what_was_planned_and_no_host_waits"],
    ),
    (
        "R-ETP-9",
        "a weight is its number and its shape, not what it holds",
        &["sharded_calls::wrong_orders_are_named", "gradient_calls::what_cannot_be_is_refused_with_its_mend"],
    ),
    (
        "R-ETP-10",
        "communicators at once do not wait for one another, and other orders are errors",
        &[
            "gradient_messages::two_communicators_at_once",
            "gradient_messages::another_order_is_an_error",
            "gradient_messages::another_order_of_weights_of_one_shape_is_an_error",
        ],
    ),
    (
        "R-ETP-11",
        "a hook comes after its sum, once a step",
        &["gradient_calls::hooks_and_finish_come_after_the_sums", "gradient_bugs::a_gradient_that_is_used_before_its_sum"],
    ),
    (
        "R-ETP-12",
        "scales travel as they are cast, in no kernel's order",
        &["src/sharded/format.rs::compile_fail", "sharded::mxfp8", "sharded::nvfp4"],
    ),
    (
        "R-ETP-13",
        "only formats whose scales follow from an amax agree on one",
        &["sharded_soak::an_amax_is_agreed_on_where_scales_follow_from_it"],
    ),
    (
        "R-ETP-14",
        "neighbours in a chain have different slots",
        &["src/sharded/slots.rs::every_plan_of_a_random_chain_holds", "sharded_protocol::what_is_left_out_is_reported"],
    ),
    ("R-ETP-15", "what is scattered and what is summed are two types", &["src/sharded/gradient/main_gradients.rs::compile_fail"]),
    (
        "R-ETP-16",
        "a gradient is written where it is sent from; padding is written once",
        &["sharded_gradients::every_world_and_element", "gradient_messages::messages_are_silent_under_many_seeds"],
    ),
    ("R-ETP-17", "a buffer is written again after it was sent", &["gradient_bugs::an_input_that_is_reused_before_it_was_put"]),
    (
        "R-ETP-18",
        "each chain, team, direction and format has memory of its own",
        &["sharded_calls::two_chains_at_once_are_silent", "sharded_calls::two_teams_have_weights_of_their_own"],
    ),
    ("R-ETP-19", "a weight that is used twice has two positions", &["sharded_calls::weights_are_used_twice_and_recomputed"]),
    ("I1", "a weight is taken once a position, in the order of the chain", &["sharded_calls::wrong_orders_are_named"]),
    (
        "I2",
        "a slot is written when no product reads it any more",
        &["sharded_soak::chains_of_any_sizes_are_right_under_many_seeds", "sharded_protocol::what_is_left_out_is_reported"],
    ),
    (
        "I3",
        "what was pulled is taken in the same pass, or the pass is an error",
        &["sharded_calls::wrong_orders_are_named", "sharded_calls::an_update_waits_for_all_pulls"],
    ),
    (
        "I4",
        "amaxes are agreed on before the casts, and these come before gathers",
        &["sharded::nvfp4", "src/sharded/step.rs::compile_fail"],
    ),
    ("I5", "scales are compact", &["sharded::mxfp8", "sharded::nvfp4_squares"]),
    (
        "I6",
        "a sent buffer is given out again after what has read it",
        &[
            "gradient_calls::a_rank_may_be_ahead",
            "gradient_bugs::an_input_that_is_reused_before_it_was_put",
            "gradient_bugs::an_input_that_is_reused_before_its_own_rows_were_summed",
        ],
    ),
    (
        "I7",
        "a main gradient is added to once a step",
        &["sharded_gradients::every_world_and_element", "gradient_calls::any_weights_in_any_order"],
    ),
    (
        "I8",
        "chains do not cross, and a pass is in one graph or in none",
        &[
            "sharded_graphs::a_chain_is_eager_or_captured",
            "sharded_graphs::a_part_of_a_pass_is_refused",
            "sharded_graphs::a_pass_is_not_replayed_while_values_are_written",
            "sharded_graphs::a_captured_chain_and_an_eager_one_in_both_orders",
        ],
    ),
    (
        "I9",
        "ranks scatter in one order",
        &[
            "gradient_calls::orders_of_steps_are_compared",
            "gradient_messages::another_order_is_an_error",
            "gradient_messages::another_order_of_weights_of_one_shape_is_an_error",
        ],
    ),
];

/// The text of a file of the library.
fn text(path: &str) -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(path);
    std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

/// Whether each row has its name, and tests that are there.
pub fn check(rows: &[(&str, &str, &[&str])], names: impl Iterator<Item = String>) {
    assert!(rows.iter().map(|(name, ..)| (*name).to_owned()).eq(names), "a name is missing, or another");
    for (name, what, shown) in rows {
        assert!(!shown.is_empty(), "{name} ({what}) is shown nowhere");
        for test in *shown {
            let (file, function) = test.split_once("::").expect("a file and a function");
            let path = if file.contains(".rs") { file.to_owned() } else { format!("tests/comm/{file}.rs") };
            let is_there = match function {
                COMPILE_FAIL => text(&path).contains("```compile_fail"),
                _ => text(&path)
                    .split("#[test]")
                    .skip(1)
                    .any(|after| after.split_once("fn ").is_some_and(|(_, name)| name.split('(').next() == Some(function))),
            };
            assert!(is_there, "{name} ({what}): there is no {function} in {path}");
        }
    }
}

/// The lines of code of the files in folders of the library, each with its file.
pub fn code(folders: &[&str]) -> Vec<(String, String)> {
    let folders = folders.iter().map(|folder| Path::new(env!("CARGO_MANIFEST_DIR")).join(folder));
    let files = folders.flat_map(|folder| std::fs::read_dir(folder).unwrap()).map(|entry| entry.unwrap().path());
    let lines = files.filter(|path| path.extension().is_some_and(|extension| extension == "rs")).flat_map(|path| {
        let (text, file) = (std::fs::read_to_string(&path).unwrap(), path.display().to_string());
        text.lines().map(|line| (file.clone(), line.trim_start().to_owned())).collect::<Vec<_>>()
    });
    lines.filter(|(_, line)| !line.starts_with("//")).collect()
}

/// No line of these folders' code prints.
pub fn check_prints(folders: &[&str]) {
    for (file, line) in code(folders) {
        assert!(!["println!", "eprintln!", "print!(", "dbg!("].iter().any(|call| line.contains(call)), "{file}: {line}");
    }
}

#[test]
fn every_requirement_is_shown_by_tests_that_are_there() {
    check(&SHOWN, (1..=19).map(|number| format!("R-ETP-{number}")).chain((1..=9).map(|number| format!("I{number}"))));
}

#[test]
fn the_library_prints_nothing() {
    check_prints(&["src/sharded", "src/sharded/gradient"]);
}
