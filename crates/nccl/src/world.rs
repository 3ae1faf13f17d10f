//! What the groups of one rank share: its GPU, its way to the other ranks, its calls under way, and
//! the watchdog over them.

use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use moe_lora_parallel::{CollectiveError, CollectiveOp, GroupName};

use crate::board::{Absence, Departure};
use crate::communicator::Communicator;
use crate::device::{Device, Event, Server};
use crate::host::Host;

/// How often the watchdog looks.
const POLL: Duration = Duration::from_millis(100);
/// How long the watchdog lets a call return by itself before it aborts under it.
const PATIENCE: Duration = Duration::from_secs(1);

pub(crate) struct World {
    pub rank: usize,
    pub size: usize,
    pub timeout: Duration,
    /// Whether ranks compare what they call before each call.
    pub checks: bool,
    pub host: Host,
    pub device: Arc<Device>,
    /// Held while a call is being issued, when the host may be inside NCCL.
    issuing: Mutex<()>,
    calls: Mutex<Calls>,
    communicators: Mutex<Vec<Arc<Communicator>>>,
    failure: Mutex<Option<Failure>>,
    over: AtomicBool,
}

/// Calls that have been issued and have not ended on the GPU, oldest first.
struct Calls {
    open: VecDeque<Call>,
    /// Since when the first of them is the oldest.
    since: Instant,
}

struct Call {
    op: CollectiveOp,
    group: GroupName,
    /// None while the host is still inside NCCL.
    done: Option<Event>,
}

/// Why no call of this rank can succeed any more.
#[derive(Clone, Debug)]
enum Failure {
    Departed { rank: usize, reason: String },
    Broken(String),
}

impl World {
    pub fn new(
        (rank, size): (usize, usize),
        host: Host,
        device: Device,
        timeout: Duration,
        checks: bool,
    ) -> Self {
        Self {
            rank,
            size,
            timeout,
            checks,
            host,
            device: Arc::new(device),
            issuing: Mutex::default(),
            calls: Mutex::new(Calls {
                open: VecDeque::new(),
                since: Instant::now(),
            }),
            communicators: Mutex::default(),
            failure: Mutex::default(),
            over: AtomicBool::new(false),
        }
    }

    /// The error of a call, once something has failed.
    pub fn check(&self, op: CollectiveOp, group: GroupName) -> Result<(), CollectiveError> {
        let rank = self.rank;
        let Some(failure) = lock(&self.failure).clone() else {
            return Ok(());
        };
        self.let_others_learn();
        Err(match failure {
            Failure::Departed {
                rank: departed,
                reason,
            } => CollectiveError::Departed {
                op,
                group,
                rank,
                departed,
                reason,
            },
            Failure::Broken(reason) => CollectiveError::Transport {
                op,
                group,
                rank,
                reason,
            },
        })
    }

    /// On rank 0, holds an error back until every rank has seen its cause on the board, or had the time
    /// to: the error may end this process, and the others would know no more than that it is gone.
    fn let_others_learn(&self) {
        self.host.outlive(self.size, PATIENCE);
    }

    /// Ends the world for this rank, and by the watchdog for the others; the first cause counts.
    pub fn fail(&self, reason: String) {
        self.fail_with(Failure::Broken(reason));
    }

    fn fail_with(&self, failure: Failure) {
        lock(&self.failure).get_or_insert(failure);
    }

    /// The error of a meeting that did not take place, which is the end of the world.
    pub fn absence(&self, op: CollectiveOp, group: GroupName, absence: Absence) -> CollectiveError {
        let (rank, waited) = (self.rank, self.timeout);
        let error = match absence {
            Absence::Missing(missing) => {
                self.fail(format!(
                    "gave up waiting for ranks {missing:?} after {waited:?}"
                ));
                CollectiveError::Timeout {
                    op,
                    group,
                    rank,
                    missing,
                    waited,
                }
            }
            Absence::Left {
                rank: departed,
                reason,
            } => {
                self.fail_with(Failure::Departed {
                    rank: departed,
                    reason: reason.clone(),
                });
                CollectiveError::Departed {
                    op,
                    group,
                    rank,
                    departed,
                    reason,
                }
            }
            Absence::Lost(reason) => {
                let reason = format!("rank 0 is out of reach: {reason}");
                self.fail(reason.clone());
                CollectiveError::Transport {
                    op,
                    group,
                    rank,
                    reason,
                }
            }
        };
        self.let_others_learn();
        error
    }

