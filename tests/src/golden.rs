//! The bytes that a GPU gave for the conformance kernels: `tests/golden/gpu.bin`, compiled in.
//!
//! The file is a line of text (device, driver, commit), then for each kernel its name and its bytes,
//! each after its length as a little-endian `u32`.

use std::collections::BTreeMap;
use std::sync::{LazyLock, Mutex, PoisonError};

static COMMITTED: LazyLock<BTreeMap<String, Vec<u8>>> =
    LazyLock::new(|| parse(include_bytes!("../golden/gpu.bin")).expect("tests/golden/gpu.bin is as OXTILE_GOLDEN_OUT writes it"));
static FIRST: Mutex<BTreeMap<&'static str, Vec<u8>>> = Mutex::new(BTreeMap::new());
static RECORDED: Mutex<BTreeMap<&'static str, Vec<u8>>> = Mutex::new(BTreeMap::new());

/// The committed bytes of a kernel.
pub fn of(kernel: &str) -> Option<&'static [u8]> {
    COMMITTED.get(kernel).map(Vec::as_slice)
}

/// Names the kernels that have no committed bytes yet: their runs can only be compared with one another.
pub fn announce(kernels: &[&str]) {
    let missing: Vec<_> = kernels.iter().filter(|kernel| of(kernel).is_none()).collect();
    if !missing.is_empty() {
        eprintln!(
            "golden: no GPU's bytes yet for {missing:?}: their runs are compared with one another; run on a GPU with \
             OXTILE_GOLDEN_OUT=FILE and copy FILE to tests/golden/gpu.bin"
        );
    }
}

/// The bytes of the first run of a kernel without committed ones: what every other run, on any back end, must give.
pub fn first(kernel: &'static str, bytes: &[u8]) -> Vec<u8> {
    FIRST.lock().unwrap_or_else(PoisonError::into_inner).entry(kernel).or_insert_with(|| bytes.to_vec()).clone()
}

/// Whether the GPU's bytes are to be written instead of compared.
pub fn recording() -> bool {
    std::env::var_os("OXTILE_GOLDEN_OUT").is_some()
}

pub fn record(kernel: &'static str, bytes: Vec<u8>) {
    RECORDED.lock().unwrap_or_else(PoisonError::into_inner).insert(kernel, bytes);
}

/// Writes what was recorded, if anything was asked for.
pub fn finish(device: &str) -> std::io::Result<()> {
    let Some(path) = std::env::var_os("OXTILE_GOLDEN_OUT") else { return Ok(()) };
    let mut file = format!("{device}\n").into_bytes();
    let mut append = |bytes: &[u8]| {
        file.extend((bytes.len() as u32).to_le_bytes());
        file.extend(bytes);
    };
    for (kernel, bytes) in RECORDED.lock().unwrap_or_else(PoisonError::into_inner).iter() {
        append(kernel.as_bytes());
        append(bytes);
    }
    std::fs::write(path, file)
}

fn parse(file: &[u8]) -> Option<BTreeMap<String, Vec<u8>>> {
    let mut rest = file.splitn(2, |&byte| byte == b'\n').nth(1)?;
    let mut kernels = BTreeMap::new();
    while !rest.is_empty() {
        let mut next = || {
            let (length, tail) = rest.split_first_chunk::<4>()?;
            let (bytes, tail) = tail.split_at_checked(u32::from_le_bytes(*length) as usize)?;
            rest = tail;
            Some(bytes)
        };
        let (name, bytes) = (next()?, next()?);
        kernels.insert(String::from_utf8(name.to_vec()).ok()?, bytes.to_vec());
    }
    Some(kernels)
}
