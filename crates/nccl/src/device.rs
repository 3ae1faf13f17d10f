//! One rank's GPU: CubeCL's context on it, a stream for the collectives, and events.

use std::sync::{Mutex, PoisonError};

use cudarc::driver::DriverError;
use cudarc::driver::{result, sys};

use crate::StartError;

/// Number of GPUs of this machine that CUDA can use; 0 without a driver.
pub fn gpu_count() -> usize {
    // SAFETY: loads the driver library, if there is one, and runs its initialisers.
    if !unsafe { sys::is_culib_present() } || result::init().is_err() {
        return 0;
    }
    result::device::get_count().map_or(0, |count| count as usize)
}

/// Collectives of all groups of a rank go through one stream, in program order.
pub(crate) struct Device {
    pub index: usize,
    context: sys::CUcontext,
    stream: sys::CUstream,
    idle: Mutex<Vec<Event>>,
}

/// A point in a stream's work.
pub(crate) struct Event(sys::CUevent);

// SAFETY: the driver's handles may be used from any thread; what is not atomic, the list of idle
// events, is behind a lock.
unsafe impl Send for Device {}
// SAFETY: as above.
unsafe impl Sync for Device {}
// SAFETY: as above.
unsafe impl Send for Event {}

impl Device {
    pub fn open(index: usize, rank: usize) -> Result<Self, StartError> {
        // SAFETY: loads the libraries, if they are there, and runs their initialisers.
        let (driver, nccl) = unsafe {
            (
                sys::is_culib_present(),
                cudarc::nccl::sys::is_culib_present(),
            )
        };
        for (there, library) in [(driver, "CUDA driver"), (nccl, "NCCL")] {
            if !there {
                return Err(StartError::Library { library });
            }
        }
        let fail = |error: DriverError| StartError::Device {
            rank,
            device: index,
            reason: error.to_string(),
        };
        result::init().map_err(fail)?;
        let device = result::device::get(index as i32).map_err(fail)?;
        let mut stream = std::ptr::null_mut();
        // SAFETY: `device` is a GPU. Its primary context is the one that CubeCL uses too; it stays
        // retained as long as the process lives. `stream` receives the new stream.
        let context = unsafe {
            let context = result::primary_ctx::retain(device).map_err(fail)?;
            result::ctx::set_current(context).map_err(fail)?;
            let flags = sys::CUstream_flags::CU_STREAM_NON_BLOCKING as u32;
            sys::cuStreamCreate(&mut stream, flags)
                .result()
                .map_err(fail)?;
            context
        };
        Ok(Self {
            index,
            context,
            stream,
            idle: Mutex::default(),
        })
    }

    /// Makes this GPU the one of the calling thread. burn runs backward passes on other threads
    /// than forward ones.
    pub fn make_current(&self) -> Result<(), String> {
        // SAFETY: the context was retained when the device was opened.
        unsafe { result::ctx::set_current(self.context) }.map_err(|error| error.to_string())
    }

    /// Calls `issue`, which gives work to the stream, between everything that the context was given
    /// before and everything that it is given from now on. The event marks the end of that work.
    ///
    /// No buffer has to be kept for it: freed memory is used again by later work alone, and that
    /// waits on the device.
    pub fn in_order(
        &self,
        issue: impl FnOnce(sys::CUstream) -> Result<(), String>,
    ) -> Result<Event, String> {
        let (ready, done) = (self.event()?, self.event()?);
        let driver = |result: sys::CUresult| result.result().map_err(|error| error.to_string());
        // SAFETY: context, stream and events are live. A wait takes an event's state as of the call,
        // so `ready` is free for other use afterwards.
        unsafe {
            driver(sys::cuCtxRecordEvent(self.context, ready.0))?;
            driver(sys::cuStreamWaitEvent(self.stream, ready.0, 0))?;
        }
        self.recycle(ready);
        issue(self.stream)?;
        // SAFETY: as above.
        unsafe {
            driver(sys::cuEventRecord(done.0, self.stream))?;
            driver(sys::cuCtxWaitEvent(self.context, done.0))?;
        }
        Ok(done)
    }

    /// Whether the work before `event` has ended, without waiting for it.
    pub fn is_done(&self, event: &Event) -> Result<bool, String> {
        // SAFETY: the event is live.
        match unsafe { sys::cuEventQuery(event.0) } {
            sys::CUresult::CUDA_SUCCESS => Ok(true),
            sys::CUresult::CUDA_ERROR_NOT_READY => Ok(false),
            error => Err(DriverError(error).to_string()),
        }
    }

    /// Keeps an event for another call: making one takes longer than using it.
    pub fn recycle(&self, event: Event) {
        self.idle
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .push(event);
    }

    fn event(&self) -> Result<Event, String> {
        let idle = self
            .idle
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .pop();
        if let Some(event) = idle {
            return Ok(event);
        }
        let mut event = std::ptr::null_mut();
        let flags = sys::CUevent_flags::CU_EVENT_DISABLE_TIMING as u32;
        // SAFETY: `event` receives the new event.
        unsafe { sys::cuEventCreate(&mut event, flags) }
            .result()
            .map_err(|error| error.to_string())?;
        Ok(Event(event))
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        // SAFETY: the event is live and owned; the driver keeps it until work that uses it is done.
        unsafe { sys::cuEventDestroy_v2(self.0) };
    }
}

impl Drop for Device {
    fn drop(&mut self) {
        // SAFETY: the stream is live and owned; the driver ends its work first.
        unsafe { sys::cuStreamDestroy_v2(self.stream) };
    }
}
