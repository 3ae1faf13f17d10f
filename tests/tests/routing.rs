//! The router's choice and the way of tokens to their experts and back: pure data movement, equal
//! to the bit.

use burn::tensor::{DType, Tensor};
use moe_lora_adapters::Sharing;
use moe_lora_experts::{Dispatch, ExpertLoad, RouterScore, TopKRouter};
use moe_lora_kernels::RowGroups;
use moe_lora_parallel::{
    Ep, Features, Group, Mesh, MockWorld, Topology, TopologyConfig, all_to_all, range_of,
};
use moe_lora_testkit::{
    Ad, Axis, GateUpTargets, Matrix, Mocked, Noise, assert_close, assert_far, mock, noise, oracle,
    panic_message, ranks, unshard,
};
use moe_lora_tests::moe::{self, place};
use proptest::prelude::*;

const COLUMNS: usize = 3;

fn topology(ep: usize, etp: usize, replicas: usize) -> Topology {
    let config = TopologyConfig::new(ep * etp * replicas);
    config.with_ep(ep).with_etp(etp).init().unwrap()
}

// ---- dispatch ----------------------------------------------------------------------------------

/// Tokens and their experts on every rank of a topology.
#[derive(Clone, Debug)]
struct Batch {
    topology: Topology,
    local: usize,
    top_k: usize,
    dealt: Vec<usize>,
    seed: u64,
}

impl Batch {
    fn experts(&self) -> usize {
        self.local * self.topology.ep()
    }

    fn tokens(&self) -> usize {
        self.dealt.iter().sum()
    }

    /// Integers that no two tokens have in common.
    fn x(&self) -> Matrix {
        Matrix::build(self.tokens(), COLUMNS, |i, j| (1 + i * COLUMNS + j) as f64)
    }

    /// Distinct experts of each token.
    fn choices(&self) -> Vec<usize> {
        let mut noise = Noise::new(self.seed);
        let mut choices = Vec::new();
        for _ in 0..self.tokens() {
            let mut experts: Vec<usize> = (0..self.experts()).collect();
            experts.sort_by_cached_key(|_| noise.bits());
            choices.extend(&experts[..self.top_k]);
        }
        choices
    }

    /// This rank's part of them.
    fn own(&self, rank: usize) -> (Matrix, Vec<usize>) {
        let tokens = range_of(&self.dealt, rank);
        let choices = tokens.start * self.top_k..tokens.end * self.top_k;
        (self.x().pick_rows(tokens), self.choices()[choices].to_vec())
    }

    /// Sends every token through experts that multiply by `factor(expert)`, and back. The first
    /// rank of an expert makes the whole product, the others terms of zero.
    fn through(&self, factor: impl Fn(usize, &Mesh<Ad>) -> f64 + Sync) -> Matrix {
        let parts = ranks(&mock(self.topology), self.topology, |mesh| {
            let (x, choices) = self.own(mesh.rank());
            let way = Dispatch::plan(&choices, self.top_k, self.local, &mesh).unwrap();
            let sent = way.tokens(x.tensor(DType::F32)).into_tensor();
            assert_eq!(sent.dims(), [way.rows().rows(), COLUMNS]);
            let mut y = Matrix::read(sent);
            for expert in 0..self.local {
                let share = if mesh.expert_tp().rank() == 0 {
                    factor(expert, &mesh)
                } else {
                    0.0
                };
                for row in way.rows().range(expert) {
                    for value in &mut y.values[row * COLUMNS..(row + 1) * COLUMNS] {
                        *value *= share;
                    }
                }
            }
            let y = mesh.expert_tp().partial(y.tensor(DType::F32));
            Matrix::read(way.combine(y))
        });
        unshard(&parts, Axis::Tokens)
    }

    /// One row for each `(token, choice)`.
    fn expected(&self, factor: impl Fn(usize) -> f64) -> Matrix {
        let (x, choices) = (self.x(), self.choices());
        Matrix::build(choices.len(), COLUMNS, |i, j| {
            x.at(i / self.top_k, j) * factor(choices[i])
        })
    }
}

