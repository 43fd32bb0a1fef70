//! A recorded sequence of launches and copies, which runs again with one call.

use std::sync::Arc;

use cudarc::driver::sys;

use super::check::{check, note};
use super::driver::recording;
use super::{Device, Stream};
use crate::error::Result;

/// What a stream recorded, ready to run again. The kernels' modules and all memory that was in use
/// must stay for as long as it runs; the addresses are those of the recording.
///
/// One thread at a time launches it: the driver does not lock graphs, so it is not `Sync`.
#[derive(Debug)]
pub struct Graph {
    device: Arc<Device>,
    handle: sys::CUgraphExec,
    nodes: usize,
}

// SAFETY: the handle may be used from any thread, by one at a time: as a raw pointer, it keeps the
// type from being `Sync`.
unsafe impl Send for Graph {}

impl Stream {
    /// Records what `record` puts into the stream instead of running it. Within it, the thread
    /// cannot allocate, free, load modules or synchronise.
    ///
    /// # Errors
    /// The error of `record`, or a runtime error when something in it cannot be recorded. The stream
    /// is as before in any case.
    pub fn capture(&self, record: impl FnOnce(&Self) -> Result<()>) -> Result<Graph> {
        let _lock = recording();
        let capture = Capture::begin(self)?;
        record(self)?;
        let recorded = capture.end()?;
        let nodes = recorded.nodes()?;
        Ok(Graph { device: Arc::clone(self.device()), handle: recorded.instantiate()?, nodes })
    }
}

impl Graph {
    /// Puts one run of the graph into `stream`.
    ///
    /// # Errors
    /// Runtime error when the driver refuses it.
    pub fn launch(&self, stream: &Stream) -> Result<()> {
        stream.device().make_current()?;
        // SAFETY: graph and stream live; no other thread uses this graph, which is not `Sync`.
        let result = unsafe { sys::cuGraphLaunch(self.handle, stream.handle()) };
        check(result, "cuGraphLaunch", || self.on(stream))
    }

    /// Brings the graph onto the device, so that its first launch is as fast as the next.
    ///
    /// # Errors
    /// Runtime error when the driver refuses it.
    pub fn upload(&self, stream: &Stream) -> Result<()> {
        stream.device().make_current()?;
        // SAFETY: graph and stream live; no other thread uses this graph, which is not `Sync`.
        let result = unsafe { sys::cuGraphUpload(self.handle, stream.handle()) };
        check(result, "cuGraphUpload", || self.on(stream))
    }

    /// The number of launches, copies and fills in it.
    pub fn nodes(&self) -> usize {
        self.nodes
    }

    fn on(&self, stream: &Stream) -> String {
        format!("a graph of {} nodes on {}", self.nodes, stream.device())
    }
}

impl Drop for Graph {
    fn drop(&mut self) {
        if self.device.make_current().is_ok() {
            // SAFETY: instantiated in `capture` and destroyed only here; the driver lets a run end.
            note(unsafe { sys::cuGraphExecDestroy(self.handle) }, "cuGraphExecDestroy");
        }
    }
}

/// A stream that records. It stops when this is dropped, so on errors and panics too.
struct Capture<'a> {
    stream: &'a Stream,
    open: bool,
}

impl<'a> Capture<'a> {
    fn begin(stream: &'a Stream) -> Result<Self> {
        stream.device().make_current()?;
        let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        // SAFETY: the stream lives; this thread ends the capture, in `end` or `drop`.
        let result = unsafe { sys::cuStreamBeginCapture_v2(stream.handle(), mode) };
        check(result, "cuStreamBeginCapture", || stream.device().to_string())?;
        Ok(Self { stream, open: true })
    }

    fn end(mut self) -> Result<Recorded<'a>> {
        self.stop()
    }

    fn stop(&mut self) -> Result<Recorded<'a>> {
        self.open = false;
        let stream = self.stream;
        stream.device().make_current()?;
        let mut handle = std::ptr::null_mut();
        // SAFETY: writes one handle to a valid address; `begin` has begun a capture here.
        let result = unsafe { sys::cuStreamEndCapture(stream.handle(), &mut handle) };
        check(result, "cuStreamEndCapture", || stream.device().to_string())?;
        Ok(Recorded { stream, handle })
    }
}

impl Drop for Capture<'_> {
    fn drop(&mut self) {
        if self.open
            && let Err(error) = self.stop()
        {
            log::debug!("{error}"); // the error that brought us here is the one to report
        }
    }
}

/// What was recorded, before it is made ready to run.
struct Recorded<'a> {
    stream: &'a Stream,
    handle: sys::CUgraph,
}

impl Recorded<'_> {
    fn nodes(&self) -> Result<usize> {
        let mut count = 0;
        // SAFETY: without room for nodes, only their number is written, to a valid address.
        let result = unsafe { sys::cuGraphGetNodes(self.handle, std::ptr::null_mut(), &mut count) };
        check(result, "cuGraphGetNodes", || self.stream.device().to_string())?;
        Ok(count)
    }

    fn instantiate(&self) -> Result<sys::CUgraphExec> {
        let mut handle = std::ptr::null_mut();
        // SAFETY: writes one handle to a valid address; the graph lives, and is not needed after.
        let result = unsafe { sys::cuGraphInstantiateWithFlags(&mut handle, self.handle, 0) };
        check(result, "cuGraphInstantiate", || self.stream.device().to_string())?;
        Ok(handle)
    }
}

impl Drop for Recorded<'_> {
    fn drop(&mut self) {
        if !self.handle.is_null() {
            // SAFETY: made by the end of a capture and destroyed only here.
            note(unsafe { sys::cuGraphDestroy(self.handle) }, "cuGraphDestroy");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Has two implementations for what is `Sync`, so that a call without a type in the brackets
    /// compiles only for what is not.
    trait NotSync<A> {
        fn holds() {}
    }
    impl<T> NotSync<()> for T {}
    impl<T: Sync> NotSync<u8> for T {}

    #[test]
    fn a_graph_moves_between_threads_but_is_not_shared() {
        fn moves<T: Send>() {}
        moves::<Graph>();
        <Graph as NotSync<_>>::holds();
        <Stream as NotSync<_>>::holds();
    }
}
