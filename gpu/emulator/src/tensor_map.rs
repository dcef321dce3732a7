//! Tensor maps: the 128-byte descriptors of tiled bulk copies (TMA).

use crate::async_copy::{self, Completion, Direction, Piece};
use crate::cluster;
use crate::fault::FaultKind;
use crate::report::BoxCopy;
use crate::site::Site;
use crate::thread::Thread;
use crate::words;
use crate::worker::READ;

pub use crate::swizzle::Swizzle;

/// Bytes of an encoded tensor map, as `CUtensorMap` has them. It must lie at a multiple of 64.
pub const TENSOR_MAP_BYTES: usize = 128;

/// A tensor in global memory and the box that one copy moves, innermost dimension first.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorMap {
    /// Device address of element zero, a multiple of 16.
    pub address: u64,
    /// Bytes an element: 1, 2, 4 or 8.
    pub element_bytes: u32,
    /// Elements in each of one to five dimensions.
    pub dimensions: Vec<u64>,
    /// Bytes between neighbours in dimensions 1.., each a multiple of 16 (one fewer than `dimensions`).
    pub strides: Vec<u64>,
    /// Elements of the box in each dimension, at most 256.
    pub box_dimensions: Vec<u32>,
    /// Layout of the box in shared memory.
    pub swizzle: Swizzle,
}

/// Why a tensor map is not possible.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("no such tensor map: {problem}; see cuTensorMapEncodeTiled for the limits")]
pub struct TensorMapError {
    problem: String,
}

/// First bytes of an encoded map, so that other bytes are not taken for one.
const MAGIC: [u8; 4] = *b"OXTM";

/// Encodes a tensor map for the emulator. The bytes go to global memory, at a multiple of 64, and the kernel
/// passes their address; it must not look inside.
pub fn encode(map: &TensorMap) -> Result<[u8; TENSOR_MAP_BYTES], TensorMapError> {
    map.validate().map_err(|problem| TensorMapError { problem })?;
    let mut bytes = [0; TENSOR_MAP_BYTES];
    let mut at = 0;
    let mut put = |part: &[u8]| {
        bytes[at..at + part.len()].copy_from_slice(part);
        at += part.len();
    };
    put(&MAGIC);
    put(&[map.dimensions.len() as u8, map.element_bytes as u8, map.swizzle as u8, 0]);
    put(&map.address.to_le_bytes());
    for d in 0..5 {
        put(&map.dimensions.get(d).map_or(0, |&n| n).to_le_bytes());
        put(&map.strides.get(d).map_or(0, |&n| n).to_le_bytes());
        put(&(map.box_dimensions.get(d).map_or(0, |&n| n) as u16).to_le_bytes());
    }
    Ok(bytes)
}

fn decode(bytes: &[u8; TENSOR_MAP_BYTES]) -> Option<TensorMap> {
    let long = |at: usize| u64::from_le_bytes(bytes[at..at + 8].try_into().expect("8 bytes"));
    let rank = usize::from(bytes[4]);
    if bytes[..4] != MAGIC || !(1..=5).contains(&rank) {
        return None;
    }
    let swizzle = [Swizzle::None, Swizzle::Bytes32, Swizzle::Bytes64, Swizzle::Bytes128];
    Some(TensorMap {
        address: long(8),
        element_bytes: u32::from(bytes[5]),
        dimensions: (0..rank).map(|d| long(16 + 18 * d)).collect(),
        strides: (0..rank - 1).map(|d| long(24 + 18 * d)).collect(),
        box_dimensions: (0..rank).map(|d| u32::from(u16::from_le_bytes([bytes[32 + 18 * d], bytes[33 + 18 * d]]))).collect(),
        swizzle: *swizzle.get(usize::from(bytes[6]))?,
    })
}

