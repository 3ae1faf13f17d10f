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

/// How much longer than the meeting itself an answer may take.
const GRACE: Duration = Duration::from_secs(5);
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
