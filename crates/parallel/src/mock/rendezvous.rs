//! Where the ranks of a mock world meet: one round of posts for each call of each group.

use std::any::Any;
use std::collections::BTreeMap;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crate::{CollectiveError, CollectiveOp, GroupName, Signature};

/// A rank's part of one round.
pub(super) struct Post {
    pub signature: Signature,
    pub payload: Option<Box<dyn Any + Send + Sync>>,
}

/// A rank's place in a group.
#[derive(Clone, Debug)]
pub(super) struct Seat {
    pub name: GroupName,
    /// Index of the group within the rendezvous.
    pub group: usize,
    /// World ranks, in group order.
    pub members: Vec<usize>,
    /// Position of this rank among the members.
    pub index: usize,
}

impl Seat {
    pub fn rank(&self) -> usize {
        self.members[self.index]
    }

    fn departed(&self, op: CollectiveOp, departed: usize, reason: String) -> CollectiveError {
        CollectiveError::Departed {
            op,
            group: self.name,
            rank: self.rank(),
            departed,
            reason,
        }
    }
}

/// Why a group cannot go on. It stays so: its ranks no longer agree on how many calls were made.
#[derive(Clone)]
enum Fault {
    Mismatch { calls: String },
    Timeout { by: usize, missing: Vec<usize> },
    Refused { by: usize, sizes: String },
}

struct Round {
    posts: Vec<Option<Arc<Post>>>,
    taken: usize,
}

struct GroupState {
    name: GroupName,
    members: Vec<usize>,
    /// Calls made so far, by member.
    calls: Vec<u64>,
    /// A member may be one round ahead of those that have not taken the last result.
    rounds: BTreeMap<u64, Round>,
    fault: Option<Fault>,
}

#[derive(Default)]
struct State {
    groups: Vec<GroupState>,
    /// When, in order, and how each rank of the world ended.
    departed: Vec<Option<(usize, String)>>,
    departures: usize,
    /// The group in which each rank of the world waits.
    waiting: Vec<Option<usize>>,
}

pub(super) struct Rendezvous {
    state: Mutex<State>,
    changed: Condvar,
    timeout: Duration,
}

impl Rendezvous {
    pub fn new(world_size: usize, timeout: Duration) -> Self {
        Self {
            state: Mutex::new(State {
                departed: vec![None; world_size],
                waiting: vec![None; world_size],
                ..State::default()
            }),
            changed: Condvar::new(),
            timeout,
        }
    }

    pub fn open(&self, name: GroupName, members: Vec<usize>, index: usize) -> Seat {
        let groups = &mut self.lock().groups;
        let group = groups
            .iter()
            .position(|g| g.name == name && g.members == members)
            .unwrap_or_else(|| {
                groups.push(GroupState {
                    name,
                    members: members.clone(),
                    calls: vec![0; members.len()],
                    rounds: BTreeMap::new(),
                    fault: None,
                });
                groups.len() - 1
            });
        Seat {
            name,
            group,
            members,
            index,
        }
    }

    /// Posts this rank's part and waits for the others': every member's post, in group order.
    pub fn meet(&self, seat: &Seat, post: Post) -> Result<Vec<Arc<Post>>, CollectiveError> {
        let op = post.signature.op;
        let mut state = self.lock();
        let group = &mut state.groups[seat.group];
        let call = group.calls[seat.index];
        group.calls[seat.index] += 1;
        // Before posting: a late post would complete a round that others have given up.
        if let Some(error) = state.fault(seat, op, self.timeout) {
            return Err(error);
        }
        let group = &mut state.groups[seat.group];
        let size = group.members.len();
        let round = group.rounds.entry(call).or_insert_with(|| Round {
            posts: vec![None; size],
            taken: 0,
        });
        round.posts[seat.index] = Some(Arc::new(post));
        let complete = round.posts.iter().all(Option::is_some);
        if complete || state.report_deadlock(seat, call) {
            self.changed.notify_all();
        }
        state.waiting[seat.rank()] = Some(seat.group);
        let start = Instant::now();
        let met = loop {
            // A complete round is taken first: what happens to its members afterwards, even
            // before this rank wakes, belongs to later calls.
            if let Some(posts) = state.groups[seat.group].take(call) {
                break Ok(posts);
            }
            if let Some(error) = state.failure(seat, op, call, self.timeout) {
                break Err(error);
            }
            let left = self.timeout.saturating_sub(start.elapsed());
            if left.is_zero() {
                let group = &mut state.groups[seat.group];
                group.fault = Some(Fault::Timeout {
                    by: seat.rank(),
                    missing: group.missing(call),
                });
                self.changed.notify_all();
            } else {
                state = self
                    .changed
                    .wait_timeout(state, left)
                    .unwrap_or_else(PoisonError::into_inner)
                    .0;
            }
        };
        state.waiting[seat.rank()] = None;
        drop(state);
        let posts = met?;
        // Compared by every rank on the same posts, so that all of them err or none.
        let calls: Vec<_> = posts.iter().map(|post| &post.signature).collect();
        if !Signature::agree(&calls) {
            return Err(CollectiveError::Mismatch {
                op,
                group: seat.name,
                rank: seat.rank(),
                calls: Signature::list(&seat.members, &calls),
            });
        }
        Ok(posts)
    }

