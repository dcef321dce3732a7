//! All-gather and all-to-all of few bytes, by one kernel a rank that waits for flags itself.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use oxtile_kernels::exchange::{
    self as kernel, DeadlineArgument, ENDED, Exchange as Kernel, ExchangeArgs, Mailbox, MailboxesArgument, MessagesArgument,
    PlayersArgument, Rounds,
};
use oxtile_tile::launch::{DeviceView, DeviceViewMut};

use super::arena::Arena;
use super::buffer::SymmetricBuffer;
use crate::comm::{Rank, Sequence};
use crate::rank::{BackendName, SymmetricError};
use crate::runtime::{Buffer, Error, Kind, Loaded, Result, Stream};

/// Messages between all ranks of an arena by loads and stores: of some KiB, in one launch a rank and about two crossings of the link.
/// [`PullGather`](super::PullGather) and [`PushGather`](super::PushGather) carry more, and take no multiprocessor.
///
/// A kernel waits for its peers on the device: each of its waits lasts at most for the arena's deadline, the first that is not answered ends
/// it, and [`check`](Self::check) returns how it ended. The deadline begins when the kernel runs, and anew in each launch after one that
/// ended by it: check after few launches, since the check ends the arena and with it every wait. The ranks launch within the deadline of
/// one another; a rank that loads its kernel first, or is slow to come, is waited for as any other.
///
/// Nothing that a rank does before its launch may wait for a peer's kernel, and the driver's allocations may wait for kernels of their
/// process (CUDA C++ Programming Guide, "Implicit Synchronization"): ranks are best processes.
pub struct Exchange {
    arena: Arena,
    mailbox: SymmetricBuffer<u64>,
    layout: Mailbox,
    /// Where each rank's mailbox lies here.
    table: Buffer<u64>,
    notice: Buffer<u64>,
    /// 0, or the code of what ended a launch early.
    verdict: Buffer<u32>,
    kernel: Loaded<Kernel>,
    /// Compares the ranks' calls before they are made.
    calls: Option<Sequence>,
    /// The epoch that the next launch begins with.
    epoch: u64,
}

/// How an [`Exchange`] cuts its messages; the same on every rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ExchangeOptions {
    /// CUDA blocks for each peer.
    pub lanes: u32,
    /// Bytes that a block sends before it waits for an answer: a multiple of 16.
    pub slot_bytes: u32,
    /// Whether every call is compared with those of the other ranks before it is made: one of another kind or length is then
    /// [`Error::Mismatch`] on all of them, and ends the arena. Without it ranks whose lengths differ get garbage, or wait for the
    /// deadline. A call costs a meeting of all hosts.
    pub compare_calls: bool,
}

impl Default for ExchangeOptions {
    /// Messages of 64 KiB in one round. Calls are compared in debug builds.
    fn default() -> Self {
        Self { lanes: 8, slot_bytes: 8 << 10, compare_calls: cfg!(debug_assertions) }
    }
}

impl Exchange {
    /// Takes a mailbox from the arena, once all ranks have cleared theirs. Every rank takes the same, in one order.
    ///
    /// # Errors
    /// [`SymmetricError::Unavailable`] for more than one rank of the virtual cluster, whose kernels run one at a time; [`Error::Invalid`] for
    /// options without a lane, or slots that are not a multiple of 16 bytes; as [`Arena::buffer`]; [`SymmetricError::Layout`] for other options on
    /// another rank; ranks that do not come.
    pub fn new(arena: &Arena, stream: &Stream, options: ExchangeOptions) -> Result<Self> {
        let (runtime, world) = (&stream.0.runtime, arena.world());
        if runtime.kind() == Kind::Emulated && world.get() > 1 {
            let why = "kernels of the virtual cluster run one at a time, and this one waits for its peers: use PullGather".to_owned();
            return Err(SymmetricError::Unavailable { backend: BackendName::Emulated, why }.into());
        }
        let ExchangeOptions { lanes, slot_bytes, compare_calls } = options;
        if lanes == 0 || slot_bytes == 0 || !slot_bytes.is_multiple_of(16) {
            let why = format!("{lanes} lanes of slots of {slot_bytes} bytes: take at least one, and a multiple of 16");
            return Err(Error::Invalid { what: "ExchangeOptions", why });
        }
        let layout = Mailbox { ranks: world.get(), lanes, slot_words: slot_bytes / 4 };
        let mut mailbox = arena.buffer::<u64>(layout.len())?;
        mailbox.local_mut().copy_from_slice(stream, &vec![0_u64; layout.len() as usize])?;
        stream.synchronize()?;
        let (name, number) = (format!("mailbox {}", mailbox.number), mailbox.number);
        let how = if compare_calls { "calls compared" } else { "calls not compared" };
        arena.0.meet_with(&name, number, &format!("a mailbox of {lanes} lanes of {slot_bytes} bytes, {how}"))?;
        let addresses = world.ranks().map(|rank| Ok(mailbox.peer(rank)?.address())).collect::<Result<Vec<_>>>()?;
        // SAFETY: a word of the arena for it alone; the arena is not closed before this and its streams' work are done.
        let notice = unsafe { Buffer::of_owner(&stream.device(), arena.0.base + arena.0.layout.notice(), 1, Arc::clone(&arena.0) as _)? };
        let (table, verdict) = (Buffer::from_slice(stream, &addresses)?, Buffer::zeros(stream, 1)?);
        let (kernel, calls) = (Loaded::new(runtime)?, compare_calls.then(|| arena.0.calls(&name)));
        Ok(Self { arena: arena.clone(), mailbox, layout, table, notice, verdict, kernel, calls, epoch: 1 })
    }

