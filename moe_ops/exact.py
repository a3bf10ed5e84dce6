"""Block-scaled products whose k blocks are summed exactly: the arithmetic of the profiles `exact-fp8-*`.

Everything is either exact in fp64 or one elementwise rounding, so neither the device nor the number of rows
nor the order inside a BLAS product shows in the bits.
"""

import torch
from torch import Tensor

BLOCK = 128
_WINDOW = 20
_LOWEST = -133  # exponent of the smallest bf16
_HIGHEST = 127


def block_scaled_product(a: Tensor, a_scale: Tensor, w: Tensor, w_scale: Tensor, group: int) -> Tensor:
    """`a @ w.T` fp32: for each `group` of k, ascending, `acc = fma(partial, a_scale * w_scale, acc)`.

    Args:
        a: [M, K] e4m3. a_scale: [M, ceil(K / group)] fp32.
        w: [N, K] e4m3. w_scale: [ceil(N / 128), ceil(K / 128)] fp32.
        group: 64 or 128. 128 products of e4m3 fit 43 bits, so a partial is exact in fp64.
    """
    accumulator = a_scale.new_zeros(a.shape[0], w.shape[0])
    columns = torch.arange(w.shape[0], device=w.device) // BLOCK
    for index, start in enumerate(range(0, a.shape[1], group)):
        stop = start + group
        partial = (_double(a[:, start:stop]) @ _double(w[:, start:stop]).t()).float()
        scale = a_scale[:, index, None] * w_scale[columns, start // BLOCK]
        accumulator = fma(partial, scale, accumulator)
    return accumulator


def block_scaled_gradient(dy: Tensor, w: Tensor, w_scale: Tensor) -> Tensor:
    """`dy @ w` fp32: for each 128 rows of w, ascending, `acc = fma(partial, w_scale, acc)`.

    Args:
        dy: [M, K] bf16. w: [K, N] e4m3. w_scale: [ceil(K / 128), ceil(N / 128)] fp32.
    """
    accumulator = w_scale.new_zeros(dy.shape[0], w.shape[1])
    columns = torch.arange(w.shape[1], device=w.device) // BLOCK
    for index, start in enumerate(range(0, dy.shape[1], BLOCK)):
        partial = _exact_partial(dy[:, start : start + BLOCK], _double(w[start : start + BLOCK]))
        scale = w_scale[index, columns].expand_as(partial)
        accumulator = fma(partial, scale, accumulator)
    return accumulator


def fma(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """fp32 `a * b + c`, rounded once: the product is exact in fp64."""
    return _sum_in_fp32(a.double() * b.double(), c.double())


def _exact_partial(dy: Tensor, w: Tensor) -> Tensor:
    """The sum over at most 128 products of bf16 and e4m3, rounded once to fp32.

    bf16 covers 261 binades, so the values are split into windows of 20 on a fixed grid: 28 bits of dy, 18 of
    w and 7 of the sum are exact in fp64. The windows' sums, lowest first, become an expansion: fp64 numbers
    that do not overlap and whose sum is exact (Shewchuk, "Adaptive Precision Floating-Point Arithmetic",
    1997).
    """
    dy = _double(dy)
    exponent = torch.frexp(dy).exponent - 1
    finite = dy.isfinite()
    expansion: list[Tensor] = []
    for start in range(_LOWEST, _HIGHEST + 1, _WINDOW):
        inside = (exponent >= start) & (exponent < start + _WINDOW) & (dy != 0) & finite
        if inside.any():
            _grow(expansion, torch.where(inside, dy, 0.0) @ w)
    special = torch.where(finite, 0.0, dy) @ w  # also the product of a zero and a NaN
    if not expansion:
        return special.float()
    total, *others = expansion
    for part in others[:-1]:
        total = _sum_to_odd(total, part)
    result = _sum_in_fp32(total, others[-1]) if others else total.float()
    return torch.where(special == 0, result, result + special.float())


def _grow(expansion: list[Tensor], value: Tensor) -> None:
    """Add `value` to an expansion, whose parts ascend in magnitude."""
    for index, part in enumerate(expansion):
        total = value + part
        expansion[index] = _error(value, part, total)
        value = total
    expansion.append(value)


def _sum_in_fp32(a: Tensor, b: Tensor) -> Tensor:
    """a + b of fp64 numbers, rounded once to fp32.

    fp64 first and fp32 then gives another result only where the fp64 sum is inexact and lies halfway between
    two fp32 numbers. There, and where fp32 is subnormal, the fp64 sum is rounded to odd instead.
    """
    total = a + b
    result = total.float()
    halfway = (total.view(torch.int64) & 0x1FFFFFFF) == 0x10000000
    doubtful = (halfway | (total.abs() < 2.0**-125)) & (total != 0)
    if doubtful.any():
        result[doubtful] = _sum_to_odd(a[doubtful], b[doubtful]).float()
    return result


def _sum_to_odd(a: Tensor, b: Tensor) -> Tensor:
    """a + b of finite fp64 numbers; an inexact sum becomes the odd one of its two neighbours."""
    total = a + b
    error = _error(a, b, total)
    bits = total.view(torch.int64)
    away = torch.where((error > 0) == (total > 0), 1, -1)
    return torch.where((error != 0) & (bits & 1 == 0), bits + away, bits).view(torch.float64)


def _error(a: Tensor, b: Tensor, total: Tensor) -> Tensor:
    """What the fp64 addition lost (Knuth's TwoSum)."""
    part = total - a
    return (a - (total - part)) + (b - part)


def _double(value: Tensor) -> Tensor:
    return value.float().double()
