"""The MoE layer on the GPU: the two passes as sequences of launches. Nothing is read back by the host."""

import torch
from torch import Tensor

from .moe_backward import launch_moe_swiglu_backward
from .moe_dispatch import launch_moe_combine, launch_moe_combine_weights, launch_moe_dispatch
from .moe_forward import launch_moe_gate_up, launch_moe_product, new_rows
from .moe_operands import ExpertWeight
from .moe_routing import launch_moe_routing

_DOWN = {None: "down_bf16", 64: "down_fp8_64", 128: "down_fp8_128"}


def forward(
    x: Tensor,
    x_scale: Tensor | None,
    topk_idx: Tensor,
    topk_weights: Tensor,
    w_gate_up: Tensor,
    w_gate_up_scale: Tensor | None,
    w_down: Tensor,
    w_down_scale: Tensor | None,
    limit: float | None,
    group: int | None,
) -> tuple[Tensor, Tensor]:
    """(y [T, H] bf16, counts [E + 1] int32).

    Beyond these, with R = T * top_k and fp8 weights, it allocates the expert-major x [R, H] e4m3, h [R, I]
    e4m3 (x is released after it), the rows [R, H] bf16, their scales, and index tables.

    Args:
        x: [T, H] bf16, or e4m3 with x_scale [T, ceil(H/128)] fp32; any strides.
        topk_idx: [T, top_k] int32 or int64. topk_weights: [T, top_k] fp32. Any strides.
        w_gate_up, w_gate_up_scale, w_down, w_down_scale: as for `moe_ops.mega_moe`.
        limit: `swiglu_limit`.
        group: columns of h's scale groups, 64 or 128; `None` for bf16 weights.
    """
    gate_up, down = ExpertWeight(w_gate_up, w_gate_up_scale), ExpertWeight(w_down, w_down_scale)
    if topk_idx.numel() == 0:
        return _empty(x), topk_idx.new_zeros(gate_up.experts + 1, dtype=torch.int32)
    with torch.cuda.device(x.device):
        routing = launch_moe_routing(topk_idx, gate_up.experts)
        rows, row_scales, row_weights, slot_rows = launch_moe_dispatch(
            x, x_scale, topk_idx, topk_weights, routing, fp8=group is not None
        )
        h, h_scales = launch_moe_gate_up(rows, row_scales, gate_up, row_weights, routing, limit, group)
        del rows, row_scales
        out = new_rows(h, down.rows)
        launch_moe_product(_DOWN[group], h, h_scales, down, routing, out, weight_nk=True)
        return launch_moe_combine(out, slot_rows), routing.counts


def backward(
    dy: Tensor,
    x: Tensor,
    x_scale: Tensor | None,
    topk_idx: Tensor,
    topk_weights: Tensor,
    w_gate_up: Tensor,
    w_gate_up_scale: Tensor | None,
    w_down: Tensor,
    w_down_scale: Tensor | None,
    limit: float | None,
    group: int | None,
    *,
    dx: bool,
    dweights: bool,
) -> tuple[Tensor | None, Tensor | None]:
    """(dx [T, H] bf16, d topk_weights [T, top_k] fp32), those asked for.

    Beyond these it allocates the expert-major x, [dgate | dup] [R, 2I] bf16, one [R, H] bf16 that holds first
    the rows of dy and then those of dx, sums [ceil(I/64), R] fp32, scales and index tables.

    Args:
        dy: [T, H] bf16, any strides.
        others: as for the forward.
    """
    gate_up, down = ExpertWeight(w_gate_up, w_gate_up_scale), ExpertWeight(w_down, w_down_scale)
    if topk_idx.numel() == 0:
        return _empty(x), torch.empty_like(topk_weights, memory_format=torch.contiguous_format)
    with torch.cuda.device(x.device):
        routing = launch_moe_routing(topk_idx, gate_up.experts)
        rows, row_scales, row_weights, slot_rows = launch_moe_dispatch(
            x, x_scale, topk_idx, topk_weights, routing, fp8=group is not None
        )
        dy_rows = launch_moe_dispatch(dy, None, topk_idx, topk_weights, routing, fp8=False)[0]
        dz, partials = launch_moe_swiglu_backward(
            dy_rows,
            rows,
            row_scales,
            gate_up,
            down,
            row_weights,
            routing,
            limit,
            dz=dx,
            partials=dweights,
        )
        del rows, row_scales
        dx_rows = dweights_out = None
        if dweights:
            dweights_out = launch_moe_combine_weights(partials, slot_rows)
        if dx:
            name = "dx_bf16" if group is None else "dx_fp8"
            dx_rows = launch_moe_product(name, dz, None, gate_up, routing, dy_rows, weight_nk=False)
            del dz
        return None if dx_rows is None else launch_moe_combine(dx_rows, slot_rows), dweights_out


def _empty(x: Tensor) -> Tensor:
    return x.new_empty(x.shape, dtype=torch.bfloat16)
