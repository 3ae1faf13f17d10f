//! What recompute saves, in bytes that are allocated at once. A binary of its own: it replaces the
//! allocator.

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicUsize, Ordering};

use burn::backend::autodiff::checkpoint::strategy::BalancedCheckpointing;
use burn::backend::{Autodiff, Flex};
use burn::tensor::{Distribution, Tensor};
use moe_lora_adapters::{
    Adaptable, AdapterBackend, ColumnLora, Dropout, Init, Lora, LoraConfig, Recompute, ShardAxis,
    TokenIds, WeightLayout,
};
use moe_lora_experts::{MlpWeights, MoeConfig, MoeLayer, MoeWeights};
use moe_lora_kernels::{DropoutMask, RowGroups, dropout};
use moe_lora_parallel::{ExpertTp, Group, Mesh, TopologyConfig, Tp};
use moe_lora_testkit::{GateUpTargets, Matrix, gradient, mock, noise, ranks};
use moe_lora_tests::dropout::key as dropout_key;

type B = Autodiff<Flex>;

static NOW: AtomicUsize = AtomicUsize::new(0);
static MOST: AtomicUsize = AtomicUsize::new(0);

struct Counting;

// SAFETY: every call is passed on to the system allocator; counting allocates nothing.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        let now = NOW.fetch_add(layout.size(), Ordering::Relaxed) + layout.size();
        MOST.fetch_max(now, Ordering::Relaxed);
        // SAFETY: the caller keeps the contract of `alloc`.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        NOW.fetch_sub(layout.size(), Ordering::Relaxed);
        // SAFETY: the caller keeps the contract of `dealloc`.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// The most bytes that were there at once during `f`, beside those before it.
fn peak<T>(f: impl FnOnce() -> T) -> usize {
    let before = NOW.load(Ordering::Relaxed);
    MOST.store(before, Ordering::Relaxed);
    drop(f());
    MOST.load(Ordering::Relaxed) - before
}

/// Bytes that are there after `f` beside those before it, and what it returned.
fn kept<T>(f: impl FnOnce() -> T) -> (usize, T) {
    let before = NOW.load(Ordering::Relaxed);
    let result = f();
    (NOW.load(Ordering::Relaxed) - before, result)
}

const TOKENS: usize = 512;
const H: usize = 32;
const F: usize = 64;
const E: usize = 4;
const TOP_K: usize = 2;
const LAYERS: usize = 6;
const F32: usize = size_of::<f32>();

fn random(columns: usize) -> Tensor<Flex, 2> {
    let distribution = Distribution::Normal(0.0, 1.0);
    Tensor::random([TOKENS, columns], distribution, &Default::default())
}

fn layer<B: AdapterBackend>(k: usize, mesh: &Mesh<B>) -> MoeLayer<B> {
    let values = |n: usize| noise(n as u64, 1, n).scaled(0.125).to_f32();
    let [router, gate, up, down] = [E * H, E * F * H, E * F * H, E * H * F].map(values);
    let weights = MoeWeights {
        router: &router,
        experts: MlpWeights {
            gate: &gate,
            up: &up,
            down: &down,
            biases: None,
        },
        ..Default::default()
    };
    let config = LoraConfig::new(2, 4.0)
        .with_init_b(Init::Xavier)
        .with_dropout(Dropout::before_a(0.1));
    let mut layer = MoeConfig::new(format!("layers.{k}.mlp"), H, F, E, TOP_K)
        .init(weights, mesh, &Default::default())
        .unwrap();
    let targets = GateUpTargets::Fused.targets();
    layer
        .add_adapters(&targets, &config, &Default::default())
        .unwrap();
    layer
}

/// One test: the numbers are those of the process.
#[test]
fn recompute_saves_the_activations_of_blocks_and_of_adapters() {
    an_adapter_with_dropout();
    blocks();
    a_sequence_parallel_input();
}

fn blocks() {
    let mesh = Mesh::<B>::solo();
    let layers: Vec<_> = (0..LAYERS).map(|k| layer(k, &mesh)).collect();
    let tokens = TokenIds::new(0, 0..TOKENS as u64);
    let block =
        |layer: &MoeLayer<B>, x: Tensor<B, 2>| x.clone() + layer.forward_tokens(x, &tokens, &mesh);
    let plain = || {
        let x = Tensor::from_inner(random(H)).require_grad();
        let y = layers.iter().fold(x.clone(), |x, layer| block(layer, x));
        y.powi_scalar(2).sum().backward()
    };
    let recomputed = || {
        let blocks = Recompute::new(random(H), &mesh);
        let blocks = layers
            .iter()
            .fold(blocks, |blocks, layer| blocks.then(layer, block));
        let mut of_loss = blocks.output().powi_scalar(2).sum().backward();
        blocks.backward(&mut of_loss)
    };
    // gemm's workspace is allocated by the first products of a thread.
    let _ = (peak(plain), peak(recomputed));
    let (plain, recomputed) = (peak(plain), peak(recomputed));
    println!("{LAYERS} layers: {plain} bytes at once, {recomputed} with recompute");
    let balanced = balanced();
    println!("{balanced} with balanced checkpointing");
    // Two values of [T K, F] a layer at least; 1.8 where adapters keep their input and do not ask for it again.
    let hidden = TOKENS * TOP_K * F * F32;
    assert!(plain - balanced > 2 * LAYERS * hidden, "{balanced} bytes");
    // A layer keeps at least the gathered rows [T K, H], gate and up, and what the down projection reads.
    let layer = TOKENS * TOP_K * (H + 3 * F) * F32;
    assert!(
        plain - recomputed > (LAYERS - 2) * layer,
        "{plain} bytes, {recomputed} with recompute: saves less than {} layers of {layer}",
        LAYERS - 2
    );
}

