//! Tiny model folders in which every element has another value, so that any misplaced one shows.
#![allow(dead_code, reason = "each test binary uses its own part")]

use half::{bf16, f16};
use moe_lora_interchange::HubModel;
use safetensors::tensor::TensorView;
use safetensors::{Dtype, serialize_to_file};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::fs;
use tempfile::TempDir;

pub const FLOATS: [Dtype; 3] = [Dtype::F32, Dtype::BF16, Dtype::F16];
pub const LAYERS: usize = 3;
pub const EXPERTS: usize = 4;
pub const VOCAB: usize = 7;

/// A family's configuration and the shapes of its tensors.
pub struct Family {
    pub config: Value,
    pub tensors: BTreeMap<String, Vec<usize>>,
}

/// A family in files.
pub struct Made {
    pub folder: TempDir,
    dtype: Dtype,
    /// Shape, and the number of the first element.
    tensors: BTreeMap<String, (Vec<usize>, usize)>,
}

impl Family {
    fn new(model_type: &str, [hidden, ffn]: [usize; 2], extra: Value) -> Self {
        let mut config = json!({
            "model_type": model_type,
            "hidden_act": "silu",
            "vocab_size": VOCAB,
            "hidden_size": hidden,
            "intermediate_size": ffn,
            "num_hidden_layers": LAYERS,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "num_experts_per_tok": 2,
            "rms_norm_eps": 1e-5,
            "max_position_embeddings": 64,
            "tie_word_embeddings": false,
        });
        let fields = config.as_object_mut().unwrap();
        fields.extend(extra.as_object().unwrap().clone());
        let mut family = Self {
            config,
            tensors: BTreeMap::new(),
        };
        family.add("model.embed_tokens.weight", &[VOCAB, hidden]);
        family.add("model.norm.weight", &[hidden]);
        family.add("lm_head.weight", &[VOCAB, hidden]);
        for layer in 0..LAYERS {
            let name = format!("model.layers.{layer}.input_layernorm.weight");
            family.add(&name, &[hidden]);
        }
        family
    }

    fn add(&mut self, name: &str, shape: &[usize]) {
        self.tensors.insert(name.to_owned(), shape.to_vec());
    }

    fn add_mlp(&mut self, module: &str, names: [&str; 3], [hidden, ffn]: [usize; 2]) {
        let [gate, up, down] = names.map(|name| format!("{module}.{name}.weight"));
        self.add(&gate, &[ffn, hidden]);
        self.add(&up, &[ffn, hidden]);
        self.add(&down, &[hidden, ffn]);
    }

    fn add_experts(&mut self, block: &str, names: [&str; 3], sizes: [usize; 2]) {
        self.add(&format!("{block}.gate.weight"), &[EXPERTS, sizes[0]]);
        for expert in 0..EXPERTS {
            self.add_mlp(&format!("{block}.experts.{expert}"), names, sizes);
        }
    }

    /// `sizes` are `[H, F]` here and below.
    pub fn mixtral(sizes: [usize; 2]) -> Self {
        let extra = json!({
            "num_local_experts": EXPERTS,
            "rope_theta": 1e6,
            "sliding_window": null,
        });
        let mut family = Self::new("mixtral", sizes, extra);
        for layer in 0..LAYERS {
            let block = format!("model.layers.{layer}.block_sparse_moe");
            family.add_experts(&block, ["w1", "w3", "w2"], sizes);
        }
        family
    }

    /// One dense layer, then two with experts, then one that only predicts further tokens.
    pub fn deepseek_v3([hidden, ffn]: [usize; 2]) -> Self {
        let extra = json!({
            "intermediate_size": 9,
            "moe_intermediate_size": ffn,
            "n_routed_experts": EXPERTS,
            "n_shared_experts": 2,
            "first_k_dense_replace": 1,
            "moe_layer_freq": 1,
            "n_group": 2,
            "topk_group": 1,
            "routed_scaling_factor": 2.5,
            "norm_topk_prob": true,
            "scoring_func": "sigmoid",
            "topk_method": "noaux_tc",
            "num_nextn_predict_layers": 1,
            "rope_theta": 10000,
            "rope_scaling": {"type": "yarn", "factor": 40},
        });
        const NAMES: [&str; 3] = ["gate_proj", "up_proj", "down_proj"];
        let mut family = Self::new("deepseek_v3", [hidden, ffn], extra);
        family.add_mlp("model.layers.0.mlp", NAMES, [hidden, 9]);
        for layer in 1..=LAYERS {
            let block = format!("model.layers.{layer}.mlp");
            family.add_experts(&block, NAMES, [hidden, ffn]);
            family.add(&format!("{block}.gate.e_score_correction_bias"), &[EXPERTS]);
            let shared = format!("{block}.shared_experts");
            family.add_mlp(&shared, NAMES, [hidden, 2 * ffn]);
        }
        family
    }

    pub fn gpt_oss([hidden, ffn]: [usize; 2]) -> Self {
        let extra = json!({
            "num_local_experts": EXPERTS,
            "experts_per_token": 2,
            "swiglu_limit": 7.0,
            "sliding_window": 128,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "rope_theta": 150000,
            "rope_scaling": {"rope_type": "yarn", "factor": 32.0},
        });
        let mut family = Self::new("gpt_oss", [hidden, ffn], extra);
        for layer in 0..LAYERS {
            let block = format!("model.layers.{layer}.mlp");
            for (name, shape) in [
                ("router.weight", &[EXPERTS, hidden][..]),
                ("router.bias", &[EXPERTS]),
                ("experts.gate_up_proj", &[EXPERTS, hidden, 2 * ffn]),
                ("experts.gate_up_proj_bias", &[EXPERTS, 2 * ffn]),
                ("experts.down_proj", &[EXPERTS, ffn, hidden]),
                ("experts.down_proj_bias", &[EXPERTS, hidden]),
            ] {
                family.add(&format!("{block}.{name}"), shape);
            }
        }
        family
    }

