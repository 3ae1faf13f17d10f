//! Processes find each other, and strangers hold nobody up. Ranks are threads here; each has its own
//! connection, as a process would.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::thread;
use std::time::{Duration, Instant};

use moe_lora_nccl::rendezvous::{gather, join};
use moe_lora_nccl::{Launch, StartError, Token};

/// Not reached by a test that passes.
const LONG: Duration = Duration::from_secs(30);
/// What "at once" means on a loaded machine.
const SOON: Duration = Duration::from_secs(10);
const SHORT: Duration = Duration::from_millis(500);

fn token(secret: &str) -> Token {
    Token::new(format!("{secret}, sixteen bytes and more")).unwrap()
}

fn listen() -> (TcpListener, String) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap().to_string();
    (listener, address)
}

fn message<T>(result: Result<T, StartError>) -> String {
    result.err().expect("it fails").to_string()
}

#[test]
fn ranks_meet_in_any_order_and_each_connection_is_its_ranks() {
    let (listener, address) = listen();
    thread::scope(|scope| {
        for rank in [3, 1, 2] {
            let address = &address;
            scope.spawn(move || {
                let mut stream = join(address, rank, 4, &token("a"), LONG).unwrap();
                stream.write_all(&[rank as u8]).unwrap();
            });
        }
        let ranks = gather(&listener, 4, &token("a"), LONG).unwrap();
        assert_eq!(ranks.keys().copied().collect::<Vec<_>>(), [1, 2, 3]);
        for (rank, mut stream) in ranks {
            let mut byte = [0];
            stream.read_exact(&mut byte).unwrap();
            assert_eq!(usize::from(byte[0]), rank);
        }
    });
}

#[test]
fn rank_0_may_start_last() {
    let (listener, address) = listen();
    drop(listener);
    thread::scope(|scope| {
        let joined = scope.spawn(|| join(&address, 1, 2, &token("a"), LONG).map(drop));
        thread::sleep(SHORT);
        let listener = TcpListener::bind(&address).unwrap();
        gather(&listener, 2, &token("a"), LONG).unwrap();
        joined.join().unwrap().unwrap();
    });
}

#[test]
fn strangers_that_are_silent_or_talk_garbage_hold_nobody_up() {
    let (listener, address) = listen();
    let start = Instant::now();
    thread::scope(|scope| {
        let silent: Vec<_> = (0..20)
            .map(|_| TcpStream::connect(&address).unwrap())
            .collect();
        let mut loud = TcpStream::connect(&address).unwrap();
        loud.write_all(&[b'x'; 4096]).unwrap();
        let mut http = TcpStream::connect(&address).unwrap();
        http.write_all(b"GET / HTTP/1.1\r\n\r\n").unwrap();
        drop(TcpStream::connect(&address).unwrap());
        let joined = scope.spawn(|| join(&address, 1, 2, &token("a"), LONG).map(drop));
        gather(&listener, 2, &token("a"), LONG).unwrap();
        joined.join().unwrap().unwrap();
        drop(silent);
    });
    assert!(start.elapsed() < SOON);
}

#[test]
fn a_rank_with_another_token_is_refused_and_its_place_stays_free() {
    let (listener, address) = listen();
    thread::scope(|scope| {
        let gathered = scope.spawn(|| gather(&listener, 2, &token("a"), LONG).map(drop));
        assert_eq!(
            message(join(&address, 1, 2, &token("b"), LONG)),
            format!(
                "rank 1 and rank 0 at {address} have different tokens (set MOE_LORA_TOKEN to the same value on every rank)"
            )
        );
        join(&address, 1, 2, &token("a"), LONG).unwrap();
        gathered.join().unwrap().unwrap();
    });
}

