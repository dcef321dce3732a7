//! Every operation of the DSL: the emulator's bytes against the GPU's, which are committed.

use oxtile::tensor::{DeviceTable, TensorMap, TensorMapMut};
use oxtile::{Buffer, HostElement, Runtime, Stream};
use oxtile_conformance::{
    THREADS, cluster::*, convert::*, copies::*, exchange::*, formats::*, fragments::*, matrix::*, memory::*, order::*, reductions::*,
    roles::*, turned::*, views::*, warp_matrix::*,
};
use oxtile_tests::inputs::{Dtype, Random, Scenario, codes};
use oxtile_tile::arrivals::{LINE, SignalsArgument, WaitsArgument};
use oxtile_tile::flag::POISON;
use oxtile_tile::launch::{DeviceFlags, Kernel, Signature};
use oxtile_tile::num::{Pod, bf16};

use super::conformance_parameters::nested;
use crate::case::{Case, Outcome, Size, equal, stream, text};
use crate::golden;

pub(super) type Bytes = Result<Vec<u8>, String>;

/// Runs a kernel and returns what it wrote.
type Written = fn(&Runtime, &Stream) -> Bytes;

pub fn cases() -> Vec<Case> {
    let kernels: [(&str, Written); 50] = [
        ("identity", identity),
        ("loads_and_stores", loads_and_stores),
        ("shared_memory", shared_memory),
        ("atomics", atomics),
        ("maxima", maxima),
        ("last_block", last_block),
        ("message", message),
        ("shuffles", shuffles),
        ("votes", votes),
        ("warp_reductions", warp_reductions),
        ("block_maximum", block_maximum),
        ("row_reductions", row_reductions),
        ("named_barriers", named_barriers),
        ("copy_async_ring", copy_async_ring),
        ("bulk_pipeline", bulk_pipeline),
        ("bulk_store", bulk_store),
        ("tensor_boxes", tensor_boxes),
        ("convert_from_f32", convert_from_f32),
        ("convert_from_bytes", convert_from_bytes),
        ("half_pairs", half_pairs),
        ("arithmetic", arithmetic),
        ("truncation", truncation),
        ("copy_async_widths", copy_async_widths),
        ("small_formats", small_formats),
        ("half_formats", half_formats),
        ("fences", fences),
        ("flags", flags),
        ("arriving_chunk", arriving_chunk),
        ("warp_round", warp_round),
        ("clock", clock),
        ("mbarrier_phases", mbarrier_phases),
        ("odd_view", odd_view),
        ("lanes", lanes),
        ("table_sums", table_sums),
        ("parts", parts),
        ("places", places),
        ("matrix_layouts", matrix_layouts),
        ("matrix_registers", matrix_registers),
        ("matrix_stacks", matrix_stacks),
        ("team_roles", team_roles),
        ("cluster_share", cluster_share),
        ("cluster_write", cluster_write),
        ("copy_async_tile", copy_async_tile),
        ("copy_async_chunks", copy_async_chunks),
        ("warp_products", warp_products),
        ("warp_chunks", warp_chunks),
        ("warp_products_8", warp_products_8),
        ("turned_products", turned_products),
        ("fragment_sums", fragment_sums),
        ("nested", nested),
    ];
    golden::announce(kernels.map(|(name, _)| name).as_slice());
    kernels.map(|(name, bytes)| Case::new(format!("conformance::{name}"), Size::Small, move |r| compare(r, name, bytes))).into()
}

fn compare(runtime: &Runtime, name: &'static str, bytes: Written) -> Outcome {
    let bytes = bytes(runtime, &stream(runtime)?)?;
    if runtime.kind() == oxtile::Kind::Cuda && golden::recording() {
        golden::record(name, bytes);
        return Ok(());
    }
    equal(name, &bytes, &golden::of(name).map_or_else(|| golden::first(name, &bytes), <[u8]>::to_vec))
}

/// The words that most kernels get.
pub(super) fn words(count: u32) -> Vec<u32> {
    let mut random = Random::new(99);
    (0..count).map(|_| random.bits() as u32).collect()
}

