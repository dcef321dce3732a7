//! Gradients that are summed where their rows are owned: the bits of a sum in the order of the ranks, in every world, order and graph.

use oxtile::num::bf16;
use oxtile::sharded::{Bf16, Mxfp8, Nvfp4, Weight};

use crate::gradient_ranks::{Calls, Case};
use crate::support::{is_long, seeds};

#[test]
fn every_world_and_element() {
    for ranks in 1..=5 {
        let case = |calls| Case::new(ranks, calls);
        case(Calls::Eager).run::<f32, Bf16>().unwrap();
        case(Calls::Captured).run::<bf16, Bf16>().unwrap();
        // Shards of whole blocks: ranks without rows.
        case(Calls::Mixed).run::<bf16, Mxfp8>().unwrap();
        if is_long() {
            for calls in [Calls::Eager, Calls::Captured, Calls::Mixed] {
                case(calls).run::<f32, Mxfp8>().unwrap();
                case(calls).run::<bf16, Bf16>().unwrap();
            }
        }
    }
}

#[test]
fn one_weight_and_formats_that_pad() {
    for calls in [Calls::Eager, Calls::Captured, Calls::Mixed] {
        let weights = vec![Weight::new("only", [40, 16]).experts(2)];
        Case { weights, ..Case::new(3, calls) }.run::<bf16, Nvfp4>().unwrap();
    }
}

/// Several steps follow each other with no wait of the host, in graphs from the first call on.
#[test]
fn a_graph_of_the_first_step_is_replayed() {
    for ranks in [2, 3] {
        Case { steps: 8, ..Case::new(ranks, Calls::Captured) }.run::<bf16, Bf16>().unwrap();
    }
}

#[test]
fn the_right_program_is_silent_under_many_seeds() {
    let weights = vec![Weight::new("first", [3, 5]), Weight::new("second", [2, 8]).experts(2), Weight::new("third", [1, 4])];
    for seed in 0..seeds() {
        let calls = [Calls::Eager, Calls::Captured, Calls::Mixed][seed as usize % 3];
        for ranks in [2, 3] {
            let case = Case { weights: weights.clone(), ..Case::new(ranks, calls) }.seeded(seed);
            case.run::<bf16, Bf16>().unwrap_or_else(|error| panic!("{case:?}: {error}"));
        }
    }
}

/// The rank that comes first changes no bit: all are those of the sum on the host.
#[test]
fn the_order_of_arrival_changes_nothing() {
    for first in 0..4 {
        Case { first, ..Case::new(4, Calls::Eager) }.run::<f32, Bf16>().unwrap();
    }
}
