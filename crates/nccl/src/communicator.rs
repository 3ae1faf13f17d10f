//! NCCL's handle on one group, with its errors in words.

use std::ffi::{CStr, c_void};
use std::ptr::null_mut;
use std::sync::Arc;
use std::sync::atomic::{AtomicPtr, Ordering};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread;
use std::time::{Duration, Instant};

use burn::tensor::DType;
use cudarc::driver::sys::CUstream;
use cudarc::nccl::sys;

use crate::device::Device;

/// Bytes of an id.
const ID: usize = 128;
/// How often the connection asks whether a member is gone.
const POLL: Duration = Duration::from_millis(100);

/// The members' communicator. Null once it is aborted or destroyed.
pub(crate) struct Communicator(AtomicPtr<sys::ncclComm>);

/// The calls of one collective, issued to a stream.
pub(crate) struct Issue<'a> {
    comm: sys::ncclComm_t,
    stream: sys::cudaStream_t,
    dtype: sys::ncclDataType_t,
    owner: &'a Communicator,
}

impl Communicator {
    /// An id for a new communicator, made by one of its members and passed to the others.
    pub fn id() -> Result<Vec<u8>, String> {
        let mut id = sys::ncclUniqueId { internal: [0; ID] };
        // SAFETY: `id` receives the id.
        let result = unsafe { sys::ncclGetUniqueId(&mut id) };
        check("ncclGetUniqueId", result, null_mut())?;
        Ok(id.internal.map(|byte| byte as u8).to_vec())
    }

    /// Connects this member with the others, all of which call it.
    ///
    /// NCCL blocks in it, for ever when a member is lost half way: so a thread of its own does it,
    /// and is left behind after `timeout`, or when a member is `gone`.
    pub fn connect(
        device: &Arc<Device>,
        id: &[u8],
        (rank, size): (usize, usize),
        timeout: Duration,
        gone: impl Fn() -> bool,
    ) -> Result<Self, String> {
        let id: [u8; ID] = id
            .try_into()
            .map_err(|_| format!("an id of {} bytes, {ID} are needed", id.len()))?;
        let id = sys::ncclUniqueId {
            internal: id.map(|byte| byte as std::ffi::c_char),
        };
        let (send, connected) = mpsc::channel();
        let device = device.clone();
        thread::spawn(move || {
            let connect = || {
                device.make_current()?;
                let mut comm = null_mut();
                // SAFETY: `comm` receives the communicator; this thread's GPU is the rank's.
                let result =
                    unsafe { sys::ncclCommInitRank(&mut comm, size as i32, id, rank as i32) };
                check("ncclCommInitRank", result, null_mut())?;
                Ok(Self(AtomicPtr::new(comm)))
            };
            let _ = send.send(connect());
        });
        let start = Instant::now();
        while start.elapsed() < timeout && !gone() {
            match connected.recv_timeout(POLL) {
                Ok(connected) => return connected,
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => {
                    return Err("ncclCommInitRank panicked".into());
                }
            }
        }
        let waited = start.elapsed();
        Err(format!("ncclCommInitRank did not return within {waited:?}"))
    }

    /// Ready to issue calls on tensors of `dtype` to `stream`.
    pub fn on(&self, stream: CUstream, dtype: DType) -> Result<Issue<'_>, String> {
        let comm = self.0.load(Ordering::Acquire);
        if comm.is_null() {
            return Err("the communicator was aborted".into());
        }
        Ok(Issue {
            comm,
            stream: stream.cast(),
            dtype: element(dtype).ok_or_else(|| format!("NCCL has no {dtype:?}"))?,
            owner: self,
        })
    }

    /// What has failed since the calls returned.
    pub fn failure(&self) -> Option<String> {
        let comm = self.0.load(Ordering::Acquire);
        if comm.is_null() {
            return None;
        }
        let mut state = sys::ncclResult_t::ncclSuccess;
        // SAFETY: the communicator is live, and this may be asked beside its calls.
        let asked = unsafe { sys::ncclCommGetAsyncError(comm, &mut state) };
        let asked = check("ncclCommGetAsyncError", asked, comm);
        asked
            .and_then(|()| check("a call that was under way", state, comm))
            .err()
    }

    /// Ends the calls that are under way, on the host and on the GPU, without the other members.
    pub fn abort(&self) {
        let comm = self.0.swap(null_mut(), Ordering::AcqRel);
        if !comm.is_null() {
            // SAFETY: the communicator is live, and nothing finds it from here on.
            unsafe { sys::ncclCommAbort(comm) };
        }
    }

    /// Ends the communicator after its last call.
    pub fn destroy(&self) {
        let comm = self.0.swap(null_mut(), Ordering::AcqRel);
        if !comm.is_null() {
            // SAFETY: as in `abort`.
            unsafe { sys::ncclCommDestroy(comm) };
        }
    }
}

