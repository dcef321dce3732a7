//! How both ends of a connection prove that they are of one job, before either tells the other anything of it.
//!
//! | step | from | frame |
//! |---|---|---|
//! | 1 | the rank | [`Opening`]: name and version of the protocol, a random number |
//! | 2 | rank 0 | [`Challenge`]: the same with a random number of its own, and its proof |
//! | 3 | the rank | [`Introduction`]: its proof, and which rank it is |
//! | 4 | rank 0 | [`Answer::Welcome`](super::wire::Answer::Welcome) |
//!
//! A proof is the HMAC-SHA256 (RFC 2104), with the job's name as key, of the end that it is of, the port, both random numbers and what it introduces. So the name
//! does not travel, an old proof is none for new numbers, that of one end is none of the other, and one that was made for a port is none at another. An end that
//! cannot prove itself gets no further frame.

use std::{fmt, io, time::Duration};

use hmac::{Hmac, Mac};
use rustix::rand::{GetRandomFlags, getrandom};
use sha2::Sha256;

use super::{
    job::beginning,
    wire::{Body, Parts},
};

/// The version of the protocol, of all that goes over a connection.
pub const VERSION: u8 = 6;
/// The longest frame in bytes of an end that has not proved itself. Longer than those of this version: one of another version is answered.
pub const LONGEST: usize = 512;

/// The first bytes of every connection, but for the version.
const NAME: [u8; 7] = *b"oxtile\0";
const MAGIC: [u8; 8] = *b"oxtile\0\x06";
const _: () = assert!(MAGIC[7] == VERSION);
/// The first bytes of what a proof is of: a key that is used elsewhere too proves nothing here.
const PURPOSE: &[u8] = b"oxtile rendezvous";

/// A random number that is used once.
pub type Nonce = [u8; 32];
/// The code of HMAC-SHA256.
pub type Proof = [u8; 32];

/// What both ends know, and no other program.
#[derive(Clone)]
pub struct Secret {
    /// The job's name, if it has one.
    pub job: Option<String>,
    /// The first port at which rank 0 may listen. Jobs that a launcher gives one name have different ones.
    pub port: u16,
}

/// The end of a connection that proves itself.
#[derive(Clone, Copy)]
enum End {
    Rank,
    Rank0,
}

/// Frames that are no part of the handshake.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Foreign {
    /// Another version of the protocol.
    Version(u8),
    /// Another program's.
    Unknown,
}

/// A rank's first frame.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Opening {
    pub nonce: Nonce,
}

/// Rank 0's answer to an opening. An opening of another version is answered by the first eight bytes of it, with rank 0's version.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Challenge {
    pub nonce: Nonce,
    pub proof: Proof,
}

/// A rank's answer to a challenge.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Introduction {
    pub proof: Proof,
    pub hello: Hello,
}

/// Which rank it is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Hello {
    pub rank: u32,
    pub world: u32,
    /// The user that runs it, as it states itself: a port that two users share is noticed, not defended.
    pub uid: u32,
    /// How long it waits for the others.
    pub timeout: Duration,
}

/// What both ends of one connection know: where rank 0 listens, and the numbers of the rank and of rank 0.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Exchange {
    pub port: u16,
    pub nonces: [Nonce; 2],
}

/// A random number.
///
/// # Errors
/// If the system has none.
pub fn nonce() -> io::Result<Nonce> {
    let mut nonce = [0; 32];
    // Up to 256 bytes come at once, and without a file descriptor, of which strangers may have taken the last.
    match getrandom(&mut nonce, GetRandomFlags::empty())? {
        32 => Ok(nonce),
        _ => Err(io::ErrorKind::UnexpectedEof.into()),
    }
}

impl Secret {
    /// The job in words: of its name only the beginning, since anyone who knows all of it can join.
    pub fn job_name(&self) -> String {
        match &self.job {
            Some(job) => format!("job {}... of port {}", beginning(job), self.port),
            None => format!("a job without a name, of port {}", self.port),
        }
    }

    /// Rank 0's answer to an opening.
    pub fn challenge(&self, exchange: &Exchange) -> Challenge {
        Challenge { nonce: exchange.nonces[1], proof: self.code(End::Rank0, exchange, &[]).finalize().into_bytes().into() }
    }