/// Buffers of an input and an output of poison, and what is left to do: launch.
pub(super) struct Run<'r> {
    pub runtime: &'r Runtime,
    pub stream: &'r Stream,
}

impl Run<'_> {
    pub fn input<T: HostElement<Device = T> + Pod>(&self, values: &[T]) -> Result<Buffer<T>, String> {
        text(Buffer::from_slice(self.stream, values))
    }

    pub fn output(&self, words: u32) -> Result<Buffer<u32>, String> {
        self.input(&vec![0xa5a5_a5a5; words as usize])
    }

    pub fn launch<K: Kernel + Signature>(&self, args: K::Args<'_>) -> Outcome {
        text(text(self.runtime.load::<K>())?.launch(self.stream, args))
    }

    pub fn bytes(&self, output: &Buffer<u32>) -> Bytes {
        Ok(text(output.to_vec(self.stream))?.into_iter().flat_map(u32::to_le_bytes).collect())
    }
}

/// A kernel of one input and one output of words.
macro_rules! one_to_one {
    ($($function:ident: $kernel:ident, $args:ident, $input:expr => $words:expr;)*) => { $(
        fn $function(runtime: &Runtime, stream: &Stream) -> Bytes {
            let run = Run { runtime, stream };
            let input = run.input(&$input)?;
            let mut output = run.output($words)?;
            run.launch::<$kernel>($args { input: input.view(), output: output.view_mut() })?;
            run.bytes(&output)
        }
    )* };
}

one_to_one! {
    matrix_layouts: MatrixLayouts, MatrixLayoutsArgs, words(MATRIX_INPUT) => LAYOUTS_OUTPUT;
    matrix_registers: MatrixRegisters, MatrixRegistersArgs, words(MATRIX_INPUT) => REGISTERS_OUTPUT;
    matrix_stacks: MatrixStacks, MatrixStacksArgs, words(MATRIX_INPUT) => STACKS_OUTPUT;
    copy_async_tile: CopyAsyncTile, CopyAsyncTileArgs, words(TILE_WORDS) => TILE_WORDS;
    copy_async_chunks: CopyAsyncChunks, CopyAsyncChunksArgs, words(TILE_WORDS) => TILE_WORDS;
    warp_chunks: WarpChunks, WarpChunksArgs, words(MATRIX_INPUT) => CHUNKS_OUTPUT;
    warp_products: WarpProducts, WarpProductsArgs, words(MATRIX_INPUT) => PRODUCTS_OUTPUT;
    warp_products_8: WarpProducts8, WarpProducts8Args, words(MATRIX_INPUT) => PRODUCTS_8_OUTPUT;
    turned_products: TurnedProducts, TurnedProductsArgs, words(MATRIX_INPUT) => TURNED_OUTPUT;
    parts: Parts, PartsArgs, words(THREADS) => THREADS;
    shared_memory: SharedMemory, SharedMemoryArgs, words(THREADS) => 3 * THREADS;
    shuffles: Shuffles, ShufflesArgs, words(THREADS) => SHUFFLE_WORDS * THREADS;
    votes: Votes, VotesArgs, words(THREADS) => 4 * THREADS;
    warp_reductions: WarpReductions, WarpReductionsArgs, words(THREADS) => 3 * THREADS;
    block_maximum: BlockMaximum, BlockMaximumArgs, words(THREADS) => 2;
    named_barriers: NamedBarriers, NamedBarriersArgs, words(THREADS) => 256;
    copy_async_ring: CopyAsyncRing, CopyAsyncRingArgs, words(oxtile_conformance::copies::ROUNDS * STAGE as u32) => oxtile_conformance::copies::ROUNDS * THREADS;
    bulk_pipeline: BulkPipeline, BulkPipelineArgs, words(oxtile_conformance::copies::ROUNDS * STAGE as u32) => oxtile_conformance::copies::ROUNDS * 96;
    bulk_store: BulkStore, BulkStoreArgs, words(STAGE as u32) => 2 * STAGE as u32;
    convert_from_f32: ConvertFromF32, ConvertFromF32Args, floats() => FROM_F32_WORDS * floats().len() as u32;
    convert_from_bytes: ConvertFromBytes, ConvertFromBytesArgs, (0..=255).collect::<Vec<u8>>() => FROM_BYTES_WORDS * 256;
    half_pairs: HalfPairs, HalfPairsArgs, half_words() => 3 * half_words().len() as u32;
    truncation: Truncation, TruncationArgs, eights() => eights().len() as u32 / 2 * 3;
    copy_async_widths: CopyAsyncWidths, CopyAsyncWidthsArgs, words(STAGE as u32) => 7 * THREADS;
    small_formats: SmallFormats, SmallFormatsArgs, eights() => eights().len() as u32 / VALUES * SMALL_WORDS;
    half_formats: HalfFormats, HalfFormatsArgs, eights() => eights().len() as u32 / VALUES * HALF_WORDS;
    warp_round: WarpRound, WarpRoundArgs, words(THREADS) => THREADS;
    mbarrier_phases: MbarrierPhases, MbarrierPhasesArgs, words(2 * PART) => 1 + 2 * THREADS;
}

