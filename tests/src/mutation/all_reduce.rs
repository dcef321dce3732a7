//! Mutants of small sums in one launch: two ranks' launches under way together.

use oxtile_emulator::mutation::{Change, Equivalent, Outcome};
use oxtile_kernels::all_reduce::{AllReduce, AllReduceArgs, LANES, MailArgument};
use oxtile_kernels::gemm::FusionArgument;
use oxtile_tile::arrivals::{LINE, WaitsArgument};
use oxtile_tile::launch::{BufferAccess, DeviceFlags, DeviceSlots, DeviceTable, Meanwhile};
use oxtile_tile::num::bf16;

use super::Job;
use super::device::{Device, Elements};
use super::gemm::values;

pub const JOBS: &[Job] = &[Job {
    name: "all_reduce",
    run: all_reduce,
    equivalents: &[
        Equivalent {
            matches: |mutation| mutation.change == Change::Skip && mutation.site.operation == "barrier_sync",
            reason: "either barrier keeps the count of calls until all have read it; both are for the word of a wait that is not answered, of which there is none here (`a_small_sum_without_a_part_is_nan`)",
        },
        Equivalent {
            matches: |mutation| mutation.change == Change::Skip && mutation.site.operation == "acquire",
            reason: "a verdict is looked at, and nothing is read because of it",
        },
    ],
}];

const RANKS: u64 = 2;
const COLUMNS: u64 = 8;
const LEN: u64 = 3 * COLUMNS;
/// One lane: a device of mutants holds one block.
const SLOT: u64 = LEN;
/// Elements of the slots of a source at a rank.
const REGION: u64 = 2 * LANES as u64 * SLOT;

/// What a rank has.
struct Side {
    part: Elements<bf16>,
    sum: Elements<bf16>,
    inbox: Elements<bf16>,
    calls: Elements<u64>,
}

/// Three calls, which take the two places in turn.
fn all_reduce(device: &Device) -> Result<Vec<u32>, Outcome> {
    let side = |rank: u64| Side {
        part: device.upload("part", &values((1 + rank) * LEN)[(rank * LEN / 2) as usize..]),
        sum: device.upload("sum", &values(LEN)),
        inbox: device.upload("inbox", &vec![u32::MAX; (RANKS * REGION / 2) as usize]),
        calls: device.upload("calls", &vec![0; 2 * LANES as usize]),
    };
    let (mut sides, bias) = ([side(0), side(1)], device.upload::<bf16>("bias", &values(COLUMNS)));
    let lines = [0, 1].map(|_| device.upload::<u64>("lines", &vec![0; 2 * LINE as usize * (1 + RANKS as usize)]));
    let table = |entries: [[u64; 2]; 2]| {
        let words: Vec<u32> = entries.iter().flatten().flat_map(|word| [*word as u32, (word >> 32) as u32]).collect();
        device.upload::<u64>("table", &words)
    };
    let inboxes = sides.each_ref().map(|side| side.inbox.address);
    let entries = [0, 1].map(|me| table(inboxes.map(|inbox| [inbox + 2 * me * REGION, REGION])));
    let ranks = device.upload::<u32>("ranks", &[0, 1]);
    let access = BufferAccess { bytes: 2 * REGION, writes: true, meanwhile: Meanwhile::Slots, ..ranks.view().access("slots") };
    let slots = [0, 1].map(|me| inboxes.map(|inbox| BufferAccess { address: inbox + 2 * me * REGION, ..access }));
    for call in 0..3_u32 {
        // Another part in each call, one of them with NaNs of all bits.
        for (rank, side) in (0_u32..).zip(&mut sides) {
            let mut part =
                values(2 * (1 + u64::from(call)) * LEN)[(LEN / 2 * u64::from(2 * call + rank)) as usize..][..LEN as usize / 2].to_vec();
            part[call as usize] |= 0xffff << (16 * rank);
            side.part = device.upload("part", &part);
        }
        let mut args = sides.iter_mut().zip(0..).map(|(Side { part, sum, inbox, calls }, me)| AllReduceArgs {
            part: part.view(),
            sum: sum.view_mut(),
            columns: COLUMNS as u32,
            mail: MailArgument {
                // SAFETY: each entry is a view that the accesses cover.
                slots: unsafe { DeviceTable::from_raw(entries[me as usize].view(), &slots[me as usize]) },
                // SAFETY: the launches use it as slots alone.
                inbox: unsafe { DeviceSlots::new(inbox.view()) },
                ranks: ranks.view(),
                calls: calls.view_mut(),
                slot: SLOT as u32,
                each: (LEN / COLUMNS) as u32,
                me,
            },
            // SAFETY: flags alone lie in the lines.
            waits: WaitsArgument { lines: unsafe { DeviceFlags::new(lines[me as usize].view()) }, first: 1, patience: 1 << 40 },
            fusion: FusionArgument { bias: Some(bias.view()), a_scale: None, b_scale: None, alpha: 0.5, beta: 0.0, gelu: true },
        });
        let both = [args.next().expect("there are two"), args.next().expect("there are two")];
        drop(args);
        device.launch_together::<AllReduce<bf16>>(both)?;
    }
    let found = sides.iter().flat_map(|side| [device.download(&side.sum), device.download(&side.inbox), device.download(&side.calls)]);
    Ok(found.flatten().collect())
}
