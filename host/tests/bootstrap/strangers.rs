//! Other programs that come to rank 0's port.

use std::{
    env, fs,
    io::{Read, Write},
    iter,
    net::{SocketAddr, TcpListener, TcpStream},
    process::{Command, ExitCode},
    sync::atomic::{AtomicU16, AtomicUsize, Ordering},
    thread,
    time::{Duration, Instant},
};

use libtest_mimic::Trial;
use oxtile::comm::{
    Rank, WorldSize,
    bootstrap::{BootstrapError, Environment, JobId, Launcher, Store},
};
use rustix::net::{AddressFamily, SocketFlags, SocketType, bind, listen, socket_with};

use crate::{
    CHILD, free_port,
    proof::{MAGIC, frame},
    trial,
};

pub const TIMEOUT: Duration = Duration::from_secs(20);

pub fn trials() -> Vec<Trial> {
    vec![
        trial("strangers::another_job_is_refused", another_job),
        trial("strangers::another_job_is_forgotten", another_job_again_and_again),
        trial("strangers::another_job_is_not_pressed", patience_with_another_job),
        trial("strangers::another_world_is_refused", another_world),
        trial("strangers::the_same_rank_twice_is_refused", same_rank),
        trial("strangers::noise_and_silence_disturb_nobody", noise),
        trial("strangers::a_taken_port_is_an_error", taken_port),
        trial("strangers::a_silent_program_at_the_only_port_is_named", silent_port),
        trial("strangers::other_jobs_at_all_ports_are_named_at_once", other_jobs),
        trial("strangers::ranks_meet_at_a_spare_port", spare_port),
        trial("strangers::ports_that_take_nobody_hold_nothing_up", full_ports),
        trial("strangers::jobs_of_one_name_do_not_mix", one_name),
        trial("strangers::a_name_without_address_is_an_error", no_address),
        trial("strangers::a_second_rank_0_is_told_so", second_rank_0),
        trial("strangers::rank_0_on_another_host_is_told_so", rank_0_elsewhere),
        trial("strangers::a_search_is_part_of_the_deadline", late_rank_0),
    ]
}

pub fn environment(port: u16, rank: u32, size: u32, job: &str) -> Environment {
    let world = WorldSize::new(size).expect("not zero");
    Environment {
        launcher: Launcher::Torchrun,
        rank: Rank::new(rank, world).expect("of this world"),
        world,
        local_rank: rank,
        master_host: "127.0.0.1".into(),
        master_port: port,
        spare_ports: 0,
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
        assert!(matches!(error, BootstrapError::Refused { .. } | BootstrapError::OtherJob { .. }), "{error:?}");
        error.to_string()
    })
}

fn another_job() {
    let mut address = String::new();
    let text = beside_a_stranger(|port| {
        address = format!("127.0.0.1:{port}");
        Store::connect(&environment(port, 1, 2, "theirs"), TIMEOUT).expect_err("refused")
    });
    let (_, port) = address.split_once(':').expect("a port");
    assert_eq!(
        text,
        format!(
            "rank 1 found a rank 0 at {address} that does not know the name of job the... of port {port}: it is of another job, or the two \
             were given different names; set OXTILE_JOB_ID the same on every rank of a job, or OXTILE_MASTER_PORT to a free port of rank \
             0's host, the same on every rank"
        )
    );
}

/// In a process of its own, whose descriptors and threads are its own.
fn another_job_again_and_again() {
    let done = Command::new(env::current_exe().expect("a path")).env(CHILD, "strangers").output().expect("it starts");
    assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
}

/// Rank 0 of two keeps nothing of connections that are of another job, or that send nothing it knows.
pub fn child() -> ExitCode {
    let held = || ["/proc/self/fd", "/proc/self/task"].map(|folder| fs::read_dir(folder).expect("Linux").count());
    beside_a_stranger(|port| {
        let come = || Store::connect(&environment(port, 1, 2, "theirs"), TIMEOUT).expect_err("refused");
        come();
        let before = held();
        for _ in 0..50 {
            come();
            TcpStream::connect(("127.0.0.1", port)).and_then(|mut noise| noise.write_all(b"GET / HTTP/1.1\r\n")).expect("it listens");
        }
        // What is closed is there for a moment.
        let deadline = Instant::now() + Duration::from_secs(5);
        while held().into_iter().zip(before).any(|(now, before)| now > before + 4) {
            assert!(Instant::now() < deadline, "descriptors and threads are {:?}, and were {before:?}", held());
            thread::sleep(Duration::from_millis(5));
        }
        come()
    });
    ExitCode::SUCCESS
}

