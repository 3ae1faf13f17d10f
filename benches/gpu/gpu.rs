//! One GPU through the driver: copy bandwidth, and time on the device alone.

use std::time::Duration;

use burn_cubecl::cubecl::Runtime;
use burn_cubecl::cubecl::client::ComputeClient;
use burn_cubecl::cubecl::cuda::{CudaDevice, CudaRuntime};
use cudarc::driver::{result, sys};

use crate::times::Times;

/// Size of the buffers that are copied. Far more than the L2 cache holds.
const COPY: usize = 1 << 30;

/// A GPU with the context that CubeCL uses, and a stream of its own.
///
/// Bench code: a driver that fails ends the process.
pub struct Gpu {
    client: ComputeClient<CudaRuntime>,
    context: sys::CUcontext,
    index: sys::CUdevice,
    stream: sys::CUstream,
    from: sys::CUdeviceptr,
    to: sys::CUdeviceptr,
    start: sys::CUevent,
    end: sys::CUevent,
    all: sys::CUevent,
    /// Bytes a second, read plus written.
    bandwidth: f64,
}

/// How long launches took on the device.
#[derive(Clone, Copy, Debug)]
pub struct DeviceTime {
    /// Microseconds from the end of the work before the launches to their own.
    pub us: f64,
    /// Whether the host had issued every launch before the first one could begin. Otherwise the
    /// time has the host's in it.
    pub alone: bool,
}

impl Gpu {
    /// Opens the GPU and measures its copy bandwidth.
    pub fn open(device: &CudaDevice) -> Self {
        let client = CudaRuntime::client(device);
        result::init().expect("the driver starts");
        let index = result::device::get(device.index as i32).expect("the GPU is there");
        let event = |flags| result::event::create(flags).expect("an event");
        let timed = sys::CUevent_flags::CU_EVENT_DEFAULT;
        // SAFETY: `index` is a GPU; its primary context stays retained as long as the process lives.
        let context = unsafe {
            let context = result::primary_ctx::retain(index).expect("the GPU's context");
            result::ctx::set_current(context).expect("the GPU's context");
            context
        };
        let kind = result::stream::StreamKind::NonBlocking;
        let allocate = || {
            // SAFETY: the buffer is written before it is read, and freed in `drop`.
            let buffer = unsafe { result::malloc_sync(COPY) }.expect("1 GiB of the GPU's memory");
            // SAFETY: the buffer has this size.
            unsafe { result::memset_d8_sync(buffer, 0x3c, COPY) }.expect("a fill");
            buffer
        };
        let mut gpu = Self {
            client,
            context,
            index,
            stream: result::stream::create(kind).expect("a stream"),
            from: allocate(),
            to: allocate(),
            start: event(timed),
            end: event(timed),
            all: event(sys::CUevent_flags::CU_EVENT_DISABLE_TIMING),
            bandwidth: f64::NAN,
        };
        gpu.bandwidth = gpu.copy_bandwidth();
        gpu
    }

    /// Bytes a second of a large copy, counting bytes read and bytes written.
    pub fn bandwidth(&self) -> f64 {
        self.bandwidth
    }

    /// Size of the L2 cache in bytes.
    pub fn l2_bytes(&self) -> usize {
        let size = sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE;
        // SAFETY: `index` is a GPU.
        unsafe { result::device::get_attribute(self.index, size) }.expect("the L2 size") as usize
    }

    /// Returns when the GPU has done everything that this process gave it, on any stream.
    pub fn wait(&self) {
        self.issued();
        self.make_current();
        result::ctx::synchronize().expect("the GPU's work ends well");
    }

    /// Bytes of the tensors that are alive.
    pub fn in_use(&self) -> i64 {
        let usage = self.client.memory_usage().expect("CubeCL answers");
        usage.bytes_in_use as i64
    }

    /// Returns when CubeCL has given the driver everything that it was given. Unlike its `flush`,
    /// this never waits for the GPU.
    fn issued(&self) {
        self.client.memory_usage().expect("CubeCL answers");
    }

    /// Times what `launch` gives to CubeCL from this thread, behind work that holds the GPU at
    /// least as long as the host needs for it.
    pub fn time(&self, hold: Duration, launch: impl FnOnce()) -> DeviceTime {
        let copy = 2.0 * COPY as f64 / self.bandwidth;
        let copies = (hold.as_secs_f64() / copy).ceil() as usize;
        // Twice: host memory of uploads is let go two flushes later, which waits for the GPU.
        for _ in 0..2 {
            self.client.flush().expect("CubeCL answers");
        }
        self.wait();
        self.copy(copies);
        // SAFETY: context, stream and events are live. A wait takes an event's state as of the call.
        unsafe {
            result::event::record(self.start, self.stream).expect("the start is recorded");
            driver(sys::cuCtxWaitEvent(self.context, self.start));
        }
        launch();
        self.issued();
        // SAFETY: as above. The end is recorded on the stream of the start, behind all others.
        unsafe {
            let alone = sys::cuEventQuery(self.start) == sys::CUresult::CUDA_ERROR_NOT_READY;
            driver(sys::cuCtxRecordEvent(self.context, self.all));
            driver(sys::cuStreamWaitEvent(self.stream, self.all, 0));
            let us = self.until_end();
            DeviceTime { us, alone }
        }
    }

    fn copy_bandwidth(&self) -> f64 {
        const COPIES: usize = 10;
        let once = || {
            // SAFETY: stream and event are live.
            unsafe { result::event::record(self.start, self.stream) }.expect("a start");
            self.copy(COPIES);
            // SAFETY: the start is recorded on this stream.
            unsafe { self.until_end() }
        };
        once();
        let us = Times::of((0..7).map(|_| once()).collect()).median;
        (2 * COPY * COPIES) as f64 / us * 1e6
    }

    fn copy(&self, copies: usize) {
        for _ in 0..copies {
            // SAFETY: both buffers have this size and live as long as `self`.
            unsafe { result::memcpy_dtod_async(self.to, self.from, COPY, self.stream) }
                .expect("a copy");
        }
    }

    /// Microseconds between the recorded start and now, in the stream.
    ///
    /// # Safety
    ///
    /// The start has been recorded on the stream.
    unsafe fn until_end(&self) -> f64 {
        // SAFETY: events and stream are live, and the start is recorded, as the caller says.
        unsafe {
            result::event::record(self.end, self.stream).expect("the end is recorded");
            result::event::synchronize(self.end).expect("the GPU's work ends well");
            let ms = result::event::elapsed(self.start, self.end).expect("both are recorded");
            f64::from(ms) * 1e3
        }
    }

    fn make_current(&self) {
        // SAFETY: the context was retained when the GPU was opened.
        unsafe { result::ctx::set_current(self.context) }.expect("the GPU's context");
    }
}

impl Drop for Gpu {
    fn drop(&mut self) {
        // SAFETY: all of them are live and owned; nothing uses the buffers after the wait.
        unsafe {
            let _ = result::ctx::set_current(self.context);
            let _ = result::stream::synchronize(self.stream);
            let _ = result::free_sync(self.from);
            let _ = result::free_sync(self.to);
            for event in [self.start, self.end, self.all] {
                let _ = result::event::destroy(event);
            }
            let _ = result::stream::destroy(self.stream);
        }
    }
}

fn driver(result: sys::CUresult) {
    result.result().expect("the driver does as it is told");
}
