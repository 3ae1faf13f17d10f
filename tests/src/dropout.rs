//! Dropout in the oracle: a token's mask folded into the factors, one token after the other.

use moe_lora_adapters::{Dropout, DropoutAt, LoraConfig, TokenIds};
use moe_lora_kernels::{DropoutKey, DropoutMask, RowGroups};
use moe_lora_testkit::{GateUpTargets, Matrix, oracle};

/// The step of every case.
pub const STEP: u64 = 3;

/// The ids of all of a batch's tokens that a rank has from `first` on: far from its row numbers.
pub fn tokens(ids: impl IntoIterator<Item = usize>) -> TokenIds {
    TokenIds::new(STEP, ids.into_iter().map(token))
}

/// The id of the batch's token `row`.
fn token(row: usize) -> u64 {
    (7 << 32) + 100 + 3 * row as u64
}

/// The rows with the ids of these tokens, where the adapters drop.
pub fn rows(
    rows: RowGroups,
    config: &LoraConfig,
    ids: impl IntoIterator<Item = usize>,
) -> RowGroups {
    match config.dropout {
        None => rows,
        Some(_) => rows.with_tokens(tokens(ids)),
    }
}

/// The key of an adapter's masks: its seed, and its path by FNV-1a.
pub fn key(config: &LoraConfig, path: &str) -> DropoutKey {
    let byte = |hash: u64, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3);
    DropoutKey {
        seed: config.seed,
        layer: path.bytes().fold(0xcbf2_9ce4_8422_2325, byte),
    }
}

/// One adapter's dropout of one token.
struct Folded<'a> {
    config: &'a LoraConfig,
    path: &'a str,
    token: u64,
    expert: usize,
}

impl Folded<'_> {
    /// What the elements `0..features` are multiplied by.
    fn factors(&self, dropout: Dropout, features: usize) -> Vec<f64> {
        let rows = RowGroups::whole(0).with_tokens(TokenIds::new(STEP, []));
        let mask = DropoutMask::new(dropout.probability, key(self.config, self.path), &rows);
        let factor = |feature| match mask.keeps(self.token, self.expert, feature) {
            true => 1.0 / (1.0 - dropout.probability),
            false => 0.0,
        };
        (0..features).map(factor).collect()
    }

    /// `A m` or `m B`, and the same of their gradients.
    fn fold(&self, [a, b]: [&Matrix; 2]) -> [Matrix; 2] {
        match self.config.dropout {
            None => [a.clone(), b.clone()],
            Some(dropout) if dropout.at == DropoutAt::BeforeA => {
                let m = self.factors(dropout, a.columns);
                [
                    Matrix::build(a.rows, a.columns, |i, j| a.at(i, j) * m[j]),
                    b.clone(),
                ]
            }
            Some(dropout) => {
                let m = self.factors(dropout, b.rows);
                [
                    a.clone(),
                    Matrix::build(b.rows, b.columns, |i, j| b.at(i, j) * m[i]),
                ]
            }
        }
    }
}

/// The linear that one token sees.
fn folded(
    linear: &oracle::Linear,
    config: &LoraConfig,
    paths: &[String],
    [token, expert]: [usize; 2],
) -> oracle::Linear {
    let loras = linear.loras().iter().zip(paths).map(|(lora, path)| {
        let folded = Folded {
            config,
            path,
            token: self::token(token),
            expert,
        };
        let [a, b] = folded.fold([&lora.a, &lora.b]);
        oracle::Lora {
            a,
            b,
            ..lora.clone()
        }
    });
    let folded = oracle::Linear::new(linear.weight().clone(), loras.collect());
    let folded = folded.stretched_as(linear);
    match linear.bias() {
        None => folded,
        Some(bias) => folded.with_bias(bias.clone()),
    }
}

/// Gradients of the factors for those of the folded ones, added to `sum`.
fn unfold(
    sum: &mut [Vec<Matrix>],
    grads: &[Vec<Matrix>],
    config: &LoraConfig,
    paths: &[String],
    [token, expert]: [usize; 2],
) {
    for ((sum, grads), path) in sum.iter_mut().zip(grads).zip(paths) {
        let (factors, magnitude) = grads.split_at(2);
        let folded = Folded {
            config,
            path,
            token: self::token(token),
            expert,
        };
        let factors = folded.fold([&factors[0], &factors[1]]);
        for (sum, grad) in sum.iter_mut().zip(factors.iter().chain(magnitude)) {
            sum.add_to_rows(0, grad);
        }
    }
}