#[test]
fn the_token_does_not_travel_and_a_recorded_exchange_is_of_no_use() {
    let (listener, address) = listen();
    thread::scope(|scope| {
        let gathered = scope.spawn(|| gather(&listener, 2, &token("a"), LONG).map(drop));
        // Between the rank and rank 0, recording what the rank says.
        let (tap, tapped) = listen();
        let joined = scope.spawn(move || join(&tapped, 1, 3, &token("a"), LONG).map(drop));
        let (mut rank, _) = tap.accept().unwrap();
        let mut door = TcpStream::connect(&address).unwrap();
        let (mut greeting, mut hello, mut verdict) = ([0; 40], [0; 80], [0; 37]);
        door.read_exact(&mut greeting).unwrap();
        rank.write_all(&greeting).unwrap();
        rank.read_exact(&mut hello).unwrap();
        door.write_all(&hello).unwrap();
        door.read_exact(&mut verdict).unwrap();
        rank.write_all(&verdict).unwrap();
        let secret = "sixteen bytes";
        assert!(!hello.windows(secret.len()).any(|w| w == secret.as_bytes()));
        // The token was right and the size of the world was not.
        assert_eq!(
            message(joined.join().unwrap()),
            "rank 1 expects world_size=3, rank 0 has world_size=2 (set WORLD_SIZE to the same value on every rank)"
        );
        // Said again on a new connection, it is a wrong token: the nonce is another.
        let mut replay = TcpStream::connect(&address).unwrap();
        replay.read_exact(&mut greeting).unwrap();
        replay.write_all(&hello).unwrap();
        replay.read_exact(&mut verdict).unwrap();
        assert_eq!(verdict[0], 1);
        join(&address, 1, 2, &token("a"), LONG).unwrap();
        gathered.join().unwrap().unwrap();
    });
}

#[test]
fn a_listener_that_does_not_have_the_token_is_not_trusted() {
    let (listener, address) = listen();
    thread::scope(|scope| {
        let joined = scope.spawn(|| join(&address, 1, 2, &token("a"), LONG).map(drop));
        let (mut rank, _) = listener.accept().unwrap();
        rank.write_all(&[b"moelora1".as_slice(), &[7; 32]].concat())
            .unwrap();
        rank.read_exact(&mut [0; 80]).unwrap();
        // "Accepted", with a code that needs no token.
        rank.write_all(&[[0].as_slice(), &2u32.to_le_bytes(), &[0; 32]].concat())
            .unwrap();
        assert!(message(joined.join().unwrap()).contains("have different tokens"));
    });
}

#[test]
fn the_second_process_of_one_rank_is_refused() {
    let (listener, address) = listen();
    thread::scope(|scope| {
        let gathered = scope.spawn(|| gather(&listener, 3, &token("a"), LONG).map(drop));
        let twice = [1, 1].map(|rank| {
            let address = &address;
            scope.spawn(move || join(address, rank, 3, &token("a"), LONG).map(drop))
        });
        // Neither returns before one is refused or rank 2 has come.
        while !twice.iter().any(|rank| rank.is_finished()) {
            thread::sleep(Duration::from_millis(5));
        }
        // Rank 0's number and one outside of the world are taken for everybody.
        for rank in [0, 3] {
            let expected = format!("rank {rank} is taken (give every process a RANK of its own)");
            assert_eq!(
                message(join(&address, rank, 3, &token("a"), LONG)),
                expected
            );
        }
        join(&address, 2, 3, &token("a"), LONG).unwrap();
        gathered.join().unwrap().unwrap();
        let mut outcomes = twice.map(|rank| rank.join().unwrap().map_err(|e| e.to_string()));
        outcomes.sort();
        let taken = "rank 1 is taken (give every process a RANK of its own)";
        assert_eq!(outcomes, [Ok(()), Err(taken.into())]);
    });
}

#[test]
fn the_missing_ranks_are_named_to_those_that_came() {
    let (listener, address) = listen();
    let start = Instant::now();
    thread::scope(|scope| {
        let joined = scope.spawn(|| join(&address, 1, 4, &token("a"), SHORT).map(drop));
        let expected =
            "ranks 2 and 3 did not come within 500ms (start as many ranks as WORLD_SIZE says)";
        assert_eq!(message(gather(&listener, 4, &token("a"), SHORT)), expected);
        assert_eq!(message(joined.join().unwrap()), expected);
    });
    assert!(start.elapsed() < SOON);
}

