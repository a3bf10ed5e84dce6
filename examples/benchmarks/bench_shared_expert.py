"""Times the shared expert on a GPU: forward, dX, forward + dX; fast and strict; beside plain torch.

    python examples/benchmarks/bench_shared_expert.py [--shapes 4096x2048] [--tokens 1 64] [--json FILE]

Everything is replayed as a CUDA graph. Two figures: one call after a flush of L2, and, as in decoding, the
time of a layer in a graph of several layers with different weights. The baselines are a plain MLP with a
packed gate-up weight and the gradient of x that a user of frozen weights would write (g and u computed again,
or kept in forward + dX): eager, `torch.compile`, and `torch.compile(mode="max-autotune-no-cudagraphs")`. A
ratio is baseline / ours, above 1 where ours is faster. No figure is printed before the correctness gate has
passed.
"""

import argparse
import json
import sys
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

import moe_ops
from moe_ops.testing import SharedExpertInputs, bits_equal, shared_expert_inputs
from moe_ops.testing.benchmark import capture, card, peak_bytes, time_graphs

OPS = torch.ops.moe_ops
FAST, STRICT = "tc-fp32-v1", "fp32-serial-v1"
PASSES = ("forward", "dx", "forward_dx")
COMPILE_MODES = {"compile": None, "max-autotune": "max-autotune-no-cudagraphs"}
WEIGHT_BYTES = 300 << 20  # of all layers in one graph: several times L2


def plain_forward(x: Tensor, dy: Tensor, w_gate_up: Tensor, w_down: Tensor) -> Tensor:
    g, u = F.linear(x, w_gate_up).chunk(2, -1)
    return F.linear(F.silu(g) * u, w_down)


def plain_dx(x: Tensor, dy: Tensor, w_gate_up: Tensor, w_down: Tensor) -> Tensor:
    return _plain_backward(*F.linear(x, w_gate_up).chunk(2, -1), dy, w_gate_up, w_down)


def plain_forward_dx(x: Tensor, dy: Tensor, w_gate_up: Tensor, w_down: Tensor) -> tuple[Tensor, Tensor]:
    g, u = F.linear(x, w_gate_up).chunk(2, -1)
    return F.linear(F.silu(g) * u, w_down), _plain_backward(g, u, dy, w_gate_up, w_down)


def _plain_backward(g: Tensor, u: Tensor, dy: Tensor, w_gate_up: Tensor, w_down: Tensor) -> Tensor:
    dh, sigmoid = dy @ w_down, torch.sigmoid(g)
    silu = g * sigmoid
    return torch.cat((dh * u * (sigmoid * (1 + g * (1 - sigmoid))), dh * silu), 1) @ w_gate_up


def our_forward(x: Tensor, dy: Tensor, *weights: Tensor, profile: str) -> Tensor:
    return OPS.shared_expert_mlp(x, *weights, profile=profile)


def our_dx(x: Tensor, dy: Tensor, *weights: Tensor, profile: str) -> Tensor:
    return OPS._shared_expert_mlp_dx(dy, x, *weights, profile=profile)


def our_forward_dx(x: Tensor, dy: Tensor, *weights: Tensor, profile: str) -> tuple[Tensor, Tensor]:
    y, g, u = OPS._shared_expert_mlp_save(x, *weights, profile=profile)
    return y, OPS._shared_expert_mlp_dx_saved(dy, g, u, *weights, profile=profile)


PLAIN = {"forward": plain_forward, "dx": plain_dx, "forward_dx": plain_forward_dx}
OURS = {"forward": our_forward, "dx": our_dx, "forward_dx": our_forward_dx}
# Multiples of T * H * I: dX computes g and u again, forward + dX keeps them.
FLOPS = {"forward": 6, "dx": 10, "forward_dx": 12}
ROWS = {"forward": 2, "dx": 3, "forward_dx": 4}  # activations read or written once, of H each


def check(inputs: SharedExpertInputs) -> None:
    """The gate: the oracle's bits (strict), rows alone with the bits they have in the batch, and fp64."""
    x, dy, *weights = inputs
    few = slice(0, 16)
    y, dx = our_forward_dx(x, dy, *weights, profile=FAST)
    wide = [value.double() for value in (x[few], dy[few], torch.cat(weights[:2]), weights[2])]
    exact = plain_forward_dx(*wide)
    plain = plain_forward_dx(x[few], dy[few], torch.cat(weights[:2]), weights[2])
    for name, ours, bf16, fp64 in zip(("y", "dx"), (y, dx), plain, exact, strict=True):
        if not (ours[few].double() - fp64).norm() <= 2 * (bf16.double() - fp64).norm():
            raise SystemExit(f"RED: {name} is further from fp64 than twice plain bf16")
    for rows in (1, 16, 100):
        alone = (
            our_forward(x[:rows], dy[:rows], *weights, profile=FAST),
            our_dx(x[:rows], dy[:rows], *weights, profile=FAST),
        )
        if not all(bits_equal(a, b[:rows]) for a, b in zip(alone, (y, dx), strict=True)):
            raise SystemExit(f"RED: bits change with the batch, T {rows} against {len(x)}")
    strict = our_forward_dx(x[few], dy[few], *weights, profile=STRICT)
    oracle = (
        moe_ops.shared_expert_mlp_reference(x[few], *weights),
        moe_ops.shared_expert_mlp_dx_reference(dy[few], x[few], *weights),
    )
    if not all(map(bits_equal, strict, oracle)):
        raise SystemExit("RED: the strict profile is not the oracle")


