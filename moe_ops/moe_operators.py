"""The MoE layer's operators and the quantisers: schemas, implementations, fakes, autocast.

Gradients are in `moe_autograd.py`.
The arguments x .. w_down_scale of every MoE operator are a `MoeTensors`, in its order. Outputs are row-major.
"""

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from . import contracts, moe_contracts, moe_reference, quant, reference
from .kernels.cpu_matmul import blocked_matmul
from .moe_contracts import MoeTensors
from .numerics import FP8_GROUPS
from .registration import below_autocast, register, register_autocast

_TENSORS = len(MoeTensors._fields)


def _mega_moe(*tensors, swiglu_limit=None, profile=None, backend=None):
    tensors = MoeTensors(*tensors)
    choice = _check("mega_moe", tensors, swiglu_limit, profile, backend)
    if choice.backend == "triton":
        kernels = _triton("mega_moe", choice, tensors)
        return kernels.forward(*tensors, swiglu_limit, FP8_GROUPS.get(choice.profile))
    return moe_reference.forward(_rules(choice), *tensors[:4], _weights(tensors), swiglu_limit)


def _mega_moe_fake(*tensors, swiglu_limit=None, profile=None, backend=None):
    tensors = MoeTensors(*tensors)
    moe_contracts.check("mega_moe", tensors, swiglu_limit, profile, backend)
    return _new_rows(tensors), tensors.x.new_empty(tensors.w_gate_up.shape[0] + 1, dtype=torch.int32)


def _mega_moe_dx(dy, *tensors, **options):
    return _gradients("mega_moe_dx", dy, MoeTensors(*tensors), x=True, weights=False, **options)[0]


def _mega_moe_dweights(dy, *tensors, **options):
    return _gradients("mega_moe_dweights", dy, MoeTensors(*tensors), x=False, weights=True, **options)[1]


def _mega_moe_dx_dweights(dy, *tensors, **options):
    return _gradients("mega_moe_dx_dweights", dy, MoeTensors(*tensors), x=True, weights=True, **options)


def _gradients(op, dy, tensors, *, x, weights, swiglu_limit=None, profile=None, backend=None):
    """(dx or None, d topk_weights or None): the gradients asked for."""
    choice = _check(op, tensors, swiglu_limit, profile, backend, dy)
    if choice.backend == "triton":
        kernels = _triton(op, choice, tensors)
        return kernels.backward(
            dy, *tensors, swiglu_limit, FP8_GROUPS.get(choice.profile), dx=x, dweights=weights
        )
    dx, dweights = moe_reference.backward(_rules(choice), dy, *tensors[:4], _weights(tensors), swiglu_limit)
    return dx.bfloat16(), dweights


def _mega_moe_dx_fake(dy, *tensors, **options):
    return _gradients_fake("mega_moe_dx", dy, MoeTensors(*tensors), **options)[0]


def _mega_moe_dweights_fake(dy, *tensors, **options):
    return _gradients_fake("mega_moe_dweights", dy, MoeTensors(*tensors), **options)[1]


def _mega_moe_dx_dweights_fake(dy, *tensors, **options):
    return _gradients_fake("mega_moe_dx_dweights", dy, MoeTensors(*tensors), **options)


def _gradients_fake(op, dy, tensors, *, swiglu_limit=None, profile=None, backend=None):
    moe_contracts.check(op, tensors, swiglu_limit, profile, backend, dy)
    return _new_rows(tensors), tensors.topk_weights.new_empty(tensors.topk_weights.shape)


def _new_rows(tensors: MoeTensors) -> Tensor:
    return tensors.x.new_empty(tensors.x.shape, dtype=torch.bfloat16)


def _check(op, tensors, swiglu_limit, profile, backend, dy=None):
    moe_contracts.check_rows(op, tensors.topk_idx.numel())
    return moe_contracts.check(op, tensors, swiglu_limit, profile, backend, dy)


def _rules(choice: contracts.Choice) -> moe_reference.Rules:
    if choice.profile in FP8_GROUPS:
        return moe_reference.Fp8Rules(FP8_GROUPS[choice.profile])
    return moe_reference.Bf16Rules(blocked_matmul if choice.backend == "aten" else reference.serial_matmul)


def _weights(tensors: MoeTensors) -> moe_reference.MoeWeights:
    return moe_reference.MoeWeights(*tensors[4:])


def _triton(op: str, choice: contracts.Choice, tensors: MoeTensors):
    """The kernels, imported when first needed."""
    capability = torch.cuda.get_device_capability(tensors.x.device)
    moe_contracts.check_gpu(op, choice, capability, torch.version.hip)
    try:
        from .kernels import moe
    except ImportError as error:
        oracle = f"exact-{choice.profile}" if choice.profile in FP8_GROUPS else "fp32-serial-v1"
        contracts.refuse_import(op, choice, error, oracle)
    return moe


