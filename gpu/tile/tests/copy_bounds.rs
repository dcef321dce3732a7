//! Asynchronous copies stay within both sides: the view in device memory and the array in shared memory, even where
//! the allocation and the arena go on.

use oxtile_emulator::{GridRun, Launch, Memory, Options};
use oxtile_tile::launch::Kernel;
use oxtile_tile::pipeline::{self, Mbarrier};
use oxtile_tile::prelude::*;

#[derive(SharedStorage)]
struct Cells {
    six: SharedArray<u32, 6>,
    many: SharedArray<u32, 64>,
    full: Mbarrier,
}

const LOAD_SHARED: u32 = 0;
const LOAD_GLOBAL: u32 = 1;
const STORE_SHARED: u32 = 2;
const STORE_GLOBAL: u32 = 3;
const ASYNC_SHARED: u32 = 4;
const ASYNC_GLOBAL: u32 = 5;
const PAIR_GLOBAL: u32 = 6;
const WORD_SHARED: u32 = 7;
const NOTHING: u32 = 8;

#[kernel(threads = 32, grid = one_block, shared = Cells)]
fn copies(input: Global<u32>, output: GlobalMut<u32>, which: u32) {
    let Cells { six, many, full } = Cells::claim();
    if thread::index() != 0 {
        return;
    }
    full.init(1);
    pipeline::publish_barriers();
    match which {
        LOAD_SHARED => full.load_part(six, &input, 0, 12),
        LOAD_GLOBAL => full.load_part(many, &input, 8, 12),
        STORE_SHARED => pipeline::store_bulk(&output, 0, six, 12),
        STORE_GLOBAL => pipeline::store_bulk(&output, 8, many, 12),
        ASYNC_SHARED => pipeline::copy_async(six, 4, &input, 0, 16),
        ASYNC_GLOBAL => pipeline::copy_async(many, 0, &input, 12, 16),
        PAIR_GLOBAL => pipeline::copy_async_pair(many, 0, &input, 14),
        WORD_SHARED => pipeline::copy_async_word(six, 6, &input, 0),
        _ => {
            many.store(4, 7);
            pipeline::copy_async(many, 0, &input, 12, 8);
            pipeline::copy_async(many, 4, &input, 1 << 40, 0);
            pipeline::commit_copies();
            pipeline::wait_copies::<0>();
            for i in 0..8 {
                output.store(u64::from(i), many.load(i));
            }
        }
    }
}

fn one_block(_: &CopiesArgs<'_>, _: &DeviceLimits) -> Result<Grid, LaunchError> {
    Ok(Grid::x(1))
}

/// Runs one thread's copies between views of 14 words of allocations of 64; the text of the report, or what was written.
fn run(which: u32) -> Result<Vec<u8>, String> {
    let memory = Memory::new();
    let [input, output] = ["input", "output"].map(|name| memory.allocate(name, 256, 0));
    memory.write(input, &[0x11; 256]).unwrap();
    memory.write(output, &[0; 256]).unwrap();
    let launch = Launch::new("copies", 1, 32, Copies::emulate).shared(Copies::INFO.shared_bytes);
    let launch = launch.arguments(&[input, 14, output, 14, u64::from(which)]);
    GridRun::new(&memory, launch, Options::check(1)).and_then(GridRun::run).map_err(|fault| fault.to_string())?;
    let mut words = vec![0; 32];
    memory.read(output, &mut words).unwrap();
    Ok(words)
}

#[track_caller]
fn refused(which: u32, part: &str) {
    let text = run(which).expect_err("the copy leaves its range");
    assert!(text.contains(part), "no {part:?} in:\n{text}");
}

#[test]
fn the_array_in_shared_memory_bounds_a_copy() {
    refused(LOAD_SHARED, "index 11 of `six` of `Cells`, which has length 6");
    refused(STORE_SHARED, "index 11 of `six` of `Cells`, which has length 6");
    refused(ASYNC_SHARED, "index 7 of `six` of `Cells`, which has length 6");
    refused(WORD_SHARED, "index 6 of `six` of `Cells`, which has length 6");
}

#[test]
fn the_view_in_device_memory_bounds_a_copy() {
    refused(LOAD_GLOBAL, "index 19 of `input`, which has length 14");
    refused(STORE_GLOBAL, "index 19 of `output`, which has length 14");
    refused(ASYNC_GLOBAL, "index 15 of `input`, which has length 14");
    refused(PAIR_GLOBAL, "index 15 of `input`, which has length 14");
}

#[test]
fn nothing_is_read_beyond_what_is_valid() {
    let expected = [[0x11; 8].as_slice(), &[0; 24]].concat();
    assert_eq!(run(NOTHING), Ok(expected));
}