/// Sums of poison that a store replaces, and of zeros.
fn fragment_sums(runtime: &Runtime, stream: &Stream) -> Bytes {
    let run = Run { runtime, stream };
    let input = run.input(&words(MATRIX_INPUT))?;
    let mut output = run.output(FRAGMENTS_OUTPUT)?;
    let start: Vec<f32> = (0..FRAGMENTS_SUMS).map(|i| if i < FRAGMENTS_SUMS / 2 { 0.5 } else { f32::NAN }).collect();
    let mut sums = run.input(&start)?;
    run.launch::<FragmentSums>(FragmentSumsArgs { input: input.view(), output: output.view_mut(), sums: sums.view_mut() })?;
    let sums = text(sums.to_vec(stream))?.into_iter().flat_map(f32::to_le_bytes);
    Ok(run.bytes(&output)?.into_iter().chain(sums).collect())
}

/// Values of every exponent and all the specials, as f32 bits.
fn floats() -> Vec<f32> {
    let random = Scenario::ALL.into_iter().flat_map(|scenario| scenario.generate(Dtype::F32, 96, 7));
    let edges =
        [0.0, f32::MIN_POSITIVE, f32::MAX, f32::INFINITY, 448.0, 464.0, 57344.0, 65504.0, 65520.0, 6.0, 7.0, 0.25, 5e-324_f64 as f32];
    let exact = (0..512_u32).map(|i| f32::from_bits(i << 23 | (i * 0x9e37) & 0x7f_ffff));
    random.chain(edges).chain(edges.map(|x| -x)).chain(exact).collect()
}

/// As [`floats`], a multiple of [`VALUES`].
fn eights() -> Vec<f32> {
    let mut values = floats();
    values.truncate(values.len() / VALUES as usize * VALUES as usize);
    values
}

/// Words of two halves: any code of either type, zeros, infinities and NaN more often than by chance. The kernel's
/// operations give one NaN, whatever the payloads were.
fn half_words() -> Vec<u32> {
    let mut random = Random::new(3);
    let mut half = || match random.below(16) {
        0 => 0x7fff,
        1 => 0x8000,
        2 => 0,
        3 => 0x7c00,
        4 => 0xff80,
        _ => random.bits() as u16,
    };
    (0..1024).map(|_| u32::from(half()) | u32::from(half()) << 16).collect()
}

/// Sums of rounded numbers, so that another order gives other bits.
fn row_reductions(runtime: &Runtime, stream: &Stream) -> Bytes {
    let run = Run { runtime, stream };
    let row: Vec<u16> = codes(Dtype::Bf16, &Scenario::Normal.generate(Dtype::Bf16, ROW as usize, 5));
    let row: Vec<bf16> = row.into_iter().map(bf16::from_bits).collect();
    let (input, mut doubled) = (run.input(&row)?, run.input(&vec![bf16::NAN; ROW as usize])?);
    let (mut pairs, mut output) = (run.input(&[0f32; ROW as usize / 2])?, run.input(&[0f32; (THREADS * ROW_WORDS) as usize])?);
    run.launch::<RowReductions>(RowReductionsArgs {
        input: input.view(),
        doubled: doubled.view_mut(),
        pairs: pairs.view_mut(),
        output: output.view_mut(),
    })?;
    let doubled = text(doubled.to_vec(stream))?.into_iter().flat_map(|half: bf16| half.to_bits().to_le_bytes());
    let floats = [text(pairs.to_vec(stream))?, text(output.to_vec(stream))?].concat();
    Ok(doubled.chain(floats.into_iter().flat_map(f32::to_le_bytes)).collect())
}

