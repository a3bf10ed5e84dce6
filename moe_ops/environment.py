"""The record of what computes a call on this machine."""

import platform
from dataclasses import dataclass
from importlib import metadata

import torch

from . import contracts, moe_contracts
from .kernels.cpu_matmul import BLOCK_ROWS, CHUNK_K
from .numerics import LAYERS, PROFILES

_TILES = {
    "reference": "none: one output element at a time",
    "aten": f"{BLOCK_ROWS} rows, {CHUNK_K} k",
    "triton": "by shape, device and T, from the tables of moe_ops.kernels; the bits do not depend on it",
}


@dataclass(frozen=True)
class Provenance:
    """What computes a call, to be compared between machines, a trainer and a rollout for example.

    Attributes:
        backend_requested, backend: the backend asked for (`None` for the preferred one), and the one used.
        profile, reduction, tile: the numeric profile, its reduction order, the tile it runs in.
        device, device_type: the device's name and type.
        threads: the intra-op threads of a CPU; `None` on a GPU.
        torch, triton: versions; triton is `None` where it is not installed.
    """

    backend_requested: str | None
    backend: str
    profile: str
    reduction: str
    tile: str
    device: str
    device_type: str
    threads: int | None
    torch: str
    triton: str | None


def provenance(
    device: torch.device | str = "cpu",
    *,
    profile: str | None = None,
    backend: str | None = None,
    layer: str = "shared_expert_mlp",
) -> Provenance:
    """The record of what a call with these arguments runs for tensors on `device`.

    Args:
        device, profile, backend: as for the layer.
        layer: "shared_expert_mlp", "mega_moe" (fp8 weights) or "mega_moe_bf16".

    Raises:
        ValueError: no such layer, profile or backend.
        NotImplementedError: this build or machine does not have it.
    """
    device = torch.device(device)
    if layer not in LAYERS:
        contracts.fail(
            ValueError,
            "provenance",
            "layer",
            f"one of {contracts.list_names(LAYERS)}",
            repr(layer),
            "Correct it.",
        )
    choice = contracts.choose(layer, "provenance", device, profile, backend)
    if choice.backend == "triton":
        capability = torch.cuda.get_device_capability(device)
        moe_contracts.check_gpu("provenance", choice, capability, torch.version.hip)
    on_cpu = device.type == "cpu"
    return Provenance(
        backend_requested=backend,
        backend=choice.backend,
        profile=choice.profile,
        reduction=PROFILES[choice.profile].reduction,
        tile=_TILES[choice.backend],
        device=_cpu_name() if on_cpu else torch.cuda.get_device_name(device),
        device_type=device.type,
        threads=torch.get_num_threads() if on_cpu else None,
        torch=torch.__version__,
        triton=_version("triton"),
    )


def _cpu_name() -> str:
    return f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}"


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
