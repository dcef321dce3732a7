//! The order of the calls of a step.

use super::super::weight::Weight;
use crate::sum_parts::Before;

/// What was called since the last finish, if anything.
#[derive(Debug, Default)]
pub(super) struct Steps(Option<Step>);

#[derive(Debug)]
struct Step {
    /// The number of the graph that it is captured in; none where its work is done at once.
    capture: Option<u64>,
    /// What its sums are added to.
    before: Before,
    /// The weight whose buffer was given out and not scattered yet.
    given: Option<usize>,
    /// The weight that was sent and not summed yet.
    sent: Option<usize>,
    /// The weights that were scattered, in order.
    scattered: Vec<usize>,
}

/// A step that has ended.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Ended {
    /// The weight that is still to be summed.
    pub last: Option<usize>,
    /// All weights that were scattered, in order.
    pub order: Vec<usize>,
    /// What the sums are added to.
    pub before: Before,
}

impl Step {
    fn new(capture: Option<u64>, before: Before) -> Self {
        Self { capture, before, given: None, sent: None, scattered: Vec::new() }
    }
}

impl Steps {
    /// Begins a step whose sums are added to nothing.
    ///
    /// # Errors
    /// As [`give`](Self::give).
    pub fn replace(&mut self, capture: Option<u64>) -> Result<(), String> {
        if self.of(capture)?.is_some() {
            return Err("a step is under way, which has sums already: finish it before".to_owned());
        }
        self.0 = Some(Step::new(capture, Before::Zero));
        Ok(())
    }

    /// What the sums of the step are added to.
    pub fn before(&self) -> Before {
        self.0.as_ref().map_or(Before::Kept, |step| step.before)
    }

    /// The weight that was sent last, if it is not summed yet.
    pub fn sent(&self) -> Option<usize> {
        self.0.as_ref().and_then(|step| step.sent)
    }

    /// Whether nothing was called since the last finish.
    pub fn is_between(&self) -> bool {
        self.0.is_none()
    }

    /// Gives out the buffer of a weight.
    ///
    /// # Errors
    /// Why not, and how to mend it.
    pub fn give(&mut self, weights: &[Weight], weight: usize, capture: Option<u64>) -> Result<(), String> {
        let name = |weight: usize| &weights[weight].name;
        let step = self.of(capture)?;
        match step.map(|step| (step.given, step.scattered.contains(&weight))) {
            Some((Some(given), _)) if given == weight => {
                Err(format!("the buffer of `{}` was asked for twice: scatter it before", name(weight)))
            }
            Some((Some(given), _)) => {
                Err(format!("the buffer of `{}` is still out: scatter it before that of `{}` is asked for", name(given), name(weight)))
            }
            Some((None, true)) => {
                let mend = "add both gradients in one buffer, or finish the step between them";
                Err(format!("`{}` was scattered in this step already: {mend}", name(weight)))
            }
            Some((None, false)) | None => {
                self.0.get_or_insert(Step::new(capture, Before::Kept)).given = Some(weight);
                Ok(())
            }
        }
    }

    /// Sends a weight, whose buffer was given out. Returns the one that was sent before it, which is summed now.
    ///
    /// # Errors
    /// As [`give`](Self::give).
    pub fn send(&mut self, weights: &[Weight], weight: usize, capture: Option<u64>) -> Result<Option<usize>, String> {
        let name = |weight: usize| &weights[weight].name;
        let step = self.of(capture)?;
        match step.as_ref().and_then(|step| step.given) {
            Some(given) if given != weight => Err(format!(
                "the buffer that was asked for is that of `{}`, and not that of `{}`: scatter that one",
                name(given),
                name(weight)
            )),
            None => {
                Err(format!("no buffer of `{}` was asked for: write what GradientScatter::buffer gives, before each scatter", name(weight)))
            }
            Some(_) => Ok(step.and_then(|step| {
                step.given = None;
                step.scattered.push(weight);
                step.sent.replace(weight)
            })),
        }
    }

