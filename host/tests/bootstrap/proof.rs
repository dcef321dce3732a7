//! Programs that do not know the job's name, at either end of a connection. The frames are made here by hand, as another implementation makes them.

use std::{
    fs::File,
    io::{ErrorKind, Read, Write},
    net::{TcpListener, TcpStream},
    thread,
    time::{Duration, Instant},
};

use hmac::{Hmac, Mac};
use libtest_mimic::Trial;
use oxtile::comm::bootstrap::{BootstrapError, Store};
use sha2::Sha256;

use crate::{
    free_port,
    strangers::{TIMEOUT, environment, free_ports, with_spares},
    trial,
};

/// Name and version of the protocol.
pub const MAGIC: [u8; 8] = *b"oxtile\0\x06";
pub const JOB: &str = "0123456789abcdef0123456789abcdef";
/// How long a connection may take to prove itself, in rank 0.
const PROOF_TIMEOUT: Duration = Duration::from_secs(10);

pub fn trials() -> Vec<Trial> {
    vec![
        trial("proof::a_rank_0_without_the_name_is_not_believed", false_rank_0),
        trial("proof::a_rank_0_of_another_version_is_named", other_version),
        trial("proof::what_another_port_passes_on_is_no_proof", relay),
        trial("proof::false_ranks_0_at_other_ports_change_nothing", false_ranks_0_beside_the_true_one),
        trial("proof::a_rank_without_the_name_is_not_let_in", false_ranks),
        trial("proof::what_was_recorded_opens_nothing", replay),
        trial("proof::another_implementation_is_let_in", true_rank),
        trial("proof::silence_has_its_time", silence),
    ]
}

/// A frame with its length.
pub fn frame(body: &[u8]) -> Vec<u8> {
    [&(body.len() as u32).to_le_bytes(), body].concat()
}

/// Rank 1 of two, of user `uid`, which waits for 20 s.
fn hello(uid: u32) -> Vec<u8> {
    [1, 2, uid, 20_000].map(u32::to_le_bytes).concat()
}

/// The proof of rank 0 (`end` 1), or of a rank that says `hello` (`end` 0), for a job whose first port is the one that is asked at.
fn proof(job: &str, end: u32, port: u16, nonces: [&[u8]; 2], hello: &[u8]) -> Vec<u8> {
    proof_at(job, end, [port; 2], nonces, hello)
}

/// The same for a job's first port and the one that is asked at.
fn proof_at(job: &str, end: u32, [first, at]: [u16; 2], nonces: [&[u8]; 2], hello: &[u8]) -> Vec<u8> {
    let mut code = Hmac::<Sha256>::new_from_slice(job.as_bytes()).expect("any key");
    let numbers = [6, end, job.len() as u32, first.into(), at.into()].map(u32::to_le_bytes).concat();
    [b"oxtile rendezvous", &numbers[..], nonces[0], nonces[1], hello].into_iter().for_each(|part| code.update(part));
    code.finalize().into_bytes().to_vec()
}

pub fn opening(nonce: &[u8; 32]) -> Vec<u8> {
    frame(&[&MAGIC[..], nonce].concat())
}

fn challenge(nonce: &[u8], proof: &[u8]) -> Vec<u8> {
    frame(&[&MAGIC[..], nonce, proof].concat())
}

/// A connection to a program that listens soon.
pub fn connect(port: u16) -> TcpStream {
    let deadline = Instant::now() + TIMEOUT;
    loop {
        match TcpStream::connect(("127.0.0.1", port)) {
            Ok(stream) => {
                stream.set_read_timeout(Some(TIMEOUT)).expect("an option");
                return stream;
            }
            Err(error) => assert!(Instant::now() < deadline, "{error}"),
        }
        thread::sleep(Duration::from_millis(5));
    }
}

/// The body of a frame of so many bytes.
fn body(stream: &mut TcpStream, bytes: usize) -> Vec<u8> {
    let mut frame = vec![0; 4 + bytes];
    stream.read_exact(&mut frame).expect("a frame");
    assert_eq!(frame[..4], (bytes as u32).to_le_bytes());
    frame.split_off(4)
}

/// All that is sent until the connection ends, however it ends.
fn rest(stream: &mut TcpStream) -> Vec<u8> {
    let mut said = Vec::new();
    match stream.read_to_end(&mut said) {
        Err(error) if error.kind() != ErrorKind::ConnectionReset => panic!("the connection is open after {TIMEOUT:?}: {error}"),
        _ => said,
    }
}

