//! Collectives of an expert tensor parallel group by themselves: what one of no bytes takes, and what bytes add.

use std::sync::Arc;

use burn::tensor::backend::Backend;
use burn::tensor::ops::FloatTensor;
use burn::tensor::{Tensor, TensorPrimitive};
use burn_moe_lora::parallel::CollectiveError;
use burn_moe_lora::prelude::*;
use serde_json::json;

use crate::Args;
use crate::calls::Plain;
use crate::case::RANK;
use crate::gpu::Gpu;
use crate::ranks;
use crate::report::Report;
use crate::times::wall;

/// Rows of `[T, r]`, in bf16: 256 KiB and more.
const TOKENS: [usize; 3] = [4 << 10, 64 << 10, 1 << 20];

/// Of a value of the group's whole size.
type Call =
    fn(&dyn Collective<Plain>, FloatTensor<Plain>) -> Result<FloatTensor<Plain>, CollectiveError>;

const CALLS: [(&str, Call); 3] = [
    ("all_reduce", |group, x| group.all_reduce(x)),
    ("all_gather", |group, x| {
        let rows = rows(&x);
        group.all_gather(x, 0, &vec![rows; group.size()])
    }),
    ("reduce_scatter", |group, x| {
        let rows = rows(&x);
        group.reduce_scatter(x, 0, &vec![rows / group.size(); group.size()])
    }),
];

fn rows(x: &FloatTensor<Plain>) -> usize {
    Tensor::<Plain, 2>::from_primitive(TensorPrimitive::Float(x.clone())).dims()[0]
}

/// Prints the time of a call for every collective and size.
pub fn run(args: &Args, rank: &Nccl, report: &mut Report) {
    let size = args.etp;
    if size == 1 {
        report.text("a group of one rank has no collectives");
        return;
    }
    let gpu = Gpu::open(rank.device());
    let group: Arc<dyn Collective<Plain>> = ranks::expert_tp(args, rank);
    let world = ranks::world::<Plain>(rank);
    let begin = || world.barrier().unwrap_or_else(|error| panic!("{error}"));
    let wait = || {
        Plain::sync(rank.device()).expect("the GPU's work ends well");
        gpu.wait();
    };
    report.text(format!(
        "wall time of a collective of {size} ranks; bytes of the whole value"
    ));
    for (name, call) in CALLS {
        for tokens in TOKENS {
            // What a gather takes in is a rank's part of the whole.
            let given = if name == "all_gather" {
                tokens / size
            } else {
                tokens
            };
            let x = Tensor::<Plain, 2>::zeros([given, RANK], rank.device());
            let mut held = Some(x.into_primitive().tensor());
            let times = wall(
                args.windows,
                args.calls,
                begin,
                wait,
                &mut held,
                |held, _| {
                    // A sum has its buffer to itself and goes on in it, as that of an adapter does.
                    let given = match name {
                        "all_reduce" => held.take(),
                        _ => held.clone(),
                    };
                    let given = given.expect("it is put back after its call");
                    let y = call(&*group, given).unwrap_or_else(|error| panic!("{error}"));
                    held.get_or_insert(y);
                },
                |_| (),
            );
            let bytes = 2 * tokens * RANK;
            report.row(
                format!("{name:<16}{bytes:>12} bytes{:>10.1} us", times.median),
                &json!({
                    "part": "collectives", "collective": name, "link": "nvlink", "group": size,
                    "ep": args.ep, "etp": size, "gpus": rank.world_size(),
                    "bytes": bytes, "us": times.median, "us_least": times.least,
                    "us_most": times.most,
                }),
            );
        }
    }
}
