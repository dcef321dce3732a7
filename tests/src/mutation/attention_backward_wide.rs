//! Mutants of the backward pass of attention of heads above 128.

use oxtile_emulator::mutation::{Change, Equivalent, Mutation, Outcome};
use oxtile_kernels::attention::{
    AttentionBackwardWideKeys, AttentionBackwardWideKeysArgs, AttentionBackwardWideQueries, AttentionBackwardWideQueriesArgs, FAR, Heads,
    QueryStatisticsArgument, QueryTargetArgument, SequencesArgument, WIDE_ROWS, WideKeyGradientsArgument, WideKeyTargetArgument,
    WideOrderArgument, WideTensorsArgument, Window,
};
use oxtile_tile::launch::{DeviceTensorMap, DeviceTensorMapMut};
use oxtile_tile::num::bf16;

use super::attention_general::map;
use super::device::{Device, Elements, words};
use super::{Job, is_at_line};

pub const JOBS: &[Job] = &[
    Job {
        name: "attention_backward_wide_keys",
        run: of_keys,
        equivalents: &[Equivalent {
            matches: |mutation| is_skipped(mutation, OF_KEYS, "fence_proxy_async", "stage.publish()"),
            reason: "statistics are read by loads alone",
        }],
    },
    Job {
        name: "attention_backward_wide_queries",
        run: of_queries,
        equivalents: &[
            Equivalent {
                matches: |mutation| mutation.site.operation == "wgmma_wait" && mutation.change == Change::CountDown,
                reason: "waits for one group more than needed: slower, never wrong",
            },
            Equivalent {
                matches: |mutation| is_skipped(mutation, OF_QUERIES, "mbarrier_wait_parity", "key.wait_again()"),
                reason: "waits once more for what has come: for ptxas, which would wait for products instead",
            },
            Equivalent {
                matches: |mutation| is_skipped(mutation, OF_QUERIES, "warp_sync", "warp::sync(); // for ptxas"),
                reason: "for ptxas, which then knows that the lanes meet",
            },
            Equivalent {
                matches: |mutation| {
                    mutation.site.line == before(OF_QUERIES, "sum.store_columns(0, query);") && mutation.change == Change::Skip
                },
                reason: "a warp multiplies by the rows that it overwrites, as far as the emulator knows; the instruction set does not say it",
            },
        ],
    },
];

const OF_KEYS: &str = include_str!("../../../gpu/src/attention/backward_wide_keys.rs");
const OF_QUERIES: &str = include_str!("../../../gpu/src/attention/backward_wide_queries.rs");

/// The line before the only one with these words.
fn before(source: &str, words: &str) -> u32 {
    source.lines().zip(0..).find_map(|(line, number)| line.contains(words).then_some(number)).unwrap_or_default()
}

fn is_skipped(mutation: &Mutation, source: &str, operation: &str, words: &str) -> bool {
    is_at_line(mutation, source, words) && mutation.site.operation == operation && mutation.change == Change::Skip
}

/// Elements of heads of `Q` and of `V`.
const SIZES: [u32; 2] = [192, 128];
/// Heads, as maps have one.
const HEADS: u32 = 1;

/// The tensors, and the gradients of queries, keys and values.
struct Tensors {
    read: [Elements<bf16>; 4],
    written: [Elements<bf16>; 3],
    arrays: [Elements<u32>; 2],
    statistics: [Elements<f32>; 2],
    counter: Elements<u32>,
    rows: [u32; 2],
}

impl Tensors {
    /// Of sequences that end there, on both sides, after the first row.
    fn new(device: &Device, ends: [&[u32]; 2]) -> Self {
        let rows = ends.map(|ends| ends.last().copied().unwrap_or_default());
        // Below 1, so that every weight counts.
        let small = |name, rows: u32, size: u32| {
            let words: Vec<_> = words((rows * size) as usize / 2).into_iter().map(|word| word & 0x3e7f_3e7f).collect();
            device.upload::<bf16>(name, &words)
        };
        let ([queries, keys], [size, value_size]) = ([rows[0] * HEADS, rows[1]], SIZES);
        let statistic = |name, value: f32| device.upload::<f32>(name, &vec![value.to_bits(); queries as usize]);
        Self {
            read: [small("q", queries, size), small("grad_out", queries, value_size), small("k", keys, size), small("v", keys, value_size)],
            written: [small("grad_q", queries, size), small("grad_k", keys, size), small("grad_v", keys, value_size)],
            arrays: ends.map(|ends| device.upload::<u32>("ends", ends)),
            statistics: [statistic("log_sum_exp", 5.0), statistic("deltas", 0.5)],
            counter: device.upload::<u32>("counter", &[0]),
            rows,
        }
    }
}