impl TensorMap {
    fn validate(&self) -> Result<(), String> {
        let rank = self.dimensions.len();
        let check = |holds: bool, problem: &str| if holds { Ok(()) } else { Err(problem.to_owned()) };
        check((1..=5).contains(&rank), "the rank is not 1 to 5")?;
        check(self.strides.len() + 1 == rank, "there is not one stride for each outer dimension")?;
        check(self.box_dimensions.len() == rank, "the box has another rank")?;
        check(matches!(self.element_bytes, 1 | 2 | 4 | 8), "elements are not 1, 2, 4 or 8 bytes")?;
        check(self.address.is_multiple_of(16), "the address is no multiple of 16")?;
        check(self.strides.iter().all(|s| s.is_multiple_of(16) && *s < 1 << 40), "a stride is no multiple of 16 below 2^40")?;
        check(self.dimensions.iter().all(|&n| (1..=1 << 32).contains(&n)), "a dimension is not 1 to 2^32")?;
        check(self.box_dimensions.iter().all(|n| (1..=256).contains(n)), "a box dimension is not 1 to 256")?;
        let row = self.box_dimensions[0] * self.element_bytes;
        check(row.is_multiple_of(16), "the box's inner dimension is no multiple of 16 bytes")?;
        check(self.swizzle.span().is_none_or(|span| row <= span), "the box's inner dimension is wider than the swizzle")
    }

    /// The box at these coordinates, as pieces of at most 16 bytes in swizzled order or of whole rows.
    fn pieces(&self, coordinates: &[i32], shared: u32, store: bool) -> Vec<Piece> {
        let row = self.box_dimensions[0] * self.element_bytes;
        let pitch = row;
        let rows: u32 = self.box_dimensions[1..].iter().product();
        let mut pieces = Vec::new();
        for number in 0..rows {
            let row_address = self.row_address(coordinates, number);
            for start in (0..row).step_by(self.element_bytes as usize) {
                let x = i64::from(coordinates[0]) + i64::from(start / self.element_bytes);
                let inside = (0..self.dimensions[0] as i64).contains(&x);
                let global = row_address.filter(|_| inside).map(|row| row + x as u64 * u64::from(self.element_bytes));
                if store && global.is_none() {
                    continue;
                }
                let shared = self.swizzle.apply(shared + number * pitch + start);
                push_merged(&mut pieces, Piece { global, shared, bytes: self.element_bytes });
            }
        }
        pieces
    }

    /// Address of element zero of a row of the box, if the row is inside the tensor.
    fn row_address(&self, coordinates: &[i32], number: u32) -> Option<u64> {
        let mut rest = number;
        let mut address = self.address;
        for (d, (&coordinate, &stride)) in coordinates[1..].iter().zip(&self.strides).enumerate() {
            let index = i64::from(coordinate) + i64::from(rest % self.box_dimensions[d + 1]);
            rest /= self.box_dimensions[d + 1];
            if !(0..self.dimensions[d + 1] as i64).contains(&index) {
                return None;
            }
            // Hardware wraps addresses, which maps with an edge that moves rely on.
            address = address.wrapping_add((index as u64).wrapping_mul(stride));
        }
        Some(address)
    }
}

fn push_merged(pieces: &mut Vec<Piece>, next: Piece) {
    if let Some(last) = pieces.last_mut() {
        let follows = match (last.global, next.global) {
            (Some(a), Some(b)) => a + u64::from(last.bytes) == b,
            (None, None) => true,
            _ => false,
        };
        if follows && last.shared + last.bytes == next.shared {
            last.bytes += next.bytes;
            return;
        }
    }
    pieces.push(next);
}

/// Queues the copy of a box.
pub(crate) fn copy(thread: &Thread, direction: Direction, shared: u32, map: u64, coordinates: &[i32], mbarrier: Option<u32>, site: Site) {
    let (pieces, completion) = plan(thread, direction, shared, map, coordinates, mbarrier, site);
    async_copy::issue(thread, direction, pieces, completion, site);
}

/// Queues the copy of a box to the same place in every block of the cluster that `blocks` has a bit for.
pub(crate) fn multicast(thread: &Thread, shared: u32, map: u64, coordinates: &[i32], mbarrier: u32, blocks: u16, site: Site) {
    let (pieces, completion) = plan(thread, Direction::Load, shared, map, coordinates, Some(mbarrier), site);
    for rank in (0..16).filter(|rank| blocks >> rank & 1 == 1) {
        let target = cluster::peer(thread, rank, site);
        async_copy::issue_to(thread, &target, Direction::Load, pieces.clone(), completion, site);
    }
}

