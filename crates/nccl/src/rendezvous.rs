//! How the processes of a world find each other: over TCP, at rank 0.
//!
//! ```text
//! rank 0 -> k   magic 8 | nonce 32
//! k -> rank 0   magic 8 | nonce 32 | rank 4 | world size 4 | code 32
//! rank 0 -> k   verdict 1 | detail 4 | code 32
//! rank 0 -> k   missing ranks 4 | rank 4 ...        once all are here, or the time is over
//! ```
//!
//! Codes are HMAC-SHA256 under the shared [`Token`] over both nonces, so the token does not travel,
//! a recorded exchange is of no use, and each side knows that the other has the token. Numbers are
//! little-endian. Every read has a fixed length and a deadline: a stranger that connects and is
//! silent, or says something else, costs a thread for five seconds and holds nobody up.

use std::collections::BTreeMap;
use std::io::{self, ErrorKind, Read, Write};
use std::net::{TcpListener, TcpStream, ToSocketAddrs};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError, mpsc};
use std::thread;
use std::time::{Duration, Instant};

use crate::token::CODE;
use crate::{StartError, Token};

const MAGIC: &[u8; 8] = b"moelora1";
const NONCE: usize = 32;
/// How long one stranger may take.
const GREETING: Duration = Duration::from_secs(5);
/// Connections, beyond one a rank, that are being greeted at a time.
const STRANGERS: usize = 64;
const POLL: Duration = Duration::from_millis(10);
const RETRY: Duration = Duration::from_millis(100);

const ACCEPTED: u8 = 0;
const WRONG_TOKEN: u8 = 1;
const WRONG_WORLD: u8 = 2;
const TAKEN: u8 = 3;

/// Waits at `listener`, as rank 0, for the other ranks of a world: their connections by rank.
///
/// # Errors
///
/// When some of them do not come within `timeout`. Those that came are told who is missing.
pub fn gather(
    listener: &TcpListener,
    world_size: usize,
    token: &Token,
    timeout: Duration,
) -> Result<BTreeMap<usize, TcpStream>, StartError> {
    let listen = |source| StartError::Listen {
        address: listener
            .local_addr()
            .map_or_else(|_| "its port".into(), |at| at.to_string()),
        source,
    };
    listener.set_nonblocking(true).map_err(listen)?;
    let deadline = Instant::now() + timeout;
    let greeted = Arc::new(AtomicUsize::new(0));
    let door = Arc::new(Door {
        world_size,
        token: token.clone(),
        taken: Mutex::new(vec![false; world_size]),
    });
    let (send, arrivals) = mpsc::channel();
    let mut ranks = BTreeMap::new();
    while ranks.len() + 1 < world_size && Instant::now() < deadline {
        match listener.accept() {
            Ok((stream, _)) if greeted.load(Ordering::Relaxed) < world_size + STRANGERS => {
                greeted.fetch_add(1, Ordering::Relaxed);
                let (door, send, count) = (door.clone(), send.clone(), greeted.clone());
                let until = deadline.min(Instant::now() + GREETING);
                thread::spawn(move || {
                    if let Ok(Some(arrival)) = door.greet(stream, until) {
                        let _ = send.send(arrival);
                    }
                    count.fetch_sub(1, Ordering::Relaxed);
                });
            }
            // Too many strangers at a time: this one is turned away.
            Ok(_) => {}
            Err(_) => thread::sleep(POLL),
        }
        ranks.extend(arrivals.try_iter());
    }
    let missing: Vec<_> = (1..world_size)
        .filter(|rank| !ranks.contains_key(rank))
        .collect();
    let mut news = Vec::with_capacity(4 * (missing.len() + 1));
    for number in std::iter::once(missing.len()).chain(missing.iter().copied()) {
        news.extend((number as u32).to_le_bytes());
    }
    // A rank that is gone by now is found by the first call that needs it.
    ranks.values_mut().for_each(|stream| {
        let _ = stream.write_all(&news);
    });
    if missing.is_empty() {
        Ok(ranks)
    } else {
        Err(StartError::Missing {
            ranks: missing,
            waited: timeout,
        })
    }
}

