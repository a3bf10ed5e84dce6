"""Numeric profiles: names for reduction orders. Bits under a name never change; others get another name."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

BACKENDS = ("reference", "aten", "triton", "cuda")


@dataclass(frozen=True)
class NumericProfile:
    """One reduction order and what it promises.

    Attributes:
        name: the name that crosses the operator schemas.
        reduction: how one output element of a matrix product is summed.
        promise: what equals what, bit for bit.
        backends: device type -> the backends of this build that compute the profile there, the preferred one
            first.
    """

    name: str
    reduction: str
    promise: str
    backends: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


PROFILES: Mapping[str, NumericProfile] = {
    profile.name: profile
    for profile in (
        NumericProfile(
            name="fp32-serial-v1",
            reduction="one fp32 accumulator per output, k ascending, each product and each sum rounded",
            promise="equal to the reference oracle on the same device, forward and dX",
            backends={"cpu": ("reference",), "cuda": ("triton", "reference")},
        ),
        NumericProfile(
            name="tc-fp32-v1",
            reduction=(
                "tensor core, one fp32 accumulator over all of K, k ascending, zero-padded to the core's "
                "length (in dX the gate rows, then the up rows); no split-K, no atomics"
            ),
            promise="a row's bits depend on the row alone: not on T, position, neighbours, tile, compilation",
            backends={"cuda": ("triton",)},
        ),
        NumericProfile(
            name="cpu-fp32-v1",
            reduction="fp32 FMAs, k in chunks of 128: ascending from +0 inside a chunk, chunk sums ascending",
            promise="a row's bits do not depend on T, position, neighbours or thread count",
            backends={"cpu": ("aten",)},
        ),
    )
}

DEFAULT_PROFILES: Mapping[str, str] = {"cpu": "cpu-fp32-v1", "cuda": "tc-fp32-v1"}


def profiles(device: torch.device | str | None = None) -> tuple[str, ...]:
    """The names of the numeric profiles.

    Args:
        device: `None` for every profile there is; a device for those that this build computes on its type.

    Returns:
        Profile names, in a fixed order. `PROFILES` in `moe_ops.numerics` holds what each name stands for.
    """
    if device is None:
        return tuple(PROFILES)
    device_type = torch.device(device).type
    return tuple(name for name, profile in PROFILES.items() if profile.backends.get(device_type))
