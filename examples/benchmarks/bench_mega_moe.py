"""Times the MoE layer on a GPU: forward, forward + dX, fp8 profiles; beside grouped products of plain torch.

    python examples/benchmarks/bench_mega_moe.py [--quick] [--shapes flash] [--tokens 8 512] [--json FILE]

Everything is replayed as a CUDA graph after a flush of L2, in rotated order; figures are medians. Ours takes
x in bf16 or as a quantised pair ("pair"); forward + dX also gives the gradient of the routing weights. The
baselines (`moe_baselines.py`) sort rows by expert: bf16 `grouped_mm`, eager and `torch.compile`, and its
autograd; fp8 `_scaled_grouped_mm` with a scale per row. A ratio is the fastest baseline / ours, above 1 where
ours is faster. Our kernels are also timed alone, in the order of their launches. TFLOP/s count 2 * T *
top_k * 3 * H * I forward and twice that for forward + dX; GB/s the weights of experts that have rows, read
once for each of the two. No figure is printed before the correctness gate has passed.
"""

import argparse
import functools
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from moe_baselines import grouped_layer, grouped_layer_dx, rowwise_layer, rowwise_weights
from moe_report import BF16_PROFILE, Shape, designed_bytes, figures, plot, show
from torch import Tensor

import moe_ops
from moe_ops.testing import MegaMoEInputs, bits_equal, mega_moe_inputs
from moe_ops.testing.benchmark import capture, card, peak_bytes, time_graphs

OPS = torch.ops.moe_ops
PROFILES = ("fp8-k128-k64-v1", "fp8-k128-k128-v1")
Calls = dict[str, Callable[[], object]]


SHAPES = {
    "flash": Shape(4096, 2048, 32, 6),
    "pro": Shape(7168, 3072, 48, 6),
    "fine": Shape(2048, 768, 128, 8),
}
TOKENS = (1, 8, 64, 256, 512, 2048, 8192)
QUICK = {"shapes": ["flash"], "tokens": [8, 512, 8192]}


class Layer(NamedTuple):
    """One layer's inputs and its weights in every format."""

    inputs: MegaMoEInputs
    bf16: tuple[Tensor, Tensor]
    rowwise: tuple[Tensor, ...]

    def weights(self, profile: str) -> tuple[Tensor | None, ...]:
        return (self.bf16[0], None, self.bf16[1], None) if profile == BF16_PROFILE else self.inputs.weights

    def head(self, tokens: int) -> "Layer":
        names = ("x", "dy", "topk_idx", "topk_weights")
        fewer = {name: getattr(self.inputs, name)[:tokens] for name in names}
        return self._replace(inputs=self.inputs._replace(**fewer))


def make_layer(shape: Shape, tokens: int, device: str = "cuda") -> Layer:
    """Weights are drawn on the device, expert by expert; the bf16 ones are the fp8 ones, dequantised."""
    inputs = mega_moe_inputs(tokens, *shape, device=device)
    pairs = (inputs.w_gate_up, inputs.w_gate_up_scale), (inputs.w_down, inputs.w_down_scale)
    bf16 = tuple(dequantized(*pair) for pair in pairs)
    return Layer(inputs, bf16, tuple(part for w in bf16 for part in rowwise_weights(w)))


def dequantized(codes: Tensor, scales: Tensor) -> Tensor:
    """[E, N, K] bf16, expert by expert."""
    value = torch.empty_like(codes, dtype=torch.bfloat16)
    for expert in range(len(codes)):
        value[expert] = moe_ops.dequantize_weights_block(codes[expert], scales[expert])
    return value


def routed(inputs: MegaMoEInputs) -> tuple[Tensor, Tensor, Tensor]:
    return inputs.x, inputs.topk_idx, inputs.topk_weights


def our_forward(layer: Layer, profile: str, pair: tuple[Tensor, Tensor] | None = None) -> Tensor:
    x, *routing = routed(layer.inputs)
    return OPS._mega_moe(*(pair or (x, None)), *routing, *layer.weights(profile), profile=profile)[0]


def our_dx(layer: Layer, profile: str) -> tuple[Tensor, Tensor]:
    x, *routing = routed(layer.inputs)
    weights = layer.weights(profile)
    return OPS._mega_moe_dx_dweights(layer.inputs.dy, x, None, *routing, *weights, profile=profile)


def our_forward_dx(layer: Layer, profile: str) -> tuple[Tensor, Tensor, Tensor]:
    return our_forward(layer, profile), *our_dx(layer, profile)


def distance(actual: Tensor, expected: Tensor) -> float:
    """1 - 2 <x, y> / (<x, x> + <y, y>): 0 for equal tensors."""
    x, y = actual.double(), expected.double()
    return (1 - 2 * (x * y).sum() / ((x * x).sum() + (y * y).sum())).item()


def check(layer: Layer, profiles: list[str]) -> None:
    """The gate: near the bf16 layer of the same quantised values, and rows with the bits they have alone."""
    inputs = layer.inputs
    quantised = moe_ops.dequantize_activations(*moe_ops.quantize_activations(inputs.x)).bfloat16()
    for profile in profiles:
        x = inputs.x if profile == BF16_PROFILE else quantised
        expected = grouped_layer_dx(inputs.dy, x, inputs.topk_idx, inputs.topk_weights, *layer.bf16)
        batch = our_forward_dx(layer, profile)
        for name, ours, plain in zip(("y", "dx", "d topk_weights"), batch, expected, strict=True):
            if not distance(ours, plain) < 1e-3:
                raise SystemExit(f"RED: {profile}: {name} is {distance(ours, plain):.1e} from plain bf16")
        for tokens in (1, 8):
            alone = our_forward_dx(layer.head(tokens), profile)
            if not all(bits_equal(a, b[:tokens]) for a, b in zip(alone, batch, strict=True)):
                raise SystemExit(f"RED: {profile}: bits change with the batch, T {tokens}, {len(x)}")
        if profile != BF16_PROFILE:
            pair = moe_ops.quantize_activations(inputs.x)
            if not bits_equal(our_forward(layer, profile, pair), batch[0]):
                raise SystemExit(f"RED: {profile}: a quantised pair gives other bits than its x")


