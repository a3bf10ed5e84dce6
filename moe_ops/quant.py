"""The contract's quantisation rules in plain torch: the same bits on every device.

A scale group is 128 (or 64) consecutive columns, or a 128 x 128 block; the last one may be ragged. Values are
`code * scale`. The functions take any floating dtype and compute in fp32; every operation is one rounding.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

E4M3_MAX = 448.0
_MAGNITUDE = 0x7FFFFFFF
_INFINITY = 0x7F800000
_NAN_CODE = 0x7F


def quantize_rows(x: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """Codes [..., K] e4m3 and scales [..., ceil(K / group)] fp32: `scale = max(amax / 448, 2^-126)`."""
    groups = row_groups(x, group)
    amax = _amax(groups, (-1,))
    codes, scale = _encode(groups, amax, _scale(amax))
    return codes.flatten(-2)[..., : x.shape[-1]].contiguous(), scale.squeeze(-1)


def requantize_rows(a: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """As `quantize_rows` with the smallest power of two not below amax / 448 for a scale, at least 2^-126."""
    groups = row_groups(a, group)
    amax = _amax(groups, (-1,))
    exponent = (amax >> 23) - 8 + ((amax & 0x7FFFFF) > 0x600000)
    exponent = torch.where(amax == 0, 127, exponent.clamp(min=1))  # biased; amax = 0 has scale 1
    scale = torch.where(amax < _INFINITY, (exponent << 23).view(torch.float32), torch.nan)
    inverse = ((254 - exponent) << 23).view(torch.float32)
    codes = torch.where(
        amax < _INFINITY, (groups * inverse).to(torch.float8_e4m3fn).view(torch.uint8), _NAN_CODE
    )
    codes = codes.view(torch.float8_e4m3fn).flatten(-2)
    return codes[..., : a.shape[-1]].contiguous(), scale.squeeze(-1)


def quantize_blocks(w: Tensor, block: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """Codes [..., N, K] e4m3 and scales [..., ceil(N / block[0]), ceil(K / block[1])] fp32, row-major."""
    rows, columns = w.shape[-2:]
    tile_rows, tile_columns = -(-rows // block[0]), -(-columns // block[1])
    codes = w.new_empty(w.shape, dtype=torch.float8_e4m3fn)
    scales = w.new_empty((*w.shape[:-2], tile_rows, tile_columns), dtype=torch.float32)
    if w.numel() == 0:
        return codes, scales
    matrices = zip(w.reshape(-1, rows, columns), codes.view(-1, rows, columns), strict=True)
    for (matrix, code), scale in zip(matrices, scales.view(-1, tile_rows, tile_columns), strict=True):
        padding = (0, tile_columns * block[1] - columns, 0, tile_rows * block[0] - rows)
        tiles = F.pad(matrix.float(), padding).view(tile_rows, block[0], tile_columns, block[1])
        amax = _amax(tiles, (1, 3))
        tile_codes, tile_scale = _encode(tiles, amax, _scale(amax))
        code.copy_(tile_codes.reshape(tile_rows * block[0], -1)[:rows, :columns])
        scale.copy_(tile_scale.view(tile_rows, tile_columns))
    return codes, scales


def widen_rows(scales: Tensor, columns: int, group: int) -> Tensor:
    """Scales [..., ceil(columns / group)] repeated to [..., columns]."""
    return scales[..., _groups_of(columns, group, scales.device)]


def widen_blocks(scales: Tensor, rows: int, columns: int, block: tuple[int, int]) -> Tensor:
    """Scales [..., ceil(rows / block[0]), ceil(columns / block[1])] repeated to [..., rows, columns]."""
    row, column = (_groups_of(*size, scales.device) for size in zip((rows, columns), block, strict=True))
    return scales[..., row[:, None], column]


def _groups_of(count: int, group: int, device: torch.device) -> Tensor:
    """The group of each of `count` elements.

    In doubles: Inductor's C++ (torch 2.13) splits a loop at an integer division (of an index or in
    `repeat_interleave`) and then leaves out the elements of a ragged last group. From the middle of an
    element, because CUDA divides by a number as it multiplies by the rounded reciprocal.
    """
    return ((torch.arange(count, dtype=torch.float64, device=device) + 0.5) / group).long()


def row_groups(x: Tensor, group: int) -> Tensor:
    """[..., K] in fp32, zero-padded, as [..., ceil(K / group), group]."""
    x = x.float()
    return F.pad(x, (0, -x.shape[-1] % group)).unflatten(-1, (-(-x.shape[-1] // group), group))


def _amax(values: Tensor, dims: tuple[int, ...]) -> Tensor:
    """The maximum of |values| as fp32 bits (int32), so that NaN > inf > finite."""
    return (values.view(torch.int32) & _MAGNITUDE).amax(dims, keepdim=True)


def _scale(amax: Tensor) -> Tensor:
    # By a tensor of the device: CUDA divides by a number as it multiplies by the rounded reciprocal.
    largest = torch.full((), E4M3_MAX, dtype=torch.float32, device=amax.device)
    scale = (amax.view(torch.float32) / largest).clamp(min=2.0**-126)
    return torch.where(amax == 0, 1.0, torch.where(amax < _INFINITY, scale, torch.nan))


def _encode(values: Tensor, amax: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    codes = (values / scale).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn).view(torch.uint8)
    return torch.where(amax < _INFINITY, codes, _NAN_CODE).view(torch.float8_e4m3fn), scale
