"""The argument rules of the MoE layer, beside those that `contracts.py` has for both layers."""

from typing import NamedTuple

import torch
from torch import Tensor

from . import contracts
from .contracts import Choice, fail, list_names, shape_text, type_name, version_text
from .numerics import FP8_GROUPS, LAYERS

E4M3 = torch.float8_e4m3fn
BLOCK = 128
MAX_EXPERTS = 4096
MAX_TOP_K = 256

_TRANSPOSED = "Pass it as stored beside the weight; a transposed scale means other numbers."


class MoeTensors(NamedTuple):
    """The tensor arguments of every MoE operator but dy."""

    x: Tensor
    x_scale: Tensor | None
    topk_idx: Tensor
    topk_weights: Tensor
    w_gate_up: Tensor
    w_gate_up_scale: Tensor | None
    w_down: Tensor
    w_down_scale: Tensor | None

    @property
    def weights(self) -> dict[str, Tensor]:
        """The frozen tensors by name: weights, then scales where there are any."""
        names = ("w_gate_up", "w_gate_up_scale", "w_down", "w_down_scale")
        return {name: getattr(self, name) for name in names if getattr(self, name) is not None}

    @property
    def present(self) -> dict[str, Tensor]:
        """All tensors that are not `None`, by name."""
        return {name: value for name, value in self._asdict().items() if value is not None}


def check_types(op: str, x: object, others: dict[str, object]) -> tuple[Tensor, Tensor | None]:
    """(x, x_scale) of a bf16 tensor or a pair; types that an operator schema would refuse without a name."""
    pair = isinstance(x, tuple | list)
    if pair and not (len(x) == 2 and all(isinstance(part, Tensor) for part in x)):
        required = "a bf16 tensor or a pair (x_fp8, x_scale) of tensors"
        got = f"a sequence ({', '.join(type_name(part) for part in x)})"
        fail(TypeError, op, "x", required, got, "Pass two tensors.")
    if not pair:
        contracts.check_tensors(op, {"x": x})
        if x.dtype == E4M3:
            required = "a bf16 tensor or a pair (x_fp8, x_scale)"
            remedy = "Pass its scale too, as moe_ops.quantize_activations returns it."
            fail(TypeError, op, "x", required, f"one tensor of {E4M3}", remedy)
    for name in ("w_gate_up_scale", "w_down_scale"):
        if others[name] is None:
            weight = name.removesuffix("_scale")
            if isinstance(others[weight], Tensor) and others[weight].dtype == E4M3:
                required = f"a torch.Tensor, as {weight} is torch.float8_e4m3fn"
                fail(TypeError, op, name, required, "None", "Pass the weight's 128 x 128 block scales.")
    given = {n: value for n, value in others.items() if value is not None or not n.endswith("_scale")}
    contracts.check_tensors(op, given)
    return (x[0], x[1]) if pair else (x, None)


def check(
    op: str,
    tensors: MoeTensors,
    swiglu_limit: float | None,
    profile: str | None,
    backend: str | None,
    dy: Tensor | None = None,
) -> Choice | None:
    """The rules of every MoE operator; returns what will run (`None` on the meta device)."""
    fp8 = _check_dtypes(op, tensors, dy)
    contracts.check_strided(op, tensors.present)
    _check_shapes(op, tensors, dy)
    _check_layouts(op, tensors)
    activations = tensors.present if dy is None else tensors.present | {"dy": dy}
    contracts.check_same_device(op, "x", tensors.x, activations)
    contracts.check_limit(op, swiglu_limit)
    contracts.check_names(op, profile, backend)
    if (profile in FP8_GROUPS) != fp8 and profile is not None:
        layer = "mega_moe" if fp8 else "mega_moe_bf16"
        available = {name for table in LAYERS[layer].values() for name in table}
        required = f"one for {'fp8' if fp8 else 'bf16'} weights, as w_gate_up is {tensors.w_gate_up.dtype}"
        remedy = f"Pass one of {list_names(sorted(available))}."
        fail(NotImplementedError, op, "profile", required, f"'{profile}'", remedy)
    if tensors.x.device.type == "meta":
        return None
    return contracts.choose("mega_moe" if fp8 else "mega_moe_bf16", op, tensors.x.device, profile, backend)


def check_pair_needs_no_gradient(op: str, tensors: MoeTensors) -> None:
    """A quantised pair is data: its gradient would be dropped."""
    if not torch.is_grad_enabled() or tensors.x_scale is None:
        return
    for name in ("x", "x_scale"):
        if getattr(tensors, name).requires_grad:
            required = "without requires_grad where x is a pair: gradients then go to topk_weights only"
            remedy = "Pass x in bf16, or detach it."
            fail(ValueError, op, name, required, "a tensor that requires grad", remedy)


def widened(scale: Tensor | None) -> Tensor | None:
    """Scales of powers of two (e8m0) in fp32, exactly."""
    return scale.float() if scale is not None and scale.dtype == torch.float8_e8m0fnu else scale


