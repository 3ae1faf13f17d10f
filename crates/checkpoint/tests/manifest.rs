//! The text of a manifest.

mod folders;

use folders::{layouts, save};
use moe_lora_checkpoint::{GroupSizes, Manifest};
use std::fs;
use tempfile::TempDir;

#[test]
fn a_manifest_reads_as_this() {
    let folder = TempDir::new().unwrap();
    save(
        folder.path(),
        GroupSizes::new(1, 2),
        &[layouts().remove(1), layouts().remove(3)],
        15,
    );
    insta::assert_snapshot!(fs::read_to_string(Manifest::path(folder.path())).unwrap(), @r#"
    {
      "format": "moe-lora-checkpoint",
      "version": 1,
      "crc32": "f7f52e0f",
      "contents": {
        "generation": 1,
        "step": 15,
        "topology": {
          "world": 2,
          "tp": 1,
          "ep": 1,
          "etp": 2
        },
        "adapters": {
          "mlp.experts.gate_up_proj": {
            "rank": 4,
            "alpha": 0.1,
            "rslora": true,
            "activation": "identity",
            "shared": false
          }
        },
        "tensors": [{
          "layout": {
            "key": "mlp.experts.gate_up_proj.lora_B",
            "dtype": "F32",
            "shape": [4, 16, 4],
            "fragments": [1, 2, 1],
            "axes": ["ep", "expert_tp", null]
          },
          "shards": [{
            "file": "g1-ep0-etp0-dp0.safetensors",
            "offset": [0, 0, 0],
            "shape": [4, 8, 4],
            "crc32": "f37dc38c"
          }, {
            "file": "g1-ep0-etp1-dp0.safetensors",
            "offset": [0, 4, 0],
            "shape": [4, 8, 4],
            "crc32": "0f44b86c"
          }]
        }, {
          "layout": {
            "key": "mlp.experts.gate_up_proj.lora_B.adamw.time",
            "dtype": "I64",
            "shape": [],
            "fragments": [],
            "axes": []
          },
          "shards": [{
            "file": "g1-ep0-etp0-dp0.safetensors",
            "offset": [],
            "shape": [],
            "crc32": "1b8a3df1"
          }]
        }]
      }
    }
    "#);
}
