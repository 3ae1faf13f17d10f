//! Where the ranks of a world meet on the host.
//!
//! NCCL carries tensors. What the host has to know, as communicator ids, token counts and who has
//! ended, goes over this board: it lies in rank 0's process, other processes reach it over the
//! connection of the rendezvous, and no call of it waits for a GPU.

use std::collections::HashMap;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use moe_lora_parallel::GroupName;

/// One meeting of a group.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Place {
    pub name: GroupName,
    /// World ranks, in group order.
    pub members: Vec<usize>,
    /// Number of the meeting within the group.
    pub sequence: u64,
}

/// Why a meeting did not take place.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Absence {
    /// World ranks that did not come in time.
    Missing(Vec<usize>),
    /// A rank that has ended.
    Left { rank: usize, reason: String },
    /// Rank 0's process, and with it the board, is out of reach.
    Lost(String),
}

/// A rank that has ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Departure {
    pub rank: usize,
    pub reason: String,
    /// Whether the rank had done all it had to do.
    pub finished: bool,
}

#[derive(Default)]
struct Round {
    posts: Vec<Option<Vec<u8>>>,
    taken: usize,
}

#[derive(Default)]
struct State {
    rounds: HashMap<Place, Round>,
    /// In the order in which they ended.
    departures: Vec<Departure>,
}

/// The board of one world.
#[derive(Default)]
pub(crate) struct Board {
    state: Mutex<State>,
    changed: Condvar,
}

impl Board {
    /// Leaves `payload` for the other members and waits for theirs: all payloads, in group order.
    pub fn meet(
        &self,
        place: &Place,
        rank: usize,
        payload: Vec<u8>,
        timeout: Duration,
    ) -> Result<Vec<Vec<u8>>, Absence> {
        let size = place.members.len();
        let index = place.members.iter().position(|member| *member == rank);
        let index = index.ok_or_else(|| Absence::Lost(format!("rank {rank} is no member")))?;
        let deadline = Instant::now() + timeout;
        let mut state = self.lock();
        let round = state.rounds.entry(place.clone()).or_insert_with(|| Round {
            posts: vec![None; size],
            taken: 0,
        });
        round.posts[index] = Some(payload);
        self.changed.notify_all();
        loop {
            let posts = &state.rounds[place].posts;
            let missing = place.members.iter().zip(posts);
            let missing = missing.filter(|(_, post)| post.is_none());
            let missing: Vec<_> = missing.map(|(member, _)| *member).collect();
            if missing.is_empty() {
                return Ok(state.take(place));
            }
            if let Some(left) = state.departures.iter().find(|d| missing.contains(&d.rank)) {
                return Err(Absence::Left {
                    rank: left.rank,
                    reason: left.reason.clone(),
                });
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(Absence::Missing(missing));
            }
            state = self
                .changed
                .wait_timeout(state, left)
                .unwrap_or_else(PoisonError::into_inner)
                .0;
        }
    }

    /// Says that a rank has ended; the first word counts.
    pub fn leave(&self, departure: Departure) {
        let mut state = self.lock();
        if state.departures.iter().all(|d| d.rank != departure.rank) {
            state.departures.push(departure);
            self.changed.notify_all();
        }
    }

    /// The first rank that ended before it had done all it had to do.
    pub fn failed(&self) -> Option<Departure> {
        let state = self.lock();
        state.departures.iter().find(|d| !d.finished).cloned()
    }

    /// Waits until all `ranks` have ended, however.
    pub fn wait_for_all(&self, ranks: usize, timeout: Duration) {
        let waiting = |state: &mut State| state.departures.len() < ranks;
        let _ = self
            .changed
            .wait_timeout_while(self.lock(), timeout, waiting);
    }

    /// Whether no meeting is under way.
    #[cfg(test)]
    pub fn is_empty(&self) -> bool {
        self.lock().rounds.is_empty()
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // Consistent between any two statements: a poisoned lock says nothing more.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    /// The payloads of a complete round. The last member to take them removes it.
    fn take(&mut self, place: &Place) -> Vec<Vec<u8>> {
        let round = self.rounds.get_mut(place).expect("the member posted in it");
        round.taken += 1;
        if round.taken < round.posts.len() {
            return round.posts.iter().flatten().cloned().collect();
        }
        let round = self.rounds.remove(place).expect("it was just there");
        round.posts.into_iter().flatten().collect()
    }
}