def check_routing(op: str, topk_idx: Tensor, w_gate_up: Tensor) -> None:
    """What `check_indices` needs to know before it reads."""
    _check_index_dtype(op, topk_idx)
    contracts.check_strided(op, {"topk_idx": topk_idx})
    _check_experts(op, "w_gate_up", w_gate_up, "[E, 2I, H]")


def check_indices(op: str, topk_idx: Tensor, experts: int) -> None:
    """The opt-in data check: waits for the device."""
    wrong = ((topk_idx < -1) | (topk_idx >= experts)).nonzero()
    if len(wrong):
        position = wrong[0].tolist()
        got = f"{int(topk_idx[tuple(position)])} at {position} ({len(wrong)} such indices)"
        required = f"in [-1, E) with E = {experts}"
        fail(ValueError, op, "topk_idx", required, got, "Use -1 for a masked slot.")


def check_validation_in_capture(op: str, capturing: bool) -> None:
    """Reading data cannot be captured."""
    if capturing:
        required = "False while a CUDA graph is captured: it waits for the device"
        fail(RuntimeError, op, "validate_indices", required, "True", "Validate before the capture.")


def check_rows(op: str, rows: int) -> None:
    """Row numbers are 32-bit on the device. Not asked while tracing, where it would bound T."""
    if rows >= 2**31:
        required = "of fewer than 2^31 entries"
        fail(NotImplementedError, op, "topk_idx", required, str(rows), "Split the tokens.")


def check_gpu(op: str, choice: Choice, capability: tuple[int, int], hip: str | None) -> None:
    """The fp8 profiles are Hopper's `wgmma`; the others need bf16 tensor cores."""
    if choice.profile not in FP8_GROUPS:
        contracts.check_gpu(op, capability, hip)
        return
    if hip is not None or capability != (9, 0):
        got = f"ROCm {hip}" if hip is not None else f"capability {version_text(capability)}"
        required = f"of compute capability 9.0 for profile '{choice.profile}': other GPUs give other bits"
        remedy = f"Pass profile='exact-{choice.profile}' (slow, every device), or bf16 weights."
        fail(NotImplementedError, op, "device", required, got, remedy)


def check_not_batched(op: str) -> None:
    """vmap has no rule: counts belong to the whole call."""
    required = "called without torch.vmap: expert counts belong to one set of tokens"
    fail(NotImplementedError, op, "the MoE layer", required, "torch.vmap", "Flatten the batch into T tokens.")


def _check_dtypes(op: str, tensors: MoeTensors, dy: Tensor | None) -> bool:
    """Whether the weights are fp8."""
    fp8 = tensors.w_gate_up.dtype == E4M3
    for name in ("w_gate_up", "w_down"):
        weight, scale = getattr(tensors, name), getattr(tensors, f"{name}_scale")
        if weight.dtype not in (E4M3, torch.bfloat16):
            required = "torch.float8_e4m3fn with scales, or torch.bfloat16 without"
            remedy = "Quantise it with moe_ops.quantize_weights_block; autocast does not cast weights."
            fail(TypeError, op, name, required, str(weight.dtype), remedy)
        if weight.dtype != tensors.w_gate_up.dtype:
            required = f"of w_gate_up's dtype {tensors.w_gate_up.dtype}"
            fail(TypeError, op, name, required, str(weight.dtype), "Keep both in one format.")
        if (scale is not None) != fp8:
            required = "a tensor for fp8 weights" if fp8 else "None for bf16 weights"
            got = "None" if scale is None else "a tensor"
            fail(TypeError, op, f"{name}_scale", required, got, "Pass weights and scales of one format.")
        if scale is not None and scale.dtype != torch.float32:
            required = "torch.float32 (torch.float8_e8m0fnu is widened by moe_ops.mega_moe)"
            fail(TypeError, op, f"{name}_scale", required, str(scale.dtype), "Cast it with .float().")
    if tensors.x_scale is None and tensors.x.dtype != torch.bfloat16:
        remedy = "Cast it with .to(torch.bfloat16), or run under torch.autocast with dtype=torch.bfloat16."
        required = "torch.bfloat16" + (", or a pair (x_fp8, x_scale)" if fp8 else "")
        fail(TypeError, op, "x", required, str(tensors.x.dtype), remedy)
    if tensors.x_scale is not None:
        if not fp8:
            required = "one bf16 tensor where the weights are bf16"
            fail(TypeError, op, "x", required, "a pair", "Pass x in bf16.")
        for name, value, dtype in (("x_fp8", tensors.x, E4M3), ("x_scale", tensors.x_scale, torch.float32)):
            if value.dtype != dtype:
                remedy = "Use moe_ops.quantize_activations."
                fail(TypeError, op, name, str(dtype), str(value.dtype), remedy)
    _check_index_dtype(op, tensors.topk_idx)
    if tensors.topk_weights.dtype != torch.float32:
        required, got = "torch.float32", str(tensors.topk_weights.dtype)
        remedy = "Cast them with .float(); moe_ops.MegaMoE does that."
        fail(TypeError, op, "topk_weights", required, got, remedy)
    if dy is not None and dy.dtype != torch.bfloat16:
        fail(TypeError, op, "dy", "torch.bfloat16", str(dy.dtype), "Cast it.")
    return fp8


