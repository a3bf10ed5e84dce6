"""Every argument rule, once: called by the functions, the operators' implementations and their fakes.

Reads no data and puts no guard on the number of tokens, so it is safe under tracing. A message names the
argument, what is required, what came, and the remedy: `TypeError` for a wrong type or dtype, `ValueError` for
a shape, range, layout or device, `NotImplementedError` for a combination that this build does not have.
"""

from typing import NamedTuple, NoReturn

import torch
from torch import Tensor

from .numerics import BACKENDS, LAYERS, PROFILES

SAVE_MODES = ("recompute", "activations")

_LAYER_NAMES = {
    "shared_expert_mlp": "the shared expert",
    "mega_moe": "the MoE layer with fp8 weights",
    "mega_moe_bf16": "the MoE layer with bf16 weights",
}

_FP32_TINY = 2.0**-149
_FP32_MAX = (2.0 - 2.0**-23) * 2.0**127


class Choice(NamedTuple):
    """What a call runs: a profile and the backend that computes it."""

    profile: str
    backend: str


def choose(layer: str, op: str, device: torch.device, profile: str | None, backend: str | None) -> Choice:
    """What a layer of `LAYERS` runs on `device`; raises for what cannot be honoured."""
    check_names(op, profile, backend)
    kind = device.type
    if kind not in LAYERS[layer]:
        required = f"of a type among {list_names(LAYERS[layer])}"
        fail(NotImplementedError, op, "device", required, f"'{kind}'", "Move the tensors.")
    available = LAYERS[layer][kind]
    name = next(iter(available)) if profile is None else profile
    if name not in available:
        required = f"one that this build computes on {kind} for {_LAYER_NAMES[layer]}"
        fail(
            NotImplementedError, op, "profile", required, f"'{name}'", f"Pass one of {list_names(available)}."
        )
    if backend is not None and backend not in available[name]:
        required = f"one that computes profile '{name}' on {kind} in this build"
        remedy = f"Pass None or one of {list_names(available[name])}, or another profile than '{name}'."
        fail(NotImplementedError, op, "backend", required, f"'{backend}'", remedy)
    return Choice(name, available[name][0] if backend is None else backend)


def check_names(op: str, profile: str | None, backend: str | None) -> None:
    """`profile` and `backend` are `None` or names that exist."""
    for argument, value, names in (("profile", profile, PROFILES), ("backend", backend, BACKENDS)):
        if value is not None and not isinstance(value, str):
            fail(
                TypeError,
                op,
                argument,
                "a str or None",
                type_name(value),
                f"Pass one of {list_names(names)}.",
            )
        if value is not None and value not in names:
            required = f"None or one of {list_names(names)}"
            fail(ValueError, op, argument, required, f"'{value}'", "Correct the name.")


def check_call(
    op: str,
    tensors: dict[str, object],
    swiglu_limit: object,
    profile: object = None,
    backend: object = None,
    save: object = "recompute",
) -> None:
    """The types that an operator schema would refuse without naming the argument."""
    check_tensors(op, tensors)
    if isinstance(swiglu_limit, bool) or not isinstance(swiglu_limit, int | float | torch.SymFloat | None):
        fail(
            TypeError, op, "swiglu_limit", "a float or None", type_name(swiglu_limit), "Pass a Python number."
        )
    check_names(op, profile, backend)
    if not isinstance(save, str):
        fail(TypeError, op, "save", f"one of {list_names(SAVE_MODES)}", type_name(save), "Pass a str.")
    if save not in SAVE_MODES:
        fail(ValueError, op, "save", f"one of {list_names(SAVE_MODES)}", f"'{save}'", "Correct the name.")


def check_tensors(op: str, tensors: dict[str, object]) -> None:
    """Every value is one tensor."""
    for argument, value in tensors.items():
        if not isinstance(value, Tensor):
            fail(TypeError, op, argument, "a torch.Tensor", type_name(value), "Pass one tensor per argument.")


def check_frozen(op: str, **weights: Tensor) -> None:
    """Weights get no gradient: one that asks for it while grad mode is enabled is an error."""
    if not torch.is_grad_enabled():
        return
    for argument, weight in weights.items():
        if weight.requires_grad:
            required = "frozen (requires_grad=False): weights get no gradient"
            remedy = (
                "Freeze the layer (moe_ops.freeze(module)), detach the tensor, merge the adapter that "
                "computes it, or call under torch.no_grad()."
            )
            fail(ValueError, op, argument, required, "a tensor that requires grad", remedy)


