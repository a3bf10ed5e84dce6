"""The Autograd kernels of the MoE layer: gradients for x and topk_weights, as far as they are asked for."""

from collections.abc import Callable

import torch

from . import (
    contracts,
    moe_contracts,
    moe_operators,  # noqa: F401  (registers the operators named below)
    quant_contracts,
)
from .moe_contracts import MoeTensors
from .registration import LIBRARY, below_autograd, transform_of

_OPS = torch.ops.moe_ops


class _MegaMoe(torch.autograd.Function):
    """Keeps x (or its pair), the routing and the weights; the backward computes everything else again."""

    @staticmethod
    def forward(ctx, options, *tensors):
        y, counts = below_autograd(_OPS._mega_moe.default, *tensors, **options)
        ctx.options = options
        ctx.save_for_backward(*tensors)
        ctx.mark_non_differentiable(counts)
        ctx.set_materialize_grads(False)
        return y, counts

    @staticmethod
    def backward(ctx, dy, _dcounts):
        contracts.check_first_derivative("mega_moe")
        x, weights = ctx.needs_input_grad[1], ctx.needs_input_grad[4]
        dx = dweights = None
        if dy is None:
            pass
        elif x and weights:
            dx, dweights = _OPS._mega_moe_dx_dweights.default(dy, *ctx.saved_tensors, **ctx.options)
        elif x:
            dx = _OPS._mega_moe_dx.default(dy, *ctx.saved_tensors, **ctx.options)
        else:
            dweights = _OPS._mega_moe_dweights.default(dy, *ctx.saved_tensors, **ctx.options)
        return None, dx, None, None, dweights, None, None, None, None


def _forward_kernel(*tensors, **options):
    named = MoeTensors(*tensors)
    contracts.check_frozen("mega_moe", **named.weights)
    contracts.check_not_transformed("mega_moe", transform_of(*named.present.values()))
    moe_contracts.check_pair_needs_no_gradient("mega_moe", named)
    if torch.is_grad_enabled() and (named.x.requires_grad or named.topk_weights.requires_grad):
        return _MegaMoe.apply(options, *tensors)
    return below_autograd(_OPS._mega_moe.default, *tensors, **options)


def _backward_kernel(name: str) -> Callable:
    op = getattr(_OPS, f"_{name}").default

    def kernel(dy, *tensors, **options):
        named = MoeTensors(*tensors)
        contracts.check_frozen(name, **named.weights)
        contracts.check_not_transformed(name, transform_of(dy, *named.present.values()))
        if any(value.requires_grad for value in (dy, *named.present.values())):
            contracts.check_first_derivative(name)
        return below_autograd(op, dy, *tensors, **options)

    return kernel


def _quantizer_kernel(name: str, argument: str) -> Callable:
    op = getattr(_OPS, name).default

    def kernel(value, *sizes):
        quant_contracts.check_not_differentiated(name, argument, value)
        contracts.check_not_transformed(name, transform_of(value))
        return below_autograd(op, value, *sizes)

    return kernel


LIBRARY.impl("_mega_moe", _forward_kernel, "Autograd")
for _name in ("mega_moe_dx", "mega_moe_dweights", "mega_moe_dx_dweights"):
    LIBRARY.impl(f"_{_name}", _backward_kernel(_name), "Autograd")
for _name, _argument in (("quantize_activations", "x"), ("quantize_weights_block", "w")):
    LIBRARY.impl(_name, _quantizer_kernel(_name, _argument), "Autograd")
