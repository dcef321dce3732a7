//! Events that are not in use: to create and destroy one takes the host as long as to record it.

use std::sync::Mutex;

use super::backend::{Backend, EventId};
use super::error::Result;
use super::runtime::lock;

/// As many of a device and a kind are kept; the rest is destroyed.
const MOST: usize = 256;

/// Idle events of each device, without and with a time.
pub(crate) struct EventPool(Vec<[Mutex<Vec<EventId>>; 2]>);

impl EventPool {
    pub fn new(devices: usize) -> Self {
        Self((0..devices).map(|_| Default::default()).collect())
    }

    fn idle(&self, device: u32, is_timed: bool) -> &Mutex<Vec<EventId>> {
        &self.0[device as usize][usize::from(is_timed)]
    }

    /// An event to be recorded, which says nothing before.
    pub fn take(&self, backend: &dyn Backend, device: u32, is_timed: bool) -> Result<EventId> {
        let idle = lock(self.idle(device, is_timed)).pop();
        idle.map_or_else(|| backend.create_event(device, is_timed), Ok)
    }

    /// Takes back an event. Streams that wait for it go on doing so: what they wait for is its record at the time of the call
    /// (CUDA driver API, `cuStreamWaitEvent`).
    pub fn give(&self, backend: &dyn Backend, event: EventId, is_timed: bool) {
        let mut idle = lock(self.idle(event.device, is_timed));
        if idle.len() < MOST {
            idle.push(event);
        } else {
            drop(idle);
            backend.destroy_event(event);
        }
    }

    /// Destroys what is idle.
    pub fn clear(&self, backend: &dyn Backend) {
        let idle = self.0.iter().flatten().flat_map(|idle| std::mem::take(&mut *lock(idle)));
        idle.for_each(|event| backend.destroy_event(event));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::runtime::{Event, Runtime};

    fn idle(runtime: &Runtime, is_timed: bool) -> usize {
        lock(runtime.0.events.idle(0, is_timed)).len()
    }

    #[test]
    fn events_are_used_again_and_tell_of_their_last_record() {
        let runtime = Runtime::emulated(1).unwrap();
        let [one, other] = [0, 1].map(|_| runtime.device(0).unwrap().stream().unwrap());
        let first = one.mark().unwrap();
        let id = first.0.id;
        first.synchronize().unwrap();
        drop(first);
        assert_eq!((idle(&runtime, false), idle(&runtime, true)), (1, 0));
        drop(one.record().unwrap());
        assert_eq!((idle(&runtime, false), idle(&runtime, true)), (1, 1), "one with a time is another");
        let again = other.mark().unwrap();
        assert_eq!((again.0.id, idle(&runtime, false)), (id, 0));
        again.synchronize().unwrap();
    }

    /// A graph of another library may hold it still, and says nothing of when it is done.
    #[test]
    fn events_of_captures_are_not_used_again() {
        let runtime = Runtime::emulated(1).unwrap();
        let stream = runtime.device(0).unwrap().stream().unwrap();
        let backend = &*runtime.0.backend;
        // As another library would, without the knowledge of this one.
        backend.begin_capture(stream.0.id).unwrap();
        let events = [stream.mark().unwrap(), stream.record().unwrap()];
        assert!(!stream.is_capturing());
        drop(events);
        let graph = backend.end_capture(stream.0.id).unwrap();
        assert_eq!((idle(&runtime, false), idle(&runtime, true)), (0, 0));
        backend.destroy_graph(graph);
        drop(stream.mark().unwrap());
        assert_eq!(idle(&runtime, false), 1);
    }

    #[test]
    fn so_many_are_kept() {
        let runtime = Runtime::emulated(1).unwrap();
        let stream = runtime.device(0).unwrap().stream().unwrap();
        let events: Vec<Event> = (0..MOST + 3).map(|_| stream.mark().unwrap()).collect();
        drop(events);
        assert_eq!(idle(&runtime, false), MOST);
        runtime.0.events.clear(&*runtime.0.backend);
        assert_eq!(idle(&runtime, false), 0);
    }
}