fn cluster_share(runtime: &Runtime, stream: &Stream) -> Bytes {
    let run = Run { runtime, stream };
    let [rows, columns] = CLUSTER_INPUT;
    let (input, mut output) = (run.input(&words(rows * columns))?, run.output(CLUSTER_OUTPUT)?);
    let map = text(TensorMap::new(stream, input.view(), [u64::from(rows), u64::from(columns)]))?;
    run.launch::<ClusterShare>(ClusterShareArgs { input: map.view(), output: output.view_mut() })?;
    run.bytes(&output)
}

fn cluster_write(runtime: &Runtime, stream: &Stream) -> Bytes {
    let run = Run { runtime, stream };
    let mut output = run.output(CLUSTER_WRITE_OUTPUT)?;
    run.launch::<ClusterWrite>(ClusterWriteArgs { output: output.view_mut() })?;
    run.bytes(&output)
}

fn team_roles(runtime: &Runtime, stream: &Stream) -> Bytes {
    let run = Run { runtime, stream };
    let mut output = run.output(ROLES_OUTPUT)?;
    run.launch::<TeamRoles>(TeamRolesArgs { output: output.view_mut() })?;
    run.bytes(&output)
}

fn identity(runtime: &Runtime, stream: &Stream) -> Bytes {
    let run = Run { runtime, stream };
    let mut output = run.output(BLOCKS * THREADS * 6)?;
    run.launch::<Identity>(IdentityArgs { output: output.view_mut() })?;
    run.bytes(&output)
}

fn loads_and_stores(runtime: &Runtime, stream: &Stream) -> Bytes {
    let run = Run { runtime, stream };
    let all = words(THREADS * 4);
    let bytes = run.input(&all.iter().take(THREADS as usize).map(|w| *w as u8).collect::<Vec<_>>())?;
    let halves = run.input(&all.iter().take(2 * THREADS as usize).map(|w| *w as u16).collect::<Vec<_>>())?;
    let longs = run.input(&all.iter().take(THREADS as usize).map(|w| u64::from(*w) * 0x1_0001_0001).collect::<Vec<_>>())?;
    let words = run.input(&all)?;
    let mut output = run.output(THREADS * 16)?;
    run.launch::<LoadsAndStores>(LoadsAndStoresArgs {
        bytes: bytes.view(),
        halves: halves.view(),
        words: words.view(),
        longs: longs.view(),
        output: output.view_mut(),
    })?;
    run.bytes(&output)
}

fn atomics(runtime: &Runtime, stream: &Stream) -> Bytes {
    let run = Run { runtime, stream };
    let input = run.input(&words(BLOCKS * THREADS))?;
    let (mut maximum, mut floats) = (run.input(&[0f32])?, run.input(&[0f32])?);
    let (mut sums, mut longs) = (run.input(&[7u32])?, run.input(&[9u64])?);
    run.launch::<Atomics>(AtomicsArgs {
        input: input.view(),
        maximum: maximum.view_mut(),
        sums: sums.view_mut(),
        longs: longs.view_mut(),
        floats: floats.view_mut(),
    })?;
    let mut bytes = text(maximum.to_vec(stream))?[0].to_le_bytes().to_vec();
    bytes.extend(text(sums.to_vec(stream))?[0].to_le_bytes());
    bytes.extend(text(longs.to_vec(stream))?[0].to_le_bytes());
    bytes.extend(text(floats.to_vec(stream))?[0].to_le_bytes());
    Ok(bytes)
}

fn maxima(runtime: &Runtime, stream: &Stream) -> Bytes {
    let run = Run { runtime, stream };
    let (input, mut output) = (run.input(&words(BLOCKS * THREADS))?, run.input(&[1u32; 8])?);
    run.launch::<Maxima>(MaximaArgs { input: input.view(), output: output.view_mut() })?;
    run.bytes(&output)
}

