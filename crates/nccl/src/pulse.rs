//! Keeps CubeCL's queue moving while collectives go through it.

use std::hint::spin_loop;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::{self, JoinHandle, Thread, available_parallelism};
use std::time::{Duration, Instant};

/// Time between two beats: CubeCL's thread gives up waiting after about 15 us.
const PERIOD: Duration = Duration::from_micros(5);
/// How long beats go on after the last call.
const AFTERGLOW: Duration = Duration::from_millis(1);
/// Threads that are busy for each GPU while it has beats: the rank's, CubeCL's and this one.
const BUSY: usize = 3;

/// A thread that calls `beat` every few microseconds for a while after each [`wake`](Self::wake).
///
/// CubeCL's thread goes to sleep for 150 us when its queue does not fill for some 15 us, and a call
/// of an adapter takes the host longer than that: where the GPU was done before the next call, each
/// collective waited for the end of a sleep, and a forward pass of 36 us took 300 to 1100 us.
pub(crate) struct Pulse {
    state: Arc<State>,
    thread: Thread,
    handle: Option<JoinHandle<()>>,
}

struct State {
    start: Instant,
    /// Nanoseconds after `start`.
    until: AtomicU64,
    asleep: AtomicBool,
    stopped: AtomicBool,
}

impl State {
    fn is_due(&self) -> bool {
        self.start.elapsed().as_nanos() < u128::from(self.until.load(Ordering::SeqCst))
    }

    fn is_stopped(&self) -> bool {
        self.stopped.load(Ordering::SeqCst)
    }
}

impl Pulse {
    /// None where the machine has too few processors for `gpus` GPUs with a pulse each.
    pub fn start(gpus: usize, beat: impl Fn() + Send + 'static) -> Option<Self> {
        let processors = available_parallelism().map_or(1, usize::from);
        if processors < BUSY * gpus {
            return None;
        }
        let state = Arc::new(State {
            start: Instant::now(),
            until: AtomicU64::new(0),
            asleep: AtomicBool::new(false),
            stopped: AtomicBool::new(false),
        });
        let of_thread = state.clone();
        let handle = thread::Builder::new()
            .name("nccl pulse".into())
            .spawn(move || run(&of_thread, beat))
            .ok()?;
        Some(Self {
            state,
            thread: handle.thread().clone(),
            handle: Some(handle),
        })
    }

    /// Has beats go on from now.
    pub fn wake(&self) {
        let until = (self.state.start.elapsed() + AFTERGLOW).as_nanos();
        let until = u64::try_from(until).unwrap_or(u64::MAX);
        self.state.until.store(until, Ordering::SeqCst);
        if self.state.asleep.load(Ordering::SeqCst) {
            self.thread.unpark();
        }
    }
}

fn run(state: &State, beat: impl Fn()) {
    while !state.is_stopped() {
        if state.is_due() {
            beat();
            let next = Instant::now() + PERIOD;
            while Instant::now() < next {
                spin_loop();
            }
            continue;
        }
        state.asleep.store(true, Ordering::SeqCst);
        // Whoever woke it before the flag was up has moved the end.
        if !state.is_due() && !state.is_stopped() {
            thread::park();
        }
        state.asleep.store(false, Ordering::SeqCst);
    }
}

impl Drop for Pulse {
    fn drop(&mut self) {
        self.state.stopped.store(true, Ordering::SeqCst);
        self.thread.unpark();
        if let Some(handle) = self.handle.take() {
            // A beat that panicked has nobody left to tell.
            let _ = handle.join();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicUsize;

    use super::*;

    #[test]
    fn beats_follow_a_call_and_end_after_it() {
        let beats = Arc::new(AtomicUsize::new(0));
        let counted = beats.clone();
        let count = move || {
            counted.fetch_add(1, Ordering::SeqCst);
        };
        let Some(pulse) = Pulse::start(0, count) else {
            panic!("no thread");
        };
        for _ in 0..3 {
            let before = beats.load(Ordering::SeqCst);
            pulse.wake();
            let start = Instant::now();
            while beats.load(Ordering::SeqCst) < before + 2 {
                assert!(start.elapsed() < Duration::from_secs(10), "no beats");
                thread::yield_now();
            }
            // Then it sleeps, and is woken again.
            while !pulse.state.asleep.load(Ordering::SeqCst) {
                assert!(start.elapsed() < Duration::from_secs(20), "beats go on");
                thread::yield_now();
            }
        }
        drop(pulse);
        let after = beats.load(Ordering::SeqCst);
        thread::sleep(Duration::from_millis(5));
        assert_eq!(beats.load(Ordering::SeqCst), after);
    }

    #[test]
    fn a_machine_with_too_few_processors_has_none() {
        assert!(Pulse::start(usize::MAX / BUSY, || ()).is_none());
    }
}
