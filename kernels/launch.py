"""The one place where kernels are launched, and what is known of the device that runs them."""

import functools
from typing import NamedTuple

import torch
import triton
from triton.runtime.jit import JITFunction

TRITON = tuple(int(part) for part in triton.__version__.split(".")[:2])
"""Its version, (major, minor)."""


class DeviceFacts(NamedTuple):
    """capability: (major, minor); shared_memory: bytes a block may use."""

    capability: tuple[int, int]
    multiprocessors: int
    shared_memory: int

    @property
    def has_tma(self) -> bool:
        return self.capability >= (9, 0)


@functools.cache
def device_facts(device: torch.device) -> DeviceFacts:
    """The facts of a CUDA device."""
    properties = torch.cuda.get_device_properties(device)
    return DeviceFacts(
        (properties.major, properties.minor),
        properties.multi_processor_count,
        properties.shared_memory_per_block_optin,
    )


def launch(kernel: JITFunction, grid: tuple[int, ...], *arguments, **options) -> None:
    """Launch on the current stream of the current device."""
    kernel[grid](*arguments, **options)
