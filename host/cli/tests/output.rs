//! The output: what it holds, what it must never replace, and that nothing is left of a failure.

mod common;

use std::{
    io::Write,
    os::unix::{fs::symlink, process::ExitStatusExt},
    path::Path,
    process::{Child, Stdio},
    time::{Duration, Instant},
};

use common::{file, names, oxtile, run, small_checkpoint, stderr};
use oxtile_cli::{
    progress::Progress,
    quantize::{self, Codes, DeviceError, Direction, Directions, Elements, Format, Piece, QuantizeDevice, Quantized, Recipe, Side},
    safetensors::Checkpoint,
};

fn tensor_bytes(path: &Path, name: &str) -> Vec<u8> {
    let checkpoint = Checkpoint::open(path).expect("a valid file");
    let tensor = checkpoint.tensors().iter().find(|tensor| tensor.name == name).expect("the tensor is there");
    let windows = checkpoint.windows(tensor, 1 << 20);
    windows.flat_map(|window| window.expect("mapped").to_vec()).collect()
}

#[test]
fn tensors_and_metadata_arrive() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let (input, output) = (small_checkpoint(folder.path()), folder.path().join("out.safetensors"));
    common::quantize(&input, &output).expect("a valid checkpoint");
    let checkpoint = Checkpoint::open(&output).expect("a valid output");
    let mut tensors: Vec<_> = checkpoint.tensors().iter().map(|t| format!("{} {} {:?}", t.name, t.dtype, t.shape)).collect();
    tensors.sort();
    let expected = [
        "bias F32 [3]",
        "brain F8_E4M3 [2, 1, 32]",
        "brain_amax F32 [1]",
        "brain_scale F8_E8M0 [2, 1]",
        "empty F32 [0, 32]",
        "half F8_E4M3 [1, 32]",
        "half_amax F32 [1]",
        "half_scale F8_E8M0 [1, 1]",
        "ids I64 [1, 2]",
        "matrix F8_E4M3 [2, 64]",
        "matrix_amax F32 [1]",
        "matrix_scale F8_E8M0 [2, 2]",
        "narrow F32 [2, 3]",
        "scalar F32 []",
    ];
    assert_eq!(tensors, expected);
    let metadata: Vec<_> = checkpoint.metadata().iter().map(|(key, value)| format!("{key}={value}")).collect();
    assert_eq!(metadata[..4], ["format=pt", "oxtile.direction=row", "oxtile.format=mxfp8", "oxtile.format_version=2"]);
    for name in ["bias", "narrow", "ids", "scalar"] {
        assert_eq!(tensor_bytes(&output, name), tensor_bytes(&input, name), "{name} is copied");
    }
    assert_eq!(tensor_bytes(&output, "matrix_amax"), (67.0f32 * 0.37).to_le_bytes());
    assert_eq!(names(folder.path()), ["out.safetensors", "small.safetensors"]);
}

#[test]
fn every_tensor_is_aligned() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let (input, output) = (small_checkpoint(folder.path()), folder.path().join("out.safetensors"));
    common::quantize(&input, &output).expect("a valid checkpoint");
    let length = u64::from_le_bytes(std::fs::read(&output).expect("readable")[..8].try_into().expect("8 bytes"));
    assert_eq!(length % 8, 0, "the data section is aligned");
    for tensor in Checkpoint::open(&output).expect("a valid output").tensors() {
        assert_eq!(tensor.range.start % (tensor.dtype.bits() / 8), 0, "{}", tensor.name);
    }
}

#[test]
fn misaligned_input_gives_the_same_output() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let input = small_checkpoint(folder.path());
    let (straight, shifted) = (folder.path().join("straight"), folder.path().join("shifted"));
    common::quantize(&input, &straight).expect("a valid checkpoint");
    // One space more of header, and every tensor lies at another address modulo 8.
    let mut bytes = std::fs::read(&input).expect("readable");
    let length = u64::from_le_bytes(bytes[..8].try_into().expect("8 bytes"));
    bytes[..8].copy_from_slice(&(length + 1).to_le_bytes());
    bytes.insert(8 + length as usize, b' ');
    std::fs::write(&input, bytes).expect("a writable folder");
    common::quantize(&input, &shifted).expect("a valid checkpoint");
    assert_eq!(std::fs::read(straight).expect("readable"), std::fs::read(shifted).expect("readable"));
}

/// Marks every element and every block by its place, which the test's tensor holds as its values.
#[derive(Default)]
struct Marking {
    calls: usize,
    amax_calls: usize,
}