#[test]
fn nobody_at_the_address_is_an_error_within_the_timeout() {
    let (listener, address) = listen();
    drop(listener);
    let start = Instant::now();
    let error = message(join(&address, 1, 2, &token("a"), SHORT));
    assert!(
        error.starts_with(&format!(
            "rank 1 did not reach rank 0 at {address} within 500ms: "
        )),
        "{error}"
    );
    assert!(start.elapsed() < SOON);
}

#[test]
fn something_else_at_the_address_is_said() {
    let (listener, address) = listen();
    thread::spawn(move || {
        for stream in listener.incoming().flatten() {
            let _ = (&stream).write_all(&[b'x'; 64]);
        }
    });
    let error = message(join(&address, 1, 2, &token("a"), SHORT));
    assert!(error.contains("something else answers there"), "{error}");
}

#[test]
fn launchers_say_the_place_in_their_variables() {
    let vars = |set: &'static [(&'static str, &'static str)]| {
        let find = move |name: &str| set.iter().find(|(key, _)| *key == name);
        Launch::from_vars(move |name| find(name).map(|(_, value)| value.to_string()))
    };
    let place = |launch: Launch| {
        let Launch {
            rank,
            world_size,
            local_rank,
            address,
            ..
        } = launch;
        (rank, world_size, local_rank, address)
    };
    const TOKEN: (&str, &str) = ("MOE_LORA_TOKEN", "0123456789abcdef");
    const TORCHRUN: [(&str, &str); 6] = [
        ("RANK", "5"),
        ("WORLD_SIZE", "8"),
        ("LOCAL_RANK", "1"),
        ("MASTER_ADDR", "node0"),
        ("MASTER_PORT", "29500"),
        TOKEN,
    ];
    let torchrun = place(vars(&TORCHRUN).unwrap());
    assert_eq!(torchrun, (5, 8, 1, "node0:29500".into()));
    // torchrun's own store listens on the port.
    const STORE: (&str, &str) = ("TORCHELASTIC_USE_AGENT_STORE", "True");
    let [a, b, c, d, e, f] = TORCHRUN;
    let kept: &'static [_] = Vec::leak(vec![a, b, c, d, e, f, STORE]);
    assert_eq!(place(vars(kept).unwrap()).3, "node0:29501");
    const OWN: (&str, &str) = ("MOE_LORA_PORT", "7000");
    let own: &'static [_] = Vec::leak(vec![a, b, c, d, e, f, STORE, OWN]);
    assert_eq!(place(vars(own).unwrap()).3, "node0:7000");
    let slurm = vars(&[
        ("SLURM_PROCID", "2"),
        ("SLURM_NTASKS", "4"),
        ("SLURM_LOCALID", "0"),
        ("MASTER_ADDR", "fd00::1"),
        ("MASTER_PORT", "29500"),
        TOKEN,
    ]);
    assert_eq!(place(slurm.unwrap()), (2, 4, 0, "[fd00::1]:29500".into()));

    assert_eq!(
        message(vars(&[])),
        "WORLD_SIZE is not set (start the process with torchrun or srun, or export it)"
    );
    assert_eq!(
        message(vars(&[("WORLD_SIZE", "8"), ("RANK", "8")])),
        r#"RANK="8" is not a number up to 7"#
    );
    let unset = message(vars(&TORCHRUN[..5]));
    assert!(unset.starts_with("MOE_LORA_TOKEN is not set ("), "{unset}");
    let short: &'static [_] = Vec::leak(vec![a, b, c, d, e, ("MOE_LORA_TOKEN", "secret")]);
    assert_eq!(
        message(vars(short)),
        r#"MOE_LORA_TOKEN="(hidden)" is not at least 16 bytes"#
    );
    assert_eq!(format!("{:?}", token("secret")), "Token(..)");
}
