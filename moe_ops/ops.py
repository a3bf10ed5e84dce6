"""The operators: schemas, implementations, fakes, autocast and vmap. `autograd.py` adds the gradients.

One operator is one fixed tuple of tensors; nothing is mutated, no output is optional. Activations carry any
number of leading dimensions. Outputs are row-major whatever the strides of the inputs, in the fakes as in the
implementations.
"""

import functools
from collections.abc import Callable
from types import ModuleType

import torch
from torch import Tensor

from . import contracts, reference
from .kernels.cpu_matmul import blocked_matmul
from .registration import below_autocast, register, register_autocast

_MATMULS: dict[str, reference.Matmul] = {"reference": reference.serial_matmul, "aten": blocked_matmul}


def _shared_expert_mlp(x, *weights, **options):
    return _forward("shared_expert_mlp", x, *weights, save=False, **options)[0]


def _shared_expert_mlp_fake(x, *weights, **options):
    _check("shared_expert_mlp", {"x": x}, *weights, **options)
    return x.new_empty(x.shape)


def _shared_expert_mlp_save(x, w_gate, *weights, **options):
    y, g, u = _forward("shared_expert_mlp", x, w_gate, *weights, save=True, **options)
    shape = (*x.shape[:-1], w_gate.shape[0])
    return y, g.view(shape), u.view(shape)


def _shared_expert_mlp_save_fake(x, w_gate, w_up, w_down, **options):
    _check("shared_expert_mlp", {"x": x}, w_gate, w_up, w_down, **options)
    shape = (*x.shape[:-1], w_gate.shape[0])
    g, u = (x.new_empty(shape, dtype=torch.float32) for _ in range(2))
    return x.new_empty(x.shape), g, u


def _forward(op, x, w_gate, w_up, w_down, *, save, swiglu_limit=None, **options):
    choice = _check(op, {"x": x}, w_gate, w_up, w_down, swiglu_limit=swiglu_limit, **options)
    if choice.backend == "triton":
        kernels, strict = _triton(op, choice, x.device)
        y, g, u = kernels.forward(x, w_gate, w_up, w_down, swiglu_limit, strict=strict, save=save)
    else:
        matmul = _MATMULS[choice.backend]
        g, u = reference.gate_up(_rows(x), w_gate, w_up, matmul)
        y = reference.down(g, u, w_down, swiglu_limit, matmul)
    return y.view(x.shape), g, u


def _shared_expert_mlp_dx(dy, x, *weights, out_dtype=None, swiglu_limit=None, **options):
    choice = _check_dx({"x": x, "dy": dy}, *weights, out_dtype, swiglu_limit=swiglu_limit, **options)
    return _dx(choice, dy, x, None, *weights, swiglu_limit, out_dtype)


def _shared_expert_mlp_dx_fake(dy, x, *weights, out_dtype=None, **options):
    _check_dx({"x": x, "dy": dy}, *weights, out_dtype, **options)
    return dy.new_empty(dy.shape, dtype=out_dtype or torch.bfloat16)


def _shared_expert_mlp_dx_saved(dy, g, u, *weights, out_dtype=None, swiglu_limit=None, **options):
    choice = _check_dx_saved(dy, g, u, *weights, out_dtype, swiglu_limit=swiglu_limit, **options)
    return _dx(choice, dy, None, (_rows(g), _rows(u)), *weights, swiglu_limit, out_dtype)


def _shared_expert_mlp_dx_saved_fake(dy, g, u, *weights, out_dtype=None, **options):
    _check_dx_saved(dy, g, u, *weights, out_dtype, **options)
    return dy.new_empty(dy.shape, dtype=out_dtype or torch.bfloat16)


def _dx(choice, dy, x, saved, w_gate, w_up, w_down, limit, out_dtype):
    """The gradient from x, or from the saved (g, u)."""
    out_dtype = out_dtype or torch.bfloat16
    if choice.backend == "triton":
        kernels, strict = _triton("shared_expert_mlp_dx", choice, dy.device)
        dx = kernels.dx(dy, x, saved, w_gate, w_up, w_down, limit, out_dtype, strict=strict)
    else:
        matmul = _MATMULS[choice.backend]
        g, u = saved or reference.gate_up(_rows(x), w_gate, w_up, matmul)
        dx = reference.dx_from_pre_activations(_rows(dy), g, u, w_gate, w_up, w_down, limit, matmul)
    return dx.to(out_dtype).view(dy.shape)