/// The mark of a place, as a code.
fn mark(place: u32, marks: u32) -> u8 {
    (place % marks) as u8
}

impl Marking {
    fn codes(side: Side, input: &[f32]) -> Codes {
        let [rows, columns] = side.shape.map(|n| n as usize);
        let turned: Vec<u32> = match side.is_transposed() {
            true => (0..columns).flat_map(|column| (0..rows).map(move |row| input[row * columns + column] as u32)).collect(),
            false => input.iter().map(|&x| x as u32).collect(),
        };
        let codes = side.format.code_bytes(turned.len() as u64) as usize;
        let data = turned.iter().step_by(turned.len() / codes).map(|&place| mark(place, 251)).collect();
        let [_, length] = side.lines().map(|n| n as usize);
        let first_of_blocks = |block: usize| turned.chunks(length).flat_map(move |line| line.iter().step_by(block).copied());
        let scales = match (side.format, side.direction) {
            (Format::Mxfp8, Direction::Column) => {
                turned.chunks(32 * length).flat_map(|lines| lines[..length].iter().map(|&x| mark(x, 241))).collect()
            }
            (Format::Mxfp8, Direction::Row) => first_of_blocks(32).map(|place| mark(place / 32, 241)).collect(),
            (Format::Nvfp4, _) => first_of_blocks(16).map(|place| mark(place / 16, 241)).collect(),
            _ => first_of_blocks(128).flat_map(|place| (place as f32).to_le_bytes()).collect(),
        };
        Codes { data, scales }
    }
}

impl QuantizeDevice for Marking {
    fn name(&self) -> String {
        "marking".into()
    }

    fn amax(&mut self, _: &Recipe, _: [u64; 2], input: Elements<'_>) -> Result<[f32; 2], DeviceError> {
        self.amax_calls += 1;
        Ok([input.to_f32().into_iter().fold(0f32, f32::max); 2])
    }

    fn quantize(&mut self, recipe: &Recipe, piece: &Piece, input: Elements<'_>) -> Result<Quantized, DeviceError> {
        let input = input.to_f32();
        assert_eq!(input.len() as u64, piece.shape.iter().product::<u64>());
        self.calls += 1;
        let amax = input.iter().fold(0f32, |amax, x| amax.max(*x));
        assert!(!recipe.format.has_tensor_amax() || piece.amax == [6_720_095.0; 2], "every piece gets the tensor's amax");
        let mut output = Quantized { amax, ..Quantized::default() };
        for side in Side::each(recipe, piece.shape) {
            output.sides[side.direction as usize] = Some(Self::codes(side, &input));
        }
        Ok(output)
    }

    fn interleave(&mut self, side: &Side, compact: &[u8]) -> Result<Vec<u8>, DeviceError> {
        // Reversed, that one sees that it was called, and padded.
        let mut interleaved = vec![0; side.scale_shape().iter().product::<u64>() as usize];
        interleaved.iter_mut().zip(compact.iter().rev()).for_each(|(to, from)| *to = *from);
        Ok(interleaved)
    }
}

const ROWS: u32 = 70_001;
const COLUMNS: u32 = 96;

/// A tensor `w` of the places of its elements, all of which are f32, and one more that is copied.
fn places(folder: &Path, rows: u32) -> std::path::PathBuf {
    let elements = rows * COLUMNS;
    assert!(elements < 1 << 24);
    let header = format!(
        r#"{{"w":{{"dtype":"F32","shape":[{rows},{COLUMNS}],"data_offsets":[0,{0}]}},
            "ids":{{"dtype":"U32","shape":[{elements}],"data_offsets":[{0},{1}]}}}}"#,
        elements * 4,
        elements * 8
    );
    let mut data: Vec<u8> = (0..elements).flat_map(|i| (i as f32).to_le_bytes()).collect();
    data.extend((0..elements).flat_map(u32::to_le_bytes));
    let path = folder.join("in");
    std::fs::write(&path, file(&header, &data)).expect("a writable folder");
    path
}

