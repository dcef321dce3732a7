//! What goes over a connection once both ends have proved themselves: the bodies of frames, all numbers little-endian.

use std::{
    fmt, io,
    net::TcpStream,
    time::{Duration, Instant},
};

use super::frame::read_frame;

/// The longest frame: the longest contributions of 4096 ranks.
const MAX_FRAME: u32 = u32::MAX;
/// The longest contribution of a rank to one operation.
pub const MAX_PAYLOAD: usize = 1 << 20;
/// The longest frame that a client sends.
pub const MAX_REQUEST: u32 = MAX_PAYLOAD as u32 + 4096;

/// What all ranks do together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Operation {
    /// Every rank gets the contributions of all.
    AllGather,
    /// Every rank gets the contribution of one.
    Broadcast(u32),
    /// Every rank waits for all.
    Barrier,
    /// The same, as the last operation.
    Close,
    /// The same; from here on ranks post notes.
    Board,
}

/// A rank's part in an operation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Call {
    pub operation: Operation,
    pub timeout: Duration,
    pub payload: Vec<u8>,
}

/// A rank's message to all others, once they have a board.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Post {
    /// A note and its key, for some ranks, or for all where none is named.
    Note { key: String, note: Vec<u8>, readers: Vec<u32> },
    /// No more notes with keys that begin so; no more at all without it.
    GaveUp { scope: Option<String>, why: String },
}

/// What a rank sends once it is let in.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Request {
    Call(Call),
    Post(Post),
}

/// What rank 0 answers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Answer {
    /// The first answer: the rank has proved that it is of this job.
    Welcome,
    /// The operation is done, with its result.
    Done(Vec<Vec<u8>>),
    /// The rank is not taken.
    Refused(String),
    /// A rank is gone.
    Lost(u32),
    /// Ranks did not come in time.
    Missing(Vec<u32>),
    /// A rank called another operation than the first.
    Mismatch { rank: u32, found: Operation, expected: Operation },
    /// Another rank's post.
    News { rank: u32, post: Post },
}

impl fmt::Display for Operation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::AllGather => f.write_str("an all-gather"),
            Self::Broadcast(root) => write!(f, "a broadcast of rank {root}"),
            Self::Barrier => f.write_str("a barrier"),
            Self::Close => f.write_str("the closing of the store"),
            Self::Board => f.write_str("the setting up of the board"),
        }
    }
}

/// A body being written.
#[derive(Default)]
pub struct Body(pub Vec<u8>);

impl Body {
    pub fn number(mut self, number: u32) -> Self {
        self.0.extend(number.to_le_bytes());
        self
    }

    /// In milliseconds, rounded up: no deadline is earlier than it was asked for.
    pub fn duration(self, duration: Duration) -> Self {
        self.number(u32::try_from(duration.as_nanos().div_ceil(1_000_000)).unwrap_or(u32::MAX))
    }

    fn bytes(self, bytes: &[u8]) -> Self {
        let mut body = self.number(bytes.len() as u32);
        body.0.extend(bytes);
        body
    }

    /// A text, if there is one.
    fn optional(self, text: Option<&str>) -> Self {
        let count = self.number(text.iter().len() as u32);
        text.into_iter().fold(count, |body, text| body.bytes(text.as_bytes()))
    }
}

/// A body being read; `None` where it ends too early.
pub struct Parts<'a>(pub &'a [u8]);

impl<'a> Parts<'a> {
    pub fn number(&mut self) -> Option<u32> {
        let (number, rest) = self.0.split_first_chunk()?;
        self.0 = rest;
        Some(u32::from_le_bytes(*number))
    }

    pub fn duration(&mut self) -> Option<Duration> {
        self.number().map(|millis| Duration::from_millis(millis.into()))
    }

    fn bytes(&mut self) -> Option<&'a [u8]> {
        let length = self.number()? as usize;
        let (bytes, rest) = self.0.split_at_checked(length)?;
        self.0 = rest;
        Some(bytes)
    }

    fn text(&mut self) -> Option<String> {
        String::from_utf8(self.bytes()?.into()).ok()
    }

    fn optional(&mut self) -> Option<Option<String>> {
        match self.number()? {
            0 => Some(None),
            1 => self.text().map(Some),
            _ => None,
        }
    }

    pub fn end<T>(self, value: T) -> Option<T> {
        self.0.is_empty().then_some(value)
    }
}

impl Operation {
    fn code(self) -> [u32; 2] {
        match self {
            Self::AllGather => [0, 0],
            Self::Broadcast(root) => [1, root],
            Self::Barrier => [2, 0],
            Self::Close => [3, 0],
            Self::Board => [4, 0],
        }
    }

    fn from_parts(parts: &mut Parts<'_>) -> Option<Self> {
        match [parts.number()?, parts.number()?] {
            [0, 0] => Some(Self::AllGather),
            [1, root] => Some(Self::Broadcast(root)),
            [2, 0] => Some(Self::Barrier),
            [3, 0] => Some(Self::Close),
            [4, 0] => Some(Self::Board),
            _ => None,
        }
    }
}

impl Call {
    pub fn to_body(&self) -> Vec<u8> {
        let [kind, root] = self.operation.code();
        Body::default().number(kind).number(root).duration(self.timeout).bytes(&self.payload).0
    }

    pub fn from_body(body: &[u8]) -> Option<Self> {
        let mut parts = Parts(body);
        let operation = Operation::from_parts(&mut parts)?;
        let (timeout, payload) = (parts.duration()?, parts.bytes()?.to_vec());
        parts.end(Self { operation, timeout, payload })
    }
}