def _check_index_dtype(op: str, topk_idx: Tensor) -> None:
    if topk_idx.dtype not in (torch.int32, torch.int64):
        required = "torch.int32 or torch.int64"
        fail(TypeError, op, "topk_idx", required, str(topk_idx.dtype), "Cast it.")


def _check_experts(op: str, argument: str, weight: Tensor, layout: str) -> None:
    if weight.dim() != 3 or 0 in weight.shape:
        required = f"{layout}, none of them 0"
        fail(ValueError, op, argument, required, shape_text(weight), "Stack the experts.")


def _check_shapes(op: str, tensors: MoeTensors, dy: Tensor | None) -> None:
    _check_experts(op, "w_gate_up", tensors.w_gate_up, "[E, 2I, H]")
    _check_experts(op, "w_down", tensors.w_down, "[E, H, I]")
    experts, double, hidden = tensors.w_gate_up.shape
    if double % 2:
        required = "[E, 2I, H]: gate rows, then as many up rows"
        fail(ValueError, op, "w_gate_up", required, shape_text(tensors.w_gate_up), "Pack both projections.")
    intermediate = double // 2
    remedy = "Weights are [out_features, in_features] of each expert."
    _check_shape(op, "w_down", tensors.w_down, (experts, hidden, intermediate), "[E, H, I]", remedy)
    if experts > MAX_EXPERTS:
        fail(NotImplementedError, op, "E", f"at most {MAX_EXPERTS}", str(experts), "Split the experts.")
    if tensors.x.dim() != 2 or tensors.x.shape[1] != hidden:
        required = f"[T, H] with H = {hidden}, as w_gate_up is [E, 2I, H] = {shape_text(tensors.w_gate_up)}"
        fail(ValueError, op, "x", required, shape_text(tensors.x), "Flatten the leading dimensions into T.")
    if tensors.topk_idx.dim() != 2 or tensors.topk_idx.shape[0] != tensors.x.shape[0]:
        required = f"[T, top_k] for x [T, H] = {shape_text(tensors.x)}"
        fail(ValueError, op, "topk_idx", required, shape_text(tensors.topk_idx), "Pass one row per token.")
    if not 1 <= tensors.topk_idx.shape[1] <= MAX_TOP_K:
        required = f"[T, top_k] with top_k from 1 to {MAX_TOP_K}"
        fail(ValueError, op, "topk_idx", required, shape_text(tensors.topk_idx), "Pass at least one slot.")
    shape = tuple(tensors.topk_idx.shape)
    _check_shape(op, "topk_weights", tensors.topk_weights, shape, "[T, top_k]", "Pass one weight per index.")
    if dy is not None:
        _check_shape(op, "dy", dy, tuple(tensors.x.shape), "[T, H]", "Pass the gradient of y.")
    blocks_h, blocks_i, blocks_2i = (-(-size // BLOCK) for size in (hidden, intermediate, double))
    if tensors.x_scale is not None:
        expected = (tensors.x.shape[0], blocks_h)
        remedy = "Use moe_ops.quantize_activations."
        _check_shape(op, "x_scale", tensors.x_scale, expected, "[T, ceil(H/128)]", remedy)
    for name, rows, columns, layout in (
        ("w_gate_up_scale", blocks_2i, blocks_h, "[E, ceil(2I/128), ceil(H/128)]"),
        ("w_down_scale", blocks_h, blocks_i, "[E, ceil(H/128), ceil(I/128)]"),
    ):
        scale = getattr(tensors, name)
        if scale is not None:
            _check_shape(op, name, scale, (experts, rows, columns), layout, _TRANSPOSED)


def _check_shape(op, argument, value, shape, layout, remedy) -> None:
    if tuple(value.shape) != shape:
        fail(ValueError, op, argument, f"{layout} = {list(shape)}", shape_text(value), remedy)


def _check_layouts(op: str, tensors: MoeTensors) -> None:
    """Scales and fp8 weights are row-major; strides of dimensions of size 1 say nothing."""
    if tensors.w_gate_up_scale is None:
        return
    for name in ("w_gate_up_scale", "w_down_scale", "w_gate_up", "w_down"):
        value = getattr(tensors, name)
        _, rows, columns = value.shape
        row_stride, column_stride = value.stride()[1:]
        if (columns > 1 and column_stride != 1) or (rows > 1 and row_stride < columns):
            remedy = _TRANSPOSED if name.endswith("scale") else "Store it as [E, out, in], contiguous."
            required = "row-major, its last axis contiguous"
            fail(ValueError, op, name, required, f"strides {list(value.stride())}", remedy)
