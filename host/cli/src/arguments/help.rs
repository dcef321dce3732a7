//! The help texts.

/// The help of `oxtile` itself.
pub const HELP: &str = "\
oxtile: low-precision checkpoints with GPU kernels written in Rust

Usage: oxtile COMMAND [OPTIONS]

Commands:
  quantize         Quantize the matrices of a safetensors file to MXFP8, NVFP4 or FP8
  dequantize       Turn what quantize wrote back into plain numbers
  compare          Measure how far the tensors of two safetensors files are apart
  inspect          Show the tensors of a safetensors file and what their values are like
  attention        Attend: queries, keys and values in, the result out
  overlap          Say how a product would be done of which ranks gather an operand, and why
  shard            Divide the tensors of a safetensors file among ranks, a file each, quantized or as they are
  join             Put the files of shard together again
  launch           Run a program as several ranks on this host
  timeline         Draw what a program's streams did when, as OXTILE_TRACE=FILE recorded it
  doctor           List the driver, GPUs, libraries and kernels that there are, and how to mend what is missing
  new              Make a crate with a kernel and its test
  build            Compile the kernels of a Rust crate for the GPU
  explain          Say what a kernel takes of a GPU, and what its runs on the emulator have shown of its memory
  demo-checkpoint  Make a 22.7 M-parameter checkpoint from a seed, to try the others on

Options:
  -h, --help       Show this; `oxtile COMMAND --help` and `oxtile help COMMAND` show that command's options
  -V, --version    Show the version
";

pub const QUANTIZE_HELP: &str = "\
Quantize the matrices of a safetensors file

Usage: oxtile quantize --input FILE --output FILE [OPTIONS]

Options:
  -i, --input FILE       The checkpoint to read; F32, F16 and BF16 tensors are quantized
  -o, --output FILE      The checkpoint to write; it appears only when it is complete
      --format FORMAT    mxfp8 (the default): E4M3 elements, an E8M0 scale for every 32 neighbours
                         nvfp4: E2M1 elements, an E4M3 scale for every 16, one more for the tensor
                         nvfp4-squares: the same with one scale for 16 by 16, the same values in both directions
                         fp8: E4M3 elements, an F32 scale for the tensor
                         fp8-block: E4M3 elements, an F32 scale for every 128
      --direction DIR    row (the default), column, both: which neighbours share a scale
      --interleave       mxfp8, nvfp4, nvfp4-squares: scales in padded tiles of 128x4, as block-scaled matrix multiplication
                         reads them (default: one after another)
      --hadamard         nvfp4 by column or both, BF16 tensors: columns go through the random Hadamard transform before
                         (default: as they are)
      --stochastic SEED  nvfp4, BF16 tensors: stochastic rounding, the same for the same seed, a number from 0 to 2^64 - 1
                         (default: to nearest)
      --device DEVICE    auto (the default): a GPU if there is one, else the emulator; cuda: the first GPU; emulated
      --json             Print one JSON document (default: tables)
  -h, --help             Show this

A tensor NAME of two or more dimensions, M the product of all but the last, K the last, becomes by rows
  mxfp8      NAME         F8_E4M3  its shape       NAME_scale  F8_E8M0  [M, K/32]
  nvfp4      NAME_packed  U8       [M, K/2]        NAME_scale  F8_E4M3  [M, K/16]  NAME_global_scale  F32  [1]
  fp8        NAME         F8_E4M3  its shape       NAME_scale  F32      [1]
  fp8-block  NAME         F8_E4M3  its shape       NAME_scale  F32      [M, K/128]
and by columns, of the transpose but for mxfp8
  mxfp8      NAME_columnwise         F8_E4M3  its shape  NAME_columnwise_scale  F8_E8M0  [M/32, K]
  nvfp4      NAME_columnwise_packed  U8       [K, M/2]   NAME_columnwise_scale  F8_E4M3  [K, M/16]
             NAME_columnwise_global_scale  F32  [1]
  fp8        NAME_columnwise         F8_E4M3  [K, M]     NAME_columnwise_scale  F32      [1]
  fp8-block  NAME_columnwise         F8_E4M3  [K, M]     NAME_columnwise_scale  F32      [K, M/128]
each with the largest magnitude that it was cast with, F32 [1], as NAME_amax or NAME_columnwise_amax; nvfp4-squares has the
tensors of nvfp4. F32 scales are what codes are multiplied by; pairs of nvfp4 codes have the even element in the low nibble; a
block at the end of a row of fp8-block may be shorter. Interleaved scales are [outer, blocks], padded to multiples of 128 and 4.
K, or M where columns are quantized, must be a multiple of 32 (mxfp8), 16 (nvfp4) or 8 (fp8-block); by columns nvfp4 and
fp8-block ask it of both, as nvfp4-squares always does. With --hadamard or --stochastic F32 and F16 tensors are not quantized:
the transform and stochastic rounding are defined for BF16, and rounding to BF16 first would change the result. Every other
tensor is copied as it is and listed with the reason. The metadata holds format, options, and type and shape of every tensor
as it was.
";