impl Post {
    /// A code that no operation has.
    const NOTE: u32 = 16;
    const GAVE_UP: u32 = 17;

    pub fn to_body(&self) -> Vec<u8> {
        let body = |code| Body::default().number(code);
        match self {
            Self::Note { key, note, readers } => {
                let body = body(Self::NOTE).bytes(key.as_bytes()).bytes(note).number(readers.len() as u32);
                readers.iter().fold(body, |body, rank| body.number(*rank)).0
            }
            Self::GaveUp { scope, why } => body(Self::GAVE_UP).optional(scope.as_deref()).bytes(why.as_bytes()).0,
        }
    }

    pub fn from_body(body: &[u8]) -> Option<Self> {
        let mut parts = Parts(body);
        let post = match parts.number()? {
            Self::NOTE => {
                let (key, note, count) = (parts.text()?, parts.bytes()?.to_vec(), parts.number()?);
                Self::Note { key, note, readers: (0..count).map(|_| parts.number()).collect::<Option<_>>()? }
            }
            Self::GAVE_UP => Self::GaveUp { scope: parts.optional()?, why: parts.text()? },
            _ => return None,
        };
        parts.end(post)
    }
}

impl Request {
    pub fn from_body(body: &[u8]) -> Option<Self> {
        Call::from_body(body).map(Self::Call).or_else(|| Post::from_body(body).map(Self::Post))
    }
}

impl Answer {
    pub fn to_body(&self) -> Vec<u8> {
        let tag = |tag| Body::default().number(tag);
        match self {
            Self::Done(parts) => parts.iter().fold(tag(0).number(parts.len() as u32), |body, part| body.bytes(part)).0,
            Self::Refused(reason) => tag(1).bytes(reason.as_bytes()).0,
            Self::Lost(rank) => tag(2).number(*rank).0,
            Self::Missing(ranks) => ranks.iter().fold(tag(3).number(ranks.len() as u32), |body, rank| body.number(*rank)).0,
            Self::Mismatch { rank, found, expected } => {
                let codes = [found.code(), expected.code()].concat();
                codes.into_iter().fold(tag(4).number(*rank), Body::number).0
            }
            Self::News { rank, post } => tag(5).number(*rank).bytes(&post.to_body()).0,
            Self::Welcome => tag(6).0,
        }
    }

    pub fn from_body(body: &[u8]) -> Option<Self> {
        let mut parts = Parts(body);
        let answer = match parts.number()? {
            0 => {
                let count = parts.number()?;
                Self::Done((0..count).map(|_| parts.bytes().map(<[u8]>::to_vec)).collect::<Option<_>>()?)
            }
            1 => Self::Refused(parts.text()?),
            2 => Self::Lost(parts.number()?),
            3 => {
                let count = parts.number()?;
                Self::Missing((0..count).map(|_| parts.number()).collect::<Option<_>>()?)
            }
            4 => {
                let rank = parts.number()?;
                Self::Mismatch { rank, found: Operation::from_parts(&mut parts)?, expected: Operation::from_parts(&mut parts)? }
            }
            5 => Self::News { rank: parts.number()?, post: Post::from_body(parts.bytes()?)? },
            6 => Self::Welcome,
            _ => return None,
        };
        parts.end(answer)
    }
}

/// Reads an answer.
///
/// # Errors
/// As [`read_frame`]; [`InvalidData`](io::ErrorKind::InvalidData) for other bytes.
pub fn read_answer(stream: &TcpStream, deadline: Instant) -> io::Result<Answer> {
    let body = read_frame(stream, MAX_FRAME, Some(deadline))?;
    Answer::from_body(&body).ok_or_else(|| io::Error::new(io::ErrorKind::InvalidData, "an unknown frame"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bodies_are_read_as_written_and_nothing_else() {
        for operation in [Operation::AllGather, Operation::Broadcast(7), Operation::Barrier, Operation::Close, Operation::Board] {
            let call = Call { operation, timeout: Duration::from_secs(1), payload: vec![1, 2] };
            assert_eq!(Request::from_body(&call.to_body()), Some(Request::Call(call)));
        }
        let note = Post::Note { key: "k".into(), note: vec![7], readers: vec![0, 2] };
        let for_all = Post::Note { key: "k".into(), note: vec![], readers: vec![] };
        let gave_up = |scope: Option<&str>| Post::GaveUp { scope: scope.map(str::to_owned), why: "w".into() };
        for post in [note.clone(), for_all, gave_up(Some("s")), gave_up(None)] {
            assert_eq!(Request::from_body(&post.to_body()), Some(Request::Post(post)));
        }
        for answer in [
            Answer::Done(vec![vec![], vec![1, 2]]),
            Answer::Refused("no".into()),
            Answer::Lost(3),
            Answer::Missing(vec![1, 5]),
            Answer::Mismatch { rank: 2, found: Operation::Barrier, expected: Operation::Broadcast(1) },
            Answer::News { rank: 1, post: note },
            Answer::Welcome,
        ] {
            let body = answer.to_body();
            for cut in 0..body.len() {
                assert_eq!(Answer::from_body(&body[..cut]), None, "{answer:?} cut at {cut}");
            }
            assert_eq!(Answer::from_body(&[&body[..], &[0]].concat()), None, "{answer:?} with a byte more");
            assert_eq!(Answer::from_body(&body), Some(answer));
        }
        assert_eq!(Answer::from_body(&[3, 0, 0, 0, 255, 255, 255, 255]), None, "a count is no allocation");
    }
}
