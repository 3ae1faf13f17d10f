"""The adapters of `gpu.rs` in PyTorch: eager and under a CUDA graph, on EP x ETP GPUs.

    python3 benches/pytorch.py --out pytorch.jsonl

starts one process a GPU by itself, two in all unless `--ep` and `--etp` say otherwise; under torchrun
each process is a rank. Same shapes, same algebra
and same inputs in rotation as the bench beside it. The scale of the adapters is 1 and is left out.
"""

import argparse
import json
import os
import socket
import statistics
import time

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F

TOKENS, HIDDEN, FFN, RANK, EXPERTS = 4096, 2048, 2688, 32, 4
DTYPE = torch.bfloat16

# `torch._grouped_mm` until it became public.
grouped_mm = getattr(F, "grouped_mm", None) or torch._grouped_mm


class ExpertTp:
    """The expert tensor parallel group of this rank: ranks that are neighbours."""

    def __init__(self, ep, etp):
        # Every rank opens every group.
        groups = [dist.new_group(list(range(k * etp, (k + 1) * etp))) for k in range(ep)]
        ep_rank, self.rank = divmod(dist.get_rank(), etp)
        self.group, self.size = groups[ep_rank], etp


class ReduceFanout(torch.autograd.Function):
    """All-reduce in both directions. Both buffers are fresh products that nobody else holds."""

    @staticmethod
    def forward(ctx, z, tp):
        ctx.tp = tp
        ctx.mark_dirty(z)
        dist.all_reduce(z, group=tp.group)
        return z

    @staticmethod
    def backward(ctx, dz):
        dz = dz.contiguous()
        dist.all_reduce(dz, group=ctx.tp.group)
        return dz, None


class GatherFanout(torch.autograd.Function):
    """All-gather along the features; reduce-scatter backward."""

    @staticmethod
    def forward(ctx, z, tp):
        ctx.tp = tp
        rows, columns = z.shape
        parts = z.new_empty(tp.size * rows, columns)
        dist.all_gather_into_tensor(parts, z.contiguous(), group=tp.group)
        parts = parts.view(tp.size, rows, columns)
        return parts.transpose(0, 1).reshape(rows, tp.size * columns)

    @staticmethod
    def backward(ctx, dz):
        tp, (rows, columns) = ctx.tp, dz.shape
        width = columns // tp.size
        parts = dz.reshape(rows, tp.size, width).transpose(0, 1).contiguous()
        own = dz.new_empty(rows, width)
        dist.reduce_scatter_tensor(own, parts.view(tp.size * rows, width), group=tp.group)
        return own, None


class Embed(torch.autograd.Function):
    """The rank's columns in zeros of full width; its slice backward."""

    @staticmethod
    def forward(ctx, delta, start, width):
        ctx.columns = slice(start, start + delta.shape[1])
        whole = delta.new_zeros(delta.shape[0], width)
        whole[:, ctx.columns] = delta
        return whole

    @staticmethod
    def backward(ctx, dy):
        return dy[:, ctx.columns], None, None


class AddColumns(torch.autograd.Function):
    """`base[:, columns] += delta` in the base's own buffer; the slice backward. PyTorch's own
    backward of an assignment to a slice copies the whole cotangent."""

    @staticmethod
    def forward(ctx, base, delta, start):
        ctx.columns = slice(start, start + delta.shape[1])
        base[:, ctx.columns] += delta
        ctx.mark_dirty(base)
        return base

    @staticmethod
    def backward(ctx, dy):
        # The base comes from a frozen linear; its gradient is dy itself.
        return None, dy[:, ctx.columns], None