/// A rank whose job may yet take another port asks rank 0 of another job no more than once a second.
fn patience_with_another_job() {
    let port = free_ports(4);
    let listener = TcpListener::bind(("127.0.0.1", port)).expect("it is free");
    let asked = AtomicUsize::new(0);
    let (asked, deadline) = (&asked, Duration::from_millis(1500));
    thread::scope(|scope| {
        scope.spawn(move || {
            // A challenge whose proof is none.
            let answer = frame(&[&MAGIC[..], &[7; 64]].concat());
            for mut stream in listener.incoming().flatten() {
                // The last has nothing to ask.
                if stream.read(&mut [0; 512]).is_ok_and(|count| count == 0) {
                    return;
                }
                asked.fetch_add(1, Ordering::Relaxed);
                stream.write_all(&answer).expect("sent");
            }
        });
        let error = Store::connect(&with_spares(port, 1, 2, "ours"), deadline).expect_err("rank 0 does not come");
        drop(TcpStream::connect(("127.0.0.1", port)).expect("it listens"));
        assert!(matches!(&error, BootstrapError::OtherJob { .. }), "{error:?}");
    });
    assert!((1..=2).contains(&asked.load(Ordering::Relaxed)), "asked {asked:?} times");
}

fn another_world() {
    let text = beside_a_stranger(|port| Store::connect(&environment(port, 1, 3, "ours"), TIMEOUT).expect_err("refused"));
    assert!(text.contains("it is of a world of 3, and rank 0 of one of 2: set WORLD_SIZE the same everywhere"), "{text}");
}

fn same_rank() {
    let port = free_port();
    let [first, second] = thread::scope(|scope| {
        // Each closes in its own thread: the one that is not well may try until its deadline, and rank 0 waits for the other.
        let one = |rank: u32| move || Store::connect(&environment(port, rank, 2, "j"), Duration::from_secs(2)).and_then(Store::close);
        let zero = scope.spawn(one(0));
        let ones = [(); 2].map(|()| scope.spawn(one(1)));
        let results = ones.map(|one| one.join().expect("no panic"));
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
        for (mut stream, name) in [(silent, "silent"), (web, "web"), (long, "long")] {
            stream.set_read_timeout(Some(TIMEOUT)).expect("an option");
            let left = stream.read(&mut [0; 16]);
            assert!(matches!(left, Ok(0) | Err(_)), "{name}: nothing is said to strangers: {left:?}");
        }
    });
}

fn taken_port() {
    let listener = TcpListener::bind(("127.0.0.1", 0)).expect("a free port");
    let port = listener.local_addr().expect("an address").port();
    let error = Store::connect(&environment(port, 0, 2, "j"), TIMEOUT).expect_err("the port is taken");
    assert!(matches!(error, BootstrapError::Listen { .. }), "{error:?}");
    assert!(error.to_string().contains("set OXTILE_MASTER_PORT to a free port of its host"), "{error}");
}

fn no_address() {
    let mut nowhere = environment(1, 1, 2, "j");
    nowhere.master_host = "no-such-host.invalid".into();
    let error = Store::connect(&nowhere, Duration::from_millis(300)).expect_err("no address").to_string();
    assert!(error.starts_with("rank 1 could not connect to rank 0 at no-such-host.invalid:1 within 0.3 s"), "{error}");
}

fn second_rank_0() {
    let text = beside_a_stranger(|port| {
        while TcpStream::connect(("127.0.0.1", port)).is_err() {
            thread::sleep(Duration::from_millis(5));
        }
        Store::connect(&environment(port, 0, 2, "ours"), TIMEOUT).expect_err("refused")
    });
    assert!(text.starts_with("rank 0 refused rank 0: another process of this job is rank 0, at 127.0.0.1:"), "{text}");
    assert!(text.ends_with("give each process its own rank (RANK), from 0 on"), "{text}");
}