    /// Puts a communicator under the watchdog.
    pub fn watch(&self, communicator: Arc<Communicator>) {
        lock(&self.communicators).push(communicator);
    }

    /// Queues one call behind what the calling thread has launched, and returns. `work` issues it,
    /// on CubeCL's thread; what fails there is the end of the world, and an error of later calls.
    pub fn submit(
        self: &Arc<Self>,
        op: CollectiveOp,
        group: GroupName,
        work: impl FnOnce(&mut Server, &Device) -> Result<Event, String> + Send + 'static,
    ) {
        let world = self.clone();
        self.device.submit(move |server| {
            let work = || work(server, &world.device);
            if let Err(reason) = world.issue(op, group, work) {
                world.fail(format!("{op} on group {group}: {reason}"));
            }
        });
    }

    /// On CubeCL's thread: gives one call to NCCL, under the watchdog's eyes.
    fn issue(
        &self,
        op: CollectiveOp,
        group: GroupName,
        work: impl FnOnce() -> Result<Event, String>,
    ) -> Result<(), String> {
        let _issuing = lock(&self.issuing);
        if self.has_failed() {
            // The communicators are aborted, or will be.
            return Ok(());
        }
        self.device.make_current()?;
        {
            let mut calls = lock(&self.calls);
            calls.reap(&self.device)?;
            if calls.open.is_empty() {
                calls.since = Instant::now();
            }
            let done = None;
            calls.open.push_back(Call { op, group, done });
        }
        // CubeCL would write a panic to its log, and go on.
        let issued = catch_unwind(AssertUnwindSafe(work));
        let event = issued.unwrap_or_else(|_| Err("panicked (stderr has the message)".into()))?;
        let mut calls = lock(&self.calls);
        let call = calls.open.back_mut().expect("the call is the last one");
        call.done = Some(event);
        Ok(())
    }

    /// Waits until the calls that are queued have been issued. One that is stuck inside NCCL is ended
    /// by the watchdog.
    pub fn flush(&self) {
        if !self.device.is_used() || self.has_failed() {
            return;
        }
        let (send, reached) = mpsc::channel();
        self.device.submit(move |_| {
            let _ = send.send(());
        });
        let start = Instant::now();
        while !self.has_failed() {
            match reached.recv_timeout(POLL) {
                Err(RecvTimeoutError::Timeout) if start.elapsed() < self.timeout => {}
                Err(RecvTimeoutError::Timeout) => self.fail(format!(
                    "calls were still queued after {:?} (the GPU's thread does not take them)",
                    self.timeout
                )),
                Ok(()) | Err(RecvTimeoutError::Disconnected) => return,
            }
        }
    }

    fn has_failed(&self) -> bool {
        lock(&self.failure).is_some()
    }

    /// One look of the watchdog: whether there is more to watch.
    fn inspect(&self) -> bool {
        if !self.has_failed() {
            self.look_for_failure();
        }
        let failed = self.has_failed();
        if failed {
            self.give_up();
        }
        !failed
    }

    /// After a failure: ends what is under way, and tells the others the cause.
    fn give_up(&self) {
        let Some(failure) = lock(&self.failure).clone() else {
            return;
        };
        self.abort();
        let reason = match failure {
            Failure::Departed { rank, reason } => format!("stopped because rank {rank} {reason}"),
            Failure::Broken(reason) => format!("failed: {reason}"),
        };
        self.leave(reason, false);
    }