    /// Whether a challenge is of a rank 0 of this job. Takes the same time whichever bytes differ.
    pub fn is_of_job(&self, exchange: &Exchange, proof: &Proof) -> bool {
        self.code(End::Rank0, exchange, &[]).verify_slice(proof).is_ok()
    }

    /// A rank's answer to a challenge.
    pub fn introduce(&self, exchange: &Exchange, hello: Hello) -> Introduction {
        Introduction { proof: self.code(End::Rank, exchange, &hello.to_bytes()).finalize().into_bytes().into(), hello }
    }

    /// The rank that introduces itself, if it is of this job. Takes the same time whichever bytes differ.
    pub fn hello(&self, exchange: &Exchange, introduction: Introduction) -> Option<Hello> {
        let Introduction { proof, hello } = introduction;
        self.code(End::Rank, exchange, &hello.to_bytes()).verify_slice(&proof).is_ok().then_some(hello)
    }

    fn code(&self, end: End, exchange: &Exchange, hello: &[u8]) -> Hmac<Sha256> {
        let name = self.job.as_deref().unwrap_or_default();
        let mut code = <Hmac<Sha256> as Mac>::new_from_slice(name.as_bytes()).expect("a key of any length");
        // The key's length too: HMAC fills a short one up with zeros. A job without a name is none of an empty one.
        let length = self.job.as_ref().map_or(u32::MAX, |job| job.len() as u32);
        let numbers = [VERSION.into(), end as u32, length, self.port.into(), exchange.port.into()];
        code.update(PURPOSE);
        code.update(&numbers.into_iter().fold(Body::default(), Body::number).0);
        code.update(exchange.nonces.as_flattened());
        code.update(hello);
        code
    }
}

/// Without the name.
impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.job_name())
    }
}

/// What follows the name and the version of the protocol.
fn of_this_version(body: &[u8]) -> Result<&[u8], Foreign> {
    match body.strip_prefix(&NAME) {
        Some([VERSION, rest @ ..]) => Ok(rest),
        Some([version, ..]) => Err(Foreign::Version(*version)),
        _ => Err(Foreign::Unknown),
    }
}

/// The answer to an opening of another version.
pub fn other_version() -> Vec<u8> {
    MAGIC.into()
}

impl Opening {
    pub fn to_body(&self) -> Vec<u8> {
        [&MAGIC[..], &self.nonce].concat()
    }

    pub fn from_body(body: &[u8]) -> Result<Self, Foreign> {
        let nonce = of_this_version(body)?.try_into().map_err(|_| Foreign::Unknown)?;
        Ok(Self { nonce })
    }
}

impl Challenge {
    pub fn to_body(&self) -> Vec<u8> {
        [&MAGIC[..], &self.nonce, &self.proof].concat()
    }

    pub fn from_body(body: &[u8]) -> Result<Self, Foreign> {
        match of_this_version(body)?.as_chunks() {
            ([nonce, proof], []) => Ok(Self { nonce: *nonce, proof: *proof }),
            _ => Err(Foreign::Unknown),
        }
    }
}

impl Introduction {
    pub fn to_body(&self) -> Vec<u8> {
        [&self.proof[..], &self.hello.to_bytes()].concat()
    }

    pub fn from_body(body: &[u8]) -> Option<Self> {
        let (proof, hello) = body.split_first_chunk()?;
        Some(Self { proof: *proof, hello: Hello::from_bytes(hello)? })
    }
}

impl Hello {
    fn to_bytes(&self) -> Vec<u8> {
        let body = [self.rank, self.world, self.uid].into_iter().fold(Body::default(), Body::number);
        body.duration(self.timeout).0
    }