    /// Makes `output` the shards of all ranks one after another. Every shard has one length, the same on all ranks.
    ///
    /// # Errors
    /// [`Error::Length`], [`Error::Argument`] for more blocks than the device holds at once; [`Error::NotCapturable`] during a capture;
    /// [`Error::Mismatch`], and ranks that do not come to the call, where calls are compared; what ended the arena.
    pub fn all_gather<'a>(
        &mut self,
        stream: &Stream,
        shard: impl Into<DeviceView<'a, u32>>,
        output: impl Into<DeviceViewMut<'a, u32>>,
    ) -> Result<()> {
        let shard = shard.into();
        self.launch(stream, "Exchange::all_gather", shard.len(), shard, output.into(), false)
    }

    /// Makes part `r` of `output` part `rank` of rank `r`'s `input`: both are as many parts of one length as there are ranks.
    ///
    /// # Errors
    /// As [`all_gather`](Self::all_gather).
    pub fn all_to_all<'a>(
        &mut self,
        stream: &Stream,
        input: impl Into<DeviceView<'a, u32>>,
        output: impl Into<DeviceViewMut<'a, u32>>,
    ) -> Result<()> {
        let input = input.into();
        let words = input.len() / u64::from(self.layout.ranks);
        self.launch(stream, "Exchange::all_to_all", words, input, output.into(), true)
    }

    fn launch(
        &mut self,
        stream: &Stream,
        what: &'static str,
        words: u64,
        input: DeviceView<'_, u32>,
        output: DeviceViewMut<'_, u32>,
        spread: bool,
    ) -> Result<()> {
        stream.0.refuse_capture("a message by kernels", "its flags count on from launch to launch: launch it between two replays")?;
        self.arena.0.check()?;
        let whole = words.saturating_mul(self.layout.ranks.into());
        // Before the ranks agree: one that is refused alone would leave the others waiting.
        Error::check_length(what, whole, output.len())?;
        Error::check_length(what, if spread { whole } else { words }, input.len())?;
        let words = u32::try_from(words).map_err(|_| Error::TooLarge { what, count: words, element_bytes: 4 })?;
        if let Some(calls) = &self.calls
            && let Err(error) = calls.agree(format_args!("{what} of {words} words a message"))
        {
            return Err(self.arena.0.fail(error)?);
        }
        let Mailbox { lanes, slot_words, .. } = self.layout;
        let rounds = Rounds { count: self.layout.rounds(words), epoch: self.epoch };
        let patience = self.arena.0.options.deadline.min(Duration::from_secs(1 << 32)).as_nanos() as u64;
        let args = ExchangeArgs {
            mailboxes: MailboxesArgument { addresses: self.table.view(), lanes, slot_words },
            messages: MessagesArgument { input, output, words, spread },
            players: PlayersArgument { verdict: self.verdict.view_mut(), first: self.arena.rank().index() },
            rounds,
            deadline: DeadlineArgument { notice: self.notice.view_mut(), patience },
        };
        self.arena.0.use_on(stream)?;
        self.kernel.launch(stream, args)?;
        self.epoch += u64::from(rounds.count);
        Ok(())
    }

    /// Waits for the stream, and returns how all launches so far ended. Each ends by the deadline, counted from its last wait that was answered.
    ///
    /// # Errors
    /// [`SymmetricError::Deadline`] with a rank that did not answer; what ended the arena, here or on another rank.
    pub fn check(&mut self, stream: &Stream) -> Result<()> {
        let verdict = self.verdict.to_vec(stream)?[0];
        self.arena.0.check_notice()?;
        let (rank, waited) = (self.arena.rank(), self.arena.0.options.deadline);
        let error = match verdict {
            0 => return Ok(()),
            ENDED => SymmetricError::Aborted { rank, why: "a flag of its mailbox is poisoned".to_owned() },
            late => {
                let missing = Rank::new(late - 1, self.arena.world()).into_iter().collect();
                SymmetricError::Deadline {
                    rank,
                    operation: "Exchange",
                    sequence: self.epoch - 1,
                    missing,
                    is_guess: false,
                    flag: None,
                    waited,
                }
            }
        };
        Err(self.arena.0.fail(error.into())?)
    }

    /// Bytes of the mailbox.
    pub fn mailbox_bytes(&self) -> u64 {
        self.mailbox.len() * 8
    }
}

impl fmt::Debug for Exchange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let kernel::Mailbox { ranks, lanes, slot_words } = self.layout;
        f.debug_struct("Exchange").field("ranks", &ranks).field("lanes", &lanes).field("slot_words", &slot_words).finish_non_exhaustive()
    }
}
