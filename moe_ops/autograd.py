"""The Autograd kernels: the gradient of the activations, by operators; weights get none.

An own kernel at the Autograd key costs 28 us a call with a gradient against 61 for
`torch.library.register_autograd` (torch 2.13, CPU). Everything below it runs with autograd switched off, so
each kernel first refuses what would otherwise be detached silently.
"""

from collections.abc import Callable

import torch

from . import contracts, ops  # noqa: F401  (registers the operators named below)
from .registration import LIBRARY, below_autograd, transform_of

_OPS = torch.ops.moe_ops


class _Recompute(torch.autograd.Function):
    """Keeps x and the weights; the backward computes g and u again."""

    @staticmethod
    def forward(ctx, options, x, *weights):
        ctx.options = options
        ctx.save_for_backward(x, *weights)
        return below_autograd(_OPS.shared_expert_mlp.default, x, *weights, **options)

    @staticmethod
    def backward(ctx, dy):
        contracts.check_first_derivative("shared_expert_mlp")
        dx = _OPS._shared_expert_mlp_dx.default(dy, *ctx.saved_tensors, **ctx.options)
        return None, dx, None, None, None


class _Save(torch.autograd.Function):
    """Keeps g, u and the weights."""

    @staticmethod
    def forward(ctx, options, x, *weights):
        y, g, u = below_autograd(_OPS._shared_expert_mlp_save.default, x, *weights, **options)
        ctx.options = options
        ctx.save_for_backward(g, u, *weights)
        ctx.mark_non_differentiable(g, u)
        ctx.set_materialize_grads(False)
        return y, g, u

    @staticmethod
    def backward(ctx, dy, _dg, _du):
        contracts.check_first_derivative("shared_expert_mlp")
        if dy is None:
            return None, None, None, None, None
        dx = _OPS._shared_expert_mlp_dx_saved.default(dy, *ctx.saved_tensors, **ctx.options)
        return None, dx, None, None, None


def _forward_kernel(op: Callable, function: type[torch.autograd.Function]) -> Callable:
    def kernel(x, w_gate, w_up, w_down, **options):
        contracts.check_frozen("shared_expert_mlp", w_gate=w_gate, w_up=w_up, w_down=w_down)
        contracts.check_not_transformed("shared_expert_mlp", transform_of(x, w_gate, w_up, w_down))
        if torch.is_grad_enabled() and x.requires_grad:
            return function.apply(options, x, w_gate, w_up, w_down)
        return below_autograd(op, x, w_gate, w_up, w_down, **options)

    return kernel


def _dx_kernel(op: Callable) -> Callable:
    names = [argument.name for argument in op._schema.arguments if not argument.kwarg_only]

    def kernel(*args, **options):
        tensors = dict(zip(names, args, strict=True))
        weights = {name: tensors.pop(name) for name in ("w_gate", "w_up", "w_down")}
        contracts.check_frozen("shared_expert_mlp_dx", **weights)
        contracts.check_not_transformed("shared_expert_mlp_dx", transform_of(*args))
        if any(tensor.requires_grad for tensor in tensors.values()):
            contracts.check_first_derivative("shared_expert_mlp_dx")
        return below_autograd(op, *args, **options)

    return kernel


LIBRARY.impl("shared_expert_mlp", _forward_kernel(_OPS.shared_expert_mlp.default, _Recompute), "Autograd")
LIBRARY.impl(
    "_shared_expert_mlp_save", _forward_kernel(_OPS._shared_expert_mlp_save.default, _Save), "Autograd"
)
LIBRARY.impl("_shared_expert_mlp_dx", _dx_kernel(_OPS._shared_expert_mlp_dx.default), "Autograd")
LIBRARY.impl("_shared_expert_mlp_dx_saved", _dx_kernel(_OPS._shared_expert_mlp_dx_saved.default), "Autograd")