def _quantize_activations(x, group=128):
    if x.is_cuda and group in (64, 128) and x.numel():
        try:
            from .kernels import moe_dispatch
        except ImportError:  # the torch rules below give the same bits
            return quant.quantize_rows(x, group)
        return moe_dispatch.launch_quantize(x, group)
    return quant.quantize_rows(x, group)


def _quantize_activations_fake(x, group=128):
    groups = (x.shape[-1] + group - 1) // group
    return (
        x.new_empty(x.shape, dtype=torch.float8_e4m3fn),
        x.new_empty((*x.shape[:-1], groups), dtype=torch.float32),
    )


def _quantize_weights_block(w, block_rows=128, block_columns=128):
    return quant.quantize_blocks(w, (block_rows, block_columns))


def _quantize_weights_block_fake(w, block_rows=128, block_columns=128):
    *experts, rows, columns = w.shape
    blocks = (rows + block_rows - 1) // block_rows, (columns + block_columns - 1) // block_columns
    return (
        w.new_empty(w.shape, dtype=torch.float8_e4m3fn),
        w.new_empty((*experts, *blocks), dtype=torch.float32),
    )


def _validated_indices(topk_idx, num_experts):
    capturing = topk_idx.is_cuda and torch.cuda.is_current_stream_capturing()
    moe_contracts.check_validation_in_capture("mega_moe", capturing)
    moe_contracts.check_indices("mega_moe", topk_idx, num_experts)
    return topk_idx.clone(memory_format=torch.contiguous_format)


def _validated_indices_fake(topk_idx, num_experts):
    return topk_idx.new_empty(topk_idx.shape)


def _refuse_vmap(name: str) -> Callable:
    def rule(info, in_dims, *args, **options):
        moe_contracts.check_not_batched(name)

    return rule


def _row_quantizer_vmap(info, in_dims, x, *sizes):
    """The batch is one more leading dimension."""
    result = torch.ops.moe_ops.quantize_activations(x.movedim(in_dims[0], 0), *sizes)
    return result, (0, 0)


def _block_quantizer_vmap(info, in_dims, w, *sizes):
    result = torch.ops.moe_ops.quantize_weights_block(w.movedim(in_dims[0], 0), *sizes)
    return result, (0, 0)


def _autocast_kernel(op: Callable, device_type: str) -> Callable:
    """Casts x to bf16 and nothing else; a quantised pair passes."""

    def kernel(x, x_scale, *others, **options):
        dtype = torch.get_autocast_dtype(device_type)
        contracts.check_autocast("mega_moe", device_type, dtype)
        if x_scale is None and x.dtype in (torch.float32, torch.float16):
            x = x.to(dtype)
        return below_autocast(device_type, op, x, x_scale, *others, **options)

    return kernel


_ARGUMENTS = (
    "Tensor x, Tensor? x_scale, Tensor topk_idx, Tensor topk_weights, "
    "Tensor w_gate_up, Tensor? w_gate_up_scale, Tensor w_down, Tensor? w_down_scale, *, "
    "float? swiglu_limit=None, str? profile=None, str? backend=None"
)

_FORWARD = register(
    f"_mega_moe({_ARGUMENTS}) -> (Tensor y, Tensor counts)",
    _mega_moe,
    _mega_moe_fake,
    _refuse_vmap("mega_moe"),
)
register_autocast(_FORWARD, functools.partial(_autocast_kernel, _FORWARD))
register(
    f"_mega_moe_dx(Tensor dy, {_ARGUMENTS}) -> Tensor",
    _mega_moe_dx,
    _mega_moe_dx_fake,
    _refuse_vmap("mega_moe_dx"),
)
register(
    f"_mega_moe_dweights(Tensor dy, {_ARGUMENTS}) -> Tensor",
    _mega_moe_dweights,
    _mega_moe_dweights_fake,
    _refuse_vmap("mega_moe_dweights"),
)
register(
    f"_mega_moe_dx_dweights(Tensor dy, {_ARGUMENTS}) -> (Tensor dx, Tensor d_topk_weights)",
    _mega_moe_dx_dweights,
    _mega_moe_dx_dweights_fake,
    _refuse_vmap("mega_moe_dx_dweights"),
)
register(
    "quantize_activations(Tensor x, int group=128) -> (Tensor codes, Tensor scales)",
    _quantize_activations,
    _quantize_activations_fake,
    _row_quantizer_vmap,
)
register(
    "quantize_weights_block(Tensor w, int block_rows=128, int block_columns=128) "
    "-> (Tensor codes, Tensor scales)",
    _quantize_weights_block,
    _quantize_weights_block_fake,
    _block_quantizer_vmap,
)
register(
    "_validated_indices(Tensor topk_idx, int num_experts) -> Tensor",
    _validated_indices,
    _validated_indices_fake,
    _refuse_vmap("mega_moe"),
)
