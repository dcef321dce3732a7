//! Collectives: ranks bring data, and go on with the result when all are there.
//!
//! A rank's part is two operations of its stream. *Arrive* takes a copy of what it brings; *leave*, once every rank has arrived,
//! writes what it gets. So each touches its own memory alone, at its own time, and the ranks' other work interleaves with both.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::{Arc, Mutex};

use oxtile_emulator::Memory;

use super::clock::Clock;
use super::extent::Extent;
use super::operation::misuse;
use super::reduction::Reduction;
use super::sanitizer::{Access, Kind};
use crate::rank::Rank;
use crate::runtime::error::{Error, Result};
use crate::runtime::runtime::lock;

/// Bytes of device memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Region {
    pub address: u64,
    pub bytes: u64,
}

/// One message of an exchange.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Transfer {
    pub peer: Rank,
    pub region: Region,
}

/// What a rank calls. Two ranks' calls fit if they are equal.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Call {
    AllReduce {
        reduction: Reduction,
        bytes: u64,
    },
    AllGather {
        shard_bytes: u64,
    },
    ReduceScatter {
        reduction: Reduction,
        shard_bytes: u64,
    },
    Broadcast {
        root: Rank,
        bytes: u64,
    },
    AllToAll {
        bytes: u64,
    },
    Barrier,
    /// One message between two ranks; the exchange that holds it does not have to be called by others.
    Message {
        bytes: u64,
    },
}

impl Call {
    const fn name(&self) -> &'static str {
        match self {
            Self::AllReduce { .. } => "all_reduce",
            Self::AllGather { .. } => "all_gather",
            Self::ReduceScatter { .. } => "reduce_scatter",
            Self::Broadcast { .. } => "broadcast",
            Self::AllToAll { .. } => "all_to_all",
            Self::Barrier => "barrier",
            Self::Message { .. } => "message",
        }
    }
}

impl fmt::Display for Call {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::AllReduce { reduction, bytes } => write!(f, "all_reduce ({reduction}) of {bytes} bytes"),
            Self::AllGather { shard_bytes } => write!(f, "all_gather of shards of {shard_bytes} bytes"),
            Self::ReduceScatter { reduction, shard_bytes } => write!(f, "reduce_scatter ({reduction}) to shards of {shard_bytes} bytes"),
            Self::Broadcast { root, bytes } => write!(f, "broadcast of {bytes} bytes from {root}"),
            Self::AllToAll { bytes } => write!(f, "all_to_all of {bytes} bytes"),
            Self::Barrier => write!(f, "barrier"),
            Self::Message { bytes } => write!(f, "a message of {bytes} bytes"),
        }
    }
}

/// Ranks that call collectives together.
pub(crate) struct Group {
    name: String,
    size: usize,
    state: Mutex<GroupState>,
}

#[derive(Default)]
struct GroupState {
    /// How many collectives each rank has come to.
    calls: BTreeMap<Rank, u64>,
    /// How many messages each rank has sent to and received from each other.
    messages: BTreeMap<(Rank, Rank, usize), u64>,
    open: BTreeMap<Key, Arc<Meeting>>,
}

/// The seats of a message.
const SENDER: usize = 0;
const RECEIVER: usize = 1;

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Key {
    Collective(u64),
    Message { from: Rank, to: Rank, number: u64 },
}

impl Group {
    pub fn new(name: String, size: u32) -> Arc<Self> {
        Arc::new(Self { name, size: size as usize, state: Mutex::default() })
    }

    fn collective(&self, rank: Rank) -> Arc<Meeting> {
        let state = &mut *lock(&self.state);
        let number = next(state.calls.entry(rank).or_default());
        state.meeting(Key::Collective(number), number, &self.name, self.size)
    }

    fn message(&self, from: Rank, to: Rank, seat: usize) -> Arc<Meeting> {
        let state = &mut *lock(&self.state);
        let number = next(state.messages.entry((from, to, seat)).or_default());
        let name = format!("{} from {from} to {to}", self.name);
        state.meeting(Key::Message { from, to, number }, number, &name, 2)
    }
}

fn next(counter: &mut u64) -> u64 {
    *counter += 1;
    *counter - 1
}

impl GroupState {
    /// The meeting of a key; forgotten here by the last that comes.
    fn meeting(&mut self, key: Key, sequence: u64, group: &str, size: usize) -> Arc<Meeting> {
        let meeting = self.open.entry(key).or_insert_with(|| Arc::new(Meeting::new(group, sequence, size))).clone();
        if meeting.expect_one_more() == size {
            self.open.remove(&key);
        }
        meeting
    }
}