fn last_block(runtime: &Runtime, stream: &Stream) -> Bytes {
    let run = Run { runtime, stream };
    let input = run.input(&words(BLOCKS * THREADS))?;
    let (mut partial, mut ticket, mut output) = (run.output(BLOCKS)?, run.input(&[0u32])?, run.output(1)?);
    run.launch::<LastBlock>(LastBlockArgs {
        input: input.view(),
        partial: partial.view_mut(),
        ticket: ticket.view_mut(),
        output: output.view_mut(),
    })?;
    run.bytes(&output)
}

fn message(runtime: &Runtime, stream: &Stream) -> Bytes {
    let run = Run { runtime, stream };
    let input = run.input(&words(1))?;
    let (mut mailbox, mut flag, mut output) = (run.output(1)?, run.input(&[0u32])?, run.output(1)?);
    run.launch::<Message>(MessageArgs {
        input: input.view(),
        mailbox: mailbox.view_mut(),
        flag: flag.view_mut(),
        output: output.view_mut(),
    })?;
    run.bytes(&output)
}

fn flags(runtime: &Runtime, stream: &Stream) -> Bytes {
    let run = Run { runtime, stream };
    let input = run.input(&words(THREADS))?;
    let (mut mailbox, mut epochs, mut output) = (run.output(THREADS)?, run.input(&[0, POISON, 0, 0])?, run.output(FLAGS_OUTPUT)?);
    run.launch::<Flags>(FlagsArgs {
        input: input.view(),
        mailbox: mailbox.view_mut(),
        epochs: epochs.view_mut(),
        output: output.view_mut(),
    })?;
    run.bytes(&output)
}

/// Flags of two ranks that one device plays: rank 1 sets them, rank 0 waits.
fn arriving_chunk(runtime: &Runtime, stream: &Stream) -> Bytes {
    const PATIENCE: u64 = 10_000_000_000;
    let run = Run { runtime, stream };
    let input = run.input(&words(THREADS))?;
    let (mut mailbox, mut output) = (run.output(THREADS)?, run.output(ARRIVING_OUTPUT)?);
    let lines = run.input(&[0_u64; (ARRIVING_LINES * LINE) as usize])?;
    let table = run.input(&[lines.address(), lines.len()])?;
    // SAFETY: no other stream uses the lines meanwhile.
    let flags = unsafe { DeviceFlags::new(lines.view()) };
    let members = [flags.access("signals")];
    // SAFETY: the entry is the lines, which are lent as flags.
    let signalled = unsafe { oxtile_tile::launch::DeviceTable::from_raw(table.view(), &members) };
    // Line 1 + 2 k + r is flag k of rank r.
    run.launch::<ArrivingChunk>(ArrivingChunkArgs {
        input: input.view(),
        mailbox: mailbox.view_mut(),
        waits: WaitsArgument { lines: flags, first: 2, patience: PATIENCE },
        signals: SignalsArgument { lines: signalled, first: 2, stride: 2 },
        output: output.view_mut(),
        hurried: true,
    })?;
    let lines: Vec<u64> = text(lines.to_vec(stream))?;
    Ok([run.bytes(&output)?, lines.into_iter().flat_map(u64::to_le_bytes).collect()].concat())
}

/// A matrix that is no multiple of the box in either direction.
fn tensor_boxes(runtime: &Runtime, stream: &Stream) -> Bytes {
    let (rows, columns) = (19, 76);
    let run = Run { runtime, stream };
    let (input, mut output) = (run.input(&words(rows * columns))?, run.output(rows * columns)?);
    let shape = [u64::from(rows), u64::from(columns)];
    let source = text(TensorMap::new(stream, input.view(), shape))?;
    let mut target = text(TensorMapMut::new(stream, output.view_mut(), shape))?;
    run.launch::<TensorBoxes>(TensorBoxesArgs { input: source.view(), output: target.view_mut(), rows, columns })?;
    drop(target);
    run.bytes(&output)
}