    /// Fails the group because this rank's own sizes do not fit, and returns this rank's error.
    pub fn refuse(&self, seat: &Seat, op: CollectiveOp, sizes: String) -> CollectiveError {
        let rank = seat.rank();
        let fault = &mut self.lock().groups[seat.group].fault;
        fault.get_or_insert_with(|| Fault::Refused {
            by: rank,
            sizes: format!("{op}, {sizes}"),
        });
        self.changed.notify_all();
        CollectiveError::Sizes {
            op,
            group: seat.name,
            rank,
            sizes,
        }
    }

    /// Releases every rank that waits for `rank`. Returns how many ranks departed before it.
    pub fn depart(&self, rank: usize, reason: String) -> usize {
        let mut state = self.lock();
        let order = state.departures;
        state.departures += 1;
        state.departed[rank] = Some((order, reason));
        self.changed.notify_all();
        order
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // The state is consistent between any two statements, and a rank that panicked is
        // reported as departed: a poisoned lock says nothing more.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl GroupState {
    /// World ranks that have not posted in round `call`.
    fn missing(&self, call: u64) -> Vec<usize> {
        let Some(round) = self.rounds.get(&call) else {
            return Vec::new();
        };
        let posts = self.members.iter().zip(&round.posts);
        posts
            .filter(|(_, post)| post.is_none())
            .map(|(member, _)| *member)
            .collect()
    }

    /// The posts of round `call`, once complete. The last member to take them removes the round.
    fn take(&mut self, call: u64) -> Option<Vec<Arc<Post>>> {
        let round = self.rounds.get_mut(&call)?;
        let posts: Vec<_> = round.posts.iter().cloned().collect::<Option<_>>()?;
        round.taken += 1;
        if round.taken == posts.len() {
            self.rounds.remove(&call);
        }
        Some(posts)
    }

    /// What `rank` called last, said with the group.
    fn last_call(&self, rank: usize) -> Option<String> {
        let index = self.members.iter().position(|m| *m == rank)?;
        let (_, round) = self.rounds.iter().next_back()?;
        let call = &round.posts[index].as_ref()?.signature;
        Some(format!(
            "rank {rank} {call} on {} of ranks {:?}",
            self.name, self.members
        ))
    }
}

impl State {
    /// Two ranks that wait for each other in different groups will never meet: they call the
    /// groups in different orders, or opened one name with different members.
    fn report_deadlock(&mut self, seat: &Seat, call: u64) -> bool {
        let rank = seat.rank();
        for other in self.groups[seat.group].missing(call) {
            let Some(at) = self.waiting[other].filter(|at| *at != seat.group) else {
                continue;
            };
            let theirs = &self.groups[at];
            if theirs.fault.is_some() {
                continue;
            }
            let waits_for_us = theirs.rounds.keys().any(|c| {
                theirs.missing(*c).contains(&rank) && !theirs.missing(*c).contains(&other)
            });
            let mine = self.groups[seat.group].last_call(rank);
            if let (true, Some(mine), Some(theirs)) = (waits_for_us, mine, theirs.last_call(other))
            {
                let calls = if rank < other {
                    format!("{mine}; {theirs}")
                } else {
                    format!("{theirs}; {mine}")
                };
                for group in [seat.group, at] {
                    let calls = calls.clone();
                    self.groups[group].fault = Some(Fault::Mismatch { calls });
                }
                return true;
            }
        }
        false
    }

    /// Why the rank at `seat` need not wait any longer for round `call`.
    fn failure(
        &self,
        seat: &Seat,
        op: CollectiveOp,
        call: u64,
        timeout: Duration,
    ) -> Option<CollectiveError> {
        self.fault(seat, op, timeout).or_else(|| {
            let missing = self.groups[seat.group].missing(call);
            let ended = missing.into_iter().filter_map(|k| {
                let (order, reason) = self.departed[k].as_ref()?;
                Some((order, k, reason))
            });
            // The first to end: others may have ended because of it.
            let (_, departed, reason) = ended.min()?;
            Some(seat.departed(op, departed, reason.clone()))
        })
    }

    /// The group's fault, as the rank at `seat` sees it.
    fn fault(&self, seat: &Seat, op: CollectiveOp, timeout: Duration) -> Option<CollectiveError> {
        let (group, rank) = (seat.name, seat.rank());
        Some(match self.groups[seat.group].fault.clone()? {
            Fault::Mismatch { calls } => CollectiveError::Mismatch {
                op,
                group,
                rank,
                calls,
            },
            Fault::Timeout { by, missing } if missing.contains(&rank) => {
                let reason = format!("gave up waiting for ranks {missing:?} after {timeout:?}");
                seat.departed(op, by, reason)
            }
            Fault::Timeout { missing, .. } => CollectiveError::Timeout {
                op,
                group,
                rank,
                missing,
                waited: timeout,
            },
            Fault::Refused { by, sizes } => {
                seat.departed(op, by, format!("refused its own call: {sizes}"))
            }
        })
    }
}