pub const LAUNCH_HELP: &str = "\
Run a program as several ranks on this host, which live and end together

Usage: oxtile launch -n RANKS [OPTIONS] [--] PROGRAM [ARGUMENTS]

Options:
  -n, --ranks RANKS    How many processes, from 1 to 4096
      --grace SECONDS  How long ranks have to end when they are asked to, before they are killed: 0 to 3600 (default 5)
      --drain SECONDS  How long their last output waits for a reader that takes nothing: 0 to 3600 (default 60)
      --verbose        Print a line also when all went well (default: only what went wrong)
  -h, --help           Show this

Each process has RANK, LOCAL_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT (as torchrun sets them) and
OXTILE_JOB_ID, which is random, nothing on its standard input, and `[rank r] ` before each line of its output. SIGINT, SIGTERM,
SIGHUP (not under nohup), SIGQUIT and SIGALRM go on to all ranks, which have the grace to end; a second one kills them. SIGUSR1,
SIGUSR2, SIGWINCH, SIGTSTP (Ctrl-Z) and SIGCONT go on to all ranks, too, and end none. When a rank fails the others get SIGTERM,
and after the grace SIGKILL. What ranks started and left behind is killed, also where the launcher is. The status is 0 if all
ranks' are, else that of the first that failed (128 and the number of a signal). A process that SIGKILL does not end within 10
seconds, and output that is not read or cannot be written, are named on standard error, and the status is not 0.
";

pub const INSPECT_HELP: &str = "\
Show the tensors of a safetensors file and what their values are like

Usage: oxtile inspect FILE [OPTIONS]

Options:
      --histogram OUT.svg  Draw how often which magnitudes occur in one tensor, and its scales (default: no picture)
      --tensor NAME        Which tensor is drawn (default: the largest that has a histogram)
      --against ORIGINAL   Draw the values of this file in the background: oxtile quantize or dequantize made FILE of it
                           (default: those of FILE alone)
      --json               Print one JSON document (default: tables)
  -h, --help               Show this

Of a file of oxtile quantize NAME is the tensor's name before: its codes are drawn as the values that they stand for.
";

pub const TIMELINE_HELP: &str = "\
Draw what the streams of one or more ranks did when

Usage: oxtile timeline FILE... [OPTIONS]

Options:
      --svg OUT.svg      Draw them: a lane a stream, a box a piece of work, waits pale; boxes show more under the pointer
      --merged OUT.json  Write one file of all, for Perfetto (ui.perfetto.dev) or chrome://tracing
  -h, --help             Show this

One of --svg and --merged is needed, or both. A program on Oxtile that runs with OXTILE_TRACE=FILE records its streams, GPUs' or
emulated; a process that a launcher gave a rank (RANK, or as mpirun and srun set it) inserts that into the name: FILE.json of rank
3 is FILE.rank3.json. Several files are ranks of one run, aligned by the host's clock. Times are microseconds of the GPUs, or steps
of the virtual cluster's scheduler, which are not times.
";

pub const OVERLAP_HELP: &str = "\
Say how a product would be done of which ranks gather an operand, and why: by a model, without a GPU

Usage: oxtile overlap --plan M,N,K --ranks RANKS [OPTIONS]

Options:
      --plan M,N,K   Rows and columns of the result over all ranks, and the length of its sums; bf16
      --ranks RANKS  How many ranks: each has rows of A and columns of B
      --json         Print one JSON document (default: lines)
  -h, --help         Show this

fused       one kernel, which waits for each chunk just before it first reads it
chunked     a product for each rank's shard, once it is there
sequential  the product after the whole gather

The times are a model's, of H200s of one host. `oxtile::overlap::AllGatherConfig::choose` chooses the same.
";

pub const SHARD_HELP: &str = "\
Divide the tensors of a safetensors file among ranks

Usage: oxtile shard --input FILE --ranks RANKS --output-prefix PREFIX [OPTIONS]
       oxtile shard --input FILE --ranks RANKS --plan [OPTIONS]

