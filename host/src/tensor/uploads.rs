//! What a bind copies to the device together, without a wait of the host: tensor maps and small arrays.

use std::sync::{Arc, OnceLock};

use oxtile_tile::launch::DeviceView;

use super::table::upload;
use crate::runtime::{Buffer, Error, Result, Stream};

/// Words that wait to be copied.
#[derive(Default)]
pub(crate) struct Uploads {
    words: Vec<u64>,
    buffer: Arc<OnceLock<Buffer<u64>>>,
}

/// Some of the words, once [`Uploads::copy`] has copied them.
pub(crate) struct Uploaded {
    buffer: Arc<OnceLock<Buffer<u64>>>,
    first: usize,
    words: usize,
}

/// What travels in the call itself: the maps of any one operation, and the sequences of some hundred batches.
const MOST_IN_CALLS: usize = 1024;

/// Tensor maps lie at multiples of 64 bytes.
const ALIGNMENT: usize = 8;

impl Uploads {
    /// Adds words, which begin at a multiple of 64 bytes.
    pub fn add(&mut self, words: &[u64]) -> Uploaded {
        let first = self.words.len();
        self.words.extend_from_slice(words);
        self.words.resize(self.words.len().next_multiple_of(ALIGNMENT), 0);
        Uploaded { buffer: Arc::clone(&self.buffer), first, words: words.len() }
    }

    /// Adds an array of `u32`.
    pub fn add_array(&mut self, values: &[u32]) -> UploadedArray {
        let pair = |pair: &[u32]| u64::from(pair[0]) | u64::from(pair.get(1).copied().unwrap_or(0)) << 32;
        UploadedArray { uploaded: self.add(&values.chunks(2).map(pair).collect::<Vec<_>>()), len: values.len() as u64 }
    }

    /// Copies all of them in stream order; the host does not wait for work. Few words travel in the call itself; many, by page-locked memory, whose
    /// allocation may wait.
    ///
    /// # Errors
    /// As [`Buffer::uninitialised`]; a driver error. [`Error::NotCapturable`] during the capture of another library.
    #[track_caller]
    pub fn copy(self, stream: &Stream) -> Result<()> {
        let backend = &stream.0.runtime.backend;
        let buffer = if self.words.len() <= MOST_IN_CALLS && backend.writes_words(stream.0.id)? {
            let mut buffer = Buffer::uninitialised(stream, self.words.len() as u64)?;
            buffer.write_words(stream, &self.words)?;
            buffer
        } else if backend.is_capturing(stream.0.id)? {
            let mend = "bind before the capture, and capture the bound run alone";
            return Err(Error::NotCapturable { what: "a bind, which copies tensor maps from the host", mend });
        } else {
            upload(stream, &self.words)?
        };
        self.buffer.set(buffer).unwrap_or_else(|_| unreachable!("`copy` takes the only uploads of these words"));
        Ok(())
    }
}

impl Uploaded {
    /// The words on the device.
    ///
    /// # Panics
    /// Before [`Uploads::copy`].
    pub fn view(&self) -> DeviceView<'_, u64> {
        let buffer = self.buffer.get().expect("the bind copies its uploads before it lends them");
        buffer.view().slice(self.first as u64, (self.first + self.words) as u64)
    }
}

/// An array of `u32` among the words.
pub(crate) struct UploadedArray {
    uploaded: Uploaded,
    len: u64,
}

impl UploadedArray {
    /// The array on the device. Panics as [`Uploaded::view`].
    pub fn view(&self) -> DeviceView<'_, u32> {
        let access = self.uploaded.view().access("array");
        // SAFETY: `add_array` put so many elements into these words, which live as long as the view's owner.
        unsafe { DeviceView::from_raw(access.address, self.len, access.owner) }
    }
}
