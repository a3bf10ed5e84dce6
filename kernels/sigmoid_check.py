"""Whether the kernels' sigmoid is `torch.sigmoid` on this machine, bit for bit."""

import torch
import triton
import triton.language as tl

from .launch import launch
from .tiles import sigmoid_tile

BLOCK = 1024


@triton.jit
def _sigmoid_kernel(x_ptr, y_ptr, count, BLOCK: tl.constexpr):
    """One program per `BLOCK` values."""
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + index, mask=index < count)
    tl.store(y_ptr + index, sigmoid_tile(x), mask=index < count)


def sigmoid_mismatches(device: torch.device, first: int = 0, last: int = 2**32, step: int = 1021) -> int:
    """How many fp32 bit patterns of first, first + step, ... below last have another sigmoid in the kernels.

    NaN equals NaN. Waits for the device. `step=1` over the whole range is exhaustive: call it in parts, each
    value takes about 40 bytes.
    """
    with torch.cuda.device(device):
        x = torch.arange(first, last, step, device=device).to(torch.int32).view(torch.float32)
        y = torch.empty_like(x)
        launch(_sigmoid_kernel, (triton.cdiv(x.numel(), BLOCK),), x, y, x.numel(), BLOCK=BLOCK, num_warps=4)
        expected = torch.sigmoid(x)
        differ = (y.view(torch.int32) != expected.view(torch.int32)) & ~(y.isnan() & expected.isnan())
        return int(differ.sum())


_SAMPLED: dict[torch.device, int] = {}


def sampled_sigmoid_mismatches(device: torch.device) -> int | None:
    """`sigmoid_mismatches` of 4.2 million values, computed once for a device and process.

    `None` while a CUDA graph is being captured and the first time is still to come: it has to wait for the
    device.
    """
    if device not in _SAMPLED:
        with torch.cuda.device(device):
            if torch.cuda.is_current_stream_capturing():
                return None
        _SAMPLED[device] = sigmoid_mismatches(device)
    return _SAMPLED[device]
