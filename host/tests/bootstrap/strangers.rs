//! Whoever else comes to rank 0's port.

use std::{
    io::{Read, Write},
    net::TcpStream,
    thread,
    time::Duration,
};

use libtest_mimic::Trial;
use oxtile::comm::{
    Rank, WorldSize,
    bootstrap::{BootstrapError, Environment, JobId, Launcher, Store},
};

use crate::{free_port, trial};

const TIMEOUT: Duration = Duration::from_secs(20);

pub fn trials() -> Vec<Trial> {
    vec![
        trial("strangers::another_job_is_refused", another_job),
        trial("strangers::another_world_is_refused", another_world),
        trial("strangers::the_same_rank_twice_is_refused", same_rank),
        trial("strangers::noise_and_silence_disturb_nobody", noise),
        trial("strangers::a_taken_port_is_an_error", taken_port),
        trial("strangers::a_name_without_address_is_an_error", no_address),
    ]
}

fn environment(port: u16, rank: u32, size: u32, job: &str) -> Environment {
    let world = WorldSize::new(size).expect("not zero");
    Environment {
        launcher: Launcher::Torchrun,
        rank: Rank::new(rank, world).expect("of this world"),
        world,
        local_rank: rank,
        master_host: "127.0.0.1".into(),
        master_port: port,
        job: JobId::new(job),
    }
}

/// Rank 0 of two waits; the stranger's error; then rank 1 comes, and both are well.
fn beside_a_stranger(stranger: impl FnOnce(u16) -> BootstrapError) -> String {
    let port = free_port();
    thread::scope(|scope| {
        let well = |rank: u32| move || Store::connect(&environment(port, rank, 2, "ours"), TIMEOUT)?.close();
        let zero = scope.spawn(well(0));
        let error = stranger(port);
        let one = scope.spawn(well(1));
        zero.join().expect("no panic").expect("rank 0 is well");
        one.join().expect("no panic").expect("rank 1 is well");
        assert!(matches!(error, BootstrapError::Refused { .. }), "{error:?}");
        error.to_string()
    })
}

fn another_job() {
    let text = beside_a_stranger(|port| Store::connect(&environment(port, 1, 2, "theirs"), TIMEOUT).expect_err("refused"));
    assert_eq!(
        text,
        "rank 0 refused rank 1: it is of another job, which uses the same address: choose another MASTER_PORT for one of them"
    );
}

fn another_world() {
    let text = beside_a_stranger(|port| Store::connect(&environment(port, 1, 3, "ours"), TIMEOUT).expect_err("refused"));
    assert!(text.contains("it is of a world of 3, and rank 0 of one of 2: set WORLD_SIZE the same everywhere"), "{text}");
}

fn same_rank() {
    let port = free_port();
    let [first, second] = thread::scope(|scope| {
        let zero = scope.spawn(move || Store::connect(&environment(port, 0, 2, "j"), Duration::from_secs(2)).and_then(Store::close));
        let ones = [(); 2].map(|()| scope.spawn(move || Store::connect(&environment(port, 1, 2, "j"), Duration::from_secs(2))));
        let results = ones.map(|one| one.join().expect("no panic").and_then(Store::close));
        zero.join().expect("no panic").expect("rank 0 and one of the two are well");
        results
    });
    // One of them is there; the other was refused, or came when the door was shut.
    let (well, other) = if first.is_ok() { (first, second) } else { (second, first) };
    well.expect("one is well");
    let error = other.expect_err("the other is not");
    let told = matches!(error, BootstrapError::Refused { .. } | BootstrapError::Connect { .. } | BootstrapError::Lost { .. });
    assert!(told, "{error:?}");
}

fn noise() {
    let port = free_port();
    thread::scope(|scope| {
        let well = |rank: u32| move || Store::connect(&environment(port, rank, 2, "j"), TIMEOUT)?.close();
        let zero = scope.spawn(well(0));
        let connect = || loop {
            match TcpStream::connect(("127.0.0.1", port)) {
                Ok(stream) => return stream,
                Err(_) => thread::sleep(Duration::from_millis(5)),
            }
        };
        let silent = connect();
        let mut web = connect();
        web.write_all(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n").expect("sent");
        let mut long = connect();
        long.write_all(&u32::MAX.to_le_bytes()).expect("sent");
        let one = scope.spawn(well(1));
        zero.join().expect("no panic").expect("rank 0 is well");
        one.join().expect("no panic").expect("rank 1 is well");
        for (mut stream, who) in [(silent, "silent"), (web, "web"), (long, "long")] {
            stream.set_read_timeout(Some(TIMEOUT)).expect("an option");
            let left = stream.read(&mut [0; 16]);
            assert!(matches!(left, Ok(0) | Err(_)), "{who}: nothing is said to strangers: {left:?}");
        }
    });
}

fn taken_port() {
    let listener = std::net::TcpListener::bind(("127.0.0.1", 0)).expect("a free port");
    let port = listener.local_addr().expect("an address").port();
    let error = Store::connect(&environment(port, 0, 2, "j"), TIMEOUT).expect_err("the port is taken");
    assert!(matches!(error, BootstrapError::Listen { .. }), "{error:?}");
    assert!(error.to_string().contains("choose another MASTER_PORT"), "{error}");
}

fn no_address() {
    let mut nowhere = environment(1, 1, 2, "j");
    nowhere.master_host = "no-such-host.invalid".into();
    let error = Store::connect(&nowhere, Duration::from_millis(300)).expect_err("no address").to_string();
    assert!(error.starts_with("rank 1 could not connect to rank 0 at no-such-host.invalid:1 within 0.3 s"), "{error}");
}
