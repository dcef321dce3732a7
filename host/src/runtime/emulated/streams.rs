//! The streams and graphs that there are: handles that come and go.

use std::sync::Arc;

use super::schedule::{Graph, Queues};
use super::scheduler::State;

impl State {
    /// A stream of the device. It takes the handle, and the place in all clocks, of one that is gone, if all its work was waited for:
    /// what the new one does comes after it anyway. So a clock has one entry for each stream alive at a time, however many come and go.
    pub fn new_stream(&mut self, device: u32) -> u64 {
        let is_known = |(handle, (of, last)): (&u64, &(u32, u64))| (*of == device && *last <= self.host.of(*handle)).then_some(*handle);
        let handle = self.retired.iter().find_map(is_known).unwrap_or_else(|| self.new_handle());
        self.retired.remove(&handle);
        self.streams.insert(handle, device);
        handle
    }

    /// The last handle of a stream is gone. One that still has work belongs to its device until the end of that.
    pub fn forget_stream(&mut self, stream: u64) {
        self.gone.insert(stream);
        self.forget_idle(stream);
    }

    /// Forgets a stream that is gone and has nothing left to do.
    pub fn forget_idle(&mut self, stream: u64) {
        if !self.gone.contains(&stream) || self.capturing.contains_key(&stream) || !self.queues.is_empty(stream) {
            return;
        }
        self.gone.remove(&stream);
        self.queues.forget(stream);
        self.poisoned.remove(&stream);
        let last = self.clocks.remove(&stream).map_or(0, |clock| clock.of(stream));
        if let Some(device) = self.streams.remove(&stream) {
            self.retired.insert(stream, (device, last));
        }
    }

    /// A capture is over: its streams may be gone meanwhile.
    pub fn end_capture(&mut self, origin: u64) -> Option<Queues> {
        self.capturing.retain(|_, capture| *capture != origin);
        self.gone.clone().into_iter().for_each(|stream| self.forget_idle(stream));
        self.captures.remove(&origin)
    }

    /// The graph is not replayed any more; what was replayed is still done.
    pub fn forget_graph(&mut self, graph: u64) {
        self.ending.extend(self.graphs.remove(&graph));
        let is_over = |graph: &Arc<Graph>| Arc::strong_count(graph) == 1 && graph.is_idle();
        let (over, ending): (Vec<_>, _) = std::mem::take(&mut self.ending).into_iter().partition(is_over);
        self.ending = ending;
        over.iter().flat_map(|graph| graph.branches()).for_each(|branch| self.forget_stream(branch.queue));
    }
}
