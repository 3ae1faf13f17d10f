//! Settings that make no sense together, and the error of each.

use burn::backend::Flex;
use burn::module::Param;
use burn::tensor::DType;
use burn::tensor::quantization::{
    QuantLevel, QuantMode, QuantParam, QuantScheme, QuantStore, QuantValue,
};
use moe_lora_adapters::{
    Activation, Adaptable, ColumnLinear, Dropout, Init, LinearConfig, LoraConfig, ReplicatedLinear,
    Sharing, Weight,
};
use moe_lora_parallel::{ExpertTp, Group, Mesh};
use moe_lora_testkit::Mocked;

use crate::grouped::etp;

type Fc = ColumnLinear<Flex, ExpertTp>;

/// Gate and up of two experts.
fn linear(group: &Group<Flex, ExpertTp>, d_out: usize) -> Result<Fc, String> {
    let config = LinearConfig::new("fc", 4, d_out).with_experts(0..2);
    let config = config.with_fragments(["gate", "up"]);
    let linear = config.init(group, |_, _, _| 0.5, &Default::default());
    linear.map_err(|error| error.to_string())
}

fn fc() -> Fc {
    linear(&Group::solo(), 8).expect("one rank divides every extent")
}

/// The error of adapters on one linear, one after the other, those with names beside each other.
///
/// # Panics
///
/// When all are taken, or one before the last is refused.
fn refused(adapters: &[(&str, Option<&str>, LoraConfig)]) -> String {
    let (mut fc, device) = (fc(), Default::default());
    let mut results = adapters.iter().map(|(path, name, config)| {
        let result = match name {
            None => fc.adapt(path, config, &device).map(drop),
            Some(name) => fc.adapt_named(path, name, config, &device).map(drop),
        };
        result.map_err(|error| error.to_string())
    });
    let found = results.by_ref().find_map(Result::err);
    assert!(results.next().is_none(), "{adapters:?}: {found:?}");
    found.unwrap_or_else(|| panic!("{adapters:?} are taken"))
}

/// The error of every rank, which is one.
///
/// # Panics
///
/// When one of them has none, or another.
fn on_ranks(size: usize, f: impl Fn(&Mesh<Flex>) -> Result<(), String> + Sync) -> String {
    let found = Mocked.run(etp(size), |mesh: &Mesh<Flex>, _| f(mesh).unwrap_err());
    assert!(found.iter().all(|message| *message == found[0]));
    found[0].clone()
}

/// The error of a shared outer factor on a linear of experts that every rank holds whole.
///
/// # Panics
///
/// When it is taken.
pub fn shared_outer_on_whole_experts() -> String {
    let config = LoraConfig::new(4, 8.0).with_sharing(Sharing::SharedOuter);
    let errors = [1, 2, 4].map(|size| {
        on_ranks(size, |mesh| {
            let linear = LinearConfig::new("fc", 8, 8).with_experts(0..2);
            let linear = linear.init(mesh.expert_tp(), |_, _, _| 0.5, &Default::default());
            let mut linear: ReplicatedLinear<Flex, ExpertTp> = linear.expect("nothing is cut");
            let adapted = linear.adapt("fc", &config, &Default::default());
            adapted.map(drop).map_err(|error| error.to_string())
        })
    });
    assert!(errors.iter().all(|error| *error == errors[0]));
    errors[0].clone()
}

/// PiSSA on a base of integers.
fn quantised() -> String {
    let mut fc = fc();
    let scheme = QuantScheme {
        value: QuantValue::Q8S,
        level: QuantLevel::Tensor,
        mode: QuantMode::Symmetric,
        param: QuantParam::F32,
        store: QuantStore::Native,
    };
    let weight = fc.weight.weight.stacked().quantize_dynamic(&scheme);
    fc.weight.weight = Weight::PerExpert(Param::from_tensor(weight).set_require_grad(false));
    let config = LoraConfig::new(2, 4.0).with_pissa(true);
    let error = fc.adapt("fc", &config, &Default::default()).unwrap_err();
    error.to_string()
}