/// The frame by which an older rank 0 lets a rank in, and that of an all-gather's result.
fn welcome_of_version_5() -> Vec<u8> {
    [frame(&6_u32.to_le_bytes()), frame(&[0_u32, 0].map(u32::to_le_bytes).concat())].concat()
}

/// How a program that does not know the job's name answers an opening.
type Answers = fn(u16, &[u8]) -> Vec<u8>;
const FALSE: [(&str, Answers); 6] = [
    ("an older rank 0", |_, _| welcome_of_version_5()),
    ("an echo", |_, opening| frame(opening)),
    ("an echo of the number as number and proof", |_, opening| challenge(&opening[8..], &opening[8..])),
    ("no proof", |_, _| challenge(&[1; 32], &[2; 32])),
    ("the proof of another name", |port, opening| challenge(&[1; 32], &proof("theirs", 1, port, [&opening[8..], &[1; 32]], &[]))),
    ("the proof of another port", |port, opening| challenge(&[1; 32], &proof_at(JOB, 1, [port, port + 1], [&opening[8..], &[1; 32]], &[]))),
];

/// Answers all that come to a port, until the test's process ends, and returns what the first have said at `heard`.
fn answer_at(listener: TcpListener, answers: Answers) -> std::sync::mpsc::Receiver<Vec<u8>> {
    let (said, heard) = std::sync::mpsc::channel();
    let port = listener.local_addr().expect("an address").port();
    thread::spawn(move || {
        for mut stream in listener.incoming().flatten() {
            let mut opening = vec![0; 44];
            if stream.read_exact(&mut opening).is_err() {
                continue;
            }
            let _ = stream.write_all(&[&answers(port, &opening[4..])[..], &welcome_of_version_5()].concat());
            let _ = stream.set_read_timeout(Some(TIMEOUT));
            let _ = stream.read_to_end(&mut opening);
            let _ = said.send(opening);
        }
    });
    heard
}

fn false_rank_0() {
    for (title, answers) in FALSE {
        let listener = TcpListener::bind(("127.0.0.1", 0)).expect("a free port");
        let port = listener.local_addr().expect("an address").port();
        let heard = answer_at(listener, answers);
        let error = Store::connect(&environment(port, 1, 2, JOB), Duration::from_millis(600)).expect_err(title);
        let is_other = matches!(error, BootstrapError::OtherJob { .. });
        assert!(is_other || matches!(error, BootstrapError::Occupied { .. }), "{title}: {error:?}");
        assert_eq!(is_other, title.contains("proof"), "{title}: {error:?}");
        assert!(!error.to_string().contains(JOB), "{error}");
        // Nothing of the job was told: a frame of a version and a random number, and nothing else.
        let heard = heard.recv_timeout(TIMEOUT).expect("it was asked");
        assert_eq!((heard.len(), &heard[..12]), (44, &[&40_u32.to_le_bytes(), &MAGIC[..]].concat()[..]), "{title}");
    }
}

fn other_version() {
    let listener = TcpListener::bind(("127.0.0.1", 0)).expect("a free port");
    let port = listener.local_addr().expect("an address").port();
    let _heard = answer_at(listener, |_, _| frame(b"oxtile\0\x09"));
    let error = Store::connect(&environment(port, 1, 2, JOB), TIMEOUT).expect_err("another version").to_string();
    let expected =
        "of another version of Oxtile, whose rendezvous is version 9, and this program's is 6: start all ranks from the same build";
    assert_eq!(error, format!("rank 1 found a rank 0 at 127.0.0.1:{port} {expected}"));
}

/// A program at the first port passes on what is said between a rank that asks there and the true rank 0, which has the second.
fn relay() {
    let port = free_ports(4);
    let listener = TcpListener::bind(("127.0.0.1", port)).expect("it is free");
    thread::scope(|scope| {
        let zero = scope.spawn(move || Store::connect(&with_spares(port, 0, 2, JOB), Duration::from_secs(2)).expect_err("no rank comes"));
        let one = scope.spawn(move || Store::connect(&environment(port, 1, 2, JOB), TIMEOUT).expect_err("it does not believe"));
        let mut rank = listener.accept().expect("it comes").0;
        let mut rank_0 = connect(port + 1);
        rank_0.write_all(&frame(&body(&mut rank, 40))).expect("sent");
        rank.write_all(&frame(&body(&mut rank_0, 72))).expect("sent");
        assert_eq!(rest(&mut rank), b"", "the rank says no more");
        assert!(matches!(one.join().expect("no panic"), BootstrapError::OtherJob { .. }));
        drop(rank_0);
        zero.join().expect("no panic");
    });
}