    /// Ends the step.
    ///
    /// # Errors
    /// As [`give`](Self::give).
    pub fn finish(&mut self, weights: &[Weight], capture: Option<u64>) -> Result<Ended, String> {
        if let Some(given) = self.of(capture)?.and_then(|step| step.given) {
            return Err(format!("the buffer of `{}` is still out: scatter it before the step is finished", weights[given].name));
        }
        let Step { before, sent, scattered, .. } = self.0.take().unwrap_or(Step::new(capture, Before::Kept));
        Ok(Ended { last: sent, order: scattered, before })
    }

    /// The weight that was sent last was summed at once.
    pub fn summed(&mut self) {
        self.0.iter_mut().for_each(|step| step.sent = None);
    }

    /// The step under way, all of which is in one graph, or in none. One of a graph that has ended is forgotten.
    fn of(&mut self, capture: Option<u64>) -> Result<Option<&mut Step>, String> {
        match self.0.as_ref().map(|step| step.capture) {
            Some(begun) if begun == capture => Ok(self.0.as_mut()),
            Some(None) => Err("a step was begun outside of the graph: finish it before the capture".to_owned()),
            Some(Some(_)) => {
                self.0 = None;
                Err("the graph in which a step was begun has ended without GradientScatter::finish: capture it again, with the finish inside".to_owned())
            }
            None => Ok(None),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_weight_at_a_time_and_each_once_a_step() {
        let weights = ["a", "b"].map(|name| Weight::new(name, [1, 1]));
        let mut steps = Steps::default();
        for _ in 0..2 {
            assert!(steps.is_between());
            assert!(steps.send(&weights, 0, None).unwrap_err().starts_with("no buffer of `a` was asked for"));
            steps.give(&weights, 0, None).unwrap();
            assert!(steps.give(&weights, 0, None).unwrap_err().starts_with("the buffer of `a` was asked for twice"));
            assert!(
                steps.give(&weights, 1, None).unwrap_err().starts_with("the buffer of `a` is still out: scatter it before that of `b`")
            );
            assert!(steps.send(&weights, 1, None).unwrap_err().starts_with("the buffer that was asked for is that of `a`"));
            assert!(steps.finish(&weights, None).unwrap_err().starts_with("the buffer of `a` is still out"));
            assert_eq!(steps.send(&weights, 0, None), Ok(None));
            assert!(steps.give(&weights, 0, None).unwrap_err().starts_with("`a` was scattered in this step already"));
            steps.give(&weights, 1, None).unwrap();
            assert_eq!(steps.send(&weights, 1, None), Ok(Some(0)));
            assert_eq!(steps.finish(&weights, None), Ok(Ended { last: Some(1), order: vec![0, 1], before: Before::Kept }));
        }
        assert_eq!(steps.finish(&weights, None), Ok(Ended { last: None, order: Vec::new(), before: Before::Kept }));
    }

    #[test]
    fn a_step_replaces_where_that_is_said_before_it() {
        let weights = [Weight::new("a", [1, 1])];
        let mut steps = Steps::default();
        steps.replace(None).unwrap();
        assert!(!steps.is_between());
        assert!(steps.replace(None).unwrap_err().starts_with("a step is under way"));
        steps.give(&weights, 0, None).unwrap();
        steps.send(&weights, 0, None).unwrap();
        assert_eq!((steps.before(), steps.sent()), (Before::Zero, Some(0)));
        assert_eq!(steps.finish(&weights, None).unwrap().before, Before::Zero);
        // The next one adds.
        steps.give(&weights, 0, None).unwrap();
        assert_eq!((steps.before(), steps.sent()), (Before::Kept, None));
        assert!(steps.replace(None).unwrap_err().starts_with("a step is under way"));
    }

    #[test]
    fn a_step_is_in_one_graph() {
        let weights = [Weight::new("a", [1, 1])];
        let mut steps = Steps::default();
        steps.give(&weights, 0, None).unwrap();
        assert!(steps.send(&weights, 0, Some(1)).unwrap_err().starts_with("a step was begun outside of the graph"));
        assert_eq!(steps.send(&weights, 0, None), Ok(None));
        steps.finish(&weights, None).unwrap();
        // A graph that ended without its finish is named once.
        steps.give(&weights, 0, Some(2)).unwrap();
        assert!(steps.give(&weights, 0, None).unwrap_err().contains("has ended without GradientScatter::finish"));
        steps.give(&weights, 0, None).unwrap();
    }
}