/// What is asked for, and the error that says why it cannot be had.
///
/// # Panics
///
/// When something of it is taken.
pub fn refusals() -> Vec<[String; 2]> {
    let plain = LoraConfig::new(2, 4.0);
    let (dora, pissa) = (plain.with_dora(true), plain.with_pissa(true));
    let silu = plain.with_activation(Activation::Silu);
    let drop = plain.with_dropout(Dropout::before_a(0.1));
    let one = |config: LoraConfig| refused(&[("fc", None, config)]);
    let named = |second: LoraConfig| {
        let [fr, de] = ["fr", "de"].map(Some);
        refused(&[("fc", fr, plain), ("fc", de, second)])
    };
    let combined = || {
        let (mut fc, device) = (fc(), Default::default());
        for (name, config) in [("fr", plain), ("de", dora)] {
            fc.adapt_named("fc", name, &config, &device).unwrap();
        }
        let error = fc.combine("both", &[("fr", 0.5), ("de", 0.5)]);
        error.unwrap_err().to_string()
    };
    let merged = |name: Option<&str>, config: LoraConfig| {
        let (mut fc, device) = (fc(), Default::default());
        match name {
            None => fc.adapt("fc", &config, &device).unwrap(),
            Some(name) => fc.adapt_named("fc", name, &config, &device).unwrap(),
        };
        fc.merge(&Group::solo()).unwrap_err().to_string()
    };
    let cut = |d_out: usize| {
        on_ranks(4, |mesh| {
            let mut fc = linear(mesh.expert_tp(), d_out)?;
            let adapted = fc.adapt("fc", &plain, &Default::default());
            adapted.map(|_| ()).map_err(|error| error.to_string())
        })
    };
    let rows = [
        (
            "DoRA, SiLU between A and B",
            one(dora.with_activation(Activation::Silu)),
        ),
        (
            "PiSSA, SiLU between A and B",
            one(pissa.with_activation(Activation::Silu)),
        ),
        (
            "PiSSA, shared outer factors",
            one(pissa.with_sharing(Sharing::SharedOuter)),
        ),
        (
            "PiSSA, one adapter for all experts",
            one(pissa.with_sharing(Sharing::Shared)),
        ),
        (
            "PiSSA, dropout",
            one(pissa.with_dropout(Dropout::before_a(0.1))),
        ),
        ("PiSSA, start values", one(pissa.with_init_b(Init::Xavier))),
        (
            "PiSSA, a scale that is not positive",
            one(LoraConfig {
                alpha: 0.0,
                ..pissa
            }),
        ),
        (
            "PiSSA, a rank above the weight's",
            one(LoraConfig { rank: 5, ..pissa }),
        ),
        ("PiSSA on a quantised base", quantised()),
        ("PiSSA, named", refused(&[("fc", Some("fr"), pissa)])),
        (
            "A and B that start at zero",
            one(plain.with_init_a(Init::Zero)),
        ),
        ("DoRA in a weighted sum of adapters", combined()),
        ("named, other functions", named(silu)),
        ("named, other dropout", named(drop)),
        (
            "named, other element types",
            named(plain.with_dtype(DType::BF16)),
        ),
        (
            "named beside nameless",
            refused(&[("fc", None, plain), ("fc", Some("fr"), plain)]),
        ),
        (
            "gate beside gate and up",
            refused(&[("fc", None, plain), ("gate", None, plain)]),
        ),
        ("SiLU between A and B, merged", merged(None, silu)),
        ("named, merged as one", merged(Some("fr"), plain)),
        ("rank 8 per expert, 3 experts of a token", {
            let error = LoraConfig::rank_per_expert(8, 3).unwrap_err();
            error.to_string()
        }),
        ("rank 2 at ETP = 4", cut(8)),
        ("6 features at ETP = 4", cut(12)),
    ];
    rows.map(|(asked, error)| [asked.into(), error]).into()
}
