//! What holds for any bytes that come over a connection. Tests by chosen bytes, below, and by found ones (`fuzz/`) share it.

use std::io::{self, Read};

use super::{
    frame::PartialFrame,
    handshake::{Challenge, Introduction, LONGEST, Opening},
    wire::{Answer, Call, Post, Request},
};

/// What is read as a body, of any kind, is written as it was: no two bodies mean the same, and no byte is without a meaning.
///
/// # Panics
/// Where that does not hold.
pub fn bodies(body: &[u8]) {
    let written = [
        Opening::from_body(body).ok().map(|opening| opening.to_body()),
        Challenge::from_body(body).ok().map(|challenge| challenge.to_body()),
        Introduction::from_body(body).map(|introduction| introduction.to_body()),
        Call::from_body(body).map(|call| call.to_body()),
        Post::from_body(body).map(|post| post.to_body()),
        Answer::from_body(body).map(|answer| answer.to_body()),
    ];
    for (kind, written) in written.into_iter().enumerate() {
        assert!(written.is_none_or(|written| written == body), "kind {kind}: {body:?}");
    }
    let is_both = Call::from_body(body).is_some() && Post::from_body(body).is_some();
    assert!(
        !is_both && Request::from_body(body).is_some() == (Call::from_body(body).is_some() || Post::from_body(body).is_some()),
        "{body:?}"
    );
}

/// Frames that come in pieces, whose sizes follow from the first byte, are those of the bytes as a whole, and nothing is read of what is too long.
///
/// # Panics
/// Where that does not hold.
pub fn frames(bytes: &[u8]) {
    let piece = usize::from(bytes.first().copied().unwrap_or(0)) % 9 + 1;
    let mut stream = Pieces { bytes, piece, is_pause: false };
    let (mut frame, mut rest) = (PartialFrame::default(), bytes);
    loop {
        let expected = match rest.split_first_chunk() {
            Some((length, _)) if u32::from_le_bytes(*length) as usize > LONGEST => Err(io::ErrorKind::InvalidData),
            Some((length, after)) => after.split_at_checked(u32::from_le_bytes(*length) as usize).ok_or(io::ErrorKind::UnexpectedEof),
            None => Err(io::ErrorKind::UnexpectedEof),
        };
        let found = loop {
            match frame.read(&mut stream, LONGEST) {
                Ok(Some(body)) => break Ok(body),
                Ok(None) => {}
                Err(error) => break Err(error.kind()),
            }
        };
        assert_eq!(found.as_deref(), expected.as_ref().map(|(body, _)| *body), "{bytes:?}");
        let read = match expected {
            Ok((body, after)) => {
                rest = after;
                4 + body.len()
            }
            Err(io::ErrorKind::InvalidData) => return assert_eq!(stream.bytes.len(), rest.len() - 4, "{bytes:?}"),
            Err(_) => return,
        };
        assert!(read >= 4 && stream.bytes.len() == rest.len(), "a byte more was read: {bytes:?}");
    }
}

/// A connection on which a few bytes come at a time, with a pause after each time.
struct Pieces<'a> {
    bytes: &'a [u8],
    piece: usize,
    is_pause: bool,
}

