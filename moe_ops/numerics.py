"""Numeric profiles: names for reduction orders. Bits under a name never change; others get another name."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

BACKENDS = ("reference", "aten", "triton", "cuda")


@dataclass(frozen=True)
class NumericProfile:
    """One reduction order and what it promises.

    Attributes:
        name: the name that crosses the operator schemas.
        reduction: how one output element of a matrix product is summed.
        promise: what equals what, bit for bit.
    """

    name: str
    reduction: str
    promise: str


_ROW_PROMISE = "a row's bits depend on the row alone: not on T, position, neighbours, tile, compilation"
_EXACT_PROMISE = "the same bits on CPU and CUDA, for every T"


def _fp8_profile(name: str, group: int, partial: str, promise: str) -> NumericProfile:
    reduction = (
        f"e4m3 codes; k blocks of 128 in the first product and of {group} in the second, ascending: "
        f"{partial} from +0, then acc = fma(partial, scale, acc)"
    )
    return NumericProfile(name, reduction, promise)


PROFILES: Mapping[str, NumericProfile] = {
    profile.name: profile
    for profile in (
        NumericProfile(
            name="fp32-serial-v1",
            reduction="one fp32 accumulator per output, k ascending, each product and each sum rounded",
            promise="equal to the reference oracle on the same device, forward and dX",
        ),
        NumericProfile(
            name="tc-fp32-v1",
            reduction=(
                "tensor core, one fp32 accumulator over all of K, k ascending, zero-padded to the core's "
                "length (in dX the gate rows, then the up rows); no split-K, no atomics"
            ),
            promise=_ROW_PROMISE,
        ),
        NumericProfile(
            name="cpu-fp32-v1",
            reduction="fp32 FMAs, k in chunks of 128: ascending from +0 inside a chunk, chunk sums ascending",
            promise="a row's bits do not depend on T, position, neighbours or thread count",
        ),
        _fp8_profile("fp8-k128-k64-v1", 64, "a tensor-core partial (sm_90 wgmma)", _ROW_PROMISE),
        _fp8_profile("fp8-k128-k128-v1", 128, "a tensor-core partial (sm_90 wgmma)", _ROW_PROMISE),
        _fp8_profile("exact-fp8-k128-k64-v1", 64, "the exact sum, rounded once,", _EXACT_PROMISE),
        _fp8_profile("exact-fp8-k128-k128-v1", 128, "the exact sum, rounded once,", _EXACT_PROMISE),
    )
}

FP8_GROUPS: Mapping[str, int] = {
    "fp8-k128-k64-v1": 64,
    "fp8-k128-k128-v1": 128,
    "exact-fp8-k128-k64-v1": 64,
    "exact-fp8-k128-k128-v1": 128,
}
"""Columns of a scale group of the activation between the two products, by FP8 profile."""

_EXACT = {"exact-fp8-k128-k64-v1": ("reference",), "exact-fp8-k128-k128-v1": ("reference",)}

LAYERS: Mapping[str, Mapping[str, Mapping[str, tuple[str, ...]]]] = {
    "shared_expert_mlp": {
        "cpu": {"cpu-fp32-v1": ("aten",), "fp32-serial-v1": ("reference",)},
        "cuda": {"tc-fp32-v1": ("triton",), "fp32-serial-v1": ("triton", "reference")},
    },
    "mega_moe": {
        "cpu": _EXACT,
        "cuda": {"fp8-k128-k64-v1": ("triton",), "fp8-k128-k128-v1": ("triton",), **_EXACT},
    },
    "mega_moe_bf16": {
        "cpu": {"cpu-fp32-v1": ("aten",), "fp32-serial-v1": ("reference",)},
        "cuda": {"tc-fp32-v1": ("triton",), "fp32-serial-v1": ("reference",)},
    },
}
"""Layer -> device type -> the profiles of this build, the default first -> backends, the preferred first.

`mega_moe` is the MoE layer with fp8 weights, `mega_moe_bf16` the one with bf16 weights.
"""


def profiles(device: torch.device | str | None = None, layer: str | None = None) -> tuple[str, ...]:
    """The names of the numeric profiles.

    Args:
        device: `None` for every profile there is; a device for those that this build computes on its type.
        layer: `None` for those of any layer, or "shared_expert_mlp", "mega_moe" (fp8 weights),
            "mega_moe_bf16". With a device and a layer the default comes first.

    Returns:
        Profile names, in a fixed order. `PROFILES` in `moe_ops.numerics` holds what each name stands for.

    Raises:
        ValueError: no such layer.
    """
    if layer is not None and layer not in LAYERS:
        raise ValueError(
            f"moe_ops.profiles: layer must be None or one of {', '.join(LAYERS)}; got {layer!r}. "
            "Correct the name."
        )
    if device is None and layer is None:
        return tuple(PROFILES)
    layers = [LAYERS[layer]] if layer is not None else list(LAYERS.values())
    kinds = [torch.device(device).type] if device is not None else ["cpu", "cuda"]
    names = [name for table in layers for kind in kinds for name in table.get(kind, {})]
    if device is not None and layer is not None:
        return tuple(names)
    return tuple(name for name in PROFILES if name in names)