/// With burn's balanced checkpointing.
fn balanced() -> usize {
    type Balanced = Autodiff<Flex, BalancedCheckpointing>;
    let mesh = Mesh::<Balanced>::solo();
    let layers: Vec<_> = (0..LAYERS).map(|k| layer(k, &mesh)).collect();
    let tokens = TokenIds::new(0, 0..TOKENS as u64);
    peak(|| {
        let x = Tensor::<Balanced, 2>::from_inner(random(H)).require_grad();
        let y = layers.iter().fold(x, |x, layer| {
            x.clone() + layer.forward_tokens(x, &tokens, &mesh)
        });
        y.powi_scalar(2).sum().backward()
    })
}

/// What two ranks keep of tokens that each has half of, beside the outputs.
fn a_sequence_parallel_input() {
    let topology = TopologyConfig::new(2).with_tp(2).init().unwrap();
    let base = WeightLayout {
        experts: None,
        d_out: 4,
        d_in: F,
        fragments: 1,
        axis: ShardAxis::Out,
        rank: 0,
        ranks: 2,
    };
    let kept = |again: bool| {
        let bytes = ranks(&mock(topology), topology, |mesh| {
            let (group, device) = (mesh.tp(), Default::default());
            let config = LoraConfig::new(2, 4.0);
            let lora: ColumnLora<B, Tp> = Lora::init("linear", &config, &base, &device).unwrap();
            let x = Tensor::<B, 2>::from_inner(random(F)).require_grad();
            let x = x.narrow(0, 0, TOKENS / 2);
            let sizes = [TOKENS / 2; 2];
            assert!(mesh.all(true));
            let before = NOW.load(Ordering::Relaxed);
            assert!(mesh.all(true));
            let x = group.shard_tokens(x.clone(), &sizes);
            let x = match again {
                true => x.gather_fanout_again(),
                false => x.gather_fanout(),
            };
            let _delta = lora.forward(x, &RowGroups::whole(TOKENS));
            assert!(mesh.all(true));
            let after = NOW.load(Ordering::Relaxed);
            assert!(mesh.all(true));
            after - before
        });
        bytes[0]
    };
    let (plain, again) = (kept(false), kept(true));
    println!("sequence parallel: {plain} bytes kept by two ranks, {again} gathered again");
    let gathered = 2 * TOKENS * F * F32;
    assert!(
        plain - again > gathered / 10 * 9,
        "{plain} and {again} bytes"
    );
}

/// An adapter draws its mask again in backward, where one that reads what a dropout of its own left keeps
/// that.
fn an_adapter_with_dropout() {
    let base = WeightLayout {
        experts: None,
        d_out: F,
        d_in: H,
        fragments: 1,
        axis: ShardAxis::Out,
        rank: 0,
        ranks: 1,
    };
    let config = LoraConfig::new(2, 4.0).with_init_b(Init::Xavier);
    let adapter = |config: LoraConfig| -> ColumnLora<B, ExpertTp> {
        Lora::init("linear", &config, &base, &Default::default()).unwrap()
    };
    let (plain, again) = (
        adapter(config),
        adapter(config.with_dropout(Dropout::before_a(0.1))),
    );
    let rows = RowGroups::whole(TOKENS).with_tokens(TokenIds::new(0, 0..TOKENS as u64));
    let mask = DropoutMask::new(0.1, dropout_key(&config, "linear"), &rows);
    let mask = mask.with_features(std::slice::from_ref(&(0..H)));
    let x = random(H);
    let run = |recompute: bool| {
        let x = Tensor::<B, 2>::from_inner(x.clone()).require_grad();
        let (bytes, delta) = kept(|| match recompute {
            true => again.forward(Group::solo().fanout(x.clone()), &rows),
            false => plain.forward(Group::solo().fanout(dropout(x.clone(), &mask)), &rows),
        });
        let grads = delta.into_tensor().powi_scalar(2).sum().backward();
        let lora = if recompute { &again } else { &plain };
        let [a, b] = [&lora.a.weight, &lora.b.weight].map(|w| gradient(w, &grads).remove(0));
        (bytes, [Matrix::read(x.grad(&grads).unwrap()), a, b])
    };
    // gemm's workspace is allocated by the first products of a thread.
    let _ = (run(false), run(true));
    let ((kept, expected), (recomputed, found)) = (run(false), run(true));
    println!("an adapter: {kept} bytes kept with its dropped input, {recomputed} with recompute");
    assert_eq!(found, expected, "gradients");
    assert!(found.iter().all(|gradient| gradient.magnitude() > 0.1));
    let input = TOKENS * H * F32;
    // burn's hash tables of nodes grow by chance: 272 bytes apart from run to run.
    let tables = 1024;
    assert!(
        kept + tables >= recomputed + input,
        "{kept} bytes, {recomputed} with recompute: saves less than the input's {input}"
    );
}