/// They have the first three ports, and the true rank 0 the last.
fn false_ranks_0_beside_the_true_one() {
    let port = free_ports(4);
    let of = |i: u16| answer_at(TcpListener::bind(("127.0.0.1", port + i)).expect("it is free"), FALSE[2 + usize::from(i)].1);
    let _heard = [0, 1, 2].map(of);
    thread::scope(|scope| {
        let ranks = [0, 1].map(|rank| {
            scope.spawn(move || {
                let mut store = Store::connect(&with_spares(port, rank, 2, JOB), TIMEOUT)?;
                let all = store.all_gather(&[rank as u8])?;
                store.close().map(|()| all)
            })
        });
        ranks.into_iter().for_each(|rank| assert_eq!(rank.join().expect("no panic").expect("well"), [[0], [1]]));
    });
}

/// Rank 0 of two waits at a port; strangers come; then rank 1 comes, and both have the bytes of both.
fn beside_strangers(port: u16, strangers: impl FnOnce()) {
    thread::scope(|scope| {
        let well = |rank: u32| {
            move || {
                let mut store = Store::connect(&environment(port, rank, 2, JOB), TIMEOUT)?;
                let all = store.all_gather(&[rank as u8])?;
                store.close().map(|()| all)
            }
        };
        let zero = scope.spawn(well(0));
        strangers();
        let one = scope.spawn(well(1));
        [zero, one].into_iter().for_each(|rank| assert_eq!(rank.join().expect("no panic").expect("well"), [[0], [1]]));
    });
}

