//! One rank's way to the board: in its own process, or over the connection to rank 0's.

use std::collections::BTreeMap;
use std::io::{self, Write};
use std::net::TcpStream;
use std::sync::{Arc, Mutex, PoisonError, TryLockError};
use std::thread;
use std::time::{Duration, Instant};

use crate::board::{Absence, Board, Departure, Place};
use crate::frame::{self, Reply, Request};
use crate::rendezvous::read_by;

/// How much longer than the meeting itself an answer may take, on a loaded machine.
const GRACE: Duration = Duration::from_secs(30);
/// Bytes of a frame; token counts of 1024 ranks and 1024 experts take 8 MiB.
const LARGEST: usize = 16 << 20;

pub(crate) enum Host {
    /// Every rank is a thread of this process.
    Here(Arc<Board>),
    /// This process is rank 0's, and answers the others.
    Serving(Arc<Board>),
    /// The board is in rank 0's process.
    There(Mutex<TcpStream>),
}

impl Host {
    /// The board in this process, with a thread for each connection of another rank.
    pub fn serve(ranks: BTreeMap<usize, TcpStream>, timeout: Duration) -> Self {
        let board = Arc::new(Board::default());
        for (rank, mut stream) in ranks {
            let board = board.clone();
            thread::spawn(move || {
                let reason = match answer(&board, rank, &mut stream, timeout) {
                    Ok(()) => return,
                    Err(error) => format!("is gone ({error})"),
                };
                board.leave(Departure {
                    rank,
                    reason,
                    finished: false,
                });
            });
        }
        Self::Serving(board)
    }

    /// The board of rank 0, over the connection to it.
    pub fn reach(stream: TcpStream) -> Self {
        Self::There(Mutex::new(stream))
    }

    /// See [`Board::meet`].
    pub fn meet(
        &self,
        place: &Place,
        rank: usize,
        payload: Vec<u8>,
        timeout: Duration,
    ) -> Result<Vec<Vec<u8>>, Absence> {
        match self {
            Self::Here(board) | Self::Serving(board) => board.meet(place, rank, payload, timeout),
            Self::There(stream) => {
                let mut stream = stream.lock().unwrap_or_else(PoisonError::into_inner);
                let request = Request::Meet(place.clone(), payload);
                match ask(&mut stream, &request, timeout + GRACE).map_err(lost)? {
                    Reply::Met(payloads) if payloads.len() == place.members.len() => Ok(payloads),
                    Reply::Absent(absence) => Err(absence),
                    _ => Err(Absence::Lost("rank 0 gave another answer".into())),
                }
            }
        }
    }

    /// The first rank that ended before it had done all it had to do; nothing while the connection
    /// is in use.
    pub fn failed(&self) -> Result<Option<Departure>, Absence> {
        match self {
            Self::Here(board) | Self::Serving(board) => Ok(board.failed()),
            Self::There(stream) => {
                let mut stream = match stream.try_lock() {
                    Ok(stream) => stream,
                    Err(TryLockError::Poisoned(stream)) => stream.into_inner(),
                    Err(TryLockError::WouldBlock) => return Ok(None),
                };
                match ask(&mut stream, &Request::Failed, GRACE).map_err(lost)? {
                    Reply::Failed(departure) => Ok(departure),
                    _ => Err(Absence::Lost("rank 0 gave another answer".into())),
                }
            }
        }
    }

    /// Says that this rank has ended.
    pub fn leave(&self, departure: Departure) {
        match self {
            Self::Here(board) | Self::Serving(board) => board.leave(departure),
            Self::There(stream) => {
                let mut stream = stream.lock().unwrap_or_else(PoisonError::into_inner);
                // Rank 0 sees the connection close in any case.
                let _ = send(&mut stream, &Request::Leave(departure).encode());
            }
        }
    }

    /// Waits until every rank of the world has ended, where the board would go with this one.
    pub fn outlive(&self, world_size: usize, timeout: Duration) {
        if let Self::Serving(board) = self {
            board.wait_for_all(world_size, timeout);
        }
    }
}

fn lost(error: io::Error) -> Absence {
    Absence::Lost(error.to_string())
}

/// Answers one rank until it leaves.
fn answer(board: &Board, rank: usize, stream: &mut TcpStream, timeout: Duration) -> io::Result<()> {
    // A rank may compute for any length of time between two requests.
    let forever = Duration::from_secs(u64::from(u32::MAX));
    loop {
        let request = Request::decode(&receive(stream, Instant::now() + forever)?)?;
        let reply = match request {
            Request::Meet(place, payload) => match board.meet(&place, rank, payload, timeout) {
                Ok(payloads) => Reply::Met(payloads),
                Err(absence) => Reply::Absent(absence),
            },
            Request::Failed => Reply::Failed(board.failed()),
            Request::Leave(departure) => {
                board.leave(Departure { rank, ..departure });
                return Ok(());
            }
        };
        send(stream, &reply.encode())?;
    }
}

fn ask(stream: &mut TcpStream, request: &Request, timeout: Duration) -> io::Result<Reply> {
    send(stream, &request.encode())?;
    Reply::decode(&receive(stream, Instant::now() + timeout)?)
}

fn send(stream: &mut TcpStream, body: &[u8]) -> io::Result<()> {
    if body.len() > LARGEST {
        return Err(frame::invalid("a message is too long"));
    }
    // One write: a second small one would wait for the answer to the first.
    stream.write_all(&[&(body.len() as u32).to_le_bytes(), body].concat())
}