/// Addresses are of contiguous buffers on the communicator's GPU that hold the given counts of
/// elements; the caller has ordered the stream after their last use.
impl Issue<'_> {
    pub fn all_reduce(&self, from: u64, to: u64, count: usize) -> Result<(), String> {
        // SAFETY: see the impl.
        self.check("ncclAllReduce", unsafe {
            sys::ncclAllReduce(
                at(from),
                at(to),
                count,
                self.dtype,
                sys::ncclRedOp_t::ncclSum,
                self.comm,
                self.stream,
            )
        })
    }

    /// `count` elements of every member.
    pub fn all_gather(&self, from: u64, to: u64, count: usize) -> Result<(), String> {
        // SAFETY: see the impl.
        self.check("ncclAllGather", unsafe {
            sys::ncclAllGather(at(from), at(to), count, self.dtype, self.comm, self.stream)
        })
    }

    /// `count` elements for every member.
    pub fn reduce_scatter(&self, from: u64, to: u64, count: usize) -> Result<(), String> {
        // SAFETY: see the impl.
        self.check("ncclReduceScatter", unsafe {
            sys::ncclReduceScatter(
                at(from),
                at(to),
                count,
                self.dtype,
                sys::ncclRedOp_t::ncclSum,
                self.comm,
                self.stream,
            )
        })
    }

    /// The sum at `root` alone.
    pub fn reduce(&self, from: u64, to: u64, count: usize, root: usize) -> Result<(), String> {
        // SAFETY: see the impl; only the root writes to `to`.
        self.check("ncclReduce", unsafe {
            sys::ncclReduce(
                at(from),
                at(to),
                count,
                self.dtype,
                sys::ncclRedOp_t::ncclSum,
                root as i32,
                self.comm,
                self.stream,
            )
        })
    }

    pub fn broadcast(&self, from: u64, to: u64, count: usize, root: usize) -> Result<(), String> {
        // SAFETY: see the impl.
        self.check("ncclBroadcast", unsafe {
            sys::ncclBroadcast(
                at(from),
                at(to),
                count,
                self.dtype,
                root as i32,
                self.comm,
                self.stream,
            )
        })
    }

    pub fn send(&self, from: u64, count: usize, to: usize) -> Result<(), String> {
        // SAFETY: see the impl.
        self.check("ncclSend", unsafe {
            sys::ncclSend(
                at(from),
                count,
                self.dtype,
                to as i32,
                self.comm,
                self.stream,
            )
        })
    }

    pub fn recv(&self, to: u64, count: usize, from: usize) -> Result<(), String> {
        // SAFETY: see the impl.
        self.check("ncclRecv", unsafe {
            sys::ncclRecv(
                at(to),
                count,
                self.dtype,
                from as i32,
                self.comm,
                self.stream,
            )
        })
    }

    /// The calls of `each` as one: none waits for another.
    pub fn together(&self, each: impl FnOnce(&Self) -> Result<(), String>) -> Result<(), String> {
        // SAFETY: every start has its end, on the same thread.
        self.check("ncclGroupStart", unsafe { sys::ncclGroupStart() })?;
        let calls = each(self);
        // SAFETY: as above.
        let end = self.check("ncclGroupEnd", unsafe { sys::ncclGroupEnd() });
        calls.and(end)
    }

    fn check(&self, call: &str, result: sys::ncclResult_t) -> Result<(), String> {
        // After an abort from another thread the handle must not be asked for its last error.
        let live = self.owner.0.load(Ordering::Acquire);
        check(call, result, live)
    }
}

fn at(address: u64) -> *mut c_void {
    address as *mut c_void
}

fn element(dtype: DType) -> Option<sys::ncclDataType_t> {
    Some(match dtype {
        DType::F64 => sys::ncclDataType_t::ncclFloat64,
        DType::F32 => sys::ncclDataType_t::ncclFloat32,
        DType::F16 => sys::ncclDataType_t::ncclFloat16,
        DType::BF16 => sys::ncclDataType_t::ncclBfloat16,
        _ => return None,
    })
}

/// The result in words: the call, the code, NCCL's text for it and its last message.
fn check(call: &str, result: sys::ncclResult_t, comm: sys::ncclComm_t) -> Result<(), String> {
    use sys::ncclResult_t::{ncclInProgress, ncclSuccess};
    if matches!(result, ncclSuccess | ncclInProgress) {
        return Ok(());
    }
    let text = |text: *const std::ffi::c_char| {
        if text.is_null() {
            return String::new();
        }
        // SAFETY: NCCL's texts end in zero and are static, or are kept until its next call here.
        let text = unsafe { CStr::from_ptr(text) };
        text.to_string_lossy().trim().to_string()
    };
    // SAFETY: both take any result and any live communicator, null included.
    let (meaning, last) = unsafe {
        (
            text(sys::ncclGetErrorString(result)),
            text(sys::ncclGetLastError(comm)),
        )
    };
    let last = if last.is_empty() {
        last
    } else {
        format!(": {last}")
    };
    Err(format!("{call} failed with {result:?}, {meaning}{last}"))
}
