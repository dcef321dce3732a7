//! Mutants of messages between ranks: two ranks, played by the blocks of one launch.

use oxtile_emulator::mutation::Outcome;
use oxtile_kernels::exchange::{
    DeadlineArgument, Exchange, ExchangeArgs, Mailbox, MailboxesArgument, MessagesArgument, PlayersArgument, Rounds,
};

use super::Job;
use super::device::{Device, Elements, words};

pub const JOBS: &[Job] = &[Job { name: "exchange", run: exchange, equivalents: &[] }];

/// Three rounds, so that slots are used again.
fn exchange(device: &Device) -> Result<Vec<u32>, Outcome> {
    const RANKS: u32 = 2;
    const WORDS: u32 = 20;
    let mailbox = Mailbox { ranks: RANKS, lanes: 1, slot_words: 8 };
    let mailboxes: Vec<Elements<u64>> = (0..RANKS).map(|_| device.upload("mailbox", &vec![0; 2 * mailbox.len() as usize])).collect();
    let addresses: Vec<u32> = mailboxes.iter().flat_map(|m| [m.address as u32, (m.address >> 32) as u32]).collect();
    let (table, mut notice) = (device.upload("mailboxes", &addresses), device.upload("notice", &[0; 2]));
    let input = device.upload("input", &words((RANKS * RANKS * WORDS) as usize));
    let mut output = device.upload("output", &[0; (RANKS * RANKS * WORDS) as usize]);
    let mut verdict = device.upload("verdict", &[0; RANKS as usize]);
    device.launch::<Exchange>(ExchangeArgs {
        mailboxes: MailboxesArgument { addresses: table.view(), lanes: mailbox.lanes, slot_words: mailbox.slot_words },
        messages: MessagesArgument { input: input.view(), output: output.view_mut(), words: WORDS, spread: true },
        players: PlayersArgument { verdict: verdict.view_mut(), first: 0 },
        rounds: Rounds { count: mailbox.rounds(WORDS), epoch: 1 },
        deadline: DeadlineArgument { notice: notice.view_mut(), patience: 1 << 40 },
    })?;
    Ok([device.download(&output), device.download(&verdict)].concat())
}
