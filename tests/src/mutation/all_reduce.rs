//! Mutants of small sums in one launch: two ranks' launches under way together.

use oxtile_emulator::mutation::Outcome;
use oxtile_kernels::all_reduce::{AllReduce, AllReduceArgs, LANES, MailArgument};
use oxtile_kernels::gemm::FusionArgument;
use oxtile_tile::arrivals::{LINE, SignalsArgument, WaitsArgument};
use oxtile_tile::launch::{BufferAccess, DeviceFlags, DeviceTable};
use oxtile_tile::num::bf16;

use super::Job;
use super::device::{Device, Elements};
use super::gemm::values;

pub const JOBS: &[Job] = &[Job { name: "all_reduce", run: all_reduce, equivalents: &[] }];

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
    epochs: Elements<u64>,
}

/// Two calls, which take another place each.
fn all_reduce(device: &Device) -> Result<Vec<u32>, Outcome> {
    let side = |rank: u64| Side {
        part: device.upload("part", &values((1 + rank) * LEN)[(rank * LEN / 2) as usize..]),
        sum: device.upload("sum", &values(LEN)),
        inbox: device.upload("inbox", &vec![0; (RANKS * REGION / 2) as usize]),
        epochs: device.upload("epochs", &vec![0; 2 * LANES as usize]),
    };
    let (mut sides, bias) = ([side(0), side(1)], device.upload::<bf16>("bias", &values(COLUMNS)));
    let lines = [0, 1].map(|_| device.upload::<u64>("lines", &vec![0; 2 * LINE as usize * (1 + (RANKS as usize) * LANES as usize)]));
    let table = |entries: [[u64; 2]; 2]| {
        let words: Vec<u32> = entries.iter().flatten().flat_map(|word| [*word as u32, (word >> 32) as u32]).collect();
        device.upload::<u64>("table", &words)
    };
    let all_lines = table(lines.each_ref().map(|lines| [lines.address, lines.length]));
    let inboxes = sides.each_ref().map(|side| side.inbox.address);
    let entries = [0, 1].map(|me| table(inboxes.map(|inbox| [inbox + 2 * me * REGION, REGION])));
    let ranks = device.upload::<u32>("ranks", &[0, 1]);
    let access = ranks.view().access("slots");
    let slots =
        [0, 1].map(|me| inboxes.map(|inbox| BufferAccess { address: inbox + 2 * me * REGION, bytes: 2 * REGION, writes: true, ..access }));
    for _ in 0..2 {
        // SAFETY: flags alone lie in the lines.
        let flags = unsafe { lines.each_ref().map(|lines| DeviceFlags::new(lines.view()).access("lines")) };
        let mut args = sides.iter_mut().zip(0..).map(|(Side { part, sum, inbox, epochs }, me)| AllReduceArgs {
            part: part.view(),
            sum: sum.view_mut(),
            columns: COLUMNS as u32,
            mail: MailArgument {
                // SAFETY: each entry is a view that the accesses cover.
                slots: unsafe { DeviceTable::from_raw(entries[me as usize].view(), &slots[me as usize]) },
                inbox: inbox.view_mut(),
                ranks: ranks.view(),
                epochs: epochs.view_mut(),
                slot: SLOT as u32,
                each: (LEN / COLUMNS) as u32,
                me,
            },
            // SAFETY: as above.
            waits: WaitsArgument { lines: unsafe { DeviceFlags::new(lines[me as usize].view()) }, first: 1, patience: 1 << 40 },
            // SAFETY: as above.
            signals: SignalsArgument {
                // SAFETY: each entry is the lines of a rank, which the accesses cover.
                lines: unsafe { DeviceTable::from_raw(all_lines.view(), &flags) },
                first: 1 + me,
                stride: RANKS as u32,
            },
            fusion: FusionArgument { bias: Some(bias.view()), a_scale: None, b_scale: None, alpha: 0.5, beta: 0.0, gelu: true },
        });
        let both = [args.next().expect("there are two"), args.next().expect("there are two")];
        drop(args);
        device.launch_together::<AllReduce<bf16>>(both)?;
    }
    let found = sides.iter().flat_map(|side| [device.download(&side.sum), device.download(&side.inbox), device.download(&side.epochs)]);
    Ok(found.flatten().collect())
}