#[test]
fn pieces_are_put_together_in_order() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let (input, output) = (places(folder.path(), ROWS), folder.path().join("out"));
    let elements = ROWS * COLUMNS;
    let mut device = Marking::default();
    quantize::run(&input, &output, Recipe::default(), &mut device, &mut Progress::hidden()).expect("a valid checkpoint");
    assert!(device.calls > 2, "the tensor takes several pieces, not {}", device.calls);
    assert!(tensor_bytes(&output, "w") == (0..elements).map(|i| mark(i, 251)).collect::<Vec<_>>());
    assert!(tensor_bytes(&output, "w_scale") == (0..elements / 32).map(|i| mark(i, 241)).collect::<Vec<_>>());
    assert_eq!(tensor_bytes(&output, "w_amax"), (elements as f32 - 1.0).to_le_bytes());
    assert!(tensor_bytes(&output, "ids") == tensor_bytes(&input, "ids"), "a long copy is whole");

    let mut device = Marking::default();
    quantize::run(&input, &output, Recipe::of(Format::Nvfp4), &mut device, &mut Progress::hidden()).expect("a valid checkpoint");
    assert_eq!((device.calls > 2, device.amax_calls), (true, device.calls), "the amax of all pieces comes before the first cast");
    assert!(tensor_bytes(&output, "w_packed") == (0..elements).step_by(2).map(|i| mark(i, 251)).collect::<Vec<_>>());
    assert!(tensor_bytes(&output, "w_scale") == (0..elements / 16).map(|i| mark(i, 241)).collect::<Vec<_>>());
    let amax = elements as f32 - 1.0;
    assert_eq!(tensor_bytes(&output, "w_amax"), amax.to_le_bytes());
    assert_eq!(tensor_bytes(&output, "w_global_scale"), (2688.0 / amax).to_le_bytes());
}

/// Places in the order of the transpose.
fn turned(rows: u32) -> impl Iterator<Item = u32> {
    (0..COLUMNS).flat_map(move |column| (0..rows).map(move |row| row * COLUMNS + column))
}

#[test]
fn pieces_of_transposed_codes_are_put_together_in_order() {
    // A multiple of 16, not of 128.
    const ROWS: u32 = 70_000;
    let folder = tempfile::tempdir().expect("a temporary folder");
    let (input, output) = (places(folder.path(), ROWS), folder.path().join("out"));
    let both = |format, interleave| Recipe { directions: Directions::Both, interleave, ..Recipe::of(format) };
    let mut device = Marking::default();
    quantize::run(&input, &output, both(Format::Fp8Block, false), &mut device, &mut Progress::hidden()).expect("a valid checkpoint");
    assert_eq!(device.calls, 2, "pieces");
    assert!(tensor_bytes(&output, "w_columnwise") == turned(ROWS).map(|i| mark(i, 251)).collect::<Vec<_>>());
    let scales: Vec<u8> = turned(ROWS).filter(|i| (i / COLUMNS).is_multiple_of(128)).flat_map(|i| (i as f32).to_le_bytes()).collect();
    assert!(tensor_bytes(&output, "w_columnwise_scale") == scales);
    assert!(tensor_bytes(&output, "w") == (0..ROWS * COLUMNS).map(|i| mark(i, 251)).collect::<Vec<_>>());

    // A multiple of 32, not of 128, and as many elements fewer as the marking's amax says.
    let input = places(folder.path(), 69_984);
    quantize::run(&input, &output, both(Format::Mxfp8, true), &mut Marking::default(), &mut Progress::hidden())
        .expect("a valid checkpoint");
    assert!(tensor_bytes(&output, "w_columnwise") == tensor_bytes(&output, "w"));
    let expected: Vec<u8> =
        (0..69_984 / 32).flat_map(|block| (0..COLUMNS).map(move |column| mark(block * 32 * COLUMNS + column, 241))).collect();
    let interleaved = tensor_bytes(&output, "w_columnwise_scale");
    assert!(interleaved.iter().zip(expected.iter().rev()).all(|(a, b)| a == b), "the scales of all pieces came together");
    assert!(interleaved[expected.len()..].iter().all(|&padding| padding == 0) && interleaved.len() > expected.len());
}

#[test]
fn the_input_is_never_the_output() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let input = small_checkpoint(folder.path());
    let before = std::fs::read(&input).expect("readable");
    let (soft, hard) = (folder.path().join("soft"), folder.path().join("hard"));
    symlink(&input, &soft).expect("a link");
    std::fs::hard_link(&input, &hard).expect("a link");
    for output in [&input, &soft, &hard] {
        let text = common::quantize(&input, output).expect_err("the same file").to_string();
        assert!(text.contains("is the input file itself"), "{text}");
        assert_eq!(std::fs::read(&input).expect("readable"), before);
    }
    let text = common::quantize(&soft, &hard).expect_err("the same file").to_string();
    assert!(text.contains("by a link"), "{text}");
    assert_eq!(names(folder.path()), ["hard", "small.safetensors", "soft"]);
}

