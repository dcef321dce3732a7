//! Mutants of the kernels of packed sequences that ranks share.

use oxtile_emulator::mutation::Outcome;
use oxtile_kernels::attention::FAR;
use oxtile_kernels::thd::*;

use super::Job;
use super::device::{Device, Elements, words};

pub const JOBS: &[Job] = &[
    Job { name: "step_sequences", run: step_sequences, equivalents: &[] },
    Job { name: "reorder", run: reorder, equivalents: &[] },
    Job { name: "reorder_numbers", run: reorder_numbers, equivalents: &[] },
    Job { name: "partition_indices", run: partition_indices, equivalents: &[] },
    Job { name: "thd_halves", run: halves, equivalents: &[] },
    Job { name: "thd_corrections", run: corrections, equivalents: &[] },
];

/// More sequences than a block has threads, so that the totals of a piece are written after those of the one before are read.
fn step_sequences(device: &Device) -> Result<Vec<u32>, Outcome> {
    const BATCHES: u32 = 140;
    let sums = |rows: u32| -> Vec<u32> { (0..=BATCHES).map(|i| rows * i).collect() };
    let (ends, offsets) = (device.upload("cu_seqlens", &sums(5)), device.upload("cu_seqlens_padded", &sums(8)));
    let mut arrays = device.upload("arrays", &[0; 4 * (2 * BATCHES as usize + 1)]);
    let mut diagonals = device.upload("diagonals", &[0; 2 * BATCHES as usize]);
    let packed = || PackedArgument { cu_seqlens: ends.view(), cu_seqlens_padded: offsets.view() };
    device.launch::<StepSequences>(StepSequencesArgs {
        queries: packed(),
        keys: packed(),
        arrays: arrays.view_mut(),
        diagonals: diagonals.view_mut(),
        kind: StepKeys::Whole as u32,
        share: Share { world: 2, rank: 1, is_zigzag: true },
        bounds: Bounds { left: FAR, right: 0 },
    })?;
    Ok([device.download(&arrays), device.download(&diagonals)].concat())
}

const OFFSETS: [u32; 4] = [0, 8, 8, 24];
/// Of the whole tensor, with rows after the last sequence.
const ROWS: u32 = 32;
const SHARE: Share = Share { world: 2, rank: 1, is_zigzag: true };
/// Of the tensor of a rank.
const OF_RANK: u32 = ROWS / 2;
const WORDS: u32 = 8;

fn reorder(device: &Device) -> Result<Vec<u32>, Outcome> {
    let extent = Extent { rows: ROWS, words: WORDS };
    let (source, offsets) = (device.upload("source", &words((ROWS * WORDS) as usize)), device.upload("cu_seqlens_padded", &OFFSETS));
    let mut target = device.upload("target", &[0; (ROWS * WORDS) as usize]);
    let (view, of_target) = (source.view(), target.view_mut());
    let args = ReorderArgs {
        source: view,
        target: of_target,
        cu_seqlens_padded: offsets.view(),
        team: Team { world: SHARE.world, is_zigzag: SHARE.is_zigzag, count: 1 },
        extent,
        to_natural: true,
    };
    device.launch::<Reorder>(args)?;
    Ok(device.download(&target))
}

fn reorder_numbers(device: &Device) -> Result<Vec<u32>, Outcome> {
    let heads = 2;
    let (source, offsets) = (device.upload("source", &words((ROWS * heads) as usize)), device.upload("cu_seqlens_padded", &OFFSETS));
    let mut target = device.upload("target", &[0; (ROWS * 2) as usize]);
    let (view, of_target, sums) = (source.view(), target.view_mut(), offsets.view());
    let args = ReorderNumbersArgs {
        source: view,
        target: of_target,
        cu_seqlens_padded: sums,
        team: Team { world: SHARE.world, is_zigzag: SHARE.is_zigzag, count: 1 },
        rows: ROWS,
        heads,
        to_natural: true,
    };
    device.launch::<ReorderNumbers>(args)?;
    Ok(device.download(&target))
}

fn partition_indices(device: &Device) -> Result<Vec<u32>, Outcome> {
    let (offsets, mut indices) = (device.upload("cu_seqlens_padded", &OFFSETS), device.upload("indices", &[0; OF_RANK as usize]));
    let args = PartitionIndicesArgs { indices: indices.view_mut(), cu_seqlens_padded: offsets.view(), share: SHARE, rows: ROWS };
    device.launch::<PartitionIndices>(args)?;
    Ok(device.download(&indices))
}

fn halves(device: &Device) -> Result<Vec<u32>, Outcome> {
    let [whole, half] = [OF_RANK, OF_RANK / 2].map(|rows| Extent { rows, words: WORDS });
    let source = device.upload("source", &words((OF_RANK * WORDS) as usize));
    let (offsets, ends) = (device.upload("cu_seqlens_padded", &OFFSETS), device.upload("ends", &[0, 3, 3, 8]));
    let mut of_half = device.upload("half", &[0; (OF_RANK / 2 * WORDS) as usize]);
    let mut target = device.upload("target", &[0; (OF_RANK * WORDS) as usize]);
    let args = ReadHalfArgs {
        whole: source.view(),
        half: of_half.view_mut(),
        cu_seqlens_padded: offsets.view(),
        world: 2,
        extent: half,
        is_late: true,
    };
    device.launch::<ReadHalf>(args)?;
    let (source, offsets) = (source.view(), offsets.view());
    device.launch::<CopyValid>(CopyValidArgs { source, target: target.view_mut(), ends: ends.view(), offsets, extent: whole })?;
    Ok([device.download(&of_half), device.download(&target)].concat())
}

fn late_halves(offsets: &Elements<u32>) -> StepRowsArgument<'_> {
    StepRowsArgument { cu_seqlens_padded: offsets.view(), world: 2, part: Part::Late as u32 }
}

fn corrections(device: &Device) -> Result<Vec<u32>, Outcome> {
    const HALF: u32 = OF_RANK / 2;
    let rows = HeadRows { heads: 2, rows: OF_RANK, step_rows: HALF, is_packed: true };
    let small = |count: u32| words(count as usize).into_iter().map(|word| word & 0x3fff_ffff).collect::<Vec<_>>();
    let offsets = device.upload("cu_seqlens_padded", &OFFSETS);
    let (mut lse, mut step_lse) = (device.upload("lse", &small(2 * OF_RANK)), device.upload("step_lse", &[0; 2 * HALF as usize]));
    device.launch::<LseReadHalf>(LseReadHalfArgs {
        whole: lse.view(),
        part: step_lse.view_mut(),
        sequences: late_halves(&offsets),
        rows,
    })?;
    device.launch::<LseCorrect>(LseCorrectArgs { whole: lse.view_mut(), step: step_lse.view(), sequences: late_halves(&offsets), rows })?;
    let (step, mut out) = (device.upload("step", &small(HALF * 32)), device.upload("out", &small(OF_RANK * 32)));
    device.launch::<OutCorrect<f32, f32>>(OutCorrectArgs {
        out: out.view_mut(),
        step: step.view(),
        lse: lse.view(),
        step_lse: step_lse.view(),
        sequences: late_halves(&offsets),
        rows,
        size: 16,
    })?;
    let changes = Changes { early: Change::None as u32, late: Change::Add as u32 };
    let (gradient, step) = (out.view_mut(), step.view());
    device.launch::<GradCorrect<f32>>(GradCorrectArgs {
        gradient,
        step,
        sequences: late_halves(&offsets),
        changes,
        step_rows: HALF,
        width: 32,
    })?;
    Ok([device.download(&lse), device.download(&out)].concat())
}