def check_shared_expert(
    op: str,
    activations: dict[str, Tensor],
    w_gate: Tensor,
    w_up: Tensor,
    w_down: Tensor,
    swiglu_limit: float | None,
    profile: str | None,
    backend: str | None,
) -> Choice | None:
    """The rules of every shared-expert operator; returns what will run (`None` on the meta device).

    `activations` (x, dy, or both) are [..., H] of one shape, by name.
    """
    weights = {"w_gate": w_gate, "w_up": w_up, "w_down": w_down}
    remedy = "Cast it with .to(torch.bfloat16), or run under torch.autocast with dtype=torch.bfloat16."
    _check_bf16(op, activations, remedy)
    _check_bf16(op, weights, "Keep the weights in bfloat16; autocast does not cast them.")
    check_strided(op, activations | weights)
    for argument, weight in weights.items():
        if weight.dim() != 2:
            layout = "[H, I]" if argument == "w_down" else "[I, H]"
            fail(
                ValueError,
                op,
                argument,
                layout,
                shape_text(weight),
                "Pass one matrix; slice a packed weight.",
            )
    intermediate, hidden = w_gate.shape
    if hidden == 0 or intermediate == 0:
        required = "[I, H], neither of them 0"
        fail(ValueError, op, "w_gate", required, shape_text(w_gate), "Pass a non-empty weight.")
    _check_matrix(op, "w_up", w_up, (intermediate, hidden), "[I, H]")
    _check_matrix(op, "w_down", w_down, (hidden, intermediate), "[H, I]")
    leading = next(iter(activations))
    for argument, value in activations.items():
        if value.dim() < 1 or value.shape[-1] != hidden:
            required = f"[..., H] with H = {hidden}, as w_gate is [I, H] = {shape_text(w_gate)}"
            fail(
                ValueError, op, argument, required, shape_text(value), "Pass rows of the layer's hidden size."
            )
        if value.shape != activations[leading].shape:
            required = f"of {leading}'s shape {shape_text(activations[leading])}"
            fail(ValueError, op, argument, required, shape_text(value), "Pass both for the same rows.")
    check_same_device(op, leading, activations[leading], activations | weights)
    check_limit(op, swiglu_limit)
    device = activations[leading].device
    if device.type == "meta":
        check_names(op, profile, backend)
        return None
    return choose("shared_expert_mlp", op, device, profile, backend)


def check_limit(op: str, swiglu_limit: float | None) -> None:
    """The limit is a finite positive fp32 number."""
    if swiglu_limit is not None and not _FP32_TINY <= swiglu_limit <= _FP32_MAX:
        required = "None, or finite and > 0 in fp32"
        fail(ValueError, op, "swiglu_limit", required, str(swiglu_limit), "Pass None for no limit.")


def check_pre_activations(op: str, dy: Tensor, g: Tensor, u: Tensor, w_gate: Tensor) -> None:
    """`g` and `u` are what the saving forward returned for the rows of `dy`."""
    shape = (*dy.shape[:-1], w_gate.shape[0])
    for argument, value in (("g", g), ("u", u)):
        if value.dtype != torch.float32:
            fail(TypeError, op, argument, "torch.float32", str(value.dtype), "Pass what the forward saved.")
        if tuple(value.shape) != shape:
            required = f"[..., I] = {list(shape)}"
            fail(ValueError, op, argument, required, shape_text(value), "Pass what the forward saved.")
    check_strided(op, {"g": g, "u": u})
    check_same_device(op, "dy", dy, {"g": g, "u": u})


def check_out_dtype(op: str, out_dtype: torch.dtype | None) -> None:
    """dX comes in fp32 or rounded once to x's dtype."""
    if out_dtype not in (None, torch.float32, torch.bfloat16):
        required = "None, torch.bfloat16 (x's dtype) or torch.float32"
        fail(TypeError, op, "out_dtype", required, str(out_dtype), "Cast the result.")


def check_autocast(op: str, device_type: str, dtype: torch.dtype) -> None:
    """Autocast casts x to bf16; no other autocast dtype keeps the contract."""
    if dtype != torch.bfloat16:
        required = f"torch.bfloat16 under autocast on {device_type}"
        remedy = "Use torch.autocast with dtype=torch.bfloat16."
        fail(TypeError, op, "x", required, f"autocast to {dtype}", remedy)


def check_not_transformed(op: str, transform: str | None) -> None:
    """Gradients exist through torch.autograd alone: any other transform would drop them, so it is refused."""
    if transform is not None:
        required = "free of function transforms that differentiate"
        remedy = "Use .backward() or torch.autograd.grad."
        fail(NotImplementedError, op, "every tensor", required, transform, remedy)


def check_first_derivative(op: str) -> None:
    """The gradient has no derivative of its own: computing it while grad mode is enabled would detach it."""
    if torch.is_grad_enabled():
        required = "computed with grad mode disabled: there is no second derivative"
        remedy = "Do not pass create_graph=True; detach what goes into it."
        fail(NotImplementedError, op, "the gradient of x", required, "grad mode enabled", remedy)


