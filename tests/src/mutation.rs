//! Mutants of the shipped kernels and of the conformance kernels: each synchronisation site is skipped or
//! miscounted in turn, and the emulator must report it. The score of each kernel is printed.

mod gemm;

use std::sync::Arc;

use libtest_mimic::Trial;
use oxtile_conformance::{THREADS, copies::*, exchange::*, memory::*, order::*};
use oxtile_emulator::mutation::{self, Change, Equivalent, Outcome};
use oxtile_emulator::tensor_map::{self, Swizzle, TensorMap};
use oxtile_emulator::{GridRun, Launch, Memory, Options};
use oxtile_kernels::amax::{Amax, AmaxArgs, MultiAmax, MultiAmaxArgs, NO_SLOT};
use oxtile_kernels::copy::{CopyWords, CopyWordsArgs};
use oxtile_kernels::fp8::*;
use oxtile_kernels::interleave::*;
use oxtile_kernels::mxfp8::{
    Mxfp8CastBoth, Mxfp8CastBothArgs, Mxfp8CastRows, Mxfp8CastRowsArgs, Mxfp8DequantizeRows, Mxfp8DequantizeRowsArgs,
};
use oxtile_kernels::nvfp4::{Nvfp4CastRows, Nvfp4CastRowsArgs, Nvfp4DequantizeRows, Nvfp4DequantizeRowsArgs};
use oxtile_tile::launch::{
    ArgumentWords, DeviceLimits, DeviceTable, DeviceTensorMap, DeviceTensorMapMut, DeviceView, DeviceViewMut, Kernel, KernelArgs,
};
use oxtile_tile::num::{Pod, bf16, e4m3, ue8m0};

use crate::times;

/// Seeds after which a mutant that was not reported has survived.
const SEEDS: u64 = 12;

/// A kernel with its inputs, and the words it writes.
struct Job {
    name: &'static str,
    run: fn(&Device) -> Result<Vec<u32>, Outcome>,
    equivalents: &'static [Equivalent<'static>],
}

/// Waiting for more groups than needed is only slower.
const STRICTER_WAIT: Equivalent<'static> = Equivalent {
    matches: |mutation| mutation.site.operation.ends_with("_wait") && mutation.change == Change::CountDown,
    reason: "waits for one group more than needed: slower, never wrong",
};

const JOBS: &[Job] = &[
    Job { name: "copy_words", run: copy_words, equivalents: &[] },
    Job { name: "amax", run: amax, equivalents: &[] },
    Job { name: "multi_amax", run: multi_amax, equivalents: &[] },
    Job { name: "fp8_cast", run: fp8_cast, equivalents: &[] },
    Job { name: "fp8_cast_delayed", run: fp8_cast_delayed, equivalents: &[] },
    Job { name: "fp8_cast_transpose", run: fp8_cast_transpose, equivalents: &[] },
    Job { name: "fp8_cast_transpose_delayed", run: fp8_cast_transpose_delayed, equivalents: &[] },
    Job { name: "fp8_transpose", run: fp8_transpose, equivalents: &[] },
    Job { name: "fp8_update_scales", run: fp8_update_scales, equivalents: &[] },
    Job { name: "fp8_dequantize", run: fp8_dequantize, equivalents: &[] },
    Job { name: "mxfp8_cast_rows", run: mxfp8_cast_rows, equivalents: &[] },
    Job { name: "mxfp8_cast_both", run: mxfp8_cast_both, equivalents: &[] },
    Job { name: "mxfp8_dequantize_rows", run: mxfp8_dequantize_rows, equivalents: &[] },
    Job { name: "nvfp4_cast_rows", run: nvfp4_cast_rows, equivalents: &[] },
    Job { name: "nvfp4_dequantize_rows", run: nvfp4_dequantize_rows, equivalents: &[] },
    Job { name: "gemm", run: gemm::gemm, equivalents: gemm::EQUIVALENTS },
    Job { name: "interleave_rows", run: interleave_rows, equivalents: &[] },
    Job { name: "interleave_columns", run: interleave_columns, equivalents: &[] },
    Job { name: "shared_memory", run: shared_memory, equivalents: &[] },
    Job { name: "block_maximum", run: block_maximum, equivalents: &[] },
    Job { name: "named_barriers", run: named_barriers, equivalents: &[] },
    Job { name: "copy_async_ring", run: copy_async_ring, equivalents: &[STRICTER_WAIT] },
    Job { name: "bulk_pipeline", run: bulk_pipeline, equivalents: &[] },
    Job { name: "bulk_store", run: bulk_store, equivalents: &[] },
    Job { name: "copy_async_widths", run: copy_async_widths, equivalents: &[] },
    Job { name: "warp_round", run: warp_round, equivalents: &[] },
    Job { name: "mbarrier_phases", run: mbarrier_phases, equivalents: &[] },
    Job { name: "fences", run: fences, equivalents: &[] },
    Job { name: "tensor_boxes", run: tensor_boxes, equivalents: &[] },
];

