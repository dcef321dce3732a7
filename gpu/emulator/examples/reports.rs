//! Prints one report of each kind, from small kernels with planted bugs. docs/emulator.md shows the output.

use oxtile_emulator::mutation::{Outcome, score};
use oxtile_emulator::{Fault, GridRun, Launch, Memory, Options, ReadOrder, Report, Scope, WriteOrder, device};

type Body = fn(&[u64]);

fn thread() -> u32 {
    device::thread_index()[0]
}

fn race(_: &[u64]) {
    device::shared_write(thread() * 4, [1; 4]);
    device::shared_write((thread() ^ 32) * 4, [2; 4]);
}

fn missing_proxy_fence(arguments: &[u64]) {
    device::shared_write(thread() * 4, [1; 4]);
    device::barrier_sync(0, 64);
    if thread() == 0 {
        device::bulk_store(arguments[0], 0, 256);
        device::bulk_commit();
        device::bulk_wait(0, true);
    }
}

fn in_flight(arguments: &[u64]) {
    device::copy_async(thread() * 4, arguments[0] + u64::from(thread()) * 4, 4, 4);
    device::copy_async_commit();
}

fn uninitialised(arguments: &[u64]) {
    let value: [u8; 4] = device::shared_read(thread() * 4);
    device::global_write(arguments[0], value, WriteOrder::Weak);
}

fn out_of_bounds(arguments: &[u64]) {
    device::global_read::<4>(arguments[0] + u64::from(thread()) * 8, ReadOrder::Weak);
}

fn misaligned(arguments: &[u64]) {
    device::global_read::<16>(arguments[0] + u64::from(thread()) * 4, ReadOrder::Weak);
}

fn divergence(_: &[u64]) {
    if device::lane() < 4 {
        device::warp_sync(u32::MAX);
    }
    device::warp_sync(u32::MAX);
}

fn barrier_misuse(_: &[u64]) {
    device::barrier_sync(0, 48);
}

fn mbarrier_misuse(_: &[u64]) {
    if thread() == 0 {
        device::mbarrier_init(0, 1);
        device::mbarrier_arrive_expect_transaction(0, 128);
        device::mbarrier_arrive(0);
    }
}

fn deadlock(_: &[u64]) {
    if thread() == 0 {
        device::mbarrier_init(0, 2);
    }
    device::barrier_sync(0, 64);
    if thread() < 32 {
        device::barrier_sync(3, 64);
    } else if thread() == 32 {
        device::mbarrier_arrive_expect_transaction(0, 128);
        device::mbarrier_wait_parity(0, 0);
    }
}

fn no_progress(arguments: &[u64]) {
    while device::global_read::<4>(arguments[0], ReadOrder::Acquire(Scope::Device)) == [0; 4] {
        device::nanosleep(100);
    }
}

fn costs(arguments: &[u64]) {
    let value: [u8; 4] = device::global_read(arguments[0] + u64::from(thread()) * 4, ReadOrder::ReadOnly);
    device::shared_write(device::lane() * 128 + device::warp() * 4, value);
}

/// A transpose whose second barrier orders nothing.
fn transpose(arguments: &[u64]) {
    device::shared_write(thread() * 4, thread().to_le_bytes());
    device::barrier_sync(0, 64);
    let value: [u8; 4] = device::shared_read((63 - thread()) * 4);
    device::global_write(arguments[0] + u64::from(thread()) * 4, value, WriteOrder::Weak);
    device::barrier_sync(0, 64);
}

fn run(name: &str, body: Body, options: Options) -> Result<Report, Fault> {
    let memory = Memory::new();
    let scales = memory.allocate("scales", 256, 0);
    memory.write(scales, &[0; 256]).expect("inside the allocation");
    GridRun::new(&memory, Launch::new(name, 1, 64, body).arguments(&[scales]).shared(4096), options)?.run()
}

fn main() {
    let kernels: [(&str, Body); 11] = [
        ("race", race),
        ("missing_proxy_fence", missing_proxy_fence),
        ("in_flight", in_flight),
        ("uninitialised", uninitialised),
        ("out_of_bounds", out_of_bounds),
        ("misaligned", misaligned),
        ("divergence", divergence),
        ("barrier_misuse", barrier_misuse),
        ("mbarrier_misuse", mbarrier_misuse),
        ("deadlock", deadlock),
        ("no_progress", no_progress),
    ];
    for (name, body) in kernels {
        match run(name, body, Options::check(1)) {
            Ok(_) => println!("{name}: silent\n"),
            Err(fault) => println!("{fault}\n"),
        }
    }
    match run("costs", costs, Options { explain: true, ..Options::check(1) }) {
        Ok(report) => println!("{report}"),
        Err(fault) => println!("{fault}\n"),
    }
    let outcome = |options: &Options| match run("transpose", transpose, options.clone()) {
        Ok(report) => Outcome::Passed(Box::new(report)),
        Err(fault) => Outcome::Faulted(fault),
    };
    match score(outcome, &[1, 2, 3, 4], &[]) {
        Ok(score) => println!("transpose: {score}"),
        Err(failure) => println!("{failure}"),
    }
}