def _triton(op: str, choice: contracts.Choice, device: torch.device) -> tuple[ModuleType, bool]:
    """The kernels, imported when first needed, and whether to run the strict ones."""
    capability = torch.cuda.get_device_capability(device)
    contracts.check_gpu(op, capability, torch.version.hip)
    try:
        from .kernels import launch, shared_expert, sigmoid_check
    except ImportError as error:
        contracts.refuse_import(op, choice, error)
    strict = choice.profile == "fp32-serial-v1"
    if strict:
        contracts.check_strict_products(op, capability, launch.TRITON)
        contracts.check_sigmoid(op, choice, sigmoid_check.sampled_sigmoid_mismatches(device))
    return shared_expert, strict


def _check(op, activations, *weights, swiglu_limit=None, profile=None, backend=None):
    return contracts.check_shared_expert(op, activations, *weights, swiglu_limit, profile, backend)


def _check_dx(activations, w_gate, w_up, w_down, out_dtype, **options):
    contracts.check_out_dtype("shared_expert_mlp_dx", out_dtype)
    return _check("shared_expert_mlp_dx", activations, w_gate, w_up, w_down, **options)


def _check_dx_saved(dy, g, u, w_gate, w_up, w_down, out_dtype, **options):
    choice = _check_dx({"dy": dy}, w_gate, w_up, w_down, out_dtype, **options)
    contracts.check_pre_activations("shared_expert_mlp_dx", dy, g, u, w_gate)
    return choice


def _rows(value: Tensor) -> Tensor:
    return value.reshape(-1, value.shape[-1])


def _vmap_rule(name: str, activation_count: int) -> Callable:
    """The batch dimension becomes one more leading dimension of the activations; rows are independent."""

    def rule(info, in_dims, *args, **options):
        weight_dims = dict(zip(("w_gate", "w_up", "w_down"), in_dims[activation_count:], strict=True))
        contracts.check_vmap(name, weight_dims)
        activations = [
            value.expand(info.batch_size, *value.shape) if dim is None else value.movedim(dim, 0)
            for value, dim in zip(args[:activation_count], in_dims, strict=False)
        ]
        op = getattr(torch.ops.moe_ops, name).default
        result = op(*activations, *args[activation_count:], **options)
        return result, tuple(0 for _ in result) if isinstance(result, tuple) else 0

    return rule


def _autocast_kernel(op: Callable, device_type: str) -> Callable:
    """Casts x to bf16 and nothing else."""

    def kernel(x, *weights, **options):
        dtype = torch.get_autocast_dtype(device_type)
        contracts.check_autocast("shared_expert_mlp", device_type, dtype)
        if x.is_floating_point() and x.dtype != torch.float64:
            x = x.to(dtype)
        return below_autocast(device_type, op, x, *weights, **options)

    return kernel


_WEIGHTS = "Tensor w_gate, Tensor w_up, Tensor w_down"
_OPTIONS = "float? swiglu_limit=None, str? profile=None, str? backend=None"
_DX_OPTIONS = f"{_OPTIONS}, ScalarType? out_dtype=None"

for _op in (
    register(
        f"shared_expert_mlp(Tensor x, {_WEIGHTS}, *, {_OPTIONS}) -> Tensor",
        _shared_expert_mlp,
        _shared_expert_mlp_fake,
        _vmap_rule("shared_expert_mlp", 1),
    ),
    register(
        f"_shared_expert_mlp_save(Tensor x, {_WEIGHTS}, *, {_OPTIONS}) -> (Tensor y, Tensor g, Tensor u)",
        _shared_expert_mlp_save,
        _shared_expert_mlp_save_fake,
        _vmap_rule("_shared_expert_mlp_save", 1),
    ),
):
    register_autocast(_op, functools.partial(_autocast_kernel, _op))
register(
    f"_shared_expert_mlp_dx(Tensor dy, Tensor x, {_WEIGHTS}, *, {_DX_OPTIONS}) -> Tensor",
    _shared_expert_mlp_dx,
    _shared_expert_mlp_dx_fake,
    _vmap_rule("_shared_expert_mlp_dx", 2),
)
register(
    f"_shared_expert_mlp_dx_saved(Tensor dy, Tensor g, Tensor u, {_WEIGHTS}, *, {_DX_OPTIONS}) -> Tensor",
    _shared_expert_mlp_dx_saved,
    _shared_expert_mlp_dx_saved_fake,
    _vmap_rule("_shared_expert_mlp_dx_saved", 3),
)