/// One trial a kernel.
pub fn trials() -> Vec<Trial> {
    JOBS.iter().map(|job| times::trial(format!("mutation::{}", job.name), || score(job).map_err(Into::into))).collect()
}

fn score(job: &Job) -> Result<(), String> {
    let expected = match (job.run)(&Device::new(&Options::check(1))) {
        Ok(words) => words,
        Err(outcome) => return Err(format!("the unchanged kernel: {outcome:?}")),
    };
    let run = |options: &Options| {
        let device = Device::new(options);
        match (job.run)(&device) {
            Ok(words) if words == expected => Outcome::Passed(device.report.take()),
            Ok(_) => Outcome::WrongOutput("the output differs from the unchanged kernel's".to_owned()),
            Err(outcome) => outcome,
        }
    };
    let seeds: Vec<u64> = (1..=SEEDS).collect();
    let score = mutation::score(run, &seeds, job.equivalents).map_err(|e| e.to_string())?;
    eprintln!("mutation: {}: {score}", job.name);
    if score.is_complete() { Ok(()) } else { Err(score.to_string()) }
}

/// Emulated memory without a runtime around it: launches run at once, with the mutant's options.
struct Device {
    memory: Arc<Memory>,
    options: Options,
    report: std::cell::RefCell<oxtile_emulator::Report>,
}

static OWNER: () = ();
const LIMITS: DeviceLimits = DeviceLimits { multiprocessors: 1, shared_bytes_per_block: 227 * 1024 };

/// Elements in emulated memory.
struct Elements<T> {
    address: u64,
    length: u64,
    element: std::marker::PhantomData<T>,
}

impl<T: Pod> Elements<T> {
    fn view(&self) -> DeviceView<'_, T> {
        // SAFETY: the memory lives as long as the job's `Device`; the emulator checks every access.
        unsafe { DeviceView::from_raw(self.address, self.length, &OWNER) }
    }

    fn view_mut(&mut self) -> DeviceViewMut<'_, T> {
        // SAFETY: as `view`; the exclusive borrow is the only view.
        unsafe { DeviceViewMut::from_raw(self.address, self.length, &OWNER) }
    }
}

impl Device {
    fn new(options: &Options) -> Self {
        Self { memory: Memory::new(), options: options.clone(), report: Default::default() }
    }

    /// Uploads 32-bit words, to be seen as elements of `T`.
    fn upload<T: Pod>(&self, name: &str, words: &[u32]) -> Elements<T> {
        let bytes: Vec<u8> = words.iter().flat_map(|w| w.to_le_bytes()).collect();
        let address = self.memory.allocate(name, bytes.len() as u64, 0);
        self.memory.write(address, &bytes).expect("fresh memory");
        Elements { address, length: (bytes.len() / size_of::<T>()) as u64, element: std::marker::PhantomData }
    }