fn batches() -> impl Strategy<Value = Batch> {
    let places = prop::sample::select(vec![
        (1, 1, 1),
        (2, 1, 1),
        (1, 2, 1),
        (1, 3, 1),
        (3, 1, 1),
        (2, 2, 1),
        (1, 4, 1),
        (4, 1, 1),
        (2, 1, 2),
        (1, 2, 2),
    ]);
    (places, 1..=3usize, 1..=3usize, any::<u32>()).prop_flat_map(|(place, local, top_k, seed)| {
        let (ep, etp, replicas) = place;
        let top_k = top_k.min(local * ep);
        prop::collection::vec(prop_oneof![Just(0), 0..=6usize], ep * etp * replicas).prop_map(
            move |dealt| Batch {
                topology: topology(ep, etp, replicas),
                local,
                top_k,
                dealt,
                seed: u64::from(seed),
            },
        )
    })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 96, failure_persistence: None, ..Default::default() })]

    #[test]
    fn every_assignment_passes_its_own_expert_and_returns_to_its_own_row(batch in batches()) {
        let number = |expert: usize| (expert + 1) as f64;
        let global = |expert: usize, mesh: &Mesh<Ad>| {
            number(mesh.coordinates().ep * batch.local + expert)
        };
        prop_assert_eq!(batch.through(global), batch.expected(number));
    }

    #[test]
    fn identity_experts_return_every_token_once_a_choice(batch in batches()) {
        prop_assert_eq!(batch.through(|_, _| 1.0), batch.expected(|_| 1.0));
    }

    #[test]
    fn rows_of_assignments_travel_with_their_tokens(batch in batches()) {
        let found = ranks(&mock(batch.topology), batch.topology, |mesh| {
            let (x, choices) = batch.own(mesh.rank());
            let way = Dispatch::plan(&choices, batch.top_k, batch.local, &mesh).unwrap();
            // Each assignment carries its token's first column and its own expert.
            let assignments = Matrix::build(choices.len(), 2, |i, j| match j {
                0 => x.at(i / batch.top_k, 0),
                _ => choices[i] as f64,
            });
            let tokens = Matrix::read(way.tokens(x.tensor(DType::F32)).into_tensor());
            let sent = way.assignments(assignments.tensor(DType::F32));
            let sent = Matrix::read(sent.into_tensor());
            assert_eq!(sent.columns(0..1), tokens.columns(0..1));
            let first = mesh.coordinates().ep * batch.local;
            (0..batch.local).all(|expert| {
                let mut rows = way.rows().range(expert);
                // No token's column is 0: that row stands for none.
                rows.all(|row| sent.at(row, 0) == 0.0 || sent.at(row, 1) == (first + expert) as f64)
            })
        });
        prop_assert!(found.into_iter().all(|right| right));
    }

    #[test]
    fn the_router_takes_the_largest_scores_and_the_lower_expert_of_equal_ones(
        seed in any::<u32>(), tokens in 0..6usize, experts in 1..7usize, top_k in 1..7usize,
    ) {
        let top_k = top_k.min(experts);
        // Coarse values, so that ties are frequent.
        let coarse = |seed, rows, columns| noise(seed, rows, columns).map(|v| (2.0 * v).round());
        let x = coarse(u64::from(seed), tokens, 2);
        let weight = coarse(u64::from(seed) + 1, experts, 2);
        let logits = x.times(&weight.transposed());
        for score in SCORES {
            let router = TopKRouter::new("gate", weight.tensor::<Ad>(DType::F32), top_k, score).unwrap();
            let routing = router.forward(x.tensor(DType::F32));
            prop_assert_eq!(routing.experts.len(), tokens * top_k);
            prop_assert_eq!(routing.weights.dims(), [tokens, top_k]);
            for token in 0..tokens {
                let chosen = &routing.experts[token * top_k..(token + 1) * top_k];
                for (k, expert) in chosen.iter().enumerate() {
                    let before = |other: usize| {
                        let (a, b) = (logits.at(token, other), logits.at(token, *expert));
                        a > b || (a == b && other < *expert)
                    };
                    // Exactly the k experts before it rank higher.
                    prop_assert_eq!((0..experts).filter(|e| before(*e)).count(), k);
                }
            }
        }
    }
}

#[test]
fn experts_that_no_token_chose_work_on_a_row_of_zeros_that_adds_to_nothing() {
    for (ep, etp) in [(2, 1), (2, 2)] {
        let topology = topology(ep, etp, 1);
        ranks(&mock(topology), topology, |mesh| {
            // Every token goes to the first expert.
            let way = Dispatch::plan(&[0, 0], 1, 2, &mesh).unwrap();
            let chosen = mesh.coordinates().ep == 0;
            let x = noise(1, 2, COLUMNS).tensor::<Ad>(DType::F64).require_grad();
            let sent = way.tokens(x.clone()).into_tensor();
            let rows = if chosen { 2 * ep * etp } else { 1 };
            assert_eq!(way.rows(), &RowGroups::new(&[rows, 0], rows).unwrap());
            assert_eq!(sent.dims(), [rows, COLUMNS]);
            assert_eq!(Matrix::read(sent.clone()).magnitude() > 0.0, chosen);
            // Terms of the row, and its gradient, go nowhere.
            let y = match chosen {
                true => sent,
                false => sent + 1e6,
            };
            let own = y.clone().sum() * if chosen { 0.0 } else { 1e6 };
            let y = way.combine(mesh.expert_tp().partial(y));
            let expected = noise(1, 2, COLUMNS).scaled(etp as f64);
            assert_eq!(Matrix::read(y.clone()), expected);
            let dx = x.grad(&(y.sum() + own).backward()).unwrap();
            let ones = Matrix::build(2, COLUMNS, |_, _| 1.0);
            assert_eq!(Matrix::read(dx), ones.scaled(etp as f64));
        });
    }
}

