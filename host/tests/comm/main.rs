//! Ranks of the virtual cluster, on the public interface.

mod arenas;
mod batch;
mod collectives;
mod contiguous;
mod declared;
mod exchange;
mod failures;
mod foreign;
mod gathers;
mod graphs;
mod groups;
mod handover;
mod in_place;
mod mismatches;
mod one_sided;
mod places;
mod sanitizer;
mod schedules;
mod shards;
mod support;
mod symmetric;
mod teams;
mod threads;
mod timeline;
mod waits;