/// Joins, as rank `rank`, the world that rank 0 gathers at `address`: the connection to it.
///
/// Rank 0 may start later: the connection is tried until `timeout`.
///
/// # Errors
///
/// When rank 0 is not reached, refuses this rank, or has waited for others in vain.
pub fn join(
    address: &str,
    rank: usize,
    world_size: usize,
    token: &Token,
    timeout: Duration,
) -> Result<TcpStream, StartError> {
    let deadline = Instant::now() + timeout;
    let mut reason = "no attempt was made".to_string();
    while Instant::now() < deadline {
        let caller = Caller {
            address,
            rank,
            world_size,
            token,
            timeout,
        };
        match caller.call(deadline) {
            Ok(outcome) => return outcome,
            Err(error) => reason = error.to_string(),
        }
        thread::sleep(RETRY);
    }
    Err(StartError::Unreachable {
        rank,
        address: address.into(),
        waited: timeout,
        reason,
    })
}

/// Rank 0's side.
struct Door {
    world_size: usize,
    token: Token,
    taken: Mutex<Vec<bool>>,
}

impl Door {
    /// The rank behind a connection, if it is one.
    fn greet(&self, mut stream: TcpStream, by: Instant) -> io::Result<Option<(usize, TcpStream)>> {
        stream.set_nonblocking(false)?;
        stream.set_nodelay(true)?;
        stream.set_write_timeout(Some(GREETING))?;
        let ours = nonce()?;
        stream.write_all(&[MAGIC.as_slice(), &ours].concat())?;
        let mut hello = [0; 8 + NONCE + 4 + 4 + CODE];
        read_by(&mut stream, &mut hello, by)?;
        let (magic, rest) = hello.split_at(8);
        let (theirs, rest) = rest.split_at(NONCE);
        let (place, code) = rest.split_at(8);
        if magic != MAGIC {
            return Ok(None);
        }
        let (rank, world) = (number(&place[..4]), number(&place[4..]));
        let verdict = if !self.token.verify(&[b"join", &ours, theirs, place], code) {
            WRONG_TOKEN
        } else if world != self.world_size {
            WRONG_WORLD
        } else if self.claim(rank) {
            ACCEPTED
        } else {
            TAKEN
        };
        let detail = (self.world_size as u32).to_le_bytes();
        // A stranger is told nothing that needs the token.
        let code = match verdict {
            WRONG_TOKEN => [0; CODE],
            _ => self
                .token
                .code(&[b"verdict", theirs, &ours, place, &[verdict], &detail]),
        };
        let told = stream.write_all(&[&[verdict], detail.as_slice(), &code].concat());
        if verdict != ACCEPTED {
            return Ok(None);
        }
        if let Err(error) = told {
            self.lock()[rank] = false;
            return Err(error);
        }
        Ok(Some((rank, stream)))
    }