#[test]
fn what_is_no_file_is_not_replaced() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let input = small_checkpoint(folder.path());
    for (output, reason) in [
        (folder.path(), "is a directory"),
        (Path::new("/dev/null"), "is a device"),
        (&folder.path().join("no/such/folder/out"), "No such file"),
    ] {
        let text = common::quantize(&input, output).expect_err("no place for a file").to_string();
        assert!(text.contains(reason) && text.contains(output.to_str().expect("UTF-8")), "{text}");
    }
    assert_eq!(names(folder.path()), ["small.safetensors"]);
}

#[test]
fn clashing_names_are_refused() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let input = folder.path().join("clash.safetensors");
    let header = r#"{"w":{"dtype":"F32","shape":[1,32],"data_offsets":[0,128]},
        "w_scale":{"dtype":"U8","shape":[1],"data_offsets":[128,129]}}"#;
    std::fs::write(&input, file(header, &[0; 129])).expect("a writable folder");
    let text = common::quantize(&input, &folder.path().join("out")).expect_err("a clash").to_string();
    assert!(text.contains("`w_scale`: the scales of `w` and the input's `w_scale`"), "{text}");
    assert_eq!(names(folder.path()), ["clash.safetensors"]);
}

#[test]
fn a_quantized_file_is_not_quantized_again() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let (input, output) = (small_checkpoint(folder.path()), folder.path().join("out.safetensors"));
    common::quantize(&input, &output).expect("a valid checkpoint");
    let text = common::quantize(&output, &folder.path().join("twice")).expect_err("a refusal").to_string();
    assert!(text.contains("quantized already"), "{text}");
}

/// A device that fails, or misbehaves, at a call.
struct Faulty(fn() -> Result<Quantized, DeviceError>);

impl QuantizeDevice for Faulty {
    fn name(&self) -> String {
        "faulty".into()
    }

    fn amax(&mut self, _: &Recipe, _: [u64; 2], _: Elements<'_>) -> Result<[f32; 2], DeviceError> {
        (self.0)().map(|output| [output.amax; 2])
    }

    fn quantize(&mut self, _: &Recipe, _: &Piece, _: Elements<'_>) -> Result<Quantized, DeviceError> {
        (self.0)()
    }

    fn interleave(&mut self, _: &Side, _: &[u8]) -> Result<Vec<u8>, DeviceError> {
        (self.0)().map(|_| Vec::new())
    }
}

#[test]
fn a_failing_device_leaves_nothing() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let (input, output) = (small_checkpoint(folder.path()), folder.path().join("out.safetensors"));
    std::fs::write(&output, "what stood there before").expect("a writable folder");
    let fail = || Err(DeviceError::new("out of memory"));
    let short = || Ok(Quantized { sides: [Some(Codes { data: vec![0; 5], scales: vec![] }), None], amax: 0.0 });
    let none = || Ok(Quantized::default());
    let cases = [
        (Faulty(fail), "out of memory"),
        (Faulty(short), "returned 5 bytes of codes and 0 scales for 2x64"),
        (Faulty(none), "returned nothing by rows for 2x64"),
    ];
    for (device, reason) in cases {
        let outcome = quantize::run(&input, &output, Recipe::default(), &mut { device }, &mut Progress::hidden());
        let text = outcome.expect_err("a failure").to_string();
        assert!(text.contains("tensor `matrix` on device faulty") && text.contains(reason), "{text}");
        assert_eq!(names(folder.path()), ["out.safetensors", "small.safetensors"]);
        assert_eq!(std::fs::read(&output).expect("readable"), b"what stood there before");
    }
}

#[test]
fn an_input_that_changes_is_noticed() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let input = small_checkpoint(folder.path());
    struct Meddler(std::path::PathBuf);
    impl QuantizeDevice for Meddler {
        fn name(&self) -> String {
            "meddler".into()
        }
        fn amax(&mut self, recipe: &Recipe, shape: [u64; 2], input: Elements<'_>) -> Result<[f32; 2], DeviceError> {
            common::Scalar.amax(recipe, shape, input)
        }
        fn quantize(&mut self, recipe: &Recipe, piece: &Piece, input: Elements<'_>) -> Result<Quantized, DeviceError> {
            let mut file = std::fs::OpenOptions::new().append(true).open(&self.0).expect("it is there");
            file.write_all(b"more").expect("writable");
            common::Scalar.quantize(recipe, piece, input)
        }
        fn interleave(&mut self, side: &Side, compact: &[u8]) -> Result<Vec<u8>, DeviceError> {
            common::Scalar.interleave(side, compact)
        }
    }
    let outcome =
        quantize::run(&input, &folder.path().join("out"), Recipe::default(), &mut Meddler(input.clone()), &mut Progress::hidden());
    let text = outcome.expect_err("a refusal").to_string();
    assert!(text.contains("changed while it was being read"), "{text}");
    assert_eq!(names(folder.path()), ["small.safetensors"]);
}