fn arithmetic(runtime: &Runtime, stream: &Stream) -> Bytes {
    let run = Run { runtime, stream };
    let mut values = floats();
    values.truncate(values.len() / 3 * 3);
    let input = run.input(&values)?;
    let mut output = run.input(&vec![0f32; values.len() / 3 * 4])?;
    run.launch::<Arithmetic>(ArithmeticArgs { input: input.view(), output: output.view_mut() })?;
    Ok(text(output.to_vec(stream))?.into_iter().flat_map(f32::to_le_bytes).collect())
}

fn fences(runtime: &Runtime, stream: &Stream) -> Bytes {
    let run = Run { runtime, stream };
    let input = run.input(&words(SCOPES))?;
    let (mut mailbox, mut flags, mut output) = (run.output(SCOPES)?, run.input(&[0u32; SCOPES as usize])?, run.output(SCOPES)?);
    run.launch::<Fences>(FencesArgs {
        input: input.view(),
        mailbox: mailbox.view_mut(),
        flags: flags.view_mut(),
        output: output.view_mut(),
    })?;
    run.bytes(&output)
}

fn clock(runtime: &Runtime, stream: &Stream) -> Bytes {
    let run = Run { runtime, stream };
    let mut output = run.output(THREADS)?;
    run.launch::<Clock>(ClockArgs { output: output.view_mut() })?;
    run.bytes(&output)
}

fn places(runtime: &Runtime, stream: &Stream) -> Bytes {
    let run = Run { runtime, stream };
    let mut output = run.output(4)?;
    run.launch::<oxtile_conformance::views::Places>(PlacesArgs { output: output.view_mut() })?;
    run.bytes(&output)
}

/// A view of bytes that starts short of a boundary, in a buffer that starts at one.
fn odd_view(runtime: &Runtime, stream: &Stream) -> Bytes {
    let run = Run { runtime, stream };
    let (first, count) = (u64::from(16 - ODD), ODD + 4 * THREADS);
    let bytes: Vec<u8> = words(first as u32 + count).into_iter().map(|word| word as u8).collect();
    let (input, mut output, mut facts) =
        (run.input(&bytes)?, run.input(&vec![0xa5u8; 4 * THREADS as usize])?, run.input(&[0u64; FACTS as usize])?);
    run.launch::<OddView>(OddViewArgs {
        input: input.view().slice(first, first + u64::from(count)),
        output: output.view_mut(),
        facts: facts.view_mut(),
    })?;
    let mut found = text(output.to_vec(stream))?;
    found.extend(text(facts.to_vec(stream))?.into_iter().flat_map(u64::to_le_bytes));
    Ok(found)
}

fn lanes(runtime: &Runtime, stream: &Stream) -> Bytes {
    let run = Run { runtime, stream };
    let all = words(16 * THREADS);
    let bytes = run.input(&all.iter().map(|w| *w as u8).collect::<Vec<_>>())?;
    let halves = run.input(&all.iter().take(8 * THREADS as usize).map(|w| *w as u16).collect::<Vec<_>>())?;
    let longs = run.input(&all.iter().take(2 * THREADS as usize).map(|w| u64::from(*w) * 0x1_0001_0001).collect::<Vec<_>>())?;
    let words = run.input(&all[..4 * THREADS as usize])?;
    let mut output = run.output(4 * THREADS)?;
    run.launch::<Lanes>(LanesArgs {
        bytes: bytes.view(),
        halves: halves.view(),
        words: words.view(),
        longs: longs.view(),
        output: output.view_mut(),
    })?;
    run.bytes(&output)
}

/// Tensors of several lengths, one of them empty, one a slice.
fn table_sums(runtime: &Runtime, stream: &Stream) -> Bytes {
    let run = Run { runtime, stream };
    let (long, short) = (run.input(&words(100))?, run.input(&words(7))?);
    let table = text(DeviceTable::new(stream, &[long.view(), short.view(), long.view().slice(50, 50), long.view().slice(3, 60)]))?;
    let mut output = run.output(4 * TABLE_WORDS)?;
    run.launch::<TableSums>(TableSumsArgs { inputs: table.view(), output: output.view_mut() })?;
    run.bytes(&output)
}