/// One collective, or one message.
struct Meeting {
    group: String,
    sequence: u64,
    size: usize,
    state: Mutex<MeetingState>,
}

#[derive(Default)]
struct MeetingState {
    expected: usize,
    first: Option<(Rank, Call)>,
    /// By seat: the rank in a collective, sender and receiver of a message.
    deposits: BTreeMap<usize, Arc<Deposit>>,
    there: Vec<Rank>,
}

/// What a rank brought, and what it knew then.
struct Deposit {
    bytes: Vec<u8>,
    clock: Clock,
}

impl Meeting {
    fn new(group: &str, sequence: u64, size: usize) -> Self {
        Self { group: group.to_owned(), sequence, size, state: Mutex::default() }
    }

    fn expect_one_more(&self) -> usize {
        let mut state = lock(&self.state);
        state.expected += 1;
        state.expected
    }

    fn arrive(&self, seat: usize, rank: Rank, call: &Call, deposit: Deposit) -> Result<()> {
        let mut state = lock(&self.state);
        let (other, expected) = state.first.get_or_insert_with(|| (rank, call.clone()));
        if expected != call {
            return Err(Error::Mismatch {
                group: self.group.clone(),
                sequence: self.sequence,
                rank,
                found: call.to_string(),
                other: *other,
                expected: expected.to_string(),
            });
        }
        state.deposits.insert(seat, Arc::new(deposit));
        state.there.push(rank);
        Ok(())
    }

    fn is_complete(&self) -> bool {
        lock(&self.state).deposits.len() == self.size
    }

    fn of(&self, seat: usize) -> Option<Arc<Deposit>> {
        lock(&self.state).deposits.get(&seat).cloned()
    }

    /// In the order of ranks.
    fn all(&self) -> Vec<Arc<Deposit>> {
        lock(&self.state).deposits.values().cloned().collect()
    }

    fn describe(&self) -> String {
        let state = lock(&self.state);
        let call = state.first.as_ref().map_or(String::new(), |(_, call)| call.to_string());
        let there: Vec<_> = state.there.iter().map(Rank::to_string).collect();
        format!("call {} of {}, {call}: only {} came", self.sequence, self.group, there.join(", "))
    }
}

/// One rank's part in a collective or an exchange.
pub(crate) struct Part {
    group: Arc<Group>,
    rank: Rank,
    work: Work,
    /// The meetings of the call under way; a graph's replay comes to new ones.
    meetings: Mutex<Vec<Arc<Meeting>>>,
}

enum Work {
    Collective { call: Call, input: Region, output: Region },
    Exchange { sends: Vec<Transfer>, receives: Vec<Transfer> },
}

impl Part {
    pub fn collective(group: &Arc<Group>, rank: Rank, call: Call, input: Region, output: Region) -> Self {
        Self { group: Arc::clone(group), rank, work: Work::Collective { call, input, output }, meetings: Mutex::default() }
    }

    pub fn exchange(group: &Arc<Group>, rank: Rank, sends: Vec<Transfer>, receives: Vec<Transfer>) -> Self {
        Self { group: Arc::clone(group), rank, work: Work::Exchange { sends, receives }, meetings: Mutex::default() }
    }

    pub fn arrive(&self, memory: &Memory, clock: &Clock) -> Result<()> {
        let deposit = |region: Region| Ok::<_, Error>(Deposit { bytes: read(memory, region)?, clock: clock.clone() });
        let mut meetings = Vec::new();
        match &self.work {
            Work::Collective { call, input, .. } => {
                let meeting = self.group.collective(self.rank);
                meeting.arrive(self.rank.index() as usize, self.rank, call, deposit(*input)?)?;
                meetings.push(meeting);
            }
            Work::Exchange { sends, receives } => {
                for send in sends {
                    let meeting = self.group.message(self.rank, send.peer, SENDER);
                    meeting.arrive(SENDER, self.rank, &Call::Message { bytes: send.region.bytes }, deposit(send.region)?)?;
                    meetings.push(meeting);
                }
                for receive in receives {
                    let meeting = self.group.message(receive.peer, self.rank, RECEIVER);
                    meeting.arrive(RECEIVER, self.rank, &Call::Message { bytes: receive.region.bytes }, deposit(Region::default())?)?;
                    meetings.push(meeting);
                }
            }
        }
        *lock(&self.meetings) = meetings;
        Ok(())
    }