/// The pieces of a box, and how their completion is observed.
fn plan(
    thread: &Thread,
    direction: Direction,
    shared: u32,
    map: u64,
    coordinates: &[i32],
    mbarrier: Option<u32>,
    site: Site,
) -> (Vec<Piece>, Completion) {
    let fail = |message: String, mend: &'static str| -> ! { thread.fail(FaultKind::AsyncMisuse, site, message, mend) };
    if !map.is_multiple_of(64) {
        fail(format!("a tensor map at {map:#x}"), "place it at a multiple of 64");
    }
    let Some(allocation) = thread.worker().locate(READ, map, TENSOR_MAP_BYTES as u64) else {
        let (_, place) = thread.worker().describe_miss(map, TENSOR_MAP_BYTES as u64);
        fail(format!("a tensor map of {place}"), "pass the global address of an encoded tensor map");
    };
    let mut bytes = [0; TENSOR_MAP_BYTES];
    words::read_bytes(allocation.words(), (map - allocation.start) as usize, &mut bytes);
    let Some(map) = decode(&bytes) else {
        fail("the bytes there are no tensor map".to_owned(), "fill them with tensor_map::encode");
    };
    if map.dimensions.len() != coordinates.len() {
        fail(format!("{} coordinates for a map of rank {}", coordinates.len(), map.dimensions.len()), "pass one coordinate a dimension");
    }
    let alignment = map.swizzle.span().map_or(128, |span| span * 8);
    if !shared.is_multiple_of(alignment) {
        let place = thread.worker().shared.place(shared, 1);
        fail(format!("a box at {place} under {:?}", map.swizzle), "align it to 8 swizzled rows, 128 bytes without swizzle");
    }
    check_start(thread, &map, shared, coordinates[0], site);
    let bytes = map.box_dimensions.iter().product::<u32>() * map.element_bytes;
    if u64::from(shared) + u64::from(bytes) > u64::from(thread.block().shared_bytes()) {
        let (place, there) = (thread.worker().shared.place(shared, 1), thread.block().shared_bytes());
        fail(format!("a box of {bytes} bytes at {place}, which has {there}"), "launch with more shared memory");
    }
    let completion = match mbarrier {
        Some(mbarrier) => Completion::Bytes { mbarrier, bytes },
        None => Completion::BulkGroup(thread.bulk_groups.get()),
    };
    if let Some(explained) = &thread.worker().explained {
        let place = thread.worker().shared.place(shared, bytes);
        let (dimensions, swizzle) = (map.box_dimensions.clone(), map.swizzle.span().unwrap_or(0));
        explained.boxes.borrow_mut().insert(BoxCopy { place, dimensions, element_bytes: map.element_bytes, swizzle });
    }
    (map.pieces(coordinates, shared, direction != Direction::Load), completion)
}

/// A box begins at a multiple of 16 bytes of the tensor. The PTX ISA does not state it, but a device ends a kernel that begins one elsewhere with an illegal
/// instruction, as others have found too: `triton-lang/triton` issue 7385 and pull request 9112, `tile-ai/tilelang` issue 2527.
fn check_start(thread: &Thread, map: &TensorMap, shared: u32, first: i32, site: Site) {
    let past = (i64::from(first) * i64::from(map.element_bytes)).rem_euclid(16);
    if past == 0 {
        return;
    }
    let place = thread.worker().shared.place(shared, map.box_dimensions[0] * map.element_bytes);
    let message = format!(
        "a tensor copy beside {place} whose box begins at element {first} of the innermost dimension, of {} bytes each: {past} bytes past a multiple of 16",
        map.element_bytes
    );
    let mend = "begin boxes at multiples of 16 bytes of the innermost dimension, and pick the element inside the box; a device ends with an illegal instruction";
    thread.fail(FaultKind::Misaligned, site, message, mend);
}
