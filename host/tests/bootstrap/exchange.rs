//! What the store is for, with ranks as threads.

use std::{thread, time::Duration};

use libtest_mimic::Trial;
use oxtile::comm::{
    Rank, WorldSize,
    bootstrap::{self, BootstrapError, Environment, JobId, Launcher, Store},
};

use crate::{free_port, trial};

const TIMEOUT: Duration = Duration::from_secs(20);

pub fn trials() -> Vec<Trial> {
    let worlds = [1, 2, 3, 8].map(|world| trial(format!("exchange::all_operations_of_{world}"), move || all_operations(world)));
    let others = vec![
        trial("exchange::ranks_that_come_at_different_times", different_times),
        trial("exchange::the_same_port_again_and_again", the_same_port),
        trial("exchange::other_operations_are_a_mismatch", mismatch),
        trial("exchange::a_panicking_thread_is_named", panicking_thread),
        trial("exchange::too_much_is_refused", too_much),
    ];
    worlds.into_iter().chain(others).collect()
}

fn world(size: u32) -> WorldSize {
    WorldSize::new(size).expect("not zero")
}

/// A thread a rank; what each returns, in the order of ranks.
fn run<T: Send>(stores: Vec<Store>, rank: impl Fn(Store) -> T + Sync) -> Vec<thread::Result<T>> {
    thread::scope(|scope| {
        let threads: Vec<_> = stores.into_iter().map(|store| scope.spawn(|| rank(store))).collect();
        threads.into_iter().map(|thread| thread.join()).collect()
    })
}

fn all_operations(size: u32) {
    let stores = bootstrap::threads(world(size), TIMEOUT).expect("threads of one process");
    let results = run(stores, |mut store| {
        let me = store.rank().index();
        for round in 0..50_u32 {
            // Some bring nothing, and lengths differ.
            let mine = |rank: u32| vec![rank as u8; (rank * round) as usize % 1000];
            let all = store.all_gather(&mine(me))?;
            assert_eq!(all, (0..size).map(mine).collect::<Vec<_>>(), "round {round}");
            let root = Rank::new(round % size, store.world()).expect("of this world");
            assert_eq!(store.broadcast(root, &[me as u8, 7])?, [root.index() as u8, 7]);
            store.barrier()?;
        }
        let long = vec![me as u8; 1 << 20];
        assert!(store.all_gather(&long)?.iter().enumerate().all(|(rank, bytes)| bytes.len() == 1 << 20 && bytes[0] == rank as u8));
        store.close()
    });
    for result in results {
        result.expect("no panic").expect("no error");
    }
}

fn environment(port: u16, rank: u32, size: u32, job: &str) -> Environment {
    Environment {
        launcher: Launcher::Torchrun,
        rank: Rank::new(rank, world(size)).expect("of this world"),
        world: world(size),
        local_rank: rank,
        master_host: "localhost".into(),
        master_port: port,
        spare_ports: 0,
        job: JobId::new(job),
    }
}

/// Rank 0 last, so that the others try before it listens.
fn different_times() {
    let port = free_port();
    thread::scope(|scope| {
        let ranks: Vec<_> = (0..3)
            .map(|rank| {
                scope.spawn(move || {
                    thread::sleep(Duration::from_millis(u64::from(2 - rank) * 150));
                    let mut store = Store::connect(&environment(port, rank, 3, "j"), TIMEOUT)?;
                    let all = store.all_gather(&[rank as u8])?;
                    store.close()?;
                    Ok::<_, BootstrapError>(all)
                })
            })
            .collect();
        for rank in ranks {
            assert_eq!(rank.join().expect("no panic").expect("no error"), [[0], [1], [2]]);
        }
    });
}

fn the_same_port() {
    let port = free_port();
    for round in 0..5 {
        thread::scope(|scope| {
            let ranks: Vec<_> = (0..2)
                .map(|rank| {
                    scope.spawn(move || {
                        let mut store = Store::connect(&environment(port, rank, 2, &format!("job {round}")), TIMEOUT)?;
                        // Every other job ends by an error.
                        if round % 2 == 0 { store.barrier().and_then(|()| store.close()) } else { Ok(()) }
                    })
                })
                .collect();
            for rank in ranks {
                rank.join().expect("no panic").expect("no error");
            }
        });
    }
}

fn mismatch() {
    let stores = bootstrap::threads(world(3), TIMEOUT).expect("threads of one process");
    let errors = run(stores, |mut store| {
        let first = match store.rank().index() {
            2 => {
                thread::sleep(Duration::from_millis(200));
                store.all_gather(&[]).map(drop)
            }
            _ => store.barrier(),
        };
        (first.expect_err("a mismatch"), store.barrier().expect_err("the same again").to_string())
    });
    for error in errors {
        let (error, again) = error.expect("no panic");
        let text = "rank 2 called an all-gather, where others called a barrier: every rank calls the same operations in the same order";
        assert!(matches!(&error, BootstrapError::Mismatch { rank, .. } if rank.index() == 2), "{error}");
        assert_eq!((error.to_string().as_str(), again.as_str()), (text, text));
    }
}

fn panicking_thread() {
    for victim in 0..3 {
        let stores = bootstrap::threads(world(3), TIMEOUT).expect("threads of one process");
        let results = run(stores, |mut store| {
            store.barrier().expect("all are there");
            // By `resume_unwind`, which prints nothing.
            if store.rank().index() == victim {
                std::panic::resume_unwind(Box::new("meant"));
            }
            store.barrier().expect_err("one is gone")
        });
        for (rank, result) in results.into_iter().enumerate() {
            match result {
                Err(_) => assert_eq!(rank as u32, victim),
                Ok(error) => assert!(matches!(&error, BootstrapError::Lost { rank, .. } if rank.index() == victim), "{victim}: {error}"),
            }
        }
        // The others can make a new one.
        let stores = bootstrap::threads(world(2), TIMEOUT).expect("a new one");
        run(stores, Store::close).into_iter().for_each(|result| result.expect("no panic").expect("no error"));
    }
}

fn too_much() {
    let mut stores = bootstrap::threads(WorldSize::ONE, TIMEOUT).expect("one thread");
    let refused = stores[0].all_gather(&vec![0; (1 << 20) + 1]).expect_err("too much").to_string();
    assert!(refused.contains("1048577 bytes are more than the 1048576"), "{refused}");
    stores[0].barrier().expect("nothing was sent");
}