    fn download<T>(&self, elements: &Elements<T>) -> Vec<u32> {
        let mut bytes = vec![0; (elements.length * size_of::<T>() as u64) as usize];
        self.memory.read(elements.address, &mut bytes).expect("live memory");
        bytes.chunks_exact(4).map(|b| u32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect()
    }

    fn launch<K: Kernel>(&self, args: K::Args<'_>) -> Result<(), Outcome> {
        let grid = K::grid(&args, &LIMITS).expect("arguments that fit");
        let mut words = ArgumentWords::new();
        args.pack(&mut words);
        let mut launch = Launch::new(K::INFO.name, grid.x, K::INFO.threads, K::emulate)
            .arguments(words.as_slice())
            .shared(K::INFO.shared_bytes)
            .cluster(K::INFO.cluster);
        launch.grid = [grid.x, grid.y, grid.z];
        let run = GridRun::new(&self.memory, launch, self.options.clone()).map_err(Outcome::Faulted)?;
        let report = run.run().map_err(Outcome::Faulted)?;
        self.report.borrow_mut().merge(&report);
        Ok(())
    }
}

fn words(count: usize) -> Vec<u32> {
    let mut random = oxtile_tests::inputs::Random::new(4);
    (0..count).map(|_| random.bits() as u32 & 0x7f7f_7f7f).collect()
}

fn copy_words(device: &Device) -> Result<Vec<u32>, Outcome> {
    let (source, mut target) = (device.upload("source", &words(5000)), device.upload("target", &[0; 5000]));
    device.launch::<CopyWords>(CopyWordsArgs { source: source.view(), target: target.view_mut() })?;
    Ok(device.download(&target))
}

fn amax(device: &Device) -> Result<Vec<u32>, Outcome> {
    let (input, mut output) = (device.upload::<bf16>("input", &words(9000)), device.upload("output", &[0]));
    device.launch::<Amax<bf16>>(AmaxArgs { input: input.view(), output: output.view_mut() })?;
    Ok(device.download(&output))
}

/// More tensors than blocks, so that a block meets several.
fn multi_amax(device: &Device) -> Result<Vec<u32>, Outcome> {
    let tensors: Vec<Elements<bf16>> = [300, 9000, 20, 70, 100, 8200, 40, 50].map(|n| device.upload("tensor", &words(n))).into();
    let entries = tensors.iter().flat_map(|t| [t.address as u32, (t.address >> 32) as u32, t.length as u32, 0]);
    let entries: Elements<u64> = device.upload("tensors", &entries.collect::<Vec<_>>());
    let mut first = vec![0u32, 0];
    for tensor in &tensors {
        first.extend([first[first.len() - 2] + oxtile_kernels::amax::tiles::<bf16>(tensor.length) as u32, 0]);
    }
    let first: Elements<u64> = device.upload("first_tiles", &first);
    let slots: Vec<u32> = (0..8).flat_map(|i| [i, if i % 2 == 0 { 8 } else { NO_SLOT }]).collect();
    let (slots, mut outputs) = (device.upload("slots", &slots), device.upload("outputs", &[0; 9]));
    // SAFETY: the entries name live memory; nothing tracks owners here.
    let table = unsafe { DeviceTable::from_raw(entries.view(), &[]) };
    let args = MultiAmaxArgs { tensors: table, first_tiles: first.view(), slots: slots.view(), outputs: outputs.view_mut() };
    device.launch::<MultiAmax<bf16>>(args)?;
    Ok(device.download(&outputs))
}

/// Two CUDA blocks, the second with an incomplete vector.
fn fp8_cast(device: &Device) -> Result<Vec<u32>, Outcome> {
    let (input, amax) = (device.upload::<bf16>("input", &words(4610)), device.upload("amax", &[3f32.to_bits()]));
    let (mut data, mut scale_inverse) = (device.upload("data", &[0; 2305]), device.upload("scale_inverse", &[0]));
    device.launch::<Fp8Cast<bf16, e4m3>>(Fp8CastArgs {
        input: input.view(),
        amax: amax.view(),
        data: data.view_mut(),
        scale_inverse: scale_inverse.view_mut(),
        epsilon: 0.0,
        power_of_two: 0,
    })?;
    Ok([device.download(&data), device.download(&scale_inverse)].concat())
}

fn fp8_cast_delayed(device: &Device) -> Result<Vec<u32>, Outcome> {
    let (input, scale) = (device.upload::<bf16>("input", &words(4610)), device.upload("scale", &[3f32.to_bits()]));
    let (mut data, mut amax) = (device.upload("data", &[0; 2305]), device.upload("amax", &[0]));
    let mut scale_inverse = device.upload("scale_inverse", &[0]);
    device.launch::<Fp8CastDelayed<bf16, e4m3>>(Fp8CastDelayedArgs {
        input: input.view(),
        scale: scale.view(),
        data: data.view_mut(),
        scale_inverse: scale_inverse.view_mut(),
        amax: amax.view_mut(),
    })?;
    Ok([device.download(&data), device.download(&amax)].concat())
}

/// 160 rows of 144: four tiles, three of them at an edge.
fn fp8_cast_transpose(device: &Device) -> Result<Vec<u32>, Outcome> {
    let (input, amax) = (device.upload::<bf16>("input", &words(160 * 72)), device.upload("amax", &[3f32.to_bits()]));
    let (mut data, mut transposed) = (device.upload("data", &[0; 40 * 144]), device.upload("transposed", &[0; 40 * 144]));
    let mut scale_inverse = device.upload("scale_inverse", &[0]);
    device.launch::<Fp8CastTranspose<bf16, e4m3>>(Fp8CastTransposeArgs {
        input: input.view(),
        amax: amax.view(),
        data: data.view_mut(),
        transposed: transposed.view_mut(),
        scale_inverse: scale_inverse.view_mut(),
        rows: 160,
        columns: 144,
        epsilon: 0.0,
        power_of_two: 0,
    })?;
    Ok([device.download(&data), device.download(&transposed)].concat())
}

fn fp8_cast_transpose_delayed(device: &Device) -> Result<Vec<u32>, Outcome> {
    let (input, scale) = (device.upload::<bf16>("input", &words(160 * 72)), device.upload("scale", &[3f32.to_bits()]));
    let (mut data, mut transposed) = (device.upload("data", &[0; 40 * 144]), device.upload("transposed", &[0; 40 * 144]));
    let (mut scale_inverse, mut amax) = (device.upload("scale_inverse", &[0]), device.upload("amax", &[0]));
    device.launch::<Fp8CastTransposeDelayed<bf16, e4m3>>(Fp8CastTransposeDelayedArgs {
        input: input.view(),
        scale: scale.view(),
        data: data.view_mut(),
        transposed: transposed.view_mut(),
        scale_inverse: scale_inverse.view_mut(),
        amax: amax.view_mut(),
        rows: 160,
        columns: 144,
    })?;
    Ok([device.download(&data), device.download(&transposed), device.download(&amax)].concat())
}

fn fp8_transpose(device: &Device) -> Result<Vec<u32>, Outcome> {
    let (data, mut transposed) = (device.upload::<e4m3>("data", &words(40 * 144)), device.upload("transposed", &[0; 40 * 144]));
    device.launch::<Fp8Transpose<e4m3>>(Fp8TransposeArgs {
        data: data.view(),
        transposed: transposed.view_mut(),
        rows: 160,
        columns: 144,
    })?;
    Ok(device.download(&transposed))
}

/// Histories of 70 steps, so that a warp meets rows that another one rolls, of 3 tensors.
fn fp8_update_scales(device: &Device) -> Result<Vec<u32>, Outcome> {
    let entries: Vec<u32> = (1..=210).map(|i| (i as f32).to_bits()).collect();
    let (mut history, agreed) = (device.upload("history", &entries), device.upload("agreed", &[0; 0]));
    let (mut scales, mut scale_inverses) = (device.upload("scales", &[0; 3]), device.upload("scale_inverses", &[0; 3]));
    device.launch::<Fp8UpdateScales>(Fp8UpdateScalesArgs {
        history: history.view_mut(),
        agreed: agreed.view(),
        scales: scales.view_mut(),
        scale_inverses: scale_inverses.view_mut(),
        length: 70,
        scaled_largest: 448.0,
        most_recent: 0,
    })?;
    Ok([device.download(&history), device.download(&scales), device.download(&scale_inverses)].concat())
}

fn fp8_dequantize(device: &Device) -> Result<Vec<u32>, Outcome> {
    let (data, scale_inverse) = (device.upload("data", &words(1201)), device.upload("scale_inverse", &[3f32.to_bits()]));
    let mut output = device.upload("output", &[0; 2402]);
    device.launch::<Fp8Dequantize<e4m3, bf16>>(Fp8DequantizeArgs {
        data: data.view(),
        scale_inverse: scale_inverse.view(),
        output: output.view_mut(),
    })?;
    Ok(device.download(&output))
}

fn mxfp8_cast_rows(device: &Device) -> Result<Vec<u32>, Outcome> {
    let input: Elements<bf16> = device.upload("input", &words(1200));
    let (mut data, mut scales) = (device.upload("data", &[0; 600]), device.upload("scales", &[0; 19]));
    let mut trimmed = Elements::<ue8m0> { address: scales.address, length: 75, element: std::marker::PhantomData };
    device.launch::<Mxfp8CastRows<bf16, e4m3>>(Mxfp8CastRowsArgs {
        input: input.view(),
        data: data.view_mut(),
        scales: trimmed.view_mut(),
    })?;
    scales = Elements::<ue8m0> { length: 76, ..scales };
    Ok([device.download(&data), device.download(&scales)].concat())
}

/// 40 rows of 128: whole tiles, and tiles at an edge.
fn mxfp8_cast_both(device: &Device) -> Result<Vec<u32>, Outcome> {
    let input: Elements<bf16> = device.upload("input", &words(2560));
    let (mut row_data, mut row_scales) = (device.upload("row_data", &[0; 1280]), device.upload("row_scales", &[0; 40]));
    let (mut column_data, mut column_scales) = (device.upload("column_data", &[0; 1280]), device.upload("column_scales", &[0; 64]));
    device.launch::<Mxfp8CastBoth<bf16, e4m3>>(Mxfp8CastBothArgs {
        input: input.view(),
        row_data: row_data.view_mut(),
        row_scales: row_scales.view_mut(),
        column_data: column_data.view_mut(),
        column_scales: column_scales.view_mut(),
        columns: 128,
    })?;
    Ok([device.download(&row_data), device.download(&row_scales), device.download(&column_data), device.download(&column_scales)].concat())
}

fn mxfp8_dequantize_rows(device: &Device) -> Result<Vec<u32>, Outcome> {
    let (data, scales) = (device.upload("data", &words(600)), device.upload("scales", &words(19)));
    let trimmed = Elements::<ue8m0> { length: 75, ..scales };
    let mut output = device.upload("output", &[0; 1200]);
    device.launch::<Mxfp8DequantizeRows<e4m3, bf16>>(Mxfp8DequantizeRowsArgs {
        data: data.view(),
        scales: trimmed.view(),
        output: output.view_mut(),
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

/// Two CUDA blocks, the second with four blocks of elements.
fn nvfp4_cast_rows(device: &Device) -> Result<Vec<u32>, Outcome> {
    let (input, amax) = (device.upload::<bf16>("input", &words(260 * 8)), device.upload("amax", &[3f32.to_bits()]));
    let (mut data, mut scales) = (device.upload("data", &[0; 260 * 2]), device.upload("scales", &[0; 65]));
    device.launch::<Nvfp4CastRows<bf16>>(Nvfp4CastRowsArgs {
        input: input.view(),
        amax: amax.view(),
        data: data.view_mut(),
        scales: scales.view_mut(),
    })?;
    Ok([device.download(&data), device.download(&scales)].concat())
}

fn nvfp4_dequantize_rows(device: &Device) -> Result<Vec<u32>, Outcome> {
    let (data, scales) = (device.upload("data", &words(520)), device.upload("scales", &words(65)));
    let (amax, mut output) = (device.upload("amax", &[3f32.to_bits()]), device.upload("output", &[0; 2080]));
    device.launch::<Nvfp4DequantizeRows<bf16>>(Nvfp4DequantizeRowsArgs {
        data: data.view(),
        scales: scales.view(),
        amax: amax.view(),
        output: output.view_mut(),
    })?;
    Ok(device.download(&output))
}

/// There and back, one tile and parts of others.
fn interleave_rows(device: &Device) -> Result<Vec<u32>, Outcome> {
    let (outer, blocks) = (130, 6);
    let compact = device.upload::<ue8m0>("compact", &words(195));
    let (mut there, mut back) = (device.upload("interleaved", &[0; 512]), device.upload("back", &[0; 195]));
    device.launch::<InterleaveRows<ue8m0>>(InterleaveRowsArgs { compact: compact.view(), interleaved: there.view_mut(), outer, blocks })?;
    device.launch::<DeinterleaveRows<ue8m0>>(DeinterleaveRowsArgs {
        interleaved: there.view(),
        compact: back.view_mut(),
        outer,
        blocks,
    })?;
    Ok([device.download(&there), device.download(&back)].concat())
}

fn interleave_columns(device: &Device) -> Result<Vec<u32>, Outcome> {
    let (outer, blocks) = (130, 6);
    let compact = device.upload::<ue8m0>("compact", &words(195));
    let (mut there, mut back) = (device.upload("interleaved", &[0; 512]), device.upload("back", &[0; 195]));
    device.launch::<InterleaveColumns<ue8m0>>(InterleaveColumnsArgs {
        compact: compact.view(),
        interleaved: there.view_mut(),
        outer,
        blocks,
    })?;
    device.launch::<DeinterleaveColumns<ue8m0>>(DeinterleaveColumnsArgs {
        interleaved: there.view(),
        compact: back.view_mut(),
        outer,
        blocks,
    })?;
    Ok([device.download(&there), device.download(&back)].concat())
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
