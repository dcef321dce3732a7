//! The help texts.

/// The help of `oxtile` itself.
pub const HELP: &str = "\
oxtile: low-precision checkpoints with GPU kernels written in Rust

Usage: oxtile COMMAND [OPTIONS]

Commands:
  quantize         Quantize the matrices of a safetensors file to MXFP8 or NVFP4
  dequantize       Turn what quantize wrote back into plain numbers
  compare          Say how far the tensors of two safetensors files are apart
  inspect          Show the tensors of a safetensors file and what their values are like
  build            Compile the kernels of a Rust crate for the GPU
  demo-checkpoint  Make a 22.7 M-parameter checkpoint from a seed, to try the others on

Options:
  -h, --help       Show this, or with a command that command's options
  -V, --version    Show the version
";

pub const QUANTIZE_HELP: &str = "\
Quantize the matrices of a safetensors file to MXFP8 or NVFP4

Usage: oxtile quantize --input FILE --output FILE [OPTIONS]

Options:
  -i, --input FILE     The checkpoint to read; F32, F16 and BF16 tensors are quantized
  -o, --output FILE    The checkpoint to write; it appears only when it is complete
      --format FORMAT  mxfp8 (the default): E4M3 elements, an E8M0 scale for every 32 of a row
                       nvfp4: E2M1 elements, an E4M3 scale for every 16 of a row, one for the tensor
      --device DEVICE  auto (the default): a GPU if there is one, else the emulator; cuda; emulated
      --json           Print one JSON document instead of tables
  -h, --help           Show this

A tensor NAME of two or more dimensions, M the product of all but the last, K the last and a multiple of 32, becomes
  NAME               F8_E4M3  its shape  the elements
  NAME_scale         F8_E8M0  [M, K/32]  their scales
  NAME_amax          F32      [1]        its largest magnitude
or, with K a multiple of 16, in nvfp4
  NAME_packed        U8       [M, K/2]   the elements in pairs, the even one in the low nibble
  NAME_scale         F8_E4M3  [M, K/16]  their scales
  NAME_global_scale  F32      [1]        what the tensor was multiplied by before: 6 * 448 / amax
  NAME_amax          F32      [1]        its largest magnitude
Every other tensor is copied as it is and listed with the reason.
";

pub const INSPECT_HELP: &str = "\
Show the tensors of a safetensors file and what their values are like

Usage: oxtile inspect FILE [OPTIONS]

Options:
      --json  Print one JSON document instead of tables
  -h, --help  Show this
";

pub const BUILD_HELP: &str = "\
Compile the kernels of a Rust crate for the GPU, check them and assemble them

Usage: oxtile build --manifest-path FILE [OPTIONS]

Options:
      --manifest-path FILE  Cargo.toml of the crate that holds the kernels
      --arch ARCH,...       Architectures by ptxas's names (default sm_90a)
      --family FAMILY       Build the kernels of one family alone
      --out-dir FOLDER      Where manifest.json, PTX and cubins go
                            (default target/oxtile/kernels/PACKAGE)
      --checked             Compile bounds checks in
  -h, --help                Show this
";

pub const DEMO_HELP: &str = "\
Make a checkpoint to try things on: the tensors of a 22.7 M-parameter BERT encoder
(6 layers, width 384, vocabulary 30522), with values from a seed

Usage: oxtile demo-checkpoint --output FILE [OPTIONS]

Options:
  -o, --output FILE  The checkpoint to write
      --seed SEED    A number (default 0); the same seed makes the same file
      --dtype DTYPE  f32 (the default), bf16 or f16
  -h, --help         Show this
";

pub const DEQUANTIZE_HELP: &str = "\
Turn a file of oxtile quantize back into plain numbers

Usage: oxtile dequantize --input FILE --output FILE [OPTIONS]

Options:
  -i, --input FILE     What oxtile quantize wrote; its metadata names the format
  -o, --output FILE    The checkpoint to write; it appears only when it is complete
      --dtype DTYPE    f32 (the default), bf16 or f16: the type of the restored tensors
      --device DEVICE  auto (the default): a GPU if there is one, else the emulator; cuda; emulated
      --json           Print one JSON document instead of tables
  -h, --help           Show this

The codes, scales and amax of a tensor NAME become NAME again, each element its code times its scale, rounded to the
type; of nvfp4 as a matrix [M, K], since that file does not tell its other dimensions. Every other tensor is copied.
";

pub const COMPARE_HELP: &str = "\
Say how far the tensors of two safetensors files are apart

Usage: oxtile compare REFERENCE OTHER [OPTIONS]

Options:
      --json  Print one JSON document instead of tables
  -h, --help  Show this

Tensors are matched by name. Of two with one shape and numbers of any type that has values:
  max error  the largest magnitude of the difference
  relative   the norm of the difference over the norm of the reference (Frobenius)
  SNR dB     10 log10 of the reference's energy over that of the difference
  cosine     of the angle between the two as vectors
An element that is NaN or infinite in either enters none of them; it is counted where the two differ.
";