    pub fn qwen3_moe([hidden, ffn]: [usize; 2]) -> Self {
        let extra = json!({
            "intermediate_size": 9,
            "moe_intermediate_size": ffn,
            "num_experts": EXPERTS,
            "norm_topk_prob": true,
            "rope_theta": 1e4,
            "mlp_only_layers": [1],
        });
        const NAMES: [&str; 3] = ["gate_proj", "up_proj", "down_proj"];
        let mut family = Self::new("qwen3_moe", [hidden, ffn], extra);
        family.add_mlp("model.layers.1.mlp", NAMES, [hidden, 9]);
        for layer in [0, 2] {
            family.add_experts(&format!("model.layers.{layer}.mlp"), NAMES, [hidden, ffn]);
        }
        family
    }

    /// Mixtral as transformers 5 names and stacks it.
    pub fn mixtral_stacked([hidden, ffn]: [usize; 2]) -> Self {
        let mut family = Self::mixtral([hidden, ffn]);
        family
            .tensors
            .retain(|name, _| !name.contains("block_sparse_moe"));
        for layer in 0..LAYERS {
            let block = format!("model.layers.{layer}.mlp");
            for (name, shape) in [
                ("gate.weight", &[EXPERTS, hidden][..]),
                ("experts.gate_up_proj", &[EXPERTS, 2 * ffn, hidden]),
                ("experts.down_proj", &[EXPERTS, hidden, ffn]),
            ] {
                family.add(&format!("{block}.{name}"), shape);
            }
        }
        family
    }

    /// One of every family and layout.
    pub fn all(sizes: [usize; 2]) -> [Self; 5] {
        [
            Self::mixtral(sizes),
            Self::deepseek_v3(sizes),
            Self::gpt_oss(sizes),
            Self::qwen3_moe(sizes),
            Self::mixtral_stacked(sizes),
        ]
    }

    /// Writes the files, the tensors in one shard or dealt out to several.
    pub fn write(self, dtype: Dtype, shards: usize) -> Made {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        fs::write(at("config.json"), self.config.to_string()).unwrap();
        let mut first = 0;
        let mut tensors = BTreeMap::new();
        for (name, shape) in self.tensors {
            let len = shape.iter().product::<usize>();
            tensors.insert(name, (shape, first));
            first += len;
        }
        let bytes = |(shape, first): &(Vec<usize>, usize)| -> Vec<u8> {
            let elements = *first..*first + shape.iter().product::<usize>();
            elements.flat_map(|n| bits(dtype, n)).collect()
        };
        let data: Vec<(&String, &Vec<usize>, Vec<u8>)> = tensors
            .iter()
            .map(|(name, tensor)| (name, &tensor.0, bytes(tensor)))
            .collect();
        let file = |shard: usize| match shards {
            1 => "model.safetensors".to_owned(),
            _ => format!("model-{:05}-of-{shards:05}.safetensors", shard + 1),
        };
        let mut map = BTreeMap::new();
        for shard in 0..shards {
            let part = data.iter().skip(shard).step_by(shards);
            let views = part.map(|(name, shape, bytes)| {
                map.insert(name.as_str(), file(shard));
                let view = TensorView::new(dtype, shape.to_vec(), bytes).unwrap();
                (name.as_str(), view)
            });
            let format = [("format".to_owned(), "pt".to_owned())];
            serialize_to_file(views, Some(format.into()), &at(&file(shard))).unwrap();
        }
        if shards > 1 {
            let index = json!({"metadata": {}, "weight_map": map});
            fs::write(at("model.safetensors.index.json"), index.to_string()).unwrap();
        }
        Made {
            folder,
            dtype,
            tensors,
        }
    }
}

impl Made {
    pub fn open(&self) -> HubModel {
        HubModel::open(self.folder.path()).unwrap()
    }

    /// The element of a tensor at an index per axis.
    #[track_caller]
    pub fn element(&self, name: &str, index: &[usize]) -> f32 {
        let (shape, first) = &self.tensors[name];
        assert_eq!(shape.len(), index.len(), "{name}");
        let flat = shape.iter().zip(index).fold(0, |flat, (&size, &i)| {
            assert!(i < size, "{name} {shape:?} at {index:?}");
            flat * size + i
        });
        value(self.dtype, first + flat)
    }
}

/// Little-endian bytes of element `n`, different for every `n` below 31,000.
fn bits(dtype: Dtype, n: usize) -> Vec<u8> {
    match dtype {
        Dtype::F32 => (n as f32).to_le_bytes().to_vec(),
        // The bit patterns of positive finite numbers, in order.
        _ => u16::try_from(n).unwrap().to_le_bytes().to_vec(),
    }
}

pub fn value(dtype: Dtype, n: usize) -> f32 {
    match dtype {
        Dtype::F32 => n as f32,
        Dtype::BF16 => bf16::from_bits(n as u16).to_f32(),
        _ => f16::from_bits(n as u16).to_f32(),
    }
}