def check_vmap(op: str, dims: dict[str, int | None]) -> None:
    """vmap batches activations; one set of weights serves the whole call."""
    for argument, dim in dims.items():
        if dim is not None:
            required = "one matrix for the whole torch.vmap"
            got = f"one matrix per batch entry (in_dims {dim})"
            fail(NotImplementedError, op, argument, required, got, "Loop over the weights.")


def check_gpu(op: str, capability: tuple[int, int], hip: str | None) -> None:
    """The Triton kernels need an NVIDIA GPU with bf16 tensor cores."""
    if hip is not None or capability < (8, 0):
        got = f"ROCm {hip}" if hip is not None else f"capability {version_text(capability)}"
        required = "an NVIDIA GPU of compute capability 8.0 or newer for the backend 'triton'"
        remedy = "Pass profile='fp32-serial-v1', backend='reference' (slow), or move the tensors."
        fail(NotImplementedError, op, "device", required, got, remedy)


def refuse_import(op: str, choice: Choice, error: ImportError, oracle: str = "fp32-serial-v1") -> NoReturn:
    """Triton could not be imported. `oracle`: the profile that needs none."""
    required = "one whose packages can be imported"
    got = f"'{choice.backend}' ({error})"
    remedy = f"Install triton, or pass profile='{oracle}', backend='reference' (slow)."
    fail(NotImplementedError, op, "backend", required, got, remedy)


def check_strict_products(op: str, capability: tuple[int, int], triton: tuple[int, int]) -> None:
    """Triton before 3.8 computes large fp32 products in tf32 where there is tensor memory (tcgen05)."""
    if (10, 0) <= capability < (12, 0) and triton < (3, 8):
        required = (
            f"3.8 or newer for profile 'fp32-serial-v1' on compute capability {version_text(capability)}"
        )
        remedy = "Install it, or pass backend='reference' (slow)."
        fail(NotImplementedError, op, "triton", required, version_text(triton), remedy)


def check_sigmoid(op: str, choice: Choice, mismatches: int | None) -> None:
    """The strict kernels compute `torch.sigmoid` themselves, which is compared once for a device."""
    if mismatches is None:
        required = "called once before a CUDA graph is captured, since its first call waits for the device"
        got = "its first call in a capture"
        remedy = "Call it once, with any shape, before the capture."
        fail(RuntimeError, op, f"profile '{choice.profile}'", required, got, remedy)
    if mismatches:
        required = "one that this machine can honour: a sigmoid in Triton with the bits of torch.sigmoid"
        got = f"'{choice.profile}', and {mismatches} of the values tried differ"
        remedy = "Pass backend='reference' (slow), or another version of torch or triton."
        fail(NotImplementedError, op, "profile", required, got, remedy)


def _check_bf16(op: str, tensors: dict[str, Tensor], remedy: str) -> None:
    for argument, value in tensors.items():
        if value.dtype != torch.bfloat16:
            fail(TypeError, op, argument, "torch.bfloat16", str(value.dtype), remedy)


def check_strided(op: str, tensors: dict[str, Tensor]) -> None:
    for argument, value in tensors.items():
        if value.layout != torch.strided:
            required = "a dense tensor (torch.strided)"
            fail(ValueError, op, argument, required, str(value.layout), "Use .to_dense().")


def _check_matrix(op: str, argument: str, value: Tensor, shape: tuple[int, int], layout: str) -> None:
    if tuple(value.shape) != shape:
        remedy = "Pass the weight as torch.nn.Linear stores it: [out_features, in_features]."
        fail(ValueError, op, argument, f"{layout} = {list(shape)}", shape_text(value), remedy)


def check_same_device(op: str, leading: str, value: Tensor, others: dict[str, Tensor]) -> None:
    for argument, other in others.items():
        if other.device != value.device:
            required = f"on {leading}'s device, {value.device}"
            fail(ValueError, op, argument, required, str(other.device), "Move both to one device.")


def fail(error: type[Exception], op: str, argument: str, required: str, got: str, remedy: str) -> NoReturn:
    raise error(f"moe_ops.{op}: {argument} must be {required}; got {got}. {remedy}")


def version_text(pair: tuple[int, int]) -> str:
    return f"{pair[0]}.{pair[1]}"


def shape_text(value: Tensor) -> str:
    return str(list(value.shape))


def type_name(value: object) -> str:
    return "None" if value is None else type(value).__name__


def list_names(names) -> str:
    return ", ".join(f"'{name}'" for name in names) or "none (this build has nothing for it)"
