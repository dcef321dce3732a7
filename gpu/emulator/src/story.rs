//! What the turns of a run did, in words: alike ones of neighbouring threads in one sentence.

use crate::block::{Block, ranges};
use crate::fault::Coordinates;
use crate::order::Space;
use crate::schedule::{Actor, Deed, Schedule, Sentence, Turn, What};
use crate::site::Site;
use crate::thread::{Thread, Waiting};
use crate::worker::{READ, Worker};

/// How a turn ended.
#[derive(Clone, Copy, PartialEq, Eq)]
enum End {
    /// Another's turn came.
    Stopped,
    Waits,
    Ended,
    /// It is the last of the run.
    Last,
}

/// Turns that are told in one sentence.
struct Step {
    block: [u32; 3],
    /// The threads, or the one that issued the copy.
    threads: Vec<(u32, [u32; 3])>,
    /// The copy's stage and where it was issued.
    copy: Option<(u32, Site)>,
    given: bool,
    /// An operation that the story is about, before the last one.
    past: Option<(Site, String)>,
    last: Option<(Site, String)>,
    end: End,
}

/// The story of a run, sentence by sentence.
#[derive(Default)]
pub(crate) struct Story(Option<Step>);

impl Story {
    /// A turn of a thread is over; what it did lies in the worker.
    pub fn thread(&mut self, schedule: &Schedule, block: &Block, thread: &Thread, given: bool, is_last: bool) {
        let worker = block.worker();
        let last = worker.deeds.last.take();
        let past = worker.deeds.about.take().filter(|past| last.is_none_or(|last| !std::ptr::eq(last.site, past.site)));
        let end = match thread.waiting.get() {
            _ if is_last => End::Last,
            Waiting::Exited => End::Ended,
            Waiting::Nothing | Waiting::Turn => End::Stopped,
            _ => End::Waits,
        };
        let told = |deed: Option<Deed>| deed.map(|deed| (deed.site, describe(worker, &deed)));
        let threads = vec![(thread.number, thread.index)];
        let (past, last) = (told(past), told(last));
        self.add(schedule, Step { block: block.index, threads, copy: None, given, past, last, end });
    }

    /// A copy is about to take a stage.
    pub fn copy(&mut self, schedule: &Schedule, block: &Block, turn: &Turn, site: Site, given: bool) {
        let Actor::Copy { thread, .. } = turn.actor else { return };
        let threads = vec![(thread, block.threads[thread as usize].index)];
        let step = Step { block: block.index, threads, copy: Some((turn.until, site)), given, past: None, last: None, end: End::Stopped };
        self.add(schedule, step);
    }

    fn add(&mut self, schedule: &Schedule, step: Step) {
        match &mut self.0 {
            Some(before) if before.continues(&step) => before.join(step),
            _ => {
                self.flush(schedule);
                self.0 = Some(step);
            }
        }
    }

    /// Tells what is left to tell.
    pub fn flush(&mut self, schedule: &Schedule) {
        if let Some(step) = self.0.take() {
            schedule.tell(step.sentence(schedule.about().unwrap_or_default()));
        }
    }
}

impl Step {
    /// Whether the next step is told with this one: the same thread's, or that of another thread that does the same.
    fn continues(&self, next: &Self) -> bool {
        let same_place = self.block == next.block && self.copy == next.copy && self.given == next.given && self.copy.is_none();
        let site = |told: &Option<(Site, String)>| told.as_ref().map(|told| told.0);
        let alike = self.end == next.end && site(&self.past) == site(&next.past) && site(&self.last) == site(&next.last);
        let goes_on = self.threads == next.threads && self.end == End::Stopped;
        same_place && next.end != End::Last && (alike || goes_on)
    }

    fn join(&mut self, next: Self) {
        if self.threads == next.threads {
            let past = next.past.or(self.past.take());
            *self = Self { past, last: next.last.or(self.last.take()), ..next };
            return;
        }
        // The threads do the same to different places: the lines are left.
        let shorten = |told: &mut Option<(Site, String)>, next: &Option<(Site, String)>| {
            if let (Some((_, mine)), Some((_, theirs))) = (told, next)
                && mine != theirs
            {
                mine.truncate(mine.find(" of ").unwrap_or(mine.len()));
            }
        };
        shorten(&mut self.past, &next.past);
        shorten(&mut self.last, &next.last);
        self.threads.extend(next.threads);
    }

    fn sentence(&self, about: &[Site]) -> Sentence {
        let block = Coordinates(self.block);
        let who = match &self.threads[..] {
            [(_, thread)] => format!("thread {} of block {block}", Coordinates(*thread)),
            several => {
                let mut numbers: Vec<u32> = several.iter().map(|thread| thread.0).collect();
                numbers.sort_unstable();
                numbers.dedup();
                format!("threads {} of block {block}", ranges(&numbers))
            }
        };
        let one = self.threads.len() == 1;
        let text = match self.copy {
            Some((stage, site)) => {
                let does = ["reads its source", "writes its destination", "signals that it is done"][stage.clamp(1, 3) as usize - 1];
                format!("the copy that {who} issued at {site} {does}")
            }
            None => {
                let place = |told: &Option<(Site, String)>| told.as_ref().map(|(site, what)| format!("{site} ({what})"));
                let past = place(&self.past).map_or(String::new(), |past| format!(" past {past}"));
                let run = if one { "runs" } else { "run" };
                let go = if one { "goes" } else { "go" };
                let begin = if one { "begins" } else { "begin" };
                let wait = if one { "where it waits" } else { "where they wait" };
                match (self.end, place(&self.last)) {
                    (End::Ended, Some(last)) if self.is_about(about) && self.past.is_none() => {
                        format!("{who} {run} past {last} to the end")
                    }
                    (End::Ended, _) => format!("{who} {run}{past} to the end"),
                    (End::Waits, Some(last)) => format!("{who} {run}{past} until {last}, {wait}"),
                    (_, Some(last)) => format!("{who} {run}{past} until {last}"),
                    (End::Last, None) => format!("{who} {go} on"),
                    (_, None) => format!("{who} {begin}"),
                }
            }
        };
        let matters = self.given || self.end == End::Last || self.is_about(about);
        Sentence { text, matters }
    }

    fn is_about(&self, about: &[Site]) -> bool {
        let copied = self.copy.map(|copy| copy.1);
        let sites = [self.past.as_ref().map(|told| told.0), self.last.as_ref().map(|told| told.0), copied];
        sites.into_iter().flatten().any(|site| about.contains(&site))
    }
}

fn describe(worker: &Worker, deed: &Deed) -> String {
    match deed.what {
        What::Synchronisation(operation) => operation.to_owned(),
        What::Access { verb, space: Space::Shared, address, bytes } => format!("{verb} of {}", worker.shared.place(address as u32, bytes)),
        What::Access { verb, space: Space::Global, address, bytes } => match worker.locate(READ, address, u64::from(bytes)) {
            Some(allocation) => format!("{verb} of {}", worker.describe(allocation, address)),
            None => format!("{verb} of {address:#x}"),
        },
    }
}