/// The address is one of RFC 5737, which no host has.
fn rank_0_elsewhere() {
    let elsewhere = Environment { master_host: "192.0.2.1".into(), ..environment(free_port(), 0, 2, "j") };
    let error = Store::connect(&elsewhere, Duration::from_millis(300)).expect_err("no host has that address");
    assert!(matches!(error, BootstrapError::Elsewhere { .. }), "{error:?}");
    let text = error.to_string();
    assert!(text.starts_with("rank 0 listens, but did not find itself at 192.0.2.1:"), "{text}");
    assert!(text.contains("set MASTER_ADDR to a name or an address of the host of rank 0, the same on every rank"), "{text}");
}

/// Rank 1 finds rank 0 when two thirds of its deadline are over, and has the last to wait for rank 2, which does not come.
fn late_rank_0() {
    const DEADLINE: Duration = Duration::from_secs(3);
    let port = free_port();
    thread::scope(|scope| {
        scope.spawn(move || {
            thread::sleep(DEADLINE * 2 / 3);
            Store::connect(&environment(port, 0, 3, "j"), TIMEOUT).expect_err("rank 2 does not come");
        });
        let begin = Instant::now();
        let error = Store::connect(&environment(port, 1, 3, "j"), DEADLINE).expect_err("rank 2 does not come");
        assert_eq!(error.to_string(), "rank 2 did not come to the rendezvous within 3 s");
        assert!((DEADLINE..DEADLINE * 3 / 2).contains(&begin.elapsed()), "{:?}", begin.elapsed());
    });
}

/// The first of so many ports in a row at which no program listens, and that no other test is given.
pub fn free_ports(count: u16) -> u16 {
    static GIVEN: AtomicU16 = AtomicU16::new(0);
    let is_free = |port: u16| TcpListener::bind(("127.0.0.1", port)).is_ok();
    // Below what the system gives out to others.
    let begin = 16_384 + (std::process::id() % 1000) as u16 * 16;
    let next = || begin + (GIVEN.fetch_add(count, Ordering::Relaxed) % 256);
    std::iter::repeat_with(next).take(256).find(|&first| (0..count).all(|i| is_free(first + i))).expect("free ports")
}

/// As under torchrun's agent.
pub fn with_spares(port: u16, rank: u32, size: u32, job: &str) -> Environment {
    Environment { spare_ports: 3, ..environment(port, rank, size, job) }
}

fn silent_port() {
    let listener = TcpListener::bind(("127.0.0.1", 0)).expect("a free port");
    let port = listener.local_addr().expect("an address").port();
    let error = Store::connect(&environment(port, 1, 2, "j"), Duration::from_millis(300)).expect_err("no rank answers");
    assert!(matches!(error, BootstrapError::Occupied { .. }), "{error:?}");
    assert!(error.to_string().starts_with(&format!("rank 1 found no rank 0 within 0.3 s, and at 127.0.0.1:{port} what")), "{error}");
    assert!(error.to_string().contains("set OXTILE_MASTER_PORT to a free port"), "{error}");
}

/// Rank 0 of jobs that never are whole, each at one port, until the returned ends are dropped.
fn hold(ports: impl IntoIterator<Item = u16>, job: &'static str) -> Vec<thread::JoinHandle<()>> {
    let hold = |port| {
        let held = thread::spawn(move || drop(Store::connect(&environment(port, 0, 2, job), Duration::from_secs(3))));
        let deadline = Instant::now() + TIMEOUT;
        while TcpStream::connect(("127.0.0.1", port)).is_err() {
            assert!(!held.is_finished() && Instant::now() < deadline, "rank 0 does not listen at port {port}, which was free");
            thread::sleep(Duration::from_millis(5));
        }
        held
    };
    ports.into_iter().map(hold).collect()
}

