//! Calls that are made as one: which calls belong to a group.

use std::any::Any;
use std::cell::RefCell;

use super::operand::Operand;
use crate::recording::Work;
use crate::runtime::backend::{Backend, StreamId};
use crate::runtime::recorder::{Recorder, Together};
use crate::runtime::{Error, Result};

const WHAT: &str = "Communicator::group";

thread_local! {
    /// The group that this thread's calls belong to.
    static UNDER_WAY: RefCell<Option<Group>> = const { RefCell::new(None) };
}

struct Group {
    /// The communicator that it is of.
    communicator: usize,
    /// What its calls use: kept until the calls are enqueued.
    uses: Vec<Operand>,
    /// The calls that its communicator makes at its end.
    calls: Vec<Box<dyn Any>>,
    /// What is recorded of the calls that were made.
    recorded: Together,
}

/// The group of this thread, until it is dropped.
#[derive(Debug)]
pub(super) struct Open(());

/// Begins the group of a communicator, whichever handle it is called by.
///
/// # Errors
/// [`Error::Invalid`] inside another group.
pub(super) fn begin(communicator: usize) -> Result<Open> {
    refuse(WHAT, "a group is under way on this thread, and groups do not nest: make its calls in the group that there is")?;
    UNDER_WAY.set(Some(Group { communicator, uses: Vec::new(), calls: Vec::new(), recorded: Together::default() }));
    Ok(Open(()))
}

/// Fails where a group is under way on this thread.
pub(super) fn refuse(what: &'static str, why: &str) -> Result<()> {
    if UNDER_WAY.with_borrow(Option::is_some) { Err(Error::Invalid { what, why: why.to_owned() }) } else { Ok(()) }
}

/// Notes a call of a communicator. Returns whether it belongs to a group, and so is made at the group's end.
///
/// # Errors
/// [`Error::Invalid`] for a call on another communicator than the group's, and for bytes that two calls of the group use and one writes: they have
/// no order.
pub(super) fn join(communicator: usize, what: &'static str, uses: &[Operand]) -> Result<bool> {
    UNDER_WAY.with_borrow_mut(|group| {
        let Some(group) = group else { return Ok(false) };
        if group.communicator != communicator {
            let why = "a group of another communicator is under way on this thread: make this call after it, or in a group of its own";
            return Err(Error::Invalid { what, why: why.to_owned() });
        }
        let conflicts = |one: &&Operand| group.uses.iter().any(|other| one.conflicts(other));
        if let Some(one) = uses.iter().find(conflicts) {
            let name = &one.memory.name;
            let why = format!("another call of the group uses these elements of buffer `{name}`, and one of them writes them: calls of a group have no order");
            return Err(Error::Invalid { what, why });
        }
        group.uses.extend(uses.iter().filter(|one| one.bytes > 0).cloned());
        Ok(true)
    })
}

/// Keeps a call for the end of this thread's group, which it has [joined](join).
pub(super) fn keep(call: impl Any) {
    UNDER_WAY.with_borrow_mut(|group| group.as_mut().expect("the call joined a group").calls.push(Box::new(call)));
}

/// Records a call of this thread's group, which it has [joined](join).
pub(super) fn record(recorder: Option<&Recorder>, backend: &dyn Backend, stream: StreamId, work: impl FnOnce() -> Work) -> Result<()> {
    UNDER_WAY.with_borrow_mut(|group| group.as_mut().expect("the call joined a group").recorded.call(recorder, backend, stream, work))
}

impl Open {
    /// Notes that the calls that were recorded are enqueued.
    pub(super) fn end_recorded(&self, recorder: Option<&Recorder>, backend: &dyn Backend) -> Result<()> {
        UNDER_WAY.with_borrow_mut(|group| group.as_mut().map_or(Ok(()), |group| group.recorded.end(recorder, backend)))
    }