    /// Whether the rank is one of the world and nobody has come as it before.
    fn claim(&self, rank: usize) -> bool {
        let mut taken = self.lock();
        (1..self.world_size).contains(&rank) && !std::mem::replace(&mut taken[rank], true)
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Vec<bool>> {
        self.taken.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Another rank's side.
struct Caller<'a> {
    address: &'a str,
    rank: usize,
    world_size: usize,
    token: &'a Token,
    timeout: Duration,
}

impl Caller<'_> {
    /// The outer error is worth another attempt, the inner one is rank 0's answer.
    fn call(&self, by: Instant) -> io::Result<Result<TcpStream, StartError>> {
        let mut stream = self.connect(by)?;
        stream.set_nodelay(true)?;
        stream.set_write_timeout(Some(GREETING))?;
        let mut greeting = [0; 8 + NONCE];
        read_by(
            &mut stream,
            &mut greeting,
            by.min(Instant::now() + GREETING),
        )?;
        let (magic, theirs) = greeting.split_at(8);
        if magic != MAGIC {
            return Err(io::Error::new(
                ErrorKind::InvalidData,
                "something else answers there",
            ));
        }
        let ours = nonce()?;
        let place = [self.rank as u32, self.world_size as u32].map(u32::to_le_bytes);
        let place = place.concat();
        let code = self.token.code(&[b"join", theirs, &ours, &place]);
        stream.write_all(&[MAGIC.as_slice(), &ours, &place, &code].concat())?;

        let mut verdict = [0; 1 + 4 + CODE];
        read_by(&mut stream, &mut verdict, by.min(Instant::now() + GREETING))?;
        let (answer, code) = verdict.split_at(5);
        let (rank, there) = (self.rank, number(&answer[1..]));
        let signed = [
            b"verdict",
            ours.as_slice(),
            theirs,
            &place,
            &answer[..1],
            &answer[1..],
        ];
        if answer[0] == WRONG_TOKEN || !self.token.verify(&signed, code) {
            return Ok(Err(StartError::Token {
                rank,
                address: self.address.into(),
            }));
        }
        match answer[0] {
            ACCEPTED => self.wait(stream, by),
            WRONG_WORLD => Ok(Err(StartError::World {
                rank,
                here: self.world_size,
                there,
            })),
            _ => Ok(Err(StartError::Taken { rank })),
        }
    }

    fn connect(&self, by: Instant) -> io::Result<TcpStream> {
        let mut last = io::Error::new(ErrorKind::NotFound, "the host has no address");
        for address in self.address.to_socket_addrs()? {
            let left = by.saturating_duration_since(Instant::now()).min(GREETING);
            if left.is_zero() {
                break;
            }
            match TcpStream::connect_timeout(&address, left) {
                Ok(stream) => return Ok(stream),
                Err(error) => last = error,
            }
        }
        Err(last)
    }

    /// Waits for the others.
    fn wait(
        &self,
        mut stream: TcpStream,
        by: Instant,
    ) -> io::Result<Result<TcpStream, StartError>> {
        // Rank 0 may have begun to wait later than this rank, and names the missing at its own end.
        let by = by + GREETING;
        let mut bytes = [0; 4];
        let mut next = |stream: &mut TcpStream| {
            read_by(stream, &mut bytes, by)?;
            io::Result::Ok(number(&bytes))
        };
        let missing = next(&mut stream)?.min(self.world_size);
        if missing == 0 {
            return Ok(Ok(stream));
        }
        let ranks = (0..missing).map(|_| next(&mut stream));
        Ok(Err(StartError::Missing {
            ranks: ranks.collect::<io::Result<_>>()?,
            waited: self.timeout,
        }))
    }
}

fn nonce() -> io::Result<[u8; NONCE]> {
    let mut nonce = [0; NONCE];
    getrandom::fill(&mut nonce).map_err(io::Error::other)?;
    Ok(nonce)
}

fn number(bytes: &[u8]) -> usize {
    u32::from_le_bytes(bytes.try_into().expect("four bytes")) as usize
}

/// Fills `buffer`, or fails at `deadline`.
pub(crate) fn read_by(
    stream: &mut TcpStream,
    buffer: &mut [u8],
    deadline: Instant,
) -> io::Result<()> {
    let mut at = 0;
    while at < buffer.len() {
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(ErrorKind::TimedOut.into());
        }
        stream.set_read_timeout(Some(left))?;
        match stream.read(&mut buffer[at..]) {
            Ok(0) => return Err(ErrorKind::UnexpectedEof.into()),
            Ok(count) => at += count,
            Err(error) => match error.kind() {
                ErrorKind::WouldBlock | ErrorKind::TimedOut | ErrorKind::Interrupted => {}
                _ => return Err(error),
            },
        }
    }
    Ok(())
}