    fn look_for_failure(&self) {
        // The board's word counts more: it names the rank that has gone, where NCCL knows that one has.
        let broken = lock(&self.communicators).iter().find_map(|c| c.failure());
        match self.host.failed() {
            Ok(None) => {}
            Ok(Some(departure)) if departure.rank == self.rank => {}
            Ok(Some(Departure { rank, reason, .. })) => {
                return self.fail_with(Failure::Departed { rank, reason });
            }
            Err(Absence::Lost(reason)) => {
                return self.fail(format!("rank 0 is out of reach: {reason}"));
            }
            Err(_) => {}
        }
        if let Some(reason) = broken {
            return self.fail(reason);
        }
        let mut calls = lock(&self.calls);
        if let Err(reason) = calls.reap(&self.device) {
            return self.fail(reason);
        }
        if let Some(Call { op, group, .. }) = calls.open.front()
            && calls.since.elapsed() > self.timeout
        {
            self.fail(format!(
                "{op} on group {group} did not end within {:?} (a rank has stopped, or has called something else)",
                self.timeout
            ));
        }
    }

    /// Ends what is under way. A call that is stuck inside NCCL, in a connection to a lost rank,
    /// holds the lock and returns because of the abort. Calls that are queued are not issued.
    fn abort(&self) {
        let start = Instant::now();
        let mut issuing = self.issuing.try_lock();
        while issuing.is_err() && start.elapsed() < PATIENCE {
            thread::sleep(Duration::from_millis(1));
            issuing = self.issuing.try_lock();
        }
        let _ = self.device.make_current();
        lock(&self.communicators).iter().for_each(|c| c.abort());
    }

    fn leave(&self, reason: String, finished: bool) {
        self.host.leave(Departure {
            rank: self.rank,
            reason,
            finished,
        });
    }

    /// Waits for the calls that are queued or under way.
    fn settle(&self) {
        self.flush();
        let start = Instant::now();
        while !self.has_failed() {
            let mut calls = lock(&self.calls);
            match calls.reap(&self.device) {
                Err(reason) => self.fail(reason),
                Ok(()) if calls.open.is_empty() => return,
                Ok(()) if start.elapsed() < self.timeout => {}
                Ok(()) => self.fail(format!("calls did not end within {:?}", self.timeout)),
            }
            drop(calls);
            thread::sleep(Duration::from_millis(1));
        }
    }
}

impl Calls {
    /// Forgets the calls that have ended.
    fn reap(&mut self, device: &Device) -> Result<(), String> {
        while let Some(event) = self.open.front().and_then(|call| call.done.as_ref()) {
            if !device.is_done(event)? {
                break;
            }
            let call = self.open.pop_front();
            if let Some(event) = call.and_then(|call| call.done) {
                device.recycle(event);
            }
            self.since = Instant::now();
        }
        Ok(())
    }
}

/// The world's end: with the last of a rank's handles and groups.
pub(crate) struct Owner {
    pub world: Arc<World>,
    watchdog: Option<JoinHandle<()>>,
}

impl Owner {
    pub fn new(world: World) -> Self {
        let world = Arc::new(world);
        let watched = world.clone();
        let watch = move || {
            let _ = watched.device.make_current();
            while !watched.over.load(Ordering::Acquire) && watched.inspect() {
                thread::park_timeout(POLL);
            }
        };
        let name = format!("nccl watch {}", world.rank);
        let watchdog = thread::Builder::new().name(name).spawn(watch).ok();
        Self { world, watchdog }
    }
}

impl Drop for Owner {
    fn drop(&mut self) {
        let world = &self.world;
        let panicking = thread::panicking();
        if !panicking {
            world.settle();
        }
        world.over.store(true, Ordering::Release);
        if let Some(watchdog) = self.watchdog.take() {
            watchdog.thread().unpark();
            let _ = watchdog.join();
        }
        if panicking {
            world.fail("panicked".into());
        }
        if world.has_failed() {
            return world.give_up();
        }
        let _ = world.device.make_current();
        lock(&world.communicators).iter().for_each(|c| c.destroy());
        world.leave("has finished".into(), true);
        // The board of the other ranks must not go before they do.
        world.host.outlive(world.size, world.timeout);
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // What is behind the locks is consistent between any two statements.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