#[test]
fn signals_leave_nothing() {
    for signal in [libc::SIGINT, libc::SIGTERM, libc::SIGHUP] {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let output = folder.path().join("demo.safetensors");
        let mut child = oxtile().args(["demo-checkpoint", "--output"]).arg(&output).stdout(Stdio::null()).spawn().expect("the binary runs");
        interrupt(&mut child, folder.path(), signal);
        assert_eq!(names(folder.path()), [""; 0], "signal {signal}");
    }
}

#[test]
fn an_interrupted_job_leaves_what_stood_there() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let (input, output) = (folder.path().join("in"), folder.path().join("out"));
    // 64 Mi elements: seconds of work, so that the signal comes in the middle of it.
    let header = r#"{"w":{"dtype":"BF16","shape":[65536,1024],"data_offsets":[0,134217728]}}"#;
    std::fs::write(&input, file(header, &[])).expect("a writable folder");
    let sparse = std::fs::OpenOptions::new().write(true).open(&input).expect("it is there");
    sparse.set_len(8 + header.len() as u64 + 134_217_728).expect("a file with a hole");
    std::fs::write(&output, "what stood there before").expect("a writable folder");
    let mut child = oxtile()
        .args(["quantize", "--device", "emulated", "-i"])
        .arg(&input)
        .arg("-o")
        .arg(&output)
        .stdout(Stdio::null())
        .spawn()
        .expect("the binary runs");
    interrupt(&mut child, folder.path(), libc::SIGINT);
    assert_eq!(names(folder.path()), ["in", "out"]);
    assert_eq!(std::fs::read(&output).expect("readable"), b"what stood there before");
}

/// Waits until a temporary file has appeared in the folder, and ends the process with a signal.
fn interrupt(child: &mut Child, folder: &Path, signal: libc::c_int) {
    let deadline = Instant::now() + Duration::from_secs(60);
    while !names(folder).iter().any(|name| name.ends_with(".partial")) {
        assert!(Instant::now() < deadline, "the temporary file appears");
        std::thread::sleep(Duration::from_millis(1));
    }
    let id = libc::pid_t::try_from(child.id()).expect("a process id");
    // SAFETY: `kill` touches no memory; the id is that of a child that has not been waited for.
    assert_eq!(unsafe { libc::kill(id, signal) }, 0);
    let status = child.wait().expect("the child ends");
    assert_eq!(status.signal(), Some(signal), "it ends as the signal would have ended it: {status}");
}

#[test]
fn a_full_disk_leaves_nothing() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let script = format!("ulimit -f 2000; exec {:?} demo-checkpoint --output out", env!("CARGO_BIN_EXE_oxtile"));
    let output = std::process::Command::new("sh").args(["-c", &script]).current_dir(folder.path()).output();
    let output = output.expect("a shell");
    assert_eq!(output.status.code(), Some(1), "{}", stderr(&output));
    assert!(stderr(&output).contains("out: cannot write: File too large"), "{}", stderr(&output));
    assert_eq!(names(folder.path()), [""; 0]);
}

#[test]
fn the_demo_depends_on_its_seed_alone() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let make = |name: &str, seed: &str| {
        let path = folder.path().join(name);
        let made = run(&[&"demo-checkpoint", &"--seed", &seed, &"--dtype", &"bf16", &"--output", &path]);
        assert!(made.status.success(), "{}", stderr(&made));
        let printed = String::from_utf8(made.stdout).expect("UTF-8");
        assert!(printed.contains(&format!("seed    {seed}\n")) && printed.contains("22.7 M BF16"), "{printed}");
        std::fs::read(path).expect("readable")
    };
    let first = make("a", "1");
    assert!(first == make("b", "1"), "one seed, one file");
    assert!(first != make("c", "2"), "another seed, another file");
}