/// Runs one of the kernels.
fn run(device: &Device, of_keys: bool, ends: [&[u32]; 2]) -> Result<Vec<u32>, Outcome> {
    let Tensors { read, written, arrays, statistics: [log_sum_exp, deltas], mut counter, rows } = Tensors::new(device, ends);
    let [size, value_size] = SIZES.map(u64::from);
    let sizes = [size, value_size, size, value_size];
    let boxes = if of_keys { [96, 96, 64, 64] } else { [64, 64, 96, 96] };
    let maps = [0, 1, 2, 3].map(|i| map(device, &read[i], sizes[i], boxes[i]));
    let of_written = [(0, size), (1, size), (2, value_size)].map(|(i, size)| map(device, &written[i], size, WIDE_ROWS as u32));
    let [q_map, grad_out_map, k_map, v_map] = maps.each_ref().map(|map| map.view().access("map"));
    let [grad_q_map, grad_k_map, grad_v_map] = of_written.each_ref().map(|map| map.view().access("map"));
    let [q, grad_out, k, v] = read.each_ref().map(|tensor| tensor.view().access("tensor"));
    let [grad_q, grad_k, grad_v] = written.each_ref().map(|tensor| tensor.view().access("tensor"));
    let [query_ends, key_ends] = arrays.each_ref().map(Elements::view);
    macro_rules! tensors {
        ($queries:literal, $keys:literal) => {
            WideTensorsArgument::<bf16, 192, 128, $queries, $keys> {
                // SAFETY: the maps were encoded for these tensors and boxes.
                q: unsafe { DeviceTensorMap::from_raw(q_map, q) },
                // SAFETY: as above.
                grad_out: unsafe { DeviceTensorMap::from_raw(grad_out_map, grad_out) },
                // SAFETY: as above.
                k: unsafe { DeviceTensorMap::from_raw(k_map, k) },
                // SAFETY: as above.
                v: unsafe { DeviceTensorMap::from_raw(v_map, v) },
                statistics: QueryStatisticsArgument { log_sum_exp: log_sum_exp.view(), deltas: deltas.view(), rows: 0 },
                sequences: SequencesArgument {
                    query_ends,
                    key_ends,
                    query_offsets: query_ends,
                    key_offsets: key_ends,
                    diagonals: None,
                    query_rows: rows[0],
                    key_rows: rows[1],
                    padded: false,
                },
                heads: Heads { batches: ends[0].len() as u32 - 1, heads: HEADS, group: HEADS, step: 0 },
                window: Window { left: FAR, right: FAR, top_left: false },
                scale: 0.18,
            }
        };
    }
    let order = WideOrderArgument { counter: counter.view_mut(), section_rows: 1000 };
    if of_keys {
        // SAFETY: as above.
        let rounded = unsafe {
            WideKeyGradientsArgument {
                k: DeviceTensorMapMut::from_raw(grad_k_map, grad_k),
                v: DeviceTensorMapMut::from_raw(grad_v_map, grad_v),
            }
        };
        let target = WideKeyTargetArgument { rounded: Some(rounded), added: None, scale: 0.125 };
        device.launch::<AttentionBackwardWideKeys<bf16, 192, 128, 96, 12>>(AttentionBackwardWideKeysArgs {
            tensors: tensors!(96, 64),
            target,
            order,
        })?;
        return Ok([device.download(&written[1]), device.download(&written[2]), device.download(&counter)].concat());
    }
    let target = QueryTargetArgument {
        // SAFETY: as above.
        rounded: Some(unsafe { DeviceTensorMapMut::from_raw(grad_q_map, grad_q) }),
        added: None,
        size: SIZES[0],
        scale: 0.125,
    };
    device.launch::<AttentionBackwardWideQueries<bf16, 192, 128, 96>>(AttentionBackwardWideQueriesArgs {
        tensors: tensors!(64, 96),
        target,
        order,
    })?;
    Ok([device.download(&written[0]), device.download(&counter)].concat())
}

/// Four tiles for one CUDA block: two of no block of queries, one of more than there are stages, one of one.
fn of_keys(device: &Device) -> Result<Vec<u32>, Outcome> {
    run(device, true, [&[0, 0, 200, 208], &[0, 70, 134, 140]])
}

/// Three tiles, the first of more blocks of keys than there are stages.
fn of_queries(device: &Device) -> Result<Vec<u32>, Outcome> {
    run(device, false, [&[0, 10, 20, 30], &[0, 200, 210, 220]])
}
