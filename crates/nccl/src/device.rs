//! One rank's GPU: CubeCL's context and queue on it, a stream for the collectives, and events.

use std::sync::{Mutex, OnceLock, PoisonError};

use burn_cubecl::cubecl::Runtime;
use burn_cubecl::cubecl::cuda::{CudaDevice, CudaRuntime};
use burn_cubecl::cubecl::device::Device as _;
use burn_cubecl::cubecl::device_handle::DeviceHandle;
use burn_cubecl::cubecl::server::{Binding, ComputeServer};
use burn_cubecl::cubecl::stream_id::StreamId;
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

/// CubeCL's state of a GPU. One thread of CubeCL's own has it, and takes what is queued for it in turn.
pub(crate) type Server = <CudaRuntime as Runtime>::Server;

/// Collectives of all groups of a rank go through one stream, in program order.
pub(crate) struct Device {
    pub index: usize,
    /// CubeCL's, which every launch goes through. Taken at the first use: it is made with the first
    /// tensor.
    queue: OnceLock<DeviceHandle<Server>>,
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
            queue: OnceLock::new(),
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

    /// Has CubeCL's thread call `task` after all that the calling thread has launched before, and in
    /// its place, without a wait for either.
    ///
    /// Launches may wait in the queue until it is full. This does not: other ranks wait for it.
    pub fn submit(&self, task: impl FnOnce(&mut Server) + Send + 'static) {
        let id = || CudaDevice::new(self.index).to_id();
        let queue = self.queue.get_or_init(|| DeviceHandle::new(id()));
        queue.submit(task);
        queue.flush_queue();
    }

    /// Whether anything was ever submitted.
    pub fn is_used(&self) -> bool {
        self.queue.get().is_some()
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

/// Where a buffer is on the GPU, as of the tasks before this one.
pub(crate) fn address(server: &mut Server, buffer: Binding) -> Result<u64, String> {
    // The submitting thread's: CubeCL's thread takes it on for the task.
    let stream = StreamId::current();
    let resource = server.get_resource(buffer, stream);
    let resource = resource.map_err(|error| format!("the tensor has no buffer: {error:?}"))?;
    Ok(resource.resource().ptr)
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