fn receive(stream: &mut TcpStream, deadline: Instant) -> io::Result<Vec<u8>> {
    let mut length = [0; 4];
    read_by(stream, &mut length, deadline)?;
    let length = u32::from_le_bytes(length) as usize;
    if length > LARGEST {
        return Err(frame::invalid("a message is too long"));
    }
    let mut body = vec![0; length];
    read_by(stream, &mut body, deadline)?;
    Ok(body)
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;

    use moe_lora_parallel::GroupName;

    use super::*;

    const LONG: Duration = Duration::from_secs(30);
    const SOON: Duration = Duration::from_secs(10);

    /// Three ranks: 0 serves, 1 and 2 are connected to it.
    fn world(timeout: Duration) -> [Host; 3] {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let connect = |rank| {
            let stream = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
            ((rank, listener.accept().unwrap().0), Host::reach(stream))
        };
        let ((one, first), (two, second)) = (connect(1), connect(2));
        [
            Host::serve(BTreeMap::from([one, two]), timeout),
            first,
            second,
        ]
    }

    fn place(members: &[usize], sequence: u64) -> Place {
        Place {
            name: GroupName::Tp,
            members: members.to_vec(),
            sequence,
        }
    }

    fn finished(rank: usize) -> Departure {
        Departure {
            rank,
            reason: "has finished".into(),
            finished: true,
        }
    }

    #[test]
    fn ranks_of_several_processes_meet_in_groups_of_any_members() {
        let hosts = world(LONG);
        thread::scope(|scope| {
            for (rank, host) in hosts.iter().enumerate() {
                scope.spawn(move || {
                    for sequence in 0..50 {
                        for members in [vec![2, 0, 1], vec![1, 2], vec![0, 2]] {
                            if !members.contains(&rank) {
                                continue;
                            }
                            let post = |k: usize| vec![k as u8; k + sequence as usize];
                            let place = place(&members, sequence);
                            let met = host.meet(&place, rank, post(rank), LONG).unwrap();
                            let expected: Vec<_> = members.iter().map(|k| post(*k)).collect();
                            assert_eq!(met, expected);
                        }
                    }
                });
            }
        });
        let Host::Serving(board) = &hosts[0] else {
            panic!("rank 0 serves");
        };
        assert!(board.is_empty(), "meetings that are over are forgotten");
    }

    #[test]
    fn ranks_that_do_not_come_are_named_in_every_process() {
        let timeout = Duration::from_millis(300);
        let hosts = world(timeout);
        let start = Instant::now();
        thread::scope(|scope| {
            for rank in [0, 1] {
                let host = &hosts[rank];
                scope.spawn(move || {
                    let met = host.meet(&place(&[0, 1, 2], 0), rank, vec![], timeout);
                    assert_eq!(met, Err(Absence::Missing(vec![2])));
                });
            }
        });
        assert!(start.elapsed() < SOON);
    }

    #[test]
    fn a_process_that_dies_is_seen_at_once_by_those_that_wait_and_those_that_ask() {
        let [zero, one, two] = world(LONG);
        let start = Instant::now();
        thread::scope(|scope| {
            let waits = scope.spawn(|| one.meet(&place(&[1, 2], 0), 1, vec![], LONG));
            drop(two); // No word of leave.
            let Err(Absence::Left { rank: 2, reason }) = waits.join().unwrap() else {
                panic!("rank 2 has left");
            };
            assert!(reason.starts_with("is gone ("), "{reason}");
        });
        assert_eq!(zero.failed().unwrap().unwrap().rank, 2);
        assert_eq!(one.failed().unwrap().unwrap().rank, 2);
        assert!(start.elapsed() < SOON);
    }

    #[test]
    fn a_process_that_finishes_has_not_failed_and_rank_0_outlives_it() {
        let [zero, one, two] = world(LONG);
        one.leave(finished(1));
        let absence = two.meet(&place(&[1, 2], 0), 2, vec![], LONG);
        assert_eq!(
            absence,
            Err(Absence::Left {
                rank: 1,
                reason: "has finished".into()
            })
        );
        assert_eq!(two.failed(), Ok(None));
        let start = Instant::now();
        thread::scope(|scope| {
            scope.spawn(|| {
                zero.leave(finished(0));
                zero.outlive(3, LONG);
                assert!(start.elapsed() >= Duration::from_millis(200));
            });
            thread::sleep(Duration::from_millis(200));
            two.leave(finished(2));
        });
        assert!(start.elapsed() < SOON);
    }

    #[test]
    fn the_end_of_rank_0_is_an_error_and_no_wait() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let host = Host::reach(TcpStream::connect(listener.local_addr().unwrap()).unwrap());
        drop(listener.accept().unwrap());
        let start = Instant::now();
        let met = host.meet(&place(&[0, 1], 0), 1, vec![], LONG);
        assert!(matches!(met, Err(Absence::Lost(_))), "{met:?}");
        assert!(matches!(host.failed(), Err(Absence::Lost(_))));
        assert!(start.elapsed() < SOON);
    }

    #[test]
    fn a_message_that_is_too_long_or_no_message_ends_the_connection() {
        for bytes in [
            u32::MAX.to_le_bytes().to_vec(),
            [&3u32.to_le_bytes(), [9, 9, 9].as_slice()].concat(),
        ] {
            let [zero, one, _two] = world(LONG);
            let Host::There(stream) = &one else {
                panic!("rank 1 is connected");
            };
            stream.lock().unwrap().write_all(&bytes).unwrap();
            let start = Instant::now();
            while zero.failed() == Ok(None) && start.elapsed() < SOON {
                thread::sleep(Duration::from_millis(5));
            }
            assert_eq!(zero.failed().unwrap().unwrap().rank, 1);
        }
    }
}