fn other_jobs() {
    let port = free_ports(4);
    let held = hold(port..port + 4, "theirs");
    let begin = Instant::now();
    let error = Store::connect(&with_spares(port, 1, 2, "ours"), TIMEOUT).expect_err("no port is left");
    assert!(matches!(error, BootstrapError::OtherJob { .. }) && begin.elapsed() < Duration::from_secs(3), "{error:?}");
    let error = Store::connect(&with_spares(port, 0, 2, "ours"), TIMEOUT).expect_err("no port is left");
    assert!(matches!(error, BootstrapError::Listen { .. }) && error.to_string().contains(&format!(":{}, ", port + 2)), "{error}");
    held.into_iter().for_each(|held| held.join().expect("no panic"));
}

/// At the ports before rank 0's no rank is let in, nor refused.
fn full_ports() {
    let port = free_ports(4);
    let full = |port: u16| {
        let socket = socket_with(AddressFamily::INET, SocketType::STREAM, SocketFlags::CLOEXEC, None).expect("a socket");
        let address = SocketAddr::from(([127, 0, 0, 1], port));
        bind(&socket, &address).and_then(|()| listen(&socket, 0)).expect("it is free");
        let waiting = iter::from_fn(|| TcpStream::connect_timeout(&address, Duration::from_millis(50)).ok());
        (socket, waiting.collect::<Vec<_>>())
    };
    let _full: Vec<_> = (port..port + 3).map(full).collect();
    let begin = Instant::now();
    thread::scope(|scope| {
        let ranks = [0, 1].map(|rank| scope.spawn(move || Store::connect(&with_spares(port, rank, 2, "ours"), TIMEOUT)?.close()));
        ranks.into_iter().for_each(|rank| rank.join().expect("no panic").expect("they meet"));
    });
    assert!(begin.elapsed() < Duration::from_secs(2), "a second for each port: {:?}", begin.elapsed());
}

/// The first port is held by a silent program, the second by another job, the third by one of the web.
fn spare_port() {
    let port = free_ports(4);
    let _silent = TcpListener::bind(("127.0.0.1", port)).expect("it is free");
    let held = hold([port + 1], "theirs");
    let web = TcpListener::bind(("127.0.0.1", port + 2)).expect("it is free");
    thread::spawn(move || web.incoming().flatten().for_each(|mut stream| _ = stream.write_all(b"HTTP/1.1 400 Bad Request\r\n\r\n")));
    let begin = Instant::now();
    thread::scope(|scope| {
        // Rank 0 last: the others have asked everywhere before.
        let ranks = [0, 1, 2].map(|rank| {
            scope.spawn(move || {
                thread::sleep(Duration::from_millis(if rank == 0 { 300 } else { 0 }));
                let mut store = Store::connect(&with_spares(port, rank, 3, "ours"), TIMEOUT)?;
                let all = store.all_gather(&[rank as u8])?;
                store.close().map(|()| all)
            })
        });
        for rank in ranks {
            assert_eq!(rank.join().expect("no panic").expect("well"), [[0], [1], [2]]);
        }
    });
    assert!(begin.elapsed() < Duration::from_secs(5), "a silent program delays no rank: {:?}", begin.elapsed());
    held.into_iter().for_each(|held| held.join().expect("no panic"));
}

/// torchrun calls every job `none`: what the launcher gave them for a port tells them apart, wherever their rank 0 listens.
fn one_name() {
    let port = free_ports(6);
    let _agents = [0, 1].map(|i| TcpListener::bind(("127.0.0.1", port + i)).expect("it is free"));
    thread::scope(|scope| {
        // The first job's ports are the next four, and the second's all of them but one.
        let ranks = [(1, 0), (2, 1), (2, 0), (1, 1)].map(|(job, rank)| {
            scope.spawn(move || {
                thread::sleep(Duration::from_millis(100 * u64::from(job == 2 && rank == 0)));
                let mut store = Store::connect(&with_spares(port + job, rank, 2, "none"), TIMEOUT)?;
                let all = store.all_gather(&[job as u8, rank as u8])?;
                store.close().map(|()| (job as u8, all))
            })
        });
        for rank in ranks {
            let (job, all) = rank.join().expect("no panic").expect("well");
            assert_eq!(all, [[job, 0], [job, 1]]);
        }
    });
}