/// Output and gradients of a linear of `expert` whose rows are `tokens`.
pub fn linear(
    linear: &oracle::Linear,
    config: &LoraConfig,
    paths: &[String],
    expert: usize,
    tokens: &[usize],
    [x, g]: [&Matrix; 2],
) -> (Matrix, oracle::LinearGrads) {
    let zeros = |matrix: &Matrix| Matrix::zeros(matrix.rows, matrix.columns);
    let factors = linear.loras().iter().map(|lora| {
        let trained = [Some(&lora.a), Some(&lora.b), lora.magnitude.as_ref()];
        trained.into_iter().flatten().map(zeros).collect()
    });
    let (mut y, mut dx, mut factors) = (zeros(g), zeros(x), factors.collect::<Vec<Vec<_>>>());
    for (row, token) in tokens.iter().enumerate() {
        let place = [*token, expert];
        let (x, g) = (x.pick_rows([row]), g.pick_rows([row]));
        let folded = folded(linear, config, paths, place);
        let grads = folded.backward(&x, &g);
        y.add_to_rows(row, &folded.forward(&x));
        dx.add_to_rows(row, &grads.dx);
        unfold(&mut factors, &grads.factors, config, paths, place);
    }
    (y, oracle::LinearGrads { dx, factors })
}

/// Paths of an MLP's adapters, those of gate and up and that of down.
fn paths(mlp: &str, gate_up: GateUpTargets) -> [Vec<String>; 2] {
    let names: &[&str] = match gate_up {
        GateUpTargets::Fused => &["gate_up_proj"],
        GateUpTargets::Separate => &["gate_proj", "up_proj"],
    };
    [names, &["down_proj"]].map(|names| names.iter().map(|name| format!("{mlp}.{name}")).collect())
}

fn folded_mlp(
    mlp: &oracle::Mlp,
    config: &LoraConfig,
    [fc1, fc2]: &[Vec<String>; 2],
    place: [usize; 2],
) -> oracle::Mlp {
    oracle::Mlp {
        gate_up: folded(&mlp.gate_up, config, fc1, place),
        down: folded(&mlp.down, config, fc2, place),
        glu: mlp.glu,
    }
}

/// Output and gradients of a layer, or of shared experts alone, whose MLPs lie at these paths.
pub fn layer(
    moe: &oracle::Moe,
    config: &LoraConfig,
    gate_up: GateUpTargets,
    [experts_path, shared_path]: [&str; 2],
    [x, g]: [&Matrix; 2],
) -> (Matrix, oracle::MoeGrads) {
    let (experts, shared) = (paths(experts_path, gate_up), paths(shared_path, gate_up));
    let mut y = Matrix::zeros(x.rows, x.columns);
    let mut sum = oracle::MoeGrads {
        dx: Matrix::zeros(x.rows, x.columns),
        experts: moe.experts.iter().map(oracle::Mlp::no_grads).collect(),
        shared: moe.shared.as_ref().map_or(Vec::new(), |s| s.mlp.no_grads()),
    };
    for token in 0..x.rows {
        let seen = moe.experts.iter().enumerate();
        let seen = seen.map(|(e, mlp)| folded_mlp(mlp, config, &experts, [token, e]));
        let seen = oracle::Moe {
            experts: seen.collect(),
            shared: moe.shared.as_ref().map(|s| oracle::Shared {
                mlp: folded_mlp(&s.mlp, config, &shared, [token, 0]),
                gate: s.gate.clone(),
            }),
            ..moe.clone()
        };
        let (x, g) = (x.pick_rows([token]), g.pick_rows([token]));
        let grads = seen.backward(&x, &g);
        y.add_to_rows(token, &seen.forward(&x));
        sum.dx.add_to_rows(token, &grads.dx);
        for (e, (sum, grads)) in sum.experts.iter_mut().zip(&grads.experts).enumerate() {
            unfold(sum, grads, config, &experts.concat(), [token, e]);
        }
        unfold(
            &mut sum.shared,
            &grads.shared,
            config,
            &shared.concat(),
            [token, 0],
        );
    }
    (y, sum)
}
