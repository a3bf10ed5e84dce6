"""The MoE layer's oracle as public functions: the arithmetic of `exact-fp8-*`, on every device."""

import torch
from torch import Tensor

from . import contracts, moe_contracts, moe_reference, reference
from .moe_contracts import MoeTensors
from .numerics import FP8_GROUPS


def mega_moe_reference(
    x: Tensor | tuple[Tensor, Tensor],
    topk_idx: Tensor,
    topk_weights: Tensor,
    w_gate_up: Tensor,
    w_gate_up_scale: Tensor | None,
    w_down: Tensor,
    w_down_scale: Tensor | None,
    *,
    swiglu_limit: float | None = None,
    profile: str | None = None,
    return_expert_counts: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """The oracle of the MoE layer: slow, readable, the same text on CPU and CUDA.

    With fp8 weights its bits are the same on every device and for every T. Differentiable in x and
    topk_weights. Reads the routing on the host.

    Args:
        x, topk_idx, topk_weights, w_gate_up, w_gate_up_scale, w_down, w_down_scale, swiglu_limit,
            return_expert_counts: as for `moe_ops.mega_moe`.
        profile: with fp8 weights "exact-fp8-k128-k64-v1" (`None`) or "exact-fp8-k128-k128-v1", with bf16
            weights "fp32-serial-v1" (`None`).

    Returns:
        y [T, H] bf16, or (y, counts [E + 1] int32).

    Raises:
        TypeError, ValueError, NotImplementedError: as `moe_ops.mega_moe`.
    """
    op = "mega_moe_reference"
    tensors = _tensors(op, x, topk_idx, topk_weights, w_gate_up, w_gate_up_scale, w_down, w_down_scale)
    moe_contracts.check_pair_needs_no_gradient(op, tensors)
    rules = _rules(op, tensors, swiglu_limit, profile)
    y, counts = _Oracle.apply(rules, swiglu_limit, *tensors)
    return (y, counts) if return_expert_counts else y


def mega_moe_dx_dweights_reference(
    dy: Tensor,
    x: Tensor | tuple[Tensor, Tensor],
    topk_idx: Tensor,
    topk_weights: Tensor,
    w_gate_up: Tensor,
    w_gate_up_scale: Tensor | None,
    w_down: Tensor,
    w_down_scale: Tensor | None,
    *,
    swiglu_limit: float | None = None,
    profile: str | None = None,
) -> tuple[Tensor, Tensor]:
    """The oracle's gradients: (dx [T, H] bf16, d topk_weights [T, top_k] fp32).

    Args:
        dy: the gradient of the output, [T, H] bf16.
        x .. profile: as for the forward.

    Raises:
        TypeError, ValueError, NotImplementedError: as `moe_ops.mega_moe`.
    """
    op = "mega_moe_dx_dweights_reference"
    contracts.check_tensors(op, {"dy": dy})
    tensors = _tensors(op, x, topk_idx, topk_weights, w_gate_up, w_gate_up_scale, w_down, w_down_scale)
    if any(value.requires_grad for value in (dy, *tensors.present.values())):
        contracts.check_first_derivative(op)
    rules = _rules(op, tensors, swiglu_limit, profile, dy)
    with torch.no_grad():
        dx, dweights = moe_reference.backward(
            rules, dy, *tensors[:4], moe_reference.MoeWeights(*tensors[4:]), swiglu_limit
        )
    return dx.bfloat16(), dweights


class _Oracle(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rules, limit, *tensors):
        ctx.save_for_backward(*tensors)
        ctx.rules, ctx.limit = rules, limit
        y, counts = moe_reference.forward(rules, *tensors[:4], moe_reference.MoeWeights(*tensors[4:]), limit)
        ctx.mark_non_differentiable(counts)
        return y, counts

    @staticmethod
    def backward(ctx, dy, _dcounts):
        contracts.check_first_derivative("mega_moe_reference")
        tensors = ctx.saved_tensors
        dx, dweights = moe_reference.backward(
            ctx.rules, dy, *tensors[:4], moe_reference.MoeWeights(*tensors[4:]), ctx.limit
        )
        dx = dx.bfloat16() if ctx.needs_input_grad[2] else None
        return None, None, dx, None, None, dweights, None, None, None, None


def _tensors(op, x, topk_idx, topk_weights, w_gate_up, w_gate_up_scale, w_down, w_down_scale) -> MoeTensors:
    others = {
        "topk_idx": topk_idx,
        "topk_weights": topk_weights,
        "w_gate_up": w_gate_up,
        "w_gate_up_scale": w_gate_up_scale,
        "w_down": w_down,
        "w_down_scale": w_down_scale,
    }
    values, x_scale = moe_contracts.check_types(op, x, others)
    scales = (x_scale, w_gate_up_scale, w_down_scale)
    x_scale, w_gate_up_scale, w_down_scale = map(moe_contracts.widened, scales)
    tensors = MoeTensors(
        values, x_scale, topk_idx, topk_weights, w_gate_up, w_gate_up_scale, w_down, w_down_scale
    )
    contracts.check_frozen(op, **tensors.weights)
    return tensors


def _rules(op, tensors, limit, profile, dy=None) -> moe_reference.Rules:
    contracts.check_call(op, {}, limit, profile)
    fp8 = tensors.w_gate_up.dtype == moe_contracts.E4M3
    profile = profile or ("exact-fp8-k128-k64-v1" if fp8 else "fp32-serial-v1")
    moe_contracts.check(op, tensors, limit, profile, "reference", dy)
    if fp8:
        return moe_reference.Fp8Rules(FP8_GROUPS[profile])
    return moe_reference.Bf16Rules(reference.serial_matmul)