    /// What it reads and writes between arriving and leaving.
    pub(super) fn accesses(&self) -> Vec<Access> {
        let access =
            |region: Region, kind, what| Access { extent: Extent::range(region.address, region.bytes), kind, on_host: false, what };
        match &self.work {
            Work::Collective { call, input, output } => vec![
                access(*input, Kind::Read, format!("{call} reads, for {}", self.rank).into()),
                access(*output, Kind::Write, format!("{call} writes, for {}", self.rank).into()),
            ],
            Work::Exchange { sends, receives } => {
                let send = |t: &Transfer| access(t.region, Kind::Read, format!("{} sends to {}", self.rank, t.peer).into());
                let receive = |t: &Transfer| access(t.region, Kind::Write, format!("{} receives from {}", self.rank, t.peer).into());
                sends.iter().map(send).chain(receives.iter().map(receive)).collect()
            }
        }
    }

    /// Its name and how many bytes the rank gets, or gives if it gets none.
    pub fn describe(&self) -> (&'static str, u64) {
        match &self.work {
            Work::Collective { call, input, output } => (call.name(), if output.bytes > 0 { output.bytes } else { input.bytes }),
            Work::Exchange { sends, receives } => {
                let moved = if receives.is_empty() { sends } else { receives };
                ("exchange", moved.iter().map(|transfer| transfer.region.bytes).sum())
            }
        }
    }

    pub fn all_are_there(&self) -> bool {
        lock(&self.meetings).iter().all(|meeting| meeting.is_complete())
    }

    pub fn missing(&self) -> String {
        let meetings = lock(&self.meetings);
        let open: Vec<_> = meetings.iter().filter(|meeting| !meeting.is_complete()).map(|meeting| meeting.describe()).collect();
        format!("the others of {} ({})", self.rank, open.join("; "))
    }

    /// Writes what the rank gets and learns what those knew whose data it got.
    pub fn leave(&self, memory: &Memory, clock: &mut Clock) -> Result<()> {
        let meetings = std::mem::take(&mut *lock(&self.meetings));
        match &self.work {
            Work::Collective { call, output, .. } => {
                meetings.iter().try_for_each(|meeting| self.finish(memory, meeting, call, *output, clock))
            }
            Work::Exchange { sends, receives } => {
                for (receive, meeting) in receives.iter().zip(&meetings[sends.len()..]) {
                    if let Some(deposit) = meeting.of(SENDER) {
                        write(memory, receive.region, &deposit.bytes)?;
                        clock.join(&deposit.clock);
                    }
                }
                Ok(())
            }
        }
    }

    fn finish(&self, memory: &Memory, meeting: &Meeting, call: &Call, output: Region, clock: &mut Clock) -> Result<()> {
        let all = meeting.all();
        let me = self.rank.index() as usize;
        let part = |deposit: &Deposit, at: usize, bytes: u64| deposit.bytes[at * bytes as usize..][..bytes as usize].to_vec();
        // Data of a collective without data order nothing, as NCCL then does nothing.
        let sources: &[Arc<Deposit>] = match call {
            Call::Barrier => &all,
            Call::Broadcast { root, .. } if output.bytes > 0 => &all[root.index() as usize..=root.index() as usize],
            _ if output.bytes > 0 => &all,
            _ => &[],
        };
        sources.iter().for_each(|deposit| clock.join(&deposit.clock));
        let result = match call {
            Call::AllReduce { reduction, .. } => reduction.of(all.iter().map(|deposit| deposit.bytes.as_slice())),
            Call::AllGather { .. } => all.iter().flat_map(|deposit| deposit.bytes.iter().copied()).collect(),
            Call::ReduceScatter { reduction, shard_bytes } => {
                let parts: Vec<_> = all.iter().map(|deposit| part(deposit, me, *shard_bytes)).collect();
                reduction.of(parts.iter().map(Vec::as_slice))
            }
            Call::Broadcast { root, .. } => all[root.index() as usize].bytes.clone(),
            Call::AllToAll { bytes } => all.iter().flat_map(|deposit| part(deposit, me, bytes / all.len() as u64)).collect(),
            Call::Barrier | Call::Message { .. } => Vec::new(),
        };
        write(memory, output, &result)
    }
}

fn read(memory: &Memory, region: Region) -> Result<Vec<u8>> {
    let mut bytes = vec![0; region.bytes as usize];
    if region.bytes > 0 {
        memory.read(region.address, &mut bytes).map_err(misuse)?;
    }
    Ok(bytes)
}

fn write(memory: &Memory, region: Region, bytes: &[u8]) -> Result<()> {
    if region.bytes == 0 { Ok(()) } else { memory.write(region.address, bytes).map_err(misuse) }
}
