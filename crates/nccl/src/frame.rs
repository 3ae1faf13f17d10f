//! What ranks and the board say to each other, as bytes: one tag, then fixed-width little-endian
//! numbers and lists with their length before them.

use std::io::{self, ErrorKind};

use burn::tensor::DType;
use moe_lora_parallel::{CollectiveOp, GroupName, Signature};

use crate::board::{Absence, Departure, Place};

/// From a rank to the board.
#[derive(Debug, PartialEq)]
pub(crate) enum Request {
    Meet(Place, Vec<u8>),
    Failed,
    Leave(Departure),
}

/// From the board to a rank.
#[derive(Debug, PartialEq)]
pub(crate) enum Reply {
    Met(Vec<Vec<u8>>),
    Absent(Absence),
    Failed(Option<Departure>),
}

/// Dtypes that travel between GPUs.
pub(crate) const DTYPES: [DType; 4] = [DType::F64, DType::F32, DType::F16, DType::BF16];

impl Request {
    pub fn encode(&self) -> Vec<u8> {
        let mut out = Writer::default();
        match self {
            Self::Meet(place, payload) => {
                out.byte(0);
                out.byte(place.name as u8);
                out.numbers(&place.members);
                out.number(place.sequence);
                out.bytes(payload);
            }
            Self::Failed => out.byte(1),
            Self::Leave(departure) => {
                out.byte(2);
                out.departure(departure);
            }
        }
        out.0
    }

    pub fn decode(bytes: &[u8]) -> io::Result<Self> {
        let mut input = Reader(bytes);
        let request = match input.byte()? {
            0 => {
                let name = pick(&GroupName::ALL, input.byte()?)?;
                let members = input.numbers()?;
                let sequence = input.number()?;
                let place = Place {
                    name,
                    members,
                    sequence,
                };
                Self::Meet(place, input.bytes()?.to_vec())
            }
            1 => Self::Failed,
            2 => Self::Leave(input.departure()?),
            _ => return Err(invalid("no such request")),
        };
        input.end().map(|()| request)
    }
}

impl Reply {
    pub fn encode(&self) -> Vec<u8> {
        let mut out = Writer::default();
        match self {
            Self::Met(payloads) => {
                out.byte(0);
                out.number(payloads.len() as u64);
                payloads.iter().for_each(|payload| out.bytes(payload));
            }
            Self::Absent(Absence::Missing(ranks)) => {
                out.byte(1);
                out.numbers(ranks);
            }
            Self::Absent(Absence::Left { rank, reason }) => {
                out.byte(2);
                out.number(*rank as u64);
                out.bytes(reason.as_bytes());
            }
            Self::Absent(Absence::Lost(reason)) => {
                out.byte(3);
                out.bytes(reason.as_bytes());
            }
            Self::Failed(None) => out.byte(4),
            Self::Failed(Some(departure)) => {
                out.byte(5);
                out.departure(departure);
            }
        }
        out.0
    }

    pub fn decode(bytes: &[u8]) -> io::Result<Self> {
        let mut input = Reader(bytes);
        let reply = match input.byte()? {
            0 => {
                // Each takes eight bytes at least: a false count ends before it allocates.
                let count = input.number()?;
                let payloads = (0..count).map(|_| input.bytes().map(<[u8]>::to_vec));
                Self::Met(payloads.collect::<io::Result<_>>()?)
            }
            1 => Self::Absent(Absence::Missing(input.numbers()?)),
            2 => Self::Absent(Absence::Left {
                rank: input.number()? as usize,
                reason: input.text()?,
            }),
            3 => Self::Absent(Absence::Lost(input.text()?)),
            4 => Self::Failed(None),
            5 => Self::Failed(Some(input.departure()?)),
            _ => return Err(invalid("no such reply")),
        };
        input.end().map(|()| reply)
    }
}

/// A signature as a payload; of dtypes, those in [`DTYPES`].
pub(crate) fn encode_signature(signature: &Signature) -> Vec<u8> {
    let mut out = Writer::default();
    let place = |dtype| DTYPES.iter().position(|d| Some(*d) == dtype);
    let op = CollectiveOp::ALL.iter().position(|op| *op == signature.op);
    out.byte(op.expect("all operations are in the list") as u8);
    out.byte(place(signature.dtype).map_or(u8::MAX, |at| at as u8));
    for option in [signature.dim, signature.root] {
        out.numbers(option.as_slice());
    }
    for list in [
        &signature.shape,
        &signature.sizes,
        &signature.send,
        &signature.recv,
    ] {
        out.numbers(list);
    }
    out.0
}

pub(crate) fn decode_signature(bytes: &[u8]) -> io::Result<Signature> {
    let mut input = Reader(bytes);
    let op = pick(&CollectiveOp::ALL, input.byte()?)?;
    let dtype = match input.byte()? {
        u8::MAX => None,
        at => Some(pick(&DTYPES, at)?),
    };
    let dim = input.numbers()?.first().copied();
    let root = input.numbers()?.first().copied();
    let signature = Signature {
        op,
        dtype,
        shape: input.numbers()?,
        dim,
        root,
        sizes: input.numbers()?,
        send: input.numbers()?,
        recv: input.numbers()?,
        primitive: None,
    };
    input.end().map(|()| signature)
}