Options:
  -i, --input FILE            The checkpoint to read
      --ranks RANKS           How many ranks, from 1 to 4096
      --output-prefix PREFIX  The files to write: PREFIX-00001-of-0000N.safetensors is rank 0's, and so on; they appear only
                              when all are complete
      --format FORMAT         keep (the default): tensors as they are
                              bf16: tensors of two or more dimensions, F32 or F16, are rounded to BF16
                              fp8, mxfp8, nvfp4, nvfp4-squares: matrices are quantized as by oxtile quantize
      --direction DIR         row (the default), column, both: as of oxtile quantize
      --plan                  Write nothing: say what weights that ranks gather when they use them take of memory and traffic
      --distance D            With --plan: how many gathers run ahead, from 0 to 64 (default: 1, 2 and 3, one after another)
      --device DEVICE         auto (the default): a GPU if there is one, else the emulator; cuda: the first GPU; emulated
      --json                  Print one JSON document (default: tables)
  -h, --help                  Show this

Each tensor is divided by rows, its first dimension: all ranks have the same number of them, but for the last ones, which may
have fewer or none. A quantized tensor is divided as the matrix that it is quantized as, in multiples of 32 rows (mxfp8) or 16
(nvfp4, nvfp4-squares), so that the parts are those of the whole's codes and scales; codes by columns that are those of the
transpose are divided by its columns. What has no rows (scalars, amaxes, scales of a whole tensor) is in every file. The whole is
never in memory. A file's metadata has its rank, the format, a fingerprint of the model, and each tensor's shape and first row.
";

pub const JOIN_HELP: &str = "\
Put the files of oxtile shard together again

Usage: oxtile join --inputs FILE... --output FILE [OPTIONS]

Options:
  -i, --inputs FILE...  The files of all ranks, in any order
  -o, --output FILE     The checkpoint to write; it appears only when it is complete
      --json            Print one JSON document (default: lines)
  -h, --help            Show this

Of format keep the tensors are those of the checkpoint before, byte for byte; of a quantized one the file is that of oxtile
quantize with the same format and direction. Files of which one is missing, twice there, of another model or damaged are
refused, with the file and tensor at fault.
";

pub const DOCTOR_HELP: &str = "\
List what this machine and environment have of what Oxtile uses, and how to mend what is missing

Usage: oxtile doctor [OPTIONS]

Options:
      --json  Print one JSON document (default: lines)
  -h, --help  Show this

driver     NVIDIA's driver, and the newest CUDA that it is for
gpu        each GPU, its compute capability and memory
nccl       the NCCL library that ranks on GPUs use, and its version; nvshmem: NVSHMEM's host library
symmetric  the back ends of memory that ranks share: which can be used here, and why not the others
kernels    the compiled kernels: for which architectures, and whether they are those of this program
launch     what a launcher has told this process (RANK, WORLD_SIZE, ...): run `oxtile launch -n 2 oxtile doctor` to see

Each line begins with ok, absent or BROKEN. Nothing is needed for the emulator. The status is 0 unless something is broken: there, or
named by a variable, and not working.
";

pub const NEW_HELP: &str = "\
Make a crate with a kernel and its test, which builds and passes as it is

Usage: oxtile new NAME [OPTIONS]

Options:
      --path FOLDER    Where the crate goes (default: NAME here)
      --oxtile FOLDER  The checkout of Oxtile that it depends on by path
                       (default: the one that this program is of; without one the crate depends on the repository)
  -h, --help           Show this

Then, in its folder: cargo test runs the kernel on the emulator, oxtile build compiles it for a GPU. docs/own-crate.md has the rest.
";

pub const BUILD_HELP: &str = "\
Compile the kernels of a Rust crate for the GPU, check them and assemble them

Usage: oxtile build [OPTIONS]

Options:
      --manifest-path FILE  Cargo.toml of the crate that holds the kernels (default: the one here)
      --arch ARCH,...       Architectures by ptxas's names, as sm_80, sm_90a, sm_100a, sm_120a (default sm_90a)
      --family FAMILY       Build the kernels of one family, a module of the crate, alone (default: all)
      --out-dir FOLDER      Where manifest.json, PTX and cubins go
                            (default target/oxtile/kernels/PACKAGE)
      --checked             Compile bounds checks in (default: none)
      --line-tables         Keep line tables, by which Nsight Compute shows the kernels' source lines (default: none)
      --accept              Write registers, instructions and collectives into ratchet/ beside Cargo.toml; later builds
                            are held to them (default: compare, where there is such a folder)
  -h, --help                Show this

The table of kernels is printed also where they may not be used, for which standard error has the reasons and the status is 1.
";

pub const DEMO_HELP: &str = "\
Make a checkpoint to try things on: the tensors of a 22.7 M-parameter BERT encoder
(6 layers, width 384, vocabulary 30522), with values from a seed

Usage: oxtile demo-checkpoint --output FILE [OPTIONS]

Options:
  -o, --output FILE  The checkpoint to write
      --seed SEED    A number from 0 to 2^64 - 1 (default 0); the same seed makes the same file
      --dtype DTYPE  f32 (the default), bf16 or f16
  -h, --help         Show this
";

pub const DEQUANTIZE_HELP: &str = "\
Turn a file of oxtile quantize back into plain numbers