def measure(x, dy, layers, packed, name: str, modes: list[str]) -> dict:
    """One row: every implementation of one pass at one shape and T."""
    rows = {profile: _bound(OURS[name], x, dy, layers, profile=profile) for profile in (FAST, STRICT)}
    rows["eager"] = _bound(PLAIN[name], x, dy, packed)
    for mode in modes:
        torch._dynamo.reset()
        compiled = torch.compile(PLAIN[name], dynamic=False, mode=COMPILE_MODES[mode])
        rows[mode] = _bound(compiled, x, dy, packed)
    once = time_graphs({key: capture(calls[0]) for key, calls in rows.items()})
    del rows[STRICT]
    several = time_graphs(
        {key: capture(lambda calls=calls: [call() for call in calls]) for key, calls in rows.items()},
        flush=False,
        repeats=9,
    )
    tokens, hidden, intermediate = *x.shape, layers[0][0].shape[0]
    flops = FLOPS[name] * tokens * hidden * intermediate
    traffic = 6 * hidden * intermediate + 2 * ROWS[name] * tokens * hidden
    return {
        "pass": name,
        "hidden": hidden,
        "intermediate": intermediate,
        "tokens": tokens,
        "us": once,
        "us_per_layer": {key: value / len(layers) for key, value in several.items()},
        "tflops": {key: flops / value / 1e6 for key, value in once.items()},
        "gbytes_per_s": {key: traffic / value / 1e3 for key, value in once.items()},
        "peak_bytes": {key: peak_bytes(calls[0]) for key, calls in rows.items()},
        "ratio": {key: value / once[FAST] for key, value in once.items() if key != FAST},
        "ratio_per_layer": {k: v / several[FAST] for k, v in several.items() if k != FAST},
    }


def _bound(function, x, dy, layers, **options):
    """The calls of all layers, without arguments."""
    return [lambda weights=weights: function(x, dy, *weights, **options) for weights in layers]


def show(row: dict) -> None:
    us, ratio = row["us"], row["ratio"]
    others = "  ".join(
        f"{key} {us[key]:.1f} ({ratio[key]:.2f}x; layers {row['ratio_per_layer'][key]:.2f}x)"
        for key in us
        if key not in (FAST, STRICT)
    )
    print(
        f"{row['hidden']}x{row['intermediate']} {row['pass']:<10} T {row['tokens']:>5}  {us[FAST]:8.1f} us "
        f"{row['tflops'][FAST]:6.1f} TFLOP/s {row['gbytes_per_s'][FAST]:6.0f} GB/s "
        f"peak {row['peak_bytes'][FAST] / 2**20:7.1f} MiB  layers {row['us_per_layer'][FAST]:7.1f} us  |  "
        f"{others}  |  strict {us[STRICT]:.0f} us {row['tflops'][STRICT]:.1f} TFLOP/s",
        flush=True,
    )


def plot(rows: list[dict], path: Path) -> None:
    """Ratios over T, one panel per pass."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, panels = plt.subplots(1, len(PASSES), figsize=(15, 4), sharey=True)
    shapes = sorted({(row["hidden"], row["intermediate"]) for row in rows})
    for panel, name in zip(panels, PASSES, strict=True):
        for shape in shapes:
            chosen = [r for r in rows if r["pass"] == name and (r["hidden"], r["intermediate"]) == shape]
            for key in sorted({key for row in chosen for key in row["ratio"]} - {STRICT}):
                points = [(row["tokens"], row["ratio"][key]) for row in chosen if key in row["ratio"]]
                panel.plot(*zip(*points, strict=True), marker="o", label=f"{key}, {shape[0]} x {shape[1]}")
        panel.set(title=name.replace("_", " + "), xscale="log", xlabel="T", ylabel="baseline / ours")
        panel.axhline(1, color="black", linewidth=0.5)
    panels[0].legend(fontsize=7)
    figure.savefig(path, bbox_inches="tight", dpi=120)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--shapes", nargs="+", default=["4096x2048", "7168x2048", "2048x768"], help="H x I")
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 16, 64, 256, 1024, 2048, 8192])
    parser.add_argument("--passes", nargs="+", choices=PASSES, default=list(PASSES))
    parser.add_argument("--compile-modes", nargs="*", choices=COMPILE_MODES, default=list(COMPILE_MODES))
    parser.add_argument("--json", type=Path, help="write all figures there")
    parser.add_argument("--plot", type=Path, help="draw the ratios there (needs matplotlib)")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("needs a CUDA device", file=sys.stderr)
        return 1
    print(*card(), sep=", ", flush=True)
    rows = []
    for shape in arguments.shapes:
        hidden, intermediate = map(int, shape.split("x"))
        inputs = shared_expert_inputs(max(*arguments.tokens, 256), hidden, intermediate, device="cuda")
        with torch.no_grad():
            check(inputs)
            count = max(2, -(-WEIGHT_BYTES // (6 * hidden * intermediate)))
            layers = [tuple(weight.clone() for weight in inputs.weights) for _ in range(count)]
            packed = [(torch.cat(weights[:2]), weights[2]) for weights in layers]
            for name in arguments.passes:
                for tokens in arguments.tokens:
                    x, dy = inputs.x[:tokens], inputs.dy[:tokens]
                    rows.append(measure(x, dy, layers, packed, name, arguments.compile_modes))
                    show(rows[-1])
                    if arguments.json:
                        report = {"card": card()._asdict(), "rows": rows}
                        arguments.json.write_text(json.dumps(report, indent=1))
    if arguments.plot:
        plot(rows, arguments.plot)
    return 0


if __name__ == "__main__":
    sys.exit(main())
