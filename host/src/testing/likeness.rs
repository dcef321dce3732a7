//! Whether two runs fail alike: the same fault at the same source lines, or the same words of the test. And how a failure ends its story.

use std::panic::Location;

use crate::runtime::{Error, Fault, FaultKind};

/// A failing run.
pub(super) struct Failure {
    /// What the test said.
    pub text: String,
    /// What ended all work on the virtual cluster; none if the test alone failed.
    pub fault: Option<Error>,
}

/// Words and source lines that two alike failures share.
#[derive(PartialEq, Eq)]
pub(super) struct Likeness(Vec<String>);

impl Failure {
    /// A failure of another run is alike if it is of the same sort, in the same kernel, and the same source lines took part. Which threads did, and at which offset,
    /// may differ.
    pub fn likeness(&self) -> Likeness {
        let mut words = match &self.fault {
            Some(Error::Fault(fault)) => {
                let lines = if ends_by_waiting(fault) { Vec::new() } else { lines(fault) };
                let places = lines.into_iter().map(ToString::to_string).chain(panicked_at(fault));
                places.chain([fault.kind.to_string(), fault.kernel.clone()]).collect()
            }
            Some(Error::Race(race)) => {
                let uses = [&race.first, &race.second].map(|used| format!("{} {:?}", used.what, used.at));
                uses.into_iter().chain([race.memory.clone()]).collect()
            }
            Some(Error::Stuck { .. }) => vec!["stuck".to_owned()],
            Some(error) => vec![without_numbers(&error.to_string())],
            None => vec![without_numbers(&self.text)],
        };
        words.sort();
        words.dedup();
        Likeness(words)
    }

    /// Whether the order of threads or streams may be its cause. A launch that is refused, a wrong argument, unwritten memory and words of the test tell nothing
    /// by the steps of the default order.
    pub fn is_of_order(&self) -> bool {
        match &self.fault {
            Some(Error::Fault(fault)) => fault.kind != FaultKind::Launch,
            Some(Error::Race(_) | Error::Stuck { .. }) => true,
            _ => false,
        }
    }

    /// The source lines that the failure is about.
    pub fn about(&self) -> Vec<&'static Location<'static>> {
        match &self.fault {
            Some(Error::Fault(fault)) => lines(fault),
            Some(Error::Race(race)) => [race.first.at, race.second.at].into_iter().flatten().collect(),
            Some(Error::Unwritten { at, .. }) => vec![at],
            _ => Vec::new(),
        }
    }

    /// Adds to the story of the run how it ended.
    pub fn end(&self, story: &mut Vec<String>) {
        let last = match &self.fault {
            Some(Error::Fault(fault)) if fault.kind == FaultKind::Deadlock => "then every thread waits: deadlock".to_owned(),
            Some(Error::Fault(fault)) if ends_by_waiting(fault) => format!("then no thread gets any further: {}", fault.kind),
            Some(Error::Stuck { .. }) => "then no stream can go on".to_owned(),
            Some(Error::Fault(fault)) => {
                return end_last(story, &fault.kind.to_string(), lines(fault).first().map(ToString::to_string).or(panicked_at(fault)));
            }
            Some(Error::Race(_)) => return end_last(story, "stream race", None),
            Some(error) => format!("then: {}", first_line(&error.to_string())),
            None => format!("then the test fails: {}", first_line(&self.text)),
        };
        story.push(last);
    }
}

/// Adds what ended the run to the last step, with its place where the step does not end there: an access that faults is not done.
fn end_last(story: &mut [String], what: &str, place: Option<String>) {
    if let Some(last) = story.last_mut() {
        match place.filter(|place| !last.contains(place.as_str())) {
            Some(place) => last.push_str(&format!(", then: {what} at {place}")),
            None => last.push_str(&format!(": {what}")),
        }
    }
}

/// Whether no single operation ended the run.
fn ends_by_waiting(fault: &Fault) -> bool {
    matches!(fault.kind, FaultKind::Deadlock | FaultKind::Divergence | FaultKind::NoProgress | FaultKind::StepLimit)
}

/// Where the kernel panicked: the end of the message, since no location of a panic outlives it.
fn panicked_at(fault: &Fault) -> Option<String> {
    let place = fault.message.rsplit_once(" (at ").filter(|_| fault.kind == FaultKind::Panic);
    place.map(|(_, place)| place.to_owned())
}

fn lines(fault: &Fault) -> Vec<&'static Location<'static>> {
    fault.involved.iter().map(|line| line.location).collect()
}

fn first_line(text: &str) -> &str {
    text.lines().next().unwrap_or_default()
}

fn without_numbers(text: &str) -> String {
    first_line(text).chars().filter(|letter| !letter.is_ascii_digit()).collect()
}
