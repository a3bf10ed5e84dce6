"""Times RMSNorm -> shared expert -> + residual, compiled: our lowerings, our opaque calls, plain torch.

    python examples/benchmarks/bench_compiled_block.py [--tokens 1 64] [--json FILE]

Two figures of each: one call replayed as a CUDA graph after a flush of L2, and a call as Python makes it,
many in a row. "dynamic" is the lowered graph that serves every T. The plain MLP has a packed gate-up weight,
frozen as ours are. No figure is printed before the correctness gate has passed.
"""

import argparse
import json
import sys
import time
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import moe_ops
from moe_ops.testing import bits_equal, shared_expert_inputs
from moe_ops.testing.benchmark import capture, card, time_graphs

PASSES = ("forward", "forward_dx")
OURS = ("lowered", "dynamic", "opaque")
CALLS = 50


class PlainMLP(nn.Module):
    """The same layer as a user of torch writes it."""

    def __init__(self, w_gate: Tensor, w_up: Tensor, w_down: Tensor) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.cat((w_gate, w_up)), requires_grad=False)
        self.down_proj = nn.Parameter(w_down.clone(), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        g, u = F.linear(x, self.gate_up_proj).chunk(2, -1)
        return F.linear(F.silu(g) * u, self.down_proj)


class Block(nn.Module):
    def __init__(self, mlp: nn.Module, hidden: int) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(hidden, dtype=torch.bfloat16).requires_grad_(False)
        self.mlp = mlp

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The output, and what the MLP got: Inductor's RMSNorm may differ from graph to graph."""
        normed = self.norm(x)
        return x + self.mlp(normed), normed


def make_blocks(hidden: int, intermediate: int, tokens: int) -> tuple[Block, Block, Tensor, Tensor]:
    """(ours, plain, x, dy)."""
    inputs = shared_expert_inputs(tokens, hidden, intermediate, device="cuda")
    ours = moe_ops.SharedExpertMLP(hidden, intermediate)
    for name, weight in zip(("gate_proj", "up_proj", "down_proj"), inputs.weights, strict=True):
        ours.get_submodule(name).weight.copy_(weight)
    blocks = (Block(mlp, hidden).cuda() for mlp in (ours, PlainMLP(*inputs.weights)))
    return *blocks, inputs.x, inputs.dy


def measure(ours: Block, plain: Block, x: Tensor, dy: Tensor, name: str) -> dict:
    """One row: every kind of one pass at one T."""
    if name == "forward_dx":
        x = x.detach().clone().requires_grad_()
    graphs, results, called, counts = {}, {}, {}, {}
    for kind in (*OURS, "plain"):
        torch.compiler.reset()  # kinds of one module would share what is compiled
        moe_ops.use_lowerings(kind != "opaque")
        call = compiled(plain if kind == "plain" else ours, x, dy, name, dynamic=kind == "dynamic")
        results[kind] = call()
        graphs[kind], called[kind], counts[kind] = capture(call), time_calls(call), kernels(call)
    moe_ops.use_lowerings(True)
    check(results, ours, x, name)
    us = time_graphs(graphs)
    return {
        "block": "shared expert",
        "pass": name,
        "hidden": x.shape[1],
        "intermediate": ours.mlp.intermediate_size,
        "tokens": len(x),
        "us": us,
        "us_called": called,
        "kernels": counts,
        "ratio": {kind: value / us["lowered"] for kind, value in us.items() if kind != "lowered"},
    }


def compiled(block: Block, x: Tensor, dy: Tensor, name: str, *, dynamic: bool):
    """The call of one pass, without arguments."""
    module = torch.compile(block, fullgraph=True, dynamic=dynamic)
    if dynamic and len(x) > 1:  # T = 1 is always a graph of its own
        torch._dynamo.mark_dynamic(x, 0)

    def forward() -> tuple[Tensor, ...]:
        with torch.no_grad():
            return module(x)

    def forward_dx() -> tuple[Tensor, ...]:
        y, normed = module(x)
        return y.detach(), normed.detach(), torch.autograd.grad(y, x, dy)[0]

    return forward if name == "forward" else forward_dx


def check(results: dict[str, tuple[Tensor, ...]], ours: Block, x: Tensor, name: str) -> None:
    """The gate: the bits of the eager layer on what the compiled one got, and everything near plain torch."""
    for kind in OURS:
        y, normed = results[kind][:2]
        with torch.no_grad():
            if not bits_equal(y, x + ours.mlp(normed)):
                raise SystemExit(f"RED: {name}: {kind} is not the eager layer")
        for value, plain in zip(results[kind], results["plain"], strict=True):
            if not (value.float() - plain.float()).norm() <= 2e-2 * plain.float().norm():
                raise SystemExit(f"RED: {name}: {kind} is far from plain torch")


def kernels(call) -> int:
    """How many kernels one call launches."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        call()
        torch.cuda.synchronize()
    return sum(event.count for event in profile.key_averages() if event.device_time_total > 0)


def time_calls(call) -> float:
    """Microseconds of a call as Python makes it, the mean of many in a row."""
    call()
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(CALLS):
        call()
    torch.cuda.synchronize()
    return (time.perf_counter() - start) / CALLS * 1e6


def show(row: dict) -> None:
    cells = (
        f"{kind} {us:.1f} us ({row['us_called'][kind]:.0f} called), {row['kernels'][kind]} kernels"
        for kind, us in row["us"].items()
    )
    print(f"{row['pass']:<10} T {row['tokens']:>5}  {'  |  '.join(cells)}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--shape", default="4096x2048", help="H x I")
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 16, 64, 256, 1024, 8192])
    parser.add_argument("--json", type=Path, help="write all figures there")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("needs a CUDA device", file=sys.stderr)
        return 1
    print(*card(), sep=", ", flush=True)
    hidden, intermediate = map(int, arguments.shape.split("x"))
    with torch.no_grad():
        ours, plain, x, dy = make_blocks(hidden, intermediate, max(arguments.tokens))
    rows = []
    for name in PASSES:
        for tokens in arguments.tokens:
            rows.append(measure(ours, plain, x[:tokens], dy[:tokens], name))
            show(rows[-1])
            if arguments.json:
                report = {"card": card()._asdict(), "rows": rows}
                arguments.json.write_text(json.dumps(report, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
