//! What the pieces of the shared memory are called in reports: the layout that a kernel claims.

use crate::fault::FaultKind;
use crate::site::Site;
use crate::thread::Thread;
use std::cell::Cell;

/// The layout of a block's shared memory, by which reports name its pieces.
#[derive(Clone, Copy, Debug)]
pub struct SharedLayout {
    /// Its type, such as `Shared`.
    pub name: &'static str,
    /// Bytes that it takes.
    pub bytes: u32,
    /// The smallest piece that holds so many bytes from an offset on, such as `maxima[5]`; empty where no piece does.
    pub piece: fn(offset: u32, bytes: u32) -> String,
}

/// The layout that a launch's threads claimed last.
#[derive(Default)]
pub(crate) struct SharedNames(Cell<Option<SharedLayout>>);

impl SharedNames {
    fn piece(&self, offset: u32, bytes: u32) -> Option<String> {
        let layout = self.0.get()?;
        let piece = (layout.piece)(offset, bytes);
        (!piece.is_empty()).then(|| format!("`{piece}` of `{}`", layout.name))
    }

    /// The piece of so many bytes at an offset.
    pub fn place(&self, offset: u32, bytes: u32) -> String {
        self.piece(offset, bytes).unwrap_or_else(|| format!("offset {offset} of the block's shared memory"))
    }

    /// The mbarrier at an offset.
    pub fn mbarrier(&self, offset: u32) -> String {
        self.piece(offset, 1).map_or_else(|| format!("the mbarrier at {offset}"), |piece| format!("the mbarrier {piece}"))
    }
}

/// The thread takes the shared memory for this layout.
pub(crate) fn claim(thread: &Thread, layout: SharedLayout, site: Site) {
    let there = thread.block().shared_bytes();
    if layout.bytes > there {
        let SharedLayout { name, bytes, .. } = layout;
        let message = format!("the kernel claims `{name}`, {bytes} bytes of shared memory; its launch has {there}");
        thread.fail(FaultKind::OutOfBounds, site, message, "name the layout in the kernel's attribute: #[kernel(shared = ..)]");
    }
    thread.worker().shared.0.set(Some(layout));
}