#[test]
fn an_expert_taken_for_its_local_number_and_rows_left_unsorted_are_seen() {
    let batch = Batch {
        topology: topology(2, 2, 1),
        local: 2,
        top_k: 2,
        dealt: vec![3, 0, 4, 2],
        seed: 5,
    };
    let number = |expert: usize| (expert + 1) as f64;
    let right = batch.expected(number);
    let local = batch.through(|expert, _| number(expert));
    assert_far("local expert numbers", &local, &right);
    // Rows returned in the order of experts, as without the last permutation.
    let mut order: Vec<usize> = (0..right.rows).collect();
    order.sort_by_key(|at| batch.choices()[*at]);
    assert_far("rows in expert order", &right.pick_rows(order), &right);
}

// ---- the router --------------------------------------------------------------------------------

const SCORES: [RouterScore; 4] = [
    RouterScore::SoftmaxThenTopK { renormalize: false },
    RouterScore::SoftmaxThenTopK { renormalize: true },
    RouterScore::TopKThenSoftmax,
    RouterScore::SigmoidThenTopK {
        n_group: 1,
        topk_group: 1,
        renormalize: true,
        scaling_factor: 1.0,
    },
];

#[test]
fn routing_weights_are_the_oracle_s_for_every_score() {
    let (x, weight) = (noise(1, 7, 5), noise(2, 6, 5));
    for (score, oracle_score) in SCORES.into_iter().zip([
        oracle::Score::Softmax,
        oracle::Score::Renormalized,
        oracle::Score::TopKFirst,
        oracle::Score::Sigmoid {
            groups: 1,
            best: 1,
            renormalize: true,
            scale: 1.0,
        },
    ]) {
        for top_k in [1, 2, 6] {
            let moe = oracle::Moe::new(weight.clone(), oracle_score, top_k, Vec::new());
            let chosen: Vec<_> = (0..7).flat_map(|t| moe.route(&x.pick_rows([t]))).collect();
            let (experts, weights): (Vec<_>, Vec<_>) = chosen.into_iter().unzip();
            let expected = Matrix {
                rows: 7,
                columns: top_k,
                values: weights,
            };
            for dtype in [DType::F32, DType::F64] {
                let router =
                    TopKRouter::new("gate", weight.tensor::<Ad>(dtype), top_k, score).unwrap();
                let routing = router.forward(x.tensor(dtype));
                assert_eq!(routing.experts, experts);
                let name = format!("{score:?} top {top_k}");
                assert_close(&name, &Matrix::read(routing.weights), &expected, dtype, 12);
            }
        }
    }
}

#[test]
fn weights_sum_to_one_where_they_are_normalised_and_not_elsewhere() {
    let (x, weight) = (noise(1, 7, 5), noise(2, 6, 5));
    for score in SCORES {
        let router = TopKRouter::new("gate", weight.tensor::<Ad>(DType::F64), 2, score).unwrap();
        let weights = Matrix::read(router.forward(x.tensor(DType::F64)).weights);
        for row in 0..7 {
            let sum: f64 = weights.pick_rows([row]).values.iter().sum();
            let renormalized = score != RouterScore::SoftmaxThenTopK { renormalize: false };
            assert_eq!((sum - 1.0).abs() < 1e-14, renormalized, "{score:?} {sum}");
        }
    }
}

#[test]
fn a_router_of_no_tokens_chooses_nothing() {
    for score in SCORES {
        let weight = noise(2, 4, 5).tensor::<Ad>(DType::F32);
        let router = TopKRouter::new("gate", weight, 2, score).unwrap();
        let x = Matrix::zeros(0, 5).tensor::<Ad>(DType::F32).require_grad();
        let routing = router.forward(x.clone());
        assert!(routing.experts.is_empty());
        assert_eq!(routing.weights.dims(), [0, 2]);
        assert!(x.grad(&routing.weights.sum().backward()).is_some());
    }
}

#[test]
fn a_router_of_more_choices_than_experts_names_both() {
    for top_k in [0, 5] {
        let weight = noise(2, 4, 5).tensor::<Ad>(DType::F32);
        let error = TopKRouter::new("gate", weight, top_k, SCORES[0]).unwrap_err();
        assert_eq!(
            error.to_string(),
            format!("gate: top_k={top_k} is not in 1..=4 (num_experts=4)")
        );
    }
}

// ---- counts that do not fit --------------------------------------------------------------------