class Case:
    """One rank's adapter with sets of inputs to rotate among."""

    def __init__(self, name, down, grouped, in_place, sets, tp, device):
        self.name, self.down, self.in_place, self.tp = name, down, in_place, tp
        self.rank, size = tp.rank, tp.size
        experts = EXPERTS if grouped else 1
        width, delta = (FFN // size, HIDDEN // size) if down else (HIDDEN, FFN // size)
        base = HIDDEN if down else delta
        rank_a = RANK if down else RANK // size

        def factor(rows, columns):
            shape = (experts, rows, columns) if grouped else (rows, columns)
            bound = columns**-0.5
            values = torch.empty(shape, device=device, dtype=DTYPE).uniform_(-bound, bound)
            return values.requires_grad_()

        def randn(columns):
            return [torch.randn(TOKENS, columns, device=device, dtype=DTYPE) for _ in range(sets)]

        self.a, self.b = factor(rank_a, width), factor(delta, RANK)
        self.xs = [x.requires_grad_() for x in randn(width)]
        self.bases, self.cotangents = randn(base), randn(base)
        ends = torch.arange(1, experts + 1, device=device) * (TOKENS // experts)
        self.ends = ends.to(torch.int32) if grouped else None

    def linear(self, x, w):
        if self.ends is None:
            return F.linear(x, w)
        return grouped_mm(x, w.transpose(-2, -1), offs=self.ends)

    def forward(self, k):
        z = self.linear(self.xs[k], self.a)
        if self.tp.size > 1:
            z = (ReduceFanout if self.down else GatherFanout).apply(z, self.tp)
        delta = self.linear(z, self.b)
        base = self.bases[k].detach()
        start = self.rank * delta.shape[1] if self.down else 0
        if self.in_place:
            return AddColumns.apply(base, delta, start)
        if self.down:
            return base + Embed.apply(delta, start, base.shape[1])
        return base + delta

    def both(self, k):
        y = self.forward(k)
        return torch.autograd.grad(y, (self.xs[k], self.a, self.b), self.cotangents[k])


def check(case, device):
    """Output and gradients against the same algebra in f64, all ranks' parts brought together."""
    tp = case.tp
    gathered = lambda x: [x.detach().double() for x in gather_all(x, tp)]
    base = case.bases[0].clone()
    y = case.forward(0).detach().double() - base.double()
    case.bases[0].copy_(base)
    dx, da, db = (g.double() for g in case.both(0))
    case.bases[0].copy_(base)
    xs, aa, bb = gathered(case.xs[0]), gathered(case.a), gathered(case.b)
    dys = gathered(case.cotangents[0])
    experts = EXPERTS if case.ends is not None else 1
    per = TOKENS // experts
    delta = bb[0].shape[-2]
    for e in range(experts):
        rows = slice(e * per, (e + 1) * per)
        pick = lambda w: w[e] if case.ends is not None else w
        a, b = [pick(w) for w in aa], [pick(w) for w in bb]
        # A rank's own x meets its own columns of A (fc2); fc1 has one x for all ranks.
        x = [v[rows] for v in xs]
        if case.down:
            z = sum(v @ w.T for v, w in zip(x, a))
            cut = [slice(k * delta, (k + 1) * delta) for k in range(tp.size)]
            dz = sum(g[rows, c] @ w for g, c, w in zip(dys, cut, b))
            own = dys[case.rank][rows, cut[case.rank]]
            expected_y = torch.zeros(per, HIDDEN, device=device, dtype=torch.float64)
            expected_y[:, cut[case.rank]] = z @ b[case.rank].T
            dz_own = dz
        else:
            z = torch.cat([x[k] @ a[k].T for k in range(tp.size)], 1)
            dz = sum(g[rows] @ w for g, w in zip(dys, b))
            own = dys[case.rank][rows]
            expected_y = z @ b[case.rank].T
            width = RANK // tp.size
            dz_own = dz[:, case.rank * width : (case.rank + 1) * width]
        pairs = {
            "y": (y[rows], expected_y),
            "dx": (dx[rows], dz_own @ a[case.rank]),
            "da": (pick(da), dz_own.T @ x[case.rank]),
            "db": (pick(db), own.T @ z),
        }
        for name, (found, expected) in pairs.items():
            error = ((found - expected).norm() / expected.norm()).item()
            # y is what the delta left in a bf16 base, rounded to the base's steps.
            assert error < 2e-2, f"{case.name} {name} of expert {e}: {error}"


def gather_all(x, tp):
    parts = [torch.empty_like(x) for _ in range(tp.size)]
    dist.all_gather(parts, x.detach().contiguous(), group=tp.group)
    return parts


def times(call, sets, windows, calls):
    """Microseconds a call: median, least and most over windows with one synchronisation each."""
    for k in range(50):
        call(k % sets)
    found = []
    for _ in range(windows):
        torch.cuda.synchronize()
        dist.barrier()
        torch.cuda.synchronize()
        start = time.perf_counter()
        for k in range(calls):
            call(k % sets)
        torch.cuda.synchronize()
        found.append((time.perf_counter() - start) / calls * 1e6)
    return statistics.median(found), min(found), max(found)


def captured(call, sets):
    """One graph a set of inputs, replayed in rotation; each keeps its results in its own memory."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            for k in range(sets):
                call(k)
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graphs, kept = [], []
    for k in range(sets):
        graph = torch.cuda.CUDAGraph()
        # Other threads, such as NCCL's watchdog, may ask the driver meanwhile.
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            kept.append(call(k))
        graphs.append(graph)
    return lambda k: graphs[k].replay(), (graphs, kept)


def copy_bandwidth(device):
    """Bytes a second of a 1 GiB copy, read plus written."""
    source = torch.ones(1 << 30, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    found = []
    for _ in range(8):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(10):
            target.copy_(source)
        end.record()
        end.synchronize()
        found.append(start.elapsed_time(end) * 1e-3)
    return 10 * 2 * (1 << 30) / statistics.median(found[1:])


def run(rank, args):
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", rank)))
    torch.cuda.set_device(device)
    gpus = args.ep * args.etp
    dist.init_process_group("nccl", rank=rank, world_size=gpus, device_id=device)
    tp = ExpertTp(args.ep, args.etp)
    place = {"ep": args.ep, "etp": args.etp, "gpus": gpus}
    torch.manual_seed(args.seed)
    out = open(args.out, "a") if args.out and rank == 0 else None

    def say(line, numbers=None):
        if rank == 0:
            print(line, flush=True)
        if out and numbers:
            out.write(json.dumps({"part": "pytorch", **place, **numbers}) + "\n")
            out.flush()

    bandwidth = copy_bandwidth(device)
    nccl = ".".join(map(str, torch.cuda.nccl.version()))
    say(
        f"PyTorch {torch.__version__}, NCCL {nccl}, {torch.cuda.get_device_name(device)}, "
        f"copy bandwidth {bandwidth / 1e12:.2f} TB/s",
        {"torch": torch.__version__, "nccl": nccl, "copy_bytes_per_s": bandwidth},
    )
    say(
        f"wall time of a call in us, EP = {args.ep}, ETP = {args.etp}; median (least to most) of "
        f"{args.windows} windows of {args.calls} calls over {args.inputs} sets of inputs"
    )
    say(f"{'case':<13}{'base':<10}{'run':<7}{'fwd':>28}{'fwd+bwd':>28}")
    for name, down, grouped in [
        ("one fc2", True, False),
        ("one fc1", False, False),
        ("grouped fc2", True, True),
        ("grouped fc1", False, True),
    ]:
        for in_place in (False, True):
            # The same base and cotangent width on all ranks, other values on each.
            torch.manual_seed(args.seed + rank)
            case = Case(name, down, grouped, in_place, args.inputs, tp, device)
            check(case, device)
            base = "in place" if in_place else ("zero pad" if down else "added")
            for how in ("eager", "graph"):
                rows = []
                for call in (case.forward, case.both):
                    keep = None
                    if how == "graph":
                        call, keep = captured(call, args.inputs)
                    rows.append(times(call, args.inputs, args.windows, args.calls))
                    del keep, call
                text = "".join(f"{m:>10.1f}{f'({lo:.1f} to {hi:.1f})':>18}" for m, lo, hi in rows)
                keys = ("us", "us_least", "us_most")
                numbers = {
                    f"{what}_{key}": value
                    for what, row in zip(("forward", "both"), rows)
                    for key, value in zip(keys, row)
                }
                say(
                    f"{name:<13}{base:<10}{how:<7}{text}",
                    {"case": name, "base": base, "run": how, "inputs": args.inputs, **numbers},
                )
            del case
            torch.cuda.empty_cache()
    dist.barrier()
    torch.cuda.synchronize()
    dist.destroy_process_group()


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--etp", type=int, default=2, help="ranks that an adapter is cut over")
    parser.add_argument("--ep", type=int, default=1, help="such groups at once, each with its own experts")
    parser.add_argument("--calls", type=int, default=300)
    parser.add_argument("--windows", type=int, default=9)
    parser.add_argument("--inputs", type=int, default=4, help="sets of inputs to rotate among")
    parser.add_argument("--seed", type=int, default=int.from_bytes(os.urandom(3)))
    parser.add_argument("--out", help="appends the numbers to this file, a JSON object a line")
    args = parser.parse_args()
    if "RANK" in os.environ:
        run(int(os.environ["RANK"]), args)
        return
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    mp.spawn(run, args=(args,), nprocs=args.ep * args.etp)


if __name__ == "__main__":
    main()
