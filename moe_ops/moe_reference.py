"""The MoE layer in plain torch: every line is one line of the contract, and none is ever "optimised".

Two sets of rules share the passes: `Fp8Rules` (the profiles `exact-fp8-*`, the same bits on every device) and
`Bf16Rules` over a matrix product (`fp32-serial-v1`, `cpu-fp32-v1`). Experts run one after the other over the
rows that chose them, which reads the routing on the host.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from . import quant
from .exact import block_scaled_gradient, block_scaled_product
from .reference import Matmul, clamped, sigmoid, swiglu_backward

Operand = tuple[Tensor, ...]


class MoeWeights(NamedTuple):
    """w_gate_up: [E, 2I, H]; w_down: [E, H, I]; the scales of fp8 weights, or `None`."""

    w_gate_up: Tensor
    w_gate_up_scale: Tensor | None
    w_down: Tensor
    w_down_scale: Tensor | None

    def gate_up(self, expert: int) -> tuple[Tensor, Tensor | None]:
        return self.w_gate_up[expert], None if self.w_gate_up_scale is None else self.w_gate_up_scale[expert]

    def down(self, expert: int) -> tuple[Tensor, Tensor | None]:
        return self.w_down[expert], None if self.w_down_scale is None else self.w_down_scale[expert]


class Fp8Rules:
    """e4m3 operands, exact partial sums of k blocks.

    Args:
        group: columns of a scale group of the activation, 64 or 128.
    """

    def __init__(self, group: int) -> None:
        self.group = group

    def rows(self, x: Tensor, x_scale: Tensor | None) -> Operand:
        """Step 1: (codes, scales), unless the caller quantised."""
        return quant.quantize_rows(x, 128) if x_scale is None else (x, x_scale)

    def activation(self, a: Tensor) -> Operand:
        """Step 5."""
        return quant.requantize_rows(a, self.group)

    def up_product(self, x: Operand, w: Tensor, w_scale: Tensor) -> Tensor:
        """Step 2."""
        return block_scaled_product(*x, w, w_scale, 128)

    def down_product(self, h: Operand, w: Tensor, w_scale: Tensor) -> Tensor:
        """Step 6."""
        return block_scaled_product(*h, w, w_scale, self.group)

    def gradient(self, dy: Tensor, w: Tensor, w_scale: Tensor) -> Tensor:
        """The products of the backward."""
        return block_scaled_gradient(dy, w, w_scale)

    def sigmoid(self, x: Tensor) -> Tensor:
        """The CPU's for every device: ATen's is other code on each, and these profiles have one."""
        return sigmoid(x.cpu()).to(x.device)


class Bf16Rules:
    """bf16 operands and one matrix product."""

    def __init__(self, matmul: Matmul) -> None:
        self.matmul = matmul

    def rows(self, x: Tensor, x_scale: None) -> Operand:
        return (x,)

    def activation(self, a: Tensor) -> Operand:
        return (a.bfloat16(),)

    def up_product(self, x: Operand, w: Tensor, w_scale: None) -> Tensor:
        return self.matmul(x[0], w, transpose_weight=True)

    down_product = up_product

    def gradient(self, dy: Tensor, w: Tensor, w_scale: None) -> Tensor:
        return self.matmul(dy, w, transpose_weight=False)

    def sigmoid(self, x: Tensor) -> Tensor:
        return sigmoid(x)


Rules = Fp8Rules | Bf16Rules


def forward(
    rules: Rules,
    x: Tensor,
    x_scale: Tensor | None,
    topk_idx: Tensor,
    topk_weights: Tensor,
    weights: MoeWeights,
    limit: float | None,
) -> tuple[Tensor, Tensor]:
    """(y [T, H] bf16, counts [E + 1] int32), as `moe_ops.mega_moe`."""
    rows = rules.rows(x, x_scale)
    slots = topk_weights.new_zeros(*topk_idx.shape, x.shape[1])
    for expert, token, slot in _assignments(topk_idx, weights.w_gate_up.shape[0]):
        g, u = rules.up_product(_take(rows, token), *weights.gate_up(expert)).chunk(2, 1)
        a = _activation(rules, g, u, limit) * topk_weights[token, slot, None]
        slots[token, slot] = rules.down_product(rules.activation(a), *weights.down(expert)).bfloat16().float()
    return combine(slots, topk_idx, weights.w_gate_up.shape[0]).bfloat16(), expert_counts(
        topk_idx, weights.w_gate_up.shape[0]
    )


def backward(
    rules: Rules,
    dy: Tensor,
    x: Tensor,
    x_scale: Tensor | None,
    topk_idx: Tensor,
    topk_weights: Tensor,
    weights: MoeWeights,
    limit: float | None,
) -> tuple[Tensor, Tensor]:
    """(dx [T, H] fp32, not yet rounded, d topk_weights [T, top_k] fp32)."""
    rows = rules.rows(x, x_scale)
    slots = topk_weights.new_zeros(*topk_idx.shape, x.shape[1])
    dweights = torch.zeros_like(topk_weights)
    for expert, token, slot in _assignments(topk_idx, weights.w_gate_up.shape[0]):
        g, u = rules.up_product(_take(rows, token), *weights.gate_up(expert)).chunk(2, 1)
        da = rules.gradient(dy[token], *weights.down(expert))
        dweights[token, slot] = tree_sum(da * _activation(rules, g, u, limit))
        da = da * topk_weights[token, slot, None]
        dgate, dup = swiglu_backward(da, g, u, limit, rules.sigmoid)
        dx = rules.gradient(torch.cat((dgate, dup), 1), *weights.gate_up(expert))
        slots[token, slot] = dx.bfloat16().float()
    return combine(slots, topk_idx, weights.w_gate_up.shape[0]), dweights


def tree_sum(products: Tensor) -> Tensor:
    """Row sums: inside each 64 columns a tree over adjacent pairs, group sums ascending from +0."""
    groups = quant.row_groups(products, 64)
    while groups.shape[-1] > 1:
        groups = groups[..., ::2] + groups[..., 1::2]
    total = torch.zeros_like(groups[:, 0, 0])
    for group in groups.squeeze(-1).unbind(1):
        total = total + group
    return total


def combine(slots: Tensor, topk_idx: Tensor, experts: int) -> Tensor:
    """[T, H] fp32: the sum of [T, top_k, H] over slots, ascending from +0; others than experts skipped."""
    total = slots.new_zeros(slots.shape[0], slots.shape[2])
    for slot, expert in zip(slots.unbind(1), topk_idx.unbind(1), strict=True):
        valid = (expert >= 0) & (expert < experts)
        total = torch.where(valid[:, None], total + slot, total)
    return total


def expert_counts(topk_idx: Tensor, experts: int) -> Tensor:
    """[E + 1] int32: rows per expert, then the number of indices that are neither an expert nor -1."""
    valid = (topk_idx >= 0) & (topk_idx < experts)
    index = torch.where(valid, topk_idx, experts)[topk_idx != -1]
    return torch.bincount(index, minlength=experts + 1).int()


def _activation(rules: Rules, g: Tensor, u: Tensor, limit: float | None) -> Tensor:
    """Step 3: a, fp32."""
    g, u = clamped(g, u, limit)
    return (g * rules.sigmoid(g)) * u


def _assignments(topk_idx: Tensor, experts: int) -> Iterator[tuple[int, Tensor, Tensor]]:
    """(expert, tokens, slots) of every expert that has rows."""
    for expert in topk_idx.unique().tolist():
        if 0 <= expert < experts:
            token, slot = (topk_idx == expert).nonzero(as_tuple=True)
            yield expert, token, slot


def _take(rows: Operand, token: Tensor) -> Operand:
    return tuple(_index(value, token) for value in rows)


def _index(value: Tensor, token: Tensor) -> Tensor:
    if value.dtype == torch.float8_e4m3fn:  # indexing is not implemented for it everywhere
        return value.view(torch.uint8)[token].view(value.dtype)
    return value[token]