/// What a stranger sends at once, and gets nothing for.
fn noise() -> Vec<(&'static str, Vec<u8>)> {
    let mut noise = vec![0; 3000];
    File::open("/dev/urandom").and_then(|mut random| random.read_exact(&mut noise)).expect("random bytes");
    // A random length that is short would be waited for.
    noise[3] = 0x77;
    vec![
        ("random bytes", noise),
        ("the web", b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n".to_vec()),
        ("the longest length", [&u32::MAX.to_le_bytes()[..], &opening(&[1; 32])].concat()),
        ("a length beyond the longest", [&513_u32.to_le_bytes()[..], &[b'x'; 513]].concat()),
        ("a frame of no bytes", frame(&[])),
        ("an opening that is too long", frame(&[&MAGIC[..], &[1; 33]].concat())),
        ("an opening that is too short", frame(&[&MAGIC[..], &[1; 31]].concat())),
    ]
}

/// The introduction of a program that has been challenged by `nonce` and `proof`.
type Introduces = fn(u16, [&[u8]; 2], &[u8]) -> Vec<u8>;
const INTRODUCTIONS: [(&str, Introduces); 6] = [
    ("rank 0's own proof", |_, _, proof| [proof, &hello(0)].concat()),
    ("no proof", |_, _, _| [&[2; 32][..], &hello(0)].concat()),
    ("the proof of another name", |port, nonces, _| [proof("theirs", 0, port, nonces, &hello(0)), hello(0)].concat()),
    ("a proof of another introduction", |port, nonces, _| [proof(JOB, 0, port, nonces, &hello(1)), hello(0)].concat()),
    ("an introduction that is cut", |port, nonces, _| [&proof(JOB, 0, port, nonces, &hello(0)), &hello(0)[..15]].concat()),
    ("nothing", |_, _, _| Vec::new()),
];

fn false_ranks() {
    let port = free_port();
    beside_strangers(port, || {
        for (title, bytes) in noise() {
            let mut stream = connect(port);
            // It may be closed before all is sent.
            let _ = stream.write_all(&bytes);
            assert_eq!(rest(&mut stream), b"", "{title}: nothing is said to strangers");
        }
        let hello = [&b"oxtile\0\x05"[..], &[0; 4], &[0; 20]].concat();
        let mut old = connect(port);
        old.write_all(&frame(&hello)).expect("sent");
        assert_eq!(rest(&mut old), frame(&MAGIC), "an older version is told which this is");
        for (title, introduces) in INTRODUCTIONS {
            let mut stream = connect(port);
            stream.write_all(&opening(&[3; 32])).expect("sent");
            let challenge = body(&mut stream, 72);
            let (nonce, proof) = challenge[8..].split_at(32);
            stream.write_all(&frame(&introduces(port, [&[3; 32], nonce], proof))).expect("sent");
            assert_eq!(rest(&mut stream), b"", "{title}: nothing is said to strangers");
        }
        // One that stays silent, at each step.
        let [_silent, mut half, mut challenged] = [(); 3].map(|()| connect(port));
        half.write_all(&opening(&[4; 32])[..20]).expect("sent");
        challenged.write_all(&opening(&[4; 32])).expect("sent");
        std::mem::forget([_silent, half, challenged]);
    });
}

/// What went over a true connection, sent once more at either end.
fn replay() {
    let port = free_ports(2);
    // A true rank 1 introduces itself to this test, which knows the name.
    let listener = TcpListener::bind(("127.0.0.1", port)).expect("it is free");
    let rank = thread::spawn(move || Store::connect(&environment(port, 1, 2, JOB), Duration::from_secs(1)).expect_err("it is not let in"));
    let mut stream = listener.accept().expect("it comes").0;
    let opening = body(&mut stream, 40);
    let answer = challenge(&[5; 32], &proof(JOB, 1, port, [&opening[8..], &[5; 32]], &[]));
    stream.write_all(&answer).expect("sent");
    let introduction = body(&mut stream, 48);
    assert_eq!(introduction[..32], proof(JOB, 0, port, [&opening[8..], &[5; 32]], &introduction[32..]));
    drop((stream, listener));
    assert!(matches!(rank.join().expect("no panic"), BootstrapError::Connect { .. }));

    // To a rank that asks anew, rank 0's recorded answer is none.
    let listener = TcpListener::bind(("127.0.0.1", port)).expect("it is free");
    let rank = thread::spawn(move || Store::connect(&environment(port, 1, 2, JOB), TIMEOUT).expect_err("it does not believe"));
    let mut stream = listener.accept().expect("it comes").0;
    body(&mut stream, 40);
    stream.write_all(&answer).expect("sent");
    assert!(matches!(rank.join().expect("no panic"), BootstrapError::OtherJob { .. }));
    drop((stream, listener));

    // To a rank 0 that challenges anew, the rank's recorded introduction is none.
    beside_strangers(port, || {
        let mut stream = connect(port);
        stream.write_all(&frame(&opening)).expect("sent");
        let challenge = body(&mut stream, 72);
        assert_ne!(challenge[8..40], [5; 32], "a number that is used once");
        stream.write_all(&frame(&introduction)).expect("sent");
        assert_eq!(rest(&mut stream), b"");
    });
}

/// What is refused above is refused for its proof alone: a connection with the right one is let in.
fn true_rank() {
    let port = free_port();
    let uid = rustix::process::getuid().as_raw();
    thread::scope(|scope| {
        let zero = scope.spawn(move || Store::connect(&environment(port, 0, 2, JOB), TIMEOUT).map(drop));
        let mut stream = connect(port);
        stream.write_all(&opening(&[3; 32])).expect("sent");
        let challenge = body(&mut stream, 72);
        let (nonce, theirs) = challenge[8..].split_at(32);
        assert_eq!(theirs, proof(JOB, 1, port, [&[3; 32], nonce], &[]));
        let introduction = [proof(JOB, 0, port, [&[3; 32], nonce], &hello(uid)), hello(uid)].concat();
        stream.write_all(&frame(&introduction)).expect("sent");
        assert_eq!(body(&mut stream, 4), 6_u32.to_le_bytes(), "welcome");
        zero.join().expect("no panic").expect("both are there");
    });
}

/// One that says nothing, and one that says a byte each second, are closed after the same time.
fn silence() {
    let port = free_port();
    thread::scope(|scope| {
        let zero = scope.spawn(move || Store::connect(&environment(port, 0, 2, JOB), TIMEOUT).map(drop));
        let [mut silent, mut dripping] = [(); 2].map(|()| connect(port));
        let mut drips = dripping.try_clone().expect("a descriptor");
        scope.spawn(move || {
            for byte in opening(&[9; 32]) {
                if drips.write_all(&[byte]).is_err() {
                    return;
                }
                thread::sleep(Duration::from_secs(1));
            }
        });
        let begin = Instant::now();
        assert_eq!([rest(&mut silent), rest(&mut dripping)].concat(), b"");
        let limit = PROOF_TIMEOUT - Duration::from_secs(1)..PROOF_TIMEOUT + Duration::from_secs(4);
        assert!(limit.contains(&begin.elapsed()), "{:?}", begin.elapsed());
        let one = scope.spawn(move || Store::connect(&environment(port, 1, 2, JOB), TIMEOUT).map(drop));
        [zero, one].into_iter().for_each(|rank| rank.join().expect("no panic").expect("well"));
    });
}