    fn from_bytes(bytes: &[u8]) -> Option<Self> {
        let mut parts = Parts(bytes);
        let [rank, world, uid] = [parts.number()?, parts.number()?, parts.number()?];
        let timeout = parts.duration()?;
        parts.end(Self { rank, world, uid, timeout })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn secret(job: Option<&str>) -> Secret {
        Secret { job: job.map(str::to_owned), port: 29500 }
    }

    fn exchange() -> Exchange {
        Exchange { port: 29501, nonces: [[1; 32], [2; 32]] }
    }

    fn hello() -> Hello {
        Hello { rank: 3, world: 8, uid: 1000, timeout: Duration::from_secs(30) }
    }

    /// By Python's `hmac.new(b"0123456789abcdef", message, "sha256")`, of
    /// `b"oxtile rendezvous" + struct.pack("<5I", 6, end, 16, 29500, 29501) + b"\1" * 32 + b"\2" * 32 + hello`.
    #[test]
    fn proofs_are_those_of_another_implementation() {
        let hex = |proof: Proof| proof.iter().map(|byte| format!("{byte:02x}")).collect::<String>();
        let secret = secret(Some("0123456789abcdef"));
        assert_eq!(hex(secret.challenge(&exchange()).proof), "622df5a001b1e675d220a7c43a327f587ca61c7de247f8b004881b9d57cf6330");
        assert_eq!(hex(secret.introduce(&exchange(), hello()).proof), "a1cdcfc23e3c6d5d660d118b8316ae31285a812465c69782e94c08996cca8304");
    }

    #[test]
    fn what_is_proved_is_all_of_it() {
        let (ours, at) = (secret(Some("ours")), exchange());
        let (challenge, introduction) = (ours.challenge(&at), ours.introduce(&at, hello()));
        assert!(ours.is_of_job(&at, &challenge.proof));
        assert_eq!(ours.hello(&at, introduction.clone()), Some(hello()));
        let [mut first, mut second, mut port] = [at.clone(), at.clone(), at.clone()];
        (first.nonces[0][31], second.nonces[1][0], port.port) = (0, 0, 29502);
        for other in [first, second, port] {
            assert!(!ours.is_of_job(&other, &challenge.proof) && ours.hello(&other, introduction.clone()).is_none(), "{other:?}");
        }
        let others = [secret(Some("ours\0")), secret(Some("")), secret(None), Secret { port: 29501, ..ours.clone() }];
        for other in others {
            assert!(!other.is_of_job(&at, &challenge.proof) && other.hello(&at, introduction.clone()).is_none(), "{other:?}");
        }
        // Nameless jobs are told apart by their ports alone, and none of them is one with an empty name.
        let proof = secret(Some("")).challenge(&at).proof;
        assert!(secret(Some("")).is_of_job(&at, &proof) && !secret(None).is_of_job(&at, &proof));
        // The proof of one end is none of the other, nor one of another rank.
        assert_eq!(ours.hello(&at, Introduction { proof: challenge.proof, hello: hello() }), None);
        assert!(!ours.is_of_job(&at, &introduction.proof));
        assert_eq!(ours.hello(&at, Introduction { hello: Hello { rank: 4, ..hello() }, ..introduction }), None);
        let mut proof = challenge.proof;
        proof[31] ^= 1;
        assert!(!ours.is_of_job(&at, &proof));
    }

    #[test]
    fn random_numbers_differ() {
        let [one, other] = [nonce().unwrap(), nonce().unwrap()];
        assert!(one != other && one != [0; 32]);
    }

    #[test]
    fn other_versions_are_known_as_such() {
        let mut body = Opening { nonce: [7; 32] }.to_body();
        assert!(body.len() <= LONGEST && Opening::from_body(&body) == Ok(Opening { nonce: [7; 32] }));
        body[7] = 5;
        assert_eq!((Opening::from_body(&body), Challenge::from_body(&body)), (Err(Foreign::Version(5)), Err(Foreign::Version(5))));
        assert_eq!(Challenge::from_body(b"oxtile\0\x07"), Err(Foreign::Version(7)));
        for unknown in [&b""[..], b"oxtile", b"oxtile\0", &other_version(), b"GET / HTTP/1.1\r\n\r\n"] {
            assert_eq!((Opening::from_body(unknown), Challenge::from_body(unknown)), (Err(Foreign::Unknown), Err(Foreign::Unknown)));
        }
    }

    #[test]
    fn no_job_is_named_in_full() {
        let shown = ["0123456789abcdef", "none", "äöü", "j"].map(|job| secret(Some(job)).job_name());
        assert_eq!(shown, ["job 012345... of port 29500", "job no... of port 29500", "job ä... of port 29500", "job ... of port 29500"]);
        assert_eq!(secret(None).job_name(), "a job without a name, of port 29500");
        assert_eq!(format!("{:?}", secret(Some("0123456789abcdef"))), "job 012345... of port 29500");
    }
}
