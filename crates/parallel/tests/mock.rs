//! The mock passes the suite of every transport, and what it does beyond it.

use std::error::Error;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::sleep;
use std::time::{Duration, Instant};

use burn::backend::Flex;
use burn::tensor::ops::FloatTensor;
use burn::tensor::{DType, Tensor};
use moe_lora_parallel::{
    Call, Collective, CollectiveError, CollectiveOp, GroupName, LaunchError, Mesh, MockRank,
    MockWorld, TopologyConfig, Transport, raise,
};
use moe_lora_testkit::{Host, conformance};

type Group<B> = Arc<dyn Collective<B>>;

/// Tests of this binary count threads, so one runs at a time.
static ALONE: Mutex<()> = Mutex::new(());

struct Alone(#[allow(dead_code)] MutexGuard<'static, ()>);

fn alone() -> Alone {
    Alone(ALONE.lock().unwrap_or_else(PoisonError::into_inner))
}

impl Drop for Alone {
    fn drop(&mut self) {
        if !std::thread::panicking() {
            // The kernel lists a joined thread a moment longer.
            let (start, mut left) = (Instant::now(), rank_threads());
            while left > 0 && start.elapsed() < SOON {
                sleep(Duration::from_millis(1));
                left = rank_threads();
            }
            assert_eq!(left, 0, "threads of ranks are left behind");
        }
    }
}

/// Threads of this process that are ranks, on Linux.
fn rank_threads() -> usize {
    let Ok(tasks) = std::fs::read_dir("/proc/self/task") else {
        return 0;
    };
    let names = tasks
        .flatten()
        .map(|t| std::fs::read_to_string(t.path().join("comm")));
    names
        .flatten()
        .filter(|name| name.starts_with("rank "))
        .count()
}

/// Far longer than any test: a rank that waits it out fails the test's check of the time.
const LONG: Duration = Duration::from_secs(30);
/// What "at once" means on a loaded machine.
const SOON: Duration = Duration::from_secs(5);

fn open(rank: &MockRank, name: GroupName, members: &[usize]) -> Group<Flex> {
    rank.open(name, members.to_vec())
}

fn x(shape: [usize; 2]) -> FloatTensor<Flex> {
    Host::of_rank(0, shape).tensor::<Flex>(&Default::default(), DType::F32)
}

/// The message of every rank, all of which have to fail soon, on group Tp of all ranks.
fn messages<T>(
    ranks: usize,
    call: impl Fn(usize, Group<Flex>) -> Result<T, CollectiveError> + Sync,
) -> Vec<String> {
    let all: Vec<_> = (0..ranks).collect();
    let start = Instant::now();
    let errors = MockWorld::new(ranks).with_timeout(LONG).run(|rank| {
        let group = open(&rank, GroupName::Tp, &all);
        call(rank.rank(), group)
            .err()
            .expect("the call fails")
            .to_string()
    });
    assert!(start.elapsed() < SOON);
    errors.unwrap()
}

#[test]
fn the_mock_conforms() {
    let _alone = alone();
    conformance::<Flex>(4, &[DType::F32, DType::F64], |ranks, body| {
        let world = MockWorld::new(ranks).with_timeout(LONG);
        world.run(|rank| body(&rank, &Default::default())).unwrap();
    });
}

#[test]
fn sums_are_bit_equal_on_all_ranks_and_over_100_runs() {
    let _alone = alone();
    // In f32: ((1e8 + 1) - 1e8) + 3 = 3, while -1e8 + 1e8 + 1 + 3 = 4.
    let terms = [1e8, 1.0, -1e8, 3.0];
    let odd = [0.1, 1e-8, -0.3, 7e7];
    for run in 0..100u64 {
        let world = MockWorld::new(4).with_timeout(LONG);
        let bits = world.run(|rank| {
            let k = rank.rank();
            let group = open(&rank, GroupName::Tp, &[0, 1, 2, 3]);
            let host = Host {
                shape: [4, 2],
                values: [terms[k], odd[k]].repeat(4),
            };
            let up = || host.tensor::<Flex>(&Default::default(), DType::F32);
            let pause = |call: u64| {
                let hash = (run * 64 + k as u64 * 8 + call).wrapping_mul(0x9E37_79B9_7F4A_7C15);
                sleep(Duration::from_micros(hash >> 55));
            };
            pause(0);
            let sum = Host::read::<Flex>(group.all_reduce(up()).unwrap(), DType::F32);
            pause(1);
            let part = group.reduce_scatter(up(), 0, &[1; 4]).unwrap();
            let part = Host::read::<Flex>(part, DType::F32);
            sum.values
                .into_iter()
                .chain(part.values)
                .map(|v| v as f32)
                .collect::<Vec<_>>()
        });
        let sum = odd.iter().fold(0.0, |sum, term| sum + *term as f32);
        for rank in bits.unwrap() {
            assert_eq!(rank, [3.0, sum].repeat(5), "run {run}");
        }
    }
}

#[test]
fn groups_of_one_rank_are_used_side_by_side() {
    let _alone = alone();
    let topology = TopologyConfig::new(4)
        .with_tp(4)
        .with_ep(2)
        .with_etp(2)
        .init()
        .unwrap();
    let sums = MockWorld::new(4).with_timeout(LONG).run(|rank| {
        let mesh = Mesh::<Flex>::new(topology, &rank).unwrap();
        let mine = [1usize << rank.rank()];
        let sum = |rows: Vec<Vec<usize>>| rows.concat().into_iter().sum::<usize>();
        let groups = [
            mesh.expert_tp().collective(),
            mesh.ep().collective(),
            mesh.tp().collective(),
            mesh.dp().collective(),
        ];
        groups.map(|group| sum(group.exchange_sizes(&mine).unwrap()))
    });
    assert_eq!(
        sums.unwrap(),
        [
            [3, 5, 15, 1],
            [3, 10, 15, 2],
            [12, 5, 15, 4],
            [12, 10, 15, 8]
        ]
    );
}

#[test]
fn a_disagreement_names_what_every_rank_called() {
    let _alone = alone();
    let remedy =
        "(every rank of a group issues the same operation, shape and dtype in the same order)";
    let mismatch = |op: [&str; 2], calls: &str| {
        [0, 1].map(|k| {
            format!(
                "{} on group tp at rank {k}: ranks disagree: {calls} {remedy}",
                op[k]
            )
        })
    };
    assert_eq!(
        messages(2, |k, group| match k {
            0 => group.all_reduce(x([2, 3])),
            _ => group.all_gather(x([2, 3]), 0, &[2, 2]),
        }),
        mismatch(
            ["all_reduce", "all_gather"],
            "rank 0 all_reduce [2, 3] F32; rank 1 all_gather [2, 3] F32 dim=0 sizes=[2, 2]"
        )
    );
    assert_eq!(
        messages(2, |k, group| group.all_reduce(x([2, 3 + k]))),
        mismatch(
            ["all_reduce"; 2],
            "rank 0 all_reduce [2, 3] F32; rank 1 all_reduce [2, 4] F32"
        )
    );
    assert_eq!(
        messages(2, |k, group| {
            let dtype = [DType::F32, DType::F64][k];
            group.all_reduce(Host::of_rank(k, [1, 1]).tensor::<Flex>(&Default::default(), dtype))
        }),
        mismatch(
            ["all_reduce"; 2],
            "rank 0 all_reduce [1, 1] F32; rank 1 all_reduce [1, 1] F64"
        )
    );
    assert_eq!(
        messages(2, |k, group| group.all_to_all(
            x([3, 1]),
            &[1, 2],
            &[[1, 2], [1, 2]][k]
        )),
        mismatch(
            ["all_to_all"; 2],
            "rank 0 all_to_all [3, 1] F32 send=[1, 2] recv=[1, 2]; rank 1 all_to_all [3, 1] F32 send=[1, 2] recv=[1, 2]"
        )
    );
    assert_eq!(
        messages(2, |k, group| group.broadcast(x([1, 1]), k)),
        mismatch(
            ["broadcast"; 2],
            "rank 0 broadcast [1, 1] F32 root=0; rank 1 broadcast [1, 1] F32 root=1"
        )
    );
    assert_eq!(
        messages(2, |k, group| group.exchange_sizes(&[7, 7][k..])),
        mismatch(
            ["exchange_sizes"; 2],
            "rank 0 exchange_sizes [2]; rank 1 exchange_sizes [1]"
        )
    );
    // Order: found at the first call, not at the second.
    assert_eq!(
        messages(2, |k, group| match k {
            0 => group
                .barrier()
                .and_then(|()| group.all_reduce(x([1, 1])).map(drop)),
            _ => group.all_reduce(x([1, 1])).and_then(|_| group.barrier()),
        }),
        mismatch(
            ["barrier", "all_reduce"],
            "rank 0 barrier []; rank 1 all_reduce [1, 1] F32"
        )
    );
}

#[test]
fn groups_called_in_different_orders_are_found_without_waiting() {
    let _alone = alone();
    let start = Instant::now();
    let errors = MockWorld::new(2).with_timeout(LONG).run(|rank| {
        let tp = open(&rank, GroupName::Tp, &[0, 1]);
        let ep = open(&rank, GroupName::Ep, &[0, 1]);
        let (first, second) = if rank.rank() == 0 {
            (&tp, &ep)
        } else {
            (&ep, &tp)
        };
        let result = first.all_reduce(x([1, 1])).and_then(|_| second.barrier());
        result.unwrap_err().to_string()
    });
    assert!(start.elapsed() < SOON);
    let calls = "ranks disagree: rank 0 all_reduce [1, 1] F32 on tp of ranks [0, 1]; rank 1 all_reduce [1, 1] F32 on ep of ranks [0, 1]";
    let errors = errors.unwrap();
    assert!(
        errors[0].starts_with(&format!("all_reduce on group tp at rank 0: {calls} (")),
        "{}",
        errors[0]
    );
    assert!(
        errors[1].starts_with(&format!("all_reduce on group ep at rank 1: {calls} (")),
        "{}",
        errors[1]
    );
}

#[test]
fn ranks_that_opened_a_group_with_different_members_are_found_without_waiting() {
    let _alone = alone();
    let start = Instant::now();
    let error = MockWorld::new(3).with_timeout(LONG).run(|rank| {
        let members = [vec![0, 1], vec![0, 1, 2], vec![0, 1, 2]][rank.rank()].clone();
        open(&rank, GroupName::Tp, &members)
            .barrier()
            .unwrap_or_else(|error| raise(error));
    });
    assert!(start.elapsed() < SOON);
    let error = error.unwrap_err().to_string();
    assert!(
        error.contains(
            "rank 0 barrier [] on tp of ranks [0, 1]; rank 1 barrier [] on tp of ranks [0, 1, 2]"
        ),
        "{error}"
    );
}

#[test]
fn a_rank_with_impossible_sizes_releases_the_others() {
    let _alone = alone();
    let errors = messages(3, |k, group| match k {
        1 => group.all_gather(x([2, 1]), 0, &[2, 3, 2]),
        _ => group.all_gather(x([2, 1]), 0, &[2, 2, 2]),
    });
    let fault = "sizes[1] of sizes=[2, 3, 2] is 3, the extent of dim=0 of [2, 1] is 2";
    assert_eq!(
        errors,
        [
            format!(
                "all_gather on group tp at rank 0: rank 1 refused its own call: all_gather, {fault}"
            ),
            format!(
                "all_gather on group tp at rank 1: {fault} (one size a rank, summing to the extent)"
            ),
            format!(
                "all_gather on group tp at rank 2: rank 1 refused its own call: all_gather, {fault}"
            ),
        ]
    );
    for (error, call) in [
        (
            messages(2, |_, g| g.all_gather(x([2, 1]), 5, &[1, 1])),
            "dim=5 of a tensor of shape [2, 1]",
        ),
        (
            messages(2, |_, g| g.reduce_scatter(x([2, 1]), 0, &[2])),
            "sizes=[2] for 2 ranks",
        ),
        (
            messages(2, |_, g| g.reduce_scatter(x([2, 1]), 0, &[2, 2])),
            "sum of sizes=[2, 2] is 4, the extent of dim=0 of [2, 1] is 2",
        ),
        (
            messages(2, |_, g| g.all_to_all(x([2, 1]), &[1, 1], &[2])),
            "recv=[2] for 2 ranks",
        ),
        (
            messages(2, |_, g| g.all_to_all(x([2, 1]), &[1, 2], &[1, 1])),
            "sum of send=[1, 2] is 3, the extent of dim=0 of [2, 1] is 2",
        ),
        (
            messages(2, |_, g| g.broadcast(x([2, 1]), 2)),
            "root=2 of 2 ranks",
        ),
    ] {
        for (k, error) in error.iter().enumerate() {
            assert!(
                error.contains(&format!(" on group tp at rank {k}: {call} (")),
                "{error}"
            );
        }
    }
}

#[test]
fn a_rank_that_never_comes_is_named_after_the_timeout_and_told_when_it_comes_late() {
    let _alone = alone();
    let timeout = Duration::from_millis(200);
    let errors = MockWorld::new(3).with_timeout(timeout).run(|rank| {
        let group = open(&rank, GroupName::ExpertTp, &[0, 1, 2]);
        if rank.rank() == 2 {
            sleep(5 * timeout);
        }
        let start = Instant::now();
        let error = group.all_reduce(x([1, 1])).unwrap_err();
        (error.to_string(), start.elapsed())
    });
    let errors = errors.unwrap();
    for (k, (error, waited)) in errors.iter().take(2).enumerate() {
        assert_eq!(
            *error,
            format!(
                "all_reduce on group expert_tp at rank {k}: no call from ranks [2] within 200ms (they called fewer collectives, or share an autodiff graph with this rank)"
            )
        );
        assert!(*waited < SOON, "{waited:?}");
    }
    // The first to come waits the timeout out, and takes the second with it.
    assert!(errors[0].1.max(errors[1].1) >= timeout);
    let (error, waited) = &errors[2];
    assert!(*waited < timeout);
    assert!(
        error.starts_with("all_reduce on group expert_tp at rank 2: rank ")
            && error.ends_with(" gave up waiting for ranks [2] after 200ms"),
        "{error}"
    );
}

#[test]
fn a_rank_that_finishes_early_is_reported_at_once() {
    let _alone = alone();
    let start = Instant::now();
    let world = MockWorld::new(3).with_timeout(LONG);
    let errors = world.run(|rank| {
        let group = open(&rank, GroupName::Ep, &[0, 1, 2]);
        group.barrier().unwrap();
        if rank.rank() == 1 {
            return String::new();
        }
        group.exchange_sizes(&[1]).unwrap_err().to_string()
    });
    assert!(start.elapsed() < SOON);
    assert_eq!(
        errors.unwrap(),
        [
            "exchange_sizes on group ep at rank 0: rank 1 has finished",
            "",
            "exchange_sizes on group ep at rank 2: rank 1 has finished",
        ]
    );
    // The world can be run again: no rank of the earlier run is missed.
    world
        .run(|rank| open(&rank, GroupName::Ep, &[0, 1, 2]).barrier().unwrap())
        .unwrap();
}

#[test]
fn a_rank_that_ends_after_its_last_call_does_not_spoil_it_for_the_others() {
    let _alone = alone();
    for run in 0..200 {
        let world = MockWorld::new(3).with_timeout(LONG);
        let ends = world.run(|rank| {
            let group = open(&rank, GroupName::Tp, &[0, 1, 2]);
            let result = group.all_reduce(x([1, 1]));
            if rank.rank() == run % 3 {
                // Fails the group's next call while others may not have taken this one's result.
                group.broadcast(x([1, 1]), 9).unwrap_err();
            }
            result.is_ok()
        });
        assert_eq!(ends.unwrap(), [true; 3], "run {run}");
    }
}

#[test]
fn a_panic_releases_ranks_in_every_group_and_is_the_cause() {
    let _alone = alone();
    let start = Instant::now();
    let seen = Mutex::new(vec![String::new(); 4]);
    let error = MockWorld::new(4).with_timeout(LONG).run(|rank| {
        let k = rank.rank();
        // Rank 3 waits for rank 2, ranks 0 and 1 for rank 3 only.
        let pair = open(
            &rank,
            GroupName::ExpertTp,
            if k < 2 { &[0, 1] } else { &[2, 3] },
        );
        let result = match k {
            2 => panic!("no rows for expert {}", 7),
            3 => pair.all_reduce(x([1, 1])).map(drop),
            _ => open(&rank, GroupName::Dp, &[0, 1, 3]).barrier(),
        };
        let error = result.unwrap_err();
        seen.lock().unwrap()[k] = error.to_string();
        raise(error)
    });
    assert!(start.elapsed() < SOON);
    let seen = seen.into_inner().unwrap();
    assert_eq!(
        seen[3],
        "all_reduce on group expert_tp at rank 3: rank 2 panicked: no rows for expert 7"
    );
    // Which of 0, 1 and 3 is seen to stop first is a matter of timing, the cause is not.
    for error in &seen[..2] {
        assert!(error.starts_with("barrier on group dp at rank "), "{error}");
        assert!(
            error.ends_with(" stopped because rank 2 panicked: no rows for expert 7"),
            "{error}"
        );
    }
    let error: LaunchError = error.map(|_: Vec<()>| ()).unwrap_err();
    assert_eq!(error.to_string(), "rank 2 panicked: no rows for expert 7");
    assert!(error.source().is_none());
}

#[test]
fn a_failed_collective_is_the_source_of_the_launch_error() {
    let _alone = alone();
    let world = MockWorld::new(2).with_timeout(LONG);
    let raised = world.run(|rank| {
        let group = open(&rank, GroupName::Tp, &[0, 1]);
        group
            .all_reduce(x([1, 1 + rank.rank()]))
            .unwrap_or_else(|error| raise(error));
    });
    let returned = world.run_result(|rank| {
        let group = open(&rank, GroupName::Tp, &[0, 1]);
        group.all_reduce(x([1, 1 + rank.rank()])).map(drop)
    });
    for error in [raised.unwrap_err(), returned.unwrap_err()] {
        assert_eq!(
            error.to_string(),
            "rank 0 failed: all_reduce on group tp at rank 0: ranks disagree: rank 0 all_reduce [1, 1] F32; rank 1 all_reduce [1, 2] F32 (every rank of a group issues the same operation, shape and dtype in the same order)"
        );
        let source = error.source().unwrap().downcast_ref::<CollectiveError>();
        assert!(matches!(
            source,
            Some(CollectiveError::Mismatch { rank: 0, .. })
        ));
    }
}

#[test]
fn an_error_that_a_rank_returns_is_the_cause_of_those_that_follow() {
    let _alone = alone();
    let start = Instant::now();
    let error = MockWorld::new(3).with_timeout(LONG).run_result(|rank| {
        if rank.rank() == 2 {
            return Err("config.json has no hidden_size".into());
        }
        open(&rank, GroupName::Dp, &[0, 1, 2])
            .barrier()
            .map_err(Box::<dyn Error + Send + Sync>::from)
    });
    assert!(start.elapsed() < SOON);
    assert_eq!(
        error.unwrap_err().to_string(),
        "rank 2 failed: config.json has no hidden_size"
    );
}

#[test]
fn every_rank_is_a_thread_and_returns_its_result() {
    let _alone = alone();
    let world = MockWorld::new(2).with_timeout(LONG);
    let threads = world.run_result(|rank| {
        let group = open(&rank, GroupName::Tp, &[0, 1]);
        group.barrier()?;
        let threads = rank_threads();
        group.barrier()?;
        Ok::<_, CollectiveError>((rank.rank(), threads))
    });
    let expected = if cfg!(target_os = "linux") { 2 } else { 0 };
    assert_eq!(threads.unwrap(), [(0, expected), (1, expected)]);
}

#[test]
fn handles_without_a_launcher_meet_each_other() {
    let _alone = alone();
    let world = MockWorld::new(2).with_timeout(LONG);
    let rows = std::thread::scope(|scope| {
        let ranks = [0, 1].map(|k| world.rank(k));
        let threads = ranks.map(|rank| {
            scope.spawn(move || {
                open(&rank, GroupName::Tp, &[1, 0])
                    .exchange_sizes(&[rank.rank()])
                    .unwrap()
            })
        });
        threads.map(|thread| thread.join().unwrap())
    });
    assert_eq!(rows, [[[1], [0]], [[1], [0]]]);
}

#[test]
fn calls_are_recorded_in_order() {
    let _alone = alone();
    let world = MockWorld::new(2).with_timeout(LONG);
    let run = || {
        let result = world.run(|rank| {
            let tp = open(&rank, GroupName::Tp, &[0, 1]);
            let ep = open(&rank, GroupName::Ep, &[1, 0]);
            tp.exchange_sizes(&[4, 5, 6]).unwrap();
            ep.all_gather(x([2, 1 + rank.rank()]), 1, &[2, 1]).unwrap();
            tp.barrier().unwrap();
            tp.broadcast(x([1, 1]), 5).unwrap_err();
        });
        result.unwrap();
    };
    run();
    let call = |group, members: &[usize], op, shape: &[usize], dtype| Call {
        group,
        members: members.to_vec(),
        op,
        shape: shape.to_vec(),
        dtype,
    };
    let calls = |rank: usize| {
        let (tp, ep) = (GroupName::Tp, GroupName::Ep);
        vec![
            call(tp, &[0, 1], CollectiveOp::ExchangeSizes, &[3], None),
            call(
                ep,
                &[1, 0],
                CollectiveOp::AllGather,
                &[2, 1 + rank],
                Some(DType::F32),
            ),
            call(tp, &[0, 1], CollectiveOp::Barrier, &[], None),
            call(
                tp,
                &[0, 1],
                CollectiveOp::Broadcast,
                &[1, 1],
                Some(DType::F32),
            ),
        ]
    };
    assert_eq!(world.calls(0), calls(0));
    assert_eq!(world.take_calls(0), calls(0));
    assert_eq!(world.calls(0), []);
    assert_eq!(world.calls(1), calls(1));
    run();
    assert_eq!(world.calls(1), [calls(1), calls(1)].concat());
}

#[test]
#[should_panic(expected = "group tp of ranks [0, 2] cannot be opened by rank 0 of 2")]
fn members_outside_the_world_are_refused() {
    open(&MockWorld::new(2).rank(0), GroupName::Tp, &[0, 2]);
}

#[test]
fn a_world_agrees_only_when_every_rank_does() {
    let _alone = alone();
    let topology = TopologyConfig::new(8)
        .with_ep(2)
        .with_etp(2)
        .init()
        .unwrap();
    for dissenter in [None, Some(0), Some(3), Some(5)] {
        let agreed = MockWorld::new(8)
            .run(|rank| {
                let mesh = Mesh::<Flex>::new(topology, &rank).unwrap();
                mesh.all(Some(mesh.rank()) != dissenter)
            })
            .unwrap();
        assert_eq!(agreed, vec![dissenter.is_none(); 8], "{dissenter:?}");
    }
}

#[test]
fn a_sum_over_the_world_counts_every_rank_once() {
    let _alone = alone();
    for (ep, etp) in [(1, 1), (2, 2), (4, 2), (1, 4)] {
        let topology = TopologyConfig::new(8).with_ep(ep).with_etp(etp).init();
        let topology = topology.unwrap();
        let sums = MockWorld::new(8)
            .run(|rank| {
                let mesh = Mesh::<Flex>::new(topology, &rank).unwrap();
                mesh.sum(10usize.pow(mesh.rank() as u32))
            })
            .unwrap();
        assert_eq!(sums, [11_111_111; 8], "ep={ep} etp={etp}");
    }
}

#[test]
fn a_gather_over_the_world_is_in_rank_order_and_sums_stay_apart() {
    let _alone = alone();
    for (ep, etp) in [(1, 1), (2, 2), (4, 2), (1, 4)] {
        let topology = TopologyConfig::new(8).with_ep(ep).with_etp(etp).init();
        let topology = topology.unwrap();
        let found = MockWorld::new(8)
            .run(|rank| {
                let mesh = Mesh::<Flex>::new(topology, &rank).unwrap();
                let own = mesh.rank() as f32;
                let values = Tensor::<Flex, 1>::from_floats([own, -own], &Default::default());
                let gathered = mesh.gather(values).into_data().to_vec::<f32>().unwrap();
                (
                    gathered,
                    mesh.sum_each(&[mesh.rank(), 1]),
                    mesh.sum_each(&[]),
                )
            })
            .unwrap();
        let ranks: Vec<f32> = (0..8)
            .flat_map(|rank| [rank as f32, -(rank as f32)])
            .collect();
        let expected = (ranks, vec![28, 8], vec![]);
        assert!(
            found.iter().all(|found| *found == expected),
            "ep={ep} etp={etp}: {found:?}"
        );
    }
}
