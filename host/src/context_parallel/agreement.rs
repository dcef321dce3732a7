//! All ranks make the same operation.

use std::sync::Mutex;

use super::memory::{Scratch, bytes, bytes_mut, note};
use super::transport::Transport;
use crate::rank::Rank;
use crate::runtime::runtime::lock;
use crate::runtime::{Buffer, Error, Result, Stream};

/// Bytes of a text that are compared.
const TEXT: usize = 2048;

/// What this rank has made, and whether the others have made the same.
pub(super) struct Agreement {
    text: String,
    /// The texts of all ranks, on the device.
    all: Scratch<u8>,
    /// Names the operation among those of an arena.
    number: u64,
    /// Whether they were compared, or why they differ.
    compared: Mutex<Option<Result<(), Difference>>>,
}

/// Another rank's operation.
#[derive(Clone)]
struct Difference {
    other: Rank,
    expected: String,
}

impl Agreement {
    /// Tells the others. Waits for no other rank.
    pub fn new(stream: &Stream, transport: &Transport<'_>, text: String) -> Result<Self> {
        let mut padded = text.clone().into_bytes();
        padded.resize(TEXT, 0);
        let own = Buffer::<u8>::from_slice(stream, &padded)?;
        let ranks = transport.place()?.1;
        let all = Scratch::new(stream, "operations of all ranks", TEXT as u64 * u64::from(ranks.get()))?;
        let mut number = 0;
        match (transport.messages, transport.memory) {
            (Some(messages), _) => messages.gather(stream, bytes(own.view()), bytes_mut(all.lend()))?,
            (None, Some((arena, _))) => {
                // All ranks take the same from an arena in one order, so the number of what is taken next names the operation.
                number = arena.flags("an operation of context parallelism", 1)?.number() as u64;
                arena.note(&name(number), &text)?;
            }
            (None, None) => {}
        }
        Ok(Self { text, all, number, compared: Mutex::default() })
    }

    /// Compares this rank's operation with the others', once, and waits for them.
    ///
    /// # Errors
    /// [`Error::Mismatch`] with both texts.
    pub fn compare(&self, stream: &Stream, transport: &Transport<'_>) -> Result<()> {
        let mut compared = lock(&self.compared);
        let Some(messages) = transport.messages else {
            if let (None, Some((arena, member))) = (&*compared, transport.memory) {
                arena.compare_notes(&name(self.number), self.number, &self.text, member.others_in_world())?;
                *compared = Some(Ok(()));
            }
            return Ok(());
        };
        if compared.is_none() {
            // Within the deadline of the transport: a rank may have failed to make its operation. After the gather, which another stream may have.
            note(stream, &[self.all.access(false)])?;
            messages.wait(stream)?;
            let all = self.all.to_vec(stream)?;
            let differs = |(other, text): (Rank, &[u8])| {
                let own = &self.text.as_bytes()[..self.text.len().min(TEXT)];
                let end = text.iter().rposition(|byte| *byte != 0).map_or(0, |last| last + 1);
                (text[..end] != *own).then(|| Difference { other, expected: String::from_utf8_lossy(&text[..end]).into_owned() })
            };
            let difference = messages.world().ranks().zip(all.chunks(TEXT)).find_map(differs);
            *compared = Some(difference.map_or(Ok(()), Err));
        }
        match &*compared {
            Some(Err(Difference { other, expected })) => Err(Error::Mismatch {
                group: "context parallelism".to_owned(),
                sequence: 0,
                rank: messages.rank(),
                found: self.text.clone(),
                other: *other,
                expected: expected.clone(),
            }),
            _ => Ok(()),
        }
    }
}

fn name(number: u64) -> String {
    format!("context parallelism {number}")
}
