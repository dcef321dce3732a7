//! Ranks of the virtual cluster, on the public interface.
//!
//! | file | what it holds |
//! |---|---|
//! | `collectives`, `groups`, `schedules`, `teams` | collectives; grouped calls and parts of a world, for every communicator; teams |
//! | `sanitizer`, `one_sided` | planted bugs of streams and of one-sided operations |
//! | `symmetric`, `arenas`, `foreign` | arenas and their failures; an arena a rank; what is of another arena |
//! | `gathers`, `in_place`, `places`, `shards` | gathers: by copy engines; from where shards lie; places that outlive epochs; of quantized shards |
//! | `declared`, `mismatches` | ranks that call different things |
//! | `batch`, `rows`, `handover`, `flags`, `contiguous`, `exchange`, `graphs` | batches; rows of matrices; signals in graphs; kernels that wait for flags; one range of addresses; messages by kernels; graphs |
//! | `overlap`, `overlap_case`, `overlap_calls` | products whose operand is gathered meanwhile: their bits, and those of a plain product; several of them, and what goes wrong |
//! | `overlap_kept`, `overlap_usage`, `overlap_bugs` | the same: what is kept; what calls allocate, collectives beside them; planted bugs |
//! | `reduced` | products whose sum all ranks get |
//! | `small_sums` | small sums of members that are not all ranks |
//! | `rounds` | rounds of calls of either, for both |
//! | `scattered`, `scattered_bugs` | products whose sum is shared and whose rows are scattered; planted bugs |
//! | `scattered_quantized` | the same, of operands that are codes and scales |
//! | `bulk`, `bulk_bugs` | calls of both in two halves; planted bugs |
//! | `epilogues` | what follows products of ranks |
//! | `overlap_turns` | the same: many calls between which no host waits, puts in step, what follows a product without its operand |
//! | `overlap_quantized` | the same, of an operand that is gathered as codes and scales |
//! | `overlap_misuse` | the same, and of scattered and summed products: unusual uses |
//! | `overlap_model`, `overlap_requirements` | the same: what is chosen, against what was measured; which test shows what |
//! | `context_parallel`, `context_calls`, `context_tensors` | attention over a sequence that is spread over ranks: what it computes; its calls, and what goes wrong; tensors, streams and teams |
//! | `context_fused`, `context_fused_packed` | passes in one launch, which wait for keys; of packed sequences |
//! | `context_pairs` | a sample of its options in which every two values meet |
//! | `context_lengths` | packed sequences whose keys have other lengths than their queries |
//! | `context_largest`, `context_fp8`, `context_refusals` | the largest scores of heads; attention of 8 bits; what is refused |
//! | `context_bugs`, `context_tampered`, `context_sums`, `context_protocol` | planted bugs of it: of what ranks compute and send, how messages are tampered with; of sums, and of its flags |
//! | `context_deaths`, `context_copies`, `context_requirements` | ranks of it that end, or are late; how often bytes are copied; which test shows what |
//! | `context_case`, `context_ranks`, `whole_attention` | a problem of it and its tensors, ranks, and what they are to find |
//! | `context_example`, `sharded_example`, `tensor_parallel_example` | the programs of the examples |
//! | `sharded`, `sharded_calls`, `sharded_graphs`, `sharded_protocol` | weights in shards: what is pulled; how passes are called; steps in graphs; what the protocol may not leave out |
//! | `sharded_footprint` | what weights in shards take, before it is taken; the events of a step |
//! | `sharded_layer` | a layer of products that overlap, with weights in shards |
//! | `sharded_overlap` | which pulls run beside which copies, by timelines |
//! | `sharded_soak`, `sharded_requirements` | chains of any sizes over many steps: memory, waits, teams; which test shows what |
//! | `sharded_replays` | replayed steps of the formats that have codes of the transpose, against calls |
//! | `sharded_ranks` | a rank's shards, and what passes are to lend |
//! | `sharded_gradients`, `gradient_calls`, `gradient_bugs` | gradients that are summed where their rows are owned: their bits; calls, hooks and teams; planted bugs |
//! | `gradient_messages` | the same without an arena |
//! | `gradient_ranks` | ranks with gradients, and what they are to find |
//! | `failures`, `threads`, `waits`, `late_flags`, `deadlocks` | failures of a host, a thread, waits without an arena, flags that do not come, and the rules of kernels that wait |
//! | `timeline` | what is recorded of ranks |
//! | `values`, `whole_product`, `support` | operands; a product over all ranks in float64; what the tests share |

/// Checked runs allocate at every operation: a tenth of their time by the system's allocator.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

mod arenas;
mod batch;
mod bulk;
mod bulk_bugs;
mod collectives;
mod context_bugs;
mod context_calls;
mod context_case;
mod context_copies;
mod context_deaths;
mod context_example;
mod context_fp8;
mod context_fused;
mod context_fused_packed;
mod context_largest;
mod context_lengths;
mod context_pairs;
mod context_parallel;
mod context_protocol;
mod context_ranks;
mod context_refusals;
mod context_requirements;
mod context_sums;
mod context_tampered;
mod context_tensors;
mod contiguous;
mod deadlocks;
mod declared;
mod epilogues;
mod exchange;
mod failures;
mod flags;
mod foreign;
mod gathers;
mod gradient_bugs;
mod gradient_calls;
mod gradient_messages;
mod gradient_ranks;
mod graphs;
mod groups;
mod handover;
mod in_place;
mod late_flags;
mod mismatches;
mod one_sided;
mod overlap;
mod overlap_bugs;
mod overlap_calls;
mod overlap_case;
mod overlap_kept;
mod overlap_misuse;
mod overlap_model;
mod overlap_quantized;
mod overlap_requirements;
mod overlap_turns;
mod overlap_usage;
mod places;
mod reduced;
mod rounds;
mod rows;
mod sanitizer;
mod scattered;
mod scattered_bugs;
mod scattered_quantized;
mod schedules;
mod sharded;
mod sharded_calls;
mod sharded_example;
mod sharded_footprint;
mod sharded_gradients;
mod sharded_graphs;
mod sharded_layer;
mod sharded_overlap;
mod sharded_protocol;
mod sharded_ranks;
mod sharded_replays;
mod sharded_requirements;
mod sharded_soak;
mod shards;
mod small_sums;
mod support;
mod symmetric;
mod teams;
mod tensor_parallel_example;
mod threads;
mod timeline;
mod values;
mod waits;
mod whole_attention;
mod whole_product;