pub(crate) fn invalid(what: &'static str) -> io::Error {
    io::Error::new(ErrorKind::InvalidData, what)
}

fn pick<T: Copy>(all: &[T], at: u8) -> io::Result<T> {
    let picked = all.get(usize::from(at)).copied();
    picked.ok_or_else(|| invalid("no such name"))
}

#[derive(Default)]
struct Writer(Vec<u8>);

impl Writer {
    fn byte(&mut self, byte: u8) {
        self.0.push(byte);
    }

    fn number(&mut self, number: u64) {
        self.0.extend(number.to_le_bytes());
    }

    fn numbers(&mut self, numbers: &[usize]) {
        self.number(numbers.len() as u64);
        numbers
            .iter()
            .for_each(|number| self.number(*number as u64));
    }

    fn bytes(&mut self, bytes: &[u8]) {
        self.number(bytes.len() as u64);
        self.0.extend(bytes);
    }

    fn departure(&mut self, departure: &Departure) {
        self.number(departure.rank as u64);
        self.byte(departure.finished.into());
        self.bytes(departure.reason.as_bytes());
    }
}

struct Reader<'a>(&'a [u8]);

impl<'a> Reader<'a> {
    fn take(&mut self, count: usize) -> io::Result<&'a [u8]> {
        let (taken, rest) = self
            .0
            .split_at_checked(count)
            .ok_or_else(|| invalid("a message is too short"))?;
        self.0 = rest;
        Ok(taken)
    }

    fn byte(&mut self) -> io::Result<u8> {
        Ok(self.take(1)?[0])
    }

    fn number(&mut self) -> io::Result<u64> {
        let bytes = self.take(8)?.try_into();
        Ok(u64::from_le_bytes(bytes.expect("eight bytes")))
    }

    fn length(&mut self) -> io::Result<usize> {
        usize::try_from(self.number()?).map_err(|_| invalid("a length is too large"))
    }

    fn numbers(&mut self) -> io::Result<Vec<usize>> {
        let bytes = self.length()?.checked_mul(8);
        let bytes = self.take(bytes.ok_or_else(|| invalid("a length is too large"))?)?;
        let numbers = bytes
            .chunks_exact(8)
            .map(|number| u64::from_le_bytes(number.try_into().expect("eight bytes")) as usize);
        Ok(numbers.collect())
    }

    fn bytes(&mut self) -> io::Result<&'a [u8]> {
        let length = self.length()?;
        self.take(length)
    }

    fn text(&mut self) -> io::Result<String> {
        Ok(String::from_utf8_lossy(self.bytes()?).into_owned())
    }

    fn departure(&mut self) -> io::Result<Departure> {
        Ok(Departure {
            rank: self.number()? as usize,
            finished: self.byte()? != 0,
            reason: self.text()?,
        })
    }

    fn end(&self) -> io::Result<()> {
        if self.0.is_empty() {
            Ok(())
        } else {
            Err(invalid("a message is too long"))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_come_back_as_they_were() {
        let place = Place {
            name: GroupName::ExpertDp,
            members: vec![3, 0, 70_000],
            sequence: u64::MAX,
        };
        let departure = Departure {
            rank: 2,
            reason: "is gone (ünexpected)".into(),
            finished: true,
        };
        for request in [
            Request::Meet(place, vec![1, 2, 3]),
            Request::Failed,
            Request::Leave(departure.clone()),
        ] {
            assert_eq!(Request::decode(&request.encode()).unwrap(), request);
        }
        for reply in [
            Reply::Met(vec![vec![], vec![7; 300]]),
            Reply::Absent(Absence::Missing(vec![1, 2])),
            Reply::Absent(Absence::Left {
                rank: 1,
                reason: "has finished".into(),
            }),
            Reply::Absent(Absence::Lost(String::new())),
            Reply::Failed(None),
            Reply::Failed(Some(departure)),
        ] {
            assert_eq!(Reply::decode(&reply.encode()).unwrap(), reply);
        }
    }

    #[test]
    fn signatures_come_back_as_they_were() {
        let tensor = |op| Signature::tensor(op, DType::BF16, vec![4, 0, 2]);
        for signature in [
            tensor(CollectiveOp::AllReduce),
            tensor(CollectiveOp::AllGather).along(1, &[0, 0]),
            tensor(CollectiveOp::AllToAll).exchanging(&[1, 3], &[2, 2]),
            tensor(CollectiveOp::Broadcast).from_root(1),
            Signature::host(CollectiveOp::ExchangeSizes, vec![3], vec![1, 2, 3]),
            Signature::host(CollectiveOp::Barrier, vec![], vec![]),
        ] {
            let bytes = encode_signature(&signature);
            assert_eq!(decode_signature(&bytes).unwrap(), signature);
        }
    }

    #[test]
    fn no_bytes_make_a_reader_panic_or_allocate_much_more_than_they_are() {
        bolero::check!().for_each(|bytes: &[u8]| {
            if let Ok(request) = Request::decode(bytes) {
                assert!(request.encode().len() <= 3 * bytes.len());
            }
            if let Ok(reply) = Reply::decode(bytes) {
                assert!(reply.encode().len() <= 3 * bytes.len());
            }
            let _ = decode_signature(bytes);
        });
    }
}
