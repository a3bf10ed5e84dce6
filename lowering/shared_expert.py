"""Lowerings of the shared expert's operators: kernels into whose last store Inductor fuses what follows.

A lowering changes speed, never bits. One that declines says why, and the operator stays one opaque call.
"""

import functools
import logging
from collections.abc import Callable

import sympy
import torch
from torch._inductor.lowering import fallback_handler, lowerings, register_lowering
from torch._inductor.virtualized import V

from .. import contracts

_LOG = logging.getLogger("moe_ops")

_OPS = torch.ops.moe_ops
_view = lowerings[torch.ops.aten.view.default]
_reshape = lowerings[torch.ops.aten.reshape.default]


def register(is_enabled: Callable[[], bool]) -> None:
    """Register them all with Inductor, once in a process, before its first compile.

    `is_enabled` is asked at each lowering.
    """
    for op, lower in (
        (_OPS.shared_expert_mlp, lower_shared_expert_mlp),
        (_OPS._shared_expert_mlp_save, lower_shared_expert_mlp_save),
        (_OPS._shared_expert_mlp_dx, lower_shared_expert_mlp_dx),
        (_OPS._shared_expert_mlp_dx_saved, lower_shared_expert_mlp_dx_saved),
    ):
        register_lowering(op.default, type_promotion_kind=None)(
            functools.partial(_lowered, is_enabled, op.default, lower)
        )


def lower_shared_expert_mlp(kernels, x, w_gate, w_up, w_down, *, swiglu_limit=None):
    """y."""
    y, _, _ = kernels.forward(_rows(x), w_gate, w_up, w_down, swiglu_limit, save=False)
    return _view(y, x.get_size())


def lower_shared_expert_mlp_save(kernels, x, w_gate, w_up, w_down, *, swiglu_limit=None):
    """y, g, u."""
    y, g, u = kernels.forward(_rows(x), w_gate, w_up, w_down, swiglu_limit, save=True)
    shape = [*x.get_size()[:-1], w_gate.get_size()[0]]
    return _view(y, x.get_size()), _view(g, shape), _view(u, shape)


def lower_shared_expert_mlp_dx(kernels, dy, x, *weights, swiglu_limit=None, out_dtype=None):
    """dx, from x."""
    dx = kernels.dx(_rows(dy), _rows(x), None, *weights, swiglu_limit, out_dtype or torch.bfloat16)
    return _view(dx, dy.get_size())


def lower_shared_expert_mlp_dx_saved(kernels, dy, g, u, *weights, swiglu_limit=None, out_dtype=None):
    """dx, from the saved g and u."""
    saved = (_rows(g), _rows(u))
    dx = kernels.dx(_rows(dy), None, saved, *weights, swiglu_limit, out_dtype or torch.bfloat16)
    return _view(dx, dy.get_size())


def _lowered(is_enabled, op, lower, *args, profile=None, backend=None, **options):
    """The one place where the implementation is chosen, by rule."""
    choice = contracts.choose("shared_expert_mlp", op.name(), args[0].get_device(), profile, backend)
    kernels, reason = _kernels(choice, args[0]) if is_enabled() else (None, "lowerings are switched off")
    if reason is not None:
        _LOG.info("%s stays an opaque call: %s", op.name(), reason)
        return fallback_handler(op, add_to_fallback_set=False)(
            *args, profile=profile, backend=backend, **options
        )
    return lower(kernels, *args, **options)


def _kernels(choice, activation):
    """(the module of the lowering, `None`), or (`None`, why there is none)."""
    device = activation.get_device()
    if any(size == 0 for size in map(V.graph.sizevars.simplify, activation.get_size()[:-1])):
        return None, "there are no tokens"
    if choice.profile == "tc-fp32-v1":
        capability = torch.cuda.get_device_capability(device)
        if torch.version.hip is not None or capability < (8, 0):
            return None, f"no kernels for compute capability {contracts.version_text(capability)}"
        from . import cuda_shared_expert

        return cuda_shared_expert, None
    if choice.profile == "cpu-fp32-v1":
        from . import cpu_shared_expert

        reason = cpu_shared_expert.reason()
        return (None, reason) if reason else (cpu_shared_expert, None)
    return None, f"profile '{choice.profile}' has no lowering"


def _rows(value):
    """[..., K] as [T, K]."""
    *leading, columns = value.get_size()
    return _reshape(value, [sympy.prod(leading), columns]) if len(leading) != 1 else value