Usage: oxtile dequantize --input FILE --output FILE [OPTIONS]

Options:
  -i, --input FILE     What oxtile quantize wrote; its metadata says how
  -o, --output FILE    The checkpoint to write; it appears only when it is complete
      --dtype DTYPE    f32, bf16 or f16: the type of the restored tensors (default: the one that each had)
      --direction DIR  row or column: which codes are taken (default: those by rows, where there are any)
      --device DEVICE  auto (the default): a GPU if there is one, else the emulator; cuda: the first GPU; emulated
      --json           Print one JSON document (default: tables)
  -h, --help           Show this

Codes and scales of a tensor NAME become NAME again, in the shape that it had, each element its code times its scale,
rounded to the type; columns that were transformed are transformed back, in f32. Every other tensor is copied.
";

pub const COMPARE_HELP: &str = "\
Measure how far the tensors of two safetensors files are apart

Usage: oxtile compare REFERENCE OTHER [OPTIONS]

Options:
      --max-relative X  End with status 1 unless every tensor of either file is in both, comparable, without other special
                        values, and its relative error at most X, from 0 on; 0 asks for equal numbers (default: no bound)
      --json            Print one JSON document (default: tables)
  -h, --help            Show this

The status is 0 if the files could be compared, whatever differs, but for --max-relative.

Tensors are matched by name. Of two with one shape and numbers of any type that has values:
  max error  the largest magnitude of the difference
  relative   the norm of the difference over the norm of the reference (Frobenius)
  SNR dB     10 log10 of the reference's energy over that of the difference
  cosine     of the angle between the two as vectors
An element that is NaN or infinite in either enters none of them; it is counted where the two differ.
";

pub const ATTENTION_HELP: &str = "\
Attend: softmax(scale Q K^T + mask) V

Usage: oxtile attention --input FILE --output FILE [OPTIONS]

Options:
  -i, --input FILE     q [batch, sequence, heads, size], k and v [batch, sequence, key heads, size], BF16 or F16;
                       or [tokens, heads, size] with cu_seqlens_q and cu_seqlens_kv, I32, one element more than
                       sequences, and optionally cu_seqlens_q_padded and cu_seqlens_kv_padded, where sequences begin
  -o, --output FILE    out, as q; lse, the natural log-sum-exp, F32 [batch, heads, sequence] or [heads, tokens];
                       with --backward dq, dk and dv, as q, k and v
      --backward       Gradients too: the input holds dout, that of out; the same bits in every run (default: out alone)
      --causal CORNER  top-left: query i sees keys up to i; bottom-right: the last query sees all keys
                       (default: each query sees all keys)
      --window L,R     Each query sees L keys before and R after the diagonal aligned bottom-right; -1, the default of
                       both, is no bound
      --scale X        Factor of the scores; by default the head size to the power -1/2
      --context-parallel SCHEDULE
                       Ranks share the sequences, and reach each other's keys by: auto, ring, pull, gather, all-to-all,
                       hierarchical:K (K neighbours trade heads, with a ring between such groups); the output is that of
                       one device (default: one device)
      --ranks RANKS    How many ranks this process plays on the emulator (default: one, of oxtile launch -n RANKS)
      --device DEVICE  auto (the default): a GPU if there is one, else the emulator; cuda: the first GPU; emulated
      --json           Print a JSON document instead of lines
  -h, --help           Show this

On GPUs each rank is a process: oxtile launch -n RANKS -- oxtile attention --context-parallel SCHEDULE ... Rank 0 writes the output.
Sequences of [batch, sequence, heads, size] are a multiple of twice the ranks; packed ones may have any length. A causal mask with
--context-parallel takes as many keys as queries, in each sequence.
";

pub const EXPLAIN_HELP: &str = "\
Say what a kernel takes of a GPU, and what checked runs on the emulator have shown of its memory and pipelines

Usage: oxtile explain KERNEL [OPTIONS]

Options:
      --records FOLDER  What runs have shown, as OXTILE_EXPLAIN=FOLDER had it written (default: target/oxtile/explain)
      --kernels FOLDER  Compiled kernels, as oxtile build writes them (default: target/oxtile/kernels)
      --svg FOLDER      Draw there: KERNEL.box1.svg, how a box of a tensor map lies in shared memory, and KERNEL.stages.svg, phases
                        of mbarriers over time
  -h, --help            Show this

KERNEL is an entry, or how the names of several begin. Registers and occupancy are those of compiled kernels. Bank conflicts and
uncoalesced accesses by source line, fields of shared memory, boxes and phases are those of runs: of any test that launches the
kernel on a checked runtime, OXTILE_EXPLAIN=target/oxtile/explain cargo test. Times of phases are steps of the emulator's scheduler.
";
