//! Mutants of the conformance kernels that synchronise.

use oxtile_conformance::{THREADS, copies::*, exchange::*, memory::*, order::*, reductions::*};
use oxtile_emulator::mutation::{Change, Equivalent, Outcome};
use oxtile_emulator::tensor_map::{self, Swizzle, TensorMap};
use oxtile_tile::arrivals::{LINE, SignalsArgument, WaitsArgument};
use oxtile_tile::launch::{DeviceFlags, DeviceTable, DeviceTensorMap, DeviceTensorMapMut};

use super::Job;
use super::device::{Device, Elements, words};

/// Waiting for more groups than needed is only slower.
pub(super) const STRICTER_WAIT: Equivalent<'static> = Equivalent {
    matches: |mutation| mutation.site.operation.ends_with("_wait") && mutation.change == Change::CountDown,
    reason: "waits for one group more than needed: slower, never wrong",
};

pub const JOBS: &[Job] = &[
    Job { name: "shared_memory", run: shared_memory, equivalents: &[] },
    Job { name: "block_maximum", run: block_maximum, equivalents: &[] },
    Job { name: "row_reductions", run: row_reductions, equivalents: &[] },
    Job { name: "named_barriers", run: named_barriers, equivalents: &[] },
    Job { name: "copy_async_ring", run: copy_async_ring, equivalents: &[STRICTER_WAIT] },
    Job { name: "bulk_pipeline", run: bulk_pipeline, equivalents: &[] },
    Job { name: "bulk_store", run: bulk_store, equivalents: &[] },
    Job { name: "copy_async_widths", run: copy_async_widths, equivalents: &[] },
    Job { name: "warp_round", run: warp_round, equivalents: &[] },
    Job { name: "mbarrier_phases", run: mbarrier_phases, equivalents: &[] },
    Job { name: "fences", run: fences, equivalents: &[] },
    Job { name: "tensor_boxes", run: tensor_boxes, equivalents: &[] },
    Job { name: "arriving_chunk", run: arriving_chunk, equivalents: &[] },
];

fn row_reductions(device: &Device) -> Result<Vec<u32>, Outcome> {
    let ones = vec![0x3f80_3f81; ROW as usize / 2];
    let (input, mut doubled) = (device.upload("input", &ones), device.upload("doubled", &ones));
    let (mut pairs, mut output) = (device.upload("pairs", &ones), device.upload("output", &[0; (THREADS * ROW_WORDS) as usize]));
    device.launch::<RowReductions>(RowReductionsArgs {
        input: input.view(),
        doubled: doubled.view_mut(),
        pairs: pairs.view_mut(),
        output: output.view_mut(),
    })?;
    Ok(device.download(&output))
}

fn fences(device: &Device) -> Result<Vec<u32>, Outcome> {
    let zeros = || device.upload("zeros", &[0; SCOPES as usize]);
    let (input, mut mailbox, mut flags, mut output) = (device.upload("input", &words(SCOPES as usize)), zeros(), zeros(), zeros());
    device.launch::<Fences>(FencesArgs {
        input: input.view(),
        mailbox: mailbox.view_mut(),
        flags: flags.view_mut(),
        output: output.view_mut(),
    })?;
    Ok(device.download(&output))
}

/// Both ranks of a chunk that arrives, as the blocks of one launch.
fn arriving_chunk(device: &Device) -> Result<Vec<u32>, Outcome> {
    let (input, mut mailbox) = (device.upload("input", &words(THREADS as usize)), device.upload("mailbox", &[0; THREADS as usize]));
    let lines = device.upload::<u64>("lines", &[0; 2 * (ARRIVING_LINES * LINE) as usize]);
    let entry = [lines.address, lines.length].map(|word| [word as u32, (word >> 32) as u32]);
    let (table, mut output) =
        (device.upload::<u64>("table", entry.as_flattened()), device.upload("output", &[0; ARRIVING_OUTPUT as usize]));
    // SAFETY: flags alone lie there; nothing tracks owners here.
    let flags = unsafe { DeviceFlags::new(lines.view()) };
    let members = [flags.access("signals")];
    // SAFETY: the entry is the lines.
    let signalled = unsafe { DeviceTable::from_raw(table.view(), &members) };
    device.launch::<ArrivingChunk>(ArrivingChunkArgs {
        input: input.view(),
        mailbox: mailbox.view_mut(),
        waits: WaitsArgument { lines: flags, first: 2, patience: 1 << 40 },
        signals: SignalsArgument { lines: signalled, first: 2, stride: 2 },
        output: output.view_mut(),
        hurried: false,
    })?;
    Ok(device.download(&output))
}

fn tensor_boxes(device: &Device) -> Result<Vec<u32>, Outcome> {
    let (rows, columns) = (19, 76);
    let (input, output) = (device.upload::<u32>("input", &words(19 * 76)), device.upload::<u32>("output", &[0; 19 * 76]));
    let map = |of: &Elements<u32>| {
        let map = TensorMap {
            address: of.address,
            element_bytes: 4,
            dimensions: vec![columns, rows],
            strides: vec![columns * 4],
            box_dimensions: vec![BOX[1] as u32, BOX[0] as u32],
            swizzle: Swizzle::None,
        };
        let bytes = tensor_map::encode(&map).expect("a map within the limits");
        let words: Vec<u32> = bytes.as_chunks::<4>().0.iter().map(|b| u32::from_le_bytes(*b)).collect();
        device.upload::<u64>("map", &words)
    };
    let (source, target) = (map(&input), map(&output));
    // SAFETY: the maps were encoded for these matrices and boxes; allocations are aligned to 256 bytes.
    let args = unsafe {
        TensorBoxesArgs {
            input: DeviceTensorMap::from_raw(source.view().access("map"), input.view().access("matrix")),
            output: DeviceTensorMapMut::from_raw(target.view().access("map"), output.view().access("matrix")),
            rows: rows as u32,
            columns: columns as u32,
        }
    };
    device.launch::<TensorBoxes>(args)?;
    Ok(device.download(&output))
}

/// A conformance kernel of one input and one output of words.
macro_rules! one_to_one {
    ($($function:ident: $kernel:ident, $args:ident, $input:expr => $output:expr;)*) => { $(
        fn $function(device: &Device) -> Result<Vec<u32>, Outcome> {
            let (input, mut output) = (device.upload("input", &words($input as usize)), device.upload("output", &vec![0; $output as usize]));
            device.launch::<$kernel>($args { input: input.view(), output: output.view_mut() })?;
            Ok(device.download(&output))
        }
    )* };
}

one_to_one! {
    shared_memory: SharedMemory, SharedMemoryArgs, THREADS => 3 * THREADS;
    block_maximum: BlockMaximum, BlockMaximumArgs, THREADS => 2;
    named_barriers: NamedBarriers, NamedBarriersArgs, THREADS => 256;
    copy_async_ring: CopyAsyncRing, CopyAsyncRingArgs, 6 * STAGE => 6 * THREADS;
    bulk_pipeline: BulkPipeline, BulkPipelineArgs, 6 * STAGE => 6 * 96;
    bulk_store: BulkStore, BulkStoreArgs, STAGE => 2 * STAGE;
    copy_async_widths: CopyAsyncWidths, CopyAsyncWidthsArgs, STAGE => 7 * THREADS;
    warp_round: WarpRound, WarpRoundArgs, THREADS => THREADS;
    mbarrier_phases: MbarrierPhases, MbarrierPhasesArgs, 2 * PART => 1 + 2 * THREADS;
}