    /// The calls that were kept, in their order: of one communicator, and so of one type.
    pub(super) fn take_kept<C: Any>(&self) -> Vec<C> {
        let calls = UNDER_WAY.with_borrow_mut(|group| group.as_mut().map(|group| std::mem::take(&mut group.calls)));
        calls.into_iter().flatten().map(|call| *call.downcast().expect("a call of the group's communicator")).collect()
    }
}

impl Drop for Open {
    fn drop(&mut self) {
        // This may free memory, which does not use groups.
        let ended = UNDER_WAY.take();
        drop(ended);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::recording::Activity;
    use crate::runtime::{Buffer, Runtime};

    #[test]
    fn groups_do_not_nest_and_end_with_their_guard() {
        assert!(!join(1, "call", &[]).unwrap());
        let open = begin(1).unwrap();
        assert!(join(1, "call", &[]).unwrap());
        let error = begin(2).unwrap_err().to_string();
        assert!(error.starts_with("Communicator::group: a group is under way"), "{error}");
        assert!(join(2, "call", &[]).unwrap_err().to_string().starts_with("call: a group of another communicator"));
        keep("mine");
        std::thread::spawn(|| assert!(begin(1).unwrap().take_kept::<&str>().is_empty())).join().unwrap();
        keep("and mine");
        assert_eq!(open.take_kept::<&str>(), ["mine", "and mine"]);
        drop(open);
        drop(begin(2).unwrap());
        refuse("call", "never").unwrap();
    }

    #[test]
    fn each_thread_records_its_own_group() {
        let (runtime, recorder) = (Runtime::emulated(1).unwrap(), Recorder::default());
        recorder.start();
        let backend = &*runtime.0.backend;
        let stream = backend.create_stream(0).unwrap();
        let call = |name: &str| record(Some(&recorder), backend, stream, || Work::new(Activity::Collective, name, None, None)).unwrap();
        let names = || {
            backend.synchronize(stream).unwrap();
            recorder.recording(backend).unwrap().spans.into_iter().map(|span| span.name).collect::<Vec<_>>()
        };
        let open = begin(1).unwrap();
        call("mine");
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let open = begin(1).unwrap();
                call("theirs");
                open.end_recorded(Some(&recorder), backend).unwrap();
            });
        });
        assert_eq!(names(), ["theirs"]);
        call("and mine");
        open.end_recorded(Some(&recorder), backend).unwrap();
        // In the order in which they began.
        assert_eq!(names(), ["mine + and mine", "theirs"]);
    }

    #[test]
    fn memory_is_kept_and_written_by_one_call_alone() {
        let stream = Runtime::emulated(1).unwrap().device(0).unwrap().stream().unwrap();
        let [one, other, none] = [2, 1, 0].map(|len| Buffer::<u32>::zeros(&stream, len).unwrap());
        let operand = |buffer: &Buffer<u32>, writes| Operand { writes, ..Operand::read(&stream, "call", buffer.view()).unwrap() };
        let use_of = |buffer: &Buffer<u32>, writes| join(1, "call", &[operand(buffer, writes)]);
        let open = begin(1).unwrap();
        use_of(&one, false).unwrap();
        use_of(&one, false).unwrap();
        assert!(use_of(&one, true).unwrap_err().to_string().contains("another call of the group uses these elements of buffer `buffer`"));
        use_of(&other, true).unwrap();
        assert!(use_of(&other, false).is_err() && use_of(&other, true).is_err());
        (0..2).for_each(|_| _ = use_of(&none, true).unwrap());
        let memory = Arc::downgrade(other.memory());
        drop(other);
        assert!(memory.upgrade().is_some());
        drop(open);
        assert!(memory.upgrade().is_none());
        // Halves of one buffer are apart.
        let open = begin(1).unwrap();
        let half = |start| Operand { writes: true, ..Operand::read(&stream, "call", one.view().slice(start, start + 1)).unwrap() };
        join(1, "call", &[half(0)]).and_then(|_| join(1, "call", &[half(1)])).unwrap();
        assert!(join(1, "call", &[half(1)]).is_err());
        drop(open);
    }
}
