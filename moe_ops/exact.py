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
    """fp32 `a * b + c`, rounded once: the product is exact in fp64, the sum is rounded to odd before fp32."""
    return _sum_to_odd(a.double() * b.double(), c.double()).float()


def _exact_partial(dy: Tensor, w: Tensor) -> Tensor:
    """The sum over at most 128 products of bf16 and e4m3, rounded once to fp32.

    bf16 covers 261 binades, so the values are split into windows of 20 on a fixed grid: 28 bits of dy, 18 of
    w and 7 of the sum are exact in fp64. The windows' sums are added as pairs of fp64 (106 bits).
    """
    dy = _double(dy)
    exponent = torch.frexp(dy).exponent - 1
    high = dy.new_zeros(dy.shape[0], w.shape[1])
    low = torch.zeros_like(high)
    for start in range(_LOWEST, _HIGHEST + 1, _WINDOW):
        inside = (exponent >= start) & (exponent < start + _WINDOW) & (dy != 0)
        if inside.any():
            window = torch.where(inside, dy, 0.0) @ w
            total = high + window
            low = low + _error(high, window, total)
            high = total
    not_finite = ~dy.isfinite()
    if not_finite.any():
        high = high + torch.where(not_finite, dy, 0.0) @ w
    return _sum_to_odd(high, low).float()


def _sum_to_odd(a: Tensor, b: Tensor) -> Tensor:
    """a + b in fp64, rounded to odd, so that a further rounding to fp32 is the only one."""
    total = a + b
    error = _error(a, b, total)
    bits = total.view(torch.int64)
    away = torch.where((error > 0) == (total > 0), 1, -1)
    bits = torch.where((error != 0) & (bits & 1 == 0), bits + away, bits)
    return bits.view(torch.float64)


def _error(a: Tensor, b: Tensor, total: Tensor) -> Tensor:
    """What the fp64 addition lost (Knuth's TwoSum); 0 where the sum is not finite."""
    part = total - a
    error = (a - (total - part)) + (b - part)
    return torch.where(error.isfinite(), error, 0.0)


def _double(value: Tensor) -> Tensor:
    return value.float().double()
