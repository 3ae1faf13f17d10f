//! What a launcher tells a process about its place in the world.

use std::io::{self, ErrorKind};
use std::net::{Ipv4Addr, TcpListener};
use std::time::Duration;

use crate::host::Host;
use crate::{StartError, Token, rendezvous};

/// One process of a world of processes.
///
/// | | torchrun | SLURM |
/// |---|---|---|
/// | rank | `RANK` | `SLURM_PROCID` |
/// | world size | `WORLD_SIZE` | `SLURM_NTASKS` |
/// | GPU on this machine | `LOCAL_RANK` | `SLURM_LOCALID` |
///
/// Rank 0 listens on `MASTER_ADDR:MASTER_PORT`. torchrun keeps that port for its own store and says
/// so (`TORCHELASTIC_USE_AGENT_STORE`): then it is the port above. `MOE_LORA_PORT` overrides both.
/// `MOE_LORA_TOKEN`, at least 16 bytes, is the same secret on every rank.
#[derive(Clone, Debug)]
pub struct Launch {
    /// This rank, `0..world_size`.
    pub rank: usize,
    /// Number of ranks.
    pub world_size: usize,
    /// Index of this rank's GPU on its machine.
    pub local_rank: usize,
    /// Host and port of rank 0.
    pub address: String,
    /// The shared secret.
    pub token: Token,
}

const LAUNCHER: &str = "start the process with torchrun or srun, or export it";

impl Launch {
    /// The place that the environment gives this process.
    ///
    /// # Errors
    ///
    /// When a variable is missing or no number, or when the token is too short.
    pub fn from_env() -> Result<Self, StartError> {
        Self::from_vars(|name| std::env::var(name).ok())
    }

    /// As [`from_env`](Self::from_env), from other variables.
    ///
    /// # Errors
    ///
    /// As [`from_env`](Self::from_env).
    pub fn from_vars(var: impl Fn(&str) -> Option<String>) -> Result<Self, StartError> {
        let either = |names: [&'static str; 2], most: usize| {
            let set = names.into_iter().find_map(|name| Some((name, var(name)?)));
            let (name, value) = set.ok_or(StartError::Unset {
                name: names[0],
                remedy: LAUNCHER,
            })?;
            let number = value
                .trim()
                .parse()
                .ok()
                .filter(|number: &usize| *number <= most);
            number.ok_or_else(|| StartError::Invalid {
                name,
                value: value.clone(),
                expected: format!("a number up to {most}"),
            })
        };
        let world_size = either(["WORLD_SIZE", "SLURM_NTASKS"], 1 << 16)?;
        let rank = either(["RANK", "SLURM_PROCID"], world_size.max(1) - 1)?;
        let local_rank = either(["LOCAL_RANK", "SLURM_LOCALID"], world_size.max(1) - 1)?;
        let host = var("MASTER_ADDR").ok_or(StartError::Unset {
            name: "MASTER_ADDR",
            remedy: "export the host of rank 0; under SLURM the first of `scontrol show hostnames`",
        })?;
        let port = if var("MOE_LORA_PORT").is_some() {
            either(["MOE_LORA_PORT"; 2], usize::from(u16::MAX))?
        } else {
            let master = either(["MASTER_PORT"; 2], usize::from(u16::MAX) - 1)?;
            let kept = var("TORCHELASTIC_USE_AGENT_STORE").is_some_and(|kept| kept == "True");
            master + usize::from(kept)
        };
        let token = var("MOE_LORA_TOKEN").ok_or(StartError::Unset {
            name: "MOE_LORA_TOKEN",
            remedy: "export the same secret on every rank, such as `openssl rand -hex 16` once",
        })?;
        let token = Token::new(token).ok_or_else(|| StartError::Invalid {
            name: "MOE_LORA_TOKEN",
            value: "(hidden)".into(),
            expected: format!("at least {} bytes", Token::SHORTEST),
        })?;
        Ok(Self {
            rank,
            world_size,
            local_rank,
            address: match host.contains(':') {
                true => format!("[{host}]:{port}"),
                false => format!("{host}:{port}"),
            },
            token,
        })
    }
}

#[cfg_attr(not(feature = "cuda"), allow(dead_code))]
impl Launch {
    /// Meets the other processes, `start` at the latest; later meetings last up to `timeout`.
    pub(crate) fn connect(&self, start: Duration, timeout: Duration) -> Result<Host, StartError> {
        let (size, token) = (self.world_size, &self.token);
        if self.rank > 0 {
            let stream = rendezvous::join(&self.address, self.rank, size, token, start)?;
            return Ok(Host::reach(stream));
        }
        if size == 1 {
            return Ok(Host::serve(Default::default(), timeout));
        }
        let listener = self.listen().map_err(|source| StartError::Listen {
            address: self.address.clone(),
            source,
        })?;
        let ranks = rendezvous::gather(&listener, size, token, start)?;
        Ok(Host::serve(ranks, timeout))
    }

    /// On rank 0's own address alone where this machine has it; behind a service's name, on all.
    fn listen(&self) -> io::Result<TcpListener> {
        TcpListener::bind(&self.address).or_else(|error| {
            let port = self
                .address
                .rsplit_once(':')
                .and_then(|(_, port)| port.parse().ok());
            match (error.kind(), port) {
                (ErrorKind::AddrNotAvailable, Some(port)) => {
                    TcpListener::bind((Ipv4Addr::UNSPECIFIED, port))
                }
                _ => Err(error),
            }
        })
    }
}

#[cfg(test)]
mod tests {
    use std::thread;

    use moe_lora_parallel::GroupName;

    use super::*;
    use crate::board::Place;

    #[test]
    fn processes_that_know_their_place_meet_on_the_board() {
        let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr();
        let port = port.unwrap().port();
        let launch = |rank| Launch {
            rank,
            world_size: 3,
            local_rank: rank,
            address: format!("localhost:{port}"),
            token: Token::new("a token for tests").unwrap(),
        };
        let long = Duration::from_secs(30);
        thread::scope(|scope| {
            for rank in [2, 1, 0] {
                scope.spawn(move || {
                    let host = launch(rank).connect(long, long).unwrap();
                    let place = Place {
                        name: GroupName::Dp,
                        members: vec![0, 1, 2],
                        sequence: 0,
                    };
                    let met = host.meet(&place, rank, vec![rank as u8], long).unwrap();
                    assert_eq!(met, [[0], [1], [2]]);
                });
            }
        });
    }

    #[test]
    fn a_port_that_is_taken_is_an_error_with_the_way_out() {
        let taken = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = taken.local_addr().unwrap().to_string();
        let launch = Launch {
            rank: 0,
            world_size: 2,
            local_rank: 0,
            address: address.clone(),
            token: Token::new("a token for tests").unwrap(),
        };
        let short = Duration::from_millis(100);
        let error = launch.connect(short, short).err().unwrap().to_string();
        assert!(
            error.starts_with(&format!("rank 0 cannot listen on {address}: "))
                && error.ends_with("(set MOE_LORA_PORT to a free port)"),
            "{error}"
        );
    }
}
