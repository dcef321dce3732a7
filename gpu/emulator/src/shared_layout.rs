//! What the pieces of the shared memory are called in reports: the layout that a kernel claims.

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

/// A field of a shared layout.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SharedField {
    /// Its name.
    pub name: String,
    /// Its offset in the block's shared memory.
    pub offset: u32,
    /// Its bytes, with what follows it up to the next field.
    pub bytes: u32,
}

impl SharedLayout {
    /// The fields of the layout itself, one after another.
    pub(crate) fn fields(&self) -> Vec<SharedField> {
        let mut fields: Vec<SharedField> = Vec::new();
        for offset in 0..self.bytes {
            let piece = (self.piece)(offset, 1);
            let name = piece.split(['[', '.']).next().unwrap_or_default();
            match fields.last_mut() {
                Some(last) if name == last.name || name.is_empty() => last.bytes = offset + 1 - last.offset,
                _ if name.is_empty() => {}
                _ => fields.push(SharedField { name: name.to_owned(), offset, bytes: 1 }),
            }
        }
        fields
    }
}

/// The layout that a launch's threads claimed last.
#[derive(Default)]
pub(crate) struct SharedNames(Cell<Option<SharedLayout>>);

impl SharedNames {
    /// A thread claims its block's shared memory for this layout.
    pub fn claim(&self, layout: SharedLayout) {
        self.0.set(Some(layout));
    }

    /// The layout's type and its fields.
    pub fn fields(&self) -> Option<(String, Vec<SharedField>)> {
        self.0.get().map(|layout| (layout.name.to_owned(), layout.fields()))
    }

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
