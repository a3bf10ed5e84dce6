"""What `bench_mega_moe.py` makes of its times: rates, ratios, designed memory, lines, a plot."""

import itertools
import sys
from pathlib import Path
from typing import NamedTuple

BF16_PROFILE = "tc-fp32-v1"
_ROUTING_BLOCK = 256  # slots that one program of the routing counts


class Shape(NamedTuple):
    """Sizes of one layer."""

    hidden: int
    intermediate: int
    experts: int
    top_k: int


def designed_bytes(shape: Shape, tokens: int, name: str, profile: str) -> int:
    """What one pass has to allocate at its peak, results included.

    Forward: h beside the rows of x, or beside the rows of the output and the output. Backward: [dgate | dup],
    the rows of dy (later of dx), the sums for the routing weights, beside the rows of x or dx; y is alive.
    """
    hidden, intermediate, experts, top_k = shape
    rows = tokens * top_k
    x, h = 2 * rows * hidden, 2 * rows * intermediate
    if profile != BF16_PROFILE:
        group = 64 if profile.endswith("k64-v1") else 128
        x = rows * (hidden + 4 * -(-hidden // 128))
        h = rows * (intermediate + 4 * -(-intermediate // group))
    bins = max(32, 1 << (experts + 1).bit_length())
    tables = 4 * (3 * rows + 2 * experts + 1 + -(-rows // _ROUTING_BLOCK) * bins)
    out_rows, result = 2 * rows * hidden, 2 * tokens * hidden
    if name == "forward":
        return tables + h + max(x, out_rows + result)
    dz, sums = 4 * rows * intermediate, 4 * rows * -(-intermediate // 64)
    return tables + result + dz + out_rows + sums + max(x, result + 4 * rows)


def figures(
    shape: Shape, tokens: int, name: str, us: dict[str, float], baselines: set[str], touched: int
) -> dict:
    """What follows from the times: rates, and the ratios to the fastest baseline."""
    passes = 1 if name == "forward" else 2
    products = passes * 3 * shape.hidden * shape.intermediate

    def weight_bytes(key: str) -> int:
        return 1 if key.startswith("fp8") else 2

    best = min(baselines, key=us.__getitem__)
    return {
        "us": us,
        "baselines": sorted(baselines),
        "best_baseline": best,
        "touched_experts": touched,
        "tflops": {key: 2 * tokens * shape.top_k * products / time / 1e6 for key, time in us.items()},
        "gbytes_per_s": {
            key: touched * products * weight_bytes(key) / time / 1e3 for key, time in us.items()
        },
        "ratio": {key: us[best] / time for key, time in us.items() if key not in baselines},
    }


def show(row: dict) -> None:
    print(f"{row['shape']} {row['pass']} T {row['tokens']}  (best baseline: {row['best_baseline']})")
    for key, time in row["us"].items():
        line = f"  {key:<26} {time:9.1f} us {row['tflops'][key]:7.1f} TFLOP/s"
        line += f" {row['gbytes_per_s'][key]:6.0f} GB/s  peak {row['peak_bytes'][key] / 2**20:8.1f} MiB"
        if key in row["ratio"]:
            line += f"  {row['ratio'][key]:.2f}x"
        if key in row["designed_bytes"]:
            line += f"  (design {row['designed_bytes'][key] / 2**20:.1f} MiB)"
        print(line)
    for profile, kernels in row["kernels_us"].items():
        print(f"  kernels of {profile}: " + ", ".join(f"{name} {us:.1f}" for name, us in kernels.items()))
    sys.stdout.flush()


def plot(rows: list[dict], path: Path) -> None:
    """Ratios over T: one row of panels per pass, one column per shape."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    passes, shapes = (list(dict.fromkeys(row[key] for row in rows)) for key in ("pass", "shape"))
    size = (5 * len(shapes), 3.5 * len(passes))
    figure, axes = plt.subplots(
        len(passes), len(shapes), figsize=size, sharex=True, sharey=True, squeeze=False
    )
    for axis, (name, shape) in zip(axes.flat, itertools.product(passes, shapes), strict=True):
        chosen = [row for row in rows if (row["pass"], row["shape"]) == (name, shape)]
        for key in chosen[0]["ratio"]:
            points = [(row["tokens"], row["ratio"][key]) for row in chosen]
            axis.plot(*zip(*points, strict=True), marker="o", label=key)
        axis.set(title=f"{shape}, {name.replace('_dx', ' + dX')}", xscale="log", xlabel="T")
        axis.axhline(1, color="black", linewidth=0.5)
        axis.legend(fontsize=7)
        axis.set_ylabel("fastest baseline / ours")
    figure.savefig(path, bbox_inches="tight", dpi=120)