impl Read for &mut Pieces<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        self.is_pause = !self.is_pause;
        if self.is_pause {
            return Err(io::ErrorKind::WouldBlock.into());
        }
        let count = self.piece.min(buffer.len()).min(self.bytes.len());
        let (now, later) = self.bytes.split_at(count);
        buffer[..count].copy_from_slice(now);
        self.bytes = later;
        Ok(count)
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use proptest::prelude::*;

    use super::super::{handshake::Hello, wire::Operation};
    use super::*;

    fn config() -> ProptestConfig {
        ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(512) }
    }

    fn operation() -> impl Strategy<Value = Operation> {
        prop_oneof![
            Just(Operation::AllGather),
            any::<u32>().prop_map(Operation::Broadcast),
            Just(Operation::Barrier),
            Just(Operation::Close),
            Just(Operation::Board)
        ]
    }

    fn bytes() -> impl Strategy<Value = Vec<u8>> {
        prop::collection::vec(any::<u8>(), 0..40)
    }

    fn millis() -> impl Strategy<Value = Duration> {
        any::<u32>().prop_map(|millis| Duration::from_millis(millis.into()))
    }

    fn call() -> impl Strategy<Value = Call> {
        (operation(), millis(), bytes()).prop_map(|(operation, timeout, payload)| Call { operation, timeout, payload })
    }

    fn post() -> impl Strategy<Value = Post> {
        let note = (".{0,9}", bytes(), prop::collection::vec(any::<u32>(), 0..5));
        prop_oneof![
            note.prop_map(|(key, note, readers)| Post::Note { key, note, readers }),
            (prop::option::of(".{0,9}"), ".{0,9}").prop_map(|(scope, why)| Post::GaveUp { scope, why })
        ]
    }

    fn answer() -> impl Strategy<Value = Answer> {
        prop_oneof![
            prop::collection::vec(bytes(), 0..5).prop_map(Answer::Done),
            ".{0,20}".prop_map(Answer::Refused),
            any::<u32>().prop_map(Answer::Lost),
            prop::collection::vec(any::<u32>(), 0..9).prop_map(Answer::Missing),
            (any::<u32>(), operation(), operation()).prop_map(|(rank, found, expected)| Answer::Mismatch { rank, found, expected }),
            (any::<u32>(), post()).prop_map(|(rank, post)| Answer::News { rank, post }),
            Just(Answer::Welcome)
        ]
    }

    fn introduction() -> impl Strategy<Value = Introduction> {
        let hello = (any::<[u32; 3]>(), millis()).prop_map(|([rank, world, uid], timeout)| Hello { rank, world, uid, timeout });
        (any::<[u8; 32]>(), hello).prop_map(|(proof, hello)| Introduction { proof, hello })
    }

    fn body() -> impl Strategy<Value = Vec<u8>> {
        prop_oneof![
            call().prop_map(|call| call.to_body()),
            post().prop_map(|post| post.to_body()),
            answer().prop_map(|answer| answer.to_body()),
            introduction().prop_map(|introduction| introduction.to_body()),
            any::<[u8; 32]>().prop_map(|nonce| Opening { nonce }.to_body()),
            any::<[[u8; 32]; 2]>().prop_map(|[nonce, proof]| Challenge { nonce, proof }.to_body()),
            bytes()
        ]
    }

    proptest! {
        #![proptest_config(config())]

        #[test]
        fn what_is_written_is_read(call in call(), post in post(), answer in answer(), introduction in introduction()) {
            prop_assert_eq!(Request::from_body(&call.to_body()), Some(Request::Call(call)));
            prop_assert_eq!(Request::from_body(&post.to_body()), Some(Request::Post(post)));
            prop_assert_eq!(Answer::from_body(&answer.to_body()), Some(answer));
            prop_assert_eq!(Introduction::from_body(&introduction.to_body()), Some(introduction));
        }

        /// Bodies with bytes that are changed, cut off or more.
        #[test]
        fn what_is_read_is_written(
            body in body(), changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 0..3), cut in 0usize..4, more in 0usize..2
        ) {
            let mut body = body;
            for (at, byte) in changes {
                if !body.is_empty() {
                    let at = at.index(body.len());
                    body[at] = byte;
                }
            }
            body.truncate(body.len().saturating_sub(cut));
            body.extend(vec![0; more]);
            bodies(&body);
        }

        #[test]
        fn frames_in_pieces_are_whole(
            lengths in prop::collection::vec(prop_oneof![8 => 0u32..20, 1 => 400u32..600, 1 => any::<u32>()], 0..5), missing in 0usize..9
        ) {
            let mut all = Vec::new();
            for (number, length) in lengths.into_iter().enumerate() {
                all.extend(length.to_le_bytes());
                all.extend(vec![number as u8; length.min(700) as usize]);
            }
            all.truncate(all.len().saturating_sub(missing));
            frames(&all);
        }
    }
}
