//! `exchange`: all ranks played by the blocks of one launch, so that the race detector sees both sides of every flag.

use oxtile::{Buffer, Runtime, Stream};
use oxtile_kernels::exchange::*;
use oxtile_tests::inputs::Random;
use oxtile_tile::flag::POISON;

use crate::case::{Case, Outcome, Size, equal, stream, text};

/// Nanoseconds on a GPU, steps on the emulator, which finds by itself that no rank answers.
const LONG: u64 = 5_000_000_000;
const SHORT: u64 = 2_000;

/// Ranks, lanes, words of a slot, and words of a message in each of three launches on the same flags.
type Shape = (u32, u32, u32, [u32; 3]);

const SHAPES: [Shape; 5] =
    [(1, 1, 4, [3, 0, 9]), (2, 1, 8, [20, 8, 1]), (2, 2, 4, [17, 40, 4]), (2, 4, 64, [100, 600, 256]), (3, 1, 12, [7, 31, 24])];

pub fn cases() -> Vec<Case> {
    let mut cases = Vec::new();
    for (shape, spread) in SHAPES.into_iter().flat_map(|shape| [(shape, false), (shape, true)]) {
        let ((ranks, lanes, slot, _), kind) = (shape, ["all_gather", "all_to_all"][usize::from(spread)]);
        let name = format!("exchange::{kind}::{ranks}_ranks::{lanes}_lanes::{slot}");
        cases.push(Case::new(name, Size::Small, move |r| arrives(r, shape, spread)));
    }
    let large = (4, 8, 4096, [100_000, 3, 262_144]);
    cases.push(Case::new("exchange::all_gather::4_ranks::8_lanes::4096", Size::Waves, move |r| arrives(r, large, false)));
    cases.push(Case::new("exchange::a_rank_does_not_come", Size::Small, |r| fails(r, 0, SHORT, 2)));
    cases.push(Case::new("exchange::the_team_has_ended", Size::Small, |r| fails(r, POISON, LONG, ENDED)));
    cases
}

struct Team {
    layout: Mailbox,
    /// The memory at the addresses of the table.
    _mailboxes: Vec<Buffer<u64>>,
    table: Buffer<u64>,
    notice: Buffer<u64>,
}

impl Team {
    fn new(stream: &Stream, layout: Mailbox, notice: u64) -> Result<Self, String> {
        let mailbox = |_| text(Buffer::<u64>::zeros(stream, layout.len()));
        let mailboxes = (0..layout.ranks).map(mailbox).collect::<Result<Vec<_>, _>>()?;
        let addresses: Vec<u64> = mailboxes.iter().map(|mailbox| mailbox.view().address()).collect();
        let table = text(Buffer::from_slice(stream, &addresses))?;
        Ok(Self { layout, _mailboxes: mailboxes, table, notice: text(Buffer::from_slice(stream, &[notice]))? })
    }
}

/// One launch of some of the ranks.
struct Call<'a> {
    words: u32,
    spread: bool,
    epoch: u64,
    patience: u64,
    players: u32,
    input: &'a [u32],
}

/// What comes from every rank at each player, and the verdicts.
fn run(runtime: &Runtime, stream: &Stream, team: &mut Team, call: &Call) -> Result<(Vec<u32>, Vec<u32>), String> {
    let Call { words, spread, epoch, patience, players, input } = *call;
    let Mailbox { ranks, lanes, slot_words } = team.layout;
    let input = text(Buffer::from_slice(stream, input))?;
    let mut output = text(Buffer::from_slice(stream, &vec![0xa5a5_a5a5_u32; (players * ranks * words) as usize]))?;
    let mut verdict = text(Buffer::<u32>::zeros(stream, players.into()))?;
    let args = ExchangeArgs {
        mailboxes: MailboxesArgument { addresses: team.table.view(), lanes, slot_words },
        messages: MessagesArgument { input: input.view(), output: output.view_mut(), words, spread },
        players: PlayersArgument { verdict: verdict.view_mut(), first: 0 },
        rounds: Rounds { count: team.layout.rounds(words), epoch },
        deadline: DeadlineArgument { notice: team.notice.view_mut(), patience },
    };
    text(text(runtime.load::<Exchange>())?.launch(stream, args))?;
    Ok((text(output.to_vec(stream))?, text(verdict.to_vec(stream))?))
}

fn arrives(runtime: &Runtime, (ranks, lanes, slot_words, messages): Shape, spread: bool) -> Outcome {
    let stream = stream(runtime)?;
    let layout = Mailbox { ranks, lanes, slot_words };
    let mut team = Team::new(&stream, layout, 0)?;
    let mut random = Random::new(u64::from(ranks * lanes));
    let mut epoch = 1;
    for words in messages {
        let sent = if spread { ranks } else { 1 };
        let input: Vec<u32> = (0..ranks * sent * words).map(|_| random.bits() as u32).collect();
        let call = Call { words, spread, epoch, patience: LONG, players: ranks, input: &input };
        let (output, verdicts) = run(runtime, &stream, &mut team, &call)?;
        equal("verdicts", &verdicts, &vec![0; ranks as usize])?;
        let message = |from: u32, to: u32| {
            let at = ((from * sent + u32::from(spread) * to) * words) as usize;
            &input[at..at + words as usize]
        };
        let expected: Vec<u32> = (0..ranks).flat_map(|to| (0..ranks).flat_map(move |from| message(from, to))).copied().collect();
        equal("output", &output, &expected)?;
        epoch += u64::from(layout.rounds(words));
    }
    Ok(())
}

/// Rank 0 of two comes alone: what it waits for does not come.
fn fails(runtime: &Runtime, notice: u64, patience: u64, expected: u32) -> Outcome {
    let stream = stream(runtime)?;
    let mut team = Team::new(&stream, Mailbox { ranks: 2, lanes: 1, slot_words: 8 }, notice)?;
    let call = Call { words: 8, spread: false, epoch: 1, patience, players: 1, input: &[7; 8] };
    let (output, verdicts) = run(runtime, &stream, &mut team, &call)?;
    equal("verdict", &verdicts, &[expected])?;
    // What came from itself is there, what did not come was not read.
    equal("output", &output, &[[7; 8], [0xa5a5_a5a5; 8]].concat())
}