def kernel_times(function: Callable[[], object]) -> dict[str, float]:
    """Microseconds of each of our launches, replayed alone, by number and kernel."""
    from moe_ops.kernels import moe_backward, moe_dispatch, moe_forward, moe_routing

    modules = (moe_backward, moe_dispatch, moe_forward, moe_routing)
    launch, launches = moe_forward.launch, []

    def record(*arguments, **options):
        launches.append((arguments, options))
        launch(*arguments, **options)

    for module in modules:
        module.launch = record
    try:
        function()
    finally:
        for module in modules:
            module.launch = launch
    graphs = {}
    for index, (arguments, options) in enumerate(launches):
        name = arguments[0].__name__.removeprefix("_moe_").removesuffix("_kernel")
        graphs[f"{index} {name}"] = capture(lambda a=arguments, o=options: launch(*a, **o), 1)
    return time_graphs(graphs, repeats=9)


def calls_of(layer: Layer, name: str, profiles: list[str], compiled: bool) -> tuple[Calls, Calls]:
    """(ours, baselines) of one pass, without arguments."""
    inputs = layer.inputs
    arguments = routed(inputs)
    grouped = torch.compile(grouped_layer, fullgraph=True)
    if name == "forward_dx":
        ours = {profile: lambda p=profile: our_forward_dx(layer, p) for profile in profiles}
        plain = functools.partial(grouped_layer_dx, inputs.dy, *arguments, *layer.bf16)
        others = {"grouped_mm": plain}
        if compiled:
            others["grouped_mm compiled"] = functools.partial(plain, layer=grouped)
        return ours, others
    ours = {profile: lambda p=profile: our_forward(layer, p) for profile in profiles}
    pair = moe_ops.quantize_activations(inputs.x)
    fp8 = [profile for profile in profiles if profile != BF16_PROFILE]
    ours |= {f"{profile} pair": lambda p=profile: our_forward(layer, p, pair) for profile in fp8}
    others = {
        "grouped_mm": lambda: grouped_layer(*arguments, *layer.bf16),
        "fp8 rowwise": lambda: rowwise_layer(*arguments, *layer.rowwise),
    }
    if compiled:
        others["grouped_mm compiled"] = lambda: grouped(*arguments, *layer.bf16)
    return ours, {key: call for key, call in others.items() if not key.startswith("fp8") or runs(key, call)}


def runs(name: str, call: Callable[[], object]) -> bool:
    """Whether this build of torch can compute an fp8 baseline; prints why not."""
    try:
        call()
    except (RuntimeError, ValueError, TypeError, AttributeError) as error:
        print(f"no baseline '{name}': {str(error).splitlines()[0][:200]}", flush=True)
        return False
    return True


def measure(shape_name: str, layer: Layer, name: str, profiles: list[str], compiled: bool) -> dict:
    """One row: every implementation of one pass at one shape and T."""
    shape, tokens = SHAPES[shape_name], len(layer.inputs.x)
    ours, others = calls_of(layer, name, profiles, compiled)
    us = time_graphs({key: capture(call) for key, call in (ours | others).items()})
    touched = len(layer.inputs.topk_idx.unique())
    peaks = {key: peak_bytes(call) for key, call in (ours | others).items()}
    kernels = {profile: kernel_times(ours[profile]) for profile in profiles[:1]}
    return (
        {"shape": shape_name, "pass": name, "tokens": tokens, **shape._asdict()}
        | figures(shape, tokens, name, us, set(others), touched)
        | {
            "peak_bytes": peaks,
            "designed_bytes": {p: designed_bytes(shape, tokens, name, p) for p in profiles},
            "kernels_us": kernels,
        }
    )


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--tokens", type=int, nargs="+", default=list(TOKENS))
    parser.add_argument("--profiles", nargs="+", choices=(*PROFILES, BF16_PROFILE), default=list(PROFILES))
    parser.add_argument("--skip-compiled", action="store_true", help="no torch.compile baselines")
    parser.add_argument("--quick", action="store_true", help=f"the same as {QUICK}")
    parser.add_argument("--json", type=Path, help="write all figures there")
    parser.add_argument("--plot", type=Path, help="draw the ratios there (needs matplotlib)")
    chosen = parser.parse_args(arguments)
    if chosen.quick:
        vars(chosen).update(QUICK)
    return chosen


@torch.no_grad()
def main() -> int:
    arguments = parse_arguments()
    if not torch.cuda.is_available():
        print("needs a CUDA device", file=sys.stderr)
        return 1
    print(*card(), sep=", ", flush=True)
    rows = []
    for shape_name in arguments.shapes:
        layer = make_layer(SHAPES[shape_name], max(*arguments.tokens, 256))
        check(layer.head(2048), arguments.profiles)
        torch._dynamo.reset()
        for name in ("forward", "forward_dx"):
            for tokens in arguments.tokens:
                few = layer.head(tokens)
                row = measure(shape_name, few, name, arguments.profiles, not arguments.skip_compiled)
                rows.append(row)
                show(row)
                if arguments.json:
                    report = {"card": card()._asdict(), "rows": rows}
                    arguments.json.write_text(json.dumps(report, indent=1))
        del layer, few
        torch.cuda.empty_cache()
    if arguments.plot:
        plot(rows, arguments.plot)
    return 0


if __name__ == "__main__":
    sys.exit(main())