#[test]
fn assignments_that_do_not_fit_the_model_name_their_values() {
    let mesh = Mesh::<Ad>::solo();
    let plan = |experts: &[usize]| panic_message(|| Dispatch::plan(experts, 2, 4, &mesh));
    assert_eq!(plan(&[0, 4]), "expert 4 is outside num_experts=4");
    assert_eq!(
        plan(&[0, 1, 2]),
        "3 assignments are not a whole number of tokens of top_k=2"
    );
}

#[test]
fn split_counts_that_do_not_sum_or_are_too_few_are_refused_and_nothing_is_cut_off() {
    let group = Group::<Ad, Ep>::solo();
    let x = || noise(1, 5, 2).tensor::<Ad>(DType::F32);
    assert_eq!(
        panic_message(|| all_to_all(x(), &group, &[4], &[4])),
        "all_to_all over ep[0/1]: send counts [4] and receive counts [4] do not fit 5 rows"
    );
    assert!(panic_message(|| all_to_all(x(), &group, &[5, 0], &[5, 0])).contains("[5, 0]"));
    assert!(RowGroups::new(&[3, 1], 5).is_err());

    // Over two ranks; both sides of the exchange have to agree.
    let failure = |send: [[usize; 2]; 2], recv: [[usize; 2]; 2]| {
        let topology = topology(2, 1, 1);
        let error = MockWorld::new(2)
            .run(|rank| {
                let mesh = Mesh::<Ad>::new(topology, &rank).unwrap();
                let at = mesh.ep().rank();
                let rows = noise(1, 5, 2).tensor::<Ad>(DType::F32);
                let y: Tensor<Ad, 2> = all_to_all(rows, mesh.ep(), &send[at], &recv[at]);
                Matrix::read(y)
            })
            .unwrap_err();
        error.to_string()
    };
    let message = failure([[2, 3], [1, 4]], [[2, 2], [3, 4]]);
    assert!(message.contains("all_to_all"), "{message}");
    assert!(message.contains("ep"), "{message}");
    let message = failure([[2, 2], [1, 4]], [[2, 1], [2, 4]]);
    assert!(
        message.contains("[2, 2]") && message.contains("5 rows"),
        "{message}"
    );
}

#[test]
fn shard_sizes_that_do_not_fit_name_extent_and_group() {
    let topology = topology(1, 2, 1);
    for (sizes, extent) in [(vec![2, 2], 5), (vec![5], 5), (vec![2, 2, 1], 5)] {
        let error = MockWorld::new(2)
            .run(|rank| {
                let mesh = Mesh::<Ad>::new(topology, &rank).unwrap();
                let x = Matrix::zeros(3, extent).tensor::<Ad>(DType::F32);
                let x = mesh.expert_tp().replicated(x);
                x.scatter_to::<Features>(&sizes).into_tensor().dims()
            })
            .unwrap_err()
            .to_string();
        let expected = format!("shard sizes {sizes:?} do not fit extent {extent}");
        assert!(
            error.contains(&expected) && error.contains("expert_tp"),
            "{error}"
        );
    }
}

// ---- load --------------------------------------------------------------------------------------

#[test]
fn the_tokens_of_every_rank_are_counted_once_at_every_topology() {
    let case = moe::case(Sharing::PerExpert, GateUpTargets::Fused, DType::F32);
    let (moe, (x, _)) = (case.oracle(), moe::data(9));
    let mut expected = vec![0; moe::EXPERTS];
    for token in 0..9 {
        for (expert, _) in moe.route(&x.pick_rows([token])) {
            expected[expert] += 1;
        }
    }
    for place in [
        place(1, 1, 1, &[9]),
        place(2, 1, 2, &[2, 7]),
        place(1, 2, 2, &[3, 0, 4, 2]),
        place(2, 2, 1, &[0, 5, 1, 3]),
        place(4, 2, 2, &[2, 1, 0, 1, 3, 0, 1, 1]),
    ] {
        let found = Mocked.run(place.topology, |mesh: &Mesh<Ad>, device| {
            let layer = case.layer(&moe, mesh, device);
            case.pass(&layer, mesh, device, &place.dealt, || ());
            let own = layer.router.counter().take();
            assert_eq!(
                own.iter().sum::<usize>(),
                moe::TOP_K * place.dealt[mesh.rank()]
            );
            // Two layers of other widths in one exchange.
            let layers = ExpertLoad::over_ranks(&[own.clone(), vec![mesh.rank()]], mesh);
            (own, layers)
        });
        let ranks = place.dealt.len();
        for (own, layers) in &found {
            assert_eq!(layers[0].tokens, expected, "{place:?}");
            assert_eq!(layers[1].tokens, [ranks * (ranks - 1) / 2]);
            assert!(ranks == 1 || *own != expected, "{place:?}: the rank's own");
        }
    }
}
